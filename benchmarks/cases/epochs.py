"""Epochs over 60 M slots: what a batch costs, and what an epoch's order costs in memory and before its first batch.

The second half is measured in a process of its own for each library, so that no memory of another is in the figure.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import floors
from benchmarks.cases import Result, Row, calling, measure, missing, result
from benchmarks.data import CARTPOLE_LEAVES, cartpole
from benchmarks.libraries import SAME_API, Call, big_buffer, buffer, replay_buffers
from benchmarks.timing import QUICK, Pace

BATCH, SMALL, SLOTS, CHUNK = 256, 100_000, 60_000_000, 10_000_000
LEAVES = {"byte": 1}
MINUTES = 3


def results(*, quick: bool) -> list[Result]:
    """`sample(256)` in turns, then one process a library."""
    slots = 1_000_000 if quick else SLOTS
    rows = measure([_cartpole(), _row(SMALL), _row(slots)], QUICK if quick else Pace())
    return rows + _first_batches(slots)


def _full(library: str, slots: int) -> Any:
    """Rows of one byte: the order of an epoch is the same for any."""
    pieces = (torch.ones(min(CHUNK, slots - at), dtype=torch.uint8) for at in range(0, slots, CHUNK))
    return big_buffer(
        library, pieces, slots, batch=BATCH, parts=lambda data: {"sampler": data.SamplerWithoutReplacement()}
    )


def _cartpole() -> Row:
    def sampling(library: str) -> Call:
        sampler = replay_buffers(library).SamplerWithoutReplacement()
        rb = buffer(library, cartpole(SMALL), batch=BATCH, sampler=sampler)
        return lambda: rb.sample(BATCH)

    return Row(
        "epochs_cartpole",
        "sample(256) without replacement, 11 TED keys, 100 k rows",
        {name: calling(lambda name=name: sampling(name)) for name in SAME_API},
        floor=lambda: floors.gather(CARTPOLE_LEAVES, SMALL, BATCH),
        target={"floor": 1 / 2},
    )


def _row(slots: int) -> Row:
    def sampling(library: str) -> Call:
        rb = _full(library, slots)
        return lambda: rb.sample(BATCH)

    small = slots == SMALL
    size = f"{slots / 1e6:g} M" if slots >= 1_000_000 else f"{slots // 1000} k"
    return Row(
        f"epochs_{slots}",
        f"sample(256) without replacement, {size} rows of a byte",
        {name: calling(lambda name=name: sampling(name)) for name in SAME_API},
        floor=lambda: floors.gather(LEAVES, slots, BATCH),
        target={} if small else {"own": 1.5},
        own_of=None if small else f"epochs_{SMALL}",
    )


def _first_batches(slots: int) -> list[Result]:
    size = f"{slots / 1e6:g} M slots"
    seconds = result(Row("epochs_first", f"first batch of an epoch over {size}", {}, target={"us": 1000}))
    memory = result(Row("epochs_memory", f"memory that an epoch over {size} takes", {}, target={"most": 1}), unit="MB")
    memory["notes"].append("the most that was resident while the first batch was drawn, less what was before")
    for name in SAME_API:
        try:
            took, megabytes = _child(name, slots)
            seconds["contenders"][name] = {"median": took, "rounds": [took]}
            memory["contenders"][name] = {"median": megabytes, "rounds": [megabytes]}
        except Exception as error:
            seconds["contenders"][name] = memory["contenders"][name] = missing(error)
    return [seconds, memory]


def _child(library: str, slots: int) -> tuple[float, float]:
    command = [sys.executable, "-m", "benchmarks.cases.epochs", library, str(slots)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 * MINUTES)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    took, megabytes = json.loads(done.stdout.strip().splitlines()[-1])
    return took, megabytes


def main() -> None:
    """In the process of its own: a short epoch first, so that code and thread pools are no part of the figure."""
    library, slots = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    short = _full(library, SMALL)
    short.sample(BATCH)
    rb = _full(library, slots)
    print(json.dumps(_with_memory(lambda: rb.sample(BATCH))))


def _with_memory(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a call, and by how many MB the most that was resident in it passed what was before."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _resident("VmRSS")
    start = time.perf_counter()
    call()
    took = time.perf_counter() - start
    return took, max(0, _resident("VmHWM") - before) / 1e6


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(f"{name} is not in /proc/self/status")


if __name__ == "__main__":
    main()
