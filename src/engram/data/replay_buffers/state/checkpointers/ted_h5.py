"""The `H5StorageCheckpointer`: episode data (TED) as one HDF5 file, without the second copy of the observations.

Each lane is a group that is written and read block by block, in one of two layouts: columnar (a dataset for each key)
or grouped (a group for each trajectory). A step of an environment has a *row* there: `step * envs + env`, steps
counted from the first in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engram._hdf5 import (
    H5Reader,
    H5Writer,
    check_options,
    create_checked,
    import_h5py,
    join_path,
    key_json,
)
from engram.checkpoint.directory import is_file_name
from engram.checkpoint.hooks import json_copy
from engram.checkpoint.protocols import (
    RestorePlan,
    Rows,
    RowSink,
    RowSource,
    SavePlan,
    StorageCheckpointerBase,
)
from engram.checkpoint.reader import SnapshotReader
from engram.checkpoint.writer import SnapshotWriter
from engram.data.replay_buffers.state.checkpointers.rows import (
    WHOLE,
    Details,
    column_of,
    cut,
    cuts_of,
    layout_of,
    most_row_bytes,
    natural,
    put_column,
    read_rows,
    rows_per_chunk,
)
from engram.data.replay_buffers.state.checkpointers.ted import EpisodeLayout, check_covered
from engram.errors import CorruptCheckpointError
from engram.pytree import Key
from engram.store.counters import Counters
from engram.store.layout import LayoutState, LeafSpec
from engram.ted import codec as ted_codec
from engram.ted.codec import DONE_KEYS, REWARD_KEYS, Column, Mask, Positions, StepKeys

STARTS = "trajectory_starts"
ROWS = np.dtype("<i8")
_COMPRESSED = {"compression": "gzip", "shuffle": True}


@dataclass(frozen=True)
class BlockRange:
    """The steps of a block: its first step in the file, the number of its steps, and the environments of its lane."""

    first: int
    steps: int
    envs: int

    @property
    def rows(self) -> int:
        return self.steps * self.envs

    def to_rows(self, positions: Positions) -> Positions:
        """Rows in the file of positions in the block, which are counted one environment after the other."""
        return (positions % self.steps + self.first) * self.envs + positions // self.steps

    def to_positions(self, rows: Positions) -> Positions:
        """The reverse of `to_rows`; ValueError when the rows are not of this block, in its order."""
        step, env = rows // self.envs - self.first, rows % self.envs
        positions: Positions = env * self.steps + step
        if len(rows) and (step.min() < 0 or step.max() >= self.steps or (np.diff(positions) <= 0).any()):
            raise ValueError("rows are not in the order of the block that they belong to")
        return positions

    def window(self) -> tuple[slice, ...]:
        """The slices that select this block in a dataset `[steps, ...]`, or `[envs, steps, ...]`."""
        steps = slice(self.first, self.first + self.steps)
        return (steps,) if self.envs == 1 else (slice(None), steps)


class LaneWriter(Protocol):
    """Writes the blocks of a lane, oldest first."""

    def add(self, block: BlockRange, rows: Rows, cuts: Sequence[int]) -> None: ...

    def blocks(self) -> list[list[int]]:
        """Of each block the number of its steps and the details that the `LaneReader` needs."""


class LaneReader(Protocol):
    """Reads what a `LaneWriter` wrote."""

    def expect(self, ranges: list[BlockRange], details: list[Details]) -> None:
        """Checks that the file can hold these blocks; ValueError when it cannot."""

    def blocks(self, ranges: list[BlockRange], details: list[Details]) -> Iterator[Rows]:
        """Rows `[envs, steps, row_bytes]` of each block; ValueError when its values are damaged."""


# ---- columnar: a dataset for each key ----
class ColumnarWriter:
    """Writes each key as a dataset with a value for every step.

    A key that changes rarely in the first block is written as its changes. Where it changes often later, the changes
    are rewritten as values.
    """

    def __init__(self, file: H5Writer, name: str, episodes: EpisodeLayout, steps: int, envs: int) -> None:
        self._file, self._name, self._episodes = file, name, episodes
        self._lead = (steps,) if envs == 1 else (envs, steps)
        self._rare: set[int] = set()
        self._ranges: list[BlockRange] = []
        self._details: list[list[int]] = []
        self._last: Rows | None = None

    def add(self, block: BlockRange, rows: Rows, cuts: Sequence[int]) -> None:
        flat = rows.reshape(block.rows, -1)
        starts = block.to_rows(np.flatnonzero(self._starts(flat, block, cuts)))
        self._file.append(join_path(self._name, STARTS), starts)
        details = [len(starts)] + [WHOLE] * len(self._episodes.layout.stored)
        ends = ted_codec.env_ends(block.envs, block.steps)
        for i, leaf in self._episodes.leaves:
            column, root = column_of(flat, leaf), self._episodes.shared.get(i)
            if root is not None:
                at = np.flatnonzero(ted_codec.broken(column_of(flat, self._episodes.layout.stored[root]), column, ends))
            elif self._changes_rarely(i, leaf, column):
                at = _run_starts(column, block)
            else:
                self._file.write(_steps(self._name, leaf), block.window(), _values(column, leaf, block))
                continue
            self._append(leaf, block.to_rows(at), column[at])
            details[i + 1] = len(at)
        self._ranges.append(block)
        self._details.append(details)
        self._last = rows[:, -1].copy()
        self._rewrite_frequent()

    def blocks(self) -> list[list[int]]:
        for i, leaf in self._episodes.leaves:
            self._file.set_attributes(_steps(self._name, leaf), self._attributes(i, leaf))
        return [[block.steps, *details] for block, details in zip(self._ranges, self._details, strict=True)]

    def _starts(self, flat: Rows, block: BlockRange, cuts: Sequence[int]) -> Mask:
        """bool [rows]: where a trajectory begins, after the end of one that may be in the block before."""
        ends = self._episodes.trajectory_ends(flat, block.envs, block.steps, cuts).reshape(block.envs, block.steps)
        starts = np.ones_like(ends)
        starts[:, 1:] = ends[:, :-1]
        if self._last is not None and 0 not in cuts:
            both = np.stack([self._last, flat.reshape(block.envs, block.steps, -1)[:, 0]], axis=1)
            pairs = self._episodes.trajectory_ends(both.reshape(2 * block.envs, -1), block.envs, 2, ())
            starts[:, 0] = pairs.reshape(-1, 2)[:, 0]
        return starts.reshape(-1)

    def _changes_rarely(self, i: int, leaf: LeafSpec, column: Column) -> bool:
        if not self._ranges:
            if _is_cheaper(len(ted_codec.run_starts(column)), leaf, len(column)):
                self._rare.add(i)
            else:
                self._create(leaf)
        return i in self._rare

    def _rewrite_frequent(self) -> None:
        """Rewrites the keys that have come to change often with a value for every step."""
        steps = sum(block.rows for block in self._ranges)
        for i in sorted(self._rare):
            leaf, counts = self._episodes.layout.stored[i], [details[i + 1] for details in self._details]
            if _is_cheaper(sum(counts), leaf, steps):
                continue
            self._rare.remove(i)
            old, new = _steps(self._name, leaf), join_path(self._name, "rewritten")
            self._create(leaf, new)
            at = 0
            for block, details in zip(self._ranges, self._details, strict=True):
                rows, values = (self._file.read(f"{old}/{x}", at, at + details[i + 1]) for x in ("row", "value"))
                column = ted_codec.repeat_runs(block.to_positions(rows), as_column(values, leaf), block.rows)
                self._file.write(new, block.window(), _values(column, leaf, block))
                at += details[i + 1]
                details[i + 1] = WHOLE
            self._file.replace(old, new)

    def _create(self, leaf: LeafSpec, name: str | None = None) -> None:
        self._file.create(name or _steps(self._name, leaf), (*self._lead, *leaf.shape), dtype_of(leaf), len(self._lead))

    def _append(self, leaf: LeafSpec, rows: Positions, column: Column) -> None:
        name = _steps(self._name, leaf)
        self._file.append(f"{name}/row", rows)
        self._file.append(f"{name}/value", column.view(dtype_of(leaf)).reshape(len(column), *leaf.shape))

    def _attributes(self, i: int, leaf: LeafSpec) -> dict[str, str]:
        attributes = leaf_attributes(leaf)
        if i in self._episodes.shared:
            root = key_json(self._episodes.layout.stored[self._episodes.shared[i]].path)
            attributes["stored"] = "exceptions"
            attributes["meaning"] = f"the value of {root} one step later, except at the rows `row`, where it is `value`"
        elif i in self._rare:
            attributes["stored"] = "changes"
            attributes["meaning"] = (
                "`value` from the row `row` on, in its environment, up to the next entry of that environment"
            )
        return attributes


class ColumnarReader:
    """Reads what a `ColumnarWriter` wrote."""

    def __init__(self, file: H5Reader, name: str, episodes: EpisodeLayout, steps: int, envs: int) -> None:
        self._file, self._name, self._episodes = file, name, episodes
        self._lead = (steps,) if envs == 1 else (envs, steps)

    def expect(self, ranges: list[BlockRange], details: list[Details]) -> None:
        sums = totals(details, 1 + len(self._episodes.layout.stored))
        self._file.expect(join_path(self._name, STARTS), (sums[0],), ROWS)
        for i, leaf in self._episodes.leaves:
            name, dtype = _steps(self._name, leaf), dtype_of(leaf)
            if all(counts[i + 1] == WHOLE for counts in details) and i not in self._episodes.shared:
                self._file.expect(name, (*self._lead, *leaf.shape), dtype)
            elif any(not 0 <= counts[i + 1] <= block.rows for counts, block in zip(details, ranges, strict=True)):
                raise ValueError(f"{key_json(leaf.path)} is stored in two ways")
            else:
                self._file.expect(f"{name}/row", (sums[i + 1],), ROWS)
                self._file.expect(f"{name}/value", (sums[i + 1], *leaf.shape), dtype)

    def blocks(self, ranges: list[BlockRange], details: list[Details]) -> Iterator[Rows]:
        at = [0] * (1 + len(self._episodes.layout.stored))
        for block, counts in zip(ranges, details, strict=True):
            yield self._block(block, counts, at)
            at = [before + max(0, count) for before, count in zip(at, counts, strict=True)]

    def _block(self, block: BlockRange, details: Details, at: list[int]) -> Rows:
        out = np.zeros((block.rows, self._episodes.layout.payload_bytes), np.uint8)
        exceptions = {}
        for i, leaf in self._episodes.leaves:
            count = details[i + 1]
            if count == WHOLE:
                read = self._file.read(_steps(self._name, leaf), block.window())
                put_column(out, leaf, as_column(read, leaf))
                continue
            rows, values = (
                self._file.read(f"{_steps(self._name, leaf)}/{x}", (slice(at[i + 1], at[i + 1] + count),))
                for x in ("row", "value")
            )
            positions, column = block.to_positions(rows), as_column(values, leaf)
            if i in self._episodes.shared:
                exceptions[i] = positions, column
            else:
                put_column(out, leaf, ted_codec.repeat_runs(positions, column, block.rows))
        for i, (positions, column) in exceptions.items():
            root = column_of(out, self._episodes.layout.stored[self._episodes.shared[i]])
            check_covered(positions, ted_codec.env_ends(block.envs, block.steps))
            put_column(out, self._episodes.layout.stored[i], ted_codec.followed(root, positions, column))
        return out.reshape(block.envs, block.steps, -1)


# ---- both layouts ----
def dtype_of(leaf: LeafSpec) -> np.dtype[Any]:
    """The dtype of a leaf in the file; bfloat16, which NumPy and HDF5 do not have, is stored as its bits."""
    if leaf.dtype == torch.bfloat16:
        return np.dtype("<u2")
    dtype: np.dtype[Any] = torch.empty(0, dtype=leaf.dtype, device="cpu").numpy().dtype
    return dtype


def as_column(values: npt.NDArray[Any], leaf: LeafSpec) -> Column:
    """uint8 [n, nbytes]: the bytes of values that were read."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).reshape(-1, leaf.nbytes)


def _steps(name: str, leaf: LeafSpec) -> str:
    """The path of a key in the group of a lane."""
    return join_path(name, "hidden" if leaf.hidden else "steps", *leaf.path)


def _values(column: Column, leaf: LeafSpec, block: BlockRange) -> npt.NDArray[Any]:
    lead = (block.steps,) if block.envs == 1 else (block.envs, block.steps)
    return column.view(dtype_of(leaf)).reshape(*lead, *leaf.shape)


def leaf_attributes(leaf: LeafSpec) -> dict[str, str]:
    """Attributes that say which key a dataset holds."""
    return {"key": key_json(leaf.path), "dtype": str(leaf.dtype).removeprefix("torch."), "stored": "values"}


def _run_starts(column: Column, block: BlockRange) -> Positions:
    """Positions where the column changes within an environment, and the first step of each."""
    start = np.zeros(block.rows, np.bool_)
    start[ted_codec.run_starts(column)] = True
    start[:: block.steps] = True
    return np.flatnonzero(start)


def _is_cheaper(changes: int, leaf: LeafSpec, steps: int) -> bool:
    """Whether changes take less than half the bytes of the values; if more, values are easier for other tools."""
    return 2 * changes * (ROWS.itemsize + leaf.nbytes) <= steps * leaf.nbytes


def totals(details: list[Details], width: int) -> list[int]:
    """Sums of the details over the blocks; ValueError when a block does not have `width` of them."""
    if any(len(counts) != width for counts in details):
        raise ValueError(f"a block does not have {width} numbers beside its steps")
    return [sum(max(0, counts[i]) for counts in details) for i in range(width)]


# ---- grouped: a group for each trajectory ----
TRAJECTORY = "trajectory_{:08d}"


class GroupedWriter:
    """Writes each trajectory as a group; one that is longer than a block goes on in the next group."""

    def __init__(self, file: H5Writer, name: str, episodes: EpisodeLayout, steps: int, envs: int) -> None:
        self._file, self._name, self._episodes = file, name, episodes
        self._number = 0
        self._blocks: list[list[int]] = []

    def add(self, block: BlockRange, rows: Rows, cuts: Sequence[int]) -> None:
        flat, leaves = rows.reshape(block.rows, -1), self._episodes.layout.stored
        ends = self._episodes.trajectory_ends(flat, block.envs, block.steps, cuts)
        at = np.concatenate(([0], np.flatnonzero(ends) + 1))
        self._file.append(join_path(self._name, STARTS), block.to_rows(at[:-1]))
        details = [len(at) - 1] + [0] * len(leaves)
        for i, leaf in self._episodes.leaves:
            column, root = column_of(flat, leaf), self._episodes.shared.get(i)
            if root is not None:
                broken = np.flatnonzero(ted_codec.broken(column_of(flat, leaves[root]), column, ends) & ~ends)
                name = join_path(self._name, "exceptions", *leaf.path)
                self._file.append(f"{name}/row", block.to_rows(broken))
                self._file.append(f"{name}/value", column[broken].view(dtype_of(leaf)).reshape(-1, *leaf.shape))
                details[i + 1] = len(broken)
            elif i in self._episodes.copy_of:
                following = column_of(flat, leaves[self._episodes.copy_of[i]])
                self._write(leaf, ted_codec.with_last(column, following, ends), at + np.arange(len(at)))
            else:
                self._write(leaf, column, at)
        if self._episodes.leaves:
            self._describe(block, at)
        self._number += len(at) - 1
        self._blocks.append([block.steps, *details])

    def blocks(self) -> list[list[int]]:
        return self._blocks

    def _write(self, leaf: LeafSpec, column: Column, at: Positions) -> None:
        values = column.view(dtype_of(leaf)).reshape(-1, *leaf.shape)
        for k, (start, stop) in enumerate(zip(at[:-1].tolist(), at[1:].tolist(), strict=True)):
            name = _trajectory(self._name, self._number + k, leaf)
            self._file.create_with(name, values[start:stop])
            if leaf.dtype == torch.bfloat16:
                self._file.set_attributes(name, leaf_attributes(leaf))

    def _describe(self, block: BlockRange, at: Positions) -> None:
        for k, row in enumerate(block.to_rows(at[:-1]).tolist()):
            attributes = {"first_step": row // block.envs, "env": row % block.envs, "steps": int(at[k + 1] - at[k])}
            self._file.set_attributes(join_path(self._name, TRAJECTORY.format(self._number + k)), attributes)


class GroupedReader:
    """Reads what a `GroupedWriter` wrote."""

    def __init__(self, file: H5Reader, name: str, episodes: EpisodeLayout, steps: int, envs: int) -> None:
        self._file, self._name, self._episodes = file, name, episodes

    def expect(self, ranges: list[BlockRange], details: list[Details]) -> None:
        if any(not 0 < counts[0] <= block.rows for counts, block in zip(details, ranges, strict=True)):
            raise ValueError("a block has no trajectory, or more of them than steps")
        sums = totals(details, 1 + len(self._episodes.layout.stored))
        self._file.expect(join_path(self._name, STARTS), (sums[0],), ROWS)
        for i in self._episodes.shared:
            leaf = self._episodes.layout.stored[i]
            name = join_path(self._name, "exceptions", *leaf.path)
            self._file.expect(f"{name}/row", (sums[i + 1],), ROWS)
            self._file.expect(f"{name}/value", (sums[i + 1], *leaf.shape), dtype_of(leaf))

    def blocks(self, ranges: list[BlockRange], details: list[Details]) -> Iterator[Rows]:
        at = [0] * (1 + len(self._episodes.layout.stored))
        for block, counts in zip(ranges, details, strict=True):
            yield self._block(block, counts, at)
            at = [before + count for before, count in zip(at, counts, strict=True)]

    def _block(self, block: BlockRange, details: Details, at: list[int]) -> Rows:
        out = np.zeros((block.rows, self._episodes.layout.payload_bytes), np.uint8)
        rows = self._file.read(join_path(self._name, STARTS), (slice(at[0], at[0] + details[0]),))
        starts = np.append(block.to_positions(rows), block.rows)
        ends = np.zeros(block.rows, np.bool_)
        ends[starts[1:] - 1] = True
        for i, leaf in self._episodes.leaves:
            if i in self._episodes.shared:
                continue
            copy = self._episodes.copy_of.get(i)
            column = self._read(leaf, at[0], np.diff(starts) + (copy is not None))
            if copy is not None:
                column, following = ted_codec.without_last(column, ends)
                put_column(out, self._episodes.layout.stored[copy], following)
            put_column(out, leaf, column)
        for i in self._episodes.shared:
            leaf, window = self._episodes.layout.stored[i], (slice(at[i + 1], at[i + 1] + details[i + 1]),)
            name = join_path(self._name, "exceptions", *leaf.path)
            positions = block.to_positions(self._file.read(f"{name}/row", window))
            out[positions, leaf.offset : leaf.offset + leaf.nbytes] = as_column(
                self._file.read(f"{name}/value", window), leaf
            )
        return out.reshape(block.envs, block.steps, -1)

    def _read(self, leaf: LeafSpec, first: int, lengths: Positions) -> Column:
        parts = []
        for k, length in enumerate(lengths.tolist()):
            name = _trajectory(self._name, first + k, leaf)
            parts.append(as_column(self._file.read_whole(name, (length, *leaf.shape), dtype_of(leaf)), leaf))
        return np.concatenate(parts)


def _trajectory(name: str, number: int, leaf: LeafSpec) -> str:
    """The path of a key of one trajectory; hidden keys lie beside the groups of the trajectories."""
    return join_path(name, *(["hidden"] if leaf.hidden else []), TRAJECTORY.format(number), *leaf.path)


_DESCRIPTION = (
    "Steps of episodes (TED). Each group lane_<n> was written by one writer, oldest step first. steps/<key> is a "
    "dataset [steps, ...], or [envs, steps, ...]; where the attribute `stored` is not `values`, it is a group whose "
    "attribute `meaning` says how `row` and `value` give a value to every step. A row is step * envs + env. "
    "trajectory_starts are the rows where trajectories begin."
)
_GROUPS = (
    "Steps of episodes (TED). Each group lane_<n> was written by one writer, oldest step first, and has a group a "
    "trajectory. A key that also exists under next has one value more than the trajectory has steps: "
    "what followed the last one; exceptions/next/<key> holds the steps inside trajectories, by row, where the value "
    "that followed is not that of the step after. A row is step * envs + env. A trajectory that is longer than a "
    "block of about 16 MB goes on in the next group of its env."
)


class H5StorageCheckpointer(StorageCheckpointerBase[RowSource, RowSink]):
    """Saves steps of TED as one HDF5 file, without the second copy of their observations.

    As the `FlatStorageCheckpointer`, in `storage/<checkpoint_file>` of the snapshot. Attributes in the file explain it;
    `docs/format.md` does so in full. A save writes the whole file.

    Args:
        checkpoint_file: its name.
        done_keys: flags, which are never read from the step after: names at any depth, or tuples for one place.
        reward_keys: rewards, the same.
        h5_kwargs: how datasets are compressed: `compression` ("gzip", "lzf"), `compression_opts`, `shuffle`,
            `fletcher32`. None: gzip with shuffle, with `group_per_trajectory` nothing, as its datasets are small; `{}`:
            nothing.
        group_per_trajectory: a group for each trajectory, in place of a dataset for each key: slow with many.

    Raises:
        ImportError: h5py is not installed; the message says what to install.
        ValueError: `checkpoint_file` is no name of a file, or an option is not one of those; and at a save, a step has
            several done flags (multi-agent).
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
        import_h5py()
        if not is_file_name(checkpoint_file) or "/" in checkpoint_file:
            raise ValueError(
                f"checkpoint_file={checkpoint_file!r} is not the name of a file; use letters, digits, '_', '-' and '.'"
            )
        self.checkpoint_file, self.group_per_trajectory = checkpoint_file, group_per_trajectory
        if h5_kwargs is None:
            h5_kwargs = {} if group_per_trajectory else _COMPRESSED
        self._keys, self._options = StepKeys(done_keys, reward_keys), check_options(h5_kwargs)

    def plan_save(self, source: RowSource, previous: dict[str, Any] | None = None) -> SavePlan:
        layout, counters = json_copy([source.layout_state(), source.counters()])
        episodes = None if layout is None else EpisodeLayout.of(LayoutState(layout), self._keys)
        form = _FileForm(f"storage/{self.checkpoint_file}", self._options, self.group_per_trajectory)
        return _SavePlan(form, source, layout, counters, episodes)

    def plan_restore(self, reader: SnapshotReader, state: dict[str, Any]) -> RestorePlan[RowSink]:
        return _RestorePlan(reader, state)


class _FileForm(NamedTuple):
    """How a file is written, and its name in the snapshot."""

    name: str
    options: dict[str, Any]
    grouped: bool


class _SavePlan:
    """One save of rows as an HDF5 file."""

    def __init__(
        self,
        form: _FileForm,
        source: RowSource,
        layout: dict[str, Any] | None,
        counters: dict[str, Any],
        episodes: EpisodeLayout | None,
    ) -> None:
        self._form, self._source, self._episodes = form, source, episodes
        self._layout, self._counters, self._checked = layout, counters, Counters(counters)

    @property
    def nbytes(self) -> int:
        return 0 if self._episodes is None else self._checked.rows * self._episodes.row_bytes

    def write(self, writer: SnapshotWriter) -> dict[str, Any]:
        episodes = self._episodes
        if episodes is None:
            return {"layout": None, "counters": self._counters, "lanes": []}
        file, options, grouped = self._form
        with writer.written_by_path(file) as path, create_checked(path, options) as out:
            description = _GROUPS if grouped else _DESCRIPTION
            out.set_attributes("/", {"format": "engram steps", "version": 1, "description": description})
            lanes = [self._write_lane(out, lane, episodes) for lane in range(self._checked.lanes)]
        # Other processes may have overwritten the oldest rows before they were read.
        counters = json_copy(self._source.counters())
        content = {"file": file, "group_per_trajectory": grouped, "shared": episodes.saved_pairs, "lanes": lanes}
        return {"layout": self._layout, "counters": counters, **content}

    def _write_lane(self, out: H5Writer, lane: int, episodes: EpisodeLayout) -> dict[str, Any]:
        checked, row_bytes = self._checked, episodes.layout.payload_bytes
        first, steps, envs = checked.first(lane), checked.stop(lane) - checked.first(lane), checked.envs
        if not steps:
            return {"start": first, "blocks": []}
        kind = GroupedWriter if self._form.grouped else ColumnarWriter
        written: LaneWriter = kind(out, _lane(lane), episodes, steps, envs)
        for chunk in cut(checked, rows_per_chunk(envs * row_bytes), lane):
            rows = read_rows(self._source, chunk, envs, row_bytes, 0, chunk.stop - chunk.start)
            block = BlockRange(chunk.start - first, chunk.stop - chunk.start, envs)
            written.add(block, rows, cuts_of(self._counters["lanes"][lane], chunk))
        blocks = written.blocks()
        out.set_attributes(_lane(lane), {"first_sequence": first, "steps": steps, "envs": envs})
        return {"start": first, "blocks": blocks}


class _RestorePlan:
    """One load of rows from an HDF5 file: the snapshot's description of it, checked, and the blocks of rows in it."""

    def __init__(self, reader: SnapshotReader, state: dict[str, Any]) -> None:
        self._reader = reader
        try:
            self.layout = layout_of(state)
            self.counters: dict[str, Any] = state["counters"]
            self._checked = Counters(self.counters)
            self._lanes = [(natural(lane["start"]), lane["blocks"]) for lane in state["lanes"]]
            if self.layout is not None:
                self._checked.check_envs(self.layout)
                self._episodes = EpisodeLayout.saved(self.layout, state)
                self._file, self._groups = str(state["file"]), bool(state["group_per_trajectory"])
            if len(self._lanes) != (0 if self.layout is None else self._checked.lanes):
                raise ValueError(f"it describes {len(self._lanes)} lanes, its counters {self._checked.lanes}")
            self._ranges = [self._block_ranges(lane, start, blocks) for lane, (start, blocks) in enumerate(self._lanes)]
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
                    sink.write_block(lane, start, rows)
                sink.end_restore()
            except BaseException:
                sink.abort_restore()
                raise

    @contextmanager
    def _opened(self) -> Iterator[Callable[[], Iterator[tuple[int, int, Rows]]]]:
        """Opens the verified file: a callable that gives lane, first sequence and rows of each block."""
        if self.layout is None:
            yield lambda: iter(())
            return
        with self._reader.verified(self._file) as file, ExitStack() as stack:
            with self._as_damage():
                opened = stack.enter_context(H5Reader.opened(file))
            yield lambda: self._as_damaged_blocks(self._blocks(opened))

    def _as_damaged_blocks(self, blocks: Iterator[tuple[int, int, Rows]]) -> Iterator[tuple[int, int, Rows]]:
        """The blocks; ValueErrors of reading them are damage, not those of whoever iterates."""
        while True:
            with self._as_damage():
                block = next(blocks, None)
            if block is None:
                return
            yield block

    def _blocks(self, file: H5Reader) -> Iterator[tuple[int, int, Rows]]:
        readers = self._readers(file)
        for lane, (start, blocks) in enumerate(self._lanes):
            ranges, details = self._ranges[lane], [tuple(block[1:]) for block in blocks]
            read, first = readers[lane].blocks(ranges, details), self._checked.first(lane)
            for block in ranges:
                rows, begin = next(read), start + block.first
                if begin + block.steps > first:
                    skip = max(0, first - begin)
                    yield lane, begin + skip, rows[:, skip:]
        file.check_nothing_else()

    def _readers(self, file: H5Reader) -> list[LaneReader]:
        kind = GroupedReader if self._groups else ColumnarReader
        readers: list[LaneReader] = []
        for lane, (_, blocks) in enumerate(self._lanes):
            ranges = self._ranges[lane]
            readers.append(
                kind(file, _lane(lane), self._episodes, sum(block.steps for block in ranges), self._checked.envs)
            )
            if ranges:
                readers[-1].expect(ranges, [tuple(block[1:]) for block in blocks])
        return readers

    def _block_ranges(self, lane: int, start: int, blocks: list[list[int]]) -> list[BlockRange]:
        """The blocks of a lane, checked to hold every row that exists."""
        ranges, at = [], 0
        for block in blocks:
            steps = natural(block[0])
            details: Details = tuple(block[1:])
            # A few bytes can stand for many equal rows: how many there are is limited before memory is taken for them.
            if not 0 < steps * self._checked.envs * self._episodes.layout.payload_bytes <= self._largest_block():
                raise ValueError(f"a block cannot have {steps} steps")
            if any(type(detail) is not int for detail in details):
                raise ValueError(f"{block!r} does not describe a block")
            ranges.append(BlockRange(at, steps, self._checked.envs))
            at += steps
        first, stop = self._checked.first(lane), self._checked.stop(lane)
        if start > first or (first < stop and start + at != stop):
            raise ValueError(f"the blocks of lane {lane} do not hold the rows {first} to {stop}")
        return ranges

    def _largest_block(self) -> int:
        return most_row_bytes(self._checked.envs * self._episodes.layout.payload_bytes)

    @contextmanager
    def _as_damage(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise CorruptCheckpointError(self._reader.path(self._file), str(error)) from error


def _lane(lane: int) -> str:
    return f"lane_{lane}"
