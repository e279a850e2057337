"""DQN from pixels: stacks of four frames, as bytes, of which each frame is stored once.

    python pixels_dqn.py                       # a game that needs no download, a minute of one core
    python pixels_dqn.py --frames 1000         # a look
    python pixels_dqn.py --atari Pong          # an Atari game, for a GPU and hours: pip install ale-py

Stacks of four frames and the network are those of Mnih et al. (2015), the target is double (van Hasselt et al., 2016).
"""

import argparse
import copy
from functools import partial

import gymnasium
import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from engram.collectors import SyncDataCollector
from engram.data import LazyTensorStorage, TensorDictReplayBuffer
from engram.envs import GymEnv, TransformedEnv
from engram.envs.transforms import CatFrames

FRAMES, BATCH, GAMMA = 4, 32, 0.98  # FRAMES: in a stack


class FallingBall(gymnasium.Env):
    """A ball falls and bounces off the walls; a paddle that goes left, stays or goes right is to be under it.

    The reward at the end is 1 where it is, else -1. One frame, uint8 `[1, 42, 42]`, does not say where the ball is
    going; two do.
    """

    observation_space = gymnasium.spaces.Box(0, 255, (1, 42, 42), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.speed = (int(n) for n in self.np_random.integers((0, -3), (40, 4)))
        self.depth, self.paddle = 0, 18
        return self.frame(), {}

    def step(self, action):
        self.paddle = min(max(self.paddle + 2 * (int(action) - 1), 0), 36)
        self.depth, self.x = self.depth + 1, self.x + self.speed
        if not 0 <= self.x <= 39:
            self.x, self.speed = (-self.x if self.x < 0 else 78 - self.x), -self.speed
        is_down, is_caught = self.depth == 18, self.paddle - 3 < self.x < self.paddle + 6
        return self.frame(), (1.0 if is_caught else -1.0) if is_down else 0.0, is_down, False, {}

    def frame(self):
        picture = np.zeros((1, 42, 42), np.uint8)
        picture[0, 2 * self.depth : 2 * self.depth + 3, self.x : self.x + 3] = 255
        picture[0, 40:, self.paddle : self.paddle + 6] = 128
        return picture


def atari(name):
    """Frames uint8 `[1, 84, 84]`; each action for four frames, up to 30 idle ones at the start."""
    import ale_py

    gymnasium.register_envs(ale_py)
    game = gymnasium.make(f"ALE/{name}-v5", frameskip=1)
    game = gymnasium.wrappers.AtariPreprocessing(game)
    return gymnasium.wrappers.ReshapeObservation(game, (1, 84, 84))


def make_env(make_game):
    """Shows the last four frames: `"observation"`, uint8 `[4, height, width]`."""
    stacks = CatFrames(FRAMES, dim=-3, in_keys=["observation"])
    return TransformedEnv(GymEnv(make_game(), categorical_action_encoding=True), stacks)


def make_buffer(capacity, seed):
    """Takes and gives back steps with whole stacks, before and after the step; each frame is stored once."""
    storage, generator = LazyTensorStorage(capacity, compact=True), torch.Generator().manual_seed(seed)
    return TensorDictReplayBuffer(storage=storage, batch_size=BATCH, generator=generator)


class Bytes(nn.Module):
    """Bytes to numbers between 0 and 1, on the learner's device: until there they take a quarter of the room."""

    def forward(self, observation):
        return observation / 255


def small_network(actions):
    return nn.Sequential(
        Bytes(), nn.Conv2d(FRAMES, 16, 6, stride=3), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
        nn.Flatten(-3), nn.Linear(32 * 6 * 6, 128), nn.ReLU(), nn.Linear(128, actions),
    )  # fmt: skip


def nature_network(actions):
    return nn.Sequential(
        Bytes(), nn.Conv2d(FRAMES, 32, 8, stride=4), nn.ReLU(), nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
        nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(-3), nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, actions),
    )  # fmt: skip


class EpsilonGreedy(nn.Module):
    """The action of the highest value; with probability `epsilon` any action."""

    def __init__(self, q, actions, epsilon):
        super().__init__()
        self.q, self.actions, self.epsilon = q, actions, epsilon

    def forward(self, observation):
        if torch.rand(()) < self.epsilon:
            return torch.randint(self.actions, ())
        return self.q(observation).argmax(-1)


def loss_of(batch, q, target):
    following = batch["next"]
    with torch.no_grad():
        best = q(following["observation"]).argmax(-1, keepdim=True)
        value = target(following["observation"]).gather(-1, best)
        goal = following["reward"].sign() + GAMMA * value * ~following["terminated"]
    return nn.functional.smooth_l1_loss(q(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1)), goal)


def mean_return(make_game, policy, episodes=40):
    """Of the policy that does not explore, or hardly."""
    policy = TensorDictModule(policy, in_keys=["observation"], out_keys=["action"])
    with SyncDataCollector(lambda: make_env(make_game), policy, trajs_per_batch=episodes) as player:
        player.set_seed(1_000)
        return float(player.rollout()["next", "reward"].sum() / episodes)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--frames", type=int, default=20_000)
    arguments.add_argument("--capacity", type=int, default=30_000)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--atari", metavar="GAME")
    given = arguments.parse_args()
    torch.manual_seed(given.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)

    make_game, network = (partial(atari, given.atari), nature_network) if given.atari else (FallingBall, small_network)
    actions = int(make_game().action_space.n)
    q = network(actions).to(device)
    target = copy.deepcopy(q).requires_grad_(False)
    optimizer = torch.optim.Adam(q.parameters(), lr=1e-3 if device == "cpu" else 1e-4)
    policy, buffer = EpsilonGreedy(q, actions, epsilon=1.0), make_buffer(given.capacity, given.seed)
    collector = SyncDataCollector(
        lambda: make_env(make_game),
        TensorDictModule(policy, in_keys=["observation"], out_keys=["action"]),
        frames_per_batch=100,
        total_frames=given.frames,
        policy_device=device,
        storing_device="cpu",
    )
    collector.set_seed(given.seed)
    for batch in collector:
        frames = collector.frames
        buffer.extend(batch)
        policy.epsilon = max(0.05, 1 - frames / (given.frames / 6))
        if frames < 1_000:
            continue
        for _ in range(25):  # one for every four frames
            loss = loss_of(buffer.sample().to(device), q, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), q.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)
        if frames % (given.frames // 12 // 100 * 100 or 100) == 0:
            score = mean_return(make_game, EpsilonGreedy(target, actions, epsilon=0.0), 2 if given.atari else 40)
            print(f"frames {frames:,}  return {score:.2f}", flush=True)
    print(f"{buffer.stats().compact.bytes_per_step:,.0f} bytes a step")


if __name__ == "__main__":
    main()
