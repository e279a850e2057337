"""Shards, nodes and producers are killed while rows are written and drawn: each row is in once, in order, and whole.

ENGRAM_RAY_KILLS=20,5,5,2000000 kills so many shards, nodes and producers, in so many rows.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
import warnings
from typing import Any

import ray

from cluster.conftest import Nodes
from cluster.programs import Threads
from cluster.rows import everything
from distributed.shards import rows, whole

SHARDS, NODES, PRODUCERS, ROWS = map(int, os.environ.get("ENGRAM_RAY_KILLS", "4,1,2,60000").split(","))
PRODUCER_ROWS = 1_000_000_000  # numbers of rows of one producer begin at a multiple


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)
class WritingActor:
    """Writes the rows of one producer, from where they ended."""

    def __init__(self, rb: Any, number: int) -> None:
        self._rb, self._number = rb.producing_as(f"producer {number}"), number

    def pid(self) -> int:
        return os.getpid()

    def run(self, stop: int) -> int:
        """Writes some rows; returns how many are in, of `stop`."""
        self._rb.flush(60.0)
        at = self._rb.rows_in()
        for _ in range(20):
            if at < stop:
                n = min(stop - at, random.choice([1, 100, 1000]))
                self._rb.extend(rows(PRODUCER_ROWS * self._number + at, PRODUCER_ROWS * self._number + at + n))
                at += n
        self._rb.flush(60.0)
        return self._rb.rows_in()


def test_every_row_is_in_once_and_in_order_whoever_is_killed(cluster: Nodes, buffer: Any) -> None:
    rb = buffer(8 * ROWS, num_shards=2, lanes=4, timeout=60.0)
    rb.extend(rows(0, 100))
    rb.flush()
    actors = [WritingActor.options(resources={"shard": 1}).remote(rb, number) for number in (1, 2)]
    killed, done = {"shards": 0, "nodes": 0, "producers": 0}, threading.Event()
    threads = Threads(done)

    def answer(make_call: Any) -> Any:
        """The answer of an actor that may have been killed, and comes back."""
        while True:
            try:
                return ray.get(make_call(), timeout=60)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                time.sleep(0.1)

    def written(actor: Any) -> None:
        while answer(lambda: actor.run.remote(ROWS)) < ROWS or not done.is_set():
            time.sleep(0.01)

    def write_here() -> None:
        at = 100
        while at < ROWS or not done.is_set():
            n = min(ROWS - at, random.choice([1, 100, 1000]))
            if n:
                rb.extend(rows(at, at + n))
                at += n
            else:
                time.sleep(0.1)
        rb.flush(60.0)

    def kill() -> None:
        rng = random.Random(0)
        plan = ["shards"] * SHARDS + ["nodes"] * NODES + ["producers"] * PRODUCERS
        rng.shuffle(plan)
        for what in plan:
            if threads.failures:
                return
            time.sleep(0.2 + 0.5 * rng.random())
            shard, producer = rng.choice(rb._actors), rng.choice(actors)
            if what == "nodes":
                node = answer(shard.place.remote)[0]
                cluster.kill(node)
            else:
                pid = answer(producer.pid.remote) if what == "producers" else answer(shard.place.remote)[1]
                os.kill(pid, signal.SIGKILL)
            killed[what] += 1
        done.set()

    def read() -> None:
        reader = rb.producing_as("only reads")
        while not done.is_set():
            assert len(whole(reader.sample())) == 64
            time.sleep(0.01)

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # that a shard came back without rows
        for work in (*(functools.partial(written, actor) for actor in actors), write_here, read):
            threads.start(work)
        kill()
        threads.join()
    lanes = [lane for lane in everything(rb) if lane]
    assert killed == {"shards": SHARDS, "nodes": NODES, "producers": PRODUCERS}
    assert sorted(lanes) == [[PRODUCER_ROWS * k + n for n in range(ROWS)] for k in range(3)]
