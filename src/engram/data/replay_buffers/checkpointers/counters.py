"""The counters of a storage as checkpointers get them: which write numbers exist in which lane."""

from __future__ import annotations

from typing import Any


class Counters:
    """Checked view of `{"lane_capacity": int | None, "strands": int, "lanes": [{"base", "published", ...}]}`.

    ValueError (or KeyError, TypeError) when that is not what it is given.
    """

    def __init__(self, counters: dict[str, Any]) -> None:
        capacity = counters["lane_capacity"]
        self._capacity = None if capacity is None else _count(capacity)
        self.strands = _count(counters["strands"])
        self._lanes = [(_count(lane["base"]), _count(lane["published"])) for lane in counters["lanes"]]
        if any(base > published for base, published in self._lanes):
            raise ValueError(f"a lane's base is beyond what it has published: {self._lanes}")

    @property
    def lanes(self) -> int:
        return len(self._lanes)

    @property
    def rows(self) -> int:
        """Rows that exist in all lanes and strands."""
        return self.strands * sum(self.stop(lane) - self.first(lane) for lane in range(self.lanes))

    def first(self, lane: int) -> int:
        """The oldest write number that exists in the lane; `stop` when there is none."""
        base, published = self._lanes[lane]
        return base if self._capacity is None else max(base, published - self._capacity)

    def stop(self, lane: int) -> int:
        return self._lanes[lane][1]


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
