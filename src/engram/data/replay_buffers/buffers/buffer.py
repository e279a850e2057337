"""The replay buffer: its parts, writing, sampling, priorities, saving."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any, ClassVar, Generic, Literal, NoReturn, Protocol, TypeAlias, overload
from weakref import WeakMethod

import numpy as np
import numpy.typing as npt
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor
from torch._dynamo import trace_rules
from typing_extensions import Never, Self, TypedDict, TypeVar, Unpack

from engram._advice import advised
from engram._checks import count_or_none
from engram._copies import LEFT_OUT, Computed, CopyForm, MadeFromParts, PartlyCopied, SentByState, refuse_what_stays
from engram._generator import Generator, is_state
from engram._system import set_state, state_of
from engram._text import warn_user
from engram.checkpoint.protocols import StorageCheckpointerBase
from engram.data.replay_buffers.buffers.batch_writer import ColumnRows
from engram.data.replay_buffers.buffers.conditional import UpdateResult, as_patch, as_version, write_if_present
from engram.data.replay_buffers.buffers.dataset import BatchDataset
from engram.data.replay_buffers.buffers.delayed import delay, is_delayed
from engram.data.replay_buffers.buffers.in_place import as_index, grid_index, in_index_order, is_int
from engram.data.replay_buffers.buffers.parts import BufferParts, Entries, PartSettings
from engram.data.replay_buffers.buffers.publishing import DrawCounts, StatsPublisher
from engram.data.replay_buffers.buffers.rate_limiters import RateLimiter, as_limit, limiter_of
from engram.data.replay_buffers.buffers.removal import RowBlock, remove_at, remove_where
from engram.data.replay_buffers.buffers.stats import (
    BatchCount,
    BufferStats,
    count_steps,
    draws_of,
    observation_shares_of,
    queue_figures_of,
    shown_content,
    writers_of,
)
from engram.data.replay_buffers.buffers.waiting import SHUT_DOWN, deadline_of
from engram.data.replay_buffers.reading.reader import MANY_ROWS, EpochOverError, LoopEpochs
from engram.data.replay_buffers.reading.reuse import why_not_reusable
from engram.data.replay_buffers.samplers.base import Sampler, as_sampler, user_object
from engram.data.replay_buffers.samplers.queue import QueueSampler, QueueShortError
from engram.data.replay_buffers.samplers.random import RandomSampler
from engram.data.replay_buffers.state.buffers import (
    PARTS,
    SavedBuffer,
    SaveHandle,
    _copied,
    buffer_state,
    load_buffer,
    load_buffer_state,
    save_buffer,
    save_in_background,
)
from engram.data.replay_buffers.storages.base import Storage, as_storage
from engram.data.replay_buffers.storages.ensemble import StorageEnsemble
from engram.data.replay_buffers.storages.list import ListStorage
from engram.data.replay_buffers.storages.memmap import LazyMemmapStorage
from engram.data.replay_buffers.writers.round_robin import (
    ImmutableDatasetWriter,
    Placing,
    RoundRobinWriter,
    Writer,
    as_writer,
    given_writer,
    has_writing_methods,
)
from engram.errors import OutOfMemoryError, StorageError
from engram.pytree import (
    Key,
    KeyPath,
    as_arrays,
    as_keys,
    get_entry,
    leaf_keys,
    move_dim,
    to_tensor,
)
from engram.pytree import describe as describe_batch
from engram.store.episodes import EpisodeIndex
from engram.store.flow import Flow, RateLimit
from engram.store.indexing import to_slots
from engram.store.rows import READ_ONLY
from engram.store.steps import Steps
from engram.transforms.adapters import as_transform
from engram.transforms.base import Transform
from engram.transforms.compose import Compose
from engram.transforms.roles import IN_BUFFERS, Role, warn_if_idle

# `torch.compile` goes round every function of this package: it cannot trace native code, and so each call is a graph
# break. (Dynamo is loaded by tensordict.)
trace_rules.add("engram")

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
    generator: torch.Generator | Generator | None
    shared: bool
    checkpointer: StorageCheckpointerBase[Any, Any] | Callable[[], StorageCheckpointerBase[Any, Any]] | None
    track_generations: bool
    compilable: bool
    reuse_batches: bool
    delayed_init: bool | None
    transform_factory: Callable[[], TransformLike] | None
    publish_stats: bool
    rate_limiter: RateLimiter | None


_ENDED_BY_FAILURE = ("add", "extend", "sample")  # see `ReplayBuffer.report_failure`


@advised
class ReplayBuffer(SentByState, MadeFromParts, PartlyCopied, Generic[T]):
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
        prefetch: how many batches threads prepare ahead, where one takes longer than handing it from thread to thread
            (0.1 ms); else each is made when it is wanted.
        transform: a Transform or a callable, applied on reading; its `inv` (in TorchRL's form also `_inv_call` or
            `_inv_apply_transform`) on writing.
        batch_size: rows of a batch, where `sample` does not say it.
        dim_extend: the dimension of the data that is time; the last batch dimension.
        generator: draws come from here instead of torch's global generator; saved with the buffer. An
            `engram.Generator` draws quicker, and does not let busy Python threads run first.
        shared: lets other processes see and write the rows.
        checkpointer: how the storage is saved: a checkpointer, or something without arguments that makes one.
        track_generations: also put each row's sequence in `info["generation"]`, and of TensorDict buffers in
            `batch["generation"]`; in both also as `"index_generation"`. A writer that has it is the same switch.
        compilable: accepted, without effect: under `torch.compile` each use of a buffer is a graph break.
        reuse_batches: read batches into the tensors of earlier ones, once nobody has any of their tensors, a view of
            one, or its memory, and all are as they were handed out; else into new ones. What you keep never changes:
            only making and freeing tensors is saved. This is for uniform batches (`RandomSampler`, no `collate_fn`)
            of storages with packed rows; at most 8 batches and 64 MB of a buffer wait, and tensors over 1 MB are
            always new. Memory that is given away by its address alone (`data_ptr`) must be kept by keeping the tensor.
        delayed_init: if True, the parts are made, and checked, at the first use, or before the buffer is sent to a
            process. A child that is forked before has parts of its own, with a warning. None: if there is a
            `transform_factory`.
        transform_factory: something without arguments that makes the transform, instead of `transform`.
        publish_stats: writes a small file beside the store once a second, from a thread, which `engram top` shows: rows
            drawn for each step written, the age of what is drawn, how many rows count. For mapped stores with a
            `scratch_dir`; copies and pickles of the buffer do not publish.
        rate_limiter: `SampleToInsertRatio` or `MinSize`: samplers wait for rows, and those who write for samplers, so
            that each keeps up with the other. It binds all who use the store, in all processes; each names it, or finds
            it there. None: what the store has.

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
        generator: torch.Generator | Generator | None = None,
        shared: bool = False,
        checkpointer: StorageCheckpointerBase[Any, Any] | Callable[[], StorageCheckpointerBase[Any, Any]] | None = None,
        track_generations: bool = False,
        compilable: bool = False,
        reuse_batches: bool = False,
        delayed_init: bool | None = None,
        transform_factory: Callable[[], TransformLike] | None = None,
        publish_stats: bool = False,
        rate_limiter: RateLimiter | None = None,
    ) -> None:
        if transform_factory is not None:
            if transform is not None:
                raise TypeError("transform and transform_factory are two ways to give one thing: leave one of them out")
            if not callable(transform_factory):
                kind = type(transform_factory).__name__
                raise TypeError(f"transform_factory must be something without arguments that makes one, got a {kind}")
        if delayed_init or (delayed_init is None and transform_factory is not None):
            arguments = BufferArguments(
                storage=storage, sampler=sampler, writer=writer, collate_fn=collate_fn, pin_memory=pin_memory,
                prefetch=prefetch, transform=transform, batch_size=batch_size, dim_extend=dim_extend,
                generator=generator, shared=shared, checkpointer=checkpointer, track_generations=track_generations,
                compilable=compilable, reuse_batches=reuse_batches, delayed_init=False,
                transform_factory=transform_factory, publish_stats=publish_stats, rate_limiter=rate_limiter,
            )  # fmt: skip
            delay(self, ReplayBuffer.__init__, capacity, arguments)
            return
        if transform_factory is not None:
            transform = transform_factory()
        self._storage = _with_capacity(None if storage is None else as_storage(storage), capacity)
        self._sampler: Any = as_sampler(_make_part(sampler, "sampler", _has_sample) or RandomSampler())
        self._writer = as_writer(_make_part(writer, "writer", _has_write) or self._make_default_writer())
        self._collate_fn = collate_fn
        self._batch_size = _checked_batch_size(batch_size)
        self._generator = generator
        self._track_generations = track_generations
        self._pin_memory = bool(pin_memory) and torch.cuda.is_available()
        if pin_memory and not self._pin_memory:
            warn_user(
                "pin_memory=True does nothing here: this process sees no CUDA device to copy batches to",
            )
        self._reuse_batches = bool(reuse_batches)
        if reuse_batches and (reason := why_not_reusable()) is not None:
            warn_user(f"reuse_batches=True does nothing here: {reason}")
        self._transform: Compose = transform  # type: ignore[assignment]  # __setattr__ makes a Compose of it
        prefetch = count_or_none(prefetch, "prefetch", 0)
        self._prefetch = prefetch or 0
        self._handed_out = BatchCount()
        self._episodes = EpisodeIndex()
        self._dim_extend = dim_extend
        if dim_extend is not None and not 0 <= dim_extend < max(self._storage.ndim, 1):
            raise ValueError(f"dim_extend must be 0 to {self._storage.ndim - 1} for this storage, got {dim_extend}")
        if shared:
            self._storage.access.table.share(type(self._storage).__name__)
        if checkpointer is not None:
            is_one = isinstance(checkpointer, StorageCheckpointerBase)
            self._storage.checkpointer = checkpointer() if callable(checkpointer) and not is_one else checkpointer
        self._rate_limit = as_limit(rate_limiter)
        self._name_limit()
        self._parts = self._join_parts()
        if publish_stats:
            self._publisher = StatsPublisher(self, self._storage, WeakMethod(self._published))

    def _published(self) -> DrawCounts:
        """What `publish_stats` looks at."""
        return DrawCounts(self._storage, self._sampler, self._handed_out.batches, self._batch_size)

    @property
    def initialized(self) -> bool:
        """Whether the parts are made, which `delayed_init=True` puts off to the first use."""
        return not is_delayed(self)

    @classmethod
    def open(
        cls,
        scratch_dir: str | os.PathLike[str],
        *,
        read_only: bool = False,
        take_over: bool = False,
        **parts: Unpack[BufferArguments],
    ) -> Self:
        """A buffer over the mapped store in a folder, as it was left by an exit, a crash or `kill -9`.

        Args:
            read_only: look at the rows only, beside a job that writes them: no lock is taken and nothing is repaired
                or written, so the job may go on as if nobody looked. Works on a read-only file system.
            take_over: open a store on a network file system that another node left open, and does not use any more:
                rows that it left torn are dropped, as after a power cut.
            parts: as the constructor takes them, storage apart.

        Raises:
            StorageError: there is no store, or its file is damaged.
            StorageInUseError: it is on a network file system, and another node may be using it.
        """
        if "storage" in parts:
            raise TypeError("open takes no storage: it is the one in the folder")
        parts["storage"] = LazyMemmapStorage.open(scratch_dir, read_only=read_only, take_over=take_over)
        return cls(**parts)

    _reuse_batches = False
    _priority_key: Any = None  # where priorities are in data that are written
    _iteration: Iterator[T] | None = None  # of `next`
    # Static: a buffer that its own reader held would stay, with all its memory, until the garbage collector comes.
    _entries: Entries | None = None  # that batches get at their root
    _make_default_writer: Callable[[], Writer] = RoundRobinWriter
    _is_shut_down = False
    _extends_plainly: ClassVar[bool] = True  # of a class that has an `extend`: whether it is the library's
    _publisher: StatsPublisher | None = None
    _rate_limit: RateLimit | None = None
    _failure: BaseException | None = None  # of what fills it in the background, to be raised by the next use
    _copied_as: ClassVar[Mapping[str, Any]] = {
        **dict.fromkeys(("_parts", "_iteration", "_is_shut_down", "_publisher"), LEFT_OUT),
        **dict.fromkeys(("_failure", *_ENDED_BY_FAILURE), LEFT_OUT),
        "_handed_out": Computed(lambda buffer: BatchCount()),
        "_generator": Computed(lambda buffer: _bytes_of(buffer.generator)),
        # Others may have changed it, or ended it: a copy is not to name the one of before again.
        "_rate_limit": Computed(lambda buffer: as_limit(buffer.rate_limiter)),
    }

    def _join_parts(self) -> BufferParts:
        """Puts the parts together; again after each change of one. A ValueError where they do not fit each other."""
        return BufferParts(
            self._storage, self._sampler, self._writer, self._transform, self._generator, self._part_settings()
        )

    def _part_settings(self) -> PartSettings:
        return PartSettings(
            self._batch_size, self._collate_fn, self._prefetch, self._dim_extend, self._pin_memory,
            self._track_generations, self._reuse_batches, self._entries, self._priority_key,
        )  # fmt: skip

    def _name_limit(self) -> None:
        """Tells the storage the bound that this buffer was made with."""
        if self._rate_limit is not None:
            with self._storage.mutex:
                self._flow.name(self._rate_limit)

    @property
    def _flow(self) -> Flow:
        """Who waits for whom, by the store that is there by now."""
        table = self._storage.access.table
        table.look()
        return table.flow

    # ---- writing ----
    def add(self, data: T | Data, *others: Never, timeout: float | None = None) -> int | Tensor:
        """Stores one step; returns its index: an int, with ndim=2 int64 [envs, 2].

        With a transform that holds steps back: int64 [n], the indices of what was written.

        With a rate limiter it waits while those who sample are too far behind, and in a queue (`QueueSampler`) while
        there is no room for it: for `timeout` seconds at most; None: any time.

        Raises:
            ValueError, TypeError: the step does not fit the storage; the message names the leaf. Nothing is changed.
            RuntimeError: it would wait, and nobody can sample.
            TimeoutError: it was not to be written until then. Nothing is changed.
        """
        if others:
            raise _several_given("add", 1 + len(others))
        parts = self._parts
        writes, storage = parts.batch_writer, parts.storage
        plainly = writes.pushes and not writes.transform.transforms
        if plainly and not (writes.priorities is not None and writes.priorities.are_stored()):
            with storage.mutex:
                pushed: int | Tensor | None = None
                if (push := storage.native.push) is not None:
                    pushed = push(data, writes.form_of_step)
            if pushed is not None:
                return pushed
        index: int | Tensor = writes.write(data, single=True, timeout=timeout)
        return index

    def extend(
        self,
        data: T | Data | Sequence[T | Data],
        *others: Never,
        update_priority: bool | None = None,
        timeout: float | None = None,
    ) -> Tensor:
        """Stores a batch of steps; returns their indices: int64 [n], with ndim=2 [n, 2].

        A list is a list of items; a tuple is one pytree. Of more steps than fit, the last ones stay. A transform that
        holds steps back may write others than those that came, or none.

        Args:
            update_priority: if False, priorities that come with the data are stored, and the steps get the priority
                of new ones all the same.
            timeout: seconds to wait, with a rate limiter, while those who sample are too far behind, and in a queue for
                room; None: any time.

        Raises:
            ValueError, TypeError: the batch does not fit the storage; the message names the leaf. Nothing is changed.
            RuntimeError: the items of a list do not stack; the message names the item. Or it would wait, and nobody can
                sample.
            TimeoutError: those who sample were too far behind until then. Nothing is changed; but of a queue, which
                takes a batch in parts, the message says how many of the first steps were written.
        """
        if others:
            raise _several_given("extend", 1 + len(others))
        parts = self._parts
        writes, storage = parts.batch_writer, parts.storage
        plainly = writes.pushes and not writes.transform.transforms
        if plainly and not (writes.priorities is not None and writes.priorities.are_stored()):
            with storage.mutex:
                pushed: Tensor | None = None
                if (push := storage.native.push) is not None:
                    pushed = push(data, writes.form)
            if pushed is not None:
                return pushed
        index: Tensor = writes.write(data, single=False, update_priority=update_priority, timeout=timeout)
        return index

    def await_room(
        self, timeout: float | None = None, *, rows: int = 1, stop: Callable[[], bool] | None = None
    ) -> None:
        """Waits until more rows may be written, as `add` and `extend` do: for who makes rows only when there is room.

        Args:
            timeout: seconds, at most; None: any time.
            rows: how many are to be made: a queue has room for as many, or for as many as it ever has. Others who write
                may take it.
            stop: a function that is called now and then: where it returns True, the wait ends.

        Raises:
            TimeoutError: those who sample were too far behind until then.
            RuntimeError: nobody can sample.
        """
        self._parts.waits.await_room(timeout, "who writes", stop, rows)

    @property
    def has_room(self) -> bool:
        """Whether more rows may be written now; `await_room` waits until they may."""
        return self.has_room_for(1)

    def has_room_for(self, rows: int) -> bool:
        """As `has_room`, of so many rows: a queue has room for all of them, or is empty."""
        parts = self._parts
        watched = parts.flow.watched
        return watched is None or not watched.is_limited or parts.waits.has_room(rows)

    @property
    def fills_up(self) -> bool:
        """Whether the storage is a queue in which who writes waits for room (`QueueSampler(full="wait")`)."""
        return self._parts.waits.fills_up()

    @property
    def holds_writers_back(self) -> bool:
        """Whether who writes may have to wait for who samples: a rate limiter, or a queue, sees to that."""
        if self.fills_up:
            return True
        limiter = self.rate_limiter
        return limiter is not None and math.isfinite(limiter.limit.behind)

    def note_policy_version(self, version: int) -> None:
        """Says which version of the policy trains from now on, to all who take rows of a queue (`max_staleness`);
        elsewhere nothing. Collectors call it when they get new weights; `rb.sampler.consumer_version` is the same.
        """
        if isinstance(self._sampler, QueueSampler):
            self._sampler.consumer_version = version
        elif (queue := self._storage.lanes.queue) is not None and queue.is_one:
            queue.consumer_version = version

    # ---- a queue whose rows are trained once ----
    def position(self, info: dict[str, Any] | None = None) -> dict[str, Any]:
        """Where this consumer of a queue is: behind the rows that were handed out, for the model's checkpoint.

        It is a small dict of plain numbers and a text, and names rows that a power cut leaves: it waits for the disk,
        as `flush` does. Whoever goes on from the checkpoint gives it to `seek`, and gets each row once that comes after
        it.

        Args:
            info: of a batch: the position behind that one, where others were taken since which are not trained yet.

        Raises:
            TypeError: the sampler is no `QueueSampler`.
            RuntimeError: another process has called `seek` since; or nothing was written.
            StorageError: the disk failed.

        Example:
            >>> rb = ReplayBuffer(
            ...     storage=LazyTensorStorage(8), sampler=QueueSampler(commit="manual"), batch_size=2)
            >>> _ = rb.extend(torch.arange(6))
            >>> rb.seek(None)
            0
            >>> rb.sample()
            tensor([0, 1])
            >>> with rb.committing() as position:
            ...     checkpoint = {"position": position}  # with the model, saved in one step
            >>> rb.sample(), rb.seek(checkpoint["position"]), rb.sample()
            (tensor([2, 3]), 0, tensor([2, 3]))
        """
        position: dict[str, Any] = self._queue_sampler("position").position(self._storage, info)
        return position

    def commit(self, position: dict[str, Any]) -> None:
        """Lets the rows below a position go, which are in a checkpoint that nobody goes back before: writers may take
        their places. Of several checkpoints that may be gone back to, the position of the oldest.

        Raises:
            TypeError, ValueError: it is no position of this store; the message says what to do.
            RuntimeError: another process has called `seek` since.
        """
        self._queue_sampler("commit").commit_rows(self._storage, position)

    def seek(self, position: dict[str, Any] | None) -> int:
        """Goes on behind a position, of the checkpoint that the model was loaded from; None: behind what was committed
        last. Before the first `sample` of a queue with `commit="manual"`, whatever killed the process before.

        A session begins by it: another process that takes rows of this queue, from a session of before, gets an error
        at its next use. Of several ranks that train one model, one calls it before the others sample.

        Returns:
            how many of the rows that come again are gone, as writers have taken their places: 0 behind what was
            committed. Rows that a power cut lost, before they were flushed, count as `missed`.

        Raises:
            TypeError, ValueError: it is no position of this store; the message says what to do.
        """
        return int(self._queue_sampler("seek").seek(self._storage, position))

    @contextlib.contextmanager
    def committing(self) -> Iterator[dict[str, Any]]:
        """A block that saves a checkpoint with the position that it gives; when it has ended well, the rows below that
        go (`commit`). In it the new checkpoint replaces the old one in one step, as `os.replace` does.

        Errors as `position` and `commit`; where the block raises one, nothing goes.
        """
        position = self.position()
        yield position
        self.commit(position)

    def _queue_sampler(self, what: str) -> QueueSampler:
        sampler = self._sampler
        if not isinstance(sampler, QueueSampler):
            raise TypeError(f"{what} is of a queue, and the sampler of this buffer is {sampler!r}: use QueueSampler()")
        return sampler

    def end_queue(self) -> None:
        """The storage is a queue no more, for all who use it: writers wait no more, and overwrite the oldest rows; what
        was handed out is forgotten. This buffer draws uniformly from now on, if its sampler was a `QueueSampler`.

        Example:
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=QueueSampler(), batch_size=2)
            >>> _ = rb.extend(torch.arange(4))
            >>> rb.end_queue()
            >>> _ = rb.extend(torch.arange(4))
            >>> rb.write_count, rb.sampler
            (8, RandomSampler())
        """
        if isinstance(self._sampler, QueueSampler):  # first: who waits in this buffer goes on with the other one
            self.set_sampler(RandomSampler())
        with self._storage.mutex:
            self._flow.end_queue()

    @property
    def column_rows(self) -> ColumnRows | None:
        """For collectors: rows to which columns are appended as they are; None where `extend` does more than that."""
        kind: Any = type(self)
        plainly = _has_plain_extend(kind) and "extend" not in vars(self)
        return self._parts.batch_writer.column_rows if plainly else None

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
        index: Tensor = self._parts.batch_writer.flush()
        return index

    @property
    def dim_extend(self) -> int:
        """The dimension of the data that is time."""
        return self._parts.time_dim

    # ---- sampling ----
    @overload
    def sample(
        self,
        batch_size: int | None = None,
        return_info: Literal[False] = False,
        include_info: bool | None = None,
        *,
        as_numpy: Literal[False] = False,
        wait: bool | None = None,
        timeout: float | None = None,
    ) -> T: ...

    @overload
    def sample(
        self,
        batch_size: int | None = None,
        *,
        return_info: Literal[True],
        include_info: bool | None = None,
        as_numpy: Literal[False] = False,
        wait: bool | None = None,
        timeout: float | None = None,
    ) -> tuple[T, dict[str, Any]]: ...

    @overload
    def sample(
        self,
        batch_size: int | None,
        return_info: Literal[True],
        include_info: bool | None = None,
        *,
        as_numpy: Literal[False] = False,
        wait: bool | None = None,
        timeout: float | None = None,
    ) -> tuple[T, dict[str, Any]]: ...

    @overload
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        as_numpy: Literal[False] = False,
        wait: bool | None = None,
        timeout: float | None = None,
    ) -> T | tuple[T, dict[str, Any]]: ...

    @overload
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        as_numpy: bool,
        wait: bool | None = None,
        timeout: float | None = None,
    ) -> Any: ...

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        as_numpy: bool = False,
        wait: bool | None = None,
        timeout: float | None = None,
    ) -> Any:
        """A batch, with `return_info` also its info: a dict with `"index"`, `"generation"`, `"priority_weight"`, ...

        `include_info` is accepted for users of other libraries: batches of TensorDict buffers always carry their index.
        With `as_numpy` the batch is (nested) dicts of NumPy arrays, which are the caller's, under the same keys; of
        plain batches, as `reuse_batches` has them, no tensor is made on the way. The info stays as it is.

        Args:
            wait: for rows that others write. None: with a rate limiter until it lets them be drawn, and in a queue
                (`QueueSampler`) until there is a batch; True: also without one, until there is a batch (`can_sample`);
                False: never.
            timeout: seconds to wait, at most; None: any time. Given, it waits as for True.

        Raises:
            TypeError: with `as_numpy` an entry of a dtype that NumPy does not have (bfloat16).
            RuntimeError: no batch size here or in the constructor; nothing is stored; with `wait=False` a rate limiter
                does not let rows be drawn now; or it would wait, and nobody can write.
            TimeoutError: there was no batch until then.
            ValueError: the rate limiter never lets so many rows be drawn at once.
            OutOfMemoryError: there is no memory for the batch; nothing was drawn where it has more than 2**20 rows and
                needs more than is free. Random numbers may have been drawn; an epoch goes on with the same rows.
        """
        n, parts = self._batch_size, self._parts
        if n is None or (batch_size is not None and batch_size != n):
            n = _chosen_batch_size(self._batch_size, batch_size)
        if n > MANY_ROWS:
            parts.reader.check_room(n)
        counted: Any = None
        if wait is not None or timeout is not None:
            deadline = deadline_of(timeout)
            counted = parts.waits.take(n, wait, deadline)
            parts = self._parts  # which may be others by now
        elif (watched := parts.flow.watched) is not None and (taken := watched.take_samples(n)):
            counted = n if taken > 0 else parts.waits.take(n, None, None)
            parts = self._parts
        try:
            if parts.prefetcher is not None:
                batch, info = parts.prefetcher.sample(n, return_info or parts.tracks_generations)
            elif return_info or parts.tracks_generations:
                batch, info = parts.reader.sample(n, generations=True)
            elif as_numpy:
                batch = parts.reader.arrays(n)
                self._handed_out.batches += 1
                return batch
            else:
                batch, info = parts.reader.batch(n), {}
            if as_numpy:
                batch = as_arrays(batch)
        except BaseException as error:
            parts.waits.undo(counted)
            if isinstance(error, QueueShortError):  # rows of this batch were overwritten before they were read
                left = None if timeout is None or deadline is None else max(0.0, deadline - time.monotonic())
                return self.sample(n, return_info, as_numpy=as_numpy, wait=wait, timeout=left)
            if isinstance(error, MemoryError):
                raise OutOfMemoryError(f"no memory for a batch of {n} rows ({error}); sample fewer") from error
            raise
        self._handed_out.batches += 1
        return (batch, info) if return_info else batch

    def __iter__(self) -> Iterator[T]:
        """Batches for ever; with a sampler without replacement, to the end of the epoch."""
        if self._batch_size is None:
            raise RuntimeError(
                "Batch_size was not specified, and iterating needs it: give one to the buffer's constructor"
            )
        if self._batch_size > MANY_ROWS:
            self._parts.reader.check_room(self._batch_size)
        epochs: LoopEpochs = None
        while True:
            if self._failure is not None:
                self._raise_failure()
            try:
                n, counted = self._parts.waits.take_next(self._batch_size)
            except EpochOverError:
                return
            parts, sampler, storage = self._parts, self._sampler, self._storage
            source = parts.reader if parts.prefetcher is None else parts.prefetcher
            try:
                batch, last, epochs = source.next(n, parts.tracks_generations, epochs)
            except BaseException as error:
                parts.waits.undo(counted)
                if isinstance(error, EpochOverError):
                    return
                if isinstance(error, QueueShortError):
                    continue
                raise
            self._handed_out.batches += 1
            yield batch
            if last:
                return
            if self._sampler is not sampler or self._storage is not storage:
                epochs = None  # of others

    def __next__(self) -> T:
        return self.sample()

    def next(self) -> T | None:
        """The next batch of iterating; None, once, at the end of each epoch of a sampler without replacement.

        Raises:
            RuntimeError: no batch size in the constructor; nothing is stored.

        Example:
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=2)
            >>> _ = rb.extend(torch.arange(3))
            >>> [None if batch is None else len(batch) for batch in (rb.next(), rb.next(), rb.next(), rb.next())]
            [2, 1, None, 2]
        """
        iteration, self._iteration = self._iteration or iter(self), None
        for batch in iteration:
            self._iteration = iteration
            return batch
        return None

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether `sample` would give a batch of this size now, the rate limiter included; other samplers than the
        library's: whether anything is stored.

        Raises:
            RuntimeError: no batch size here or in the constructor.
            ValueError: one that the sampler does not take.
        """
        n = _checked_batch_size(self._batch_size if batch_size is None else batch_size)
        if n is None:
            raise RuntimeError(
                "batch_size not specified: give one to can_sample(batch_size) or to the buffer's constructor"
            )
        return bool(self._sampler.can_sample(self._storage, n)) and self._parts.waits.can_take(n)

    def as_iterable_dataset(self, batches: int | None = None) -> BatchDataset:
        """The batches of iterating as a dataset for `torch.utils.data.DataLoader` and Lightning; see the example.

        Worker processes draw with copies of the sampler, seeded by the loader (`torch.manual_seed`, or its
        `generator=`; not by the buffer's own generator). With samplers that draw with replacement the workers' draws
        are independent. Of each epoch of a `SamplerWithoutReplacement` every worker gives a part, and together they
        give each row once; with `rank=, world_size=`, this learner's part. Workers see the rows that are stored when
        they start; with `shared=True` or a mapped file also later ones. With `num_workers=0` it is the buffer itself.

        Args:
            batches: of one pass, of all workers together; epochs begin anew as they end. None: one epoch, or without
                end where the sampler has none.

        Raises:
            RuntimeError: no batch size in the buffer's constructor. In a worker: a prioritized sampler, whose
                priorities would not be those of this process; another sampler with epochs, in several workers.

        Example:
            >>> from torch.utils.data import DataLoader
            >>> rb = TensorDictReplayBuffer(
            ...     storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4)
            >>> _ = rb.extend(TensorDict({"x": torch.arange(10)}, [10]))
            >>> dataset = rb.as_iterable_dataset()
            >>> loader = DataLoader(dataset, batch_size=None, collate_fn=dataset.collate)  # and num_workers=
            >>> [len(batch) for batch in loader]
            [4, 4, 2]
        """
        return BatchDataset(self, batches)

    # ---- by index ----
    def __len__(self) -> int:
        """Stored steps of all writers."""
        if self._failure is not None:
            self._raise_failure()
        return len(self._storage)

    @property
    def write_count(self) -> int:
        """Steps ever written."""
        if self._failure is not None:
            self._raise_failure()
        return self._storage.write_count

    def report_failure(self, failure: BaseException | None) -> None:
        """The next write, batch, `len` or `write_count` raises RuntimeError with this error as its cause.

        For what fills the buffer in the background, as a collector after `start()`, and has ended: a program that waits
        for rows would do so for ever. It is raised once; None: not at all.
        """
        self._failure = self._parts.waits.failure = failure
        for name in _ENDED_BY_FAILURE:  # on this object, so that it costs other calls nothing
            if failure is None:
                vars(self).pop(name, None)
            else:
                vars(self)[name] = self._raise_failure

    def report_filling(self, begins: bool) -> None:
        """What fills the buffer in the background, as a collector after `start()`, begins, or has ended: when all have,
        a `sample` that waits for rows, in a storage that no other process has open, raises RuntimeError, and a loop
        over a queue ends.
        """
        self._parts.waits.count_filling(begins)

    def _raise_failure(self, *_: Any, **__: Any) -> NoReturn:
        failure = self._failure
        self.report_failure(None)
        raise RuntimeError(
            f"what filled this buffer in the background has ended with an error, no rows will come: {failure!r:.300}"
        ) from failure

    def stats(self) -> BufferStats:
        """The state of the buffer in numbers, counted now: rows, bytes, capacity, writes, draws, episodes, writers.

        Episodes are those of the sampler, if it draws slices; else of `("collector", "traj_ids")`, `"episode"` or
        `("next", "done")`. The first call looks at every stored step's id or flag, later ones at new steps.
        """
        storage = self._storage
        counted = count_steps(storage, self._sampler, self._episodes)
        return BufferStats(
            rows=counted.rows,
            bytes=storage.nbytes,
            capacity=storage.max_size,
            writes=counted.writes,
            draws=self._handed_out.batches,
            episodes=counted.episodes,
            writers=writers_of(storage),
            compact=observation_shares_of(storage),
            removed=storage.lanes.store.removed_rows,
            **draws_of(storage),
            **queue_figures_of(storage, self._sampler),
        )

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
        index, one_dimension = as_index(index), self._storage.ndim == 1
        if isinstance(index, tuple) and not one_dimension and len(index) > 1:
            rows = move_dim(self._storage.get(slice(None)), 0, self._parts.time_dim)[index]
        else:
            rows = self._storage.get(index)
            if not one_dimension and not is_int(index):
                rows = move_dim(rows, 0, self._parts.time_dim)
        if self._collate_fn is not None and not is_int(index):
            # A lazy stack of a list storage: the items, as batches are made of.
            of_items = isinstance(rows, LazyStackedTensorDict) and self._storage.access.item_reader is not None
            rows = self._collate_fn(rows.tensordicts if of_items else rows)
        return self._transform.read(rows) if self._transform.transforms else rows

    def __setitem__(self, index: Index, items: T | Data | Sequence[T | Data]) -> None:
        """Replaces stored steps, for which this process must have the storage alone: those that `rb[...]` reads.

        Of a step that the index names more than once the last counts, as for NumPy arrays.

        Raises:
            IndexError: a step that has not been written.
            ValueError, TypeError: the data do not fit; the message names the leaf. Nothing is changed.
            StorageInUseError: another process has the storage open.
        """
        self._writer.check_mutable("rb[...] = ...")
        index = as_index(index)
        items = self._parts.batch_writer.in_place(items)
        if self._storage.ndim > 1:
            if isinstance(index, tuple) and len(index) > 1:
                index = grid_index(self._storage, self._parts.time_dim, index)
            elif not is_int(index):
                items = move_dim(items, self._parts.time_dim, 0)
        elif type(items) is list:
            items = self._parts.batch_writer.as_batch(items, 0)
        with self._parts.undisturbed():
            self._storage.access.assign(index, Steps(items, index_key=self._writer.index_key))

    def set_(self, key: Any, value: Any) -> Self:
        """Sets one entry of every stored step, in place; returns itself.

        Args:
            key: of an entry that the steps have: a string, or a tuple of strings.
            value: as `rb.storage` holds it (transforms are not applied), in the form of `rb[:]`, or one for all steps.

        Raises:
            KeyError: the steps have no such entry.
            ValueError, TypeError: the value does not fit. Nothing is changed.
            StorageInUseError: another process has the storage open.

        Example:
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
            >>> _ = rb.extend(TensorDict({"x": torch.arange(3.0)}, [3]))
            >>> rb.set_("x", torch.ones(3)).set_at_("x", 5.0, [0, 2])[:]["x"]
            tensor([5., 1., 5.])
        """
        self._parts.change_entries({key: value}, slice(None))
        return self

    def set_at_(self, key: Any, value: Any, index: Index) -> Self:
        """Sets one entry of the stored steps at an index, in place; value and errors as `set_`, in the form of
        `rb[index]`. Of a step that the index names more than once the last value counts. Also an IndexError: a step
        that has not been written.
        """
        self._parts.change_entries({key: value}, index)
        return self

    def update_(
        self, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Sequence[Any] | None = None
    ) -> Self:
        """Sets several entries of every stored step, in place and together; values and errors as `set_`.

        Args:
            input_dict_or_td: a TensorDict or dict, nested or not, with some of the entries that steps have.
            clone: without effect: values are always copied.
            keys_to_update: of these entries only.
        """
        values = {key: get_entry(input_dict_or_td, key) for key in leaf_keys(input_dict_or_td)}
        if keys_to_update is not None:
            chosen = as_keys(list(keys_to_update))
            absent = [key for key in chosen if key not in values]
            if absent:
                raise KeyError(f"keys_to_update names {absent}, the data have {list(values)}; nothing was changed")
            values = {key: values[key] for key in chosen}
        self._parts.change_entries(values, slice(None))
        return self

    def read_all_in_order(self, end: int | None = None) -> Any:
        """All stored steps as one batch, in the order of their slots: oldest first until the ring has gone round.

        Args:
            end: only so many of the first slots; with ndim=2 time steps.

        Raises:
            IndexError: nothing has been written.
        """
        if not len(self._storage):
            raise IndexError("nothing has been written to this buffer yet")
        rows: Any = self[:end]
        collate_fn = self._parts.reader.collate_fn
        return collate_fn(rows) if type(rows) is list and rows and collate_fn is not self._collate_fn else rows

    def write_all(self, data: T | Data | Sequence[T | Data], end: int | None = None) -> None:
        """Replaces all stored steps, in the order in which `read_all_in_order` gives them; `end` and errors as there,
        and those of `rb[...] = ...`.
        """
        self[:end] = data

    def update_if_present(
        self,
        *,
        index: Index,
        generation: Tensor | npt.NDArray[Any] | Sequence[int] | int,
        patch: T | Data | Mapping[Any, Any] | Sequence[T | Data],
        version_key: Key | None = None,
        version: Tensor | npt.NDArray[Any] | Sequence[int] | int | None = None,
        require_newer: bool = False,
    ) -> UpdateResult:
        """Writes over the steps that still have these generations, and over no other: what was computed from sampled
        steps goes back to them, never to others that have taken their places meanwhile.

        Args:
            index: the n steps, as `sample` and `extend` give them. One may come more than once: then the last counts.
                -1, which writers give to what they refuse, is stale.
            generation: one for each of them: `info["generation"]`, `batch["index_generation"]` or
                `writer.generations_of(index)`, of the time when the step was looked at.
            patch: entries [n, ...] of the steps, by key; the other entries of a step stay. For steps that have no keys,
                whole steps. The transforms' inverses are applied to it, as in `rb[...] = ...`.
            version_key: an entry with one number a step that says how new it is, or what computed it, such as the
                policy's version; not in the patch.
            version: one number, or one for each step. A step whose stored version is higher is left alone; others get
                this one together with the patch.
            require_newer: leave steps alone whose stored version is the same.

        Raises:
            KeyError: the stored steps have no such entry.
            ValueError, TypeError: the patch does not fit them, or the arguments do not belong together. Nothing is
                changed.
            StorageInUseError: another process has the storage open.
        """
        self._writer.check_mutable("update_if_present")
        storage = self._storage
        if not storage.initialized:
            raise IndexError("nothing has been written yet")
        slots = to_slots(index, storage.env_shape, storage.max_size or 0)
        expected = to_tensor(generation).cpu().reshape(-1)
        if len(slots) != len(expected):
            raise ValueError(f"{len(slots)} steps are indexed, {len(expected)} generations given; nothing was written")
        patch = as_patch(patch)
        versions = as_version(version_key, version, require_newer, patch, len(slots))
        patch = self._parts.batch_writer.in_place(patch)
        if type(patch) is list:
            patch = self._parts.batch_writer.as_batch(patch, 0)
        with self._parts.undisturbed(), storage.access.exclusive("update_if_present"):
            return write_if_present(storage, slots, expected, patch, versions, self._writer.index_key)

    def remove(
        self,
        index: Index | Callable[[RowBlock], Any],
        generation: Tensor | npt.NDArray[Any] | Sequence[int] | int | None = None,
    ) -> int:
        """Takes stored rows out of what is drawn, beside writers and readers: no `sample` after it has one of them.

        They keep their places, which others take as the ring comes round: memory is not freed before, `len` and indices
        stay, `rb[i]` still reads them. `update_priority` and `update_if_present` leave them out, saves keep what was
        removed, exports leave them out. Slices with a removed row are not drawn. A batch that was prepared ahead
        (`prefetch`) may have a row that was removed since. It is no one step: what is removed before an error, or a
        kill, stays removed; calling it again removes the rest.

        Args:
            index: int, int64 [n], a slice, a bool mask over the stored steps, with ndim=2 a tuple (time, env) or
                [n, 2]; or a function that is given some rows at a time, as `RowBlock`, and returns a bool for each. It
                is called outside of all locks, and sees each row that was stored when `remove` was called, but for
                those that were removed before.
            generation: int64 [n], as `info["generation"]` has it: only rows that still have it are removed.

        Returns:
            how many rows were removed: those that are not stored any more, or were removed before, do not count.

        Raises:
            IndexError: a row that has not been written, where no generation is given. Nothing is removed.
            ValueError, TypeError: sizes differ, or the function returned something else than a mask.
            StorageError: the store was made by an engram that removed no rows, or is open for reading only.
            NoFreeLaneError: another process made the store with `lanes=1`, and has it open.
            StorageInUseError: another process has been appending for ten seconds; the message names it.

        Example:
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=64)
            >>> _ = rb.extend(TensorDict({"episode": torch.tensor([0, 0, 1, 1, 2])}, [5]))
            >>> rb.remove(lambda rows: rows["episode"] == 1)
            2
            >>> sorted(set(rb.sample()["episode"].tolist())), len(rb), rb.stats().removed
            ([0, 2], 5, 2)
        """
        storage = self._storage
        if storage.read_only:
            raise StorageError(READ_ONLY)
        if not callable(index):
            return remove_at(storage, index, generation)
        if generation is not None:
            raise TypeError("a function that chooses rows is given without generation=; nothing was removed")
        return remove_where(storage, index)

    def flush(self) -> None:
        """Makes the rows written so far survive a power cut, where the storage is in a folder; else nothing.

        (Rows that have been written survive the end of their process, a kill included, without it. Steps that a
        transform holds back are not written yet: `flush_transforms`.)

        Raises:
            StorageError: the disk failed, and no row counts as flushed that did not before.

        Example:
            >>> import tempfile, torch
            >>> from engram.data import LazyMemmapStorage, ReplayBuffer
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=folder))
            ...     _ = rb.extend(torch.arange(3))
            ...     rb.flush()
            ...     rb.storage.close()
        """
        self.storage.flush()

    def empty(self, empty_write_count: bool = True) -> None:
        """Forgets every step, priority and prepared batch; the cursor is 0.

        Raises:
            StorageInUseError: another process has the storage open.
        """
        self._writer.check_mutable("empty")
        with self._parts.undisturbed(), self._storage.access.replacing("empty"):
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
        """Sets priorities of stored steps; for samplers without priorities there is nothing to do.

        With ndim=2 and the index [n, 2] that `extend` returned, priorities may have the form of the data, as
        `[envs, time]`. Errors as `Sampler.update_priority`.
        """
        if self._storage.ndim > 1:
            priority = in_index_order(self._storage, self._parts.time_dim, index, priority)
        self._parts.plan.update(index, priority, generation=generation, storage=self._storage)

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
        return user_object(self._sampler)

    @property
    def writer(self) -> Any:
        return given_writer(self._writer)

    @property
    def transform(self) -> Compose:
        """What changes batches on their way in and out."""
        return self._transform

    @property
    def generator(self) -> torch.Generator | Generator | None:
        """The buffer's own generator; None: draws come from torch's global one."""
        return self._generator

    @property
    def batch_size(self) -> int | None:
        return self._batch_size

    @property
    def rate_limiter(self) -> RateLimiter | None:
        """The bound on the rows drawn for each row written, which all users of the store keep; None: there is none.

        It can be set while jobs run: counts begin anew, without a debt of either side, for all of them. None ends it.
        """
        return limiter_of(self._flow.limit)

    @rate_limiter.setter
    def rate_limiter(self, limiter: RateLimiter | None) -> None:
        limit = as_limit(limiter)
        with self._storage.mutex:
            self._flow.set(limit)
        self._rate_limit = limit

    def set_rng(self, generator: torch.Generator | Generator | None) -> None:
        """Draws come from this generator from now on, and it is saved with the buffer; None: torch's global one."""
        self._replace({"_generator": generator})

    def set_sampler(self, sampler: Any) -> Any:
        """Uses another sampler from now on; returns the old one."""
        old: Sampler = self._replace({"_sampler": as_sampler(sampler)})["_sampler"]
        return user_object(old)

    def set_writer(self, writer: Any) -> Any:
        """Uses another writer from now on; returns the old one."""
        old: Writer = self._replace({"_writer": as_writer(writer)})["_writer"]
        return given_writer(old)

    def set_storage(self, storage: Storage, collate_fn: Callable[[Any], Any] | None = None) -> Storage:
        """Uses another storage from now on; returns the old one."""
        changed: dict[str, Any] = {"_storage": as_storage(storage)}
        if collate_fn is not None:
            changed["_collate_fn"] = collate_fn
        old: Storage = self._replace(changed)["_storage"]
        return old

    def share(self, shared: bool = True) -> Self:
        """Lets processes that this buffer is sent to see and write its rows; before the first write. Returns itself.

        Raises:
            ValueError: the rows are in private memory already, or the storage is of a kind that cannot be shared.
        """
        if shared:
            self._storage.access.table.share(type(self._storage).__name__)
        elif getattr(self._storage, "shared", False):
            raise ValueError("the rows are in shared memory and stay there; make a storage with shared=False")
        return self

    # ---- as buffers that live in another process are used; this one is used as it is ----
    service_backend = "direct"

    def start(self) -> Self:
        """Returns itself: it can be used as soon as it is made."""
        return self

    def client(self) -> Self:
        """Returns itself: what uses a buffer in another process through a client uses this one so, too."""
        return self

    def synchronize(self) -> None:
        """Does nothing: what was written is there when `add` and `extend` return."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends the threads that prepare batches, and that of `publish_stats`: each batch is made when it is wanted.

        Args:
            timeout: without effect: they end with the batches that they are making.
        """
        self._parts.waits.ended = SHUT_DOWN
        self._parts.close()
        if self._publisher is not None:
            self._publisher.close()
        self._is_shut_down = True

    @property
    def is_alive(self) -> bool:
        """Whether `shutdown` was not called."""
        return not self._is_shut_down

    def _replace(self, changed: dict[str, Any]) -> dict[str, Any]:
        """Exchanges parts and what belongs to them; returns the old ones, which stay where the new ones do not fit."""
        before = self._parts
        with before.undisturbed():
            old = {name: vars(self)[name] for name in changed}
            vars(self).update(changed)
            try:
                self._parts = self._join_parts()
                if "_storage" in changed:
                    self._name_limit()
            except BaseException:  # the parts do not fit each other
                vars(self).update(old)
                self._parts = self._join_parts()
                raise
            finally:
                before.close()
                self._parts.waits.failure, self._parts.waits.filling = self._failure, before.waits.filling
                before.waits.successor = self._parts.waits
        return old

    def append_transform(self, transform: TransformLike, *, invert: bool = False) -> Self:
        """Adds a transform at the end; with `invert` a callable is applied on writing instead of on reading.

        Raises:
            TypeError: it is no transform, or has an inverse that cannot be called.
        """
        adapted = as_transform(transform, invert)
        self._check_transform(adapted)
        with self._parts.undisturbed():
            self._transform.append(adapted)
            self._parts.use_transform(self._transform)
        return self

    def insert_transform(self, index: int, transform: TransformLike, *, invert: bool = False) -> Self:
        """Adds a transform before the one at `index`.

        Raises:
            ValueError: there is no such place.
            TypeError: as `append_transform`.
        """
        adapted = as_transform(transform, invert)
        self._check_transform(adapted)
        with self._parts.undisturbed():
            self._transform.insert(index, adapted)
            self._parts.use_transform(self._transform)
        return self

    def _check_transform(self, transform: Transform) -> None:
        """Raises TypeError for a transform that does not work here; warns of one that does nothing, or too little."""
        if isinstance(self._writer, ImmutableDatasetWriter):
            warn_if_idle(transform, Role.READING, "in a replay buffer that is only read")
        else:
            warn_if_idle(transform, IN_BUFFERS, "in a replay buffer")
        for part in transform.parts():
            if part.names_no_entry_to_invert():
                warn_user(
                    f"{part.kind} has `_inv_apply_transform` and no `in_keys_inv`: {list(part.in_keys) or 'entries'} "
                    "are stored as they are written, and changed on reading only; in_keys_inv names the entries to "
                    "change on writing",
                )

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
        if "_parts" not in self.__dict__:
            object.__setattr__(self, name, compose)
            return
        with self._parts.undisturbed():
            object.__setattr__(self, name, compose)
            self._parts.use_transform(compose)

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Adds a callable that is applied to what the storage saves."""
        self._storage.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Adds a callable that is applied to what the storage loads."""
        self._storage.register_load_hook(hook)

    def keys(self) -> list[str | tuple[Any, ...]]:
        """The keys of a stored step, as batches have them: a nested one is a tuple; none before the first write.

        Of items of a list storage, which may differ, those of the oldest; none where steps are tensors or other objects
        without keys.

        Example:
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
            >>> _ = rb.extend({"obs": torch.zeros(2, 3), "next": {"reward": torch.zeros(2, 1)}})
            >>> rb.keys()
            ['obs', ('next', 'reward')]
        """
        storage, layout, paths = self._storage, self._storage.layout, []
        if layout is not None:
            paths = [leaf.path for leaf in layout.leaves]
        elif len(storage) and not isinstance(storage, StorageEnsemble):
            paths = _paths_of(storage.get(0))
        return [path[0] if len(path) == 1 else path for path in paths if path]

    def __repr__(self) -> str:
        return shown_buffer(
            type(self).__name__,
            {
                "storage": self._storage,
                **shown_content(self._storage, self._sampler, self._episodes),
                "sampler": self._sampler,
                "writer": self._writer,
                "batch_size": self._batch_size,
                "transform": self._transform,
                "collate_fn": self._parts.reader.collate_fn,
            },
        )

    # ---- saving and loading ----
    def dumps(self, path: str | os.PathLike[str], *, blocking: bool = True, keep_last: int = 1) -> str | SaveHandle:
        """Saves everything: a whole snapshot beside the last one, which it then replaces.

        Killed at any moment, `loads` finds the old state or the new one, exactly. What has not changed since the last
        snapshot there is not written again, but taken over by hard links.

        Args:
            blocking: if False, a thread saves the state of this moment while the buffer goes on, and a `SaveHandle`
                is returned: `done()`, `result()`, `progress`, `rows_left_out`. What is overwritten before it is
                saved is kept in memory until then.
            keep_last: how many of the newest snapshots stay.

        Returns:
            the name of the snapshot, which `loads(snapshot=...)` takes while it stays; `result()` of a handle has it.

        Raises:
            CheckpointError: it cannot be written (disk full, read-only, another save there, ...); the last snapshot
                is as it was.
        """
        if not blocking:
            handle = self.begin_dumps(path, keep_last=keep_last)
            handle.await_begin()
            return handle
        # Batches that were prepared before the last writes are prepared again, here and where this is loaded.
        with self._parts.undisturbed(), self._storage.mutex:
            return save_buffer(self._saved_form, Path(path), keep_last)

    def begin_dumps(self, path: str | os.PathLike[str], *, keep_last: int = 1) -> SaveHandle:
        """As `dumps(path, blocking=False)`, but waits for no disk: why it cannot begin is an error of `result()`."""
        with self._parts.undisturbed(), self._storage.mutex:
            return save_in_background(self._saved_form, Path(path), keep_last)

    def loads(
        self,
        path: str | os.PathLike[str],
        *,
        snapshot: str | None = None,
        parts: tuple[str, ...] = PARTS,
    ) -> None:
        """Takes over a saved state: the batches that follow are those that would have followed there.

        The buffer may be larger than the saved one, and its storage of another kind: in memory here, a file there. A
        smaller one takes it as long as the saved rows fit. Directories that TorchRL's `dumps` wrote, and
        memory-mapped TensorDicts, are read too (docs/other-formats.md says what of them).

        Other threads see the state of before or the new one, whole. After an error the buffer is as it was: rows,
        priorities, cursor, epochs, transforms; also where a load hook, or a part of a user's own, raised it. (Rows are
        kept aside for that, more than 32 MB of them in a temporary file; more than 256 MB are not: what fails after all
        of them were verified, a disk that reads a file once and not twice, leaves the buffer empty; an error that comes
        when they are in their places leaves it with what was loaded.)

        Args:
            snapshot: which one of those that `keep_last` has kept, by its name; None: the newest.
            parts: what is loaded, of `"storage"` (the rows), `"sampler"`, `"writer"` and `"generator"`; the others stay
                as they are here. For another sampler than the saved one: `parts=("storage", "writer")`.

        Raises:
            CorruptCheckpointError: a file is not what was saved; the message names it.
            CheckpointMisfitError: the checkpoint does not fit this buffer; every difference is listed. It is a
                ValueError, too.
        """
        with self._parts.undisturbed():
            load_buffer(self._saved_form, Path(path), snapshot, parts)

    dump = save = dumps
    load = loads

    def state_dict(self) -> dict[str, Any]:
        """The whole state in memory: rows, counters, sampler, writer, transforms, generator, batch size."""
        with self._parts.held_still():
            return buffer_state(self._saved_form)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave, as `loads` does.

        Raises:
            CheckpointMisfitError: it is no such state, or does not fit this buffer; every difference is listed, and
                nothing is changed. It is a ValueError, too.
        """
        with self._parts.undisturbed():
            load_buffer_state(self._saved_form, state)
            batch_size = state.get("_batch_size")
            if batch_size is not None:
                self._batch_size = batch_size

    @property
    def _saved_form(self) -> SavedBuffer:
        """This buffer, as it is saved and loaded."""
        return self._parts.saved_form(type(self).__name__, self._batch_size)

    # ---- copies: what `pickle` and `copy` make; what is sent to a process travels by `__getstate__` ----
    def _copy_form(self) -> CopyForm:
        def parts() -> tuple[Any, tuple[Any, ...]]:
            return _copied, (type(self), self.__getstate__(), copy.deepcopy(self._saved_form.states()))

        is_pickled = not self._storage.access.table.place.opens_path()
        return CopyForm(self._parts.held_still, parts, is_pickled, check_sending=self._check_sending)

    def _check_sending(self) -> None:
        refuse_what_stays(self._sampler)
        refuse_what_stays(self._writer)

    def _complete_copy(self) -> None:
        # Steps that wait for their future are written by the process that they were given to.
        self._transform.empty()
        saved: Any = self._generator
        if saved is not None:
            saved_state = torch.frombuffer(bytearray(saved), dtype=torch.uint8)
            self._generator = Generator() if is_state(saved_state) else torch.Generator()
            set_state(self._generator, saved_state)
        self._name_limit()
        self._parts = self._join_parts()


@functools.cache
def _has_plain_extend(kind: Any) -> bool:
    definer = next(vars(parent) for parent in kind.__mro__ if "extend" in vars(parent))
    return bool(definer.get("_extends_plainly"))


def sent_to_writers(buffer: Any) -> Any:
    """What processes are sent that write into a buffer and never sample: the same one, without its sampler.

    Another library's buffer is sent as it is. None: its writer needs the storage alone.
    """
    if not isinstance(buffer, ReplayBuffer):
        return buffer
    if buffer._writer.placing is Placing.REPLACING:
        return None
    twin = object.__new__(type(buffer))
    # Whoever writes first makes the store, and makes it a queue.
    sampler = buffer._sampler if isinstance(buffer._sampler, QueueSampler) else RandomSampler()
    twin.__dict__.update(buffer.__dict__, _sampler=sampler, _prefetch=0)
    return twin


def _several_given(method: str, count: int) -> TypeError:
    """The error of `add` and `extend` for the entries of a step, one by one."""
    what = "one step" if method == "add" else "one batch of steps"
    return TypeError(
        f"{method}() takes {what}, a TensorDict or a dict, and got {count} values: "
        f'{method}({{"observation": obs, "action": action, "next": {{"observation": next_obs, "reward": reward, '
        '"done": done}}). Buffers with add(obs, next_obs, action, reward, done, infos) are in engram.compat.sb3'
    )


def _bytes_of(generator: torch.Generator | Generator | None) -> bytes | None:
    """Its state; as bytes, as a tensor made here would be gone before another process had received it."""
    state: bytes | None = None if generator is None else state_of(generator).numpy().tobytes()
    return state


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
    return has_writing_methods(part) and not isinstance(part, type)


def _with_capacity(storage: Storage | None, capacity: int | None) -> Storage:
    """The storage with the capacity that the buffer was given."""
    if storage is None:
        return ListStorage(_DEFAULT_CAPACITY if capacity is None else capacity)
    if capacity is None or storage.max_size == capacity:
        return storage
    storage.access.table.limit(capacity)
    return storage


def _checked_batch_size(batch_size: Any) -> int | None:
    return count_or_none(batch_size, "batch_size")


def _chosen_batch_size(own: int | None, batch_size: Any) -> int:
    """The batch size of a call, of a buffer that has its own or none."""
    if batch_size is None:
        raise RuntimeError("batch_size not specified: give one to sample(batch_size) or to the buffer's constructor")
    if own is not None and batch_size != own:
        warn_user(
            f"sample was called with batch_size={batch_size}, the buffer was made with batch_size={own}; "
            f"{batch_size} is used",
        )
    if type(batch_size) is int and batch_size > 0:
        return batch_size
    checked = _checked_batch_size(batch_size)
    assert checked is not None
    return checked


def shown_buffer(kind: str, shown: dict[str, Any]) -> str:
    """What `repr` of a buffer says."""
    collate_fn = shown["collate_fn"]
    shown = {**shown, "collate_fn": getattr(collate_fn, "__name__", collate_fn)}
    inner = ",\n".join(textwrap.indent(f"{k}={v}", "    ") for k, v in shown.items())
    return f"{kind}(\n{inner})"


def _paths_of(item: Any) -> list[KeyPath]:
    """The paths of an item's leaves; none where it has no keys."""
    return [path for path, _ in describe_batch(item, 0)[1]] if isinstance(item, dict | TensorDictBase) else []
