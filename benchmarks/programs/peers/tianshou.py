"""The programs under tianshou: its algorithms and trainers, with our networks and sizes."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from tianshou.algorithm import DQN, PPO, SAC
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
from tianshou.algorithm.modelfree.sac import AutoAlpha, SACPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, ReplayBuffer, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OffPolicyTrainerParams, OnPolicyTrainerParams
from tianshou.utils.net.common import ModuleWithVectorOutput, Net
from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic
from torch import nn

from benchmarks.programs import catch, dqn, pixel_dqn, ppo, sac
from benchmarks.programs.shares import Parts
from benchmarks.programs.turns import Program


class OffPolicy:
    """Random frames, then the trainer: some frames, some updates."""

    def __init__(
        self, algorithm: Any, collector: Any, *, frames: int, random_frames: int, frames_per_batch: int, **settings: Any
    ) -> None:
        self.algorithm, self.collector, self._random_frames = algorithm, collector, random_frames
        self._parameters = OffPolicyTrainerParams(
            training_collector=collector,
            max_epochs=1,
            epoch_num_steps=frames - random_frames,
            collection_step_num_env_steps=frames_per_batch,
            show_progress=False,
            verbose=False,
            **settings,
        )

    def parts(self) -> Parts:
        rows = self.collector.buffer
        return Parts(learner=[(self.algorithm, "update")], replay=[(rows, "sample"), (rows, "add")])

    def run(self) -> int:
        self.collector.reset()
        self.collector.collect(n_step=self._random_frames, random=True)
        self.algorithm.run_training(self._parameters)  # counts its own frames
        return self._random_frames + int(self.collector.collect_step)


def make_dqn(s: dqn.Settings) -> Program:
    torch.manual_seed(s.seed)
    env = gymnasium.make(s.env)
    net = Net(state_shape=4, action_shape=2, hidden_sizes=s.widths)
    return _dqn(net, env, ReplayBuffer(s.capacity), s)


class Convolutions(ModuleWithVectorOutput):
    """Our network in tianshou's form."""

    def __init__(self) -> None:
        super().__init__(pixel_dqn.ACTIONS)
        self.net = pixel_dqn.QNetwork()

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> tuple[torch.Tensor, Any]:
        return self.net(torch.as_tensor(obs)), state


def make_pixel_dqn(s: pixel_dqn.Settings) -> Program:
    torch.manual_seed(s.seed)
    env = gymnasium.wrappers.FrameStackObservation(catch.Catch(), pixel_dqn.STACK)
    env = gymnasium.wrappers.ReshapeObservation(env, (pixel_dqn.STACK, catch.SIZE, catch.SIZE))
    buffer = ReplayBuffer(s.capacity, stack_num=pixel_dqn.STACK, ignore_obs_next=True, save_only_last_obs=True)
    return _dqn(Convolutions(), env, buffer, s)


def _dqn(net: nn.Module, env: Any, buffer: ReplayBuffer, s: dqn.Settings) -> Program:
    policy = DiscreteQLearningPolicy(
        model=net, action_space=env.action_space, observation_space=env.observation_space, eps_training=1.0
    )
    algorithm = DQN(
        policy=policy,
        optim=AdamOptimizerFactory(lr=s.learning_rate),
        gamma=s.gamma,
        target_update_freq=s.copy_every,
        is_double=False,
    )
    return OffPolicy(
        algorithm,
        Collector(algorithm, env, buffer),
        frames=s.frames,
        random_frames=s.learning_starts,
        frames_per_batch=s.frames_per_batch,
        batch_size=s.batch_size,
        update_step_num_gradient_steps_per_sample=s.updates_per_batch / s.frames_per_batch,
        training_fn=lambda _, frames: policy.set_eps_training(s.epsilon(frames)),
    )


def make_sac(s: sac.Settings) -> Program:
    torch.manual_seed(s.seed)
    env, sizes = gymnasium.make(s.env), (s.width, s.width)
    actor = ContinuousActorProbabilistic(
        preprocess_net=Net(state_shape=3, hidden_sizes=sizes), action_shape=1, unbounded=True, conditioned_sigma=True
    )
    policy = SACPolicy(actor=actor, action_space=env.action_space, observation_space=env.observation_space)

    def critic() -> ContinuousCritic:
        return ContinuousCritic(preprocess_net=Net(state_shape=3, action_shape=1, hidden_sizes=sizes, concat=True))

    algorithm = SAC(
        policy=policy,
        policy_optim=AdamOptimizerFactory(lr=s.actor_rate),
        critic=critic(),
        critic_optim=AdamOptimizerFactory(lr=s.critic_rate),
        critic2=critic(),
        critic2_optim=AdamOptimizerFactory(lr=s.critic_rate),
        tau=s.target_rate,
        gamma=s.gamma,
        alpha=AutoAlpha(target_entropy=-1.0, log_alpha=0.0, optim=AdamOptimizerFactory(lr=s.critic_rate)),
    )
    return OffPolicy(
        algorithm,
        Collector(algorithm, env, ReplayBuffer(s.capacity)),
        frames=s.frames,
        random_frames=s.random_frames,
        frames_per_batch=1,
        batch_size=s.batch_size,
        update_step_num_gradient_steps_per_sample=1.0,
    )


class OnPolicy:
    """The trainer: a batch of frames, some epochs."""

    def __init__(self, algorithm: Any, collector: Any, s: ppo.Settings) -> None:
        self.algorithm, self.collector = algorithm, collector
        self._parameters = OnPolicyTrainerParams(
            training_collector=collector,
            max_epochs=1,
            epoch_num_steps=s.batches * s.steps * s.envs,
            collection_step_num_env_steps=s.steps * s.envs,
            batch_size=s.minibatch,
            update_step_num_repetitions=s.epochs,
            show_progress=False,
            verbose=False,
        )

    def parts(self) -> Parts:
        rows = self.collector.buffer
        return Parts(learner=[(self.algorithm, "update")], replay=[(rows, "sample"), (rows, "add")])

    def run(self) -> int:
        self.collector.reset()
        self.algorithm.run_training(self._parameters)
        return int(self.collector.collect_step)


def make_ppo(s: ppo.Settings) -> Program:
    torch.manual_seed(s.seed)
    np.random.seed(s.seed)
    env = gymnasium.make(s.env)
    envs = DummyVectorEnv([lambda: gymnasium.make(s.env) for _ in range(s.envs)])
    envs.seed(s.seed)

    def net() -> Net:
        return Net(state_shape=4, hidden_sizes=(64, 64), activation=nn.Tanh)

    policy = ProbabilisticActorPolicy(
        actor=DiscreteActor(preprocess_net=net(), action_shape=2, softmax_output=False),
        dist_fn=lambda logits: torch.distributions.Categorical(logits=logits),
        action_space=env.action_space,
        observation_space=env.observation_space,
        action_scaling=False,
        action_bound_method=None,
    )
    algorithm = PPO(
        policy=policy,
        critic=DiscreteCritic(preprocess_net=net()),
        optim=AdamOptimizerFactory(lr=s.learning_rate, eps=1e-5),
        eps_clip=s.clip,
        vf_coef=s.value,
        ent_coef=s.entropy,
        max_grad_norm=s.largest_norm,
        gae_lambda=s.lambda_,
        gamma=s.gamma,
        max_batchsize=s.minibatch,
    )
    return OnPolicy(algorithm, Collector(algorithm, envs, VectorReplayBuffer(s.steps * s.envs, s.envs)), s)
