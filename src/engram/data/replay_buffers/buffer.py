"""The replay buffer: its parts, writing, sampling, priorities, saving."""

from __future__ import annotations

import contextlib
import copy
import os
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import EllipsisType
from typing import Any, Generic, Literal, Protocol, TypeAlias, overload

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import Self, TypedDict, TypeVar, Unpack

from engram._system import set_state, state_of
from engram.checkpoint.protocols import StorageCheckpointerBase
from engram.data.replay_buffers.checkpointing import (
    PARTS,
    SaveHandle,
    _copied,
    _load,
    _load_state,
    _save,
    _save_in_background,
    _state_of,
)
from engram.data.replay_buffers.prefetch import Prefetcher
from engram.data.replay_buffers.reader import MANY_ROWS, BatchReader
from engram.data.replay_buffers.samplers.base import Sampler, as_sampler
from engram.data.replay_buffers.samplers.random import RandomSampler
from engram.data.replay_buffers.storages.base import Storage, as_storage
from engram.data.replay_buffers.storages.list import ListStorage
from engram.data.replay_buffers.storages.memmap import LazyMemmapStorage
from engram.data.replay_buffers.writers.round_robin import RoundRobinWriter, Writer, as_writer
from engram.errors import OutOfMemoryError
from engram.pytree import collate_items, move_dim, select_rows, stack
from engram.store.files import is_passing_fds, pickle_by_state
from engram.store.indexing import to_slots
from engram.transforms.adapters import as_transform
from engram.transforms.base import Transform, WriteRequest
from engram.transforms.compose import Compose

_DEFAULT_CAPACITY = 1000

#: What a buffer's samples are: a TensorDict, a dict, a tensor, a class of the user's; checked by type checkers only.
T = TypeVar("T", default=Any)

#: One step or a batch of steps in any form that a buffer stores.
Data: TypeAlias = TensorDictBase | Mapping[Any, Any] | Tensor | npt.NDArray[Any] | tuple[Any, ...]

#: Which stored steps: one, or several.
Index: TypeAlias = (
    int
    | np.integer[Any]
    | slice
    | range
    | Sequence[int]
    | Tensor
    | npt.NDArray[Any]
    | tuple[Any, ...]
    | EllipsisType
    | None
)

#: What is applied to batches: a Transform, any callable, or an object in TorchRL's form.
TransformLike: TypeAlias = Transform | Callable[..., Any]


class SupportsSample(Protocol):
    """A sampler that does not inherit from `Sampler`."""

    def sample(self, storage: Any, batch_size: int, /) -> tuple[Any, dict[str, Any]]: ...


class SupportsWrite(Protocol):
    """A writer that does not inherit from `Writer`."""

    def write(self, storage: Any, items: Any, single: bool, time_dim: int, /) -> Any: ...


class BufferArguments(TypedDict, total=False):
    """The keyword arguments of a ReplayBuffer, which its children take too."""

    storage: Storage | Callable[[], Storage] | None
    sampler: Sampler | SupportsSample | Callable[[], Sampler | SupportsSample] | None
    writer: Writer | SupportsWrite | Callable[[], Writer | SupportsWrite] | None
    collate_fn: Callable[[Any], Any] | None
    pin_memory: bool
    prefetch: int | None
    transform: TransformLike | None
    batch_size: int | None
    dim_extend: int | None
    generator: torch.Generator | None
    shared: bool
    checkpointer: StorageCheckpointerBase[Any, Any] | None
    track_generations: bool


class ReplayBuffer(Generic[T]):
    """Stores what environments produce and hands back training batches.

    For type checkers it is generic in what it holds: `ReplayBuffer[TensorDict]`, `ReplayBuffer[dict[str, Tensor]]`.

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
        track_generations: also put each row's sequence in `info["generation"]`.

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
        sampler: Sampler | SupportsSample | Callable[[], Sampler | SupportsSample] | None = None,
        writer: Writer | SupportsWrite | Callable[[], Writer | SupportsWrite] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: TransformLike | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        checkpointer: StorageCheckpointerBase[Any, Any] | None = None,
        track_generations: bool = False,
    ) -> None:
        self._storage = _with_capacity(None if storage is None else as_storage(storage), capacity)
        self._sampler: Any = as_sampler(_make_part(sampler, "sampler", _has_sample) or RandomSampler())
        self._writer = as_writer(_make_part(writer, "writer", _has_write) or self._default_writer())
        self._collate_fn = collate_fn
        self._batch_size = _checked_batch_size(batch_size)
        self._generator = generator
        self._track_generations = track_generations
        self._pin_memory = bool(pin_memory) and torch.cuda.is_available()
        if pin_memory and not self._pin_memory:
            warnings.warn(
                "pin_memory=True does nothing here: this process sees no CUDA device to copy batches to", stacklevel=3
            )
        self._transform: Compose = transform  # type: ignore[assignment]  # __setattr__ makes a Compose of it
        if prefetch is not None and prefetch < 0:
            raise ValueError(f"prefetch must be 0 or more, got {prefetch}")
        self._prefetch = prefetch or 0
        self._dim_extend = dim_extend
        if dim_extend is not None and not 0 <= dim_extend < max(self._storage.ndim, 1):
            raise ValueError(f"dim_extend must be 0 to {self._storage.ndim - 1} for this storage, got {dim_extend}")
        if shared:
            self._storage._share()
        if checkpointer is not None:
            self._storage.checkpointer = checkpointer
        self._wire()

    @classmethod
    def open(
        cls, scratch_dir: str | os.PathLike[str], *, read_only: bool = False, **parts: Unpack[BufferArguments]
    ) -> Self:
        """A buffer over the mapped store in a folder, as it was left by an exit, a crash or `kill -9`.

        Args:
            read_only: look at the rows only, beside a job that writes them: no lock is taken and nothing is repaired
                or written, so the job may go on as if nobody looked. Works on a read-only file system.
            parts: as the constructor takes them, storage apart.

        Raises:
            StorageError: there is no store, or its file is damaged.
        """
        if "storage" in parts:
            raise TypeError("open takes no storage: it is the one in the folder")
        parts["storage"] = LazyMemmapStorage.open(scratch_dir, read_only=read_only)
        return cls(**parts)

    def _default_writer(self) -> Writer:
        return RoundRobinWriter()

    def _wire(self) -> None:
        """Makes the parts work together; again after each change of one."""
        self._check_parts()
        self._storage.attach(self)
        self._register_writer()
        self._sampler.use_generator(self._generator)
        self._time_dim = self._storage.ndim - 1 if self._dim_extend is None else self._dim_extend
        self._reader = self._make_reader()
        self._prefetcher = Prefetcher(self._reader, self._prefetch, self._generators()) if self._prefetch else None

    def _check_parts(self) -> None:
        self._sampler.check_storage(self._storage)

    def _register_writer(self) -> None:
        self._writer.register_storage(self._storage)

    def _make_reader(self) -> Any:
        """What reads batches: a BatchReader; an ensemble has its own kind."""
        return self._reader_for(self._storage, self._sampler, None, pin_memory=self._pin_memory)

    def _reader_for(
        self,
        storage: Storage,
        sampler: Sampler,
        collate_fn: Callable[[Any], Any] | None,
        *,
        pin_memory: bool = False,
    ) -> BatchReader:
        """What reads batches as this buffer does; an ensemble reads its members' rows so, with samplers of its own.

        Args:
            collate_fn: instead of this buffer's own; None for that.
        """
        if collate_fn is None:
            collate_fn = self._collate_fn or (collate_items if storage._holds_items else None)
        if sampler._given is self._sampler._given:
            sampler = self._sampler  # whose lock all draws of a user's own sampler take
        attach = self._attach if self._attaches else None
        return BatchReader(
            storage, sampler, self._transform, collate_fn, attach, pin_memory=pin_memory,
            with_generation=self._track_generations,
        )  # fmt: skip

    @property
    def _attaches(self) -> bool:
        """Whether batches get entries at their root."""
        return False

    # Static: a buffer that its own reader held would stay, with all its memory, until the garbage collector comes.
    @staticmethod
    def _attach(index: Any, info: dict[str, Any]) -> dict[str, Any] | None:
        """Entries to put at the root of each sampled batch."""
        return None

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """No draws or changes of priorities inside the block, and what was prepared ahead before is forgotten."""
        with self._paused(), self._reader.lock:
            yield

    def _paused(self) -> AbstractContextManager[None]:
        """A block in which nothing is prepared ahead, and before which what was prepared is forgotten."""
        return contextlib.nullcontext() if self._prefetcher is None else self._prefetcher.paused()

    # ---- writing ----
    def add(self, item: T | Data) -> int | Tensor:
        """Stores one step; returns its index: an int, with ndim=2 int64 [envs, 2].

        With a transform that holds steps back: int64 [n], the indices of what was written.

        Raises:
            ValueError, TypeError: the step does not fit the storage; the message names the leaf. Nothing is changed.
        """
        if self._transform.transforms:
            written: int | Tensor = self._write_through(item, single=True)
            return written
        storage = self._storage
        priorities = self._given_priorities(item, True, -1)
        with storage.mutex if priorities is None else self._writing():
            slots: Any = self._writer.write(storage, item, True, -1)  # positional: the hot path
            if priorities is not None:
                self._set_priorities(slots, priorities)
        index: int | Tensor = self._index_of(slots, True)
        return index

    def extend(self, items: T | Data | Sequence[T | Data]) -> Tensor:
        """Stores a batch of steps; returns their indices: int64 [n], with ndim=2 [n, 2].

        A list is a list of items; a tuple is one pytree. Of more steps than fit, the last ones stay. A transform that
        holds steps back may write others than those that came, or none.

        Raises:
            ValueError, TypeError: the batch does not fit the storage; the message names the leaf. Nothing is changed.
        """
        if self._transform.transforms:
            written: Tensor = self._write_through(items, single=False)
            return written
        storage, time_dim = self._storage, self._time_dim
        batch = self._as_batch(items, time_dim) if type(items) is list else items
        priorities = self._given_priorities(batch, False, time_dim)
        with storage.mutex if priorities is None else self._writing():
            slots: Any = self._writer.write(storage, batch, False, time_dim)  # positional: the hot path
            if priorities is not None:
                self._set_priorities(slots, priorities)
        index: Tensor = self._index_of(slots, False)
        return index

    def _as_batch(self, items: list[Any], time_dim: int) -> Any:
        """A list of items as one batch; storages of items take the list."""
        return items if self._storage._holds_items else stack(items, time_dim)

    def _write_through(self, items: Any, *, single: bool) -> Any:
        """Writes what the transforms make of the data; where that is refused, they are as they were before."""
        transform, storage = self._transform, self._storage
        if not transform.inverse_in_order:
            writing = transform.inverse_stream(WriteRequest(items, storage.ndim, self._time_dim, single))
            with self._writing():
                slots = self._write(writing)
        else:
            with self._writing():
                if type(items) is list:
                    items = stack(items, self._time_dim)
                before = transform.remember()
                try:
                    writing = transform.inverse_stream(WriteRequest(items, storage.ndim, self._time_dim, single))
                    slots = self._write(writing)
                except BaseException:
                    transform.undo(before)
                    raise
        return self._index_of(slots, single=writing.single and not writing.resized)

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
                slots = self._write(transform.flush(WriteRequest(None, storage.ndim, storage.ndim - 1)))
            except BaseException:
                transform.undo(before)
                raise
        index: Tensor = self._index_of(slots, single=False)
        return index

    def _write(self, writing: WriteRequest) -> Any:
        """Writes what transforms made of the data, if anything; returns slots. The caller holds the mutex."""
        storage, items, time_dim = self._storage, writing.items, -1 if writing.single else writing.time_dim
        if writing.held is not None:
            # What waits in a transform must fit, too: an error later would belong to somebody else's data.
            self._writer.check_mutable("extend")
            storage.check(writing.held, single=writing.single, time_dim=time_dim, index_key=self._writer.index_key)
        if items is None:
            return torch.empty(0, dtype=torch.int64)
        if type(items) is list:
            items = self._as_batch(items, time_dim)
        priorities = self._given_priorities(items, writing.single, time_dim)
        slots = self._writer.write(storage, items, single=writing.single, time_dim=time_dim)
        if priorities is not None:
            self._set_priorities(slots, priorities)
        return slots

    def _index_of(self, slots: Any, single: bool) -> Any:
        """Slots as `add` (`single`) and `extend` return them."""
        if self._storage.ndim > 1:
            # Before the first write a storage does not know its environments; there is nothing to point at, either.
            if not len(slots):
                return slots.new_empty(0, self._storage.ndim)
            return torch.stack(tuple(self._storage.from_slots(slots)), -1)
        if not single:
            return slots
        return slots if type(slots) is int else int(slots[0])

    def _given_priorities(self, items: Any, single: bool, time_dim: int) -> Tensor | None:
        """Priorities that come with data that are about to be written, for `_set_priorities`; None: there are none.

        `time_dim` is where time runs in these data; transforms may have moved it. Raises where they are invalid.
        """
        return None

    def _writing(self) -> AbstractContextManager[Any]:
        """Around a write of data that may come with priorities."""
        return self._storage.mutex

    def _set_priorities(self, slots: Tensor | int, priorities: Tensor) -> None:
        """After a write of data that came with priorities, before another thread writes. Slot -1: refused."""

    @property
    def dim_extend(self) -> int:
        """The dimension of the data that is time."""
        return self._time_dim

    # ---- sampling ----
    @overload
    def sample(self, batch_size: int | None = None, return_info: Literal[False] = False) -> T: ...

    @overload
    def sample(self, batch_size: int | None = None, *, return_info: Literal[True]) -> tuple[T, dict[str, Any]]: ...

    @overload
    def sample(self, batch_size: int | None, return_info: Literal[True]) -> tuple[T, dict[str, Any]]: ...

    @overload
    def sample(self, batch_size: int | None = None, return_info: bool = False) -> T | tuple[T, dict[str, Any]]: ...

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> T | tuple[T, dict[str, Any]]:
        """A batch, with `return_info` also its info: a dict with `"index"`, `"generation"`, `"priority_weight"`, ...

        Raises:
            ValueError: no batch size here or in the constructor.
            RuntimeError: nothing is stored.
            OutOfMemoryError: there is no memory for the batch; nothing was drawn where it has more than 2**20 rows and
                needs more than is free. Random numbers may have been drawn; an epoch goes on with the same rows.
        """
        n = self._batch_size
        if n is None or (batch_size is not None and batch_size != n):
            n = self._choose_batch_size(batch_size)
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

    def _choose_batch_size(self, batch_size: int | None) -> int:
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

    def __iter__(self) -> Iterator[T]:
        """Batches for ever; with a sampler without replacement, to the end of the epoch."""
        if self._batch_size is None:
            raise ValueError("iterating needs a batch size: give one to the buffer's constructor")
        if self._batch_size > MANY_ROWS:
            self._reader.check_room(self._batch_size)
        while True:
            if self._prefetcher is not None:
                batch, _, last = self._prefetcher.next(self._batch_size)
            else:
                batch, last = self._reader.next(self._batch_size, generations=self._track_generations)
            yield batch
            if last:
                return

    def __next__(self) -> T:
        return self.sample()

    # ---- by index ----
    def __len__(self) -> int:
        return len(self._storage)

    @property
    def write_count(self) -> int:
        """Steps ever written."""
        return self._storage.write_count

    @overload
    def __getitem__(self, index: str) -> Any: ...

    @overload
    def __getitem__(self, index: Index) -> T: ...

    def __getitem__(self, index: Any) -> Any:
        """A copy of stored steps; with ndim=2 the index goes along time and `rb[:]` is `[envs, time]`.

        Raises:
            IndexError: a step that has not been written.
        """
        if isinstance(index, str) or (isinstance(index, tuple) and index and all(isinstance(k, str) for k in index)):
            everything: Any = self[:]
            return everything[index]
        one_dimension = self._storage.ndim == 1
        if isinstance(index, tuple) and not one_dimension and len(index) > 1:
            rows = move_dim(self._storage.get(slice(None)), 0, self._time_dim)[index]
        else:
            rows = self._storage.get(index)
            if not one_dimension and not _is_int(index):
                rows = move_dim(rows, 0, self._time_dim)
        if self._collate_fn is not None and not _is_int(index):
            rows = self._collate_fn(rows)
        return self._transform.forward(rows) if self._transform.transforms else rows

    def __setitem__(self, index: Index, items: T | Data | Sequence[T | Data]) -> None:
        """Replaces stored steps, for which this process must have the storage alone.

        Raises:
            IndexError: a step that has not been written.
            ValueError, TypeError: the data do not fit; the message names the leaf. Nothing is changed.
            StorageInUseError: another process has the storage open.
        """
        self._writer.check_mutable("rb[...] = ...")
        items = self._transformed_in_place(items)
        if self._storage.ndim > 1:
            if isinstance(index, tuple) and len(index) > 1:
                raise IndexError(
                    "rb[...] = ... goes along time; use rb.storage[time, env] = ... for single environments"
                )
            if not _is_int(index):
                items = move_dim(items, self._time_dim, 0)
        elif type(items) is list:
            items = self._as_batch(items, 0)
        with self._undisturbed():
            self._storage.set(index, items, self._writer.index_key)

    def _transformed_in_place(self, items: Any) -> Any:
        """Data that replace stored steps, as transforms store them: they follow nothing that was written before."""
        transform, storage = self._transform, self._storage
        if not transform.transforms:
            return items
        if not transform.inverse_in_order:
            return transform.inverse_stream(WriteRequest(items, storage.ndim, self._time_dim, in_place=True)).items
        with storage.mutex:
            if type(items) is list:
                items = stack(items, self._time_dim)
            before = transform.remember()
            try:
                return transform.inverse_stream(WriteRequest(items, storage.ndim, self._time_dim, in_place=True)).items
            except BaseException:
                transform.undo(before)
                raise

    def update_if_present(self, index: Index, generation: Tensor | int, values: T | Data) -> Tensor:
        """Writes values over the steps that still have these generations; returns which: bool [n].

        Raises:
            StorageInUseError: another process has the storage open.
        """
        self._writer.check_mutable("update_if_present")
        storage = self._storage
        if storage.lanes is None:
            raise IndexError("nothing has been written yet")
        slots = to_slots(index, storage.env_shape, storage.max_size or 0)
        expected = torch.as_tensor(generation).reshape(-1)
        if len(slots) != len(expected):
            raise ValueError(f"{len(slots)} steps are indexed, {len(expected)} generations given; nothing was written")
        values = self._transformed_in_place(values)
        if type(values) is list:
            values = self._as_batch(values, 0)
        with self._undisturbed(), storage._exclusive("update_if_present"):
            present = (storage.lanes.generations(slots) == expected) & (expected >= 0)
            if bool(present.any()):
                storage.overwrite(slots[present], select_rows(values, present), self._writer.index_key)
        return present

    def empty(self, empty_write_count: bool = True) -> None:
        """Forgets every step, priority and prepared batch; the cursor is 0.

        Raises:
            StorageInUseError: another process has the storage open.
        """
        self._writer.check_mutable("empty")
        with self._undisturbed(), self._storage._replacing("empty"):
            self._storage.empty(empty_write_count)
            self._transform.empty()
            self._sampler.empty()
            self._writer.empty()

    # ---- priorities: other samplers ignore them ----
    def update_priority(
        self,
        index: Index,
        priority: Tensor | npt.NDArray[Any] | Sequence[float] | float,
        generation: Tensor | None = None,
    ) -> None:
        """Sets priorities of stored steps; for samplers without priorities there is nothing to do."""
        sampler = self._sampler
        if sampler._built_in:  # which takes its lock itself
            sampler.update_priority(index, priority, generation=generation, storage=self._storage)
            return
        with sampler.lock:
            if generation is None:  # which a sampler of a user's own may not take
                sampler.update_priority(index, priority, storage=self._storage)
            else:
                sampler.update_priority(index, priority, generation=generation, storage=self._storage)

    def mark_update(self, index: Index) -> None:
        """Tells the sampler that stored steps have changed."""
        with self._sampler.lock:
            self._sampler.mark_update(index, storage=self._storage)

    # ---- parts ----
    @property
    def storage(self) -> Storage:
        return self._storage

    @property
    def sampler(self) -> Any:
        return self._sampler._given

    @property
    def writer(self) -> Any:
        return self._writer._given

    @property
    def transform(self) -> Compose:
        """What changes batches on their way in and out."""
        return self._transform

    @property
    def generator(self) -> torch.Generator | None:
        """The buffer's own generator; None: draws come from torch's global one."""
        return self._generator

    @property
    def batch_size(self) -> int | None:
        return self._batch_size

    def set_sampler(self, sampler: Any) -> Any:
        """Uses another sampler from now on; returns the old one."""
        old: Sampler = self._replace("_sampler", as_sampler(sampler))
        return old._given

    def set_writer(self, writer: Any) -> Any:
        """Uses another writer from now on; returns the old one."""
        old: Writer = self._replace("_writer", as_writer(writer))
        return old._given

    def set_storage(self, storage: Storage, collate_fn: Callable[[Any], Any] | None = None) -> Storage:
        """Uses another storage from now on; returns the old one."""
        if collate_fn is not None:
            self._collate_fn = collate_fn
        old: Storage = self._replace("_storage", as_storage(storage))
        return old

    def _replace(self, name: str, part: Any) -> Any:
        with self._undisturbed():
            old = getattr(self, name)
            setattr(self, name, part)
            try:
                self._check_parts()
            except BaseException:
                setattr(self, name, old)
                raise
            if self._prefetcher is not None:
                self._prefetcher.close()
            try:
                self._wire()
            except BaseException:  # the parts do not fit each other
                setattr(self, name, old)
                self._wire()
                raise
        return old

    def append_transform(self, transform: TransformLike, *, invert: bool = False) -> Self:
        """Adds a transform at the end; with `invert` a callable is applied on writing instead of on reading.

        Raises:
            TypeError: it is no transform, or has an inverse that cannot be called.
        """
        adapted = as_transform(transform, invert)
        self._check_transform(adapted)
        with self._undisturbed():
            self._transform.append(adapted)
        return self

    def insert_transform(self, index: int, transform: TransformLike, *, invert: bool = False) -> Self:
        """Adds a transform before the one at `index`; errors as `append_transform`."""
        adapted = as_transform(transform, invert)
        self._check_transform(adapted)
        with self._undisturbed():
            self._transform.insert(index, adapted)
        return self

    def _check_transform(self, transform: Transform) -> None:
        """Raises TypeError for a transform that does not work here."""

    def __setattr__(self, name: str, value: Any) -> None:
        # Users set `rb._transform`. A property would cost its call at each write; this costs nothing there.
        if name != "_transform":
            if name == "__orig_class__":  # `ReplayBuffer[dict](...)`: type checkers alone look at it
                return
            object.__setattr__(self, name, value)
            return
        compose = value if isinstance(value, Compose) else Compose(*([] if value is None else [value]))
        for transform in compose:
            self._check_transform(transform)
        if "_reader" not in self.__dict__:
            object.__setattr__(self, name, compose)
            return
        with self._undisturbed():
            object.__setattr__(self, name, compose)
            self._reader.transform = compose

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Adds a callable that is applied to what the storage saves."""
        self._storage.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Adds a callable that is applied to what the storage loads."""
        self._storage.register_load_hook(hook)

    def __repr__(self) -> str:
        shown = self._shown()
        collate_fn = shown["collate_fn"]
        shown["collate_fn"] = getattr(collate_fn, "__name__", collate_fn)
        inner = ",\n".join(textwrap.indent(f"{k}={v}", "    ") for k, v in shown.items())
        return f"{type(self).__name__}(\n{inner})"

    def _shown(self) -> dict[str, Any]:
        """What `repr` shows."""
        return {
            "storage": self._storage,
            "sampler": self._sampler,
            "writer": self._writer,
            "batch_size": self._batch_size,
            "transform": self._transform,
            "collate_fn": self._reader.collate_fn,
        }

    # ---- saving and loading ----
    def dumps(self, path: str | os.PathLike[str], *, blocking: bool = True, keep_last: int = 1) -> SaveHandle | None:
        """Saves everything: a whole snapshot beside the last one, which it then replaces.

        Killed at any moment, `loads` finds the old state or the new one, exactly. What has not changed since the last
        snapshot there is not written again, but taken over by hard links.

        Args:
            blocking: if False, a thread saves the state of this moment while the buffer goes on, and a `SaveHandle`
                is returned: `done()`, `result()`, `progress`, `rows_left_out`. What is overwritten before it is
                saved is kept in memory until then.
            keep_last: how many of the newest snapshots stay.

        Raises:
            CheckpointError: it cannot be written (disk full, read-only, another save there, ...); the last snapshot
                is as it was.
        """
        # Batches that were prepared before the last writes are prepared again, here and where this is loaded.
        with self._undisturbed(), self._storage.mutex:
            if blocking:
                _save(self, Path(path), keep_last)
                return None
            return _save_in_background(self, Path(path), keep_last)

    def loads(
        self,
        path: str | os.PathLike[str],
        *,
        snapshot: str | None = None,
        parts: tuple[str, ...] = PARTS,
    ) -> None:
        """Takes over a saved state: the batches that follow are those that would have followed there.

        Directories that TorchRL's `dumps` wrote are read too (docs/other-formats.md says what of them).

        Other threads see the state of before or the new one, whole. After an error the buffer is as it was: rows,
        priorities, cursor, epochs, transforms; also where a load hook, or a part of a user's own, raised it. (Rows of
        more than 256 MB are not kept aside: what fails after all of them were verified, a disk that reads a file once
        and not twice, leaves the buffer empty; an error that comes when they are in their places leaves it with what
        was loaded.)

        Raises:
            CorruptCheckpointError: a file is not what was saved; the message names it.
            CheckpointMisfitError: the checkpoint does not fit this buffer; every difference is listed. It is a
                ValueError, too.
        """
        with self._undisturbed():
            _load(self, Path(path), snapshot, parts)

    dump = save = dumps
    load = loads

    def state_dict(self) -> dict[str, Any]:
        """The whole state in memory: rows, counters, sampler, writer, transforms, generator."""
        with self._undisturbed(), self._storage.mutex:
            return _state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave, as `loads` does; a ValueError where it does not fit, every difference."""
        with self._undisturbed():
            _load_state(self, state)

    # ---- the state of its parts ----
    def _part_states(self) -> dict[str, Any]:
        """States of sampler, writer, transforms and generator."""
        self._sampler._sync(self._storage)
        return {
            "sampler": self._sampler.state_dict(),
            "writer": self._writer.state_dict(),
            "transform": self._saved_transform.state_dict(),
            "generator": self._generator_state(),
        }

    @property
    def _saved_transform(self) -> Any:
        """What of the transforms is saved."""
        return self._transform

    def _generators(self) -> list[torch.Generator]:
        """The generators that draws change, but for torch's global one."""
        return [] if self._generator is None else [self._generator]

    def _generator_state(self) -> Any:
        """Where the buffer's own generator stands; None without one."""
        return None if self._generator is None else state_of(self._generator)

    def _restore_generator(self, state: Any) -> None:
        """Goes on where a generator stood; without one of its own, or a state, nothing changes."""
        if state is not None and self._generator is not None:
            set_state(self._generator, state)

    def _check_generator(self, state: Any) -> None:
        """An error where `_restore_generator` would be one."""
        if state is not None and self._generator is not None:
            set_state(torch.Generator(device=self._generator.device), state)

    # ---- copies: what `pickle` and `copy` make; what is sent to a process travels by `__getstate__` ----
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        pickle_by_state(cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if is_passing_fds() or self._storage._pickled_by_path:
            return super().__reduce_ex__(protocol)
        with self._undisturbed(), self._storage.mutex:
            return self._copy_parts()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A buffer with equal parts and rows of its own: the batches that follow are the same in both."""
        with self._undisturbed(), self._storage.mutex:
            make, parts = self._copy_parts()
            memo[id(self)] = copied = make(*copy.deepcopy(parts, memo))
        return copied

    def _copy_parts(self) -> tuple[Any, tuple[Any, ...]]:
        """A function that makes a copy, and its arguments."""
        return _copied, (type(self), self.__getstate__(), copy.deepcopy(self._part_states()))

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_reader", "_prefetcher"):
            del state[name]
        # As bytes: a tensor made here would be gone, with its memory, before another process had received it.
        state["_generator"] = None if self._generator is None else state_of(self._generator).numpy().tobytes()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state["_generator"]
        self.__dict__.update(state)
        # Steps that wait for their future are written by the process that they were given to.
        self._transform.empty()
        if saved is not None:
            self._generator = torch.Generator()
            set_state(self._generator, torch.frombuffer(bytearray(saved), dtype=torch.uint8))
        self._wire()

    def after_fork(self) -> None:
        """In a child: no steps that the parent will write, too."""
        lanes = self._storage.lanes
        if lanes is not None and lanes.locks is not None:
            self._transform.empty()


pickle_by_state(ReplayBuffer)  # as `__init_subclass__` does for its children


def _make_part(part: Any, name: str, is_one: Callable[[Any], bool]) -> Any:
    """A part from what the constructor was given: the part, or something without arguments that makes one."""
    if part is None or is_one(part):
        return part
    if callable(part):
        return part()
    kind = type(part).__name__
    raise TypeError(f"{name} must be a {name}, or something without arguments that makes one, got a {kind}")


def _has_sample(part: Any) -> bool:
    return hasattr(part, "sample") and not isinstance(part, type)


def _has_write(part: Any) -> bool:
    return hasattr(part, "write") and not isinstance(part, type)


def _with_capacity(storage: Storage | None, capacity: int | None) -> Storage:
    """The storage with the capacity that the buffer was given."""
    if storage is None:
        return ListStorage(_DEFAULT_CAPACITY if capacity is None else capacity)
    if capacity is None or storage.max_size == capacity:
        return storage
    storage._limit(capacity)
    return storage


def _checked_batch_size(batch_size: Any) -> int | None:
    if batch_size is None:
        return None
    if isinstance(batch_size, bool) or not hasattr(batch_size, "__index__") or int(batch_size) < 1:
        raise ValueError(f"batch_size must be a positive integer, got {batch_size!r}")
    return int(batch_size)


def _is_int(index: Any) -> bool:
    return hasattr(index, "__index__") and not (isinstance(index, Tensor) and index.ndim)
