"""Numbers for trajectories."""

from __future__ import annotations

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
        self._current = torch.zeros(envs, dtype=torch.int64)
        self._starts_next = torch.ones(envs, dtype=torch.bool)

    def restart(self) -> None:
        """The next step of every environment starts a trajectory."""
        self._starts_next.fill_(True)

    def number(self, done: Tensor) -> Tensor:
        """Ids, int64 `[envs, time]`, of steps whose `("next", "done")` is `done`, bool `[envs, time]`."""
        starts = torch.cat([self._starts_next.unsqueeze(1), done[:, :-1]], 1)
        in_time_order = starts.t().reshape(-1).cumsum(0).reshape(done.shape[1], -1).t() + self.count - 1
        before = self._current.unsqueeze(1).expand_as(done)
        ids = torch.where(starts, in_time_order, before).cummax(1).values  # later trajectories have higher numbers
        self.count += int(starts.sum())
        self._current, self._starts_next = ids[:, -1].clone(), done[:, -1].clone()
        return ids
