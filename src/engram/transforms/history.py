"""What has happened so far in each trajectory: sums of rewards, numbers of steps, first steps, last frames."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.data.specs import Categorical, Spec, Unbounded
from engram.transforms.entries import Key, Keys, as_key, find, get, path_of, put
from engram.transforms.in_env import Deferred, on, root_key, root_pairs, where_reset
from engram.transforms.scale import REWARDS, first_key
from engram.transforms.specs import RESULTS, EnvSpecs
from engram.transforms.strands import DONES, Trajectories, running_sum, summable
from engram.transforms.timed import TimedTransform, sibling


class RewardSum(TimedTransform):
    """The sum of each trajectory's rewards so far, this step's included: `episode_reward` beside each reward.

    Args:
        in_keys: rewards; `("next", "reward")` if None, or `"reward"` in batches without it.
        out_keys: their sums; `"episode_reward"` in the place of `"reward"` if None.
        done_key, traj_key: where trajectories end; see TimedTransform.

    In an environment `in_keys` of None are `"reward"`, and the sums are 0 at resets.
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

    _sum_along = staticmethod(running_sum)

    # ---- environments ----
    @cached_property
    def _env_pairs(self) -> list[tuple[Key, Key]]:
        return root_pairs(self.in_keys, self.out_keys) if self.in_keys else [("reward", "episode_reward")]

    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        if taken := [target for _, target in self._env_pairs if target in RESULTS]:
            raise ValueError(f"RewardSum would replace {taken}; give it out_keys of its own in an environment")
        return specs.with_entries({target: self._sum_spec(specs.entry(source)) for source, target in self._env_pairs})

    def _sum_spec(self, spec: Any) -> Spec:
        return Unbounded(spec.shape, spec.device, spec.dtype if spec.dtype.is_floating_point else torch.int64)

    def _start(self, specs: EnvSpecs) -> None:
        specs.require([source for source, _ in self._env_pairs], "RewardSum")
        self._of: list[Any] = [specs.entry(source) for source, _ in self._env_pairs]
        self._sums = [wide(spec.zero()) for spec in self._of]

    def _reset(self, td: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
        device = fresh.get("done").device
        self._sums = [where_reset(td, torch.zeros_like(old, device=device), old) for old in self._sums]
        for (_, target), total, spec in zip(self._env_pairs, self._sums, self._of, strict=True):
            fresh.set(target, self._shown(total, spec.dtype))
        return fresh

    @staticmethod
    def _shown(total: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy: the sum goes on in place, and the caller may write into what it got."""
        return total.to(dtype, copy=True) if dtype.is_floating_point else total.clone()

    def _step(self, td: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        for i, (source, target) in enumerate(self._env_pairs):
            reward = following.get(source)
            total = self._sums[i] = on(self._sums[i], reward.device).add_(reward)
            following.set(target, self._shown(total, reward.dtype))
        return following

    def deferred(self) -> Deferred | None:
        if type(self) is not RewardSum:
            return None
        sources, targets = zip(*self._env_pairs, strict=True)
        in_keys, out_keys = ([("next", *path_of(key)) for key in keys] for keys in (sources, targets))
        return self._deferred(targets, in_keys=in_keys, out_keys=out_keys, _sum_along=_sum_in_order)

    def _run_in_env(self, batch: Any, trajectories: Trajectories, goes_on: Tensor, before: Any) -> Any:
        left = self._run(batch, trajectories, goes_on, before)
        for i, (_, target) in enumerate(self._env_pairs):
            total = get(batch, ("next", *path_of(target)), "RewardSum")
            after = trajectories.strands.split(total, target).flatten(2)
            so_far = torch.zeros_like(after)
            so_far[:, 1:] = after[:, :-1]
            if before is not None:
                so_far[:, 0] = before[i]
            put(batch, target, so_far.masked_fill_(trajectories.starts.unsqueeze(-1), 0).reshape(total.shape))
        return left

    def _run(self, batch: Any, trajectories: Trajectories, goes_on: Tensor, before: Any) -> Any:
        first, left = trajectories.first(), []
        for i, (source, target) in enumerate(self._pairs(batch)):
            reward = get(batch, source, "RewardSum")
            split = trajectories.strands.split(reward, source)
            x = summable(split)
            if before is not None:
                x = x.clone()
                x[:, 0] += torch.where(goes_on.unsqueeze(-1), before[i].to(x.device), 0)
            total = self._sum_along(x, first)
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

    # ---- environments ----
    def for_env(self, specs: EnvSpecs) -> StepCounter:
        if self.max_steps is not None and (self.truncated_key != "truncated" or not self.update_done):
            raise ValueError(
                "in an environment done is terminated or truncated: max_steps needs truncated_key='truncated' and "
                f"update_done=True, got {self.truncated_key!r} and {self.update_done}"
            )
        return super().for_env(specs)

    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        return specs.with_entries({self.step_count_key: Unbounded(specs.done.shape, specs.done.device, torch.int64)})

    def _start(self, specs: EnvSpecs) -> None:
        self._count: Tensor | None = None
        self._most = 0  # no count is higher: saves looking at them

    def _reset(self, td: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
        zero = torch.zeros_like(fresh.get("done"), dtype=torch.int64)
        self._most = 0 if td.get("_reset", None) is None else self._most
        self._count = where_reset(td, zero, self._count)
        return fresh.set(self.step_count_key, self._count.clone())

    def _step(self, td: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        done = following.get("done")
        if self._count is None:
            self._count = torch.zeros_like(done, dtype=torch.int64)
        self._count = on(self._count, done.device).add_(1)
        self._most += 1
        following.set(self.step_count_key, self._count.clone())
        if self.max_steps is not None and self._most >= self.max_steps:
            over = self._count >= self.max_steps
            following.set("truncated", following.get("truncated") | over).set("done", done | over)
            self._most = int(self._count.max())
        return following

    def deferred(self) -> Deferred | None:
        if type(self) is not StepCounter:
            return None
        return self._deferred([self.step_count_key], limit=self.max_steps, max_steps=None)

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

    # ---- environments ----
    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        mark = Categorical(2, specs.done.shape, specs.done.device, torch.bool)
        return specs.with_entries({root_key(self.init_key): mark})

    def root_entries(self) -> list[Key]:
        """The mark's name in an environment."""
        return [root_key(self.init_key)]

    def _start(self, specs: EnvSpecs) -> None:
        """It keeps nothing."""

    def _reset(self, td: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
        done = fresh.get("done")
        return fresh.set(root_key(self.init_key), where_reset(td, torch.ones_like(done), torch.zeros_like(done)))

    def _step(self, td: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        return following.set(root_key(self.init_key), torch.zeros_like(following.get("done")))

    def deferred(self) -> Deferred | None:
        if type(self) is not InitTracker:
            return None
        return self._deferred(self.root_entries(), init_key=root_key(self.init_key))

    def _run_in_env(self, batch: Any, trajectories: Trajectories, goes_on: Tensor, before: Any) -> Any:
        put(batch, ("next", *path_of(self.init_key)), torch.zeros_like(batch.get(("next", "done"))))
        return self._run(batch, trajectories, goes_on, before)

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


def _sum_in_order(x: Tensor, first: Tensor) -> Tensor:
    """As `running_sum`, and to the last bit what an environment gives, which adds up one step after the other."""
    sums = x.numpy().copy()
    starts = (first == torch.arange(x.shape[1])).numpy()
    for row, is_start in zip(sums, starts, strict=True):
        bounds = [*np.flatnonzero(is_start).tolist(), len(row)]
        for start, stop in pairwise(bounds):
            np.add.accumulate(row[start:stop], axis=0, out=row[start:stop])
    return torch.from_numpy(sums)


def wide(value: Tensor) -> Tensor:
    """In the dtype to sum in."""
    if value.dtype in (torch.float16, torch.bfloat16):
        return value.to(torch.float32)
    return value if value.is_floating_point() else value.to(torch.int64)
