"""From a fixed dataset to an environment: conservative Q-learning offline, then half old steps, half new ones.

    python offline_to_online.py                  # half a minute of one core
    python offline_to_online.py --frames 1000    # a look

The dataset is a Minari one, which a poor player makes here first. Offline, values of actions that are not in the data
are kept low (Kumar et al., 2020); online, half of each batch is of the dataset, half of new steps (Ball et al., 2023).
"""

import argparse
import copy
from pathlib import Path

import torch
from torch import nn

from engram.collectors import SyncDataCollector
from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBufferEnsemble, TensorDictReplayBuffer
from engram.data.datasets import iter_minari, read_minari, write_minari
from engram.envs import GymEnv
from engram.envs.transforms import MultiStepTransform

GAMMA, N_STEPS, BATCH, SCALE = 0.99, 5, 256, 0.1  # SCALE: of rewards
DATASET, ROWS = Path("cartpole/poor-v0"), Path("offline-rows")


def make_env():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def make_dataset(steps=10_000):
    """Of a player who pushes to where the pole leans, and four times in five anywhere."""

    def poor(observation):
        leans = (observation[..., 2] + 0.3 * observation[..., 3] > 0).long()
        return torch.where(torch.rand(leans.shape) < 0.8, torch.randint(2, leans.shape), leans)

    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(steps))
    collector = SyncDataCollector(make_env, poor, frames_per_batch=1_000, total_frames=steps)
    collector.set_seed(1)
    for batch in collector:
        buffer.extend(batch)
    write_minari(buffer, DATASET)


def make_buffer(storage):
    """Rewards of n steps are summed as rows are written, the dataset's as the collector's."""
    return TensorDictReplayBuffer(storage=storage, batch_size=BATCH, transform=MultiStepTransform(N_STEPS, GAMMA))


def open_dataset():
    """The dataset's rows in a mapped file, read once: it may be larger than memory."""
    buffer = make_buffer(LazyMemmapStorage(100_000, scratch_dir=ROWS, existsok=True))
    if not len(buffer):
        read_minari(DATASET, buffer, progress=False)
        buffer.flush_transforms()  # the last steps, which waited for more
    return buffer


class Scaled(nn.Module):
    """Observations in units of their usual sizes: position, velocity, angle, angular velocity."""

    def forward(self, observation):
        return observation / torch.tensor([2.4, 2.0, 0.2, 2.0])


class EpsilonGreedy(nn.Module):
    epsilon = 0.05

    def __init__(self, q):
        super().__init__()
        self.q = q

    def forward(self, observation):
        if torch.rand(()) < self.epsilon:
            return torch.randint(2, ())
        return self.q(observation).argmax(-1)


class Learner:
    def __init__(self):
        self.q = nn.Sequential(
            Scaled(), nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)
        )
        self.target = copy.deepcopy(self.q).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.q.parameters(), lr=5e-4)

    def update(self, batch, conservative):
        """One step of a double DQN; `conservative` weighs how far values of other actions are pushed down."""
        following, action = batch["next"], batch["action"].unsqueeze(-1)
        with torch.no_grad():
            best = self.q(following["observation"]).argmax(-1, keepdim=True)
            future = self.target(following["observation"]).gather(-1, best)
            goal = SCALE * following["reward"] + batch["gamma"] * ~following["terminated"] * future
        values = self.q(batch["observation"])
        value = values.gather(-1, action)
        loss = nn.functional.smooth_l1_loss(value, goal)
        loss = loss + conservative * (values.logsumexp(-1, keepdim=True) - value).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.q.parameters(), strict=True):
                slow.lerp_(fast, 0.01)

    def mean_return(self, episodes=10):
        """Of the policy that does not explore."""
        greedy = EpsilonGreedy(self.target)
        greedy.epsilon = 0.0
        with SyncDataCollector(make_env, greedy, trajs_per_batch=episodes) as player:
            player.set_seed(1_000)
            return float(player.rollout()["next", "reward"].sum() / episodes)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--frames", type=int, default=5_000)
    arguments.add_argument("--offline-updates", type=int, default=4_000)
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)  # networks as small as these are slower on several

    if not DATASET.exists():
        make_dataset()
    offline, learner = open_dataset(), Learner()
    returns = [float(episode["next", "reward"].sum()) for episode in iter_minari(DATASET)]
    print(f"dataset {len(offline):,} steps  return {sum(returns) / len(returns):.1f}")
    for _ in range(given.offline_updates):
        learner.update(offline.sample(), conservative=0.1)
    print(f"frames 0  return {learner.mean_return():.1f}", flush=True)

    online = make_buffer(LazyTensorStorage(100_000))
    both = ReplayBufferEnsemble(offline, online, sample_from_all=True, batch_size=BATCH)  # batches [2, BATCH / 2]
    collector = SyncDataCollector(make_env, EpsilonGreedy(learner.q), frames_per_batch=100, total_frames=given.frames)
    collector.set_seed(given.seed)
    for batch in collector:
        online.extend(batch)
        for _ in range(50):
            learner.update(both.sample().reshape(-1), conservative=0.0)
        if collector.frames % 1_000 == 0:
            print(f"frames {collector.frames:,}  return {learner.mean_return():.1f}", flush=True)


if __name__ == "__main__":
    main()
