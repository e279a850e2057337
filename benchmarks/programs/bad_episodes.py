"""Offline-to-online SAC whose simulator sometimes writes episodes of NaN, and a watcher that removes them.

    python -m benchmarks.programs.bad_episodes            # three ways, half a minute each
    python -m benchmarks.programs.bad_episodes --seconds 5

Two actor processes step Pendulum into one mapped store, which has rows of a random policy to begin with; a learner
draws 256 rows an update. One episode in ten comes from a crashed simulator: from some step on it is NaN. The learner
leaves out an update whose batch has NaN. Three ways: a simulator that never crashes; one that does; and with a watcher
in a process of its own, which looks at all rows five times a second. Printed for each: updates, those that were left
out, the share of drawn rows that were NaN, and drawn NaN rows that were older than two looks of the watcher.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import tempfile
import time
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn

from engram.data import LazyMemmapStorage, TensorDictReplayBuffer

_BATCH, _ROWS, _LOOK_S, _CRASHES = 256, 100_000, 0.2, 0.1


def make_buffer(folder: str) -> TensorDictReplayBuffer:
    storage = LazyMemmapStorage(_ROWS, scratch_dir=folder, shared_init=True, existsok=True, lanes=4)
    return TensorDictReplayBuffer(storage=storage, batch_size=_BATCH)


def act(folder: str, number: int, crashes: float, end: Any, written: Any, steps: int | None = None) -> None:
    """Steps with a random policy until `end`, or so many steps."""
    torch.set_num_threads(1)
    rng, buffer = np.random.default_rng(number), make_buffer(folder)
    env = gymnasium.make("Pendulum-v1", max_episode_steps=100)
    while not end.is_set() and (steps is None or written.value < steps):
        rows, (observation, _) = [], env.reset(seed=int(rng.integers(1 << 30)))
        broken = int(rng.integers(100)) if rng.random() < crashes else 1000
        for step in range(100):
            action = rng.uniform(-2, 2, 1).astype(np.float32)
            after, reward, *_ = env.step(action)
            if step >= broken:
                after, reward = np.full_like(after, np.nan), np.nan
            rows.append((observation, action, after, np.float32(reward)))
            observation = after
        x, action, after, reward = (np.stack(column) for column in zip(*rows, strict=True))
        buffer.extend({
            "observation": x, "action": action, "next": {"observation": after, "reward": reward[:, None]},
            "written": np.full(100, time.time()),
        })  # fmt: skip
        with written.get_lock():
            written.value += 100


def watch(folder: str, end: Any, found: Any) -> None:
    """Removes rows with NaN, in any process that has the store open."""
    torch.set_num_threads(1)
    buffer = make_buffer(folder)
    while not end.is_set():
        looked = time.thread_time()
        removed = buffer.remove(lambda rows: rows["next", "reward"].isnan().reshape(len(rows)))
        removed += buffer.remove(lambda rows: rows["observation"].isnan().any(-1))
        found[0] += removed
        found[1] += time.thread_time() - looked
        time.sleep(_LOOK_S)


class Sac:
    """A small SAC with one critic and a fixed temperature."""

    def __init__(self) -> None:
        self.actor = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1))
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.optimizer = torch.optim.Adam([*self.actor.parameters(), *self.critic.parameters()], lr=1e-3)

    def action(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = self.actor(observation).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = normal.rsample()
        return 2 * raw.tanh(), normal.log_prob(raw) - torch.log(2 * (1 - raw.tanh() ** 2) + 1e-6)

    def update(self, batch: Any) -> None:
        after = batch["next"]["observation"]
        with torch.no_grad():
            action, log_prob = self.action(after)
            goal = 0.1 * batch["next"]["reward"] + 0.99 * (self.target(torch.cat([after, action], -1)) - 0.1 * log_prob)
        value = self.critic(torch.cat([batch["observation"], batch["action"]], -1))
        action, log_prob = self.action(batch["observation"])
        for_actor = self.critic(torch.cat([batch["observation"], action], -1))
        self.optimizer.zero_grad()
        ((value - goal).pow(2).mean() + (0.1 * log_prob - for_actor).mean()).backward()
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.critic.parameters(), strict=True):
                slow.lerp_(fast, 0.005)


def run(crashes: float, watched: bool, seconds: float) -> str:
    """One way, in one line."""
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        end, written, found = processes.Event(), processes.Value("q", 0), processes.Array("d", 2)
        act(folder, 99, 0.0, end, written, steps=5_000)  # what is there offline
        others = [processes.Process(target=act, args=(folder, i, crashes, end, written)) for i in range(2)]
        others += [processes.Process(target=watch, args=(folder, end, found))] if watched else []
        for other in others:
            other.start()
        buffer, sac = make_buffer(folder), Sac()
        updates = left_out = drawn = bad = old = 0
        stop = None
        while stop is None or time.monotonic() < stop:
            if stop is None and written.value > 6_000:  # all processes run
                stop = time.monotonic() + seconds
            batch = buffer.sample()
            spoiled = batch["next"]["reward"].isnan().squeeze(-1) | batch["observation"].isnan().any(-1)
            drawn, bad = drawn + _BATCH, bad + int(spoiled.sum())
            old += int((spoiled & (batch["written"] < time.time() - 2 * _LOOK_S - 1)).sum())
            if bool(spoiled.any()):
                left_out += 1
                continue
            sac.update(batch)
            updates += 1
        end.set()
        for other in others:
            other.join()
        stats = buffer.stats()
        buffer.storage.close()
    return (
        f"{updates / seconds:8.1f} updates/s  {left_out:6d} left out  {100 * bad / drawn:6.3f} % of drawn rows NaN  "
        f"{old:6d} of them old  {stats.rows:6d} rows, {stats.removed:5d} removed  "
        f"{written.value / seconds:6.0f} steps/s  watcher {100 * found[1] / seconds:4.1f} % of a core"
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=30)
    seconds = arguments.parse_args().seconds
    torch.set_num_threads(1)
    for name, crashes, watched in (
        ("no crashes", 0.0, False), ("no crashes, watched", 0.0, True), ("crashes", _CRASHES, False),
        ("crashes, watched", _CRASHES, True),
    ):  # fmt: skip
        print(f"{name:20s}", run(crashes, watched, seconds), flush=True)


if __name__ == "__main__":
    main()
