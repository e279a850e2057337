"""Keeping the best rows: neither a write into a full buffer nor a draw may grow with the buffer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks import floors
from benchmarks.cases import Row, calling
from benchmarks.cases.prioritized import words
from benchmarks.data import CARTPOLE_LEAVES, cartpole, cartpole_chunks
from benchmarks.libraries import Call, big_buffer

BATCH, APPENDED = 256, 64
SIZES = (10_000, 1_000_000, 10_000_000)
RANK = ("next", "reward")
GROWTH = 1.5
"""What counts as not growing: ten million rows lie outside every cache, ten thousand do not."""


def groups(*, quick: bool) -> Iterator[list[Row]]:
    """`extend(64)`, half of it refused, and `sample(256)` at each size."""
    yield [row for capacity in (SIZES[:2] if quick else SIZES) for row in _rows(capacity)]


def _rows(capacity: int) -> list[Row]:
    libraries = ("engram", "torchrl") if capacity == SIZES[0] else ("engram",)
    held = functools.cache(lambda library: _full(library, capacity))

    def sampling(library: str) -> Call:
        rb = held(library)
        return lambda: rb.sample(BATCH)

    smallest = capacity == SIZES[0]
    target = {} if smallest else {"own": GROWTH}
    return [
        Row(
            f"max_value_extend_{capacity}",
            f"max-value extend(64), 32 kept, {words(capacity)}",
            {name: calling(lambda name=name: rising(held(name))) for name in libraries},
            target=target,
            own_of=None if smallest else f"max_value_extend_{SIZES[0]}",
        ),
        Row(
            f"max_value_sample_{capacity}",
            f"sample(256) of the same, {words(capacity)}",
            {name: calling(lambda name=name: sampling(name)) for name in libraries},
            floor=lambda: floors.gather(CARTPOLE_LEAVES, capacity, BATCH),
            target=target,
            own_of=None if smallest else f"max_value_sample_{SIZES[0]}",
        ),
    ]


def rising(rb: Any) -> Call:
    """Every second row is better than all before it, so that a buffer of any size keeps as many of them for ever."""
    steps = cartpole(APPENDED)
    kept = (torch.arange(APPENDED) % 2 == 0).float().unsqueeze(-1)
    steps[RANK] = kept * (2 + torch.rand(APPENDED, 1)) - 1  # above every row of the first filling; -1: below
    rank = steps[RANK]

    def call() -> None:
        rank.add_(kept)
        rb.extend(steps)

    return call


def _full(library: str, capacity: int) -> Any:
    return big_buffer(
        library,
        _ranked(capacity),
        capacity,
        batch=BATCH,
        kind="TensorDictReplayBuffer",
        parts=lambda data: {"writer": data.TensorDictMaxValueWriter(rank_key=RANK)},
    )


def _ranked(capacity: int) -> Iterator[TensorDict]:
    for chunk in cartpole_chunks(capacity):
        chunk[RANK] = torch.rand(len(chunk), 1)
        yield chunk
