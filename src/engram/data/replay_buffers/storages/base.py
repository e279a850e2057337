"""What every storage does: hold rows, hand them out, say how many there are."""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from engram.checkpoint.snapshot import save_snapshot
from engram.data.replay_buffers.checkpointers.opening import open_saved
from engram.data.replay_buffers.storages.staging import TooManyRowsError
from engram.errors import StorageError
from engram.pytree import KeyPath, format_key, get_entry
from engram.store.files import is_sent, sends
from engram.store.indexing import Selection, outward, select, stored_slots
from engram.store.lanes import Lanes, tell_of_copy
from engram.store.layout import LeafSpec
from engram.store.tables import expand_slots

log = logging.getLogger("engram")

_MOST = 1 << 56

_T = TypeVar("_T")

_live: weakref.WeakSet[Storage] = weakref.WeakSet()


# What a read by slots gives: the batch; positions of rows that were overwritten while they were copied (None: none);
# positions of slots that hold no row (None: none); each row's write number (None unless asked for).
Rows = tuple[Any, list[int] | None, list[int] | None, Tensor | None]


class Checked(NamedTuple):
    """A batch that fits the storage and can be written: `steps` time steps."""

    steps: int
    data: Any


class Storage(abc.ABC):
    """Holds rows.

    Samplers ask `lanes` what exists and `read` for rows; writers hand a `check`ed batch to `append` or `overwrite`.
    """

    ndim: int = 1

    read_only = False  # whether it shows the rows of others and takes none

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        sends(cls)

    def __init__(self, max_size: int | None, checkpointer: Any = None) -> None:
        if max_size is not None and (
            isinstance(max_size, bool) or not hasattr(max_size, "__index__") or not 0 < int(max_size) <= _MOST
        ):
            raise ValueError(f"max_size must be an integer from 1 to 2**56, got {max_size!r}")
        self._max_size = None if max_size is None else int(max_size)
        self._checkpointer: Any = None
        self.checkpointer = checkpointer
        self.shifts = []
        #: Changes before and after all rows are replaced at once (`empty`, `loads`), and is odd meanwhile. What was
        #: drawn before such a change is not read after it.
        self.incarnation = 0
        self._attached: weakref.WeakSet[Any] = weakref.WeakSet()
        self.mutex = threading.RLock()
        self._forked_from = 0  # the process that had this storage, without rows, when it forked this one
        _live.add(self)

    # ---- facts ----
    @property
    def max_size(self) -> int | None:
        """The number of steps that fit; None: no limit."""
        return self._max_size

    @property
    @abc.abstractmethod
    def lanes(self) -> Lanes | None:
        """Counters of what is stored; None before the first write of a storage that is made then."""

    @property
    def inner(self) -> tuple[int, ...]:
        """The shape of the strands: `()` with ndim=1, `(envs,)` with ndim=2."""
        return ()

    @property
    def item_shape(self) -> tuple[int, ...]:
        """Batch dimensions of a stored item: `()` of steps, `(T,)` of whole trajectories of T steps."""
        return ()

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of the storage, used or not; 0 before the first write."""

    @property
    @abc.abstractmethod
    def _storage(self) -> Any:
        """The stored data as a live view."""

    @property
    def _is_full(self) -> bool:
        return self.settled(lambda: self.lanes is not None and self.lanes.is_full)

    def __len__(self) -> int:
        return self.settled(self._count)

    @property
    def is_empty(self) -> bool:
        """Whether no step is stored."""
        return not len(self)

    def _count(self) -> int:
        lanes = self.lanes
        if lanes is None:
            self._tell_of_copy()
            return 0
        return len(lanes)

    def _tell_of_copy(self) -> None:
        """Warns where this process was forked before there was anything to share."""
        parent, self._forked_from = self._forked_from, 0
        tell_of_copy(parent)

    @property
    def write_count(self) -> int:
        """Steps ever written."""
        return self.settled(lambda: 0 if self.lanes is None else self.lanes.write_count)

    # ---- the write path: check, then append or overwrite ----
    @abc.abstractmethod
    def check(
        self,
        items: Any,
        single: bool,
        time_dim: int = 0,
        index_key: str | None = None,
        index: Tensor | None = None,
    ) -> Checked:
        """Checks a batch (or one step, `single`) leaf by leaf; nothing moves. Makes the storage at the first call.

        `time_dim` says which batch dimension is time. With `index_key` each row also stores its own index there:
        `index` (int64 [steps]), or where `append` will put it.

        Raises:
            ValueError, TypeError: the batch does not fit; the message names the leaf.
            StorageError: the storage cannot be made.
        """

    @abc.abstractmethod
    def append(self, checked: Checked, most: int | None = None) -> Tensor | int:
        """Writes behind the newest row; returns slots, int64 [steps * strands] in the order of time.

        With `most`, only so many of the first steps. Of one step without batch dimensions it may return the slot as a
        number.
        """

    def replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> None:
        """Writes rows (int64 [n]) of a checked batch over stored ones, for which the storage must be used alone.

        Each gets a sequence of its own (`lanes.reserve_sequences`), which `lanes.own_sequences` finds.
        """
        raise NotImplementedError(f"a {type(self).__name__} has no `replace`, which writers need that keep the best")

    def prepare_replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> Callable[[], None]:
        """As `replace`, in two steps: all that may fail for want of memory, and what is returned, which writes."""
        return functools.partial(self.replace, checked, rows, slots)

    def expect_sequences(self) -> None:
        """A writer is used that writes rows over others out of turn: from the first write on each carries its sequence."""

    def carry_sequences(self) -> None:
        """Before the first row is written over another one out of turn: makes room for the sequences of rows.

        Raises:
            StorageError: the rows have none, and their layout cannot be changed.
        """

    @abc.abstractmethod
    def overwrite(self, slots: Tensor, items: Any, index_key: str | None = None) -> None:
        """Writes items over stored rows, for which the storage must be used by nobody else."""

    # ---- the read path ----
    @abc.abstractmethod
    def read(
        self,
        slots: Tensor,
        shape: tuple[int, ...] | None = None,
        extra: dict[str, Any] | None = None,
        numbers: bool = False,
    ) -> Rows:
        """Copies the rows of slots (int64 [n]) out; `extra` entries are added at the root of the batch."""

    def leaf(self, path: KeyPath) -> LeafSpec | None:
        """Dtype and shape of one leaf of a stored step; None: steps have none there."""
        if not len(self) or self.lanes is None:
            return None
        found = get_entry(self.read(stored_slots(self.lanes.store)[:1])[0], path)
        return None if found is None else LeafSpec(path, found.dtype, tuple(found.shape[1:]))

    def column(self, path: KeyPath, slots: Tensor) -> Tensor:
        """One leaf of the steps at these time slots: [n, *strands, ...]. The caller holds the storage's mutex."""
        rows = torch.as_tensor(expand_slots(slots, math.prod(self.inner)))
        found = get_entry(self.read(rows)[0], path)
        if found is None:
            raise KeyError(f"the stored steps have no {format_key(path)}")
        column: Tensor = found.reshape(len(slots), *self.inner, *found.shape[1:])
        return column

    def read_with(
        self,
        others: list[Any],
        slots: Tensor,
        shape: tuple[int, ...],
        extra: dict[str, Any] | None = None,
        numbers: bool = False,
        parts: list[dict[str, Any] | None] | None = None,
    ) -> tuple[Any, ...] | None:
        """As `read`, from this storage and others: as many slots of each, one after the other, into one batch.

        With `parts` (for each storage entries to add, or None), also a list of each storage's rows as a batch, which
        lie in the memory of the whole. None: the rows do not lie alike, each storage must be read by itself.
        """
        return None

    def believed(self, read: Callable[[], Any], only_errors: bool = False) -> Any:
        """What `read` gives, of a moment in which nobody else changed rows that exist; `only_errors`: what it gives
        need not be of one moment, but an error must."""
        return read()

    def get(self, index: Any) -> Any:
        """The rows at an index, copied.

        Raises:
            IndexError: a step that has not been written.
        """
        for _ in range(100):
            with self.mutex:  # what is there and its rows are looked at together: nobody replaces them in between
                if self.lanes is None:
                    raise IndexError(f"index {index!r:.80}: nothing has been written to this storage yet")
                selection = select(self.lanes.store, index, self.inner)
                batch, gone, absent, _ = self._read_shaped(selection)
            if absent is not None:
                slot = int(selection.slots[absent[0]])
                raise IndexError(f"index {slot} has not been written; {len(self)} steps are stored")
            if gone is None:
                return batch
        raise RuntimeError("other processes overwrite these rows faster than they can be copied; read fewer at a time")

    def _read_shaped(self, selection: Selection) -> Rows:
        return self.read(selection.slots, selection.shape)

    def set(self, index: Any, items: Any, index_key: str | None = None) -> None:
        """Replaces stored rows. With `index_key` each of them keeps its own index there.

        Raises:
            IndexError: a step that has not been written.
            StorageInUseError: another process has the storage open.
        """
        if self.lanes is None:
            raise IndexError(f"index {index!r} has not been written: the storage is empty; extend it first")
        with self.lanes.alone("changing stored rows"):
            self._set(select(self.lanes.store, index, self.inner), items, index_key)

    @abc.abstractmethod
    def _set(self, selection: Selection, items: Any, index_key: str | None) -> None: ...

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    def __setitem__(self, index: Any, items: Any) -> None:
        self.set(index, items)

    def outward(self, slots: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Slots as users see them."""
        return outward(slots, self.inner)

    # ---- life ----
    def alone(self, what: str) -> AbstractContextManager[None]:
        """For what must not run beside other users of the storage.

        Raises:
            StorageInUseError: another process has the storage open.
        """
        return self.mutex if self.lanes is None else self.lanes.alone(what)  # type: ignore[return-value]

    def empty(self, reset_count: bool = True) -> None:
        """Forgets every row; the cursor is 0.

        Raises:
            StorageInUseError: another process has the storage open.
        """
        with self.replacing("empty"):
            self._empty(reset_count)

    def _empty(self, reset_count: bool) -> None:
        if self.lanes is not None:
            self.lanes.store.empty(reset_count)

    @contextlib.contextmanager
    def replacing(self, what: str) -> Iterator[None]:
        """As `alone`, around what replaces all rows: readers see what was there before or what is there at the end."""
        with self.alone(what):
            if self.incarnation % 2:  # inside of another such block, whose end is the end
                yield
                return
            self.incarnation += 1
            try:
                yield
            finally:
                self.incarnation += 1

    def settled(self, look: Callable[[], _T]) -> _T:
        """What `look` finds of the storage; not what it finds in the middle of a `loads`, whose end it waits for."""
        before = self.incarnation
        found = look()
        if before == self.incarnation and not before % 2:
            return found
        with self.mutex:
            return look()

    def attach(self, buffer: Any) -> None:
        """Notes that a buffer uses this storage."""
        self._attached.add(buffer)

    def flush(self) -> None:
        """Rows appended so far survive a power cut, where the storage outlives its processes."""

    def release(self) -> None:
        """Gives this process's lane back, for another process to take."""
        if self.lanes is not None:
            self.lanes.release()

    def mark_seam(self) -> None:
        """The next row that this process writes begins a trajectory, whatever ids and flags say."""
        if self.lanes is not None:
            self.lanes.mark_seam()

    def close(self) -> None:
        """Ends the use of the storage by this object."""
        self.release()

    # ---- checkpoints ----
    #: By how much `loads` moved the write numbers of each lane down.
    shifts: list[int]

    def identity(self) -> dict[str, Any]:
        """What names these rows, for saves that write only what changed; `{}`: every save writes all of them."""
        return {}

    def edited(self, since: dict[str, Any]) -> list[tuple[int, int]] | None:
        """Lane and write number of rows changed in place since `identity()` was `since`; None if that is not known."""
        return None

    def freeze(self) -> Any:
        """What the checkpointer saves, as it is now, while the storage goes on: it has `left_out` and `close()`.

        The caller holds the mutex, here and at `close`.
        """
        raise NotImplementedError(f"a {type(self).__name__} cannot be saved in the background; use blocking=True")

    @contextlib.contextmanager
    def still(self) -> Iterator[Any]:
        """What the checkpointer saves while this process writes nothing, though other processes may.

        The caller holds the mutex.
        """
        yield self

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Rows and counters in memory."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces everything by what `state_dict` gave; a ValueError where it does not fit."""

    def check_state(self, state: dict[str, Any]) -> None:
        """A ValueError where what `state_dict` gave does not fit; changes nothing."""

    def dumps(self, path: str | os.PathLike[str], *, keep_last: int = 1) -> None:
        """Saves this storage alone."""
        with self.mutex, self.still() as source:
            save_snapshot(path, {}, (self.checkpointer, source), keep_last=keep_last)

    def loads(self, path: str | os.PathLike[str], *, snapshot: str | None = None) -> None:
        """Replaces everything by what was saved; errors as `ReplayBuffer.loads`."""
        with open_saved(path, snapshot) as saved, self.alone("loads"):
            fill, undo = self.read_aside(saved), self.kept()
            with self.replacing("loads"):
                try:
                    fill()
                except BaseException:
                    if undo is not None:
                        undo()
                    raise

    def read_aside(self, saved: Any) -> Callable[[], None]:
        """What fills this storage with what was saved; where it holds something, all of that has been verified."""
        staging = None if self.is_empty else self.staging()
        if staging is not None:
            try:
                saved.load_storage(self.checkpointer, staging)
            except TooManyRowsError:  # they are verified, and then read a second time
                staging = None
        return functools.partial(saved.load_storage, self.checkpointer, self) if staging is None else staging.commit

    def staging(self) -> Any:
        """What takes a state from the checkpointer instead of this storage, which has it after `commit()`; None:
        the storage cannot have it later.
        """
        return None

    def kept(self) -> Callable[[], None] | None:
        """What puts everything back as it is now, after a load that failed. None: that would be too much to keep."""
        return self.empty if self.is_empty else None

    def hand_over(self, sampler: Any) -> None:
        """After `loads`: tells a sampler how the write numbers of its rows have changed."""
        if self.lanes is not None and hasattr(sampler, "adopt"):
            sampler.adopt(self.lanes.store.incarnation, self.shifts)

    @property
    def checkpointer(self) -> Any:
        """What encodes this storage for disk; may be assigned. TypeError: it saves another kind of storage."""
        if self._checkpointer is None:
            self._checkpointer = self._default_checkpointer()
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, checkpointer: Any) -> None:
        needs = getattr(checkpointer, "needs", None)
        if needs is not None and not hasattr(type(self), needs):
            raise TypeError(
                f"a {type(checkpointer).__name__} cannot save a {type(self).__name__}, which hands out no {needs}; use "
                f"a {type(self._default_checkpointer()).__name__}"
            )
        self._checkpointer = checkpointer

    @abc.abstractmethod
    def _default_checkpointer(self) -> Any: ...

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Adds a callable that storages' checkpointers apply to what is saved."""
        self.checkpointer.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Adds a callable that storages' checkpointers apply to what is loaded."""
        self.checkpointer.register_load_hook(hook)

    def after_fork(self) -> None:
        """In a child: mutexes that no thread of the parent holds."""
        self.mutex = threading.RLock()
        if self.lanes is not None:
            self.lanes.mutex = self.mutex
        else:
            self._forked_from = os.getppid()
        for buffer in list(self._attached):
            if hasattr(buffer, "after_fork"):
                buffer.after_fork()

    def __getstate__(self) -> dict[str, Any]:
        raise StorageError(
            f"Cannot share a storage of type {type(self).__name__}, which belongs to its process; "
            "LazyTensorStorage(shared=True) and LazyMemmapStorage can be sent to others, and dumps and loads copy any"
        )

    # ---- copies: what `pickle` and `copy` make ----
    def settings(self) -> dict[str, Any] | None:
        """Arguments for a storage like this one, in which copied rows are put; None: it is not copied so."""
        return None

    @property
    def travels_by_path(self) -> bool:
        """Whether a pickle names a file instead of holding its rows."""
        return False

    def form(self) -> Any:
        """What an empty storage must know of the rows before their state is loaded."""
        return None

    def take_form(self, form: Any) -> None:
        """Makes room for rows of what `form` gave."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        settings = self.settings()
        if settings is None or is_sent() or self.travels_by_path:
            return super().__reduce_ex__(protocol)
        with self.mutex:
            state = self.state_dict() if len(self) or self.lanes is not None else None
            return _copied, (type(self), settings, self._checkpointer, self.form(), state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        settings = self.settings()
        if settings is None:
            made = super().__reduce_ex__(4)
            return copy._reconstruct(self, memo, *made)  # type: ignore[attr-defined]
        with self.mutex:
            made = self._like(copy.deepcopy(settings, memo), copy.deepcopy(self._checkpointer, memo))
            memo[id(self)] = made
            if self.lanes is not None:
                self.copy_rows_into(made, memo)
        return made

    @classmethod
    def _like(cls, settings: dict[str, Any], checkpointer: Any) -> Any:
        made = cls.__new__(cls)
        made.__init__(**settings)  # type: ignore[misc]
        if checkpointer is not None:
            made.checkpointer = checkpointer
        return made

    def copy_rows_into(self, other: Any, memo: dict[int, Any]) -> None:
        """Puts a copy of every row into an empty storage of the same settings; the caller holds the mutex."""
        other.take_form(self.form())
        other.load_state_dict(copy.deepcopy(self.state_dict(), memo))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_size={self.max_size}, len={len(self)}, ndim={self.ndim})"


def _copied(cls: Any, settings: dict[str, Any], checkpointer: Any, form: Any, state: Any) -> Any:
    """The copy that a pickle holds."""
    made = cls._like(settings, checkpointer)
    if state is not None:
        made.take_form(form)
        made.load_state_dict(state)
    return made


def _after_fork() -> None:
    for storage in list(_live):
        storage.after_fork()


os.register_at_fork(after_in_child=_after_fork)

__all__ = ["Checked", "Rows", "Storage"]
