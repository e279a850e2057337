"""A shard or a node that is gone is drawn from the others meanwhile, and comes back with its rows and priorities.

ENGRAM_RAY_AWAY=10,3 kills so many shards and nodes; the longest waits are printed (`-s`).
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import ray
import torch

from cluster.conftest import Nodes
from cluster.test_buffer import write
from distributed.shards import rows, whole
from engram.data import PrioritizedSampler
from engram.errors import ShardUnavailableError

SHARDS, NODES = map(int, os.environ.get("ENGRAM_RAY_AWAY", "1,1").split(","))


class Waits:
    """The longest time that each kind of call took, and how many of them had no answer."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}
        self.refused = 0

    def of(self, name: str, call: Callable[[], Any]) -> Any:
        before = time.monotonic()
        try:
            return call()
        except ShardUnavailableError:
            self.refused += 1
        finally:
            self.longest[name] = max(self.longest.get(name, 0.0), time.monotonic() - before)

    def __str__(self) -> str:
        return ", ".join(f"{name} {1000 * s:.0f} ms" for name, s in self.longest.items()) + f"; {self.refused} refused"


def _update(rb: Any, batch: Any) -> None:
    """Gives rows the priorities that they have."""
    batch["td_error"] = torch.where(batch["n"] < 500, 3.0, 1.0)
    rb.update_tensordict_priority(batch)


def test_it_is_drawn_from_the_others_until_it_is_back(cluster: Nodes, buffer: Any) -> None:
    rb = buffer(num_shards=2, timeout=60.0, batches_per_call=4, sampler=PrioritizedSampler(None, 1.0, 1.0, eps=0.0))
    index = rb.extend(rows(0, 1000))
    rb.flush()
    ray.get(write.remote(rb, 1000, 2000))
    while len({int(n) // 1000 for n in whole(rb.sample())}) < 2:
        pass
    first, second = (shard.number * shard.facts.capacity + torch.arange(1000) for shard in rb._shards)
    assert torch.equal(index, first) or torch.equal(index, second)
    rb.update_priority(index, torch.where(torch.arange(1000) < 500, 3.0, 1.0))
    rb.update_priority(second if torch.equal(index, first) else first, 1.0)
    rb.flush_priorities()
    reader = rb.producing_as("reads only")
    reader._settings = reader._settings._replace(timeout=1.0)
    waits = Waits()
    for kill, what in enumerate(["shard"] * SHARDS + ["node"] * NODES):
        rb.stats()
        before = [shard.totals.draws.share for shard in rb._shards]
        victim = kill % 2
        node, pid = ray.get(rb._actors[victim].place.remote())
        if what == "node":
            cluster.kill(node)
        else:
            os.kill(pid, signal.SIGKILL)
        began, away, drawn = time.monotonic(), False, 0
        while not away or reader.stats().away:
            batch = waits.of("sample", reader.sample)
            if batch is not None:
                drawn += len(whole(batch))
                waits.of("update_priority", functools.partial(_update, reader, batch))
            stats = waits.of("stats", reader.stats)
            waits.of("len", lambda: len(reader))
            away = away or (stats is not None and stats.away == (victim,))
            time.sleep(0.01)  # the cores are for what comes back
        print(f"{what} {kill}: away for {time.monotonic() - began:.1f} s, {drawn} rows meanwhile; longest: {waits}")
        assert drawn > 0 and len(rb) == 2000
        assert [shard.totals.draws.share for shard in rb._shards] == before
    drawn_rows = torch.cat([whole(reader.sample()) for _ in range(50)])
    assert {int(n) // 1000 for n in drawn_rows} == {0, 1}
