"""ReplayBuffer: rows in, batches out; the parts do the work."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from engram.data.replay_buffers.indexing import inward
from engram.data.replay_buffers.parts import checked_batch_size
from engram.data.replay_buffers.reading import MANY_ROWS
from engram.data.replay_buffers.saving import SavedBuffer
from engram.data.replay_buffers.stacking import chosen, stack_rows, swap_dims
from engram.data.replay_buffers.storages.list import ListStorage
from engram.data.replay_buffers.storages.memmap import LazyMemmapStorage
from engram.errors import OutOfMemoryError
from engram.transforms.writing import Writing


class ReplayBuffer(SavedBuffer):
    """Stores what environments produce and hands back training batches.

    Args:
        capacity: steps that fit, where the storage does not say it; 1000 with neither.
        storage: where rows are kept: a Storage, or something without arguments that makes one. `ListStorage(1000)`.
        sampler: which rows a batch is made of. `RandomSampler()`.
        writer: where new rows go. `RoundRobinWriter()`.
        collate_fn: makes a batch of what was read: of a list of items for list storages (stacked by default), of
            the batch for others.
        pin_memory: puts batches in page-locked memory.
        prefetch: how many batches threads prepare ahead.
        transform: a Transform or a callable, applied on reading; its `inv` (in TorchRL's form also `_inv_call` or
            `_inv_apply_transform`) on writing.
        batch_size: rows of a batch, where `sample` does not say it.
        dim_extend: the dimension of the data that is time; the last batch dimension.
        generator: draws come from here instead of torch's global generator; saved with the buffer.
        shared: lets other processes see and write the rows.
        checkpointer: how the storage is saved.
        track_generations: also put each row's write number in `info["generation"]`.

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rb.extend(TensorDict({"obs": torch.randn(10, 3), "reward": torch.zeros(10, 1)}, [10]))
        tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
        >>> rb.sample()["obs"].shape
        torch.Size([4, 3])
    """

    # ---- writing ----
    def add(self, item: Any) -> Any:
        """Stores one step; returns its index. With a transform that holds steps back: indices of what was written.

        Raises:
            ValueError, TypeError: the step does not fit the storage; the message names the leaf. Nothing is changed.
        """
        if self._transform.transforms:
            return self._write_through(item, True)
        storage = self._storage
        extras = self._extras(item, True, -1)
        with storage.mutex if extras is None else self._writing():
            slots: Any = self._writer.write(storage, item, True, -1)
            if extras is not None:
                self._wrote(slots, extras)
        return self._index_of(slots, True)

    def extend(self, items: Any) -> Tensor:
        """Stores a batch of steps; returns their indices: int64 [n], with ndim=2 [n, 2].

        A list is a list of items; a tuple is one pytree. Of more steps than fit, the last ones stay. A transform that
        holds steps back may write others than those that came, or none.

        Raises:
            ValueError, TypeError: the batch does not fit the storage; the message names the leaf. Nothing is changed.
        """
        if self._transform.transforms:
            written: Tensor = self._write_through(items, False)
            return written
        storage, time_dim = self._storage, self._time_dim
        if type(items) is list and not isinstance(storage, ListStorage):
            items = stack_rows(items, time_dim)
        extras = self._extras(items, False, time_dim)
        with storage.mutex if extras is None else self._writing():
            slots: Any = self._writer.write(storage, items, False, time_dim)
            if extras is not None:
                self._wrote(slots, extras)
        made: Tensor = self._index_of(slots, False)
        return made

    def _write_through(self, items: Any, single: bool) -> Any:
        """Writes what the transforms make of the data; where that is refused, they are as they were before."""
        transform, storage = self._transform, self._storage
        if not transform.write_in_order:
            writing = transform.write(Writing(items, storage.ndim, self._time_dim, single))
            with self._writing():
                slots = self._written(writing)
        else:
            with self._writing():
                if type(items) is list:
                    items = stack_rows(items, self._time_dim)
                before = transform.remember()
                try:
                    writing = transform.write(Writing(items, storage.ndim, self._time_dim, single))
                    slots = self._written(writing)
                except BaseException:
                    transform.undo(before)
                    raise
        return self._index_of(slots, writing.single and not writing.resized)

    def flush_transforms(self) -> Tensor:
        """Writes the steps that transforms hold back; returns their indices as `extend` does, none if none waited.

        For the end of training: a `MultiStepTransform` gives them the rewards that exist, as at their trajectories'
        end. If these go on after all, their next steps begin anew; nothing is written twice.

        Raises:
            RuntimeError: the buffer is an immutable dataset. The steps go on waiting.

        Example:
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=MultiStepTransform(n_steps=3, gamma=0.5))
            >>> following = {"reward": torch.ones(4, 1), "done": torch.zeros(4, 1, dtype=torch.bool)}
            >>> rb.extend(TensorDict({"next": following}, [4])), rb.flush_transforms()
            (tensor([0, 1]), tensor([2, 3]))
            >>> rb[:]["next", "reward"].flatten()
            tensor([1.7500, 1.7500, 1.5000, 1.0000])
        """
        transform, storage = self._transform, self._storage
        with self._writing():
            before = transform.remember()
            try:
                slots = self._written(transform.flush(Writing(None, storage.ndim, storage.ndim - 1)))
            except BaseException:
                transform.undo(before)
                raise
        made: Tensor = self._index_of(slots, False)
        return made

    def _written(self, writing: Writing) -> Any:
        """Writes what is to be written, if anything; returns slots. The caller holds the mutex."""
        storage, items, time_dim = self._storage, writing.items, -1 if writing.single else writing.time_dim
        if writing.held is not None:
            # What waits in a transform must fit, too: an error later would belong to somebody else's data.
            self._writer.allow("extend")
            storage.check(writing.held, writing.single, time_dim, self._writer.index_key)
        if items is None:
            return torch.empty(0, dtype=torch.int64)
        if type(items) is list and not isinstance(storage, ListStorage):
            items = stack_rows(items, time_dim)
        extras = self._extras(items, writing.single, time_dim)
        slots = self._writer.write(storage, items, writing.single, time_dim)
        if extras is not None:
            self._wrote(slots, extras)
        return slots

    def _index_of(self, slots: Any, single: bool) -> Any:
        """Slots as `add` (`single`) and `extend` return them."""
        if self._storage.ndim > 1:
            # Before the first write a storage does not know its environments; there is nothing to point at, either.
            if not len(slots):
                return slots.new_empty(0, self._storage.ndim)
            return torch.stack(tuple(self._storage.outward(slots)), -1)
        if not single:
            return slots
        return slots if type(slots) is int else int(slots[0])

    def _extras(self, items: Any, single: bool, time_dim: int) -> Any:
        """Before each write: what `_wrote` takes from the data beside rows; None: nothing. Raises where it is invalid.

        `time_dim` is where time runs in these data; transforms may have moved it.
        """
        return None

    def _writing(self) -> AbstractContextManager[Any]:
        """Around a write that may have extras."""
        return self._storage.mutex

    def _wrote(self, slots: Tensor | int, extras: Any) -> None:
        """After a write that had extras, before another thread writes. Slot -1: refused."""

    @property
    def _time_dim(self) -> int:
        return self._storage.ndim - 1 if self._dim_extend is None else self._dim_extend

    @property
    def dim_extend(self) -> int:
        """The dimension of the data that is time."""
        return self._time_dim

    # ---- sampling ----
    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """A batch, with `return_info` also a dict of what there is to say about it (`"index"`, `"generation"`, ...).

        Raises:
            ValueError: no batch size here or in the constructor.
            RuntimeError: nothing is stored.
            OutOfMemoryError: there is no memory for the batch; nothing was drawn where it has more than 2**20 rows and
                needs more than is free. Random numbers may have been drawn; an epoch goes on with the same rows.
        """
        n = self._batch_size
        if n is None or (batch_size is not None and batch_size != n):
            n = self._agreed_batch_size(batch_size)
        if n > MANY_ROWS:
            self._reader.check_room(n)
        try:
            if self._prefetcher is not None:
                batch, info, _ = self._prefetcher.next(n)
            else:
                batch, info = self._reader.sample(n, return_info or self._track_generations)
        except MemoryError as error:
            raise OutOfMemoryError(f"no memory for a batch of {n} rows ({error}); sample fewer") from error
        return (batch, info) if return_info else batch

    def _agreed_batch_size(self, batch_size: int | None) -> int:
        if batch_size is None:
            raise ValueError("no batch size: give one to sample(batch_size) or to the buffer's constructor")
        if self._batch_size is not None and batch_size != self._batch_size:
            warnings.warn(
                f"sample was called with batch_size={batch_size}, the buffer was made with "
                f"batch_size={self._batch_size}; {batch_size} is used",
                stacklevel=3,
            )
        if type(batch_size) is int and batch_size > 0:
            return batch_size
        checked = checked_batch_size(batch_size)
        assert checked is not None
        return checked

    def __iter__(self) -> Iterator[Any]:
        """Batches for ever; with a sampler without replacement, to the end of the epoch."""
        if self._batch_size is None:
            raise ValueError("iterating needs a batch size: give one to the buffer's constructor")
        if self._batch_size > MANY_ROWS:
            self._reader.check_room(self._batch_size)
        while True:
            if self._prefetcher is not None:
                batch, _, last = self._prefetcher.next(self._batch_size)
            else:
                batch, last = self._reader.next(self._batch_size, self._track_generations)
            yield batch
            if last:
                return

    def __next__(self) -> Any:
        return self.sample()

    # ---- by index ----
    def __len__(self) -> int:
        return len(self._storage)

    @property
    def write_count(self) -> int:
        """Steps ever written."""
        return self._storage.write_count

    def __getitem__(self, index: Any) -> Any:
        """A copy of stored steps; with ndim=2 the index goes along time and `rb[:]` is `[envs, time]`.

        Raises:
            IndexError: a step that has not been written.
        """
        if isinstance(index, str) or (isinstance(index, tuple) and index and all(isinstance(k, str) for k in index)):
            return self[:][index]
        one_dimension = self._storage.ndim == 1
        if isinstance(index, tuple) and not one_dimension and len(index) > 1:
            rows = swap_dims(self._storage.get(slice(None)), self._time_dim, to_time=True)[index]
        else:
            rows = self._storage.get(index)
            if not one_dimension and not _is_int(index):
                rows = swap_dims(rows, self._time_dim, to_time=True)
        if self._collate_fn is not None and not _is_int(index):
            rows = self._collate_fn(rows)
        return self._transform.forward(rows) if self._transform.transforms else rows

    def __setitem__(self, index: Any, items: Any) -> None:
        """Replaces stored steps, for which this process must have the storage alone.

        Raises:
            IndexError: a step that has not been written.
            ValueError, TypeError: the data do not fit; the message names the leaf. Nothing is changed.
            StorageInUseError: another process has the storage open.
        """
        self._writer.allow("rb[...] = ...")
        items = self._replacing(items)
        if self._storage.ndim > 1:
            if isinstance(index, tuple) and len(index) > 1:
                raise IndexError(
                    "rb[...] = ... goes along time; use rb.storage[time, env] = ... for single environments"
                )
            if not _is_int(index):
                items = swap_dims(items, self._time_dim, to_time=False)
        elif type(items) is list and not isinstance(self._storage, ListStorage):
            items = stack_rows(items, 0)
        with self._undisturbed():
            self._storage.set(index, items, self._writer.index_key)

    def _replacing(self, items: Any) -> Any:
        """Data that replace stored steps, as they are stored: no next piece of what was written before."""
        transform, storage = self._transform, self._storage
        if not transform.transforms:
            return items
        if not transform.write_in_order:
            return transform.write(Writing(items, storage.ndim, self._time_dim, in_place=True)).items
        with storage.mutex:
            if type(items) is list:
                items = stack_rows(items, self._time_dim)
            before = transform.remember()
            try:
                return transform.write(Writing(items, storage.ndim, self._time_dim, in_place=True)).items
            except BaseException:
                transform.undo(before)
                raise

    # ---- what prioritised samplers take; others ignore it ----
    def update_priority(self, index: Any, priority: Any, generation: Any = None) -> None:
        """Sets priorities of stored steps; for samplers without priorities there is nothing to do."""
        if generation is None and self._reader.guards_updates:
            self._sampler.update_priority(index, priority, storage=self._storage)
            return
        update = getattr(self._sampler, "update_priority", None)
        if update is None:
            return
        with self._reader.lock:
            if generation is None:
                update(index, priority, storage=self._storage)
            else:
                update(index, priority, generation=generation, storage=self._storage)

    def mark_update(self, index: Any) -> None:
        """Tells the sampler that stored steps have changed."""
        mark = getattr(self._sampler, "mark_update", None)
        if mark is not None:
            with self._reader.lock:
                mark(index, storage=self._storage)

    def update_if_present(self, index: Any, generation: Any, values: Any) -> Tensor:
        """Writes values over the steps that still have these generations; returns which: bool [n].

        Raises:
            StorageInUseError: another process has the storage open.
        """
        self._writer.allow("update_if_present")
        storage = self._storage
        if storage.lanes is None:
            raise IndexError("nothing has been written yet")
        slots = inward(index, storage.inner, storage.max_size or 0)
        wanted = torch.as_tensor(generation).reshape(-1)
        if len(slots) != len(wanted):
            raise ValueError(f"{len(slots)} steps are indexed, {len(wanted)} generations given; nothing was written")
        values = self._replacing(values)
        if type(values) is list and not isinstance(storage, ListStorage):
            values = stack_rows(values, 0)
        with self._undisturbed(), storage.lanes.alone("update_if_present"):
            there = (storage.lanes.generations(slots) == wanted) & (wanted >= 0)
            if bool(there.any()):
                storage.overwrite(slots[there], chosen(values, there), self._writer.index_key)
        return there

    def empty(self, empty_write_count: bool = True) -> None:
        """Forgets every step, priority and prepared batch; the cursor is 0.

        Raises:
            StorageInUseError: another process has the storage open.
        """
        self._writer.allow("empty")
        with self._undisturbed(), self._storage.replacing("empty"):
            self._storage.empty(empty_write_count)
            self._transform.empty()
            for part in (self._sampler, self._writer):
                if hasattr(part, "empty"):
                    part.empty()

    @classmethod
    def open(cls, scratch_dir: str | os.PathLike[str], *, read_only: bool = False, **parts: Any) -> Any:
        """A buffer over the mapped store in a folder, as it was left by an exit, a crash or `kill -9`.

        Args:
            read_only: look at the rows only, beside a job that writes them: no lock is taken and nothing is repaired
                or written, so the job may go on as if nobody looked. Works on a read-only file system.
            parts: as the constructor takes them, storage apart.

        Raises:
            StorageError: there is no store, or its file is damaged.
        """
        return cls(storage=LazyMemmapStorage.open(scratch_dir, read_only=read_only), **parts)


def _is_int(index: Any) -> bool:
    return hasattr(index, "__index__") and not (isinstance(index, Tensor) and index.ndim)
