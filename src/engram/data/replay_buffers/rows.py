"""Packed rows: private memory, shared memory, or a mapped file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram import _native
from engram.data.replay_buffers import trees
from engram.data.replay_buffers.border import Border
from engram.data.replay_buffers.lanes import Lanes
from engram.data.replay_buffers.layout import SEQUENCE, RowLayout
from engram.data.replay_buffers.utils import slots_tensor
from engram.errors import StorageError

_Read = tuple[Any, list[int] | None, list[int] | None, Tensor | None]


class RowTable:
    """The bytes of the stored rows, and the way in and out of them."""

    def __init__(self, lanes: Lanes, layout: RowLayout, mapped: bool) -> None:
        self.lanes = lanes
        self._store = lanes.store
        self.layout = layout
        self._codec = layout.codec
        self.mapped = mapped
        self._fast = layout.plain
        border = Border.of([leaf.path for leaf in layout.leaves], [(x.shape, x.dtype) for x in layout.leaves])
        if border.says_anything:
            self._store.set_border(self._codec, list(border.entries), list(border.done), border.either, border.id)
        if layout.sequence_offset is not None and self._store.lanes == self._store.strands == 1:
            lanes.own_sequences = functools.partial(_own_sequences, self._store, layout.sequence_offset)

    @property
    def nbytes(self) -> int:
        """Bytes of header and rows, used or not."""
        return self._store.total_bytes

    def plan(self, batch: Any, batch_dims: int, time_dim: int, extra: tuple[str, Any] | None = None) -> _native.Plan:
        """Checks a batch leaf by leaf, as `RowLayout.plan`."""
        plan: _native.Plan = self.layout.plan(batch, batch_dims, time_dim, extra)
        if plan.strands != self._store.strands:
            raise ValueError(
                f"the batch has {plan.strands} environments, this storage {self._store.strands}; nothing was written"
            )
        return plan

    def append(self, plan: _native.Plan, most: int | None = None) -> Tensor | int:
        """Writes a checked batch (`most`: only its first steps) behind the newest row of this process's lane.

        Returns time slots, int64 [steps]; of a single step without batch dimensions its slot.
        """
        made: Any = self._store.append(self.lanes.hold(), plan, most)
        return made if type(made) in (Tensor, int) else slots_tensor(made)

    def overwrite(self, slots: Tensor, plan: _native.Plan, rows: Tensor | None = None) -> None:
        """Writes a checked batch (`rows`: these of its rows, int64 [n]) over rows that exist."""
        self._store.overwrite(slots, plan, rows)

    def prepare_overwrite(self, slots: Tensor, plan: _native.Plan, rows: Tensor, first: int) -> Callable[[], None]:
        """As `overwrite`; what is returned writes, and needs no memory. The rows may come until then.

        Row i of the batch gets the sequence `first + i`, with its bytes.
        """
        return self._store.prepare_overwrite(slots, plan, rows, first).write

    def with_sequences(self) -> RowTable:
        """A copy of the rows in private memory, with room for their own sequences."""
        layout, leaves = self.layout.with_sequence(), {leaf.path: leaf for leaf in self.layout.leaves}
        moves = [(leaves[x.path].offset, x.offset, x.nbytes) for x in layout.leaves]
        store = self._store.widened(layout.payload_bytes, layout.alignment, layout.to_bytes(), moves)
        return RowTable(self.lanes.widened(store), layout, mapped=False)

    def read(
        self,
        slots: Tensor,
        shape: tuple[int, ...] | None = None,
        extra: dict[str, Any] | None = None,
        numbers: bool = False,
    ) -> _Read:
        """Copies rows out.

        Args:
            slots: int64 [n].
            shape: batch dimensions with n elements; `[n]` if None.
            extra: entries to add at the root of the batch.
            numbers: also give each row's write number.

        Returns:
            the batch; positions of rows that were overwritten meanwhile (None: none); positions of slots that hold
            no row (None: none); write numbers (None unless asked for).
        """
        if self.lanes.asleep:
            self.lanes.wake()
        if extra and self.layout.within:
            lead = 1 if shape is None else len(shape)
            extra = {key: trees.spread(value, lead, self.layout.within) for key, value in extra.items()}
        if self._fast:
            made: _Read = self._store.gather(self._codec, slots, shape, extra, self.mapped, numbers)
            return made
        return self._read_slowly(slots, (len(slots),) if shape is None else shape, extra, numbers)

    def like(self, other: RowTable) -> bool:
        """Whether both can be read into one batch."""
        return self._fast and (other is self or (other.layout.plain and other.layout.key == self.layout.key))

    def read_with(
        self,
        others: list[RowTable],
        slots: Tensor,
        shape: tuple[int, ...],
        extra: dict[str, Any] | None,
        numbers: bool,
        parts: list[dict[str, Any] | None] | None,
    ) -> tuple[Any, ...] | None:
        """As `read`, from tables that are `like` this one."""
        tables = [self, *others]
        for table in tables:
            if table.lanes.asleep:
                table.lanes.wake()
        if within := self.layout.within:
            extra = None if extra is None else {k: trees.spread(v, len(shape), within) for k, v in extra.items()}
            parts = parts and [one and {k: trees.spread(v, 1, within) for k, v in one.items()} for one in parts]
        stores = [table.lanes.store for table in tables]
        mapped = any(table.mapped for table in tables)
        return _native.gather_many(stores, self._codec, slots, shape, extra, mapped, numbers, parts)

    def _read_slowly(self, slots: Tensor, shape: tuple[int, ...], extra: dict[str, Any] | None, numbers: bool) -> _Read:
        if _native.has_exchange():
            leaves, gone, absent, found = self._store.gather(self._codec, slots, shape, None, self.mapped, numbers)
            batch = self.layout.build(leaves, shape) if isinstance(leaves, list) else leaves
        else:
            arrays = self.layout.empty_arrays(len(slots))
            where = slots.numpy()
            _, gone, absent, found = self._store.gather_into(self._codec, where, arrays, self.mapped, numbers)
            batch = self.layout.build(self.layout.tensors_of(arrays, shape), shape)
        for key, value in (extra or {}).items():
            trees.put_entry(batch, key, value)
        return batch, gone, absent, None if found is None else slots_tensor(found)

    def column(self, path: trees.Path, slots: Tensor) -> Tensor:
        """One leaf of the steps at time slots: [n, *strands, ...]."""
        # A view whose gaps are the rest of the rows.
        whole = trees.flatten(self.layout.root, self.view(0, self._store.lanes * self._store.lane_capacity))
        at = next(i for i, leaf in enumerate(self.layout.leaves) if leaf.path == path)
        leaf: Tensor = whole[at][slots]
        return leaf

    def view(self, start: int, stop: int) -> Any:
        """Live views of time slots [start, stop): `[time, ...]`, or `[time, strands, ...]` with several strands."""
        s = self._store
        lead: tuple[int, ...] = (stop - start,)
        steps: tuple[int, ...] = (1,)
        if s.strands > 1:
            lead, steps = (*lead, s.strands), (*steps, s.lane_capacity)
        offset = s.rows_offset + start * s.row_stride
        return self.layout.views(s.memory(), offset, s.row_stride, lead, steps)

    # ---- whole blocks, for checkpoints ----
    def block(self, lane: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        """uint8 [strands, stop - start, payload bytes]: the rows with these write numbers, copied."""
        out = np.empty((self._store.strands, stop - start, self._store.payload_bytes), np.uint8)
        for at, there in self._pieces(lane, start, stop):
            out[:, at] = there
        return out

    def set_block(self, lane: int, start: int, rows: np.ndarray[Any, Any]) -> None:
        """Puts rows in their places; they become visible when the counters are set. StorageError: the disk fails."""
        if rows.strides[-1] != 1:
            rows = np.ascontiguousarray(rows)
        try:
            self._store.put(lane, start, rows)
        except OSError as error:
            raise StorageError(f"rows cannot be written to the storage's file: {error.strerror}") from error

    def _pieces(self, lane: int, start: int, stop: int) -> list[tuple[slice, np.ndarray[Any, Any]]]:
        s = self._store
        shape = (s.lanes, s.strands, s.lane_capacity, s.row_stride)
        size = s.lanes * s.strands * s.lane_capacity * s.row_stride
        memory = s.memory()[s.rows_offset : s.rows_offset + size].reshape(shape)[lane]
        pieces, w = [], start
        while w < stop:
            slot = w % s.lane_capacity
            n = min(stop - w, s.lane_capacity - slot)
            pieces.append((slice(w - start, w - start + n), memory[:, slot : slot + n, : s.payload_bytes]))
            w += n
        return pieces


def _own_sequences(store: _native.Store, offset: int, slots: Tensor) -> Tensor:
    """The sequences that the rows in these slots carry: int64 [n]. A store of one lane and one strand."""
    rows = store.memory()[store.rows_offset :][: store.lane_capacity * store.row_stride]
    own = rows.reshape(store.lane_capacity, store.row_stride)[:, offset : offset + SEQUENCE.nbytes][slots.numpy()]
    return torch.from_numpy(own.reshape(-1).view(np.int64))


def expand_slots(time_slots: Tensor | int, strands: int) -> Tensor | int:
    """The slots of all strands at these times: int64 [steps * strands], time first."""
    if strands == 1 or isinstance(time_slots, int):
        return time_slots
    return (time_slots.unsqueeze(1) * strands + torch.arange(strands)).reshape(-1)
