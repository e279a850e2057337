"""DQN on CartPole with tianshou's collectors and trainer, and the buffer that it is given."""

import time
from typing import Any

import gymnasium
import numpy as np
import torch
from tianshou.algorithm.modelfree.dqn import DQN, DiscreteQLearningPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OffPolicyTrainerParams
from tianshou.utils.net.common import Net


def main(make_buffer: Any, environments: int, epochs: int, n_step: int = 3, seed: int = 1) -> dict[str, Any]:
    """Test returns after each epoch of 1000 steps, a number that every weight has changed, and seconds."""
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    began = time.perf_counter()
    training, test = (DummyVectorEnv([lambda: gymnasium.make("CartPole-v1")] * n) for n in (environments, 10))
    training.seed(seed)
    test.seed(seed)
    space = gymnasium.make("CartPole-v1")
    policy = DiscreteQLearningPolicy(
        model=Net(
            state_shape=space.observation_space.shape, action_shape=space.action_space.n, hidden_sizes=[128, 128]
        ),
        action_space=space.action_space, eps_training=0.1, eps_inference=0.0,
    )  # fmt: skip
    algorithm = DQN(
        policy=policy, optim=AdamOptimizerFactory(lr=1e-3), gamma=0.99, n_step_return_horizon=n_step,
        target_update_freq=100,
    )  # fmt: skip
    collector = Collector(algorithm, training, make_buffer(), exploration_noise=True, raise_on_nan_in_buffer=True)
    collector.reset()
    collector.collect(n_step=500, random=True)
    returns: list[float] = []

    def keep(stats: Any) -> float:
        returns.append(float(stats.returns_stat.mean))
        return returns[-1]

    algorithm.run_training(
        OffPolicyTrainerParams(
            training_collector=collector, test_collector=Collector(algorithm, test), max_epochs=epochs,
            epoch_num_steps=1000, collection_step_num_env_steps=10 * environments, test_step_num_episodes=10,
            batch_size=64, update_step_num_gradient_steps_per_sample=0.1, compute_score_fn=keep, verbose=False,
            show_progress=False,
        )
    )  # fmt: skip
    return {
        "returns": returns,
        "weights": sum(p.double().abs().sum().item() for p in algorithm.policy.parameters()),
        "seconds": time.perf_counter() - began,
        "buffer": collector.buffer,
    }
