"""Trajectories in collected batches: their ids, in one process and over several, and whole trajectories."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.store.files import share_fd

Array = np.ndarray[Any, Any]
IDS = ("collector", "traj_ids")
Worker = int


class TrajectoryIds:
    """Gives trajectories the ids 0, 1, 2, ... in the order of their first steps; of equal ones, by environment.

    >>> ids = TrajectoryIds(2)
    >>> ids.number(np.array([[False, True, False], [False, False, True]])).tolist()
    [[0, 0, 2], [1, 1, 1]]
    >>> ids.number(np.zeros((2, 1), dtype=np.bool_)).tolist()
    [[2], [3]]
    """

    def __init__(self, envs: int) -> None:
        self.count = 0
        self._current = np.zeros(envs, dtype=np.int64)
        self._starts_next = np.ones(envs, dtype=np.bool_)

    def restart(self) -> None:
        """Starts a trajectory with the next step of every environment."""
        self._starts_next[:] = True
        self._current[:] = 0  # a loaded state may count from lower ids

    def number(self, done: Array) -> Array:
        """The ids, int64 `[envs, time]`, of steps whose `("next", "done")` is `done`, bool `[envs, time]`."""
        if len(done) == 1:
            return self._number_one(done[0])[None]
        ends = done.T  # time first: ids are given in time order
        starts = np.concatenate([self._starts_next[None], ends[:-1]])
        ids = (self.count - 1 + starts.cumsum()).reshape(starts.shape)
        # a step that is not a start has the id of the last start of its own environment
        ids = np.maximum.accumulate(np.where(starts, ids, self._current), axis=0)
        self.count += int(np.count_nonzero(starts))
        self._current, self._starts_next = ids[-1].copy(), ends[-1].copy()
        return np.ascontiguousarray(ids.T)

    def _number_one(self, ends: Array) -> Array:
        ids = np.empty(len(ends), dtype=np.int64)
        ids[0] = self.count - 1 + self._starts_next[0]
        ids[1:] = ends[:-1]
        ids.cumsum(out=ids)
        self._current[0], self._starts_next[0] = ids[-1], ends[-1]
        self.count = int(ids[-1]) + 1
        return ids


class StepTags:
    """The entries under `"collector"` of each step: its trajectory, and the policy's version where that is tracked."""

    def __init__(self, envs: int, *, tracks_version: bool = False) -> None:
        self.ids = TrajectoryIds(envs)
        self.version = 0
        self._tracks_version = tracks_version

    def tag(self, done: Array, shape: torch.Size, versions: Callable[[], Array] | None = None) -> dict[str, Tensor]:
        """Entries int64 `shape` for steps whose `("next", "done")` is `done`, bool `[envs, time]`.

        `versions` gives the versions of the steps, int64 `[envs, time]`, where they are not all the present one.
        """
        tags = {"traj_ids": torch.from_numpy(self.ids.number(done)).reshape(shape)}
        if self._tracks_version:
            now = torch.full(shape, self.version, dtype=torch.int64)
            tags["policy_version"] = now if versions is None else torch.from_numpy(versions()).reshape(shape)
        return tags


class SharedCounter:
    """A number that several processes count up; a process that is killed while it does so blocks no other.

    >>> counter = SharedCounter()
    >>> counter.take(3), counter.take(1)
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
        """Counts up by n, and returns the first of the n numbers that are now the caller's."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)  # the kernel releases it when its holder dies
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


class GlobalTrajectoryIds:
    """Gives the trajectories of several workers, each of which counts its own, ids in the order of their first steps.

    `take(n)` reserves n ids and returns the first. Batches that are numbered together began together: of their new
    trajectories the earlier gets the smaller id; of equal ones that of the worker, then environment, before.
    """

    def __init__(self, take: Callable[[int], int]) -> None:
        self._take = take
        self._global_ids: dict[Worker, dict[int, int]] = {}  # by the worker's own id

    def forget(self) -> None:
        """Forgets the workers' ids: their next trajectories are new ones."""
        self._global_ids.clear()

    def number(self, batches: Sequence[tuple[Worker, TensorDictBase]]) -> None:
        """Replaces the ids, int64 `[*, time]`, of each worker's batch, in the batch."""
        seen = [(worker, batch, *_first_steps(batch)) for worker, batch in batches]
        new = [
            (time, place, int(own), worker)
            for place, (worker, _, ids, times, _) in enumerate(seen)
            for own, time in zip(ids, times, strict=True)
            if int(own) not in self._global_ids.get(worker, {})
        ]
        first = self._take(len(new))
        reserved = {(worker, own): first + k for k, (_, _, own, worker) in enumerate(sorted(new))}
        for worker, batch, ids, _, inverse in seen:
            before = self._global_ids.get(worker, {})
            # a trajectory that is not in this batch has ended: an environment that goes on is in every batch
            self._global_ids[worker] = {int(i): reserved.get((worker, int(i)), before.get(int(i), -1)) for i in ids}
            replaced = np.array([self._global_ids[worker][int(i)] for i in ids], np.int64)
            batch.set(IDS, torch.from_numpy(replaced[inverse.reshape(-1)]).reshape(batch.shape))


def _first_steps(batch: TensorDictBase) -> tuple[Any, Any, Any]:
    """The ids in a batch, the time of the first step of each, and which of the ids each step has."""
    ids, first, inverse = np.unique(batch.get(IDS).cpu().numpy(), return_index=True, return_inverse=True)
    return ids, first % batch.shape[-1], inverse


class TrajectoryAssembler:
    """Takes batches `[*, time]` with trajectory ids, and gives whole trajectories in the order in which they ended.

    Of those that ended at one step, the first environment's comes first.

    >>> from tensordict import TensorDict
    >>> def batch(ids, done):
    ...     tags = {"collector": {"traj_ids": torch.tensor(ids)}, "next": {"done": torch.tensor(done).unsqueeze(-1)}}
    ...     return TensorDict(tags, batch_size=[2, 2])
    >>> whole = TrajectoryAssembler()
    >>> whole.add(batch([[0, 0], [1, 2]], [[False, False], [True, False]]))
    >>> whole.add(batch([[0, 3], [2, 2]], [[True, False], [False, True]]))
    >>> whole.count, whole.take(2)["collector", "traj_ids"].tolist()
    (3, [1, 0, 0, 0])
    """

    def __init__(self) -> None:
        self._steps: TensorDictBase | None = None
        self._ids = np.zeros(0, np.int64)
        self._ended: deque[int] = deque()
        self._handed_out: list[int] = []  # dropped at the next batch: to move the rest for each would cost more
        self._sort()

    @property
    def count(self) -> int:
        """The number of trajectories that have ended and were not handed out."""
        return len(self._ended)

    def restart(self) -> None:
        """Drops the trajectories that have not ended."""
        self._select(np.isin(self._ids, list(self._ended)))

    def clear(self) -> None:
        """Drops everything."""
        self._ended.clear()
        self.restart()

    def add(self, batch: TensorDictBase) -> None:
        """Adds a batch."""
        if self._handed_out:
            self._select(~np.isin(self._ids, self._handed_out))
        ids = batch.get(("collector", "traj_ids")).reshape(-1, batch.shape[-1]).cpu().numpy()
        done = batch.get(("next", "done")).reshape(*ids.shape, -1).any(-1).cpu().numpy()
        steps = batch.reshape(-1)
        self._steps = steps if self._steps is None else torch.cat([self._steps, steps])
        self._ids = np.concatenate([self._ids, ids.reshape(-1)])
        self._ended.extend(ids.T[done.T].tolist())
        self._sort()

    def take(self, count: int) -> TensorDictBase:
        """The next `count` trajectories, one after the other, `[steps]`. Raises ValueError where fewer have ended."""
        if count > self.count or self._steps is None:
            raise ValueError(f"{count} trajectories were asked for, and {self.count} have ended")
        chosen = [self._ended.popleft() for _ in range(count)]
        self._handed_out.extend(chosen)
        starts, stops = self._sorted_ids.searchsorted(chosen), self._sorted_ids.searchsorted(chosen, "right")
        index = np.concatenate([self._order[a:b] for a, b in zip(starts, stops, strict=True)])
        return self._steps[torch.from_numpy(index)]

    def _select(self, mask: Array) -> None:
        if self._steps is not None:
            self._steps = self._steps[torch.from_numpy(mask)] if mask.any() else None
        self._ids = self._ids[mask]
        self._handed_out.clear()
        self._sort()

    def _sort(self) -> None:
        # The steps of one trajectory come in the order of time: one environment made them.
        self._order = self._ids.argsort(kind="stable")
        self._sorted_ids = self._ids[self._order]
