"""The read path, once: draw, read, draw again what was overwritten meanwhile, collate, transform."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.data.replay_buffers.indexing import inward
from engram.data.replay_buffers.samplers.base import Sampler, redrawn
from engram.data.replay_buffers.storages.base import Storage
from engram.data.replay_buffers.storages.list import ListStorage, copied
from engram.data.replay_buffers.trees import put_of_items
from engram.transforms.compose import Compose

_ROUNDS = 8  # of drawing again; then row by row


class Ticket(NamedTuple):
    """A drawn batch that has not been read yet."""

    slots: Tensor
    index: Any
    info: dict[str, Any]
    last: bool  # of its epoch


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
        self._index_is_slots = storage.ndim == 1 and type(sampler).__module__.startswith("engram.")
        self._finish = _own(sampler, "finish")
        self._replaced = _own(sampler, "replaced")
        self.lock = threading.RLock()  # samplers have state: one draw at a time

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

    def draw(self, n: int) -> Ticket:
        """Asks the sampler."""
        with self.lock:
            index, info = self.sampler.sample(self.storage, n)
            last = self.sampler.ran_out if hasattr(self.sampler, "ran_out") else False
        return Ticket(self.slots_of(index), index, info, last)

    def sample(self, n: int, numbers: bool) -> tuple[Any, dict[str, Any]]:
        """A batch of n and what there is to say about it."""
        with self.lock:
            index, info = self.sampler.sample(self.storage, n)
        slots: Any = index if self._index_is_slots else self.slots_of(index)
        return self.fetch(slots, index, info, numbers)

    def fetch(self, slots: Tensor, index: Any, info: dict[str, Any], numbers: bool) -> tuple[Any, dict[str, Any]]:
        """Reads what was drawn: the batch, and `info` with its index (and generations with `numbers`)."""
        extra = None if self._attach is None else self._attach(index, info)
        batch, gone, absent, generation = self.storage.read(slots, None, extra, numbers)
        if self._replaced is not None:
            gone = self._replaced(self.storage, slots, info) or gone
        if gone is not None or absent is not None:
            index, batch, generation = self._again(slots, info, (gone, absent), numbers)
            extra = None if self._attach is None else self._attach(index, info)
            if not isinstance(self.storage, ListStorage):  # items get them when they are one batch
                for key, value in (extra or {}).items():
                    put_of_items(batch, key, value)
        if self.collate_fn is not None:
            batch = self._collate(batch, extra, info)
        elif self._finish is not None:
            batch = self._finish(batch, info)
        if generation is not None and extra is not None and self.with_generation:
            put_of_items(batch, "generation", generation)
        if self.transform.transforms:
            batch = self.transform.forward(batch)
        if self.pin_memory:
            batch = batch.pin_memory()
        info["index"] = index
        if generation is not None:
            info["generation"] = generation
        return batch, info

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
        batch = self.collate_fn(items if self.collate_fn is stack_items else [copied(i) for i in items])
        if isinstance(batch, TensorDictBase | dict):
            for key, value in (extra or {}).items():
                put_of_items(batch, key, value)
        return finish(batch, info)

    def _again(
        self, slots: Tensor, info: dict[str, Any], bad: tuple[list[int] | None, list[int] | None], numbers: bool
    ) -> tuple[Any, Any, Tensor | None]:
        """Other slots for the rows that are not there any more: their index, the batch, its generations."""
        redraw = getattr(self.sampler, "redraw", None) or functools.partial(redrawn, self.sampler)
        for attempt in range(1000):
            places = sorted({*(bad[0] or ()), *(bad[1] or ())})
            # After some rounds one row at a time: a whole batch may be too slow for writers of a small ring.
            with self.lock:
                for part in [places] if attempt < _ROUNDS else [[i] for i in reversed(places)]:
                    slots = redraw(self.storage, slots, info, part)
            batch, *bad_now, generation = self.storage.read(slots, None, None, numbers)
            bad = (bad_now[0], bad_now[1])
            if self._replaced is not None:
                bad = (self._replaced(self.storage, slots, info) or bad[0], bad[1])
            if bad == (None, None):
                return self.storage.outward(slots), batch, generation
        raise RuntimeError("writers overwrite the rows of this batch faster than they can be read; sample fewer")


def _own(sampler: Any, name: str) -> Any:
    """A method that the sampler has of its own; None where it is the one that does nothing."""
    method = getattr(sampler, name, None)
    return None if getattr(type(sampler), name, None) is getattr(Sampler, name) else method


def _as_it_is(batch: Any, info: dict[str, Any]) -> Any:
    return batch


def stack_items(items: list[Any]) -> Any:
    """The default collate function of list storages: tensors, TensorDicts and pytrees of them stacked; else a list."""
    first = items[0]
    if isinstance(first, Tensor):
        return torch.stack(items)
    if isinstance(first, TensorDictBase) or hasattr(type(first), "_from_tensordict"):
        return torch.stack(items)
    if isinstance(first, dict):
        return {k: stack_items([item[k] for item in items]) for k in first}
    if isinstance(first, tuple):
        return tuple(stack_items([item[i] for item in items]) for i in range(len(first)))
    if isinstance(first, list) and all(isinstance(x, list) and len(x) == len(first) for x in items):
        return [stack_items([item[i] for item in items]) for i in range(len(first))]
    if isinstance(first, bool | int | float) or type(first).__module__ == "numpy":
        return torch.as_tensor(items)
    return list(items)
