"""PPO: whole batches of fresh steps, learned from in epochs without replacement, then thrown away.

    python examples/ppo_cartpole.py                # about a minute on one core
    python examples/ppo_cartpole.py --workers 2    # the environments in two worker processes

What it shows:

- A stochastic policy out of tensordict's modules. What it writes besides the action, here the action's
  log-probability, comes back in every batch, as the clipped objective needs it.
- `SyncDataCollector` over a `SerialEnv`: batches `[envs, time]`, episodes that go on from one batch to the next, and
  under `"next"` the true last observation of each episode, so that the value of a truncated one is taken from its own
  end.
- `MultiSyncDataCollector`, by `--workers`: the same batches from processes that get new weights before each.
- A `LazyTensorStorage` for exactly one batch with `SamplerWithoutReplacement`: iterating over the buffer is an epoch,
  in another order each time.

Proximal policy optimisation is by Schulman et al. (2017), generalised advantages by Schulman et al. (2016).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from support.running import Progress, begin, mean_return, parser, returns_ended_in
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical

from engram.collectors import MultiSyncDataCollector, SyncDataCollector
from engram.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from engram.envs import GymEnv, SerialEnv


@dataclass(frozen=True)
class Settings:
    """Everything that decides how a run goes. Frames are steps of the environment."""

    frames: int = 204_800  # the budget
    solved_at: float = 475.0
    envs: int = 8
    frames_per_batch: int = 2_048
    epochs: int = 10
    batch_size: int = 256
    learning_rate: float = 1e-3
    gamma: float = 0.99
    lambda_: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01
    evaluate_every: int = 5  # batches
    evaluation_episodes: int = 20

    def quick(self) -> Settings:
        return replace(self, frames=2_048, frames_per_batch=512, epochs=4, evaluate_every=4, evaluation_episodes=4)


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def make_networks() -> tuple[ProbabilisticTensorDictSequential, TensorDictModule]:
    """The actor, from observations to actions and their log-probabilities, and the critic."""
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(mlp(4, 2), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=Categorical,
            return_log_prob=True,
            log_prob_key="log_prob",
        ),
    )
    return actor, TensorDictModule(mlp(4, 1), in_keys=["observation"], out_keys=["value"])


def mlp(inputs: int, outputs: int) -> nn.Module:
    layers = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    nn.init.normal_(layers[-1].weight, std=0.01)  # at first all actions are as likely, and all values zero
    return nn.Sequential(*layers)


def make_collector(settings: Settings, actor: nn.Module, workers: int) -> SyncDataCollector | MultiSyncDataCollector:
    """Batches `[envs, time]`, whoever steps the environments."""
    frames = {"frames_per_batch": settings.frames_per_batch, "total_frames": settings.frames}
    if not workers:
        return SyncDataCollector(SerialEnv(settings.envs, make_env), actor, **frames)
    some = partial(SerialEnv, settings.envs // workers, make_env)
    return MultiSyncDataCollector(some, actor, num_workers=workers, cat_results=0, update_at_each_batch=True, **frames)


@torch.no_grad()
def advantages(batch: TensorDictBase, critic: nn.Module, gamma: float, lambda_: float) -> tuple[Tensor, Tensor]:
    """Advantages and the returns that the critic should learn, `[envs, time, 1]`."""
    following = batch["next"]
    value, next_value = critic.module(batch["observation"]), critic.module(following["observation"])
    # A pole that still stands when time is up has a future: `terminated` ends the return, `done` ends the trace.
    error = following["reward"] + gamma * next_value * ~following["terminated"] - value
    decay = gamma * lambda_ * ~following["done"]
    advantage, ahead = torch.empty_like(error), torch.zeros_like(error[:, 0])
    for t in reversed(range(batch.shape[1])):
        ahead = error[:, t] + decay[:, t] * ahead
        advantage[:, t] = ahead
    return advantage, advantage + value


def loss_of(batch: TensorDictBase, actor: ProbabilisticTensorDictSequential, critic: nn.Module, s: Settings) -> Tensor:
    """The clipped objective, the critic's error and the entropy of a minibatch."""
    policy = actor.get_dist(batch)
    ratio = (policy.log_prob(batch["action"]) - batch["log_prob"]).exp()
    advantage = batch["advantage"].squeeze(-1)
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - s.clip, 1 + s.clip) * advantage)
    error = nn.functional.smooth_l1_loss(critic.module(batch["observation"]), batch["goal"])
    return error - gain.mean() - s.entropy * policy.entropy().mean()


def train(settings: Settings, seed: int, workers: int) -> None:
    begin(seed)
    actor, critic = make_networks()
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=settings.learning_rate, fused=True)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(settings.frames_per_batch),
        sampler=SamplerWithoutReplacement(),
        batch_size=settings.batch_size,
    )
    progress, so_far, updates = Progress(), torch.zeros(settings.envs), 0
    with make_collector(settings, actor, workers) as collector:
        collector.set_seed(seed)
        for batch in collector:
            advantage, goal = advantages(batch, critic, settings.gamma, settings.lambda_)
            batch["advantage"], batch["goal"] = (advantage - advantage.mean()) / advantage.std(), goal
            buffer.extend(batch.reshape(-1))  # takes the place of the batch before
            for _ in range(settings.epochs):
                for minibatch in buffer:
                    loss = loss_of(minibatch, actor, critic, settings)
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(parameters, 0.5)
                    optimizer.step()
                    updates += 1
            ended = returns_ended_in(batch, so_far)
            if collector.batches % settings.evaluate_every == 0:
                score = mean_return(make_env, actor, settings.evaluation_episodes, longest=500)
                recent = sum(ended) / max(1, len(ended))
                progress.show(collector.frames, training_return=recent, evaluation=score, loss=loss.item())
                if score >= settings.solved_at:
                    break
        progress.summary(
            example="ppo_cartpole", seed=seed, workers=workers, frames=collector.frames, updates=updates,
            loss=loss.item(), rows=len(buffer), training_return=recent, mean_return=score,
        )  # fmt: skip


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--workers", type=int, default=0, help="processes that collect; 0: this one")
    given = arguments.parse_args()
    settings = Settings().quick() if given.quick else Settings()
    if given.workers and settings.envs % given.workers:
        arguments.error(f"--workers must divide the {settings.envs} environments")
    train(settings, given.seed, given.workers)


if __name__ == "__main__":
    main()
