"""What a storage holds: a table of rows."""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram import pytree
from engram.errors import StorageError
from engram.pytree import KeyPath, format_key, get_entry, to_tensor
from engram.store.indexing import Selection, last_of_each, stored_slots
from engram.store.lanes import Lanes
from engram.store.layout import LeafSpec, RowLayout
from engram.store.packed_rows import NativeRows
from engram.store.places import NOT_SENT
from engram.store.rows import Checked, ItemReader, Rows, expand_slots
from engram.store.steps import Steps

#: Makes a block in which all rows are replaced, by the name of the operation.
Replacing = Callable[[str], AbstractContextManager[Any]]
_STEPS_AT_ONCE = 512  # of which whole rows are read for one leaf


class Table(abc.ABC):
    """Stored rows, as a storage and the buffer around it use them.

    What is here suits rows that one process keeps in its memory and whose form is not known; five methods are left.

    Args:
        max_size: steps that fit; None: no limit.
    """

    #: Keys, shapes and dtypes of a row; None: it is not known, or they differ.
    layout: RowLayout | None = None
    #: What keeps the rows, where all have one layout; None: something else.
    rows: Any = None
    #: Batch dimensions between time and the entries.
    env_shape: tuple[int, ...] = ()
    #: Batch dimensions of a stored item: `()` of steps, `(T,)` of whole trajectories of T steps.
    item_shape: tuple[int, ...] = ()
    #: Counters of the rows; before the first write they count none.
    lanes: Lanes

    def __init__(self, max_size: int | None = None) -> None:
        self._max_size = max_size
        #: Batch dimensions of the data; the last one is time.
        self.ndim = 1
        #: What native calls do with the rows.
        self.native = NativeRows()
        #: What makes a batch of what was read; None: it is one.
        self.collate: Callable[[Any], Any] | None = None
        #: Whether rows can be written over others out of turn (`prepare_replace`).
        self.replaces_rows = True
        #: Whether `update_if_present` of a buffer can write over rows.
        self.replaces_in_place = True
        #: Whether a pickle names a file instead of holding the rows.
        self.has_path = False
        #: The n of n-step rows, whose next observation is that of the n-th row behind them; 1: rows of single steps.
        self.horizon = 1
        #: Whether batches carry an index, so that rows must have a place for it where a writer stores it.
        self.requires_index = False
        #: Of stored rows that are changed in part, by slot: the entries that stay, whatever `overwrite` is given there.
        self.kept: Mapping[int, frozenset[KeyPath]] = {}
        self.mutex: Any = contextlib.nullcontext()

    def take_mutex(self, mutex: Any) -> None:
        """Takes the mutex that writers hold."""
        self.mutex = mutex

    def after_fork(self, mutex: Any) -> None:
        """In a child: takes a mutex that no thread of the parent holds; nothing is opened before it is used here."""
        self.take_mutex(mutex)

    # ---- facts ----
    @property
    def initialized(self) -> bool:
        """Whether it has a place for rows."""
        return True

    @property
    def max_size(self) -> int | None:
        """Steps that fit; None: no limit, or it is not known yet."""
        return self._max_size

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, used or not."""
        return len(self.lanes) * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes that a stored row takes in a batch; 0 before the first write."""
        if not len(self.lanes):
            return 0
        rows = self.read(stored_slots(self.lanes.store)[:1]).batch
        values = [to_tensor(value) for _, value in pytree.describe(rows, 1)[1]]
        return sum(value.numel() * value.itemsize for value in values)

    @property
    def extra(self) -> str:
        """What the `repr` of a storage says besides size, length and dimensions."""
        return ""

    @property
    def is_full(self) -> bool:
        """Whether every slot holds a row."""
        return self.lanes.is_full

    def count(self) -> int:
        """Stored steps."""
        return len(self.lanes)

    # ---- other processes ----
    def making(self) -> AbstractContextManager[Any]:
        """A block in which no other process makes a table that this one shares and has not made yet."""
        return contextlib.nullcontext()

    def turn(self) -> AbstractContextManager[None]:
        """A block in which no other process appends where this one does; the caller holds the mutex.

        Raises:
            StorageInUseError: another process has been appending for ten seconds; the message names it.
        """
        return contextlib.nullcontext()

    def exclusive(self, operation: str) -> AbstractContextManager[Any]:
        """A block that no other user of the rows runs beside.

        Raises:
            StorageInUseError: another process has them open; `operation` is named in the message.
        """
        return self.lanes.exclusive(operation)

    def share(self, name: str) -> None:
        """Lets other processes see and write the rows of a storage of this name. ValueError: they cannot."""
        raise ValueError(
            f"shared=True needs LazyTensorStorage or LazyMemmapStorage, whose rows processes can share, not {name}"
        )

    # ---- sequences of rows that are written out of turn ----
    def expect_sequences(self, by_set: bool) -> None:
        """Called for a writer that replaces rows out of turn (`by_set`: by `set`): each row then carries its sequence.

        Raises:
            TypeError: the writer cannot do that here.
        """

    def carry_sequences(self, replacing: Replacing) -> None:
        """Before the first row is replaced out of turn: makes room for sequences.

        Raises:
            StorageError: the rows have none, and their layout cannot be changed.
        """

    # ---- writing ----
    @abc.abstractmethod
    def fit(self, steps: Steps) -> Checked:
        """As `check` of a storage."""

    @abc.abstractmethod
    def append(self, checked: Checked, most: int | None = None) -> Tensor | int:
        """As `append` of a storage."""

    def prepare_replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> Callable[[], None]:
        """As `replace` of a storage, in two steps: what may fail for want of memory is done here, what is returned
        writes.
        """
        raise NotImplementedError("a table without `prepare_replace`, which writers need that keep the best")

    @abc.abstractmethod
    def overwrite(self, slots: Tensor, steps: Steps) -> None:
        """As `overwrite` of a storage; the index that steps store, if any, is that of their slots."""

    def is_single(self, items: Any, env_dims: int = 0, *, unwritten: bool = False) -> bool:
        """Whether the data are one step, to be written at every index; with `env_dims` one of all environments.

        `unwritten` is the answer of a table whose rows have no form yet.
        """
        path, value = pytree.describe(items, 0)[1][0]
        leaf = self.leaf(path)
        return leaf is not None and to_tensor(value).ndim == env_dims + len(leaf.shape)

    def for_selection(self, items: Any, selection: Selection) -> Any:
        """Data for the rows of an index as `overwrite` takes them: one step is repeated."""
        if self.is_single(items):
            return pytree.expand(items, len(selection.slots))
        dims = len(selection.shape)
        if dims < 2:
            return items
        leaves = pytree.describe(items, 0)[1]
        shape = tuple(pytree.shape_of(leaves[0][1]))[:dims] if leaves else ()
        if shape != selection.shape:
            raise ValueError(
                f"the index means steps of shape {list(selection.shape)}, the data have {list(shape)}; nothing was "
                "written"
            )
        return pytree.flatten_dims(items, 0, dims - 1)

    def for_steps(self, items: Any, steps: int, at_one: bool) -> Any:
        """Data for so many time steps as a batch (`at_one`: the index is an int): one step is repeated."""
        if at_one:
            return pytree.expand(items, 1) if self.is_single(items, self.ndim - 1, unwritten=True) else items
        items = self.as_batch(items, 0)
        return pytree.expand(items, steps) if type(items) is not list and self.is_single(items) else items

    def as_batch(self, items: Any, time_dim: int) -> Any:
        """A list that is written, as a batch where rows have one layout."""
        return pytree.stack(items, time_dim) if type(items) is list else items

    def overwrite_selection(
        self, selection: Selection, steps: Steps, overwrite: Callable[[Tensor, Steps], None]
    ) -> None:
        """Writes data over the stored rows of an index by `overwrite`; of a row that is named twice the last counts."""
        slots, rows = selection.slots, self.for_selection(steps.items, selection)
        if (last := last_of_each(slots)) is not None:
            slots, rows = slots[last], pytree.select_rows(rows, last)
        overwrite(slots, Steps(rows, index_key=steps.index_key, own_index=slots))

    # ---- reading ----
    @abc.abstractmethod
    def read(
        self,
        slots: Tensor,
        shape: tuple[int, ...] | None = None,
        extra: dict[str, Any] | None = None,
        sequences: bool = False,
    ) -> Rows:
        """As `read` of a storage."""

    @property
    def item_reader(self) -> ItemReader | None:
        """What reads items for batches; None: `read` does, which gives a batch."""
        return None

    def of_selection(self, rows: Rows, selection: Selection) -> Rows:
        """Rows that `read` gave, as `get` returns those of an index."""
        return rows

    def leaf(self, path: KeyPath) -> LeafSpec | None:
        """As `leaf` of a storage."""
        if not len(self.lanes):
            return None
        value = get_entry(self.read(stored_slots(self.lanes.store)[:1]).batch, path)
        return None if value is None else LeafSpec(path, value.dtype, tuple(value.shape[1:]))

    def column(self, path: KeyPath, slots: Tensor) -> Tensor:
        """As `column` of a storage."""

        def read(part: Tensor) -> Tensor:
            rows = to_tensor(expand_slots(part, math.prod(self.env_shape)))
            values = get_entry(self.read(rows).batch, path)
            if values is None:
                raise KeyError(f"the stored steps have no {format_key(path)}")
            column: Tensor = values.reshape(len(part), *self.env_shape, *values.shape[1:])
            return column

        return read_in_parts(read, slots)

    def view(self) -> Any:
        """A live view of all rows; None: there is none."""
        return None

    def slice(self, index: slice) -> Any:
        """A live view of the rows of a slice, where they lie next to each other; else None."""
        return None

    # ---- copies ----
    def arguments(self) -> dict[str, Any] | None:
        """Arguments for a storage like this one, to put copied rows in; None: it is copied as any object."""
        return None

    def own_state(self) -> dict[str, Any] | None:
        """What a deep copy has of a storage of a user's own; None: it is copied otherwise."""
        return None

    def check_sending(self) -> None:
        """Called before the storage is sent to another process; an error where it must not be."""

    def sent_state(self, name: str) -> dict[str, Any]:
        """What another process gets that shares the rows, or opens their file; with `init`, a constructor's arguments.

        Raises:
            StorageError: it cannot; the message names the class of the storage.
        """
        raise StorageError(f"Cannot share a storage of type {name}, {NOT_SENT}")

    def take_sent(self, state: dict[str, Any]) -> None:
        """In that process: uses what was sent."""

    # ---- life ----
    def limit(self, max_size: int) -> None:
        """Gives an empty table without limit a size."""
        raise ValueError(f"capacity={max_size}, but the storage has max_size={self.max_size}; give one of them")

    def clear(self, reset_count: bool = True) -> None:
        """Forgets every row; the caller uses them alone."""
        self.lanes.store.empty(reset_count)

    def flush(self) -> None:
        """Makes rows survive a power cut, where they outlive their processes."""

    def release(self) -> None:
        """Gives this process's lane back, for another process to take."""
        self.lanes.release()

    def close(self) -> None:
        """Ends the use of a file, or gives this process's lane back."""
        self.release()


def read_in_parts(read: Callable[[Tensor], Tensor], slots: Tensor) -> Tensor:
    """One leaf of the steps at time slots, by a function that reads whole rows for it: few of them at a time."""
    parts = [read(part) for part in torch.split(slots, _STEPS_AT_ONCE)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def is_one(index: Any) -> bool:
    """Whether an index is an int."""
    return np.ndim(index) == 0 and not isinstance(index, slice | range)
