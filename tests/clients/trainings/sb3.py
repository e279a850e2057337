"""Trainings with stable-baselines3, its own replay buffer or another one: what they learnt, and how long it took."""

import time
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3 import DQN, SAC, TD3
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize


class DictPendulum(gymnasium.ObservationWrapper):
    """Pendulum whose observation is a dict of an angle and a speed."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("Pendulum-v1"))
        low, high = self.env.observation_space.low, self.env.observation_space.high
        self.observation_space = gymnasium.spaces.Dict(
            angle=gymnasium.spaces.Box(low[:2], high[:2]), speed=gymnasium.spaces.Box(low[2:], high[2:])
        )

    def observation(self, observation: np.ndarray) -> dict[str, np.ndarray]:
        return {"angle": observation[:2], "speed": observation[2:]}


def dqn_cartpole(buffer: Any, steps: int) -> DQN:
    return DQN(
        "MlpPolicy", "CartPole-v1", learning_rate=2.3e-3, batch_size=64, buffer_size=100_000, learning_starts=1000,
        target_update_interval=10, train_freq=256, gradient_steps=128, exploration_fraction=0.16,
        exploration_final_eps=0.04, policy_kwargs={"net_arch": [256, 256]}, seed=1, device="cpu",
        replay_buffer_class=buffer,
    ).learn(steps)  # fmt: skip


def sac_pendulum(buffer: Any, steps: int) -> SAC:
    return SAC("MlpPolicy", "Pendulum-v1", learning_rate=1e-3, seed=1, device="cpu", replay_buffer_class=buffer).learn(
        steps
    )


def td3_dict_in_four_environments(buffer: Any, steps: int) -> TD3:
    environments = VecNormalize(make_vec_env(DictPendulum, 4, seed=1))
    return TD3(
        "MultiInputPolicy", environments, learning_rate=1e-3, buffer_size=2000, batch_size=32, gradient_steps=1,
        policy_kwargs={"net_arch": [32]}, seed=1, device="cpu", replay_buffer_class=buffer,
    ).learn(steps)  # fmt: skip


def outcome(train: Any, buffer: Any, steps: int) -> dict[str, Any]:
    """Returns of the last episodes, a number that every weight has changed, and seconds."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    model = train(buffer, steps)
    return {
        "returns": [float(episode["r"]) for episode in model.ep_info_buffer],
        "weights": sum(p.double().abs().sum().item() for p in model.policy.parameters()),
        "seconds": time.perf_counter() - began,
    }
