"""DQN with n-step returns and prioritised replay, on CartPole.

    python dqn_per.py                  # half a minute of one core
    python dqn_per.py --frames 2000    # a look
    python dqn_per.py --resume         # continues from ./dqn-checkpoint

Double Q-learning (van Hasselt et al., 2016), three-step returns, priorities with weights (Schaul et al., 2016).
"""

import argparse
import copy
from pathlib import Path

import torch
from torch import nn

from engram.collectors import SyncDataCollector
from engram.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
from engram.envs import GymEnv
from engram.envs.transforms import MultiStepTransform

GAMMA, N_STEPS, BATCH, SCALE = 0.99, 3, 128, 0.1  # SCALE: of rewards
CHECKPOINT = Path("dqn-checkpoint")


def make_env():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


class Scaled(nn.Module):
    """Observations in units of their usual sizes: position, velocity, angle, angular velocity."""

    def forward(self, observation):
        return observation / torch.tensor([2.4, 2.0, 0.2, 2.0])


class EpsilonGreedy(nn.Module):
    """The action of the highest value; with probability `epsilon` any action."""

    def __init__(self, q):
        super().__init__()
        self.q, self.epsilon = q, 1.0

    def forward(self, observation):
        if torch.rand(()) < self.epsilon:
            return torch.randint(2, ())
        return self.q(observation).argmax(-1)


def make_buffer(seed):
    return TensorDictPrioritizedReplayBuffer(
        alpha=0.6,
        beta=0.4,
        storage=LazyTensorStorage(50_000),
        transform=MultiStepTransform(n_steps=N_STEPS, gamma=GAMMA),  # sums rewards as steps are written
        batch_size=BATCH,
        generator=torch.Generator().manual_seed(seed),
    )


def td_errors(batch, q, target):
    """The value that `q` gives each step, minus its target, `[batch]`."""
    reward, power = batch["next", "reward"].squeeze(-1), batch["gamma"].squeeze(-1)  # power: gamma ** summed steps
    has_future = ~batch["next", "terminated"].squeeze(-1)  # also where time was up
    with torch.no_grad():
        best = q(batch["next", "observation"]).argmax(-1, keepdim=True)
        future = target(batch["next", "observation"]).gather(-1, best).squeeze(-1)
        goal = SCALE * reward + power * has_future * future
    return q(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1) - goal


def mean_return(q, episodes=10):
    """Of the policy that does not explore."""
    with SyncDataCollector(make_env, lambda observation: q(observation).argmax(-1), trajs_per_batch=episodes) as player:
        player.set_seed(1_000)
        return float(player.rollout()["next", "reward"].sum() / episodes)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--frames", type=int, default=15_000)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--resume", action="store_true")
    given = arguments.parse_args()
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)  # networks as small as these are slower on several

    q = nn.Sequential(Scaled(), nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    nn.init.constant_(q[-1].bias, SCALE / (1 - GAMMA))  # the value of a pole that never falls
    target = copy.deepcopy(q).requires_grad_(False)
    optimizer = torch.optim.Adam(q.parameters(), lr=1e-3)
    policy, buffer = EpsilonGreedy(q), make_buffer(given.seed)
    collector = SyncDataCollector(make_env, policy, frames_per_batch=50, total_frames=given.frames)
    collector.set_seed(given.seed)
    if given.resume:
        buffer.loads(CHECKPOINT / "buffer")  # rows, priorities, steps that wait for their return, random numbers
        state = torch.load(CHECKPOINT / "learner.pt")
        q.load_state_dict(state["q"]), target.load_state_dict(state["target"])
        optimizer.load_state_dict(state["optimizer"]), collector.load_state_dict(state["collector"])

    for batch in collector:
        frames = collector.frames
        buffer.extend(batch)  # with the highest priority so far
        policy.epsilon = max(0.05, 1 - frames / 5_000)
        buffer.sampler.beta = min(1.0, 0.4 + 0.6 * frames / given.frames)  # less bias as values settle
        if frames < 1_000:
            continue
        for _ in range(25):
            drawn = buffer.sample()
            error = td_errors(drawn, q, target)
            loss = (drawn["priority_weight"] * nn.functional.smooth_l1_loss(error, 0 * error, reduction="none")).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            buffer.update_tensordict_priority(drawn.set("td_error", error.detach().abs()))
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), q.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)
        if frames % 1_000 == 0:
            print(f"frames {frames:,}  return {mean_return(target):.1f}", flush=True)
            buffer.dumps(CHECKPOINT / "buffer")  # the first time whole, then what is new
            parts = {"q": q, "target": target, "optimizer": optimizer, "collector": collector}
            torch.save({name: part.state_dict() for name, part in parts.items()}, CHECKPOINT / "learner.pt")


if __name__ == "__main__":
    main()
