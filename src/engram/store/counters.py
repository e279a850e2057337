"""The counters of a storage as checkpointers get them: which sequences exist in which lane."""

from __future__ import annotations

import math
from typing import Any

_SEQUENCE_LIMIT = 1 << 62


class Counters:
    """Checked view of `{"lane_capacity": int | None, "strands": int, "lanes": [{"base", "published", ...}]}`.

    ValueError (or KeyError, TypeError) when that is not what it is given.
    """

    def __init__(self, counters: dict[str, Any]) -> None:
        capacity = counters["lane_capacity"]
        self._capacity = None if capacity is None else _count(capacity)
        self.envs = _count(counters["strands"])
        self._lanes = [_checked(lane) for lane in counters["lanes"]]

    def check_envs(self, layout: dict[str, Any]) -> None:
        """ValueError where the layout names another number of environments than the counters."""
        shape = layout.get("strands", [self.envs])
        if not isinstance(shape, list) or math.prod(map(_count, shape)) != self.envs or not self.envs:
            raise ValueError(f"the layout is of environments {shape!r}, the counters of {self.envs}")

    @property
    def lanes(self) -> int:
        return len(self._lanes)

    @property
    def rows(self) -> int:
        """Rows that exist in all lanes and environments."""
        return self.envs * sum(self.stop(lane) - self.first(lane) for lane in range(self.lanes))

    def first(self, lane: int) -> int:
        """The oldest sequence that exists in the lane; `stop` when there is none."""
        base, published = self._lanes[lane]
        return base if self._capacity is None else max(base, published - self._capacity)

    def stop(self, lane: int) -> int:
        return self._lanes[lane][1]


def _checked(lane: dict[str, Any]) -> tuple[int, int]:
    """`base` and `published` of a lane; ValueError where its counters contradict each other."""
    base, published = _count(lane["base"]), _count(lane["published"])
    if base > published:
        raise ValueError(f"a lane's base, {base}, is beyond what it has published, {published}")
    if type(lane["origin"]) is not int or not 0 <= lane["origin"] < 1 << 64:
        raise ValueError(f"{lane['origin']!r} is no origin of a lane")
    seams = [_count(seam) for seam in lane["seams"]]
    if seams != sorted(seams) or seams[-1:] > [published]:
        raise ValueError(f"the seams of a lane do not rise up to {published}: {seams}")
    border = lane.get("border")
    if border is not None:
        looked, agreed = _count(border["looked"]), border["agreed"]
        if looked > published or (agreed is not None and (type(agreed) is not int or not 0 <= agreed < 1 << 63)):
            raise ValueError(f"{border!r:.80} is no border evidence of a lane")
    return base, published


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _SEQUENCE_LIMIT:
        raise ValueError(f"{value!r} is not a count")
    return value
