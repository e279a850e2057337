"""The samplers that the machine drives, each with its rule in plain Python."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from engram.data import RandomSampler, SamplerWithoutReplacement
from machine.ring import Ring, Row


class RandomOracle:
    """Every stored row is as likely."""

    batch_sizes = range(1, 13)
    has_priorities = False
    has_frequencies = True
    may_be_short = False  # whether a batch may have fewer rows than were asked for
    is_queue = False
    knows_removed = False  # whether its rule is known where rows were removed

    def __init__(self, ring: Ring) -> None:
        self.ring = ring

    def make(self) -> Any:
        return RandomSampler()

    # ---- what happens to the buffer ----
    def begin(self) -> None:
        """A new sampler, over what is stored now."""

    def made_anew(self) -> None:
        """A new sampler, over a store that the one before has used in the same way."""
        self.begin()

    def go_on(self, rb: Any) -> None:
        """What a user does first with a new sampler."""

    def loaded(self) -> None:
        """What there is was saved and loaded."""

    def room(self) -> int:
        """For how many columns there is room; as many as are written where nobody waits for any."""
        return 1_000_000

    def wrote(self, slots: list[int]) -> None:
        """Columns came to these time slots."""

    def replaced(self, slots: list[int]) -> None:
        """Columns were changed in place."""

    def emptied(self) -> None:
        """Nothing is stored any more."""

    def updated(self, rows: list[Row], priorities: list[float]) -> None:
        """Priorities of rows were set."""

    def marked(self, rows: list[Row]) -> None:
        """Rows were marked as changed."""

    def set_beta(self, sampler: Any, beta: float) -> None:
        """How strongly weights correct for priorities."""

    # ---- what it draws ----
    def refusal(self, n: int) -> str | None:
        """What the error says where n rows cannot be drawn."""
        return None if self.ring.stored() else "Cannot sample from an empty storage"

    def drew(self, n: int, rows: list[Row], info: dict[str, Any], batch: Any) -> None:
        """Fails where this batch cannot have been drawn."""
        assert len(rows) == n
        assert set(rows) <= set(self.ring.rows())

    sure = True  # whether `ran_out` is known

    def ran_out(self) -> bool:
        """Whether the last draw ended an epoch."""
        return False

    def frequencies(self) -> dict[Hashable, float]:
        """What is drawn, with its relative frequency."""
        return dict.fromkeys(self.ring.rows(), 1.0)

    def units(self, rows: list[Row]) -> list[Hashable]:
        """A batch cut into what `frequencies` speaks of."""
        return list(rows)

    def many(self) -> int:
        """A batch size for measuring frequencies."""
        return 60 * len(self.ring.rows())


class EpochOracle(RandomOracle):
    """Every row once, then all over again."""

    has_frequencies = False  # draws depend on each other
    may_be_short = True
    drop_last = False
    shuffle = True

    def make(self) -> Any:
        return SamplerWithoutReplacement(drop_last=self.drop_last, shuffle=self.shuffle)

    def begin(self) -> None:
        self.left: list[tuple[Row, int]] | None = None  # rows with their write numbers; None: no epoch has begun

    def emptied(self) -> None:
        self.begin()

    def refusal(self, n: int) -> str | None:
        too_many = "drop_last" if self.drop_last and n > len(self.ring.rows()) else None
        return super().refusal(n) or too_many

    def _still_there(self) -> list[Row]:
        return [row for row, number in self.left or [] if self.ring.order[row[0]] == number]

    def drew(self, n: int, rows: list[Row], info: dict[str, Any], batch: Any) -> None:
        left = self._still_there()
        if len(left) < (n if self.drop_last else 1):
            self.left = [(row, self.ring.order[row[0]]) for row in self.ring.rows()]
            left = self._still_there()
        assert len(rows) == len(set(rows)) == min(n, len(left))
        assert rows == left[:n] if not self.shuffle else set(rows) <= set(left)
        self.left = [(row, number) for row, number in self.left or [] if row in set(left) - set(rows)]
        if len(self.left) < (n if self.drop_last else 1):
            self.left = None

    def ran_out(self) -> bool:
        return self.left is None


class LastDroppedOracle(EpochOracle):
    drop_last = True


class InOrderOracle(EpochOracle):
    shuffle = False


UNIFORM = {
    "random": RandomOracle,
    "epoch": EpochOracle,
    "epoch, last dropped": LastDroppedOracle,
    "epoch in order": InOrderOracle,
}
