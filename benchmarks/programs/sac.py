"""SAC on Pendulum-v1, in CleanRL's form: an actor, two critics with slow copies, a temperature, an update each step."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.programs.shares import Parts
from benchmarks.programs.turns import Row, in_all_forms, main
from engram.collectors import SyncDataCollector
from engram.data import LazyTensorStorage, TensorDictReplayBuffer
from engram.envs import GymEnv

Array = np.ndarray


@dataclass(frozen=True)
class Settings:
    """Everything that decides how a run goes; equal in all forms."""

    env: str = "Pendulum-v1"
    frames: int = 240
    random_frames: int = 48  # at the beginning, before the first update
    capacity: int = 10_000
    batch_size: int = 256
    width: int = 256
    actor_rate: float = 3e-4
    critic_rate: float = 1e-3
    gamma: float = 0.99
    target_rate: float = 0.005
    seed: int = 1

    def shorter(self) -> Settings:
        return replace(self, frames=self.random_frames + 16)


LARGEST = 2.0  # torque
LEAST_LOG_STD, LARGEST_LOG_STD = -5.0, 2.0


def mlp(inputs: int, outputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


class Actor(nn.Module):
    """A squashed Gaussian; uniform torques while `is_random`."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.net, self.is_random = mlp(3, 2, s.width), True

    def drawn(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Actions `[batch, 1]` and their log-probabilities `[batch, 1]`."""
        mean, log_std = self.net(observation).chunk(2, -1)
        log_std = LEAST_LOG_STD + 0.5 * (LARGEST_LOG_STD - LEAST_LOG_STD) * (log_std.tanh() + 1)
        policy = torch.distributions.Normal(mean, log_std.exp())
        raw = policy.rsample()
        squashed = raw.tanh()
        log_prob = policy.log_prob(raw) - (LARGEST * (1 - squashed.square()) + 1e-6).log()
        return LARGEST * squashed, log_prob.sum(-1, keepdim=True)

    def forward(self, observation: Tensor) -> Tensor:
        """The action `[1]` for an observation `[3]`."""
        if self.is_random:
            return torch.rand(1) * (2 * LARGEST) - LARGEST
        return self.drawn(observation)[0]


class Critics(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.nets = nn.ModuleList(mlp(4, 1, s.width) for _ in range(2))

    def forward(self, observation: Tensor, action: Tensor) -> list[Tensor]:
        pairs = torch.cat([observation, action], -1)
        return [net(pairs) for net in self.nets]


class Learner:
    """Actor, critics, their slow copies, the temperature, and one step of each."""

    def __init__(self, actor: Actor, s: Settings) -> None:
        self.actor, self.critics = actor, Critics(s)
        self._targets = copy.deepcopy(self.critics).requires_grad_(False)
        self._log_temperature = torch.zeros(1, requires_grad=True)
        self._of_actor = torch.optim.Adam(actor.parameters(), lr=s.actor_rate)
        self._of_critics = torch.optim.Adam(self.critics.parameters(), lr=s.critic_rate)
        self._of_temperature = torch.optim.Adam([self._log_temperature], lr=s.critic_rate)
        self._s = s

    def update(
        self, observation: Tensor, action: Tensor, reward: Tensor, next_observation: Tensor, terminated: Tensor
    ) -> None:
        """One step on transitions `[batch]`, actions `[batch, 1]`."""
        s, temperature = self._s, math.exp(self._log_temperature.item())
        with torch.no_grad():
            next_action, next_log_prob = self.actor.drawn(next_observation)
            lowest = torch.minimum(*self._targets(next_observation, next_action))
            following = (lowest - temperature * next_log_prob).squeeze(1)
            goal = (reward + s.gamma * following * ~terminated).unsqueeze(1)
        errors = [nn.functional.mse_loss(value, goal) for value in self.critics(observation, action)]
        self._step(self._of_critics, errors[0] + errors[1])
        drawn, log_prob = self.actor.drawn(observation)
        self._step(self._of_actor, (temperature * log_prob - torch.minimum(*self.critics(observation, drawn))).mean())
        self._step(self._of_temperature, -(self._log_temperature.exp() * (log_prob.detach() - 1.0)).mean())
        with torch.no_grad():
            for slow, fast in zip(self._targets.parameters(), self.critics.parameters(), strict=True):
                slow.lerp_(fast, s.target_rate)

    def _step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class ByHand:
    """One loop, and a ring of NumPy arrays."""

    def __init__(self, s: Settings) -> None:
        torch.manual_seed(s.seed)
        self._s, self.actor = s, Actor(s)
        self.learner = Learner(self.actor, s)
        self.env = gymnasium.make(s.env)
        self._generator = np.random.default_rng(s.seed)
        self.observations = np.zeros((s.capacity, 3), np.float32)
        self.next_observations = np.zeros((s.capacity, 3), np.float32)
        self.actions = np.zeros((s.capacity, 1), np.float32)
        self.rewards = np.zeros(s.capacity, np.float32)
        self.terminations = np.zeros(s.capacity, np.bool_)

    def draw(self, stored: int) -> Array:
        """The slots of a batch."""
        return self._generator.integers(stored, size=self._s.batch_size)

    def sample(self, stored: int) -> tuple[Tensor, ...]:
        slots = self.draw(stored)
        columns = (self.observations, self.actions, self.rewards, self.next_observations, self.terminations)
        return tuple(torch.from_numpy(column[slots]) for column in columns)

    def parts(self) -> Parts:
        return Parts(learner=[(self.learner, "update")], replay=[(self, "sample")])

    def run(self) -> int:
        s, env = self._s, self.env
        observation, _ = env.reset(seed=s.seed)
        for frame in range(s.frames):
            self.actor.is_random = frame < s.random_frames
            with torch.no_grad():
                action = self.actor(torch.from_numpy(observation)).numpy()
            following, reward, terminated, truncated, _ = env.step(action)
            slot = frame % s.capacity
            self.observations[slot] = observation
            self.next_observations[slot] = following
            self.actions[slot] = action
            self.rewards[slot] = reward
            self.terminations[slot] = terminated
            observation = env.reset()[0] if terminated or truncated else following
            if frame >= s.random_frames:
                self.learner.update(*self.sample(min(frame + 1, s.capacity)))
        return s.frames


class Engram:
    """A collector that writes into a replay buffer, and a loop over updates."""

    def __init__(self, s: Settings) -> None:
        torch.manual_seed(s.seed)
        self._s, self.actor = s, Actor(s)
        self.learner = Learner(self.actor, s)
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(s.capacity),
            batch_size=s.batch_size,
            generator=torch.Generator().manual_seed(s.seed),
        )
        self.collector = SyncDataCollector(
            lambda: GymEnv(s.env),
            self.actor,
            frames_per_batch=1,
            total_frames=s.frames,
            replay_buffer=self.buffer,
        )
        self.collector.set_seed(s.seed)

    def sample(self) -> tuple[Tensor, ...]:
        batch = self.buffer.sample()
        following = batch["next"]
        return (
            batch["observation"],
            batch["action"],
            following["reward"].squeeze(1),
            following["observation"],
            following["terminated"].squeeze(1),
        )

    def parts(self) -> Parts:
        return Parts(learner=[(self.learner, "update")], replay=[(self, "sample"), (self.buffer, "extend")])

    def run(self) -> int:
        s, collector = self._s, self.collector
        for _ in collector:
            if collector.frames > s.random_frames:
                self.learner.update(*self.sample())
            self.actor.is_random = collector.frames < s.random_frames
        return collector.frames


ROWS = [Row("program_sac", "SAC, an update each step", Settings(), in_all_forms(ByHand, Engram, "make_sac"))]

if __name__ == "__main__":
    main(__doc__, ROWS)
