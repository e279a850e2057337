"""The programs under TorchRL: its collectors, losses and buffers, with our networks and sizes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import CatFrames, GymEnv, GymWrapper, SerialEnv, TransformedEnv
from torchrl.modules import EGreedyModule, ProbabilisticActor, QValueActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss, DQNLoss, HardUpdate, SACLoss, SoftUpdate
from torchrl.objectives.value import GAE

from benchmarks.programs import catch, dqn, pixel_dqn, ppo, sac
from benchmarks.programs.shares import Parts
from benchmarks.programs.turns import Program

logging.getLogger("torchrl").setLevel(logging.ERROR)


class DQN:
    """A collector, a buffer, and a loop over updates."""

    def __init__(self, s: dqn.Settings, env: Any, net: nn.Module, key: str, *, left_out: tuple[Any, ...] = ()) -> None:
        self._s, self._left_out = s, left_out
        self.buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(s.capacity), batch_size=s.batch_size)
        actor = QValueActor(net, in_keys=[key], spec=env.action_spec)
        self.explorer = EGreedyModule(
            env.action_spec, eps_init=1.0, eps_end=s.least_epsilon, annealing_num_steps=s.explore_for
        )
        self.loss = DQNLoss(actor, loss_function="l2", delay_value=True, double_dqn=False, action_space=env.action_spec)
        self.loss.make_value_estimator(gamma=s.gamma)
        self._target = HardUpdate(self.loss, value_network_update_interval=s.copy_every)
        self._optimizer = torch.optim.Adam(self.loss.parameters(), lr=s.learning_rate)
        self.collector = Collector(
            env,
            TensorDictSequential(actor, self.explorer),
            frames_per_batch=s.frames_per_batch,
            total_frames=s.frames,
        )

    def update(self, batch: TensorDictBase) -> None:
        loss = self.loss(batch)["loss"]
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self._target.step()

    def parts(self) -> Parts:
        return Parts(learner=[(self, "update")], replay=[(self.buffer, "sample"), (self.buffer, "extend")])

    def run(self) -> int:
        s, frames = self._s, 0
        for batch in self.collector:
            self.buffer.extend(batch.exclude(*self._left_out) if self._left_out else batch)
            self.explorer.step(batch.numel())
            frames += batch.numel()
            if frames > s.learning_starts:
                for _ in range(s.updates_per_batch):
                    self.update(self.buffer.sample())
        self.collector.shutdown()
        return frames


def make_dqn(s: dqn.Settings) -> Program:
    torch.manual_seed(s.seed)
    env = GymEnv(s.env)
    env.set_seed(s.seed)
    return DQN(s, env, dqn.q_network(s), "observation")


def make_pixel_dqn(s: pixel_dqn.Settings) -> Program:
    torch.manual_seed(s.seed)
    stacked = CatFrames(pixel_dqn.STACK, dim=-3, in_keys=["observation"], out_keys=["stack"])
    env = TransformedEnv(GymWrapper(catch.Catch()), stacked)
    env.set_seed(s.seed)
    return DQN(s, env, pixel_dqn.QNetwork(), "stack", left_out=("observation", ("next", "observation")))


class SAC:
    """A collector, a buffer, and a loop over updates."""

    def __init__(self, s: sac.Settings) -> None:
        torch.manual_seed(s.seed)
        self._s = s
        env = GymEnv(s.env)
        env.set_seed(s.seed)
        net = nn.Sequential(sac.mlp(3, 2, s.width), NormalParamExtractor())
        actor = ProbabilisticActor(
            TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
            in_keys=["loc", "scale"],
            spec=env.action_spec,
            distribution_class=TanhNormal,
            distribution_kwargs={"low": -sac.LARGEST, "high": sac.LARGEST},
        )
        critic = ValueOperator(_Pairs(s), in_keys=["observation", "action"])
        self.loss = SACLoss(actor, critic, num_qvalue_nets=2, loss_function="l2", action_spec=env.action_spec)
        self.loss.make_value_estimator(gamma=s.gamma)
        self._target = SoftUpdate(self.loss, tau=s.target_rate)
        self._optimizers = {
            "loss_qvalue": torch.optim.Adam(self.loss.qvalue_network_params.flatten_keys().values(), lr=s.critic_rate),
            "loss_actor": torch.optim.Adam(self.loss.actor_network_params.flatten_keys().values(), lr=s.actor_rate),
            "loss_alpha": torch.optim.Adam([self.loss.log_alpha], lr=s.critic_rate),
        }
        self.buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(s.capacity), batch_size=s.batch_size)
        self.collector = Collector(
            env, actor, frames_per_batch=1, total_frames=s.frames, init_random_frames=s.random_frames
        )

    def update(self, batch: TensorDictBase) -> None:
        losses = self.loss(batch)
        sum(losses[key] for key in self._optimizers).backward()
        for optimizer in self._optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        self._target.step()

    def parts(self) -> Parts:
        return Parts(learner=[(self, "update")], replay=[(self.buffer, "sample"), (self.buffer, "extend")])

    def run(self) -> int:
        frames = 0
        for batch in self.collector:
            self.buffer.extend(batch)
            frames += batch.numel()
            if frames > self._s.random_frames:
                self.update(self.buffer.sample())
        self.collector.shutdown()
        return frames


class _Pairs(nn.Module):
    def __init__(self, s: sac.Settings) -> None:
        super().__init__()
        self.net = sac.mlp(4, 1, s.width)

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([observation, action], -1))


class PPO:
    """A collector, advantages, and epochs over a buffer of one batch."""

    def __init__(self, s: ppo.Settings) -> None:
        torch.manual_seed(s.seed)
        self._s, agent = s, ppo.Agent()
        env = SerialEnv(s.envs, lambda: GymEnv(s.env, categorical_action_encoding=True))
        env.set_seed(s.seed)
        actor = ProbabilisticActor(
            TensorDictModule(agent.actor, in_keys=["observation"], out_keys=["logits"]),
            in_keys=["logits"],
            spec=env.full_action_spec["action"],
            distribution_class=Categorical,
            return_log_prob=True,
        )
        critic = ValueOperator(agent.critic, in_keys=["observation"])
        self.advantages = GAE(gamma=s.gamma, lmbda=s.lambda_, value_network=critic, average_gae=False)
        self.loss = ClipPPOLoss(
            actor,
            critic,
            clip_epsilon=s.clip,
            entropy_coeff=s.entropy,
            critic_coeff=s.value,
            loss_critic_type="l2",
            normalize_advantage=True,
        )
        self._optimizer = torch.optim.Adam(self.loss.parameters(), lr=s.learning_rate, eps=1e-5)
        frames = s.steps * s.envs
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(frames), sampler=SamplerWithoutReplacement(), batch_size=s.minibatch
        )
        self.collector = Collector(env, actor, frames_per_batch=frames, total_frames=s.batches * frames)

    def update(self, batch: TensorDictBase) -> None:
        losses = self.loss(batch)
        self._optimizer.zero_grad()
        (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
        nn.utils.clip_grad_norm_(self.loss.parameters(), self._s.largest_norm)
        self._optimizer.step()

    @torch.no_grad()
    def put_advantages(self, batch: TensorDictBase) -> None:
        self.advantages(batch)

    def minibatches(self) -> Iterator[TensorDictBase]:
        """An epoch over the batch in the buffer."""
        return iter(self.buffer)

    def parts(self) -> Parts:
        learner = [(self, "put_advantages"), (self, "update")]
        return Parts(learner=learner, replay=[(self.buffer, "extend")], iterators=[(self, "minibatches")])

    def run(self) -> int:
        frames = 0
        for batch in self.collector:
            self.put_advantages(batch)
            self.buffer.extend(batch.reshape(-1))
            for _ in range(self._s.epochs):
                for minibatch in self.minibatches():
                    self.update(minibatch)
            frames += batch.numel()
        self.collector.shutdown()
        return frames


make_sac, make_ppo = SAC, PPO
