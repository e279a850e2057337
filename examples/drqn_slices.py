"""Recurrent Q-learning from slices of trajectories: CartPole when velocities are hidden.

    python examples/drqn_slices.py                 # half a minute of one core
    python examples/drqn_slices.py --memoryless    # the same network when it may not remember

What it shows:

- A policy with a state of its own: it reads `"hidden"` and writes `("next", "hidden")`. The collector carries the
  state from step to step and from batch to batch, makes it zero where an episode begins, and stores it with the
  steps.
- `LazyTensorStorage(ndim=2)`: a strand for each environment, so that a trajectory stays one through all batches.
- `SequenceSampler`, slices of one length `[slices, time]`: rows of burn-in to bring the state up to date, rows to
  train on, padding and a mask where a trajectory is shorter. `"is_init"` marks where the state is to be taken from
  the row.
- `weight="steps"`: each stored step is as likely as any other. Drawn by trajectory instead, most slices come from the
  hundreds of short episodes of the start, and the later steps of long ones are seldom learned from.

The burn-in and the stored states are those of Kapturowski et al. (2019), the recurrent values of Hausknecht and Stone
(2015), the lambda returns, which are not corrected for exploration, of Peng and Williams (1996).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import gymnasium
import torch
from support.recurrent import HIDDEN, Positions, RecurrentQ
from support.running import Progress, begin, mean_return, parser, returns_ended_in
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from engram.collectors import SyncDataCollector
from engram.data import LazyTensorStorage, SequenceSampler, TensorDictReplayBuffer
from engram.envs import ExplorationType, GymEnv, SerialEnv, exploration_type


@dataclass(frozen=True)
class Settings:
    """Everything that decides how a run goes. Frames are steps of the environment."""

    frames: int = 81_920  # the budget
    solved_at: float = 475.0
    envs: int = 8
    frames_per_batch: int = 128
    updates_per_batch: int = 8
    capacity: int = 50_000
    slices: int = 32
    burn_in: int = 8
    trained: int = 24  # rows of a slice
    warm_up: int = 2_048  # frames before the first update
    learning_rate: float = 1e-3
    gamma: float = 0.99
    lambda_: float = 0.7  # weight of an (n + 1)-step return, relative to the n-step one
    reward_scale: float = 0.1
    target_rate: float = 0.01
    explore_for: int = 8_192  # frames in which epsilon falls from 1 to
    least_epsilon: float = 0.05
    evaluate_every: int = 4_096
    evaluation_episodes: int = 100

    def quick(self) -> Settings:
        return replace(self, frames=2_048, warm_up=1_024, evaluate_every=2_048, evaluation_episodes=2, slices=16)


def make_env() -> GymEnv:
    return GymEnv(Positions(gymnasium.make("CartPole-v1")), categorical_action_encoding=True)


class EpsilonGreedy(TensorDictModuleBase):
    """Acts by the values of a `RecurrentQ`, at random with probability `epsilon` while it explores."""

    in_keys = ["observation", "hidden"]
    out_keys = ["action", ("next", "hidden")]
    epsilon = 1.0

    def __init__(self, q: RecurrentQ) -> None:
        super().__init__()
        self.q = q

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        hidden = td.get("hidden", None)  # there is none before the very first step
        values, state = self.q(td["observation"], torch.zeros(*td.shape, HIDDEN) if hidden is None else hidden)
        action = values.argmax(-1)
        if exploration_type() is not ExplorationType.DETERMINISTIC:
            action = torch.where(torch.rand(td.shape) < self.epsilon, torch.randint(2, td.shape), action)
        return td.set("action", action).set(("next", "hidden"), state)


def returns(rows: TensorDictBase, value: Tensor, s: Settings) -> Tensor:
    """Lambda returns `[slices, time, 1]` of rows; `value`, of the same shape, is that of the state after each row.

    A return goes no further than the last step of its slice: rows of padding after it do not count.
    """
    reward, has_future = s.reward_scale * rows["next", "reward"], ~rows["next", "terminated"]
    mask = rows["collector", "mask"].unsqueeze(-1)
    goals, after = [], value[:, -1]
    for t in reversed(range(rows.shape[1])):
        goals.append(reward[:, t] + s.gamma * has_future[:, t] * after)
        after = value[:, t - 1].lerp(goals[-1], s.lambda_ * mask[:, t])  # what the row before goes on with
    return torch.stack(goals[::-1], 1)


class Learner:
    """A double Q-learner over sequences."""

    def __init__(self, q: RecurrentQ, s: Settings) -> None:
        self.q, self.target, self._settings, self.updates = q, copy.deepcopy(q).requires_grad_(False), s, 0
        self._optimizer = torch.optim.Adam(q.parameters(), lr=s.learning_rate, fused=True)

    def update(self, warm_up: TensorDictBase, rows: TensorDictBase) -> float:
        """One step on `rows` `[slices, time]`, with the states that the rows before them lead to."""
        s, following = self._settings, rows["next"]
        values, states = self.q.over(rows, self._state_after(self.q, warm_up))
        with torch.no_grad():
            _, target_states = self.target.over(rows, self._state_after(self.target, warm_up))
            best = self.q(following["observation"], states)[0].argmax(-1, keepdim=True)
            value = self.target(following["observation"], target_states)[0].gather(-1, best)
            goal = returns(rows, value, s)
        error = nn.functional.smooth_l1_loss(values.gather(-1, rows["action"].unsqueeze(-1)), goal, reduction="none")
        loss = error.squeeze(-1)[rows["collector", "mask"]].mean()  # padding teaches nothing
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.q.parameters(), 10.0)
        self._optimizer.step()
        self.updates += 1
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.q.parameters(), strict=True):
                slow.lerp_(fast, s.target_rate)
        return loss.item()

    @torch.no_grad()
    def _state_after(self, q: RecurrentQ, warm_up: TensorDictBase) -> Tensor:
        return q.over(warm_up, torch.zeros(warm_up.shape[0], HIDDEN))[1][:, -1]


def train(settings: Settings, seed: int, memoryless: bool) -> None:
    begin(seed)
    learner = Learner(RecurrentQ(settings.reward_scale / (1 - settings.gamma), not memoryless), settings)
    policy, averaged_policy = EpsilonGreedy(learner.q), EpsilonGreedy(learner.target)  # of the last networks
    sampler = SequenceSampler(slice_len=settings.burn_in + settings.trained, burn_in=settings.burn_in, weight="steps")
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(settings.capacity, ndim=2),
        sampler=sampler,
        batch_size=settings.slices * (settings.burn_in + settings.trained),
    )
    progress, so_far, score, recent, loss = Progress(), torch.zeros(settings.envs), 0.0, [0.0], float("nan")
    with SyncDataCollector(
        SerialEnv(settings.envs, make_env),
        policy,
        frames_per_batch=settings.frames_per_batch,
        total_frames=settings.frames,
    ) as collector:
        collector.set_seed(seed)
        for batch in collector:
            frames = collector.frames
            policy.epsilon = max(settings.least_epsilon, 1 - frames / settings.explore_for)
            recent = [*recent, *returns_ended_in(batch, so_far)][-50:]
            buffer.extend(batch.exclude(("next", "hidden")))
            if frames >= settings.warm_up:
                for _ in range(settings.updates_per_batch):
                    sequences = buffer.sample().reshape(settings.slices, -1)
                    loss = learner.update(*sampler.split(sequences))
            if frames % settings.evaluate_every == 0:
                score = mean_return(make_env, averaged_policy, settings.evaluation_episodes, longest=500)
                progress.show(frames, training_return=sum(recent) / len(recent), evaluation=score, loss=loss)
                if score >= settings.solved_at:
                    break
        progress.summary(
            example="drqn_slices", seed=seed, memory=not memoryless, frames=collector.frames, updates=learner.updates,
            rows=len(buffer), loss=loss, mean_return=score,
        )  # fmt: skip


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--memoryless", action="store_true", help="forget everything after each step")
    given = arguments.parse_args()
    train(Settings().quick() if given.quick else Settings(), given.seed, given.memoryless)


if __name__ == "__main__":
    main()
