"""All rows of a buffer on a cluster, read shard by shard."""

from __future__ import annotations

import time
from typing import Any

import torch

from distributed.shards import whole
from engram.distributed import unpack
from engram.errors import ShardUnavailableError
from engram.store.layout import RowLayout


def everything(rb: Any) -> list[list[int]]:
    """The numbers of the rows of each lane of each shard, oldest first; fails unless every row is whole."""
    numbers = []
    for link in rb._links:
        facts = _facts(link)
        layout = RowLayout.from_bytes(facts.layout)
        for lane, (first, stop) in enumerate(facts.totals.ranges.tolist()):
            numbers.append([])
            for start in range(first, stop, 50_000):
                sequence = torch.arange(start, min(stop, start + 50_000))
                lanes = torch.full_like(sequence, lane)
                taken = link.call("take", facts.totals.incarnation, lanes, sequence).result(60.0)
                assert taken.present.all()
                numbers[-1] += whole(unpack(layout, taken.block)).tolist()
    return numbers


def _facts(link: Any) -> Any:
    """What a shard says of itself; one that was killed a moment ago is being started again."""
    until = time.monotonic() + 60
    while True:
        try:
            return link.call("facts").result(60.0)
        except ShardUnavailableError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
