"""How a buffer reads batches: draw, read, draw again what was overwritten meanwhile, collate, transform."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram import _native
from engram._system import free_memory, human_bytes
from engram.data.replay_buffers.reuse import PREVENT_REUSE, may_reuse, why_not_reusable
from engram.data.replay_buffers.samplers.base import Sampler
from engram.data.replay_buffers.samplers.draw import Draw, is_per_row
from engram.data.replay_buffers.samplers.runs import mark
from engram.data.replay_buffers.storages.base import Storage
from engram.data.replay_buffers.storages.tensor import TableStorage
from engram.errors import OutOfMemoryError
from engram.pytree import (
    KeyPath,
    as_arrays,
    as_leaf,
    clone,
    collate_items,
    get_entry,
    has_keys,
    is_tensorclass,
    no_array_error,
    set_per_item,
)
from engram.transforms.compose import Compose

_ROUNDS = 8  # of drawing again whole batches; then row by row
_DRAWN_BYTES = 64  # that a draw takes for a row: its slot, its slice, its weight
MANY_ROWS = 1 << 20  # smaller batches are tried without a look at what memory is free
BEYOND_MEMORY = 1 << 46  # rows


class PreparedRows(NamedTuple):
    """A batch that was drawn, and whose rows threads are copying."""

    rows: _native.PreparedBatch
    incarnation: int  # of the storage when it was drawn


class BatchReader:
    """Turns draws into batches. One for each buffer; any number of threads may use it.

    Args:
        attach: from a batch's index and info, entries to add at its root; None for none.
        with_generation: where entries are added, also add each row's sequence.
        reuse: batches may be read into tensors of earlier ones that nobody has any more.
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
        reuse: bool = False,
    ) -> None:
        self.storage = storage
        self.sampler = sampler
        self.transform = transform
        self.collate_fn = collate_fn
        self.pin_memory = pin_memory
        self.with_generation = with_generation
        self._attach = attach if attach is None or sampler._built_in else partial(_attach_per_row, attach)
        #: Whether batches get the entries that a sampler of a user's own has for each row in its info.
        self.attaches_info = attach is not None and not sampler._built_in
        self._items = storage.item_reader
        self._stacks_items = collate_fn is collate_items
        self.has_epochs = sampler._has_epochs
        self.draws = 0  # of epochs, so far: who undoes one must know that it was the last
        # Samplers have state: one draw at a time. Built-in ones take their lock themselves.
        self._draws_directly = sampler._built_in and not storage.read_only
        #: What draws rows inside a native call; None: only the sampler does.
        self.row_draw: _native.RowDraw | None = None
        self._maker = maker = self._native_maker(PREVENT_REUSE if reuse and why_not_reusable() is None else None)
        # Nothing that has this reader, which would be a cycle.
        self.make = None if maker is None or self.has_epochs else maker.sample

    def _native_maker(self, reuse: Any) -> _native.BatchMaker | None:
        """What makes whole batches of this buffer in one native call; None where a batch takes more than that.

        This is the one place where it is decided: when the parts are put together, and by what they are. A table, which
        is made later, says by `native` whether the call can read it; transforms are applied to what comes out.
        """
        storage, sampler = self.storage, self.sampler
        reads_plainly = storage.ndim == 1 and isinstance(storage, TableStorage)
        entries_are_ours = self._attach is None or self._attach is index_and_weight
        hands_out_plainly = self.collate_fn is None and not self.pin_memory
        if not (reads_plainly and sampler._built_in and entries_are_ours and hands_out_plainly):
            return None
        self.row_draw = draw = sampler._native_draw(storage)
        # The counters of a store always say which rows it has; what else is read another process may be replacing.
        if draw is None or (storage.read_only and not isinstance(draw, _native.UniformDraw)):
            return None
        index_key, weight_key = ("index", "priority_weight") if self.attaches else (None, None)
        return _native.BatchMaker(draw, sampler, index_key, reuse, weight_key)

    @property
    def lock(self) -> Any:
        """Held by whoever draws or changes the sampler."""
        return self.sampler.lock

    @property
    def attaches(self) -> bool:
        """Whether batches get entries at their root."""
        return self._attach is not None

    @property
    def hands_out_rows(self) -> bool:
        """Whether batches are rows as they are stored, marks and transforms apart."""
        return self.collate_fn is None and not self.pin_memory

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
            self.draws += self.has_epochs
            incarnation = self.storage._incarnation
            draw = self.draw_rows(n)
            draw.last, draw.incarnation = self.sampler.ran_out, incarnation
        return draw

    def draw_exactly(self, n: int) -> Draw:
        """Draws n rows, over the end of an epoch if need be: members of an ensemble give equal parts of a batch."""
        with self.lock:
            self.draws += 1
            incarnation, sampler = self.storage._incarnation, self.sampler
            draw = self.draw_rows(n)
            draw.rest = None  # a row that is lost is replaced, by one of the next epoch if need be
            draw.last, draw.incarnation = sampler.ran_out, incarnation
            while not draw.info and len(draw.slots) < n:
                more = self.draw_rows(n - len(draw.slots))
                if not len(more.slots):
                    raise RuntimeError(
                        f"{sampler!r} drew {len(draw.slots)} rows of the {n} that each member gives to a batch, and "
                        "then none; a sampler without rows to draw raises a RuntimeError, others draw some"
                    )
                draw.last = draw.last or sampler.ran_out
                draw.append(more)
        return draw

    def draw_rows(self, n: int) -> Draw:
        """Draws n rows. Somebody else may empty or replace the rows: the read finds out which exist."""
        storage, sampler = self.storage, self.sampler
        with self.lock:
            if not storage.read_only:
                return sampler._draw_batch(storage, n)
            draw: Draw = storage._validated(
                lambda: sampler._draw_batch(storage, n), errors_only=not sampler._can_repeat_draws
            )
            return draw

    # ---- whole batches ----
    def batch(self, n: int, only_native: bool = False) -> Any:
        """A batch of n as `sample` gives it, without its info and generations; where it can be, in one call.

        With `only_native` None where it cannot be.
        """
        storage = self.storage
        if self._maker is not None and (source := storage.native.source) is not None:
            if self.has_epochs:
                batch = self._batch_of_epoch(source, n)
                if batch is not None:
                    return batch
            else:
                make = self.make or self._maker.sample
                transform = self.transform
                if not transform.transforms:
                    batch = make(source, n)
                    if batch is not None:
                        return batch
                else:
                    incarnation = storage._incarnation
                    batch = make(source, n)
                    if batch is not None:
                        batch = transform.forward(batch)
                        if storage._incarnation == incarnation:
                            return batch
        return None if only_native else self.sample(n, generations=False)[0]

    def arrays(self, n: int) -> Any:
        """A batch of n as `sample` gives it, with dicts for TensorDicts and arrays for tensors.

        Raises:
            TypeError: an entry has a dtype that numpy does not have; nothing is drawn where no transform may cast it.
        """
        storage = self.storage
        if not self.transform.transforms:
            self._refuse_dtypes_without_array()
            if self._maker is not None and (source := storage.native.source) is not None:
                batch = self.make(source, n, True) if self.make else self._batch_of_epoch(source, n, True)
                if batch is not None:
                    return batch
        return as_arrays(self.batch(n))

    def _refuse_dtypes_without_array(self) -> None:
        layout = self.storage.layout if self.collate_fn is None else None
        for leaf in () if layout is None else layout.leaves:
            if leaf.dtype is torch.bfloat16:
                raise no_array_error(leaf.path)

    # ---- whole batches ahead: `Reader` in prefetch.py says what these do ----
    def prepare(self, n: int, threads: _native.CopyThreads) -> PreparedRows | None:
        storage = self.storage
        if self._maker is None or (source := storage.native.source) is None:
            return None
        self.draws += self.has_epochs
        incarnation = storage._incarnation
        rows = self._maker.prepare(source, n, threads)
        return None if rows is None else PreparedRows(rows, incarnation)

    def finish(self, batch: Any, prepared: PreparedRows) -> Any:
        if self.transform.transforms:
            batch = self.transform.forward(batch)
        return batch if self.storage._incarnation == prepared.incarnation else None

    def prepares(self) -> bool:
        return self._maker is not None

    def transforms(self) -> bool:
        return bool(self.transform.transforms)

    def _batch_of_epoch(self, source: _native.RowSource, n: int, as_numpy: bool = False) -> Any:
        """A batch of a sampler with epochs, in one native call; None: the epoch goes on with the same rows.

        It does so too where there is no memory for the batch or for what transforms make of it.
        """
        assert self._maker is not None
        storage, sampler, transform, before = self.storage, self.sampler, self.transform, None
        incarnation = storage._incarnation
        batch = None
        try:
            # Held until the rows are copied: nobody draws the rows behind those that are to be drawn again.
            with sampler.lock:
                self.draws = draws = self.draws + 1
                before = draws, sampler._get_cursor()
                try:
                    batch = self._maker.sample(source, n, as_numpy)
                finally:
                    if batch is None:
                        self._undo_draw(before)
            if batch is None or not transform.transforms:
                return batch
            batch = transform.forward(batch)
        except MemoryError:
            self._undo_draw(before)
            raise
        return batch if storage._incarnation == incarnation else None  # else transforms may have learnt of other rows

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
                        draw = sampler._draw_batch(storage, n) if self._draws_directly else self.draw_rows(n)
                elif self._draws_directly:
                    draw = sampler._draw_batch(storage, n)
                else:
                    draw = self.draw_rows(n)
                draw.incarnation = incarnation
                batch_and_info = self.read(draw, generations)
            except MemoryError:
                self._undo_draw(before)
                raise
            if batch_and_info is not None:
                return batch_and_info

    def next(self, n: int, generations: bool) -> tuple[Any, bool]:
        """A batch of n, and whether it is the last of its epoch."""
        if self._maker is not None and not generations:
            if not self.has_epochs:
                return self.batch(n), False
            batch = self.batch(n, only_native=True)
            if batch is not None:  # the native call leaves the last of an epoch to the sampler
                return batch, False
        while True:
            before = None
            try:
                with self.lock:
                    if self.has_epochs:
                        before = self.draws + 1, self.sampler._get_cursor()
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
        storage, attach, index, info = self.storage, self._attach, draw.index, draw.info
        incarnation = draw.incarnation
        extra = None if attach is None else attach(index, info)
        # Positional: the hot path.
        items = self._items
        if items is None:
            batch, overwritten, absent, generation = storage.read(draw.slots, None, extra, generations)
        elif self._stacks_items:  # which copies: the stored ones will do
            batch, overwritten, absent, generation = items.read_batch(draw.slots, extra, generations)
        else:
            batch, overwritten, absent, generation = items.read_own(draw.slots, generations, may_reuse())
        if storage._incarnation != incarnation:
            return None
        if draw.seen is not None:
            overwritten = draw.seen.stale(draw.store, draw.slots) or overwritten
        if overwritten is not None or absent is not None:
            lost = sorted({*(overwritten or ()), *(absent or ())})
            again = self._read_again(draw, lost, generations)
            if again is None:
                return None
            draw, batch, generation = again
            index, info = draw.index, draw.info
            extra = None if attach is None else attach(index, info)
            if items is None:  # items get them when they are one batch
                for key, value in (extra or {}).items():
                    set_per_item(batch, key, value)
        collate = self.collate_fn
        if collate is not None and type(batch) is list:
            batch, collate = self._collate_items(collate, batch, extra), None
        if draw.runs is not None:
            info.update(mark(batch, draw.marks, draw.runs, draw.flags))
        if collate is not None and items is None:  # items are a batch by now, with these entries
            batch = collate(batch)
        if generation is not None and self.with_generation:
            info["index_generation"] = generation
            if extra is not None:
                put_generation(batch, generation)
        if self.attaches_info:
            put_info(batch, info, len(index[0] if isinstance(index, tuple) else index))
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

    def _read_again(self, draw: Draw, lost: list[int], generations: bool) -> tuple[Draw, Any, Tensor | None] | None:
        """Draw, batch and generations with other rows at the positions whose rows do not exist any more."""
        storage, sampler, incarnation = self.storage, self.sampler, draw.incarnation
        for attempt in range(1000):
            # After some rounds one row at a time: a whole batch may be too slow for writers of a small ring.
            with self.lock:
                if storage._incarnation != incarnation:
                    return None
                self.draws += 1
                for part in [lost] if attempt < _ROUNDS else [[i] for i in reversed(lost)]:
                    draw = draw.redraw(part)
            if self._items is None:
                batch, overwritten, absent, generation = storage.read(draw.slots, None, None, generations)
            else:
                batch, overwritten, absent, generation = self._items.read_own(draw.slots, generations, may_reuse())
            if storage._incarnation != incarnation:
                return None
            if draw.seen is not None:
                overwritten = draw.seen.stale(draw.store, draw.slots) or overwritten
            if overwritten is None and absent is None:
                draw.index = storage.from_slots(draw.slots)
                return draw, batch, generation
            lost = sorted({*(overwritten or ()), *(absent or ())})
        if absent is not None and not sampler._built_in:
            raise IndexError(
                f"{draw.kind}.sample returns slot {int(draw.slots[absent[0]])}, which holds no row; {len(storage)} "
                "are stored"
            )
        raise RuntimeError("writers overwrite the rows of this batch faster than they can be read; sample fewer")

    def _collate_items(self, collate: Callable[[Any], Any], items: list[Any], extra: dict[str, Any] | None) -> Any:
        if self._items is None and not self._stacks_items:
            items = [clone(item) for item in items]  # which a collate function of the user's own may change
        batch = collate(items)
        if isinstance(batch, TensorDictBase | dict):
            for key, value in (extra or {}).items():
                set_per_item(batch, key, value)
        return batch


def index_and_weight(index: Any, info: dict[str, Any]) -> dict[str, Any]:
    """The entries that samples of TensorDict buffers have at their root."""
    entries: dict[str, Any] = {"index": torch.stack(index, -1) if isinstance(index, tuple) else index}
    if "priority_weight" in info:
        entries["priority_weight"] = info["priority_weight"]
    return entries


def _attach_per_row(
    attach: Callable[[Any, dict[str, Any]], dict[str, Any] | None], index: Any, info: dict[str, Any]
) -> dict[str, Any]:
    """What `attach` gives of the info of a user's own sampler, as tensors, where it has a value for each row."""
    n = len(index[0] if isinstance(index, tuple) else index)
    leaves = ((key, _per_row_leaf(value, (key,), n)) for key, value in (attach(index, info) or {}).items())
    return {key: leaf for key, leaf in leaves if leaf is not None}


def _per_row_leaf(value: Any, path: KeyPath, n: int) -> Any:
    """An entry of an info as batches of n rows hold it; None: it has no value for each row, or none of a tensor."""
    if isinstance(value, list) or not is_per_row(value, n):
        return None
    with contextlib.suppress(TypeError):
        return as_leaf(value, path)
    return None


_NOT_OF_SAMPLERS = ("index", "generation", "index_generation", "buffer_ids")  # entries that only buffers give


def put_info(batch: Any, info: dict[str, Any], n: int) -> None:
    """Puts the entries of an info that have a value for each of n rows, as tensors or arrays, into a batch with keys.

    What the batch has under the same key stays; what it cannot hold is in the info only.
    """
    if not has_keys(batch) or is_tensorclass(batch):
        return
    if isinstance(batch, TensorDictBase) and batch.batch_size[:1] != (n,):  # a collate function has made another shape
        return
    for key, value in info.items():
        path = key if isinstance(key, tuple) else (key,)
        if key in _NOT_OF_SAMPLERS or not (path and all(isinstance(part, str) for part in path)):
            continue
        leaf = _per_row_leaf(value, path, n)
        if leaf is not None and _is_free(batch, path):
            set_per_item(batch, path, leaf)


def _is_free(batch: Any, path: KeyPath) -> bool:
    """Whether an entry can be added at a path: there is none, nor one without keys on the way to it."""
    for i in range(1, len(path)):
        holder = get_entry(batch, path[:i])
        if holder is not None and (not has_keys(holder) or is_tensorclass(holder)):
            return False
    return get_entry(batch, path) is None


def put_generation(batch: Any, generation: Tensor, lead: int = 1) -> None:
    """Puts the generation `[*lead]` of each row into a batch, under both names that readers of batches know."""
    set_per_item(batch, "generation", generation, lead)
    set_per_item(batch, "index_generation", generation, lead)


def refuse_if_too_many(rows: int, row_bytes: int, batch_size: int) -> None:
    """OutOfMemoryError where so many rows, of a batch of this size, do not fit into the memory that is free."""
    free = free_memory()
    if rows >= BEYOND_MEMORY or (free is not None and rows * row_bytes > free):
        of_free = "" if free is None else f", {human_bytes(free)} are free"
        raise OutOfMemoryError(
            f"batch_size={batch_size} needs {human_bytes(rows * row_bytes)}{of_free}; sample fewer. Nothing was drawn"
        )
