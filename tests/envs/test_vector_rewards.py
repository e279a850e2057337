"""Rewards that are vectors: environments with a `reward_space`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from contracts.each import each
from engram.collectors import SyncDataCollector
from engram.data import LazyTensorStorage, TensorDictReplayBuffer
from engram.envs import Compose, GymEnv, ParallelEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv
from engram.specs import Unbounded


class TwoObjectives(gymnasium.Env[Any, Any]):
    """Observes t; step t gives the reward [t, -t / 10]. An episode has 4 steps."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 9, (1,))
        self.action_space = spaces.Discrete(2)
        self.reward_space = spaces.Box(-10, 10, (2,))
        self.t = 0

    def reset(self, **kwargs: Any) -> Any:
        super().reset(**kwargs)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.array([self.t], np.float32), np.array([self.t, -self.t / 10]), self.t == 4, False, {}


class LinearReward(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Named as mo-gymnasium's: the sum of the vector, below which the space stays."""

    def step(self, action: Any) -> Any:
        observation, reward, *rest = self.env.step(action)
        return observation, float(np.sum(reward)), *rest


def make() -> GymEnv:
    return GymEnv(TwoObjectives())


@each(
    "make_env",
    [
        make,
        lambda: SerialEnv(2, make),
        lambda: ParallelEnv(2, make),
        lambda: TransformedEnv(make(), Compose(StepCounter(3), RewardSum())),
    ],
)
def test_vectors_are_collected_and_sampled(make_env):
    env = make_env()
    assert env.reward_spec == Unbounded((*env.batch_size, 2))
    collector = SyncDataCollector(env, None, frames_per_batch=12, total_frames=24)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=24)
    for batch in collector:
        buffer.extend(batch.reshape(-1))
    sample = buffer.sample()
    t = sample["next", "observation"]
    torch.testing.assert_close(sample["next", "reward"], torch.cat([t, -t / 10], -1))
    collector.shutdown()
    env.close()


def test_episode_rewards_and_skipped_frames_add_vectors_up():
    summed = TransformedEnv(make(), RewardSum()).rollout(4)["next", "episode_reward"]
    torch.testing.assert_close(summed[-1], torch.tensor([10.0, -1.0]))
    skipped = GymEnv(TwoObjectives(), frame_skip=2).rollout(2)["next", "reward"]
    torch.testing.assert_close(skipped, torch.tensor([[3.0, -0.3], [7.0, -0.7]]))


def test_a_vector_environment_with_a_place_for_vectors_is_stepped():
    class TwoRows(SyncVectorEnv):
        reward_space = spaces.Box(-10, 10, (2,))

        def __init__(self) -> None:
            super().__init__([TwoObjectives, TwoObjectives])
            self._rewards = np.zeros((2, 2))

    rewards = GymEnv(TwoRows()).rollout(6, break_when_any_done=False)["next", "reward"]
    assert rewards.shape == (2, 6, 2) and rewards[0, :4, 0].tolist() == [1, 2, 3, 4]


def test_a_vector_environment_without_such_a_place_is_refused_at_once():
    with pytest.raises(ValueError, match="SerialEnv or ParallelEnv"):
        GymEnv(SyncVectorEnv([TwoObjectives]))


def test_rewards_that_a_wrapper_made_one_number_are_one_number():
    assert GymEnv(LinearReward(TwoObjectives())).rollout(2)["next", "reward"].shape == (2, 1)


def test_a_reward_of_another_shape_is_refused():
    class Short(TwoObjectives):
        def step(self, action: Any) -> Any:
            observation, _, *rest = super().step(action)
            return observation, np.zeros(3), *rest

    with pytest.raises(ValueError, match=r"\(3,\)"):
        GymEnv(Short()).rollout(1)
