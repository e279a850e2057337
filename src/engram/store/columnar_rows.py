"""Rows as columns on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engram import pytree
from engram.pytree import to_tensor
from engram.store.border import LOOK_BACK, Border, ColumnBorder
from engram.store.lanes import Lanes
from engram.store.layout import SEQUENCE, RowLayout
from engram.store.rows import LayoutRows, Rows, expand_slots
from engram.store.steps import Steps


class _Columns(NamedTuple):
    """Checked data: leaves `[time, *envs, ...]` on the columns' device.

    Attributes:
        own: the number of the leaf in which rows get their own index when they are written; None: what is in the leaves
            is written.
    """

    leaves: list[Tensor]
    own: int | None = None


class ColumnarRows(LayoutRows):
    """Rows as columns `[time, *envs, ...]` on one device. Writers and readers hold the storage's mutex."""

    widened = "in place"  # by one column more

    def __init__(
        self, lanes: Lanes, layout: RowLayout, columns: list[Tensor], env_shape: tuple[int, ...], ndim: int
    ) -> None:
        super().__init__(lanes, layout, env_shape, ndim)
        self._columns = [_as_signed(column) for column in columns]
        self._device = columns[0].device
        self._sequences: Tensor | None = None
        if layout.carries_sequence:
            self.with_sequences()
        border = Border.of([leaf.path for leaf in layout.leaves], [(x.shape, x.dtype) for x in layout.leaves])
        self._border = ColumnBorder(border, lanes.envs, self._device) if border.decides else None
        self._incarnation = lanes.store.incarnation

    @classmethod
    def empty(
        cls, lanes: Lanes, layout: RowLayout, env_shape: tuple[int, ...], ndim: int, device: torch.device
    ) -> ColumnarRows:
        """New columns with room for every step."""
        lead = (lanes.store.lane_capacity, *env_shape)
        columns = [torch.zeros((*lead, *x.shape), dtype=x.dtype, device=device) for x in layout.leaves]
        return cls(lanes, layout, columns, env_shape, ndim)

    @property
    def nbytes(self) -> int:
        return sum(c.numel() * c.itemsize for c in self._stored())

    def with_sequences(self) -> ColumnarRows:
        """These rows: their sequences are in a column that no batch shows."""
        if self._sequences is None:
            lead = self._columns[0].shape[: 1 + len(self.env_shape)]
            self._sequences = torch.zeros(lead, dtype=SEQUENCE.dtype, device=self._device)
            self.layout = self.layout.with_sequence()
            self.lanes.own_sequences = functools.partial(_own_sequences_of_column, self._sequences)
        return self

    def _stored(self) -> list[Tensor]:
        """The columns of `layout.stored`."""
        return self._columns if self._sequences is None else [*self._columns, self._sequences]

    def plan(self, steps: Steps, index_key: str | None = None) -> tuple[int, _Columns]:
        batch, own = steps.items, None
        if index_key is not None:
            batch = pytree.with_entry(batch, index_key, to_tensor(self._own_index.of(steps)))
            own = next(k for k, leaf in enumerate(self.layout.leaves) if leaf.path == (index_key,))
        leaves = self.layout.fitting(batch, steps.lead)
        if steps.is_single:
            leaves = [t.unsqueeze(0) for t in leaves]
        elif steps.time:
            leaves = [t.movedim(steps.time, 0) for t in leaves]
        if len(self.env_shape) > 1:
            leaves = [t.reshape(t.shape[0], *self.env_shape, *t.shape[2:]) for t in leaves]
        for leaf, t in zip(self.layout.leaves, leaves, strict=True):
            if tuple(t.shape[1 : 1 + len(self.env_shape)]) != self.env_shape:
                raise ValueError(
                    f"{pytree.format_key(leaf.path)} has {list(t.shape[1 : 1 + len(self.env_shape)])} environments, "
                    f"this storage {list(self.env_shape)}"
                )
        return self._moved(leaves, own if steps.own_index is None else None)

    def plan_rows(self, rows: Any) -> tuple[int, _Columns]:
        return self._moved(self.layout.fitting(rows, 1))

    def _moved(self, leaves: list[Tensor], own: int | None = None) -> tuple[int, _Columns]:
        return len(leaves[0]), _Columns([_as_signed(t.to(self._device)) for t in leaves], own)

    def append_plan(self, plan: _Columns, most: int | None = None) -> Tensor:
        leaves = [leaf[:most] for leaf in plan.leaves]
        capacity = self.lanes.store.lane_capacity
        self.lanes.hold()
        self.lanes.check_room(len(leaves[0]))
        slots = self.lanes.next_slots(len(leaves[0]))
        if plan.own is not None:
            index = self._own_index.of_slots(to_tensor(expand_slots(slots, self.lanes.envs)))
            leaves[plan.own] = index.reshape(leaves[plan.own].shape).to(self._device)
        if self._border is not None:
            self._note_border(self._border, leaves)
        where = slots[-capacity:].to(self._device)
        for column, leaf in zip(self._columns, leaves, strict=True):
            column[where] = leaf[-capacity:]
        if self._sequences is not None:
            self._sequences[where] = 0
        return self.lanes.advance(len(slots))  # what could not be written is not counted

    def _note_border(self, border: ColumnBorder, new: list[Tensor]) -> None:
        """Notes in the lanes whether the first new step continues the newest stored one."""
        store, lanes = self.lanes.store, self.lanes
        lane = store.lane(0)
        published, capacity = lane["published"], store.lane_capacity
        if store.incarnation != self._incarnation:
            self._incarnation = store.incarnation
            looked, agreed = store.border_evidence(0)
            border.restore(agreed)
            rows = torch.arange(
                max(lane["first"], min(looked, published - 1), published - LOOK_BACK), published, device="cpu"
            )
            cut = torch.isin(rows[1:], torch.tensor(store.seams(0), dtype=torch.int64, device="cpu"))
            border.learn_all(self._columns, (rows % capacity).to(self._device), cut.to(self._device).unsqueeze(1))
        if published > lane["first"]:
            newest = [column[(published - 1) % capacity] for column in self._columns]
            begins = border.begins(newest, new)
            border.learn(newest, new, begins)
            lanes.pending_borders.add(begins, lanes.mutex)
        border.learn_all(new, torch.arange(len(new[0]), device=self._device))
        lanes.pending_borders.set_evidence(published + len(new[0]) - 1, border.evidence)

    def overwrite_plan(
        self, slots: Tensor, plan: _Columns, rows: Tensor | None = None, first: int | None = None
    ) -> None:
        """Writes leaves ([n, ...]; `rows`: these of them) over rows that exist.

        Row i of the leaves gets the sequence `first + i`; None: what is in a slot keeps the one that it has.
        """
        absent = (self.lanes.generations(slots) < 0).nonzero().flatten()
        if len(absent):
            raise IndexError(f"slot {int(slots[absent[0]])} has not been written")
        where = slots.to(self._device)
        for k, (flat, leaf) in enumerate(zip(self._flat(), plan.leaves, strict=True)):
            if k == plan.own:
                flat[where] = self._own_index.of_slots(slots).to(self._device)
            else:
                flat[where] = leaf if rows is None else leaf[rows.to(self._device)]
        if first is not None:
            assert rows is not None and self._sequences is not None
            self._sequences[where] = first + rows.to(self._device)
        self.lanes.store.note_edits(slots, first is not None)

    def prepare_overwrite(self, slots: Tensor, plan: _Columns, rows: Tensor, first: int) -> Callable[[], None]:
        return functools.partial(self.overwrite_plan, slots, plan, rows, first)

    def read(
        self,
        slots: Tensor,
        shape: tuple[int, ...] | None = None,
        extra: dict[str, Any] | None = None,
        sequences: bool = False,
    ) -> Rows:
        """As `TableRows.read`; no row is overwritten meanwhile."""
        self.lanes.use()
        if slots.numel() and (int(slots.min()) < 0 or int(slots.max()) >= self.lanes.capacity):
            raise IndexError(f"a slot lies outside 0 to {self.lanes.capacity - 1}")
        where = slots.to(self._device)
        lead = (len(slots),) if shape is None else shape
        with self.lanes.mutex:
            generation = self.lanes.generations(slots)
            leaves = [flat.index_select(0, where) for flat in self._flat()]
        absent = (generation < 0).nonzero().flatten().tolist()
        leaves = [t.reshape((*lead, *x.shape)).view(x.dtype) for t, x in zip(leaves, self.layout.leaves, strict=True)]
        batch = pytree.unflatten(self.layout.root, leaves, lead, self._device)
        for key, value in (extra or {}).items():
            pytree.set_per_item(batch, key, value, len(lead))
        return Rows(batch, absent=absent or None, sequences=generation if sequences else None)

    def column(self, path: pytree.KeyPath, slots: Tensor) -> Tensor:
        at = next(i for i, leaf in enumerate(self.layout.leaves) if leaf.path == path)
        return self._columns[at][slots.to(self._device)].view(self.layout.leaves[at].dtype)

    def view(self, steps: range | None = None) -> Any:
        start, stop = (0, len(self._columns[0])) if steps is None else (steps.start, steps.stop)
        leaves = [c[start:stop].view(x.dtype) for c, x in zip(self._columns, self.layout.leaves, strict=True)]
        return pytree.unflatten(self.layout.root, leaves, (stop - start, *self.env_shape), self._device)

    # ---- whole blocks, for checkpoints ----
    def block(self, lane: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        slots = torch.arange(start, stop, device="cpu") % self.lanes.store.lane_capacity
        out = np.empty((self.lanes.envs, stop - start, self.layout.payload_bytes), np.uint8)
        for column, x in zip(self._stored(), self.layout.stored, strict=True):
            rows = column[slots.to(self._device)].cpu().reshape(stop - start, self.lanes.envs, *x.shape)
            if x.nbytes and start < stop:
                raw = rows.contiguous().reshape(stop - start, self.lanes.envs, x.nbytes // x.itemsize)
                as_bytes = raw.view(torch.uint8).numpy()
                out[:, :, x.offset : x.offset + x.nbytes] = as_bytes.transpose(1, 0, 2)
        return out

    def block_writer(self, bases: list[int]) -> Callable[[int, int, np.ndarray[Any, Any]], None]:
        return self.set_block

    def set_block(self, lane: int, start: int, rows: np.ndarray[Any, Any]) -> None:
        """Writes packed rows from a sequence on."""
        slots = (torch.arange(start, start + rows.shape[1], device="cpu") % self.lanes.store.lane_capacity).to(
            self._device
        )
        for column, x in zip(self._stored(), self.layout.stored, strict=True):
            if not x.nbytes:  # arrays without elements have strides that views refuse
                continue
            # A copy with strides of its own: of one row, any strides count as contiguous, and views refuse some.
            part = rows[:, :, x.offset : x.offset + x.nbytes].transpose(1, 0, 2).copy()
            leaf = torch.from_numpy(part).view(x.dtype).reshape(rows.shape[1], *self.env_shape, *x.shape)
            column[slots] = _as_signed(leaf.to(self._device))

    def _flat(self) -> list[Tensor]:
        return [c.flatten(0, len(self.env_shape)) for c in self._columns]


#: PyTorch 2.13 neither reads nor writes elements of these at an index.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _as_signed(values: Tensor) -> Tensor:
    """The same memory, of a dtype that torch indexes."""
    return values.view(_SIGNED.get(values.dtype, values.dtype))


def _own_sequences_of_column(column: Tensor, slots: Tensor) -> Tensor:
    """The sequences that the rows in these slots carry: int64 [n]."""
    return column.flatten()[slots.to(column.device)].cpu()
