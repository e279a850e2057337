"""A replay buffer for CleanRL's scripts, in the place of the one that they import."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from engram.compat.transitions import REFUSES_SHARED_OBSERVATIONS, MakeStorage, TransitionRows, truncations
from engram.data import LazyTensorStorage


class ReplayBufferSamples(NamedTuple):
    """A batch: `[n, ...]` each, `dones` and `rewards` float32 `[n, 1]`."""

    observations: Any
    actions: Tensor
    next_observations: Any
    dones: Tensor
    rewards: Tensor


class ReplayBuffer:
    """`cleanrl_utils.buffers.ReplayBuffer` of CleanRL's scripts: the same arguments, the same draws, the same batches.

    A script changes one line, `from engram.compat.cleanrl import ReplayBuffer`; it needs no stable-baselines3. Batches
    are drawn from NumPy's generator: equal seeds give the trainings that the script's own buffer gives.

    Args:
        buffer_size: steps of all environments together that fit.
        observation_space, action_space: of one environment; a Dict makes batches of dicts.
        device: where batches are put; "auto" is a GPU where there is one.
        n_envs: environments that step side by side.
        optimize_memory_usage: taken with `handle_timeout_termination=False`, and saves nothing here.
        handle_timeout_termination: `dones` of a batch are 0 where an info says `"TimeLimit.truncated"`. Scripts set it
            to False, and add terminations.
        storage: makes the storage: called with a number of steps and `ndim=2`.

    Raises:
        ValueError: `optimize_memory_usage=True` with `handle_timeout_termination=True`.

    Example:
        >>> from gymnasium.spaces import Box, Discrete
        >>> rb = ReplayBuffer(1000, Box(-1, 1, (3,)), Discrete(2), "cpu", handle_timeout_termination=False)
        >>> rb.add(np.zeros((1, 3)), np.ones((1, 3)), np.array([1]), np.array([0.5]), np.array([False]), {})
        >>> data = rb.sample(4)
        >>> data.observations.shape, data.rewards.flatten()
        (torch.Size([4, 3]), tensor([0.5000, 0.5000, 0.5000, 0.5000]))
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
        storage: MakeStorage = LazyTensorStorage,
    ) -> None:
        if optimize_memory_usage and handle_timeout_termination:
            raise ValueError(REFUSES_SHARED_OBSERVATIONS)
        if str(device) == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.observation_space = observation_space
        self.action_space = action_space
        self.device = torch.device(device)
        self.n_envs = n_envs
        self.handle_timeout_termination = handle_timeout_termination
        self.rows = TransitionRows(self.buffer_size, n_envs, observation_space, action_space, storage)

    @property
    def pos(self) -> int:
        """The time slot that the next step goes to."""
        return self.rows.position

    @property
    def full(self) -> bool:
        """Whether the oldest steps are being overwritten."""
        return self.rows.is_full

    def size(self) -> int:
        """Stored time steps."""
        return self.buffer_size if self.full else self.pos

    def reset(self) -> None:
        """Forgets every step."""
        self.rows.buffer.empty()

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Stores one step of all environments: arrays `[n_envs, ...]`.

        Args:
            infos: looked at with `handle_timeout_termination` only: a list of one dict for each environment, or the
                dict of arrays that gymnasium's vector environments give.
        """
        truncated = np.zeros(self.n_envs, np.bool_)
        if self.handle_timeout_termination:
            truncated = truncations([infos] if isinstance(infos, dict) else infos, self.n_envs)
        self.rows.add(obs, next_obs, action, reward, done, truncated)

    def extend(self, *columns: Any) -> None:
        """`add` of one after the other: the arguments of `add`, as `[time, n_envs, ...]`."""
        for step in zip(*columns, strict=True):
            self.add(*step)

    def sample(self, batch_size: int) -> ReplayBufferSamples:
        """A batch of steps, each drawn with equal probability.

        Raises:
            ValueError: nothing is stored.
        """
        times = np.random.randint(0, self.size(), size=batch_size)
        envs = np.random.randint(0, high=self.n_envs, size=(batch_size,))
        batch = self.rows.read(times, envs)
        following = batch["next"]
        return ReplayBufferSamples(
            self._on_device(batch["observation"]),
            batch["action"].to(self.device),
            self._on_device(following["observation"]),
            following["terminated"].float().to(self.device),
            following["reward"].to(self.device),
        )

    def _on_device(self, obs: Any) -> Any:
        if isinstance(obs, dict):
            return {key: self._on_device(part) for key, part in obs.items()}
        return obs.to(self.device)
