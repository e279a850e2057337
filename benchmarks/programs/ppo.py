"""PPO on CartPole-v1, in CleanRL's form: arrays `[time, envs]` of what the agent saw and did, epochs of minibatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical

from benchmarks.programs.shares import Parts
from benchmarks.programs.turns import Row, in_all_forms, main
from engram.collectors import SyncDataCollector
from engram.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from engram.envs import GymEnv

Array = np.ndarray


@dataclass(frozen=True)
class Settings:
    """Everything that decides how a run goes; equal in all forms."""

    env: str = "CartPole-v1"
    envs: int = 8
    steps: int = 128  # of each environment in a batch
    batches: int = 4
    epochs: int = 4
    minibatch: int = 256
    learning_rate: float = 2.5e-4
    gamma: float = 0.99
    lambda_: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01
    value: float = 0.5
    largest_norm: float = 0.5
    vectorization: str = "sync"
    seed: int = 1

    def shorter(self) -> Settings:
        return replace(self, batches=1)


def layer(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    made = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(made.weight, gain)
    nn.init.zeros_(made.bias)
    return made


class Agent(nn.Module):
    """An actor and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(layer(4, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, 1.0))
        self.actor = nn.Sequential(layer(4, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 2, 0.01))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Actions, their log-probabilities and the values of observations, each `[envs]`."""
        policy = Categorical(logits=self.actor(observation))
        action = policy.sample()
        return action, policy.log_prob(action), self.critic(observation).squeeze(-1)


class Learner:
    """Advantages, and one gradient step on a minibatch."""

    def __init__(self, agent: Agent, s: Settings) -> None:
        self.agent, self._s = agent, s
        self._optimizer = torch.optim.Adam(agent.parameters(), lr=s.learning_rate, eps=1e-5)

    @torch.no_grad()
    def advantages(self, reward: Tensor, value: Tensor, done: Tensor, last: Tensor) -> Tensor:
        """Generalised advantages `[time, envs]`; `last` are the observations after the last step."""
        s, following, ahead = self._s, self.agent.critic(last).squeeze(-1), torch.zeros(reward.shape[1])
        advantage, goes_on = torch.empty_like(reward), 1 - done.float()
        for t in reversed(range(len(reward))):
            error = reward[t] + s.gamma * following * goes_on[t] - value[t]
            ahead = error + s.gamma * s.lambda_ * goes_on[t] * ahead
            advantage[t], following = ahead, value[t]
        return advantage

    def update(self, observation: Tensor, action: Tensor, log_prob: Tensor, advantage: Tensor, goal: Tensor) -> None:
        """One step on a minibatch, all `[minibatch]`."""
        s = self._s
        policy = Categorical(logits=self.agent.actor(observation))
        ratio = (policy.log_prob(action) - log_prob).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - s.clip, 1 + s.clip) * advantage).mean()
        error = 0.5 * (self.agent.critic(observation).squeeze(-1) - goal).square().mean()
        loss = s.value * error - gain - s.entropy * policy.entropy().mean()
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.agent.parameters(), s.largest_norm)
        self._optimizer.step()


def vector(s: Settings) -> Any:
    """Gymnasium's vector environment: its own for CartPole, or one that steps single ones and resets them at once."""
    if s.vectorization == "vector_entry_point":
        return gymnasium.make_vec(s.env, s.envs, vectorization_mode=s.vectorization)
    kwargs = {"autoreset_mode": AutoresetMode.SAME_STEP}
    return gymnasium.make_vec(s.env, s.envs, vectorization_mode=s.vectorization, vector_kwargs=kwargs)


class CollectByHand:
    """The loop over the environments alone, with the agent's outputs kept in arrays `[time, envs]`."""

    def __init__(self, s: Settings) -> None:
        torch.manual_seed(s.seed)
        self.s, self.agent, self.env = s, Agent(), vector(s)
        self._observation, _ = self.env.reset(seed=s.seed)
        self._ended = np.zeros(s.envs, np.bool_)

    def collect(self) -> dict[str, Array]:
        """Steps of all environments. `idle`: calls that only reset an environment, whose rows are no steps."""
        s, env, agent, observation, ended = self.s, self.env, self.agent, self._observation, self._ended
        resets_in_next_call = s.vectorization == "vector_entry_point"
        observations = np.empty((s.steps, s.envs, 4), np.float32)
        actions = np.empty((s.steps, s.envs), np.int64)
        log_probs, values, rewards = (np.empty((s.steps, s.envs), np.float32) for _ in range(3))
        dones, idle = np.empty((s.steps, s.envs), np.bool_), np.zeros((s.steps, s.envs), np.bool_)
        for t in range(s.steps):
            observations[t] = observation
            with torch.no_grad():
                action, log_prob, value = agent(torch.from_numpy(observation))
            actions[t], log_probs[t], values[t] = raw, _, _ = action.numpy(), log_prob.numpy(), value.numpy()
            observation, rewards[t], terminated, truncated, _ = env.step(raw)
            if resets_in_next_call:
                idle[t] = ended
            dones[t] = ended = np.logical_or(terminated, truncated)
        self._observation, self._ended = observation, ended
        columns = {"observation": observations, "action": actions, "log_prob": log_probs, "value": values}
        return {**columns, "reward": rewards, "done": dones, "idle": idle, "last": observation}

    def parts(self) -> Parts:
        return Parts()

    def run(self) -> int:
        frames = 0
        for _ in range(self.s.batches):
            idle = self.collect()["idle"]
            frames += idle.size - np.count_nonzero(idle)
        return frames


class ByHand(CollectByHand):
    """The whole of PPO."""

    def __init__(self, s: Settings) -> None:
        super().__init__(s)
        self.learner = Learner(self.agent, s)
        self._generator = np.random.default_rng(s.seed)

    def epoch(self) -> Array:
        """The order of the rows of a batch in an epoch."""
        return self._generator.permutation(self.s.steps * self.s.envs)

    def minibatches(self, columns: list[Tensor]) -> Iterator[list[Tensor]]:
        """An epoch over the columns of a batch."""
        order = self.epoch()
        for start in range(0, len(order), self.s.minibatch):
            rows = torch.from_numpy(order[start : start + self.s.minibatch])
            yield [column[rows] for column in columns]

    def parts(self) -> Parts:
        learner = [(self.learner, "advantages"), (self.learner, "update")]
        return Parts(learner=learner, iterators=[(self, "minibatches")])

    def run(self) -> int:
        s, frames = self.s, 0
        for _ in range(s.batches):
            columns = {key: torch.from_numpy(column) for key, column in self.collect().items()}
            value = columns["value"]
            advantage = self.learner.advantages(columns["reward"], value, columns["done"], columns["last"])
            kept = (columns["observation"], columns["action"], columns["log_prob"], advantage, advantage + value)
            flat = [column.reshape(-1, *column.shape[2:]) for column in kept]
            for _ in range(s.epochs):
                for minibatch in self.minibatches(flat):
                    self.learner.update(*minibatch)
            frames += s.steps * s.envs
        return frames


class CollectWithEngram:
    """A collector, with the agent's outputs in its batches `[envs, time]`."""

    def __init__(self, s: Settings) -> None:
        torch.manual_seed(s.seed)
        self.s, self.agent = s, Agent()
        policy = TensorDictModule(self.agent, in_keys=["observation"], out_keys=["action", "log_prob", "value"])
        self.collector = SyncDataCollector(
            lambda: GymEnv(
                s.env, num_envs=s.envs, vectorization_mode=s.vectorization, categorical_action_encoding=True
            ),
            policy,
            frames_per_batch=s.steps * s.envs,
            total_frames=s.batches * s.steps * s.envs,
        )
        self.collector.set_seed(s.seed)

    def parts(self) -> Parts:
        return Parts()

    def run(self) -> int:
        for _ in self.collector:
            pass
        return self.collector.frames


class Engram(CollectWithEngram):
    """The whole of PPO."""

    def __init__(self, s: Settings) -> None:
        super().__init__(s)
        self.learner = Learner(self.agent, s)
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(s.steps * s.envs),
            sampler=SamplerWithoutReplacement(),
            batch_size=s.minibatch,
            generator=torch.Generator().manual_seed(s.seed),
        )

    def put_advantages(self, batch: TensorDictBase) -> None:
        """Adds "advantage" and "goal" to a batch `[envs, time]`."""
        following, value = batch["next"], batch["value"]
        reward, done = following["reward"].squeeze(-1), following["done"].squeeze(-1)
        last = following["observation"][:, -1]
        advantage = self.learner.advantages(reward.T, value.T, done.T, last).T
        batch["advantage"], batch["goal"] = advantage, advantage + value

    def update(self, batch: TensorDictBase) -> None:
        keys = ("observation", "action", "log_prob", "advantage", "goal")
        self.learner.update(*(batch[key] for key in keys))

    def minibatches(self) -> Iterator[TensorDictBase]:
        """An epoch over the batch in the buffer."""
        return iter(self.buffer)

    def parts(self) -> Parts:
        learner = [(self, "put_advantages"), (self.learner, "update")]
        return Parts(learner=learner, replay=[(self.buffer, "extend")], iterators=[(self, "minibatches")])

    def run(self) -> int:
        for batch in self.collector:
            self.put_advantages(batch)
            self.buffer.extend(batch.reshape(-1))
            for _ in range(self.s.epochs):
                for minibatch in self.minibatches():
                    self.update(minibatch)
        return self.collector.frames


NATIVE = "vector_entry_point"
COLUMNS = ("observation", "action", "log_prob", "value", "reward", "done")


FEW, MANY = Settings(batches=8), Settings(envs=64, batches=4)
COLLECTING = in_all_forms(CollectByHand, CollectWithEngram)
WHOLE = in_all_forms(ByHand, Engram, "make_ppo")
COLLECTION_ROWS = [
    Row("program_collect_8", "PPO collection, 8 gymnasium sync environments", FEW, COLLECTING, most=1.1),
    Row("program_collect_64", "PPO collection, 64 gymnasium sync environments", MANY, COLLECTING, most=1.1),
    Row(
        "program_collect_native_8",
        "PPO collection, native vector of 8",
        replace(FEW, vectorization=NATIVE),
        COLLECTING,
        most=1.1,
    ),
    Row(
        "program_collect_native_64",
        "PPO collection, native vector of 64",
        replace(MANY, vectorization=NATIVE, batches=8),
        COLLECTING,
        most=1.1,
    ),
]
ROWS = [
    Row("program_ppo_8", "PPO, 8 environments", replace(FEW, batches=4), WHOLE),
    Row("program_ppo_64", "PPO, 64 environments", replace(MANY, batches=1, minibatch=2_048), WHOLE),
]

if __name__ == "__main__":
    main(__doc__, [*COLLECTION_ROWS, *ROWS])
