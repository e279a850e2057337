"""Rows that are handed out once, and writers that wait for them, with their rules in plain Python."""

from __future__ import annotations

from typing import Any

from engram.data import QueueSampler
from machine.ring import Ring, Row
from machine.samplers import RandomOracle


class QueueOracle(RandomOracle):
    """Rows come once, oldest first; where they are not overwritten, writes end where there is no room.

    Rows are counted as their environments' steps, one time step after the other: those below `consumed` were handed
    out, and those from `kept` on keep their places.
    """

    has_frequencies = False
    is_queue = True
    knows_removed = True
    overwrites = False
    commits = False
    staleness: int | None = None
    settings: dict[str, Any] = {}

    def __init__(self, ring: Ring) -> None:
        super().__init__(ring)
        self.each = max(ring.envs, 1)
        self.batch_sizes = [*range(1, 2 * self.each + 2), 3 * self.each, 7 * self.each]
        self.missed, self.stale, self.version = ring.counts
        self.lost = 0
        self.is_to_seek = False

    def make(self) -> Any:
        return QueueSampler(**self.settings)

    def begin(self) -> None:
        """All that is stored waits; what was overwritten of a store that was no queue yet is missed."""
        base = 0 if self.ring.was_queue else self.ring.base
        first = self._first()
        self.consumed = first if self.ring.was_queue else base * self.each
        self.kept = first
        self.lost = 0 if self.overwrites else first - self.consumed
        self.ring.was_queue = True

    def ended(self) -> None:
        """The store is no queue any more, and keeps its counts."""
        self.ring.counts = self.missed, self.stale, self.version

    def made_anew(self) -> None:
        """A new sampler, over a store that has been this queue all the time."""

    def go_on(self, rb: Any) -> None:
        if self.commits:
            self.is_to_seek, self.storage = not rb.storage.initialized, rb.storage
            assert rb.seek(None) == (0 if self.is_to_seek else self.sought(min(self.kept, self.consumed)))

    def take_part(self) -> None:
        """A seek before the first write is made up for when something is asked of the queue."""
        if self.is_to_seek and self.storage.initialized:
            self.sought(min(self.kept, self.consumed))

    # ---- what happens to the buffer ----
    def emptied(self) -> None:
        self.consumed = self.kept = self.ring.base * self.each

    def loaded(self) -> None:
        """Only rows that are there were saved."""
        self.missed += max(0, self._first() - self.consumed)
        self.consumed = max(self.consumed, self._first())
        self.kept = min(max(self.kept, self._first()), self.consumed)

    def room(self) -> int:
        """Time steps that can be written. Where there are none, removed rows that come next leave."""
        if self.overwrites:
            return 1_000_000
        if not self._places():
            self._pass_removed()
        return self._places()

    def _places(self) -> int:
        return max(self.kept // self.each, self.ring.base) + self.ring.capacity - self.ring.next

    def _pass_removed(self) -> None:
        to = self._behind_removed(self.consumed)
        if to > self.consumed:
            self.kept = to if self.kept >= self.consumed else self.kept
            self.consumed = to

    # ---- what it draws ----
    def _first(self) -> int:
        return min((self.ring.order[slot] for slot in self.ring.stored()), default=self.ring.next) * self.each

    def _row(self, number: int) -> Row:
        return number // self.each % self.ring.capacity, number % self.each

    def _behind_removed(self, number: int) -> int:
        while number < self.ring.next * self.each and self._row(number) in self.ring.removed:
            number += 1
        return number

    def waiting(self) -> list[int]:
        """The rows that come next, by their numbers."""
        numbers = range(max(self.consumed, self._first()), self.ring.next * self.each)
        return [number for number in numbers if self._row(number) not in self.ring.removed]

    def _is_old(self, number: int) -> bool:
        return self.staleness is not None and self.ring.step(self._row(number)).traj < self.version - self.staleness

    def can_sample(self, n: int) -> bool:
        waiting = self.waiting()
        fresh = [number for number in waiting if not self._is_old(number)]
        if len(waiting) >= n > len(fresh) and not self.lost:
            self._pass_old(waiting)
        return len(fresh) >= n and not self.lost

    def _pass_old(self, waiting: list[int]) -> None:
        """A look for a batch that is not there passes what is too old in front of the other rows."""
        old = 0
        while old < len(waiting) and self._is_old(waiting[old]):
            old += 1
        if old:
            self._move(waiting[old - 1] + 1, is_free=self.kept >= self.consumed)
            self.stale += old

    def _move(self, to: int, is_free: bool) -> None:
        self.missed += max(0, self._first() - self.consumed)
        self.consumed = to
        self.kept = to if is_free else self.kept

    def refusal(self, n: int) -> str | None:
        if n > self.ring.capacity * self.each:
            return "more than the queue has room for"
        if n % self.each:
            # Before the first write it may not be known how many rows a time step has.
            return "ends in the middle of one" if self.ring.next else "ends in the middle of one|sample waits for"
        if self.lost:
            self.missed, self.consumed, self.lost = self.missed + self.lost, self._first(), 0
            return "were overwritten before they were handed out"
        self.take_part()
        return None if self.can_sample(n) else "sample waits for"

    def drew(self, n: int, rows: list[Row], info: dict[str, Any], batch: Any) -> None:
        waiting, taken = self.waiting(), []
        while len(taken) < n:
            number = waiting.pop(0)
            if self._is_old(number):
                self.stale += 1
            else:
                taken.append(number)
        assert rows == [self._row(number) for number in taken]
        self._move(self._behind_removed(taken[-1] + 1), is_free=not self.commits)

    # ---- positions ----
    def committed(self, to: int) -> None:
        self.kept = max(self.kept, min(to, self.consumed))

    def sought(self, to: int) -> int:
        """The rows from there on come next; how many of them are gone."""
        self.is_to_seek, first = False, self._first()
        if to < self.kept:
            self.kept = max(to, min(first, self.kept))
        gone = max(0, first - to)
        self.consumed, self.missed = max(to, first), self.missed + gone
        if gone:  # of which nobody is told once more
            self.kept = first
        return gone

    def figures(self) -> tuple[int, int, int, int, int]:
        """As `stats` has them: rows that wait, that are not committed, missed, too old; and the version that trains."""
        uncommitted = max(0, self.consumed - max(self.kept, self._first()))
        return len(self.waiting()), uncommitted, self.missed, self.stale, self.version


class OverwritingQueueOracle(QueueOracle):
    overwrites = True
    settings = {"full": "overwrite"}


class CommittedQueueOracle(QueueOracle):
    commits = True
    settings = {"commit": "manual"}


class OverwritingCommittedQueueOracle(CommittedQueueOracle):
    overwrites = True
    settings = {"full": "overwrite", "commit": "manual"}


class FreshQueueOracle(QueueOracle):
    """The number of a row's trajectory is its version."""

    staleness = 3
    settings = {"max_staleness": 3, "version_key": "traj"}


QUEUES = {
    "queue": QueueOracle,
    "overwriting queue": OverwritingQueueOracle,
    "committed queue": CommittedQueueOracle,
    "overwriting committed queue": OverwritingCommittedQueueOracle,
    "fresh queue": FreshQueueOracle,
}
