"""The producers of a shard: each is a stream of its store, whose count outlives every process."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from engram.data import LazyMemmapStorage, LazyTensorStorage
from engram.errors import StorageError
from engram.kernel.disk import DocumentFile
from engram.kernel.rows import StreamEntry, StreamTable
from engram.kernel.tools import forms

_RECORD = "shard.json"
STREAMS = "streams"  # the file of the table of streams, beside the store
#: Seconds after it was sent for which the answer to a call says where the producer's next rows go (`Place`).
PLACE_HOLDS = 0.25
LANE_KEPT = 1.0  # seconds; longer, so that rows that are sent until then have time to come
_LEAST_WAIT = 0.005  # seconds, before rows that have to wait are sent again
_KEPT_SHARE = 4  # a quarter of the lanes is kept at most, so that producers that pause do not keep much


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


def store_identity(storage: LazyTensorStorage | LazyMemmapStorage) -> tuple[str, int] | None:
    """The store of a storage, and its incarnation; None: it is not made."""
    store = storage.lanes.store
    return (store.store_id.hex(), store.incarnation) if storage.initialized else None


_STORE = forms.nullable(forms.fields(forms.text, forms.integer()))
_DOCUMENT = forms.record({"incarnation": forms.integer(), "store": _STORE, "replaced": forms.integer()})


@dataclasses.dataclass(frozen=True)
class Record:
    """What a successor of the shard's process has to know, in a small file beside the table of streams."""

    incarnation: int
    store: tuple[str, int] | None = None  # id and incarnation of the store that it speaks of
    replaced: int = 0  # how often all rows were emptied, or replaced by a load

    @classmethod
    def of(cls, state: dict[str, Any]) -> Record:
        """The record of which `dataclasses.asdict` made this document; ValueError where it is none."""
        forms.check(_DOCUMENT, state, "it")
        store = state["store"]
        return cls(state["incarnation"], None if store is None else (store[0], store[1]), state["replaced"])


class Producers:
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
        self._waiting: dict[StreamEntry, float] = {}  # until when, for lanes that are kept for others
        self.record = Record(time.time_ns())

    # ---- opening ----
    def open(self) -> None:
        """Continues from the record of a predecessor, if there is one."""
        before = self._read()
        if before is not None:
            self.record = dataclasses.replace(before, incarnation=max(before.incarnation + 1, time.time_ns()))
        if self._storage.initialized:
            self.open_table(None if before is None else before.store)

    def open_table(self, before: tuple[str, int] | None = None) -> None:
        """Opens the table of streams, which was kept beside the store `before`."""
        self._table = StreamTable(self._storage.lanes, None if self._folder is None else self._folder / STREAMS)
        store = store_identity(self._storage)
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

    def _read(self) -> Record | None:
        if self._folder is None:
            return None
        path = self._folder / _RECORD
        try:
            return Record.of(DocumentFile(path).read())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise StorageError(
                f"{path} is damaged: {error}. Without it the shard cannot tell whose rows it has; delete it, and "
                "producers begin anew"
            ) from error

    def write(self, record: Record | None = None) -> None:
        """Puts a record in force, in the file and then here, whole or not at all; None: the same in a changed store."""
        record = self.record if record is None else record
        record = dataclasses.replace(record, store=store_identity(self._storage))
        if self._folder is not None and self._storage.initialized:
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
        self._waiting.pop(entry, None)
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
    def wait_for(self, entry: StreamEntry, n: int) -> float | None:
        """Seconds until a producer should send its next n rows again: lanes that they need are kept for others.

        None: they can be appended. While one waits no other producer is told of a place, so that the lanes are free
        when the last one that was told has had its time.
        """
        store = self._storage.lanes.store
        if n <= (store.lanes - len(self._kept)) * store.lane_capacity:  # as nearly always
            return None
        self._give_idle_back(time.monotonic())
        told = [when for other, when in self._kept.items() if other is not entry]
        if not told or n <= (store.lanes - len(told)) * store.lane_capacity:
            return None
        self._waiting[entry] = max(told) + LANE_KEPT
        return self.wait_of(entry)

    def wait_of(self, entry: StreamEntry) -> float | None:
        """The same, of rows that a producer was told to send again; None: there are none."""
        until = self._waiting.get(entry)
        return None if until is None else max(_LEAST_WAIT, until - time.monotonic())

    def _anybody_waits(self, now: float) -> bool:
        """Whether rows need lanes that are kept: they are sent again soon, unless their producer has died."""
        return any(now - until <= LANE_KEPT for until in self._waiting.values())

    def append(self, entry: StreamEntry, append: Callable[[], Tensor]) -> Tensor:
        """Appends rows of a producer; returns their slots. The caller has asked `wait_for` them."""
        now = time.monotonic()
        self._last_rows[entry.name] = now
        self._waiting.pop(entry, None)
        self._give_idle_back(now)
        has_room = entry in self._kept or len(self._kept) < self._storage.lanes.store.lanes // _KEPT_SHARE
        self.table.keep_place(entry, has_room and not self._anybody_waits(now))
        try:
            with self._storage.mutex, self.table.writing(entry):
                return append()
        except BaseException:
            self._kept.pop(entry, None)
            self.table.give_back(entry)  # nobody is told of its place
            raise

    def place(self, entry: StreamEntry) -> Place | None:
        """Where a producer's next rows go, if its lane is kept for it, and others do not wait for that."""
        kept = self.table.kept_place(entry)
        if kept is None or not kept[2]:
            self._kept.pop(entry, None)
            return None
        lane, sequence, rows = kept
        store, now = self._storage.lanes.store, time.monotonic()
        if store.is_overdue(lane) or self._anybody_waits(now):
            self._kept.setdefault(entry, now)
            return None
        self._kept[entry] = now
        return Place(lane * store.lane_capacity, store.lane_capacity, sequence, rows)

    def _give_idle_back(self, now: float) -> None:
        for entry, told in list(self._kept.items()):
            if now - told >= LANE_KEPT:
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
        self._waiting.clear()
        table, self._table = self._table, None
        if table is not None:
            table.close()
