"""Writing to and drawing from a store between whose lanes writers move, against one in which they take turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.cases import Row, calling
from benchmarks.data import cartpole
from benchmarks.libraries import Call
from engram.data import LazyTensorStorage, ReplayBuffer

CAPACITY, APPENDED, BATCH = 100_000, 64, 256
STORES = {"turns": None, "lanes": 8}


def groups(*, quick: bool) -> Iterator[list[Row]]:
    """`extend(64)` and `sample(256)` of either, in memory that processes share."""
    data = cartpole(CAPACITY)
    batch = data[:APPENDED].clone()

    def full(lanes: int | None) -> ReplayBuffer:
        rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY, shared=True, lanes=lanes), batch_size=BATCH)
        rb.extend(data)
        return rb

    def extending(lanes: int | None) -> Call:
        rb = full(lanes)
        return lambda: rb.extend(batch)

    def sampling(lanes: int | None) -> Call:
        return full(lanes).sample

    names = {"turns": "one lane, in turns", "lanes": "lanes=8"}
    calls: dict[str, Any] = {"extend": (extending, f"extend({APPENDED})"), "sample": (sampling, f"sample({BATCH})")}
    most = {"extend": 1.15, "sample": 1.25}
    for key, (make, title) in calls.items():
        yield [
            Row(
                f"{store}_{key}",
                f"shared memory, {names[store]}: {title}",
                {"engram": calling(lambda make=make, lanes=lanes: make(lanes))},
                target={"own": most[key]} if store == "lanes" else {},
                own_of=f"turns_{key}" if store == "lanes" else None,
            )
            for store, lanes in STORES.items()
        ]
