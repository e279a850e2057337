"""RayReplayBuffer on a cluster: what it writes and draws, from several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import ray
import torch

from cluster.rows import by_lane, everything
from distributed.shards import rows, whole
from engram.data import LazyTensorStorage, ListStorage, PrioritizedSampler, SamplerWithoutReplacement, SliceSampler
from engram.distributed import RayReplayBuffer


@ray.remote(num_cpus=0)
def write(rb: Any, start: int, stop: int) -> bool:
    """Writes rows in a process of its own; returns whether it did so beside the shard."""
    for k in range(start, stop, 100):
        rb.extend(rows(k, min(stop, k + 100), start))
    rb.close()
    return any(rb._local)


def test_rows_of_this_process_and_of_others_are_in_once_and_drawn_and_can_be_written_to(buffer) -> None:
    rb = buffer(num_shards=2)
    rb.extend(rows(0, 1000))
    beside = ray.get([write.remote(rb, k, k + 1000) for k in (1000, 2000)])
    rb.flush()
    assert sorted(n for lane in everything(rb) for n in lane) == list(range(3000)) and len(rb) == rb.write_count == 3000
    drawn = torch.cat([whole(rb.sample()) for _ in range(100)])
    assert {int(n) // 1000 for n in drawn} == {0, 1, 2} and rb.stats().away == ()
    assert len(beside) == 2
    for _ in range(3):
        for leaf in rb.sample().values(True, True):
            leaf.add_(1)
    assert bool((whole(rb.sample()) < 3000).all())


@pytest.mark.parametrize("beside", [False, True])
def test_one_producer_keeps_as_many_rows_as_all_shards_have_room_for(buffer, beside: bool) -> None:
    rb = buffer(4000, num_shards=4)
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(rb.nodes[0], soft=False)
    if beside:  # it begins in a shard of its node, and goes on to the others through Ray
        assert ray.get(write.options(scheduling_strategy=strategy).remote(rb, 0, 9010))
    else:
        write._function(rb, 0, 9010)
    rb.flush()
    assert sorted(n for lane in by_lane(rb) for n in lane) == list(range(5010, 9010)) and len(rb) == 4000


def test_priorities_go_there_and_back(buffer) -> None:
    rb = buffer(sampler=PrioritizedSampler(None, 1.0, 1.0, eps=0.0), num_shards=2, batches_per_call=2)
    index = rb.extend(rows(0, 50))
    rb.flush()
    rb.update_priority(index, torch.where(torch.arange(50) == 7, 2.0, 0.0))
    rb.flush_priorities()
    batch = [rb.sample() for _ in range(10)][-1]
    assert set(whole(batch).tolist()) == {7} and bool((batch["priority_weight"] == 1).all())


def test_slices_do_not_leave_their_trajectory(buffer) -> None:
    rb = buffer(sampler=SliceSampler(slice_len=8, traj_key="traj"), num_shards=2)
    rb.extend(rows(0, 100))
    ray.get([write.remote(rb, k, k + 150) for k in (1000, 2000)])
    for _ in range(20):
        assert bool((whole(rb.sample()).reshape(-1, 8).diff() == 1).all())


def test_on_the_node_of_the_shard_nothing_goes_through_ray(cluster) -> None:
    rb = RayReplayBuffer(storage=LazyTensorStorage(1000), batch_size=32, timeout=20.0)
    here = ray.get_runtime_context().get_node_id()
    assert rb._nodes == [here] or not any(rb._local)
    rb.extend(rows(0, 100))
    assert len(whole(rb.sample())) == 32
    folder = rb._shards[0].facts.folder
    rb.shutdown()
    assert not os.path.exists(folder)


def test_the_store_of_a_shard_that_may_move_is_not_opened_beside_it(buffer) -> None:
    rb = buffer(placement="DEFAULT")
    rb.extend(rows(0, 100))
    rb.flush()
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(rb.nodes[0], soft=False)
    assert not ray.get(write.options(scheduling_strategy=strategy).remote(rb, 100, 200)) and len(rb) == 200


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"num_shards": 0}, ValueError, "num_shards"),
        ({"batches_per_call": 0}, ValueError, "batches_per_call"),
        ({"max_batch_age": -1.0}, ValueError, "max_batch_age"),
        ({"max_batch_age": float("nan")}, ValueError, "max_batch_age"),
        ({"timeout": 0.0}, ValueError, "timeout"),
        ({"sampler": SamplerWithoutReplacement()}, TypeError, "cannot be divided"),
        ({"sampler": SliceSampler(num_slices=4)}, ValueError, "num_slices"),
        ({"storage": lambda: 3}, TypeError, "make one"),
        ({"storage": ListStorage(None)}, ValueError, "max_size"),
        ({"writer": "last"}, TypeError, "no place in shards"),
    ],
)
def test_settings_that_are_not_allowed_are_refused(cluster, settings, error, words) -> None:
    with pytest.raises(error, match=words):
        RayReplayBuffer(**{"storage": LazyTensorStorage(100), **settings})


LEAVES = """
import os, sys
import ray
from distributed.shards import rows
from engram.data import LazyTensorStorage
from engram.distributed import RayReplayBuffer

ray.init(address={address!r}, log_to_driver=False)
rb = RayReplayBuffer(storage=LazyTensorStorage(1000), remote_config={{"resources": {{"shard": 1}}}}, timeout=60.0)
rb.extend(rows(0, 10))
rb.flush()
print(rb._shards[0].facts.folder, ray.get(rb._actors[0].place.remote())[1], flush=True)
sys.stdin.read()
"""


def test_what_a_killed_program_left_in_memory_is_removed_and_what_comes_back_is_not(cluster, buffer) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", LEAVES.format(address=cluster.cluster.address)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    folder, pid = program.stdout.readline().split()
    os.kill(int(pid), signal.SIGKILL)  # so that it cannot tidy up
    program.kill()
    program.wait()
    own = buffer()
    own.extend(rows(0, 10))
    own.flush()
    own_folder = own._shards[0].facts.folder
    os.kill(ray.get(own._actors[0].place.remote())[1], signal.SIGKILL)  # it will come back
    deadline = time.monotonic() + 60
    while os.path.exists(folder) and time.monotonic() < deadline:
        other = buffer()
        assert other._shards[0].await_presence(deadline).folder != own_folder and os.path.exists(own_folder)
    assert not os.path.exists(folder) and len(own) == 10
