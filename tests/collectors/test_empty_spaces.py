"""Spaces without a number: observations and actions of shape (0,) are collected as all others are."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from torch import nn

from contracts.each import each
from contracts.gym_loop import Proxy
from engram.collectors import SyncDataCollector
from engram.data import LazyTensorStorage, ReplayBuffer
from engram.envs import GymEnv, ParallelEnv, SerialEnv


class World(gymnasium.Env):
    """Episodes of three steps."""

    def __init__(self, seen, action):
        self.observation_space, self.action_space, self.steps = seen, action, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        return self.observation_space.sample(), 1.0, self.steps % 3 == 0, False, {}


def box(*shape):
    return Box(-1, 1, shape, np.float32)


def made(path, *spaces):
    if path in ("NextStep", "SameStep", "Disabled"):
        return GymEnv(gymnasium.vector.SyncVectorEnv([lambda: World(*spaces)] * 2, autoreset_mode=path))

    def one():
        return GymEnv(World(*spaces))

    if path == "parallel":
        return ParallelEnv(2, one, num_workers=1)
    return {"single": one, "stepped": lambda: Proxy(one()), "serial": lambda: SerialEnv(2, one)}[path]()


PATHS = ["single", "serial", "stepped", "parallel", "NextStep", "SameStep", "Disabled"]
SPACES = {
    "(0,)": box(0),
    "(3, 0)": box(3, 0),
    "dict": Dict(a=box(0), b=box(2)),
    "only": Dict(a=box(0)),
    "tuple": Tuple([box(2), box(0)]),
}


@each("space", SPACES)
@each("path", PATHS)
def test_observations_without_a_number_are_collected(path, space):
    env, rb = made(path, SPACES[space], Discrete(2)), ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    collector = SyncDataCollector(env, frames_per_batch=20, total_frames=60, replay_buffer=rb)
    list(collector)
    key = {"dict": "a", "only": "a", "tuple": ("observation", "1")}.get(space, "observation")
    shape = (3, 0) if space == "(3, 0)" else (0,)
    for rows in (rb[:], rb.sample()):
        assert rows[key].shape[1:] == rows["next"][key].shape[1:] == shape
    assert len(rb) == 60 and rb[:]["next", "reward"].sum() == 60 and collector.stats.episodes > 0
    env.close()


class NoNumbers(nn.Module):
    def forward(self, observation):
        return observation[..., :0]


@each("policy", [None, NoNumbers()])
@each("path", PATHS)
def test_actions_without_a_number_are_taken(path, policy):
    env = made(path, box(2), box(0))
    batch = SyncDataCollector(env, policy, frames_per_batch=20).rollout()
    assert batch["action"].shape == (*batch.shape, 0) and batch.numel() == 20
    env.close()
