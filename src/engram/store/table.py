"""A table: rows of one kind in a place. How they come to be there, who else may make them, and how it ends.

`lanes` are those of the store that is in use by now: asking for them looks whether another process has made it. `rows`
are asked for after `look`, or after `lanes`.

A table is in one of these states. It has lanes in each. Its place knows which of the first two, and whether it is
closed (`awaits_others`):

    unwritten   There is no store: the lanes count no rows, and `rows` are `Unwritten`. Tables in memory begin so, and
                those in temporary files.
    awaited     As unwritten; another process that shares the place may make the store at any time, and each look at
                `lanes` finds out whether one has. Tables in folders begin so, and those with `shared_init=True`.
    written     There are rows of a kind (`rows.py`), in a store which other processes may have open, too. Tables begin
                so whose folder holds a store, that are made around tensors, that only read (`ObservedFile`), and those
                of items and of users' classes.
    closed      As unwritten: the stores of others are not looked for. Another write makes a store, or opens the one
                that is in the folder; one that only reads refuses it.

What changes one into another. Where rows become others, it ends in `_begin`:

    make        unwritten, awaited, closed -> written: by a first batch, a layout or a load (`make_for`). Of several
                processes the first one makes the store, and the others open it.
    look        awaited -> written, where another process has made the store.
    take_sent   In a process that was sent the storage: unwritten -> written by the file of the store; before there is
                one, unwritten -> awaited.
    share       unwritten -> unwritten, or awaited: the place becomes one that processes share.
    limit       written -> written, of items that there are none of yet: they get a limit.
    carry_sequences
                written -> written: the same rows, each with room for a sequence; columns get one more where they are
                (also in `expect_sequences`).
    take_back   written -> unwritten: a load that failed takes back the table that it made, unless other processes may
                have it open by now (`_Sink._reset` in `state/rows.py`).
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
    5. Lanes, rows and what is derived from them are exchanged in one function, `_begin`; who writes or reads asks for
       them under the mutex. (data/test_loads_that_fail.py, data/storages/test_exchanged_rows.py)
    6. A child that was forked before the first write, and has rows of its own for that, is told at its first use.
       (processes/test_stores_in_processes.py: test_a_child_that_was_forked_before_the_first_write_...)
    7. A look opens nothing that was closed. (processes/test_shared_init.py: test_a_closed_one_is_not_opened_again)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from engram import pytree
from engram._copies import share_fd
from engram._text import warn_user
from engram.errors import StorageError
from engram.pytree import KeyPath, TreeSpec
from engram.store.compact import (
    NO_REPLACING,
    NOTHING_TO_SHARE,
    ROW_WORTH_IT,
    SAVING_WORTH_IT,
    Compact,
    FirstSteps,
    KnownSteps,
    advice_to_share,
)
from engram.store.files import open_passed_store
from engram.store.first_writers import FirstWriters
from engram.store.flow import Flow
from engram.store.lanes import Lanes
from engram.store.layout import LeafSpec, ObservationKeys, RowLayout, specs_of
from engram.store.packed_rows import NativeCalls
from engram.store.places import NewTable, Place, TableSize, locks_of, open_lanes
from engram.store.rows import NO_STEPS, Checked, NoRows, Rows, TableRows, check_envs, warn_of_items
from engram.store.steps import Steps

#: Makes a block in which all rows are replaced, by the name of the operation.
Replacing = Callable[[str], AbstractContextManager[Any]]


class _LookedFor:
    """The `lanes` of a table until they are an attribute of it: another process may have made the store by now."""

    def __get__(self, table: Table | None, owner: type[Table]) -> Any:
        return self if table is None else table.look().lanes


class Table:
    """Stored rows, and how they come to be there: what a storage and the buffer around it use.

    Args:
        size: how many.
        place: where.
        rows: what keeps them from the start; None: the first write makes it.
        compact: which observations are stored once; None: none.
        advises: whether the first rows are looked at for what storing observations once would save.
    """

    #: Counters of the rows; before the first write they count none.
    lanes: Lanes = _LookedFor()  # type: ignore[assignment]

    def __init__(
        self,
        size: TableSize,
        place: Place,
        rows: TableRows | None = None,
        compact: Compact | None = None,
        *,
        advises: bool = False,
    ) -> None:
        self.size, self.place, self.compact, self._advises = size, place, compact, advises
        self.mutex: Any = contextlib.nullcontext()
        self._make_lock = threading.Lock()
        self._expects_sequences = False
        #: What native calls do with the rows.
        self.native = NativeCalls()
        #: The n of n-step rows, whose next observation is that of the n-th row behind them; 1: rows of single steps.
        self.horizon = 1
        #: Who waits for whom.
        self.flow = Flow()
        #: Whether batches carry an index, so that rows must have a place for it where a writer stores it.
        self.requires_index = False
        self._unwritten = Unwritten(self, self._no_lanes())
        self._begin(self._unwritten if rows is None else rows)

    # ---- facts ----
    @property
    def initialized(self) -> bool:
        """Whether it has a place for rows."""
        return self.look() is not self._unwritten

    @property
    def lane_count(self) -> int:
        """How many lanes there are, or will be."""
        return self.size.lanes if self._lanes_here is None else self._lanes_here.store.lanes

    @property
    def max_size(self) -> int | None:
        """Steps that fit; None: no limit, or it is not known yet."""
        return self.size.max_size if self._capacity is None else self._capacity

    @property
    def replaces_rows(self) -> bool:
        """Whether rows can be written over others out of turn (`prepare_replace`)."""
        return self.compact is None and self.rows.replaces_rows

    @property
    def extra(self) -> str:
        """What the `repr` of a storage says besides size, length and dimensions."""
        lanes = self.lane_count
        each = "" if self.max_size is None else f", steps_per_lane={self.max_size // lanes}"
        of_lanes = f", lanes={lanes}{each}" if lanes > 1 else ""
        observations = self.rows.observations
        return of_lanes if observations is None else f"{of_lanes}, compact={observations}"

    # ---- from nothing to rows ----
    @contextlib.contextmanager
    def first_write(self) -> Iterator[bool]:
        """A block in which this thread alone may `make` the table; gives whether there is no table yet."""
        with self.making(), self._make_lock:
            yield self.rows is self._unwritten

    def make(self, new: NewTable) -> None:
        """Makes the table, or opens what another process has made meanwhile.

        Raises:
            StorageError: there is no room for it.
        """
        self.rows.lanes.use()  # which warns in a child that was forked before there was anything to share
        self._begin(self.place.make(new))

    def look(self) -> TableRows:
        """Opens what another process has made, if one has; returns the rows that are in use then."""
        if self.rows is self._unwritten and self.place.awaits_others():
            with self._make_lock:
                if self.rows is self._unwritten and (opened := self.place.find_made(self.size)) is not None:
                    self._begin(opened)
        return self.rows

    def _begin(self, rows: TableRows) -> None:
        """Uses these rows from now on, and lets native calls use them."""
        rows.take_mutex(self.mutex)
        if rows.observations is not None and self.compact is None:
            self.compact = Compact.of(rows.observations)
        here = rows.lanes if rows is not self._unwritten and self.place.keeps_rows() else None
        # Before anybody sees the rows: a thread that samples would find them unbound.
        self.flow.use(rows, counts_late=here is None and rows is not self._unwritten)
        #: The lanes of rows that lie in the place; None: there are none yet, or a user's class keeps them.
        self._lanes_here: Lanes | None = here
        self._capacity = here.capacity if here is not None and self.size.is_given else None
        #: What keeps the rows.
        self.rows = rows
        self.__dict__.pop("lanes", None)
        if here is not None:
            self.lanes = here
            here.on_join = functools.partial(_bind_again, weakref.ref(self))
        rows.bind(self.native)
        if self.flow.conflict:
            self.native.unbind()  # so that each use looks, and says why

    def _no_lanes(self) -> Lanes:
        """Lanes that count no rows."""
        lanes = Lanes.in_memory(self.size.max_size)
        lanes.mutex, lanes.copied_by_fork = self.mutex, self.place.is_copied_by_fork()
        return lanes

    def limit(self, max_size: int) -> None:
        """Gives an empty table without limit a size."""
        if self.max_size is not None:
            raise ValueError(f"capacity={max_size}, but the storage has max_size={self.max_size}; give one of them")
        self.rows.limit(max_size)
        self.size = TableSize(max_size, None, self.size.ndim, None)
        self._begin(self.rows)

    # ---- a layout, which the first batch decides, or a load ----
    def make_for(
        self,
        layout: RowLayout,
        env_shape: tuple[int, ...],
        saved_lanes: int = 0,
        observations: ObservationKeys | None = None,
    ) -> None:
        """Makes the table for rows of a layout and environments of this shape, perhaps saved ones of so many lanes.

        Args:
            observations: those that were found to be stored once; None: as far as the layout says it.
        """
        if not self.size.is_given:
            raise ValueError("this storage needs a max_size, or max_bytes")
        if self._expects_sequences:
            layout = layout.with_sequence()
        size = self.size
        if self.compact is not None:
            self.compact.check(layout, self.place.device)
            if observations is None:
                observations = self.compact.find(layout, KnownSteps(ObservationKeys({}, self.horizon)))
        lanes, capacity = size.fit(layout, env_shape, self.place, saved_lanes, observations)
        self.make(NewTable(layout, env_shape, size.ndim, lanes, capacity, size.given_lanes, observations))

    def adopt(self, layout: RowLayout) -> None:
        """Makes the table for rows of this layout; the same again is no error.

        Raises:
            ValueError: it has another layout already; every difference is listed.
        """
        with self.mutex, self.first_write() as is_first:  # in the order of `extend`
            if is_first:
                self.make_for(layout, ())
        own = self.rows.layout
        differences = [] if is_first or own is None else own.differences(layout)
        if differences:
            raise ValueError(f"this storage has another layout: {'; '.join(differences)}. Nothing was changed")

    def fit_first(self, steps: Steps) -> Checked:
        """As `check` of a storage, of a first batch: makes the table for rows like it."""
        merged = steps if steps.lead < 2 else steps.with_one_env_dim()
        with self.first_write() as is_first:
            if is_first:
                self._make_for_first(merged, steps)
        rows = self.rows
        if self.place.awaits_others():  # one of them may have made it
            check_envs(steps.env_shape, rows.env_shape)
        return rows.fit(steps)

    def _make_for_first(self, steps: Steps, given: Steps) -> None:
        """Makes the table for rows like those of a batch, which was given with all dimensions of environments."""
        root, entries = pytree.describe(steps.items, steps.lead)
        self.place.note_device([leaf for _, leaf in entries])
        leaves, ndim = specs_of(entries, steps.lead), self.size.ndim
        extra = _add_index(root, leaves, steps, ndim, required=self.requires_index)
        layout = RowLayout(root, leaves)
        # The first batch decides the layout only if it can be written itself.
        if not steps.plan(layout, extra).steps:
            raise ValueError(NO_STEPS)
        if steps.lead == ndim == 1 and layout.within:
            warn_of_items(steps.items)
        observations = None
        if self.compact is not None:
            observations = self.compact.find(layout, FirstSteps(steps, self.horizon))
            if observations is None:
                warn_user(NOTHING_TO_SHARE)
        self.make_for(layout, given.env_shape, observations=observations)
        if self._advises and layout.payload_bytes > ROW_WORTH_IT:
            _advise_to_share(self, layout, FirstSteps(steps, self.horizon, most=32))

    # ---- sequences of rows that are written out of turn ----
    def expect_sequences(self, by_set: bool) -> None:
        """Called for a writer that replaces rows out of turn (`by_set`: by `set`): each row then carries its sequence.

        Raises:
            TypeError: the writer cannot do that here.
        """
        if self.compact is not None:
            if not by_set:
                raise TypeError(NO_REPLACING)
            return
        self._expects_sequences = True
        if self.rows.widened == "in place":
            self.rows.with_sequences()

    def carry_sequences(self, replacing: Replacing) -> None:
        """Before the first row is replaced out of turn: makes room for sequences.

        Raises:
            StorageError: the rows have none, and their layout cannot be changed.
        """
        rows = self.rows
        if rows.layout is None or rows.layout.carries_sequence:
            return
        if rows.widened == "in place":
            rows.with_sequences()
            return
        if rows.widened is None:
            raise StorageError(
                "these rows were made for another writer: they have no place for the sequence that a replaced row "
                "carries, and rows in a file or in shared memory keep their layout. Save them with dumps, and take "
                "them over with loads into a storage that is made with a TensorDictMaxValueWriter; nothing was written"
            )
        with replacing("giving rows their sequences"):
            self._begin(rows.with_sequences())

    # ---- reading ----
    def view(self, index: slice | None = None) -> Any:
        """A live view of all rows, or of those of a slice where they lie next to each other; None: there is none."""
        rows = self.look()
        if index is None:
            return rows.lanes.validated(rows.view)
        if rows.layout is None:
            return None
        store = rows.lanes.store
        lane = store.lane(0)
        stored = lane["published"] - lane["first"]
        # Without gaps and from slot 0 on: not where a recovery left the middle of a ring, not in several lanes.
        contiguous = store.lanes == 1 and (stored == store.lane_capacity or lane["first"] % store.lane_capacity == 0)
        start, stop, step = index.indices(max(0, stored))
        return rows.view(range(start, max(start, stop))) if contiguous and step == 1 else None

    # ---- other processes ----
    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """A block in which no other process makes a table that this one shares and has not made yet."""
        if self.place.unmade() is None or self.initialized:
            yield
            return
        with self.place.making():
            self.look()  # while this process waited
            yield

    def exclusive(self, operation: str) -> AbstractContextManager[Any]:
        """A block that no other user of the rows runs beside.

        Raises:
            StorageInUseError: another process has them open; `operation` is named in the message.
        """
        if self.rows is self._unwritten:
            return self._making_exclusively(operation)
        return self.rows.lanes.exclusive(operation)

    @contextlib.contextmanager
    def _making_exclusively(self, operation: str) -> Iterator[None]:
        with self.mutex, self.making(), self.lanes.exclusive(operation):
            yield

    def turn(self) -> AbstractContextManager[None]:
        """A block in which no other process appends where this one does; the caller holds the mutex.

        Raises:
            StorageInUseError: another process has been appending for ten seconds; the message names it.
        """
        if self.rows is self._unwritten and self.place.unmade() is not None:
            return self._making_in_turn()
        lanes = self.rows.lanes
        return lanes.turn() if lanes.takes_turns else contextlib.nullcontext()

    @contextlib.contextmanager
    def _making_in_turn(self) -> Iterator[None]:
        with self.making(), self.lanes.turn():
            yield

    def share(self, name: str) -> None:
        """Lets other processes see and write the rows of a storage of this name. ValueError: they cannot."""
        self.place = self.place.shared(self.rows is not self._unwritten, name)
        if self.rows is self._unwritten:
            self.rows.lanes.copied_by_fork = self.place.is_copied_by_fork()

    def sent_state(self, name: str) -> dict[str, Any]:
        """What another process gets that shares the rows, or opens their file; with `init`, a constructor's arguments.

        Raises:
            StorageError: it cannot; the message names the class of the storage.
        """
        own = self.place.sent_state(name)
        if own is not None:
            return own
        self.look()
        lanes, unmade = self._lanes_here, self.place.unmade()
        opening = self.place.opening_arguments(self.size, lanes)
        if opening is not None:
            return {"init": opening}
        try:
            state: dict[str, Any] = {"init": self.place.sent_arguments(self.size, lanes)}
        except StorageError as error:
            raise StorageError(f"Cannot share a storage of type {name}{error}") from None
        if self.compact is not None:
            state["init"] = {**state["init"], **self._as_found()}
        if lanes is None and unmade is not None:
            return {**state, "unmade": unmade}
        return {**state, "env_shape": self.rows.env_shape, "descriptor": share_fd(locks_of(lanes).fd)}

    def take_sent(self, state: dict[str, Any]) -> None:
        """In that process: uses what was sent."""
        if self.place.take_sent(state):
            return
        if "unmade" in state and "init" in state:
            self.place = FirstWriters(self.place, state["unmade"])
            self.rows.lanes.copied_by_fork = False
        elif "descriptor" in state:
            store, locks, stored = open_passed_store(state["descriptor"])
            lanes = open_lanes(store, locks, self.size.given_lanes)
            self._begin(self.place.rows_of(lanes, stored, state["env_shape"], self.size.ndim))

    # ---- copies and loads ----
    def arguments(self) -> dict[str, Any] | None:
        """Arguments for a storage like this one, to put copied rows in; None: it is copied as any object."""
        arguments = self.place.arguments(self.size, self._lanes_here)
        return arguments if arguments is None or self.compact is None else {**arguments, **self._as_found()}

    def _as_found(self) -> dict[str, Any]:
        """The argument of a constructor that says what was found in the first rows."""
        found = self.rows.observations
        return {"compact": self.compact if found is None else Compact.of(found)}

    def row_form(self) -> Any:
        """What an empty copy must know about the rows before their state is loaded; None: there are none."""
        layout, observations = self.rows.layout, self.rows.observations  # with its classes, which a state does not name
        if layout is None:
            return None
        form = layout.root, layout.leaves, layout.carries_sequence, self.rows.env_shape, None
        return form if observations is None else (*form, observations)

    def take_row_form(self, form: Any) -> None:
        """Makes room for rows of what `row_form` returned."""
        if form is not None and self.rows.layout is None:
            root, leaves, carries_sequence, env_shape, _, *observations = form
            self.make_for(RowLayout(root, leaves, carries_sequence), env_shape, 0, *observations)

    def widen_for(self, layout: RowLayout, replacing: Replacing) -> None:
        """Before rows of this layout are restored: makes room for the sequences that they carry, where it can."""
        if (self._expects_sequences or layout.carries_sequence) and self.rows.widened is not None:
            self.carry_sequences(replacing)

    # ---- forks and the end ----
    def take_mutex(self, mutex: Any) -> None:
        """Takes the mutex that writers hold."""
        self.mutex = mutex
        self.rows.take_mutex(mutex)

    def after_fork(self, mutex: Any) -> None:
        """In a child: takes a mutex that no thread of the parent holds; nothing is opened before it is used here."""
        self._make_lock = threading.Lock()
        self.flow.after_fork()
        self.take_mutex(mutex)
        self.place.after_fork(self.rows is not self._unwritten)
        self.native.pause()  # until this process uses the lanes

    def take_back(self) -> bool:
        """Frees a table that was just made, so that another layout can be; False: it stays."""
        if not self.place.can_take_back():
            return False
        self.rows.lanes.close()
        self._end()
        return True

    def flush(self) -> None:
        """Makes rows survive a power cut, where they outlive their processes."""
        self.place.flush()

    def release(self) -> None:
        """Gives this process's lane back, for another process to take."""
        self.lanes.release()

    def close(self) -> None:
        """Ends the use of a file, or gives this process's lane back."""
        with self.mutex:
            lanes, ends = self.rows.lanes, True
            try:
                ends = self.place.close()
            finally:
                if ends and self._lanes_here is not None:
                    lanes.close()
                    self._end(self.rows.env_shape)
            if not ends:
                lanes.release()

    def _end(self, env_shape: tuple[int, ...] = ()) -> None:
        """There are no rows any more; those that were had environments of this shape."""
        self._unwritten = Unwritten(self, self._no_lanes())
        self._unwritten.env_shape = env_shape
        self._begin(self._unwritten)


class Unwritten(NoRows):
    """The rows of a table that has none yet, or none any more: those that are there by now, or an error.

    It does not keep the table alive: there would be a cycle, and the files of a storage that is dropped would wait for
    the garbage collector.
    """

    def __init__(self, table: Table, lanes: Lanes) -> None:
        super().__init__(lanes, _nothing_written)
        self._table, self.ndim = weakref.ref(table), table.size.ndim

    def _now(self) -> TableRows:
        """The rows that this process, or another one, has made meanwhile. IndexError: there are none."""
        table = self._table()
        rows = self if table is None else table.look()
        if rows is self:
            raise _nothing_written("")
        return rows

    def fit(self, steps: Steps) -> Checked:
        table = self._table()
        assert table is not None
        return table.fit_first(steps)

    def append(self, checked: Checked, most: int | None = None) -> Tensor | int:
        return self._now().append(checked, most)

    def prepare_replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> Callable[[], None]:
        return self._now().prepare_replace(checked, rows, slots)

    def overwrite(self, slots: Tensor, steps: Steps) -> None:
        self._now().overwrite(slots, steps)

    def read(self, slots: Tensor, *how: Any) -> Rows:
        return self._now().read(slots, *how)

    def column(self, path: KeyPath, slots: Tensor) -> Tensor:
        return self._now().column(path, slots)


def _nothing_written(method: str) -> IndexError:
    return IndexError("nothing has been written to this storage yet; extend it first")


def _bind_again(table: weakref.ref[Table]) -> None:
    """In a forked child that has begun to use a table's lanes."""
    if (alive := table()) is not None:
        alive.rows.bind(alive.native)


def _add_index(
    root: TreeSpec, leaves: list[LeafSpec], steps: Steps, ndim: int, *, required: bool
) -> tuple[str, Tensor] | None:
    """Adds the key under which rows store their own index to the root of their form, and to their leaves.

    Returns it with a place for the index of each step; None where there is none. A tensorclass without such a field is
    left as it is, unless the index is required.
    """
    key, kind, cls = steps.index_key, root.kind, root.cls
    if key is None:
        return None
    lacks_field = cls is not None and key not in {field.name for field in dataclasses.fields(cls)}
    if kind not in ("td", "dict", "class") or (lacks_field and required):
        named = {"leaf": "tensor", "stack": "lazy stack of different members"}
        form = f"{cls.__name__} without such a field" if cls is not None else named.get(kind, kind)
        raise TypeError(f"a {form} has no place for {key!r}; use RoundRobinWriter, which stores no index")
    if lacks_field:
        return None
    if kind == "class":
        root = root.children[0]
    index = LeafSpec((key,), torch.int64, (*root.batch, *(() if ndim == 1 else (ndim,))))
    if key in root.keys:
        leaves[root.children[root.keys.index(key)].leaf] = index
    else:
        leaves.append(index)
        root.keys, root.children = (*root.keys, key), (*root.children, TreeSpec("leaf", leaf=len(leaves) - 1))
    return key, torch.zeros((*steps.shape, *index.shape), dtype=torch.int64, device="cpu")


def _advise_to_share(table: Table, layout: RowLayout, steps: FirstSteps) -> None:
    """Warns where storing observations once would save much of the memory of a table that was just made."""
    lanes, place = table.rows.lanes, table.place
    if place.device.type != "cpu" or (found := steps.shared(layout)) is None:
        return
    size = lanes.store.lanes, lanes.store.lane_capacity, table.size.given_lanes
    new = NewTable(layout, table.rows.env_shape, table.size.ndim, *size)
    plain, once = (place.bytes_of(new._replace(observations=keys)) for keys in (None, found))
    if plain - once > SAVING_WORTH_IT:
        warn_user(advice_to_share(found, lanes.capacity, plain, once))
