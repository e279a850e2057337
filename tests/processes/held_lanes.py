"""Writers with a lane each, for tests: what a row has to be is known from its lane and its number there.

Writers that engram makes move from lane to lane, or take turns in one. Here a process takes a lane at its first write
and stays there, until it gives it back or ends. Rows are appended, read and recovered by the same code.
"""

from __future__ import annotations

import dataclasses
import fcntl
from collections.abc import Callable
from typing import Any

from engram import _native
from engram._system import notice_fork
from engram.errors import NoFreeLaneError
from engram.store.lanes import Lanes, end_of
from engram.store.locks import _FIRST_LANE_BYTE, LaneLocks, _lock
from engram.store.places import LaneCount


def take_lane(locks: LaneLocks, lane: int) -> bool:
    """Takes a lane for this process alone; False where another one holds it."""
    return _lock(locks._own_fd(), fcntl.F_WRLCK, _FIRST_LANE_BYTE + lane)


def free_lane(locks: LaneLocks, lane: int) -> None:
    _lock(locks._own_fd(), fcntl.F_UNLCK, _FIRST_LANE_BYTE + lane)


@dataclasses.dataclass(frozen=True)
class HeldLaneCount(LaneCount):
    """So many lanes in the place of `lanes=`, each for one process at a time; as stores of before had them."""

    tells_writers: bool = False

    def open(
        self,
        store: _native.Store,
        locks: LaneLocks,
        on_take: Callable[[int | None], None] | None,
        on_exclusive: Callable[[], None] | None,
    ) -> Lanes:
        return HeldLanes(store, locks, on_take, on_exclusive)


class HeldLanes(Lanes):
    """The lanes of a store, each of which has one writer: the process that took it, until it gives it back or ends."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.moves_on, self._stints = False, None
        self._ends: dict[int, tuple[int, int]] = {}  # of lanes that this process gave back: incarnation and end, then

    @property
    def cursor(self) -> int:
        return self.store.cursor(self.held or 0)

    def hold(self) -> int:
        """Takes the first free lane of `by_room`; NoFreeLaneError: every lane has a writer."""
        if self.held is None:
            self.use()
            with self.mutex:
                self.held = next((lane for lane in self.by_room() if self._take_lane(lane)), None)
        if self.held is None:
            raise NoFreeLaneError(f"all {self.store.lanes} lanes of this store have a writer")
        return self.held

    def by_room(self) -> list[int]:
        """All lanes, in the order in which a new writer takes one: where the fewest rows are lost by it.

        First those that this process gave back and nobody has written to since; then by their number of rows; of equal
        ones that whose newest row is the oldest.
        """
        own = [lane for lane, end in self._ends.items() if end == end_of(self.store, lane)][::-1]
        lanes = self.counters()
        rows = [lane["published"] - lane["first"] for lane in lanes]
        others = sorted(range(len(lanes)), key=lambda i: (rows[i], lanes[i]["written_at"] if rows[i] else 0, i))
        return own + [lane for lane in others if lane not in own]

    def _take_lane(self, lane: int) -> bool:
        """Takes a lane; False where another process holds it."""
        assert self.locks is not None
        if not take_lane(self.locks, lane):
            return False
        if self._on_take is not None:
            self._on_take(lane)
        # The last writer of this lane may have stopped in the middle of a trajectory.
        if self._ends.pop(lane, None) != end_of(self.store, lane):
            self.store.mark_seam(lane)
        return True

    def mark_seam(self) -> None:
        with self.mutex:
            for lane in self._ends if self.held is None else (self.held,):  # one of which it takes again
                self.store.mark_seam(lane)

    def release(self) -> None:
        notice_fork()
        with self.mutex:
            if self.held is not None:
                assert self.locks is not None
                self._ends.pop(self.held, None)  # so that it is the last
                self._ends[self.held] = end_of(self.store, self.held)
                free_lane(self.locks, self.held)
            self.held = None

    def after_fork(self) -> None:
        super().after_fork()
        self._ends = {}  # the parent's

    def _continues(self, lane: int, published: int) -> bool:
        return lane == self.held or self._ends.get(lane) == (self.store.incarnation, published)

    def _next_slots(self, steps: int) -> Any:
        assert self.held is not None
        return self.store.next_slots(self.held, steps)
