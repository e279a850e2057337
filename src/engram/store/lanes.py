"""Lanes: capacity, counters, seams, and which process writes where.

`docs/memory-model.md` says which rows a reader may use and why; the protocol itself is native.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

import engram._native as _native
from engram._system import fork_registry, notice_fork, run_after_fork
from engram._text import warn_user
from engram.errors import NoFreeLaneError, StorageError, StorageInUseError
from engram.store.counters import removed_bits
from engram.store.locks import LaneLocks

_T = TypeVar("_T")
_MAX_DRAWS = 10_000  # of `retry_draw`
_DRAWS_BEFORE_FIRST_ROW = 100  # of these while the first row is still being written
_MAX_PENDING_BORDERS = 1024  # results that a device has not been asked for
_TURN_TIMEOUT = 10.0  # seconds that a writer waits for the turn of another
_TURN_LOOKS = 64  # at whose turn it is, before a writer sleeps and asks whether the other one lives
_TURN_PAUSE = 5e-5  # seconds that it sleeps, rising up to
_LONGEST_TURN_PAUSE = 2e-3
_END_OF_SEQUENCES = 1 << 62
NO_LIMIT = 1 << 40  # steps of a store without a size


class Lanes:
    """The lanes of one store: which rows exist, where the next one goes, and how this process writes there.

    A store of one lane has one writer, or writers that take turns in it. In one of several lanes writers move from lane
    to lane (`Stints`), so that together they are one ring.

    Args:
        store: the native store.
        locks: of a store that processes share; None for memory that is private to this process.
        on_take: called before the first write of this process, and before it takes over the turn of a dead writer: with
            the lane's number, or None where a new writer's rows are not joined with those of others.
        on_exclusive: called before each change that needs the store alone.
        turns: any number of processes write to a store of one lane: each has it for one append.
    """

    def __init__(
        self,
        store: _native.Store,
        locks: LaneLocks | None = None,
        on_take: Callable[[int | None], None] | None = None,
        on_exclusive: Callable[[], None] | None = None,
        turns: bool = False,
    ) -> None:
        self.store = store
        self.locks = locks
        #: Whether processes take turns in the store's only lane (`turn`), so that rows of others come between its own.
        self.takes_turns = turns and locks is not None and store.lanes == 1
        #: Whether writers move from lane to lane.
        self.moves_on = locks is not None and store.lanes > 1
        self.mutex = threading.RLock()  # writers of this process take turns; in-place writes keep readers by slot out
        self._on_take = on_take
        self._turns = Turns(store, locks, on_take) if self.takes_turns and locks is not None else None
        self._stints = Stints(store, locks, on_take) if self.moves_on and locks is not None else None
        self._on_exclusive = on_exclusive
        #: 0 from the first write of this process on, whatever lanes it writes to; None: it has written nothing yet.
        self.held: int | None = None
        self.unused_since_fork = False  # in a forked child that has not used the store yet
        #: Called after the first use of the store in a forked child.
        self.on_join: Callable[[], None] = _nothing
        #: Whether a forked child has a copy of the rows, which are in memory that is private to this process.
        self.copied_by_fork = locks is None
        self._copy_of = 0  # the process whose private memory this is a copy of, until the warning about it
        self._held_by_parent: int | None = None  # the lane in which such a copy goes on
        #: Seams that a device may still be computing.
        self.pending_borders = PendingBorders(store)
        #: The sequences that rows carry (int64 [n] of slots); 0 where a row has the one that its lane counts.
        #: None: they carry none. Set by the rows.
        self.own_sequences: Callable[[Tensor], Tensor] | None = None
        #: By how much the last load moved the sequences of each of its lanes down; empty: there was none.
        self.shifts: list[int] = []
        self._exclusive_depth = 0
        self._session = os.urandom(8).hex()
        self._released: tuple[int, int] | None = None  # the end of its only lane when this process gave it back
        self._noted_removals = False  # that this process removes rows, to those who look at what came before a row
        #: The store as a queue; None: it was made by an engram whose stores were none.
        self.queue = _native.StoreQueue(store) if store.has_flow else None
        self.capacity: int = store.lanes * store.lane_capacity * store.envs
        self.envs: int = store.envs
        _live.add(self)

    @classmethod
    def in_memory(cls, capacity: int | None, envs: int = 1) -> Lanes:
        """Counters without rows, for storages that keep their rows elsewhere. None: without limit."""
        steps = NO_LIMIT if capacity is None else capacity
        return cls(_native.Store.create(-1, 1, steps, envs, 0, 8, False, b"", os.urandom(16)))

    # ---- what exists ----
    def __len__(self) -> int:
        """Stored steps of all lanes and environments."""
        if self._copy_of:  # waiting here for rows of the parent process would never end
            self.use()
        return self.store.rows()

    @property
    def write_count(self) -> int:
        """Steps ever written, over all lanes and environments."""
        return self.store.steps_written() * self.envs

    @property
    def cursor(self) -> int:
        """Where the next time step of this process goes."""
        return int(self.store.next_stint_slots(1)[0]) if self.moves_on else self.store.cursor(0)

    @property
    def is_full(self) -> bool:
        """Whether every lane has been filled once since it was last empty."""
        return all(lane["claimed"] - lane["base"] >= self.store.lane_capacity for lane in self.counters())

    def counters(self) -> list[dict[str, Any]]:
        """The counters of each lane, as `states` gives them, without a look at every row's seam."""
        return [self.store.lane(i) for i in range(self.store.lanes)]

    def states(self) -> list[dict[str, Any]]:
        """Counters and seams of each lane. `published` is among the seams where this process's next row will be one."""
        self.pending_borders.settle(self.mutex)
        return [{**self.store.lane(i), "seams": self.store.seams(i)} for i in range(self.store.lanes)]

    # ---- for saves ----
    def saved_states(self) -> list[dict[str, Any]]:
        """The counters of each lane as a save keeps them: `base`, `published`, `origin`, `seams`, `border`, `replaced`.

        Of several lanes also `ticket`, `left`, `goes_on`: which of the store's stints the last one there is, how many
        rows it may still append, and whether it is this process's; and in the first lane `carried`: which entries agree
        at the borders of this process's rows in the lane where it was before. `removed`, where there are any: a bit for
        each row from `first` on, the lowest of a byte first, in base 64; in the last lane `rate`, of a store with
        a rate limiter: the rows `written` and `drawn` since its counts began; `queue`, of one: the rows of the lane,
        counted as its environments' steps one after the other, below which all were handed out (`consumed`), and below
        which they may be overwritten (`kept`); in the last lane also the `version` of the policy that trains, and how
        many rows were `missed` and `stale`. A lane's end is a seam, unless this process writes there or was the last to
        write: a process that loads the save goes on as this one would.
        """
        notice_fork()
        if self.locks is not None:  # a process that only saves is a user of the store, too
            self.use()
        # A copy of private memory that is only saved stays unused.
        held = self._held_by_parent if self.unused_since_fork else self.held
        several = self.store.lanes > 1 and self.locks is not None
        saved = []
        self.pending_borders.settle(self.mutex)
        for i in range(self.store.lanes):
            lane = self.store.lane(i)
            published = lane["published"]
            base = min(max(lane["base"], lane["first"]), published)
            # Another process may have taken the lane over since `published` was read.
            seams = [seam for seam in self.store.seams(i) if seam <= published]
            if several:
                continues = self._continues(i, published)
            else:
                continues = held is not None or self._released == (self.store.incarnation, published)
            if (self.takes_turns or self.moves_on) and self.store.lane(i)["published"] != published:
                continues = False  # another process is writing: the row before may be its own
            if not continues and published > base and seams[-1:] != [published]:
                seams.append(published)
            looked, agreed = self.store.border_evidence(i)
            border = {"looked": min(looked, published), "agreed": agreed}
            counters = {"base": base, "published": published, "origin": lane["origin"], "seams": seams}
            stint: dict[str, Any] = {}
            if self.moves_on:
                stint = {"ticket": lane["ticket"], "left": lane["left"], "goes_on": continues}
                if i == 0:
                    stint["carried"] = self.store.carried_border
            bits = self.store.removed_bits(i, base, published)
            removed = {"removed": {"first": base, "bits": base64.b64encode(bits).decode()}} if bits else {}
            saved.append(
                {**counters, "border": border, "replaced": 0 if i else self.store.replaced, **stint, **removed}
            )
        if (rate := self.store.rate_counts) is not None:
            saved[-1]["rate"] = {"written": max(0, rate[0]), "drawn": rate[1]}
        if self.queue is not None and self.queue.is_one:
            for lane, consumed, kept in zip(saved, self.queue.consumed, self.queue.kept, strict=True):
                lane["queue"] = {"consumed": consumed, "kept": kept}
            missed = self.queue.missed + self.queue.just_missed  # whoever loads it finds only rows that are there
            saved[-1]["queue"] |= {"version": self.queue.consumer_version, "missed": missed, "stale": self.queue.stale}
        return saved

    def _continues(self, lane: int, published: int) -> bool:
        """Whether the next row of this process in a lane, of several, goes on from the newest one there."""
        return lane == self.store.stint

    def restore_lane(self, i: int, lane: dict[str, Any], shift: int) -> None:
        """Takes over the counters of a saved lane (`saved_states`), whose sequences were `shift` higher."""
        store, origin = self.store, (lane["origin"] - shift) % (1 << 64)
        store.restore_lane(i, lane["base"] - shift, lane["published"] - shift, origin)
        store.restore_removed(i, lane["base"] - shift, removed_bits(lane, self.envs))
        store.set_border_evidence(i, max(0, lane["border"]["looked"] - shift), lane["border"]["agreed"])
        if self.moves_on and not shift:
            store.set_stint(i, lane.get("ticket", 0), lane.get("left", 0))
        if i == 0:
            store.replaced, self.shifts = lane["replaced"], []
        self.shifts.append(shift)
        if (rate := lane.get("rate")) is not None and store.rate_limit is not None:  # else the counts begin anew
            store.restore_rate_counts(rate["written"], rate["drawn"])
        if (cursors := lane.get("queue")) is not None and self.queue is not None:
            consumed, kept = (max(0, cursors[name] - shift * self.envs) for name in ("consumed", "kept"))
            self.queue.restore(i, consumed, kept)
            if (version := cursors.get("version")) is not None:
                self.queue.consumer_version = version
                self.queue.restore_counts(cursors.get("missed", 0), cursors.get("stale", 0))

    def shifts_since(self, lane_capacity: int | None) -> list[int]:
        """By how much the sequences of each lane are lower here than where the rows were saved; empty: by nothing.

        For a sampler that is loaded alone, from a store of this lane capacity (None: not known). Loading keeps
        sequences where lanes have the same capacity.
        """
        return [] if lane_capacity in (None, self.store.lane_capacity) else self.shifts

    def widened(self, store: _native.Store) -> Lanes:
        """The same lanes of the same rows, which were copied to another store in private memory."""
        twin = copy.copy(self)
        twin.store, twin.pending_borders = store, PendingBorders(store)
        twin.queue = _native.StoreQueue(store) if store.has_flow else None
        _live.add(twin)
        return twin

    def identity(self) -> dict[str, Any]:
        """JSON that, with a lane and a sequence, names a row; and the end of the log of in-place changes."""
        s = self.store
        return {"session": self._session, "incarnation": s.incarnation, "log": s.log_head}

    def log(self) -> list[tuple[int, int] | None]:
        """Lane and sequence of each row in the log of in-place changes, as far as it reaches back; None for rows that
        were overwritten since."""
        head = self.store.log_head
        if not head:
            return []
        slots = torch.tensor(self.store.log(max(0, head - _native.LOG_ENTRIES)), dtype=torch.int64, device="cpu")
        lane_slots = self.store.lane_capacity * self.envs
        sequences = self.store.generations(slots).tolist()
        return [(slot // lane_slots, w) if w >= 0 else None for slot, w in zip(slots.tolist(), sequences, strict=True)]

    # ---- writing ----
    def hold(self) -> int:
        """Makes this process a writer of the store; returns 0.

        Raises:
            NoFreeLaneError: the store has one writer, another process.
            StorageInUseError: as `turn`.
        """
        held = self.held
        return held if held is not None else self._take()

    def _take(self) -> int:
        self.use()
        with self.mutex:
            if self.held is None:
                if self._stints is not None:
                    self._stints.join()
                else:
                    self._take_only_lane()
                self.held = 0
        return 0

    def _take_only_lane(self) -> None:
        if self.locks is not None and not self.locks.take_lanes(1, self.takes_turns):
            raise NoFreeLaneError(
                "all 1 lane of this store have a writer; make the store without lanes=1, so that writers take turns, "
                "or release() it"
            )
        try:
            if self._turns is not None:
                self._turns.join(0)
            elif self._on_take is not None:
                self._on_take(0)
            # The last writer may have stopped in the middle of a trajectory.
            released, self._released = self._released, None
            if released != end_of(self.store, 0):
                self.store.mark_seam(0)
        except BaseException:
            if self.locks is not None:
                self.locks.free_lanes(1)
            raise

    def continue_as_saved(self, saved: list[dict[str, Any]]) -> None:
        """When rows with these `saved_states` are restored: goes on in the stint of the process that saved them."""
        if not self.moves_on or self.held is None:
            return
        self.store.carried_border = saved[0].get("carried") if saved else None  # none: nothing had been written
        states = self.counters()
        own = [i for i, lane in enumerate(saved) if states[i]["left"] and lane.get("goes_on")]
        if own:
            self.store.continue_stint(max(own, key=lambda i: states[i]["ticket"]))

    def slots_of(self, lane: int | Tensor, sequences: Tensor, env: int | Tensor = 0) -> Tensor:
        """The slots that rows with these sequences lie in, or lay: int64 [n].

        Whether they are still there says the sequence of the row that is read from the slot.

        Args:
            lane, env: one for all, or int64 [n].
            sequences: int64 [n].

        Raises:
            IndexError: a lane, an environment or a sequence that cannot exist.

        Example:
            >>> Lanes.in_memory(10).slots_of(0, torch.tensor([3, 13, 25]))
            tensor([3, 3, 5])
        """
        check_range("lane", lane, self.store.lanes)
        check_range("environment", env, self.envs)
        check_range("sequence", sequences, _END_OF_SEQUENCES)
        return (lane * self.store.lane_capacity + sequences % self.store.lane_capacity) * self.envs + env

    # ---- turns ----
    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """A block in which no other process appends to this process's lane; the caller holds the mutex.

        Raises:
            StorageInUseError: another process has been appending for ten seconds; the message names it.
        """
        notice_fork()
        turns = self._turns
        if turns is None or self.store.has_turn:
            yield
            return
        lane = self.hold()
        try:
            turns.begin(lane)
            if not self.store.has_written:
                turns.warn_of_second_writer(lane)
            yield
        finally:
            self.store.end_turn(lane)

    def next_slots(self, steps: int) -> Tensor:
        """The time slots that the next steps of this process go to: int64 [steps]."""
        self.hold()
        slots = self._next_slots(steps)
        if self.held is not None:
            return slots
        self.hold()  # the native call has noticed a fork that Python did not see
        return self._next_slots(steps)

    def _next_slots(self, steps: int) -> Tensor:
        return self.store.next_stint_slots(steps) if self.moves_on else self.store.next_slots(0, steps)

    def next_slot(self) -> int:
        """The time slot that the next step of this process goes to."""
        if self.moves_on:
            return int(self.next_slots(1)[0])
        lane = self.hold()
        slot = self.store.next_slot(lane)
        return slot if lane == self.held else self.store.next_slot(self.hold())

    def advance(self, steps: int, begins: bool = False) -> Tensor:
        """Counts steps as written, for storages that keep their rows elsewhere; returns their time slots.

        `begins`: puts a seam before the first of them.

        Raises:
            StorageError: processes share these lanes: seams between their rows are known to the store that has them.
        """
        if self.locks is not None:
            raise StorageError("rows that processes share are counted by the store that they lie in, when it has them")
        lane = self.hold()
        slots = self.store.next_slots(lane, steps)
        self.store.advance(lane, steps, begins)
        return slots

    def mark_seam(self) -> None:
        """Puts a seam before the next step that this process writes: a trajectory begins there."""
        with self.mutex:
            if self.held is not None or self._released is not None:
                self.store.mark_seam(0)

    # ---- removing ----
    def remove(self, slots: Tensor, generation: Tensor) -> int:
        """Removes rows, which are never drawn again until others take their places; returns how many.

        Those in these slots (int64 [n]) that still have these generations, by the counters (`counted`). The caller
        holds the mutex. This process need not be a writer, and does not become one, but in a store with one writer.

        Raises:
            StorageError: the store was made by an engram that removed no rows.
            NoFreeLaneError: the store has one writer, another process.
            StorageInUseError: another process has been appending for ten seconds; the message names it. In other lanes
                rows may have been removed.
        """
        store = self.store
        if not store.has_flow:
            raise StorageError(
                "this store was made by an engram that removed no rows: `engram convert` copies its rows to a new one, "
                "where they can be removed. Nothing was removed"
            )
        which = slots // (store.lane_capacity * self.envs)
        removed = 0
        for lane in sorted(set(which.tolist())):
            here = which == lane
            with self._removing(lane):
                removed += store.remove(lane, slots[here], generation[here])
        return removed

    @contextlib.contextmanager
    def _removing(self, lane: int) -> Iterator[None]:
        """A block in which nobody else appends to a lane or removes rows of it; errors as `remove`."""
        self.use()
        locks, store = self.locks, self.store
        if locks is None or not (self.takes_turns or self.moves_on):
            if locks is not None:
                self.hold()  # one writer for ever: there are no turns
            yield
            return
        with self._beside_writers(locks):
            if not self._noted_removals and self._on_take is not None:
                self._on_take(None)
            self._noted_removals = True
            self._take_guest_number(locks)
            wait_for_turn(locks, partial(store.begin_removing, lane), partial(self._begin_removing_after, lane))
            try:
                yield
            finally:
                store.end_removing(lane)

    def _take_guest_number(self, locks: LaneLocks) -> None:
        """Gives this process a number for turns that it has without being a writer."""
        if not self.store.guest:
            self.store.guest = _new_number(self.store, locks)

    @contextlib.contextmanager
    def _beside_writers(self, locks: LaneLocks) -> Iterator[None]:
        """A block in which no process holds the lanes for itself; a NoFreeLaneError where one does."""
        if self.held is not None:  # as a writer beside others
            yield
            return
        if not locks.take_lanes(self.store.lanes, shared=True):
            raise NoFreeLaneError(
                "this store has one writer, who made it with lanes=1 and has it open: only that process removes rows; "
                "nothing was removed"
            )
        try:
            yield
        finally:
            locks.free_lanes(self.store.lanes)

    def _begin_removing_after(self, lane: int, dead: int) -> bool:
        """Takes the turn of a writer that died with it; False where another process was faster."""
        if self.store.begin_removing(lane, dead):
            return False
        if self._on_take is not None and self.takes_turns:
            try:
                self._on_take(lane)
            except BaseException:
                self.store.undo_takeover(lane, dead)
                raise
        return True

    # ---- the store as a queue ----
    def begin_taking(self) -> None:
        """Waits until no other process takes rows out of the queue; `queue.end_turn` ends that.

        The caller keeps the other threads of this process out.

        Raises:
            StorageInUseError: another process has been taking a batch for ten seconds; the message names it.
        """
        locks, queue = self.locks, self.queue
        assert queue is not None
        if locks is None:
            return
        self._take_guest_number(locks)
        wait_for_turn(locks, queue.begin_turn, lambda dead: not queue.begin_turn(dead), "taking a batch from")

    def check_room(self, steps: int) -> None:
        """A QueueFullError where the lane of a queue has no room for so many steps: before rows that are kept elsewhere
        are put over others."""
        if self.queue is not None:
            self.queue.check_room(0, steps)

    def release(self) -> None:
        """Makes this process no writer any more. Where none other writes meanwhile, its trajectories go on."""
        notice_fork()
        if self._copy_of and self.store.rows():
            self.use()
        with self.mutex:
            if self.held is not None:
                self._released = end_of(self.store, 0)
                if self.locks is not None:
                    self.locks.free_lanes(self.store.lanes)
            self.held = None

    @contextlib.contextmanager
    def exclusive(self, operation: str) -> Iterator[None]:
        """A block that no other user of the store runs beside: in-place writes, `empty`, `loads`.

        Raises:
            StorageInUseError: another process has the store open; `operation` is named in the message.
        """
        self.use()
        with self.mutex:
            # Such blocks may be nested: only the outermost takes and drops the lock.
            if self.locks is None or self._exclusive_depth:
                yield
                return
            with self.locks.exclusive(operation):
                self._exclusive_depth += 1
                try:
                    if self._on_exclusive is not None:
                        self._on_exclusive()
                    yield
                finally:
                    self._exclusive_depth -= 1

    def close(self) -> None:
        """Makes this process no writer any more, and releases the locks."""
        with self.mutex:
            self.held = None
            if self.locks is not None:
                self.locks.close()

    def validated(self, read: Callable[[], _T], errors_only: bool = False) -> _T:
        """What `read` returns, of a moment in which no other process changed stored rows in place.

        With `errors_only` a result may be of several moments; only an error is not believed unless it is of one. Who
        writes here keeps such changes out by the locks that it holds.
        """
        return read()

    # ---- drawing ----
    @property
    def all_removed(self) -> bool:
        """Whether rows are stored, and all of them were removed."""
        removed = self.store.removed_rows
        return removed > 0 and removed >= self.store.rows()

    def any_rows(self, counter: str = "claimed") -> bool:
        """Whether rows have been written since the store was empty, the one that is being written now included.

        With `counter="published"` that one is left out.
        """
        return any(lane[counter] > lane["base"] for lane in self.counters())

    def uniform(self, seed: Tensor, n: int) -> Tensor | None:
        """n slots of stored rows drawn uniformly from a seed (int64 [1]); None if nothing is stored."""
        self.use()
        slots = self.store.uniform(seed, n)
        if slots is None and not self.all_removed:
            slots = self.retry_draw(lambda: self.store.uniform(seed, n))
        return slots

    def retry_draw(self, draw: Callable[[], Any]) -> Any:
        """Calls `draw` until it returns something other than None; None if nothing is stored.

        A lane of few rows shows none for the moment in which its writer replaces them all, and before its first row;
        the process that was about to write that one may have been stopped, so it is not waited for as long.
        """
        for k in range(_MAX_DRAWS):
            if not self.any_rows("published" if k >= _DRAWS_BEFORE_FIRST_ROW else "claimed"):
                with self.mutex:  # another thread may be replacing all rows: after it
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
        """The sequence of the first of n rows that are about to be written; they are given, whatever happens here.

        Raises:
            TypeError: the store is a queue, in which rows have their order.
        """
        if self.queue is not None and self.queue.is_one:
            raise TypeError(
                "this storage is a queue, whose rows are handed out in the order in which they come: a writer that "
                "puts rows over others out of turn cannot write to it. Use a RoundRobinWriter, or `rb.end_queue()`"
            )
        return self.store.reserve_sequences(n)

    def note_sequences(self, slots: Tensor) -> None:
        """Stored rows carry these sequences: none is given again, where a power cut has lost the count of them."""
        if self.own_sequences is not None and len(slots):
            given = int(self.generations(slots).max()) + 1 - _native.FIRST_REPLACED
            if given > self.store.replaced:
                self.store.replaced = given

    def counted(self, slots: Tensor, generation: Tensor) -> Tensor:
        """Generations (int64 [n]) by the counters only, as native code compares them; -1: another row by now."""
        if self.own_sequences is None:
            return generation
        current = self.generations(slots) == generation
        return torch.where(current, self.store.generations(slots), -1)

    def use(self) -> None:
        """Before rows are read or written: opens the store at its first use in a forked child.

        Warns there where the rows are a copy that the parent does not see.
        """
        notice_fork()
        if not self.unused_since_fork:
            return
        with self.mutex:
            if not self.unused_since_fork:
                return  # another thread has
            if self.locks is not None:
                self.locks.join()
            else:
                self.held = self._held_by_parent
            parent, self._copy_of = self._copy_of, 0
            self.unused_since_fork = False
            self.on_join()
        warn_of_copy(parent)

    def after_fork(self) -> None:
        """In a child: new mutexes, and no lane; rows in private memory are the child's own copy."""
        self.mutex = threading.RLock()
        self._exclusive_depth = 0
        self._released = None  # the parent may go on where it stopped; this process did not write there
        self._noted_removals = False
        self.store.end_save()  # the saving thread runs in the parent only
        self.store.after_fork()
        self._session = os.urandom(8).hex()
        if not self.unused_since_fork:
            self._held_by_parent = self.held if self.locks is None else None
        self.held = None
        self.unused_since_fork = True
        if self.copied_by_fork:
            self._copy_of = os.getppid()


class Turns:
    """The turns of the processes that write to a store's only lane: each has it for one append.

    Args:
        on_take: called with the lane's number when this process joins them, and when it takes a dead writer's turn.
    """

    def __init__(self, store: _native.Store, locks: LaneLocks, on_take: Callable[[int | None], None] | None) -> None:
        self._store, self._locks, self._on_take = store, locks, on_take

    def join(self, lane: int) -> None:
        """Makes this process one of those that take turns."""
        _take_number(self._store, self._locks)
        if self._on_take is None:
            return
        try:
            # In a turn, so that the term rises at a change of writer and not among the rows of one.
            self.begin(lane)
            self._on_take(lane)
        finally:
            self._store.end_turn(lane)

    def begin(self, lane: int) -> None:
        """Waits for the turn of this process. Errors as `Lanes.turn`."""
        wait_for_turn(self._locks, partial(self._store.begin_turn, lane), partial(self._take_over, lane))

    def _take_over(self, lane: int, dead: int) -> bool:
        """Takes the turn of a writer that died with it; False where another process was faster."""
        if self._store.begin_turn(lane, dead):
            return False
        if self._on_take is not None:
            try:
                self._on_take(lane)
            except BaseException:
                self._store.undo_takeover(lane, dead)
                raise
        return True

    def warn_of_second_writer(self, lane: int) -> None:
        """Warns where another process that lives has written to the lane; not of a queue, which has no slices."""
        if self._store.has_flow and _native.StoreQueue(self._store).is_one:
            return
        last = self._store.last_writer(lane)
        if not last or last == self._store.writer or not self._locks.is_writer_alive(last >> _native.PID_BITS):
            return
        warn_user(
            f"this process and process {last & ((1 << _native.PID_BITS) - 1)} write to one store and take turns: "
            "rows of both lie behind each other, a whole extend (or add) at a time, and no slice or trajectory goes on "
            "from one extend to the next where another process wrote in between. For slices longer than one extend "
            "make the storage with lanes=n, for about n writers side by side",
            RuntimeWarning,
        )


class Stints:
    """A process among the writers that move from lane to lane: each has a number, and waits in native code.

    Args:
        on_take: called with None when this process joins them.
    """

    def __init__(self, store: _native.Store, locks: LaneLocks, on_take: Callable[[int | None], None] | None) -> None:
        self._store, self._locks, self._on_take = store, locks, on_take

    def join(self) -> None:
        """Makes this process one of them.

        Raises:
            StorageInUseError: a process holds a lane by itself.
        """
        lanes = self._store.lanes
        if not self._locks.take_lanes(lanes, shared=True):
            raise StorageInUseError(
                "a process holds a lane of this store for itself: of an engram from before writers moved from lane to "
                "lane. End it first; nothing was written"
            )
        try:
            _take_number(self._store, self._locks)
            self._store.use_writer_locks(*self._locks.writer_bytes(), _TURN_TIMEOUT)
            if self._on_take is not None:
                self._on_take(None)
        except BaseException:
            self._locks.free_lanes(lanes)
            raise


def wait_for_turn(
    locks: LaneLocks, take: Callable[[], int], take_over: Callable[[int], bool], what: str = "writing to"
) -> None:
    """Waits until this process has a turn; a StorageInUseError where another has had it for ten seconds.

    Args:
        take: takes it: 0, or the writer that has it.
        take_over: takes that of a writer that died; False where another process was faster.
        what: the other process does with the store.
    """
    deadline = time.monotonic() + _TURN_TIMEOUT
    looks = 0
    while holder := take():
        looks += 1
        if looks < _TURN_LOOKS:
            time.sleep(0)
            continue
        if not locks.is_writer_alive(holder >> _native.PID_BITS):
            if take_over(holder):
                return
            continue
        if time.monotonic() > deadline:
            pid = holder & ((1 << _native.PID_BITS) - 1)
            lanes = "; or make the store with lanes=n, for about n writers side by side, which then wait for nobody"
            raise StorageInUseError(
                f"process {pid} has been {what} this store for {_TURN_TIMEOUT:g} seconds, and processes take turns in "
                f"that: it was stopped, or waits for something. Let it go on or end it{lanes if 'writ' in what else ''}"
            )
        time.sleep(min(_LONGEST_TURN_PAUSE, _TURN_PAUSE * (looks - _TURN_LOOKS + 1)))


def _take_number(store: _native.Store, locks: LaneLocks) -> None:
    """Gives this process a number among the writers of a store."""
    if not store.writer:
        store.writer = _new_number(store, locks)


def _new_number(store: _native.Store, locks: LaneLocks) -> int:
    """A number among the writers of a store, whose byte is locked by this process."""
    while True:
        number = store.new_writer(0, os.getpid())
        if locks.take_writer(number >> _native.PID_BITS):  # else the header that counts them is damaged
            return number


class PendingBorders:
    """Borders between trajectories that a device may still be computing: nobody waits for it before seams are read."""

    def __init__(self, store: _native.Store) -> None:
        self._store = store
        self._borders: list[tuple[int, Tensor]] = []  # sequence, whether a trajectory begins there
        self._evidence: tuple[int, Tensor] | None = None
        self._incarnation = store.incarnation  # of the rows that both are about

    def add(self, begins: Tensor, mutex: Any) -> None:
        """Puts a seam before the next step if this flag, which a device may still be computing, is set."""
        self._drop_outdated()
        self._borders.append((self._store.lane(0)["published"], begins))
        if len(self._borders) >= _MAX_PENDING_BORDERS:
            self.settle(mutex)

    def set_evidence(self, looked: int, evidence: Tensor) -> None:
        """Border evidence of the steps up to a sequence (`ColumnBorder`), which a device may still be computing."""
        self._drop_outdated()
        self._evidence = looked, evidence

    def _drop_outdated(self) -> None:
        """Forgets pending results about rows that have all been replaced since."""
        if self._incarnation != self._store.incarnation:
            self._incarnation, self._borders = self._store.incarnation, []
            self._evidence = None

    def settle(self, mutex: Any) -> None:
        """Waits for the results given to `add` and `set_evidence`; called before seams are read."""
        if self._evidence is not None:
            with mutex:
                self._drop_outdated()
                pending, self._evidence = self._evidence, None
                if pending is not None:
                    exists, *agreed = pending[1].tolist()
                    bits = sum(1 << k for k, agrees in enumerate(agreed) if agrees)
                    self._store.set_border_evidence(0, pending[0], bits if exists else None)
        if not self._borders:
            return
        with mutex:
            self._drop_outdated()
            borders, self._borders = self._borders, []
            if not borders:
                return
            oldest = self._store.lane(0)["first"]
            flags = torch.stack([begins for _, begins in borders]).tolist()  # one wait for all
            for (sequence, _), begins in zip(borders, flags, strict=True):
                if begins and sequence > oldest:
                    self._store.add_seam(0, sequence)


def end_of(store: _native.Store, lane: int) -> tuple[int, int]:
    """What is another value after a write to a lane: the incarnation of its rows, and where they end."""
    return store.incarnation, store.lane(lane)["published"]


def check_range(what: str, values: int | Tensor, end: int) -> None:
    """An IndexError where a number is not one of 0 to `end` - 1."""
    if isinstance(values, Tensor):
        if values.dtype != torch.int64 or values.ndim != 1:
            raise TypeError(f"{what}s are int64 [n], found {values.dtype} {list(values.shape)}")
        outside = values[(values < 0) | (values >= end)]
        wrong = int(outside[0]) if len(outside) else None
    else:
        wrong = None if 0 <= values < end else values
    if wrong is not None:
        raise IndexError(f"{what} {wrong} is not one of 0 to {end - 1}")


_copy_warned = False


def _nothing() -> None:
    """There is nothing to do."""


def warn_of_copy(parent: int) -> None:
    """Warns, once a process, that its rows are a copy of those of process `parent`; 0: they are not."""
    global _copy_warned
    # Without the parent process, as in a daemon, there is nobody to share rows with.
    if _copy_warned or not parent or parent != os.getppid():
        return
    _copy_warned = True
    warn_user(
        f"this process was forked from process {parent} and uses a copy of its replay buffer: it sees no row that is "
        "written there from now on, and what it writes is not seen there. To share the rows make the buffer with "
        "shared=True (LazyTensorStorage, LazyMemmapStorage) and write its first batch before the fork; where a copy "
        "is what you want, ignore this",
        RuntimeWarning,
    )


def _warn_again() -> None:
    global _copy_warned
    _copy_warned = False


run_after_fork(_warn_again)
_live: weakref.WeakSet[Lanes] = fork_registry(lambda lanes: lanes.after_fork())
