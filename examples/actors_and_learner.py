"""Several processes: actors that write into one buffer in shared memory, and a learner that reads it.

    python actors_and_learner.py                          # two actors, a minute of two cores
    python actors_and_learner.py --frames 3000            # a look

The learner is a double DQN on CartPole. No row is sent: actors write where the learner reads.
"""

import argparse
import copy
import time

import torch
import torch.multiprocessing as mp
from torch import nn

from engram.collectors import SyncDataCollector
from engram.data import LazyTensorStorage, TensorDictReplayBuffer
from engram.envs import GymEnv
from engram.envs.transforms import MultiStepTransform

GAMMA, N_STEPS, BATCH, SCALE = 0.99, 3, 128, 0.1  # SCALE: of rewards
FRAMES_PER_UPDATE, WARM_UP = 2, 1_000


def make_env():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def make_q():
    return nn.Sequential(Scaled(), nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


class Scaled(nn.Module):
    """Observations in units of their usual sizes: position, velocity, angle, angular velocity."""

    def forward(self, observation):
        return observation / torch.tensor([2.4, 2.0, 0.2, 2.0])


class EpsilonGreedy(nn.Module):
    def __init__(self, q, epsilon):
        super().__init__()
        self.q, self.epsilon = q, epsilon

    def forward(self, observation):
        if torch.rand(()) < self.epsilon:
            return torch.randint(2, ())
        return self.q(observation).argmax(-1)


def act(buffer, published, frames, updates, number, given):
    """An actor: its epsilon stays, each actor has another one; at each batch it takes the newest weights."""
    torch.manual_seed(1_000 * given.seed + number)
    torch.set_num_threads(1)
    policy = EpsilonGreedy(make_q(), epsilon=0.4 ** (1 + 2 * number))
    collector = SyncDataCollector(make_env, policy, frames_per_batch=50)
    collector.set_seed(1_000 * given.seed + number)
    while frames.value < given.frames:
        while frames.value > WARM_UP + FRAMES_PER_UPDATE * updates.value + 500:  # no further ahead of the learner
            time.sleep(0.001)
        policy.q.load_state_dict(published)
        buffer.extend(collector.rollout())
        with frames.get_lock():
            frames.value += 50
    buffer.flush_transforms()  # the last steps, which waited for more


def update(batch, q, target, optimizer):
    following = batch["next"]
    with torch.no_grad():
        best = q(following["observation"]).argmax(-1, keepdim=True)
        future = target(following["observation"]).gather(-1, best)
        goal = SCALE * following["reward"] + batch["gamma"] * ~following["terminated"] * future
    loss = nn.functional.smooth_l1_loss(q(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1)), goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), q.parameters(), strict=True):
            slow.lerp_(fast, 0.01)


def mean_return(q, episodes=10):
    """Of the policy that does not explore."""
    with SyncDataCollector(make_env, EpsilonGreedy(q, epsilon=0.0), trajs_per_batch=episodes) as player:
        player.set_seed(10_000)
        return float(player.rollout()["next", "reward"].sum() / episodes)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--frames", type=int, default=15_000)
    arguments.add_argument("--actors", type=int, default=2)
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)  # networks as small as these are slower on several

    q, processes = make_q(), mp.get_context("spawn")
    target, optimizer = copy.deepcopy(q).requires_grad_(False), torch.optim.Adam(q.parameters(), lr=1e-3)
    published = {name: weight.clone().share_memory_() for name, weight in q.state_dict().items()}
    frames, updates = processes.Value("q", 0), processes.Value("q", 0)
    # shared_init: the actors get the buffer before anything is written; the first of them that writes makes its memory.
    # lanes: actors write side by side, so that they never wait for each other, nor mix their episodes.
    storage = LazyTensorStorage(50_000, shared_init=True, lanes=given.actors)
    # Each actor has its own transform, which sums the rewards of three steps as it writes.
    buffer = TensorDictReplayBuffer(storage=storage, transform=MultiStepTransform(N_STEPS, GAMMA), batch_size=BATCH)
    actors = [
        processes.Process(target=act, args=(buffer, published, frames, updates, number, given), daemon=True)
        for number in range(given.actors)
    ]
    for actor in actors:
        actor.start()
    shown = 0
    while any(actor.is_alive() for actor in actors) or updates.value < (given.frames - WARM_UP) // FRAMES_PER_UPDATE:
        if updates.value >= (frames.value - WARM_UP) // FRAMES_PER_UPDATE:
            time.sleep(0.001)
            continue
        update(buffer.sample(), q, target, optimizer)
        updates.value += 1
        for name, weight in q.state_dict().items():
            published[name].copy_(weight)
        if frames.value // 1_000 > shown:
            shown = frames.value // 1_000
            print(f"frames {frames.value:,}  return {mean_return(target):.1f}", flush=True)
    for actor in actors:
        actor.join()
    print(f"{len(buffer):,} rows of {given.actors} actors, {updates.value:,} updates")


if __name__ == "__main__":
    main()
