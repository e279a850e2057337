"""The rows of one lane in an HDF5 file: a dataset a key, or a group a trajectory. Written and read block by block.

A step of a lane has a *row*: `step * strands + strand`, steps counted from the first in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engram.data.replay_buffers.checkpointers.base import Rows
from engram.data.replay_buffers.checkpointers.h5 import H5Reader, H5Writer, key_text, place
from engram.data.replay_buffers.checkpointers.packing import WHOLE, Details, column_of, put_column
from engram.data.replay_buffers.layout import LeafSpec, RowLayout
from engram.data.replay_buffers.ted import steps as st
from engram.data.replay_buffers.ted.steps import Column, Mask, Positions

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
        ends = st.strand_ends(span.strands, span.steps)
        for i, leaf in self._form.leaves:
            column, root = column_of(flat, leaf), self._form.shared.get(i)
            if root is not None:
                at = np.flatnonzero(st.broken(column_of(flat, self._form.layout.stored[root]), column, ends))
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
            if _is_cheaper(len(st.run_starts(column)), leaf, len(column)):
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
                column = st.repeat_runs(span.positions_at(rows), as_column(values, leaf), span.rows)
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
                put_column(out, leaf, st.repeat_runs(positions, column, span.rows))
        for i, (positions, column) in exceptions.items():
            root = column_of(out, self._form.layout.stored[self._form.shared[i]])
            check_ends(positions, span)
            put_column(out, self._form.layout.stored[i], st.followed(root, positions, column))
        return out.reshape(span.strands, span.steps, -1)


# ---- what they share ----
def trajectory_ends(form: Form, flat: Rows, span: Span, cuts: Sequence[int]) -> Mask:
    """bool [rows]: the last steps of trajectories, of strands, and before each cut."""
    ends = st.strand_ends(span.strands, span.steps)
    ends.reshape(span.strands, span.steps)[:, [cut - 1 for cut in cuts if cut]] = True
    flags, ids = ([column_of(flat, form.layout.stored[i]) for i in some] for some in (form.flags, form.ids))
    return st.trajectory_ends(ends, flags, ids)


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
    start[st.run_starts(column)] = True
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
