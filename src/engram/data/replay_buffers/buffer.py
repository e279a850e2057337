"""ReplayBuffer: storage, sampler, writer and transforms wired together, and nothing else."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engram.data.replay_buffers import dumping
from engram.data.replay_buffers.indexing import inward
from engram.data.replay_buffers.prefetch import Prefetcher
from engram.data.replay_buffers.reading import Reader, stack_items
from engram.data.replay_buffers.samplers.base import Sampler
from engram.data.replay_buffers.samplers.uniform import RandomSampler
from engram.data.replay_buffers.stacking import chosen, stack_rows, swap_dims
from engram.data.replay_buffers.storages.base import Storage
from engram.data.replay_buffers.storages.list import ListStorage
from engram.data.replay_buffers.storages.memmap import LazyMemmapStorage
from engram.data.replay_buffers.storages.tensor import LazyTensorStorage
from engram.data.replay_buffers.writers.base import Writer
from engram.data.replay_buffers.writers.round_robin import RoundRobinWriter
from engram.transforms.compose import Compose

_DEFAULT_CAPACITY = 1000


class ReplayBuffer:
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
        transform: a Transform or a callable, applied on reading; its `inv` on writing.
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

    def __init__(
        self,
        capacity: int | None = None,
        /,
        *,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        checkpointer: Any = None,
        track_generations: bool = False,
    ) -> None:
        self._storage = _with_capacity(_made(storage, Storage, "storage"), capacity)
        self._sampler = _made(sampler, object, "sampler") or RandomSampler()
        self._writer = _made(writer, Writer, "writer") or self._default_writer()
        self._collate_fn = collate_fn
        self._batch_size = _checked_batch_size(batch_size)
        self._generator = generator
        self._track_generations = track_generations
        self._pin_memory = pin_memory and torch.cuda.is_available()
        self._transform = (
            transform if isinstance(transform, Compose) else Compose(*([] if transform is None else [transform]))
        )
        if prefetch is not None and prefetch < 0:
            raise ValueError(f"prefetch must be 0 or more, got {prefetch}")
        self._prefetch = prefetch or 0
        self._dim_extend = dim_extend
        if dim_extend is not None and not 0 <= dim_extend < max(self._storage.ndim, 1):
            raise ValueError(f"dim_extend must be 0 to {self._storage.ndim - 1} for this storage, got {dim_extend}")
        if shared:
            self._share()
        if checkpointer is not None:
            self._storage.checkpointer = checkpointer
        self._wire()

    def _default_writer(self) -> Writer:
        return RoundRobinWriter()

    def _share(self) -> None:
        if isinstance(self._storage, LazyTensorStorage):
            self._storage.shared = True
        elif not isinstance(self._storage, LazyMemmapStorage):
            raise ValueError(
                f"shared=True needs LazyTensorStorage or LazyMemmapStorage, whose rows processes can share, "
                f"not {type(self._storage).__name__}"
            )

    def _wire(self) -> None:
        """Makes the parts know each other; again after each change of one."""
        self._storage.attach(self)
        self._writer.register_storage(self._storage)
        if hasattr(self._sampler, "use_generator"):
            self._sampler.use_generator(self._generator)
        collate = self._collate_fn
        if collate is None and isinstance(self._storage, ListStorage):
            collate = stack_items
        attach = self._attach if self._attaches else None
        self._reader = Reader(
            self._storage, self._sampler, self._transform, collate, attach, self._pin_memory, self._track_generations
        )
        self._prefetcher = Prefetcher(self._reader, self._prefetch, self._generator) if self._prefetch else None

    # ---- writing ----
    def add(self, item: Any) -> Any:
        """Stores one step; returns its index.

        Raises:
            ValueError, TypeError: the step does not fit the storage; the message names the leaf. Nothing is changed.
        """
        if self._transform.transforms:
            item = self._transform.inv(item)
        storage = self._storage
        with storage.mutex:
            slots: Any = self._writer.write(storage, item, True, -1)
        self._wrote(slots, item)
        if storage.ndim > 1:
            return torch.stack(tuple(storage.outward(slots)), -1)
        return slots if type(slots) is int else int(slots[0])

    def extend(self, items: Any) -> Tensor:
        """Stores a batch of steps; returns their indices: int64 [n], with ndim=2 [n, 2].

        A list is a list of items; a tuple is one pytree. Of more steps than fit, the last ones stay.

        Raises:
            ValueError, TypeError: the batch does not fit the storage; the message names the leaf. Nothing is changed.
        """
        if self._transform.transforms:
            items = self._transform.inv(items)
        storage = self._storage
        if type(items) is list and not isinstance(storage, ListStorage):
            items = stack_rows(items, self._time_dim)
        with storage.mutex:
            slots: Any = self._writer.write(storage, items, False, self._time_dim)
        self._wrote(slots, items)
        if storage.ndim > 1:
            return torch.stack(tuple(storage.outward(slots)), -1)
        made: Tensor = slots
        return made

    def _wrote(self, slots: Tensor | int, items: Any) -> None:
        """After each write; for buffers that take more from the data than rows."""

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
        """
        n = self._batch_size
        if n is None or (batch_size is not None and batch_size != n):
            n = self._agreed_batch_size(batch_size)
        if self._prefetcher is not None:
            batch, info, _ = self._prefetcher.next(n)
        else:
            batch, info = self._reader.sample(n, return_info or self._track_generations)
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
        checked = _checked_batch_size(batch_size)
        assert checked is not None
        return checked

    @property
    def _attaches(self) -> bool:
        return False

    # Static: a buffer that its own reader held would stay, with all its memory, until the garbage collector comes.
    @staticmethod
    def _attach(index: Any, info: dict[str, Any]) -> dict[str, Any] | None:
        """Entries to put at the root of each sampled batch."""
        return None

    def __iter__(self) -> Iterator[Any]:
        """Batches for ever; with a sampler without replacement, to the end of the epoch."""
        if self._batch_size is None:
            raise ValueError("iterating needs a batch size: give one to the buffer's constructor")
        while True:
            if self._prefetcher is not None:
                batch, _, last = self._prefetcher.next(self._batch_size)
            else:
                ticket = self._reader.draw(self._batch_size)
                batch, _ = self._reader.fetch(ticket.slots, ticket.index, ticket.info, self._track_generations)
                last = ticket.last
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
        return 0 if self._storage.lanes is None else self._storage.lanes.write_count

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
        items = self._transform.inv(items) if self._transform.transforms else items
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

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """No draws meanwhile, and nothing that was prepared before."""
        paused = contextlib.nullcontext() if self._prefetcher is None else self._prefetcher.paused()
        with paused, self._reader.lock:
            yield

    # ---- what prioritised samplers take; others ignore it ----
    def update_priority(self, index: Any, priority: Any, generation: Any = None) -> None:
        """Sets priorities of stored steps; for samplers without priorities there is nothing to do."""
        update = getattr(self._sampler, "update_priority", None)
        if update is not None:
            update(index, priority, generation=generation, storage=self._storage)

    def mark_update(self, index: Any) -> None:
        """Tells the sampler that stored steps have changed."""
        mark = getattr(self._sampler, "mark_update", None)
        if mark is not None:
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
        with self._undisturbed():
            self._storage.empty(empty_write_count)
            for part in (self._sampler, self._writer):
                if hasattr(part, "empty"):
                    part.empty()

    # ---- parts ----
    @property
    def storage(self) -> Storage:
        return self._storage

    @property
    def sampler(self) -> Any:
        return self._sampler

    @property
    def writer(self) -> Writer:
        return self._writer

    @property
    def generator(self) -> torch.Generator | None:
        """The buffer's own generator; None: draws come from torch's global one."""
        return self._generator

    @property
    def batch_size(self) -> int | None:
        return self._batch_size

    def set_sampler(self, sampler: Any) -> Any:
        """Uses another sampler from now on; returns the old one."""
        return self._replace("_sampler", sampler)

    def set_writer(self, writer: Writer) -> Writer:
        """Uses another writer from now on; returns the old one."""
        old: Writer = self._replace("_writer", writer)
        return old

    def set_storage(self, storage: Storage, collate_fn: Callable[[Any], Any] | None = None) -> Storage:
        """Uses another storage from now on; returns the old one."""
        if collate_fn is not None:
            self._collate_fn = collate_fn
        old: Storage = self._replace("_storage", storage)
        return old

    def _replace(self, name: str, part: Any) -> Any:
        with self._undisturbed():
            old = getattr(self, name)
            setattr(self, name, part)
            if self._prefetcher is not None:
                self._prefetcher.close()
            self._wire()
        return old

    def append_transform(self, transform: Any, *, invert: bool = False) -> ReplayBuffer:
        """Adds a transform at the end; with `invert` a callable is applied on writing instead of on reading."""
        with self._undisturbed():
            self._transform.append(transform, invert=invert)
        return self

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> ReplayBuffer:
        """Adds a transform before the one at `index`."""
        with self._undisturbed():
            self._transform.insert(index, transform, invert=invert)
        return self

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Adds a callable that is applied to what the storage saves."""
        self._storage.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Adds a callable that is applied to what the storage loads."""
        self._storage.register_load_hook(hook)

    # ---- saving ----
    def dumps(self, path: str | os.PathLike[str], *, blocking: bool = True, keep_last: int = 1) -> None:
        """Saves everything: a whole snapshot beside the last one, which it then replaces.

        Killed at any moment, `loads` finds the old state or the new one, exactly.

        Raises:
            CheckpointError: it cannot be written (disk full, read-only, ...); the last snapshot is as it was.
        """
        if not blocking:
            raise NotImplementedError("saving in the background comes in a later release; use blocking=True")
        # Batches that were prepared before the last writes are prepared again, here and where this is loaded.
        with self._undisturbed(), self._storage.mutex:
            dumping.save(self, Path(path), keep_last)

    def loads(
        self,
        path: str | os.PathLike[str],
        *,
        snapshot: str | None = None,
        parts: tuple[str, ...] = dumping.PARTS,
    ) -> None:
        """Takes over a saved state: the batches that follow are those that would have followed there.

        Raises:
            CorruptCheckpointError: a file is not what was saved; the message names it. A buffer that holds rows is
                as it was, an empty one stays empty.
            ValueError: the checkpoint does not fit this buffer; every difference is listed.
        """
        with self._undisturbed():
            dumping.load(self, Path(path), snapshot, parts)

    dump = save = dumps
    load = loads

    def state_dict(self) -> dict[str, Any]:
        """The whole state in memory: rows, counters, sampler, writer, generator."""
        with self._undisturbed(), self._storage.mutex:
            return dumping.state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave."""
        with self._undisturbed():
            dumping.load_state(self, state)

    def part_states(self) -> dict[str, Any]:
        """States of sampler, writer and generator."""
        sampler = self._sampler.state_dict() if hasattr(self._sampler, "state_dict") else {}
        generator = None if self._generator is None else self._generator.get_state()
        return {"sampler": sampler, "writer": self._writer.state_dict(), "generator": generator}

    @classmethod
    def open(cls, scratch_dir: str | os.PathLike[str], **parts: Any) -> Any:
        """A buffer over the mapped store in a folder, as it was left by an exit, a crash or `kill -9`.

        Raises:
            StorageError: there is no store, or its file is damaged.
        """
        return cls(storage=LazyMemmapStorage.open(scratch_dir), **parts)

    # ---- processes ----
    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_reader", "_prefetcher"):
            del state[name]
        # As bytes: a tensor made here would be gone, with its memory, before another process had received it.
        state["_generator"] = None if self._generator is None else self._generator.get_state().numpy().tobytes()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state["_generator"]
        self.__dict__.update(state)
        if saved is not None:
            self._generator = torch.Generator()
            self._generator.set_state(torch.frombuffer(bytearray(saved), dtype=torch.uint8))
        self._wire()

    def after_fork(self) -> None:
        """In a child: a lock that no thread of the parent holds."""
        self._reader.lock = threading.RLock()

    def __repr__(self) -> str:
        collate = self._reader.collate_fn
        said = {
            "storage": self._storage,
            "sampler": self._sampler,
            "writer": self._writer,
            "batch_size": self._batch_size,
            "transform": self._transform,
            "collate_fn": getattr(collate, "__name__", collate),
        }
        inner = ",\n".join(f"    {k}={v}" for k, v in said.items())
        return f"{type(self).__name__}(\n{inner})"


def _made(part: Any, kind: type, name: str) -> Any:
    """An instance from an instance or a factory without arguments."""
    if part is None:
        return None
    is_part = isinstance(part, kind) if kind is not object else hasattr(part, "sample") and not isinstance(part, type)
    if is_part:
        return part
    if callable(part):
        return part()
    raise TypeError(f"{name} must be a {kind.__name__} or something that makes one, got a {type(part).__name__}")


def _with_capacity(storage: Storage | None, capacity: int | None) -> Storage:
    if storage is None:
        return ListStorage(_DEFAULT_CAPACITY if capacity is None else capacity)
    if capacity is None or storage.max_size == capacity:
        return storage
    if storage.max_size is None and isinstance(storage, ListStorage):
        storage.limit(capacity)
        return storage
    raise ValueError(f"capacity={capacity}, but the storage has max_size={storage.max_size}; give one of them")


def _checked_batch_size(batch_size: Any) -> int | None:
    if batch_size is None:
        return None
    if isinstance(batch_size, bool) or not hasattr(batch_size, "__index__") or int(batch_size) < 1:
        raise ValueError(f"batch_size must be a positive integer, got {batch_size!r}")
    return int(batch_size)


def _is_int(index: Any) -> bool:
    return hasattr(index, "__index__") and not (isinstance(index, Tensor) and index.ndim)
