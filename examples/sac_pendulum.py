"""SAC on a continuous task, from prioritised replay, with a checkpoint of everything in the middle.

    python examples/sac_pendulum.py                 # about four minutes on one core
    python examples/sac_pendulum.py --stop-at 4000  # ends there, after a checkpoint in ./sac-run ...
    python examples/sac_pendulum.py --resume        # ... and this goes on from it

What it shows:

- `TensorDictPrioritizedReplayBuffer`: steps are drawn in proportion to their last error, the loss is weighted by the
  batch's `"priority_weight"`, and `update_tensordict_priority(batch)` writes new errors under `"td_error"` back.
- A squashed Gaussian policy as a tensordict module; `init_random_frames` before it is worth anything.
- `dumps` and `loads`: after a resume the rows, priorities, the buffer's generator and the collector's counters are
  those of the checkpoint. Only the episode that was in the middle is lost: the environment starts a new one.

Soft actor-critic is by Haarnoja et al. (2018), prioritised replay by Schaul et al. (2016).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from support import checkpoints
from support.running import Progress, begin, mean_return, parser
from support.sac import Learner, make_actor

from engram.collectors import SyncDataCollector
from engram.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
from engram.envs import GymEnv


@dataclass(frozen=True)
class Settings:
    """Everything that decides how a run goes. Frames are steps of the environment."""

    frames: int = 10_000
    random_frames: int = 1_000
    frames_per_batch: int = 50  # with as many updates after each
    batch_size: int = 128
    learning_rate: float = 1e-3
    gamma: float = 0.99
    alpha: float = 0.6  # how much priorities count
    beta: float = 0.4  # how much weights correct for it at first; 1 at the end
    save_every: int = 4_000
    evaluate_every: int = 2_000
    evaluation_episodes: int = 10

    def quick(self) -> Settings:
        return replace(self, frames=700, random_frames=500, evaluate_every=700, evaluation_episodes=2)


def make_env() -> GymEnv:
    return GymEnv("Pendulum-v1")


class Training:
    """The parts of a training, and the loop over them."""

    def __init__(self, settings: Settings, seed: int, folder: Path) -> None:
        begin(seed)
        self._settings, self._seed, self._folder = settings, seed, folder
        self._actor = make_actor()
        self._learner = Learner(self._actor, settings.learning_rate, settings.gamma)
        self._collector = SyncDataCollector(
            make_env,
            self._actor,
            frames_per_batch=settings.frames_per_batch,
            total_frames=settings.frames,
            init_random_frames=settings.random_frames,
        )
        self._collector.set_seed(seed)
        self._buffer = TensorDictPrioritizedReplayBuffer(
            alpha=settings.alpha,
            beta=settings.beta,
            storage=LazyTensorStorage(settings.frames),
            batch_size=settings.batch_size,
            generator=torch.Generator().manual_seed(seed),
        )
        self.loss, self._resumed_from = float("nan"), 0

    def resume(self) -> None:
        """Takes everything from the newest checkpoint."""
        checkpoint = checkpoints.newest(self._folder)
        self._buffer.loads(checkpoint / "buffer")
        state = checkpoints.learner_state(checkpoint)
        self._learner.load_state_dict(state["learner"])
        self._collector.load_state_dict(state["collector"])
        self._collector.set_seed(self._seed + self._collector.frames)  # other starts than the first time
        torch.set_rng_state(state["rng"])
        self._resumed_from = self._collector.frames

    def save(self) -> None:
        state = {
            "learner": self._learner.state_dict(),
            "collector": self._collector.state_dict(),
            "rng": torch.get_rng_state(),
        }
        checkpoints.save(self._folder, self._collector.frames, self._buffer, state)

    def run(self, stop_at: int) -> None:
        """Collects and learns in turns, until the end or `stop_at`."""
        settings, progress, score = self._settings, Progress(), None
        for batch in self._collector:
            self._buffer.extend(batch.select("observation", "action", "next"))
            frames = self._collector.frames
            if frames >= settings.random_frames:
                self.learn(updates=settings.frames_per_batch)
            if frames % settings.evaluate_every == 0:
                score = mean_return(make_env, self._actor, settings.evaluation_episodes, longest=200)
                progress.show(frames, evaluation=score, loss=self.loss)
            if frames % settings.save_every == 0 or frames >= stop_at:
                self.save()
            if frames >= stop_at:
                break
        progress.summary(
            example="sac_pendulum", seed=self._seed, resumed_from=self._resumed_from, frames=self._collector.frames,
            updates=self._learner.updates, rows=len(self._buffer), loss=self.loss, mean_return=score,
        )  # fmt: skip

    def learn(self, updates: int) -> None:
        settings = self._settings
        done = self._collector.frames / settings.frames
        self._buffer.sampler.beta = settings.beta + (1 - settings.beta) * done  # less bias as values settle
        for _ in range(updates):
            batch = self._buffer.sample()
            batch["td_error"], self.loss = self._learner.update(batch)
            self._buffer.update_tensordict_priority(batch)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--run-dir", type=Path, default=Path("sac-run"), help="for checkpoints; default: ./sac-run")
    arguments.add_argument("--stop-at", type=int, help="save a checkpoint after so many frames, and end")
    arguments.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    given = arguments.parse_args()
    settings = Settings().quick() if given.quick else Settings()
    training = Training(settings, given.seed, given.run_dir)
    if given.resume:
        try:
            training.resume()
        except FileNotFoundError as error:
            arguments.error(str(error))
    training.run(given.stop_at or settings.frames)


if __name__ == "__main__":
    main()
