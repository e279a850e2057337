"""SAC on Pendulum.

    python sac.py                  # a minute of one core
    python sac.py --frames 2000    # a look

Soft actor-critic with a temperature that is learned (Haarnoja et al., 2018).
"""

import argparse
import copy

import torch
from torch import nn
from torch.distributions import Normal

from engram.collectors import SyncDataCollector
from engram.data import LazyTensorStorage, TensorDictReplayBuffer
from engram.envs import GymEnv

GAMMA, BATCH, LARGEST = 0.99, 256, 2.0  # LARGEST: torque


def make_env():
    return GymEnv("Pendulum-v1")


def mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs))


class Actor(nn.Module):
    """A Gaussian, squashed to the torques that the pendulum takes."""

    def __init__(self):
        super().__init__()
        self.net = mlp(3, 2)

    def drawn(self, observation):
        """Actions `[batch, 1]` and their log-probabilities `[batch, 1]`."""
        mean, log_std = self.net(observation).chunk(2, -1)
        gaussian = Normal(mean, log_std.clamp(-5, 2).exp())
        raw = gaussian.rsample()
        squash = 2 * (0.6931472 - raw - nn.functional.softplus(-2 * raw))  # log(1 - tanh(raw)**2)
        return LARGEST * raw.tanh(), gaussian.log_prob(raw) - squash

    def forward(self, observation):
        return self.drawn(observation)[0]

    def mode(self, observation):
        return LARGEST * self.net(observation).chunk(2, -1)[0].tanh()


class Learner:
    """Two critics with slow copies, the temperature, and one step of everything."""

    def __init__(self, actor):
        self.actor, self.critics = actor, nn.ModuleList(mlp(4, 1) for _ in range(2))
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_temperature = nn.Parameter(torch.zeros(()))
        self.of_actor = torch.optim.Adam(actor.parameters(), lr=1e-3)
        self.of_critics = torch.optim.Adam(self.critics.parameters(), lr=1e-3)
        self.of_temperature = torch.optim.Adam([self.log_temperature], lr=1e-3)

    def update(self, batch):
        observation, action, following = batch["observation"], batch["action"], batch["next"]
        temperature = self.log_temperature.detach().exp()
        with torch.no_grad():
            next_action, next_log_prob = self.actor.drawn(following["observation"])
            value = lowest(self.targets, following["observation"], next_action) - temperature * next_log_prob
            goal = following["reward"] + GAMMA * ~following["terminated"] * value  # where time was up there is a future
        pairs = torch.cat([observation, action], -1)
        step(self.of_critics, sum((critic(pairs) - goal).square().mean() for critic in self.critics))
        drawn, log_prob = self.actor.drawn(observation)
        step(self.of_actor, (temperature * log_prob - lowest(self.critics, observation, drawn)).mean())
        surplus = -log_prob.detach().mean() + 1  # entropy above -1, the usual goal for one dimension
        step(self.of_temperature, self.log_temperature.exp() * surplus)
        with torch.no_grad():
            for slow, fast in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
                slow.lerp_(fast, 0.005)


def lowest(critics, observation, action):
    pairs = torch.cat([observation, action], -1)
    return torch.minimum(*(critic(pairs) for critic in critics))


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward(inputs=optimizer.param_groups[0]["params"])
    optimizer.step()


def mean_return(actor, episodes=10):
    """Of the policy that does not explore."""
    with SyncDataCollector(make_env, lambda observation: actor.mode(observation), trajs_per_batch=episodes) as player:
        player.set_seed(1_000)
        return float(player.rollout()["next", "reward"].sum() / episodes)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--frames", type=int, default=10_000)
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)  # networks as small as these are slower on several

    actor = Actor()
    learner = Learner(actor)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100_000), batch_size=BATCH, generator=torch.Generator().manual_seed(given.seed)
    )
    collector = SyncDataCollector(
        make_env, actor, frames_per_batch=50, total_frames=given.frames, init_random_frames=1_000
    )
    collector.set_seed(given.seed)
    for batch in collector:
        buffer.extend(batch)
        if collector.frames >= 1_000:
            for _ in range(50):
                learner.update(buffer.sample())
            if collector.frames % 1_000 == 0:
                print(f"frames {collector.frames:,}  return {mean_return(actor):.1f}", flush=True)


if __name__ == "__main__":
    main()
