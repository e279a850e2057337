"""How a buffer reads batches: draw, read, draw again what was overwritten meanwhile, collate, transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram._system import free_memory, human_bytes
from engram.data.replay_buffers.samplers.base import Sampler
from engram.data.replay_buffers.storages.base import Storage
from engram.errors import OutOfMemoryError
from engram.pytree import clone, collate_items, set_per_item
from engram.store.indexing import to_slots
from engram.transforms.compose import Compose

_ROUNDS = 8  # of drawing again whole batches; then row by row
_DRAWN_BYTES = 64  # that a draw takes for a row: its slot, its slice, its weight
MANY_ROWS = 1 << 20  # smaller batches are tried without a look at what memory is free
BEYOND_MEMORY = 1 << 46  # rows


class Draw(NamedTuple):
    """A batch that was drawn and is not read yet."""

    slots: Tensor
    index: Any
    info: dict[str, Any]
    last: bool  # of its epoch
    incarnation: int  # of the storage when it was drawn


class BatchReader:
    """Turns draws into batches. One for each buffer; any number of threads may use it.

    Args:
        attach: from a batch's index and info, entries to add at its root; None for none.
        with_generation: where entries are added, also add each row's sequence.
    """

    def __init__(
        self,
        storage: Storage,
        sampler: Sampler,
        transform: Compose,
        collate_fn: Callable[[Any], Any] | None,
        attach: Callable[[Any, dict[str, Any]], dict[str, Any] | None] | None,
        *,
        pin_memory: bool,
        with_generation: bool,
    ) -> None:
        self.storage = storage
        self.sampler = sampler
        self.transform = transform
        self.collate_fn = collate_fn
        self.pin_memory = pin_memory
        self.with_generation = with_generation
        self._attach = attach
        self._keeps_items = storage._holds_items
        # Samplers of a user's own may give an index of any form.
        self._index_is_slots = storage.ndim == 1 and sampler._built_in
        # None, and not called for each batch, where they do nothing.
        self._postprocess = None if type(sampler)._postprocess is Sampler._postprocess else sampler._postprocess
        self._find_stale = None if type(sampler)._find_stale is Sampler._find_stale else sampler._find_stale
        self.has_epochs = sampler._built_in and type(sampler).ran_out is not Sampler.ran_out
        self.draws = 0  # of epochs, so far: who undoes one must know that it was the last
        # Samplers have state: one draw at a time. Built-in ones take their lock themselves.
        self._draws_directly = sampler._built_in and not storage.read_only

    @property
    def lock(self) -> Any:
        """Held by whoever draws or changes the sampler."""
        return self.sampler.lock

    @property
    def attaches(self) -> bool:
        """Whether batches get entries at their root."""
        return self._attach is not None

    @property
    def only_reads(self) -> bool:
        """Whether batches are rows as they are stored, transforms apart."""
        return self.collate_fn is None and self._postprocess is None and not self.pin_memory

    def find_stale(self, slots: Tensor, info: dict[str, Any]) -> list[int] | None:
        """After a read: positions whose slots may hold other rows than those that the sampler drew; None: none."""
        return None if self._find_stale is None else self._find_stale(self.storage, slots, info)

    def entries(self, index: Any, info: dict[str, Any]) -> dict[str, Any]:
        """What batches get at their root."""
        return {} if self._attach is None else self._attach(index, info) or {}

    def check_room(self, n: int) -> None:
        """OutOfMemoryError where a batch of n rows cannot be held, before anything is drawn."""
        rows = self.sampler._max_rows(self.storage, n) if n < BEYOND_MEMORY else n
        if rows is not None:
            refuse_if_too_many(rows, self.row_bytes, n)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a batch, with its index and info; of lists on average."""
        return _DRAWN_BYTES + self.storage._bytes_per_row()

    # ---- drawing ----
    def draw(self, n: int) -> Draw:
        """Draws n rows."""
        with self.lock:
            incarnation = self.storage._incarnation
            index, info = self._draw(n)
            last = self.sampler.ran_out
        return Draw(self.slots_of(index), index, info, last, incarnation)

    def _draw(self, n: int) -> tuple[Any, dict[str, Any]]:
        """Index and info of n rows. Somebody else may empty or replace the rows: the read finds out which exist."""
        storage, sampler = self.storage, self.sampler
        drawn: tuple[Any, dict[str, Any]]
        with self.lock:
            if storage.read_only:
                drawn = storage._validated(
                    lambda: sampler.sample(storage, n), errors_only=not sampler._can_repeat_draws
                )
            else:
                drawn = sampler.sample(storage, n)
        return drawn

    def slots_of(self, index: Any) -> Tensor:
        """The slots that a sampler's index means: int64 [n]."""
        if type(index) is Tensor and index.dtype is torch.int64 and index.ndim == 1 and index.device.type == "cpu":
            return index
        return to_slots(index, self.storage.env_shape, self.storage.max_size or 0)

    # ---- whole batches ----
    def sample(self, n: int, generations: bool) -> tuple[Any, dict[str, Any]]:
        """A batch of n and its info."""
        storage, sampler = self.storage, self.sampler
        while True:
            before = None
            try:
                incarnation = storage._incarnation  # before the draw: a load that comes in between makes us draw anew
                if self.has_epochs:
                    with sampler.lock:
                        self.draws = draws = self.draws + 1
                        before = draws, sampler._get_cursor()
                        index, info = sampler.sample(storage, n) if self._draws_directly else self._draw(n)
                elif self._draws_directly:
                    index, info = sampler.sample(storage, n)
                else:
                    index, info = self._draw(n)
                slots: Any = index if self._index_is_slots else self.slots_of(index)
                # Positional, and without a Draw: this is the hot path.
                batch_and_info = self._read(slots, index, info, generations, incarnation)
            except MemoryError:
                self._undo_draw(before)
                raise
            if batch_and_info is not None:
                return batch_and_info

    def next(self, n: int, generations: bool) -> tuple[Any, bool]:
        """A batch of n, and whether it is the last of its epoch."""
        while True:
            before = None
            try:
                with self.lock:
                    if self.has_epochs:
                        self.draws += 1
                        before = self.draws, self.sampler._get_cursor()
                    draw = self.draw(n)
                batch_and_info = self.read(draw, generations)
            except MemoryError:
                self._undo_draw(before)
                raise
            if batch_and_info is not None:
                return batch_and_info[0], draw.last

    def _undo_draw(self, before: tuple[int, Any] | None) -> None:
        """After a batch that there was no memory for: an epoch goes on with the rows that were drawn for it.

        Unless another thread has drawn meanwhile: then they are left out.
        """
        if before is not None:
            with self.lock:
                if self.draws == before[0]:
                    self.sampler._set_cursor(before[1])

    # ---- reading what was drawn ----
    def read(self, draw: Draw, generations: bool) -> tuple[Any, dict[str, Any]] | None:
        """The batch of a draw, and its info; None: all rows of the storage have been replaced by others since then."""
        return self._read(draw.slots, draw.index, draw.info, generations, draw.incarnation)

    def _read(
        self, slots: Tensor, index: Any, info: dict[str, Any], generations: bool, incarnation: int
    ) -> tuple[Any, dict[str, Any]] | None:
        storage, attach, find_stale = self.storage, self._attach, self._find_stale
        extra = None if attach is None else attach(index, info)
        # Positional: the hot path.
        batch, overwritten, absent, generation = storage.read(slots, None, extra, generations)
        if storage._incarnation != incarnation:
            return None
        if find_stale is not None:
            overwritten = find_stale(storage, slots, info) or overwritten
        if overwritten is not None or absent is not None:
            lost = sorted({*(overwritten or ()), *(absent or ())})
            again = self._read_again(slots, info, lost, generations, incarnation)
            if again is None:
                return None
            index, batch, generation = again
            extra = None if attach is None else attach(index, info)
            if not self._keeps_items:  # items get them when they are one batch
                for key, value in (extra or {}).items():
                    set_per_item(batch, key, value)
        if self.collate_fn is not None:
            batch = self._collate(batch, extra, info)
        elif self._postprocess is not None:
            batch = self._postprocess(batch, info)
        if generation is not None and extra is not None and self.with_generation:
            set_per_item(batch, "generation", generation)
        if self.transform.transforms:
            batch = self.transform.forward(batch)
            if storage._incarnation != incarnation:  # what transforms have learnt may be that of other rows
                return None
        if self.pin_memory:
            batch = batch.pin_memory()
        info["index"] = index
        if generation is not None:
            info["generation"] = generation
        return batch, info

    def _read_again(
        self, slots: Tensor, info: dict[str, Any], lost: list[int], generations: bool, incarnation: int
    ) -> tuple[Any, Any, Tensor | None] | None:
        """Index, batch and generations with other rows at the positions whose rows do not exist any more."""
        storage, sampler = self.storage, self.sampler
        for attempt in range(1000):
            # After some rounds one row at a time: a whole batch may be too slow for writers of a small ring.
            with self.lock:
                if storage._incarnation != incarnation:
                    return None
                self.draws += 1
                for part in [lost] if attempt < _ROUNDS else [[i] for i in reversed(lost)]:
                    slots = sampler._redraw(storage, slots, info, part)
            batch, overwritten, absent, generation = storage.read(slots, None, None, generations)
            if storage._incarnation != incarnation:
                return None
            overwritten = self.find_stale(slots, info) or overwritten
            if overwritten is None and absent is None:
                return storage.from_slots(slots), batch, generation
            lost = sorted({*(overwritten or ()), *(absent or ())})
        raise RuntimeError("writers overwrite the rows of this batch faster than they can be read; sample fewer")

    def _collate(self, items: Any, extra: dict[str, Any] | None, info: dict[str, Any]) -> Any:
        assert self.collate_fn is not None
        postprocess = self.sampler._postprocess
        if not self._keeps_items:
            return self.collate_fn(postprocess(items, info))
        # A collate function of the user's own may change what it gets; the default one copies anyhow.
        batch = self.collate_fn(items if self.collate_fn is collate_items else [clone(i) for i in items])
        if isinstance(batch, TensorDictBase | dict):
            for key, value in (extra or {}).items():
                set_per_item(batch, key, value)
        return postprocess(batch, info)


def refuse_if_too_many(rows: int, row_bytes: int, batch_size: int) -> None:
    """OutOfMemoryError where so many rows, of a batch of this size, do not fit into the memory that is free."""
    free = free_memory()
    if rows >= BEYOND_MEMORY or (free is not None and rows * row_bytes > free):
        of_free = "" if free is None else f", {human_bytes(free)} are free"
        raise OutOfMemoryError(
            f"batch_size={batch_size} needs {human_bytes(rows * row_bytes)}{of_free}; sample fewer. Nothing was drawn"
        )
