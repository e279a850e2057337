"""The life of a buffer on a cluster: found by its name, longer than its program or not, and its end, told at once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster.conftest import Nodes
from cluster.programs import Program, another_program, is_told_gone
from cluster.rows import everything
from contracts.waiting import comes
from distributed.shards import rows, whole
from engram.data import LazyTensorStorage, PrioritizedSampler
from engram.distributed import RayReplayBuffer, Timeouts
from engram.errors import ShardGoneError, ShardUnavailableError


def program(cluster: Nodes, name: str, **more: Any) -> contextlib.AbstractContextManager[Program]:
    """A program that has made a buffer."""
    return another_program(
        {"address": cluster.cluster.address}, name=name, remote_config={"resources": {"shard": 1}, **more}
    )


@ray.remote(num_cpus=0)
class Client:
    """A client on the node of a shard."""

    def __init__(self, name: str) -> None:
        self.rb = RayReplayBuffer.attach(name)

    def is_beside(self) -> bool:
        return any(self.rb._local)

    def extend(self, start: int, stop: int) -> int:
        self.rb.extend(rows(start, stop))
        self.rb.flush()
        return self.rb.stats().accepted

    def ends(self) -> list[bool]:
        """Writes and draws until both are told that the buffer is gone; whether each said so at once then."""
        for call in (lambda: self.rb.extend(rows(0, 1)), self.rb.sample):
            while not is_told_gone(call):
                pass
        calls = (lambda: self.rb.extend(rows(0, 1)), self.rb.flush, self.rb.sample, self.rb.stats)
        began = time.monotonic()
        return [is_told_gone(call) and time.monotonic() - began < 5.0 for call in calls]

    def accepted(self) -> int:
        return self.rb._accepted_before + (0 if self.rb._producer is None else self.rb._producer.acknowledged)


def clients(name: str, nodes: list[str]) -> list[Any]:
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    made = [Client.options(scheduling_strategy=strategy(node, soft=False)).remote(name) for node in nodes]
    assert all(ray.get([one.is_beside.remote() for one in made]))
    return made


def test_a_detached_buffer_outlives_the_program_that_made_it(cluster: Nodes) -> None:
    with program(cluster, "outlives", lifetime="detached") as made:
        made.kill()
    rb = RayReplayBuffer.attach("outlives")
    try:
        assert len(rb) == 100 and rb.batch_size == 64
        others = clients("outlives", rb.nodes)
        assert sum(ray.get([one.extend.remote(1000 * k, 1000 * k + 50) for k, one in enumerate(others, 1)])) == 100
        rb.extend(rows(100, 200))
        rb.flush()
        for actor in rb._actors:  # as ever, who dies comes back
            os.kill(ray.get(actor.place.remote())[1], signal.SIGKILL)
        assert comes(lambda: _length(rb) == 300)
        expected = sorted([*range(200), *range(1000, 1050), *range(2000, 2050)])
        assert sorted(n for lane in everything(rb) for n in lane) == expected
        whole(rb.sample())
        folders = [shard.facts.folder for shard in rb._shards]
    finally:
        rb.shutdown()
    assert all(ray.get([one.ends.remote() for one in others])) and not any(map(os.path.exists, folders))
    assert comes(lambda: _has_no_name("outlives"))


def _length(rb: RayReplayBuffer) -> int:
    try:
        return len(rb)
    except ShardUnavailableError:
        return -1


def _has_no_name(name: str) -> bool:
    try:
        RayReplayBuffer.attach(name)
    except ShardGoneError as error:
        assert name in str(error)
        return True
    return False


def test_the_end_of_the_program_that_made_a_buffer_is_told_on_every_node(cluster: Nodes) -> None:
    with program(cluster, "ends") as made:
        rb = RayReplayBuffer.attach("ends")
        others = clients("ends", rb.nodes)
        before = ray.get([one.extend.remote(1000, 1050) for one in others])
        whole(rb.sample())
        made.kill()
        ends = [one.ends.remote() for one in others]
        for call in (lambda: rb.extend(rows(0, 1)), rb.sample):
            assert comes(lambda call=call: is_told_gone(call))
        assert ray.get(ends) == [[True] * 4] * len(others)
        assert comes(lambda: _has_no_name("ends"))
        written = ray.get([one.accepted.remote() for one in others])
        stays = ray.get([one.ends.remote() for one in others])
        assert stays == [[True] * 4] * len(others) and written == ray.get([one.accepted.remote() for one in others])
        assert all(now >= then for now, then in zip(written, before, strict=True))


def test_a_name_is_that_of_one_buffer(cluster: Nodes, buffer: Any) -> None:
    rb = buffer(name="taken")
    rb.extend(rows(0, 10))
    rb.flush()
    for shards in (1, 2):
        with pytest.raises(ValueError, match=r"attach\('taken'\)"):
            buffer(name="taken", num_shards=shards)
    other = RayReplayBuffer.attach("taken")
    assert len(rb) == len(other) == 10
    other.close()
    with pytest.raises(ValueError, match="name"):
        buffer(name="")


def test_settings_come_with_the_name(buffer: Any) -> None:
    rb = buffer(name="settings", sampler=PrioritizedSampler(None, 1.0, 1.0), priority_key="loss", batch_size=7)
    rb.extend(rows(0, 10), priority=2.0)
    rb.flush()
    other = RayReplayBuffer.attach("settings")
    assert len(other.sample()) == 7 and other._settings.priority_key == "loss"
    assert bool((other.sample()["priority_weight"] == 1).all())
    other.close()


def test_shards_for_which_there_is_no_room_are_given_up_in_time(cluster: Nodes) -> None:
    with pytest.raises(ShardUnavailableError, match=r"shards \[0, 1\] have not started within 0.5 seconds"):
        RayReplayBuffer(
            storage=LazyTensorStorage(100), name="nowhere", num_shards=2, timeout=Timeouts(start=0.5),
            remote_config={"resources": {"no such thing": 1}, "lifetime": "detached"},
        )  # fmt: skip
    assert comes(lambda: not any("nowhere" in one["name"] for one in ray.util.list_named_actors(all_namespaces=True)))


def test_what_writes_waits_longer_and_says_for_whom(cluster: Nodes, buffer: Any, caplog: Any) -> None:
    rb = buffer(timeout=Timeouts(answer=0.5, extend=2.5))
    rb.extend(rows(0, 10))
    rb.flush()
    pid = ray.get(rb._actors[0].place.remote())[1]
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(ShardUnavailableError):
            rb.sample()
        said = time.monotonic() - began
        assert said < 2.5
        rb.extend(rows(10, 20))
        with pytest.raises(ShardUnavailableError, match=f"shard 0, on node {rb.nodes[0][:12]}.* does not answer"):
            rb.flush()
        assert time.monotonic() - began > said + 2.5
    finally:
        os.kill(pid, signal.SIGCONT)
    assert any("shard 0, on node" in one.message and "waiting for it" in one.message for one in caplog.records)
    assert comes(lambda: _length(rb) == 20)


def test_what_a_program_with_a_cluster_of_its_own_left_goes_when_the_next_one_begins(tmp_path: Path) -> None:
    """Each program starts Ray by itself, as on a laptop; the first is killed with all of its processes."""
    text = (Path(__file__).parent / "own_cluster.py").read_text()
    folders = []
    for _ in range(2):
        program = subprocess.Popen(
            [sys.executable, "-c", text, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True, env={k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RAY_TMPDIR")},
        )  # fmt: skip
        folder, *pids = program.stdout.readline().split()
        assert os.path.exists(folder)
        assert not any(map(os.path.exists, folders))
        folders.append(folder)
        for pid in map(int, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        program.kill()
        program.wait()
