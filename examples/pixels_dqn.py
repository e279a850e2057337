"""A DQN that plays from pixels: single frames are stored as bytes, stacks of frames are made where they are needed.

    python examples/pixels_dqn.py    # a few minutes on one core

What it shows:

- `GymEnv(from_pixels=True)`, uint8 pictures `[H, W, 3]`, in a `TransformedEnv` that makes them small and grey and, by
  `CatFrames`, shows the policy the last four: one picture does not say where the ball is going.
- The buffer keeps single small pictures, as bytes, not the stacks: a quarter of the memory.
- `CatFrames.make_rb_transform_and_sampler` gives the buffer a sampler that draws a step, with `weight="steps"` each
  with equal probability whatever its episode's length, with the three before it in that episode, and a transform that
  stacks them again: what the learner reads is, byte for byte, what the policy saw, at the beginnings of episodes too.

Stacks of four frames are those of Mnih et al. (2015).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from support.dqn import Greedy
from support.falling_ball import STEPS, FallingBall
from support.running import Progress, begin, mean_return, parser
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from engram.collectors import SyncDataCollector
from engram.data import LazyTensorStorage, TensorDictReplayBuffer
from engram.envs import GymEnv, TransformedEnv
from engram.envs.transforms import CatFrames, Compose, DTypeCastTransform, GrayScale, Resize, ToTensorImage

FRAMES = 4  # in a stack
SIZE = 42  # of a picture
ACTIONS = 3


@dataclass(frozen=True)
class Settings:
    """Everything that decides how a run goes. Frames are steps of the environment."""

    frames: int = 30_000  # the budget
    solved_at: float = 0.9
    capacity: int = 30_000
    frames_per_batch: int = 100
    batch_size: int = 32
    warm_up: int = 1_000  # frames before the first update
    frames_per_update: int = 4
    learning_rate: float = 1e-3
    gamma: float = 0.98
    target_rate: float = 0.01
    explore_for: int = 4_000  # frames in which epsilon falls from 1 to
    least_epsilon: float = 0.05
    evaluate_every: int = 2_500
    evaluation_episodes: int = 40

    def quick(self) -> Settings:
        return replace(self, frames=400, warm_up=200, evaluate_every=400, evaluation_episodes=4)


def make_env() -> TransformedEnv:
    """Shows `"pixels"`, uint8 `[1, SIZE, SIZE]`, to be stored, and `"observation"`, the last FRAMES of them."""
    small_and_grey = (
        ToTensorImage(from_int=False),  # [3, H, W], floats from 0 to 255
        GrayScale(),
        Resize(SIZE, antialias=True),
        DTypeCastTransform(torch.float32, torch.uint8, in_keys=["pixels"]),
    )
    stacked = CatFrames(FRAMES, dim=-3, in_keys=["pixels"], out_keys=["observation"])
    game = GymEnv(FallingBall(render_mode="rgb_array"), from_pixels=True, categorical_action_encoding=True)
    return TransformedEnv(game, Compose(*small_and_grey, stacked))


def make_buffer(settings: Settings, seed: int) -> TensorDictReplayBuffer:
    """Takes steps with single frames, gives back steps with stacks, `[batch_size]`."""
    frames = CatFrames(FRAMES, dim=-3, in_keys=["pixels"], out_keys=["observation"])
    stacks, sampler = frames.make_rb_transform_and_sampler(settings.batch_size, weight="steps")
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(settings.capacity),
        sampler=sampler,
        transform=stacks,
        batch_size=settings.batch_size,
        generator=torch.Generator().manual_seed(seed),
    )


def to_store(batch: TensorDictBase) -> TensorDictBase:
    return batch.exclude("observation", ("next", "observation"))


class PixelQ(nn.Module):
    """From stacks, uint8 `[*, FRAMES, SIZE, SIZE]`, to the value of each action."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(FRAMES, 16, 6, stride=3), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten(-3),
            nn.Linear(32 * 6 * 6, 128), nn.ReLU(), nn.Linear(128, ACTIONS),
        )  # fmt: skip

    def forward(self, stack: Tensor) -> Tensor:
        return self.layers(stack / 255)


class EpsilonGreedy(Greedy):
    """With probability `epsilon`, which the training loop lowers, a random action; for one environment."""

    epsilon = 1.0

    def forward(self, observation: Tensor) -> Tensor:
        return torch.randint(ACTIONS, ()) if torch.rand(()) < self.epsilon else super().forward(observation)


def on_stacks(policy: nn.Module) -> TensorDictModule:
    """The environment shows two things; the policy is to see the stack."""
    return TensorDictModule(policy, in_keys=["observation"], out_keys=["action"])


class Learner:
    """A double DQN on steps with stacks, `"observation"` and `("next", "observation")`."""

    def __init__(self, s: Settings) -> None:
        self.q, self._settings, self.updates = PixelQ(), s, 0
        self.target = copy.deepcopy(self.q).requires_grad_(False)  # follows slowly
        self._optimizer = torch.optim.Adam(self.q.parameters(), lr=s.learning_rate, fused=True)

    def update(self, batch: TensorDictBase) -> float:
        following = batch["next"]
        with torch.no_grad():
            best = self.q(following["observation"]).argmax(-1, keepdim=True)
            value = self.target(following["observation"]).gather(-1, best)
            goal = following["reward"] + self._settings.gamma * value * ~following["terminated"]
        loss = nn.functional.smooth_l1_loss(
            self.q(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1)), goal
        )
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.updates += 1
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.q.parameters(), strict=True):
                slow.lerp_(fast, self._settings.target_rate)
        return loss.item()


def train(settings: Settings, seed: int) -> None:
    begin(seed)
    learner = Learner(settings)
    policy, best_policy = EpsilonGreedy(learner.q), on_stacks(Greedy(learner.target))
    buffer, progress, score, loss = make_buffer(settings, seed), Progress(), -1.0, float("nan")
    with SyncDataCollector(
        make_env, on_stacks(policy), frames_per_batch=settings.frames_per_batch, total_frames=settings.frames
    ) as collector:
        collector.set_seed(seed)
        for batch in collector:
            frames = collector.frames
            policy.epsilon = max(settings.least_epsilon, 1 - frames / settings.explore_for)
            buffer.extend(to_store(batch))
            while frames >= settings.warm_up and learner.updates < frames // settings.frames_per_update:
                loss = learner.update(buffer.sample())
            if frames % settings.evaluate_every == 0:
                score = mean_return(make_env, best_policy, settings.evaluation_episodes, longest=STEPS)
                caught = batch["next", "reward"].gt(0).sum().item() / batch["next", "done"].sum().item()
                progress.show(frames, caught_in_training=caught, evaluation=score, loss=loss)
                if score >= settings.solved_at:
                    break
        progress.summary(
            example="pixels_dqn", seed=seed, frames=collector.frames, updates=learner.updates, rows=len(buffer),
            bytes_per_step=buffer.storage.nbytes // settings.capacity, loss=loss, mean_return=score,
        )  # fmt: skip


def main() -> None:
    given = parser(__doc__).parse_args()
    train(Settings().quick() if given.quick else Settings(), given.seed)


if __name__ == "__main__":
    main()
