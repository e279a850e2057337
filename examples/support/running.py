"""What every example does around its training: arguments, an evaluation, a line of progress, a summary as JSON."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase

from engram.collectors import SyncDataCollector
from engram.envs import EnvBase, ExplorationType, SerialEnv

FIRST_SEED = 10_000  # of evaluations, far from those of trainings


def parser(doc: str) -> argparse.ArgumentParser:
    """With what all examples understand; `doc` is the module's docstring."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--quick", action="store_true", help="a run of seconds that shows the parts and learns little")
    return made


def begin(seed: int) -> None:
    """Seeds torch, and keeps it to one thread: networks as small as these are slower on several."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)


def returns_ended_in(batch: TensorDictBase, so_far: torch.Tensor) -> list[float]:
    """Returns of the episodes that ended in `batch` `[envs, time]`, in time order; `so_far` `[envs]` is carried on."""
    reward, done = batch["next", "reward"].squeeze(-1), batch["next", "done"].squeeze(-1)
    ended = []
    for t in range(batch.shape[-1]):
        so_far += reward[:, t]
        ended += so_far[done[:, t]].tolist()
        so_far[done[:, t]] = 0
    return ended


def mean_return(make_env: Callable[[], EnvBase], policy: Any, episodes: int, longest: int) -> float:
    """Of the policy without exploration: the same `episodes` starts each time, played side by side."""
    with SyncDataCollector(
        lambda: SerialEnv(episodes, make_env),
        policy,
        frames_per_batch=episodes * longest,
        exploration_type=ExplorationType.DETERMINISTIC,
    ) as collector:
        collector.set_seed(FIRST_SEED)
        following = collector.rollout()["next"]  # [episodes, time]
    done, reward = following["done"].squeeze(-1).int(), following["reward"].squeeze(-1)
    in_first_episode = done.cumsum(1) - done == 0
    return float((reward * in_first_episode).sum(1).mean())


class Progress:
    """A line now and then, and a summary at the end: the last line of the output, as JSON."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def show(self, frames: int, **facts: float) -> None:
        said = "  ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in facts.items())
        print(f"frame {frames:>7,}  {said}", flush=True)

    def summary(self, **facts: Any) -> None:
        print(json.dumps({**facts, "seconds": round(time.perf_counter() - self._began, 1)}), flush=True)
