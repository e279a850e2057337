"""The rows of one lane in an HDF5 file: a dataset a key, or a group a trajectory. Written and read block by block.

A step of a lane has a *row*: `step * strands + strand`, steps counted from the first in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engram import _hdf5 as h5
from engram._hdf5 import H5Reader, H5Writer, key_text, place
from engram.checkpoint.directory import is_file_name
from engram.checkpoint.protocols import Hook, RestorePlan, Rows, RowSink, RowSource, SavePlan, StorageCheckpointerBase
from engram.checkpoint.reader import SnapshotReader
from engram.checkpoint.writer import SnapshotWriter
from engram.data.replay_buffers.checkpointers.rows import (
    WHOLE,
    Details,
    column_of,
    cut,
    cuts_of,
    hooked,
    json_copy,
    layout_of,
    most_row_bytes,
    natural,
    put_column,
    read_rows,
    rows_per_chunk,
)
from engram.data.replay_buffers.checkpointers.ted import shared_of
from engram.errors import CorruptCheckpointError
from engram.pytree import Key
from engram.store.counters import Counters
from engram.store.layout import LayoutState, LeafSpec, RowLayout
from engram.ted import codec as ted_codec
from engram.ted.codec import DONE_KEYS, REWARD_KEYS, Column, Mask, Positions, StepKeys

STARTS = "trajectory_starts"
ROWS = np.dtype("<i8")


@dataclass(frozen=True)
class Form:
    """Leaves of a row, which of them repeat which, and which say where a trajectory ends."""

    layout: RowLayout
    shared: dict[int, int]
    flags: Sequence[int] = ()
    ids: Sequence[int] = ()

    @property
    def leaves(self) -> list[tuple[int, LeafSpec]]:
        """Those that have bytes, with their numbers."""
        return [(i, leaf) for i, leaf in enumerate(self.layout.stored) if leaf.nbytes]

    @property
    def copy_of(self) -> dict[int, int]:
        return {root: i for i, root in self.shared.items()}


@dataclass(frozen=True)
class Span:
    """Where a block lies: its first step, its steps, and the strands of its lane."""

    first: int
    steps: int
    strands: int

    @property
    def rows(self) -> int:
        return self.steps * self.strands

    def rows_at(self, positions: Positions) -> Positions:
        """Rows of steps counted strand after strand in this block."""
        return (positions % self.steps + self.first) * self.strands + positions // self.steps

    def positions_at(self, rows: Positions) -> Positions:
        """The reverse; a ValueError when the rows are not of this block, in its order."""
        step, strand = rows // self.strands - self.first, rows % self.strands
        positions: Positions = strand * self.steps + step
        if len(rows) and (step.min() < 0 or step.max() >= self.steps or (np.diff(positions) <= 0).any()):
            raise ValueError("rows are not in the order of the block that they belong to")
        return positions

    def window(self) -> tuple[Any, ...]:
        """This block in a dataset [steps, ...], or [strands, steps, ...]."""
        steps = slice(self.first, self.first + self.steps)
        return (steps,) if self.strands == 1 else (slice(None), steps)


class LaneOut(Protocol):
    """Writes the blocks of a lane, oldest first."""

    def add(self, span: Span, rows: Rows, cuts: Sequence[int]) -> None: ...

    def blocks(self) -> list[list[int]]:
        """For each block its steps and what `LaneIn` needs to know of it."""


class LaneIn(Protocol):
    """Reads them."""

    def expect(self, spans: list[Span], details: list[Details]) -> None:
        """Checks that the file can hold these blocks; ValueError."""

    def blocks(self, spans: list[Span], details: list[Details]) -> Iterator[Rows]:
        """Rows `[strands, steps, row_bytes]` of each block; ValueError when they cannot be."""


# ---- a dataset a key ----
class DatasetsOut:
    """Keys as datasets. One that seldom changes: where it changes, until it turns out to change often after all."""

    def __init__(self, file: H5Writer, name: str, form: Form, steps: int, strands: int) -> None:
        self._file, self._name, self._form = file, name, form
        self._lead = (steps,) if strands == 1 else (strands, steps)
        self._seldom: set[int] = set()
        self._spans: list[Span] = []
        self._details: list[list[int]] = []
        self._last: Rows | None = None

    def add(self, span: Span, rows: Rows, cuts: Sequence[int]) -> None:
        flat = rows.reshape(span.rows, -1)
        starts = span.rows_at(np.flatnonzero(self._starts(flat, span, cuts)))
        self._file.append(place(self._name, STARTS), starts)
        details = [len(starts)] + [WHOLE] * len(self._form.layout.stored)
        ends = ted_codec.strand_ends(span.strands, span.steps)
        for i, leaf in self._form.leaves:
            column, root = column_of(flat, leaf), self._form.shared.get(i)
            if root is not None:
                at = np.flatnonzero(ted_codec.broken(column_of(flat, self._form.layout.stored[root]), column, ends))
            elif self._is_seldom(i, leaf, column):
                at = _run_starts(column, span)
            else:
                self._file.write(_steps(self._name, leaf), span.window(), _values(column, leaf, span))
                continue
            self._append(leaf, span.rows_at(at), column[at])
            details[i + 1] = len(at)
        self._spans.append(span)
        self._details.append(details)
        self._last = rows[:, -1].copy()
        self._widen()

    def blocks(self) -> list[list[int]]:
        for i, leaf in self._form.leaves:
            self._file.describe(_steps(self._name, leaf), self._attributes(i, leaf))
        return [[span.steps, *details] for span, details in zip(self._spans, self._details, strict=True)]

    def _starts(self, flat: Rows, span: Span, cuts: Sequence[int]) -> Mask:
        """Where a trajectory begins: after the end of one, which may be the last step of the block before."""
        ends = trajectory_ends(self._form, flat, span, cuts).reshape(span.strands, span.steps)
        starts = np.ones_like(ends)
        starts[:, 1:] = ends[:, :-1]
        if self._last is not None and 0 not in cuts:
            both = np.stack([self._last, flat.reshape(span.strands, span.steps, -1)[:, 0]], axis=1)
            pair = Span(0, 2, span.strands)
            starts[:, 0] = trajectory_ends(self._form, both.reshape(pair.rows, -1), pair, ()).reshape(-1, 2)[:, 0]
        return starts.reshape(-1)

    def _is_seldom(self, i: int, leaf: LeafSpec, column: Column) -> bool:
        if not self._spans:
            if _is_cheaper(len(ted_codec.run_starts(column)), leaf, len(column)):
                self._seldom.add(i)
            else:
                self._make(leaf)
        return i in self._seldom

    def _widen(self) -> None:
        """Gives every step a value of the keys that have come to change often."""
        steps = sum(span.rows for span in self._spans)
        for i in sorted(self._seldom):
            leaf, counts = self._form.layout.stored[i], [details[i + 1] for details in self._details]
            if _is_cheaper(sum(counts), leaf, steps):
                continue
            self._seldom.remove(i)
            old, aside = _steps(self._name, leaf), place(self._name, "aside")
            self._make(leaf, aside)
            at = 0
            for span, details in zip(self._spans, self._details, strict=True):
                rows, values = (self._file.read(f"{old}/{x}", at, at + details[i + 1]) for x in ("row", "value"))
                column = ted_codec.repeat_runs(span.positions_at(rows), as_column(values, leaf), span.rows)
                self._file.write(aside, span.window(), _values(column, leaf, span))
                at += details[i + 1]
                details[i + 1] = WHOLE
            self._file.replace(old, aside)

    def _make(self, leaf: LeafSpec, name: str | None = None) -> None:
        self._file.make(name or _steps(self._name, leaf), (*self._lead, *leaf.shape), dtype_of(leaf), len(self._lead))

    def _append(self, leaf: LeafSpec, rows: Positions, column: Column) -> None:
        name = _steps(self._name, leaf)
        self._file.append(f"{name}/row", rows)
        self._file.append(f"{name}/value", column.view(dtype_of(leaf)).reshape(len(column), *leaf.shape))

    def _attributes(self, i: int, leaf: LeafSpec) -> dict[str, str]:
        said = leaf_attributes(leaf)
        if i in self._form.shared:
            root = key_text(self._form.layout.stored[self._form.shared[i]].path)
            said["stored"] = "exceptions"
            said["meaning"] = f"the value of {root} one step later, except in the steps `row`, where it is `value`"
        elif i in self._seldom:
            said["stored"] = "changes"
            said["meaning"] = "`value` from the step `row` on, in its strand, up to the strand's next entry"
        return said


class DatasetsIn:
    """Reads what `DatasetsOut` wrote."""

    def __init__(self, file: H5Reader, name: str, form: Form, steps: int, strands: int) -> None:
        self._file, self._name, self._form = file, name, form
        self._lead = (steps,) if strands == 1 else (strands, steps)

    def expect(self, spans: list[Span], details: list[Details]) -> None:
        counts = totals(details, 1 + len(self._form.layout.stored))
        self._file.expect(place(self._name, STARTS), (counts[0],), ROWS)
        for i, leaf in self._form.leaves:
            name, dtype = _steps(self._name, leaf), dtype_of(leaf)
            if all(some[i + 1] == WHOLE for some in details) and i not in self._form.shared:
                self._file.expect(name, (*self._lead, *leaf.shape), dtype)
            elif any(not 0 <= some[i + 1] <= span.rows for some, span in zip(details, spans, strict=True)):
                raise ValueError(f"{key_text(leaf.path)} is stored in two ways")
            else:
                self._file.expect(f"{name}/row", (counts[i + 1],), ROWS)
                self._file.expect(f"{name}/value", (counts[i + 1], *leaf.shape), dtype)

    def blocks(self, spans: list[Span], details: list[Details]) -> Iterator[Rows]:
        at = [0] * (1 + len(self._form.layout.stored))
        for span, some in zip(spans, details, strict=True):
            yield self._block(span, some, at)
            at = [before + max(0, count) for before, count in zip(at, some, strict=True)]

    def _block(self, span: Span, details: Details, at: list[int]) -> Rows:
        out = np.zeros((span.rows, self._form.layout.payload_bytes), np.uint8)
        exceptions = {}
        for i, leaf in self._form.leaves:
            count = details[i + 1]
            if count == WHOLE:
                read = self._file.read(_steps(self._name, leaf), span.window())
                put_column(out, leaf, as_column(read, leaf))
                continue
            rows, values = (
                self._file.read(f"{_steps(self._name, leaf)}/{x}", slice(at[i + 1], at[i + 1] + count))
                for x in ("row", "value")
            )
            positions, column = span.positions_at(rows), as_column(values, leaf)
            if i in self._form.shared:
                exceptions[i] = positions, column
            else:
                put_column(out, leaf, ted_codec.repeat_runs(positions, column, span.rows))
        for i, (positions, column) in exceptions.items():
            root = column_of(out, self._form.layout.stored[self._form.shared[i]])
            check_ends(positions, span)
            put_column(out, self._form.layout.stored[i], ted_codec.followed(root, positions, column))
        return out.reshape(span.strands, span.steps, -1)


# ---- what they share ----
def trajectory_ends(form: Form, flat: Rows, span: Span, cuts: Sequence[int]) -> Mask:
    """bool [rows]: the last steps of trajectories, of strands, and before each cut."""
    ends = ted_codec.strand_ends(span.strands, span.steps)
    ends.reshape(span.strands, span.steps)[:, [cut - 1 for cut in cuts if cut]] = True
    flags, ids = ([column_of(flat, form.layout.stored[i]) for i in some] for some in (form.flags, form.ids))
    return ted_codec.trajectory_ends(ends, flags, ids)


def dtype_of(leaf: LeafSpec) -> np.dtype[Any]:
    """What numpy and HDF5 call a leaf's dtype; bfloat16 they do not know: its bits."""
    if leaf.dtype == torch.bfloat16:
        return np.dtype("<u2")
    made: np.dtype[Any] = torch.empty(0, dtype=leaf.dtype).numpy().dtype
    return made


def as_column(values: npt.NDArray[Any], leaf: LeafSpec) -> Column:
    """uint8 [n, nbytes]."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).reshape(-1, leaf.nbytes)


def _steps(name: str, leaf: LeafSpec) -> str:
    return place(name, "hidden" if leaf.hidden else "steps", *leaf.path)


def _values(column: Column, leaf: LeafSpec, span: Span) -> npt.NDArray[Any]:
    lead = (span.steps,) if span.strands == 1 else (span.strands, span.steps)
    return column.view(dtype_of(leaf)).reshape(*lead, *leaf.shape)


def leaf_attributes(leaf: LeafSpec) -> dict[str, str]:
    return {"key": key_text(leaf.path), "dtype": str(leaf.dtype).removeprefix("torch."), "stored": "values"}


def _run_starts(column: Column, span: Span) -> Positions:
    """Where the column changes within a strand, and the first step of each."""
    start = np.zeros(span.rows, np.bool_)
    start[ted_codec.run_starts(column)] = True
    start[:: span.steps] = True
    return np.flatnonzero(start)


def _is_cheaper(changes: int, leaf: LeafSpec, steps: int) -> bool:
    """Whether changes take less than half the bytes of the values: worth a dataset that is not one value a step."""
    return 2 * changes * (ROWS.itemsize + leaf.nbytes) <= steps * leaf.nbytes


def totals(details: list[Details], width: int) -> list[int]:
    if any(len(some) != width for some in details):
        raise ValueError(f"a block has {width} numbers beside its steps")
    return [sum(max(0, some[i]) for some in details) for i in range(width)]


def check_ends(positions: Positions, span: Span) -> None:
    given = np.zeros(span.rows, np.bool_)
    given[positions] = True
    if not given[span.steps - 1 :: span.steps].all():
        raise ValueError("nothing says what followed the newest step")


TRAJECTORY = "trajectory_{:08d}"


class GroupsOut:
    """Trajectories as groups; one that is longer than a block goes on in the next group."""

    def __init__(self, file: H5Writer, name: str, form: Form, steps: int, strands: int) -> None:
        self._file, self._name, self._form = file, name, form
        self._number = 0
        self._blocks: list[list[int]] = []

    def add(self, span: Span, rows: Rows, cuts: Sequence[int]) -> None:
        flat, leaves = rows.reshape(span.rows, -1), self._form.layout.stored
        ends = trajectory_ends(self._form, flat, span, cuts)
        at = np.concatenate(([0], np.flatnonzero(ends) + 1))
        self._file.append(place(self._name, STARTS), span.rows_at(at[:-1]))
        details = [len(at) - 1] + [0] * len(leaves)
        for i, leaf in self._form.leaves:
            column, root = column_of(flat, leaf), self._form.shared.get(i)
            if root is not None:
                broken = np.flatnonzero(ted_codec.broken(column_of(flat, leaves[root]), column, ends) & ~ends)
                name = place(self._name, "exceptions", *leaf.path)
                self._file.append(f"{name}/row", span.rows_at(broken))
                self._file.append(f"{name}/value", column[broken].view(dtype_of(leaf)).reshape(-1, *leaf.shape))
                details[i + 1] = len(broken)
            elif i in self._form.copy_of:
                following = column_of(flat, leaves[self._form.copy_of[i]])
                self._write(leaf, ted_codec.with_last(column, following, ends), at + np.arange(len(at)))
            else:
                self._write(leaf, column, at)
        if self._form.leaves:
            self._describe(span, at)
        self._number += len(at) - 1
        self._blocks.append([span.steps, *details])

    def blocks(self) -> list[list[int]]:
        return self._blocks

    def _write(self, leaf: LeafSpec, column: Column, at: Positions) -> None:
        values = column.view(dtype_of(leaf)).reshape(-1, *leaf.shape)
        for k, (start, stop) in enumerate(zip(at[:-1].tolist(), at[1:].tolist(), strict=True)):
            name = _trajectory(self._name, self._number + k, leaf)
            self._file.put(name, values[start:stop])
            if leaf.dtype == torch.bfloat16:
                self._file.describe(name, leaf_attributes(leaf))

    def _describe(self, span: Span, at: Positions) -> None:
        for k, row in enumerate(span.rows_at(at[:-1]).tolist()):
            said = {"first_step": row // span.strands, "strand": row % span.strands, "steps": int(at[k + 1] - at[k])}
            self._file.describe(place(self._name, TRAJECTORY.format(self._number + k)), said)


class GroupsIn:
    """Reads what `GroupsOut` wrote."""

    def __init__(self, file: H5Reader, name: str, form: Form, steps: int, strands: int) -> None:
        self._file, self._name, self._form = file, name, form

    def expect(self, spans: list[Span], details: list[Details]) -> None:
        if any(not 0 < some[0] <= span.rows for some, span in zip(details, spans, strict=True)):
            raise ValueError("a block has no trajectory, or more of them than steps")
        counts = totals(details, 1 + len(self._form.layout.stored))
        self._file.expect(place(self._name, STARTS), (counts[0],), ROWS)
        for i in self._form.shared:
            leaf = self._form.layout.stored[i]
            name = place(self._name, "exceptions", *leaf.path)
            self._file.expect(f"{name}/row", (counts[i + 1],), ROWS)
            self._file.expect(f"{name}/value", (counts[i + 1], *leaf.shape), dtype_of(leaf))

    def blocks(self, spans: list[Span], details: list[Details]) -> Iterator[Rows]:
        at = [0] * (1 + len(self._form.layout.stored))
        for span, some in zip(spans, details, strict=True):
            yield self._block(span, some, at)
            at = [before + count for before, count in zip(at, some, strict=True)]

    def _block(self, span: Span, details: Details, at: list[int]) -> Rows:
        out = np.zeros((span.rows, self._form.layout.payload_bytes), np.uint8)
        rows = self._file.read(place(self._name, STARTS), slice(at[0], at[0] + details[0]))
        starts = np.append(span.positions_at(rows), span.rows)
        ends = np.zeros(span.rows, np.bool_)
        ends[starts[1:] - 1] = True
        for i, leaf in self._form.leaves:
            if i in self._form.shared:
                continue
            copy = self._form.copy_of.get(i)
            column = self._read(leaf, at[0], np.diff(starts) + (copy is not None))
            if copy is not None:
                column, following = ted_codec.without_last(column, ends)
                put_column(out, self._form.layout.stored[copy], following)
            put_column(out, leaf, column)
        for i in self._form.shared:
            leaf, where = self._form.layout.stored[i], slice(at[i + 1], at[i + 1] + details[i + 1])
            name = place(self._name, "exceptions", *leaf.path)
            positions = span.positions_at(self._file.read(f"{name}/row", where))
            out[positions, leaf.offset : leaf.offset + leaf.nbytes] = as_column(
                self._file.read(f"{name}/value", where), leaf
            )
        return out.reshape(span.strands, span.steps, -1)

    def _read(self, leaf: LeafSpec, first: int, lengths: Positions) -> Column:
        parts = []
        for k, length in enumerate(lengths.tolist()):
            name = _trajectory(self._name, first + k, leaf)
            parts.append(as_column(self._file.take(name, (length, *leaf.shape), dtype_of(leaf)), leaf))
        return np.concatenate(parts)


def _trajectory(name: str, number: int, leaf: LeafSpec) -> str:
    """Where the values of one trajectory lie; those of no batch beside the groups of the trajectories."""
    return place(name, *(["hidden"] if leaf.hidden else []), TRAJECTORY.format(number), *leaf.path)


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
        return self._checked.rows * (layout.payload_bytes - sum(layout.stored[i].nbytes for i in self._form.shared))

    def write(self, writer: SnapshotWriter) -> dict[str, Any]:
        form = self._form
        if form is None:
            return {"layout": None, "counters": self._counters, "lanes": []}
        file, grouped = f"storage/{self._checkpointer.checkpoint_file}", self._checkpointer.group_per_trajectory
        with writer.written_by_path(file) as path, h5.create_checked(path, self._checkpointer._options) as out:
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
        first, steps, strands = checked.first(lane), checked.stop(lane) - checked.first(lane), checked.envs
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
                self._checked.check_envs(self.layout)
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
                opened = stack.enter_context(h5.open_checked(file))
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
            made.append(kind(file, _lane(lane), self._form, sum(span.steps for span in spans), self._checked.envs))
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
            if not 0 < steps * self._checked.envs * self._form.layout.payload_bytes <= self._most():
                raise ValueError(f"a block cannot have {steps} steps")
            if any(type(detail) is not int for detail in details):
                raise ValueError(f"{block!r} does not describe a block")
            spans.append(Span(at, steps, self._checked.envs))
            at += steps
        first, stop = self._checked.first(lane), self._checked.stop(lane)
        if start > first or (first < stop and start + at != stop):
            raise ValueError(f"the blocks of lane {lane} do not hold the rows {first} to {stop}")
        return spans

    def _most(self) -> int:
        return most_row_bytes(self._checked.envs * self._form.layout.payload_bytes)

    @contextmanager
    def _as_damage(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise CorruptCheckpointError(self._reader.path(self._file), str(error)) from error


def _lane(lane: int) -> str:
    return f"lane_{lane}"
