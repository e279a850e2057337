"""One tensor per key: for a GPU, and for tensors that the user handed over."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.data.replay_buffers import trees
from engram.data.replay_buffers.border import LOOK_BACK, Border, ColumnBorder
from engram.data.replay_buffers.lanes import Lanes
from engram.data.replay_buffers.layout import SEQUENCE, RowLayout


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
            self._lanes.own_sequences = functools.partial(_own_sequences, self._sequences)

    def _stored(self) -> list[Tensor]:
        """The columns of `layout.stored`."""
        return self._columns if self._sequences is None else [*self._columns, self._sequences]

    def plan(self, batch: Any, batch_dims: int, time_dim: int, extra: tuple[str, Any] | None = None) -> list[Tensor]:
        """Leaves `[time, *strands, ...]` on the columns' device; errors as `RowLayout.plan`."""
        if extra is not None:
            batch = trees.with_entry(batch, *extra)
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
                    f"{trees.show(leaf.path)} has {list(t.shape[1 : 1 + len(self._inner)])} environments, "
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
        batch = trees.unflatten(self.layout.root, leaves, lead, self._device)
        for key, value in (extra or {}).items():
            trees.put_of_items(batch, key, value, len(lead))
        return batch, None, absent or None, generation if numbers else None

    def column(self, path: trees.Path, slots: Tensor) -> Tensor:
        """One leaf of the steps at time slots: [n, *strands, ...]."""
        at = next(i for i, leaf in enumerate(self.layout.leaves) if leaf.path == path)
        return self._columns[at][slots.to(self._device)]

    def view(self, start: int, stop: int) -> Any:
        """Live views of time slots [start, stop)."""
        leaves = [c[start:stop] for c in self._columns]
        return trees.unflatten(self.layout.root, leaves, (stop - start, *self._inner), self._device)

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


def _own_sequences(column: Tensor, slots: Tensor) -> Tensor:
    """The sequences that the rows in these slots carry: int64 [n]."""
    return column.flatten()[slots.to(column.device)].cpu()
