"""Recurrent Q-learning with burn-in (R2D2's replay), on CartPole whose velocities are hidden.

    python recurrent_dqn.py                   # with a GRU, a minute of one core
    python recurrent_dqn.py --memory lstm
    python recurrent_dqn.py --memory none     # the same network when it may not remember
    python recurrent_dqn.py --frames 4096     # a look

Stored states and burn-in are those of Kapturowski et al. (2019), recurrent values those of Hausknecht and Stone
(2015), the lambda returns, which are not corrected for exploration, those of Peng and Williams (1996).
"""

import argparse
import copy

import gymnasium
import numpy as np
import torch
from tensordict.nn import TensorDictModuleBase
from torch import nn

from engram.collectors import SyncDataCollector
from engram.data import LazyTensorStorage, SequenceSampler, TensorDictReplayBuffer
from engram.envs import ExplorationType, GymEnv, SerialEnv, exploration_type

ENVS, SLICES, BURN_IN, TRAINED, WIDTH = 8, 32, 8, 24, 64
GAMMA, LAMBDA, SCALE = 0.99, 0.7, 0.1  # SCALE: of rewards


class Positions(gymnasium.ObservationWrapper):
    """Where cart and pole are, in units of the limits of an episode, but not how they move."""

    def __init__(self, env):
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation):
        return np.array([observation[0] / 2.4, observation[2] / 0.2], np.float32)


def make_env():
    return GymEnv(Positions(gymnasium.make("CartPole-v1")), categorical_action_encoding=True)


class GRU(nn.GRUCell):
    state_size = WIDTH

    def forward(self, x, state):
        """The output and the next state."""
        state = super().forward(x, state)
        return state, state


class LSTM(nn.LSTMCell):
    """Its state is one tensor: hidden and cell state side by side."""

    state_size = 2 * WIDTH

    def forward(self, x, state):
        hidden, cell = super().forward(x, state.chunk(2, -1))
        return hidden, torch.cat([hidden, cell], -1)


class NoMemory(GRU):
    def forward(self, x, state):
        return super().forward(x, torch.zeros_like(state))


MEMORIES = {"gru": GRU, "lstm": LSTM, "none": NoMemory}


class RecurrentQ(nn.Module):
    """The values of both actions, given all observations so far."""

    def __init__(self, memory):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, WIDTH), nn.ReLU())
        self.memory, self.head = memory(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        nn.init.constant_(self.head.bias, SCALE / (1 - GAMMA))  # the value of a pole that never falls

    def forward(self, observation, state):
        """Values `[n, 2]` and the next states of observations `[n, 2]`."""
        said, state = self.memory(self.encoder(observation), state)
        return self.head(said), state

    def over(self, rows, state):
        """Values `[slices, time, 2]`, and the state after each row; `state` is the one before the first row.

        At the start of an episode, which `"is_init"` marks, it is the one that was stored with the row: zero.
        """
        values, states = [], []
        for t in range(rows.shape[1]):
            state = torch.where(rows["is_init"][:, t], rows["state"][:, t], state)
            value, state = self(rows["observation"][:, t], state)
            values.append(value), states.append(state)
        return torch.stack(values, 1), torch.stack(states, 1)

    def zeros(self, n):
        return torch.zeros(n, self.memory.state_size)


class EpsilonGreedy(TensorDictModuleBase):
    """Reads `"state"` and writes `("next", "state")`, which the collector carries on, zero where an episode begins."""

    in_keys = ["observation", "state"]
    out_keys = ["action", ("next", "state")]
    epsilon = 1.0

    def __init__(self, q):
        super().__init__()
        self.q = q

    def forward(self, td):
        state = td.get("state", None)  # there is none before the very first step
        values, state = self.q(td["observation"], self.q.zeros(len(td)) if state is None else state)
        action = values.argmax(-1)
        if exploration_type() is not ExplorationType.DETERMINISTIC:
            action = torch.where(torch.rand(len(td)) < self.epsilon, torch.randint(2, action.shape), action)
        return td.set("action", action).set(("next", "state"), state)


def returns(rows, value):
    """Lambda returns `[slices, time, 1]`; `value` is that of the state after each row. None goes over a slice's end."""
    reward, has_future = SCALE * rows["next", "reward"], ~rows["next", "terminated"]
    mask = rows["collector", "mask"].unsqueeze(-1)  # False in padding
    goals, after = [], value[:, -1]
    for t in reversed(range(rows.shape[1])):
        goals.append(reward[:, t] + GAMMA * has_future[:, t] * after)
        after = value[:, t - 1].lerp(goals[-1], LAMBDA * mask[:, t])  # what the row before it bootstraps from
    return torch.stack(goals[::-1], 1)


def loss_of(q, target, burn_in, rows):
    """Of a double Q-learner over `rows` `[slices, time]`, from the states that the rows before them lead to."""
    with torch.no_grad():
        states = [net.over(burn_in, net.zeros(SLICES))[1][:, -1] for net in (q, target)]
    values, after = q.over(rows, states[0])
    with torch.no_grad():
        _, target_after = target.over(rows, states[1])
        seen = rows["next", "observation"].flatten(0, 1)
        best = q(seen, after.flatten(0, 1))[0].argmax(-1, keepdim=True)
        value = target(seen, target_after.flatten(0, 1))[0].gather(-1, best).reshape(SLICES, -1, 1)
        goal = returns(rows, value)
    error = nn.functional.smooth_l1_loss(values.gather(-1, rows["action"].unsqueeze(-1)), goal, reduction="none")
    return error.squeeze(-1)[rows["collector", "mask"]].mean()  # padding teaches nothing


def mean_return(q, episodes=20, longest=500):
    """Of the policy that does not explore: the first episode of each of so many environments."""
    with SyncDataCollector(
        SerialEnv(episodes, make_env),
        EpsilonGreedy(q),
        frames_per_batch=episodes * longest,
        exploration_type=ExplorationType.DETERMINISTIC,
    ) as player:
        player.set_seed(1_000)
        following = player.rollout()["next"]
    done = following["done"].int()
    return float((following["reward"] * (done.cumsum(1) - done == 0)).sum() / episodes)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--frames", type=int, default=24_576)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--memory", choices=MEMORIES, default="gru")
    given = arguments.parse_args()
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)  # networks as small as these are slower on several

    q = RecurrentQ(MEMORIES[given.memory])
    target, policy = copy.deepcopy(q).requires_grad_(False), EpsilonGreedy(q)
    optimizer = torch.optim.Adam(q.parameters(), lr=1e-3)
    sampler = SequenceSampler(slice_len=BURN_IN + TRAINED, burn_in=BURN_IN, weight="steps")
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(50_000, ndim=2),  # a strand for each environment: episodes go on from batch to batch
        sampler=sampler,
        batch_size=SLICES * (BURN_IN + TRAINED),
    )
    collector = SyncDataCollector(
        SerialEnv(ENVS, make_env), policy, frames_per_batch=16 * ENVS, total_frames=given.frames
    )
    collector.set_seed(given.seed)
    for batch in collector:  # [envs, time]
        frames = collector.frames
        buffer.extend(batch.exclude(("next", "state")))  # the next row has it
        policy.epsilon = max(0.05, 1 - frames / 8_192)
        if frames < 2_048:
            continue
        for _ in range(8):
            sequences = buffer.sample().reshape(SLICES, -1)
            loss = loss_of(q, target, *sampler.split(sequences))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(q.parameters(), 10.0)
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), q.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)
        if frames % 2_048 == 0:
            print(f"frames {frames:,}  return {mean_return(target):.1f}", flush=True)


if __name__ == "__main__":
    main()
