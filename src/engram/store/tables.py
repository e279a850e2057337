"""Packed rows: private memory, shared memory, or a mapped file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram import _native, pytree
from engram._system import slots_tensor
from engram.errors import StorageError
from engram.store.border import LOOK_BACK, Border, ColumnBorder
from engram.store.lanes import Lanes
from engram.store.layout import SEQUENCE, RowLayout

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
            extra = {key: pytree.repeat_per_step(value, lead, self.layout.within) for key, value in extra.items()}
        found = None
        if numbers and self.lanes.own_sequences is not None:
            found, numbers = self.lanes.generations(slots), False
        if self._fast:
            made: _Read = self._store.gather(self._codec, slots, shape, extra, self.mapped, numbers)
        else:
            made = self._read_slowly(slots, (len(slots),) if shape is None else shape, extra, numbers)
        return made if found is None else (*made[:3], found)

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
        """As `read`, from tables that are `like` this one; None where some rows carry sequences of their own."""
        tables = [self, *others]
        for table in tables:
            if table.lanes.asleep:
                table.lanes.wake()
            if numbers and table.lanes.own_sequences is not None:
                return None
        if within := self.layout.within:
            extra = (
                None if extra is None else {k: pytree.repeat_per_step(v, len(shape), within) for k, v in extra.items()}
            )
            parts = parts and [
                one and {k: pytree.repeat_per_step(v, 1, within) for k, v in one.items()} for one in parts
            ]
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
            pytree.set_entry(batch, key, value)
        return batch, gone, absent, None if found is None else slots_tensor(found)

    def column(self, path: pytree.KeyPath, slots: Tensor) -> Tensor:
        """One leaf of the steps at time slots: [n, *strands, ...]."""
        # A view whose gaps are the rest of the rows.
        whole = pytree.flatten(self.layout.root, self.view(0, self._store.lanes * self._store.lane_capacity))
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


class ColumnTable:
    """Rows kept as columns `[time, *strands, ...]` on one device. Writers and readers take the storage's mutex."""

    def __init__(self, lanes: Lanes, layout: RowLayout, columns: list[Tensor], inner: tuple[int, ...]) -> None:
        self._lanes = lanes
        self.layout = layout
        self._columns = columns
        self._inner = inner
        self._device = columns[0].device
        self._sequences: Tensor | None = None
        if layout.carries_sequence:
            self.carry_sequences()
        border = Border.of([leaf.path for leaf in layout.leaves], [(x.shape, x.dtype) for x in layout.leaves])
        self._border = ColumnBorder(border, lanes.strands, self._device) if border.says_anything else None
        self._incarnation = lanes.store.incarnation

    @classmethod
    def empty(cls, lanes: Lanes, layout: RowLayout, inner: tuple[int, ...], device: torch.device) -> ColumnTable:
        """Columns with room for every lane."""
        lead = (lanes.store.lane_capacity, *inner)
        columns = [torch.zeros((*lead, *x.shape), dtype=x.dtype, device=device) for x in layout.leaves]
        return cls(lanes, layout, columns, inner)

    @property
    def nbytes(self) -> int:
        return sum(c.numel() * c.itemsize for c in self._stored())

    def carry_sequences(self) -> None:
        """Makes room for the rows' own sequences, in a column that no batch shows."""
        if self._sequences is None:
            lead = self._columns[0].shape[: 1 + len(self._inner)]
            self._sequences = torch.zeros(lead, dtype=SEQUENCE.dtype, device=self._device)
            self.layout = self.layout.with_sequence()
            self._lanes.own_sequences = functools.partial(_own_sequences_of_column, self._sequences)

    def _stored(self) -> list[Tensor]:
        """The columns of `layout.stored`."""
        return self._columns if self._sequences is None else [*self._columns, self._sequences]

    def plan(self, batch: Any, batch_dims: int, time_dim: int, extra: tuple[str, Any] | None = None) -> list[Tensor]:
        """Leaves `[time, *strands, ...]` on the columns' device; errors as `RowLayout.plan`."""
        if extra is not None:
            batch = pytree.with_entry(batch, *extra)
        leaves = self.layout.fitting(batch, batch_dims)
        if batch_dims == 0 or time_dim < 0:
            leaves = [t.unsqueeze(0) for t in leaves]
        elif time_dim:
            leaves = [t.movedim(time_dim, 0) for t in leaves]
        if len(self._inner) > 1:
            leaves = [t.reshape(t.shape[0], *self._inner, *t.shape[2:]) for t in leaves]
        for leaf, t in zip(self.layout.leaves, leaves, strict=True):
            if tuple(t.shape[1 : 1 + len(self._inner)]) != self._inner:
                raise ValueError(
                    f"{pytree.format_key(leaf.path)} has {list(t.shape[1 : 1 + len(self._inner)])} environments, "
                    f"this storage {list(self._inner)}"
                )
        return [t.to(self._device) for t in leaves]

    def append(self, leaves: list[Tensor], most: int | None = None) -> Tensor:
        """Writes (`most`: only the first of) the steps behind the newest one; returns time slots, int64 [steps]."""
        leaves = [leaf[:most] for leaf in leaves]
        capacity = self._lanes.store.lane_capacity
        if self._border is not None:
            self._look_at_border(self._border, leaves)
        slots = self._lanes.advance(len(leaves[0]))
        where = slots[-capacity:].to(self._device)
        for column, leaf in zip(self._columns, leaves, strict=True):
            column[where] = leaf[-capacity:]
        if self._sequences is not None:
            self._sequences[where] = 0
        return slots

    def _look_at_border(self, border: ColumnBorder, new: list[Tensor]) -> None:
        """Says to the lanes whether the first of the new steps goes on where the newest stored one stopped."""
        store, lanes = self._lanes.store, self._lanes
        lane = store.lane(0)
        published, capacity = lane["published"], store.lane_capacity
        if store.incarnation != self._incarnation:
            self._incarnation = store.incarnation
            looked, agreed = store.border_evidence(0)
            border.recall(agreed)
            rows = torch.arange(max(lane["first"], min(looked, published - 1), published - LOOK_BACK), published)
            cut = torch.isin(rows[1:], torch.tensor(store.seams(0), dtype=torch.int64))
            border.learn_all(self._columns, (rows % capacity).to(self._device), cut.to(self._device).unsqueeze(1))
        if published > lane["first"]:
            newest = [column[(published - 1) % capacity] for column in self._columns]
            begins = border.begins(newest, new)
            border.learn(newest, new, begins)
            lanes.note_border(begins)
        border.learn_all(new, torch.arange(len(new[0]), device=self._device))
        lanes.note_evidence(published + len(new[0]) - 1, border.evidence)

    def overwrite(
        self, slots: Tensor, leaves: list[Tensor], rows: Tensor | None = None, first: int | None = None
    ) -> None:
        """Writes `leaves` ([n, ...]; `rows`: these of them) over rows that exist.

        Row i of the leaves gets the sequence `first + i`; None: what is in a slot keeps the one that it has.
        """
        absent = (self._lanes.generations(slots) < 0).nonzero().flatten()
        if len(absent):
            raise IndexError(f"slot {int(slots[absent[0]])} has not been written")
        where = slots.to(self._device)
        for flat, leaf in zip(self._flat(), leaves, strict=True):
            flat[where] = leaf if rows is None else leaf[rows.to(self._device)]
        if first is not None:
            assert rows is not None and self._sequences is not None
            self._sequences[where] = first + rows.to(self._device)
        self._lanes.store.note_edits(slots)

    def prepare_overwrite(self, slots: Tensor, leaves: list[Tensor], rows: Tensor, first: int) -> Callable[[], None]:
        """As `overwrite`, which what is returned does."""
        return functools.partial(self.overwrite, slots, leaves, rows, first)

    def read(
        self,
        slots: Tensor,
        shape: tuple[int, ...] | None = None,
        extra: dict[str, Any] | None = None,
        numbers: bool = False,
    ) -> tuple[Any, list[int] | None, list[int] | None, Tensor | None]:
        """As `RowTable.read`; nothing is ever overwritten meanwhile."""
        if self._lanes.asleep:
            self._lanes.wake()
        if slots.numel() and (int(slots.min()) < 0 or int(slots.max()) >= self._lanes.capacity):
            raise IndexError(f"a slot lies outside 0 to {self._lanes.capacity - 1}")
        where = slots.to(self._device)
        lead = (len(slots),) if shape is None else shape
        with self._lanes.mutex:
            generation = self._lanes.generations(slots)
            leaves = [flat.index_select(0, where) for flat in self._flat()]
        absent = (generation < 0).nonzero().flatten().tolist()
        leaves = [t.reshape((*lead, *x.shape)) for t, x in zip(leaves, self.layout.leaves, strict=True)]
        batch = pytree.unflatten(self.layout.root, leaves, lead, self._device)
        for key, value in (extra or {}).items():
            pytree.set_per_item(batch, key, value, len(lead))
        return batch, None, absent or None, generation if numbers else None

    def column(self, path: pytree.KeyPath, slots: Tensor) -> Tensor:
        """One leaf of the steps at time slots: [n, *strands, ...]."""
        at = next(i for i, leaf in enumerate(self.layout.leaves) if leaf.path == path)
        return self._columns[at][slots.to(self._device)]

    def view(self, start: int, stop: int) -> Any:
        """Live views of time slots [start, stop)."""
        leaves = [c[start:stop] for c in self._columns]
        return pytree.unflatten(self.layout.root, leaves, (stop - start, *self._inner), self._device)

    # ---- whole blocks, for checkpoints ----
    def block(self, lane: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        """uint8 [strands, stop - start, payload bytes]: packed rows of these write numbers."""
        slots = torch.arange(start, stop) % self._lanes.store.lane_capacity
        out = np.empty((self._lanes.strands, stop - start, self.layout.payload_bytes), np.uint8)
        for column, x in zip(self._stored(), self.layout.stored, strict=True):
            rows = column[slots.to(self._device)].cpu().reshape(stop - start, self._lanes.strands, *x.shape)
            if x.nbytes and start < stop:
                raw = rows.contiguous().reshape(stop - start, self._lanes.strands, x.nbytes // x.itemsize)
                as_bytes = raw.view(torch.uint8).numpy()
                out[:, :, x.offset : x.offset + x.nbytes] = as_bytes.transpose(1, 0, 2)
        return out

    def set_block(self, lane: int, start: int, rows: np.ndarray[Any, Any]) -> None:
        """Puts packed rows in their places."""
        slots = (torch.arange(start, start + rows.shape[1]) % self._lanes.store.lane_capacity).to(self._device)
        for column, x in zip(self._stored(), self.layout.stored, strict=True):
            # A copy with strides of its own: of one row, any strides count as contiguous, and views refuse some.
            part = rows[:, :, x.offset : x.offset + x.nbytes].transpose(1, 0, 2).copy()
            leaf = torch.from_numpy(part).view(x.dtype).reshape(rows.shape[1], *self._inner, *x.shape)
            column[slots] = leaf.to(self._device)

    def _flat(self) -> list[Tensor]:
        return [c.flatten(0, len(self._inner)) for c in self._columns]


def _own_sequences_of_column(column: Tensor, slots: Tensor) -> Tensor:
    """The sequences that the rows in these slots carry: int64 [n]."""
    return column.flatten()[slots.to(column.device)].cpu()
