"""Publishes what a buffer draws beside its store, for `engram top`: `ReplayBuffer(publish_stats=True)`.

A thread looks once a second; nothing is counted in `sample` for it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engram.data.replay_buffers.samplers.base import Sampler
from engram.data.replay_buffers.storages.base import Storage
from engram.data.replay_buffers.storages.memmap import LazyMemmapStorage
from engram.store.flow import rate_figures
from engram.store.published import Histogram, LearnerFile, LearnerStats

_SECONDS = 1.0  # between two blocks
_MOST_LOOKED_AT = 1 << 12  # rows, evenly spread over all that are stored: what a block says of chances is of these
_BINS = 24
_DECILES = np.linspace(0, 1, 11).clip(1e-9, 1 - 1e-9)


class DrawCounts(NamedTuple):
    """A buffer's storage and sampler, how many batches it has handed out, and how many rows one has (None: any)."""

    storage: Storage
    sampler: Sampler
    batches: int
    batch_size: int | None


class StatsPublisher:
    """A thread that publishes the statistics of a buffer's draws once a second, until the buffer is gone.

    Args:
        owner: the buffer, which is only referenced weakly.
        storage: its storage.
        look: gives, while the buffer lives, what gives its counts.

    Raises:
        ValueError: the buffer's storage is no mapped file in a folder.
    """

    def __init__(self, owner: object, storage: Storage, look: Callable[[], Callable[[], DrawCounts] | None]) -> None:
        if not isinstance(storage, LazyMemmapStorage) or storage.scratch_dir is None:
            raise ValueError(
                "publish_stats=True writes a file beside the store, so it needs LazyMemmapStorage(..., scratch_dir=...)"
            )
        self._file = LearnerFile(storage.scratch_dir)
        self._stop = threading.Event()
        self._look = look
        self._begun = _Totals(time.monotonic(), 0, storage.write_count)
        self._last = self._begun
        thread = threading.Thread(target=self._run, name="engram publish_stats", daemon=True)
        #: Ends the thread and removes the file: when the buffer is collected, shut down, or the process exits.
        self.close = weakref.finalize(owner, _end, self._stop, self._file, thread)
        thread.start()

    def _run(self) -> None:
        folder: Path = self._file.path.parent
        with contextlib.suppress(OSError):
            self._file.remove_forgotten()
        while not self._stop.wait(_SECONDS):
            look = self._look()
            if look is None:
                return
            stats = self._stats(look())
            del look  # the buffer may be collected while this waits
            if folder.is_dir():  # the first write makes it
                with contextlib.suppress(OSError):  # a full disk is no reason to end the training
                    self._file.write(stats)

    def _stats(self, counts: DrawCounts) -> LearnerStats:
        storage, sampler, batches, batch_size = counts
        written = storage.write_count
        now = _Totals(time.monotonic(), batches, written)
        last, self._last = self._last, now
        rate = ratio = None
        if batch_size is not None:
            rate = batch_size * (now.batches - last.batches) / max(now.at - last.at, 1e-9)
            steps = now.written - self._begun.written
            ratio = batch_size * batches / steps if steps > 0 else None
        if (figures := rate_figures(storage.lanes.store)) is not None:
            ratio = figures.samples_per_insert  # of all who sample, since the counts began
        ages, effective, priorities = draw_chances(storage, sampler)
        return LearnerStats(
            os.getpid(), time.time(), type(sampler).__name__, batches, batch_size, rate, ratio, ages, effective,
            len(storage), priorities,
        )  # fmt: skip


class _Totals:
    """Batches handed out and steps written, at a time."""

    def __init__(self, at: float, batches: int, written: int) -> None:
        self.at, self.batches, self.written = at, batches, written


def _end(stop: threading.Event, file: LearnerFile, thread: threading.Thread) -> None:
    stop.set()
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(5 * _SECONDS)
    file.remove()


def draw_chances(storage: Storage, sampler: Sampler) -> tuple[list[float] | None, float | None, Histogram | None]:
    """Deciles of the age of what a sampler draws now, the effective number of rows, a histogram of their weights.

    Of rows evenly spread over the stored ones, where there are many. None where nothing is stored, or the sampler does
    not say how likely it draws which row; no histogram where all are equally likely.
    """
    slots, ages = _spread(storage)
    weights = None
    if len(slots):
        given = sampler.draw_weights(storage, torch.from_numpy(slots))
        weights = None if given is None else given.numpy()
    if weights is None or weights.sum() <= 0:
        return None, None, None
    order = ages.argsort()
    reached = weights[order].cumsum()
    deciles = ages[order][np.searchsorted(reached, reached[-1] * _DECILES)].tolist()
    share = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    histogram = None
    if weights.max() > weights.min():
        counts, edges = np.histogram(weights, _BINS, (0.0, weights.max()))
        histogram = Histogram(edges.tolist(), counts.tolist())
    return deciles, float(share) * len(storage), histogram


def _spread(storage: Storage) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Slots of stored rows, evenly spread over lanes and environments, and how many steps ago each was written."""
    lanes = storage.lanes
    slots, ages = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for lane, state in enumerate(lanes.counters()):
        first, stop, envs = state["first"], state["published"], lanes.envs
        n = (stop - first) * envs
        most = max(1, _MOST_LOOKED_AT // lanes.store.lanes)
        which = np.arange(n) if n <= most else np.linspace(0, n - 1, most).astype(np.int64)
        steps = first + which // envs
        slots.append((lane * lanes.store.lane_capacity + steps % lanes.store.lane_capacity) * envs + which % envs)
        ages.append(stop - 1 - steps)
    return np.concatenate(slots), np.concatenate(ages)
