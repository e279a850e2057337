"""Storages whose rows all have one layout: packed rows in memory, columns on a GPU, tensors that exist."""

from __future__ import annotations

import abc
import contextlib
import copy
import dataclasses
import functools
import json
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram import _native, pytree
from engram._advice import advised, with_argument
from engram._system import parse_bytes
from engram._text import log
from engram.data.replay_buffers.state.rows import SavedRows, TableForLoad, env_shape_of, layout_of
from engram.data.replay_buffers.storages.base import NO_NATIVE_ROWS, Checked, NativeRows, Storage, warn_of_items
from engram.errors import CheckpointError, CheckpointMisfitError, StorageError
from engram.pytree import TreeSpec
from engram.specs.tensors import usable_device
from engram.store.files import (
    StoreSpec,
    open_passed_store,
    open_shared_memory,
    refuse_if_memory_is_short,
    share_fd,
)
from engram.store.indexing import from_slots
from engram.store.lanes import Lanes
from engram.store.layout import LeafSpec, RowLayout
from engram.store.locks import LaneLocks
from engram.store.tables import ColumnTable, Rows, RowTable, Table, expand_slots
from engram.store.unmade import UnmadeStore
from engram.store.views import ChangeTracker, ColumnSnapshot, EmptySource, PrivateRows, RowSnapshot

_MOST_DIMS = 64  # of a batch: more than tensors have
_NO_STEPS = "nothing to add: the batch has no steps"


class TableStorage(Storage):
    """A storage whose rows all have one layout: those of a table that is made when the layout is known."""

    _is_mapped: ClassVar[bool] = False  # whether rows are in a file, so that reading them may wait for a disk

    def __init__(
        self,
        max_size: int | None,
        ndim: int,
        checkpointer: Any = None,
        given_lanes: int | None = None,
        max_bytes: int | str | None = None,
    ) -> None:
        super().__init__(max_size, checkpointer)
        if max_size is not None and max_bytes is not None:
            raise ValueError(f"max_size={max_size} and max_bytes={max_bytes!r} were given; give one of them")
        self._max_bytes = None if max_bytes is None else parse_bytes(max_bytes, "max_bytes")
        if ndim < 1:
            raise ValueError(f"ndim must be at least 1, got {ndim}")
        # Whether a storage that nothing was written to may be sent, and is then made by the first process that writes.
        self._shared_init = False
        self._unmade: UnmadeStore | None = None  # what these processes share until then, where no file has a name
        self._given_lanes = given_lanes  # None: writers take turns in one lane
        lanes = 1 if given_lanes is None else given_lanes
        if lanes < 1 or (lanes > 1 and ndim > 1):
            raise ValueError(f"lanes must be at least 1, and 1 with ndim={ndim}: got {lanes}")
        self.ndim = ndim
        self._n_lanes = lanes
        if self._max_size is not None:
            self._max_size = math.ceil(self._max_size / lanes) * lanes
        self._requested_size = self._max_size
        self._env_shape: tuple[int, ...] = ()
        self._first_env_shape: tuple[int, ...] | None = None  # of a first batch with several environment dimensions
        self._lanes: Lanes | None = None
        self._table: Table | None = None
        self._make_lock = threading.Lock()
        self._expects_sequences = False

    def _after_fork(self) -> None:
        self._make_lock = threading.Lock()
        shared_init, self._shared_init = self._shared_init, False  # nothing is opened before this process uses it
        super()._after_fork()
        self._shared_init = shared_init
        self.native = self.native._replace(source=None)  # until this process uses the lanes

    @abc.abstractmethod
    def _make(self, layout: RowLayout, lane_capacity: int) -> tuple[Lanes, Table]:
        """The lanes and the table of a new store. Raises StorageError, with the numbers, where memory is short."""

    # ---- facts ----
    def __repr__(self) -> str:
        shown = super().__repr__()
        if self._n_lanes > 1:
            each = "" if self._max_size is None else f", steps_per_lane={self._max_size // self._n_lanes}"
            shown = f"{shown.removesuffix(')')}, lanes={self._n_lanes}{each})"
        return shown

    @property
    def lanes(self) -> Lanes | None:
        if self._lanes is None and self._shared_init:
            self._join_made()
        return self._lanes

    @property
    def env_shape(self) -> tuple[int, ...]:
        return self._env_shape

    @property
    def nbytes(self) -> int:
        return 0 if self.lanes is None or self._table is None else self._table.nbytes

    @property
    def layout(self) -> RowLayout | None:
        return None if self.lanes is None or self._table is None else self._table.layout

    def flatten(self) -> Storage:
        if self.ndim == 1:
            return self
        return TensorStorage(pytree.flatten_dims(self.get(slice(None)), 0, len(self._env_shape)))

    @property
    def _storage(self) -> Any:
        if self.lanes is None or self._lanes is None:
            return None
        store = self._lanes.store
        return self._shaped_view(0, store.lanes * store.lane_capacity)

    def _shaped_view(self, start: int, stop: int) -> Any:
        assert self._table is not None
        view = self._table.view(start, stop)
        if (len(self._env_shape) > 1 or self._env_shape == (1,)) and isinstance(self._table, RowTable):
            lead, merged = (stop - start, *self._env_shape), 1 if self._env_shape == (1,) else 2
            view = pytree.map_outermost(view, lambda part: part.reshape(*lead, *part.shape[merged:]))
        return view

    def __getitem__(self, index: Any) -> Any:
        """Rows at an index; a slice of a storage that has not wrapped is a live view, for reading only."""
        if isinstance(index, slice) and self._table is not None and self._lanes is not None:
            store = self._lanes.store
            lane = store.lane(0)
            rows = lane["published"] - lane["first"]
            # Without gaps and from slot 0 on: not where a recovery left the middle of a ring, not in several lanes.
            contiguous = store.lanes == 1 and (rows == store.lane_capacity or lane["first"] % store.lane_capacity == 0)
            start, stop, step = index.indices(max(0, rows))
            if contiguous and step == 1:
                return self._shaped_view(start, max(start, stop))
        return self.get(index)

    # ---- copies ----
    def row_form(self) -> Any:
        """What an empty copy must know about the rows before their state is loaded; None: there are none."""
        if self._table is None:
            return None
        layout = self._table.layout  # with its classes, which a state does not name
        return layout.root, layout.leaves, layout.carries_sequence, self._env_shape, self._first_env_shape

    def take_row_form(self, form: Any) -> None:
        """Makes room for rows of what `row_form` returned."""
        if form is not None and self._table is None:
            root, leaves, carries_sequence, env_shape, self._first_env_shape = form
            self._make_table(RowLayout(root, leaves, carries_sequence), env_shape)

    # ---- other processes ----
    def _opening_arguments(self) -> dict[str, Any] | None:
        """The constructor's arguments that open its file in any process; None: it has none with a name."""
        return None

    def __getstate__(self) -> dict[str, Any]:
        opening = self._opening_arguments()
        if opening is not None:
            return {"init": opening}
        state = {"init": self._sent_arguments()}
        if self.lanes is None and self._unmade is not None:
            return {**state, "unmade": self._unmade}
        return {**state, "env_shape": self._env_shape, "descriptor": share_fd(self._made_locks().fd)}

    def _made_locks(self) -> LaneLocks:
        if self._lanes is None or self._lanes.locks is None:
            raise StorageError(
                "the storage has not been initialized: write its first batch before sending it to another process, or "
                "make it with shared_init=True"
            )
        return self._lanes.locks

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**(state["init"] if "init" in state else self._arguments_of_older(state)))  # type: ignore[misc]
        if "unmade" in state and "init" in state:
            self._shared_init, self._unmade = True, state["unmade"]
        elif "descriptor" in state:
            store, locks, layout = open_passed_store(state["descriptor"])
            if self._is_mapped:
                store.advise_random()
            lanes = Lanes(store, locks, turns=self._given_lanes is None)
            self._env_shape = state["env_shape"]
            self._take_table(lanes, RowTable(lanes, layout, mapped=self._is_mapped))

    def _arguments_of_older(self, state: dict[str, Any]) -> dict[str, Any]:
        """The constructor's arguments of what `__getstate__` returned in engram 0.1."""
        return state

    # ---- making ----
    def _ensure(self, items: Any, batch_dims: int, time_dim: int, index_key: str | None) -> Table:
        with self._making(), self._make_lock:
            if self._table is None:
                layout = RowLayout.of(items, batch_dims)
                # The first batch decides the layout only if it can be written itself.
                if not layout.plan(items, batch_dims, time_dim).steps:
                    raise ValueError(_NO_STEPS)
                if batch_dims == self.ndim == 1 and layout.within:
                    warn_of_items(items)
                if index_key is not None:
                    layout = _with_index(layout, index_key, self.ndim, required=self._requires_index)
                self._make_table(layout, self._first_env_shape or _env_shape(items, batch_dims, time_dim))
        assert self._table is not None
        if self._shared_init:  # another process may have made it
            envs = self._first_env_shape or _env_shape(items, batch_dims, time_dim)
            if envs != self._env_shape:
                raise self._other_envs(envs)
        return self._table

    def _other_envs(self, envs: tuple[int, ...]) -> ValueError:
        return ValueError(f"the batch has environments of shape {list(envs)}, this storage {list(self._env_shape)}")

    def adopt(self, layout: RowLayout) -> None:
        """Makes the storage for rows of this layout before the first of them comes; ndim=1. The same again is no error.

        Raises:
            ValueError: it has another layout already; every difference is listed. Or ndim is not 1.
            StorageError: it cannot be made.

        Example:
            >>> storage = LazyTensorStorage(10)
            >>> storage.adopt(RowLayout.of(TensorDict({"x": torch.zeros(3)}, [3]), 1))
            >>> storage.layout.paths, len(storage)
            (frozenset({('x',)}), 0)
        """
        if self.ndim != 1:
            raise ValueError(f"a layout says nothing of environments: ndim must be 1, it is {self.ndim}")
        with self.mutex, self._making(), self._make_lock:  # in the order of `extend`
            if self._table is None:
                self._make_table(layout, ())
                return
        differences = self._table.layout.differences(layout)
        if differences:
            raise ValueError(f"this storage has another layout: {'; '.join(differences)}. Nothing was changed")

    def _make_table(self, layout: RowLayout, env_shape: tuple[int, ...]) -> None:
        """Makes the table for rows of a layout and environments of this shape."""
        if self._requested_size is None and self._max_bytes is None:
            raise ValueError("this storage needs a max_size, or max_bytes")
        self._warn_of_copy()
        self._env_shape = env_shape
        if self._expects_sequences:
            layout = layout.with_sequence()
        try:
            lanes, table = self._make(layout, self._new_lane_capacity(layout, math.prod(env_shape)))
        except BaseException:
            self._env_shape = ()
            raise
        self._take_table(lanes, table)

    def _take_table(self, lanes: Lanes, table: Table) -> None:
        lanes.mutex = self.mutex
        self._max_size = lanes.capacity
        self._set_table(lanes, table)

    def _set_table(self, lanes: Lanes | None, table: Table | None) -> None:
        """Uses a table from now on; None: there is none any more."""
        self._lanes, self._table = lanes, table
        self._bind()
        if lanes is not None:
            lanes.on_join = functools.partial(_bind_again, weakref.ref(self))

    def _bind(self) -> None:
        """Lets native calls do with the rows what no child of the user's has a method of its own for."""
        table, overrides = self._table, self._overrides
        if not isinstance(table, RowTable):
            self.native = NO_NATIVE_ROWS
            return
        reads = not overrides & {"get", "read", "column", "leaf"}
        appends = not overrides & {"set", "check", "append"}
        push: Any = table.push
        if self.ndim > 1:
            push = functools.partial(_push_envs, table, self._env_shape) if self.ndim == 2 else None
        self.native = NativeRows(table.source if reads else None, push if appends else None, table if reads else None)

    # ---- making it together with other processes ----
    def _join_made(self) -> None:
        """Opens the store that another process has made, if one has."""
        with self._make_lock:
            if self._table is None and self._unmade is not None and self._unmade.is_made():
                self._take_table(*self._table_of_shared(*self._unmade.open(), None))

    @contextlib.contextmanager
    def _making(self) -> Iterator[None]:
        """A block in which no other process makes a storage that this one shares and has not made yet."""
        if self._unmade is None or self.lanes is not None:
            yield
            return
        with self._unmade.held():
            self._join_made()  # while this process waited
            yield

    def _table_of_shared(
        self, store: _native.Store, locks: LaneLocks, layout: RowLayout | None
    ) -> tuple[Lanes, RowTable]:
        """The lanes and the table of a store that one of the processes has made, perhaps for rows of this layout."""
        saved, self._env_shape, _ = saved_layout(store)
        if layout is not None and not layout.differences(saved):
            saved.take_form(layout)  # which may have a tensorclass, unnamed in the store
        lanes = Lanes(store, locks, turns=self._given_lanes is None)
        return lanes, RowTable(lanes, saved, mapped=self._is_mapped)

    @property
    def _dimensions(self) -> dict[str, Any]:
        """What processes that open the store must know besides the layout."""
        return {"inner": list(self._env_shape), "ndim": self.ndim}

    def _warn_of_copy(self) -> None:
        if not self._shared_init:  # else the first write makes rows that both processes use
            super()._warn_of_copy()

    def set(self, cursor: Any, data: Any, index_key: str | None = None, *, set_cursor: bool = True) -> None:
        with self.mutex, self._making():  # in the order of `extend`
            super().set(cursor, data, index_key)

    def _exclusive(self, operation: str) -> AbstractContextManager[None]:
        if self._unmade is None or self._lanes is not None:
            return super()._exclusive(operation)
        return self._first_exclusive(operation)

    @contextlib.contextmanager
    def _first_exclusive(self, operation: str) -> Iterator[None]:
        with self.mutex, self._making(), super()._exclusive(operation):
            yield

    def _new_lane_capacity(self, layout: RowLayout, envs: int) -> int:
        """Time steps of a lane of a new table. StorageError: not one fits into `max_bytes`."""
        if self._max_bytes is None:
            return math.ceil((self._requested_size or 0) / (self._n_lanes * envs))
        fit, too_many = 0, self._max_bytes // max(self._n_lanes * envs * layout.payload_bytes, 1) + 1
        while too_many - fit > 1:  # the space between header and rows grows with their number
            steps = (fit + too_many) // 2
            if self._bytes_of(layout, steps, envs) > self._max_bytes:
                too_many = steps
            else:
                fit = steps
        if not fit:
            raise StorageError(
                f"max_bytes={self._max_bytes} is less than the {self._bytes_of(layout, 1, envs)} bytes that a storage "
                f"of one step{' of each environment' * (envs > 1)}{' in each lane' * (self._n_lanes > 1)} needs"
            )
        return fit

    def _bytes_of(self, layout: RowLayout, lane_capacity: int, envs: int) -> int:
        """Bytes of a new table, header and rows."""
        extra = None if self._unmade is None else self._dimensions
        return StoreSpec(layout, self._n_lanes, lane_capacity, envs, trailer=False, layout_extra=extra).total_bytes

    def _size_arguments(self) -> dict[str, Any]:
        """`max_size` and `max_bytes` for a storage with as much room."""
        if self._max_bytes is None or self._lanes is not None:
            return {"max_size": self._max_size if self._requested_size is None else self._requested_size}
        return {"max_size": None, "max_bytes": self._max_bytes}

    def _expect_sequences(self, by_set: bool = False) -> None:
        self._expects_sequences = True
        if isinstance(self._table, ColumnTable):  # one column more, nothing is copied
            self._table.carry_sequences()

    def _carry_sequences(self) -> None:
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
        with self._replacing("giving rows their sequences"):
            assert isinstance(table, RowTable)
            layout = table.layout.with_sequence()
            refuse_if_memory_is_short(StoreSpec(layout, self._n_lanes, lanes.store.lane_capacity, lanes.envs, False))
            table = table.with_sequences()
            self._set_table(table.lanes, table)

    @property
    def _can_widen(self) -> bool:
        """Whether stored rows can get room for sequences: not in a file, nor in shared memory."""
        table = self._table
        in_private = isinstance(table, RowTable) and not table.mapped and table.lanes.locks is None
        return in_private or isinstance(table, ColumnTable)

    def _make_room(self, layout: RowLayout) -> None:
        """Before rows of this layout are restored: makes room for the sequences that they carry, where it can."""
        if self._can_widen and (self._expects_sequences or layout.carries_sequence):
            self._carry_sequences()

    def _remove_table(self) -> bool:
        """Frees a table that no other process has seen; False: it stays."""
        if self._lanes is not None:
            self._lanes.close()
        self._set_table(None, None)
        self._env_shape, self._first_env_shape = (), None
        self._max_size = self._requested_size
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
            items, batch_dims, time_dim = self._merge_envs(items, batch_dims, time_dim)
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
        checked = Checked(*table.fit(items, batch_dims, time_dim, extra))
        if checked.steps == 0:
            raise ValueError(_NO_STEPS)
        return checked

    def _merge_envs(self, items: Any, batch_dims: int, time_dim: int) -> tuple[Any, int, int]:
        """Makes several environment dimensions one; the first batch decides their shape."""
        shape = _lead_shape(items, batch_dims)
        if time_dim not in (-1, 0, batch_dims - 1):
            raise ValueError(f"time must be the first or the last batch dimension, got {time_dim} of {batch_dims}")
        envs = shape if time_dim < 0 else shape[1:] if time_dim == 0 else shape[:-1]
        if self._table is None:
            self._first_env_shape = envs
        elif envs != self._env_shape:
            raise self._other_envs(envs)
        if len(envs) == 1:
            return items, batch_dims, time_dim
        first = 1 if time_dim == 0 else 0
        merged = pytree.flatten_dims(items, first, first + len(envs) - 1)
        return merged, batch_dims - len(envs) + 1, time_dim if time_dim <= 0 else 1

    def _own_index(self, items: Any, batch_dims: int, time_dim: int) -> Tensor | int:
        assert self._lanes is not None
        if batch_dims == 0:
            return self._lanes.next_slot()
        steps = 1 if time_dim < 0 else _lead_shape(items, batch_dims)[time_dim]
        times = self._lanes.next_slots(steps)
        if self.ndim == 1:
            return times
        slots: Any = expand_slots(times, self._lanes.envs)
        index = torch.stack(tuple(self.from_slots(slots)), -1).reshape(steps, self._lanes.envs, self.ndim)
        return index[0] if time_dim < 0 else index if time_dim == 0 else index.transpose(0, 1)

    def _of_each_step(self, index: Tensor | int) -> Tensor:
        """The index of each item, repeated for its steps where items have batch dimensions of their own."""
        assert self._table is not None
        at, within = torch.as_tensor(index), self._table.layout.within
        return pytree.repeat_per_step(at, at.ndim - (self.ndim > 1), within) if within else at

    def _stores(self, key: str) -> bool:
        assert self._table is not None
        return (key,) in self._table.layout.paths

    def append(self, checked: Checked, most: int | None = None) -> Tensor | int:
        assert self._table is not None and self._lanes is not None
        return expand_slots(self._table.append(checked.data, most), self._lanes.envs)

    def _turn(self) -> AbstractContextManager[None]:
        lanes = self._lanes
        if lanes is None and self._unmade is not None:
            return self._first_turn()
        return contextlib.nullcontext() if lanes is None or not lanes.takes_turns else lanes.turn()

    @contextlib.contextmanager
    def _first_turn(self) -> Iterator[None]:
        with self._making(), contextlib.nullcontext() if self.lanes is None else self.lanes.turn():
            yield

    def replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> None:
        self._prepare_replace(checked, rows, slots)()

    def _prepare_replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> Callable[[], None]:
        assert self._table is not None and self._lanes is not None
        first = self._lanes.reserve_sequences(checked.steps)
        return self._table.prepare_overwrite(slots, checked.data, rows, first)

    def overwrite(self, slots: Tensor, items: Any, index_key: str | None = None) -> None:
        assert self._table is not None
        self._table.overwrite(slots, self._plan_rows(items, slots, index_key))

    def _plan_rows(self, items: Any, slots: Tensor, index_key: str | None) -> Any:
        """Rows for in-place writing: [n, ...], whatever environments the storage has; one step is repeated."""
        assert self._table is not None
        n = len(slots)
        if self._is_single(items):
            items = pytree.expand(items, n)
        if index_key is not None and self._stores(index_key):
            _check_count(n, *_lead_shape(items, 1)[:1])
            own = self.from_slots(slots)
            index = torch.stack(own, -1) if isinstance(own, tuple) else own
            items = pytree.with_entry(items, index_key, self._of_each_step(index))
        count, rows = self._table.fit_rows(items)
        _check_count(n, count)
        return rows

    def _is_single(self, items: Any, env_dims: int = 0) -> bool:
        assert self._table is not None
        leaf = self._table.layout.leaves[0]
        value = pytree.get_entry(items, leaf.path)
        return value is not None and np.ndim(value) == env_dims + len(
            leaf.shape
        )  # None: an error when the rows are checked

    def _empty(self) -> None:
        """Called before all rows are forgotten, of a child that overrides it as TorchRL's users do."""

    # ---- reading ----
    def read(
        self,
        slots: Tensor,
        shape: tuple[int, ...] | None = None,
        extra: dict[str, Any] | None = None,
        sequences: bool = False,
    ) -> Rows:
        table = self._table
        if table is None:
            if self.lanes is None or self._table is None:
                raise IndexError("nothing has been written to this storage yet")
            table = self._table
        return table.read(slots, shape, extra, sequences)

    @property
    def _item_shape(self) -> tuple[int, ...]:
        return () if self._table is None else self._table.layout.within

    def _bytes_per_row(self) -> int:
        return 0 if self._table is None else sum(leaf.nbytes for leaf in self._table.layout.leaves)

    def leaf(self, path: pytree.KeyPath) -> LeafSpec | None:
        leaves = () if self._table is None else self._table.layout.leaves
        return next((leaf for leaf in leaves if leaf.path == path), None)

    def column(self, path: pytree.KeyPath, slots: Tensor) -> Tensor:
        assert self._table is not None
        return self._table.column(path, slots)

    # ---- rows as bytes ----
    def append_packed(self, lane: int, rows: Tensor | np.ndarray[Any, Any]) -> Tensor:
        """Writes rows as bytes, uint8 [n, layout.payload_bytes], to a lane that this process holds: `Lanes.hold_lane`.

        Returns time slots, int64 [n].

        Raises:
            ValueError: the rows are not ones of this layout; nothing was written.
            StorageError: this process does not hold the lane; or the rows are not kept as bytes.

        Example:
            >>> batch = TensorDict({"x": torch.arange(3)}, [3])
            >>> storage = LazyTensorStorage(10, shared=True, lanes=2)
            >>> storage.adopt(RowLayout.of(batch, 1))
            >>> storage.lanes.hold_lane(1)
            >>> storage.append_packed(1, storage.layout.pack(batch))
            tensor([5, 6, 7])
        """
        with self.mutex:
            return self._packed_rows.append_packed(lane, rows)

    def append_leaves(self, lane: int, leaves: list[Any]) -> Tensor:
        """As `append_packed`, of the bytes of each leaf: uint8 [n, nbytes] for each of `layout.leaves`."""
        with self.mutex:
            return self._packed_rows.append_leaves(lane, leaves)

    def read_packed(self, slots: Tensor, by_leaf: bool = False, sequences: bool = False) -> Rows:
        """As `read`, as bytes: `batch` is a list of one tensor, uint8 [n, layout.payload_bytes].

        With `by_leaf` a list with the bytes of each leaf, uint8 [n, nbytes].
        """
        return self._packed_rows.read_packed(slots, by_leaf, sequences)

    @property
    def _packed_rows(self) -> RowTable:
        table = self._table
        if not isinstance(table, RowTable):
            raise StorageError("this storage has no rows as bytes: adopt a layout first, with device='cpu'")
        return table

    # ---- saving: the RowSource and RowSink that a checkpointer sees ----
    def _default_checkpointer(self) -> Any:
        from engram.data.replay_buffers.checkpointers.rows import TensorStorageCheckpointer

        return TensorStorageCheckpointer()

    def layout_state(self) -> dict[str, Any] | None:
        """The layout and the dimensions as JSON; None before the first write."""
        if self.lanes is None or self._table is None:
            return None
        return {**self._table.layout.to_json(), "envs": list(self._env_shape), "ndim": self.ndim}

    def counters(self) -> dict[str, Any]:
        """Counters of every lane as JSON."""
        if self.lanes is None or self._lanes is None:
            return {"lane_capacity": 0, "envs": 1, "lanes": []}
        store, lanes = self._lanes.store, self._lanes.saved_states()
        return {"lane_capacity": store.lane_capacity, "envs": store.envs, "lanes": lanes}

    def read_block(self, lane: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        """uint8 [envs, stop - start, row bytes]."""
        assert self._table is not None
        return self._table.block(lane, start, stop)

    def row_layout(self) -> RowLayout | None:
        """The layout; None before the first write."""
        return None if self._table is None else self._table.layout

    def private_rows(self) -> PrivateRows | None:
        """None: what a hook writes into rows of this memory would change them."""
        return None

    def identity(self) -> dict[str, Any]:
        """As `Lanes.identity`."""
        return {} if self._lanes is None else self._lanes.identity()

    def edited(self, since: dict[str, Any]) -> list[tuple[int, int]] | None:
        """Rows changed in place since `identity()` returned `since`; None where the log does not reach back so far."""
        return None if self._lanes is None else ChangeTracker(self._lanes).edited(since)

    def rows_to_save(self, background: bool) -> Any:
        """The RowSource of a save: the rows as they are now, while this process writes others in the background."""
        lanes, table = self.lanes, self._table
        if not background and (lanes is None or lanes.locks is None or not isinstance(table, RowTable)):
            return self  # no other process sees these rows
        if lanes is None or table is None:
            return EmptySource()
        if isinstance(table, ColumnTable):
            return ColumnSnapshot(lanes, self)
        if background and lanes.store.saving:
            raise CheckpointError("this buffer is being saved in the background; wait for that save's result()")
        layout = self.layout_state()
        assert layout is not None
        return RowSnapshot(lanes, layout, self.counters(), table.layout, copy_on_write=background)

    def check_restore(self, layout: dict[str, Any] | None, counters: dict[str, Any]) -> None:
        """A ValueError that lists every difference between what was saved and this storage."""
        differences = []
        lanes = counters["lanes"]
        if layout is not None:
            own = None if self._table is None else self._table.layout
            saved, env_shape = layout_of(layout, own), env_shape_of(layout)
            if layout["ndim"] != self.ndim:
                differences.append(f"ndim is {self.ndim} here, {layout['ndim']} there")
            if self._table is not None:
                differences += self._table.layout.differences(saved)
                replaced = any(lane["replaced"] for lane in lanes)
                if replaced and saved.carries_sequence > self._table.layout.carries_sequence and not self._can_widen:
                    differences.append(
                        "rows carry sequences of their own there, as a TensorDictMaxValueWriter has replaced some; "
                        "those here, in a file or in shared memory, have no place for them: use a storage that is made "
                        "with such a writer"
                    )
                if env_shape != self._env_shape:
                    differences.append(f"environments are {list(self._env_shape)} here, {list(env_shape)} there")
            envs = math.prod(env_shape)
            if counters["envs"] != envs:
                differences.append(f"counters of {counters['envs']} environments, but a layout of {envs} there")
            room = self._lane_room(saved, envs)
            rows = [lane["published"] - lane["base"] for lane in lanes]
            if len(lanes) > self._n_lanes:
                differences.append(f"{self._n_lanes} lanes here, {len(lanes)} there")
            if any(r > room for r in rows):
                differences.append(f"room for {room * envs} steps in a lane here, {max(rows) * envs} saved there")
        if differences:
            raise CheckpointMisfitError("the checkpoint does not fit this storage", differences)

    def _lane_room(self, layout: RowLayout, envs: int) -> int:
        """Time steps that fit into a lane: of this table, or of one that is made with this layout."""
        return self._new_lane_capacity(layout, envs) if self._lanes is None else self._lanes.store.lane_capacity

    def table_for(self, layout: dict[str, Any] | None, counters: dict[str, Any]) -> TableForLoad:
        """A table for saved rows that fit (`check_restore`): that of this storage, or a new one where it has none."""
        is_new = self._table is None and layout is not None
        if self._table is None and layout is not None:
            # A copy: batches of this storage may give it another form, and what was saved may fill several storages.
            self._make_table(copy.copy(layout_of(layout, None)), env_shape_of(layout))
            if self._shared_init:
                self.check_restore(layout, counters)  # another process may have made it
        elif self._table is not None and layout is not None:
            self._make_room(layout_of(layout, self._table.layout))
        return TableForLoad(self._lanes, self._table, is_new)

    def reset(self, with_table: bool) -> None:
        """Leaves the storage empty; `with_table` also without a layout, unless other processes may use the table."""
        if with_table and not self._shared_init and self._remove_table():
            return
        if self._lanes is not None:
            self._lanes.store.begin_restore()
            self._lanes.store.repair()
            self._lanes.store.end_restore()

    @property
    def saved_form(self) -> SavedRows:
        return SavedRows(self)


def _bind_again(storage: weakref.ref[TableStorage]) -> None:
    """In a forked child that has begun to use a storage's lanes."""
    if (alive := storage()) is not None:
        alive._bind()


def _push_envs(
    table: RowTable, env_shape: tuple[int, ...], items: Any, batch_dims: int, time_dim: int, index_key: str | None
) -> Any:
    """As `RowTable.push`, of steps of several environments."""
    slots: Any = table.push(items, batch_dims, time_dim, index_key)
    if slots is None:
        return None
    slots = expand_slots(slots, table.lanes.envs)
    return torch.stack(tuple(from_slots(slots, env_shape)), -1)


def saved_layout(store: _native.Store) -> tuple[RowLayout, tuple[int, ...], int]:
    """The layout of a store's rows, the shape of its environments, and its ndim; any error: they are damaged."""
    saved = json.loads(store.layout)
    layout, inner, ndim = RowLayout.from_json(saved), tuple(saved["inner"]), saved["ndim"]
    if any(type(n) is not int for n in (*inner, ndim)) or math.prod(inner) != store.envs or not 0 <= ndim <= _MOST_DIMS:
        raise ValueError(f"its rows are of environments {list(inner)!r:.80} and {ndim!r:.80} dimensions")
    if layout.payload_bytes != store.payload_bytes:
        raise ValueError(f"its rows have {layout.payload_bytes} bytes, those of the store {store.payload_bytes}")
    return layout, inner, ndim


def _with_index(layout: RowLayout, key: str, ndim: int, *, required: bool) -> RowLayout:
    """The layout with one more key at its root, which holds each row's own index.

    Of a tensorclass without such a field the layout as it is, unless the index is required.
    """
    kind, cls = layout.root.kind, layout.root.cls
    lacks_field = cls is not None and key not in {field.name for field in dataclasses.fields(cls)}
    if kind not in ("td", "dict", "class") or (lacks_field and required):
        named = {"leaf": "tensor", "stack": "lazy stack of different members"}
        form = f"{cls.__name__} without such a field" if cls is not None else named.get(kind, kind)
        raise TypeError(f"a {form} has no place for {key!r}; use RoundRobinWriter, which stores no index")
    if lacks_field:
        return layout
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


def _check_count(indexed: int, given: int) -> None:
    if given != indexed:
        raise ValueError(f"{indexed} steps are indexed, the data have {given}; nothing was written")


def _lead_shape(items: Any, batch_dims: int) -> tuple[int, ...]:
    shape = getattr(items, "shape", None)
    if shape is None:
        _, leaves = pytree.describe(items, batch_dims)
        if not leaves:
            raise ValueError("nothing to store: the data hold no tensor")
        shape = pytree.shape_of(leaves[0][1])
    if len(shape) < batch_dims:
        raise ValueError(f"the data have shape {list(shape)}; this storage takes {batch_dims} batch dimensions")
    return tuple(shape[:batch_dims])


def _env_shape(items: Any, batch_dims: int, time_dim: int) -> tuple[int, ...]:
    shape = _lead_shape(items, batch_dims)
    return shape if time_dim < 0 else tuple(d for i, d in enumerate(shape) if i != time_dim)


class TensorStorage(TableStorage):
    """A storage around tensors that exist: they are the stored rows, all of them, and are written in place.

    Args:
        storage: a tensor, TensorDict, tensorclass or pytree whose first `ndim` dimensions are `[time, ...]`. A
            TensorDict without entries is room for as many steps as its batch size says, which the first write fills
            with entries: the rows are then the storage's own.
        max_size: steps; must agree with the data.
        device: where the data must be; the data's own if None.
        ndim: batch dimensions.

    Raises:
        ValueError: there are no data, `max_size` or `ndim` do not fit them, or there is no such device.

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
        compilable: bool = False,
    ) -> None:
        if storage is None:
            raise ValueError("the data of a TensorStorage are to be non-null; LazyTensorStorage(n) begins without any")
        root, entries = pytree.describe(storage, ndim)
        if not entries and isinstance(storage, TensorDictBase):
            self._init_without_entries(storage, max_size, device, ndim, checkpointer)
            return
        tensors = [_tensor(value, path) for path, value in entries]
        lead = _common_lead(entries, tensors, ndim)
        count = math.prod(lead)
        if max_size is not None and max_size not in (lead[0], count):
            raise ValueError(f"max_size={max_size}, but the data hold {count} steps; leave max_size out")
        if count == 0:
            raise ValueError("the data have no steps: there is nothing to store in")
        super().__init__(count, ndim, checkpointer)
        if device is not None:
            tensors = [t.to(_device(device)) for t in tensors]
        layout = RowLayout.of(pytree.map_outermost(storage, lambda part: part[:1]), ndim)
        layout.take_root(root)
        self._env_shape = tuple(lead[1:])
        lanes = Lanes.in_memory(lead[0], math.prod(self._env_shape))
        self._take_table(lanes, ColumnTable(lanes, layout, tensors, self._env_shape))
        lanes.advance(lead[0])
        self._data = storage
        self.device = tensors[0].device

    def _init_without_entries(
        self, room: TensorDictBase, max_size: int | None, device: Any, ndim: int, checkpointer: Any
    ) -> None:
        lead = tuple(room.batch_size[:ndim])
        if len(lead) < ndim or 0 in lead:
            raise ValueError(f"a TensorDict without entries of batch size {list(room.batch_size)} is no room for steps")
        count = math.prod(lead)
        if max_size is not None and max_size not in (lead[0], count):
            raise ValueError(f"max_size={max_size}, but the batch size is {list(lead)}; leave max_size out")
        super().__init__(count, ndim, checkpointer)
        self._data, self._room = room, lead
        self.device = _device(device if device is not None else room.device or "cpu")

    def _copy_arguments(self) -> dict[str, Any]:
        return {"storage": self._data, "ndim": self.ndim}

    def _make(self, layout: RowLayout, lane_capacity: int) -> tuple[Lanes, Table]:
        if self._env_shape != self._room[1:]:
            raise ValueError(
                f"the batch has environments of shape {list(self._env_shape)}, this storage {list(self._room[1:])}"
            )
        return _in_memory(StoreSpec(layout, 1, lane_capacity, math.prod(self._env_shape), trailer=False), self)


@advised
class LazyTensorStorage(TensorStorage):
    """Packed rows in memory, made at the first write; on a GPU, one tensor per key.

    Args:
        max_size: steps that fit. With `ndim=2` it is rounded up to whole rows of environments.
        device: where the rows are kept; "auto": on the device of the first batch.
        ndim: batch dimensions of the data; the last one is time.
        shared: keep the rows in memory that other processes see and write too.
        lanes: how many processes may append side by side, each to a ring of its own of `max_size / lanes` steps: no
            more of one writer are kept. A new writer takes the free lane with the fewest steps. None: any number take
            turns in one ring, an `extend` at a time, and slices end where another process wrote.
        compilable: accepted, without effect: under `torch.compile` each use of a buffer is a graph break.
        consolidated, cleanup_memmap: accepted, without effect: rows are packed in one memory, which goes with them.
        shared_init: shared, and processes that have it (forked, or sent) before the first write share it, too: the
            first of them that writes makes the rows' memory, the others use it.
        max_bytes: instead of `max_size`, what the rows and their header may take: a number, "8GB", "512MiB". As many
            steps as fit, which is known at the first write; until then `max_size` is None.

    Raises:
        ValueError: a setting that is not allowed, or there is no such device.
        StorageError: at the first write, with the numbers, when memory cannot hold it, or `max_bytes` not one step.

    Example:
        >>> storage = LazyTensorStorage(100)
        >>> rb = ReplayBuffer(storage=storage, batch_size=4)
        >>> rb.extend(TensorDict({"x": torch.arange(6.0)}, [6]))
        tensor([0, 1, 2, 3, 4, 5])
        >>> len(storage), storage[2:4]["x"]
        (6, tensor([2., 3.]))
        >>> storage = LazyTensorStorage(max_bytes="1MB")
        >>> storage.set(0, torch.zeros(250))
        >>> storage.max_size > 900, storage.nbytes <= 1_000_000
        (True, True)
    """

    def __init__(
        self,
        max_size: int | None = None,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        shared: bool = False,
        lanes: int | None = None,
        *,
        checkpointer: Any = None,
        compilable: bool = False,
        shared_init: bool = False,
        max_bytes: int | str | None = None,
    ) -> None:
        if max_size is None and max_bytes is None:
            raise ValueError('a storage needs a size: max_size=100_000 steps, or max_bytes="8GB"')
        TableStorage.__init__(self, max_size, ndim, checkpointer, lanes, max_bytes)  # there are no tensors yet
        self._takes_device = device == "auto"
        self.device = _device("cpu" if self._takes_device else device)
        self.shared = shared or shared_init
        if self.device.type != "cpu" and (self.shared or self._n_lanes > 1):
            raise ValueError(f"a storage on {self.device} belongs to one process: shared and lanes need device='cpu'")
        if self._n_lanes > 1 and not self.shared:
            raise ValueError("lanes are for processes that share a storage: pass shared=True too")
        if shared_init:
            self._shared_init, self._unmade = True, UnmadeStore(temporary=False)

    def _ensure(self, items: Any, batch_dims: int, time_dim: int, index_key: str | None) -> Table:
        if self._takes_device:
            tensors = [leaf for _, leaf in pytree.describe(items, batch_dims)[1] if isinstance(leaf, Tensor)]
            if tensors and not self.shared:
                self.device = tensors[0].device
        return super()._ensure(items, batch_dims, time_dim, index_key)

    def _make(self, layout: RowLayout, lane_capacity: int) -> tuple[Lanes, Table]:
        envs = math.prod(self._env_shape)
        extra = None if self._unmade is None else self._dimensions
        spec = StoreSpec(layout, self._n_lanes, lane_capacity, envs, trailer=False, layout_extra=extra)
        if not self.shared:
            return _in_memory(spec, self)
        log.info("storage in shared memory: %s", spec)
        if self._unmade is not None:
            return self._table_of_shared(*self._unmade.open_or_make(spec), layout)
        fd = open_shared_memory(spec)
        lanes = Lanes(spec.create_in(fd), LaneLocks(fd), turns=self._given_lanes is None)
        return lanes, RowTable(lanes, layout, mapped=False)

    def _share(self) -> None:
        if self._table is not None and not self.shared:
            raise ValueError(
                "the rows are in private memory already: make the storage with shared=True, or call share() before its "
                "first write"
            )
        if self.device.type != "cpu":
            raise ValueError(f"a storage on {self.device} belongs to one process: sharing needs device='cpu'")
        self.shared = True

    def _copy_arguments(self) -> dict[str, Any]:
        device = "auto" if self._takes_device and self._table is None else str(self.device)
        return {
            **self._size_arguments(), "device": device, "ndim": self.ndim,
            "shared": self.shared, "lanes": self._given_lanes, "shared_init": self._shared_init,
        }  # fmt: skip

    get = with_argument(TableStorage.get, "index", "indices")

    def _bytes_of(self, layout: RowLayout, lane_capacity: int, envs: int) -> int:
        if self.device.type == "cpu":
            return super()._bytes_of(layout, lane_capacity, envs)
        return lane_capacity * envs * sum(leaf.nbytes for leaf in layout.stored)

    def _sent_arguments(self) -> dict[str, Any]:
        if not self.shared:
            raise StorageError(
                f"Cannot share a storage of type {type(self).__name__} whose rows are in private memory: make it with "
                "shared=True"
            )
        return {
            **self._size_arguments(), "device": str(self.device), "ndim": self.ndim, "shared": True,
            "lanes": self._given_lanes,
        }  # fmt: skip


def _in_memory(spec: StoreSpec, storage: LazyTensorStorage | TensorStorage) -> tuple[Lanes, Table]:
    """The lanes and the table of a new store of this process alone, on the storage's device."""
    if storage.device.type != "cpu":
        lanes = Lanes.in_memory(spec.lane_capacity, spec.envs)
        log.info("storage on %s: %s", storage.device, spec)
        return lanes, ColumnTable.empty(lanes, spec.layout, storage.env_shape, storage.device)
    log.info("storage in memory: %s", spec)
    refuse_if_memory_is_short(spec)
    lanes = Lanes(spec.create(-1))
    return lanes, RowTable(lanes, spec.layout, mapped=False)


def _device(device: torch.device | str) -> torch.device:
    """The device for rows. ValueError, TypeError: no rows can be kept there."""
    usable = usable_device(device, "device")
    if usable is None or usable.type == "meta":
        raise ValueError(f"device={device!r}: a storage keeps its rows in memory, 'cpu' or that of a GPU")
    return usable


def _tensor(value: Any, path: pytree.KeyPath) -> Tensor:
    if not isinstance(value, Tensor):
        return pytree.as_tensor(value, path)
    if value.device.type == "cpu":
        pytree.as_tensor(value, path)  # for its errors
    return value.detach()


def _common_lead(entries: list[tuple[pytree.KeyPath, Any]], tensors: list[Tensor], ndim: int) -> tuple[int, ...]:
    if not tensors:
        raise ValueError("nothing to store: the data hold no tensor")
    lead = tuple(tensors[0].shape[:ndim])
    for (path, _), t in zip(entries, tensors, strict=True):
        if t.ndim < ndim or tuple(t.shape[:ndim]) != lead:
            raise ValueError(
                f"{pytree.format_key(path)} has shape {list(t.shape)}; all data must begin with {list(lead)}"
            )
    if len(lead) < ndim:
        raise ValueError(f"the data have shape {list(lead)}, fewer than ndim={ndim} dimensions")
    return lead


__all__ = ["LazyTensorStorage", "TensorStorage"]
