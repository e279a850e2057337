"""How storages with a fixed layout are saved and restored: the RowSource and RowSink that a checkpointer sees."""

from __future__ import annotations

import abc
import contextlib
import copy
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram import pytree
from engram.data.replay_buffers.storages.base import Checked, Rows, Storage, log
from engram.data.replay_buffers.storages.staging import StagedRows, TooManyRowsError
from engram.errors import CheckpointError, CheckpointMisfitError, StorageError
from engram.pytree import TreeSpec
from engram.specs.tensors import usable_device
from engram.store.counters import Counters
from engram.store.files import (
    StoreSize,
    open_shared_memory,
    refuse_if_memory_is_short,
    share_descriptor,
    store_of_descriptor,
)
from engram.store.indexing import Selection
from engram.store.lanes import Lanes
from engram.store.layout import LayoutState, LeafSpec, MalformedLayoutError, RowLayout
from engram.store.locks import LaneLocks
from engram.store.tables import ColumnTable, RowTable, expand_slots
from engram.store.views import Changes, CopiedRows, FrozenRows, NothingYet


class SavedTable(Storage):
    """A storage whose rows lie in a table that is made when the layout is known."""

    _n_lanes: int
    _inner: tuple[int, ...]
    _asked_size: int | None
    _lanes: Lanes | None
    _table: RowTable | ColumnTable | None
    _made_for_restore = False

    @abc.abstractmethod
    def _adopt(self, layout: RowLayout, inner: tuple[int, ...]) -> None:
        """Makes the table for a layout and strands of this shape."""

    @abc.abstractmethod
    def _make_room(self, layout: RowLayout) -> None:
        """Before rows of this layout are restored into the table: for the sequences that they carry, if it can."""

    @abc.abstractmethod
    def _unmake(self) -> bool:
        """Gives a table that nobody has seen back; False: it stays."""

    def _default_checkpointer(self) -> Any:
        from engram.data.replay_buffers.checkpointers.rows import TensorStorageCheckpointer

        return TensorStorageCheckpointer()

    def layout_state(self) -> dict[str, Any] | None:
        """The layout as JSON, with what else a twin needs to make the same table; None before the first write."""
        if self._table is None:
            return None
        return {**self._table.layout.to_json(), "strands": list(self._inner), "ndim": self.ndim}

    def counters(self) -> dict[str, Any]:
        """Counters of every lane as JSON."""
        if self._lanes is None:
            return {"lane_capacity": 0, "strands": 1, "lanes": []}
        store, lanes = self._lanes.store, self._lanes.saved_states()
        return {"lane_capacity": store.lane_capacity, "strands": store.strands, "lanes": lanes}

    def read_block(self, lane: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        """uint8 [strands, stop - start, row bytes]."""
        assert self._table is not None
        return self._table.block(lane, start, stop)

    def identity(self) -> dict[str, Any]:
        """What names these rows, as `Lanes.identity`."""
        return self._changes().identity()

    def edited(self, since: dict[str, Any]) -> list[tuple[int, int]] | None:
        """Rows changed in place since `identity()` was `since`; None if that is not known."""
        return self._changes().edited(since)

    def _changes(self) -> Changes | NothingYet:
        return NothingYet() if self._lanes is None else Changes(self._lanes)

    def freeze(self) -> Any:
        """The rows as they are now, for a save in the background; the caller holds the mutex, here and to close it."""
        if self._table is None or self._lanes is None:
            return NothingYet()
        if isinstance(self._table, ColumnTable):
            return CopiedRows(self._lanes, self)
        if self._lanes.store.saving:
            raise CheckpointError("this buffer is being saved in the background; wait for that save's result()")
        layout = self.layout_state()
        assert layout is not None
        return FrozenRows(self._lanes, layout, self.counters(), self._table.layout.payload_bytes)

    @contextlib.contextmanager
    def still(self) -> Iterator[Any]:
        table, lanes = self._table, self._lanes
        if lanes is None or lanes.locks is None or not isinstance(table, RowTable):
            yield self  # no other process sees these rows
            return
        layout = self.layout_state()
        assert layout is not None
        yield FrozenRows(lanes, layout, self.counters(), table.layout.payload_bytes, beside=False)

    def check_restore(self, layout: dict[str, Any] | None, counters: dict[str, Any]) -> None:
        """A ValueError that lists every difference between what was saved and this storage."""
        said = []
        lanes = counters["lanes"]
        if layout is not None:
            saved, inner = self._saved_layout(layout), _inner(layout)
            if layout["ndim"] != self.ndim:
                said.append(f"ndim is {self.ndim} here, {layout['ndim']} there")
            if self._table is not None:
                said += self._table.layout.differences(saved)
                if inner != self._inner:
                    said.append(f"environments are {list(self._inner)} here, {list(inner)} there")
            strands = math.prod(inner)
            if counters["strands"] != strands:
                said.append(f"counters of {counters['strands']} strands stand beside a layout of {strands} there")
            room = self._room(strands)
            rows = [lane["published"] - lane["base"] for lane in lanes]
            if len(lanes) > self._n_lanes:
                said.append(f"{self._n_lanes} lanes here, {len(lanes)} there")
            if any(r > room for r in rows):
                said.append(f"room for {room * strands} steps in a lane here, {max(rows) * strands} saved there")
        if said:
            raise CheckpointMisfitError("the checkpoint does not fit this storage", said)

    def _room(self, strands: int) -> int:
        if self._lanes is not None:
            return self._lanes.store.lane_capacity
        return math.ceil((self._asked_size or 0) / (self._n_lanes * strands))

    def begin_restore(self, layout: dict[str, Any] | None, counters: dict[str, Any]) -> None:
        """Makes the table if there is none and empties it."""
        self.check_restore(layout, counters)
        self._made_for_restore = self._table is None and layout is not None
        if self._table is None and layout is not None:
            # A copy: batches of this storage may give it another form, and what was saved may fill several storages.
            self._adopt(copy.copy(self._saved_layout(layout)), _inner(layout))
        elif layout is not None:
            self._make_room(self._saved_layout(layout))
        # From here on rows of before are being lost: whatever may fail comes first.
        self._order = None if layout is None or self._table is None else self._order_in(layout)
        self._restoring = counters
        if self._lanes is not None:
            self._lanes.hold()
            self._lanes.store.begin_restore()
        if self._lanes is not None:
            for i, lane in enumerate(counters["lanes"]):
                shift = self._shift(i)
                seams = [seam - shift for seam in lane["seams"] if seam > lane["base"]]
                self._lanes.store.set_seams(i, lane["base"] - shift, lane["published"] - shift, seams)

    def _saved_layout(self, saved: dict[str, Any]) -> RowLayout:
        """What was saved; where it is that of this storage, ours: rows can go back where there is no memory for one."""
        if not isinstance(saved, dict):
            return RowLayout.from_json(saved)  # an error that says what is wrong with it
        state = saved if isinstance(saved, LayoutState) else LayoutState(saved)
        return state.parse(None if self._table is None else self._table.layout)

    def _order_in(self, layout: dict[str, Any]) -> Any:
        """Where a saved row has each byte of ours: the same keys may have been written in another order there."""
        assert self._table is not None
        return self._table.layout.order_in(self._saved_layout(layout))

    def write_block(self, lane: int, start: int, rows: np.ndarray[Any, Any]) -> None:
        """Takes rows [strands, n, row bytes] with write numbers from `start` on."""
        assert self._table is not None
        if self._order is not None:
            rows = np.ascontiguousarray(rows[..., self._order])
            rows[..., self._order < 0] = 0  # sequences, which the saved rows did not carry
        self._table.set_block(lane, start - self._shift(lane), rows)

    def end_restore(self) -> None:
        """Shows the restored rows."""
        if self._lanes is None:
            return
        store = self._lanes.store
        for i, lane in enumerate(self._restoring["lanes"]):
            self._lanes.restore_lane(i, lane, self._shift(i))
        store.end_restore()
        self.shifts = [self._shift(i) for i in range(len(self._restoring["lanes"]))]

    def state_dict(self) -> dict[str, Any]:
        with self.mutex, self.still() as source:
            lanes = source.counters()["lanes"]
            blocks = [source.read_block(i, lane["base"], lane["published"]) for i, lane in enumerate(lanes)]
            counters = source.counters()  # other processes may have overwritten the oldest rows meanwhile
        lost = [now["base"] - then["base"] for now, then in zip(counters["lanes"], lanes, strict=True)]
        rows = [torch.from_numpy(block[:, n:]) for block, n in zip(blocks, lost, strict=True)]
        return {"layout": self.layout_state(), "counters": counters, "rows": rows}

    def check_state(self, state: dict[str, Any]) -> None:
        try:
            _check_rows(state)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the state of the storage is not one that state_dict gave ({error!r})") from error
        self.check_restore(state["layout"], state["counters"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state(state)
        with self.replacing("load_state_dict"):
            self.begin_restore(state["layout"], state["counters"])
            for i, (lane, rows) in enumerate(zip(state["counters"]["lanes"], state["rows"], strict=True)):
                if lane["published"] > lane["base"]:
                    self.write_block(i, lane["base"], rows.numpy())
            self.end_restore()

    def staging(self) -> StagedRows:
        return StagedRows(self, spill=bool(getattr(self.checkpointer, "load_hooks", None)))

    def kept(self) -> Callable[[], None] | None:
        layout, counters = self.layout_state(), self.counters()
        if layout is None:
            return self._forget
        rows = StagedRows(self, spill=False)
        try:
            rows.begin_restore(layout, counters)
        except TooManyRowsError:
            return None
        for i, lane in enumerate(counters["lanes"]):
            if lane["published"] > lane["base"]:
                rows.write_block(i, lane["base"], self.read_block(i, lane["base"], lane["published"]))
        rows.end_restore()
        return rows.commit

    def _forget(self) -> None:
        """Nothing has been written to this storage."""
        self._made_for_restore = True
        self.abort_restore()

    def abort_restore(self) -> None:
        """Leaves the storage empty; one that had no rows to be like has none again."""
        if self._made_for_restore and self._unmake():
            return
        if self._lanes is not None:
            self._lanes.store.begin_restore()
            self._lanes.store.mend()
            self._lanes.store.end_restore()

    def _shift(self, lane: int) -> int:
        """Write numbers stay as they are in a lane of the same capacity; in another one the oldest row is number 0."""
        assert self._lanes is not None
        same = self._restoring["lane_capacity"] == self._lanes.store.lane_capacity
        return 0 if same else int(self._restoring["lanes"][lane]["base"])


def _inner(layout: dict[str, Any]) -> tuple[int, ...]:
    """The shape of the environments that a saved layout is of; MalformedLayoutError where it says none."""
    strands = layout.get("strands")
    if not isinstance(strands, list) or not all(type(n) is int for n in strands) or "ndim" not in layout:
        raise MalformedLayoutError(f"this is no row layout: it is of environments {strands!r:.80}")
    return tuple(strands)


def _check_rows(state: dict[str, Any]) -> None:
    """ValueError, KeyError, TypeError or AttributeError where the rows of a state are not those of its counters."""
    layout, counters, rows = state["layout"], state["counters"], state["rows"]
    known = Counters(counters)
    row_bytes = 0 if layout is None else layout["row_bytes"]
    expected = [(known.strands, lane["published"] - lane["base"], row_bytes) for lane in counters["lanes"]]
    found = [tuple(some.shape) if some.dtype is torch.uint8 else some.dtype for some in rows]
    if found != expected:
        raise ValueError(f"the rows of the lanes are uint8 {found}, their counters say {expected}")


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

    def carry_sequences(self) -> None:
        table, lanes = self._table, self._lanes
        if table is None or lanes is None or table.layout.carries_sequence:
            return
        if isinstance(table, ColumnTable):
            table.carry_sequences()
            return
        if table.mapped or lanes.locks is not None:
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

    def _make_room(self, layout: RowLayout) -> None:
        can_change = isinstance(self._table, ColumnTable) or (
            self._table is not None and not self._table.mapped and self._table.lanes.locks is None
        )
        if can_change and (self._expects_sequences or layout.carries_sequence):
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
        merged = pytree.flatten_dims(items, first, first + len(inner) - 1)
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
        return pytree.repeat_per_step(at, at.ndim - (self.ndim > 1), within) if within else at

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
            items = pytree.expand(items, n)
        if index_key is not None and self._stores(index_key):
            own = self.outward(slots)
            index = torch.stack(own, -1) if isinstance(own, tuple) else own
            items = pytree.with_entry(items, index_key, self._of_each_step(index))
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
        items = items if n <= 1 or _is_single(self._table.layout, items) else pytree.flatten_dims(items, 0, n - 1)
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

    def leaf(self, path: pytree.KeyPath) -> LeafSpec | None:
        leaves = () if self._table is None else self._table.layout.leaves
        return next((leaf for leaf in leaves if leaf.path == path), None)

    def column(self, path: pytree.KeyPath, slots: Tensor) -> Tensor:
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
    node = TreeSpec("leaf", leaf=len(leaves) - 1)
    root.keys, root.children = (*root.keys, key), (*root.children, node)
    return RowLayout(layout.root, leaves, layout.carries_sequence)


def _lead_shape(items: Any, batch_dims: int) -> tuple[int, ...]:
    shape = getattr(items, "shape", None)
    if shape is None:
        _, leaves = pytree.describe(items, batch_dims)
        if not leaves:
            raise ValueError("nothing to store: the data hold no tensor")
        shape = np.shape(leaves[0][1]) if not isinstance(leaves[0][1], Tensor) else leaves[0][1].shape
    if len(shape) < batch_dims:
        raise ValueError(f"the data have shape {list(shape)}; this storage takes {batch_dims} batch dimensions")
    return tuple(shape[:batch_dims])


def _strand_shape(items: Any, batch_dims: int, time_dim: int) -> tuple[int, ...]:
    shape = _lead_shape(items, batch_dims)
    return shape if time_dim < 0 else tuple(d for i, d in enumerate(shape) if i != time_dim)


def _is_single(layout: RowLayout, items: Any) -> bool:
    """Whether the data are one step, to be written at every index."""
    leaf = layout.leaves[0]
    value = pytree.get_entry(items, leaf.path)
    return value is not None and np.ndim(value) == len(leaf.shape)  # None: the check of the rows raises an error


class LazyTensorStorage(TableStorage):
    """Packed rows in memory, made at the first write; on a GPU, one tensor per key.

    Args:
        max_size: steps that fit. With `ndim=2` it is rounded up to whole rows of environments.
        device: where the rows are kept.
        ndim: batch dimensions of the data; the last one is time.
        shared: keep the rows in memory that other processes see and write too.
        lanes: how many processes may append.

    Raises:
        ValueError: a setting that is not allowed, or there is no such device.
        StorageError: at the first write, with the numbers, when memory cannot hold it.

    Example:
        >>> storage = LazyTensorStorage(100)
        >>> rb = ReplayBuffer(storage=storage, batch_size=4)
        >>> rb.extend(TensorDict({"x": torch.arange(6.0)}, [6]))
        tensor([0, 1, 2, 3, 4, 5])
        >>> len(storage), storage[2:4]["x"]
        (6, tensor([2., 3.]))
    """

    def __init__(
        self,
        max_size: int,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        shared: bool = False,
        lanes: int = 1,
        *,
        checkpointer: Any = None,
    ) -> None:
        super().__init__(max_size, ndim, checkpointer, lanes)
        self.device = _device(device)
        self.shared = shared
        if self.device.type != "cpu" and (shared or lanes > 1):
            raise ValueError(f"a storage on {self.device} belongs to one process: shared and lanes need device='cpu'")
        if lanes > 1 and not shared:
            raise ValueError("lanes are for processes that share a storage: pass shared=True too")

    def _make(self, layout: RowLayout, lane_capacity: int) -> tuple[Lanes, RowTable | ColumnTable]:
        size = StoreSize(layout, self._n_lanes, lane_capacity, _count(self._inner), trailer=False)
        if self.device.type != "cpu":
            lanes = Lanes.in_memory(lane_capacity, _count(self._inner))
            log.info("storage on %s: %s", self.device, size.describe())
            return lanes, ColumnTable.empty(lanes, layout, self._inner, self.device)
        log.info("storage in %smemory: %s", "shared " if self.shared else "", size.describe())
        if self.shared:
            fd = open_shared_memory(size)
            lanes = Lanes(size.create_in(fd), LaneLocks(fd))
        else:
            refuse_if_memory_is_short(size)
            lanes = Lanes(size.create(-1))
        return lanes, RowTable(lanes, layout, mapped=False)

    def settings(self) -> dict[str, Any]:
        return {
            "max_size": self._asked_size, "device": str(self.device), "ndim": self.ndim, "shared": self.shared,
            "lanes": self._n_lanes,
        }  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        if not self.shared:
            raise StorageError(
                f"Cannot share a storage of type {type(self).__name__} whose rows are in private memory: make it with "
                "shared=True"
            )
        if self._lanes is None or self._lanes.locks is None:
            raise StorageError(
                "the storage has not been initialized: write its first batch before sending it to another process"
            )
        return {
            "init": (self._asked_size, str(self.device), self.ndim, True, self._n_lanes),
            "inner": self._inner,
            "descriptor": share_descriptor(self._lanes.locks.fd),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["init"])  # type: ignore[misc]
        store, locks, layout = store_of_descriptor(state["descriptor"])
        lanes = Lanes(store, locks)
        lanes.mutex = self.mutex
        self._inner, self._lanes = state["inner"], lanes
        self._table = RowTable(lanes, layout, mapped=False)
        self._max_size = lanes.capacity


class TensorStorage(TableStorage):
    """A storage around tensors that exist: they are the stored rows, all of them, and are written in place.

    Args:
        storage: a tensor, TensorDict, tensorclass or pytree whose first `ndim` dimensions are `[time, ...]`.
        max_size: steps; must agree with the data.
        device: where the data must be; the data's own if None.
        ndim: batch dimensions.

    Raises:
        ValueError: `max_size` or `ndim` do not fit the data, or there is no such device.

    Example:
        >>> data = torch.arange(10)
        >>> storage = TensorStorage(data)
        >>> len(storage), storage[3]
        (10, tensor(3))
    """

    def __init__(
        self,
        storage: Any,
        max_size: int | None = None,
        device: torch.device | str | None = None,
        ndim: int = 1,
        *,
        checkpointer: Any = None,
    ) -> None:
        root, found = pytree.describe(storage, ndim)
        tensors = [_tensor(value, path) for path, value in found]
        lead = _common_lead(found, tensors, ndim)
        count = 1
        for d in lead:
            count *= d
        if max_size is not None and max_size not in (lead[0], count):
            raise ValueError(f"max_size={max_size}, but the data hold {count} steps; leave max_size out")
        if count == 0:
            raise ValueError("the data have no steps: there is nothing to store in")
        super().__init__(count, ndim, checkpointer)
        if device is not None:
            tensors = [t.to(_device(device)) for t in tensors]
        layout = RowLayout.of(pytree.map_outermost(storage, lambda part: part[:1]), ndim)
        layout.take_root(root)
        self._inner = tuple(lead[1:])
        self._lanes = Lanes.in_memory(lead[0], _count(self._inner))
        self._lanes.mutex = self.mutex
        self._lanes.advance(lead[0])
        self._table = ColumnTable(self._lanes, layout, tensors, self._inner)
        self._data = storage
        self.device = tensors[0].device

    def settings(self) -> dict[str, Any]:
        return {"storage": self._data, "ndim": self.ndim}

    def _make(self, layout: RowLayout, lane_capacity: int) -> tuple[Lanes, RowTable | ColumnTable]:
        raise AssertionError("made in __init__")


def _device(device: torch.device | str) -> torch.device:
    """Where rows are to be kept. ValueError, TypeError: they cannot be kept there."""
    found = usable_device(device, "device")
    if found is None or found.type == "meta":
        raise ValueError(f"device={device!r}: a storage keeps its rows in memory, 'cpu' or that of a GPU")
    return found


def _count(shape: tuple[int, ...]) -> int:
    n = 1
    for d in shape:
        n *= d
    return n


def _tensor(value: Any, path: pytree.KeyPath) -> Tensor:
    if not isinstance(value, Tensor):
        return pytree.as_tensor(value, path)
    if value.device.type == "cpu":
        pytree.as_tensor(value, path)  # for its errors
    return value.detach()


def _common_lead(found: list[tuple[pytree.KeyPath, Any]], tensors: list[Tensor], ndim: int) -> tuple[int, ...]:
    if not tensors:
        raise ValueError("nothing to store: the data hold no tensor")
    lead = tuple(tensors[0].shape[:ndim])
    for (path, _), t in zip(found, tensors, strict=True):
        if t.ndim < ndim or tuple(t.shape[:ndim]) != lead:
            raise ValueError(
                f"{pytree.format_key(path)} has shape {list(t.shape)}; all data must begin with {list(lead)}"
            )
    if len(lead) < ndim:
        raise ValueError(f"the data have shape {list(lead)}, fewer than ndim={ndim} dimensions")
    return lead


__all__ = ["LazyTensorStorage", "TensorStorage"]
