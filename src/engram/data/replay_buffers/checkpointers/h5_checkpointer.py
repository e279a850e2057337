"""Episode data (TED) on disk as one HDF5 file that any tool opens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from engram.data.replay_buffers.checkpointers import h5
from engram.data.replay_buffers.checkpointers.base import (
    Hook,
    RestorePlan,
    Rows,
    RowSink,
    RowSource,
    SavePlan,
    StorageCheckpointerBase,
)
from engram.data.replay_buffers.checkpointers.commit import SnapshotWriter
from engram.data.replay_buffers.checkpointers.counters import Counters
from engram.data.replay_buffers.checkpointers.directory import is_file_name
from engram.data.replay_buffers.checkpointers.flat import shared_of
from engram.data.replay_buffers.checkpointers.h5_groups import GroupsIn, GroupsOut
from engram.data.replay_buffers.checkpointers.h5_lanes import DatasetsIn, DatasetsOut, Form, LaneIn, LaneOut, Span
from engram.data.replay_buffers.checkpointers.packing import Details
from engram.data.replay_buffers.checkpointers.reading import SnapshotReader
from engram.data.replay_buffers.checkpointers.tensor import (
    cut,
    cuts_of,
    hooked,
    json_copy,
    layout_of,
    most_row_bytes,
    natural,
    read_rows,
    rows_per_chunk,
)
from engram.data.replay_buffers.layout import LayoutState
from engram.data.replay_buffers.ted.keys import DONE_KEYS, REWARD_KEYS, Key, StepKeys
from engram.errors import CorruptCheckpointError

_DESCRIPTION = (
    "Steps of episodes (TED). Each group lane_<n> was written by one writer, oldest step first. steps/<key> is a "
    "dataset [steps, ...], or [strands, steps, ...]; where the attribute `stored` is not `values`, it is a group whose "
    "attribute `meaning` says how `row` and `value` give a value to every step. A row is step * strands + strand. "
    "trajectory_starts are the rows where trajectories begin."
)
_GROUPS = (
    "Steps of episodes (TED). Each group lane_<n> was written by one writer, oldest step first, and has a group a "
    "trajectory. A key that also exists one step later (under next) has one value more than the trajectory has steps: "
    "what followed the last one; exceptions/next/<key> holds the steps inside trajectories, by row, where the value "
    "that followed is not that of the step after. A row is step * strands + strand. A trajectory that is longer than a "
    "block of about 16 MB goes on in the next group of its strand."
)


class H5StorageCheckpointer(StorageCheckpointerBase[RowSource, RowSink]):
    """Saves steps of TED as one HDF5 file, without the second copy of their observations.

    As the `FlatStorageCheckpointer`, in `storage/<checkpoint_file>` of the snapshot. Attributes in the file explain it;
    `docs/format.md` does so in full. A save writes the whole file.

    Args:
        checkpoint_file: its name.
        done_keys: flags, which are never taken from the step after: names at any depth, or tuples for one place.
        reward_keys: rewards, the same.
        h5_kwargs: how datasets are compressed: `compression` ("gzip", "lzf"), `compression_opts`, `shuffle`,
            `fletcher32`.
        group_per_trajectory: a group for each trajectory, in place of a dataset for each key: slow with many.

    Raises:
        ImportError: there is no h5py; the message says what to install.
        ValueError: here, `checkpoint_file` is no name of a file, or an option is not one of those; at a save, a step
            has several done flags (multi-agent).
    """

    format = "h5"
    needs = "read_block"

    def __init__(
        self,
        *,
        checkpoint_file: str = "checkpoint.h5",
        done_keys: Sequence[Key] = DONE_KEYS,
        reward_keys: Sequence[Key] = REWARD_KEYS,
        h5_kwargs: Mapping[str, Any] | None = None,
        group_per_trajectory: bool = False,
    ) -> None:
        super().__init__()
        h5.library()
        if not is_file_name(checkpoint_file) or "/" in checkpoint_file:
            raise ValueError(
                f"checkpoint_file={checkpoint_file!r} is not the name of a file; use letters, digits, '_', '-' and '.'"
            )
        self.checkpoint_file, self.group_per_trajectory = checkpoint_file, group_per_trajectory
        self._keys, self._options = StepKeys(done_keys, reward_keys), h5.check_options(h5_kwargs or {})

    def plan_save(self, source: RowSource, previous: dict[str, Any] | None = None) -> SavePlan:
        return _SavePlan(self, source)

    def plan_restore(self, reader: SnapshotReader, state: dict[str, Any]) -> RestorePlan[RowSink]:
        return _RestorePlan(self.load_hooks, reader, state)

    def _form(self, layout: LayoutState) -> Form:
        parsed, keys = layout.parse(), self._keys
        return Form(parsed, keys.shared(parsed.leaves), keys.flags(parsed.leaves), keys.ids(parsed.leaves))


class _SavePlan:
    """One save of rows as an HDF5 file."""

    def __init__(self, checkpointer: H5StorageCheckpointer, source: RowSource) -> None:
        self._checkpointer, self._source = checkpointer, source
        self._layout, self._counters = json_copy([source.layout_state(), source.counters()])
        self._checked = Counters(self._counters)
        self._form = None if self._layout is None else checkpointer._form(LayoutState(self._layout))

    @property
    def nbytes(self) -> int:
        if self._form is None:
            return 0
        layout = self._form.layout
        return self._checked.rows * (layout.payload_bytes - sum(layout.leaves[i].nbytes for i in self._form.shared))

    def write(self, writer: SnapshotWriter) -> dict[str, Any]:
        form = self._form
        if form is None:
            return {"layout": None, "counters": self._counters, "lanes": []}
        file, grouped = f"storage/{self._checkpointer.checkpoint_file}", self._checkpointer.group_per_trajectory
        with writer.written_by_path(file) as path, h5.writing(path, self._checkpointer._options) as out:
            description = _GROUPS if grouped else _DESCRIPTION
            out.describe("/", {"format": "engram steps", "version": 1, "description": description})
            lanes = [self._write_lane(out, lane, form) for lane in range(self._checked.lanes)]
        # Other processes may have overwritten the oldest rows before they were read.
        counters = json_copy(self._source.counters())
        shared = [[i, root] for i, root in form.shared.items()]
        content = {"file": file, "group_per_trajectory": grouped, "shared": shared, "lanes": lanes}
        return {"layout": self._layout, "counters": counters, **content}

    def _write_lane(self, out: h5.H5Writer, lane: int, form: Form) -> dict[str, Any]:
        checked, row_bytes = self._checked, form.layout.payload_bytes
        first, steps, strands = checked.first(lane), checked.stop(lane) - checked.first(lane), checked.strands
        if not steps:
            return {"start": first, "blocks": []}
        kind = GroupsOut if self._checkpointer.group_per_trajectory else DatasetsOut
        written: LaneOut = kind(out, _lane(lane), form, steps, strands)
        for chunk in cut(checked, rows_per_chunk(strands * row_bytes), lane):
            rows = read_rows(self._source, chunk, strands, row_bytes, self._checkpointer.save_hooks)
            span = Span(chunk.start - first, chunk.stop - chunk.start, strands)
            written.add(span, rows, cuts_of(self._counters["lanes"][lane], chunk))
        blocks = written.blocks()
        out.describe(_lane(lane), {"first_write_number": first, "steps": steps, "strands": strands})
        return {"start": first, "blocks": blocks}


class _RestorePlan:
    """What a snapshot says of its HDF5 file, checked to be possible, and the blocks of rows in the file."""

    def __init__(self, hooks: list[Hook], reader: SnapshotReader, state: dict[str, Any]) -> None:
        self._hooks, self._reader = hooks, reader
        try:
            self.layout = layout_of(state)
            self.counters: dict[str, Any] = state["counters"]
            self._checked = Counters(self.counters)
            self._lanes = [(natural(lane["start"]), lane["blocks"]) for lane in state["lanes"]]
            if self.layout is not None:
                self._checked.check_strands(self.layout)
                layout = self.layout.parse()
                self._form = Form(layout, shared_of(layout, state))
                self._file, self._groups = str(state["file"]), bool(state["group_per_trajectory"])
            if len(self._lanes) != (0 if self.layout is None else self._checked.lanes):
                raise ValueError(f"it describes {len(self._lanes)} lanes, its counters {self._checked.lanes}")
            self._spans = [self._cut(lane, *said) for lane, said in enumerate(self._lanes)]
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise reader.malformed(f"its description of the rows is malformed ({error!r})") from error
        if self.layout is None and any(
            self._checked.first(i) < self._checked.stop(i) for i in range(self._checked.lanes)
        ):
            raise reader.malformed("it has no layout, and its counters say that there are rows")
        if self.layout is not None:
            reader.nbytes(self._file)

    def check(self, sink: RowSink) -> None:
        sink.check_restore(self.layout, self.counters)

    def load(self, sink: RowSink) -> None:
        self.check(sink)
        with self._opened() as blocks:
            if len(sink):
                for _ in blocks():
                    pass
            sink.begin_restore(self.layout, self.counters)
            try:
                for lane, start, rows in blocks():
                    sink.write_block(lane, start, hooked(self._hooks, rows))
                sink.end_restore()
            except BaseException:
                sink.abort_restore()
                raise

    @contextmanager
    def _opened(self) -> Iterator[Callable[[], Iterator[tuple[int, int, Rows]]]]:
        """The verified file: a callable that gives lane, first write number and rows of each block, from the start."""
        if self.layout is None:
            yield lambda: iter(())
            return
        with self._reader.verified(self._file) as file, ExitStack() as stack:
            with self._as_damage():
                opened = stack.enter_context(h5.reading(file))
            yield lambda: self._as_damaged_blocks(self._blocks(opened))

    def _as_damaged_blocks(self, blocks: Iterator[tuple[int, int, Rows]]) -> Iterator[tuple[int, int, Rows]]:
        """The blocks; what is wrong with them, not with who takes them, is damage."""
        while True:
            with self._as_damage():
                block = next(blocks, None)
            if block is None:
                return
            yield block

    def _blocks(self, file: h5.H5Reader) -> Iterator[tuple[int, int, Rows]]:
        readers = self._readers(file)
        for lane, (start, blocks) in enumerate(self._lanes):
            spans, details = self._spans[lane], [tuple(block[1:]) for block in blocks]
            read, first = readers[lane].blocks(spans, details), self._checked.first(lane)
            for span in spans:
                rows, begin = next(read), start + span.first
                if begin + span.steps > first:
                    skip = max(0, first - begin)
                    yield lane, begin + skip, rows[:, skip:]
        file.nothing_else()

    def _readers(self, file: h5.H5Reader) -> list[LaneIn]:
        kind = GroupsIn if self._groups else DatasetsIn
        made: list[LaneIn] = []
        for lane, (_, blocks) in enumerate(self._lanes):
            spans = self._spans[lane]
            made.append(kind(file, _lane(lane), self._form, sum(span.steps for span in spans), self._checked.strands))
            if spans:
                made[-1].expect(spans, [tuple(block[1:]) for block in blocks])
        return made

    def _cut(self, lane: int, start: int, blocks: list[list[int]]) -> list[Span]:
        """The blocks of a lane, which must hold every row that exists."""
        spans, at = [], 0
        for block in blocks:
            steps = natural(block[0])
            details: Details = tuple(block[1:])
            # A few bytes can stand for many equal rows: how many there are is limited before memory is taken for them.
            if not 0 < steps * self._checked.strands * self._form.layout.payload_bytes <= self._most():
                raise ValueError(f"a block cannot have {steps} steps")
            if any(type(detail) is not int for detail in details):
                raise ValueError(f"{block!r} does not describe a block")
            spans.append(Span(at, steps, self._checked.strands))
            at += steps
        first, stop = self._checked.first(lane), self._checked.stop(lane)
        if start > first or (first < stop and start + at != stop):
            raise ValueError(f"the blocks of lane {lane} do not hold the rows {first} to {stop}")
        return spans

    def _most(self) -> int:
        return most_row_bytes(self._checked.strands * self._form.layout.payload_bytes)

    @contextmanager
    def _as_damage(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise CorruptCheckpointError(self._reader.path(self._file), str(error)) from error


def _lane(lane: int) -> str:
    return f"lane_{lane}"
