"""Tables: stored rows, packed in private memory, shared memory or a mapped file, or as columns on a device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

import engram._native as _native
from engram import pytree
from engram._text import warn_user
from engram.errors import StorageError, StorageInUseError
from engram.store.border import LOOK_BACK, Border, ColumnBorder
from engram.store.lanes import Lanes
from engram.store.layout import SEQUENCE, LeafSpec, RowLayout


class Checked(NamedTuple):
    """A batch that fits the storage and can be written: `steps` time steps."""

    steps: int
    data: Any


class Rows(NamedTuple):
    """Rows that were copied out of a storage.

    Attributes:
        batch: the rows, in the form of the stored data.
        overwritten: positions of rows that were overwritten while they were copied; None: none.
        absent: positions of slots that hold no row; None: none.
        sequences: int64 [n], the sequence of each row; None unless asked for.
    """

    batch: Any
    overwritten: list[int] | None = None
    absent: list[int] | None = None
    sequences: Tensor | None = None


class JoinedRows(NamedTuple):
    """Rows of several tables in one batch: as `Rows`; `parts` are each table's rows, in the memory of the whole."""

    batch: Any
    overwritten: list[int] | None
    absent: list[int] | None
    sequences: Tensor | None
    parts: list[Any] | None = None


_NO_INDEX = -1
#: The bits of the floats that `torch.as_tensor` makes of Python's; other dtypes are left to it.
_FLOAT_BITS = {torch.float32: 32, torch.float64: 64}

# `Rows(*values)` runs Python code; this is done at every read.
_new_tuple: Any = tuple.__new__


class IndexTakenError(StorageInUseError):
    """Rows that store their own index were not appended, as another process has taken their slots."""


class MadeTable(Protocol):
    """Stored rows of one layout: packed rows, or columns."""

    layout: RowLayout

    @property
    def nbytes(self) -> int:
        """Bytes of header and rows, used or not."""

    def fit(self, batch: Any, batch_dims: int, time_dim: int, extra: tuple[str, Any] | None = None) -> tuple[int, Any]:
        """The time steps of a batch, and its data as `append` takes them.

        Args:
            extra: a key at the root, and what the rows also store there.

        Raises:
            ValueError, TypeError: the batch does not fit; the message names the leaf. Nothing was written.
        """

    def fit_rows(self, rows: Any) -> tuple[int, Any]:
        """As `fit`, of rows [n, ...] for `overwrite`, whatever environments they are of."""

    def append(self, data: Any, most: int | None = None) -> Tensor | int:
        """Writes a checked batch (`most`: only its first steps) behind the newest row of this process's lane.

        Returns time slots, int64 [steps]; of a single step without batch dimensions perhaps its slot.
        """

    def overwrite(self, slots: Tensor, data: Any) -> None:
        """Writes checked rows over rows that exist."""

    def prepare_overwrite(self, slots: Tensor, data: Any, rows: Tensor, first: int) -> Callable[[], None]:
        """As `overwrite`, of `rows` (int64 [n]) of a checked batch, in two steps: what is returned writes.

        Row i of the batch gets the sequence `first + i`.
        """

    def read(
        self,
        slots: Tensor,
        shape: tuple[int, ...] | None = None,
        extra: dict[str, Any] | None = None,
        sequences: bool = False,
    ) -> Rows:
        """Copies rows out.

        Args:
            slots: int64 [n].
            shape: batch dimensions with n elements; `[n]` if None.
            extra: entries to add at the root of the batch.
            sequences: also return each row's sequence.
        """

    def column(self, path: pytree.KeyPath, slots: Tensor) -> Tensor:
        """One leaf of the steps at time slots: [n, *envs, ...]."""

    def view(self, start: int, stop: int) -> Any:
        """Live views of time slots [start, stop)."""

    def block(self, lane: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        """uint8 [envs, stop - start, payload bytes]: packed rows with these sequences, copied."""

    def set_block(self, lane: int, start: int, rows: np.ndarray[Any, Any]) -> None:
        """Writes packed rows from a sequence on, visible when the counters are set. StorageError: the disk fails."""


class NativeRows:
    """What native calls may do with stored rows past the methods of a storage, now."""

    __slots__ = ("_appends", "_reads", "push", "source", "table")

    def __init__(self) -> None:
        #: What whole batches are read from.
        self.source: _native.RowSource | None = None
        #: Checks and appends plain data in one call, as `RowTable.push`; returns the index as `add` and `extend` do.
        self.push: Callable[[Any, int, int, str | None], Any] | None = None
        #: Rows that may be read together with those of other tables.
        self.table: RowTable | None = None
        self._reads = self._appends = True

    def limit(self, *, reads: bool, appends: bool) -> None:
        """Keeps native calls from what a storage does in another way."""
        self._reads, self._appends = reads, appends

    def bind(self, table: RowTable, push: Any) -> None:
        """Uses a table, to whose rows `push` appends."""
        self.bind_source(table)
        self.table, self.push = table if self._reads else None, push if self._appends else None

    def bind_source(self, table: RowTable) -> None:
        """Uses a table of which only whole batches are read."""
        self.source, self.push, self.table = table.source if self._reads else None, None, None

    def unbind(self) -> None:
        """There is no table."""
        self.source = self.push = self.table = None

    def pause(self) -> None:
        """Nothing is read until the table is bound again."""
        self.source = None


class RowTable:
    """Packed rows: the bytes of each step next to each other."""

    def __init__(self, lanes: Lanes, layout: RowLayout, mapped: bool) -> None:
        self.lanes = lanes
        self._store = lanes.store
        self.layout = layout
        self._codec = layout.codec
        self.mapped = mapped
        self._fast = layout.plain
        self._index_leaves: dict[str, int | None] = {}
        border = Border.of([leaf.path for leaf in layout.leaves], [(x.shape, x.dtype) for x in layout.leaves])
        if border.decides:
            self._store.set_border(self._codec, list(border.entries), list(border.done), border.either, border.id)
        if layout.sequence_offset is not None and self._store.lanes == self._store.envs == 1:
            lanes.own_sequences = functools.partial(_own_sequences, self._store, layout.sequence_offset)
        #: What native calls read whole batches from; None: not all of a batch's form is made by them.
        self.source = None
        if self._fast and not layout.within:
            self.source = _native.RowSource(self._store, self._codec, mapped)

    @property
    def nbytes(self) -> int:
        return self._store.total_bytes

    def fit(
        self, batch: Any, batch_dims: int, time_dim: int, extra: tuple[str, Any] | None = None
    ) -> tuple[int, _native.Plan]:
        plan: _native.Plan = self.layout.plan(batch, batch_dims, time_dim, extra)
        if plan.envs != self._store.envs:
            raise ValueError(
                f"the batch has {plan.envs} environments, this storage {self._store.envs}; nothing was written"
            )
        return plan.steps, plan

    def fit_rows(self, rows: Any) -> tuple[int, _native.Plan]:
        plan: _native.Plan = self.layout.plan(rows, 1, 0)
        return plan.steps, plan

    def push(self, batch: Any, batch_dims: int, time_dim: int, index_key: str | None) -> Tensor | int | None:
        """`fit` and `append` in one native call, of a plain batch or of a list of plain items.

        With `index_key` each row also stores its own index there, if its layout has such an entry. Returns what
        `append` does. None: nothing was written, and `fit` and `append` write it, or say what does not fit.
        """
        lane, own = self.lanes._held, None
        if lane is None or not self._fast:
            return None
        if index_key is not None:
            try:
                own = self._index_leaves[index_key]
            except KeyError:
                own = self._index_leaves[index_key] = self._index_leaf(index_key)
            if own == _NO_INDEX:
                return None
        bits = _FLOAT_BITS.get(torch.get_default_dtype(), 0) if type(batch) is list else None
        # Positional: the hot path.
        return _native.push(self._store, self._codec, lane, batch, batch_dims, time_dim, own, bits)

    def _index_leaf(self, key: str) -> int | None:
        """The number of the leaf for the rows' own index; None: there is none, `_NO_INDEX`: the entry is another."""
        if (key,) not in self.layout.paths:
            return None
        k = next(k for k, leaf in enumerate(self.layout.leaves) if leaf.path == (key,))
        return k if self._codec.holds_index(k) else _NO_INDEX

    def append(self, plan: _native.Plan, most: int | None = None) -> Tensor | int:
        slots = self._store.append(self.lanes.hold(), plan, most)
        return self._append_in_turn(plan, most) if slots is None else slots

    def _append_in_turn(self, plan: _native.Plan, most: int | None) -> Tensor | int:
        """As `append`, where it is another process's turn, or the first one of this, or others have written.

        Also before rows of an earlier writer are evicted, and in a process that has just found out that it was forked.
        """
        with self.lanes.mutex, self.lanes.turn():  # the mutex of a forked child is another one than its caller holds
            lane = self.lanes.hold()
            self.lanes.warn_of_evictions()
            slots = self._store.append(lane, plan, most)
        if slots is None:
            raise IndexTakenError(
                "another process wrote between the check of these rows and their append, so the index that they store "
                "is not theirs; nothing was written. Write them again; or make the storage with lanes=n, one for each "
                "of n writers"
            )
        return slots

    def append_packed(self, lane: int, rows: Tensor | np.ndarray[Any, Any]) -> Tensor:
        """Writes packed rows of this layout (uint8 [n, payload_bytes]) behind the newest row of a lane of this process.

        Returns time slots, int64 [n]. A row whose first entries do not go on from the newest row begins a trajectory,
        as those of `append` do.

        Raises:
            ValueError: rows of another length, several environments, rows that carry their own sequence; nothing was
                written.
            StorageError: this process does not hold the lane.
        """
        self._check_held(lane)
        given: Any = rows
        return self._store.append_packed(lane, self._codec, given)

    def append_leaves(self, lane: int, leaves: list[Any]) -> Tensor:
        """As `append_packed`, of the bytes of each leaf: uint8 [n, nbytes] for each of `layout.leaves`."""
        self._check_held(lane)
        plan = None if self.layout.carries_sequence else self.layout.raw_leaf_codec.check_list(leaves, 1, 0)
        if plan is None:
            sizes = [leaf.nbytes for leaf in self.layout.leaves]
            raise ValueError(
                f"an array uint8 [n, bytes] is needed for each leaf, of {sizes} bytes, found "
                f"{[tuple(leaf.shape) for leaf in leaves]}; nothing was written"
            )
        slots = self._store.append(lane, plan)
        assert isinstance(slots, Tensor)
        return slots

    def _check_held(self, lane: int) -> None:
        if not self.lanes.holds(lane):
            raise StorageError(f"this process does not hold lane {lane}: hold_lane({lane}) first; nothing was written")

    def overwrite(self, slots: Tensor, plan: _native.Plan) -> None:
        self._store.overwrite(slots, plan, None)

    def prepare_overwrite(self, slots: Tensor, plan: _native.Plan, rows: Tensor, first: int) -> Callable[[], None]:
        """As `MadeTable.prepare_overwrite`; what is returned takes no memory. The rows may come until then."""
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
        sequences: bool = False,
    ) -> Rows:
        if self.lanes.unused_since_fork:
            self.lanes.join_after_fork()
        if extra and self.layout.within:
            lead = 1 if shape is None else len(shape)
            extra = {key: pytree.repeat_per_step(value, lead, self.layout.within) for key, value in extra.items()}
        if self._fast:
            rows: Rows = _new_tuple(Rows, self._store.gather(self._codec, slots, shape, extra, self.mapped, sequences))
            return rows
        return self._read_form(slots, (len(slots),) if shape is None else shape, extra, sequences)

    def read_packed(self, slots: Tensor, by_leaf: bool = False, sequences: bool = False) -> Rows:
        """As `read`, without taking rows apart: `batch` is a list of one tensor, uint8 [n, payload_bytes].

        With `by_leaf` a list with the bytes of each leaf, uint8 [n, nbytes].
        """
        if self.lanes.unused_since_fork:
            self.lanes.join_after_fork()
        codec = self.layout.raw_leaf_codec if by_leaf else self.layout.raw_codec
        return Rows(*self._store.gather(codec, slots, None, None, self.mapped, sequences))

    def same_rows(self, other: RowTable) -> bool:
        """Whether rows of both can be read into one batch."""
        return self._fast and (other is self or (other.layout.plain and other.layout.key == self.layout.key))

    def read_many(
        self,
        others: list[RowTable],
        slots: Tensor,
        shape: tuple[int, ...],
        extra: dict[str, Any] | None,
        sequences: bool,
        parts: list[dict[str, Any] | None] | None,
    ) -> JoinedRows:
        """As `read`, from tables with the `same_rows` too."""
        tables = [self, *others]
        for table in tables:
            if table.lanes.unused_since_fork:
                table.lanes.join_after_fork()
        if within := self.layout.within:
            extra = (
                None if extra is None else {k: pytree.repeat_per_step(v, len(shape), within) for k, v in extra.items()}
            )
            parts = parts and [
                one and {k: pytree.repeat_per_step(v, 1, within) for k, v in one.items()} for one in parts
            ]
        stores = [table.lanes.store for table in tables]
        mapped = any(table.mapped for table in tables)
        return JoinedRows(*_native.gather_many(stores, self._codec, slots, shape, extra, mapped, sequences, parts))

    def _read_form(self, slots: Tensor, shape: tuple[int, ...], extra: dict[str, Any] | None, sequences: bool) -> Rows:
        """As `read`, for forms of batches that the native core does not build."""
        leaves, *rest = self._store.gather(self._codec, slots, shape, None, self.mapped, sequences)
        batch = self.layout.build(leaves, shape)
        for key, value in (extra or {}).items():
            pytree.set_entry(batch, key, value)
        return Rows(batch, *rest)

    def column(self, path: pytree.KeyPath, slots: Tensor) -> Tensor:
        if self._store.read_only:
            return self._read_only_column(next(x for x in self.layout.leaves if x.path == path), slots)
        # A view whose gaps are the rest of the rows.
        leaves = pytree.flatten(self.layout.root, self.view(0, self._store.lanes * self._store.lane_capacity))
        at = next(i for i, leaf in enumerate(self.layout.leaves) if leaf.path == path)
        leaf: Tensor = leaves[at][slots]
        return leaf

    def _read_only_column(self, leaf: LeafSpec, slots: Tensor) -> Tensor:
        """The same from memory of which torch has no views."""
        s = self._store
        shape, strides = (
            (s.lanes * s.lane_capacity, s.envs, leaf.nbytes),
            (s.row_stride, s.lane_capacity * s.row_stride, 1),
        )
        start = s.memory()[s.rows_offset + leaf.offset :]
        rows = np.lib.stride_tricks.as_strided(start, shape, strides, writeable=False)
        values = torch.from_numpy(rows[slots.numpy()])
        lead = (len(slots), s.envs) if s.envs > 1 else (len(slots),)
        return values.view(leaf.dtype).reshape(*lead, *leaf.shape)

    def view(self, start: int, stop: int) -> Any:
        """Live views of time slots [start, stop): `[time, ...]`, or `[time, envs, ...]` with several environments."""
        s = self._store
        lead: tuple[int, ...] = (stop - start,)
        steps: tuple[int, ...] = (1,)
        if s.envs > 1:
            lead, steps = (*lead, s.envs), (*steps, s.lane_capacity)
        offset = s.rows_offset + start * s.row_stride
        return self.layout.views(s.memory(), offset, s.row_stride, lead, steps)

    # ---- whole blocks, for checkpoints ----
    def block(self, lane: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        out = np.empty((self._store.envs, stop - start, self._store.payload_bytes), np.uint8)
        for at, rows in self._pieces(lane, start, stop):
            out[:, at] = rows
        return out

    def set_block(self, lane: int, start: int, rows: np.ndarray[Any, Any]) -> None:
        if rows.strides[-1] != 1:
            rows = np.ascontiguousarray(rows)
        try:
            self._store.put(lane, start, rows)
        except OSError as error:
            raise StorageError(f"rows cannot be written to the storage's file: {error.strerror}") from error

    def _pieces(self, lane: int, start: int, stop: int) -> list[tuple[slice, np.ndarray[Any, Any]]]:
        s = self._store
        shape = (s.lanes, s.envs, s.lane_capacity, s.row_stride)
        size = s.lanes * s.envs * s.lane_capacity * s.row_stride
        memory = s.memory()[s.rows_offset : s.rows_offset + size].reshape(shape)[lane]
        pieces, w = [], start
        while w < stop:
            slot = w % s.lane_capacity
            n = min(stop - w, s.lane_capacity - slot)
            pieces.append((slice(w - start, w - start + n), memory[:, slot : slot + n, : s.payload_bytes]))
            w += n
        return pieces


def _own_sequences(store: _native.Store, offset: int, slots: Tensor) -> Tensor:
    """The sequences that the rows in these slots carry: int64 [n]. A store of one lane and one environment."""
    rows = store.memory()[store.rows_offset :][: store.lane_capacity * store.row_stride]
    own = rows.reshape(store.lane_capacity, store.row_stride)[:, offset : offset + SEQUENCE.nbytes][slots.numpy()]
    return torch.from_numpy(own.reshape(-1).view(np.int64))


def expand_slots(time_slots: Tensor | int, envs: int) -> Tensor | int:
    """The slots of all environments at these times: int64 [steps * envs], time first."""
    if envs == 1 or isinstance(time_slots, int):
        return time_slots
    return (time_slots.unsqueeze(1) * envs + torch.arange(envs)).reshape(-1)


def warn_of_items(batch: Any) -> None:
    """Warns, at the first batch of a storage with ndim=1, that whole trajectories are what it stores as items."""
    shape = list(batch.shape)
    n, steps = shape[0], math.prod(shape[1:])
    warn_user(
        f"a batch of shape {shape} is stored as {n} items of {steps} steps each, as the storage has ndim=1: a sample "
        f"of k is [k, {', '.join(map(str, shape[1:]))}]. To store {n * steps} single steps, make the storage with "
        f"ndim={len(shape)}, or write batch.reshape(-1); where whole trajectories are what you want, ignore this",
        UserWarning,
    )


class ColumnTable:
    """Rows as columns `[time, *envs, ...]` on one device. Writers and readers hold the storage's mutex."""

    source = None  # no native call reads them

    def __init__(self, lanes: Lanes, layout: RowLayout, columns: list[Tensor], env_shape: tuple[int, ...]) -> None:
        self._lanes = lanes
        self.layout = layout
        self._columns = columns
        self._env_shape = env_shape
        self._device = columns[0].device
        self._sequences: Tensor | None = None
        if layout.carries_sequence:
            self.carry_sequences()
        border = Border.of([leaf.path for leaf in layout.leaves], [(x.shape, x.dtype) for x in layout.leaves])
        self._border = ColumnBorder(border, lanes.envs, self._device) if border.decides else None
        self._incarnation = lanes.store.incarnation

    @classmethod
    def empty(cls, lanes: Lanes, layout: RowLayout, env_shape: tuple[int, ...], device: torch.device) -> ColumnTable:
        """New columns with room for every step."""
        lead = (lanes.store.lane_capacity, *env_shape)
        columns = [torch.zeros((*lead, *x.shape), dtype=x.dtype, device=device) for x in layout.leaves]
        return cls(lanes, layout, columns, env_shape)

    @property
    def nbytes(self) -> int:
        return sum(c.numel() * c.itemsize for c in self._stored())

    def carry_sequences(self) -> None:
        """Makes room for the rows' own sequences, in a column that no batch shows."""
        if self._sequences is None:
            lead = self._columns[0].shape[: 1 + len(self._env_shape)]
            self._sequences = torch.zeros(lead, dtype=SEQUENCE.dtype, device=self._device)
            self.layout = self.layout.with_sequence()
            self._lanes.own_sequences = functools.partial(_own_sequences_of_column, self._sequences)

    def _stored(self) -> list[Tensor]:
        """The columns of `layout.stored`."""
        return self._columns if self._sequences is None else [*self._columns, self._sequences]

    def fit(
        self, batch: Any, batch_dims: int, time_dim: int, extra: tuple[str, Any] | None = None
    ) -> tuple[int, list[Tensor]]:
        """The data are leaves `[time, *envs, ...]` on the columns' device."""
        if extra is not None:
            batch = pytree.with_entry(batch, extra[0], torch.as_tensor(extra[1]))
        leaves = self.layout.fitting(batch, batch_dims)
        if batch_dims == 0 or time_dim < 0:
            leaves = [t.unsqueeze(0) for t in leaves]
        elif time_dim:
            leaves = [t.movedim(time_dim, 0) for t in leaves]
        if len(self._env_shape) > 1:
            leaves = [t.reshape(t.shape[0], *self._env_shape, *t.shape[2:]) for t in leaves]
        for leaf, t in zip(self.layout.leaves, leaves, strict=True):
            if tuple(t.shape[1 : 1 + len(self._env_shape)]) != self._env_shape:
                raise ValueError(
                    f"{pytree.format_key(leaf.path)} has {list(t.shape[1 : 1 + len(self._env_shape)])} environments, "
                    f"this storage {list(self._env_shape)}"
                )
        return len(leaves[0]), [t.to(self._device) for t in leaves]

    def fit_rows(self, rows: Any) -> tuple[int, list[Tensor]]:
        leaves = self.layout.fitting(rows, 1)
        return len(leaves[0]), leaves

    def append(self, leaves: list[Tensor], most: int | None = None) -> Tensor:
        leaves = [leaf[:most] for leaf in leaves]
        capacity = self._lanes.store.lane_capacity
        if self._border is not None:
            self._note_border(self._border, leaves)
        slots = self._lanes.advance(len(leaves[0]))
        where = slots[-capacity:].to(self._device)
        for column, leaf in zip(self._columns, leaves, strict=True):
            column[where] = leaf[-capacity:]
        if self._sequences is not None:
            self._sequences[where] = 0
        return slots

    def _note_border(self, border: ColumnBorder, new: list[Tensor]) -> None:
        """Notes in the lanes whether the first new step continues the newest stored one."""
        store, lanes = self._lanes.store, self._lanes
        lane = store.lane(0)
        published, capacity = lane["published"], store.lane_capacity
        if store.incarnation != self._incarnation:
            self._incarnation = store.incarnation
            looked, agreed = store.border_evidence(0)
            border.restore(agreed)
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
        return functools.partial(self.overwrite, slots, leaves, rows, first)

    def read(
        self,
        slots: Tensor,
        shape: tuple[int, ...] | None = None,
        extra: dict[str, Any] | None = None,
        sequences: bool = False,
    ) -> Rows:
        """As `MadeTable.read`; no row is overwritten meanwhile."""
        if self._lanes.unused_since_fork:
            self._lanes.join_after_fork()
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
        return Rows(batch, absent=absent or None, sequences=generation if sequences else None)

    def column(self, path: pytree.KeyPath, slots: Tensor) -> Tensor:
        at = next(i for i, leaf in enumerate(self.layout.leaves) if leaf.path == path)
        return self._columns[at][slots.to(self._device)]

    def view(self, start: int, stop: int) -> Any:
        leaves = [c[start:stop] for c in self._columns]
        return pytree.unflatten(self.layout.root, leaves, (stop - start, *self._env_shape), self._device)

    # ---- whole blocks, for checkpoints ----
    def block(self, lane: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        slots = torch.arange(start, stop) % self._lanes.store.lane_capacity
        out = np.empty((self._lanes.envs, stop - start, self.layout.payload_bytes), np.uint8)
        for column, x in zip(self._stored(), self.layout.stored, strict=True):
            rows = column[slots.to(self._device)].cpu().reshape(stop - start, self._lanes.envs, *x.shape)
            if x.nbytes and start < stop:
                raw = rows.contiguous().reshape(stop - start, self._lanes.envs, x.nbytes // x.itemsize)
                as_bytes = raw.view(torch.uint8).numpy()
                out[:, :, x.offset : x.offset + x.nbytes] = as_bytes.transpose(1, 0, 2)
        return out

    def set_block(self, lane: int, start: int, rows: np.ndarray[Any, Any]) -> None:
        """Writes packed rows from a sequence on."""
        slots = (torch.arange(start, start + rows.shape[1]) % self._lanes.store.lane_capacity).to(self._device)
        for column, x in zip(self._stored(), self.layout.stored, strict=True):
            # A copy with strides of its own: of one row, any strides count as contiguous, and views refuse some.
            part = rows[:, :, x.offset : x.offset + x.nbytes].transpose(1, 0, 2).copy()
            leaf = torch.from_numpy(part).view(x.dtype).reshape(rows.shape[1], *self._env_shape, *x.shape)
            column[slots] = leaf.to(self._device)

    def _flat(self) -> list[Tensor]:
        return [c.flatten(0, len(self._env_shape)) for c in self._columns]


def _own_sequences_of_column(column: Tensor, slots: Tensor) -> Tensor:
    """The sequences that the rows in these slots carry: int64 [n]."""
    return column.flatten()[slots.to(column.device)].cpu()
