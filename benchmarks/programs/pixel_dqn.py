"""DQN from pixels: the last four frames `[4, 84, 84]`, Mnih et al.'s network, an update every four steps."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from benchmarks.programs import dqn
from benchmarks.programs.catch import SIZE, Catch
from benchmarks.programs.shares import Parts
from benchmarks.programs.turns import Row, in_all_forms, main
from engram.collectors import SyncDataCollector
from engram.data import LazyTensorStorage, TensorDictReplayBuffer
from engram.envs import GymEnv, TransformedEnv
from engram.envs.transforms import CatFrames

STACK, ACTIONS = 4, 3
Array = np.ndarray


@dataclass(frozen=True)
class Settings(dqn.Settings):
    """Everything that decides how a run goes; equal in all forms."""

    frames: int = 240
    frames_per_batch: int = 4
    learning_starts: int = 40
    capacity: int = 1_000
    batch_size: int = 32
    explore_for: int = 120


class QNetwork(nn.Module):
    """From stacks, uint8 `[*, 4, 84, 84]`, to the value of each action."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(STACK, 32, 8, stride=4), nn.ReLU(), nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
            nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(-3), nn.Linear(64 * 7 * 7, 512), nn.ReLU(),
            nn.Linear(512, ACTIONS),
        )  # fmt: skip

    def forward(self, stack: Tensor) -> Tensor:
        return self.layers(stack / 255)


class ByHand:
    """One loop, and a ring of NumPy arrays of whole stacks, as most scripts keep them."""

    def __init__(self, s: Settings) -> None:
        dqn.begin(s.seed)
        self._s, self.env = s, Catch()
        self.learner = dqn.Learner(QNetwork(), s)
        self._generator = np.random.default_rng(s.seed)
        self.observations = np.zeros((s.capacity, STACK, SIZE, SIZE), np.uint8)
        self.next_observations = np.zeros((s.capacity, STACK, SIZE, SIZE), np.uint8)
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
        stack = np.repeat(env.reset(seed=s.seed)[0], STACK, 0)
        frame = 0
        while frame < s.frames:
            epsilon = s.epsilon(frame)
            for _ in range(s.frames_per_batch):
                if random.random() < epsilon:
                    action = random.randrange(ACTIONS)
                else:
                    with torch.no_grad():
                        action = q(torch.from_numpy(stack)).argmax().item()
                picture, reward, terminated, truncated, _ = env.step(action)
                slot = frame % s.capacity
                self.observations[slot] = stack
                stack = np.concatenate([stack[1:], picture])
                self.next_observations[slot] = stack
                self.actions[slot] = action
                self.rewards[slot] = reward
                self.terminations[slot] = terminated
                frame += 1
                if terminated or truncated:
                    stack = np.repeat(env.reset()[0], STACK, 0)
            if frame > s.learning_starts:
                for _ in range(s.updates_per_batch):
                    self.learner.update(*self.sample(min(frame, s.capacity)))
        return frame


class Engram:
    """A collector whose policy sees stacks, and a buffer that stores each frame of them once."""

    def __init__(self, s: Settings) -> None:
        dqn.begin(s.seed)
        self._s = s
        q = QNetwork()
        self.learner, self.policy = dqn.Learner(q, s), dqn.EpsilonGreedy(q, ACTIONS)
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(s.capacity, compact=True),
            batch_size=s.batch_size,
            generator=torch.Generator().manual_seed(s.seed),
        )
        stacked = CatFrames(STACK, dim=-3, in_keys=["observation"])
        self.collector = SyncDataCollector(
            TransformedEnv(GymEnv(Catch(), categorical_action_encoding=True), stacked),
            TensorDictModule(self.policy, in_keys=["observation"], out_keys=["action"]),
            frames_per_batch=s.frames_per_batch,
            total_frames=s.frames,
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
        for batch in collector:
            self.buffer.extend(batch)
            self.policy.epsilon = s.epsilon(collector.frames)
            if collector.frames > s.learning_starts:
                for _ in range(s.updates_per_batch):
                    self.learner.update(*self.sample())
        return collector.frames


ROWS = [
    Row(
        "program_pixel_dqn",
        "pixel DQN, an update every 4 steps",
        Settings(),
        in_all_forms(ByHand, Engram, "make_pixel_dqn"),
    )
]

if __name__ == "__main__":
    main(__doc__, ROWS)
