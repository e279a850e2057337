"""On the node of a shard: its process ends, for a moment or for good, beside a client that opens its store."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import ray
import torch

from cluster.conftest import Nodes
from cluster.programs import another_program
from cluster.rows import everything
from contracts.waiting import comes, is_gone
from distributed.shards import rows, whole
from engram.errors import ShardGoneError, ShardUnavailableError


def here() -> Any:
    return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )


def is_refused(call: Any) -> bool:
    try:
        call()
    except ShardUnavailableError:
        return True
    return False


@pytest.mark.parametrize("n", [1, 2])
def test_a_second_program_notices_that_the_one_that_made_the_shards_was_killed(
    cluster: Nodes, tmp_path: Any, n: int
) -> None:
    init = {"address": cluster.cluster.address}
    with another_program(init, num_shards=n, placement=here()) as program:
        rb = program.buffer()
        assert all(rb._local)
        rb.extend(rows(100, 200))
        assert len(whole(rb.sample())) == 64
    assert comes(lambda: is_refused(lambda: rb.extend(rows(0, 10))))  # Ray ends the actors some seconds later
    assert is_refused(rb.flush)
    assert comes(lambda: is_refused(lambda: [rb.sample() for _ in range(200)]))  # of several, one ends before another
    written = rb._producer.acknowledged
    for call in (lambda: rb.extend(rows(0, 10)), rb.flush, rb.sample, lambda: len(rb), lambda: rb.dumps(tmp_path)):
        with pytest.raises(ShardGoneError, match="is not started again"):
            call()
    assert rb._producer.acknowledged == written


def test_writing_and_drawing_beside_a_shard_that_is_killed_go_on_when_it_is_back(cluster: Nodes, buffer: Any) -> None:
    rb = buffer(placement=here(), remote_config={"resources": {}}, timeout=60.0)
    assert rb._local == [True]
    at = 0
    for _kill in range(3):
        for _ in range(20):
            rb.extend(rows(at, at + 50))
            at += 50
            whole(rb.sample())
        rb.flush()
        pid = ray.get(rb._actors[0].place.remote())[1]
        os.kill(pid, signal.SIGKILL)
        assert is_gone(pid) and comes(lambda: not rb._watch.is_held())  # its last thread, too
    rb.extend(rows(at, at + 50))
    rb.flush()
    assert [lane for lane in everything(rb) if lane] == [list(range(at + 50))]
    drawn = torch.cat([whole(rb.sample()) for _ in range(10)])
    assert bool((drawn < at + 50).all()) and rb._beside is not None
