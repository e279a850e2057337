"""The counters of a storage as checkpointers get them: which sequences exist in which lane."""

from __future__ import annotations

import math
from typing import Any

from engram._native import FIRST_REPLACED

_SEQUENCE_LIMIT = 1 << 62


class Counters:
    """Checked view of `{"lane_capacity": int | None, "envs": int, "lanes": [{"base", "published", ...}]}`.

    ValueError (or KeyError, TypeError) when that is not what it is given.
    """

    def __init__(self, counters: dict[str, Any]) -> None:
        self._capacity: int | None = counters["lane_capacity"]
        self.envs: int = counters["envs"]
        _check_counts(self.envs, 0 if self._capacity is None else self._capacity)
        self._lanes = [_checked(lane) for lane in counters["lanes"]]

    def check_envs(self, layout: dict[str, Any]) -> None:
        """ValueError where the layout names another number of environments than the counters."""
        shape = layout.get("envs", [self.envs])
        if isinstance(shape, list):
            _check_counts(*shape)
        if not isinstance(shape, list) or math.prod(shape) != self.envs or not self.envs:
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
    base, published = lane["base"], lane["published"]
    _check_counts(base, published, *lane["seams"])
    if base > published:
        raise ValueError(f"a lane's base, {base}, is beyond what it has published, {published}")
    if type(lane["origin"]) is not int or not 0 <= lane["origin"] < 1 << 64:
        raise ValueError(f"{lane['origin']!r} is no origin of a lane")
    seams = list(lane["seams"])
    if seams != sorted(seams) or seams[-1:] > [published]:
        raise ValueError(f"the seams of a lane do not rise up to {published}: {seams}")
    looked, agreed = lane["border"]["looked"], lane["border"]["agreed"]
    _check_counts(looked, lane["replaced"], lane.get("ticket", 0), lane.get("left", 0))
    if type(lane.get("goes_on", False)) is not bool:
        raise ValueError(f"{lane['goes_on']!r:.80} does not say whether a writer's stay in a lane goes on")
    if looked > published:
        raise ValueError(f"{lane['border']!r:.80} cannot be the evidence about the border of a lane")
    for bits in (agreed, lane.get("carried")):
        if bits is not None and (type(bits) is not int or not 0 <= bits < 1 << 63):
            raise ValueError(f"{bits!r:.80} cannot be the evidence about the border of a lane: a bit for each entry")
    return base, published


def check_sequences(sequences: list[int], n: int) -> None:
    """Raises ValueError where these are not the sequences that n items can carry: 0, or one that no lane counts."""
    if len(sequences) != n or not all(own == 0 or FIRST_REPLACED <= own < 1 << 63 for own in map(_whole, sequences)):
        raise ValueError(f"the sequences of {n} items are {sequences!r:.80}")


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is not a sequence")
    return value


def _check_counts(*values: Any) -> None:
    for value in values:
        if type(value) is not int or not 0 <= value < _SEQUENCE_LIMIT:
            raise ValueError(f"{value!r} is not a count")
