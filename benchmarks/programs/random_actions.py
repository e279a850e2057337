"""Random actions in vector CartPole: what a collector costs beside a bare loop that keeps nothing.

The bare loop draws its actions before the clock starts. Calls that only reset an environment are no frames of either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
import torch

from benchmarks.programs.shares import Parts
from benchmarks.programs.turns import Row, in_all_forms, main
from engram.collectors import SyncDataCollector
from engram.envs import GymEnv


@dataclass(frozen=True)
class Settings:
    """Everything that decides how a run goes."""

    make: Callable[[int], Any]  # a vector environment of so many
    envs: int
    steps: int  # of each environment in a batch
    calls: int = 4_096
    seed: int = 1

    def shorter(self) -> Settings:
        return replace(self, calls=256)


class Bare:
    """Steps of the environments, and nothing else."""

    def __init__(self, s: Settings) -> None:
        self._env = s.make(s.envs)
        torch.manual_seed(s.seed)
        self._actions = torch.randint(2, (s.calls, s.envs)).numpy()
        self._env.reset()
        ended = [np.count_nonzero(np.logical_or(*self._env.step(row)[2:4])) for row in self._actions]
        self._frames = s.calls * s.envs - sum(ended)  # each end is followed by a call that only resets; about as many

    def parts(self) -> Parts:
        return Parts()

    def run(self) -> int:
        step = self._env.step
        for row in self._actions:
            step(row)
        return self._frames


class Engram:
    """A collector without a policy."""

    def __init__(self, s: Settings) -> None:
        self._collector = SyncDataCollector(
            GymEnv(s.make(s.envs)), frames_per_batch=s.steps * s.envs, total_frames=s.calls * s.envs
        )
        torch.manual_seed(s.seed)

    def parts(self) -> Parts:
        return Parts()

    def run(self) -> int:
        for _ in self._collector:
            pass
        return self._collector.frames


def native(envs: int) -> Any:
    return gymnasium.make_vec("CartPole-v1", envs, vectorization_mode="vector_entry_point")


def pool(envs: int) -> Any:
    """EnvPool's CartPole, stepped by one thread."""
    import envpool

    return envpool.make("CartPole-v1", env_type="gymnasium", num_envs=envs, num_threads=1, seed=1)


BOTH, MOST = in_all_forms(Bare, Engram), 1 / 0.9
ROWS = [
    Row(
        "program_random_32",
        "random actions, native vector of 64, batches of 32 steps",
        Settings(native, 64, 32),
        BOTH,
        most=MOST,
    ),
    Row(
        "program_random_128",
        "random actions, native vector of 64, batches of 128 steps",
        Settings(native, 64, 128),
        BOTH,
        most=MOST,
    ),
    Row(
        "program_pool_8",
        "random actions, EnvPool of 8, batches of 128 steps",
        Settings(pool, 8, 128, calls=16_384),
        BOTH,
        most=MOST,
    ),
    Row(
        "program_pool_64",
        "random actions, EnvPool of 64, batches of 128 steps",
        Settings(pool, 64, 128, calls=8_192),
        BOTH,
        most=MOST,
    ),
]

if __name__ == "__main__":
    main(__doc__, ROWS)
