"""SyncDataCollector against loops written by hand, on CartPole-v1: `python benchmarks/collect.py`.

The bare loop draws its actions before the clock starts (as `np.int64`, which gymnasium checks faster than `int`), adds
up rewards, and keeps no data at all; the collector draws, steps, copies and makes TED batches. The torch loop has the
same net, under `torch.no_grad` too. Beside the bare vector loop stands one that also keeps actions and results, in
arrays. Both sides make their environment by `gymnasium.make("CartPole-v1")`, with one thread. Rounds are short, and in
each one the contestants follow each other in alternating order; figures are medians over rounds, ratios medians of each
round's own. Time is CPU time of this process, so that whatever else the machine does counts less.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from engram.collectors import SyncDataCollector
from engram.envs import GymEnv, SerialEnv, TransformedEnv
from engram.envs.transforms import Compose, RewardSum, StepCounter

FRAMES_PER_BATCH = 1000
Run = Callable[[int], None]


class Greedy(nn.Module):
    """A 2x64 MLP and an argmax."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.scores = nn.Sequential(*layers)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.scores(observation).argmax(-1)


def bare_loop() -> Run:
    env = gymnasium.make("CartPole-v1")

    def run(frames: int) -> None:
        total = 0.0
        env.reset(seed=0)
        for action in actions[:frames]:
            _, reward, terminated, truncated, _ = env.step(action)
            total += reward
            if terminated or truncated:
                env.reset()
                total = 0.0

    actions = list(torch.randint(2, (100_000,)).numpy())
    return run


def torch_loop(net: nn.Module) -> Run:
    env = gymnasium.make("CartPole-v1")

    @torch.no_grad()
    def run(frames: int) -> None:
        total = 0.0
        observation, _ = env.reset(seed=0)
        for _ in range(frames):
            action = net(torch.from_numpy(observation)).item()
            observation, reward, terminated, truncated, _ = env.step(action)
            total += reward
            if terminated or truncated:
                observation, _ = env.reset()
                total = 0.0

    return run


def collector(policy: Any) -> Run:
    env = GymEnv("CartPole-v1", categorical_action_encoding=policy is not None)

    def run(frames: int) -> None:
        env.set_seed(0)
        for _ in SyncDataCollector(env, policy, frames_per_batch=FRAMES_PER_BATCH, total_frames=frames):
            pass

    return run


def bare_together(envs: int = 64) -> Run:
    """Gymnasium's native vector CartPole; calls that only reset an environment count as its steps."""
    env = gymnasium.make_vec("CartPole-v1", envs, vectorization_mode="vector_entry_point")
    actions = torch.randint(2, (2_000, envs)).numpy()

    def run(frames: int) -> None:
        env.reset(seed=0)
        for row in actions[: frames // envs]:
            env.step(row)

    return run


def kept_together(envs: int = 64, steps: int = 100) -> Run:
    """The same, which keeps actions and results in arrays, as many steps as a batch of the collector has."""
    env = gymnasium.make_vec("CartPole-v1", envs, vectorization_mode="vector_entry_point")
    actions = torch.randint(2, (2_000, envs)).numpy()

    def run(frames: int) -> None:
        observation, _ = env.reset(seed=0)
        for start in range(0, frames // envs, steps):
            observations, following = (np.empty((steps, envs, 4), np.float32) for _ in range(2))
            taken, rewards = np.empty((steps, envs), np.int64), np.empty((steps, envs), np.float32)
            terminations, truncations = (np.empty((steps, envs), np.bool_) for _ in range(2))
            for at, row in enumerate(actions[start : start + steps]):
                observations[at], taken[at] = observation, row
                observation, reward, terminated, truncated, _ = env.step(row)
                following[at], rewards[at], terminations[at], truncations[at] = (
                    observation, reward, terminated, truncated,
                )  # fmt: skip

    return run


def bare_serial(envs: int = 16) -> Run:
    members = [gymnasium.make("CartPole-v1") for _ in range(envs)]
    actions = list(torch.randint(2, (100_000,)).numpy())

    def run(frames: int) -> None:
        for number, env in enumerate(members):
            env.reset(seed=number)
        drawn = iter(actions)
        for _ in range(frames // envs):
            for env in members:
                _, _, terminated, truncated, _ = env.step(next(drawn))
                if terminated or truncated:
                    env.reset()

    return run


def several(env: Any, frames_per_batch: int) -> Run:
    def run(frames: int) -> None:
        env.set_seed(0)
        for _ in SyncDataCollector(env, frames_per_batch=frames_per_batch, total_frames=frames):
            pass

    return run


def seconds(run: Run, frames: int) -> float:
    start = time.process_time()
    run(frames)
    return time.process_time() - start


def compare(floor: Run, contestants: dict[str, Run], frames: int, rounds: int) -> dict[str, dict[str, float]]:
    """Steps per second, and the share of the floor's, of each contestant."""
    runs = {"floor": floor, **contestants}
    for run in runs.values():
        run(frames)  # warm up
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(rounds):
        order = list(runs) if round_number % 2 == 0 else list(reversed(runs))
        for name in order:
            rates[name].append(frames / seconds(runs[name], frames))
    ratios = {name: [mine / base for mine, base in zip(rates[name], rates["floor"], strict=True)] for name in runs}
    return {
        name: {"steps_per_second": statistics.median(rates[name]), "ratio": statistics.median(ratios[name])}
        for name in runs
    }


def run(rounds: int = 21) -> dict[str, Any]:
    """Figures by name: steps per second, ratio to the hand-written loop, target ratio."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(0)
        net = Greedy()
        module = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
        serial = SerialEnv(16, lambda: GymEnv("CartPole-v1"))
        in_series = compare(bare_serial(), {"random": several(serial, 1_600)}, 3_200, rounds)
        native = GymEnv("CartPole-v1", num_envs=64, vectorization_mode="vector_entry_point")
        contestants = {"random": several(native, 6_400), "kept": kept_together()}
        together = compare(bare_together(), contestants, 64_000, rounds)
        counted = TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), RewardSum()))
        contestants = {"random": collector(None), "transformed": several(counted, FRAMES_PER_BATCH)}
        random = compare(bare_loop(), contestants, 5_000, 2 * rounds)
        nets = {"nn.Module": collector(net), "TensorDictModule": collector(module)}
        network = compare(torch_loop(net), nets, 1_000, 2 * rounds)
    finally:
        torch.set_num_threads(threads)
    return {
        "bare gymnasium loop": random["floor"],
        "collector, random policy": {**random["random"], "target": 0.88},
        "collector, StepCounter, RewardSum": {**random["transformed"], "target": 0.7},
        "bare loop over 16": in_series["floor"],
        "collector, SerialEnv of 16": {**in_series["random"], "target": 0.8},
        "bare vector loop, 64": together["floor"],
        "vector loop that keeps arrays, 64": together["kept"],
        "collector, native vector of 64": {**together["random"], "target": 0.9},
        "torch loop by hand, 2x64": network["floor"],
        "collector, nn.Module 2x64": {**network["nn.Module"], "target": 0.92},
        "collector, TensorDictModule 2x64": {**network["TensorDictModule"], "target": 0.92},
    }


if __name__ == "__main__":
    figures = run()
    for name, figure in figures.items():
        target = f"  (target {figure['target']:.0%})" if "target" in figure else ""
        print(f"{name:34} {figure['steps_per_second']:>10,.0f} steps/s  {figure['ratio']:7.1%}{target}")
    print(json.dumps(figures))
