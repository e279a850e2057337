"""What some transforms of an environment do, done to whole batches that were collected without them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.pytree import Key
from engram.transforms.trajectory import InitTracker, RewardSum, StepCounter, as_sum_dtype
from engram.transforms.values import RewardScaling


class Afterwards(Protocol):
    """One transform. `writes` are the root entries that it makes or changes, `limit` the steps after which it
    truncates."""

    @property
    def writes(self) -> tuple[Key, ...]: ...

    @property
    def limit(self) -> int | None: ...

    def apply(self, batch: TensorDictBase, starts: Tensor) -> None:
        """Changes a batch `[*batch, T]` in TED, in place, as the transform would have done step by step.

        `starts` bool `[N, T]` says which frames follow a reset. It goes on where the last batch ended.
        """


class _Sums:
    limit = None

    def __init__(self, transform: RewardSum) -> None:
        self._pairs = transform._env_pairs
        self.writes = tuple(target for _, target in self._pairs)
        self._left: list[Any] = [None] * len(self._pairs)

    def apply(self, batch: TensorDictBase, starts: Tensor) -> None:
        following = batch.get("next")
        for i, (source, target) in enumerate(self._pairs):
            reward = following.get(source)
            rows = as_sum_dtype(reward).reshape(*starts.shape, -1)
            left = self._left[i] if self._left[i] is not None else torch.zeros_like(rows[:, 0])
            after = _added(rows, starts, left)
            before = torch.cat([left.unsqueeze(1), after[:, :-1]], 1).masked_fill_(starts.unsqueeze(-1), 0)
            self._left[i] = after[:, -1].clone()
            dtype = reward.dtype if reward.is_floating_point() else torch.int64
            batch.set(target, before.to(dtype).reshape(reward.shape))
            following.set(target, after.to(dtype).reshape(reward.shape))


def _added(rows: Tensor, starts: Tensor, left: Tensor) -> Tensor:
    """Sums `[N, T, k]` so far in each episode, added up one after the other as an environment does; `left` `[N, k]`."""
    values, sums = rows.numpy().copy(), np.empty(rows.shape, rows.numpy().dtype)
    values[:, 0] += np.where(starts[:, :1].numpy(), 0, left.numpy())
    for row, total, first in zip(values, sums, starts.numpy(), strict=True):
        cuts = [0, *(np.flatnonzero(first[1:]) + 1).tolist(), len(row)]
        for a, b in pairwise(cuts):
            np.add.accumulate(row[a:b], axis=0, out=total[a:b])
    return torch.from_numpy(sums)


class _Counts:
    def __init__(self, transform: StepCounter) -> None:
        self.writes = (transform.step_count_key,)
        self.limit = transform.max_steps
        self._left: Tensor | None = None

    def apply(self, batch: TensorDictBase, starts: Tensor) -> None:
        times = torch.arange(starts.shape[1])
        last = torch.where(starts, times, -1).cummax(1).values
        left = torch.zeros(len(starts), dtype=torch.int64) if self._left is None else self._left
        counts = torch.where(last >= 0, times - last, times + left.unsqueeze(1))
        self._left = counts[:, -1] + 1
        shape = batch.get(("next", "done")).shape
        batch.set(self.writes[0], counts.reshape(shape))
        batch.get("next").set(self.writes[0], (counts + 1).reshape(shape))


class _Marks:
    limit = None

    def __init__(self, transform: InitTracker) -> None:
        self.writes = tuple(transform.root_entries())

    def apply(self, batch: TensorDictBase, starts: Tensor) -> None:
        done = batch.get(("next", "done"))
        batch.set(self.writes[0], starts.reshape(done.shape).clone())
        batch.get("next").set(self.writes[0], torch.zeros_like(done))


class _Rewards:
    writes = ("reward",)
    limit = None

    def __init__(self, transform: RewardScaling) -> None:
        self._transform = transform

    def apply(self, batch: TensorDictBase, starts: Tensor) -> None:
        following = batch.get("next")
        following.set("reward", self._transform._apply_transform(following.get("reward")))


def afterwards_of(part: Any) -> Afterwards | None:
    """What does the same as a transform at work in an environment; None: only it can."""
    if type(part) is RewardSum:
        return _Sums(part)
    if type(part) is StepCounter:
        return _Counts(part)
    if type(part) is InitTracker:
        return _Marks(part)
    if type(part) is RewardScaling and part._env_pairs == [("reward", "reward")]:
        return _Rewards(part) if all(torch.as_tensor(x).numel() == 1 for x in (part.loc, part.scale)) else None
    return None
