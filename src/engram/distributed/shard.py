"""One shard of a replay buffer over several machines: a store to which any number of producers write, and its draws."""

from __future__ import annotations

import copy
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from engram import __version__
from engram.data import (
    Compact,
    DrawTotals,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    Sampler,
)
from engram.distributed.blocks import Block, check, goes_by_leaf, pack
from engram.distributed.folder_lock import FolderLock
from engram.distributed.priority_file import FILE_NAME as _PRIORITIES
from engram.distributed.priority_file import PriorityFile
from engram.distributed.producers import LANE_KEPT, LentStream, Place, Producers, Tenancy, store_identity
from engram.distributed.resharding import LoadedPiece, Run, SavedPiece, check_piece
from engram.distributed.shard_sampling import draw_rows, lane_ranges, read_by_sequence
from engram.errors import IncarnationError, ShardVersionError, StorageError
from engram.kernel.disk import Checkpoint
from engram.kernel.replay import Member, SaveHandle
from engram.kernel.rows import Lanes, RowLayout, StreamEntry
from engram.kernel.tools import user_path

_MOST_DRAWS = 100
_KEPT_OUTCOMES = 16  # of saves that have ended
_LOADER = "rows that were loaded"  # the name of their stream
_QUEUE_BYTES = 16 << 20  # of rows that all producers together may have sent and that are not in yet

P = ParamSpec("P")
T = TypeVar("T")


class ShardTotals(NamedTuple):
    """A shard's contents in numbers, which are part of every answer.

    Attributes:
        incarnation: of the shard; every call names it.
        rows: stored steps.
        writes: steps ever written.
        draws: what its sampler draws from.
    """

    incarnation: int
    rows: int
    writes: int
    draws: DrawTotals


class ShardFacts(NamedTuple):
    """The facts about a shard that a client needs before it calls.

    Attributes:
        layout: of its rows, as JSON; None before `adopt`.
        capacity: steps that fit.
        folder: of the store, which processes of that machine can open; None: the store has no folder.
        producers: names of those that have a tenancy.
        replaced: how often all rows were emptied, or replaced by a load.
    """

    layout: bytes | None
    capacity: int
    folder: str | None
    producers: tuple[str, ...]
    replaced: int
    totals: ShardTotals


class Acknowledgement(NamedTuple):
    """The answer to `extend`.

    Attributes:
        rows: how many rows of the tenancy are in, however they came in.
        in_force: False: the tenancy ended at that count; the producer joins again and continues from there.
        credit: how many rows it may have sent without having their acknowledgement, before it waits.
        place: where its next rows go; None: that is known when they are in.
        slots: of the rows of the call, int64 [n], where they were asked for; -1: not known any more.
        wait: seconds after which what is not in is to be sent again: its room is kept for other producers. None: all
            is in.
    """

    rows: int
    in_force: bool
    credit: int
    place: Place | None
    slots: Tensor | None
    totals: ShardTotals
    wait: float | None = None


class TakenRows(NamedTuple):
    """Rows that were asked for by sequence; `present` (bool [n]): those that are still there, and whole."""

    block: Block
    present: Tensor
    totals: ShardTotals


class DrawnRows(NamedTuple):
    """Rows that the shard drew.

    Attributes:
        slots: int64 [n]; `generation`: the sequence of each row.
        ratio: the leaf `(p + eps) ** alpha` of the lowest row over that of each drawn one, float64 [n]; None: draws are
            not by priority.
        slice_id: which slice each row is of, int64 [n]; None: no slices.
        last: where slices end, bool [n, 1]; None: no slices, or they are not marked.
        mask: False where a slice was padded, bool [n]; None: none was.
        totals: those of the draw.
    """

    block: Block
    slots: Tensor
    generation: Tensor
    ratio: Tensor | None
    slice_id: Tensor | None
    last: Tensor | None
    mask: Tensor | None
    totals: ShardTotals


def _lanes_of(storage: LazyTensorStorage | LazyMemmapStorage) -> Lanes:
    if not storage.initialized:
        raise RuntimeError("the shard has no layout yet: adopt one first")
    return storage.lanes


def _call(
    method: Callable[Concatenate[ReplayShard, int, P], T],
) -> Callable[Concatenate[ReplayShard, int, P], T]:
    """A method that names the incarnation which it is meant for: another one changes nothing, and is refused."""

    @functools.wraps(method)
    def checked(self: ReplayShard, incarnation: int, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            if incarnation != self.incarnation:
                raise IncarnationError(
                    f"the call is for incarnation {incarnation} of the shard, this is {self.incarnation}: it was "
                    "restarted, emptied or loaded, or another process has its place; ask for the present one. Nothing "
                    "was changed"
                )
            return method(self, incarnation, *args, **kwargs)

    return cast("Callable[Concatenate[ReplayShard, int, P], T]", checked)


class ReplayShard:
    """A part of a replay buffer that lies on several machines: one store, one ring of rows for any number of producers.

    Producers move from lane to lane, so that one alone fills the shard, and no trajectory mixes with another. The store
    counts how many rows of each are in, whichever process died: `extend` names the number of its first row, and rows
    that are in already are left out. What a producer sends until it leaves is a *tenancy*. Its number is never given
    again, and a new one is begun after `empty` and `loads`; a call for an older one is answered with the count at which
    that ended. A producer that sends nothing keeps nothing but its count.

    With a `scratch_dir` a shard that is made anew, after any kind of death, continues where the rows ended, without
    seams. Priorities come back with their rows; rows that were given none have the highest that any row ever had, as
    new ones do. After a power cut that took rows, all have the priority of new ones.

    Every call names the shard's incarnation, which is new each time it is made, emptied or loaded. Calls of several
    threads take turns.

    Args:
        capacity: steps that fit, rounded up to whole lanes.
        lanes: about how many producers write side by side; more are welcome.
        sampler: one whose draws can be divided among shards (`Sampler.totals`), for this shard alone: `beta` and
            `dtype` of one with priorities are set, as the client computes weights. None: uniform draws.
        compact: which observations are stored once; None: none.
        scratch_dir: a folder for the rows, on this machine. None: shared memory, gone with the process.
        idle: seconds without a row after which a producer has no part any more in the room for rows on their way.
        timeout: seconds to wait for a predecessor that is just ending.
        generator: of the draws; None: torch's global one.

    Raises:
        TypeError: a sampler whose draws cannot be divided.
        ValueError: one with `num_slices` instead of `slice_len`, or with `max_priority_within_buffer`.
        NoFreeLaneError: another shard still has the folder after `timeout`.
        StorageError: the folder holds another store, or a damaged one.

    Example:
        >>> from engram.distributed import pack
        >>> batch = TensorDict({"x": torch.arange(3.0)}, [3])
        >>> layout = RowLayout.of(batch, 1)
        >>> shard = ReplayShard(100, lanes=2)
        >>> shard.adopt(shard.incarnation, layout.to_bytes())
        >>> tenancy = shard.join(shard.incarnation, "collector 0")
        >>> shard.extend(shard.incarnation, "collector 0", tenancy.number, 0, pack(layout, batch)).rows
        3
        >>> shard.extend(shard.incarnation, "collector 0", tenancy.number, 0, pack(layout, batch)).rows  # sent again
        3
    """

    def __init__(
        self,
        capacity: int,
        *,
        lanes: int = 8,
        sampler: Sampler | None = None,
        compact: Compact | None = None,
        scratch_dir: str | os.PathLike[str] | None = None,
        idle: float = 60.0,
        timeout: float = 30.0,
        generator: torch.Generator | None = None,
    ) -> None:
        self._lock = threading.RLock()
        self._folder = None if scratch_dir is None else user_path(scratch_dir)
        self._timeout = timeout
        room, several = max(2, capacity), max(2, lanes)  # so that producers move from lane to lane
        if self._folder is None:
            self._storage: LazyTensorStorage | LazyMemmapStorage = LazyTensorStorage(
                room, shared=True, lanes=several, compact=compact
            )
        else:
            self._storage = LazyMemmapStorage(
                room, scratch_dir=self._folder, existsok=True, lanes=several, compact=compact
            )
        sampler = RandomSampler() if sampler is None else sampler
        sampler.totals(self._storage)  # one that cannot tell them cannot be a shard's
        self._prioritized = isinstance(sampler, PrioritizedSampler)
        if isinstance(sampler, PrioritizedSampler):
            if sampler.max_priority_within_buffer:
                raise ValueError(
                    "max_priority_within_buffer is of one storage: over several shards new rows get the highest "
                    "priority that any row ever had"
                )
            sampler.beta, sampler.dtype = 1.0, torch.float64  # so that weights are ratios of leaves
        self._buffer = ReplayBuffer(storage=self._storage, sampler=sampler, generator=generator)
        self._rows = Member(self._storage, sampler)
        self._sampler = sampler
        self._folder_lock: FolderLock | None = None
        self._priorities: PriorityFile | None = None
        self._producers = Producers(self._storage, self._folder, idle)
        self._saves = _Saves()
        self._refused_versions: set[str] = set()  # of engram, of clients
        self._giver: threading.Timer | None = None  # of lanes that were kept for producers that send nothing
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    # ---- opening ----
    def _open(self) -> None:
        """Takes the folder, then reads the record: a predecessor may have changed it until it released the folder."""
        if self._folder is not None:  # one shard at a time, although other processes may write to its store
            self._folder.mkdir(parents=True, exist_ok=True)
            self._folder_lock = FolderLock(self._folder, self._timeout)
        self._producers.open()
        if self._storage.initialized:
            self._open_priorities()

    # ---- priorities beside the store ----
    def _open_priorities(self) -> None:
        """Gives rows the priorities that they had."""
        if self._folder is None or not self._prioritized:
            return
        self._priorities = PriorityFile(self._folder / _PRIORITIES, self._lanes.capacity)
        if self._priorities.store != _store_name(self._storage):
            self._priorities.restart(_store_name(self._storage), self._new_priority)
            return
        highest, sequences = (
            self._priorities.highest,
            self._lanes.generations(torch.arange(self._lanes.capacity, device="cpu")),
        )
        saved = self._priorities.of(sequences)
        stored = (sequences >= 0).nonzero().flatten()
        self._sampler.raise_new_priority(highest, storage=self._storage)
        if len(stored):
            priorities = saved[stored]
            priorities[priorities.isnan()] = highest
            self._sampler.update_priority(stored, priorities, generation=sequences[stored], storage=self._storage)

    def _rewrite_priorities(self) -> None:
        """Writes the priorities of rows that have replaced all others."""
        if self._priorities is None:
            return self._open_priorities() if self._storage.initialized else None
        self._priorities.restart(_store_name(self._storage), self._new_priority)
        sequences = self._lanes.generations(torch.arange(self._lanes.capacity, device="cpu"))
        stored = (sequences >= 0).nonzero().flatten()
        stored = stored[~self._storage.is_removed(stored)]
        if len(stored):
            assert isinstance(self._sampler, PrioritizedSampler)
            priorities = self._sampler.priorities(stored, storage=self._storage)
            self._priorities.note(stored, sequences[stored], priorities, self._new_priority)
        return None

    @property
    def _new_priority(self) -> float:
        highest = self._sampler.totals(self._storage, newest=False).new_priority
        return 1.0 if highest is None else highest

    # ---- facts ----
    @property
    def incarnation(self) -> int:
        """The number that every call names; a new one is higher."""
        return self._producers.record.incarnation

    @property
    def layout(self) -> bytes | None:
        """The layout of rows as JSON; None before `adopt`."""
        layout = self._storage.layout
        return None if layout is None else layout.to_bytes()

    @property
    def capacity(self) -> int:
        """Steps that fit."""
        assert self._storage.max_size is not None
        return self._storage.max_size

    def __len__(self) -> int:
        return len(self._storage)

    @property
    def write_count(self) -> int:
        """Steps ever written."""
        return self._storage.write_count

    @property
    def _lanes(self) -> Lanes:
        return _lanes_of(self._storage)

    @property
    def _layout(self) -> RowLayout:
        layout = self._storage.layout
        if layout is None:
            raise RuntimeError("the shard has no layout yet: adopt one first")
        return layout

    def facts(self, client_version: str = __version__) -> ShardFacts:
        """The facts that a client needs before it calls; the only call that names no incarnation.

        Raises:
            ShardVersionError: the client runs another version of engram; the log of the shard says so, too.
        """
        if client_version != __version__:
            error = ShardVersionError(__version__, client_version)
            if client_version not in self._refused_versions:
                self._refused_versions.add(client_version)
                logging.getLogger("engram").error("a client was refused: %s", error)
            raise error
        with self._lock:
            folder = None if self._folder is None else str(self._folder.absolute())
            producers, totals = self._producers, self._totals()
            return ShardFacts(self.layout, self.capacity, folder, producers.names, producers.record.replaced, totals)

    def _totals(self, newest: bool = True) -> ShardTotals:
        lanes = self._storage.lanes
        draws = self._sampler.totals(self._storage, newest=newest)
        return ShardTotals(self.incarnation, len(lanes), lanes.write_count, draws)

    @_call
    def totals(self, incarnation: int) -> ShardTotals:
        """The present contents, in numbers."""
        return self._totals()

    # ---- producers ----
    @_call
    def adopt(self, incarnation: int, layout: bytes) -> None:
        """Makes the store for rows of this layout (`RowLayout.to_bytes`); the same again is not an error.

        Raises:
            ValueError: it has another layout; every difference is listed.
            KeyError: rows of this layout lack an entry that the sampler draws by. Nothing was changed.
        """
        made, given = self._storage.initialized, RowLayout.from_bytes(layout)
        if not made:
            _check_sampler(self._sampler, given)
        self._storage.adopt(given)
        if not made:
            self._producers.open_table()
            self._open_priorities()

    @_call
    def join(self, incarnation: int, producer: str) -> Tenancy:
        """The producer's tenancy: the one that it has, or a new one.

        Raises:
            NoFreeLaneError: the producer is a living process of this machine that writes by itself.
            ValueError: its name is too long.
        """
        return self._producers.join(producer)

    @_call
    def admit(self, incarnation: int, producer: str, most: int) -> int | None:
        """As `join`, but where the shard has more than so many producers it says how many, and nothing is changed.

        None: the producer has joined.
        """
        names = self._producers.names
        if len(names) > most and producer not in names:
            return len(names)
        self._producers.join(producer)
        return None

    @_call
    def lend(self, incarnation: int, producer: str, tenancy: int) -> LentStream:
        """Lets a process of this machine write the rows of its tenancy itself.

        The process opens the store, and goes on with the stream (`AdoptedStream`). Rows are counted as ever.
        When it has closed the store, or has died, calls by this producer's name continue as before.

        Raises:
            ValueError: the tenancy has ended, or never began; or the shard has no `scratch_dir`.
        """
        return self._producers.lend(producer, tenancy)

    @_call
    def leave(self, incarnation: int, producer: str, tenancy: int) -> int:
        """Ends a tenancy; returns the count at which it ended.

        Raises:
            ValueError: the producer has never had this tenancy.
            NoFreeLaneError: it is lent, and its process lives.
        """
        return self._producers.leave(producer, tenancy)

    @_call
    def end_producer(self, incarnation: int, producer: str) -> int:
        """Ends the tenancy of a producer that has died, if it has one; returns how many rows of its last one are in.

        Raises:
            NoFreeLaneError: it is lent, and its process lives.
        """
        return self._producers.end_producer(producer)

    @_call
    def extend(
        self,
        incarnation: int,
        producer: str,
        tenancy: int,
        first: int,
        block: Block,
        new_priority: float | None = None,
        priority: Tensor | None = None,
        asks_slots: bool = False,
    ) -> Acknowledgement:
        """Appends rows of a producer that are not in yet.

        Nothing is appended where the rows need lanes that are kept for other producers, which were told of late that
        their next rows go there (`Acknowledgement.wait`); nor are rows that come behind such ones.

        Args:
            first: the number of the block's first row among those of the tenancy, from 0.
            new_priority: the highest priority of all shards, which new rows get.
            priority: of the block's rows, float64 [n]; NaN: that of new rows. Rows that are in already get theirs if
                they have never had one: a shard that was killed in between gives it when the rows are sent again.
            asks_slots: the answer is to say where the rows lie.

        Raises:
            ValueError: the block is not of this layout; rows before `first` never came; the producer has never had
                this tenancy; or priorities are wrong, or the sampler has none. Nothing was written.
            NoFreeLaneError: the tenancy is lent, and its process lives. Nothing was written.
            StorageInUseError: processes were stopped while they wrote in each of the lanes.
            StorageError: the folder was removed. Nothing was written.
        """
        check(self._layout, block)
        if priority is not None:
            _check_priorities(self._sampler, priority, len(block))
        producers, ended = self._producers, self._producers.ended_before(producer, tenancy)
        if ended is not None:
            return Acknowledgement(ended, False, 0, None, None, self._totals())
        entry = producers.entry_of(producer, tenancy)
        if entry.has_ended:
            return Acknowledgement(producers.table.rows(entry), False, 0, None, None, self._totals())
        producers.table.adopt(entry)
        if self._folder_lock is not None and self._folder_lock.is_removed:
            raise StorageError(f"{self._folder} was removed; what is written to it now would be lost")
        count = producers.table.rows(entry)
        follows = first > count
        wait = producers.wait_of(entry) if follows else producers.wait_for(entry, first + len(block) - count)
        if wait is None and (follows or first < 0):
            raise ValueError(
                f"first={first}, but {count} rows of tenancy {tenancy} are in: those between never came. Nothing was "
                "written"
            )
        if new_priority is not None:
            self._sampler.raise_new_priority(new_priority, storage=self._storage)
        if wait is not None:
            return Acknowledgement(count, True, self._credit, None, None, self._totals(), wait)
        new = block.rest(count - first)
        slots = torch.empty(0, dtype=torch.int64, device="cpu")
        if len(new):
            slots = producers.append(entry, lambda: self._append(new))
        place = producers.place(entry)
        if place is not None:
            self._give_back_later()
        if priority is not None or asks_slots:
            slots = torch.cat([self._slots_of(entry, first, len(block) - len(new)), slots])
        if priority is not None:
            self._give_priorities(slots, len(block) - len(new), priority)
        rows = producers.table.rows(entry)
        return Acknowledgement(rows, True, self._credit, place, slots if asks_slots else None, self._totals())

    def _append(self, block: Block) -> Tensor:
        if goes_by_leaf(self._layout):
            return self._storage.append_leaves(list(block.parts))
        return self._storage.append_packed(block.parts[0])

    def _give_back_later(self) -> None:
        """Looks after a while whether lanes are kept for producers that send nothing any more."""
        if self._giver is None:
            self._giver = threading.Timer(LANE_KEPT, self._give_back)
            self._giver.daemon = True
            self._giver.start()

    def _give_back(self) -> None:
        with self._lock:
            self._giver = None
            if self._producers.give_back(idle_only=True):
                self._give_back_later()

    def _slots_of(self, entry: StreamEntry, first: int, n: int) -> Tensor:
        """Where rows of a producer that were in before lie, int64 [n]; -1: not known any more."""
        slots = torch.full((n,), -1, device="cpu")
        for row, lane, sequence, rows in self._producers.table.places(entry, first, n) if n else ():
            slots[row - first : row - first + rows] = self._lanes.slots_of(
                lane, torch.arange(sequence, sequence + rows, device="cpu")
            )
        return slots

    def _give_priorities(self, slots: Tensor, before: int, priority: Tensor) -> None:
        """Gives rows the priorities that came with them, if they have had none; `before`: how many were in before."""
        known = (slots >= 0) & ~priority.isnan()
        sequences = torch.full_like(slots, -1)
        sequences[known] = self._lanes.generations(slots[known])
        known &= sequences >= 0
        # A shard without a file of them is gone with its rows: only an answer can have been lost.
        if self._priorities is None:
            known[:before] = False
        else:
            known[known.clone()] = ~self._priorities.has(slots[known], sequences[known])
        if bool(known.any()):
            self._set_priorities(slots[known], priority[known], sequences[known])

    @property
    def _credit(self) -> int:
        """How many rows a producer may have on their way here, so that few wait, whichever side is faster."""
        return max(1, _QUEUE_BYTES // (self._layout.payload_bytes * max(1, self._producers.active)))

    # ---- draws ----
    @_call
    def ranges(self, incarnation: int) -> Tensor:
        """The oldest sequence of each lane, and the one after its newest: int64 [lanes, 2]; none before a layout."""
        return lane_ranges(self._storage.lanes)[: None if self._storage.initialized else 0]

    @_call
    def take(self, incarnation: int, lane: Tensor, sequence: Tensor) -> TakenRows:
        """Rows by lane and sequence (int64 [n] each), as a client has drawn them from `ranges`.

        Raises:
            IndexError: a lane or a sequence that cannot exist.
        """
        rows = read_by_sequence(self._storage, lane, sequence)
        return TakenRows(rows.block, rows.present, self._totals())

    @_call
    def draw(self, incarnation: int, n: int, seed: int) -> DrawnRows:
        """n rows drawn uniformly, less those that were overwritten meanwhile; where there are none, no block."""
        if not self._storage.initialized:
            return _no_rows(self._totals())
        return DrawnRows(*draw_rows(self._storage, n, seed), None, None, None, None, self._totals())

    @_call
    def sample(self, incarnation: int, n: int) -> DrawnRows:
        """n rows that the shard's sampler draws; none where it has nothing to draw from any more.

        Rows that were overwritten while they were read are left out; of slices all are drawn again.

        Raises:
            RuntimeError: writers on this machine overwrite rows faster than they are read.
        """
        if not self._storage.initialized:
            return _no_rows(self._totals())
        by_leaf = goes_by_leaf(self._layout)
        for _ in range(_MOST_DRAWS):
            with self._sampler.lock:
                try:
                    draw = self._rows.draw(n)
                except RuntimeError:
                    if self._totals().draws.share:
                        raise
                    return _no_rows(self._totals())
                totals = self._totals(newest=False)
            if len(draw.slots) > n:
                raise ValueError(f"{self._sampler!r} drew {len(draw.slots)} rows where {n} were asked for")
            removed = self._rows.removed(draw.slots)  # before the read, as in `Member`
            rows = self._storage.read_packed(draw.slots, by_leaf, sequences=True)
            assert rows.sequences is not None
            lost = sorted({*draw.lost(rows.overwritten, rows.absent), *(removed or ())})
            runs, is_padded = draw.runs, "mask" in dict(draw.marks)
            if lost and runs is not None:
                continue
            ratio = draw.info["priority_weight"] if self._prioritized else None
            drawn = DrawnRows(
                _block(rows.batch), draw.slots, rows.sequences, ratio, draw.info.get("slice_id"),
                None if runs is None else runs.last(), None if runs is None or not is_padded else runs.mask(),
                totals,
            )  # fmt: skip
            return _without(drawn, lost) if lost else drawn
        raise RuntimeError("writers overwrite the rows of this batch faster than they can be read; sample fewer")

    @_call
    def update_priority(
        self,
        incarnation: int,
        index: Tensor,
        priority: Tensor,
        generation: Tensor | None = None,
        came_with_rows: bool = False,
    ) -> ShardTotals:
        """Sets priorities of rows that are still the ones that were drawn; errors as `Sampler.update_priority`.

        Args:
            came_with_rows: they are of rows that a process of this machine has just written, with their generations:
                rows that have been given one since keep it.
        """
        if came_with_rows and self._priorities is not None and generation is not None:
            has_none = ~self._priorities.has(index, generation)
            index, priority, generation = index[has_none], priority[has_none], generation[has_none]
        self._set_priorities(index, priority, generation)
        return self._totals()

    def _set_priorities(self, index: Tensor, priority: Tensor, generation: Tensor | None) -> None:
        if self._priorities is None:
            self._buffer.update_priority(index, priority, generation)
            return
        assert isinstance(self._sampler, PrioritizedSampler)
        sequences = self._lanes.generations(index) if generation is None else generation
        self._buffer.update_priority(index, priority, generation)
        given = self._sampler.checked_priorities(priority, len(index))
        stored = (self._lanes.generations(index) == sequences) & (sequences >= 0)
        self._priorities.note(index[stored], sequences[stored], given[stored], self._new_priority)

    # ---- life ----
    @_call
    def empty(self, incarnation: int) -> int:
        """Forgets every row; returns the new incarnation. Every tenancy ends.

        Raises:
            StorageInUseError: another process has the store open for writing. Nothing was changed.
        """
        if not self._storage.initialized:
            self._producers.end_all()
            return self.incarnation
        with self._lanes.exclusive("empty()"):
            self._producers.end_all()
            self._buffer.empty()
            self._producers.write()
            self._rewrite_priorities()
        return self.incarnation

    @_call
    def begin_save(self, incarnation: int, path: str | os.PathLike[str], oldest: str | None = None) -> int | None:
        """Begins a save of rows and sampler as they are now, as `ReplayBuffer.dumps` makes one; `saved` tells its end.

        Calls are answered meanwhile; this one waits for no disk, and where it cannot be written there, `saved` says so.

        Args:
            oldest: the name of a snapshot: it stays, and those after it. None: older ones go.

        Returns:
            the number of the save; None: an earlier one has not ended, and nothing was begun.
        """
        older = [] if oldest is None else Checkpoint(path).snapshots()
        kept = sum(oldest is not None and _number(name) >= _number(oldest) for name in older)
        return self._saves.begin(lambda: self._buffer.begin_dumps(path, keep_last=1 + kept))

    @_call
    def saved(self, incarnation: int, save: int) -> str | None:
        """The name of the snapshot that a save has made; None: it has not ended yet.

        Raises:
            CheckpointError: the save failed, and what was saved before is in force.
            ValueError: no such save was begun, or it ended long ago.
        """
        return self._saves.name(save)

    def dumps(self, incarnation: int, path: str | os.PathLike[str], oldest: str | None = None) -> str:
        """As `begin_save`, and waits for the end of the save; returns the snapshot's name.

        Calls of other threads are answered meanwhile.
        """
        while (number := self.begin_save(incarnation, path, oldest)) is None:
            self._saves.wait()
        self._saves.wait()
        name = self._saves.name(number)
        assert name is not None
        return name

    @_call
    def verify(self, incarnation: int, path: str | os.PathLike[str], snapshot: str) -> None:
        """CorruptCheckpointError where a file of a snapshot is not what was saved."""
        with Checkpoint(path).reading(snapshot) as reader:
            reader.check()

    @_call
    def loads(self, incarnation: int, path: str | os.PathLike[str], snapshot: str | None = None) -> int:
        """Takes over what `dumps` saved; returns the new incarnation. Every tenancy ends, also after an error.

        Errors as `ReplayBuffer.loads`.
        """
        if self._storage.initialized:
            with self._lanes.exclusive("loads()"):
                pass
        self._producers.end_all()
        was_made = self._storage.initialized
        try:
            self._buffer.loads(path, snapshot=snapshot)
        finally:
            if self._storage.initialized:
                if was_made:
                    self._producers.write()
                else:
                    self._producers.open_table()
                self._rewrite_priorities()
        return self.incarnation

    @_call
    def verify_pieces(self, incarnation: int, pieces: tuple[SavedPiece, ...]) -> None:
        """CheckpointError where a piece of a save is damaged, or does not fit; nothing is changed."""
        for piece in pieces:
            check_piece(piece, self._storage.layout, self._sampler)

    @_call
    def load_pieces(self, incarnation: int, pieces: tuple[SavedPiece, ...]) -> int:
        """Takes over pieces of a save of other shards, in place of all rows; returns the new incarnation.

        Every tenancy ends, also after an error, which leaves the rows of the pieces before. One of the saved parts at a
        time is in memory.

        Raises:
            CheckpointError: as `verify_pieces`.
            StorageInUseError: another process has the store open for writing. Nothing was changed.
        """
        self.empty(incarnation)
        for piece in pieces:
            loaded = LoadedPiece(piece, copy.deepcopy(self._sampler))
            try:
                self.adopt(self.incarnation, loaded.layout.to_bytes())
                if loaded.new_priority is not None:
                    self._sampler.raise_new_priority(loaded.new_priority, storage=self._storage)
                self._append_runs(loaded.runs())
            finally:
                loaded.close()
        return self.incarnation

    def _append_runs(self, runs: Iterable[Run]) -> None:
        """Appends rows that were saved, with a seam where a run begins."""
        entry = self._producers.entry_of(_LOADER, self._producers.join(_LOADER).number)

        def append(run: Run) -> Tensor:
            if run.begins:
                self._storage.mark_seam()
            return self._append(pack(self._layout, run.batch))

        for run in runs:
            slots = self._producers.append(entry, functools.partial(append, run))
            if run.priority is not None:
                self._set_priorities(slots, run.priority, None)
        self._producers.end_producer(_LOADER)

    def close(self) -> None:
        """Ends the use of the store, after a save that is being made; with a `scratch_dir` a new shard continues."""
        self._saves.wait()
        with self._lock:
            giver, self._giver = self._giver, None
            if giver is not None:
                giver.cancel()
            self._producers.close()
            self._storage.close()
            if self._priorities is not None:
                self._priorities.close()
                self._priorities = None
            if self._folder_lock is not None:
                self._folder_lock.close()
                self._folder_lock = None


def _no_rows(totals: ShardTotals) -> DrawnRows:
    nothing = torch.empty(0, dtype=torch.int64, device="cpu")
    return DrawnRows(Block(()), nothing, nothing, None, None, None, None, totals)


def _without(drawn: DrawnRows, lost: list[int]) -> DrawnRows:
    """Rows of no slices, less those that were overwritten: none is drawn in their place, so others are as likely."""
    kept = torch.ones(len(drawn.slots), dtype=torch.bool, device="cpu")
    kept[lost] = False
    block = Block(tuple(part[kept.numpy()] for part in drawn.block.parts))
    ratio = None if drawn.ratio is None else drawn.ratio[kept]
    return drawn._replace(block=block, slots=drawn.slots[kept], generation=drawn.generation[kept], ratio=ratio)


def _store_name(storage: LazyTensorStorage | LazyMemmapStorage) -> str:
    """A name of the store and its incarnation."""
    identity = store_identity(storage)
    assert identity is not None
    return f"{identity[0][:20]}.{identity[1] % 10**18}"


def _check_sampler(sampler: Sampler, layout: RowLayout) -> None:
    """Lets a copy of the sampler look at rows of this layout: afterwards no `extend` fails when its rows are in."""
    probe = LazyTensorStorage(1)
    ReplayBuffer(storage=probe).extend(layout.unpack(np.zeros((1, layout.payload_bytes), np.uint8)))
    copy.deepcopy(sampler).totals(probe)


def _check_priorities(sampler: Sampler, priority: Tensor, n: int) -> None:
    if not isinstance(sampler, PrioritizedSampler):
        raise ValueError(f"priorities came with rows, and {type(sampler).__name__} draws without them")
    sampler.checked_priorities(priority.nan_to_num(1.0), n)


class _Saves:
    """The saves of a shard, one at a time, in a thread."""

    def __init__(self) -> None:
        self._running: SaveHandle | None = None  # the last one
        self._begun = 0
        self._ended: dict[int, str | Exception] = {}  # by number; the name of the snapshot, or why there is none

    def begin(self, save: Callable[[], Any]) -> int | None:
        """Begins one, of which a handle comes; returns its number. None: another has not ended."""
        if self._running is not None:
            if not self._running.done():
                return None
            self._ended[self._begun] = _outcome(self._running)
            self._ended.pop(self._begun - _KEPT_OUTCOMES, None)
        self._running = None
        self._running = save()
        self._begun += 1
        return self._begun

    def name(self, number: int) -> str | None:
        """As `ReplayShard.saved`."""
        outcome: str | Exception | None = self._ended.get(number)
        if number == self._begun and self._running is not None:
            if not self._running.done():
                return None
            outcome = _outcome(self._running)
        if outcome is None:
            raise ValueError(f"save {number} is not known: the last one of this shard is {self._begun}")
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def wait(self) -> None:
        """Waits until none is being made."""
        running = self._running
        if running is not None:
            _outcome(running)


def _outcome(save: SaveHandle) -> str | Exception:
    """Waits for the end of a save; the name of the snapshot, or why there is none."""
    try:
        return save.result()
    except Exception as error:
        return error


def _number(snapshot: str) -> int:
    return int(snapshot.removeprefix("g-"))


def _block(parts: list[Tensor]) -> Block:
    return Block(tuple(part.numpy() for part in parts))
