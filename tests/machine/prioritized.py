"""Samplers by priority, against sums of plain Python."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest

from engram.data import PrioritizedSampler, PrioritizedSliceSampler
from machine.ring import Row
from machine.samplers import RandomOracle
from machine.slices import SliceOracle


# ---- draws in proportion to priorities, with their rule in plain Python ----
class PrioritizedOracle(RandomOracle):
    """With probability in proportion to (p + eps) ** alpha; weights (P / P_min) ** -beta."""

    has_priorities = True
    alpha, eps = 0.7, 1e-8

    def make(self) -> Any:
        return PrioritizedSampler(None, self.alpha, self.beta, self.eps)

    def begin(self) -> None:
        self.beta = 0.9
        self.emptied()
        self.priority = dict.fromkeys(self.ring.rows(), 1.0)

    def emptied(self) -> None:
        self.highest, self.priority = 1.0, {}

    def _new(self, slots: list[int]) -> None:
        for slot in slots:
            self.priority.update({(slot, env): self.highest for env in range(max(self.ring.envs, 1))})

    wrote = replaced = _new

    def updated(self, rows: list[Row], priorities: list[float]) -> None:
        self.priority.update(zip(rows, priorities, strict=True))
        self.highest = max([self.highest, *priorities])

    def marked(self, rows: list[Row]) -> None:
        self.priority.update(dict.fromkeys(rows, self.highest))

    def set_beta(self, sampler: Any, beta: float) -> None:
        sampler.beta = self.beta = beta

    def mass(self, row: Row) -> float:
        return (self.priority[row] + self.eps) ** self.alpha

    def frequencies(self) -> dict[Hashable, float]:
        return {row: self.mass(row) for row in self.ring.rows()}

    def drew(self, n: int, rows: list[Row], info: dict[str, Any], batch: Any) -> None:
        super().drew(n, rows, info, batch)
        assert info["priority_weight"].tolist() == pytest.approx(self.weights(rows), rel=1e-5)
        if "priority_weight" in batch.keys():
            assert batch["priority_weight"].tolist() == info["priority_weight"].tolist()

    def weights(self, rows: list[Row]) -> list[float]:
        frequency = self.frequencies()
        lowest = min(frequency.values())
        return [(frequency[row] / lowest) ** -self.beta for row in rows]


class AlphaOneOracle(PrioritizedOracle):
    alpha, eps = 1.0, 0.25


PRIORITIZED = {"priorities": PrioritizedOracle, "priorities as they are": AlphaOneOracle}


# ---- slices that start by priority, with their rule in plain Python ----
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
        return {
            tuple(piece[start : start + length]): self.mass(piece[start])
            for piece in self.ring.trajectories(self.by_id)
            if len(piece) >= self.shortest(length)
            for start in range(max(len(piece) - length, 0) + 1)
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
