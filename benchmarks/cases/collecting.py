"""Collecting CartPole steps: our collectors (`benchmarks/collect.py`) and TorchRL's, in steps a second.

`benchmarks.collect.run()` measures our collector in turns with loops written by hand, for each kind of policy.
"""

from __future__ import annotations

import importlib
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.cases import FLOOR, Result, Row, missing, result

TITLES = {
    "random": "collector, CartPole, random policy",
    "transformed": "collector, CartPole with StepCounter and RewardSum, random policy",
    "serial": "collector, SerialEnv of 16 CartPoles, random policy",
    "vector": "collector, native vector CartPole of 64, random policy",
    "module": "collector, CartPole, 2x64 nn.Module",
    "tensordict": "collector, CartPole, 2x64 TensorDictModule",
}
TARGETS = {"random": 0.88, "transformed": 0.7, "serial": 0.8, "vector": 0.9, "module": 0.92, "tensordict": 0.92}
FRAMES = 1000
VECTOR, MOST_ABOVE_US = 64, 10


def results(*, quick: bool) -> list[Result]:
    """One row for each kind of policy that our side or TorchRL's has."""
    figures: dict[str, Any] = {}
    try:
        collect = importlib.import_module("benchmarks.collect")
        figures = collect.run(rounds=5) if quick else collect.run()
        ours: dict[str, Any] = _by_kind(figures)
        reason: dict[str, Any] = missing("benchmarks.collect.run() has no such figure")
    except Exception as error:
        ours, reason = {}, missing(error)
    peers = {
        "random": lambda: _torchrl(None),
        "transformed": lambda: _torchrl(None, counted=True),
        "module": lambda: _torchrl(_network()),
    }
    rows = [
        _row(kind, ours.get(kind, {}), reason, peers.get(kind), seconds=0.3 if quick else 2.0)
        for kind in dict.fromkeys([*peers, *ours])
    ]
    return [*rows, _above_arrays(figures, reason)]


def _above_arrays(figures: dict[str, Any], reason: Result) -> Result:
    """What a vector step costs the collector above a loop that keeps the same in arrays."""
    row = result(
        Row("collect_vector_above", f"the same, a step of all {VECTOR} above a loop that keeps arrays", {},
            target={"most": MOST_ABOVE_US}, notes=["either this or the share of the bare loop is to be met"]),
        unit="us",
    )  # fmt: skip
    try:
        rates = [figures[name]["steps_per_second"] for name in ("collector, native vector of 64",
                                                                "vector loop that keeps arrays, 64")]  # fmt: skip
        row["contenders"]["engram"] = {"median": 1e6 * VECTOR * (1 / rates[0] - 1 / rates[1])}
    except KeyError:
        row["contenders"]["engram"] = reason
    return row


def _by_kind(figures: dict[str, Any]) -> dict[str, Any]:
    """Our rates and those of the loops written by hand, for each kind of policy."""
    pairs = {
        "random": ("collector, random policy", "bare gymnasium loop"),
        "transformed": ("collector, StepCounter, RewardSum", "bare gymnasium loop"),
        "serial": ("collector, SerialEnv of 16", "bare loop over 16"),
        "vector": ("collector, native vector of 64", "bare vector loop, 64"),
        "module": ("collector, nn.Module 2x64", "torch loop by hand, 2x64"),
        "tensordict": ("collector, TensorDictModule 2x64", "torch loop by hand, 2x64"),
    }
    # The rate is what the collector's share of the loop says: a median over rounds in which both took turns.
    return {
        kind: {
            "engram": figures[ours]["ratio"] * figures[floor]["steps_per_second"],
            FLOOR: figures[floor]["steps_per_second"],
        }
        for kind, (ours, floor) in pairs.items()
    }


def _row(kind: str, ours: Any, reason: Result, peer: Callable[[], Any] | None, *, seconds: float) -> Result:
    row = result(
        Row(f"collect_{kind}", TITLES.get(kind, f"collector, {kind}"), {}, target={FLOOR: TARGETS.get(kind, 0.9)}),
        unit="steps/s",
        better="higher",
    )
    figures = ours if isinstance(ours, dict) else {"engram": ours}
    row["contenders"] = {
        name: {"median": float(rate)} for name, rate in figures.items() if isinstance(rate, (int, float))
    }
    row["contenders"].setdefault("engram", reason)
    if FLOOR not in row["contenders"] and kind == "random":
        row["contenders"][FLOOR] = {"median": _bare_loop(seconds)}
    if peer is not None:
        try:
            row["contenders"]["torchrl"] = _rates(peer(), seconds)
        except Exception as error:
            row["contenders"]["torchrl"] = missing(error)
    return row


def _torchrl(policy: Any, *, counted: bool = False) -> Any:
    """TorchRL's single-process collector; called `Collector` since 0.13."""
    logging.getLogger("torchrl").setLevel(logging.ERROR)
    import torchrl.collectors as collectors
    from torchrl.envs import Compose, GymEnv, RewardSum, StepCounter, TransformedEnv

    made = getattr(collectors, "Collector", None) or collectors.SyncDataCollector
    env = GymEnv("CartPole-v1")
    env = TransformedEnv(env, Compose(StepCounter(), RewardSum())) if counted else env
    return made(env, policy, frames_per_batch=FRAMES, total_frames=-1)


def _network() -> Any:
    """A 2x64 net with one-hot actions, as TorchRL's users wire it."""
    from tensordict.nn import TensorDictModule, TensorDictSequential
    from torch import nn
    from torchrl.modules import QValueModule

    net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    values = TensorDictModule(net, in_keys=["observation"], out_keys=["action_value"])
    return TensorDictSequential(values, QValueModule(action_space="one-hot"))


def _rates(collector: Any, seconds: float) -> Result:
    """Steps a second of three stretches of at least `seconds` each."""
    rates = []
    try:
        batches = iter(collector)
        next(batches)
        for _ in range(3):
            start, frames = time.perf_counter(), 0
            while time.perf_counter() - start < seconds:
                frames += next(batches).numel()
            rates.append(frames / (time.perf_counter() - start))
    finally:
        collector.shutdown()
    return {"median": statistics.median(rates), "rounds": rates}


def _bare_loop(seconds: float) -> float:
    """Steps a second of gymnasium alone with random actions."""
    import gymnasium

    env = gymnasium.make("CartPole-v1")
    env.reset(seed=0)
    sample, step = env.action_space.sample, env.step
    start, frames = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(FRAMES):
            _, _, terminated, truncated, _ = step(sample())
            if terminated or truncated:
                env.reset()
        frames += FRAMES
    return frames / (time.perf_counter() - start)
