"""`RandomTruncationTransform` and `TargetReturn`: lengths of episodes and target returns."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram import _forms as forms
from engram._checks import count
from engram.pytree import Key, Keys, as_key, key_path, require_tensor, set_entry
from engram.specs import Spec, Unbounded
from engram.transforms.base import Transform, has_entries, root_pairs, select_reset, to_device
from engram.transforms.env_specs import RESULT_KEYS, EnvSpecs
from engram.transforms.roles import Role
from engram.transforms.trajectory import (
    TrajectoryBounds,
    TrajectoryTransform,
    end_episodes,
    flatten_for_sum,
    running_sum,
    sums_form,
)
from engram.transforms.values import REWARD_KEYS, rewards_of


class RandomTruncationTransform(Transform, built_in=True):
    """Truncates episodes at random lengths, so that environments which started together do not end together.

    Args:
        min_horizon, max_horizon: the smallest and the largest length that is drawn, both included.
        prob: the probability that an episode has a length drawn from `min_horizon` to `max_horizon`; all others are
            truncated at `max_horizon`.
        first_episode_prob: the same for the first episode of each environment that follows a reset of all; `prob` if
            None.
        step_count_key: the entry of a `StepCounter` that stands before this transform.
        truncated_key, done_key: the flags, `"truncated"` and `"done"` in environments.

    A reset of all environments at once draws their lengths from 1 to `max_horizon`.

    Raises:
        ValueError: a horizon below 1, `min_horizon` above `max_horizon`, or no probability.
        RuntimeError: there is no such step count before this transform.
        NotImplementedError: it is called on a batch.

    Example:
        >>> from engram.envs import GymEnv, TransformedEnv
        >>> from engram.transforms import Compose, StepCounter
        >>> truncation = RandomTruncationTransform(min_horizon=2, max_horizon=4, prob=1.0)
        >>> env = TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), truncation))
        >>> env.rollout(10)["next", "step_count"].max() <= 4
        tensor(True)
    """

    def __init__(
        self,
        min_horizon: int,
        max_horizon: int,
        prob: float = 0.0,
        first_episode_prob: float | None = None,
        *,
        step_count_key: Key = "step_count",
        truncated_key: Key = "truncated",
        done_key: Key = "done",
    ) -> None:
        super().__init__()
        min_horizon, max_horizon = count(min_horizon, "min_horizon"), count(max_horizon, "max_horizon")
        if max_horizon < min_horizon:
            raise ValueError(f"min_horizon must be at most max_horizon, got {min_horizon!r} and {max_horizon!r}")
        for name, value in (("prob", prob), ("first_episode_prob", first_episode_prob)):
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} must be 0 to 1, got {value}")
        if (truncated_key, done_key) != ("truncated", "done"):
            raise ValueError(
                f"the flags of an environment are 'truncated' and 'done', got {truncated_key!r} and {done_key!r}"
            )
        self.min_horizon, self.max_horizon = int(min_horizon), int(max_horizon)
        self.prob, self.first_episode_prob = prob, prob if first_episode_prob is None else first_episode_prob
        self.step_count_key = as_key(step_count_key)

    def roles(self) -> Role:
        return Role.ENVIRONMENT

    def for_env(self, specs: EnvSpecs) -> RandomTruncationTransform:
        own = copy.copy(self)
        vars(own).update(_horizon=None, _is_first=None, _groups=specs.groups)
        return own

    _groups: Sequence[Key] = ()  # of agents with flags of their own

    _horizon: Tensor | None = None  # int64, with the shape of the flags
    _is_first: Tensor | None = None  # whether the next episode is the first one after a reset of all

    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        if specs.entry(self.step_count_key) is None:
            raise RuntimeError(
                f"RandomTruncationTransform needs {self.step_count_key!r}: put a StepCounter before it, "
                "Compose(StepCounter(), RandomTruncationTransform(...))"
            )
        return specs

    def _reset(self, td: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
        done, mask = fresh.get("done"), td.get("_reset", None)
        if mask is None or self._horizon is None or self._is_first is None:
            self._horizon = torch.randint(1, self.max_horizon + 1, done.shape, device="cpu").to(done.device)
            self._is_first = torch.ones_like(done, dtype=torch.bool)
            return fresh
        is_first = to_device(self._is_first, done.device)
        prob = torch.where(is_first, self.first_episode_prob, self.prob)
        drawn = torch.randint(self.min_horizon, self.max_horizon + 1, done.shape, device="cpu").to(done.device)
        horizon = torch.where(torch.rand(done.shape, device="cpu").to(done.device) < prob, drawn, self.max_horizon)
        self._horizon = select_reset(td, horizon, self._horizon)
        self._is_first = select_reset(td, torch.zeros_like(is_first), is_first)
        return fresh

    def _step(self, td: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        done = following.get("done")
        if self._horizon is None:  # steps without a reset
            self._horizon = torch.full(done.shape, self.max_horizon, device="cpu")
        self._horizon = to_device(self._horizon, done.device)
        over = following.get(self.step_count_key) >= self._horizon
        return end_episodes(following, over, self._groups)

    def forward(self, batch: Any) -> Any:
        raise NotImplementedError(
            "RandomTruncationTransform truncates episodes of an environment: put it into a TransformedEnv"
        )

    def _settings(self) -> dict[str, Any]:
        return {"min_horizon": self.min_horizon, "max_horizon": self.max_horizon, "prob": self.prob}


class TargetReturn(TrajectoryTransform, built_in=True):
    """Adds the target return to each step, as `target_return`: for policies conditioned on it (decision transformers).

    Args:
        target_return: the return at the start of each trajectory.
        mode: "reduce" subtracts the rewards that were received since; "constant" does not.
        in_keys: rewards; `("next", "reward")` if None, or `"reward"` in batches without it.
        out_keys: the target returns; `"target_return"` if None.
        reset_key: None or `"_reset"`: trajectories begin where the environment is reset.
        done_key, traj_key: where trajectories end; see TrajectoryTransform.

    The entry has the shape of the rewards, also under `"next"`, where it is reduced by the step's own reward. In an
    environment it is computed from the entry of the step before: a caller may set another target there. In a buffer,
    trajectories and carrying on between writes: see TrajectoryTransform.

    Raises:
        ValueError: another mode, or another reset key.

    Example:
        >>> from engram.envs import GymEnv, TransformedEnv
        >>> env = TransformedEnv(GymEnv("CartPole-v1"), TargetReturn(200.0))
        >>> env.rollout(3)["target_return"].flatten()
        tensor([200., 199., 198.])
    """

    MODES = ("reduce", "constant")

    def __init__(
        self,
        target_return: float,
        mode: str = "reduce",
        in_keys: Keys = None,
        out_keys: Keys = None,
        reset_key: Key | None = None,
        *,
        done_key: Key | None = None,
        traj_key: Key | None = None,
    ) -> None:
        if mode not in self.MODES:
            raise ValueError(f"mode must be one of {self.MODES}, got {mode!r}")
        if reset_key not in (None, "_reset"):
            raise ValueError(f"trajectories begin where '_reset' says, got reset_key={reset_key!r}")
        self._finds_reward = in_keys is None
        outs = "target_return" if out_keys is None else out_keys
        super().__init__("reward" if in_keys is None else in_keys, outs, done_key=done_key, traj_key=traj_key)
        self.target_return, self.mode = float(target_return), mode
        self.reset_key = "_reset"

    # ---- environments ----
    _reward_specs: list[Any]

    def _env_state(self, specs: EnvSpecs) -> dict[str, Any]:
        pairs = self._env_pairs
        if self._finds_reward:
            pairs = [(key, self._key_of(key)) for key in specs.reward_keys]
            if len({target for _, target in pairs}) < len(pairs):
                raise ValueError(
                    f"TargetReturn would write one {self.out_keys[0]!r} for several rewards, {specs.reward_keys}: "
                    "give it in_keys and out_keys"
                )
        specs.require([source for source, _ in pairs], "TargetReturn")
        return {"_env_pairs": pairs, "_reward_specs": [specs.entry(source) for source, _ in pairs]}

    def _key_of(self, reward: Key) -> Key:
        """The key of the target return: in the place of the reward, at the root or in its group."""
        return (*key_path(reward)[:-1], *key_path(self.out_keys[0])) if isinstance(reward, tuple) else self.out_keys[0]

    def transform_specs(self, specs: EnvSpecs) -> EnvSpecs:
        if replaced := [target for _, target in self._env_pairs if target in (*RESULT_KEYS, *specs.result_keys)]:
            raise ValueError(f"TargetReturn would replace {replaced}; give it out_keys of its own in an environment")
        return specs.with_entries({target: self._spec(specs.entry(source)) for source, target in self._env_pairs})

    def _spec(self, spec: Any) -> Spec:
        return Unbounded(spec.shape, spec.device, _float_of(spec.dtype))

    def _reset(self, td: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
        for (_, target), spec in zip(self._env_pairs, self._reward_specs, strict=True):
            value = torch.full(spec.shape, self.target_return, dtype=_float_of(spec.dtype), device="cpu")
            fresh.set(target, to_device(value, fresh.get("done").device))
        return fresh

    def _step(self, td: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        for source, target in self._env_pairs:
            before = require_tensor(td, target, "TargetReturn")
            following.set(target, before - following.get(source) if self.mode == "reduce" else before.clone())
        return following

    # ---- batches ----
    def has_changed(self, batch: Any) -> bool | None:
        return has_entries(batch, [target for _, target in root_pairs(self.in_keys, self.out_keys)])

    def _pairs(self, batch: Any) -> list[tuple[Key, Key]]:
        if not self._finds_reward:
            return super()._pairs(batch)
        keys = rewards_of(batch, "TargetReturn")
        return [(key, self.out_keys[0] if key in REWARD_KEYS else self._key_of(key)) for key in keys]

    def _run(self, batch: Any, trajectories: TrajectoryBounds, continues: Tensor, before: Any) -> Any:
        first, left = trajectories.first(), []
        for i, (source, key) in enumerate(self._pairs(batch)):
            reward = require_tensor(batch, source, "TargetReturn")
            split = trajectories.view.split(reward, source)
            x = flatten_for_sum(split)
            x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
            x = x.clone() if self.mode == "reduce" else torch.zeros_like(x)
            own = x.clone()
            if before is not None:
                x[:, 0] += torch.where(continues.unsqueeze(-1), before[i].to(x.device), 0)
            received = running_sum(x, first)
            left.append(received[:, -1].clone())
            dtype = _float_of(reward.dtype)
            root, following = root_pairs([source], [key])[0][1], source[0] == "next" and not isinstance(source, str)
            for target, value in ((root, received - own), (("next", *key_path(root)), received)):
                if target == root or following:
                    shaped = (self.target_return - value).reshape(split.shape).to(dtype)
                    set_entry(batch, target, trajectories.view.join(shaped))
        return left

    def _value_form(self) -> forms.Form:
        return sums_form(self.in_keys)

    def _settings(self) -> dict[str, Any]:
        return {"target_return": self.target_return, "mode": self.mode, **super()._settings()}


def _float_of(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point else torch.get_default_dtype()
