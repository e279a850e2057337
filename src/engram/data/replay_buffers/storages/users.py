"""Storages of users' own: rows around the methods of their classes.

A child of `Storage` defines our five methods (`check`, `append`, `overwrite`, `read`, `lanes`), or `get`, `set` and
`__len__` in TorchRL's form. A child of one of our storages may define some of the five, too (`overrides.py`). Which
ones is looked up when its class is made; each storage then has rows that call them, and no other class pays for that.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from tensordict import LazyStackedTensorDict
from torch import Tensor

from engram import pytree
from engram._copies import is_passing_fds
from engram.errors import StorageError
from engram.pytree import KeyPath, format_key, to_tensor
from engram.store.indexing import stored_generations, stored_slots
from engram.store.items import ItemRows
from engram.store.lanes import Lanes
from engram.store.layout import LeafSpec
from engram.store.places import NOT_SENT, NewTable, Place, TableSize, not_shared
from engram.store.rows import NO_STEPS, Checked, NoRows, Rows, TableRows, each_of_steps, expand_slots
from engram.store.steps import Steps
from engram.store.table import Table

# Each object has its own.
_NOT_COPIED = {
    *("mutex", "native", "access", "_attached", "_held_table", "_our_methods", "_saved_as", "_of_data"),
}
# What constructors of ours make again from their arguments.
_MADE_BY_ARGUMENTS = {
    *("_checkpointer", "_file", "scratch_dir", "device", "ndim", "stack_dim", "compression_level"),
}


def own_attributes(storage: Any) -> dict[str, Any]:
    """What a user, or a class of the user's, keeps in a storage of ours: copies have it as copies of any object do."""
    ours = _NOT_COPIED | _MADE_BY_ARGUMENTS
    return {name: value for name, value in vars(storage).items() if name not in ours}


def _without_parts(storage: UsersStorage, state: dict[str, Any]) -> dict[str, Any]:
    """What its class keeps, of the attributes of a storage."""
    parts = {name: part for name, part in vars(storage).items() if name in _NOT_COPIED}
    return {name: value for name, value in state.items() if name not in parts or value is not parts[name]}


_STEPS_AT_ONCE = 512  # of which whole rows are read for one leaf


class UsersStorage(Protocol):
    """A storage of a user's class, as a table around its methods calls it."""

    mutex: Any
    access: Any

    @property
    def lanes(self) -> Lanes: ...

    @property
    def env_shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...

    # ---- our methods ----
    def check(self, *args: Any) -> Checked: ...

    def append(self, *args: Any) -> Tensor | int: ...

    def replace(self, checked: Checked, rows: Tensor, slots: Tensor, /) -> None: ...

    def overwrite(self, *args: Any) -> None: ...

    def read(self, *args: Any) -> Rows: ...

    def from_slots(self, slots: Tensor, /) -> Any: ...

    # ---- TorchRL's ----
    def get(self, index: Any, /) -> Any: ...

    def set(self, index: Any, data: Any, /) -> None: ...

    def _empty(self) -> None: ...


class OfStorage:
    """A part of a storage that calls its methods. It does not keep the storage alive: there would be a cycle, and rows,
    locks and files of a storage that is dropped would wait for the garbage collector.
    """

    _ref: weakref.ref[UsersStorage]

    @property
    def _storage(self) -> UsersStorage:
        storage = self._ref()
        assert storage is not None
        return storage

    @_storage.setter
    def _storage(self, storage: UsersStorage) -> None:
        self._ref = weakref.ref(storage)


class UsersRows(OfStorage, TableRows):
    """Rows as the methods of a user's class give them: of a child of `Storage` itself, which defines our five.

    Also what our `get` and `set`, and a writer that keeps the best, see of a child of one of our storages that defines
    some of the five.

    Args:
        max_size: steps that fit, as the class says it; None: no limit.
        own: the names that the class defines.
        table: of the storage that the class is a child of; None: it is one of `Storage` itself.
    """

    def __init__(
        self, storage: UsersStorage, max_size: int | None, own: frozenset[str], table: Table | None = None
    ) -> None:
        self._storage, self.max_size, self._table = storage, max_size, table
        self.replaces_rows = "replace" in own
        if table is not None:
            # Where buffers write by `set`, or read by `get`, the child's other methods were called before these.
            if comes_first(type(storage), "set", {"check", "append"}):
                own -= {"check", "append"}
            if comes_first(type(storage), "get", {"read"}):
                own -= {"read"}
        self._own = own

    @property
    def ours(self) -> TableRows:
        """What our methods do, which the class does not define, or calls by `super()`."""
        return _Undefined(self, type(self._storage).__name__) if self._table is None else self._table.rows

    @property
    def counted(self) -> Any:
        """What a copy must know of the rows besides what the user's class keeps."""
        return None

    def take_counted(self, counted: Any) -> None:
        """In a copy: takes over what `counted` gave."""

    # ---- its five ----
    @property
    def lanes(self) -> Lanes:  # type: ignore[override]
        return self._storage.lanes

    @property
    def env_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self._storage.env_shape

    def fit(self, steps: Steps) -> Checked:
        return self._storage.check(*steps.arguments) if "check" in self._own else self.ours.fit(steps)

    def append(self, checked: Checked, most: int | None = None) -> Tensor | int:
        if "append" not in self._own:
            return self.ours.append(checked, most)
        return self._storage.append(checked) if most is None else self._storage.append(checked, most)

    def overwrite(self, slots: Tensor, steps: Steps) -> None:
        if "overwrite" in self._own:
            self._storage.overwrite(slots, steps.items, steps.index_key)
        else:
            self.ours.overwrite(slots, steps)

    def prepare_replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> Callable[[], None]:
        if "replace" in self._own:
            return functools.partial(self._storage.replace, checked, rows, slots)
        return self.ours.prepare_replace(checked, rows, slots)

    def is_single(self, items: Any, env_dims: int = 0) -> bool:
        path, value = pytree.describe(items, 0)[1][0]
        leaf = self.leaf(path)
        return leaf is not None and to_tensor(value).ndim == env_dims + len(leaf.shape)

    each = each_of_steps

    def read(self, slots: Tensor, *how: Any) -> Rows:
        return self._storage.read(slots, *how) if "read" in self._own else self.ours.read(slots, *how)

    # ---- made of the five ----
    def _first(self) -> Any:
        """The first row that is stored, as a batch; None: there is none."""
        lanes = self.lanes
        return self.read(stored_slots(lanes.store)[:1]).batch if len(lanes) else None

    @property
    def nbytes(self) -> int:
        return len(self.lanes) * self.row_bytes

    @property
    def row_bytes(self) -> int:
        first = self._first()
        values = [] if first is None else [to_tensor(value) for _, value in pytree.describe(first, 1)[1]]
        return sum(value.numel() * value.itemsize for value in values)

    def leaf(self, path: KeyPath) -> LeafSpec | None:
        first = self._first()
        value = None if first is None else pytree.get_entry(first, path)
        return None if value is None else LeafSpec(path, value.dtype, tuple(value.shape[1:]))

    def column(self, path: KeyPath, slots: Tensor) -> Tensor:
        def read(part: Tensor) -> Tensor:
            rows = to_tensor(expand_slots(part, math.prod(self.env_shape)))
            values = entry_of(self.read(rows).batch, path)
            return values.reshape(len(part), *self.env_shape, *values.shape[1:])

        return read_in_parts(read, slots)

    def view(self, steps: range | None = None) -> None:
        """None: there is none."""

    def take_mutex(self, mutex: Any) -> None:
        """Nothing: the lanes are the user's own, and perhaps not there yet."""

    def after_fork(self) -> None:
        """In a child: the user's lanes have the mutex of the storage there."""
        self.lanes.mutex = self._storage.mutex


class _Undefined(NoRows):
    """What our methods do in a storage that defines the five, which calls them by `super()`.

    What such a storage may leave out is made of its five.
    """

    def __init__(self, rows: UsersRows, name: str) -> None:
        super().__init__(Lanes.in_memory(rows.max_size), functools.partial(_is_undefined, name))
        self._rows = rows

    def leaf(self, path: KeyPath) -> LeafSpec | None:
        return self._rows.leaf(path)

    def column(self, path: KeyPath, slots: Tensor) -> Tensor:
        return self._rows.column(path, slots)

    def clear(self, reset_count: bool = True) -> None:
        self._rows.clear(reset_count)


def _is_undefined(storage: str, method: str) -> NotImplementedError:
    if method == "replace":
        return NotImplementedError(f"a {storage} has no `replace`, which writers need that keep the best")
    return NotImplementedError(
        f"Storage.{method} does nothing: a {storage} defines {method} itself, and its super() is only there in a "
        "child of LazyTensorStorage, ListStorage or another storage that has one"
    )


class GetSetRows(UsersRows):
    """The rows of a storage that defines `get`, `set` and `__len__` in TorchRL's form, of which the five are made."""

    env_shape = ()

    def __init__(self, storage: UsersStorage, max_size: int | None, own: frozenset[str]) -> None:
        super().__init__(storage, max_size, own - {"replace"})  # which would call this one by `super()`
        self.replaces_rows = "replace" in own
        self.collate = _collate_list
        self._mutex: Any = contextlib.nullcontext()

    @functools.cached_property
    def lanes(self) -> Lanes:  # type: ignore[override]
        lanes = Lanes.in_memory(self.max_size)
        lanes.mutex = self._mutex
        if len(self._storage):
            lanes.advance(len(self._storage))
        return lanes

    def take_mutex(self, mutex: Any) -> None:
        self._mutex = mutex
        if "lanes" in vars(self):
            self.lanes.mutex = mutex

    def after_fork(self) -> None:
        """Nothing: `take_mutex` has done it, where there are lanes."""

    # ---- writing ----
    def fit(self, steps: Steps) -> Checked:
        steps = steps._replace(items=pytree.clone(steps.items))
        n, single, index_key = count_steps(steps), steps.is_single, steps.index_key
        if not n:
            raise ValueError(NO_STEPS)
        items = steps.time_first()
        if index_key is not None:
            at = self.lanes.next_slots(n) if steps.own_index is None else steps.own_index
            if isinstance(items, list):
                items = [_with_index(item, index_key, slot, 0) for item, slot in zip(items, at, strict=True)]
            else:
                items = _with_index(items, index_key, at[0] if single else at, 0 if single else 1)
        return Checked(n, (items, single))

    def append(self, checked: Checked, most: int | None = None) -> Tensor:
        items, single = checked.data
        n = checked.steps if most is None else min(most, checked.steps)
        slots = self.lanes.next_slots(n)
        if single:
            self._storage.set(int(slots[0]), items)
        else:
            first = max(0, n - self.lanes.capacity)  # of a batch that is longer than the ring the last steps stay
            chosen = torch.zeros(checked.steps, dtype=torch.bool, device="cpu")
            chosen[first:n] = True
            self._storage.set(slots[first:], items if bool(chosen.all()) else pytree.select_rows(items, chosen))
        self.lanes.advance(n)
        return slots

    def overwrite(self, slots: Tensor, steps: Steps) -> None:
        lanes = self.lanes
        absent = slots[lanes.store.generations(slots) < 0]
        if len(absent):
            stored = len(self._storage)
            raise IndexError(f"index {int(absent[0])} has not been written; {stored} steps are stored")
        new = Steps(steps.items, index_key=steps.index_key, own_index=slots)
        n = count_steps(new)
        if n != len(slots):
            raise ValueError(f"{len(slots)} steps are indexed, the data have {n}; nothing was written")
        self._storage.set(slots, self.fit(new).data[0])
        lanes.store.note_edits(slots)

    def overwrite_one(self, slots: Tensor, steps: Steps) -> bool:
        new = steps._replace(lead=0, time=-1, own_index=slots)
        self._storage.set(int(slots[0]), self.fit(new).data[0])
        self.lanes.store.note_edits(slots)
        return True

    def is_single(self, items: Any, env_dims: int = 0) -> bool:
        stored = self._storage.get(int(stored_slots(self.lanes.store)[0]))
        return tuple(pytree.shape_of(first_leaf(items))) == tuple(np.shape(first_leaf(stored)))

    def as_batch(self, items: Any, time_dim: int) -> Any:
        return items

    # ---- reading ----
    def read(self, slots: Tensor, *how: Any) -> Rows:
        return read_by_get(self._storage, slots, *how)

    def leaf(self, path: KeyPath) -> LeafSpec | None:
        return leaf_as_read(self._storage, path)

    def column(self, path: KeyPath, slots: Tensor) -> Tensor:
        return read_in_parts(lambda part: entry_of(self._storage.get(part), path), slots)

    # ---- copies: what the user's class keeps is copied as it is, and beside it the counters ----
    @property
    def counted(self) -> Any:
        return (self.lanes.capacity, self.lanes.saved_states()[0]) if "lanes" in vars(self) else None

    def take_counted(self, counted: Any) -> None:
        if counted is None:
            return
        capacity, lane = counted
        self.lanes = lanes = Lanes.in_memory(capacity)
        lanes.mutex = self._mutex
        lanes.hold()  # as the writer of the copied rows: trajectories go on
        lanes.store.begin_restore()
        lanes.store.set_seams(
            0, lane["base"], lane["published"], [seam for seam in lane["seams"] if seam > lane["base"]]
        )
        lanes.restore_lane(0, lane, 0)
        lanes.store.end_restore()

    # ---- life ----
    def clear(self, reset_count: bool = True) -> None:
        if "_empty" not in self._own:
            kind = type(self._storage).__name__
            raise RuntimeError(f"a {kind} has no method _empty, which forgets all rows")
        self._storage._empty()
        self.lanes.store.empty(reset_count)


class UsersPlace(OfStorage, Place):
    """Rows that a class of the user's keeps in its storage."""

    def __init__(self, storage: UsersStorage, rows: UsersRows, size: TableSize) -> None:
        self._storage, self._rows, self._size = storage, rows, size

    def make(self, new: NewTable) -> NoReturn:
        raise StorageError("the rows of this storage are those that its class keeps")

    def keeps_rows(self) -> bool:
        return False

    def shared(self, made: bool, name: str) -> NoReturn:
        raise not_shared(name)

    def after_fork(self, made: bool) -> None:
        self._rows.after_fork()

    def arguments(self, size: TableSize, made: Lanes | None) -> None:
        """None: it is copied as any object."""

    # ---- copies: what the user's class keeps is copied as it is, and beside it the counters ----
    def copied_parts(self) -> tuple[type[UsersStorage], int | None, Any, Any]:
        """What a copy of a storage is made of whose class has a `__getstate__`: its class, size, counters and state."""
        storage: Any = self._storage
        state = storage.__getstate__()
        state = _without_parts(storage, state) if isinstance(state, dict) else state
        return type(storage), self._size.max_size, self._rows.counted, state

    def own_state(self) -> dict[str, Any] | None:
        if not isinstance(self._rows, GetSetRows):
            return None
        own = _without_parts(self._storage, vars(self._storage))
        return {**own, "_max_size": self._size.max_size, "_own_lanes": self._rows.counted}

    def check_sending(self) -> None:
        if isinstance(self._rows, GetSetRows):
            raise StorageError(f"Cannot share a storage of type {type(self._storage).__name__}, {NOT_SENT}")

    def sent_state(self, name: str) -> dict[str, Any] | None:
        if is_passing_fds():
            self.check_sending()
        with self._storage.mutex:  # the rows of one moment, whatever is written while they are pickled
            own = self.own_state()
            return None if own is None else copy.deepcopy(own, {id(self._storage): self._storage})

    def take_sent(self, state: dict[str, Any]) -> bool:
        kept = {name: value for name, value in state.items() if name not in ("_max_size", "_own_lanes")}
        self._size.max_size = self._rows.max_size = state.get("_max_size", self._size.max_size)
        vars(self._storage).update(kept)
        self._rows.take_counted(state.get("_own_lanes"))
        return True


class CountedSets:
    """A storage whose class has a `set` of its own, for a writer: what the writer sets counts as stored."""

    def __init__(self, storage: UsersStorage) -> None:
        self._given = storage

    def set(self, cursor: Any, data: Any, index_key: str | None = None, *, set_cursor: bool = True) -> None:
        storage = self._given
        slots, single = to_tensor(cursor, dtype=torch.int64).reshape(-1), np.ndim(cursor) == 0
        with storage.mutex:
            if torch.equal(slots, storage.access.table.lanes.next_slots(len(slots))):
                checked = storage.check(data, single, -1 if single else 0, index_key)
                if checked.steps != len(slots):
                    raise ValueError(
                        f"{len(slots)} steps are indexed, the data have {checked.steps}; nothing was written"
                    )
                storage.append(checked)
            else:
                storage.access.assign(cursor if single else slots, Steps(data, index_key=index_key))

    def __len__(self) -> int:
        return len(self._given)

    def __getitem__(self, index: Any) -> Any:
        return self._given[index]

    def __getattr__(self, name: str) -> Any:
        if name == "_given":  # while a copy is made
            raise AttributeError(name)
        return getattr(self._given, name)


def comes_first(kind: type, name: str, others: set[str]) -> bool:
    """Whether a user's class defines `name`, and neither that class nor a parent of it defines one of `others`.

    A child that adds one of these calls ours by `super()`, which calls `name`.
    """
    for parent in reversed(kind.__mro__):
        if parent.__module__.startswith("engram."):
            continue
        if others & vars(parent).keys():
            return False
        if name in vars(parent):
            return True
    return False


def read_by_get(
    storage: UsersStorage,
    slots: Tensor,
    shape: tuple[int, ...] | None = None,
    extra: dict[str, Any] | None = None,
    sequences: bool = False,
) -> Rows:
    """What the `get` of a user's class returns, as a `read` returns it: reshaped, with further entries."""
    with storage.mutex:
        counted = stored_generations(storage.lanes, slots)
        absent = torch.nonzero(counted < 0).reshape(-1).tolist()
        if absent:
            return Rows(None, absent=absent)
        batch = storage.get(storage.from_slots(slots))
        now = stored_generations(storage.lanes, slots)
        replaced = torch.nonzero(now != counted).reshape(-1).tolist()  # by other processes
    if replaced:
        return Rows(None, absent=replaced)
    numbers = counted if sequences else None
    if isinstance(batch, LazyStackedTensorDict) and isinstance(storage.access.table.rows, ItemRows):
        batch = batch.tensordicts  # of a child of LazyStackStorage
    if isinstance(batch, list):  # which a collate function makes a batch of
        return Rows(batch, sequences=numbers)
    if shape is not None:
        batch = pytree.map_outermost(batch, lambda part: part.reshape(*shape, *part.shape[1:]))
    if extra and pytree.has_keys(batch):
        batch = pytree.copy_containers(batch)
        for key, value in extra.items():
            pytree.set_per_item(batch, key, value, 1 if shape is None else len(shape))
    return Rows(batch, sequences=numbers)


def leaf_as_read(storage: UsersStorage, path: KeyPath) -> LeafSpec | None:
    """What a stored row has under a key, as the `get` or `read` of a user's class hands it out."""
    if not len(storage):
        return None
    value = _entry(storage.read(stored_slots(storage.lanes.store)[:1]).batch, path)
    return None if value is None else LeafSpec(path, value.dtype, tuple(value.shape[1:]))


def entry_of(batch: Any, path: KeyPath) -> Tensor:
    """One entry of a batch. KeyError: it has none, or not all items have it."""
    values = _entry(batch, path)
    if values is None:
        raise KeyError(f"the stored steps have no {format_key(path)}")
    return values


def _entry(batch: Any, path: KeyPath) -> Tensor | None:
    """One entry of a batch, or of each item of a list; None: not all have it."""
    if not isinstance(batch, list):
        value = pytree.get_entry(batch, path)
        return None if value is None else to_tensor(value)
    values = [pytree.get_entry(item, path) for item in batch]
    return None if any(value is None for value in values) else torch.stack([to_tensor(v) for v in values])


def _collate_list(batch: Any) -> Any:
    return pytree.collate_items(batch) if isinstance(batch, list) else batch


def _with_index(items: Any, key: str, index: Tensor, lead: int) -> Any:
    """Data with keys, and under one of them the index of each step; other data as they are."""
    if not pytree.has_keys(items):
        return items
    items = items.copy()
    pytree.set_per_item(items, key, index, lead)
    return items


def count_steps(steps: Steps) -> int:
    """How many time steps they are; of a list its items."""
    items = steps.items
    if steps.is_single or isinstance(items, list):
        return 1 if steps.is_single else len(items)
    shape = pytree.shape_of(first_leaf(items)) if not hasattr(items, "shape") else items.shape
    if len(shape) <= steps.time:
        raise ValueError("extend takes a batch, found a single step; use add. Nothing was written")
    return int(shape[steps.time])


def first_leaf(items: Any) -> Any:
    """The first leaf of data; None where they have none."""
    leaves = pytree.describe(items, 0)[1]
    return leaves[0][1] if leaves else None


def read_in_parts(read: Callable[[Tensor], Tensor], slots: Tensor) -> Tensor:
    """One leaf of the steps at time slots, by a function that reads whole rows for it: few of them at a time."""
    parts = [read(part) for part in torch.split(slots, _STEPS_AT_ONCE)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
