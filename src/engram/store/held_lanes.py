"""Lanes that a process takes by their numbers, several at a time: those of a shard, one for each producer."""

from __future__ import annotations

from typing import Any

from engram._system import notice_fork
from engram.errors import NoFreeLaneError, StorageError
from engram.store.lanes import Lanes, check_range, end_of


class HeldLanes(Lanes):
    """The lanes of a store, each of which has one writer: the process that took it, until it gives it back or ends."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.moves_on, self._differ, self._stints = False, True, None
        self._beside: set[int] = set()  # lanes that `hold_lane` took
        self._ends: dict[int, tuple[int, int]] = {}  # of lanes that this process gave back: incarnation and end, then

    @property
    def cursor(self) -> int:
        return self.store.cursor(self.held or 0)

    def hold(self) -> int:
        """Takes a lane for what is written without a lane's number: the first free one of `by_room`.

        Raises:
            NoFreeLaneError: every lane has a writer.
        """
        if self.held is None:
            self._hold_first(self.by_room())
        assert self.held is not None
        return self.held

    def hold_as_saved(self, saved: list[dict[str, Any]]) -> int:
        ends = [(lane["published"] > lane["base"], lane["seams"][-1:] != [lane["published"]]) for lane in saved]
        if self.held is None:
            self._hold_first(sorted(self.by_room(), key=lambda i: i >= len(ends) or not all(ends[i])))
        return self.hold()

    def _hold_first(self, lanes: list[int]) -> None:
        notice_fork()
        if self.unused_since_fork:
            self.join_after_fork()
        with self.mutex:
            for lane in lanes:
                if lane not in self._beside and self._take_lane(lane, goes_on=False):
                    self.held = lane
                    return
        raise NoFreeLaneError(f"all {self.store.lanes} lanes of this store have a writer")

    def by_room(self) -> list[int]:
        """All lanes, in the order in which a new writer should take one: where the fewest rows are lost by it.

        First those that this process gave back and nobody has written to since; then by their number of rows; of equal
        ones that whose newest row is the oldest.
        """
        own = [lane for lane, end in self._ends.items() if end == end_of(self.store, lane)][::-1]
        lanes = self.counters()
        rows = [lane["published"] - lane["first"] for lane in lanes]
        others = sorted(range(len(lanes)), key=lambda i: (rows[i], lanes[i]["written_at"] if rows[i] else 0, i))
        return own + [lane for lane in others if lane not in own]

    def _take_lane(self, lane: int, goes_on: bool) -> bool:
        """Takes a lane; False where another process holds it."""
        if self.locks is not None and not self.locks.take_lane(lane):
            return False
        try:
            if self._on_take is not None:
                self._on_take(lane)
            # The last writer of this lane may have stopped in the middle of a trajectory.
            if self._ends.pop(lane, None) != end_of(self.store, lane) and not goes_on:
                self.store.mark_seam(lane)
        except BaseException:
            self._free(lane)
            raise
        return True

    def _free(self, lane: int) -> None:
        if self.locks is not None:
            self.locks.free_lane(lane)

    def _give_back(self, lane: int) -> None:
        self._ends.pop(lane, None)  # so that it is the last
        self._ends[lane] = end_of(self.store, lane)
        self._free(lane)

    # ---- by their numbers ----
    def holds(self, lane: int) -> bool:
        """Whether this process writes to a lane: its own, or one that it took with `hold_lane`."""
        notice_fork()
        return lane == self.held or lane in self._beside

    def check_owned(self, lane: int) -> None:
        if not self.holds(lane):
            raise StorageError(f"this process does not hold lane {lane}: hold_lane({lane}) first; nothing was written")

    def hold_lane(self, lane: int, *, goes_on: bool = False) -> None:
        """Takes a certain lane for this process, beside the one that `hold` gives; once more: nothing happens.

        Args:
            goes_on: the next row goes on from the lane's newest one, whoever wrote that: no seam comes between them.

        Raises:
            IndexError: there is no such lane.
            NoFreeLaneError: another process writes to it.
            ValueError: it is this process's own.
        """
        notice_fork()
        check_range("lane", lane, self.store.lanes)
        if self.unused_since_fork:
            self.join_after_fork()
        with self.mutex:
            if lane in self._beside:
                return
            if lane == self.held:
                raise ValueError(f"lane {lane} is written to by `extend` in this process; hold another one")
            if not self._take_lane(lane, goes_on):
                raise NoFreeLaneError(f"lane {lane} of this store has a writer in another process; end it first")
            self._beside.add(lane)

    def release_lane(self, lane: int) -> None:
        """Gives a lane that `hold_lane` took back; others: nothing happens."""
        notice_fork()
        with self.mutex:
            if lane in self._beside:
                self._beside.discard(lane)
                self._give_back(lane)

    def mark_seam_in(self, lane: int) -> None:
        """Puts a seam before the next row of a lane that this process holds."""
        with self.mutex:
            if not self.holds(lane):
                raise ValueError(f"this process does not hold lane {lane}")
            self.store.mark_seam(lane)

    def mark_seam(self) -> None:
        with self.mutex:
            for lane in self._ends if self.held is None else (self.held,):  # one of which it takes again
                self.store.mark_seam(lane)

    def release(self) -> None:
        notice_fork()
        with self.mutex:
            if self.held is not None:
                self._give_back(self.held)
            self.held = None

    def close(self) -> None:
        with self.mutex:
            self._beside.clear()
            super().close()

    def after_fork(self) -> None:
        super().after_fork()
        self._beside, self._ends = set(), {}  # the parent's

    # ---- what depends on the lane ----
    def _continues(self, lane: int, published: int) -> bool:
        return self.holds(lane) or self._ends.get(lane) == (self.store.incarnation, published)

    def _next_slots(self, steps: int) -> Any:
        assert self.held is not None
        return self.store.next_slots(self.held, steps)
