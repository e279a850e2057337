"""Replay buffers for CleanRL's scripts, in the place of the one that they import and of that of `rainbow_atari.py`."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engram.compat.transitions import MakeStorage, TransitionRows, on_device, truncations
from engram.data import (
    Compact,
    LazyTensorStorage,
    PrioritizedSampler,
    RoundRobinWriter,
    Storage,
    TensorDictReplayBuffer,
)
from engram.kernel.tools import packages

with packages("engram.compat.cleanrl", "engram[gym]", gymnasium="gymnasium"):
    from gymnasium import spaces


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
    are drawn from NumPy's generator: equal seeds give the trainings that the script's own buffer gives. Storing a step
    takes no longer than there, a batch a third of the time or less.

    Args:
        buffer_size: steps of all environments together that fit.
        observation_space, action_space: of one environment; a Dict makes batches of dicts.
        device: where batches are put; "auto" is a GPU where there is one.
        n_envs: environments that step side by side.
        optimize_memory_usage: store each observation once, by `compact=True` of the storage: stacks of 4 frames take an
            eighth of the memory. Draws are as without it, and so is what is read, at time limits too.
        handle_timeout_termination: `dones` of a batch are 0 where an info says `"TimeLimit.truncated"`. Scripts set it
            to False, and add terminations.
        storage: makes the storage: called with a number of steps and `ndim=2`, and `compact=True`.

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
        if str(device) == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.observation_space = observation_space
        self.action_space = action_space
        self.device = torch.device(device)
        self.n_envs = n_envs
        self.handle_timeout_termination = handle_timeout_termination
        self.rows = TransitionRows(
            self.buffer_size, n_envs, observation_space, action_space, storage, optimize_memory_usage
        )

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
        truncated = None
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
        batch = self.rows.transitions(self.rows.draw(batch_size))
        made = ReplayBufferSamples(
            batch.observation, batch.action, batch.next_observation, batch.terminated, batch.reward
        )
        return made if self.device.type == "cpu" else ReplayBufferSamples(*(on_device(x, self.device) for x in made))


class PrioritizedBatch(NamedTuple):
    """A batch drawn by priority: tensors `[n, ...]` on the buffer's device, and the slots that its rows are in.

    Actions are int64 `[n, 1]`; rewards, dones and weights float32 `[n, 1]`; indices an int64 array `[n]`.
    """

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    next_observations: Tensor
    dones: Tensor
    indices: npt.NDArray[np.int64]
    weights: Tensor


class PrioritizedReplayBuffer:
    """The buffer that CleanRL's `rainbow_atari.py` defines: prioritised n-step transitions of one environment.

    The script imports this class instead of its own, and stays as it is. A transition has the discounted sum of at most
    `n_step` rewards (Sutton, 1988) and the observation after them; it is drawn with probability proportional to
    `(|priority| + eps) ** alpha` (Schaul et al., 2016), by engram's sampler from torch's generator: equal seeds do not
    give the draws of the script's own class.

    No transition crosses the end of an episode. Before a termination it has as many rewards as there are, and the last
    `n_step - 1` steps are stored like all others. A step is left out where its episode is cut off, truncated or
    reset, before `n_step` steps: the script discounts by `gamma ** n_step` whatever was summed.

    Args:
        capacity: transitions that fit.
        obs_shape: of one observation.
        device: where batches are put.
        n_step, gamma: how many rewards are summed, each `gamma` times less than the one before.
        alpha: how much priorities count.
        beta: how much `weights` correct for it; `rb.beta = ...` changes it at any time.
        eps: added to each priority.
        observation_dtype: of stored observations.
        optimize_memory_usage: store each observation once, by `compact=` of the storage.
        storage: makes the storage: called with the capacity, and `compact=` where observations are stored once.

    `rb.buffer` is the engram buffer; its `dumps` saves everything but the steps that wait for their n-step return.

    Raises:
        ValueError: `n_step`, `gamma`, `alpha`, `beta` or `eps` is not allowed.

    Example:
        >>> rb = PrioritizedReplayBuffer(1000, (4, 84, 84), "cpu", n_step=3, gamma=0.5)
        >>> frames = np.zeros((5, 1, 4, 84, 84), np.uint8)
        >>> for t in range(4):
        ...     rb.add(frames[t], np.array([0]), np.array([1.0]), frames[t + 1], np.array([t == 3]))
        >>> data = rb.sample(32)
        >>> data.observations.shape, sorted({*data.rewards.flatten().tolist()})
        (torch.Size([32, 4, 84, 84]), [1.0, 1.5, 1.75])
        >>> rb.update_priorities(data.indices, np.ones(32))
    """

    def __init__(
        self,
        capacity: int,
        obs_shape: tuple[int, ...],
        device: torch.device | str,
        n_step: int,
        gamma: float,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-6,
        *,
        observation_dtype: npt.DTypeLike = np.uint8,
        optimize_memory_usage: bool = False,
        storage: Callable[..., Storage] = LazyTensorStorage,
    ) -> None:
        self.capacity = capacity
        self.obs_shape = tuple(obs_shape)
        self.device = torch.device(device)
        self._dtype = np.dtype(observation_dtype)
        self._shapes = self.obs_shape, (1, *self.obs_shape)
        self._episode = _RunningEpisode(n_step, gamma)
        self.sampler = PrioritizedSampler(None, alpha, beta, eps)
        options: dict[str, Any] = {"compact": Compact(n_steps=n_step)} if optimize_memory_usage else {}
        self.buffer: TensorDictReplayBuffer[Any] = TensorDictReplayBuffer(
            storage=storage(capacity, **options), sampler=self.sampler, writer=RoundRobinWriter()
        )

    @property
    def size(self) -> int:
        """Stored transitions."""
        return len(self.buffer)

    @property
    def beta(self) -> float:
        """How much `weights` correct for priorities."""
        return self.sampler.beta

    @beta.setter
    def beta(self, beta: float) -> None:
        self.sampler.beta = beta

    def add(self, obs: Any, action: Any, reward: Any, next_obs: Any, done: Any, truncated: Any = False) -> None:
        """Takes one step of the environment in, and stores the transitions that are complete with it.

        Args:
            obs, next_obs: `obs_shape`, or `[1, *obs_shape]` as a vector environment gives it.
            done: whether the episode terminates here, and nothing comes after `next_obs`.
            truncated: whether it is cut off here. It needs not be given where the next step begins with another
                observation than this `next_obs`: that step is the first of its episode.

        Raises:
            ValueError, TypeError: an argument is not that of one environment, or of another dtype. Nothing is changed.
        """
        now, following = self._observation("obs", obs), self._observation("next_obs", next_obs)
        step = operator.index(_single("action", action)), float(_single("reward", reward))
        terminated, cut_off = bool(_single("done", done)), bool(_single("truncated", truncated))
        for start in self._episode.advance(now.tobytes(), *step, following, terminated, cut_off):
            row = {
                "observation": np.frombuffer(start.obs, self._dtype).reshape(self.obs_shape),
                "action": np.array([start.action], np.int64),
                "next": {
                    "observation": following,
                    "reward": np.array([start.returned], np.float32),
                    "terminated": np.array([terminated]),
                },
            }
            self.buffer.add(row)

    def sample(self, batch_size: int) -> PrioritizedBatch:
        """A batch drawn by priority, with replacement.

        `weights` are `(1 / P) ** beta`, divided by the highest of the batch; P is the probability of a draw.

        Raises:
            ValueError: nothing is stored.
        """
        if not len(self.buffer):
            raise ValueError(
                "no transition is complete yet: add more steps, where each but the first of an episode has the "
                "next_obs of the one before as obs"
            )
        batch = self.buffer.sample(batch_size)
        following, weights = batch["next"], batch["priority_weight"].numpy()
        weights /= weights.max()
        made = PrioritizedBatch(
            batch["observation"],
            batch["action"],
            following["reward"],
            following["observation"],
            following["terminated"].to(torch.float32),
            batch["index"].numpy(),
            torch.from_numpy(weights[:, None]),
        )
        if self.device.type == "cpu":
            return made
        tensors: dict[str, Any] = {
            name: part.to(self.device) for name, part in made._asdict().items() if isinstance(part, Tensor)
        }
        return made._replace(**tensors)

    def update_priorities(self, indices: Any, priorities: Any) -> None:
        """Gives the transitions in these slots, `indices` of a batch, the priorities `|priorities|`: [n] each.

        Raises:
            IndexError: there is no such slot.
            ValueError: a priority is NaN or infinite, or there is not one for each. Nothing is changed.
        """
        magnitudes = np.abs(_array(priorities)).reshape(-1)
        self.buffer.update_priority(torch.from_numpy(_array(indices)), torch.from_numpy(magnitudes))

    def _observation(self, name: str, value: Any) -> npt.NDArray[Any]:
        """One observation as it is stored: `obs_shape`."""
        array = value if isinstance(value, np.ndarray) else np.asarray(value)
        if array.shape not in self._shapes:
            raise ValueError(f"{name} must have shape {self._shapes[0]} or {self._shapes[1]}, got {array.shape}")
        if array.dtype != self._dtype:
            if not np.can_cast(array.dtype, self._dtype, "same_kind"):
                raise TypeError(f"{name} is {array.dtype}, the buffer stores {self._dtype}: set observation_dtype")
            array = array.astype(self._dtype)
        return array.reshape(self.obs_shape)


class _Start:
    """A step whose n-step return is being summed."""

    __slots__ = ("action", "obs", "returned")

    def __init__(self, obs: bytes, action: int) -> None:
        self.obs = obs
        self.action = action
        self.returned = 0.0


class _RunningEpisode:
    """Steps of the running episode whose n-step return is not known yet: at most `n_step - 1`, the oldest first."""

    def __init__(self, n_step: int, gamma: float) -> None:
        if n_step < 1:
            raise ValueError(f"n_step must be 1 or more, got {n_step}")
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma must be 0 to 1, got {gamma}")
        self._discounts = [gamma**k for k in range(n_step)]
        self._starts: deque[_Start] = deque()
        self._following = b""  # the observation after the newest of them

    def advance(
        self, obs: bytes, action: int, reward: float, following: npt.NDArray[Any], terminated: bool, truncated: bool
    ) -> list[_Start]:
        """Takes a step in; the steps that are complete with it, whose next observation is `following`."""
        starts = self._starts
        if starts and obs != self._following:
            starts.clear()  # the episode before was cut off
        starts.append(_Start(obs, action))
        for start, discount in zip(reversed(starts), self._discounts, strict=False):
            start.returned += discount * reward
        complete: list[_Start] = []
        if terminated:
            complete = list(starts)
        elif len(starts) == len(self._discounts):
            complete = [starts.popleft()]
        if terminated or truncated:
            starts.clear()
        if starts:
            self._following = following.tobytes()
        return complete


def _single(name: str, value: Any) -> Any:
    """The one number in a value of one environment."""
    if type(value) is bool:
        return value
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    if array.size != 1:
        raise ValueError(f"{name} must be one number, that of one environment, got shape {array.shape}")
    return array.item()


def _array(values: Any) -> npt.NDArray[Any]:
    """Values of an array, a list or a tensor on any device."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
