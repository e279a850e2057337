"""One shard of a replay buffer over several machines: a store with a lane for each producer, and its draws."""

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
from engram.errors import IncarnationError, NoFreeLaneError, StorageError
from engram.kernel.disk import Checkpoint, DocumentFile
from engram.kernel.replay import Member
from engram.kernel.rows import HeldLaneCount, HeldLanes, RowLayout

_RECORD = "shard.json"
_PAUSE = 0.02  # seconds between two tries to take a lane
_MOST_DRAWS = 100
_MOST_ENDED = 1024  # tenancies that ended whose counts are remembered
_QUEUE_BYTES = 16 << 20  # of rows that all producers together may have sent and that are not in yet

P = ParamSpec("P")
T = TypeVar("T")


class Tenancy(NamedTuple):
    """One producer's use of a lane.

    Attributes:
        lane: where its rows go.
        number: of the tenancy, in this shard; every call of the producer names it.
        begin: the sequence that its first row has in the lane.
        rows: how many of its rows are in.
        ended: the number of the producer's tenancy before, and how many of its rows are in; None: there was none.
    """

    lane: int
    number: int
    begin: int
    rows: int
    ended: tuple[int, int] | None


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
        lanes: how many there are, each with room for `capacity / lanes` of them.
        folder: of the store, which processes of that machine can open; None: the store has no folder.
        producers: names of those that have a lane.
        replaced: how often all rows were emptied, or replaced by a load.
    """

    layout: bytes | None
    capacity: int
    lanes: int
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
    """

    rows: int
    in_force: bool
    credit: int
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
class _LaneUse:
    producer: str
    tenancy: int
    begin: int  # the sequence of the tenancy's first row
    lent: bool = False  # whether a process of this machine writes to the lane itself


@dataclasses.dataclass(frozen=True)
class _Record:
    """The producer of each lane, kept in a small file: written once for each tenancy, never for rows."""

    incarnation: int
    store: tuple[str, int] | None  # id and incarnation of the store that it speaks of
    next_tenancy: int
    replaced: int  # how often all rows were emptied, or replaced by a load
    lanes: tuple[_LaneUse | None, ...]
    ended: dict[str, tuple[int, int]]  # of the last producers whose tenancy ended, in that order: it, and the count

    @property
    def producers(self) -> tuple[str, ...]:
        """The names of those that have a lane."""
        return tuple(use.producer for use in self.lanes if use is not None)

    @classmethod
    def of(cls, state: dict[str, Any]) -> _Record:
        """The record of which `dataclasses.asdict` made this document."""
        lanes = tuple(None if use is None else _LaneUse(**use) for use in state.pop("lanes"))
        ended = {producer: (number, count) for producer, (number, count) in state.pop("ended").items()}
        store = state.pop("store")
        return cls(**state, store=None if store is None else (store[0], store[1]), lanes=lanes, ended=ended)


class _Tenancies:
    """The producers of a shard and their lanes, in a record from which a successor of the shard's process continues.

    The caller has the shard's folder alone, and makes one call at a time.

    Attributes:
        record: the one in force.
    """

    def __init__(
        self,
        storage: LazyTensorStorage | LazyMemmapStorage,
        folder: Path | None,
        lanes: int,
        idle: float,
        timeout: float,
    ) -> None:
        self._storage, self._folder, self._idle, self._timeout = storage, folder, idle, timeout
        self._last_rows = [time.monotonic()] * lanes  # when each lane last got some
        self.record = _Record(time.time_ns(), None, 1, 0, (None,) * lanes, {})

    @property
    def _lanes(self) -> HeldLanes:
        return _lanes_of(self._storage)

    # ---- opening ----
    def open(self) -> None:
        """Continues from the record of a predecessor, if there is one, and takes the lanes."""
        before = self._read()
        if before is not None:
            self.record = before
        if self._storage.lanes is not None:
            self.hold_lanes()
        if before is not None:
            self.record = dataclasses.replace(before, incarnation=max(before.incarnation + 1, time.time_ns()))
            store = _store_identity(self._storage)
            if before.store != store:  # rows were replaced, or lost in a power cut
                same_rows = before.store is not None and store is not None and before.store[0] == store[0]
                self.record = self._without_tenancies(self.record, lost=not same_rows)
        if self._storage.lanes is not None:
            for lane in range(len(self.record.lanes)):  # of tenancies that have just ended, too
                if self._lanes.holds(lane) and not self.count(lane):
                    self._lanes.mark_seam_in(lane)
            self.write()

    def hold_lanes(self) -> None:
        """Takes every lane that is not lent to a living process."""
        deadline = time.monotonic() + self._timeout
        for lane, use in enumerate(self.record.lanes):
            while not self._reclaim(lane) and not (use is not None and use.lent):
                if time.monotonic() > deadline:
                    raise NoFreeLaneError(
                        f"lane {lane} of the shard has a writer in another process, which was not lent it; end it first"
                    )
                time.sleep(_PAUSE)

    def _reclaim(self, lane: int) -> bool:
        """Takes a lane, if it is not this shard's already; False: another process writes to it."""
        if self._lanes.holds(lane):
            return True
        try:
            self._lanes.hold_lane(lane, goes_on=True)
        except NoFreeLaneError:
            return False
        if not self.count(lane):  # else the next row continues the newest one
            self._lanes.mark_seam_in(lane)
        return True

    def _read(self) -> _Record | None:
        if self._folder is None:
            return None
        path = self._folder / _RECORD
        try:
            record = _Record.of(DocumentFile(path).read())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageError(
                f"{path} is damaged: {error}. Without it the shard cannot tell whose rows it has; delete it, and "
                "producers begin anew"
            ) from error
        if len(record.lanes) != len(self.record.lanes):
            raise StorageError(
                f"{path} is of a shard with {len(record.lanes)} lanes, lanes={len(self.record.lanes)} was given"
            )
        return record

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
    def join(self, producer: str) -> Tenancy:
        """As `ReplayShard.join`."""
        for lane, use in enumerate(self.record.lanes):
            if use is not None and use.producer == producer:
                self.must_reclaim(lane)
                return self._tenancy(lane, use)
        lane = self._free_lane()
        record = self._ended(self.record, lane)
        use = _LaneUse(producer, record.next_tenancy, self._lanes.store.lane(lane)["published"])
        uses = (*record.lanes[:lane], use, *record.lanes[lane + 1 :])
        self._lanes.mark_seam_in(lane)
        self.write(dataclasses.replace(record, lanes=uses, next_tenancy=record.next_tenancy + 1))
        self.note_rows(lane)
        return self._tenancy(lane, use)

    def _tenancy(self, lane: int, use: _LaneUse) -> Tenancy:
        return Tenancy(lane, use.tenancy, use.begin, self.count(lane), self.record.ended.get(use.producer))

    def _free_lane(self) -> int:
        for lane in self._lanes.by_room():
            if self.record.lanes[lane] is None and self._reclaim(lane):
                return lane
        for lane in sorted(range(len(self.record.lanes)), key=self._last_rows.__getitem__):
            if time.monotonic() - self._last_rows[lane] >= self._idle and self._reclaim(lane):
                return lane
        raise NoFreeLaneError(
            f"all {len(self.record.lanes)} lanes of the shard have a producer that wrote within {self._idle:g} "
            "seconds, or to which the lane is lent; make it with more lanes, or end a producer"
        )

    def must_reclaim(self, lane: int) -> None:
        """Takes a lane; NoFreeLaneError where another process writes to it."""
        if not self._reclaim(lane):
            use = self.record.lanes[lane]
            raise NoFreeLaneError(
                f"lane {lane} is lent to a living process, as {'nobody' if use is None else use.producer!r}: each "
                "producer needs a name of its own. Nothing was changed"
            )

    def lend(self, producer: str, tenancy: int) -> str:
        """As `ReplayShard.lend`."""
        lane = self.lane_of(producer, tenancy)
        if lane is None or self._folder is None:
            reason = "has ended" if lane is None else "is in a shard without a scratch_dir, which others cannot open"
            raise ValueError(f"tenancy {tenancy} of {producer!r} {reason}: its lane cannot be lent")
        use = self.record.lanes[lane]
        assert use is not None
        uses = (*self.record.lanes[:lane], dataclasses.replace(use, lent=True), *self.record.lanes[lane + 1 :])
        self.write(dataclasses.replace(self.record, lanes=uses))
        self._lanes.release_lane(lane)
        return str(self._folder)

    def leave(self, producer: str, tenancy: int) -> int:
        """As `ReplayShard.leave`."""
        lane = self.lane_of(producer, tenancy)
        if lane is not None:
            self.must_reclaim(lane)
            self.write(self._ended(self.record, lane))
        return self.record.ended[producer][1]

    def end_producer(self, producer: str) -> int:
        """As `ReplayShard.end_producer`."""
        for use in self.record.lanes:
            if use is not None and use.producer == producer:
                return self.leave(producer, use.tenancy)
        ended = self.record.ended.get(producer)
        return 0 if ended is None else ended[1]

    def note_rows(self, lane: int) -> None:
        """Notes that a lane has just got rows: its producer is not idle."""
        self._last_rows[lane] = time.monotonic()

    def lane_of(self, producer: str, tenancy: int) -> int | None:
        """The lane of a tenancy; None: it has ended."""
        for lane, use in enumerate(self.record.lanes):
            if use is not None and (use.producer, use.tenancy) == (producer, tenancy):
                return lane
        ended = self.record.ended.get(producer)
        if ended is None or ended[0] != tenancy:
            raise ValueError(
                f"{producer!r} has no tenancy {tenancy} in this shard; its last one that ended is {ended}: join again. "
                "Nothing was written"
            )
        return None

    def count(self, lane: int, record: _Record | None = None) -> int:
        """Rows of the lane's tenancy that are in: what the lane itself counts."""
        use = (self.record if record is None else record).lanes[lane]
        return 0 if use is None else max(0, self._lanes.store.lane(lane)["published"] - use.begin)

    def _ended(self, record: _Record, lane: int, lost: bool = False) -> _Record:
        """The record without the tenancy of a lane. `lost`: this store has none of its rows."""
        use = record.lanes[lane]
        if use is None:
            return record
        count = 0 if lost else self.count(lane, record)
        uses = (*record.lanes[:lane], None, *record.lanes[lane + 1 :])
        ended = {name: end for name, end in record.ended.items() if name != use.producer}
        for name in list(ended)[: max(0, len(ended) + 1 - _MOST_ENDED)]:
            del ended[name]
        return dataclasses.replace(record, lanes=uses, ended={**ended, use.producer: (use.tenancy, count)})

    def _without_tenancies(self, record: _Record, lost: bool = False) -> _Record:
        for lane in range(len(record.lanes)):
            record = self._ended(record, lane, lost)
        return record

    def end_all(self) -> None:
        """Ends all tenancies before rows are replaced: after a kill no count is taken from a lane of other rows."""
        record = self._without_tenancies(self.record)
        incarnation = max(record.incarnation + 1, time.time_ns())
        self.write(dataclasses.replace(record, incarnation=incarnation, replaced=record.replaced + 1))


def _lanes_of(storage: LazyTensorStorage | LazyMemmapStorage) -> HeldLanes:
    lanes = storage.lanes
    if not isinstance(lanes, HeldLanes):
        raise RuntimeError("the shard has no layout yet: adopt one first")
    return lanes


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
    """A part of a replay buffer that lies on several machines: one store, in which each producer has a lane.

    Trajectories stay whole, as no two producers write to one lane; and the lane counts how many rows of a producer are
    in, whichever process died: `extend` names the number of its first row, and rows that are in already are left out.
    The use of a lane by a producer is a *tenancy*. Its number is new with each change of producer, and after `empty`
    and `loads`; a call for an older one is answered with the count at which that ended.

    With a `scratch_dir` a shard that is made anew, after any kind of death, continues where the rows ended, without
    seams. Priorities come back with their rows; rows that were given none have the highest that any row ever had, as
    new ones do. After a power cut that took rows, all have the priority of new ones.

    Every call names the shard's incarnation, which is new each time it is made, emptied or loaded. Calls of several
    threads take turns.

    Args:
        capacity: steps that fit, rounded up to whole lanes.
        lanes: how many producers may write at a time; each has a ring of `capacity / lanes` steps.
        sampler: one whose draws can be divided among shards (`Sampler.totals`), for this shard alone: `beta` and
            `dtype` of one with priorities are set, as the client computes weights. None: uniform draws.
        scratch_dir: a folder for the rows, on this machine. None: shared memory, gone with the process.
        idle: seconds without a row after which a lane may be given to another producer, where none is free.
        timeout: seconds to wait for lanes that a predecessor, which is just ending, holds.
        generator: of the draws; None: torch's global one.

    Raises:
        TypeError: a sampler whose draws cannot be divided.
        ValueError: one with `num_slices` instead of `slice_len`, or with `max_priority_within_buffer`.
        NoFreeLaneError: another process still writes to a lane after `timeout`.
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
        if self._folder is None:
            self._storage: LazyTensorStorage | LazyMemmapStorage = LazyTensorStorage(
                capacity, shared=True, lanes=HeldLaneCount(lanes)
            )
        else:
            self._storage = LazyMemmapStorage(
                capacity, scratch_dir=self._folder, existsok=True, lanes=HeldLaneCount(lanes)
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
        self._tenancies = _Tenancies(self._storage, self._folder, lanes, idle, timeout)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    # ---- opening ----
    def _open(self) -> None:
        """Takes the folder, then reads the record: a predecessor may have changed it until it released the folder."""
        self._take_folder()
        self._tenancies.open()
        if self._storage.lanes is not None:
            self._open_priorities()

    def _take_folder(self) -> None:
        """Locks the folder: one shard at a time, although some of its lanes may be lent."""
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
        return self._tenancies.record.incarnation

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
    def _lanes(self) -> HeldLanes:
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
            record, totals = self._tenancies.record, self._totals()
            lanes, producers = len(record.lanes), record.producers
            return ShardFacts(self.layout, self.capacity, lanes, folder, producers, record.replaced, totals)

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
            self._tenancies.hold_lanes()
            self._tenancies.write()
            self._open_priorities()

    def _check_sampler(self, layout: RowLayout) -> None:
        """Lets a copy of the sampler look at rows of this layout: afterwards no `extend` fails when its rows are in."""
        probe = LazyTensorStorage(1)
        ReplayBuffer(storage=probe).extend(layout.unpack(np.zeros((1, layout.payload_bytes), np.uint8)))
        copy.deepcopy(self._sampler).totals(probe)

    @_call
    def join(self, incarnation: int, producer: str) -> Tenancy:
        """A lane for a producer: the one that it has, or a free one, or one that has been idle.

        Raises:
            NoFreeLaneError: every lane has a producer that writes; or this producer's is lent to a living process.
        """
        return self._tenancies.join(producer)

    @_call
    def lend(self, incarnation: int, producer: str, tenancy: int) -> str:
        """Lets a process of this machine write to the lane of its tenancy itself; returns the folder of the store.

        The process opens the store, takes the lane (`hold_lane`; `goes_on`: the tenancy has rows), and appends.
        The lane counts stored rows as ever. When the process has let the lane go, or has died, calls by this producer's
        name continue as before.

        Raises:
            ValueError: the tenancy has ended, or never began; or the shard has no `scratch_dir`.
        """
        return self._tenancies.lend(producer, tenancy)

    @_call
    def leave(self, incarnation: int, producer: str, tenancy: int) -> int:
        """Ends a tenancy, and frees its lane; returns the count at which it ended.

        Raises:
            ValueError: the producer has never had this tenancy.
            NoFreeLaneError: the lane is lent, and its process has not let it go.
        """
        return self._tenancies.leave(producer, tenancy)

    @_call
    def end_producer(self, incarnation: int, producer: str) -> int:
        """Ends the tenancy of a producer that has died, if it has one; returns how many rows of its last one are in.

        Raises:
            NoFreeLaneError: the lane is lent, and its process has not let it go.
        """
        return self._tenancies.end_producer(producer)

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
    ) -> Acknowledgement:
        """Appends rows of a producer that are not in yet.

        Args:
            first: the number of the block's first row among those of the tenancy, from 0.
            new_priority: the highest priority of all shards, which new rows get.
            priority: of the block's rows, float64 [n]; NaN: that of new rows. Rows that are in already get theirs if
                they have never had one: a shard that was killed in between gives it when the rows are sent again.

        Raises:
            ValueError: the block is not of this layout; rows before `first` never came; the producer has never had
                this tenancy; or priorities are wrong, or the sampler has none. Nothing was written.
            NoFreeLaneError: the lane is lent, and its process has not let it go. Nothing was written.
            StorageError: the folder was removed. Nothing was written.
        """
        check(self._layout, block)
        if priority is not None:
            self._check_priorities(priority, len(block))
        tenancies = self._tenancies
        lane = tenancies.lane_of(producer, tenancy)
        if lane is None:
            return Acknowledgement(tenancies.record.ended[producer][1], False, 0, self._totals())
        tenancies.must_reclaim(lane)
        if self._folder_lock is not None and self._folder_lock.is_removed:
            raise StorageError(f"{self._folder} was removed; what is written to it now would be lost")
        count = tenancies.count(lane)
        if not 0 <= first <= count:
            raise ValueError(
                f"first={first}, but {count} rows of tenancy {tenancy} are in: those between never came. Nothing was "
                "written"
            )
        if new_priority is not None:
            self._sampler.raise_new_priority(new_priority, storage=self._storage)
        new = block.rest(count - first)
        if len(new):
            if goes_by_leaf(self._layout):
                self._storage.append_leaves(lane, list(new.parts))
            else:
                self._storage.append_packed(lane, new.parts[0])
        if priority is not None:
            self._give_priorities(lane, first, count, priority)
        tenancies.note_rows(lane)
        return Acknowledgement(tenancies.count(lane), True, self._credit, self._totals())

    def _check_priorities(self, priority: Tensor, n: int) -> None:
        if not isinstance(self._sampler, PrioritizedSampler):
            raise ValueError(f"priorities came with rows, and {type(self._sampler).__name__} draws without them")
        self._sampler.checked_priorities(priority.nan_to_num(1.0), n)

    def _give_priorities(self, lane: int, first: int, count: int, priority: Tensor) -> None:
        """Gives rows the priorities that came with them, if they have had none; `count`: rows that were in before."""
        use = self._tenancies.record.lanes[lane]
        assert use is not None
        number = first + torch.arange(len(priority))
        sequences = use.begin + number
        slots = self._lanes.slots_of(lane, sequences)
        given = ~priority.isnan() & (self._lanes.generations(slots) == sequences)
        # A shard without a file of them is gone with its rows: only an answer can have been lost.
        given &= number >= count if self._priorities is None else ~self._priorities.has(slots, sequences)
        if bool(given.any()):
            self._set_priorities(slots[given], priority[given], sequences[given])

    @property
    def _credit(self) -> int:
        """How many rows a producer may have on their way here, so that few wait, whichever side is faster."""
        producers = len(self._tenancies.record.producers)
        return max(1, _QUEUE_BYTES // (self._layout.payload_bytes * max(1, producers)))

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
            self._tenancies.end_all()
            return self.incarnation
        with self._lanes.exclusive("empty()"):
            self._tenancies.end_all()
            self._buffer.empty()
            self._tenancies.hold_lanes()  # also those that were lent
            self._tenancies.write()
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
        self._tenancies.end_all()
        if self._storage.lanes is not None:
            self._lanes.release_lane(0)  # a load takes one as `extend` does
        try:
            self._buffer.loads(path, snapshot=snapshot)
        finally:
            if self._storage.lanes is not None:
                self._lanes.release()
                self._tenancies.hold_lanes()
                self._tenancies.write()
                self._rewrite_priorities()
        return self.incarnation

    def close(self) -> None:
        """Ends the use of the store; with a `scratch_dir` a new shard can continue with it."""
        with self._lock:
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
