"""How the rows of a chunk lie in its file: as they are, or every observation once (`flat`, `nested`)."""

from __future__ import annotations

import functools
import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from engram.checkpoint.directory import from_json, to_json
from engram.checkpoint.protocols import Hook, Rows, RowSink, RowSource, StorageCheckpointerBase, apply_hooks
from engram.checkpoint.reader import THREADS, SnapshotReader, in_parallel
from engram.checkpoint.writer import Block, SnapshotWriter
from engram.errors import CorruptCheckpointError
from engram.store.counters import Counters
from engram.store.layout import LeafSpec
from engram.ted import codec as ted_codec
from engram.ted.codec import Column, Positions

Details = tuple[int, ...]
WHOLE = -1  # in place of a number of values: every value is there


class Packing(Protocol):
    """Makes the content of a chunk's file of its rows, and the rows of the content.

    `details` are numbers that stand beside a chunk in the manifest; with them the size of its file is known.
    """

    @property
    def row_bytes(self) -> int:
        """About how many bytes of a file a row takes."""

    def state(self) -> dict[str, Any]:
        """JSON that `loads` needs, and that must be the same for a file to be taken over by the next save."""

    def pack(self, rows: Rows, cuts: Sequence[int]) -> tuple[Details, list[Block]]:
        """Details and content of rows `[strands, steps, row_bytes]`; no trajectory goes on across one of `cuts`."""

    def nbytes(self, details: Details, strands: int, steps: int) -> int:
        """The size of a file; ValueError when these details cannot be."""

    def unpack(self, content: Rows, details: Details, strands: int, steps: int) -> Rows:
        """Rows `[strands, steps, row_bytes]`, valid as long as `content` is; ValueError when they cannot be."""


class RawPacking:
    """Rows as they are."""

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes

    def state(self) -> dict[str, Any]:
        return {}

    def pack(self, rows: Rows, cuts: Sequence[int]) -> tuple[Details, list[Block]]:
        return (), [rows]

    def nbytes(self, details: Details, strands: int, steps: int) -> int:
        if details:
            raise ValueError(f"rows as they are have no details, found {details}")
        return strands * steps * self.row_bytes

    def unpack(self, content: Rows, details: Details, strands: int, steps: int) -> Rows:
        return content.reshape(strands, steps, self.row_bytes)


class Sections:
    """Takes the content of a file apart, front to back."""

    def __init__(self, content: Rows) -> None:
        self._content, self._at = content, 0

    def values(self, count: int, nbytes: int) -> Rows:
        """uint8 [count, nbytes]."""
        return self._take(count * nbytes).reshape(count, nbytes)

    def positions(self, count: int, below: int) -> Positions:
        """int64 [count]: rising positions of steps; a ValueError says that they are not."""
        found = self._take(4 * count).view("<u4").astype(np.int64)
        if count and (found[-1] >= below or (np.diff(found) <= 0).any()):
            raise ValueError("positions of steps do not rise, or go beyond the last step")
        return found

    def _take(self, nbytes: int) -> Rows:
        taken = self._content[self._at : self._at + nbytes]
        if len(taken) != nbytes:
            raise ValueError("its content is shorter than its details say")
        self._at += nbytes
        return taken


def positions_block(positions: Positions) -> Block:
    return positions.astype("<u4")


def column_of(flat: Rows, leaf: LeafSpec) -> Column:
    """uint8 [n, nbytes]: a leaf of rows [n, row_bytes], copied."""
    return np.ascontiguousarray(flat[:, leaf.offset : leaf.offset + leaf.nbytes])


def put_column(flat: Rows, leaf: LeafSpec, column: Column) -> None:
    """The reverse."""
    flat[:, leaf.offset : leaf.offset + leaf.nbytes] = column


def pack_values(column: Column) -> tuple[int, list[Block]]:
    """Every value, or the steps where it changes and the new values: how many, or WHOLE, and the shorter of the two."""
    starts = ted_codec.run_starts(column)
    if section_bytes(column.shape[1], len(starts), len(column)) >= column.size:
        return WHOLE, [column]
    return len(starts), [positions_block(starts), column[starts]]


def unpack_values(sections: Sections, nbytes: int, count: int, n: int) -> Column:
    """The column of n steps that `pack_values` packed."""
    if count == WHOLE:
        return sections.values(n, nbytes)
    return ted_codec.repeat_runs(sections.positions(count, n), sections.values(count, nbytes), n)


def section_bytes(nbytes: int, count: int, n: int) -> int:
    """Size of a section of `count` positions and values, or of all n values."""
    return n * nbytes if count == WHOLE else count * (4 + nbytes)


class Identified(Protocol):
    """A storage that can say what of it has changed."""

    def identity(self) -> dict[str, Any]: ...
    def edited(self, since: dict[str, Any]) -> list[tuple[int, int]] | None: ...


class Unchanged:
    """Rows that have not changed since a snapshot: the same store, and no edit in between.

    Args:
        source: the storage that is being saved.
        previous: what its checkpointer returned for the snapshot in force.
        same: entries of `previous` that must be as they are now: the layout, how rows are cut, the hooks.
    """

    def __init__(self, source: Identified, previous: dict[str, Any] | None, same: dict[str, Any]) -> None:
        self._edited: set[tuple[int, int]] = set()
        self.any = previous is not None and all(previous.get(key) == value for key, value in same.items())
        since = None if previous is None else previous.get("identity")
        if self.any and isinstance(since, dict):
            edited = source.edited(since)
            self.any = edited is not None
            self._edited = set(edited or ())
        else:
            self.any = False

    def holds(self, lane: int, start: int, stop: int) -> bool:
        """Whether none of these write numbers was changed."""
        return self.any and not any(e[0] == lane and start <= e[1] < stop for e in self._edited)


CHUNK_BYTES = 1 << 24
_CHUNKS_AHEAD = THREADS + 2  # that the disk reads while others are taken in
_LARGEST_CHUNK = 1 << 26  # that is read; four times as large as those that are written


@dataclass(frozen=True)
class Chunk:
    """Rows `start` to `stop` of a lane in one file, the strands one after the other."""

    lane: int
    number: int
    start: int
    stop: int
    details: Details = ()

    @classmethod
    def read(cls, entry: list[Any]) -> Chunk:
        """What `entry` gave; ValueError or TypeError where it is not that."""
        if any(type(detail) is not int for detail in entry[4:]):
            raise ValueError(f"{entry!r} does not describe a chunk")
        lane, number, start, stop = map(natural, entry[:4])
        return cls(lane, number, start, stop, tuple(entry[4:]))

    @property
    def entry(self) -> list[int]:
        return [self.lane, self.number, self.start, self.stop, *self.details]

    @property
    def place(self) -> tuple[int, int]:
        return self.lane, self.number

    @property
    def file(self) -> str:
        return f"storage/rows-{self.lane:05d}-{self.number:08d}.bin"


class ChunkedStorageCheckpointer(StorageCheckpointerBase[RowSource, RowSink]):
    """Saves rows in chunks: the size on disk follows the rows that exist, not the capacity.

    Chunk `c` of a lane holds write numbers `c * rows_per_chunk` to `(c + 1) * rows_per_chunk`, as far as they exist.
    Each layout has one `rows_per_chunk` (about 16 MB), so a later save cuts unchanged rows at the same places.
    """

    needs = "read_block"

    @abstractmethod
    def _packing(self, layout: dict[str, Any]) -> Packing:
        """How rows of this layout are written; ValueError when they cannot be."""

    @abstractmethod
    def _saved_packing(self, layout: dict[str, Any], state: dict[str, Any]) -> Packing:
        """How they were written; KeyError, TypeError or ValueError when `state` does not say it."""

    def nbytes(self, source: RowSource, previous: dict[str, Any] | None = None) -> int:
        layout = source.layout_state()
        if layout is None:
            return 0
        packing = self._packing(layout)
        known, said = Counters(source.counters()), self._said(source, layout, packing)
        kept = self._kept(source, known, said, previous)
        new = [c for c in cut(known, said["rows_per_chunk"]) if c.place not in kept]
        return sum(c.stop - c.start for c in new) * known.envs * packing.row_bytes

    def dumps(
        self, source: RowSource, writer: SnapshotWriter, previous: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        layout, counters = json_copy(source.layout_state()), json_copy(source.counters())
        if layout is None:
            return {"layout": None, "counters": counters, "rows_per_chunk": 0, "chunks": []}
        packing = self._packing(layout)
        known, said = Counters(counters), self._said(source, layout, packing)
        kept = self._kept(source, known, said, previous)
        written = []
        for chunk in cut(known, said["rows_per_chunk"]):
            old = kept.get(chunk.place)
            if old is not None and writer.reuse(old.file):
                chunk = old  # it may begin with rows that exist no longer
            else:
                rows = read_rows(source, chunk, known.envs, layout["row_bytes"], self.save_hooks)
                details, blocks = packing.pack(rows, cuts_of(counters["lanes"][chunk.lane], chunk))
                writer.write_file(chunk.file, blocks)
                chunk = replace(chunk, details=details)
            written.append(chunk.entry)
        # Other processes may have overwritten the oldest rows before they were read.
        counters = json_copy(source.counters())
        left = Counters(counters)
        return {**said, "counters": counters, "chunks": [c for c in written if c[3] > left.first(c[0])]}

    def _said(self, source: RowSource, layout: dict[str, Any], packing: Packing) -> dict[str, Any]:
        per_number = Counters(source.counters()).envs * layout["row_bytes"]
        return {
            **packing.state(),
            "layout": layout,
            "rows_per_chunk": rows_per_chunk(per_number),
            # A hook may change any byte: what was written with one cannot be told from what would be written now.
            "identity": None if self.save_hooks else json_copy(source.identity()),
        }

    def _kept(
        self, source: RowSource, known: Counters, said: dict[str, Any], previous: dict[str, Any] | None
    ) -> dict[tuple[int, int], Chunk]:
        """Chunks of the snapshot in force, by lane and number, that hold all rows of theirs that exist now."""
        if said["identity"] is None or previous is None:
            return {}
        unchanged = Unchanged(source, previous, {k: said[k] for k in said if k != "identity"})
        try:
            found = [Chunk.read(entry) for entry in previous["chunks"]] if unchanged.any else []
        except (KeyError, TypeError, ValueError):
            return {}
        now = {c.place: c for c in cut(known, said["rows_per_chunk"])}
        return {
            old.place: old
            for old in found
            if (new := now.get(old.place)) is not None
            and old.stop == new.stop
            and unchanged.holds(new.lane, new.start, new.stop)
        }

    def check(self, sink: RowSink, reader: SnapshotReader, state: dict[str, Any]) -> None:
        plan = _Plan(reader, state, self._saved_packing)
        sink.check_restore(plan.layout, plan.counters)

    def loads(self, sink: RowSink, reader: SnapshotReader, state: dict[str, Any]) -> None:
        plan = _Plan(reader, state, self._saved_packing)
        sink.check_restore(plan.layout, plan.counters)
        if len(sink):
            in_parallel((functools.partial(plan.rows, c) for c in plan.asked_for()), THREADS)
        sink.begin_restore(plan.layout, plan.counters)
        try:
            # Hooks see the blocks in their order, and run in the thread that holds the buffer's locks; without any,
            # several files are read, hashed and copied at once.
            if self.load_hooks:
                for chunk in plan.asked_for():
                    self._load(sink, plan, chunk)
            else:
                in_parallel((functools.partial(self._load, sink, plan, c) for c in plan.asked_for()), THREADS)
            sink.end_restore()
        except BaseException:
            sink.abort_restore()
            raise

    def _load(self, sink: RowSink, plan: _Plan, chunk: Chunk) -> None:
        start, rows = plan.rows(chunk)
        sink.write_block(chunk.lane, start, hooked(self.load_hooks, rows))


class TensorStorageCheckpointer(ChunkedStorageCheckpointer):
    """Saves rows as they are."""

    format = "rows"

    def _packing(self, layout: dict[str, Any]) -> Packing:
        return RawPacking(layout["row_bytes"])

    def _saved_packing(self, layout: dict[str, Any], state: dict[str, Any]) -> Packing:
        return RawPacking(natural(layout["row_bytes"]))


class _Plan:
    """What a snapshot says of its rows, checked to be possible, and its blocks of rows."""

    def __init__(
        self,
        reader: SnapshotReader,
        state: dict[str, Any],
        packing: Callable[[dict[str, Any], dict[str, Any]], Packing],
    ) -> None:
        self._reader = reader
        self._buffers = threading.local()
        try:
            self.layout: dict[str, Any] | None = state["layout"]
            self.counters: dict[str, Any] = state["counters"]
            self._known = Counters(self.counters)
            self.chunks = [Chunk.read(entry) for entry in state["chunks"]]
            if self.layout is not None:
                self._known.check_envs(self.layout)
            self._row_bytes = 0 if self.layout is None else natural(self.layout["row_bytes"])
            self._packing = RawPacking(0) if self.layout is None else packing(self.layout, state)
            self._most = max(1, natural(state["rows_per_chunk"]))
            self._sizes = {chunk.place: self._nbytes(chunk) for chunk in self.chunks}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise reader.malformed(f"its description of the rows is malformed ({error!r})") from error
        self._check_sizes()
        self._check_coverage()

    def asked_for(self) -> Iterator[Chunk]:
        """The chunks, each handed out when the disk has been made to read those after it."""
        for i, chunk in enumerate(self.chunks):
            for later in self.chunks[i + _CHUNKS_AHEAD : i + _CHUNKS_AHEAD + 1]:
                self._reader.ask_for(later.file)
            yield chunk

    def rows(self, chunk: Chunk) -> tuple[int, Rows]:
        """First write number and verified rows of a chunk; they are valid until this thread's next call."""
        nbytes = self._nbytes(chunk)
        buffer = getattr(self._buffers, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._buffers.buffer = np.empty(nbytes, np.uint8)
        content = buffer[:nbytes]
        self._reader.read_into(chunk.file, content)
        rows = self._unpack(chunk, content)
        start = max(chunk.start, self._known.first(chunk.lane))
        return start, rows[:, start - chunk.start :]

    def _unpack(self, chunk: Chunk, content: Rows) -> Rows:
        try:
            return self._packing.unpack(content, chunk.details, self._known.envs, chunk.stop - chunk.start)
        except ValueError as error:
            raise CorruptCheckpointError(self._reader.path(chunk.file), str(error)) from error

    def _nbytes(self, chunk: Chunk) -> int:
        steps = chunk.stop - chunk.start
        # A few bytes can stand for many equal rows: how many there are is limited before memory is taken for them.
        per_step = self._known.envs * self._row_bytes
        if not 0 < steps <= self._most or steps * per_step > most_row_bytes(per_step):
            raise ValueError(f"{chunk.file} cannot hold rows {chunk.start} to {chunk.stop}")
        return self._packing.nbytes(chunk.details, self._known.envs, steps)

    def _check_sizes(self) -> None:
        for chunk in self.chunks:
            if self._reader.nbytes(chunk.file) != self._sizes[chunk.place]:
                raise self._reader.malformed(f"{chunk.file} is not as long as its rows {chunk.start} to {chunk.stop}")

    def _check_coverage(self) -> None:
        """Each row that exists is in one chunk; a chunk may begin with rows that exist no longer."""
        reached = [self._known.first(lane) for lane in range(self._known.lanes)]
        started = [False] * self._known.lanes
        for chunk in self.chunks:
            fits = (
                chunk.lane < len(reached)
                and chunk.stop > reached[chunk.lane]
                and (
                    chunk.start == reached[chunk.lane]
                    or (chunk.start < reached[chunk.lane] and not started[chunk.lane])
                )
            )
            if not fits:
                raise self._reader.malformed(f"{chunk.file} does not follow the chunk before it")
            reached[chunk.lane], started[chunk.lane] = chunk.stop, True
        expected = [
            self._known.first(lane) if self.layout is None else self._known.stop(lane) for lane in range(len(reached))
        ]
        if reached != expected:
            raise self._reader.malformed("its chunks do not hold every row that its counters say exists")


def read_rows(source: RowSource, chunk: Chunk, strands: int, row_bytes: int, hooks: list[Hook]) -> Rows:
    """The rows of a chunk, as the hooks left them: `[strands, steps, row_bytes]`."""
    rows = hooked(hooks, source.read_block(chunk.lane, chunk.start, chunk.stop))
    expected = (strands, chunk.stop - chunk.start, row_bytes)
    if rows.dtype != np.uint8 or rows.shape != expected:
        raise ValueError(f"the storage gave a block of {rows.dtype} {rows.shape}, expected uint8 {expected}")
    return rows


def hooked(hooks: list[Hook], rows: Rows) -> Rows:
    """What hooks made of a block of rows."""
    changed: Rows = apply_hooks(hooks, rows)
    if changed.shape != rows.shape or changed.dtype != rows.dtype:
        raise ValueError(
            f"a hook made {changed.dtype} {changed.shape} of a block of rows {rows.dtype} {rows.shape}; "
            "it may change bytes, not how many there are"
        )
    return changed


def cuts_of(lane: dict[str, Any], chunk: Chunk) -> list[int]:
    """Where in a chunk other trajectories begin whatever the rows say: another process took the lane over."""
    return [seam - chunk.start for seam in lane["seams"] if chunk.start < seam < chunk.stop]


def rows_per_chunk(bytes_per_number: int) -> int:
    return max(1, math.ceil(CHUNK_BYTES / max(1, bytes_per_number)))


def most_row_bytes(bytes_per_number: int) -> int:
    """The most bytes of the rows of a chunk that is read."""
    return _LARGEST_CHUNK + bytes_per_number


def cut(counters: Counters, rows_per_chunk: int, only: int | None = None) -> Iterator[Chunk]:
    """The chunks that hold every row, of all lanes or of one."""
    for lane in range(counters.lanes) if only is None else [only]:
        first, stop = counters.first(lane), counters.stop(lane)
        for number in range(first // rows_per_chunk, -(-stop // rows_per_chunk) if stop > first else 0):
            begin = number * rows_per_chunk
            yield Chunk(lane, number, max(first, begin), min(stop, begin + rows_per_chunk))


def natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def json_copy(value: Any) -> Any:
    # a copy: the storage's own objects may change before the manifest is written
    return from_json(to_json(value))
