"""TorchRL's RayReplayBuffer, for benchmarks.cluster."""

from __future__ import annotations

import functools
import logging
import os
from importlib.metadata import version

os.environ["OMP_NUM_THREADS"] = "1"

import ray
import torch
from torchrl.data import LazyTensorStorage, RayReplayBuffer

from benchmarks.cluster_turns import Turn, serve, turn
from benchmarks.data import cartpole

CAPACITY = 100_000


def main() -> None:
    torch.set_num_threads(1)
    ray.init(
        address="local", num_cpus=1, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False,
        logging_level=logging.ERROR,
    )  # fmt: skip
    buffer = RayReplayBuffer(
        storage=functools.partial(LazyTensorStorage, CAPACITY), batch_size=256, remote_config={"num_cpus": 0}
    )
    data, steps = cartpole(CAPACITY), cartpole(1000)
    buffer.extend(data)
    stores = [
        int(pid)
        for pid in os.listdir("/proc")
        if pid.isdigit() and _command(pid).startswith("ray::") and "ReplayBuffer" in _command(pid)
        and os.getpid() == _driver(pid)
    ]  # fmt: skip

    def sample(seconds: float) -> Turn:
        return turn(buffer.sample, seconds, 1, stores)

    def extend(seconds: float) -> Turn:
        return turn(lambda: buffer.extend(steps), seconds, 1000, stores)

    serve({"sample": sample, "extend": extend}, {"torchrl": version("torchrl"), "ray": ray.__version__})
    buffer.close()
    ray.shutdown()


def _command(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except OSError:
        return ""


def _driver(pid: str) -> int:
    """The driver above a worker: a worker's parent is the raylet, which the driver started."""
    at = int(pid)
    for _ in range(2):
        with open(f"/proc/{at}/stat") as file:
            at = int(file.read().rpartition(")")[2].split()[1])
    return at


if __name__ == "__main__":
    main()
