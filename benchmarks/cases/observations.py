"""Stacks of frames, each frame stored once: pairs of stacks that are sampled and written, and bytes of a step.

Beside others that store frames once, and both stacks stored as they are. Bytes are those of a process of its own, whose
ring has gone round.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.cases import Result, Row, calling, missing, result
from benchmarks.libraries import Call

STACK, SIDE, PAIRS, WRITTEN = 4, 84, 32, 64
EPISODES = (20, 100, 1000)
STEPS, FEW_STEPS = 50_000, 4_000
OURS, PLAIN = "engram", "engram, both stacks"
MINUTES = 60
Array = np.ndarray


class Game:
    """Steps of a game without end, whose stacks are of frames of noise: the first frame of an episode is repeated."""

    def __init__(self, episode: int) -> None:
        self.episode = episode
        self._noise = np.random.default_rng(0).integers(0, 256, (4096 + 1009, SIDE, SIDE), np.uint8)

    def steps(self, start: int, stop: int) -> tuple[Array, Array, Array]:
        """Stacks before and after each step, uint8 [n, 4, 84, 84], and whether it ends its episode, [n]."""
        now = np.arange(start, stop)
        number, at = now // self.episode, now % self.episode
        first = number * (self.episode + 1)
        seen = [self._stacks(first, at + more) for more in (0, 1)]
        return seen[0], seen[1], at == self.episode - 1

    def _stacks(self, first: Array, at: Array) -> Array:
        shown = np.maximum(at[:, None] + np.arange(1 - STACK, 1), 0) + first[:, None]
        return self._noise[shown % len(self._noise)]


class Engram:
    """Stacks as they are, in a storage that keeps each frame once, or in a plain one."""

    compact = True

    def __init__(self, n: int) -> None:
        from engram.data import LazyTensorStorage, TensorDictReplayBuffer

        self.rb = TensorDictReplayBuffer(storage=LazyTensorStorage(n, compact=self.compact), batch_size=PAIRS)

    def write(self, now: Array, following: Array, ends: Array) -> None:
        n = len(now)
        after = {"pixels": following, "reward": np.zeros((n, 1), np.float32), "done": ends[:, None]}
        self.rb.extend({"pixels": now, "action": np.zeros(n, np.int64), "next": after})

    def sample(self) -> object:
        return self.rb.sample()

    @property
    def steps(self) -> int:
        """How many are stored."""
        return len(self.rb)


class EngramPlain(Engram):
    compact = False


class Cpprb:
    """`next_of` and `stack_compress`, of stacks whose last dimension is the frames."""

    def __init__(self, n: int) -> None:
        import cpprb

        env = {
            "obs": {"shape": (SIDE, SIDE, STACK), "dtype": np.uint8},
            "act": {"dtype": np.int64},
            "rew": {},
            "done": {},
        }
        self.rb = cpprb.ReplayBuffer(n, env, next_of="obs", stack_compress="obs")

    def write(self, now: Array, following: Array, ends: Array) -> None:
        obs, next_obs = (np.moveaxis(stacks, 1, -1) for stacks in (now, following))
        for step in range(len(now)):
            self.rb.add(obs=obs[step], act=0, rew=0.0, next_obs=next_obs[step], done=ends[step])
            if ends[step]:
                self.rb.on_episode_end()

    def sample(self) -> object:
        return self.rb.sample(PAIRS)

    @property
    def steps(self) -> int:
        return int(self.rb.get_stored_size())


class StableBaselines3:
    """`optimize_memory_usage`: each stack once, and what follows a step is the next stack, also where episodes end."""

    def __init__(self, n: int) -> None:
        from gymnasium import spaces
        from stable_baselines3.common.buffers import ReplayBuffer

        space = spaces.Box(0, 255, (STACK, SIDE, SIDE), np.uint8)
        self.rb = ReplayBuffer(
            n, space, spaces.Discrete(2), "cpu", optimize_memory_usage=True, handle_timeout_termination=False
        )

    def write(self, now: Array, following: Array, ends: Array) -> None:
        action, reward = np.zeros((1, 1), np.int64), np.zeros(1, np.float32)
        for step in range(len(now)):
            one = slice(step, step + 1)
            self.rb.add(now[one], following[one], action, reward, ends[one], [{}])

    def sample(self) -> object:
        return self.rb.sample(PAIRS)

    @property
    def steps(self) -> int:
        return self.rb.size()


class Tianshou:
    """`save_only_last_obs`, `ignore_obs_next`, `stack_num`: single frames, stacked on reading.

    What follows the last step of an episode is not stored.
    """

    def __init__(self, n: int) -> None:
        from tianshou.data import ReplayBuffer

        self.rb = ReplayBuffer(n, stack_num=STACK, ignore_obs_next=True, save_only_last_obs=True)

    def write(self, now: Array, following: Array, ends: Array) -> None:
        from tianshou.data import Batch

        for step in range(len(now)):
            self.rb.add(
                Batch(obs=now[step], obs_next=following[step], act=0, rew=0.0, terminated=ends[step], truncated=False)
            )

    def sample(self) -> object:
        return self.rb.sample(PAIRS)[0]

    @property
    def steps(self) -> int:
        return len(self.rb)


class Dopamine:
    """By hand, as Castro et al. (2018) describe it: a ring of frames, three empty ones before each episode.

    What follows a step is the stack one frame later, which at the end of an episode is of the next one's beginning.
    """

    def __init__(self, n: int) -> None:
        self._frames = np.zeros((n, SIDE, SIDE), np.uint8)
        self._actions, self._rewards = np.zeros(n, np.int32), np.zeros(n, np.float32)
        self._ends, self._is_step = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        self._count, self._begins = 0, True
        self._draw = np.random.default_rng(0)

    def write(self, now: Array, following: Array, ends: Array) -> None:
        for step in range(len(now)):
            if self._begins:
                for _ in range(STACK - 1):
                    self._put(0, False, False)
            self._put(now[step, -1], True, ends[step])
            self._begins = bool(ends[step])

    def _put(self, frame: Any, is_step: bool, ends: bool) -> None:
        at = self._count % len(self._frames)
        self._frames[at], self._actions[at], self._rewards[at] = frame, 0, 0.0
        self._ends[at], self._is_step[at] = ends, is_step
        self._count += 1

    def sample(self) -> object:
        n, newest = len(self._frames), self._count - 1
        oldest = max(0, self._count - n)
        steps = np.zeros(0, np.int64)
        while len(steps) < PAIRS:  # neither an empty frame nor one whose stack is not there
            drawn = self._draw.integers(oldest + STACK - 1, newest, PAIRS)
            steps = np.append(steps, drawn[self._is_step[drawn % n]])
        places = (steps[:PAIRS, None] + np.arange(1 - STACK, 2)) % n
        at = places[:, -2]
        states, following = self._frames[places[:, :-1]], self._frames[places[:, 1:]]
        return states, self._actions[at], self._rewards[at], following, self._ends[at]

    @property
    def steps(self) -> int:
        return int(self._is_step.sum())


CONTENDERS: dict[str, Callable[[int], Any]] = {
    OURS: Engram,
    PLAIN: EngramPlain,
    "cpprb": Cpprb,
    "stable-baselines3": StableBaselines3,
    "tianshou": Tianshou,
    "Dopamine's scheme": Dopamine,
}


def full(name: str, n: int, game: Game) -> Any:
    """A buffer whose ring has gone round."""
    buffer = CONTENDERS[name](n)
    for start in range(0, 2 * n, WRITTEN):
        buffer.write(*game.steps(start, start + WRITTEN))
    return buffer


def groups(*, quick: bool) -> Iterator[list[Row]]:
    """Batches and writes, all in turns."""
    game, n = Game(EPISODES[1]), FEW_STEPS if quick else STEPS // 5
    buffers: dict[str, Any] = {}

    def buffer(name: str) -> Any:
        if name not in buffers:
            buffers[name] = full(name, n, game)
        return buffers[name]

    def writing(name: str) -> Call:
        made, steps = buffer(name), game.steps(0, WRITTEN)
        return lambda: made.write(*steps)

    yield [
        Row(
            "sample_observations_once",
            f"sample({PAIRS}) of stacks of four 84x84 frames, before and after the step; each frame stored once",
            {name: calling(lambda name=name: buffer(name).sample) for name in CONTENDERS},
            target={"cpprb": 1 / 0.9, PLAIN: 1.0},
            notes=[f"{n:,} steps, episodes of {EPISODES[1]}"],
        ),
        Row(
            "write_observations_once",
            f"the same steps written, {WRITTEN} of one episode",
            {name: calling(lambda name=name: writing(name)) for name in CONTENDERS},
            target={PLAIN: 1 / 1.1},
        ),
    ]


def results(*, quick: bool) -> list[Result]:
    """Bytes of a step, each buffer in a process of its own."""
    n = FEW_STEPS if quick else STEPS
    rows = []
    for episode in EPISODES:
        title = f"memory of a step with two stacks of four 84x84 frames, episodes of {episode:,} steps"
        row = result(Row(f"bytes_observations_{episode}", title, {}, target={"most": 7500}), unit="bytes")
        row["notes"].append(f"resident memory of a full ring of {n:,} steps, which has gone round")
        for name in CONTENDERS:
            try:
                nbytes = _child(name, episode, n)
                row["contenders"][name] = {"median": nbytes, "rounds": [nbytes]}
            except Exception as error:
                row["contenders"][name] = missing(error)
        rows.append(row)
    return rows


def _child(name: str, episode: int, n: int) -> float:
    command = [sys.executable, "-m", "benchmarks.cases.observations", name, str(episode), str(n)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20 * MINUTES)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    """In the process of its own: a small buffer first, so that code is no part of the figure."""
    name, episode, n = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    game = Game(episode)
    full(name, WRITTEN, game).sample()
    before = _own_memory()
    buffer = full(name, n, game)
    print(json.dumps((_own_memory() - before) / buffer.steps))
    buffer.sample()


def _own_memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise KeyError("RssAnon is not in /proc/self/status")


if __name__ == "__main__":
    main()
