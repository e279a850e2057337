"""Collectors with two worker processes against one process. Seconds a frame.

The floor is half the time of one process: two cores, nothing handed over. A worker may have batches ready when its turn
begins, so as many are taken before the clock starts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium

from benchmarks.cases import FLOOR, Result, Row, missing, result
from benchmarks.cases.parallel import Busy, calibrate
from engram.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, SyncDataCollector
from engram.envs import GymEnv

WORKERS, FRAMES, READY, TIMED = 2, 400, 4, 10


def results(*, quick: bool) -> list[Result]:
    """A row for an environment that computes for 100 us, and one for CartPole."""
    calibrate()
    rounds = 3 if quick else 9
    return [
        _row("busy", "100 us a step", Busy, rounds, {"one process": 1.6}),
        _row("cartpole", "CartPole", lambda: gymnasium.make("CartPole-v1"), rounds, {}),
    ]


def _row(kind: str, title: str, make: Callable[[], Any], rounds: int, target: dict[str, float]) -> Result:
    row = result(Row(f"workers_{kind}", f"collectors, 2 workers, {title}", {}, target=target))
    makers = [lambda: GymEnv(make())] * WORKERS
    collectors: dict[str, Any] = {}
    try:
        collectors["engram"] = MultiaSyncDataCollector(makers, frames_per_batch=FRAMES)
        collectors["engram, in step"] = MultiSyncDataCollector(makers, frames_per_batch=FRAMES)
        collectors["one process"] = SyncDataCollector(makers[0], frames_per_batch=FRAMES)
        row["contenders"] = _measured(collectors, rounds)
    except Exception as error:
        row["contenders"] = {"engram": missing(error)}
    finally:
        for collector in collectors.values():
            collector.shutdown()
    return row


def _measured(collectors: dict[str, Any], rounds: int) -> Result:
    seconds: dict[str, list[float]] = {name: [] for name in collectors}
    for number in range(rounds):
        for name in collectors if number % 2 == 0 else reversed(collectors):
            for _ in range(READY):
                collectors[name].rollout()
            start = time.perf_counter()
            frames = sum(collectors[name].rollout().numel() for _ in range(TIMED))
            seconds[name].append((time.perf_counter() - start) / frames)
    seconds[FLOOR] = [one / WORKERS for one in seconds["one process"]]
    return {name: {"median": statistics.median(s), "least": min(s), "rounds": s} for name, s in seconds.items()}
