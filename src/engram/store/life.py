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
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar, overload

from engram._copies import share_fd
from engram.errors import StorageError
from engram.pytree import KeyPath
from engram.store.files import open_passed_store
from engram.store.first_writers import FirstWriters
from engram.store.lanes import Lanes
from engram.store.packed_rows import PackedRows
from engram.store.places import (
    NewTable,
    OpenedTable,
    Place,
    TableSize,
    locks_of,
    open_lanes,
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
