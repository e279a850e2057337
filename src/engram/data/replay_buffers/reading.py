"""The read path, once: draw, read, draw again what was overwritten meanwhile, collate, transform."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.data.replay_buffers.indexing import inward
from engram.data.replay_buffers.samplers.base import Sampler
from engram.data.replay_buffers.storages.base import Rows, Storage
from engram.data.replay_buffers.storages.list import ListStorage, copied
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
    """

    def __init__(
        self,
        storage: Storage,
        sampler: Sampler,
        transform: Compose,
        collate_fn: Callable[[Any], Any] | None,
        attach: Callable[[Any, dict[str, Any]], dict[str, Any] | None] | None,
        pin_memory: bool,
    ) -> None:
        self.storage = storage
        self.sampler = sampler
        self.transform = transform
        self.collate_fn = collate_fn
        self.pin_memory = pin_memory
        self._attach = attach
        self.lock = threading.RLock()  # samplers have state: one draw at a time

    def draw(self, n: int) -> Ticket:
        """Asks the sampler."""
        with self.lock:
            index, info = self.sampler.sample(self.storage, n)
            last = self.sampler.ran_out if hasattr(self.sampler, "ran_out") else False
        if type(index) is Tensor and index.dtype is torch.int64 and index.ndim == 1:
            slots = index
        else:
            slots = inward(index, self.storage.inner, self.storage.max_size or 0)
        return Ticket(slots, index, info, last)

    def fetch(self, ticket: Ticket, numbers: bool) -> tuple[Any, dict[str, Any]]:
        """Reads what was drawn: the batch, and `info` with its index (and generations with `numbers`)."""
        info = ticket.info
        extra = None if self._attach is None else self._attach(ticket.index, info)
        rows = self.storage.read(ticket.slots, None, extra, numbers)
        if rows.gone is not None or rows.absent is not None:
            ticket, rows = self._again(ticket, rows, numbers)
            info = ticket.info
            extra = None if self._attach is None else self._attach(ticket.index, info)
            for key, value in (extra or {}).items():
                rows.batch[key] = value
        batch = rows.batch
        if self.collate_fn is not None:
            batch = self._collate(batch, extra)
        if self.transform.transforms:
            batch = self.transform.forward(batch)
        if self.pin_memory:
            batch = batch.pin_memory()
        info["index"] = ticket.index
        if rows.generation is not None:
            info["generation"] = rows.generation
        return batch, info

    def sample(self, n: int, numbers: bool) -> tuple[Any, dict[str, Any]]:
        """A batch of n and what there is to say about it."""
        return self.fetch(self.draw(n), numbers)

    def _collate(self, items: Any, extra: dict[str, Any] | None) -> Any:
        assert self.collate_fn is not None
        if isinstance(self.storage, ListStorage):
            # A collate function of the user's own may change what it gets; the default one copies anyhow.
            batch = self.collate_fn(items if self.collate_fn is stack_items else [copied(i) for i in items])
            if extra and isinstance(batch, TensorDictBase | dict):
                for key, value in extra.items():
                    batch[key] = value
            return batch
        return self.collate_fn(items)

    def _again(self, ticket: Ticket, rows: Rows, numbers: bool) -> tuple[Ticket, Rows]:
        """Other slots for the rows that are not there any more."""
        slots = ticket.slots.clone()
        for attempt in range(1000):
            bad = sorted({*(rows.gone or ()), *(rows.absent or ())})
            if not bad:
                break
            # After some rounds one row at a time: a whole batch may be too slow for writers of a small ring.
            for part in [bad] if attempt < _ROUNDS else [[i] for i in bad]:
                slots[torch.tensor(part)] = self.draw_all(len(part))
            rows = self.storage.read(slots, None, None, numbers)
        else:
            raise RuntimeError("writers overwrite the rows of this batch faster than they can be read; sample fewer")
        index = self.storage.outward(slots)
        return ticket._replace(slots=slots, index=index), rows

    def draw_all(self, n: int) -> Tensor:
        """Exactly n slots, over the end of an epoch if need be."""
        found = [self.draw(n).slots]
        while sum(map(len, found)) < n:
            found.append(self.draw(n - sum(map(len, found))).slots)
        return torch.cat(found)[:n]


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
