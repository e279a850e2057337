"""Rows that are read and written, and the tables that keep those of one layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engram import pytree
from engram._text import warn_user
from engram.errors import StorageInUseError
from engram.pytree import KeyPath, to_tensor
from engram.store.indexing import from_slots
from engram.store.lanes import Lanes
from engram.store.layout import ObservationKeys, RowLayout, StoredLayout
from engram.store.steps import Steps


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


class IndexTakenError(StorageInUseError):
    """Rows that store their own index were not appended, as another process has taken their slots."""


class ItemReader(Protocol):
    """Reads items, which are stored one by one, for batches."""

    def read_batch(self, slots: Tensor, extra: dict[str, Any] | None, sequences: bool) -> Rows:
        """As `Storage.read`: a list of items, perhaps the stored ones, or a new batch with the entries of `extra`."""

    def read_own(self, slots: Tensor, sequences: bool, reuse: bool) -> Rows:
        """As `Storage.read`, a list of items that the caller may change.

        With `reuse` small ones may have tensors of earlier ones that nobody has any more (`why_not_reusable`).
        """


class TableRows(Protocol):
    """Stored rows of one layout: packed rows, or columns."""

    layout: RowLayout
    #: Those that are stored once, and not in the rows; None: none.
    observations: ObservationKeys | None

    @property
    def stored(self) -> StoredLayout | None:
        """Where leaves lie in rows that are bytes; None: there are columns."""

    @property
    def nbytes(self) -> int:
        """Bytes of header and rows, used or not."""

    def fit(self, steps: Steps, extra: tuple[str, Any] | None = None) -> tuple[int, Any]:
        """How many time steps they are, and their data as `append` takes them.

        Args:
            extra: a key at the root, and what the rows also store there.

        Raises:
            ValueError, TypeError: the batch does not fit; the message names the leaf. Nothing was written.
        """

    def fit_rows(self, rows: Any) -> tuple[int, Any]:
        """As `fit`, of rows [n, ...] for `overwrite`, whatever environments they are of."""

    def append(self, data: Any, most: int | None = None) -> Tensor | int:
        """Writes a checked batch (`most`: only its first steps) behind the newest row of this process's lane.

        Returns time slots, int64 [steps]; of a single step without batch dimensions perhaps its slot.
        """

    def overwrite(self, slots: Tensor, data: Any) -> None:
        """Writes checked rows over rows that exist."""

    def prepare_overwrite(self, slots: Tensor, data: Any, rows: Tensor, first: int) -> Callable[[], None]:
        """As `overwrite`, of `rows` (int64 [n]) of a checked batch, in two steps: what is returned writes.

        Row i of the batch gets the sequence `first + i`.
        """

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

    def column(self, path: pytree.KeyPath, slots: Tensor) -> Tensor:
        """One leaf of the steps at time slots: [n, *envs, ...]."""

    def view(self, start: int, stop: int) -> Any:
        """Live views of time slots [start, stop); None: there are none."""

    def block(self, lane: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        """uint8 [envs, stop - start, payload bytes]: packed rows with these sequences, copied."""

    def block_writer(self, bases: list[int]) -> Callable[[int, int, np.ndarray[Any, Any]], None]:
        """Writes packed rows of a lane from a sequence on, visible when the counters are set.

        Args:
            bases: the sequence of the first row that comes, of each lane.

        What is returned raises a StorageError where the disk fails; several threads may call it, in any order of rows.
        """


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


def with_kept(stored: Any, items: Any, kept: frozenset[KeyPath]) -> Any:
    """Rows that are written over others, with the entries that these keep; of another form they stay as they are."""
    root, entries = pytree.describe(stored, 1)
    given = dict(pytree.describe(items, 1)[1])
    if not given.keys() <= kept | dict(entries).keys():
        return items
    changed = {path: pytree.as_leaf(value, path) for path, value in given.items() if path not in kept}
    leaves = [changed[path].to(value.device) if path in changed else value for path, value in entries]
    lead = pytree.shape_of(entries[0][1])[:1]
    return pytree.unflatten(root, leaves, lead, stored.device if pytree.has_batch_size(stored) else None)


def check_count(indexed: int, given: int) -> None:
    if given != indexed:
        raise ValueError(f"{indexed} steps are indexed, the data have {given}; nothing was written")
