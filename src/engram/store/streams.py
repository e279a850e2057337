"""The table of streams: of processes that write rows of others, whose these are, and how many of each are in.

streams:  a page with the format's name, then entries of 512 bytes
entry:    0: the stream's record, which native code writes (src/native/stream_protocol.hpp)
          128: CRC-32 of what follows up to the name's end, stream, before, rows before, length of the name, name
          511: 0: free, 1: in force, 2: ended
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import engram._native as _native
from engram._system import memory_file, open_regular
from engram.errors import NoFreeLaneError, StorageError
from engram.store.lanes import Lanes

_HEAD, _ENTRY, _NAME_AT, _STATE_AT = 4096, 512, 128, 511
_ABOUT = struct.Struct("<QQQH")
_FORMAT = b"engram streams 1"
_FREE, _IN_FORCE, _ENDED = range(3)
MOST_STREAMS = 8192
_HIGHEST_NUMBER = (1 << (63 - _native.PID_BITS)) - 1  # of a stream: half of all, so that there is always another one
LONGEST_NAME = _STATE_AT - _NAME_AT - 4 - _ABOUT.size  # bytes


@dataclasses.dataclass(eq=False)
class StreamEntry:
    """A stream of the table.

    Attributes:
        at: the number of its entry.
        stream: the number that its rows are of, with a pid in the lowest bits.
        name: whose rows they are.
        has_ended: no row of it comes any more.
        before: the number of the stream of that name before, and how many rows it had; None: there was none.
        writer: what this process appends its rows with; None: another process may.
    """

    at: int
    stream: int
    name: str
    has_ended: bool = False
    before: tuple[int, int] | None = None
    writer: _native.Stream | None = None

    @property
    def number(self) -> int:
        """The stream's number, which no other one of the store ever has."""
        return self.stream >> _native.PID_BITS


class StreamTable:
    """The table of streams of a store whose writers move from lane to lane.

    One process at a time begins streams and ends them. The rows of one are appended by this process, or by another that
    adopts it. Their count is right whoever dies (docs/memory-model.md).

    Args:
        lanes: of the store.
        path: of the file; it is made. None: the table is in memory, for this process.

    Raises:
        StorageError: the file is another one, or damaged; or there is no room for it; or the store has one lane only.
    """

    def __init__(self, lanes: Lanes, path: Path | None) -> None:
        if not lanes.moves_on or lanes.locks is None:
            raise StorageError(
                "a store of one lane cannot have several streams: it was made by an older engram for a shard with "
                "lanes=1; draw its rows there, or save and load them"
            )
        self._store, self._lanes, self._locks = lanes.store, lanes, lanes.locks
        fd = _opened(path)
        try:
            self._memory = mmap.mmap(fd, _HEAD + MOST_STREAMS * _ENTRY)
            lanes.hold()
            self._store.use_streams(fd)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        #: Those in the table, by name: the newest of each.
        self.entries: dict[str, StreamEntry] = {}
        self._free: list[int] = []
        self._highest = 0  # number of a stream
        self._used = MOST_STREAMS
        try:
            for at in range(MOST_STREAMS):
                place = self._store.stream_place(at)
                if place is None:
                    self._used = at
                    break
                self._read(at, place[0])
        except ValueError as error:
            self._memory.close()
            raise StorageError(_damaged(path, f"entry {at}: {error}")) from error

    def _read(self, at: int, stream: int) -> None:
        number = stream >> _native.PID_BITS
        if number > _HIGHEST_NUMBER:
            raise ValueError(f"{number} is no number of a stream, the highest one is {_HIGHEST_NUMBER}")
        self._highest = max(self._highest, number)
        entry = self._entry(at, stream)
        if entry is None:
            self._free.append(at)
            return
        other = self.entries.get(entry.name)
        if other is not None and other.stream > entry.stream:  # a process died while it began the newer one
            entry, other = other, entry
        if other is not None:
            self._forget(other)
        self.entries[entry.name] = entry

    def _entry(self, at: int, stream: int) -> StreamEntry | None:
        start = _HEAD + at * _ENTRY
        state, at_name = self._memory[start + _STATE_AT], start + _NAME_AT
        about = self._memory[at_name + 4 : at_name + 4 + _ABOUT.size]
        named, before, rows, length = _ABOUT.unpack(about)
        name = self._memory[at_name + 4 + _ABOUT.size :][: min(length, LONGEST_NAME)] if state else b""
        (crc,) = struct.unpack("<I", self._memory[at_name : at_name + 4])
        if state not in (_IN_FORCE, _ENDED) or named != stream or crc != zlib.crc32(about + name):
            return None
        return StreamEntry(at, stream, name.decode(), state == _ENDED, (before, rows) if before else None)

    # ---- beginning and ending ----
    def begin(self, name: str) -> StreamEntry:
        """Begins a stream of this name, whose one before has ended, and which this process appends.

        Where the table is full the stream that ended first is forgotten, or the one that began first.

        Raises:
            ValueError: the name is too long.
        """
        encoded = name.encode()
        if len(encoded) > LONGEST_NAME:
            raise ValueError(f"a name of {len(encoded)} bytes was given; the longest has {LONGEST_NAME}")
        old = self.entries.get(name)
        before = None if old is None else (old.number, self.rows(old))
        if old is not None and not old.has_ended:
            raise ValueError(f"{name!r} has a stream already")
        # A table may be of a store that was here before: no number of it is given again.
        number = self._store.new_writer(0, os.getpid(), self._highest)
        entry = StreamEntry(self._room(), number, name, before=before)
        about = _ABOUT.pack(entry.stream, *(before or (0, 0)), len(encoded))
        start = _HEAD + entry.at * _ENTRY
        self._set_state(entry, _FREE)
        block = struct.pack("<I", zlib.crc32(about + encoded)) + about + encoded
        self._memory[start + _NAME_AT : start + _NAME_AT + len(block)] = block
        self._store.set_stream_place(entry.at, entry.stream, None, 0, 0)
        self._set_state(entry, _IN_FORCE)
        if old is not None and self.entries.get(name) is old:  # else it has made room for the new one
            self._forget(old)
        self.entries[name] = entry
        self.adopt(entry)
        return entry

    def _room(self) -> int:
        if self._free:
            return self._free.pop()
        if self._used < MOST_STREAMS:
            self._used += 1
            return self._used - 1
        for oldest in sorted(self.entries.values(), key=lambda one: (not one.has_ended, one.stream)):
            try:
                self.end(oldest)
            except NoFreeLaneError:  # it is another process's, which lives
                continue
            self._forget(oldest)
            return self._free.pop()
        raise NoFreeLaneError(
            f"{MOST_STREAMS} producers write to this store by themselves, which is all that there can be: end some"
        )

    def end(self, entry: StreamEntry, rows: int | None = None) -> int:
        """Ends a stream; returns how many rows it has. `rows`: as is known otherwise.

        Raises:
            NoFreeLaneError: another process appends its rows.
        """
        if not entry.has_ended:
            if rows is None:
                self.adopt(entry)
                rows = self.rows(entry)
            self._release(entry)
            self._store.set_stream_place(entry.at, entry.stream, None, 0, rows)
            self._set_state(entry, _ENDED)
            entry.has_ended = True
        return self.rows(entry)

    def _forget(self, entry: StreamEntry) -> None:
        self._set_state(entry, _FREE)
        self._free.append(entry.at)
        if self.entries.get(entry.name) is entry:
            del self.entries[entry.name]

    def _set_state(self, entry: StreamEntry, state: int) -> None:
        self._memory[_HEAD + entry.at * _ENTRY + _STATE_AT] = state

    # ---- whose rows this process appends ----
    def adopt(self, entry: StreamEntry) -> None:
        """Makes this process the one that appends the stream's rows, once whoever did has ended.

        Raises:
            NoFreeLaneError: that lives.
            StorageInUseError: a process was stopped while it appended in the stream's lane.
        """
        if entry.writer is not None:
            return
        if not self._locks.take_writer(entry.number):
            raise NoFreeLaneError(
                f"{entry.name!r} is a living process, which writes by itself: each producer needs a name of its own. "
                "Nothing was changed"
            )
        try:
            entry.writer = self._store.adopt_stream(entry.at)
        except BaseException:
            self._locks.free_writer(entry.number)
            raise

    def lend(self, entry: StreamEntry) -> None:
        """Lets another process adopt a stream of this one."""
        self._release(entry)

    def _release(self, entry: StreamEntry) -> None:
        if entry.writer is not None:
            self._store.give_turns_back(entry.writer)
            entry.writer = None
            self._locks.free_writer(entry.number)

    def rows(self, entry: StreamEntry) -> int:
        """How many rows of a stream are in, as far as this process or the record knows."""
        if entry.writer is not None:
            return entry.writer.position
        place = self._store.stream_place(entry.at)
        return 0 if place is None else place[4]

    def rows_after_recovery(self, entry: StreamEntry) -> int:
        """How many rows a stream has in a store whose lanes may end elsewhere than when its record was written.

        Rows that a lane has lost are not counted; of those that the record does not know, those up to the first seam.
        """
        place = self._store.stream_place(entry.at)
        if place is None:
            return 0
        _, _, lane, start, position = place
        if lane is None:
            return position
        published: int = self._store.lane(lane)["published"]
        end = min([seam for seam in self._store.seams(lane) if seam >= start] + [published])
        return max(0, position + end - start) if published >= start else max(0, position - (start - published))

    @contextlib.contextmanager
    def writing(self, entry: StreamEntry) -> Iterator[None]:
        """A block in which what this process appends to the store is of this stream; the caller has its mutex."""
        assert entry.writer is not None
        self._store.write_as(entry.writer)
        try:
            yield
        finally:
            self._store.write_as(None)

    def places(self, entry: StreamEntry, first: int, n: int) -> list[tuple[int, int, int, int]]:
        """Where rows `first` to `first + n - 1` of a stream lie, as far as is known: (row, lane, sequence, rows)."""
        found = []
        for lane in range(self._store.lanes):
            extents = self._store.extents(lane)
            ends = [*(start for start, _, _ in extents), self._store.lane(lane)["published"]][1:]
            for (start, stream, position), end in zip(extents, ends, strict=False):  # without extents there is no end
                low, high = max(position, first), min(position + end - start, first + n)
                if stream == entry.stream and low < high:
                    found.append((low, lane, start + low - position, high - low))
        return found

    # ---- turns that are kept, so that it is known where the next rows go ----
    def keep_place(self, entry: StreamEntry, keeps: bool) -> None:
        """Whether the stream's lane stays its own from its next append on, until `give_back`."""
        if entry.writer is not None:
            entry.writer.keeps = keeps

    def kept_place(self, entry: StreamEntry) -> tuple[int, int, int] | None:
        """Lane, sequence and number of the next rows of a stream whose lane is kept; None: it is not."""
        return None if entry.writer is None else self._store.kept_place(entry.writer)

    def give_back(self, entry: StreamEntry | None = None) -> None:
        """Lets others write in the lane that is kept for a stream; None: for any."""
        self._store.give_turns_back(None if entry is None else entry.writer)

    def close(self) -> None:
        """Ends the use of the table; streams stay."""
        self._store.give_turns_back(None)
        for entry in self.entries.values():
            entry.writer = None
        self._memory.close()


class AdoptedStream:
    """A stream that this process appends, of a table that another one keeps.

    Args:
        path: of the table.
        at, number: of its entry, and of the stream.

    Raises:
        NoFreeLaneError: another process appends its rows.
    """

    def __init__(self, lanes: Lanes, path: Path, at: int, number: int) -> None:
        if lanes.locks is None:
            raise StorageError("the store is not one that processes share")
        lanes.hold()
        self._store = lanes.store
        fd = open_regular(path, os.O_RDWR)
        try:
            self._store.use_streams(fd)
        finally:
            os.close(fd)
        if not lanes.locks.take_writer(number):
            raise NoFreeLaneError("another process writes under the name of this producer; end it first")
        try:
            self._writer = self._store.adopt_stream(at)
            if self._writer.number >> _native.PID_BITS != number:
                raise StorageError("the producer's stream has ended")
        except BaseException:
            lanes.locks.free_writer(number)
            raise

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self._writer.position

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """As `StreamTable.writing`; only one thread writes to the store."""
        self._store.write_as(self._writer)
        try:
            yield
        finally:
            self._store.write_as(None)


def _opened(path: Path | None) -> int:
    """The file of a table, which is made whole or not at all."""
    size = _HEAD + MOST_STREAMS * _ENTRY
    if path is None:
        fd = memory_file("engram-streams")
        os.truncate(fd, size)
        return fd
    try:
        if not path.exists():
            aside = path.with_suffix(".new")
            fd = open_regular(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            try:
                os.posix_fallocate(fd, 0, size)
                os.pwrite(fd, _FORMAT, 0)
                os.replace(aside, path)
            finally:
                os.close(fd)
        fd = open_regular(path, os.O_RDWR)
    except OSError as error:
        raise StorageError(f"{path} cannot be made or opened: {error.strerror}") from error
    if os.fstat(fd).st_size != size or os.pread(fd, len(_FORMAT), 0) != _FORMAT:
        os.close(fd)
        raise StorageError(_damaged(path, "its size or its first bytes are those of another file"))
    return fd


def _damaged(path: Path | None, what: str) -> str:
    return (
        f"{path or 'the table of streams'} is damaged, or of another engram ({what}). Without it the shard cannot tell "
        "whose rows it has; delete it, and producers begin anew"
    )
