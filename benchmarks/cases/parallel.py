"""ParallelEnv with two workers: against one process, and against gymnasium's AsyncVectorEnv. Raw steps, us a step.

The floor are two processes that make the same steps and say nothing to each other between the first and the last of a
turn: how much faster two cores are than one on this machine, at this moment. Beside it, a round of workers that have
nothing to do: what it takes to ask them and to hear of both.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from benchmarks.cases import FLOOR, Result, Row, missing, result
from engram.envs import GymEnv, ParallelEnv, SerialEnv
from engram.processes.lockstep import LockstepPool

Turn = Callable[[int], Any]  # makes so many steps
WORKERS, MOST_ABOVE_US = 2, 25


class Busy(gymnasium.Env):  # type: ignore[type-arg]
    """Counts for about 100 us a step: work, not time, so that a core that is taken away is felt."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    count = 2000

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        total = 0
        for k in range(self.count):
            total += k
        return np.zeros(4, np.float32), 1.0, False, False, {}


def results(*, quick: bool) -> list[Result]:
    """A row for each number of environments, of either kind."""
    rounds, steps = (3, 50) if quick else (15, 200)
    calibrate()
    busy = [_row("busy", n, Busy, rounds, steps, {"serial": 1.6} if n > WORKERS else {}) for n in (2, 4, 8)]
    busy.insert(1, _above_silence(busy[0]))
    cart = [_row("cartpole", n, _cartpole, rounds, steps, {"gymnasium async": 1.0}) for n in (2, 4, 16)]
    return busy + cart


def _row(kind: str, n: int, make: Callable[[], Any], rounds: int, steps: int, target: dict[str, float]) -> Result:
    row = result(Row(f"parallel_{kind}_{n}", f"ParallelEnv, 2 workers, {n} x {kind}", {}, target=target))
    cores = sorted(os.sched_getaffinity(0))[:WORKERS]
    turns: dict[str, Turn] = {}
    closes: list[Callable[[], None]] = []
    try:
        for name, cpus in {"engram": None, "engram, a core each": cores}.items():
            env = ParallelEnv(n, lambda: GymEnv(make()), num_workers=min(n, WORKERS), cpus=cpus)
            closes.append(env.close)
            turns[name] = _engine(env)
        turns["serial"] = _repeated(_stepped(n, make))
        vector = gymnasium.vector.AsyncVectorEnv([make] * n)
        closes.append(vector.close)
        turns["gymnasium async"] = _vector(vector, n)
        idle = LockstepPool(_steps, [(make, 0)] * WORKERS, name="worker")
        closes.append(idle.close)
        turns["rounds of nothing"] = _repeated(lambda: idle.execute(1))
        free = LockstepPool(_steps, [(make, n // WORKERS)] * WORKERS, name="worker")
        closes.append(free.close)
        turns[FLOOR] = free.execute
        row["contenders"] = _measured(turns, rounds, steps)
    except Exception as error:
        row["contenders"] = {"engram": missing(error)}
    finally:
        for close in closes:
            close()
    return row


def _above_silence(row: Result) -> Result:
    """What a step of workers costs above the steps of two processes that say nothing to anybody, round by round."""
    above = result(
        Row(f"{row['key']}_above", "the same, above two processes that say nothing to anybody", {},
            target={"most": MOST_ABOVE_US}),
        unit="us",
    )  # fmt: skip
    names = [name for name in ("engram", "engram, a core each") if "rounds" in row["contenders"].get(name, {})]
    for name in names:
        pairs = zip(row["contenders"][name]["rounds"], row["contenders"][FLOOR]["rounds"], strict=True)
        rounds = [1e6 * (mine - bare) for mine, bare in pairs]
        above["contenders"][name] = {"median": statistics.median(rounds), "rounds": rounds}
    above["contenders"].setdefault("engram", row["contenders"]["engram"])
    return above


def _repeated(step: Callable[[], Any]) -> Turn:
    def turn(steps: int) -> None:
        for _ in range(steps):
            step()

    return turn


def _steps(channel: Any, slot: Any, make: Callable[[], Any], n: int) -> None:
    """A worker that makes as many steps of each of `n` environments as it is told."""
    slot.attach(channel)
    step = _stepped(n, make)
    while True:
        for _ in range(slot.recv_command()):
            step()
        slot.complete()


def _engine(env: ParallelEnv) -> Turn:
    engine = env.vector_engine()
    assert engine is not None
    engine.reset()
    actions = np.zeros(engine.n, np.int64)
    return _repeated(lambda: engine.step(actions))


def _stepped(n: int, make: Callable[[], Any]) -> Callable[[], None]:
    """A step of each of `n` environments in this process."""
    engines = (SerialEnv(n, lambda: GymEnv(make())).engines() if n else None) or []
    for engine in engines:
        engine.reset()
    action = np.int64(0)

    def step() -> None:
        for engine in engines:
            _, _, terminated, truncated, _ = engine.step(action)
            if terminated or truncated:
                engine.reset()

    return step


def _vector(vector: Any, n: int) -> Turn:
    vector.reset()
    actions = np.zeros(n, np.int64)
    return _repeated(lambda: vector.step(actions))


def _measured(turns: dict[str, Turn], rounds: int, steps: int) -> Result:
    """Seconds a step: medians over turns that follow each other, each long enough for caches and cores to be warm."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds):
        for name in turns if number % 2 == 0 else reversed(turns):
            start = time.perf_counter()
            turns[name](steps)
            seconds[name].append((time.perf_counter() - start) / steps)
    return {name: {"median": statistics.median(s), "least": min(s), "rounds": s} for name, s in seconds.items()}


def calibrate() -> None:
    """Makes a step of `Busy` take 100 us on this machine, now."""
    env, best = Busy(), 1.0
    for _ in range(100):
        start = time.perf_counter()
        env.step(0)
        best = min(best, time.perf_counter() - start)
    Busy.count = max(1, int(Busy.count * 100e-6 / best))


def _cartpole() -> Any:
    return gymnasium.make("CartPole-v1")
