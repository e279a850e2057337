"""The life of a table whose rows lie in a place: how they come to be there, who else may make them, and how it ends.

A table is in one of these states. It has lanes in each:

    unwritten   There is no store: the lanes count no rows, and `rows` are `UNWRITTEN`. Tables in memory begin so, and
                those in temporary files.
    awaited     As unwritten; another process that shares the place may make the store at any time, and each look at
                `lanes` finds out whether one has. Tables in folders begin so, and those with `shared_init=True`.
    written     There is a store, which other processes may have open, too. Tables begin so whose folder holds a store,
                that are made around tensors, and that only read (`ObservedFile`).
    closed      As unwritten: the stores of others are not looked for. Another write makes a store, or opens the one
                that is in the folder.

What changes one into another; all but `take_back` and `close` end in `take`, which uses a store from then on:

    make        unwritten, awaited, closed -> written: by a first batch, a layout or a load (`LazyTable.make_for`). Of
                several processes the first one makes the store, and the others open it.
    look        awaited -> written, where another process has made the store.
    take_sent   In a process that was sent the storage: unwritten -> written by the file of the store; before there is
                one, unwritten -> awaited.
    exchange    written -> written: the same rows, each with room for a sequence.
    take_back   written -> unwritten: a load that failed takes back the table that it made, but for those in folders.
    close       any -> closed where rows lie in files; in memory only this process's lane is given back.
    after_fork  The child is in the state of its parent, with a copy of the rows where memory is private. At its first
                use (`Lanes.use`) it becomes a user of a store that is shared, or is warned of the copy.

What holds, whatever processes and threads do, and the tests that fail where it does not (in `tests/`):

    1. One process makes the store: the one that has the lock of `UnmadeStore`, or that gives a file in a folder its
       name (`files.create_named`). What it left half made when it died is made anew. (processes/test_shared_init.py)
    2. One thread makes it: writers and loads hold the storage's mutex, and `first_write` keeps out who does not.
       (processes/test_shared_init.py: test_of_two_threads_that_check_the_first_rows_...)
    3. Locks are taken in the order mutex, `making`, `_make_lock`; `look` is not called with the last one held.
       (contracts/lock_order.py, in every test)
    4. Who looks at `lanes` has those of the store as soon as its maker lets others in, at the end of
       `UnmadeStore.held`. (processes/test_shared_init.py)
    5. Lanes, rows and what is derived from them are exchanged in one function, `_begin`. (data/test_loads_that_fail.py)
    6. A child that was forked before the first write, and has rows of its own for that, is told at its first use.
       (processes/test_stores_in_processes.py: test_a_child_that_was_forked_before_the_first_write_...)
    7. A look opens nothing that was closed. (processes/test_shared_init.py: test_a_closed_one_is_not_opened_again)
"""

from __future__ import annotations

import abc
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
from typing import Any, NoReturn, TypeVar, overload

import engram._native as _native
from engram._copies import MadeAnew, share_fd
from engram._system import fork_registry, memory_file, notice_fork, seal_size
from engram._text import log
from engram.errors import StorageError, StorageInUseError
from engram.pytree import KeyPath
from engram.store.files import StoreSpec, open_passed_store, open_unnamed, refuse_if_memory_is_short, reserve
from engram.store.header import opened_store
from engram.store.lanes import Lanes
from engram.store.layout import RowLayout, StoredLayout
from engram.store.locks import LaneLocks, _close, _lock
from engram.store.packed_rows import PackedRows
from engram.store.places import (
    LaneCount,
    NewTable,
    OpenedTable,
    Place,
    TableSize,
    locks_of,
    open_lanes,
    saved_layout,
)
from engram.store.rows import TableRows
from engram.store.table import Table

_T = TypeVar("_T")
_MADE = b"\1"
_LOCK_BYTE = 1 << 60  # of the flag's file: far behind its end
_MAKE_TIMEOUT = 60.0  # seconds that a process waits for another one that makes the store


class Unwritten:
    """The rows of a table that has none yet, or none any more."""

    layout = observations = stored = None
    nbytes = row_bytes = 0

    def leaf(self, path: KeyPath) -> None:
        """None: steps have no leaves."""

    def view(self, start: int, stop: int) -> None:
        """None: there is nothing to see."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise IndexError("nothing has been written to this storage yet; extend it first")

    fit = fit_rows = append = overwrite = prepare_overwrite = read = column = block = block_writer = _refuse


UNWRITTEN = Unwritten()


class _LookedFor:
    """The `lanes` of a table that another process may make, until they are an attribute of it."""

    @overload
    def __get__(self, table: None, owner: type[PlacedTable]) -> _LookedFor: ...

    @overload
    def __get__(self, table: PlacedTable, owner: type[PlacedTable]) -> Lanes: ...

    def __get__(self, table: PlacedTable | None, owner: type[PlacedTable]) -> Any:
        return self if table is None else table.look()


class PlacedTable(Table):
    """A table whose rows lie in a place.

    Args:
        size: how many.
        place: where.
    """

    lanes = _LookedFor()

    def __init__(self, size: TableSize, place: Place) -> None:
        super().__init__()
        self.size, self.place, self.ndim = size, place, size.ndim
        self.has_path = place.opens_path()
        #: What keeps the rows.
        self.rows: TableRows | Unwritten = UNWRITTEN
        #: `lanes`, without a look for what another process has made meanwhile.
        self.current_lanes = self._no_lanes()
        self._make_lock = threading.Lock()

    # ---- facts ----
    @property
    def initialized(self) -> bool:
        self.look()
        return self.rows is not UNWRITTEN

    @property
    def lane_count(self) -> int:
        """How many lanes there are, or will be."""
        return self.size.lanes if self.rows is UNWRITTEN else self.current_lanes.store.lanes

    @property
    def max_size(self) -> int | None:
        return self.size.max_size if self.rows is UNWRITTEN else self.current_lanes.capacity

    # ---- from nothing to rows ----
    @contextlib.contextmanager
    def first_write(self) -> Iterator[bool]:
        """A block in which this thread alone may `make` the table; gives whether there is no table yet."""
        with self.making(), self._make_lock:
            yield self.rows is UNWRITTEN

    def make(self, new: NewTable) -> None:
        """Makes the table, or opens what another process has made meanwhile.

        Raises:
            StorageError: there is no room for it.
        """
        self.current_lanes.use()  # which warns in a child that was forked before there was anything to share
        self.take(self.place.make(new))

    def look(self) -> Lanes:
        """Opens the table that another process has made, if one has; returns the lanes that are in use then."""
        if self.rows is UNWRITTEN and self.place.awaits_others():
            with self._make_lock:
                if self.rows is UNWRITTEN and (opened := self.place.find_made(self.size)) is not None:
                    self.take(opened)
        return self.current_lanes

    def take(self, opened: OpenedTable) -> None:
        """Uses a table that was made or opened."""
        self.ndim, self.env_shape = opened.ndim, opened.env_shape
        self._begin(opened.lanes, opened.table)

    def exchange(self, rows: PackedRows) -> None:
        """Uses the same rows in another store."""
        self._begin(rows.lanes, rows)

    def _begin(self, lanes: Lanes, rows: TableRows | Unwritten) -> None:
        """Uses lanes and rows from now on."""
        lanes.mutex = self.mutex
        self.current_lanes, self.rows = lanes, rows
        self.__dict__.pop("lanes", None)
        if rows is not UNWRITTEN:
            self.lanes = lanes
        self.renew()

    @abc.abstractmethod
    def renew(self) -> None:
        """Called when `rows` or lanes are others: what is derived from them follows."""

    def _no_lanes(self) -> Lanes:
        """Lanes that count no rows."""
        lanes = Lanes.in_memory(self.size.max_size)
        lanes.mutex, lanes.copied_by_fork = self.mutex, self.place.is_copied_by_fork()
        return lanes

    # ---- other processes ----
    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        if self.place.unmade() is None or self.initialized:
            yield
            return
        with self.place.making():
            self.look()  # while this process waited
            yield

    def exclusive(self, operation: str) -> AbstractContextManager[Any]:
        if self.rows is UNWRITTEN:
            return self._making_exclusively(operation)
        return self.current_lanes.exclusive(operation)

    @contextlib.contextmanager
    def _making_exclusively(self, operation: str) -> Iterator[None]:
        with self.mutex, self.making(), self.lanes.exclusive(operation):
            yield

    def turn(self) -> AbstractContextManager[None]:
        if self.rows is UNWRITTEN and self.place.unmade() is not None:
            return self._making_in_turn()
        lanes = self.current_lanes
        return lanes.turn() if lanes.takes_turns else contextlib.nullcontext()

    @contextlib.contextmanager
    def _making_in_turn(self) -> Iterator[None]:
        with self.making(), self.lanes.turn():
            yield

    def share(self, name: str) -> None:
        self.place = self.place.shared(self.rows is not UNWRITTEN)
        if self.rows is UNWRITTEN:
            self.current_lanes.copied_by_fork = self.place.is_copied_by_fork()

    def sent_state(self, name: str) -> dict[str, Any]:
        self.look()
        lanes, unmade = (None if self.rows is UNWRITTEN else self.current_lanes), self.place.unmade()
        opening = self.place.opening_arguments(self.size, lanes)
        if opening is not None:
            return {"init": opening}
        try:
            state: dict[str, Any] = {"init": self.place.sent_arguments(self.size, lanes)}
        except StorageError as error:
            raise StorageError(f"Cannot share a storage of type {name}{error}") from None
        if lanes is None and unmade is not None:
            return {**state, "unmade": unmade}
        return {**state, "env_shape": self.env_shape, "descriptor": share_fd(locks_of(lanes).fd)}

    def take_sent(self, state: dict[str, Any]) -> None:
        if "unmade" in state and "init" in state:
            self.place = FirstWriters(self.place, state["unmade"])
            self.current_lanes.copied_by_fork = False
        elif "descriptor" in state:
            store, locks, stored = open_passed_store(state["descriptor"])
            lanes = open_lanes(store, locks, self.size.given_lanes)
            self.take(OpenedTable(lanes, self.place.table(lanes, stored), state["env_shape"], self.ndim))

    # ---- forks and the end ----
    def take_mutex(self, mutex: Any) -> None:
        super().take_mutex(mutex)
        self.current_lanes.mutex = mutex

    def after_fork(self, mutex: Any) -> None:
        self._make_lock = threading.Lock()
        super().after_fork(mutex)
        self.place.after_fork(self.rows is not UNWRITTEN)

    def take_back(self) -> bool:
        """Frees a table that was just made, so that another layout can be; False: it stays."""
        if not self.place.can_take_back():
            return False
        self.current_lanes.close()
        self.env_shape = ()
        self._begin(self._no_lanes(), UNWRITTEN)
        return True

    def flush(self) -> None:
        self.place.flush()

    def close(self) -> None:
        with self.mutex:
            lanes, ends = self.current_lanes, True
            try:
                ends = self.place.close()
            finally:
                if ends and self.rows is not UNWRITTEN:
                    lanes.close()
                    self._begin(self._no_lanes(), UNWRITTEN)
            if not ends:
                lanes.release()


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

    def make(self, new: NewTable) -> OpenedTable:
        if self._unmade is None:
            return self._place.make(new)
        spec = new.spec(with_dimensions=True)
        log.info("storage that processes share from its first row on: %s", spec)
        return self._opened(*self._unmade.open_or_make(spec), new.layout, new.given_lanes)

    def table(self, lanes: Lanes, stored: StoredLayout) -> TableRows:
        return self._place.table(lanes, stored)

    def _opened(
        self, store: _native.Store, locks: LaneLocks, layout: RowLayout | None, given_lanes: int | LaneCount | None
    ) -> OpenedTable:
        """The table of a store that one of the processes has made, perhaps for rows of this layout."""
        saved, env_shape, ndim = saved_layout(store)
        if layout is not None and not layout.differences(saved.logical):
            saved.logical.take_form(layout)  # which may have a tensorclass, unnamed in the store
        lanes = open_lanes(store, locks, given_lanes)
        return OpenedTable(lanes, self.table(lanes, saved), env_shape, ndim)

    def bytes_of(self, new: NewTable) -> int:
        return new.spec(with_dimensions=True).total_bytes

    def awaits_others(self) -> bool:
        return self._unmade is not None

    def find_made(self, size: TableSize) -> OpenedTable | None:
        if self._unmade is None or not self._unmade.is_made():
            return None
        return self._opened(*self._unmade.open(), None, size.given_lanes)

    def making(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._unmade is None else self._unmade.held()

    def is_copied_by_fork(self) -> bool:
        return self._unmade is None

    def shared(self, made: bool) -> Place:
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
