"""Capacity, counters, seams, and who holds a lane: the one owner of these facts.

`docs/memory-model.md` says what a reader may believe and why; the protocol itself is native.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from engram import _native
from engram.errors import NoFreeLaneError
from engram.store.locks import LaneLocks

_LOOKS = 10_000
_LOOKS_BEFORE_THE_FIRST = 100
_MOST_BORDERS = 1024  # that a device has not been asked about

_live: weakref.WeakSet[Lanes] = weakref.WeakSet()


class Lanes:
    """The lanes of one store: which rows exist, where the next one goes, and who may put it there.

    Args:
        store: the native store.
        locks: of a store that processes share; None for memory that is private to this process.
        on_take: called with a lane's number when this process has taken it, before its first write.
        on_alone: called before each change that needs the store alone.
    """

    def __init__(
        self,
        store: _native.Store,
        locks: LaneLocks | None = None,
        on_take: Callable[[int], None] | None = None,
        on_alone: Callable[[], None] | None = None,
    ) -> None:
        self.store = store
        self.locks = locks
        self.mutex = threading.RLock()  # writers of this process take turns; in-place writes keep readers by slot out
        self._on_take = on_take
        self._on_alone = on_alone
        self._held: int | None = None
        self.asleep = False  # a forked child that has not used the store yet
        self._copied_from = 0  # the process whose private memory this is a copy of, until that was told
        self._held_there: int | None = None  # and the lane that the copy goes on in
        #: The sequences that rows carry (int64 [n] of slots); 0 where a row has the one that its lane counts.
        #: None: they carry none. Set by the table that holds the rows.
        self.own_sequences: Callable[[Tensor], Tensor] | None = None
        self._alone = 0
        self._session = os.urandom(8).hex()
        self._borders: list[tuple[int, Tensor]] = []  # of the rows of this incarnation, as `_evidence` is
        self._evidence: tuple[int, Tensor] | None = None
        self._noted_in = store.incarnation
        self._left: dict[int, tuple[int, int]] = {}  # lanes that this process gave back: incarnation and end, then
        self.capacity: int = store.lanes * store.lane_capacity * store.envs
        self.strands: int = store.envs
        _live.add(self)

    @classmethod
    def in_memory(cls, capacity: int, strands: int = 1) -> Lanes:
        """Counters alone, for storages that keep their rows elsewhere."""
        return cls(_native.Store.create(-1, 1, capacity, strands, 0, 8, False, b"", os.urandom(16)))

    # ---- what exists ----
    def __len__(self) -> int:
        """Stored steps of all lanes and strands."""
        if self._copied_from:  # who waits for rows of another process would wait for ever
            self.wake()
        return self.store.rows()

    @property
    def write_count(self) -> int:
        """Steps ever written, over all lanes and strands."""
        return self.store.steps_written() * self.strands

    @property
    def cursor(self) -> int:
        """Where the next time step goes in the lane of this process (lane 0 before it has one)."""
        return self.store.cursor(self._held or 0)

    @property
    def is_full(self) -> bool:
        """Whether every lane has been filled once since it was last empty."""
        lanes = (self.store.lane(i) for i in range(self.store.lanes))
        return all(lane["claimed"] - lane["base"] >= self.store.lane_capacity for lane in lanes)

    def states(self) -> list[dict[str, Any]]:
        """The counters of each lane, and its seams: `published` is one where this process's next row will be."""
        self.settle_borders()
        return [{**self.store.lane(i), "seams": self.store.seams(i)} for i in range(self.store.lanes)]

    # ---- for saves ----
    def saved_states(self) -> list[dict[str, Any]]:
        """The counters of each lane as a save keeps them: `base`, `published`, `origin`, `seams`, `border`, `replaced`.

        Where another process, or nobody yet, writes a lane, its end is a seam, but for one that this process gave back
        and nobody wrote to since: whoever loads goes on as this process would.
        """
        if self.asleep and self.locks is not None:  # who only saves is a user of the store, too
            self.wake()
        held = self._held_there if self.asleep else self._held  # a copy that is only saved needs no waking
        found = []
        self.settle_borders()
        for i in range(self.store.lanes):
            lane = self.store.lane(i)
            published = lane["published"]
            base = min(max(lane["base"], lane["first"]), published)
            # Another process may have taken the lane over since `published` was read.
            seams = [seam for seam in self.store.seams(i) if seam <= published]
            goes_on = i == held or self._left.get(i) == (self.store.incarnation, published)
            if not goes_on and published > base and seams[-1:] != [published]:
                seams.append(published)
            saved = {"base": base, "published": published, "origin": lane["origin"], "seams": seams}
            looked, agreed = self.store.border_evidence(i)
            border = {"looked": min(looked, published), "agreed": agreed}
            found.append({**saved, "border": border, "replaced": 0 if i else self.store.replaced})
        return found

    def restore_lane(self, i: int, lane: dict[str, Any], shift: int) -> None:
        """The counters of a lane as `saved_states` gave them, of write numbers that were `shift` higher."""
        store, origin = self.store, (lane["origin"] - shift) % (1 << 64)
        store.restore_lane(i, lane["base"] - shift, lane["published"] - shift, origin)
        store.set_border_evidence(i, max(0, lane["border"]["looked"] - shift), lane["border"]["agreed"])
        if i == 0:
            store.replaced = lane["replaced"]

    def widened(self, store: _native.Store) -> Lanes:
        """The same lanes of the same rows, which were copied to another store in private memory."""
        twin = copy.copy(self)
        twin.store = store
        _live.add(twin)
        return twin

    def identity(self) -> dict[str, Any]:
        """JSON that, with a lane and a write number, names a row; and how far the log of in-place changes has come."""
        s = self.store
        return {"session": self._session, "incarnation": s.incarnation, "log": s.log_head}

    def log(self) -> list[tuple[int, int] | None]:
        """Lane and write number of the rows that the log of in-place changes names, as far as it reaches back; None
        for rows that are gone."""
        head = self.store.log_head
        if not head:
            return []
        slots = torch.tensor(self.store.log(max(0, head - _native.LOG_ENTRIES)), dtype=torch.int64)
        lane_slots = self.store.lane_capacity * self.strands
        numbers = self.store.generations(slots).tolist()
        return [(slot // lane_slots, w) if w >= 0 else None for slot, w in zip(slots.tolist(), numbers, strict=True)]

    # ---- writing ----
    def hold(self) -> int:
        """The lane that this process writes to; the first call takes a free one.

        Raises:
            NoFreeLaneError: every lane has a writer.
        """
        held = self._held
        return held if held is not None else self._take()

    def _take(self) -> int:
        if self.asleep:
            self.wake()
        with self.mutex:
            if self._held is not None:
                return self._held
            for lane in range(self.store.lanes):
                if self.locks is None or self.locks.take_lane(lane):
                    self._prepare(lane)
                    self._held = lane
                    return lane
        n = self.store.lanes
        raise NoFreeLaneError(
            f"all {n} lane{'s' if n > 1 else ''} of this store have a writer; make the store with lanes={n + 1} or "
            "more, or release() one of them"
        )

    def _prepare(self, lane: int) -> None:
        assert self.locks is None or self._held is None
        try:
            if self._on_take is not None:
                self._on_take(lane)
            # Whoever wrote here before may have stopped in the middle of a trajectory.
            if self._left.pop(lane, None) != self._end(lane):
                self.store.mark_seam(lane)
        except BaseException:
            if self.locks is not None:
                self.locks.free_lane(lane)
            raise

    def next_slots(self, steps: int) -> Tensor:
        """The time slots that the next steps of this process go to: int64 [steps]."""
        return self.store.next_slots(self.hold(), steps)

    def next_slot(self) -> int:
        """The time slot that the next step of this process goes to."""
        return self.store.next_slot(self.hold())

    def advance(self, steps: int, begins: bool = False) -> Tensor:
        """Counts steps as written, for storages that keep their rows elsewhere; returns their time slots.

        `begins`: a trajectory begins at the first of them, whatever flags and ids say.
        """
        lane = self.hold()
        slots = self.store.next_slots(lane, steps)
        self.store.advance(lane, steps, begins)
        return slots

    def mark_seam(self) -> None:
        """The next step that this process writes begins a trajectory, whatever flags and ids say."""
        with self.mutex:
            self._left.clear()
            if self._held is not None:
                self.store.mark_seam(self._held)

    def note_border(self, begins: Tensor) -> None:
        """The next step begins a trajectory if this flag, which a device may still be working out, says so."""
        self._note()
        self._borders.append((self.store.lane(0)["published"], begins))
        if len(self._borders) >= _MOST_BORDERS:
            self.settle_borders()

    def note_evidence(self, looked: int, evidence: Tensor) -> None:
        """What `ColumnBorder` knows of the steps up to a write number, which a device may still be working out."""
        self._note()
        self._evidence = looked, evidence

    def _note(self) -> None:
        """Before something is noted: what was noted of rows that have been replaced by others is not."""
        if self._noted_in != self.store.incarnation:
            self._noted_in, self._borders, self._evidence = self.store.incarnation, [], None

    def settle_borders(self) -> None:
        """Waits for what `note_border` and `note_evidence` were given. Before anybody looks at seams."""
        if self._evidence is not None:
            with self.mutex:
                self._note()
                noted, self._evidence = self._evidence, None
                if noted is not None:
                    known, *agreed = noted[1].tolist()
                    bits = sum(1 << k for k, agrees in enumerate(agreed) if agrees)
                    self.store.set_border_evidence(0, noted[0], bits if known else None)
        if not self._borders:
            return
        with self.mutex:
            self._note()
            borders, self._borders = self._borders, []
            if not borders:
                return
            oldest = self.store.lane(0)["first"]
            found = torch.stack([begins for _, begins in borders]).tolist()  # waits once for all
            for (number, _), begins in zip(borders, found, strict=True):
                if begins and number > oldest:
                    self.store.add_seam(0, number)

    def _end(self, lane: int) -> tuple[int, int]:
        return self.store.incarnation, self.store.lane(lane)["published"]

    def release(self) -> None:
        """Gives this process's lane back. If nobody writes to it before this process does again, trajectories go on."""
        if self._copied_from:
            self.wake()
        with self.mutex:
            if self._held is not None:
                if not self.store.next_is_seam(self._held):
                    self._left[self._held] = self._end(self._held)
                if self.locks is not None:
                    self.locks.free_lane(self._held)
            self._held = None

    @contextlib.contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """For what must not run beside other users of the store: in-place writes, `empty`, `loads`."""
        if self.asleep:
            self.wake()
        with self.mutex:
            # What needs the store alone may be made of parts that do: only the outermost takes and drops the lock.
            if self.locks is None or self._alone:
                yield
                return
            with self.locks.alone(what):
                self._alone += 1
                try:
                    if self._on_alone is not None:
                        self._on_alone()
                    yield
                finally:
                    self._alone -= 1

    def close(self) -> None:
        """Gives the lane and the locks back."""
        with self.mutex:
            self._held = None
            if self.locks is not None:
                self.locks.close()

    # ---- drawing ----
    def claimed(self, count: str = "claimed") -> bool:
        """Whether there are rows, be it that they are being written just now; `published`: or have been there."""
        lanes = [self.store.lane(i) for i in range(self.store.lanes)]
        return any(lane[count] > lane["base"] for lane in lanes)

    def uniform(self, seed: Tensor, n: int) -> Tensor | None:
        """n slots of stored rows drawn uniformly from a seed (int64 [1]); None if nothing is stored."""
        if self.asleep:
            self.wake()
        slots = self.store.uniform(seed, n)
        if slots is None:
            slots = self.look_again(lambda: self.store.uniform(seed, n))
        return slots

    def look_again(self, draw: Callable[[], Any]) -> Any:
        """What `draw` gives, which was None; still None if nothing is stored.

        A lane of few rows can show none for the moment in which its writer replaces them all, and before its first; who
        was about to write that one may have been stopped, and nobody waits long for it.
        """
        for k in range(_LOOKS):
            if not self.claimed("published" if k >= _LOOKS_BEFORE_THE_FIRST else "claimed"):
                with self.mutex:  # after somebody who is replacing all rows
                    return draw()
            time.sleep(0)
            drawn = draw()
            if drawn is not None:
                return drawn
        return None

    def generations(self, slots: Tensor) -> Tensor:
        """The sequence of the row that each slot holds; -1 where it holds none."""
        counted = self.store.generations(slots)
        if self.own_sequences is None:
            return counted
        # After the counters, and before the rows where they are read next: a row may be newer than its sequence, which
        # is then one that is gone, but never older.
        own = self.own_sequences(slots)
        return torch.where((counted >= 0) & (own >= _native.FIRST_REPLACED), own, counted)

    # ---- rows that a max-value writer writes over others, out of turn ----
    def reserve_sequences(self, n: int) -> int:
        """The sequence of the first of n rows that are about to be written; they are given, whatever happens here."""
        return self.store.reserve_sequences(n)

    def note_sequences(self, slots: Tensor) -> None:
        """Stored rows carry these sequences: none is given again, where a power cut has lost the count of them."""
        if self.own_sequences is not None and len(slots):
            given = int(self.generations(slots).max()) + 1 - _native.FIRST_REPLACED
            if given > self.store.replaced:
                self.store.replaced = given

    def counted(self, slots: Tensor, generation: Tensor) -> Tensor:
        """Generations (int64 [n]) by the counters alone, as native code compares them; -1: another row by now."""
        if self.own_sequences is None:
            return generation
        there = self.generations(slots) == generation
        return torch.where(there, self.store.generations(slots), -1)

    def wake(self) -> None:
        """At the first use in a forked child; warns where the rows are a copy that the parent does not see."""
        with self.mutex:
            if self.asleep and self.locks is not None:
                self.locks.join()
            parent, self._copied_from = self._copied_from, 0
            if self.asleep and self.locks is None:
                self._held = self._held_there
            self.asleep = False
        tell_of_copy(parent)

    def after_fork(self) -> None:
        """In a child: new mutexes, and no lane; a table in private memory is its own copy."""
        self.mutex = threading.RLock()
        self._alone = 0
        self._left.clear()  # the parent may go on where it stopped; this process did not write there
        self.store.end_save()  # its thread is the parent's
        self.store.after_fork()
        self._session = os.urandom(8).hex()
        if not self.asleep:
            self._held_there = self._held if self.locks is None else None
        self._held = None
        self.asleep = True
        if self.locks is None:
            self._copied_from = os.getppid()


_told_of_copy = False


def tell_of_copy(parent: int) -> None:
    """Warns, once a process, that rows are a copy, which the process that it was forked from does not see; 0: none."""
    global _told_of_copy
    # Whose parent has ended, as a daemon's has, is alone with its copy.
    if _told_of_copy or not parent or parent != os.getppid():
        return
    _told_of_copy = True
    warnings.warn(
        f"this process was forked from process {parent} and uses a copy of its replay buffer: it sees no row that is "
        "written there from now on, and what it writes is not seen there. To share the rows make the buffer with "
        "shared=True (LazyTensorStorage, LazyMemmapStorage) and write its first batch before the fork; where a copy "
        "is what you want, ignore this",
        RuntimeWarning,
        stacklevel=4,
    )


def _after_fork() -> None:
    global _told_of_copy
    _told_of_copy = False
    for lanes in list(_live):
        lanes.after_fork()


os.register_at_fork(after_in_child=_after_fork)
