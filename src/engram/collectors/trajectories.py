"""Numbers for trajectories."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class TrajectoryIds:
    """Gives trajectories the numbers 0, 1, 2, ... in the order of their first steps; of equal ones, by environment.

    >>> ids = TrajectoryIds(2)
    >>> done = torch.tensor([[False, True, False], [False, False, True]])
    >>> ids.number(done)
    tensor([[0, 0, 2],
            [1, 1, 1]])
    >>> ids.number(torch.zeros(2, 1, dtype=torch.bool))
    tensor([[2],
            [3]])
    """

    def __init__(self, envs: int) -> None:
        self.count = 0
        self._current = np.zeros(envs, dtype=np.int64)
        self._starts_next = np.ones(envs, dtype=np.bool_)

    def restart(self) -> None:
        """The next step of every environment starts a trajectory."""
        self._starts_next[:] = True

    def number(self, done: Tensor) -> Tensor:
        """Ids, int64 `[envs, time]`, of steps whose `("next", "done")` is `done`, bool `[envs, time]`."""
        ends = done.numpy().T  # time first: numbers are given in time order
        starts = np.concatenate([self._starts_next[None], ends[:-1]])
        numbers = (self.count - 1 + starts.cumsum()).reshape(starts.shape)
        if starts.shape[1] > 1:  # what is not a start has the number of the last one of its own environment
            numbers = np.maximum.accumulate(np.where(starts, numbers, self._current), axis=0)
        self.count += int(np.count_nonzero(starts))
        self._current, self._starts_next = numbers[-1].copy(), ends[-1].copy()
        return torch.from_numpy(np.ascontiguousarray(numbers.T))
