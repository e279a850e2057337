"""Rows of very many keys: 1,000 of one float each, 4 KB a row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import TensorDict

from benchmarks import floors
from benchmarks.cases import Row, calling
from benchmarks.libraries import SAME_API, Call, buffer

KEYS, CAPACITY, BATCH = 1_000, 20_000, 256


def groups(*, quick: bool) -> Iterator[list[Row]]:
    """`sample(256)` of 1,000 keys."""
    capacity = CAPACITY // 10 if quick else CAPACITY
    data = TensorDict({f"key_{k}": torch.randn(capacity, 1) for k in range(KEYS)}, batch_size=[capacity])

    def sampling(library: str) -> Call:
        rb = buffer(library, data, batch=BATCH)
        return lambda: rb.sample(BATCH)

    yield [
        Row(
            "sample_wide",
            f"sample(256) of {KEYS:,} keys, {capacity // 1000} k rows",
            {name: calling(lambda name=name: sampling(name)) for name in SAME_API},
            floor=lambda: floors.gather(dict.fromkeys(data.keys(), 4), capacity, BATCH),
            target={"floor": 1 / 1.5},
        )
    ]
