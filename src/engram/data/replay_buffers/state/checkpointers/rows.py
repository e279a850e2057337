"""Checkpointers of packed rows: rows are cut in chunks, a file each, and a codec encodes a chunk.

`TensorStorageCheckpointer` writes rows as their storage keeps them: unchanged, or each observation once.
`checkpointers/ted.py` has codecs of episode data.
"""

from __future__ import annotations

import functools
import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

import engram._native as _native
from engram.checkpoint.directory import OBSERVATIONS
from engram.checkpoint.hooks import json_copy
from engram.checkpoint.protocols import (
    Rows,
    RowSink,
    RowSource,
    StorageCheckpointerBase,
)
from engram.checkpoint.reader import THREADS, in_parallel
from engram.checkpoint.writer import Block
from engram.errors import CorruptCheckpointError
from engram.store.counters import Counters
from engram.store.layout import LayoutState, LeafSpec, ObservationKeys, RowLayout
from engram.ted import codec as ted_codec
from engram.ted.codec import Column, Positions

Details = tuple[int, ...]
WHOLE = -1  # in place of a number of values: every value is there


class ChunkFiles(Protocol):
    """Where chunks are written: a snapshot on disk, or a state in memory."""

    features: set[str]

    def write_file(self, name: str, blocks: Iterable[Block]) -> None: ...
    def reuse(self, *names: str) -> bool: ...


class SavedChunkFiles(Protocol):
    """Where chunks are read from."""

    def nbytes(self, name: str) -> int: ...
    def read_into(self, name: str, buffer: Rows) -> None: ...
    def read_ahead(self, name: str) -> None: ...
    def path(self, name: str) -> str: ...
    def malformed(self, reason: str) -> CorruptCheckpointError: ...


class ChunkCodec(Protocol):
    """Encodes the rows of a chunk as the content of its file, and decodes them.

    `details` are numbers that the manifest has for a chunk; the size of its file follows from them.
    """

    #: What a reader of the snapshot must know.
    features: ClassVar[frozenset[str]]
    #: Steps that a chunk has at least, where they take not much more than other chunks.
    least_steps: ClassVar[int]
    #: That read chunks at once.
    threads: ClassVar[int]

    @property
    def row_bytes(self) -> int:
        """About how many bytes of a file a row takes."""

    @property
    def held_bytes(self) -> int:
        """The bytes of memory that each row of a chunk takes while it is read, by which rows are cut into chunks."""

    def state(self) -> dict[str, Any]:
        """JSON that `loads` needs; the next save reuses files only where it is the same."""

    def pack(
        self, read: Callable[[int, int], Rows], envs: int, steps: int, cuts: Sequence[int]
    ) -> tuple[Details, list[Block]]:
        """Details and content of a chunk of so many steps.

        Args:
            read: rows `[envs, stop - start, row_bytes]` of its steps from `start` to `stop`; each is read once.
            cuts: steps before which no trajectory goes on.
        """

    def nbytes(self, details: Details, envs: int, steps: int) -> int:
        """The size of a file; ValueError when the details are impossible."""

    def unpack(self, content: Rows, details: Details, envs: int, steps: int, first: int) -> Iterator[tuple[int, Rows]]:
        """The rows from step `first` on: blocks `[envs, n, row_bytes]`, each with its first step.

        A block is valid until the next one, and as long as `content` is. ValueError before the first one when the
        content is damaged.
        """


class WholeChunks:
    """A codec that has all rows of a chunk in memory."""

    features: ClassVar[frozenset[str]] = frozenset()
    least_steps: ClassVar[int] = 1
    threads: ClassVar[int] = THREADS


class RawChunkCodec(WholeChunks):
    """Writes rows unchanged."""

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = self.held_bytes = row_bytes

    def state(self) -> dict[str, Any]:
        return {}

    def pack(
        self, read: Callable[[int, int], Rows], envs: int, steps: int, cuts: Sequence[int]
    ) -> tuple[Details, list[Block]]:
        return (), [read(0, steps)]

    def nbytes(self, details: Details, envs: int, steps: int) -> int:
        if details:
            raise ValueError(f"unchanged rows have no details, got {details}")
        return envs * steps * self.row_bytes

    def unpack(self, content: Rows, details: Details, envs: int, steps: int, first: int) -> Iterator[tuple[int, Rows]]:
        yield first, content.reshape(envs, steps, self.row_bytes)[:, first:]


_BLOCK_BYTES = 1 << 20  # of whole rows that are compared, or made, at once


class ObservationCodec:
    """Writes each observation once, and reads rows block by block: whole ones would take many times a chunk's memory.

    Args:
        keys: numbers of the leaves with an observation and its next one, and how many frames they are a stack of.
        n_steps: how many rows behind a row the observation comes that is mostly its next one.

    Raises:
        ValueError: a layout has no such observations.
    """

    features: ClassVar[frozenset[str]] = frozenset({OBSERVATIONS})
    least_steps: ClassVar[int] = 256  # the first stacks of a chunk are whole
    threads: ClassVar[int] = 1  # a storage that keeps observations once takes rows in their order

    def __init__(self, layout: RowLayout, keys: list[tuple[int, int, int]], n_steps: int) -> None:
        leaves = [(layout.leaves[x], layout.leaves[after], frames) for x, after, frames in keys]
        for x, after, frames in leaves:
            if x.nbytes != after.nbytes or frames < 1 or x.nbytes % frames:
                raise ValueError(f"{after.path} is no next observation of {x.path}, in {frames} frames")
        self._keys, self._n_steps, self._whole_bytes = keys, n_steps, layout.payload_bytes
        self._places = [(x.offset, after.offset, frames, x.nbytes // frames) for x, after, frames in leaves]
        newest = sum(nbytes for _, _, _, nbytes in self._places)
        rest = self._whole_bytes - 2 * sum(x.nbytes for x, _, _ in leaves)
        self.row_bytes = self.held_bytes = rest + newest + len(keys)
        self._rest = rest
        self._encoder(1, 1)  # it looks at all places

    @classmethod
    def of(cls, layout: RowLayout, observations: ObservationKeys) -> ObservationCodec:
        """That of a storage which keeps these once."""
        numbers = {leaf.path: i for i, leaf in enumerate(layout.leaves)}
        following = layout.following_of(observations)
        keys = [(numbers[path], numbers[following[path]], frames) for path, frames in observations.frames.items()]
        return cls(layout, keys, observations.n_steps)

    @classmethod
    def saved(cls, layout: RowLayout, state: dict[str, Any]) -> ObservationCodec:
        """The reverse of `state`; KeyError, TypeError or ValueError where it is damaged."""
        keys = [(natural(x), natural(after), natural(frames)) for x, after, frames in state["keys"]]
        if any(max(x, after) >= len(layout.leaves) for x, after, _ in keys):
            raise ValueError(f"{keys} are no leaves of the layout")
        return cls(layout, keys, natural(state["n_steps"]))

    def observations(self, layout: RowLayout) -> ObservationKeys:
        """Which observations the storage that was saved kept once."""
        return ObservationKeys({layout.leaves[x].path: frames for x, _, frames in self._keys}, self._n_steps)

    def state(self) -> dict[str, Any]:
        return {"observations": {"keys": [[*key] for key in self._keys], "n_steps": self._n_steps}}

    def _encoder(self, envs: int, steps: int) -> _native.ObservationEncoder:
        return _native.ObservationEncoder(envs, steps, self._whole_bytes, self._n_steps, self._places)

    def _blocks(self, envs: int, first: int, steps: int) -> Iterator[tuple[int, int]]:
        most = max(1, _BLOCK_BYTES // (envs * self._whole_bytes))
        return ((start, min(start + most, steps)) for start in range(first, steps, most))

    def pack(
        self, read: Callable[[int, int], Rows], envs: int, steps: int, cuts: Sequence[int]
    ) -> tuple[Details, list[Block]]:
        encoder = self._encoder(envs, steps)
        for start, stop in self._blocks(envs, 0, steps):
            encoder.append(read(start, stop))
        sections, given = encoder.sections()
        return tuple(given), sections

    def nbytes(self, details: Details, envs: int, steps: int) -> int:
        n = envs * steps
        if len(details) != len(self._keys):
            raise ValueError(f"{details} do not describe {n} rows with {len(self._keys)} observations")
        newest = sum(1 + nbytes for _, _, _, nbytes in self._places)
        given = sum(count * place[3] for count, place in zip(details, self._places, strict=True))
        return n * (self._rest + newest) + given

    def unpack(self, content: Rows, details: Details, envs: int, steps: int, first: int) -> Iterator[tuple[int, Rows]]:
        decoder = _native.ObservationDecoder(
            content, list(details), envs, steps, self._whole_bytes, self._n_steps, self._places
        )
        for start, stop in self._blocks(envs, first, steps):
            rows = np.empty((envs, stop - start, self._whole_bytes), np.uint8)
            decoder.read(start, rows)
            yield start, rows


class SectionReader:
    """Reads the sections of a file's content, from start to end."""

    def __init__(self, content: Rows) -> None:
        self._content, self._at = content, 0

    def values(self, count: int, nbytes: int) -> Rows:
        """uint8 [count, nbytes]."""
        return self._take(count * nbytes).reshape(count, nbytes)

    def positions(self, count: int, below: int) -> Positions:
        """int64 [count]: positions of steps; ValueError unless they rise and are below `below`."""
        positions = self._take(4 * count).view("<u4").astype(np.int64)
        if count and (positions[-1] >= below or (np.diff(positions) <= 0).any()):
            raise ValueError("positions of steps do not rise, or go beyond the last step")
        return positions

    def _take(self, nbytes: int) -> Rows:
        section = self._content[self._at : self._at + nbytes]
        if len(section) != nbytes:
            raise ValueError("its content is shorter than its details say")
        self._at += nbytes
        return section


def positions_block(positions: Positions) -> Block:
    """Positions as a section of a file."""
    return positions.astype("<u4")


def column_of(flat: Rows, leaf: LeafSpec) -> Column:
    """A copy, uint8 [n, nbytes], of one leaf of rows [n, row_bytes]."""
    return np.ascontiguousarray(flat[:, leaf.offset : leaf.offset + leaf.nbytes])


def put_column(flat: Rows, leaf: LeafSpec, column: Column) -> None:
    """The reverse of `column_of`."""
    flat[:, leaf.offset : leaf.offset + leaf.nbytes] = column


def pack_values(column: Column) -> tuple[int, list[Block]]:
    """Encodes a column as all values (WHOLE), or as changes (their number), whichever is shorter."""
    starts = ted_codec.run_starts(column)
    if section_bytes(column.shape[1], len(starts), len(column)) >= column.size:
        return WHOLE, [column]
    return len(starts), [positions_block(starts), column[starts]]


def unpack_values(sections: SectionReader, nbytes: int, count: int, n: int) -> Column:
    """The reverse of `pack_values` for n steps."""
    if count == WHOLE:
        return sections.values(n, nbytes)
    return ted_codec.repeat_runs(sections.positions(count, n), sections.values(count, nbytes), n)


def section_bytes(nbytes: int, count: int, n: int) -> int:
    """The size of a section of `count` positions and values, or of all n values."""
    return n * nbytes if count == WHOLE else count * (4 + nbytes)


class TracksChanges(Protocol):
    """A storage that records which of its rows were changed in place."""

    def identity(self) -> dict[str, Any]: ...
    def edited(self, since: dict[str, Any]) -> list[tuple[int, int]] | None: ...


class ReusableChunks:
    """Decides which chunks of the current snapshot can be reused: those of the same store without edits since.

    `any` is False where no chunk can.

    Args:
        source: the storage that is being saved.
        previous: what its checkpointer returned for the current snapshot.
        same: entries of `previous` that must be as they are now: the layout, how rows are cut.
    """

    def __init__(self, source: TracksChanges, previous: dict[str, Any] | None, same: dict[str, Any]) -> None:
        since = None if previous is None else previous.get("identity")
        comparable = previous is not None and isinstance(since, dict) and same.items() <= previous.items()
        edited = source.edited(since) if comparable and since is not None else None
        self.any = edited is not None
        self._edited = set(edited or ())

    def unchanged(self, lane: int, start: int, stop: int) -> bool:
        """Whether no row of the lane with a sequence from `start` to `stop` was changed."""
        return self.any and not (self._edited and any(e[0] == lane and start <= e[1] < stop for e in self._edited))


CHUNK_BYTES = 1 << 24
_CHUNKS_AHEAD = THREADS + 2  # that the disk reads while others are decoded
_LARGEST_CHUNK = 1 << 26  # bytes that a chunk may have when it is read; four times what is written


@dataclass(frozen=True)
class Chunk:
    """Rows `start` to `stop` of a lane in one file, the environments one after the other."""

    lane: int
    number: int
    start: int
    stop: int
    details: Details = ()

    @classmethod
    def read(cls, entry: list[Any]) -> Chunk:
        """The reverse of `entry`; ValueError or TypeError where it is damaged."""
        lane, number, start, stop = entry[:4]
        if {*map(type, entry)} != {int} or min(entry[:4]) < 0:
            raise ValueError(f"{entry!r:.80} does not describe a chunk")
        return cls(lane, number, start, stop, tuple(entry[4:]))

    @property
    def entry(self) -> list[int]:
        """The chunk in the manifest."""
        return [self.lane, self.number, self.start, self.stop, *self.details]

    @property
    def place(self) -> tuple[int, int]:
        return self.lane, self.number

    @property
    def file(self) -> str:
        return f"storage/rows-{self.lane:05d}-{self.number:08d}.bin"


class ChunkedStorageCheckpointer(StorageCheckpointerBase[RowSource, RowSink]):
    """Saves rows in chunks: the size on disk follows the rows that exist, not the capacity.

    Chunk `c` of a lane holds the sequences `c * rows_per_chunk` to `(c + 1) * rows_per_chunk`, as far as they exist.
    Each layout has one `rows_per_chunk` (about 16 MB), so a later save cuts unchanged rows at the same places.
    """

    needs = "read_block"

    @abstractmethod
    def _codec(self, layout: LayoutState, source: RowSource) -> ChunkCodec:
        """The codec that writes rows of this layout; ValueError when they cannot be written."""

    @abstractmethod
    def _saved_codec(self, layout: LayoutState, state: dict[str, Any]) -> ChunkCodec:
        """The codec that `state` describes; KeyError, TypeError or ValueError when it is damaged."""

    def plan_save(self, source: RowSource, previous: dict[str, Any] | None = None) -> RowSavePlan | NothingToSave:
        layout, counters = source.layout_state(), source.counters()
        if layout is None:
            return NothingToSave(json_copy(counters))
        layout, counters, identity = json_copy([layout, counters, source.identity()])
        codec = self._codec(LayoutState(layout), source)
        return RowSavePlan(codec, source, layout, counters, identity, previous)

    def plan_restore(self, reader: SavedChunkFiles, state: dict[str, Any]) -> RowRestorePlan:
        return RowRestorePlan(self._saved_codec, reader, state)


@runtime_checkable
class KeepsObservations(Protocol):
    """A RowSource whose storage may keep observations once."""

    observations: ObservationKeys | None


class TensorStorageCheckpointer(ChunkedStorageCheckpointer):
    """Saves rows as the storage keeps them: unchanged, or with `compact=` each observation once."""

    format = "rows"

    def _codec(self, layout: LayoutState, source: RowSource) -> ChunkCodec:
        observations = source.observations if isinstance(source, KeepsObservations) else None
        if observations is None:
            return RawChunkCodec(layout["row_bytes"])
        return ObservationCodec.of(layout.parse(), observations)

    def _saved_codec(self, layout: LayoutState, state: dict[str, Any]) -> ChunkCodec:
        if "observations" not in state:
            return RawChunkCodec(natural(layout["row_bytes"]))
        codec = ObservationCodec.saved(layout.parse(), state["observations"])
        layout.observations = codec.observations(layout.parse())
        return codec


class NothingToSave:
    """The save of a storage to which nothing has been written."""

    nbytes = 0

    def __init__(self, counters: dict[str, Any]) -> None:
        self._counters = counters

    def write(self, writer: ChunkFiles) -> dict[str, Any]:
        return {"layout": None, "counters": self._counters, "rows_per_chunk": 0, "chunks": []}


class RowSavePlan:
    """One save of rows: the chunks that hold them, and which of these the current snapshot has already."""

    def __init__(
        self,
        codec: ChunkCodec,
        source: RowSource,
        layout: dict[str, Any],
        counters: dict[str, Any],
        identity: dict[str, Any],
        previous: dict[str, Any] | None,
    ) -> None:
        self._codec, self._source, self._counters = codec, source, counters
        self._checked = Counters(self._counters)
        self._row_bytes = layout["row_bytes"]
        same = {
            **self._codec.state(),
            "layout": layout,
            "rows_per_chunk": rows_per_chunk(self._checked.envs * codec.held_bytes, codec.least_steps),
        }
        self._description = {**same, "identity": identity}
        self._chunks = cut(self._checked, same["rows_per_chunk"])
        self._reusable = {} if previous is None else self._find_reusable(previous, same)
        steps = sum([c.stop - c.start for c in self._chunks if c not in self._reusable])
        self.nbytes = steps * self._checked.envs * self._codec.row_bytes

    def _find_reusable(self, previous: dict[str, Any], same: dict[str, Any]) -> dict[Chunk, Chunk]:
        """The chunks whose rows are unchanged in a chunk of the current snapshot, and that chunk."""
        reusable = ReusableChunks(self._source, previous, same)
        if not reusable.any:
            return {}
        try:
            saved = {old.place: old for old in map(Chunk.read, previous["chunks"])}
        except (KeyError, TypeError, ValueError):
            return {}
        pairs = [(chunk, saved.get(chunk.place)) for chunk in self._chunks]
        return {
            chunk: old
            for chunk, old in pairs
            if old is not None and old.stop == chunk.stop and reusable.unchanged(chunk.lane, chunk.start, chunk.stop)
        }

    def write(self, writer: ChunkFiles) -> dict[str, Any]:
        writer.features.update(self._codec.features)
        written = [self._write(chunk, writer) for chunk in self._chunks]
        # Other processes may have overwritten the oldest rows before they were read.
        counters, left = self._source.counters(), self._checked
        if counters != self._counters:
            counters = json_copy(counters)
            left = Counters(counters)
        chunks = [chunk.entry for chunk in written if chunk.stop > left.first(chunk.lane)]
        return {**self._description, "counters": counters, "chunks": chunks}

    def _write(self, chunk: Chunk, writer: ChunkFiles) -> Chunk:
        """Writes or reuses a chunk; returns it as it is in the file."""
        old = self._reusable.get(chunk)
        if old is not None and writer.reuse(old.file):
            return old  # it may begin with rows that no longer exist
        envs, steps = self._checked.envs, chunk.stop - chunk.start
        read = functools.partial(read_rows, self._source, chunk, envs, self._row_bytes)
        cuts = cuts_of(self._counters["lanes"][chunk.lane], chunk)
        details, blocks = self._codec.pack(read, envs, steps, cuts)
        writer.write_file(chunk.file, blocks)
        return replace(chunk, details=details)


class _Memory(threading.local):
    """What a thread reads its chunks into, one after the other."""

    def __init__(self) -> None:
        self.bytes: Rows = np.empty(0, np.uint8)


class RowRestorePlan:
    """One load of rows: the snapshot's description of them, checked, and its chunks.

    Args:
        codec_of: makes the codec of the layout and the state that were saved.
    """

    def __init__(
        self,
        codec_of: Callable[[LayoutState, dict[str, Any]], ChunkCodec],
        reader: SavedChunkFiles,
        state: dict[str, Any],
    ) -> None:
        self._reader = reader
        self._memory = _Memory()
        try:
            self.layout = layout_of(state)
            self.counters: dict[str, Any] = state["counters"]
            self._checked = Counters(self.counters)
            self.chunks = [Chunk.read(entry) for entry in state["chunks"]]
            if self.layout is not None:
                self._checked.check_envs(self.layout)
            self._codec = RawChunkCodec(0) if self.layout is None else codec_of(self.layout, state)
            self._max_steps = max(1, natural(state["rows_per_chunk"]))
            self._sizes = {chunk: self._nbytes(chunk) for chunk in self.chunks}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise reader.malformed(f"its description of the rows is malformed ({error!r})") from error
        self._check_sizes()
        self._check_coverage()

    def check(self, sink: RowSink) -> None:
        sink.check_restore(self.layout, self.counters)

    def verify(self) -> None:
        """Reads everything. CorruptCheckpointError where it is not what was saved."""
        in_parallel((functools.partial(self._verify, c) for c in self._read_ahead()), self._codec.threads)

    def load(self, sink: RowSink) -> None:
        if len(sink):
            self.check(sink)
            self.verify()
        sink.begin_restore(self.layout, self.counters)
        try:
            # several files are read, hashed and copied at once
            in_parallel((functools.partial(self._load, sink, c) for c in self._read_ahead()), self._codec.threads)
            sink.end_restore()
        except BaseException:
            sink.abort_restore()
            raise

    def _load(self, sink: RowSink, chunk: Chunk) -> None:
        for start, rows in self._blocks(chunk):
            sink.write_block(chunk.lane, start, rows)

    def _verify(self, chunk: Chunk) -> None:
        next(self._blocks(chunk), None)  # the whole file is verified first

    def _read_ahead(self) -> Iterator[Chunk]:
        """The chunks; before each, the kernel is told to read the ones after it."""
        for i, chunk in enumerate(self.chunks):
            for ahead in self.chunks[i + _CHUNKS_AHEAD : i + _CHUNKS_AHEAD + 1]:
                self._reader.read_ahead(ahead.file)
            yield chunk

    def _blocks(self, chunk: Chunk) -> Iterator[tuple[int, Rows]]:
        """Verified rows of a chunk that exist, block by block, each with its first sequence.

        Blocks are valid until the next one, and until this thread reads another chunk.
        """
        nbytes = self._sizes[chunk]
        if len(self._memory.bytes) < nbytes:
            self._memory.bytes = np.empty(nbytes, np.uint8)
        content = self._memory.bytes[:nbytes]
        self._reader.read_into(chunk.file, content)
        first = max(chunk.start, self._checked.first(chunk.lane)) - chunk.start
        steps = chunk.stop - chunk.start
        try:
            for start, rows in self._codec.unpack(content, chunk.details, self._checked.envs, steps, first):
                yield chunk.start + start, rows
        except ValueError as error:
            raise CorruptCheckpointError(self._reader.path(chunk.file), str(error)) from error

    def _nbytes(self, chunk: Chunk) -> int:
        steps = chunk.stop - chunk.start
        # A few bytes can encode many equal rows: their number is limited before memory is allocated for them.
        per_step = self._checked.envs * self._codec.held_bytes
        if not 0 < steps <= self._max_steps or steps * per_step > most_row_bytes(per_step):
            raise ValueError(f"{chunk.file} cannot hold rows {chunk.start} to {chunk.stop}")
        return self._codec.nbytes(chunk.details, self._checked.envs, steps)

    def _check_sizes(self) -> None:
        for chunk in self.chunks:
            if self._reader.nbytes(chunk.file) != self._sizes[chunk]:
                raise self._reader.malformed(f"{chunk.file} is not as long as its rows {chunk.start} to {chunk.stop}")

    def _check_coverage(self) -> None:
        """Checks that each row that exists is in one chunk; a chunk may begin with rows that no longer exist."""
        reached = [self._checked.first(lane) for lane in range(self._checked.lanes)]
        started = [False] * self._checked.lanes
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
            self._checked.first(lane) if self.layout is None else self._checked.stop(lane)
            for lane in range(len(reached))
        ]
        if reached != expected:
            raise self._reader.malformed("its chunks do not hold every row that its counters say exists")


def read_rows(source: RowSource, chunk: Chunk, envs: int, row_bytes: int, start: int, stop: int) -> Rows:
    """The steps from `start` to `stop` of a chunk: `[envs, stop - start, row_bytes]`."""
    rows = source.read_block(chunk.lane, chunk.start + start, chunk.start + stop)
    expected = (envs, stop - start, row_bytes)
    if rows.dtype != np.uint8 or rows.shape != expected:
        raise ValueError(f"the storage gave a block of {rows.dtype} {rows.shape}, expected uint8 {expected}")
    return rows


def cuts_of(lane: dict[str, Any], chunk: Chunk) -> list[int]:
    """The seams in a chunk, counted from its start: no trajectory goes on across one, whatever its flags and ids."""
    return [seam - chunk.start for seam in lane["seams"] if chunk.start < seam < chunk.stop]


def rows_per_chunk(bytes_per_step: int, least: int = 1) -> int:
    """The number of steps of this size in a chunk: `least` or more, unless they are more than four times its bytes."""
    size = max(1, bytes_per_step)
    return max(1, math.ceil(CHUNK_BYTES / size), min(least, 4 * CHUNK_BYTES // size))


def most_row_bytes(bytes_per_step: int) -> int:
    """The most bytes that the rows of a chunk may have when it is read."""
    return _LARGEST_CHUNK + bytes_per_step


def cut(counters: Counters, rows_per_chunk: int, only: int | None = None) -> list[Chunk]:
    """The chunks that hold every row, of all lanes or of one."""
    chunks = []
    for lane in range(counters.lanes) if only is None else [only]:
        first, stop = counters.first(lane), counters.stop(lane)
        for number in range(first // rows_per_chunk, -(-stop // rows_per_chunk) if stop > first else 0):
            begin = number * rows_per_chunk
            chunks.append(Chunk(lane, number, max(first, begin), min(stop, begin + rows_per_chunk)))
    return chunks


def natural(value: Any) -> int:
    """The value, if it is an int of 0 or more; else a ValueError."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def layout_of(state: dict[str, Any]) -> LayoutState | None:
    """The layout in a state; KeyError or TypeError where it has none."""
    layout = state["layout"]
    if layout is not None and not isinstance(layout, dict):
        raise TypeError(f"{layout!r:.80} is not a layout")
    return None if layout is None else LayoutState(layout)
