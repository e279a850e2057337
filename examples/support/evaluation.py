"""How good a network is when it does not explore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from engram.collectors import SyncDataCollector
from engram.envs import SerialEnv
from support.dqn import Greedy

FIRST_SEED = 10_000
LONGEST_EPISODE = 500


class Evaluation:
    """Plays the same `episodes` starts each time, side by side, in environments of their own."""

    def __init__(self, make_env: Callable[[], Any], q: nn.Module, episodes: int) -> None:
        self._collector = SyncDataCollector(
            SerialEnv(episodes, make_env),
            Greedy(q),
            frames_per_batch=episodes * LONGEST_EPISODE,
            reset_at_each_iter=True,
        )

    def mean_return(self) -> float:
        """The mean over the first episode of each environment."""
        self._collector.set_seed(FIRST_SEED)
        following = self._collector.rollout()["next"]  # [episodes, time]
        done, reward = following["done"].squeeze(-1).int(), following["reward"].squeeze(-1)
        in_first_episode = done.cumsum(1) - done == 0
        return float((reward * in_first_episode).sum(1).mean())
