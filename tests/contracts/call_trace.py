"""How many Python functions of engram the commonest calls call, as kept in `call_trace.json`.

`make call-trace` writes the file. Comprehensions are left out, which are functions in some Pythons only.
"""

from __future__ import annotations

import collections
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict

import engram
from engram.collectors import SyncDataCollector
from engram.data import LazyTensorStorage, PrioritizedSampler, SliceSampler, TensorDictReplayBuffer
from engram.envs import GymEnv

KEPT = Path(__file__).with_suffix(".json")
SOURCES = os.path.dirname(engram.__file__) + os.sep
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>"}
ROWS, WARM_UP = 1000, 3
Calls = collections.Counter[tuple[str, str]]


def calls_of(work: Callable[[], object]) -> Calls:
    """File and function of each call of engram's own Python functions, those in threads included."""
    calls: Calls = collections.Counter()

    def note(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCES) and code.co_name not in COMPREHENSIONS:
            calls[code.co_filename.removeprefix(SOURCES), code.co_name] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls


def steps(n: int) -> TensorDict:
    ends = (torch.arange(n) % 10 == 9)[:, None]
    after = {"observation": torch.rand(n, 4), "reward": torch.rand(n, 1), "done": ends, "terminated": ends.clone()}
    return TensorDict({"observation": torch.rand(n, 4), "action": torch.zeros(n, 1), "next": after}, [n])


class _Endless(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(4, np.float32), {}

    def step(self, action):
        return np.zeros(4, np.float32), 1.0, False, False, {}


def _buffer(**parts: object) -> TensorDictReplayBuffer:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(ROWS), batch_size=32, **parts)
    rb.extend(steps(ROWS))
    return rb


def common_calls(folder: Path) -> dict[str, Callable[[], object]]:
    """Each call by its name; what is called repeatedly does the same each time."""
    rb, sliced = _buffer(), _buffer(sampler=SliceSampler(num_slices=4, end_key=("next", "done")))
    per = _buffer(sampler=PrioritizedSampler(ROWS, 0.6, 0.4))
    slots, priorities = torch.arange(32), torch.rand(32)
    batch, step = steps(64), steps(1)[0]
    collector = SyncDataCollector(GymEnv(_Endless()), frames_per_batch=64, total_frames=-1)
    collected = iter(collector)
    return {
        "add": lambda: rb.add(step),
        "extend": lambda: rb.extend(batch),
        "sample": rb.sample,
        "sample slices": sliced.sample,
        "extend, prioritised": lambda: per.extend(batch),
        "sample, prioritised": per.sample,
        "update_priority": lambda: per.update_priority(slots, priorities),
        "dumps": lambda: rb.dumps(folder / "saved"),
        "loads": lambda: rb.loads(folder / "saved"),
        "collect 64 frames": lambda: next(collected),
    }


def measure(folder: Path) -> dict[str, Calls]:
    found = {}
    for name, work in common_calls(folder).items():
        for _ in range(WARM_UP):
            work()
        found[name] = calls_of(work)
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        totals = {name: sum(calls.values()) for name, calls in measure(Path(made)).items()}
    KEPT.write_text(json.dumps(totals, indent=2) + "\n")
    print(KEPT.read_text())
