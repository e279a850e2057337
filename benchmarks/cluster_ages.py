"""How old batches from shards are, on a cluster of Ray: the age of a batch's newest row while writers write on.

    python -m benchmarks.cluster_ages                       two shards, learners of several paces
    python -m benchmarks.cluster_ages --max-batch-age 0.02

The ring is small and written fast, so that the newest of the rows of a batch is one of the newest that its shards had:
its age is how long ago these drew, and some milliseconds. The clock is that of one machine, where all processes run.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import ray
import torch
from tensordict import TensorDict

from engram.data import LazyTensorStorage
from engram.distributed import RayReplayBuffer

ROWS, BLOCK, PAUSE, BATCH = 2000, 50, 0.005, 256


class Writer:
    """Writes rows with the time of their writing, until the cluster ends."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def write(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            now = torch.full((BLOCK,), time.monotonic(), dtype=torch.float64)
            self._buffer.extend(TensorDict({"time": now}, [BLOCK]))
            self._buffer.flush()
            time.sleep(PAUSE)


def ages(buffer: Any, pause: float, seconds: float) -> torch.Tensor:
    """The ages of the newest rows of batches that a learner takes for so long, in seconds."""
    found, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        batch = buffer.sample()
        found.append(time.monotonic() - float(batch["time"].max()))
        if pause:
            time.sleep(pause)
    return torch.tensor(found, dtype=torch.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--max-batch-age", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
    paces = (0.0, 0.001, 0.01, 0.05)
    buffer = RayReplayBuffer(
        storage=LazyTensorStorage(ROWS), batch_size=BATCH, num_shards=arguments.shards, timeout=60.0,
        max_batch_age=arguments.max_batch_age, placement="DEFAULT",
    )  # fmt: skip
    buffer.extend(TensorDict({"time": torch.zeros(BLOCK, dtype=torch.float64)}, [BLOCK]))
    buffer.flush()
    writers = [ray.remote(num_cpus=0)(Writer).remote(buffer) for _ in range(arguments.shards)]
    writing = [writer.write.remote((len(paces) + 1) * (arguments.seconds + 2.0)) for writer in writers]
    while buffer.stats().writes < 2 * ROWS:
        time.sleep(0.1)
    for pause in paces:
        for _ in range(20):
            buffer.sample()
        began = time.monotonic()
        for shard in buffer._shards:
            shard.ask(began + 60.0, "totals")
        answer = (time.monotonic() - began) / len(buffer._shards)
        found = ages(buffer, pause, arguments.seconds)
        quantiles = torch.quantile(found, torch.tensor([0.5, 0.99, 0.999, 1.0], dtype=torch.float64))
        print(f"{1e3 * pause:5.0f} ms between batches: {len(found):6} batches, age of the newest row, ms: median, "
              "99 %, 99.9 %, all: " + ", ".join(f"{1e3 * q:.1f}" for q in quantiles.tolist()) +
              f"; an answer {1e3 * answer:.1f} ms", flush=True)  # fmt: skip
    ray.get(writing)
    buffer.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
