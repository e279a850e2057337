"""Transitions of several environments side by side, as trainers of other libraries write them and read them back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engram.data import LazyTensorStorage, ReplayBuffer, Storage
from engram.pytree import KeyPath

#: Makes a storage: called with the number of steps of all environments together, and `ndim=2`.
MakeStorage: TypeAlias = Callable[..., Storage]

REFUSES_SHARED_OBSERVATIONS = (
    "optimize_memory_usage=True keeps each next observation in the row of the step after it, which at the end of an "
    "episode is one of another episode. Rows here hold both: leave it out, and where memory is short halve buffer_size "
    "or keep the rows in a file, storage=LazyMemmapStorage"
)


class TransitionRows:
    """A ring of `steps` time steps of `n_envs` environments, in an engram `buffer` under the usual keys.

    Trainers may call a step truncated that they do not call done. `("next", "done")` is `done | truncated`, where
    every reader of engram ends an episode; `("next", "reported_done")` is the flag that the trainer gave.

    Args:
        observation_space, action_space: of one environment, as gymnasium has them: a Dict, or one with a shape and a
            dtype. Observations are stored as their space has them, actions as vectors.
    """

    def __init__(
        self,
        steps: int,
        n_envs: int,
        observation_space: Any,
        action_space: Any,
        storage: MakeStorage = LazyTensorStorage,
    ) -> None:
        self.steps = steps
        self.n_envs = n_envs
        self.buffer = ReplayBuffer(storage=storage(steps * n_envs, ndim=2))
        self._observation_space = observation_space
        self._action_size = math.prod(action_space.shape)
        self._action_dtype = np.dtype(np.float32 if action_space.dtype == np.float64 else action_space.dtype)

    # ---- where the ring stands: the storage's counters say it ----
    @property
    def position(self) -> int:
        """The time slot that the next step goes to."""
        return self.buffer.write_count // self.n_envs % self.steps

    @property
    def is_full(self) -> bool:
        return len(self.buffer) == self.steps * self.n_envs

    # ---- writing and reading ----
    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, truncated: Any) -> None:
        """Stores one time step: arrays `[n_envs, ...]`; an episode ends where it is done or truncated."""
        done, truncated = self._per_env(done, np.bool_), self._per_env(truncated, np.bool_)
        step = {
            "observation": self._observations(obs, self._observation_space),
            "action": np.asarray(action, self._action_dtype).reshape(self.n_envs, self._action_size),
            "next": {
                "observation": self._observations(next_obs, self._observation_space),
                "reward": self._per_env(reward, np.float32),
                "done": done | truncated,
                "reported_done": done,
                "terminated": done & ~truncated,
                "truncated": truncated,
            },
        }
        storage = self.buffer.storage
        with storage.mutex:  # as `buffer.add`, without the index of each environment, which takes longer than the rest
            self.buffer.writer.write(storage, step, single=True, time_dim=-1)

    def read(self, times: npt.NDArray[Any], envs: npt.NDArray[Any]) -> dict[str, Any]:
        """The transitions at time slots and environments, int64 [n] each: tensors `[n, ...]` under their keys.

        Raises:
            IndexError: one that has not been written.
        """
        batch: dict[str, Any] = read_slots(self.buffer, times * self.n_envs + envs)
        return batch

    def column(self, path: KeyPath, times: npt.NDArray[Any], envs: npt.NDArray[Any]) -> Tensor:
        """One entry of these steps, also of slots that have not been written, where it means nothing: [n, ...]."""
        storage = self.buffer.storage
        with storage.mutex:
            return storage.column(path, torch.from_numpy(times))[torch.arange(len(times)), torch.from_numpy(envs)]

    def stored(self, *path: str) -> Any:
        """One entry of all stored steps, in the order of their slots, to look at: arrays `[time, n_envs, ...]`."""
        if not len(self.buffer):
            raise AttributeError(f"nothing has been added yet, and so there is no {path!r} to look at")
        entry = self.buffer.storage[:]
        for key in path:
            entry = entry[key]
        return _read_only(entry)

    def _per_env(self, value: Any, dtype: Any) -> npt.NDArray[Any]:
        return np.asarray(value, dtype).reshape(self.n_envs, 1)

    def _observations(self, value: Any, space: Any) -> Any:
        """Observations of all environments in the shapes and dtypes of their space; the shape of a number is (1,)."""
        if isinstance(space, Mapping):
            return {key: self._observations(value[key], part) for key, part in space.items()}
        return np.asarray(value, space.dtype).reshape(self.n_envs, *(space.shape or (1,)))


def read_slots(buffer: ReplayBuffer, slots: npt.NDArray[Any]) -> Any:
    """The rows of slots, int64 [n]. IndexError: one that has not been written."""
    storage, at = buffer.storage, torch.from_numpy(slots)
    rows = storage.read(at)
    if rows.absent is None and rows.overwritten is None:
        return rows.batch
    return storage.get(storage.from_slots(at))  # which names what is absent, and reads again


def _read_only(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {key: _read_only(part) for key, part in entry.items()}
    array = entry.numpy()
    array.flags.writeable = False
    return array
