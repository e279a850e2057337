"""Sampling CartPole steps: from a small buffer, with `index`, and from one far larger than any cache."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import floors
from benchmarks.cases import Row, calling
from benchmarks.data import CARTPOLE_LEAVES, CHUNK, cartpole, cartpole_chunks, row_bytes
from benchmarks.libraries import Call, Cpprb, StableBaselines3, Tianshou, big_buffer, buffer, steps_of
from benchmarks.machine import available_memory

SMALL, BIG, BATCH = 100_000, 20_000_000, 256
WARM_UP = 10_000
"""Batches: 2.5 M random rows touch nearly every page of 20 M packed rows."""


def groups(*, quick: bool) -> Iterator[list[Row]]:
    """`sample(256)` of 11 TED keys."""
    data = cartpole(SMALL)
    fixed = steps_of(data)

    def sampling(library: str, kind: str) -> Call:
        rb = buffer(library, data, batch=BATCH, kind=kind)
        return lambda: rb.sample(BATCH)

    small = Row(
        "sample_small",
        "sample(256), 11 TED keys, 100 k rows",
        {
            "engram": calling(lambda: sampling("engram", "ReplayBuffer")),
            "torchrl": calling(lambda: sampling("torchrl", "ReplayBuffer")),
            "cpprb": calling(lambda: Cpprb(data).sample(BATCH)),
            "tianshou": calling(lambda: Tianshou(*fixed).sample(BATCH)),
            "stable-baselines3": calling(lambda: StableBaselines3(*fixed).sample(BATCH)),
        },
        floor=lambda: floors.gather(CARTPOLE_LEAVES, SMALL, BATCH),
        target={"us": 12, "torchrl": 8, "cpprb": 4},
        beside=True,
        notes=["tianshou has 7 keys, stable-baselines3 5"],
    )
    indexed = Row(
        "sample_tensordict",
        "the same, TensorDictReplayBuffer",
        {
            "engram": calling(lambda: sampling("engram", "TensorDictReplayBuffer")),
            "torchrl": calling(lambda: sampling("torchrl", "TensorDictReplayBuffer")),
        },
        floor=lambda: floors.gather({**CARTPOLE_LEAVES, "index": 8}, SMALL, BATCH),
        target={"us": 15},
        beside=True,
    )
    yield [small, indexed, _big(quick)]


def _big(quick: bool) -> Row:
    """The buffers of 20 M rows; fewer when the memory for three of them is not there."""
    wanted = CHUNK if quick else BIG
    fits = int(available_memory() * 0.7 / (3 * row_bytes(CARTPOLE_LEAVES)))
    capacity = min(wanted, max(SMALL, fits))

    def sampling(library: str) -> Call:
        rb = big_buffer(library, cartpole_chunks(capacity), capacity, batch=BATCH)
        return lambda: rb.sample(BATCH)

    note = [] if capacity == BIG else [f"{capacity:,} rows instead of {BIG:,}: " + ("--quick" if quick else "memory")]
    return Row(
        "sample_big",
        f"the same from {capacity / 1e6:.3g} M rows in memory",
        {
            "engram": calling(lambda: sampling("engram")),
            "torchrl": calling(lambda: sampling("torchrl")),
        },
        floor=lambda: floors.gather(CARTPOLE_LEAVES, capacity, BATCH),
        target={"own": 1.25},
        own_of="sample_small",
        beside=True,
        warm_up=0 if quick else WARM_UP,
        notes=note,
    )
