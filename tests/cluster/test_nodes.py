"""Nodes that share neither memory nor network: they die, hang, and are cut off; rows are in once, or told as lost.

ENGRAM_RAY_NODE_KILLS=200 makes so many failures in the long tests, and ENGRAM_RAY_STOPS=5,60 stops a shard for so many
seconds.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray
import torch

from cluster.conftest import LONG
from cluster.environments import Constant, env_of_any_machine
from cluster.namespaces import NamespaceCluster, Node
from cluster.programs import Threads, another_program, is_told_gone
from cluster.rows import batches_of_lanes, by_lane
from contracts.waiting import NEVER, comes
from distributed.shards import rows, whole
from engram.data import LazyTensorStorage
from engram.distributed import RayCollector, RayReplayBuffer
from engram.errors import ShardUnavailableError

KILLS = int(os.environ.get("ENGRAM_RAY_NODE_KILLS", "200"))
KILLS_OF_A_BUFFER = 10
COLLECTOR_KILLS = 6
STOPS = [float(seconds) for seconds in os.environ.get("ENGRAM_RAY_STOPS", "15,60").split(",")]
ROOM = 1_000_000  # rows of both shards
PRODUCER_ROWS = 1_000_000_000  # numbers of rows of one producer begin at a multiple


@pytest.fixture
def buffer(spaces: NamespaceCluster) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(capacity: int = ROOM, **settings: Any) -> Any:
        settings = {"batch_size": 64, "num_shards": 2, "timeout": 5.0, **settings}
        config = {"resources": {"shard": 1}}
        made.append(RayReplayBuffer(storage=LazyTensorStorage(capacity), remote_config=config, **settings))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


class Writer:
    """A producer whose rows have the numbers from a multiple of `PRODUCER_ROWS` on; it notes which shard took them."""

    def __init__(self, rb: Any, number: int) -> None:
        self.rb, self.first = rb.producing_as(f"producer {number}"), PRODUCER_ROWS * number
        self.written = 0
        self.acknowledged: list[tuple[int, int, int]] = []  # shard, first number, end

    def write(self, n: int) -> None:
        """Writes n rows and waits, however long, until they are in."""
        start = self.first + self.written
        while True:
            try:
                self.rb.extend(rows(start, start + n))
                break
            except ShardUnavailableError:  # these rows were not sent
                continue
        self.written += n
        while True:
            try:
                self.rb.flush()
                break
            except ShardUnavailableError:  # they are kept, and sent again
                continue
        self.acknowledged.append((self.shard, start, start + n))

    @property
    def shard(self) -> int:
        """The number of the shard to which it writes."""
        return int(self.rb._producer.shard.number)


def node_of(spaces: NamespaceCluster, rb: Any, shard: int) -> Node:
    """The node on which a shard is now."""
    return spaces.node_of(place(rb, shard)[0])


def place(rb: Any, shard: int) -> tuple[str, int]:
    """The node of a shard, and its process there; waits until it answers."""
    until = time.monotonic() + NEVER
    while True:
        try:
            node, pid = ray.get(rb._actors[shard].place.remote(), timeout=5)
            return str(node), int(pid)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def check(rb: Any, writers: list[Writer], lost_shards: set[int] = frozenset(), told: int = 0) -> int:  # type: ignore[assignment]
    """Checks that rows are in once and in order, and that missing ones are of shards whose node is lost, and were told.

    No row may have been overwritten: buffers here have room for all that is written. Returns how many are missing.
    """
    stats = rb.stats()
    assert max(shard.totals.writes for shard in rb._shards) <= stats.capacity // len(rb._shards), (
        "rows were overwritten"
    )
    lanes = by_lane(rb)
    numbers = [n for lane in lanes for n in lane]
    assert len(set(numbers)) == len(numbers)
    for lane in lanes:
        for writer in writers:
            own = [n for n in lane if writer.first <= n < writer.first + PRODUCER_ROWS]
            assert own == sorted(own)
    there, missing = set(numbers), 0
    for writer in writers:
        for shard, start, stop in writer.acknowledged:
            gone = sum(n not in there for n in range(start, stop))
            assert not gone or shard in lost_shards, f"{gone} acknowledged rows of shard {shard} are missing"
            missing += gone
        written = range(writer.first, writer.first + writer.written)
        assert all(n in written for n in numbers if n // PRODUCER_ROWS == writer.first // PRODUCER_ROWS)
    assert missing <= told
    return missing


@contextmanager
def losses() -> Iterator[Callable[[], int]]:
    """Collects how many rows warnings in this block tell as lost."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield lambda: sum(_rows_lost(str(one.message)) for one in said)


def _rows_lost(text: str) -> int:
    _, found, rest = text.partition("came back without ")
    return int(rest.split()[0]) if found else 0


def draws(rb: Any) -> bool:
    """Whether a batch comes."""
    try:
        return len(whole(rb.sample())) == 64
    except ShardUnavailableError:
        return False


def two_writers(rb: Any) -> list[Writer]:
    """One for each shard, with 1,000 rows."""
    writers = [Writer(rb, 0), Writer(rb, 1)]
    for writer in writers:
        writer.write(1000)
    assert {writer.shard for writer in writers} == {0, 1}
    return writers


def test_nodes_share_no_memory(spaces: NamespaceCluster, buffer: Any) -> None:
    rb = buffer()
    two_writers(rb)
    rb.stats()
    folders = [shard.facts.folder for shard in rb._shards]
    assert len(set(rb.nodes)) == 2 and not any(map(os.path.exists, folders))


def test_rows_in_the_memory_of_a_node_that_dies_are_told_as_lost_and_all_others_are_there(
    spaces: NamespaceCluster, buffer: Any
) -> None:
    rb = buffer()
    writers = two_writers(rb)
    with losses() as told:
        spaces.kill(place(rb, 0)[0])
        for writer in writers:
            for _ in range(3):
                writer.write(100)
        assert draws(rb) or comes(lambda: draws(rb))
        rb.stats()
        for writer in writers:
            writer.rb.stats()
        assert check(rb, writers, {0}, told()) == 1000


@pytest.mark.deep
def test_a_link_that_is_cut_for_a_moment_loses_nothing(spaces: NamespaceCluster, buffer: Any) -> None:
    rb = buffer()
    writers = two_writers(rb)
    with losses() as told:
        node = node_of(spaces, rb, 0)
        node.cut()
        connector = threading.Timer(1.0, node.connect)
        connector.start()
        for _ in range(5):
            for writer in writers:
                writer.write(100)
        connector.join()
        assert comes(lambda: draws(rb))
        assert check(rb, writers) == told() == 0


@pytest.mark.deep
def test_a_shard_whose_node_is_cut_off_comes_back_elsewhere_and_its_rows_are_told_as_lost(
    spaces: NamespaceCluster, buffer: Any
) -> None:
    rb = buffer()
    writers = two_writers(rb)
    with losses() as told:
        node = node_of(spaces, rb, 0)
        node.cut()
        for _ in range(3):
            for writer in writers:
                writer.write(100)  # to shard 0 when it is elsewhere
        assert place(rb, 0)[0] != node.node_id
        node.connect()  # what still runs there has an older life, and is ended by Ray
        for _ in range(3):
            for writer in writers:
                writer.write(100)
        assert comes(lambda: draws(rb))
        for writer in writers:
            writer.rb.stats()
        assert check(rb, writers, {0}, told()) == 1000
    spaces.remove(node)
    spaces.add()


def stopped_for(spaces: NamespaceCluster, rb: Any, seconds: float) -> None:
    """A shard's process stops for so long; the other one answers meanwhile, and nothing is lost."""
    writers = two_writers(rb)
    node, pid = place(rb, 0)
    with losses() as told:
        spaces.node_of(node).kill_process(pid, signal.SIGSTOP)
        stopped = time.monotonic()
        continuer = threading.Timer(seconds, spaces.node_of(node).kill_process, (pid, signal.SIGCONT))
        continuer.start()
        other = next(writer for writer in writers if writer.shard == 1)
        while time.monotonic() < stopped + seconds:
            if other.written < ROOM // 4:  # its shard keeps all of them, however fast it is
                other.write(100)
            assert comes(lambda: draws(rb), within=seconds + 2 * 5.0)
        continuer.join()
        for writer in writers:
            writer.write(100)
        assert place(rb, 0) == (node, pid)
        assert check(rb, writers) == told() == 0


@pytest.mark.deep
def test_a_shard_that_stops_for_some_seconds_loses_nothing(spaces: NamespaceCluster, buffer: Any) -> None:
    stopped_for(spaces, buffer(), 5.0)


@LONG
@pytest.mark.parametrize("seconds", STOPS)
def test_a_shard_that_stops_for_long_loses_nothing(spaces: NamespaceCluster, buffer: Any, seconds: float) -> None:
    stopped_for(spaces, buffer(), seconds)


@pytest.mark.deep
def test_a_node_that_hangs_and_goes_on_answers_for_no_shard_that_is_elsewhere_by_then(
    spaces: NamespaceCluster, buffer: Any
) -> None:
    rb = buffer()
    writers = two_writers(rb)
    with losses() as told:
        node = node_of(spaces, rb, 0)
        node.stop()
        for writer in writers:
            writer.write(100)
        assert place(rb, 0)[0] != node.node_id
        node.go_on()
        for _ in range(3):
            for writer in writers:
                writer.write(100)
        assert comes(lambda: draws(rb))
        for writer in writers:
            writer.rb.stats()
        assert check(rb, writers, {0}, told()) == 1000
    spaces.remove(node)
    spaces.add()


@pytest.mark.deep
def test_shards_end_with_the_driver_that_made_them_and_their_memory_goes_with_the_next_shard(
    spaces: NamespaceCluster, buffer: Any
) -> None:
    init = {"address": spaces.address, "_node_ip_address": spaces.address_of(1)}
    with another_program(init, remote_config={"resources": {"shard": 1}}) as program:
        rb = program.buffer()
        assert draws(rb)
        names = [os.path.basename(shard.facts.folder) for shard in rb._shards]
    assert comes(lambda: is_told_gone(rb.sample))
    rb.close()
    two_writers(buffer())
    left = {name for node in spaces.nodes for name in node.memory()}
    assert not left & set(names)


@pytest.mark.deep
def test_collectors_that_are_killed_on_their_nodes_come_back_and_no_step_is_twice_or_missing(
    spaces: NamespaceCluster, buffer: Any
) -> None:
    rb, rng = buffer(), random.Random(0)
    collecting = RayCollector(
        env_of_any_machine, Constant(), frames_per_batch=50, num_collectors=2, replay_buffer=rb,
        remote_configs={"num_cpus": 0, "resources": {"shard": 1}},
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")

        def made_anew() -> int:
            return sum("is made anew" in str(one.message) for one in said)

        with collecting:
            nodes = set()
            for kills in range(COLLECTOR_KILLS):
                collecting.rollout()
                node, pid = ray.get(rng.choice(collecting.remote_collectors).place.remote(), timeout=NEVER)
                nodes.add(node)
                spaces.node_of(node).kill_process(pid)
                while made_anew() <= kills:
                    collecting.rollout()
    assert nodes == {node.node_id for node in spaces.nodes} and made_anew() == COLLECTOR_KILLS
    steps: dict[tuple[float, float], list[float]] = {}
    for parts in batches_of_lanes(rb):
        for *env, step in torch.cat([part["observation"] for part in parts]).tolist() if parts else ():
            steps.setdefault(tuple(env), []).append(step)
    assert all(of_one == list(range(len(of_one))) for of_one in steps.values())  # in order: none is in two lanes
    assert sum(map(len, steps.values())) == collecting.frames == rb.write_count


@LONG
@pytest.mark.parametrize("seed", range(-(-KILLS // KILLS_OF_A_BUFFER)))
def test_every_acknowledged_row_is_in_once_or_told_as_lost_with_its_node(
    spaces: NamespaceCluster, buffer: Any, seed: int
) -> None:
    rb = buffer(capacity=8_000_000, timeout=2.0)
    writers = two_writers(rb)
    rng, done = random.Random(seed), threading.Event()
    threads = Threads(done)

    def write(writer: Writer) -> None:
        while not done.is_set():
            writer.write(rng.choice([1, 10, 100]))

    def read() -> None:
        reader = rb.producing_as("only reads")
        while not done.is_set():
            draws(reader)
            time.sleep(0.01)

    made = {"process": 0, "stop": 0, "cut": 0, "node": 0}
    lost_shards: set[int] = set()
    with losses() as told:
        for writer in writers:
            threads.start(write, writer)
        threads.start(read)
        for _ in range(KILLS_OF_A_BUFFER):
            if threads.failures:
                break
            shard, what = rng.randrange(2), rng.choices(list(made), [80, 8, 6, 6])[0]
            node_id, pid = place(rb, shard)
            node = spaces.node_of(node_id)
            if what == "node":
                lost_shards |= {k for k in range(2) if place(rb, k)[0] == node_id}
                spaces.kill(node_id)
            elif what == "cut":
                node.cut()
                time.sleep(rng.random())
                node.connect()
            elif what == "stop":
                node.kill_process(pid, signal.SIGSTOP)
                time.sleep(2 * rng.random())
                node.kill_process(pid, signal.SIGCONT)
            else:
                node.kill_process(pid)
            made[what] += 1
            print(what, end=" ", flush=True)
            time.sleep(0.3 * rng.random())
        done.set()
        threads.join()
        for writer in writers:
            writer.write(1)
            writer.rb.stats()
        missing = check(rb, writers, lost_shards, told())
    written = sum(writer.written for writer in writers)
    print(f"{made}: {written} rows, of which {missing} were lost with a node, and {told()} told as lost")
