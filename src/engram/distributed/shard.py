"""One shard of a replay buffer over several machines: a store to which any number of producers write, and its draws."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from engram.data import (
    DrawTotals,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    Sampler,
)
from engram.distributed.blocks import Block, check, goes_by_leaf
from engram.distributed.folder_lock import FolderLock
from engram.distributed.priority_file import FILE_NAME as _PRIORITIES
from engram.distributed.priority_file import PriorityFile
from engram.distributed.shard_sampling import draw_rows, lane_ranges, read_by_sequence
from engram.errors import IncarnationError, StorageError
from engram.kernel.disk import Checkpoint, DocumentFile
from engram.kernel.replay import Member
from engram.kernel.rows import Lanes, RowLayout, StreamEntry, StreamTable

_RECORD = "shard.json"
STREAMS = "streams"  # the file of the table of streams, beside the store
_MOST_DRAWS = 100
#: Seconds after it was sent for which the answer to a call says where the producer's next rows go (`Place`).
PLACE_HOLDS = 0.25
_LANE_KEPT = 1.0  # seconds; longer, so that rows that are sent until then have time to come
_KEPT_SHARE = 4  # a quarter of the lanes is kept at most, so that producers that pause do not keep much
_QUEUE_BYTES = 16 << 20  # of rows that all producers together may have sent and that are not in yet

P = ParamSpec("P")
T = TypeVar("T")


class Place(NamedTuple):
    """Where the next rows of a producer go, if sent within `PLACE_HOLDS` seconds: to one lane, a ring of slots.

    Attributes:
        first_slot, capacity: of the lane.
        sequence: of the next row there.
        rows: how many of them.
    """

    first_slot: int
    capacity: int
    sequence: int
    rows: int


class Tenancy(NamedTuple):
    """One producer's rows in a shard, until it leaves.

    Attributes:
        number: of the tenancy, in this shard; every call of the producer names it.
        rows: how many of its rows are in.
        ended: the number of the producer's tenancy before, and how many of its rows are in; None: there was none.
    """

    number: int
    rows: int
    ended: tuple[int, int] | None


class LentStream(NamedTuple):
    """What a process of the same machine needs to write a producer's rows itself.

    Attributes:
        folder: of the store.
        entry: of the producer, in the table of streams there.
    """

    folder: str
    entry: int


class ShardTotals(NamedTuple):
    """A shard's contents in numbers, which are part of every answer.

    Attributes:
        incarnation: of the shard; every call names it.
        ranges: int64 [lanes, 2], the oldest sequence of each lane, and the one after its newest.
        writes: steps ever written.
        draws: what its sampler draws from.
    """

    incarnation: int
    ranges: Tensor
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
    """

    rows: int
    in_force: bool
    credit: int
    place: Place | None
    slots: Tensor | None
    totals: ShardTotals


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


@dataclasses.dataclass(frozen=True)
class _Record:
    """What a successor of the shard's process has to know, in a small file beside the table of streams."""

    incarnation: int
    store: tuple[str, int] | None = None  # id and incarnation of the store that it speaks of
    replaced: int = 0  # how often all rows were emptied, or replaced by a load

    @classmethod
    def of(cls, state: dict[str, Any]) -> _Record:
        """The record of which `dataclasses.asdict` made this document."""
        store = state["store"]
        return cls(state["incarnation"], None if store is None else (store[0], store[1]), state["replaced"])


class _Producers:
    """The producers of a shard: each is a stream of the store, whose count outlives every process.

    The caller has the shard's folder alone, and makes one call at a time.

    Attributes:
        record: the one in force.
    """

    def __init__(self, storage: LazyTensorStorage | LazyMemmapStorage, folder: Path | None, idle: float) -> None:
        self._storage, self._folder, self._idle = storage, folder, idle
        self._table: StreamTable | None = None
        self._last_rows: dict[str, float] = {}  # when each producer last sent some
        self._kept: dict[StreamEntry, float] = {}  # when those whose lanes are kept were last told of their place
        self.record = _Record(time.time_ns())

    # ---- opening ----
    def open(self) -> None:
        """Continues from the record of a predecessor, if there is one."""
        before = self._read()
        if before is not None:
            self.record = dataclasses.replace(before, incarnation=max(before.incarnation + 1, time.time_ns()))
        if self._storage.lanes is not None:
            self.open_table(None if before is None else before.store)

    def open_table(self, before: tuple[str, int] | None = None) -> None:
        """Opens the table of streams, which was kept beside the store `before`."""
        assert self._storage.lanes is not None
        self._table = StreamTable(self._storage.lanes, None if self._folder is None else self._folder / STREAMS)
        store = _store_identity(self._storage)
        if before != store:  # rows were replaced, or lost in a power cut
            same_rows = before is not None and store is not None and before[0] == store[0]
            for entry in list(self._table.entries.values()):
                self._table.end(entry, self._table.rows_after_recovery(entry) if same_rows else 0)
        self.write()

    @property
    def table(self) -> StreamTable:
        """The table of streams."""
        if self._table is None:
            raise RuntimeError("the shard has no layout yet: adopt one first")
        return self._table

    def _read(self) -> _Record | None:
        if self._folder is None:
            return None
        path = self._folder / _RECORD
        try:
            return _Record.of(DocumentFile(path).read())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageError(
                f"{path} is damaged: {error}. Without it the shard cannot tell whose rows it has; delete it, and "
                "producers begin anew"
            ) from error

    def write(self, record: _Record | None = None) -> None:
        """Puts a record in force, in the file and then here, whole or not at all; None: the same in a changed store."""
        record = self.record if record is None else record
        record = dataclasses.replace(record, store=_store_identity(self._storage))
        if self._folder is not None and self._storage.lanes is not None:
            path = self._folder / _RECORD
            try:
                DocumentFile(path).write(dataclasses.asdict(record))
            except OSError as error:
                raise StorageError(f"{path} cannot be written: {error.strerror}; nothing was changed") from error
        self.record = record

    # ---- producers ----
    @property
    def names(self) -> tuple[str, ...]:
        """Of those that have a tenancy."""
        table = self._table
        return () if table is None else tuple(one.name for one in table.entries.values() if not one.has_ended)

    def join(self, producer: str) -> Tenancy:
        """As `ReplayShard.join`."""
        entry = self.table.entries.get(producer)
        if entry is None or entry.has_ended:
            entry = self.table.begin(producer)
        else:
            self.table.adopt(entry)
        self._last_rows[producer] = time.monotonic()
        return Tenancy(entry.number, self.table.rows(entry), entry.before)

    def lend(self, producer: str, tenancy: int) -> LentStream:
        """As `ReplayShard.lend`."""
        entry = self.entry_of(producer, tenancy)
        if entry.has_ended or self._folder is None:
            reason = "has ended" if entry.has_ended else "is in a shard without a scratch_dir, which others cannot open"
            raise ValueError(f"tenancy {tenancy} of {producer!r} {reason}: its rows are sent to the shard")
        self._kept.pop(entry, None)
        self.table.lend(entry)
        return LentStream(str(self._folder), entry.at)

    def leave(self, producer: str, tenancy: int) -> int:
        """As `ReplayShard.leave`."""
        return self._end(self.entry_of(producer, tenancy))

    def end_producer(self, producer: str) -> int:
        """As `ReplayShard.end_producer`."""
        entry = None if self._table is None else self._table.entries.get(producer)
        return 0 if entry is None else self._end(entry)

    def _end(self, entry: StreamEntry) -> int:
        rows = self.table.end(entry)
        self._kept.pop(entry, None)
        self._last_rows.pop(entry.name, None)
        return rows

    def end_all(self) -> None:
        """Ends all tenancies before rows are replaced: after a kill no count is taken from a lane of other rows."""
        self.give_back()
        for entry in [] if self._table is None else list(self._table.entries.values()):
            self._end(entry)
        record = self.record
        incarnation = max(record.incarnation + 1, time.time_ns())
        self.write(dataclasses.replace(record, incarnation=incarnation, replaced=record.replaced + 1))

    def entry_of(self, producer: str, tenancy: int) -> StreamEntry:
        """The stream of a tenancy, which may have ended. ValueError: the producer's newest one is another."""
        entry = self.table.entries.get(producer)
        if entry is None or entry.number != tenancy:
            raise ValueError(
                f"{producer!r} has no tenancy {tenancy} in this shard; its last one is "
                f"{None if entry is None else entry.number}: join again. Nothing was written"
            )
        return entry

    def ended_before(self, producer: str, tenancy: int) -> int | None:
        """How many rows the tenancy before the producer's newest one had; None: that was another."""
        entry = self.table.entries.get(producer)
        return (
            entry.before[1] if entry is not None and entry.before is not None and entry.before[0] == tenancy else None
        )

    # ---- rows ----
    def append(self, entry: StreamEntry, append: Callable[[], Tensor]) -> Tensor:
        """Appends rows of a producer; returns their slots."""
        now = time.monotonic()
        self._last_rows[entry.name] = now
        self._give_idle_back(now)
        assert self._storage.lanes is not None
        self.table.keep_place(
            entry, entry in self._kept or len(self._kept) < self._storage.lanes.store.lanes // _KEPT_SHARE
        )
        with self._storage.mutex, self.table.writing(entry):
            return append()

    def place(self, entry: StreamEntry) -> Place | None:
        """Where a producer's next rows go, if its lane is kept for it, and others do not wait for that."""
        kept = self.table.kept_place(entry)
        if kept is None or not kept[2]:
            self._kept.pop(entry, None)
            return None
        lane, sequence, rows = kept
        assert self._storage.lanes is not None
        store, now = self._storage.lanes.store, time.monotonic()
        if store.is_overdue(lane):
            self._kept.setdefault(entry, now)
            return None
        self._kept[entry] = now
        return Place(lane * store.lane_capacity, store.lane_capacity, sequence, rows)

    def _give_idle_back(self, now: float) -> None:
        for entry, told in list(self._kept.items()):
            if now - told > _LANE_KEPT:
                del self._kept[entry]
                self.table.give_back(entry)

    def give_back(self, idle_only: bool = False) -> bool:
        """Gives lanes back that are kept, or those of idle producers; returns whether some are kept still."""
        if self._table is not None and idle_only:
            self._give_idle_back(time.monotonic())
        elif self._table is not None:
            self._kept.clear()
            self._table.give_back()
        return bool(self._kept)

    @property
    def active(self) -> int:
        """How many producers have sent rows of late."""
        now = time.monotonic()
        self._last_rows = {name: last for name, last in self._last_rows.items() if now - last <= self._idle}
        return len(self._last_rows)

    def close(self) -> None:
        """Ends the use of the table."""
        self._kept.clear()
        table, self._table = self._table, None
        if table is not None:
            table.close()


def _lanes_of(storage: LazyTensorStorage | LazyMemmapStorage) -> Lanes:
    if storage.lanes is None:
        raise RuntimeError("the shard has no layout yet: adopt one first")
    return storage.lanes


def _store_identity(storage: LazyTensorStorage | LazyMemmapStorage) -> tuple[str, int] | None:
    """The store of a storage, and its incarnation; None: it is not made."""
    lanes = storage.lanes
    return None if lanes is None else (lanes.store.store_id.hex(), lanes.store.incarnation)


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
        scratch_dir: str | os.PathLike[str] | None = None,
        idle: float = 60.0,
        timeout: float = 30.0,
        generator: torch.Generator | None = None,
    ) -> None:
        self._lock = threading.RLock()
        self._folder = None if scratch_dir is None else Path(scratch_dir)
        self._timeout = timeout
        room, several = max(2, capacity), max(2, lanes)  # so that producers move from lane to lane
        if self._folder is None:
            self._storage: LazyTensorStorage | LazyMemmapStorage = LazyTensorStorage(room, shared=True, lanes=several)
        else:
            self._storage = LazyMemmapStorage(room, scratch_dir=self._folder, existsok=True, lanes=several)
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
        self._producers = _Producers(self._storage, self._folder, idle)
        self._giver: threading.Timer | None = None  # of lanes that were kept for producers that send nothing
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    # ---- opening ----
    def _open(self) -> None:
        """Takes the folder, then reads the record: a predecessor may have changed it until it released the folder."""
        self._take_folder()
        self._producers.open()
        if self._storage.lanes is not None:
            self._open_priorities()

    def _take_folder(self) -> None:
        """Locks the folder: one shard at a time, although other processes may write to its store."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._folder_lock = FolderLock(self._folder, self._timeout)

    # ---- priorities beside the store ----
    def _open_priorities(self) -> None:
        """Gives rows the priorities that they had."""
        if self._folder is None or not self._prioritized:
            return
        self._priorities = PriorityFile(self._folder / _PRIORITIES, self._lanes.capacity)
        if self._priorities.store != self._store_name:
            self._priorities.restart(self._store_name, self._new_priority)
            return
        highest, sequences = self._priorities.highest, self._lanes.generations(torch.arange(self._lanes.capacity))
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
            return self._open_priorities() if self._storage.lanes is not None else None
        self._priorities.restart(self._store_name, self._new_priority)
        sequences = self._lanes.generations(torch.arange(self._lanes.capacity))
        stored = (sequences >= 0).nonzero().flatten()
        if len(stored):
            assert isinstance(self._sampler, PrioritizedSampler)
            priorities = self._sampler.priorities(stored, storage=self._storage)
            self._priorities.note(stored, sequences[stored], priorities, self._new_priority)
        return None

    @property
    def _new_priority(self) -> float:
        highest = self._sampler.totals(self._storage, newest=False).new_priority
        return 1.0 if highest is None else highest

    @property
    def _store_name(self) -> str:
        """A name of the store and its incarnation."""
        identity = _store_identity(self._storage)
        assert identity is not None
        return f"{identity[0][:20]}.{identity[1] % 10**18}"

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

    def facts(self) -> ShardFacts:
        """The facts that a client needs before it calls; the only call that names no incarnation."""
        with self._lock:
            folder = None if self._folder is None else str(self._folder.absolute())
            producers, totals = self._producers, self._totals()
            return ShardFacts(self.layout, self.capacity, folder, producers.names, producers.record.replaced, totals)

    def _totals(self, newest: bool = True) -> ShardTotals:
        lanes = self._storage.lanes
        ranges = lane_ranges(lanes)
        draws = self._sampler.totals(self._storage, newest=newest)
        writes = 0 if lanes is None else lanes.write_count
        return ShardTotals(self.incarnation, ranges, writes, draws)

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
        made, given = self._storage.lanes is not None, RowLayout.from_bytes(layout)
        if not made:
            self._check_sampler(given)
        self._storage.adopt(given)
        if not made:
            self._producers.open_table()
            self._open_priorities()

    def _check_sampler(self, layout: RowLayout) -> None:
        """Lets a copy of the sampler look at rows of this layout: afterwards no `extend` fails when its rows are in."""
        probe = LazyTensorStorage(1)
        ReplayBuffer(storage=probe).extend(layout.unpack(np.zeros((1, layout.payload_bytes), np.uint8)))
        copy.deepcopy(self._sampler).totals(probe)

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
            self._check_priorities(priority, len(block))
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
        if not 0 <= first <= count:
            raise ValueError(
                f"first={first}, but {count} rows of tenancy {tenancy} are in: those between never came. Nothing was "
                "written"
            )
        if new_priority is not None:
            self._sampler.raise_new_priority(new_priority, storage=self._storage)
        new = block.rest(count - first)
        slots = torch.empty(0, dtype=torch.int64)
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
            self._giver = threading.Timer(_LANE_KEPT, self._give_back)
            self._giver.daemon = True
            self._giver.start()

    def _give_back(self) -> None:
        with self._lock:
            self._giver = None
            if self._producers.give_back(idle_only=True):
                self._give_back_later()

    def _slots_of(self, entry: StreamEntry, first: int, n: int) -> Tensor:
        """Where rows of a producer that were in before lie, int64 [n]; -1: not known any more."""
        slots = torch.full((n,), -1)
        for row, lane, sequence, rows in self._producers.table.places(entry, first, n) if n else ():
            slots[row - first : row - first + rows] = self._lanes.slots_of(
                lane, torch.arange(sequence, sequence + rows)
            )
        return slots

    def _check_priorities(self, priority: Tensor, n: int) -> None:
        if not isinstance(self._sampler, PrioritizedSampler):
            raise ValueError(f"priorities came with rows, and {type(self._sampler).__name__} draws without them")
        self._sampler.checked_priorities(priority.nan_to_num(1.0), n)

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
    def take(self, incarnation: int, lane: Tensor, sequence: Tensor) -> TakenRows:
        """Rows by lane and sequence (int64 [n] each), as a client has drawn them from the ranges that it knows.

        Raises:
            IndexError: a lane or a sequence that cannot exist.
        """
        rows = read_by_sequence(self._storage, lane, sequence)
        return TakenRows(rows.block, rows.present, self._totals())

    @_call
    def draw(self, incarnation: int, ranges: Tensor, n: int, seed: int) -> DrawnRows:
        """n rows drawn uniformly from ranges that a client knows, less those that were overwritten since.

        However the shard has grown since then, each row of the ranges is as likely as any other: so draws from several
        shards, in proportion to the ranges that the client divided them by, are those of one buffer.

        Args:
            ranges: int64 [lanes, 2], as `ShardTotals` had them.

        Raises:
            RuntimeError: the ranges are empty.
            IndexError: they cannot be those of this shard.
        """
        return DrawnRows(*draw_rows(self._storage, ranges, n, seed), None, None, None, None, self._totals())

    @_call
    def sample(self, incarnation: int, n: int) -> DrawnRows:
        """n rows that the shard's sampler draws; none where it has nothing to draw from any more.

        Raises:
            RuntimeError: writers on this machine overwrite rows faster than they are read.
        """
        by_leaf = goes_by_leaf(self._layout)
        for _ in range(_MOST_DRAWS):
            with self._sampler.lock:
                try:
                    draw = self._rows.draw(n)
                except RuntimeError:
                    if self._totals().draws.share:
                        raise
                    return self._no_rows()
                totals = self._totals(newest=False)
            if len(draw.slots) > n:
                raise ValueError(f"{self._sampler!r} drew {len(draw.slots)} rows where {n} were asked for")
            rows = self._storage.read_packed(draw.slots, by_leaf, sequences=True)
            if not draw.lost(rows.overwritten, rows.absent):
                assert rows.sequences is not None
                ratio = draw.info["priority_weight"] if self._prioritized else None
                runs, is_padded = draw.runs, "mask" in dict(draw.marks)
                return DrawnRows(
                    _block(rows.batch), draw.slots, rows.sequences, ratio, draw.info.get("slice_id"),
                    None if runs is None else runs.last(), None if runs is None or not is_padded else runs.mask(),
                    totals,
                )  # fmt: skip
        raise RuntimeError("writers overwrite the rows of this batch faster than they can be read; sample fewer")

    def _no_rows(self) -> DrawnRows:
        nothing = torch.empty(0, dtype=torch.int64)
        rows = self._storage.read_packed(nothing, goes_by_leaf(self._layout))
        ratio = nothing.double() if self._prioritized else None
        return DrawnRows(_block(rows.batch), nothing, nothing, ratio, None, None, None, self._totals())

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
        if self._storage.lanes is None:
            self._producers.end_all()
            return self.incarnation
        with self._lanes.exclusive("empty()"):
            self._producers.end_all()
            self._buffer.empty()
            self._producers.write()
            self._rewrite_priorities()
        return self.incarnation

    @_call
    def dumps(self, incarnation: int, path: str | os.PathLike[str], oldest: str | None = None) -> str:
        """Saves rows and sampler as `ReplayBuffer.dumps` does; returns the snapshot's name.

        Args:
            oldest: the name of a snapshot: it stays, and those after it. None: older ones go.
        """
        older = [] if oldest is None else Checkpoint(path).snapshots()
        kept = sum(oldest is not None and _number(name) >= _number(oldest) for name in older)
        name = self._buffer.dumps(path, keep_last=1 + kept)
        assert isinstance(name, str)
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
        if self._storage.lanes is not None:
            with self._lanes.exclusive("loads()"):
                pass
        self._producers.end_all()
        was_made = self._storage.lanes is not None
        try:
            self._buffer.loads(path, snapshot=snapshot)
        finally:
            if self._storage.lanes is not None:
                if was_made:
                    self._producers.write()
                else:
                    self._producers.open_table()
                self._rewrite_priorities()
        return self.incarnation

    def close(self) -> None:
        """Ends the use of the store; with a `scratch_dir` a new shard can continue with it."""
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


def _number(snapshot: str) -> int:
    return int(snapshot.removeprefix("g-"))


def _block(parts: list[Tensor]) -> Block:
    return Block(tuple(part.numpy() for part in parts))
