"""A data-parallel learner: every process collects, writes into one mapped store, and learns with its own batches.

    torchrun --nproc-per-node 2 data_parallel.py                  # a minute of two cores
    torchrun --nproc-per-node 2 data_parallel.py --frames 3000    # a look

The learner is a double DQN on CartPole in DistributedDataParallel, which averages the gradients of all processes.
"""

import argparse
import copy
import shutil

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from engram.collectors import SyncDataCollector
from engram.data import LazyMemmapStorage, TensorDictReplayBuffer
from engram.envs import GymEnv
from engram.envs.transforms import MultiStepTransform

GAMMA, N_STEPS, BATCH, SCALE = 0.99, 3, 64, 0.1  # BATCH: of each process; SCALE: of rewards
ROWS = "data-parallel-rows"


def make_env():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


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


def loss_of(batch, q, target):
    following = batch["next"]
    with torch.no_grad():
        best = q.module(following["observation"]).argmax(-1, keepdim=True)
        future = target(following["observation"]).gather(-1, best)
        goal = SCALE * following["reward"] + batch["gamma"] * ~following["terminated"] * future
    return nn.functional.smooth_l1_loss(q(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1)), goal)


def mean_return(q, episodes=10):
    """Of the policy that does not explore."""
    with SyncDataCollector(make_env, EpsilonGreedy(q, epsilon=0.0), trajs_per_batch=episodes) as player:
        player.set_seed(10_000)
        return float(player.rollout()["next", "reward"].sum() / episodes)


def learn(given):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1_000 * given.seed + rank)
    torch.set_num_threads(1)  # networks as small as these are slower on several

    # One store for all, by its path; shared_init: the first that writes makes it. Each process has a lane of its own.
    if rank == 0:
        shutil.rmtree(ROWS, ignore_errors=True)  # of an earlier run
    dist.barrier()
    storage = LazyMemmapStorage(50_000, scratch_dir=ROWS, existsok=True, shared_init=True, lanes=world)
    buffer = TensorDictReplayBuffer(
        storage=storage,
        transform=MultiStepTransform(N_STEPS, GAMMA),  # of this process's steps, as they are written
        batch_size=BATCH,
        generator=torch.Generator().manual_seed(1_000 * given.seed + rank),  # other rows in each process
    )
    q = DistributedDataParallel(  # which begins with the weights of rank 0
        nn.Sequential(Scaled(), nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    )
    target = copy.deepcopy(q.module).requires_grad_(False)
    optimizer = torch.optim.Adam(q.parameters(), lr=1e-3)
    policy = EpsilonGreedy(q.module, epsilon=1.0)
    collector = SyncDataCollector(make_env, policy, frames_per_batch=50, total_frames=given.frames // world)
    collector.set_seed(1_000 * given.seed + rank)
    for batch in collector:
        frames = world * collector.frames
        buffer.extend(batch)
        policy.epsilon = max(0.05, 1 - frames / 5_000)
        if frames < 1_000:
            continue
        for _ in range(25 * world):
            loss = loss_of(buffer.sample(), q, target)
            optimizer.zero_grad()
            loss.backward()  # gradients are averaged over all processes meanwhile
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), q.module.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)
        if rank == 0 and frames % 1_000 == 0:
            print(f"frames {frames:,}  return {mean_return(target):.1f}", flush=True)
    buffer.flush_transforms()  # the last steps, which waited for more
    dist.barrier()
    if rank == 0:
        print(f"{len(buffer):,} rows of {world} processes")


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--frames", type=int, default=15_000, help="of all processes")
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    dist.init_process_group("gloo")  # "nccl" with a GPU for each process
    learn(given)
    dist.destroy_process_group()  # when the learner is gone: it may hang while one is left


if __name__ == "__main__":
    main()
