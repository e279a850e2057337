"""A replay buffer for stable-baselines3's off-policy algorithms (DQN, SAC, TD3, DDPG, and those of sb3-contrib)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engram.compat.transitions import (
    MakeStorage,
    Slots,
    TransitionRows,
    on_device,
    powers,
    truncations,
)
from engram.data import LazyTensorStorage
from engram.kernel.rows import NSteps
from engram.kernel.tools import packages

with packages("engram.compat.sb3", "stable-baselines3", stable_baselines3="stable_baselines3"):
    from gymnasium import spaces
    from stable_baselines3.common import buffers
    from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
    from stable_baselines3.common.vec_env import VecNormalize


class ReplayBuffer(buffers.ReplayBuffer):  # type: ignore[misc]
    """For `replay_buffer_class=`: stable-baselines3's ReplayBuffer, DictReplayBuffer and NStepReplayBuffer in one.

    Batches are drawn as stable-baselines3 draws them, from NumPy's generator: equal seeds give the trainings that its
    own buffers give. `model.save_replay_buffer` and `load_replay_buffer` work; so does `dumps` of `rows.buffer`, the
    engram buffer, which survives a kill at any moment.

    Args:
        optimize_memory_usage: store each observation once, by `compact=True` of the storage: stacks of 4 frames take an
            eighth of the memory. What is read is what was written, at time limits too, so that it goes with
            `handle_timeout_termination=True`, `n_steps` and dict observations, which stable-baselines3 refuses.
        storage: makes the storage: called with a number of steps and `ndim=2`, and `compact=True`. With
            `functools.partial(LazyMemmapStorage, scratch_dir=..., existsok=True)` a training continues with the rows of
            one that was killed.
        n_steps, gamma: rewards of so many steps are added up, each `gamma` times less, as in NStepReplayBuffer; also
            for dict observations.
        Others: as stable-baselines3's, but `buffer_size`, and `pos`, follow from the storage.

    `full = True` of a buffer to which nothing was added fills it with zeros, which is what stable-baselines3's own is
    full of then; else `full` and `pos` follow from what was added.

    `replay_buffer.observations`, `actions`, `rewards`, `dones`, `timeouts` are arrays of all time slots, 0 where
    nothing is stored; `replay_buffer.rewards[3] = 0` changes the stored row.

    Raises:
        ValueError: `n_steps` is below 1.
        TypeError: arguments of HerReplayBuffer: goals are relabelled by stable-baselines3's own class only.

    Example:
        >>> from stable_baselines3 import DQN
        >>> model = DQN("MlpPolicy", "CartPole-v1", replay_buffer_class=ReplayBuffer, buffer_size=10_000).learn(40)
        >>> model.replay_buffer.size()
        40
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        n_steps: int = 1,
        gamma: float = 0.99,
        storage: MakeStorage = LazyTensorStorage,
    ) -> None:
        if n_steps < 1:
            raise ValueError(f"n_steps must be 1 or more, got {n_steps}")
        # Not that of its ReplayBuffer, which makes arrays for all steps.
        super(buffers.ReplayBuffer, self).__init__(buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        self.n_steps = n_steps
        self.gamma = gamma
        self.rows = TransitionRows(
            self.buffer_size, n_envs, observation_space, action_space, storage, optimize_memory_usage
        )

    # ---- where it stands ----
    @property
    def pos(self) -> int:
        return self.rows.position

    @pos.setter
    def pos(self, value: int) -> None:
        if "rows" in self.__dict__ and value != self.pos:
            raise self._refusal("pos")

    @property
    def full(self) -> bool:
        return self.rows.is_full

    @full.setter
    def full(self, value: bool) -> None:
        # Before there are rows it is the parent's constructor, which says that nothing is stored.
        if "rows" not in self.__dict__ or bool(value) == self.full:
            return
        if len(self.rows.buffer):
            raise self._refusal("full")
        self.rows.fill_with_zeros()  # the arrays of stable-baselines3's own are zeros then

    def _refusal(self, name: str) -> AttributeError:
        return AttributeError(
            f"{name} follows from what was added, and cannot be set where something was; reset() forgets everything"
        )

    def reset(self) -> None:
        self.rows.buffer.empty()

    # ---- writing ----
    def add(
        self,
        obs: npt.NDArray[Any] | dict[str, npt.NDArray[Any]],
        next_obs: npt.NDArray[Any] | dict[str, npt.NDArray[Any]],
        action: npt.NDArray[Any],
        reward: npt.NDArray[Any],
        done: npt.NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        truncated = truncations(infos, self.n_envs) if self.handle_timeout_termination else None
        self.rows.add(obs, next_obs, action, reward, done, truncated)

    # ---- reading ----
    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        if self.optimize_memory_usage:  # by its draws, which leave out the step that is overwritten next
            return super().sample(batch_size, env)
        return self._batch(self.rows.draw(batch_size), env)

    def _get_samples(self, batch_inds: npt.NDArray[Any], env: VecNormalize | None = None) -> Any:
        return self._batch(self.rows.draw_environments(batch_inds), env)

    def _batch(self, slots: Slots, env: VecNormalize | None) -> Any:
        """The transitions in slots, int64 [n], as stable-baselines3 hands them to its algorithms."""
        rows, discounts = self.rows, None
        if self.n_steps == 1:
            batch = rows.transitions(slots)
            rewards = batch.reward if env is None else self._normalized(batch.reward, env)
        else:
            batch, steps = rows.n_step_transitions(slots, powers(self.gamma, self.n_steps))
            rewards = steps.returns if env is None else self._normalized_returns(steps, env)
            discounts = steps.discounts
        observations, following = batch.observation, batch.next_observation
        if env is not None:
            observations, following = (self._normalized_observations(obs, env) for obs in (observations, following))
        kind = DictReplayBufferSamples if isinstance(observations, dict) else ReplayBufferSamples
        made = kind(observations, batch.action, following, batch.terminated, rewards, discounts)
        return made if self.device.type == "cpu" else kind(*(on_device(part, self.device) for part in made))

    def _normalized(self, rewards: Tensor, env: VecNormalize) -> Tensor:
        return torch.from_numpy(self._normalize_reward(rewards.numpy(), env))

    def _normalized_returns(self, steps: NSteps, env: VecNormalize) -> Tensor:
        within = np.arange(self.n_steps) < steps.counts.numpy()[:, None]  # the zeros behind are normalised, too
        rewards = self._normalize_reward(steps.rewards.numpy(), env) * within
        return torch.from_numpy((rewards * powers(self.gamma, self.n_steps)[:-1]).sum(1, keepdims=True))

    def _normalized_observations(self, obs: Any, env: VecNormalize) -> Any:
        if isinstance(obs, dict):
            arrays = self._normalize_obs({key: part.numpy() for key, part in obs.items()}, env)
            return {key: torch.from_numpy(part) for key, part in arrays.items()}
        return torch.from_numpy(self._normalize_obs(obs.numpy(), env))

    # ---- to look at ----
    observations = property(lambda self: self.rows.all_observations())
    next_observations = property(lambda self: self.rows.all_observations("next"))
    actions = property(lambda self: self.rows.all_actions())
    rewards = property(lambda self: self.rows.all_numbers("reward"))
    dones = property(lambda self: self.rows.all_numbers("reported_done"))
    timeouts = property(lambda self: self.rows.all_numbers("truncated"))


#: Dict observations need no class of their own here.
DictReplayBuffer = ReplayBuffer


class NStepReplayBuffer(ReplayBuffer):
    """ReplayBuffer with stable-baselines3's default of this name: rewards of three steps are added up."""

    def __init__(self, *args: Any, n_steps: int = 3, **kwargs: Any) -> None:
        super().__init__(*args, n_steps=n_steps, **kwargs)
