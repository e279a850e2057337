"""Sampling frames: 14 MB a batch, from a buffer that no cache holds."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import floors
from benchmarks.cases import Row, calling
from benchmarks.data import PIXEL_LEAVES, pixels
from benchmarks.libraries import Call, Cpprb, StableBaselines3, Tianshou, buffer, steps_of

BATCH = 256


def groups(*, quick: bool) -> Iterator[list[Row]]:
    """`sample(256)` of 2 x 4x84x84 uint8."""
    capacity = 1000 if quick else 4000
    data = pixels(capacity)
    fixed = steps_of(data)

    def sampling(library: str) -> Call:
        rb = buffer(library, data, batch=BATCH)
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
            },
            floor=lambda: floors.gather(PIXEL_LEAVES, capacity, BATCH),
            target={"us": 1100},
            beside=True,
            notes=[f"{capacity:,} rows"],
        )
    ]
