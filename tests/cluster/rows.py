"""All rows of a buffer on a cluster, read shard by shard."""

from __future__ import annotations

import time
from typing import Any

import torch

from distributed.shards import whole
from engram.data import LazyMemmapStorage
from engram.distributed import unpack
from engram.errors import ShardUnavailableError
from engram.store.layout import RowLayout


def everything(rb: Any) -> list[list[int]]:
    """The numbers of the rows of each producer, in the order in which it wrote them; fails unless all are whole."""
    return [whole(batch).tolist() for batch in batches_of_producers(rb)]


def by_lane(rb: Any) -> list[list[int]]:
    """The numbers of the rows of each lane of each shard, oldest first; fails unless every row is whole."""
    return [whole(torch.cat(parts)).tolist() if parts else [] for parts in batches_of_lanes(rb)]


def batches_of_lanes(rb: Any) -> list[list[Any]]:
    """The rows of each lane of each shard, oldest first, in some batches; from shards on any machine."""
    lanes: list[list[Any]] = []
    for link in rb._links:
        facts = _facts(link)
        layout = RowLayout.from_bytes(facts.layout)
        for lane, (first, stop) in enumerate(link.call("ranges", facts.totals.incarnation).result(60.0).tolist()):
            lanes.append([])
            for start in range(first, stop, 50_000):
                sequence = torch.arange(start, min(stop, start + 50_000))
                numbers = torch.full_like(sequence, lane)
                taken = link.call("take", facts.totals.incarnation, numbers, sequence).result(60.0)
                assert taken.present.all()
                lanes[-1].append(unpack(layout, taken.block))
    return lanes


def batches_of_producers(rb: Any) -> list[Any]:
    """The rows of each producer, in the order in which it wrote them, from the stores, which lie on this machine."""
    batches = []
    for link in rb._links:
        storage = LazyMemmapStorage.open(_facts(link).folder, read_only=True)
        store, layout = storage.lanes.store, storage.layout
        parts: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for lane in range(store.lanes):
            extents, end = store.extents(lane), store.lane(lane)["published"]
            for (start, stream, position), stop in zip(extents, [*(e[0] for e in extents), end][1:], strict=False):
                slots = lane * store.lane_capacity + torch.arange(start, stop) % store.lane_capacity
                parts.setdefault(stream, []).append((position, slots))
        for of_stream in parts.values():
            slots = torch.cat([slots for _, slots in sorted(of_stream, key=lambda part: part[0])])
            rows = storage.read_packed(slots)
            assert rows.overwritten is None and rows.absent is None
            if len(slots):
                batches.append(layout.unpack(rows.batch[0]))
        storage.close()
    return batches


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
