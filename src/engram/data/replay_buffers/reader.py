"""The read path, once: draw, read, draw again what was overwritten meanwhile, collate, transform."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram._system import free_memory, human_bytes
from engram.data.replay_buffers.samplers.base import Sampler, lock_of, redrawn
from engram.data.replay_buffers.storages.base import Storage
from engram.data.replay_buffers.storages.list import ListStorage
from engram.errors import OutOfMemoryError
from engram.pytree import clone, collate_items, set_per_item
from engram.store.indexing import inward
from engram.transforms.compose import Compose

_ROUNDS = 8  # of drawing again; then row by row
_SAID = 64  # bytes that a draw takes for a row: its slot, its slice, its weight
MANY_ROWS = 1 << 20  # smaller batches are tried without a look at what memory is free
BEYOND_MEMORY = 1 << 46  # rows

_live: weakref.WeakSet[Reader] = weakref.WeakSet()


class Ticket(NamedTuple):
    """A drawn batch that has not been read yet."""

    slots: Tensor
    index: Any
    info: dict[str, Any]
    last: bool  # of its epoch
    incarnation: Any  # of the storage when it was drawn


class Reader:
    """Turns draws into batches. One for each buffer; any number of threads may use it.

    Args:
        attach: from a batch's index and info, entries to add at its root; None for none.
        with_generation: where entries are added, also add each row's write number.
    """

    def __init__(
        self,
        storage: Storage,
        sampler: Sampler,
        transform: Compose,
        collate_fn: Callable[[Any], Any] | None,
        attach: Callable[[Any, dict[str, Any]], dict[str, Any] | None] | None,
        pin_memory: bool,
        with_generation: bool = False,
    ) -> None:
        self.storage = storage
        self.sampler = sampler
        self.transform = transform
        self.collate_fn = collate_fn
        self.pin_memory = pin_memory
        self._attach = attach
        self.with_generation = with_generation
        # Our own samplers give a row's slot as its index where there is one dimension; others may give anything.
        self._index_is_slots = storage.ndim == 1 and _ours(sampler)
        self._finish = _own(sampler, "finish")
        self._replaced = _own(sampler, "replaced")
        # Our own samplers take their lock themselves when priorities change.
        updates = getattr(type(sampler), "update_priority", None)
        self.guards_updates = getattr(updates, "__module__", "").startswith("engram.")
        self._observes = storage.read_only
        self.of_epochs = _of_epochs(sampler)
        self.draws = 0  # of epochs, so far: who undoes one must know that it was the last
        # Samplers have state: one draw at a time. Our own take their lock themselves.
        self.lock = lock_of(sampler)
        own = str(getattr(getattr(sampler, "sample", None), "__module__", "")).startswith("engram.")
        self._guards_draws = own and not self._observes
        _live.add(self)

    @property
    def attaches(self) -> bool:
        """Whether batches get entries at their root."""
        return self._attach is not None

    @property
    def only_reads(self) -> bool:
        """Whether batches are rows as they are stored, transforms apart."""
        return self.collate_fn is None and self._finish is None and not self.pin_memory

    def replaced(self, slots: Tensor, info: dict[str, Any]) -> list[int] | None:
        """After a read: positions whose slots may hold other rows than those that the sampler drew; None: none."""
        found: list[int] | None = None if self._replaced is None else self._replaced(self.storage, slots, info)
        return found

    def entries(self, index: Any, info: dict[str, Any]) -> dict[str, Any]:
        """What batches get at their root."""
        return {} if self._attach is None else self._attach(index, info) or {}

    def check_room(self, n: int) -> None:
        """OutOfMemoryError where a batch of n rows cannot be held, before anything is drawn."""
        most_rows = getattr(self.sampler, "most_rows", None)
        if most_rows is not None:
            refuse_if_too_many(most_rows(self.storage, n) if n < BEYOND_MEMORY else n, self.row_bytes, n)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a batch, with what is said of it; of lists on average."""
        layout, stored = getattr(self.storage, "layout", None), len(self.storage)
        if layout is None:
            stored_bytes = self.storage.nbytes // stored if isinstance(self.storage, ListStorage) and stored else 0
            return _SAID + stored_bytes
        return _SAID + sum(int(leaf.nbytes) for leaf in layout.leaves)

    def draw(self, n: int) -> Ticket:
        """Asks the sampler."""
        with self.lock:
            incarnation = self.storage.incarnation
            index, info = self._drawn(n)
            last = self.sampler.ran_out if hasattr(self.sampler, "ran_out") else False
        return Ticket(self.slots_of(index), index, info, last, incarnation)

    def sample(self, n: int, numbers: bool) -> tuple[Any, dict[str, Any]]:
        """A batch of n and what there is to say about it."""
        storage = self.storage
        while True:
            before = None
            try:
                incarnation = storage.incarnation  # before the draw: a load that comes in between makes us draw anew
                if self.of_epochs:
                    with self.lock:
                        self.draws = draws = self.draws + 1
                        before = draws, self.sampler.position()
                        index, info = self.sampler.sample(storage, n) if self._guards_draws else self._drawn(n)
                elif self._guards_draws:
                    index, info = self.sampler.sample(storage, n)
                else:
                    index, info = self._drawn(n)
                slots: Any = index if self._index_is_slots else self.slots_of(index)
                read = self.fetch(slots, index, info, numbers, incarnation)
            except MemoryError:
                self._draw_again(before)
                raise
            if read is not None:
                return read

    def next(self, n: int, numbers: bool) -> tuple[Any, bool]:
        """A batch of n, and whether it is the last of its epoch."""
        while True:
            before = None
            try:
                with self.lock:
                    if self.of_epochs:
                        self.draws += 1
                        before = self.draws, self.sampler.position()
                    ticket = self.draw(n)
                read = self.fetch(ticket.slots, ticket.index, ticket.info, numbers, ticket.incarnation)
            except MemoryError:
                self._draw_again(before)
                raise
            if read is not None:
                return read[0], ticket.last

    def _draw_again(self, before: tuple[int, Any] | None) -> None:
        """Each row comes once an epoch: one that there was no memory for goes on with the rows that it had drawn.

        Unless another thread has drawn meanwhile: then they are left out.
        """
        if before is not None:
            with self.lock:
                if self.draws == before[0]:
                    self.sampler.rewind(before[1])

    def _drawn(self, n: int) -> tuple[Any, dict[str, Any]]:
        """What the sampler draws. Somebody else may empty or replace the rows: the read finds out which are there."""
        drawn: tuple[Any, dict[str, Any]]
        with self.lock:
            if self._observes:
                of_epochs = hasattr(self.sampler, "ran_out")  # a draw that is not believed would leave its rows out
                drawn = self.storage.believed(lambda: self.sampler.sample(self.storage, n), only_errors=of_epochs)
            else:
                drawn = self.sampler.sample(self.storage, n)
        return drawn

    def fetch(
        self, slots: Tensor, index: Any, info: dict[str, Any], numbers: bool, incarnation: Any
    ) -> tuple[Any, dict[str, Any]] | None:
        """Reads what was drawn: the batch, and `info` with its index (and generations with `numbers`).

        None: since it was drawn (`incarnation` is the storage's of then) all rows have been replaced by others.
        """
        storage, attach, replaced = self.storage, self._attach, self._replaced
        extra = None if attach is None else attach(index, info)
        batch, gone, absent, generation = storage.read(slots, None, extra, numbers)
        if storage.incarnation != incarnation:
            return None
        if replaced is not None:
            gone = replaced(storage, slots, info) or gone
        if gone is not None or absent is not None:
            again = self._again(slots, info, (gone, absent), numbers, incarnation)
            if again is None:
                return None
            index, batch, generation = again
            extra = None if attach is None else attach(index, info)
            if not isinstance(storage, ListStorage):  # items get them when they are one batch
                for key, value in (extra or {}).items():
                    set_per_item(batch, key, value)
        if self.collate_fn is not None:
            batch = self._collate(batch, extra, info)
        elif self._finish is not None:
            batch = self._finish(batch, info)
        if generation is not None and extra is not None and self.with_generation:
            set_per_item(batch, "generation", generation)
        if self.transform.transforms:
            batch = self.transform.forward(batch)
            if storage.incarnation != incarnation:  # what transforms have learnt may be that of other rows
                return None
        if self.pin_memory:
            batch = batch.pin_memory()
        info["index"] = index
        if generation is not None:
            info["generation"] = generation
        return batch, info

    def after_fork(self) -> None:
        """In a child: a lock that no thread of the parent holds."""
        self.lock = lock_of(self.sampler)

    def slots_of(self, index: Any) -> Tensor:
        """The slots that a sampler's index means: int64 [n]."""
        if type(index) is Tensor and index.dtype is torch.int64 and index.ndim == 1 and index.device.type == "cpu":
            return index
        return inward(index, self.storage.inner, self.storage.max_size or 0)

    def _collate(self, items: Any, extra: dict[str, Any] | None, info: dict[str, Any]) -> Any:
        assert self.collate_fn is not None
        finish = self._finish or _as_it_is
        if not isinstance(self.storage, ListStorage):
            return self.collate_fn(finish(items, info))
        # A collate function of the user's own may change what it gets; the default one copies anyhow.
        batch = self.collate_fn(items if self.collate_fn is collate_items else [clone(i) for i in items])
        if isinstance(batch, TensorDictBase | dict):
            for key, value in (extra or {}).items():
                set_per_item(batch, key, value)
        return finish(batch, info)

    def _again(
        self,
        slots: Tensor,
        info: dict[str, Any],
        bad: tuple[list[int] | None, list[int] | None],
        numbers: bool,
        incarnation: Any,
    ) -> tuple[Any, Any, Tensor | None] | None:
        """Other slots for the rows that are not there any more: their index, the batch, its generations."""
        redraw = getattr(self.sampler, "redraw", None) or functools.partial(redrawn, self.sampler)
        for attempt in range(1000):
            places = sorted({*(bad[0] or ()), *(bad[1] or ())})
            # After some rounds one row at a time: a whole batch may be too slow for writers of a small ring.
            with self.lock:
                if self.storage.incarnation != incarnation:
                    return None
                self.draws += 1
                for part in [places] if attempt < _ROUNDS else [[i] for i in reversed(places)]:
                    slots = redraw(self.storage, slots, info, part)
            batch, *bad_now, generation = self.storage.read(slots, None, None, numbers)
            if self.storage.incarnation != incarnation:
                return None
            bad = (bad_now[0], bad_now[1])
            if self._replaced is not None:
                bad = (self._replaced(self.storage, slots, info) or bad[0], bad[1])
            if bad == (None, None):
                return self.storage.outward(slots), batch, generation
        raise RuntimeError("writers overwrite the rows of this batch faster than they can be read; sample fewer")


def refuse_if_too_many(rows: int, row_bytes: int, batch_size: int) -> None:
    """OutOfMemoryError where so many rows, of a batch of this size, do not fit into what is free."""
    free = free_memory()
    if rows >= BEYOND_MEMORY or (free is not None and rows * row_bytes > free):
        there = "" if free is None else f", {human_bytes(free)} are free"
        raise OutOfMemoryError(
            f"batch_size={batch_size} needs {human_bytes(rows * row_bytes)}{there}; sample fewer. Nothing was drawn"
        )


def _own(sampler: Any, name: str) -> Any:
    """A method that the sampler has of its own; None where it is the one that does nothing."""
    method = getattr(sampler, name, None)
    return None if getattr(type(sampler), name, None) is getattr(Sampler, name) else method


def _of_epochs(sampler: Any) -> bool:
    """Whether it is one of our own that goes through epochs."""
    return _ours(sampler) and type(sampler).ran_out is not Sampler.ran_out


def _ours(sampler: Any) -> bool:
    return type(sampler).__module__.startswith("engram.")


def _as_it_is(batch: Any, info: dict[str, Any]) -> Any:
    return batch


def _after_fork() -> None:
    for reader in list(_live):
        reader.after_fork()


os.register_at_fork(after_in_child=_after_fork)  # after that of the samplers, which are imported here
