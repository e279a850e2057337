"""The programs under stable-baselines3: its algorithms, with our sizes."""

from __future__ import annotations

from typing import Any

import gymnasium
import torch
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.env_util import make_vec_env

from benchmarks.programs import catch, dqn, pixel_dqn, ppo, sac
from benchmarks.programs.shares import Parts
from benchmarks.programs.turns import Program


class Learning:
    """A run of `learn`."""

    def __init__(self, model: Any, frames: int) -> None:
        self.model, self._frames = model, frames

    def parts(self) -> Parts:
        rows, learner = getattr(self.model, "replay_buffer", None), [(self.model, "train")]
        if rows is not None:
            return Parts(learner=learner, replay=[(rows, "sample"), (rows, "add")])
        rows = self.model.rollout_buffer
        learner.append((rows, "compute_returns_and_advantage"))
        return Parts(learner=learner, replay=[(rows, "add")], iterators=[(rows, "get")])

    def run(self) -> int:
        self.model.learn(self._frames)
        return int(self.model.num_timesteps)


def make_dqn(s: dqn.Settings) -> Program:
    return Learning(_dqn("MlpPolicy", gymnasium.make(s.env), s, {"net_arch": list(s.widths)}), s.frames)


def make_pixel_dqn(s: pixel_dqn.Settings) -> Program:
    env = gymnasium.wrappers.FrameStackObservation(catch.Catch(), pixel_dqn.STACK)
    env = gymnasium.wrappers.ReshapeObservation(env, (pixel_dqn.STACK, catch.SIZE, catch.SIZE))
    return Learning(_dqn("CnnPolicy", env, s, {}), s.frames)


def _dqn(policy: str, env: Any, s: dqn.Settings, policy_kwargs: dict[str, Any]) -> DQN:
    return DQN(
        policy,
        env,
        learning_rate=s.learning_rate,
        buffer_size=s.capacity,
        learning_starts=s.learning_starts,
        batch_size=s.batch_size,
        gamma=s.gamma,
        train_freq=s.frames_per_batch,
        gradient_steps=s.updates_per_batch,
        target_update_interval=s.copy_every * s.frames_per_batch // s.updates_per_batch,
        exploration_fraction=s.explore_for / s.frames,
        exploration_final_eps=s.least_epsilon,
        max_grad_norm=float("inf"),
        policy_kwargs=policy_kwargs,
        seed=s.seed,
        device="cpu",
    )


def make_sac(s: sac.Settings) -> Program:
    model = SAC(
        "MlpPolicy",
        gymnasium.make(s.env),
        learning_rate=s.actor_rate,
        buffer_size=s.capacity,
        learning_starts=s.random_frames,
        batch_size=s.batch_size,
        tau=s.target_rate,
        gamma=s.gamma,
        policy_kwargs={"net_arch": [s.width, s.width]},
        seed=s.seed,
        device="cpu",
    )
    return Learning(model, s.frames)


def make_ppo(s: ppo.Settings) -> Program:
    model = PPO(
        "MlpPolicy",
        make_vec_env(s.env, s.envs, seed=s.seed),
        learning_rate=s.learning_rate,
        n_steps=s.steps,
        batch_size=s.minibatch,
        n_epochs=s.epochs,
        gamma=s.gamma,
        gae_lambda=s.lambda_,
        clip_range=s.clip,
        ent_coef=s.entropy,
        vf_coef=s.value,
        max_grad_norm=s.largest_norm,
        policy_kwargs={"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": torch.nn.Tanh},
        seed=s.seed,
        device="cpu",
    )
    return Learning(model, s.batches * s.steps * s.envs)
