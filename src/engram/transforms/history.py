"""What has happened so far in each trajectory: sums of rewards, numbers of steps, first steps, last frames."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engram.transforms.entries import Key, Keys, as_key, find, get, path_of, put
from engram.transforms.scale import REWARDS, first_key
from engram.transforms.strands import DONES, Trajectories, running_sum, summable
from engram.transforms.timed import TimedTransform, sibling


class RewardSum(TimedTransform):
    """The sum of each trajectory's rewards so far, this step's included: `episode_reward` beside each reward.

    Args:
        in_keys: rewards; `("next", "reward")` if None, or `"reward"` in batches without it.
        out_keys: their sums; `"episode_reward"` in the place of `"reward"` if None.
        done_key, traj_key: where trajectories end; see TimedTransform.

    Sums of integers are int64. Trajectories, and carrying on between writes: see TimedTransform.

    Example:
        >>> done = torch.tensor([[False], [True], [False]])
        >>> batch = {"next": {"reward": torch.ones(3, 1), "done": done}}
        >>> RewardSum()(batch)["next"]["episode_reward"].flatten()
        tensor([1., 2., 1.])
    """

    def __init__(
        self, in_keys: Keys = None, out_keys: Keys = None, *, done_key: Key | None = None, traj_key: Key | None = None
    ) -> None:
        super().__init__(in_keys, [] if in_keys is None else out_keys, done_key=done_key, traj_key=traj_key)
        if in_keys is not None and out_keys is None:
            self.out_keys = [sibling(key, f"episode_{path_of(key)[-1]}") for key in self.in_keys]
        if in_keys is None and out_keys is not None:
            raise ValueError("RewardSum with out_keys needs in_keys")

    def _pairs(self, batch: Any) -> list[tuple[Key, Key]]:
        if self.in_keys:
            return super()._pairs(batch)
        key = first_key(batch, REWARDS, "RewardSum")
        return [(key, sibling(key, "episode_reward"))]

    def _run(self, batch: Any, trajectories: Trajectories, goes_on: Tensor, before: Any) -> Any:
        first, left = trajectories.first(), []
        for i, (source, target) in enumerate(self._pairs(batch)):
            reward = get(batch, source, "RewardSum")
            split = trajectories.strands.split(reward, source)
            x = summable(split)
            if before is not None:
                x = x.clone()
                x[:, 0] += torch.where(goes_on.unsqueeze(-1), before[i].to(x.device), 0)
            total = running_sum(x, first)
            left.append(total[:, -1].clone())
            dtype = reward.dtype if reward.is_floating_point() else torch.int64
            put(batch, target, trajectories.strands.join(total.reshape(split.shape).to(dtype)))
        return left


class StepCounter(TimedTransform):
    """Counts steps within each trajectory: `step_count` 0, 1, 2, ... and, one higher, `("next", "step_count")`.

    Args:
        max_steps: steps with this count and above are marked truncated, and with `update_done` done.
        truncated_key: the flag's name beside the done flag.
        step_count_key: the count's name, int64 with the shape of the flags.
        update_done: whether `max_steps` also sets the done flag.
        done_key, traj_key: where trajectories end; see TimedTransform.

    Trajectories, and carrying on between writes: see TimedTransform.

    Example:
        >>> done = torch.tensor([[False], [False], [True], [False]])
        >>> batch = StepCounter()({"next": {"done": done}})
        >>> batch["step_count"].flatten(), batch["next"]["step_count"].flatten()
        (tensor([0, 1, 2, 0]), tensor([1, 2, 3, 1]))
    """

    def __init__(
        self,
        max_steps: int | None = None,
        truncated_key: str = "truncated",
        step_count_key: str = "step_count",
        update_done: bool = True,
        *,
        done_key: Key | None = None,
        traj_key: Key | None = None,
    ) -> None:
        super().__init__(done_key=done_key, traj_key=traj_key)
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps must be 1 or more, or None, got {max_steps}")
        self.max_steps = max_steps
        self.truncated_key, self.step_count_key = truncated_key, step_count_key
        self.update_done = update_done

    def _run(self, batch: Any, trajectories: Trajectories, goes_on: Tensor, before: Any) -> Any:
        done_key = self.done_key or first_key(batch, DONES, "StepCounter")
        done = get(batch, done_key, "StepCounter")
        first = trajectories.first()
        count = trajectories.position - first
        if before is not None:
            offset = torch.where(goes_on, before.to(count.device), 0).unsqueeze(-1)
            count = count + torch.where(first == 0, offset, 0)
        shaped = trajectories.strands.join(count)
        shaped = shaped.reshape(*shaped.shape, *[1] * (done.ndim - shaped.ndim)).expand(done.shape).contiguous()
        put(batch, self.step_count_key, shaped)
        if done_key[0] == "next":
            put(batch, ("next", self.step_count_key), shaped + 1)
        if self.max_steps is not None:
            self._truncate(batch, shaped + 1 >= self.max_steps, done_key)
        return count[:, -1] + 1

    def _truncate(self, batch: Any, over: Tensor, done_key: Key) -> None:
        truncated_key = sibling(done_key, self.truncated_key)
        truncated = find(batch, truncated_key)
        put(batch, truncated_key, over if truncated is None else truncated | over)
        if self.update_done:
            put(batch, done_key, get(batch, done_key, "StepCounter") | over)

    def _settings(self) -> dict[str, Any]:
        return {"max_steps": self.max_steps, **super()._settings()}


class InitTracker(TimedTransform):
    """Marks each trajectory's first step, and the first step of the batch: `is_init`, bool with the shape of the flags.

    Args:
        init_key: the mark's name.
        done_key, traj_key: where trajectories end; see TimedTransform.

    On writing (see TimedTransform) the first step of a batch is marked only where a trajectory starts.

    Example:
        >>> done = torch.tensor([[False], [True], [False]])
        >>> InitTracker()({"next": {"done": done}})["is_init"].flatten()
        tensor([ True, False,  True])
    """

    def __init__(self, init_key: Key = "is_init", *, done_key: Key | None = None, traj_key: Key | None = None) -> None:
        super().__init__(done_key=done_key, traj_key=traj_key)
        self.init_key = as_key(init_key)

    def _run(self, batch: Any, trajectories: Trajectories, goes_on: Tensor, before: Any) -> Any:
        done = get(batch, self.done_key or first_key(batch, DONES, "InitTracker"), "InitTracker")
        init = trajectories.first() == trajectories.position
        init[:, 0] = ~goes_on if before is not None else True
        shaped = trajectories.strands.join(init)
        shaped = shaped.reshape(*shaped.shape, *[1] * (done.ndim - shaped.ndim)).expand(done.shape)
        put(batch, self.init_key, shaped.contiguous())
        return True

    def _settings(self) -> dict[str, Any]:
        return {"init_key": self.init_key, **super()._settings()}
