"""The rows of one lane in an HDF5 file, a group a trajectory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from engram.data.replay_buffers.checkpointers.base import Rows
from engram.data.replay_buffers.checkpointers.h5 import H5Reader, H5Writer, place
from engram.data.replay_buffers.checkpointers.h5_lanes import (
    ROWS,
    STARTS,
    Form,
    Span,
    as_column,
    dtype_of,
    leaf_attributes,
    totals,
    trajectory_ends,
)
from engram.data.replay_buffers.checkpointers.packing import Details, column_of, put_column
from engram.data.replay_buffers.layout import LeafSpec
from engram.data.replay_buffers.ted import steps as st
from engram.data.replay_buffers.ted.steps import Column, Positions

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
                broken = np.flatnonzero(st.broken(column_of(flat, leaves[root]), column, ends) & ~ends)
                name = place(self._name, "exceptions", *leaf.path)
                self._file.append(f"{name}/row", span.rows_at(broken))
                self._file.append(f"{name}/value", column[broken].view(dtype_of(leaf)).reshape(-1, *leaf.shape))
                details[i + 1] = len(broken)
            elif i in self._form.copy_of:
                following = column_of(flat, leaves[self._form.copy_of[i]])
                self._write(leaf, st.with_last(column, following, ends), at + np.arange(len(at)))
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
                column, following = st.without_last(column, ends)
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
