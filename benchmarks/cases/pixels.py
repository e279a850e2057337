"""Sampling frames: 14 MB a batch, from a buffer that no cache holds; by one thread, by two, in two, and ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import floors
from benchmarks.cases import Row, calling
from benchmarks.data import PIXEL_LEAVES, pixels
from benchmarks.libraries import Call, Cpprb, StableBaselines3, Tianshou, buffer, steps_of
from benchmarks.timing import Turn, at_once, repeat

BATCH, THREADS = 256, 2
CLONE = "floor, a clone"
"""Of as many bytes, by torch, with one thread."""


def groups(*, quick: bool) -> Iterator[list[Row]]:
    """`sample(256)` of 2 x 4x84x84 uint8."""
    capacity = 1000 if quick else 4000
    data = pixels(capacity)
    fixed = steps_of(data)

    def sampling(library: str, **settings: Any) -> Call:
        rb = buffer(library, data, batch=BATCH, **settings)
        return lambda: rb.sample(BATCH)

    yield [
        Row(
            "sample_pixels",
            "sample(256) of 2 x 4x84x84 uint8",
            {
                "engram": calling(lambda: sampling("engram")),
                "torchrl": calling(lambda: sampling("torchrl")),
                "cpprb": calling(lambda: Cpprb(data).sample(BATCH)),
                "tianshou": calling(lambda: Tianshou(*fixed).sample(BATCH)),
                "stable-baselines3": calling(lambda: StableBaselines3(*fixed).sample(BATCH)),
                CLONE: calling(_cloning),
            },
            floor=lambda: floors.gather(PIXEL_LEAVES, capacity, BATCH),
            target={CLONE: 1 / 1.05},
            beside=True,
            notes=[f"{capacity:,} rows"],
        ),
        Row(
            "sample_pixels_threads",
            f"the same after torch.set_num_threads({THREADS})",
            {
                "engram": lambda: _with_threads(sampling("engram")),
                "torchrl": lambda: _with_threads(sampling("torchrl")),
                CLONE: calling(_cloning),
            },
            target={CLONE: 1 / 0.6},
        ),
        Row(
            "sample_pixels_at_once",
            f"the same, a batch of each of {THREADS} threads that sample one buffer",
            {
                "engram": lambda: at_once(sampling("engram"), THREADS),
                "torchrl": lambda: at_once(sampling("torchrl"), THREADS),
            },
            target={"own": 1.0},
            own_of="sample_pixels",
            notes=["seconds of all by batches of all: 1x its own is the rate of one thread"],
        ),
        Row(
            "sample_pixels_prefetch",
            "the same, prefetch=3, a learner that does nothing between batches",
            {"engram": calling(lambda: sampling("engram", prefetch=3))},
            target={"own": 1.1},
            own_of="sample_pixels",
        ),
    ]


def _cloning() -> Call:
    """A copy of the bytes of a batch into new memory."""
    frames: list[Any] = list(pixels(BATCH).flatten_keys(".").values())
    return lambda: [leaf.clone() for leaf in frames]


def _with_threads(call: Call) -> Turn:
    """A turn in which torch may use several threads."""
    once = repeat(call)

    def turn(n: int) -> float:
        before = torch.get_num_threads()
        torch.set_num_threads(THREADS)
        try:
            return once(n)
        finally:
            torch.set_num_threads(before)

    return turn
