"""Batches that threads prepare while the caller trains."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch

import engram._native as _native
from engram._generator import Generator
from engram._system import fork_registry, notice_fork, set_state, state_of
from engram.data.replay_buffers.reading.reader import (
    BatchReader,
    DrawnEpochs,
    LoopEpochs,
    PreparedRows,
    check_epochs,
    epochs_of,
)
from engram.data.replay_buffers.samplers.draw import Draw

#: A batch that takes less is prepared by who wants it: handing it from thread to thread costs more. 0: never.
PAYS_FROM_S = 100e-6
#: The same of batches that a Python thread makes, in turns with the caller's, where that is more.
PYTHON_PAYS_FROM_S = 500e-6

# The least time of so many batches decides: what is slow about some of them, the machine or another thread, is no work.
_WATCHED = 8
# Quick batches that follow a quick one before the next is watched: a look at the clock is a tenth of some.
_UNWATCHED = 7
# After so many prepared batches their caller's time is compared with what a batch took without threads.
_COMPARED = 32
# Batches without threads after a comparison that was lost; each one lost after that doubles them, up to the most.
_PAUSE, _MOST_PAUSE = 256, 1 << 16
# No wait counts for more batches than this: a machine that is busy for a moment does not decide.
_MOST_WAIT = 4


# A batch and its info, None where it must be drawn again; and the seconds that it took.
_Result = tuple[tuple[Any, dict[str, Any]] | None, float]


class _Work(Protocol):
    """A batch on its way."""

    def result(self) -> _Result: ...

    def discard(self) -> None:
        """Nothing reads from the storage any more when this returns."""


class _InThread:
    """A batch that a Python thread makes."""

    def __init__(self, future: Future[_Result], copying: _Copying | None = None) -> None:
        self._future, self._copying = future, copying
        self.result = future.result

    def discard(self) -> None:
        if self._copying is not None:
            self._copying.discard()
        if not self._future.cancel():
            self._future.exception()  # wait: it reads from the storage


class _Copying:
    """A batch whose rows are copied without the GIL, and wrapped by who wants it."""

    def __init__(self, reader: BatchReader, prepared: PreparedRows) -> None:
        self._reader, self._prepared = reader, prepared

    def result(self) -> _Result:
        rows = self._prepared.rows
        batch = rows.take()
        start = time.perf_counter()
        if batch is not None:
            batch = self._reader.finish(batch, self._prepared)
        return (None if batch is None else (batch, {})), rows.seconds + time.perf_counter() - start

    def discard(self) -> None:
        self._prepared.rows.cancel()


# Where a generator stands. Of ours its numbers: making and ending a tensor gives the GIL away.
_Position = torch.Tensor | tuple[int, int]


def _position(generator: torch.Generator | Generator) -> _Position:
    return (generator.key, generator.counter) if isinstance(generator, Generator) else state_of(generator)


def _put_back(generator: torch.Generator | Generator, position: _Position) -> None:
    if isinstance(position, torch.Tensor):
        set_state(generator, position)
    else:
        assert isinstance(generator, Generator)
        generator.key, generator.counter = position


class _Prepared(NamedTuple):
    work: _Work
    has_info: bool
    cursor: Any  # the sampler's, before this draw
    generators: list[_Position]  # theirs then
    incarnations: list[int]  # of the storages then
    draws: list[Draw]  # none where one native call has drawn: it leaves the last of an epoch to the sampler
    epochs: DrawnEpochs  # that it is of


class Prefetcher:
    """Keeps up to `depth` batches ready, where preparing one takes long enough for that to pay.

    Draws are made in order, by the caller's thread, when a batch is scheduled; threads then read, collate and
    transform. So the batches are those that one would get without prefetching, which is what happens while the last
    batches took less than `PAYS_FROM_S` each, and for a while after callers have waited longer for prepared ones than
    batches took without threads. Where a batch is made in one native call, its rows are copied by threads that never
    take the GIL; who wants it before it is ready helps them.

    Args:
        generators: those that draws change, but for torch's global one.
    """

    def __init__(self, reader: BatchReader, depth: int, generators: Sequence[torch.Generator | Generator]) -> None:
        self._reader = reader
        self._depth = depth
        self._generators = list(generators)
        self._queue: deque[_Prepared] = deque()
        self._batch_size: int | None = None
        self._seconds: deque[float] = deque(maxlen=_WATCHED)  # that the last batches took
        self._pays = PAYS_FROM_S <= 0
        self._ends = False  # what is prepared is still handed out, but nothing more is prepared
        self._is_closed = False
        self._unwatched = 0  # of the next batches
        self._alone_s = 0.0  # that a batch took before threads prepared them
        self._waited: list[float] = []  # seconds that prepared batches cost their callers since the last comparison
        self._pause = _PAUSE
        self._start_threads()
        # Taken before the reader's lock, and alone while a batch is waited for: its thread may have to draw again.
        self._lock = threading.RLock()
        _live.add(self)

    def sample(self, n: int, details: bool) -> tuple[Any, dict[str, Any]]:
        """The next batch, and its info; where no `details` are wanted that may be empty.

        Raises: what reading it raised.
        """
        if self._pays:
            prepared = self._next(n, details)
            if prepared is not None:
                return prepared[:2]
        elif self._unwatched > 0:
            self._unwatched -= 1
            return self._reader.sample(n, True) if details else (self._reader.batch(n), {})
        start = time.perf_counter()
        batch_and_info = self._reader.sample(n, True) if details else (self._reader.batch(n), {})
        self._watch(n, details, time.perf_counter() - start)
        return batch_and_info

    def next(self, n: int, generations: bool, epochs: LoopEpochs = None) -> tuple[Any, bool, LoopEpochs]:
        """A loop's next batch, as `BatchReader.next`. Raises as that and as `sample`."""
        if self._pays:
            prepared = self._next(n, generations, epochs)
            if prepared is not None:
                return prepared[0], prepared[2], {**(epochs or {}), **prepared[3]}
        elif self._unwatched > 0:
            self._unwatched -= 1
            return self._reader.next(n, generations, epochs)
        start = time.perf_counter()
        batch_and_last = self._reader.next(n, generations, epochs)
        self._watch(n, generations, time.perf_counter() - start)
        return batch_and_last

    def _watch(self, n: int, details: bool, seconds: float) -> None:
        """Notes what a batch of n took; decides whether the next ones are prepared ahead."""
        with self._lock:
            if self._is_closed:
                return
            if n != self._batch_size:
                self._batch_size, self._pause = n, _PAUSE
                self._seconds.clear()
            self._seconds.append(seconds)
            if len(self._seconds) < _WATCHED:
                return
            least = self._least_s(details)
            if min(self._seconds) < least:
                self._unwatched = 0 if seconds >= least else _UNWATCHED
                self._ends, self._pays = True, bool(self._queue)
            elif not self._pays:
                self._alone_s, self._ends, self._pays = statistics.median(self._seconds), False, True
                self._waited.clear()

    def _least_s(self, details: bool) -> float:
        """Seconds that a batch must take for threads to pay."""
        if PAYS_FROM_S <= 0 or (not details and self._reader.copies_only):
            return PAYS_FROM_S
        return max(PAYS_FROM_S, PYTHON_PAYS_FROM_S)

    def _still_pays(self, details: bool) -> bool:
        """Whether more batches are to be prepared."""
        if PAYS_FROM_S <= 0:
            return True
        if len(self._seconds) == _WATCHED and min(self._seconds) < self._least_s(details):
            return False
        if len(self._waited) < _COMPARED:
            return True
        waited = statistics.mean(min(seconds, _MOST_WAIT * self._alone_s) for seconds in self._waited)
        self._waited.clear()
        if waited < self._alone_s:
            self._pause = _PAUSE
            return True
        self._seconds.clear()
        self._unwatched, self._pause = self._pause, min(2 * self._pause, _MOST_PAUSE)
        return False

    def _next(
        self, n: int, details: bool, epochs: LoopEpochs = None
    ) -> tuple[Any, dict[str, Any], bool, DrawnEpochs] | None:
        """The next batch, its info, whether it is the last of its epoch, and its epochs; None: the caller makes it.

        EpochOverError: as `BatchReader.next`; it stays ready.
        """
        notice_fork()  # the threads are the parent's
        with self._lock:
            if not self._pays:  # another thread has found out meanwhile
                return None
            start = time.perf_counter()
            if n != self._batch_size or (details and self._queue and not self._queue[0].has_info):
                self.drop()
                if n != self._batch_size:
                    self._waited.clear()  # a batch of another size takes another time
                self._batch_size = n
                self._seconds.clear()
            if self._queue and self._reader.are_set_anew(self._queue[0].epochs):
                self.drop()  # of members that were not, the samplers are put back
            if not self._queue:
                self._schedule(details)
            check_epochs(epochs, self._queue[0].epochs)
            prepared = self._queue.popleft()
            try:
                batch_and_info, seconds = prepared.work.result()
            except BaseException as error:
                if isinstance(error, MemoryError):
                    self._queue.appendleft(prepared)  # it is drawn again, too: each row comes once an epoch
                self.drop()
                raise
            if prepared.incarnations != self._reader.incarnations():  # since they were read, too, by another buffer
                batch_and_info = None
            if batch_and_info is None:  # its rows were replaced by others meanwhile
                self._queue.appendleft(prepared)
                self.drop()
                return None
            self._seconds.append(seconds)
            self._ends = self._ends or not self._still_pays(details)
            if self._ends:
                self._pays = bool(self._queue)  # what is prepared comes first
            else:
                self._fill(details)
            self._waited.append(time.perf_counter() - start)
        batch, info = batch_and_info
        return batch, info, any(draw.last for draw in prepared.draws), prepared.epochs

    def _read(self, draws: list[Draw]) -> _Result:
        """The batch of what was drawn, as the reader gives it, and the seconds that it took; in a thread."""
        start = time.perf_counter()
        batch_and_info = self._reader.read(draws, generations=True)
        return batch_and_info, time.perf_counter() - start

    def _fill(self, details: bool) -> None:
        while len(self._queue) < self._depth:
            try:
                self._schedule(details)
            except Exception:
                # Nothing to draw any more: the caller gets the error when it comes for this batch.
                return

    def _schedule(self, details: bool) -> None:
        assert self._batch_size is not None
        reader = self._reader
        with reader.lock:
            cursor, incarnations = reader.cursor(), reader.incarnations()
            generators = [_position(generator) for generator in self._generators]
            try:
                prepared = None if details else reader.prepare(self._batch_size, self._copy_threads)
                if prepared is None:
                    if not details:
                        self._rewind(cursor, generators)
                    draws = reader.draw(self._batch_size)
                epochs = reader.epochs() if prepared is not None else epochs_of(draws)
            except BaseException:
                self._rewind(cursor, generators)
                raise
        work: _Work
        if prepared is None:
            work = _InThread(self._threads.submit(self._read, draws))
        else:
            work = copying = _Copying(reader, prepared)
            if prepared.transforms:
                work = _InThread(self._threads.submit(copying.result), copying)
        drawn = [] if prepared is not None else draws
        self._queue.append(_Prepared(work, prepared is None, cursor, generators, incarnations, drawn, epochs))

    def drop(self) -> None:
        """Forgets what was prepared; the sampler is where it was before."""
        notice_fork()
        with self._lock:
            if not self._queue:
                return
            oldest = self._queue[0]
            for prepared in self._queue:
                prepared.work.discard()
            self._queue.clear()
            with self._reader.lock:
                self._rewind(oldest.cursor, oldest.generators)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is prepared inside the block, and what was prepared before is forgotten."""
        with self._lock:
            self.drop()
            yield

    def _rewind(self, cursor: Any, generators: list[_Position]) -> None:
        self._reader.put_back(cursor)
        for generator, position in zip(self._generators, generators, strict=True):
            _put_back(generator, position)

    def close(self) -> None:
        """Ends the threads; who has waited meanwhile makes a batch without them."""
        notice_fork()
        with self._lock:
            self.drop()
            self._is_closed, self._pays = True, False
        self._threads.shutdown(wait=True)
        self._copy_threads.close()

    def _start_threads(self) -> None:
        # Both begin none before there is work for it.
        self._threads = ThreadPoolExecutor(self._depth, thread_name_prefix="engram-prefetch")
        self._copy_threads = _native.CopyThreads(self._depth)

    def after_fork(self) -> None:
        """In a child: the threads are the parent's, and a lock may be held by one of them."""
        self._lock = threading.RLock()
        self._start_threads()
        if self._queue:
            self._rewind(self._queue[0].cursor, self._queue[0].generators)
        self._queue.clear()


# After that of the samplers, which are imported here.
_live: weakref.WeakSet[Prefetcher] = fork_registry(Prefetcher.after_fork)
