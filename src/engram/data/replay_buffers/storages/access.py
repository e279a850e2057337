"""The lock of a storage: who reads and writes its rows when, and which rows are those of before a load."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import Tensor

from engram.data.replay_buffers.storages.overrides import OuterMethods
from engram.data.replay_buffers.storages.setting import RowSetter
from engram.data.replay_buffers.storages.users import CountedSets, GetSetRows, UsersRows, UsersStorage
from engram.pytree import KeyPath
from engram.store.indexing import MissingRowError, look_again, select, unwritten
from engram.store.places import LaneCount
from engram.store.rows import Checked, ItemReader, Rows
from engram.store.steps import Steps
from engram.store.table import Table

_T = TypeVar("_T")


class Access:
    """Keeps users of a table out of each other's way, in this process and in others.

    Args:
        table: of the storage.
        outer: what buffers call of a user's child; None: the rows.
        inner: what `get` and `set` call of such a child, and a writer that keeps the best; None: the rows.
        own: the names that a user's class has of its own.
    """

    def __init__(
        self,
        table: Table,
        outer: OuterMethods | None = None,
        inner: UsersRows | None = None,
        own: frozenset[str] = frozenset(),
    ) -> None:
        self.table, self._outer, self._inner = table, outer, inner
        #: Whether a method of a user's class writes over stored rows, which takes them as this class reads them. Else
        #: rows that are to be changed are those of the table, in whatever form such a class reads them.
        self.writes_as_read = bool(own & {"set", "overwrite"})
        #: Where each row stores its own index, in a `set` that a child overrides.
        self.index_key: str | None = None
        # The slots of rows that `set` appends for a writer, in their order; None: it is called by others.
        self._appended: list[Tensor | int] | None = None
        self._only_replaces = False  # whether `set` appends nothing
        # Raised before and after all rows are replaced (`empty`, `loads`), so odd meanwhile: rows that were drawn
        # under another value are not read.
        self.incarnation = 0

    def turn(self) -> AbstractContextManager[None]:
        """A block in which no other process appends where this one does; the caller holds the mutex.

        Before the first write there is nothing to take turns in.

        Raises:
            StorageInUseError: another process has been appending for ten seconds; the message names it.
        """
        return self.table.turn()

    def exclusive(self, operation: str) -> AbstractContextManager[Any]:
        """A block that no other user of the storage runs beside.

        Raises:
            StorageInUseError: another process has the storage open; `operation` is named in the message.
        """
        return self.table.exclusive(operation)

    @contextlib.contextmanager
    def replacing(self, operation: str) -> Iterator[None]:
        """As `exclusive`, around a replacement of all rows: readers see the rows of before or those of the end."""
        with self.table.exclusive(operation):
            if self.incarnation % 2:  # inside of another such block, whose end is the end
                yield
                return
            self.incarnation += 1
            try:
                yield
            finally:
                self.incarnation += 1

    def settled(self, look: Callable[[], _T]) -> _T:
        """What `look` returns, outside of a replacement of all rows: waits for its end where one is under way."""
        before = self.incarnation
        result = self.table.lanes.validated(look)
        if before == self.incarnation and not before % 2:
            return result
        with self.table.mutex:
            return look()

    def validated(self, read: Callable[[], _T], errors_only: bool = False) -> _T:
        """What `read` returns, of a moment in which no other process changed stored rows in place.

        With `errors_only` a result may be of several moments; only an error is not believed unless it is of one.
        """
        return self.table.lanes.validated(read, errors_only)

    # ---- reading at an index ----
    def get(self, index: Any) -> Any:
        """As `get` of a storage."""
        return self._get(index, self._inner)

    def get_to_write(self, storage: UsersStorage, index: Any) -> Any:
        """As `get` of the storage, in the form in which rows are written over stored ones."""
        return storage.get(index) if self.writes_as_read else self._get(index, None)

    def _get(self, index: Any, inner: UsersRows | None) -> Any:
        read = functools.partial(self._read_stored, index, inner)
        for _ in range(100):
            rows = self.table.lanes.validated(functools.partial(self.beside_writers, read))
            if rows.overwritten is None:
                return rows.batch
        raise RuntimeError("other processes overwrite these rows faster than they can be copied; read fewer at a time")

    def _read_stored(self, index: Any, inner: UsersRows | None) -> Rows:
        """The rows at an index; MissingRowError where one of them is not stored now."""
        table = self.table
        with table.mutex:  # no row may be replaced between the look at the counters and the copy
            lanes = table.lanes
            selection = select(lanes.store, index, table.rows.env_shape)
            rows = table.rows.of_selection((inner or table.rows).read(selection.slots, selection.shape), selection)
        if rows.absent is not None:
            raise unwritten(lanes.store, int(selection.slots[rows.absent[0]]))
        return rows

    def beside_writers(self, look: Callable[[], _T]) -> _T:
        """What `look` returns, which is called again while other processes overwrite rows that it misses.

        Raises:
            MissingRowError: a row is missing for another reason.
        """
        try:
            return look()
        except MissingRowError:
            return look_again(self.table.lanes.store, look)

    @property
    def item_reader(self) -> ItemReader | None:
        """What reads items for batches; None: `read` of the storage does, which gives a batch."""
        return (self._outer or self.table.rows).item_reader

    # ---- writing at an index ----
    def set(self, cursor: Any, steps: Steps) -> None:
        """As `set` of a storage."""
        with self.table.mutex, self.table.making():  # in the order of `extend`
            if steps.index_key is None and self.index_key is not None:
                steps = steps._replace(index_key=self.index_key)
            if self._only_replaces:
                self._setter().replace(cursor, steps)
                return
            slots = self._setter().set(cursor, steps, new_rows=self._appended is not None)
            if self._appended is not None and slots is not None:
                self._appended.append(slots)

    def assign(self, index: Any, steps: Steps) -> None:
        """Replaces stored rows for `rb[index] = items`."""
        with self.table.mutex:
            if isinstance(self._outer, OuterMethods) and self._outer.writes_by_set:
                self._outer.replace(index, steps)
            else:
                self._setter().replace(index, steps)

    @contextlib.contextmanager
    def keeping(self, kept: Mapping[int, frozenset[KeyPath]]) -> Iterator[None]:
        """Inside, in this thread, rows that are written over stored ones leave these entries as they are, by slot.

        What a user's class makes of an entry when it reads it, and of that when it writes it, need not be the same.
        """
        with self.table.mutex:
            rows = self.table.rows
            rows.kept = kept
            try:
                yield
            finally:
                rows.kept = {}

    def _setter(self) -> RowSetter:
        return RowSetter(self.table, self._inner, self.replacing)

    @contextlib.contextmanager
    def setting_new_rows(self) -> Iterator[list[Tensor | int]]:
        """Inside, in this thread, `set` writes new rows: also those that take the place of others.

        What it appends is in the list, call by call: the slots that `append` returned.
        """
        with self.table.mutex:
            before, self._appended = self._appended, []
            try:
                yield self._appended
            finally:
                self._appended = before

    @contextlib.contextmanager
    def setting_stored_rows(self) -> Iterator[None]:
        """Inside, in this thread, `set` only replaces rows that are stored, at any index, and appends none."""
        with self.table.mutex:
            before, self._only_replaces = self._only_replaces, True
            try:
                yield
            finally:
                self._only_replaces = before

    # ---- for the parts of a buffer ----
    def prepare_replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> Callable[[], None]:
        """As `replace` of a storage, in two steps: what may fail for want of memory is done here.

        What is returned writes.
        """
        return (self._inner or self.table.rows).prepare_replace(checked, rows, slots)

    def for_own_writers(self, storage: UsersStorage) -> Any:
        """What a writer of a user's own calls `set` of, given the storage."""
        return CountedSets(storage) if isinstance(self.table.rows, GetSetRows) else storage

    def expect_sequences(self, by_set: bool = False) -> None:
        """Called for a writer that replaces rows out of turn (`by_set`: by `set`): every row then carries its sequence.

        Raises:
            TypeError: this storage does not let the writer do that.
        """
        (self._outer or self.table).expect_sequences(by_set)

    def carry_sequences(self) -> None:
        """Before the first row is written over another one out of turn: makes room for the sequences of rows.

        Raises:
            StorageError: the rows have none, and their layout cannot be changed.
        """
        self.table.carry_sequences(self.replacing)

    def description(self) -> dict[str, Any] | None:
        """Arguments for a storage like this one, as far as a checkpoint can have them; None: they are not known."""
        arguments = self.table.arguments()
        if arguments is not None and isinstance(arguments.get("lanes"), LaneCount):
            arguments["lanes"] = operator.index(arguments["lanes"])
        if arguments is not None and "compact" in arguments:
            rest = {name: value for name, value in arguments.items() if name != "compact"}
            return {**rest, "compact": arguments["compact"].to_json()}
        plain = {bool, int, str, type(None)}
        return arguments if arguments is not None and plain.issuperset(map(type, arguments.values())) else None
