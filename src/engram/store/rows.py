"""Rows that are read and written, and the contract of what keeps them: the rows of a table, of one kind."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engram import pytree
from engram._text import warn_user
from engram.errors import StorageError
from engram.pytree import KeyPath, to_tensor
from engram.store.indexing import Selection, from_slots
from engram.store.lanes import Lanes
from engram.store.layout import LeafSpec, ObservationKeys, RowLayout, StoredLayout
from engram.store.steps import Steps

if TYPE_CHECKING:
    from engram.store.observation_shares import ObservationShares

READ_ONLY = "this buffer was opened with read_only=True: it looks at the rows of others and writes nothing"
NO_STEPS = "nothing to add: the batch has no steps"


class Checked(NamedTuple):
    """A batch that fits the storage and can be written: `steps` time steps."""

    steps: int
    data: Any


class Rows(NamedTuple):
    """Rows that were copied out of a storage.

    Attributes:
        batch: the rows, in the form of the stored data.
        overwritten: positions of rows that were overwritten while they were copied; None: none.
        absent: positions of slots that hold no row; None: none.
        sequences: int64 [n], the sequence of each row; None unless asked for.
    """

    batch: Any
    overwritten: list[int] | None = None
    absent: list[int] | None = None
    sequences: Tensor | None = None


class JoinedRows(NamedTuple):
    """Rows of several tables in one batch: as `Rows`; `parts` are each table's rows, in the memory of the whole."""

    batch: Any
    overwritten: list[int] | None
    absent: list[int] | None
    sequences: Tensor | None
    parts: list[Any] | None = None


class ItemReader(Protocol):
    """Reads items, which are stored one by one, for batches."""

    def read_batch(self, slots: Tensor, extra: dict[str, Any] | None, sequences: bool) -> Rows:
        """As `Storage.read`: a list of items, perhaps the stored ones, or a new batch with the entries of `extra`."""

    def read_own(self, slots: Tensor, sequences: bool, reuse: bool) -> Rows:
        """As `Storage.read`, a list of items that the caller may change.

        With `reuse` small ones may have tensors of earlier ones that nobody has any more (`why_not_reusable`).
        """


class TableRows(abc.ABC):
    """The rows of a table, of one kind: packed, compact, columnar, items, those of a user's class or of an ensemble.

    What concerns the data of rows is here, and nothing of where they lie or who else uses them, which is the table's
    and its place's. `fit`, then `append`, is how new rows come in. Slots are those of all environments, time slots
    those of time steps (`expand_slots`). Writers hold `lanes.mutex`; readers of packed rows hold nothing, and compare
    what they copied with the counters afterwards.
    """

    #: Counters of the rows.
    lanes: Lanes
    #: Keys, shapes and dtypes of a row; None: it is not known, or they differ.
    layout: RowLayout | None = None
    #: Where leaves lie in rows that are bytes; None: they are no bytes.
    stored: StoredLayout | None = None
    #: Those that are stored once, and not in the rows; None: none.
    observations: ObservationKeys | None = None
    #: Batch dimensions of the data; the last one is time.
    ndim: int = 1
    #: Batch dimensions between time and the entries.
    env_shape: tuple[int, ...] = ()
    #: Batch dimensions of a stored item: `()` of steps, `(T,)` of whole trajectories of T steps.
    item_shape: tuple[int, ...] = ()
    #: What reads items for batches; None: `read` does, which gives a batch.
    item_reader: ItemReader | None = None
    #: What makes a batch of what was read; None: it is one.
    collate: Callable[[Any], Any] | None = None
    #: How stored rows get room for sequences of their own (`with_sequences`); None: they cannot.
    widened: Literal["in place", "by a copy"] | None = None
    #: Whether these rows can be written over others out of turn; see `Table.replaces_rows`.
    replaces_rows: bool = True
    #: Whether `update_if_present` of a buffer can write over rows.
    replaces_in_place: bool = True
    #: Of stored rows that are changed in part, by slot: the entries that stay, whatever `overwrite` is given there.
    kept: Mapping[int, frozenset[KeyPath]] = MappingProxyType({})

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of header and rows, used or not."""

    @property
    @abc.abstractmethod
    def row_bytes(self) -> int:
        """Bytes that a row takes in a batch."""

    # ---- writing ----
    @abc.abstractmethod
    def fit(self, steps: Steps) -> Checked:
        """Checks every leaf of new steps; nothing is written.

        Raises:
            ValueError, TypeError: they do not fit; the message names the leaf.
        """

    @abc.abstractmethod
    def append(self, checked: Checked, most: int | None = None) -> Tensor | int:
        """Writes checked steps (`most`: only the first of them) behind the newest one, and then counts them.

        Returns their slots, int64 [steps * envs], time first; of one step without batch dimensions perhaps its slot.
        """

    @abc.abstractmethod
    def prepare_replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> Callable[[], None]:
        """Prepares rows (int64 [n]) of checked steps to be written over those in slots; what is returned writes them.

        What may fail for want of memory is done here. Each gets a sequence of its own (`Lanes.reserve_sequences`).
        """

    @abc.abstractmethod
    def overwrite(self, slots: Tensor, steps: Steps) -> None:
        """Writes steps over the rows in slots, which are the same rows with other values; notes which changed.

        The index that steps store, if any, is that of their slots. Errors as `fit`, or an IndexError where a slot holds
        no row; nothing was written then.
        """

    def overwrite_one(self, slots: Tensor, steps: Steps) -> bool:
        """As `overwrite`, of the step that an index means which is an int; False: that is nothing else here."""
        return False

    @abc.abstractmethod
    def is_single(self, items: Any, env_dims: int = 0) -> bool:
        """Whether the data are one step, to be written at every index; with `env_dims` one of all environments."""

    @abc.abstractmethod
    def each(self, items: Any, shape: tuple[int, ...], n: int, env_dims: int = 0) -> Any:
        """Data for the n rows, or time steps, of an index of this shape: one step is repeated."""

    def as_batch(self, items: Any, time_dim: int) -> Any:
        """A list that is written, as a batch where rows have one layout."""
        return pytree.stack(items, time_dim) if type(items) is list else items

    def with_sequences(self) -> TableRows:
        """The same rows with room for their own sequences; where they are copied, these replace them in the table."""
        raise StorageError("these rows get no room for sequences of their own")

    def limit(self, max_size: int) -> None:
        """Gives room for so many steps to rows that have none, and no limit."""
        raise ValueError(f"capacity={max_size}, but the storage has max_size=None; give one of them")

    # ---- reading ----
    @abc.abstractmethod
    def read(
        self,
        slots: Tensor,
        shape: tuple[int, ...] | None = None,
        extra: dict[str, Any] | None = None,
        sequences: bool = False,
    ) -> Rows:
        """Copies rows out.

        Args:
            slots: int64 [n].
            shape: batch dimensions with n elements; `[n]` if None.
            extra: entries to add at the root of the batch.
            sequences: also return each row's sequence.
        """

    def of_selection(self, rows: Rows, selection: Selection) -> Rows:
        """Rows that `read` gave, as `get` returns those of an index."""
        return rows

    @abc.abstractmethod
    def leaf(self, path: KeyPath) -> LeafSpec | None:
        """Dtype and shape of one leaf of a row; None: rows have no such leaf."""

    @abc.abstractmethod
    def column(self, path: KeyPath, slots: Tensor) -> Tensor:
        """One leaf of the steps at time slots: [n, *envs, ...]; of slots without a row any values."""

    @abc.abstractmethod
    def view(self, steps: range | None = None) -> Any:
        """A live view of these time slots, or of all, written or not: `[time, *envs, ...]`; None: there is none.

        Rows of which there is none are copied where a view is asked for.
        """

    # ---- whole blocks, for checkpoints ----
    def block(self, lane: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        """uint8 [envs, stop - start, payload bytes]: packed rows with these sequences, copied."""
        raise NotImplementedError(f"{type(self).__name__} are saved one by one")

    def block_writer(self, bases: list[int]) -> Callable[[int, int, np.ndarray[Any, Any]], None]:
        """Writes packed rows of a lane from a sequence on, visible when the counters are set.

        Args:
            bases: the sequence of the first row that comes, of each lane.

        What is returned raises a StorageError where the disk fails; several threads may call it, in any order of rows.
        """
        raise NotImplementedError(f"{type(self).__name__} are saved one by one")

    def observation_shares(self) -> ObservationShares | None:
        """What the rows are made of, where observations are stored once; None: rows are whole."""
        return None

    # ---- life ----
    def take_mutex(self, mutex: Any) -> None:
        """Takes the mutex that writers hold."""
        self.lanes.mutex = mutex

    def bind(self, native: Any) -> None:
        """Lets native calls (`NativeCalls`) use the rows, as far as they can."""
        native.unbind()

    def clear(self, reset_count: bool = True) -> None:
        """Forgets every row; the caller uses them alone."""
        self.lanes.store.empty(reset_count)


def each_of_steps(rows: TableRows, items: Any, shape: tuple[int, ...], n: int, env_dims: int = 0) -> Any:
    """As `TableRows.each`, of steps that come as a batch."""
    if rows.is_single(items, env_dims):
        return pytree.expand(items, n)
    dims = len(shape)
    if dims < 2:
        return items
    leaves = pytree.describe(items, 0)[1]
    given = tuple(pytree.shape_of(leaves[0][1]))[:dims] if leaves else ()
    if given != shape:
        raise ValueError(
            f"the index means steps of shape {list(shape)}, the data have {list(given)}; nothing was written"
        )
    return pytree.flatten_dims(items, 0, dims - 1)


class NoRows(TableRows):
    """Stands where there are no rows that could be read or written.

    Args:
        lanes: count none.
        refusal: the error of the method of a storage with this name.
    """

    nbytes = row_bytes = 0

    def __init__(self, lanes: Lanes, refusal: Callable[[str], Exception]) -> None:
        self.lanes, self._refusal = lanes, refusal

    def fit(self, steps: Steps) -> Checked:
        raise self._refusal("check")

    def append(self, checked: Checked, most: int | None = None) -> Tensor | int:
        raise self._refusal("append")

    def prepare_replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> Callable[[], None]:
        raise self._refusal("replace")

    def overwrite(self, slots: Tensor, steps: Steps) -> None:
        raise self._refusal("overwrite")

    def read(self, slots: Tensor, *how: Any) -> Rows:
        raise self._refusal("read")

    def column(self, path: KeyPath, slots: Tensor) -> Tensor:
        raise self._refusal("column")

    def leaf(self, path: KeyPath) -> LeafSpec | None:
        """None: steps have no leaves."""
        return None

    def view(self, steps: range | None = None) -> Any:
        """None: there is nothing to see."""
        return None

    def is_single(self, items: Any, env_dims: int = 0) -> bool:
        """False: nothing says what one step is."""
        return False

    def each(self, items: Any, shape: tuple[int, ...], n: int, env_dims: int = 0) -> Any:
        return pytree.expand(items, 1) if shape == () else items


class LayoutRows(TableRows):
    """Rows of one layout: what packed rows and columns have in common.

    Args:
        env_shape: the shape of the environments of a step.
        ndim: batch dimensions of the data.
    """

    layout: RowLayout

    def __init__(self, lanes: Lanes, layout: RowLayout, env_shape: tuple[int, ...], ndim: int) -> None:
        self.lanes, self.layout, self.env_shape, self.ndim = lanes, layout, env_shape, ndim
        self.item_shape = layout.within
        self._own_index = OwnIndex(lanes, layout.within, env_shape, ndim)

    @property
    def row_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.layout.leaves)

    # ---- writing ----
    @abc.abstractmethod
    def plan(self, steps: Steps, index_key: str | None = None) -> tuple[int, Any]:
        """How many time steps they are, and their data as `append_plan` takes them.

        Args:
            index_key: the key at the root under which the rows have a place for their own index: `steps.own_index`, or
                the one that they get when they are written.

        Raises:
            ValueError, TypeError: the batch does not fit; the message names the leaf. Nothing was written.
        """

    @abc.abstractmethod
    def plan_rows(self, rows: Any) -> tuple[int, Any]:
        """As `plan`, of rows [n, ...] for `overwrite_plan`, whatever environments they are of."""

    @abc.abstractmethod
    def append_plan(self, plan: Any, most: int | None = None) -> Tensor | int:
        """Writes checked data (`most`: only their first steps) behind the newest row of this process's lane.

        They are counted once all of them are written. A seam comes before them where they do not go on from the newest
        row (`border.py`), or where another process wrote that. Rows that store their own index get it here. Sequences
        that the places of the rows carried are 0.

        Returns time slots, int64 [steps]; of a single step without batch dimensions perhaps its slot.
        """

    @abc.abstractmethod
    def overwrite_plan(self, slots: Tensor, plan: Any) -> None:
        """Writes checked rows over rows that exist, and notes it (`Store.note_edits`, which native stores do)."""

    @abc.abstractmethod
    def prepare_overwrite(self, slots: Tensor, plan: Any, rows: Tensor, first: int) -> Callable[[], None]:
        """As `overwrite_plan`, of `rows` (int64 [n]) of checked data, in two steps: what is returned writes.

        Row i of the data gets the sequence `first + i`.
        """

    def fit(self, steps: Steps) -> Checked:
        merged, key = steps, steps.index_key
        if steps.lead > 1:
            merged = steps.with_one_env_dim()
            check_envs(steps.env_shape, self.env_shape)
        count, plan = self.plan(merged, key if key is not None and (key,) in self.layout.paths else None)
        if not count:
            raise ValueError(NO_STEPS)
        return Checked(count, plan)

    def append(self, checked: Checked, most: int | None = None) -> Tensor | int:
        slots, envs = self.append_plan(checked.data, most), self.lanes.envs
        return slots if envs == 1 else expand_slots(slots, envs)

    def prepare_replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> Callable[[], None]:
        first = self.lanes.reserve_sequences(checked.steps)
        return self.prepare_overwrite(slots, checked.data, rows, first)

    def overwrite(self, slots: Tensor, steps: Steps) -> None:
        """As `overwrite` of a storage, whatever environments it has; one step is repeated."""
        n, items, key = len(slots), steps.items, steps.index_key
        if self.is_single(items):
            items = pytree.expand(items, n)
        if self.kept:
            items = _with_kept(self.read(slots).batch, items, self.kept.get(int(slots[0]), frozenset()))
        if key is not None and (key,) in self.layout.paths:
            _check_count(n, Steps(items).times)
            items = pytree.with_entry(items, key, self._own_index.of_slots(slots))
        count, plan = self.plan_rows(items)
        _check_count(n, count)
        self.overwrite_plan(slots, plan)

    def is_single(self, items: Any, env_dims: int = 0) -> bool:
        leaf = self.layout.leaves[0]
        value = pytree.get_entry(items, leaf.path)
        if value is None:
            return False  # an error when the rows are checked
        return np.ndim(value) == env_dims + len(leaf.shape)

    each = each_of_steps

    # ---- reading ----
    def leaf(self, path: KeyPath) -> LeafSpec | None:
        return next((leaf for leaf in self.layout.leaves if leaf.path == path), None)


def check_envs(given: tuple[int, ...], own: tuple[int, ...]) -> None:
    """A ValueError where the environments of steps are not those of the rows."""
    if given != own:
        raise ValueError(f"the batch has environments of shape {list(given)}, this storage {list(own)}")


class OwnIndex:
    """The index that rows store of themselves.

    Args:
        within: batch dimensions of an item, each step of which has the item's index.
    """

    def __init__(self, lanes: Lanes, within: tuple[int, ...], env_shape: tuple[int, ...], ndim: int) -> None:
        self._lanes, self._within, self._env_shape, self._ndim = lanes, within, env_shape, ndim

    def of(self, steps: Steps) -> Tensor | int:
        """What each step stores: the index that is given with it, or the one that `append` will give."""
        lanes, index = self._lanes, steps.own_index
        if index is not None:
            return self.of_items(index[0] if steps.is_single else index)
        if steps.lead == 0:
            return self.of_items(lanes.next_slot()) if self._within else lanes.next_slot()
        count = steps.times
        times = lanes.next_slots(count)
        if self._ndim == 1:
            return self.of_items(times) if self._within else times
        slots: Any = expand_slots(times, lanes.envs)
        index = torch.stack(tuple(from_slots(slots, self._env_shape)), -1).reshape(count, lanes.envs, self._ndim)
        return self.of_items(index[0] if steps.is_single else index if steps.time == 0 else index.transpose(0, 1))

    def of_slots(self, slots: Tensor) -> Tensor:
        """Those of the rows in slots (int64 [n])."""
        own = from_slots(slots, self._env_shape)
        return self.of_items(torch.stack(own, -1) if isinstance(own, tuple) else own)

    def of_items(self, index: Tensor | int) -> Tensor:
        """The index of each item, repeated for its steps where items have batch dimensions of their own."""
        at = to_tensor(index)
        return pytree.repeat_per_step(at, at.ndim - (self._ndim > 1), self._within) if self._within else at


def expand_slots(time_slots: Tensor | int, envs: int) -> Tensor | int:
    """The slots of all environments at these times: int64 [steps * envs], time first."""
    if envs == 1 or isinstance(time_slots, int):
        return time_slots
    return (time_slots.unsqueeze(1) * envs + torch.arange(envs, device="cpu")).reshape(-1)


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


def _with_kept(stored: Any, items: Any, kept: frozenset[KeyPath]) -> Any:
    """Rows that are written over others, with the entries that these keep; of another form they stay as they are."""
    root, entries = pytree.describe(stored, 1)
    given = dict(pytree.describe(items, 1)[1])
    if not given.keys() <= kept | dict(entries).keys():
        return items
    changed = {path: pytree.as_leaf(value, path) for path, value in given.items() if path not in kept}
    leaves = [changed[path].to(value.device) if path in changed else value for path, value in entries]
    lead = pytree.shape_of(entries[0][1])[:1]
    return pytree.unflatten(root, leaves, lead, stored.device if pytree.has_batch_size(stored) else None)


def _check_count(indexed: int, given: int) -> None:
    if given != indexed:
        raise ValueError(f"{indexed} steps are indexed, the data have {given}; nothing was written")
