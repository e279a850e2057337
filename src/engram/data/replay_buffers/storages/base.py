"""The interface of storages: rows are checked, appended, read and replaced; and what every storage does with that."""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
import inspect
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from engram import _native, pytree
from engram._system import fork_registry
from engram._text import warn_user
from engram.checkpoint.foreign import open_saved
from engram.checkpoint.snapshot import save_snapshot
from engram.data.replay_buffers.state.items import SavedSteps
from engram.data.replay_buffers.state.plans import SavedStorage
from engram.data.replay_buffers.storages.overrides import (
    Checked,
    count_steps,
    first_leaf,
    route_to_overrides,
    rows_of,
)
from engram.errors import StorageError
from engram.pytree import KeyPath, format_key, get_entry
from engram.store.copies import MadeFromParts
from engram.store.files import is_passing_fds, pickle_by_state
from engram.store.indexing import (
    MissingRowError,
    Selection,
    from_slots,
    look_again,
    select,
    stored_slots,
    to_slots,
    unwritten,
)
from engram.store.lanes import Lanes, warn_of_copy
from engram.store.layout import LeafSpec, RowLayout
from engram.store.tables import Rows, RowTable, expand_slots

_MAX_SIZE = 1 << 56

_T = TypeVar("_T")


class NativeRows(NamedTuple):
    """What native calls may do with a storage's rows past its methods."""

    #: What whole batches are read from.
    source: _native.RowSource | None = None
    #: Checks and appends plain data in one call, as `RowTable.push`; returns the index as `add` and `extend` do.
    push: Callable[[Any, int, int, str | None], Any] | None = None
    #: Rows that may be read together with those of other tables.
    table: RowTable | None = None


NO_NATIVE_ROWS = NativeRows()


class ItemReader(Protocol):
    """Reads items, which are stored one by one, for batches."""

    def read_batch(self, slots: Tensor, extra: dict[str, Any] | None, sequences: bool) -> Rows:
        """As `Storage.read`: a list of items, perhaps the stored ones, or a new batch with the entries of `extra`."""

    def read_own(self, slots: Tensor, sequences: bool, reuse: bool) -> Rows:
        """As `Storage.read`, a list of items that the caller may change.

        With `reuse` small ones may have tensors of earlier ones that nobody has any more (`why_not_reusable`).
        """


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("engram.")


class StorageUser:
    """A buffer, as the storages know it that it attaches itself to."""

    def after_load(self) -> None:
        """Called after its storage alone was loaded, before other rows are written."""

    def after_fork(self) -> None:
        """Called in a forked child, before the storage is used there."""


class Storage(MadeFromParts, abc.ABC):
    """Holds rows.

    Samplers read `lanes` to learn which rows exist, and `read` them; writers hand a `check`ed batch to `append` or
    `overwrite`.

    A storage of your own defines `lanes`, `check`, `append`, `overwrite` and `read`; it may also define `replace` (for
    writers that keep the best), `leaf` and `column` (faster than reading whole rows), `empty` and `nbytes`.
    `engram.testing.StorageContract` tests it.

    Or it defines `get(index)`, `set(index, data)` and `__len__` in TorchRL's form, and `_empty()` for buffers that are
    emptied: `index` is an int, or a tensor of slots, for which `get` returns a batch or a list of items. Whoever reads
    it while it is written must see whole rows; the buffer holds a lock meanwhile.
    """

    #: Batch dimensions of the data; the last one is time.
    ndim: int = 1
    #: Whether this process only reads the rows, which another one writes.
    read_only = False

    #: Whether `update_if_present` of a buffer can write over its rows.
    supports_conditional_update: ClassVar[bool] = True

    # Whether a list that is written stays one.
    _takes_lists: ClassVar[bool] = False
    # What makes a batch of what was read, where the buffer does not say it.
    _default_collate: ClassVar[Any] = None
    # Whether what is `set` now are new rows (`_setting_new_rows`).
    _sets_new_rows = False
    #: What native calls may do with the rows past the methods of this class, now.
    native: NativeRows = NO_NATIVE_ROWS
    # Whether it has a `replace`, which writes rows out of turn.
    _replaces_rows: ClassVar[bool] = True
    # Methods that a child of the user's, of this class or one of its kind, has of its own.
    _overrides: ClassVar[frozenset[str]] = frozenset()
    # Where each row stores its own index, in a `set` that a child overrides (`overrides.py`).
    _index_key: str | None = None
    # Whether its buffer's batches carry an index, so that rows must have a place for it where a writer stores it.
    _requires_index = False
    # Whether its steps can be saved as items, one by one (`StepsAsItems`).

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        pickle_by_state(cls)
        ours = next(kind for kind in cls.__mro__ if _is_ours(kind))
        cls._overrides = own = frozenset(name for kind in cls.__mro__[: cls.__mro__.index(ours)] for name in vars(kind))
        if ours is Storage:
            cls._replaces_rows = "replace" in own
            if own >= {"get", "set"} and "append" not in own:
                for name in _FROM_GET_AND_SET:
                    if name not in own:
                        setattr(cls, name, vars(_GetSetStorage)[name])
        elif ours is not cls:
            route_to_overrides(cls)

    def __init__(self, max_size: int | None, checkpointer: Any = None, compilable: bool = False) -> None:
        if max_size is not None and (
            isinstance(max_size, bool) or not hasattr(max_size, "__index__") or not 0 < int(max_size) <= _MAX_SIZE
        ):
            raise ValueError(f"max_size must be an integer from 1 to 2**56, got {max_size!r}")
        self._max_size = None if max_size is None else int(max_size)
        self._checkpointer: Any = None
        self.checkpointer = checkpointer
        # Raised before and after all rows are replaced (`empty`, `loads`), so odd meanwhile: rows that were drawn
        # under another value are not read.
        self._incarnation = 0
        self._attached: weakref.WeakSet[StorageUser] = weakref.WeakSet()
        #: Held by writers, and by readers that need the rows not to change.
        self.mutex = threading.RLock()
        self._forked_from = 0  # the process that had this storage, without rows, when it forked this one
        _live.add(self)

    # ---- facts ----
    @property
    def initialized(self) -> bool:
        """Whether it has a place for rows: it was written to, or made around tensors."""
        return self.lanes is not None

    @property
    def max_size(self) -> int | None:
        """The number of steps that fit; None: no limit."""
        return self._max_size

    @property
    @abc.abstractmethod
    def lanes(self) -> Lanes | None:
        """Counters of the stored rows (`Lanes.in_memory` makes some); None before the first write."""

    @property
    def layout(self) -> RowLayout | None:
        """Keys, shapes and dtypes of a stored step; None before the first write, and where steps may differ."""
        return None

    @property
    def env_shape(self) -> tuple[int, ...]:
        """The shape of the environments: `()` with ndim=1, `(envs,)` with ndim=2."""
        return ()

    @property
    def shape(self) -> torch.Size:
        """The stored time steps, and with ndim=2 the environments of each."""
        return torch.Size((len(self) // math.prod(self.env_shape), *self.env_shape))

    def __contains__(self, index: Any) -> bool:
        """Whether every step that an index means is stored."""
        lanes = self.lanes
        if lanes is None:
            return False
        try:
            self._beside_writers(functools.partial(self._check_stored, index))
        except IndexError:
            return False
        return True

    def contains(self, item: Any) -> bool | Tensor:
        """Whether the steps of an index are stored, all of them; of a tensor, for each index in it: a bool tensor.

        With ndim=2 the last dimension of a tensor is (time, environment).

        Example:
            >>> storage = LazyTensorStorage(10)
            >>> storage.set(range(5), torch.arange(5))
            >>> storage.contains(7), storage.contains(torch.tensor([3, 7]))
            (False, tensor([ True, False]))
        """
        if not isinstance(item, Tensor):
            return item in self
        if self.ndim > 1:
            each = [tuple(step) in self for step in item.reshape(-1, self.ndim).tolist()]
            return torch.tensor(each, dtype=torch.bool).reshape(item.shape[:-1])
        lanes = self.lanes
        if lanes is None:
            return torch.zeros(item.shape, dtype=torch.bool)
        in_room = (item >= 0) & (item < lanes.capacity)
        slots = torch.where(in_room, item, 0).to("cpu", torch.int64)
        stored = (lanes.store.generations(slots.reshape(-1)) >= 0).reshape(item.shape).to(item.device)
        return torch.where(item < 0, item >= -len(self), in_room & stored)

    def _check_stored(self, index: Any) -> None:
        """An IndexError where an index means a step that is not stored."""
        lanes = self.lanes
        assert lanes is not None
        slots = select(lanes.store, index, self.env_shape).slots
        if outside := slots[slots >= lanes.capacity].tolist():
            raise unwritten(lanes.store, outside[0], IndexError)
        if missing := slots[lanes.store.generations(slots) < 0].tolist():
            raise unwritten(lanes.store, missing[0])

    def flatten(self) -> Storage:
        """This storage, where it has one dimension; else a new one of one dimension with copies of all rows."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the storage, used or not; 0 before the first write."""
        return len(self) * self._bytes_per_row()

    @property
    def _storage(self) -> Any:
        """The stored data; a live view where the storage has one."""
        return self.get(slice(None)) if len(self) else None

    @property
    def _item_shape(self) -> tuple[int, ...]:
        """Batch dimensions of a stored item: `()` of steps, `(T,)` of whole trajectories of T steps."""
        return ()

    @property
    def _is_full(self) -> bool:
        return self._settled(lambda: self.lanes is not None and self.lanes.is_full)

    def __len__(self) -> int:
        """Stored steps of all writers; with `lanes=n` at most `max_size / n` of each."""
        return self._settled(self._count)

    def _count(self) -> int:
        lanes = self.lanes
        if lanes is None:
            self._warn_of_copy()
            return 0
        return len(lanes)

    def _warn_of_copy(self) -> None:
        """Warns where this process was forked before the first write, so that there was nothing to share."""
        parent, self._forked_from = self._forked_from, 0
        warn_of_copy(parent)

    @property
    def write_count(self) -> int:
        """Steps ever written."""
        return self._settled(lambda: 0 if self.lanes is None else self.lanes.write_count)

    def _bytes_per_row(self) -> int:
        """Bytes that a stored row takes in a batch; 0 before the first write."""
        if self.lanes is None or not len(self):
            return 0
        rows = self.read(stored_slots(self.lanes.store)[:1]).batch
        values = [torch.as_tensor(value) for _, value in pytree.describe(rows, 1)[1]]
        return sum(value.numel() * value.itemsize for value in values)

    # ---- writing: check, then append or overwrite ----
    @abc.abstractmethod
    def check(
        self,
        items: Any,
        single: bool,
        time_dim: int = 0,
        index_key: str | None = None,
        index: Tensor | None = None,
    ) -> Checked:
        """Checks a batch (or one step, `single`) leaf by leaf; nothing is written. The first call makes the storage.

        `time_dim` is the batch dimension of time. With `index_key` each row also stores its own index there: `index`
        (int64 [steps]), or the one that `append` will give it.

        Raises:
            ValueError, TypeError: the batch does not fit; the message names the leaf.
            StorageError: the storage cannot be made.
        """

    @abc.abstractmethod
    def append(self, checked: Checked, most: int | None = None) -> Tensor | int:
        """Writes behind the newest row; returns slots, int64 [steps * envs] in the order of time.

        With `most`, only so many of the first steps. Of one step without batch dimensions it may return the slot as a
        number.
        """

    def replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> None:
        """Writes rows (int64 [n]) of a checked batch over stored ones; the caller uses the storage exclusively.

        Each gets a sequence of its own (`lanes.reserve_sequences`), which `lanes.own_sequences` returns.
        """
        raise NotImplementedError(f"a {type(self).__name__} has no `replace`, which writers need that keep the best")

    def _prepare_replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> Callable[[], None]:
        """As `replace`, in two steps: what may fail for want of memory is done here, what is returned writes."""
        return functools.partial(self.replace, checked, rows, slots)

    def _expect_sequences(self, by_set: bool = False) -> None:
        """Called for a writer that replaces rows out of turn (`by_set`: by `set`): every row then carries its sequence.

        Raises:
            TypeError: this storage does not let the writer do that.
        """

    def _carry_sequences(self) -> None:
        """Before the first row is written over another one out of turn: makes room for the sequences of rows.

        Raises:
            StorageError: the rows have none, and their layout cannot be changed.
        """

    @abc.abstractmethod
    def overwrite(self, slots: Tensor, items: Any, index_key: str | None = None) -> None:
        """Writes items over stored rows, one for each slot (int64 [n]); the caller uses the storage exclusively.

        With `index_key` each of them stores its own index there.

        Raises:
            IndexError: a slot holds no row.
            ValueError, TypeError: the items do not fit; nothing was written.
        """

    # ---- reading ----
    @abc.abstractmethod
    def read(
        self,
        slots: Tensor,
        shape: tuple[int, ...] | None = None,
        extra: dict[str, Any] | None = None,
        sequences: bool = False,
    ) -> Rows:
        """Copies the rows of slots (int64 [n]) out.

        Args:
            shape: batch dimensions with n elements; `[n]` if None.
            extra: entries to add at the root of the batch.
            sequences: also return each row's sequence.
        """

    @property
    def item_reader(self) -> ItemReader | None:
        """What reads items for batches; None: `read` does, which gives a batch."""
        return None

    def leaf(self, path: KeyPath) -> LeafSpec | None:
        """Dtype and shape of one leaf of a stored step; None: steps have no such leaf."""
        if not len(self) or self.lanes is None:
            return None
        value = get_entry(self.read(stored_slots(self.lanes.store)[:1]).batch, path)
        return None if value is None else LeafSpec(path, value.dtype, tuple(value.shape[1:]))

    def column(self, path: KeyPath, slots: Tensor) -> Tensor:
        """One leaf of the steps at these time slots: [n, *envs, ...]. The caller holds the storage's mutex."""
        rows = torch.as_tensor(expand_slots(slots, math.prod(self.env_shape)))
        values = get_entry(self.read(rows).batch, path)
        if values is None:
            raise KeyError(f"the stored steps have no {format_key(path)}")
        column: Tensor = values.reshape(len(slots), *self.env_shape, *values.shape[1:])
        return column

    def _validated(self, read: Callable[[], _T], errors_only: bool = False) -> _T:
        """What `read` returns, of a moment in which no other process changed stored rows in place.

        With `errors_only` just an error must be of one moment.
        """
        return read()

    def get(self, index: Any) -> Any:
        """The rows at an index, copied.

        Raises:
            IndexError: a step that has not been written.
        """
        for _ in range(100):
            rows = self._beside_writers(functools.partial(self._read_stored, index))
            if rows.overwritten is None:
                return rows.batch
        raise RuntimeError("other processes overwrite these rows faster than they can be copied; read fewer at a time")

    def _read_stored(self, index: Any) -> Rows:
        """The rows at an index; MissingRowError where one of them is not stored now."""
        with self.mutex:  # no row may be replaced between the look at the counters and the copy
            lanes = self.lanes
            if lanes is None:
                raise IndexError(f"index {index!r:.80}: nothing has been written to this storage yet")
            selection = select(lanes.store, index, self.env_shape)
            rows = self._read_selection(selection)
        if rows.absent is not None:
            raise unwritten(lanes.store, int(selection.slots[rows.absent[0]]))
        return rows

    def _beside_writers(self, look: Callable[[], _T]) -> _T:
        """What `look` returns, which is called again while other processes overwrite rows that it misses.

        Raises:
            MissingRowError: a row is missing for another reason.
        """
        try:
            return look()
        except MissingRowError:
            if self.lanes is None:
                raise
            return look_again(self.lanes.store, look)

    def _read_selection(self, selection: Selection) -> Rows:
        return self._read_rows(selection.slots, selection.shape)

    def _read_rows(self, slots: Tensor, shape: tuple[int, ...] | None = None) -> Rows:
        """Reads in a `get`, which no `read` made of that `get` may call again."""
        return self.read(slots, shape)

    def set(self, cursor: Any, data: Any, index_key: str | None = None, *, set_cursor: bool = True) -> None:
        """Writes at an index: replaces rows that are stored, and appends at those that follow directly on them.

        Args:
            cursor: an int, or a range, list or tensor of ints: time steps. A slice of as many steps as the data have is
                such a range, too. Any other index means stored rows.
            data: a batch with a row for each, or one row for all. For storages of items also any sequence of these.
            index_key: each row also stores its own index there.
            set_cursor: without effect: rows that are stored count.

        Raises:
            IndexError: an index that has not been written and does not follow directly on what is stored.
            ValueError, TypeError: the data do not fit; the message names the leaf. Nothing is changed.
            StorageInUseError: stored rows would be replaced, and another process has the storage open.

        Example:
            >>> storage = LazyTensorStorage(10)
            >>> storage.set(range(3), torch.tensor([0.0, 1.0, 2.0]))
            >>> storage.set([2, 3], torch.tensor([20.0, 30.0]))
            >>> len(storage), storage[:]
            (4, tensor([ 0.,  1., 20., 30.]))
        """
        with self.mutex:
            index_key = self._index_key if index_key is None else index_key
            index = self._as_new_steps(cursor, data) if isinstance(cursor, slice) else cursor
            steps = _listed_steps(index)
            if steps is None:
                self._replace_stored(index, data, index_key)
                return
            stored = self._are_stored(steps)
            if self._sets_new_rows and torch.equal(steps, self._next_steps(len(steps))):
                stored[:] = False  # round the ring: the newest rows take the place of the oldest
            lanes = self.lanes
            # A new row can take the place of any stored one where that gets a sequence of its own.
            as_new = self._sets_new_rows and self._replaces_rows and self.ndim == 1
            as_new = as_new and lanes is not None and lanes.store.lanes == 1
            if bool(stored.all()) and not as_new:
                self._replace_stored(index, data, index_key)
                return
            rows = self._rows_for(index, len(steps), data)
            new = steps[~stored]
            following = self._next_steps(len(new))
            if not torch.equal(new, following):
                raise IndexError(
                    f"index {new[new != following][0]} has not been written, and does not follow directly on the "
                    f"{len(self)} stored steps: the next is {following[0]}. Nothing was written"
                )
            self._set_and_append(steps, stored, rows, index_key, as_new=as_new)

    def _as_new_steps(self, index: slice, items: Any) -> slice | range:
        """A slice as a range of time steps where it has as many of these as the data, and not all are stored."""
        start, stop = index.start or 0, self.max_size if index.stop is None else index.stop
        if type(start) is not int or type(stop) is not int or index.step not in (None, 1):
            return index
        if not 0 <= start < stop or stop - start != _length(items):
            return index
        is_single = not isinstance(items, list) and self.lanes is not None and len(self) and self._is_single(items)
        if is_single or (self.max_size is not None and stop > self.max_size):
            return index
        steps = range(start, stop)
        return index if bool(self._are_stored(torch.tensor(steps)).all()) else steps

    def _set_and_append(self, steps: Tensor, stored: Tensor, rows: Any, index_key: str | None, *, as_new: bool) -> None:
        """Replaces the rows of those steps that are stored, and appends those of the others."""
        replaces, appends = bool(stored.any()), not bool(stored.all())
        if appends:
            checked = self._check_rows(pytree.select_rows(rows, ~stored) if replaces else rows, index_key)
            if checked.steps != len(steps) - int(stored.sum()):
                raise ValueError(f"{len(steps)} steps are indexed, the data have others; nothing was written")
        if replaces:
            replaced = pytree.select_rows(rows, stored) if appends else rows
            put = self._replace_by_new if as_new else self._replace_stored
            put(steps[stored], replaced, index_key)
        if appends:
            self._append_rows(checked)

    def _check_rows(self, items: Any, index_key: str | None, index: Tensor | None = None) -> Checked:
        """Checks in a `set`, as `_append_rows` appends."""
        return self.check(items, False, 0, index_key, index)

    def _append_rows(self, checked: Checked) -> None:
        """Appends in a `set`, which no `append` made of that `set` may call again."""
        self.append(checked)

    def _rows_for(self, index: Any, n: int, items: Any) -> Any:
        """Data for n steps as a batch: one row is repeated, a list becomes a batch where rows have one layout."""
        if np.ndim(index) == 0 and not isinstance(index, range):
            if self.item_reader is not None:
                return [items]
            return pytree.expand(items, 1) if self.lanes is None or self._is_single(items, self.ndim - 1) else items
        if type(items) is list and not self._takes_lists:
            return pytree.stack(items, 0)
        return pytree.expand(items, n) if self.lanes is not None and self._is_single(items) else items

    def _next_steps(self, n: int) -> Tensor:
        """The time steps that the next n rows of this process go to: int64 [n]."""
        if self.lanes is not None:
            return self.lanes.next_slots(n)
        return torch.arange(n) if self.max_size is None else torch.arange(n) % self.max_size

    def _are_stored(self, steps: Tensor) -> Tensor:
        """Which of these time steps hold rows: bool [n]. IndexError: one lies outside the storage."""
        lanes = self.lanes
        if lanes is None:
            return torch.zeros(len(steps), dtype=torch.bool)
        room = lanes.capacity // lanes.envs
        if bool((steps >= room).any()):
            raise IndexError(
                f"index {int(steps.max())} has not been written, and lies outside the {room} steps that the storage "
                "has room for; nothing was written"
            )
        return lanes.store.generations(steps * lanes.envs) >= 0

    def _assign(self, index: Any, items: Any, index_key: str | None) -> None:
        """Replaces stored rows for `rb[index] = items`."""
        self._replace_stored(index, items, index_key)

    def _replace_stored(self, index: Any, items: Any, index_key: str | None = None) -> None:
        """Replaces stored rows in place: they are the same steps with other values."""
        if self.lanes is None:
            raise IndexError(f"index {index!r} has not been written: the storage is empty; extend it first")
        with self.lanes.exclusive("changing stored rows"):
            self._set(select(self.lanes.store, index, self.env_shape), items, index_key)

    def _replace_by_new(self, slots: Tensor, items: Any, index_key: str | None) -> None:
        """Puts new rows in the place of stored ones: each gets a sequence of its own."""
        if len(set(slots.tolist())) != len(slots):
            raise ValueError("an index names a step twice; nothing was written")
        self._carry_sequences()
        checked = self._check_rows(items, index_key, slots)
        if checked.steps != len(slots):
            raise ValueError(f"{len(slots)} steps are indexed, the data have {checked.steps}; nothing was written")
        with self._exclusive("replacing rows"):
            assert self.lanes is not None
            self._prepare_replace(checked, torch.arange(len(slots)), slots)()
            self.lanes.store.count_replaced(slots)

    @contextlib.contextmanager
    def _setting_new_rows(self) -> Iterator[None]:
        """Inside, in this thread, `set` writes new rows: also those that take the place of others."""
        with self.mutex:
            before, self._sets_new_rows = self._sets_new_rows, True
            try:
                yield
            finally:
                self._sets_new_rows = before

    def _for_own_writers(self) -> Any:
        """What a writer of a user's own calls `set` of."""
        return self

    def _set(self, selection: Selection, items: Any, index_key: str | None) -> None:
        if len(set(selection.slots.tolist())) != len(selection.slots):
            raise ValueError("an index names a step twice; nothing was written")
        if self._is_single(items):
            items = pytree.expand(items, len(selection.slots))
        elif len(selection.shape) > 1:
            items = pytree.flatten_dims(items, 0, len(selection.shape) - 1)
        self.overwrite(selection.slots, items, index_key)

    def _is_single(self, items: Any, env_dims: int = 0) -> bool:
        """Whether the data are one step, to be written at every index; with `env_dims` one of all environments."""
        path, value = pytree.describe(items, 0)[1][0]
        leaf = self.leaf(path)
        return leaf is not None and torch.as_tensor(value).ndim == env_dims + len(leaf.shape)

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    def __setitem__(self, index: Any, items: Any) -> None:
        self.set(index, items)

    def _generations_of(self, index: Any) -> Tensor:
        """The sequence of the row in each place, int64 in the shape of the index; -1: there is none."""
        slots = to_slots(index, self.env_shape, self.max_size or 0)
        return self._generations(slots).reshape(_shape_of(index, len(self.env_shape)))

    def _generations(self, slots: Tensor) -> Tensor:
        """The sequence of the row in each slot (int64 [n]); -1 where there is none, as for slot -1, which writers give
        to what they refuse.
        """
        lanes = self.lanes
        if lanes is None:
            return torch.full_like(slots, -1)
        return torch.where(slots < 0, -1, lanes.generations(slots.clamp(min=0)))

    def from_slots(self, slots: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Slots as users see them: int64 [n], with ndim=2 a tuple (time, env) of such."""
        return from_slots(slots, self.env_shape)

    def _index_of(self, slots: Any, single: bool) -> Any:
        """Slots as `add` (`single`) and `extend` return them."""
        if self.ndim > 1:
            # Before the first write a storage does not know its environments; there is nothing to point at, either.
            if not len(slots):
                return slots.new_empty(0, self.ndim)
            return torch.stack(tuple(self.from_slots(slots)), -1)
        if not single:
            return slots
        return slots if type(slots) is int else int(slots[0])

    # ---- life ----
    def empty(self, reset_count: bool = True) -> None:
        """Forgets every row; the cursor is 0.

        Raises:
            StorageInUseError: another process has the storage open.
        """
        with self._replacing("empty"):
            if self.lanes is not None:
                self.lanes.store.empty(reset_count)

    def attach(self, buffer: Any) -> None:
        """Notes that a buffer uses this storage."""
        if isinstance(buffer, StorageUser):  # another library's has nothing to do then
            self._attached.add(buffer)

    def flush(self) -> None:
        """Makes the rows appended so far survive a power cut, where the storage outlives its processes."""

    def release(self) -> None:
        """Gives this process's lane back, for another process to take."""
        if self.lanes is not None:
            self.lanes.release()

    def mark_seam(self) -> None:
        """Begins a trajectory at the next row that this process writes, whatever its id and flags are."""
        if self.lanes is not None:
            self.lanes.mark_seam()

    def close(self) -> None:
        """Ends the use of the storage by this object."""
        self.release()

    def _turn(self) -> AbstractContextManager[None]:
        """A block in which no other process appends where this one does; the caller holds the mutex.

        Before the first write there is nothing to take turns in.

        Raises:
            StorageInUseError: another process has been appending for ten seconds; the message names it.
        """
        return contextlib.nullcontext()

    def _exclusive(self, operation: str) -> AbstractContextManager[None]:
        """A block that no other user of the storage runs beside.

        Raises:
            StorageInUseError: another process has the storage open; `operation` is named in the message.
        """
        return self.mutex if self.lanes is None else self.lanes.exclusive(operation)  # type: ignore[return-value]

    @contextlib.contextmanager
    def _replacing(self, operation: str) -> Iterator[None]:
        """As `_exclusive`, around a replacement of all rows: readers see the rows of before or those of the end."""
        with self._exclusive(operation):
            if self._incarnation % 2:  # inside of another such block, whose end is the end
                yield
                return
            self._incarnation += 1
            try:
                yield
            finally:
                self._incarnation += 1

    def _settled(self, look: Callable[[], _T]) -> _T:
        """What `look` returns, outside of a replacement of all rows: waits for its end where one is under way."""
        before = self._incarnation
        result = look()
        if before == self._incarnation and not before % 2:
            return result
        with self.mutex:
            return look()

    def _limit(self, max_size: int) -> None:
        """Gives an empty storage without limit a size."""
        raise ValueError(f"capacity={max_size}, but the storage has max_size={self.max_size}; give one of them")

    def _share(self) -> None:
        """Lets other processes see and write the rows; a ValueError where they cannot."""
        raise ValueError(
            f"shared=True needs LazyTensorStorage or LazyMemmapStorage, whose rows processes can share, "
            f"not {type(self).__name__}"
        )

    # ---- saving ----
    @property
    def saved_form(self) -> SavedStorage:
        """This storage, as it is saved and loaded."""
        return SavedSteps(self)

    @property
    def checkpointer(self) -> Any:
        """Encodes this storage for disk; may be assigned. TypeError: it saves another kind of storage."""
        if self._checkpointer is None:
            self._checkpointer = self._default_checkpointer()
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, checkpointer: Any) -> None:
        needs = getattr(checkpointer, "needs", None)
        if needs is not None and not self.saved_form.hands_out(needs):
            raise TypeError(
                f"a {type(checkpointer).__name__} cannot save a {type(self).__name__}, which hands out no {needs}; use "
                f"a {type(self._default_checkpointer()).__name__}"
            )
        self._checkpointer = checkpointer

    def _default_checkpointer(self) -> Any:
        from engram.data.replay_buffers.checkpointers.objects import ListStorageCheckpointer

        return ListStorageCheckpointer()

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Adds a callable that storages' checkpointers apply to what is saved."""
        self.checkpointer.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Adds a callable that storages' checkpointers apply to what is loaded."""
        self.checkpointer.register_load_hook(hook)

    def dumps(self, path: str | os.PathLike[str], *, keep_last: int = 1, checkpointer: Any = None) -> str:
        """Saves this storage alone, by its own checkpointer if no other is given; returns the name of the snapshot."""
        with self._saved_by(checkpointer):
            source = self.saved_form.source(background=False)
            return save_snapshot(path, {}, (self.checkpointer, source), keep_last=keep_last)

    def loads(self, path: str | os.PathLike[str], *, snapshot: str | None = None, checkpointer: Any = None) -> None:
        """Replaces everything by what was saved, as `dumps` did it; errors as `ReplayBuffer.loads`."""
        with open_saved(path, snapshot) as saved, self._exclusive("loads"), self._saved_by(checkpointer):
            plan = self.saved_form.plan_load(saved)
            with self._replacing("loads"):
                plan.run()
        self._tell_of_load()

    dump = save = dumps
    load = loads

    @contextlib.contextmanager
    def _saved_by(self, checkpointer: Any) -> Iterator[None]:
        """A block of one thread in which this checkpointer stands for the storage's own; None: its own."""
        with self.mutex:
            if checkpointer is None:
                yield
                return
            own, self.checkpointer = self._checkpointer, checkpointer
            try:
                yield
            finally:
                self._checkpointer = own

    def state_dict(self) -> dict[str, Any]:
        """Rows and counters in memory."""
        with self.mutex:
            return self.saved_form.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces everything by what `state_dict` gave; a ValueError where it does not fit."""
        self.saved_form.check(state)
        with self._replacing("load_state_dict"):
            self.saved_form.fill(state)
        self._tell_of_load()

    def _tell_of_load(self) -> None:
        """After a load: buffers look for what their samplers know of these rows, before others are written."""
        for buffer in list(self._attached):
            buffer.after_load()

    def _shifts_since(self, lane_capacity: int | None) -> list[int]:
        """By how much the sequences of each lane are lower here than where the rows were saved; empty: by nothing.

        For a sampler that is loaded alone, from a store of this lane capacity (None: not known). Loading keeps
        sequences where lanes have the same capacity.
        """
        lanes = self.lanes
        return [] if lanes is None or lane_capacity in (None, lanes.store.lane_capacity) else lanes.shifts

    # ---- forks and copies ----
    def _after_fork(self) -> None:
        """In a child: mutexes that no thread of the parent holds."""
        self.mutex = threading.RLock()
        if self.lanes is not None:
            self.lanes.mutex = self.mutex
        else:
            self._forked_from = os.getppid()
        for buffer in list(self._attached):
            buffer.after_fork()

    def __getstate__(self) -> dict[str, Any]:
        return {"init": self._sent_arguments()}

    def _sent_arguments(self) -> dict[str, Any]:
        """The constructor's arguments in a process that this storage is sent to, which shares its rows.

        Raises:
            StorageError: it cannot be sent.
        """
        raise StorageError(
            f"Cannot share a storage of type {type(self).__name__}, which belongs to its process; "
            "LazyTensorStorage(shared=True) and LazyMemmapStorage can be sent to others, and dumps and loads copy any"
        )

    def _copy_arguments(self) -> dict[str, Any] | None:
        """Arguments for a storage like this one, to put copied rows in; None: it is copied as any object."""
        return None

    def _description(self) -> dict[str, Any] | None:
        """Arguments for a storage like this one, as far as a checkpoint can have them; None: they are not known."""
        arguments = self._copy_arguments()
        plain = {bool, int, str, type(None)}
        return arguments if arguments is not None and plain.issuperset(map(type, arguments.values())) else None

    @property
    def _has_hooks(self) -> bool:
        """Whether hooks change what is saved or loaded."""
        own = self._checkpointer
        return own is not None and bool(getattr(own, "save_hooks", ()) or getattr(own, "load_hooks", ()))

    @property
    def _pickled_by_path(self) -> bool:
        """Whether a pickle names a file instead of holding its rows."""
        return False

    @property
    def _pickled_from_parts(self) -> bool:
        return not self._pickled_by_path and self._copy_arguments() is not None

    def _held_still(self) -> AbstractContextManager[Any]:
        return self.mutex

    def _copy_parts(self) -> tuple[Any, tuple[Any, ...]]:
        state = self.state_dict() if len(self) or self.lanes is not None else None
        return _unpickled, (type(self), self._copy_arguments(), self._checkpointer, self.saved_form.row_form(), state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        arguments = self._copy_arguments()
        if arguments is None:
            return copy._reconstruct(self, memo, *super().__reduce_ex__(4))  # type: ignore[attr-defined]
        with self.mutex:
            twin = _made_like(type(self), copy.deepcopy(arguments, memo), copy.deepcopy(self._checkpointer, memo))
            memo[id(self)] = twin
            if self.lanes is not None:
                with twin._exclusive("copying"):
                    self.saved_form.copy_to(twin, memo)
        return twin

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_size={self.max_size}, len={len(self)}, ndim={self.ndim})"


class _GetSetStorage(Storage):
    """What a storage of a user's own gets that has only `get`, `set` and `__len__`: the rest, made of these."""

    _own_lanes: Lanes | None = None
    _takes_lists: ClassVar[bool] = True

    @property
    def lanes(self) -> Lanes:
        if self._own_lanes is None:
            self._own_lanes = Lanes.in_memory(self._max_size)
            self._own_lanes.mutex = self.mutex
            if len(self):
                self._own_lanes.advance(len(self))
        return self._own_lanes

    def _for_own_writers(self) -> Any:
        return _CountedSets(self)

    # ---- copies: what the user's class keeps is copied as it is, and beside it the counters ----
    def _check_sending(self) -> None:
        Storage.__getstate__(self)

    def _own_state(self) -> dict[str, Any]:
        """The attributes that a copy gets, those of the user's class as they are; the caller holds the mutex."""
        state = {name: value for name, value in vars(self).items() if name not in _NOT_COPIED}
        lanes = self._own_lanes
        return {**state, "_own_lanes": None if lanes is None else (lanes.capacity, lanes.saved_states()[0])}

    def __getstate__(self) -> dict[str, Any]:
        if is_passing_fds():
            self._check_sending()
        with self.mutex:  # the rows of one moment, whatever is written while they are pickled
            return copy.deepcopy(self._own_state(), {id(self): self})

    def __setstate__(self, state: dict[str, Any]) -> None:
        Storage.__init__(self, None)
        vars(self).update(state)
        if state["_own_lanes"] is None:
            return
        capacity, lane = state["_own_lanes"]
        self._own_lanes = lanes = Lanes.in_memory(capacity)
        lanes.mutex = self.mutex
        lanes.hold()  # as the writer of the copied rows: trajectories go on
        lanes.store.begin_restore()
        lanes.store.set_seams(
            0, lane["base"], lane["published"], [seam for seam in lane["seams"] if seam > lane["base"]]
        )
        lanes.restore_lane(0, lane, 0)
        lanes.store.end_restore()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if type(self).__getstate__ is not _GetSetStorage.__getstate__:  # the class says itself what a copy is made of
            return Storage.__deepcopy__(self, memo)
        memo[id(self)] = twin = type(self).__new__(type(self))
        with self.mutex:
            twin.__setstate__(copy.deepcopy(self._own_state(), memo))
        return twin

    def check(
        self,
        items: Any,
        single: bool,
        time_dim: int = 0,
        index_key: str | None = None,
        index: Tensor | None = None,
    ) -> Checked:
        items = pytree.clone(items)
        n = 1 if single else count_steps(items, time_dim)
        if not n:
            raise ValueError("nothing to add: the batch has no steps")
        if not single:
            items = items if isinstance(items, list) else pytree.move_dim(items, time_dim, 0)
        if index_key is not None:
            at = self.lanes.next_slots(n) if index is None else index
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
            self.set(int(slots[0]), items)
        else:
            first = max(0, n - self.lanes.capacity)  # of a batch that is longer than the ring the last steps stay
            chosen = torch.zeros(checked.steps, dtype=torch.bool)
            chosen[first:n] = True
            self.set(slots[first:], items if bool(chosen.all()) else pytree.select_rows(items, chosen))
        self.lanes.advance(n)
        return slots

    def overwrite(self, slots: Tensor, items: Any, index_key: str | None = None) -> None:
        lanes = self.lanes
        absent = slots[lanes.store.generations(slots) < 0]
        if len(absent):
            raise IndexError(f"index {int(absent[0])} has not been written; {len(self)} steps are stored")
        n = count_steps(items, 0)
        if n != len(slots):
            raise ValueError(f"{len(slots)} steps are indexed, the data have {n}; nothing was written")
        self.set(slots, self.check(items, False, 0, index_key, slots).data[0])
        lanes.store.note_edits(slots)

    def read(
        self,
        slots: Tensor,
        shape: tuple[int, ...] | None = None,
        extra: dict[str, Any] | None = None,
        sequences: bool = False,
    ) -> Rows:
        with self.mutex:
            counted = self.lanes.generations(slots)
            absent = torch.nonzero(counted < 0).reshape(-1).tolist()
            if absent:
                return Rows(None, absent=absent)
            batch = self.get(slots)
        return rows_of(batch, counted if sequences else None, shape, extra)

    def _default_collate(self, batch: Any) -> Any:
        return pytree.collate_items(batch) if isinstance(batch, list) else batch

    def leaf(self, path: KeyPath) -> LeafSpec | None:
        if not len(self):
            return None
        value = get_entry(self._default_collate(self.get(stored_slots(self.lanes.store)[:1])), path)
        return None if value is None else LeafSpec(path, value.dtype, tuple(value.shape[1:]))

    def column(self, path: KeyPath, slots: Tensor) -> Tensor:
        values = get_entry(self._default_collate(self.get(slots)), path)
        if values is None:
            raise KeyError(f"the stored steps have no {format_key(path)}")
        return torch.as_tensor(values)

    def _is_single(self, items: Any, env_dims: int = 0) -> bool:
        stored = self.get(int(stored_slots(self.lanes.store)[0]))
        return tuple(pytree.shape_of(first_leaf(items))) == tuple(np.shape(first_leaf(stored)))

    def _replace_stored(self, index: Any, items: Any, index_key: str | None = None) -> None:
        if np.ndim(index) == 0 and not isinstance(index, slice):
            with self.lanes.exclusive("changing stored rows"):
                selection = select(self.lanes.store, index, ())
                self.set(int(selection.slots[0]), self.check(items, True, -1, index_key, selection.slots).data[0])
                self.lanes.store.note_edits(selection.slots)
            return
        Storage._replace_stored(self, index, items, index_key)

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    def __setitem__(self, index: Any, items: Any) -> None:
        self.set(index, items)

    def empty(self, reset_count: bool = True) -> None:
        forget = getattr(self, "_empty", None)
        if forget is None:
            raise RuntimeError(f"a {type(self).__name__} has no method _empty, which forgets all rows")
        with self._replacing("empty"):
            forget()
            self.lanes.store.empty(reset_count)


_FROM_GET_AND_SET = [
    *("lanes", "check", "append", "overwrite", "read", "leaf", "column", "empty", "__getitem__", "__setitem__"),
    *("_own_lanes", "_takes_lists", "_default_collate", "_is_single", "_replace_stored", "_for_own_writers"),
    *("_check_sending", "_own_state", "__getstate__", "__setstate__", "__deepcopy__"),
]
_NOT_COPIED = ("mutex", "_attached", "_forked_from", "_own_lanes")  # each object has its own


class _CountedSets:
    """A storage whose class has a `set` of its own, for a writer: what the writer sets counts as stored."""

    def __init__(self, storage: Storage) -> None:
        self._given = storage

    def set(self, cursor: Any, data: Any, index_key: str | None = None, *, set_cursor: bool = True) -> None:
        storage = self._given
        slots, single = torch.as_tensor(cursor, dtype=torch.int64).reshape(-1), np.ndim(cursor) == 0
        with storage.mutex:
            if torch.equal(slots, storage._next_steps(len(slots))):
                checked = storage.check(data, single, -1 if single else 0, index_key)
                if checked.steps != len(slots):
                    raise ValueError(
                        f"{len(slots)} steps are indexed, the data have {checked.steps}; nothing was written"
                    )
                storage.append(checked)
            else:
                storage._replace_stored(cursor if single else slots, data, index_key)

    def __len__(self) -> int:
        return len(self._given)

    def __getitem__(self, index: Any) -> Any:
        return self._given[index]

    def __getattr__(self, name: str) -> Any:
        if name == "_given":  # while a copy is made
            raise AttributeError(name)
        return getattr(self._given, name)


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


def _with_index(items: Any, key: str, index: Tensor, lead: int) -> Any:
    """Data with keys, and under one of them the index of each step; other data as they are."""
    if not pytree.has_keys(items):
        return items
    items = items.copy()
    pytree.set_per_item(items, key, index, lead)
    return items


def _length(items: Any) -> int | None:
    """The length of a sequence or of the first dimension of a batch; None of a single step."""
    if isinstance(items, list | tuple | range):
        return len(items)
    shape = items.shape if hasattr(items, "shape") else pytree.shape_of(first_leaf(items))
    return int(shape[0]) if len(shape) else None


def _listed_steps(index: Any) -> Tensor | None:
    """The time steps of an int, or of a range, list, array or tensor of ints from 0 on; None: it is another index."""
    if isinstance(index, range):
        index = list(index)
    if isinstance(index, bool | np.bool_ | tuple | slice | str) or index is None or index is ...:
        return None
    try:
        steps = torch.as_tensor(index)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    if steps.dtype == torch.bool or steps.is_floating_point() or steps.is_complex() or steps.ndim > 1:
        return None
    steps = steps.reshape(-1).cpu().to(torch.int64)
    return steps if len(steps) and int(steps.min()) >= 0 else None


_live: weakref.WeakSet[Storage] = fork_registry(lambda storage: storage._after_fork())


def _made_like(cls: Any, arguments: dict[str, Any], checkpointer: Any) -> Any:
    twin = cls.__new__(cls)
    twin.__init__(**arguments)
    if checkpointer is not None:
        twin.checkpointer = checkpointer
    return twin


def _unpickled(cls: Any, arguments: dict[str, Any], checkpointer: Any, form: Any, state: Any) -> Any:
    storage = _made_like(cls, arguments, checkpointer)
    if form is not None:
        storage.take_row_form(form)
    if state is not None:
        storage.load_state_dict(state)
    return storage


def _shape_of(index: Any, env_dims: int) -> tuple[int, ...]:
    """The shape of the places that an index of a storage with so many dimensions of environments names."""
    if isinstance(index, tuple):
        return tuple(np.shape(index[0]))
    shape = tuple(np.shape(index))
    return shape[:-1] if env_dims else shape


def as_storage(storage: Any) -> Storage:
    """A storage, or what a function without arguments makes of one.

    Raises:
        TypeError: it is no `Storage`, or one whose methods lack arguments that buffers pass.
    """
    if not isinstance(storage, Storage):
        storage = storage() if callable(storage) else storage
    if not isinstance(storage, Storage):
        raise TypeError(
            "storage must be a storage, or something without arguments that makes one, got a "
            f"{type(storage).__name__}; TensorStorage(data) stores in tensors that exist, ListStorage(n) takes any "
            "objects"
        )
    _check_signatures(type(storage))
    return storage


def _check_signatures(cls: type[Storage]) -> None:
    for name in ("check", "append", "overwrite", "read"):
        method = inspect.signature(getattr(cls, name)).parameters
        if any(p.kind is p.VAR_KEYWORD for p in method.values()):
            continue
        missing = [p for p in inspect.signature(getattr(Storage, name)).parameters if p not in method]
        if missing:
            raise TypeError(
                f"{cls.__name__}.{name} has no argument {', '.join(map(repr, missing))}; it must take all arguments of "
                f"Storage.{name}"
            )


__all__ = ["Checked", "Rows", "Storage", "as_storage"]
