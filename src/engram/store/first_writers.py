"""Stores that processes share before there is one: the first of them to write makes it, the others open it."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import engram._native as _native
from engram._copies import MadeAnew, share_fd
from engram._system import fork_registry, memory_file, notice_fork, seal_size
from engram._text import log
from engram.errors import StorageError, StorageInUseError
from engram.store.files import StoreSpec, open_unnamed, refuse_if_memory_is_short, reserve
from engram.store.header import opened_store
from engram.store.lanes import Lanes
from engram.store.layout import RowLayout, StoredLayout
from engram.store.locks import LaneLocks, _close, _lock
from engram.store.packed_rows import PackedRows
from engram.store.places import (
    LaneCount,
    NewTable,
    Place,
    TableSize,
    open_lanes,
    saved_layout,
)
from engram.store.rows import TableRows

_MADE = b"\1"
_LOCK_BYTE = 1 << 60  # of the flag's file: far behind its end
_MAKE_TIMEOUT = 60.0  # seconds that a process waits for another one that makes the store


class UnmadeStore(MadeAnew):
    """The empty file of a store without a layout, for processes that share it: the first of them to write makes it.

    A flag in shared memory says that the store is made. Who makes it holds a lock until then, which ends with its
    process; what a process left behind that died is made anew. Forked children have it, and it may be sent to others.

    Args:
        temporary: the rows will be in an unlinked file in TMPDIR; else in shared memory.

    Raises:
        StorageError: a temporary file cannot be made.
    """

    def __init__(self, *, temporary: bool, received: tuple[Any, Any] | None = None) -> None:
        """`received` are the handles of a flag and a file that another process has sent."""
        if received is not None:
            self._own(temporary, *(handle.detach() for handle in received))
            return
        flag = memory_file("engram-made")
        try:
            file = open_unnamed() if temporary else memory_file("engram")
        except BaseException:
            os.close(flag)
            raise
        self._own(temporary, flag, file)

    def _own(self, temporary: bool, flag: int, file: int) -> None:
        self._temporary, self._flag, self._file = temporary, flag, file
        self._closer = weakref.finalize(self, _close, flag, file)
        self._mutex = threading.RLock()
        self._depth = 0
        self._lock_fd: int | None = None  # a description of its own: forked children have the others
        self._has_made = False
        _live.add(self)

    def is_made(self) -> bool:
        """Whether a process has made the store."""
        return os.pread(self._flag, 1, 0) == _MADE

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A block in which no other process makes the store; one that is made inside is opened by others after it.

        Raises:
            StorageInUseError: another process has held it for a minute.
        """
        notice_fork()
        with self._mutex:
            if not self._depth:
                self._lock()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    self._release()

    def open_or_make(self, spec: StoreSpec) -> tuple[_native.Store, LaneLocks]:
        """The store; makes it where no process has. StorageError, with the numbers, where there is no room for it."""
        with self.held():
            if not self.is_made() and not self._has_made:
                self._make(spec)
                self._has_made = True
            return self.open()

    def open(self) -> tuple[_native.Store, LaneLocks]:
        """The store that was made, opened anew, so that its locks are this process's own."""
        fd = _opened_anew(self._file)
        try:
            store = opened_store(fd)
        except BaseException:
            os.close(fd)
            raise
        return store, LaneLocks(fd)

    def _make(self, spec: StoreSpec) -> None:
        os.ftruncate(self._file, 0)  # what another process has left half made
        try:
            if self._temporary:
                reserve(self._file, spec, tempfile.gettempdir())
            else:
                refuse_if_memory_is_short(spec)
                os.ftruncate(self._file, spec.total_bytes)
            spec.create(self._file)
        except BaseException as error:
            os.ftruncate(self._file, 0)
            if isinstance(error, OSError):
                raise StorageError(f"there is no room for the storage ({error.strerror}): {spec}") from error
            raise

    # ---- the lock ----
    def _lock(self) -> None:
        fd, deadline = _opened_anew(self._flag), time.monotonic() + _MAKE_TIMEOUT
        try:
            while not _lock(fd, fcntl.F_WRLCK, _LOCK_BYTE):
                if time.monotonic() > deadline:
                    raise StorageInUseError(
                        f"another process has been making this storage for {_MAKE_TIMEOUT:g} seconds: it was stopped, "
                        "or loads a large checkpoint into it. Let it go on or end it"
                    )
                time.sleep(0.001)
        except BaseException:
            os.close(fd)
            raise
        self._lock_fd = fd

    def _release(self) -> None:
        fd, self._lock_fd = self._lock_fd, None
        assert fd is not None
        try:
            if self._has_made and not self.is_made():
                os.pwrite(self._flag, _MADE, 0)
                if not self._temporary:
                    seal_size(self._file)  # as of other shared memory
        finally:
            _lock(fd, fcntl.F_UNLCK, _LOCK_BYTE)  # not by closing: a child that was forked meanwhile has it, too
            os.close(fd)

    # ---- other processes ----
    def after_fork(self) -> None:
        """In a child: a mutex that no thread of the parent holds, and no lock."""
        self._mutex, self._depth, self._has_made = threading.RLock(), 0, False
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _made_from(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        handles = share_fd(self._flag), share_fd(self._file)
        return functools.partial(UnmadeStore, temporary=self._temporary, received=handles), ()


class FirstWriters(Place):
    """A place that processes share before there is a table: the first of them to write makes one, the others open it.

    Args:
        place: `SharedMemory` or `TemporaryFile`.
        unmade: what the processes share.
    """

    def __init__(self, place: Place, unmade: UnmadeStore) -> None:
        self._place = place
        self._unmade: UnmadeStore | None = unmade

    def make(self, new: NewTable) -> TableRows:
        if self._unmade is None:
            return self._place.make(new)
        spec = new.spec(with_dimensions=True)
        log.info("storage that processes share from its first row on: %s", spec)
        return self._opened(*self._unmade.open_or_make(spec), new.layout, new.given_lanes)

    def rows_of(self, lanes: Lanes, stored: StoredLayout, env_shape: tuple[int, ...], ndim: int) -> PackedRows:
        return self._place.rows_of(lanes, stored, env_shape, ndim)

    def _opened(
        self, store: _native.Store, locks: LaneLocks, layout: RowLayout | None, given_lanes: int | LaneCount | None
    ) -> PackedRows:
        """The rows of a store that one of the processes has made, perhaps of this layout."""
        saved, env_shape, ndim = saved_layout(store)
        if layout is not None and not layout.differences(saved.logical):
            saved.logical.take_form(layout)  # which may have a tensorclass, unnamed in the store
        lanes = open_lanes(store, locks, given_lanes)
        return self.rows_of(lanes, saved, env_shape, ndim)

    def bytes_of(self, new: NewTable) -> int:
        return new.spec(with_dimensions=True).total_bytes

    def awaits_others(self) -> bool:
        return self._unmade is not None

    def find_made(self, size: TableSize) -> PackedRows | None:
        if self._unmade is None or not self._unmade.is_made():
            return None
        return self._opened(*self._unmade.open(), None, size.given_lanes)

    def making(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._unmade is None else self._unmade.held()

    def is_copied_by_fork(self) -> bool:
        return self._unmade is None

    def shared(self, made: bool, name: str) -> Place:
        return self

    def unmade(self) -> UnmadeStore | None:
        return self._unmade

    def arguments(self, size: TableSize, made: Lanes | None) -> dict[str, Any] | None:
        arguments = self._place.arguments(size, made)
        return None if arguments is None else {**arguments, "shared_init": self._unmade is not None}

    def sent_arguments(self, size: TableSize, made: Lanes | None) -> dict[str, Any]:
        return self._place.sent_arguments(size, made)

    def close(self) -> bool:
        ends = self._place.close()
        if ends:
            self._unmade = None
        return ends


def _opened_anew(fd: int) -> int:
    """Another description of an open file, which shares no locks with the first."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


_live: weakref.WeakSet[UnmadeStore] = fork_registry(UnmadeStore.after_fork)
