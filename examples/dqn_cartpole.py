"""An agent learns CartPole from a replay buffer in a mapped file, and is killed on the way.

    python examples/dqn_cartpole.py

1. **Training** runs in a child process: a collector steps the environment, a `LazyMemmapStorage` keeps every step in a
   file, a double DQN learns from it. Steps are stored as they were collected; a `SliceSampler` draws each with the same
   probability, with the two after it in its episode, for a 3-step return. Every so often there is a checkpoint.
2. **SIGKILL**: at a fixed frame the child dies by `kill -9` in the middle of an `extend`, long after its last
   checkpoint.
3. **Looking for losses**: the file is opened and held against a ledger in which the child had noted each row.
4. **Resuming**: a fresh process takes weights and samplers from the checkpoint and the rows from the file, where there
   are newer ones. No slice crosses the kill. First it makes up for the updates that were lost; then it goes on until
   the greedy policy has a mean return of 475 over 20 episodes.

The same seed gives the same curve, the kill included. Exit code 1: it did not learn, or something was lost.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from support import checkpoints
from support.curve import draw
from support.dqn import EpsilonGreedy, Learner, q_network
from support.evaluation import Evaluation
from support.fatal_writer import FatalWriter
from support.history import Episodes, History
from support.ledger import Check, Ledger, verify
from support.run_folder import RunFolder
from support.screen import Screen
from tensordict import TensorDictBase

from engram.collectors import SyncDataCollector
from engram.data import LazyMemmapStorage, SliceSampler, TensorDictReplayBuffer
from engram.envs import GymEnv

OBSERVATION_SIZES = (2.4, 2.0, 0.2, 2.0)  # position, velocity, angle, angular velocity


@dataclass(frozen=True)
class Settings:
    """Everything that decides how a run goes. Frames are steps of the environment."""

    seed: int = 0
    frames: int = 60_000  # the budget
    kill_at: int = 5_500
    solved_at: float = 475.0
    capacity: int = 50_000
    frames_per_batch: int = 100
    batch_size: int = 128  # slices
    steps: int = 3  # of a slice, and so of a return
    warm_up: int = 1_000  # frames before the first update
    frames_per_update: int = 2
    width: int = 128  # of the network's layers
    learning_rate: float = 1e-3
    gamma: float = 0.99
    reward_scale: float = 0.1
    target_rate: float = 0.01
    explore_for: int = 5_000  # frames in which epsilon falls from 1 to
    least_epsilon: float = 0.05
    evaluate_every: int = 1_000
    evaluation_episodes: int = 20
    save_every: int = 2_000

    def quick(self) -> Settings:
        """A run of seconds that learns nothing. Its small buffer has gone round when the kill comes."""
        return replace(
            self, frames=1_500, kill_at=900, solved_at=0.0, capacity=550, warm_up=200, evaluate_every=600,
            evaluation_episodes=4, save_every=600,
        )  # fmt: skip

    @property
    def highest_value(self) -> float:
        """The value of a pole that never falls. Where all starts there, learning is about what makes it fall."""
        return self.reward_scale / (1 - self.gamma)

    def epsilon(self, frames: int) -> float:
        """How often a random action is taken after so many frames."""
        return max(self.least_epsilon, 1 - (1 - self.least_epsilon) * frames / self.explore_for)

    def updates(self, frames: int) -> int:
        """How many updates so many frames are worth."""
        return max(0, frames - self.warm_up) // self.frames_per_update


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def make_sampler(steps: int) -> SliceSampler:
    """Draws every stored step with the same probability, with those after it in its episode; at its end, padding."""
    return SliceSampler(
        slice_len=steps, weight="steps", strict_length=False, pad_output=True, traj_key=("collector", "traj_ids"),
        truncated_key=None,
    )  # fmt: skip


# ---- the child process ----
def train(settings: Settings, folder: RunFolder, supervisor: Connection, kill_at: int | None) -> None:
    """Trains until it is killed in the first `extend` after frame `kill_at`; resumes and trains to the end if None."""
    torch.set_num_threads(1)
    training = Training(settings, folder, supervisor)
    if kill_at is None:
        training.resume()
    else:
        training.start()
    training.run(kill_at)


class Training:
    """The parts of a training, and the loop over them."""

    def __init__(self, settings: Settings, folder: RunFolder, supervisor: Connection) -> None:
        torch.manual_seed(settings.seed)
        self._settings, self._folder, self._supervisor = settings, folder, supervisor
        q = q_network(OBSERVATION_SIZES, actions=2, first_value=settings.highest_value, width=settings.width)
        self._policy = EpsilonGreedy(q)
        self._learner = Learner(q, settings.learning_rate, settings.gamma, settings.target_rate, settings.reward_scale)
        self._collector = SyncDataCollector(make_env, self._policy, frames_per_batch=settings.frames_per_batch)
        self._evaluation = Evaluation(make_env, self._learner.target, settings.evaluation_episodes)
        self._ledger = Ledger(folder.ledger)
        self._episodes = Episodes()
        self._sample_times: deque[float] = deque(maxlen=200)

    def start(self) -> None:
        """With an empty buffer, in a new file."""
        storage = LazyMemmapStorage(self._settings.capacity, scratch_dir=self._folder.rows)
        self._buffer = TensorDictReplayBuffer(storage=storage, **self._buffer_parts())
        self._collector.set_seed(self._settings.seed)

    def resume(self) -> None:
        """With the rows that are in the file, which are newer than the checkpoint of everything else."""
        self._buffer = TensorDictReplayBuffer.open(self._folder.rows, **self._buffer_parts())
        checkpoint = checkpoints.newest(self._folder.checkpoints)
        self._buffer.loads(checkpoint / "buffer", parts=("sampler", "writer", "generator"))
        state = checkpoints.learner_state(checkpoint)
        self._learner.load_state_dict(state["learner"])
        torch.set_rng_state(state["rng"])
        # The environment died with the process. A new episode starts, with a number that no row has.
        newest_trajectory = int(self._buffer["collector", "traj_ids"].max())
        self._collector.load_state_dict({**state["collector"], "trajectories": newest_trajectory + 1})
        self._collector.set_seed(self._settings.seed + self.frames)
        self._ledger.found(self.frames)

    def _buffer_parts(self) -> dict[str, Any]:
        settings = self._settings
        generator = torch.Generator().manual_seed(settings.seed)
        rows = settings.batch_size * settings.steps
        return {"sampler": make_sampler(settings.steps), "batch_size": rows, "generator": generator}

    @property
    def frames(self) -> int:
        """Frames of the whole training, over all its processes. Nobody counts them but the buffer."""
        return self._buffer.write_count

    def run(self, kill_at: int | None) -> None:
        """Collects, learns, evaluates and saves, in turns."""
        settings = self._settings
        if kill_at is None:
            self._make_up_for_lost_updates()
        while (before := self.frames) < settings.frames:
            if kill_at is not None and before >= kill_at:
                self._buffer.set_writer(FatalWriter())
            batch = self._collect()
            self._learn()
            self._tell_progress(batch)
            if _passed(settings.evaluate_every, before, self.frames) or self.frames >= settings.frames:
                score = self._evaluation.mean_return()
                self._tell("evaluation", frames=self.frames, score=score)
                if score >= settings.solved_at and kill_at is None:
                    break
            if _passed(settings.save_every, before, self.frames):
                self._save()
        self._buffer.storage.close()

    def _collect(self) -> TensorDictBase:
        """A batch of frames, with a note in the ledger before and after it is written."""
        self._policy.epsilon = self._settings.epsilon(self.frames)
        batch = self._collector.rollout()
        self._ledger.announce(batch)
        self._buffer.extend(batch)
        self._ledger.returned(self._buffer.write_count)
        return batch

    def _tell_progress(self, batch: TensorDictBase) -> None:
        self._tell(
            "progress",
            frames=self.frames,
            updates=self._learner.updates,
            episodes=self._episodes.ended_in(batch),
            fill=len(self._buffer) / self._settings.capacity,
            sample_us=median(self._sample_times) * 1e6 if self._sample_times else None,
        )

    def _learn(self) -> None:
        """As many updates as the frames so far are worth."""
        while self._learner.updates < self._settings.updates(self.frames):
            began = time.perf_counter()
            batch = self._buffer.sample()
            self._sample_times.append(time.perf_counter() - began)
            self._learner.update(batch.reshape(-1, self._settings.steps))

    def _make_up_for_lost_updates(self) -> None:
        """The rows outlived the process, so what had been learned from them can be learned again."""
        before = self._learner.updates
        self._learn()
        self._tell("resumed", frames=self.frames, updates=self._learner.updates - before)

    def _save(self) -> None:
        state = {
            "learner": self._learner.state_dict(),
            "collector": self._collector.state_dict(),
            "rng": torch.get_rng_state(),
        }
        checkpoints.save(self._folder.checkpoints, self.frames, self._buffer, state)

    def _tell(self, what: str, **facts: Any) -> None:
        self._supervisor.send((what, facts))


def _passed(every: int, before: int, now: int) -> bool:
    """Whether a multiple of `every` lies in (before, now]."""
    return now // every > before // every


# ---- the parent process ----
def main() -> int:
    settings, folder = _arguments()
    screen, history = Screen(settings.solved_at), History()
    began = time.perf_counter()

    screen.headline(f"1. Training until SIGKILL in the middle of an extend, after frame {settings.kill_at:,}")
    exit_code = supervise(settings, folder, screen, history, settings.kill_at)
    if exit_code != -signal.SIGKILL:
        screen.failure(f"the training process ended with exit code {exit_code}, not by SIGKILL")
        return 1

    screen.headline("2. What the dead process had logged, and what is in its file")
    frames, after_kill = look_for_losses(folder)
    history.killed_at, history.resumed_from = frames, int(checkpoints.newest(folder.checkpoints).name)
    screen.checks(after_kill)
    screen.say(
        f"Of the {settings.frames_per_batch} rows of the interrupted extend the first {frames - settings.kill_at} are "
        f"there. {frames - history.resumed_from:,} rows are newer than the checkpoint."
    )

    screen.headline(f"3. Resuming: weights of frame {history.resumed_from:,}, rows up to frame {frames:,}")
    exit_code = supervise(settings, folder, screen, history, None)
    if exit_code != 0:
        screen.failure(f"the resumed process ended with exit code {exit_code}")
        return 1

    frames, at_end = look_for_losses(folder)
    nothing_lost = all(check.holds for check in after_kill + at_end)
    solved = history.last_score >= settings.solved_at
    history.save(folder.history)
    draw(history, settings.solved_at, folder.curve)
    screen.headline("4. Summary")
    screen.summary(
        {
            "frames": f"{frames:,}, killed at {history.killed_at:,}",
            "updates": f"{history.updates:,}",
            "batch time": f"{history.sample_us:.0f} us for {settings.batch_size} slices of {settings.steps} (median)",
            "wall time": f"{time.perf_counter() - began:.0f} s",
            "greedy return": f"{history.last_score:.1f} over {settings.evaluation_episodes} episodes",
            f"learned ({settings.solved_at:g} or more)": solved,
            "nothing lost at the kill": all(check.holds for check in after_kill),
            "nothing lost at the end": all(check.holds for check in at_end),
            "learning curve": folder.curve,
        }
    )
    return 0 if solved and nothing_lost else 1


def supervise(
    settings: Settings, folder: RunFolder, screen: Screen, history: History, kill_at: int | None
) -> int | None:
    """Runs a training process to its end and shows what it tells; returns its exit code, -9 after SIGKILL."""
    processes = multiprocessing.get_context("spawn")
    receiving, sending = processes.Pipe(duplex=False)
    process = processes.Process(target=train, args=(settings, folder, sending, kill_at), daemon=True)
    process.start()
    sending.close()  # the child has the only other end: when it dies, reading ends
    with screen.live():
        while True:
            try:
                what, facts = receiving.recv()
            except (EOFError, OSError):  # at the end of a message, or within one
                break
            history.add(what, facts)
            screen.show(what, facts)
    process.join()
    return process.exitcode


def look_for_losses(folder: RunFolder) -> tuple[int, list[Check]]:
    """Opens the file as any other process would; returns how many rows were ever written, and what was checked."""
    buffer = TensorDictReplayBuffer.open(folder.rows)
    checks = verify(folder.ledger, buffer)
    frames = buffer.write_count
    buffer.storage.close()
    return frames, checks


def _arguments() -> tuple[Settings, RunFolder]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--run-dir", type=Path, default=Path("demo-run"), help="wiped at the start; default: ./demo-run"
    )
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--frames", type=int, help="the most frames that it may take to learn")
    parser.add_argument("--quick", action="store_true", help="seconds long: the kill and the checks without learning")
    arguments = parser.parse_args()
    settings = Settings(seed=arguments.seed)
    if arguments.quick:
        settings = settings.quick()
    if arguments.frames is not None:
        settings = replace(settings, frames=arguments.frames)
    least = settings.kill_at + settings.frames_per_batch
    if settings.frames <= least:
        parser.error(f"--frames must be more than {least}: something is to be left to do after the kill")
    try:
        return settings, RunFolder.made_new(arguments.run_dir)
    except FileExistsError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
