"""Numbers for trajectories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]


class TrajectoryIds:
    """Gives trajectories the numbers 0, 1, 2, ... in the order of their first steps; of equal ones, by environment.

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
        """The next step of every environment starts a trajectory."""
        self._starts_next[:] = True
        self._current[:] = 0  # a loaded state may count from lower numbers

    def number(self, done: Array) -> Array:
        """Ids, int64 `[envs, time]`, of steps whose `("next", "done")` is `done`, bool `[envs, time]`."""
        if len(done) == 1:
            return self._number_one(done[0])[None]
        ends = done.T  # time first: numbers are given in time order
        starts = np.concatenate([self._starts_next[None], ends[:-1]])
        numbers = (self.count - 1 + starts.cumsum()).reshape(starts.shape)
        # what is not a start has the number of the last one of its own environment
        numbers = np.maximum.accumulate(np.where(starts, numbers, self._current), axis=0)
        self.count += int(np.count_nonzero(starts))
        self._current, self._starts_next = numbers[-1].copy(), ends[-1].copy()
        return np.ascontiguousarray(numbers.T)

    def _number_one(self, ends: Array) -> Array:
        numbers = np.empty(len(ends), dtype=np.int64)
        numbers[0] = self.count - 1 + self._starts_next[0]
        numbers[1:] = ends[:-1]
        numbers.cumsum(out=numbers)
        self._current[0], self._starts_next[0] = numbers[-1], ends[-1]
        self.count = int(numbers[-1]) + 1
        return numbers


class FrameMarks:
    """What a collector writes beside each frame: its trajectory, and the version of the policy if that is tracked."""

    def __init__(self, envs: int, *, tracks_version: bool = False) -> None:
        self.ids = TrajectoryIds(envs)
        self.version = 0
        self._tracks_version = tracks_version

    def entries(self, done: Array, shape: torch.Size, versions: Callable[[], Array] | None = None) -> dict[str, Tensor]:
        """Entries int64 `shape` for steps whose `("next", "done")` is `done`, bool `[envs, time]`.

        `versions` gives those of the frames, int64 `[envs, time]`, where they are not all the present one.
        """
        marks = {"traj_ids": torch.from_numpy(self.ids.number(done)).reshape(shape)}
        if self._tracks_version:
            now = torch.full(shape, self.version, dtype=torch.int64)
            marks["policy_version"] = now if versions is None else torch.from_numpy(versions()).reshape(shape)
        return marks
