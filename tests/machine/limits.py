"""Bounds on the rows drawn for each row written, with their rule in plain Python."""

from __future__ import annotations

import math
from typing import Any

from engram.data import SampleToInsertRatio
from machine.ring import Ring


class NoLimit:
    """Nobody waits."""

    binds = False
    ratio = 0.0
    least = 0
    ahead = behind = math.inf

    def __init__(self, ring: Ring) -> None:
        self.ring, self.written, self.drawn = ring, 0, 0
        self.each = max(ring.envs, 1)

    def make(self) -> Any:
        return None

    def may_write(self) -> bool:
        return True

    def may_draw(self, n: int) -> bool:
        return True


class RatioLimit(NoLimit):
    """rows drawn <= ratio x (rows written - least) + ahead; and who writes waits more than `behind` below that."""

    binds = True
    ratio, ahead, behind = 2.0, 25.0, 20.0

    def __init__(self, ring: Ring) -> None:
        super().__init__(ring)
        self.least = min(3, ring.capacity * self.each)

    def make(self) -> Any:
        behind = None if math.isinf(self.behind) else self.behind
        return SampleToInsertRatio(self.ratio, self.least, ahead=self.ahead, behind=behind)

    def _budget(self) -> float:
        return self.ratio * (self.written - self.least) - self.drawn

    def _stored(self) -> int:
        return len(self.ring.stored()) * self.each

    def may_write(self) -> bool:
        return self._stored() < self.least or self._budget() <= self.behind

    def may_draw(self, n: int) -> bool:
        return self._stored() >= self.least and self._budget() - n >= -self.ahead


class MinSizeLimit(RatioLimit):
    """Who writes never waits."""

    ratio, ahead, behind = 0.5, 16.0, math.inf


LIMITS = {"none": NoLimit, "ratio": RatioLimit, "ratio of draws": MinSizeLimit}
