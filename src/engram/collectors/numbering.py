"""Trajectory ids that are unique over the workers of a collector."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from engram.store.files import share_fd

IDS = ("collector", "traj_ids")
Worker = int


class SharedCount:
    """A number that several processes count up; a process that is killed while it does blocks nobody.

    >>> count = SharedCount()
    >>> count.take(3), count.take(1)
    (0, 3)
    """

    def __init__(self, first: int = 0) -> None:
        self._fd = os.memfd_create("engram-count", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, 8)
        self._map()
        self._value[0] = first

    def _map(self) -> None:
        self._value: Any = np.frombuffer(mmap.mmap(self._fd, 8), np.int64)

    def take(self, n: int) -> int:
        """Counts up by n; the first of the n numbers that are now the caller's."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)  # the kernel gives it back when a holder dies
        try:
            first = int(self._value[0])
            self._value[0] = first + n
            return first
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    @property
    def value(self) -> int:
        """The next number."""
        return int(self._value[0])

    def __getstate__(self) -> dict[str, Any]:
        return {"descriptor": share_fd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._fd = state["descriptor"].detach()
        self._map()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)


class Numbering:
    """Gives the trajectories of several workers, each of which counts its own, numbers in the order of their steps.

    `take(n)` reserves n numbers and returns the first. Batches that are numbered together began together: of their new
    trajectories the earlier gets the smaller number; of equal ones that of the worker, then environment, before.
    """

    def __init__(self, take: Callable[[int], int]) -> None:
        self._take = take
        self._known: dict[Worker, dict[int, int]] = {}

    def forget(self) -> None:
        """The workers' next trajectories are new ones, whatever numbers they have."""
        self._known.clear()

    def number(self, batches: Sequence[tuple[Worker, TensorDictBase]]) -> None:
        """Replaces the ids, int64 `[*, time]`, of each worker's batch, in the batch."""
        found = [(worker, batch, *_seen(batch)) for worker, batch in batches]
        new = [
            (time, place, int(own), worker)
            for place, (worker, _, ids, times, _) in enumerate(found)
            for own, time in zip(ids, times, strict=True)
            if int(own) not in self._known.get(worker, {})
        ]
        first = self._take(len(new))
        given = {(worker, own): first + k for k, (_, _, own, worker) in enumerate(sorted(new))}
        for worker, batch, ids, _, inverse in found:
            known = self._known.get(worker, {})
            # what is not in this batch has ended: an environment that goes on is in every batch
            self._known[worker] = {int(i): given.get((worker, int(i)), known.get(int(i), -1)) for i in ids}
            numbers = np.array([self._known[worker][int(i)] for i in ids], np.int64)
            batch.set(IDS, torch.from_numpy(numbers[inverse.reshape(-1)]).reshape(batch.shape))


def _seen(batch: TensorDictBase) -> tuple[Any, Any, Any]:
    ids, first, inverse = np.unique(batch.get(IDS).cpu().numpy(), return_index=True, return_inverse=True)
    return ids, first % batch.shape[-1], inverse
