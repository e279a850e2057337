"""Batches that threads prepare while the caller trains."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch

from engram._system import fork_registry, set_state, state_of
from engram.data.replay_buffers.samplers.base import Sampler


class Reader(Protocol):
    """What batches are prepared with: a `BatchReader` or an `EnsembleReader`."""

    sampler: Sampler

    @property
    def lock(self) -> Any: ...

    def draw(self, n: int) -> Any: ...

    def read(self, draw: Any, generations: bool) -> tuple[Any, dict[str, Any]] | None: ...


class _Prepared(NamedTuple):
    future: Future[tuple[Any, dict[str, Any]] | None]
    cursor: Any  # the sampler's, before this draw
    generators: list[torch.Tensor]  # their states then
    last: bool


class Prefetcher:
    """Keeps up to `depth` batches ready.

    Draws are made in order, by the caller's thread, when a batch is scheduled; threads then read, collate and
    transform. So the batches are those that one would get without prefetching.

    Args:
        generators: those that draws change, but for torch's global one.
    """

    def __init__(self, reader: Reader, depth: int, generators: Sequence[torch.Generator]) -> None:
        self._reader = reader
        self._depth = depth
        self._generators = list(generators)
        self._queue: deque[_Prepared] = deque()
        self._batch_size: int | None = None
        self._threads = ThreadPoolExecutor(depth, thread_name_prefix="engram-prefetch")
        # Taken before the reader's lock, and alone while a batch is waited for: its thread may have to draw again.
        self._lock = threading.RLock()
        _live.add(self)

    def next(self, n: int) -> tuple[Any, dict[str, Any], bool]:
        """The next batch, its info, and whether it is the last of its epoch.

        Raises: what reading it raised.
        """
        with self._lock:
            if n != self._batch_size:
                self.drop()
                self._batch_size = n
            while True:
                if not self._queue:
                    self._schedule()
                prepared = self._queue.popleft()
                try:
                    batch_and_info = prepared.future.result()
                except BaseException as error:
                    if isinstance(error, MemoryError):
                        self._queue.appendleft(prepared)  # it is drawn again, too: each row comes once an epoch
                    self.drop()
                    raise
                if batch_and_info is not None:
                    break
                self.drop()  # somebody else has replaced all rows of the storage
            self._fill()
        batch, info = batch_and_info
        return batch, info, prepared.last

    def _fill(self) -> None:
        while len(self._queue) < self._depth:
            try:
                self._schedule()
            except Exception:
                # Nothing to draw any more: the caller gets the error when it comes for this batch.
                return

    def _schedule(self) -> None:
        assert self._batch_size is not None
        reader = self._reader
        with reader.lock:
            cursor = reader.sampler._get_cursor()
            generators = [state_of(generator) for generator in self._generators]
            try:
                draw = reader.draw(self._batch_size)
            except BaseException:
                self._rewind(cursor, generators)
                raise
        future = self._threads.submit(reader.read, draw, generations=True)
        self._queue.append(_Prepared(future, cursor, generators, draw.last))

    def drop(self) -> None:
        """Forgets what was prepared; the sampler is where it was before."""
        with self._lock:
            if not self._queue:
                return
            oldest = self._queue[0]
            for prepared in self._queue:
                if not prepared.future.cancel():
                    prepared.future.exception()  # wait: it reads from the storage
            self._queue.clear()
            with self._reader.lock:
                self._rewind(oldest.cursor, oldest.generators)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is prepared inside the block, and what was prepared before is forgotten."""
        with self._lock:
            self.drop()
            yield

    def _rewind(self, cursor: Any, generators: list[torch.Tensor]) -> None:
        self._reader.sampler._set_cursor(cursor)
        for generator, state in zip(self._generators, generators, strict=True):
            set_state(generator, state)

    def close(self) -> None:
        """Ends the threads."""
        self.drop()
        self._threads.shutdown(wait=True)

    def after_fork(self) -> None:
        """In a child: the threads are the parent's, and a lock may be held by one of them."""
        self._lock = threading.RLock()
        self._threads = ThreadPoolExecutor(self._depth, thread_name_prefix="engram-prefetch")
        if self._queue:
            self._rewind(self._queue[0].cursor, self._queue[0].generators)
        self._queue.clear()


# After that of the samplers, which are imported here.
_live: weakref.WeakSet[Prefetcher] = fork_registry(Prefetcher.after_fork)
