"""What storages with a fixed layout share: the first batch decides it, and a table holds the rows."""

from __future__ import annotations

import abc
import dataclasses
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.data.replay_buffers import trees
from engram.data.replay_buffers.columns import ColumnTable
from engram.data.replay_buffers.files import StoreSize, refuse_if_memory_is_short
from engram.data.replay_buffers.indexing import Selection
from engram.data.replay_buffers.lanes import Lanes
from engram.data.replay_buffers.layout import LeafSpec, RowLayout
from engram.data.replay_buffers.rows import RowTable, expand_slots
from engram.data.replay_buffers.storages.base import Checked, Rows, flat
from engram.data.replay_buffers.storages.saved_table import SavedTable
from engram.data.replay_buffers.trees import Node
from engram.errors import StorageError

_COPIED_BYTES = 16 << 20
_NO_STEPS = "nothing to add: the batch has no steps"


class TableStorage(SavedTable):
    """A storage whose rows all have one layout."""

    def __init__(self, max_size: int | None, ndim: int, checkpointer: Any = None, lanes: int = 1) -> None:
        super().__init__(max_size, checkpointer)
        if ndim < 1:
            raise ValueError(f"ndim must be at least 1, got {ndim}")
        if lanes < 1 or (lanes > 1 and ndim > 1):
            raise ValueError(f"lanes must be at least 1, and 1 with ndim={ndim}: got {lanes}")
        self.ndim = ndim
        self._n_lanes = lanes
        if self._max_size is not None:
            self._max_size = math.ceil(self._max_size / lanes) * lanes
        self._asked_size = self._max_size
        self._inner: tuple[int, ...] = ()
        self._first_inner: tuple[int, ...] | None = None  # the strands of a first batch with several strand dimensions
        self._lanes: Lanes | None = None
        self._table: RowTable | ColumnTable | None = None
        self._making = threading.Lock()
        self._expects_sequences = False

    def after_fork(self) -> None:
        super().after_fork()
        self._making = threading.Lock()

    @abc.abstractmethod
    def _make(self, layout: RowLayout, lane_capacity: int) -> tuple[Lanes, RowTable | ColumnTable]:
        """Takes the memory. Raises StorageError, with the numbers, where there is not enough."""

    # ---- facts ----
    @property
    def lanes(self) -> Lanes | None:
        return self._lanes

    @property
    def inner(self) -> tuple[int, ...]:
        return self._inner

    @property
    def nbytes(self) -> int:
        return 0 if self._table is None else self._table.nbytes

    @property
    def layout(self) -> RowLayout | None:
        """Keys, shapes and dtypes of a stored step; None before the first write."""
        return None if self._table is None else self._table.layout

    @property
    def _storage(self) -> Any:
        if self._table is None or self._lanes is None:
            return None
        store = self._lanes.store
        return self._shaped_view(0, store.lanes * store.lane_capacity)

    def _shaped_view(self, start: int, stop: int) -> Any:
        assert self._table is not None
        view = self._table.view(start, stop)
        if (len(self._inner) > 1 or self._inner == (1,)) and isinstance(self._table, RowTable):
            view = view.reshape(stop - start, *self._inner)
        return view

    def __getitem__(self, index: Any) -> Any:
        """Rows at an index; a slice of a storage that has not wrapped is a live view, for reading only."""
        if isinstance(index, slice) and self._table is not None and self._lanes is not None:
            store = self._lanes.store
            lane = store.lane(0)
            rows = lane["published"] - lane["first"]
            # Without gaps, and from slot 0 on: not after a recovery that kept the middle of a ring, not in lanes.
            whole = store.lanes == 1 and (rows == store.lane_capacity or lane["first"] % store.lane_capacity == 0)
            start, stop, step = index.indices(max(0, rows))
            if whole and step == 1:
                return self._shaped_view(start, max(start, stop))
        return self.get(index)

    # ---- copies ----
    def form(self) -> Any:
        if self._table is None:
            return None
        layout = self._table.layout  # its classes, too, which a state does not name
        return layout.root, layout.leaves, layout.carries_sequence, self._inner, self._first_inner

    def take_form(self, form: Any) -> None:
        if form is not None and self._table is None:
            root, leaves, carries_sequence, inner, self._first_inner = form
            self._adopt(RowLayout(root, leaves, carries_sequence), inner)

    def copy_rows_into(self, other: Any, memo: dict[int, Any]) -> None:
        # Block by block: there may be more rows than memory.
        other.take_form(self.form())
        with self.still() as source, other.alone("copying"):
            layout, before = source.layout_state(), source.counters()
            other.begin_restore(layout, before)
            rows = max(1, _COPIED_BYTES // max(1, layout["row_bytes"] * math.prod(self._inner)))
            for i, lane in enumerate(before["lanes"]):
                for start in range(lane["base"], lane["published"], rows):
                    stop = min(start + rows, lane["published"])
                    other.write_block(i, start, source.read_block(i, start, stop))
            other.finish_restore(source.counters())  # other processes may have overwritten the oldest rows meanwhile

    def finish_restore(self, counters: dict[str, Any]) -> None:
        """Shows the restored rows, as far as these counters say that they were whole."""
        self._restoring = counters
        self.end_restore()

    # ---- making ----
    def _ensure(self, items: Any, batch_dims: int, time_dim: int, index_key: str | None) -> RowTable | ColumnTable:
        with self._making:
            if self._table is None:
                layout = RowLayout.of(items, batch_dims)
                # The first batch decides the layout only if it can be written itself.
                if not layout.plan(items, batch_dims, time_dim).steps:
                    raise ValueError(_NO_STEPS)
                if index_key is not None:
                    layout = _with_index(layout, index_key, self.ndim)
                self._adopt(layout, self._first_inner or _strand_shape(items, batch_dims, time_dim))
        assert self._table is not None
        return self._table

    def _adopt(self, layout: RowLayout, inner: tuple[int, ...]) -> None:
        """Makes the table for a layout and strands of this shape."""
        if self._asked_size is None:
            raise ValueError("this storage needs a max_size")
        self._tell_of_copy()
        self._inner = inner
        if self._expects_sequences:
            layout = layout.with_sequence()
        try:
            lane_capacity = math.ceil(self._asked_size / (self._n_lanes * math.prod(inner)))
            lanes, table = self._make(layout, lane_capacity)
        except BaseException:
            self._inner = ()
            raise
        lanes.mutex = self.mutex
        self._table, self._lanes = table, lanes
        self._max_size = lanes.capacity

    def expect_sequences(self) -> None:
        self._expects_sequences = True
        if isinstance(self._table, ColumnTable):  # one column more, nothing is copied
            self._table.carry_sequences()

    def carry_sequences(self) -> None:
        table, lanes = self._table, self._lanes
        if table is None or lanes is None or table.layout.carries_sequence:
            return
        if isinstance(table, ColumnTable):
            table.carry_sequences()
            return
        if not self._can_widen:
            raise StorageError(
                "these rows were made for another writer: they have no place for the sequence that a replaced row "
                "carries, and rows in a file or in shared memory keep their layout. Save them with dumps, and take "
                "them over with loads into a storage that is made with a TensorDictMaxValueWriter; nothing was written"
            )
        with self.replacing("giving rows their sequences"):
            layout = table.layout.with_sequence()
            refuse_if_memory_is_short(StoreSize(layout, self._n_lanes, lanes.store.lane_capacity, lanes.strands, False))
            self._table = table = table.with_sequences()
            self._lanes = table.lanes

    @property
    def _can_widen(self) -> bool:
        table = self._table
        return isinstance(table, ColumnTable) or (table is not None and not table.mapped and table.lanes.locks is None)

    def _make_room(self, layout: RowLayout) -> None:
        if self._can_widen and (self._expects_sequences or layout.carries_sequence):
            self.carry_sequences()

    def _unmake(self) -> bool:
        if self._lanes is not None:
            self._lanes.close()
        self._table, self._lanes, self._inner, self._first_inner = None, None, (), None
        self._max_size = self._asked_size
        return True

    # ---- writing ----
    def check(
        self,
        items: Any,
        single: bool,
        time_dim: int = 0,
        index_key: str | None = None,
        index: Tensor | None = None,
    ) -> Checked:
        batch_dims = self.ndim - 1 if single else self.ndim
        if single:
            time_dim = -1
        if batch_dims > 1:
            items, batch_dims, time_dim = self._merge_strands(items, batch_dims, time_dim)
        table = self._table
        if table is None:
            table = self._ensure(items, batch_dims, time_dim, index_key)
        extra: tuple[str, Any] | None = None
        if index is not None and index_key is not None:
            own = index[0] if single else index
            extra = (index_key, self._of_each_step(own)) if self._stores(index_key) else None
        elif index_key is not None and (index_key,) in table.layout.paths:
            own_index = self._own_index(items, batch_dims, time_dim)
            extra = (index_key, self._of_each_step(own_index) if table.layout.within else own_index)
        plan = table.plan(items, batch_dims, time_dim, extra)
        steps = len(plan[0]) if isinstance(plan, list) else plan.steps
        if steps == 0:
            raise ValueError(_NO_STEPS)
        return Checked(steps, plan)

    def _merge_strands(self, items: Any, batch_dims: int, time_dim: int) -> tuple[Any, int, int]:
        """Several strand dimensions become one; their shape is remembered by the first batch."""
        shape = _lead_shape(items, batch_dims)
        if time_dim not in (-1, 0, batch_dims - 1):
            raise ValueError(f"time must be the first or the last batch dimension, got {time_dim} of {batch_dims}")
        inner = shape if time_dim < 0 else shape[1:] if time_dim == 0 else shape[:-1]
        if self._table is None:
            self._first_inner = inner
        elif inner != self._inner:
            raise ValueError(f"the batch has environments of shape {list(inner)}, this storage {list(self._inner)}")
        if len(inner) == 1:
            return items, batch_dims, time_dim
        first = 1 if time_dim == 0 else 0
        merged = _merge(items, first, first + len(inner))
        return merged, batch_dims - len(inner) + 1, time_dim if time_dim <= 0 else 1

    def _own_index(self, items: Any, batch_dims: int, time_dim: int) -> Tensor | int:
        assert self._lanes is not None
        if batch_dims == 0:
            return self._lanes.next_slot() if isinstance(self._table, RowTable) else self._lanes.next_slots(1)[0]
        steps = 1 if time_dim < 0 else _lead_shape(items, batch_dims)[time_dim]
        times = self._lanes.next_slots(steps)
        if self.ndim == 1:
            return times
        slots: Any = expand_slots(times, self._lanes.strands)
        index = torch.stack(tuple(self.outward(slots)), -1).reshape(steps, self._lanes.strands, self.ndim)
        return index[0] if time_dim < 0 else index if time_dim == 0 else index.transpose(0, 1)

    def _of_each_step(self, index: Tensor | int) -> Tensor:
        """The index of items as each of their steps stores it, where items have batch dimensions of their own."""
        assert self._table is not None
        at, within = torch.as_tensor(index), self._table.layout.within
        return trees.spread(at, at.ndim - (self.ndim > 1), within) if within else at

    def _stores(self, key: str) -> bool:
        assert self._table is not None
        return (key,) in self._table.layout.paths

    def append(self, checked: Checked, most: int | None = None) -> Tensor | int:
        assert self._table is not None and self._lanes is not None
        return expand_slots(self._table.append(checked.data, most), self._lanes.strands)

    def replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> None:
        self.prepare_replace(checked, rows, slots)()

    def prepare_replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> Callable[[], None]:
        assert self._table is not None and self._lanes is not None
        first = self._lanes.reserve_sequences(checked.steps)
        return self._table.prepare_overwrite(slots, checked.data, rows, first)

    def overwrite(self, slots: Tensor, items: Any, index_key: str | None = None) -> None:
        assert self._table is not None
        self._table.overwrite(slots, self._plan_rows(items, slots, index_key))

    def _plan_rows(self, items: Any, slots: Tensor, index_key: str | None) -> Any:
        """Rows for in-place writing: [n, ...], whatever strands the storage has; one step is repeated."""
        assert self._table is not None
        layout, n = self._table.layout, len(slots)
        if _is_single(layout, items):
            items = _repeat(items, n)
        if index_key is not None and self._stores(index_key):
            own = self.outward(slots)
            index = torch.stack(own, -1) if isinstance(own, tuple) else own
            items = trees.with_entry(items, index_key, self._of_each_step(index))
        if isinstance(self._table, ColumnTable):
            plan: Any = layout.fitting(items, 1)
            count = len(plan[0])
        else:
            plan = layout.plan(items, 1, 0)
            count = plan.steps
        if count != n:
            raise ValueError(f"{n} steps are indexed, the data have {count}; nothing was written")
        return plan

    def _set(self, selection: Selection, items: Any, index_key: str | None) -> None:
        if len(set(selection.slots.tolist())) != len(selection.slots):
            raise ValueError("an index names a step twice; nothing was written")
        n = len(selection.shape)
        assert self._table is not None
        items = items if n <= 1 or _is_single(self._table.layout, items) else flat(items, n)
        self.overwrite(selection.slots, items, index_key)

    # ---- reading ----
    def read(
        self,
        slots: Tensor,
        shape: tuple[int, ...] | None = None,
        extra: dict[str, Any] | None = None,
        numbers: bool = False,
    ) -> Rows:
        if self._table is None:
            raise IndexError("nothing has been written to this storage yet")
        return self._table.read(slots, shape, extra, numbers)

    def read_with(
        self,
        others: list[Any],
        slots: Tensor,
        shape: tuple[int, ...],
        extra: dict[str, Any] | None = None,
        numbers: bool = False,
        parts: list[dict[str, Any] | None] | None = None,
    ) -> tuple[Any, ...] | None:
        first = self._table
        tables: list[RowTable] = []
        for other in others:
            table = other.table if isinstance(other, TableStorage) else None
            if not isinstance(table, RowTable) or not isinstance(first, RowTable) or not first.like(table):
                return None
            tables.append(table)
        return first.read_with(tables, slots, shape, extra, numbers, parts) if isinstance(first, RowTable) else None

    @property
    def table(self) -> RowTable | ColumnTable | None:
        """The rows; None before the first write."""
        return self._table

    @property
    def item_shape(self) -> tuple[int, ...]:
        return () if self._table is None else self._table.layout.within

    def leaf(self, path: trees.Path) -> LeafSpec | None:
        leaves = () if self._table is None else self._table.layout.leaves
        return next((leaf for leaf in leaves if leaf.path == path), None)

    def column(self, path: trees.Path, slots: Tensor) -> Tensor:
        assert self._table is not None
        return self._table.column(path, slots)


def _with_index(layout: RowLayout, key: str, ndim: int) -> RowLayout:
    """The layout with one more key at its root, which holds each row's own index."""
    kind, cls = layout.root.kind, layout.root.cls
    if kind not in ("td", "dict", "class") or (
        cls is not None and key not in {field.name for field in dataclasses.fields(cls)}
    ):
        found = "tensor" if kind == "leaf" else kind if cls is None else f"{cls.__name__} without such a field"
        raise TypeError(f"a {found} has no place for {key!r}; use RoundRobinWriter, which stores no index")
    root = layout.root.children[0] if layout.root.kind == "class" else layout.root
    leaves = list(layout.leaves)
    index = LeafSpec((key,), torch.int64, (*root.batch, *(() if ndim == 1 else (ndim,))))
    if key in root.keys:
        node = root.children[root.keys.index(key)]
        leaves[node.leaf] = index
        return RowLayout(layout.root, leaves, layout.carries_sequence)
    leaves.append(index)
    node = Node("leaf", leaf=len(leaves) - 1)
    root.keys, root.children = (*root.keys, key), (*root.children, node)
    return RowLayout(layout.root, leaves, layout.carries_sequence)


def _lead_shape(items: Any, batch_dims: int) -> tuple[int, ...]:
    shape = getattr(items, "shape", None)
    if shape is None:
        _, leaves = trees.describe(items, batch_dims)
        if not leaves:
            raise ValueError("nothing to store: the data hold no tensor")
        shape = np.shape(leaves[0][1]) if not isinstance(leaves[0][1], Tensor) else leaves[0][1].shape
    if len(shape) < batch_dims:
        raise ValueError(f"the data have shape {list(shape)}; this storage takes {batch_dims} batch dimensions")
    return tuple(shape[:batch_dims])


def _strand_shape(items: Any, batch_dims: int, time_dim: int) -> tuple[int, ...]:
    shape = _lead_shape(items, batch_dims)
    return shape if time_dim < 0 else tuple(d for i, d in enumerate(shape) if i != time_dim)


def _merge(items: Any, first: int, last: int) -> Any:
    if isinstance(items, dict):
        return {k: _merge(v, first, last) for k, v in items.items()}
    if isinstance(items, list | tuple):
        return type(items)(_merge(v, first, last) for v in items)
    return items.flatten(first, last - 1)


def _is_single(layout: RowLayout, items: Any) -> bool:
    """Whether the data are one step, to be written at every index."""
    leaf = layout.leaves[0]
    value = items
    for key in leaf.path:
        try:
            value = value.get(key) if hasattr(value, "_from_tensordict") else value[key]
        except (KeyError, IndexError, TypeError):
            return False  # it does not fit, which is said when the rows are checked
    return np.ndim(value) == len(leaf.shape)


def _repeat(items: Any, n: int, path: trees.Path = ()) -> Any:
    if isinstance(items, dict):
        return {k: _repeat(v, n, (*path, k)) for k, v in items.items()}
    if isinstance(items, list | tuple):
        return type(items)(_repeat(v, n, (*path, i)) for i, v in enumerate(items))
    items = items if hasattr(items, "expand") else trees.as_tensor(items, path)
    return items.expand(n, *items.shape)
