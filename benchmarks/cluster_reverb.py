"""DeepMind's Reverb, for benchmarks.cluster: one table in a server of its own process, steps as items of one step."""

from __future__ import annotations

import multiprocessing
import os
import socket
from importlib.metadata import version
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import numpy as np
import reverb
import tensorflow as tf

from benchmarks.cluster_turns import Turn, serve, turn

CAPACITY = 100_000
ROWS = 20_000
"""That are in before the first turn: batches repeat rows anyhow."""


def step(rng: np.random.Generator) -> dict[str, Any]:
    """A CartPole step with the leaves that `benchmarks.data.cartpole` has."""
    one = np.zeros(1, bool)
    observation = rng.standard_normal((2, 4)).astype(np.float32)
    return {
        "observation": observation[0], "action": np.array([0, 1]), "done": one, "terminated": one, "truncated": one,
        "next_observation": observation[1], "next_reward": np.ones(1, np.float32), "next_done": one,
        "next_terminated": one, "next_truncated": one, "traj_ids": np.int64(3),
    }  # fmt: skip


def serve_table(port: int, ready: Any) -> None:
    signature = {key: tf.TensorSpec(value.shape, value.dtype) for key, value in step(np.random.default_rng(0)).items()}
    table = reverb.Table(
        "steps", reverb.selectors.Uniform(), reverb.selectors.Fifo(), CAPACITY, reverb.rate_limiters.MinSize(1),
        signature=signature,
    )  # fmt: skip
    server = reverb.Server([table], port=port)
    ready.put(port)
    server.wait()


def main() -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Queue()
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    server = context.Process(target=serve_table, args=(port, ready), daemon=True)
    server.start()
    ready.get()
    address = f"localhost:{port}"
    client, rng = reverb.Client(address), np.random.default_rng(0)
    steps = [step(rng) for _ in range(1000)]

    def write() -> None:
        with client.trajectory_writer(num_keep_alive_refs=1) as writer:
            for one in steps:
                writer.append(one)
                writer.create_item("steps", 1.0, {key: column[-1] for key, column in writer.history.items()})
            writer.flush()

    for _ in range(ROWS // 1000):
        write()
    # The fastest of the settings that we tried.
    batches = reverb.TrajectoryDataset.from_table_signature(address, "steps", max_in_flight_samples_per_worker=512)
    batches = batches.batch(256, drop_remainder=True).prefetch(8).as_numpy_iterator()

    def sample(seconds: float) -> Turn:
        return turn(lambda: next(batches), seconds, 1, [server.pid])

    def extend(seconds: float) -> Turn:
        return turn(write, seconds, 1000, [server.pid])

    serve({"sample": sample, "extend": extend}, {"reverb": version("dm-reverb"), "tensorflow": tf.__version__})
    server.terminate()
    os._exit(0)  # threads of the iterator would wait for the server


if __name__ == "__main__":
    main()
