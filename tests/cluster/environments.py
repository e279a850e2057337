"""An environment whose steps have numbers, a policy that acts with its weight, and a buffer that ends its writer."""

from __future__ import annotations

import itertools
import os
import secrets
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from engram.distributed import RayReplayBuffer
from engram.envs import GymEnv

_instances = itertools.count()


class Numbered(gym.Env):  # type: ignore[misc]
    """Observations are (process, instance, number of the step over all episodes); episodes have 7 steps."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def __init__(self, fails_at: int = -1, hangs_at: int = -1, marker: str | None = None) -> None:
        self._at, self._instance, self._fails_at = 0, next(_instances), fails_at
        self._hangs_at, self._marker = hangs_at, marker

    def _observation(self) -> Any:
        return np.array([os.getpid(), self._instance, self._at], np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self._at += 1
        if self._at == self._fails_at:
            raise RuntimeError("the simulator broke")
        if self._at == self._hangs_at and (self._marker is None or not os.path.exists(self._marker)):
            if self._marker is not None:
                open(self._marker, "x").close()  # the first one only
            time.sleep(1e6)
        return self._observation(), float(action[0]), self._at % 7 == 0, False, {}


class NumberedAnywhere(Numbered):
    """In place of the process, which has a number on its machine only, is one that no other has anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self._process = secrets.randbits(52)

    def _observation(self) -> Any:
        return np.array([self._process, self._instance, self._at], np.float64)


def env_of_any_machine() -> GymEnv:
    return GymEnv(NumberedAnywhere())


def make_env(fails_at: int = -1, hangs_at: int = -1, marker: str | None = None) -> Any:
    return GymEnv(Numbered(fails_at, hangs_at, marker))


def hanging_env() -> Any:
    """Making it does not end."""
    time.sleep(1e6)


class Constant(nn.Module):
    """Acts with its only weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, observation: Any) -> Any:
        return self.weight.expand(*observation.shape[:-1], 1)


class EndsFirstLives(RayReplayBuffer):
    """Ends the process of a collector's first life when its rows are in, before it can report them."""

    def flush(self, timeout: float | None = None) -> None:
        super().flush(timeout)
        if self._name.startswith("collector-") and self._name.split("-")[-2] == "0":
            os._exit(1)
