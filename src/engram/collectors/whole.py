"""Whole trajectories out of batches that cut them."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase


class WholeTrajectories:
    """Takes batches `[*, time]` with trajectory ids, and gives whole trajectories in the order in which they ended.

    Of those that ended at one step, the first environment's comes first.

    >>> from tensordict import TensorDict
    >>> def batch(ids, done):
    ...     marks = {"collector": {"traj_ids": torch.tensor(ids)}, "next": {"done": torch.tensor(done).unsqueeze(-1)}}
    ...     return TensorDict(marks, batch_size=[2, 2])
    >>> whole = WholeTrajectories()
    >>> whole.add(batch([[0, 0], [1, 2]], [[False, False], [True, False]]))
    >>> whole.add(batch([[0, 3], [2, 2]], [[True, False], [False, True]]))
    >>> whole.count, whole.take(2)["collector", "traj_ids"].tolist()
    (3, [1, 0, 0, 0])
    """

    def __init__(self) -> None:
        self._steps: TensorDictBase | None = None
        self._ids = np.zeros(0, np.int64)
        self._ended: deque[int] = deque()
        self._taken: list[int] = []  # dropped at the next batch: to move the rest for each would cost more
        self._sort()

    @property
    def count(self) -> int:
        """How many have ended and wait."""
        return len(self._ended)

    def restart(self) -> None:
        """Those that have not ended never will: they are dropped."""
        self._keep(np.isin(self._ids, list(self._ended)))

    def clear(self) -> None:
        """Drops everything."""
        self._ended.clear()
        self.restart()

    def add(self, batch: TensorDictBase) -> None:
        """Takes in a batch."""
        if self._taken:
            self._keep(~np.isin(self._ids, self._taken))
        ids = batch.get(("collector", "traj_ids")).reshape(-1, batch.shape[-1]).cpu().numpy()
        done = batch.get(("next", "done")).reshape(*ids.shape, -1).any(-1).cpu().numpy()
        steps = batch.reshape(-1)
        self._steps = steps if self._steps is None else torch.cat([self._steps, steps])
        self._ids = np.concatenate([self._ids, ids.reshape(-1)])
        self._ended.extend(ids.T[done.T].tolist())
        self._sort()

    def take(self, count: int) -> TensorDictBase:
        """The next `count`, one after the other, `[steps]`. Raises ValueError where so many have not ended."""
        if count > self.count or self._steps is None:
            raise ValueError(f"{count} trajectories were asked for, and {self.count} have ended")
        chosen = [self._ended.popleft() for _ in range(count)]
        self._taken.extend(chosen)
        starts, stops = self._sorted.searchsorted(chosen), self._sorted.searchsorted(chosen, "right")
        index = np.concatenate([self._order[a:b] for a, b in zip(starts, stops, strict=True)])
        return self._steps[torch.from_numpy(index)]

    def _keep(self, mask: np.ndarray[Any, Any]) -> None:
        if self._steps is not None:
            self._steps = self._steps[torch.from_numpy(mask)] if mask.any() else None
        self._ids = self._ids[mask]
        self._taken.clear()
        self._sort()

    def _sort(self) -> None:
        # The steps of one trajectory come in the order of time: one environment made them.
        self._order = self._ids.argsort(kind="stable")
        self._sorted = self._ids[self._order]
