"""Batches that go from a worker to its owner as packed rows in shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from engram.data import LazyTensorStorage, ReplayBuffer


class Shelved(NamedTuple):
    """Where a batch lies: `storage` is the shelf itself where it is a new one."""

    shape: tuple[int, ...]
    first: int  # write number of its first row
    storage: LazyTensorStorage | None


class Shelf:
    """The worker's side: a ring of rows with room for `batches` batches that nobody has taken yet.

    The first batch decides the layout. A batch of another layout, or one too long for the ring, gets a new shelf; the
    old one's memory goes when the owner has taken what lies there.
    """

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self._buffer: ReplayBuffer | None = None
        self._capacity = 0

    def put(self, batch: TensorDictBase) -> Shelved:
        """Copies a batch into shared memory; what was put `batches` batches ago may be overwritten."""
        rows = batch.reshape(-1)
        is_new = self._buffer is None or rows.numel() * self._batches > self._capacity
        if not is_new:
            try:
                return self._put(rows, batch.shape, None)
            except (KeyError, ValueError):  # other keys, shapes or dtypes than before; nothing was written
                pass
        self._capacity = rows.numel() * self._batches
        storage = LazyTensorStorage(self._capacity, shared=True)
        self._buffer = ReplayBuffer(storage=storage, batch_size=1)
        return self._put(rows, batch.shape, storage)

    def _put(self, rows: TensorDictBase, shape: torch.Size, storage: LazyTensorStorage | None) -> Shelved:
        assert self._buffer is not None
        first = self._buffer.write_count
        self._buffer.extend(rows)
        return Shelved(tuple(shape), first, storage)


class ShelfReader:
    """The owner's side."""

    def __init__(self) -> None:
        self._storage: Any = None

    def take(self, shelved: Shelved) -> TensorDictBase:
        """A copy of a batch, in memory of its own."""
        if shelved.storage is not None:
            self._storage = shelved.storage
        n, capacity = torch.Size(shelved.shape).numel(), self._storage.max_size
        slots = torch.arange(shelved.first, shelved.first + n).remainder_(capacity)
        batch: TensorDictBase = self._storage.get(slots)
        return batch.reshape(shelved.shape).clear_device_()
