"""Buffers whose parts are made at their first use: `ReplayBuffer(delayed_init=True)`."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from engram._system import fork_registry
from engram.data.replay_buffers.storages.memmap import LazyMemmapStorage, ObservedMemmapStorage
from engram.store.lanes import warn_of_copy

_DELAYED = "_delayed"  # the attribute of a buffer that holds what makes its parts, until they are made


def is_delayed(buffer: Any) -> bool:
    """Whether a buffer's parts are still to be made."""
    return _DELAYED in vars(buffer)


def delay(buffer: Any, init: Callable[..., None], capacity: int | None, arguments: Mapping[str, Any]) -> None:
    """Puts off `init(buffer, capacity, **arguments)`, which makes the buffer's parts, to its first use."""
    cls: Any = type(buffer)
    vars(buffer)[_DELAYED] = _DelayedParts(cls, init, capacity, arguments)
    buffer.__class__ = _delayed_class(cls)


class _DelayedParts:
    """The arguments of a buffer whose parts are made at its first use."""

    def __init__(
        self, cls: type, init: Callable[..., None], capacity: int | None, arguments: Mapping[str, Any]
    ) -> None:
        self._cls, self._init, self._capacity, self._arguments = cls, init, capacity, arguments
        self._lock, self._begun = threading.RLock(), False
        self._forked_from = 0  # the process that makes parts of its own
        _unmade.add(self)

    def after_fork(self) -> None:
        """In a child, where no thread goes on that was making them."""
        self._lock, self._begun = threading.RLock(), False
        self._forked_from = os.getppid()

    def make(self, buffer: Any) -> None:
        """Makes them, unless they are made or this thread is making them; after an error the buffer waits again."""
        with self._lock:
            if self._begun:
                return
            self._begun = True
            try:
                self._init(buffer, self._capacity, **self._arguments)
            except BaseException:
                self._begun = False
                raise
            del vars(buffer)[_DELAYED]
            buffer.__class__ = self._cls
            storage = buffer._storage
            kinds = (LazyMemmapStorage, ObservedMemmapStorage)
            is_in_folder = isinstance(storage, kinds) and storage.scratch_dir is not None
            if storage is not self._arguments["storage"] and not is_in_folder:
                warn_of_copy(self._forked_from)


_unmade: weakref.WeakSet[_DelayedParts] = fork_registry(_DelayedParts.after_fork)


def _make_parts(buffer: Any) -> None:
    delayed = vars(buffer).get(_DELAYED)
    if delayed is not None:  # else another thread has just made them
        delayed.make(buffer)


@functools.cache
def _delayed_class(cls: Any) -> type:
    """The class that a buffer has until its parts are made: whatever is looked up in it makes them.

    (A `__getattr__` of the buffer's class itself would make every look at an attribute slower.)
    """

    class Delayed(cls):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name != "initialized" and not name.startswith("__"):
                _make_parts(self)
            return cls.__getattribute__(self, name)  # for which it is of the class again

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "_transform":  # which making the parts would set again
                _make_parts(self)
            cls.__setattr__(self, name, value)

        def __repr__(self) -> str:
            return f"{cls.__name__}(delayed_init=True)"

    Delayed.__name__, Delayed.__qualname__, Delayed.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    return Delayed
