"""DQN on CartPole-v1, in CleanRL's form: epsilon-greedy actions, a ring of transitions, a target network."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, replace

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

    env: str = "CartPole-v1"
    frames: int = 1_280
    frames_per_batch: int = 1  # steps between updates
    updates_per_batch: int = 1
    learning_starts: int = 256
    capacity: int = 10_000
    batch_size: int = 128
    learning_rate: float = 2.5e-4
    gamma: float = 0.99
    copy_every: int = 100  # updates
    explore_for: int = 640  # frames in which epsilon falls from 1 to
    least_epsilon: float = 0.05
    widths: tuple[int, int] = (120, 84)
    seed: int = 1

    def shorter(self) -> Settings:
        return replace(self, frames=self.learning_starts + 64)

    def epsilon(self, frames: int) -> float:
        return max(self.least_epsilon, 1 - (1 - self.least_epsilon) * frames / self.explore_for)


def q_network(s: Settings) -> nn.Sequential:
    first, second = s.widths
    return nn.Sequential(nn.Linear(4, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, 2))


class Learner:
    """The network, its target copy, and one gradient step."""

    def __init__(self, q: nn.Module, s: Settings) -> None:
        self.q, self.updates = q, 0
        self._target = copy.deepcopy(q).requires_grad_(False)
        self._optimizer = torch.optim.Adam(q.parameters(), lr=s.learning_rate)
        self._gamma, self._copy_every = s.gamma, s.copy_every

    def update(
        self, observation: Tensor, action: Tensor, reward: Tensor, next_observation: Tensor, terminated: Tensor
    ) -> None:
        """One step on transitions `[batch]`."""
        with torch.no_grad():
            best = self._target(next_observation).max(1).values
            goal = reward + self._gamma * best * ~terminated
        value = self.q(observation).gather(1, action.unsqueeze(1)).squeeze(1)
        loss = nn.functional.mse_loss(value, goal)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.updates += 1
        if self.updates % self._copy_every == 0:
            self._target.load_state_dict(self.q.state_dict())


def begin(seed: int) -> None:
    """Seeds the generators from which networks and actions are drawn."""
    random.seed(seed)
    torch.manual_seed(seed)


class ByHand:
    """One loop, and a ring of NumPy arrays."""

    def __init__(self, s: Settings) -> None:
        begin(s.seed)
        self._s = s
        self.learner = Learner(q_network(s), s)
        self.env = gymnasium.make(s.env)
        self._generator = np.random.default_rng(s.seed)
        self.observations = np.zeros((s.capacity, 4), np.float32)
        self.next_observations = np.zeros((s.capacity, 4), np.float32)
        self.actions = np.zeros(s.capacity, np.int64)
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
        s, env, q = self._s, self.env, self.learner.q
        observation, _ = env.reset(seed=s.seed)
        frame = 0
        while frame < s.frames:
            epsilon = s.epsilon(frame)
            for _ in range(s.frames_per_batch):
                if random.random() < epsilon:
                    action = random.randrange(2)
                else:
                    with torch.no_grad():
                        action = q(torch.from_numpy(observation)).argmax().item()
                following, reward, terminated, truncated, _ = env.step(action)
                slot = frame % s.capacity
                self.observations[slot] = observation
                self.next_observations[slot] = following
                self.actions[slot] = action
                self.rewards[slot] = reward
                self.terminations[slot] = terminated
                frame += 1
                observation = env.reset()[0] if terminated or truncated else following
            if frame > s.learning_starts:
                for _ in range(s.updates_per_batch):
                    self.learner.update(*self.sample(min(frame, s.capacity)))
        return frame


class EpsilonGreedy(nn.Module):
    """With probability `epsilon` a random action, else the one with the highest value."""

    def __init__(self, q: nn.Module, actions: int = 2) -> None:
        super().__init__()
        self.q, self.actions, self.epsilon = q, actions, 1.0

    def forward(self, observation: Tensor) -> Tensor:
        if random.random() < self.epsilon:
            return torch.tensor(random.randrange(self.actions))
        return self.q(observation).argmax()


class Engram:
    """A collector that writes into a replay buffer, and a loop over updates."""

    def __init__(self, s: Settings) -> None:
        begin(s.seed)
        self._s = s
        q = q_network(s)
        self.learner, self.policy = Learner(q, s), EpsilonGreedy(q)
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(s.capacity),
            batch_size=s.batch_size,
            generator=torch.Generator().manual_seed(s.seed),
        )
        self.collector = SyncDataCollector(
            lambda: GymEnv(s.env, categorical_action_encoding=True),
            self.policy,
            frames_per_batch=s.frames_per_batch,
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
            self.policy.epsilon = s.epsilon(collector.frames)
            if collector.frames > s.learning_starts:
                for _ in range(s.updates_per_batch):
                    self.learner.update(*self.sample())
        return collector.frames


ROWS = [
    Row("program_dqn", "DQN, an update each step", Settings(), in_all_forms(ByHand, Engram, "make_dqn"), most=1.05),
    Row(
        "program_dqn_16",
        "the same, 16 steps, then 16 updates",
        Settings(frames_per_batch=16, updates_per_batch=16),
        in_all_forms(ByHand, Engram),
        most=1.05,
    ),
    Row(
        "program_dqn_4",
        "DQN, an update every 4 steps",
        Settings(frames=2_560, frames_per_batch=4),
        in_all_forms(ByHand, Engram, "make_dqn"),
    ),
]

if __name__ == "__main__":
    main(__doc__, ROWS)
