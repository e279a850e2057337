"""Packed rows in private memory, shared memory or a mapped file, and what native calls do with them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

import engram._native as _native
from engram import pytree
from engram.errors import StorageError
from engram.pytree import to_tensor
from engram.store.border import Border
from engram.store.files import StoreSpec, refuse_if_memory_is_short
from engram.store.indexing import from_slots
from engram.store.lanes import Lanes
from engram.store.layout import SEQUENCE, RowLayout, StoredLayout
from engram.store.rows import READ_ONLY, JoinedRows, LayoutRows, Rows, expand_slots
from engram.store.steps import Form, Steps

_NO_INDEX = -1
#: The bits of the floats that `torch.as_tensor` makes of Python's; other dtypes are left to it.
_FLOAT_BITS = {torch.float32: 32, torch.float64: 64}

# `Rows(*values)` runs Python code; this is done at every read.
_new_tuple: Any = tuple.__new__


class NativeCalls:
    """What native calls may do with stored rows past the methods of a storage, now."""

    __slots__ = ("_appends", "_reads", "_rows", "appended", "push", "read", "source")

    def __init__(self) -> None:
        #: What whole batches are read from.
        self.source: _native.RowSource | None = None
        #: Checks and appends plain data in one call, as `PackedRows.push`; returns the index as `add` and `extend` do.
        self.push: Callable[[Any, Form], Any] | None = None
        #: What single leaves, n-step returns and batches of several storages are read from.
        self.read: PackedRows | None = None
        #: To what steps of plain arrays are appended (`PackedRows.push_step`), and, where there is a `push`, columns.
        self.appended: PackedRows | None = None
        self._rows: PackedRows | None = None
        self._reads = self._appends = True

    def limit(self, *, reads: bool, appends: bool) -> None:
        """Keeps native calls from what a storage does in another way."""
        self._reads, self._appends = reads, appends

    def offset(self, path: pytree.KeyPath) -> int | None:
        """Where a leaf lies in the rows (bytes); None: there are none, and `column` of the storage has its values."""
        return None if self._rows is None else self._rows.offset(path)

    def bind(self, rows: PackedRows, push: Any) -> None:
        """Uses rows, to which `push` appends."""
        self.bind_source(rows)
        self.read = self._rows
        if self._appends:
            self.push, self.appended = push, rows

    def bind_push(self, push: Any) -> None:
        """Appends by `push`; rows are read by the methods of the storage."""
        self.unbind()
        self.push = push if self._appends else None

    def bind_source(self, rows: PackedRows) -> None:
        """Uses rows of which only whole batches and single leaves are read."""
        self.unbind()
        if self._reads:
            self.source, self._rows = rows.source, rows

    def unbind(self) -> None:
        """There are no rows that native calls use."""
        self.source = self.push = self.read = self.appended = self._rows = None

    def pause(self) -> None:
        """Nothing is read until rows are bound again."""
        self.source = None


class PackedRows(LayoutRows):
    """Packed rows: the bytes of each step next to each other.

    Args:
        store: holds the rows, where it is another one than that of the lanes (`Store.with_growing_rows`).
        codec: of other batches with this layout than the one of its `StoredLayout` makes.
        stored: where leaves lie in the rows, where that is not as in packed ones.
    """

    stored: StoredLayout

    def __init__(
        self,
        lanes: Lanes,
        layout: RowLayout,
        mapped: bool,
        env_shape: tuple[int, ...] = (),
        ndim: int = 1,
        store: _native.Store | None = None,
        codec: _native.Codec | None = None,
        stored: StoredLayout | None = None,
    ) -> None:
        super().__init__(lanes, layout, env_shape, ndim)
        self._store = lanes.store if store is None else store
        #: Where leaves lie in the rows.
        self.stored = StoredLayout(layout) if stored is None else stored
        self._codec = self.stored.codec if codec is None else codec
        #: Those that are stored once, and not in the rows; None: none.
        self.observations = self.stored.observations
        #: Whether stored rows can get room for sequences: not in a file, nor in shared memory.
        if not mapped and lanes.locks is None and self.observations is None:
            self.widened = "by a copy"
        self.mapped = mapped
        self._fast = layout.plain
        #: `Store.gather`; of a store that others write and this process only reads, of one moment.
        self._gather = self._store.gather
        if self._store.read_only:
            self._gather = functools.partial(_gathered, lanes, self._store)
            self.fit = self.overwrite = _refuse  # type: ignore[method-assign, assignment]
        self._index_leaves: dict[str, int | None] = {}
        self._leaf_numbers = {leaf.path: k for k, leaf in enumerate(layout.leaves)}
        self._chosen_leaves: dict[tuple[pytree.KeyPath, ...], list[int]] = {}
        if env_shape:
            self._store.env_shape = list(env_shape)
        border = Border.of([leaf.path for leaf in layout.leaves], [(x.shape, x.dtype) for x in layout.leaves])
        if border.decides:
            self._store.set_border(self._codec, list(border.entries), list(border.done), border.either, border.id)
        if layout.carries_sequence and self._store.lanes == self._store.envs == 1:
            lanes.own_sequences = functools.partial(_own_sequences, self._store, self.stored.offset(SEQUENCE))
        #: What native calls read whole batches from; None: not all of a batch's form is made by them.
        self.source = None
        if self._fast and not layout.within and store is None:
            self.source = _native.RowSource(self._store, self._codec, mapped)

    @property
    def nbytes(self) -> int:
        return self._store.total_bytes

    @property
    def stored_key(self) -> bytes:
        """Equal for rows that are laid out in the same way."""
        return self.stored.key

    def plan(self, steps: Steps, index_key: str | None = None) -> tuple[int, _native.Plan]:
        plan = None
        leaf = None if index_key is None or steps.own_index is not None else self._index_leaf(index_key)
        gets_index = leaf is not None and leaf != _NO_INDEX
        if gets_index and self._fast:
            plan = self._codec.check(steps.items, steps.lead, steps.time, (index_key, None))
        if plan is None:
            extra = None if index_key is None else (index_key, self._own_index.of(steps))
            plan = steps.plan(self.layout, extra, self._codec)
            if leaf is not None and gets_index:
                self._codec.set_own(plan, leaf)
        if plan.envs != self._store.envs:
            raise ValueError(
                f"the batch has {plan.envs} environments, this storage {self._store.envs}; nothing was written"
            )
        return plan.steps, plan

    def plan_rows(self, rows: Any) -> tuple[int, _native.Plan]:
        plan = Steps(rows).plan(self.layout, None, self._codec)
        return plan.steps, plan

    def push(self, batch: Any, form: Form) -> Tensor | int | None:
        """`fit` and `append` in one native call, of a plain batch or of a list of plain items.

        With an index key each row also stores its own index there, if its layout has such an entry. Returns what
        `append` does. None: nothing was written, and `fit` and `append` write it, or say what does not fit.
        """
        lane, (dims, time, key), own = self.lanes.held, form, None
        if lane is None or not self._fast:
            return None
        if key is not None:
            try:
                own = self._index_leaves[key]
            except KeyError:
                own = self._index_leaf(key)
            if own == _NO_INDEX:
                return None
        bits = _FLOAT_BITS.get(torch.get_default_dtype(), 0) if type(batch) is list else None
        # Positional: the hot path.
        return _native.push(self._store, self._codec, lane, batch, dims, time, own, bits)

    def push_columns(self, columns: list[Any], form: Form) -> bool:
        """As `push`, of an array or tensor `[*batch, ...]` for each of `layout.leaves`; makes no index.

        What stands for the leaf of the rows' own index is ignored. False: nothing was written.
        """
        lane, (dims, time, key) = self.lanes.held, form
        own = None if key is None else self._index_leaf(key)
        if lane is None or not self._fast or own == _NO_INDEX:
            return False
        return _native.push_columns(self._store, self._codec, lane, columns, dims, time, own)

    def plan_columns(self, columns: list[Any], form: Form) -> _native.Plan | None:
        """Columns as those of `push_columns`, all of them arrays, for `push_part`; None: they are not of these rows."""
        dims, time, key = form
        own = None if key is None else self._index_leaf(key)
        if own == _NO_INDEX or not self._fast:
            return None
        plan = self._codec.check_columns(columns, dims, time, own)
        return None if plan is None or plan.envs != self._store.envs else plan

    def push_part(self, plan: _native.Plan, first: int, steps: int) -> bool:
        """Appends so many steps of checked columns, as they are now; makes no index. False: nothing was written."""
        lane = self.lanes.held
        return lane is not None and self._store.append(lane, plan, first, steps, False, True) is not None

    def push_step(self, step: Any) -> bool:
        """Appends one time step of all environments, of numpy arrays, and makes no index of it, in one native call.

        Arrays have as many numbers as the rows, in any shape and dtype: `numpy.reshape` and `astype` in one. False:
        nothing was written; `fit` and `append` write it, or say what does not fit.
        """
        lane = self.lanes.held
        # Positional: the hot path.
        return lane is not None and self._fast and _native.push_step(self._store, self._codec, lane, step)

    def _index_leaf(self, key: str) -> int | None:
        """The number of the leaf for the rows' own index; None: there is none, `_NO_INDEX`: the entry is another."""
        if key in self._index_leaves:
            return self._index_leaves[key]
        leaf = next((k for k, leaf in enumerate(self.layout.leaves) if leaf.path == (key,)), None)
        if leaf is not None and self._codec.index_dims(leaf) != self.ndim:
            leaf = _NO_INDEX
        self._index_leaves[key] = leaf
        return leaf

    def append_plan(self, plan: _native.Plan, most: int | None = None) -> Tensor | int:
        n = None if most is None else min(most, plan.steps)
        slots = self._store.append(self.lanes.hold(), plan, 0, n)
        if slots is None:  # another process's turn, or the first one of this, which was perhaps forked
            with self.lanes.mutex, self.lanes.turn():  # a forked child's mutex is another one than its caller holds
                slots = self._store.append(self.lanes.hold(), plan, 0, n)
        assert slots is not None
        return slots

    def plan_packed(self, rows: Tensor | np.ndarray[Any, Any]) -> _native.Plan:
        """As `plan`, of packed rows of this layout, uint8 [n, payload_bytes], which are copied as they are.

        A row whose first entries do not go on from this process's newest one begins a trajectory, as those of a batch.

        Raises:
            ValueError: rows of another length, several environments, or rows that carry their own sequence.
        """
        given: Any = rows
        return self._codec.check_packed(given)

    def plan_leaves(self, leaves: list[Any]) -> _native.Plan:
        """As `plan_packed`, of the bytes of each leaf: uint8 [n, nbytes] for each of `layout.leaves`."""
        plan = None if self.layout.carries_sequence else self.stored.raw_leaf_codec.check_list(leaves, 1, 0)
        if plan is None:
            raise self._no_leaves(leaves)
        return plan

    def _no_leaves(self, leaves: list[Any]) -> ValueError:
        sizes = [leaf.nbytes for leaf in self.layout.leaves]
        return ValueError(
            f"an array uint8 [n, bytes] is needed for each leaf, of {sizes} bytes, found "
            f"{[tuple(leaf.shape) for leaf in leaves]}; nothing was written"
        )

    def overwrite_plan(self, slots: Tensor, plan: _native.Plan) -> None:
        self._store.overwrite(slots, plan, None)

    def prepare_overwrite(
        self, slots: Tensor, plan: _native.Plan, rows: Tensor, first: int | None
    ) -> Callable[[], None]:
        """As `LayoutRows.prepare_overwrite`; what is returned takes no memory. The rows may come until then.

        With `first=None` the rows carry no sequence.
        """
        return self._store.prepare_overwrite(slots, plan, rows, first, True).write

    def with_sequences(self) -> PackedRows:
        """A copy of the rows in private memory, with room for their own sequences."""
        layout, lanes = self.layout.with_sequence(), self.lanes
        wide = StoredLayout(layout)
        refuse_if_memory_is_short(StoreSpec(layout, lanes.store.lanes, lanes.store.lane_capacity, lanes.envs, False))
        moves = [(self.stored.offset(x), wide.offset(x), x.nbytes) for x in layout.leaves]
        store = self._store.widened(wide.row_bytes, wide.alignment, layout.to_bytes(), moves)
        return PackedRows(lanes.widened(store), layout, False, self.env_shape, self.ndim)

    def read(
        self,
        slots: Tensor,
        shape: tuple[int, ...] | None = None,
        extra: dict[str, Any] | None = None,
        sequences: bool = False,
    ) -> Rows:
        self.lanes.use()
        if extra and self.layout.within:
            lead = 1 if shape is None else len(shape)
            extra = {key: pytree.repeat_per_step(value, lead, self.layout.within) for key, value in extra.items()}
        if self._fast:
            rows: Rows = _new_tuple(Rows, self._gather(self._codec, slots, shape, extra, self.mapped, sequences))
            return rows
        return self._read_form(slots, (len(slots),) if shape is None else shape, extra, sequences)

    def read_packed(self, slots: Tensor, by_leaf: bool = False, sequences: bool = False) -> Rows:
        """As `read`, without taking rows apart: `batch` is a list of one tensor, uint8 [n, payload_bytes].

        With `by_leaf` a list with the bytes of each leaf, uint8 [n, nbytes].
        """
        self.lanes.use()
        codec = self.layout.raw_leaf_codec if by_leaf else self.layout.raw_codec
        return Rows(*self._gather(codec, slots, None, None, self.mapped, sequences))

    def same_rows(self, other: PackedRows) -> bool:
        """Whether rows of both can be read into one batch."""
        return self._fast and (other is self or (other.layout.plain and other.stored_key == self.stored_key))

    def read_many(
        self,
        others: list[PackedRows],
        slots: Tensor,
        shape: tuple[int, ...],
        extra: dict[str, Any] | None,
        sequences: bool,
        parts: list[dict[str, Any] | None] | None,
    ) -> JoinedRows:
        """As `read`, of these and others of the same form (`same_rows`)."""
        members = [self, *others]
        for member in members:
            member.lanes.use()
        if within := self.layout.within:
            extra = (
                None if extra is None else {k: pytree.repeat_per_step(v, len(shape), within) for k, v in extra.items()}
            )
            parts = parts and [
                one and {k: pytree.repeat_per_step(v, 1, within) for k, v in one.items()} for one in parts
            ]
        stores = [member.lanes.store for member in members]
        mapped = any(member.mapped for member in members)
        return JoinedRows(*_native.gather_many(stores, self._codec, slots, shape, extra, mapped, sequences, parts))

    def _read_form(self, slots: Tensor, shape: tuple[int, ...], extra: dict[str, Any] | None, sequences: bool) -> Rows:
        """As `read`, for forms of batches that the native core does not build."""
        leaves, *rest = self._gather(self._codec, slots, shape, None, self.mapped, sequences)
        batch = self.layout.build(leaves, shape)
        for key, value in (extra or {}).items():
            pytree.set_entry(batch, key, value)
        return Rows(batch, *rest)

    def read_leaves(self, slots: Tensor | np.ndarray[Any, Any], paths: tuple[pytree.KeyPath, ...]) -> Rows:
        """As `read_leaves` of a storage."""
        self.lanes.use()
        leaves = self._chosen_leaves.get(paths)
        if leaves is None:
            leaves = self._chosen_leaves[paths] = [self._leaf_number(path) for path in paths]
        return Rows(*self._store.gather_leaves(self._codec, slots, leaves, self.mapped))

    def read_n_steps(
        self,
        slots: Tensor | np.ndarray[Any, Any],
        discounts: np.ndarray[Any, Any],
        reward: pytree.KeyPath,
        done: pytree.KeyPath,
    ) -> tuple[Tensor, ...] | None:
        """As `read_n_steps` of a storage, in one native call; None: a slot holds no row, or rows were overwritten."""
        self.lanes.use()
        leaves = self._leaf_number(reward), self._leaf_number(done)
        return _native.read_n_steps(self._store, self._codec, slots, discounts, *leaves, self.mapped)

    def _leaf_number(self, path: pytree.KeyPath) -> int:
        try:
            return self._leaf_numbers[path]
        except KeyError:
            raise KeyError(f"the stored steps have no {pytree.format_key(path)}") from None

    def column(self, path: pytree.KeyPath, slots: Tensor) -> Tensor:
        envs = self._store.envs
        values: Tensor = self.read_leaves(to_tensor(expand_slots(slots, envs)), (path,)).batch[0]
        return values.reshape(len(slots), envs, *values.shape[1:]) if envs > 1 else values

    @property
    def _all_steps(self) -> range:
        return range(self._store.lanes * self._store.lane_capacity)

    def view(self, steps: range | None = None) -> Any:
        """As `TableRows.view`; a copy of all rows where they are only read: torch has no views of such memory."""
        if self._store.read_only and steps is not None:
            return None
        view, shape = self._merged_view(self._all_steps if steps is None else steps), self.env_shape
        if len(shape) > 1 or shape == (1,):
            merged = 1 if shape == (1,) else 2
            view = pytree.map_outermost(view, lambda part: part.reshape(len(part), *shape, *part.shape[merged:]))
        return pytree.clone(view) if self._store.read_only else view

    def _merged_view(self, steps: range) -> Any:
        """Live views of time slots: `[time, ...]`, or `[time, envs, ...]` with several environments."""
        s, start, stop = self._store, steps.start, steps.stop
        lead: tuple[int, ...] = (stop - start,)
        strides: tuple[int, ...] = (1,)
        if s.envs > 1:
            lead, strides = (*lead, s.envs), (*strides, s.lane_capacity)
        offset = s.rows_offset + start * s.row_stride
        return self.stored.views(s.memory(), offset, s.row_stride, lead, strides)

    def offset(self, path: pytree.KeyPath) -> int | None:
        """Where a leaf lies in the stored rows (bytes); None: there is none, or it lies beside or behind them."""
        leaf = next((leaf for leaf in self.layout.leaves if leaf.path == path), None)
        at = 0 if leaf is None else self.stored.offset(leaf)
        return None if leaf is None or at + leaf.nbytes > self._store.payload_bytes else at

    def bind(self, native: NativeCalls) -> None:
        if self._store.read_only:  # native calls validate what they read themselves
            native.bind_source(self)
            return
        push: Any = self.push
        if self.ndim > 1:
            push = functools.partial(_push_envs, self) if self.ndim == 2 else None
        native.bind(self, push)

    # ---- whole blocks, for checkpoints ----
    def block(self, lane: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        out = np.empty((self._store.envs, stop - start, self._store.payload_bytes), np.uint8)
        for at, rows in self._pieces(lane, start, stop):
            out[:, at] = rows
        return out

    def block_writer(self, bases: list[int]) -> Callable[[int, int, np.ndarray[Any, Any]], None]:
        return self.set_block

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


def _gathered(lanes: Lanes, store: _native.Store, *args: Any) -> Any:
    """As `Store.gather`, of a moment in which no other process changed rows in place."""
    return lanes.validated(lambda: store.gather(*args))


def _refuse(*args: Any) -> NoReturn:
    raise StorageError(READ_ONLY)


def _push_envs(rows: PackedRows, batch: Any, form: Form) -> Any:
    """As `PackedRows.push`, of steps of several environments."""
    slots: Any = rows.push(batch, form)
    if slots is None:
        return None
    slots = expand_slots(slots, rows.lanes.envs)
    return torch.stack(tuple(from_slots(slots, rows.env_shape)), -1)


def _own_sequences(store: _native.Store, offset: int, slots: Tensor) -> Tensor:
    """The sequences that the rows in these slots carry: int64 [n]. A store of one lane and one environment."""
    rows = store.memory()[store.rows_offset :][: store.lane_capacity * store.row_stride]
    own = rows.reshape(store.lane_capacity, store.row_stride)[:, offset : offset + SEQUENCE.nbytes][slots.numpy()]
    return torch.from_numpy(own.reshape(-1).view(np.int64))
