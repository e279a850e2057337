"""Storages: a table of rows with a lock, and TorchRL's names on top."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from engram import pytree
from engram._copies import CopyForm, MadeFromParts, pickle_by_state
from engram._system import fork_registry
from engram.checkpoint.foreign import open_saved
from engram.checkpoint.snapshot import save_snapshot
from engram.data.replay_buffers.state.items import SavedSteps
from engram.data.replay_buffers.state.plans import SavedStorage
from engram.data.replay_buffers.storages.access import Access
from engram.data.replay_buffers.storages.overrides import OuterMethods
from engram.data.replay_buffers.storages.users import GetSetRows, UsersPlace, UsersRows, own_attributes
from engram.pytree import KeyPath
from engram.store.indexing import check_stored, from_slots, stored_slots, tensor_of, to_slots
from engram.store.lanes import Lanes
from engram.store.layout import LeafSpec, RowLayout
from engram.store.places import TableSize
from engram.store.rows import Checked, Rows, TableRows
from engram.store.steps import Steps
from engram.store.table import Table


@contextlib.contextmanager
def _saved_by(storage: Storage, checkpointer: Any) -> Iterator[None]:
    """A block of one thread in which this checkpointer stands for the storage's own; None: its own."""
    with storage.mutex:
        if checkpointer is None:
            yield
            return
        own, storage.checkpointer = storage.checkpointer, checkpointer
        try:
            yield
        finally:
            storage.checkpointer = own


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("engram.")


def _our_class(kind: type) -> Any:
    """The class itself, or the nearest class of engram that it is derived from."""
    return next(parent for parent in kind.__mro__ if _is_ours(parent))


class StorageUser:
    """A buffer, as the storages know it that it attaches itself to."""

    def after_load(self) -> None:
        """Called after its storage alone was loaded, before other rows are written."""

    def after_fork(self) -> None:
        """Called in a forked child, before the storage is used there."""


class Storage(MadeFromParts):
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
    read_only: bool = False
    # What a child of the user's, of this class or one of its kind, has of its own.
    _overrides: ClassVar[frozenset[str]] = frozenset()
    # The rows of a child of this class itself.
    _own_rows: ClassVar[type[UsersRows]] = UsersRows

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ours = _our_class(cls)
        cls._overrides = own = frozenset(name for kind in cls.__mro__[: cls.__mro__.index(ours)] for name in vars(kind))
        if ours is Storage and own >= {"get", "set"} and "append" not in own:
            cls._own_rows = GetSetRows
        if ours is not Storage or cls._own_rows is GetSetRows or "__getstate__" not in own:
            pickle_by_state(cls, _check_sending)  # else as `pickle` does, by its own `__getstate__`

    def __init__(self, max_size: int | None, checkpointer: Any = None, compilable: bool = False) -> None:
        missing = _MUST_DEFINE - self._overrides
        if missing and self._own_rows is not GetSetRows:
            raise TypeError(
                f"Can't instantiate abstract class {type(self).__name__}: it has no {', '.join(sorted(missing))}"
            )
        size = TableSize(max_size, None, 1, None)
        rows = self._own_rows(self, size.max_size, self._overrides)
        self._hold(Table(size, UsersPlace(self, rows, size), rows), checkpointer)

    def _hold(
        self,
        table: Table,
        checkpointer: Any,
        saved_as: Callable[[Storage], SavedStorage] = SavedSteps,
        of_data: Callable[[Any], Storage] | None = None,
    ) -> None:
        """Begins with a table, which is saved and loaded in this form; `of_data` makes a storage around tensors."""
        self._of_data = of_data
        self._held_table, self._saved_as, self.native = table, saved_as, table.native
        own = self._overrides
        outer = inner = None
        if own & {"check", "append", "overwrite", "read", "replace"} and type(table.rows) is not UsersRows:
            inner = UsersRows(self, None, own, table)
        # What our methods do, where these are not the rows'.
        self._our_methods: TableRows | OuterMethods | None = None
        if isinstance(table.rows, UsersRows):
            self._our_methods = table.rows.ours if type(table.rows) is UsersRows else None
        else:
            self.ndim = table.rows.ndim
            if own & {"set", "get", "read", "_empty"}:
                self._our_methods = outer = OuterMethods(table, self, own)
            reads = not own & {"get", "read", "column", "leaf"}
            self.native.limit(reads=reads, appends=not own & {"set", "check", "append"})
            table.rows.bind(self.native)
        #: The lock of its rows.
        self.access: Access = Access(table, outer, inner, own)
        self._attached: weakref.WeakSet[StorageUser] = weakref.WeakSet()
        #: Held by writers, and by readers that need the rows not to change.
        self.mutex = threading.RLock()
        table.take_mutex(self.mutex)
        self._checkpointer: Any = None
        self.checkpointer = checkpointer
        _live.add(self)

    # ---- facts ----
    @property
    def initialized(self) -> bool:
        """Whether it has a place for rows: it was written to, or made around tensors."""
        return self._held_table.initialized

    @property
    def max_size(self) -> int | None:
        """The number of steps that fit; None: no limit."""
        return self._held_table.max_size

    @property
    def lanes(self) -> Lanes:
        """Counters of the stored rows (`Lanes.in_memory` makes some); they count none before the first write.

        The first write may bring others, here or in another process: ask for them at each use.
        """
        outer = self._our_methods
        return self._held_table.lanes if outer is None else outer.lanes

    @property
    def layout(self) -> RowLayout | None:
        """Keys, shapes and dtypes of a stored step; None before the first write, and where steps may differ."""
        return self._held_table.rows.layout or self._held_table.look().layout

    @property
    def env_shape(self) -> tuple[int, ...]:
        """The shape of the environments: `()` with ndim=1, `(envs,)` with ndim=2."""
        return (self._our_methods or self._held_table.rows).env_shape

    @property
    def supports_conditional_update(self) -> bool:
        """Whether `update_if_present` of a buffer can write over its rows."""
        return self._held_table.rows.replaces_in_place

    @property
    def shape(self) -> torch.Size:
        """The stored time steps, and with ndim=2 the environments of each."""
        return torch.Size((len(self) // math.prod(self.env_shape), *self.env_shape))

    def __contains__(self, index: Any) -> bool:
        """Whether every step that an index means is stored."""
        try:
            self.access.beside_writers(functools.partial(check_stored, self.lanes, self.env_shape, index))
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
            return torch.tensor(each, dtype=torch.bool, device="cpu").reshape(item.shape[:-1])
        lanes = self.lanes
        in_room = (item >= 0) & (item < lanes.capacity)
        slots = torch.where(in_room, item, 0).to("cpu", torch.int64)
        stored = (lanes.store.generations(slots.reshape(-1)) >= 0).reshape(item.shape).to(item.device)
        return torch.where(item < 0, item >= -len(self), in_room & stored)

    def is_removed(self, index: Any) -> Tensor:
        """Which of the steps at an index were removed (`ReplayBuffer.remove`), bool [n]: a sampler of your own draws
        none of them, or its buffer asks it to draw again.

        Args:
            index: int64 [n], with ndim=2 a tuple (time, env) of such or [n, 2], as samplers return it.
        """
        parts = [tensor_of(part) for part in (index if isinstance(index, tuple) else (index,))]
        if any(part.dtype == torch.bool or part.is_floating_point() or part.is_complex() for part in parts):
            raise IndexError(f"an index of rows is one of integers, found {[part.dtype for part in parts]}")
        slots, lanes = to_slots(index, self.env_shape, self.max_size or 0), self.lanes
        removed = torch.zeros(len(slots), dtype=torch.bool, device="cpu")
        if places := lanes.store.removed(slots):
            removed[places] = True
        return removed

    def flatten(self) -> Storage:
        """This storage, where it has one dimension; else a new one of one dimension with copies of all rows.

        Removed rows are removed there, too.
        """
        if self.ndim == 1 or self._of_data is None:
            return self
        lanes = self.lanes
        removed = lanes.store.removed(stored_slots(lanes.store))
        flat = self._of_data(pytree.flatten_dims(self.get(slice(None)), 0, len(self.env_shape)))
        if removed:
            slots = torch.tensor(removed, device="cpu")
            flat.lanes.remove(slots, flat.lanes.store.generations(slots))
        return flat

    @property
    def nbytes(self) -> int:
        """Bytes of the storage, used or not; 0 before the first write."""
        return self._held_table.look().nbytes

    @property
    def _storage(self) -> Any:
        """The stored data; a live view where the storage has one."""
        view = self._held_table.view()
        return self.get(slice(None)) if view is None and len(self) else view

    @property
    def _is_full(self) -> bool:
        return self.access.settled(lambda: self._held_table.lanes.is_full)

    def __len__(self) -> int:
        """Stored steps of all writers."""
        return self.access.settled(lambda: len(self._held_table.lanes))

    @property
    def write_count(self) -> int:
        """Steps ever written."""
        return self.access.settled(lambda: self.lanes.write_count)

    # ---- writing: check, then append or overwrite ----
    def check(
        self,
        items: Any,
        single: bool,
        time_dim: int = 0,
        index_key: str | None = None,
        index: Tensor | None = None,
    ) -> Checked:
        """Checks a batch (or one step, `single`) leaf by leaf; nothing is written. The first call makes the table.

        `time_dim` is the batch dimension of time. With `index_key` each row also stores its own index there: `index`
        (int64 [steps]), or the one that `append` will give it.

        Raises:
            ValueError, TypeError: the batch does not fit; the message names the leaf.
            StorageError: the table cannot be made.
        """
        steps = Steps.given(items, single, time_dim, index_key, index, ndim=self._held_table.rows.ndim)
        return (self._our_methods or self._held_table.rows).fit(steps)

    def append(self, checked: Checked, most: int | None = None) -> Tensor | int:
        """Writes behind the newest row; returns slots, int64 [steps * envs] in the order of time.

        With `most`, only so many of the first steps. Of one step without batch dimensions it may return the slot as a
        number.
        """
        return (self._our_methods or self._held_table.rows).append(checked, most)

    def replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> None:
        """Writes rows (int64 [n]) of a checked batch over stored ones; the caller uses the storage exclusively.

        Each gets a sequence of its own (`lanes.reserve_sequences`), which `lanes.own_sequences` returns.
        """
        (self._our_methods or self._held_table.rows).prepare_replace(checked, rows, slots)()

    def overwrite(self, slots: Tensor, items: Any, index_key: str | None = None) -> None:
        """Writes items over stored rows, one for each slot (int64 [n]); the caller uses the storage exclusively.

        With `index_key` each of them stores its own index there.

        Raises:
            IndexError: a slot holds no row.
            ValueError, TypeError: the items do not fit; nothing was written.
        """
        (self._our_methods or self._held_table.rows).overwrite(slots, Steps(items, index_key=index_key))

    # ---- reading ----
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
        return (self._our_methods or self._held_table.rows).read(slots, shape, extra, sequences)

    def leaf(self, path: KeyPath) -> LeafSpec | None:
        """Dtype and shape of one leaf of a stored step; None: steps have no such leaf."""
        return (self._our_methods or self._held_table.rows).leaf(path)

    def column(self, path: KeyPath, slots: Tensor) -> Tensor:
        """One leaf of the steps at these time slots: [n, *envs, ...]. The caller holds the storage's mutex."""
        return (self._our_methods or self._held_table.rows).column(path, slots)

    def get(self, index: Any) -> Any:
        """The rows at an index, copied.

        Raises:
            IndexError: a step that has not been written.
        """
        return self.access.get(index)

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
        self.access.set(cursor, Steps(data, index_key=index_key))

    def __getitem__(self, index: Any) -> Any:
        """Rows at an index; a slice of rows that lie next to each other is a live view, for reading only."""
        view = self._held_table.view(index) if isinstance(index, slice) else None
        return self.get(index) if view is None else view

    def __setitem__(self, index: Any, items: Any) -> None:
        self.set(index, items)

    def from_slots(self, slots: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Slots as users see them: int64 [n], with ndim=2 a tuple (time, env) of such."""
        return from_slots(slots, self.env_shape)

    # ---- life ----
    def empty(self, reset_count: bool = True) -> None:
        """Forgets every row; the cursor is 0.

        Raises:
            StorageInUseError: another process has the storage open.
        """
        with self.access.replacing("empty"):
            (self._our_methods or self._held_table.rows).clear(reset_count)

    def _empty(self) -> None:
        """Called before all rows are forgotten, of a child that overrides it as TorchRL's users do."""

    def attach(self, buffer: Any) -> None:
        """Notes that a buffer uses this storage."""
        if isinstance(buffer, StorageUser):  # another library's has nothing to do then
            self._attached.add(buffer)

    def flush(self) -> None:
        """Makes the rows appended so far survive a power cut, where the storage outlives its processes.

        Raises:
            StorageError: the disk failed, and no row counts as flushed that did not before. The next call writes all
                of them again; it fails, too, where the system has dropped one meanwhile.
        """
        self._held_table.flush()

    def release(self) -> None:
        """Gives this process's lane back, for another process to take."""
        self._held_table.release()

    def mark_seam(self) -> None:
        """Begins a trajectory at the next row that this process writes, whatever its id and flags are."""
        self.lanes.mark_seam()

    def close(self) -> None:
        """Ends the use of the storage by this object; what was written to a folder is synced, and there for `open`."""
        self._held_table.close()

    # ---- saving ----
    @property
    def saved_form(self) -> SavedStorage:
        """This storage, as it is saved and loaded."""
        return self._saved_as(self)

    @property
    def checkpointer(self) -> Any:
        """Encodes this storage for disk; may be assigned. TypeError: it saves another kind of storage."""
        if self._checkpointer is None:
            self._checkpointer = self.saved_form.default_checkpointer()
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, checkpointer: Any) -> None:
        needs = getattr(checkpointer, "needs", None)
        if needs is not None and not self.saved_form.hands_out(needs):
            raise TypeError(
                f"a {type(checkpointer).__name__} cannot save a {type(self).__name__}, which hands out no {needs}; use "
                f"a {type(self.saved_form.default_checkpointer()).__name__}"
            )
        self._checkpointer = checkpointer

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Adds a callable that storages' checkpointers apply to what is saved."""
        self.checkpointer.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Adds a callable that storages' checkpointers apply to what is loaded."""
        self.checkpointer.register_load_hook(hook)

    def dumps(self, path: str | os.PathLike[str], *, keep_last: int = 1, checkpointer: Any = None) -> str:
        """Saves this storage alone, by its own checkpointer if no other is given; returns the name of the snapshot."""
        with _saved_by(self, checkpointer):
            source = self.checkpointer.source(self.saved_form)
            return save_snapshot(path, {}, (self.checkpointer, source), keep_last=keep_last)

    def loads(self, path: str | os.PathLike[str], *, snapshot: str | None = None, checkpointer: Any = None) -> None:
        """Replaces everything by what was saved, as `dumps` did it; errors as `ReplayBuffer.loads`."""
        with open_saved(path, snapshot) as saved, self.access.exclusive("loads"), _saved_by(self, checkpointer):
            plan = self.saved_form.plan_load(saved)
            with self.access.replacing("loads"):
                plan.run()
        for buffer in list(self._attached):
            buffer.after_load()

    dump = save = dumps
    load = loads

    def state_dict(self) -> dict[str, Any]:
        """Rows and counters in memory."""
        with self.mutex:
            return self.saved_form.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces everything by what `state_dict` gave.

        Raises:
            CheckpointMisfitError: it is no such state, or does not fit; every difference is listed, and nothing is
                changed. It is a ValueError, too.
        """
        self.saved_form.check_fits(state)
        with self.access.replacing("load_state_dict"):
            self.saved_form.fill(state)
        for buffer in list(self._attached):
            buffer.after_load()

    # ---- forks and copies ----
    def _after_fork(self) -> None:
        """In a child: mutexes that no thread of the parent holds."""
        self.mutex = threading.RLock()
        self._held_table.after_fork(self.mutex)
        for buffer in list(self._attached):
            buffer.after_fork()

    def __getstate__(self) -> dict[str, Any]:
        state = self._held_table.sent_state(type(self).__name__)
        own = {} if _is_direct(type(self)) else own_attributes(self)
        return {**state, "own": own} if own else state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if not _is_direct(type(self)):
            state = {**state}
            vars(self).update(state.pop("own", {}))
            _call_our_constructor(self, _opening_arguments(state))
        elif not vars(self):  # else `_begun` made it
            Storage.__init__(self, None)
        self._held_table.take_sent(state)

    def _copy_form(self) -> CopyForm:
        table = self._held_table
        is_pickled = not table.place.opens_path() and table.arguments() is not None

        def parts() -> tuple[Any, tuple[Any, ...]]:
            state = self.state_dict() if len(self) or self.initialized else None
            form = self.saved_form.row_form()
            own = own_attributes(self)
            made_of = (type(self), table.arguments(), self._checkpointer, form, state)
            return _unpickled, (*made_of, own) if own else made_of

        if isinstance(table.place, UsersPlace) and "__getstate__" in self._overrides:
            by_class = functools.partial(_made_by_class, table.place)
            return CopyForm(
                held_still=lambda: self.mutex,
                parts=by_class,
                copied=lambda memo: _reconstructed(self, memo, by_class()),
                check_sending=table.place.check_sending,
                is_sent=True,
            )
        copied = functools.partial(_deep_copy, self, table.place.own_state, self._checkpointer)
        return CopyForm(lambda: self.mutex, parts, is_pickled, copied, table.place.check_sending)

    def __repr__(self) -> str:
        extra = self._held_table.extra
        return f"{type(self).__name__}(max_size={self.max_size}, len={len(self)}, ndim={self.ndim}{extra})"


def _check_sending(storage: Storage) -> None:
    storage.access.table.place.check_sending()


_MUST_DEFINE = frozenset({"lanes", "check", "append", "overwrite", "read"})


def _is_direct(kind: type[Storage]) -> bool:
    """Whether a class is a child of `Storage` that a user wrote."""
    return _our_class(kind) is Storage


def _opening_arguments(state: dict[str, Any]) -> dict[str, Any]:
    """The constructor's arguments in a state that another process sent; also in one of engram 0.1."""
    if "init" in state:
        arguments: dict[str, Any] = state["init"]
        return arguments
    if "scratch_dir" not in state and "unmade" not in state:
        return state
    given = state.get("unmade") or {"scratch_dir": state["scratch_dir"], "lanes": state.get("lanes")}
    return {**given, "existsok": True}


_live: weakref.WeakSet[Storage] = fork_registry(lambda storage: storage._after_fork())


def _call_our_constructor(storage: Any, arguments: dict[str, Any]) -> None:
    """Calls the constructor of our class, not that of a user's child of it, which has other arguments."""
    _our_class(type(storage)).__init__(storage, **arguments)


def _made_like(cls: Any, arguments: dict[str, Any], checkpointer: Any) -> Any:
    twin = cls.__new__(cls)
    _call_our_constructor(twin, arguments)
    if checkpointer is not None:
        twin.checkpointer = checkpointer
    return twin


def _made_by_class(place: UsersPlace) -> tuple[Any, ...]:
    """What a pickle has of a storage whose class has a `__getstate__`; a `__setstate__` finds parts that are new."""
    kind, max_size, counted, state = place.copied_parts()
    return _begun, (kind, max_size, counted), state


def _begun(kind: type[Storage], max_size: int | None, counted: Any) -> Storage:
    storage = kind.__new__(kind)
    Storage.__init__(storage, max_size)
    rows = storage.access.table.rows
    assert isinstance(rows, UsersRows)
    rows.take_counted(counted)
    return storage


def _reconstructed(storage: Storage, memo: dict[int, Any], parts: tuple[Any, ...]) -> Any:
    """A deep copy, as `copy` makes it of what `__reduce_ex__` returns."""
    return copy._reconstruct(storage, memo, *parts)  # type: ignore[attr-defined]


def _deep_copy(
    storage: Storage, own_state: Callable[[], dict[str, Any] | None], checkpointer: Any, memo: dict[int, Any]
) -> Any:
    """A deep copy of a storage whose mutex the caller holds; rows are copied block by block where a table has them."""
    own = own_state()
    if own is not None:
        memo[id(storage)] = twin = type(storage).__new__(type(storage))
        twin.__setstate__(copy.deepcopy(own, memo))
        return twin
    arguments = storage.access.table.arguments()
    if arguments is None:
        return _reconstructed(storage, memo, object.__reduce_ex__(storage, 4))  # type: ignore[arg-type]
    twin = _made_like(type(storage), copy.deepcopy(arguments, memo), copy.deepcopy(checkpointer, memo))
    memo[id(storage)] = twin
    vars(twin).update(copy.deepcopy(own_attributes(storage), memo))
    if storage.initialized:
        with twin.access.exclusive("copying"):
            storage.saved_form.copy_to(twin, memo)
    return twin


def _unpickled(
    cls: Any, arguments: dict[str, Any], checkpointer: Any, form: Any, state: Any, own: Mapping[str, Any] | None = None
) -> Any:
    storage = _made_like(cls, arguments, checkpointer)
    vars(storage).update(own or {})
    storage.saved_form.take_row_form(form)
    if state is not None:
        storage.load_state_dict(state)
    return storage


def as_storage(storage: Any) -> Storage:
    """A storage, or what a function without arguments makes of one.

    Raises:
        TypeError: it is no `Storage`, or one whose methods lack arguments that buffers pass, or that has no `lanes`.
    """
    if not isinstance(storage, Storage):
        storage = storage() if callable(storage) else storage
    if not isinstance(storage, Storage):
        raise TypeError(
            "storage must be a storage, or something without arguments that makes one, got a "
            f"{type(storage).__name__}; TensorStorage(data) stores in tensors that exist, ListStorage(n) takes any "
            "objects"
        )
    _check_signatures(type(storage))  # type: ignore[arg-type]  # of a class mypy sees the hash of its objects
    if type(storage.access.table.rows) is UsersRows and not isinstance(lanes := storage.lanes, Lanes):
        raise TypeError(
            f"{type(storage).__name__}.lanes is {lanes!r:.80}: a storage has lanes before its first write, too, which "
            "count no rows; Lanes.in_memory(max_size) makes some"
        )
    return storage


@functools.lru_cache(maxsize=256)  # the signatures of a class take as long as all else of a buffer
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
