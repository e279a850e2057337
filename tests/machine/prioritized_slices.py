"""Slices that start by priority, with their rule in plain Python."""

from __future__ import annotations

from typing import Any

from engram.data import PrioritizedSliceSampler
from machine.prioritized import PrioritizedOracle
from machine.ring import Row
from machine.slices import SliceOracle


class PrioritizedSliceOracle(PrioritizedOracle, SliceOracle):
    """Starts in proportion to (p + eps) ** alpha, among those from which a whole slice lies in its trajectory."""

    by_id = True
    frequencies = SliceOracle.frequencies  # of slices, not of rows

    def make(self) -> Any:
        where = {"traj_key": "traj"} if self.by_id else {"end_key": ("next", "done")}
        return PrioritizedSliceSampler(
            None, self.alpha, self.beta, self.eps, slice_len=self.length, strict_length=self.strict, **where
        )

    def slices(self, length: int) -> dict[tuple[Row, ...], float]:
        shortest = length if self.strict else 1
        return {
            tuple(piece[start : start + length]): self.mass(piece[start])
            for piece in self.ring.trajectories(self.by_id)
            for start in range(len(piece) - shortest + 1)
        }

    def weights(self, rows: list[Row]) -> list[float]:
        possible = self.slices(self.length)
        lowest = min(possible.values())
        return [(possible[s] / lowest) ** -self.beta for s in self._cut(rows, self._ids) for _ in s]


class ShortPrioritizedSliceOracle(PrioritizedSliceOracle):
    strict = False
    by_id = False


PRIORITIZED_SLICES = {
    "slices by priority": PrioritizedSliceOracle,
    "short slices by priority": ShortPrioritizedSliceOracle,
}
