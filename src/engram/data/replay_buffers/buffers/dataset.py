"""A buffer as torch's data loaders read one: an iterable dataset of whole batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from engram.data.replay_buffers.samplers.base import WorkerShare
from engram.data.replay_buffers.samplers.queue import QueueSampler


class BatchDataset(IterableDataset[Any]):
    """The batches of a buffer, which is asked for them when they are: `ReplayBuffer.as_iterable_dataset`."""

    def __init__(self, buffer: Any, batches: int | None) -> None:
        if buffer.batch_size is None:
            raise RuntimeError(
                "Batch_size was not specified, and a dataset of batches needs it: give one to the buffer's constructor"
            )
        if batches is not None and batches < 0:
            raise ValueError(f"batches must be 0 or more, got {batches}")
        self.buffer = buffer
        self._batches = batches
        self._split = False  # whether this worker process has its share

    def __len__(self) -> int:
        if self._batches is None:
            raise TypeError("without batches= a dataset of draws has no length")
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        worker, batches = get_worker_info(), self._batches
        if worker is not None:
            self._take_share(WorkerShare(worker.id, worker.num_workers, worker.seed - worker.id), worker.seed)
            if batches is not None:
                batches = batches // worker.num_workers + (worker.id < batches % worker.num_workers)
        yield from itertools.islice(self._draws(), batches)

    def _draws(self) -> Iterator[Any]:
        """Batches, and where their number is given, epoch after epoch; of a queue, to its end."""
        yield from self.buffer
        while self._batches is not None and not isinstance(self.buffer.sampler, QueueSampler):
            yield from self.buffer

    def _take_share(self, share: WorkerShare, seed: int) -> None:
        if not self._split:
            self.buffer._sampler._split_among_workers(share)
            # Its own generator would draw in each worker what it draws in the others.
            self.buffer.set_rng(torch.Generator().manual_seed(seed))
            self._split = True

    def set_epoch(self, epoch: int) -> None:
        """The next pass is the epoch of this number: with `rank=, world_size=`, before each pass, in all learners."""
        self.buffer.sampler.set_epoch(epoch)

    @staticmethod
    def collate(batch: Any) -> Any:
        """The batch as it is, for `DataLoader(collate_fn=)`: torch's own takes TensorDicts for lists."""
        return batch
