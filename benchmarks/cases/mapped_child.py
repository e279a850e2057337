"""The child processes of the mapped case: build or read, what, where, how many rows. Prints seconds a batch as JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import floors
from benchmarks.data import CARTPOLE_LEAVES, cartpole
from benchmarks.libraries import SAME_API, Call

BATCH, CHUNK = 256, 1_000_000
WARM_UP, BATCHES, ENOUGH = 2, 200, 12
LONG_S, MOST_S = 20.0, 300.0


def build(library: str, folder: Path, rows: int) -> None:
    """Write `rows` rows through the library's mapped storage, and close it by ending."""
    data = __import__(SAME_API[library], fromlist=["ReplayBuffer"])
    rb = data.ReplayBuffer(storage=data.LazyMemmapStorage(rows, scratch_dir=folder), batch_size=BATCH)
    chunk = cartpole(CHUNK)
    for start in range(0, rows, CHUNK):
        rb.extend(chunk[: rows - start])


def open_engram(folder: Path) -> Call:
    """Reopen ours."""
    from engram.data import ReplayBuffer

    rb = ReplayBuffer.open(folder, batch_size=BATCH)
    return lambda: rb.sample(BATCH)


def open_torchrl(folder: Path) -> Call:
    """Reopen TorchRL's files: the memory-mapped TensorDict that its storage keeps, as a storage again."""
    from tensordict import TensorDict
    from torchrl.data import ReplayBuffer, TensorStorage

    rb = ReplayBuffer(storage=TensorStorage(TensorDict.load_memmap(folder)), batch_size=BATCH)
    return lambda: rb.sample(BATCH)


OPEN: dict[str, Callable[[Path], Call]] = {"engram": open_engram, "torchrl": open_torchrl}


def time_batches(call: Call) -> list[float]:
    """Seconds of each batch; fewer batches when they take seconds each."""
    for _ in range(WARM_UP):
        call()
    seconds: list[float] = []
    start = time.perf_counter()
    while len(seconds) < BATCHES:
        spent = time.perf_counter() - start
        if spent > MOST_S or (spent > LONG_S and len(seconds) >= ENOUGH):
            break
        before = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - before)
    return seconds


def main() -> None:
    """Do what the command line says."""
    verb, what, path, rows = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    seconds: list[float] = []
    if verb == "build":
        build(what, path, rows)
    elif what in OPEN:
        seconds = time_batches(OPEN[what](path))
    else:
        seconds = floors.mapped(path, CARTPOLE_LEAVES, rows, BATCH, what, BATCHES)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
