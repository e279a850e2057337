"""PPO on CartPole with 8 environments.

    python ppo.py                  # half a minute of one core
    python ppo.py --frames 4096    # a look

Proximal policy optimisation (Schulman et al., 2017) with generalised advantages (Schulman et al., 2016).
"""

import argparse

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical

from engram.collectors import SyncDataCollector
from engram.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from engram.envs import GymEnv

ENVS, STEPS, EPOCHS, BATCH = 8, 128, 8, 256  # STEPS: of each environment in a batch
GAMMA, LAMBDA, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01


def make_env(envs=ENVS):
    return GymEnv("CartPole-v1", num_envs=envs, categorical_action_encoding=True)


class Agent(nn.Module):
    """An actor and a critic."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
            for outputs in (2, 1)
        )
        nn.init.normal_(self.actor[-1].weight, std=0.01)  # at first all actions are as likely

    def forward(self, observation):
        """Actions and their log-probabilities, `[envs]`."""
        policy = Categorical(logits=self.actor(observation))
        action = policy.sample()
        return action, policy.log_prob(action)


@torch.no_grad()
def advantages(batch, critic):
    """Advantages and the returns that the critic should learn, `[envs, time, 1]`."""
    following = batch["next"]
    value, next_value = critic(batch["observation"]), critic(following["observation"])
    # A pole that still stands when time is up has a future: `terminated` ends the return, `done` ends the trace.
    error = following["reward"] + GAMMA * next_value * ~following["terminated"] - value
    decay = GAMMA * LAMBDA * ~following["done"]
    advantage, ahead = torch.empty_like(error), torch.zeros_like(error[:, 0])
    for t in reversed(range(batch.shape[1])):
        ahead = error[:, t] + decay[:, t] * ahead
        advantage[:, t] = ahead
    return advantage, advantage + value


def loss_of(batch, agent):
    """The clipped objective, the critic's error and the entropy of a minibatch."""
    policy = Categorical(logits=agent.actor(batch["observation"]))
    ratio = (policy.log_prob(batch["action"]) - batch["log_prob"]).exp()
    advantage = batch["advantage"].squeeze(-1)
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    error = nn.functional.smooth_l1_loss(agent.critic(batch["observation"]), batch["goal"])
    return error - gain.mean() - ENTROPY * policy.entropy().mean()


def mean_return(agent, episodes=10):
    """Of the likeliest actions."""
    likeliest = TensorDictModule(lambda seen: agent.actor(seen).argmax(-1), ["observation"], ["action"])
    with SyncDataCollector(lambda: make_env(1), likeliest, trajs_per_batch=episodes) as player:
        player.set_seed(1_000)
        return float(player.rollout()["next", "reward"].sum() / episodes)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--frames", type=int, default=60 * ENVS * STEPS)
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)  # networks as small as these are slower on several

    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(ENVS * STEPS), sampler=SamplerWithoutReplacement(), batch_size=BATCH
    )
    policy = TensorDictModule(agent, in_keys=["observation"], out_keys=["action", "log_prob"])
    collector = SyncDataCollector(make_env, policy, frames_per_batch=ENVS * STEPS, total_frames=given.frames)
    collector.set_seed(given.seed)
    for batch in collector:  # [envs, time]
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - (collector.frames - ENVS * STEPS) / given.frames)
        advantage, batch["goal"] = advantages(batch, agent.critic)
        batch["advantage"] = (advantage - advantage.mean()) / advantage.std()
        buffer.extend(batch.reshape(-1))  # takes the place of the batch before
        for _ in range(EPOCHS):
            for minibatch in buffer:  # every step once, in another order each time
                loss = loss_of(minibatch, agent)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        if collector.batches % 4 == 0:
            print(f"frames {collector.frames:,}  return {mean_return(agent):.1f}", flush=True)


if __name__ == "__main__":
    main()
