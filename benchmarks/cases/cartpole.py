"""Sampling CartPole steps: from a small buffer, with `index`, and from one far larger than any cache.

Each of them also with `reuse_batches=True`; the smallest with an `engram.Generator`, prefetched, and by two threads.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import floors
from benchmarks.cases import Row, calling
from benchmarks.data import CARTPOLE_LEAVES, CHUNK, cartpole, cartpole_chunks, row_bytes
from benchmarks.libraries import (
    OURS,
    Call,
    Cpprb,
    StableBaselines3,
    Tianshou,
    big_buffer,
    buffer,
    replay_buffers,
    steps_of,
)
from benchmarks.machine import available_memory
from benchmarks.timing import at_once

SMALL, BIG, BATCH, THREADS = 100_000, 10_000_000, 256, 2
WARM_UP = 10_000
"""Batches: 2.5 M random rows touch nearly every page of 10 M packed rows."""


def groups(*, quick: bool) -> Iterator[list[Row]]:
    """`sample(256)` of 11 TED keys."""
    data = cartpole(SMALL)
    fixed = steps_of(data)

    def sampling(library: str, kind: str, **settings: Any) -> Call:
        rb = buffer(library, data, batch=BATCH, kind=kind, **settings)
        return lambda: rb.sample(BATCH)

    def ours(key: str, title: str, kind: str, settings: Callable[[], dict[str, Any]], **more: Any) -> Row:
        contenders = {"engram": calling(lambda: sampling("engram", kind, **settings()))}
        return Row(key, title, contenders, floor=lambda: floors.gather(CARTPOLE_LEAVES, SMALL, BATCH), **more)

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
        target={"floor": 1 / 1.6, "torchrl": 8, "cpprb": 4},
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
        target={"floor": 1 / 1.75},
        beside=True,
    )

    def arrays() -> Call:
        rb = buffer("engram", data, batch=BATCH, kind="ReplayBuffer")
        return lambda: rb.sample(BATCH, as_numpy=True)

    def without_release(**more: Any) -> dict[str, Any]:
        return {"reuse_batches": True, "generator": importlib.import_module("engram").Generator(0), **more}

    def tensors() -> None:
        for _ in CARTPOLE_LEAVES:
            torch.empty(BATCH)

    def by_threads(alone: Row, settings: Callable[[], dict[str, Any]]) -> Row:
        return Row(
            f"{alone.key}_at_once",
            f"{alone.title}, a batch of each of {THREADS} threads that sample one buffer",
            {"engram": lambda: at_once(sampling("engram", "ReplayBuffer", **settings()), THREADS)},
            target={"own": 1.0},
            own_of=alone.key,
            floor=lambda: at_once(tensors, THREADS),
            notes=[
                "seconds of all by batches of all: 1x its own is the rate of one thread",
                "the floor: threads that make and drop as many tensors; torch releases the GIL at the end of each",
            ],
        )

    as_numpy = Row(
        "sample_arrays",
        "the same as NumPy arrays, ReplayBuffer",
        {
            "engram": calling(arrays),
            "cpprb": calling(lambda: Cpprb(data).sample(BATCH)),
            "tianshou": calling(lambda: Tianshou(*fixed).sample(BATCH)),
        },
        floor=lambda: floors.gather(CARTPOLE_LEAVES, SMALL, BATCH),
        notes=["tianshou has 7 keys"],
    )
    again = ours(
        "sample_small_reuse",
        "sample(256), 100 k rows, reuse_batches=True",
        "ReplayBuffer",
        lambda: {"reuse_batches": True},
        target={"floor": 1 / 1.4},
        beside=True,
    )
    indexed_again = ours(
        "sample_tensordict_reuse",
        "the same, TensorDictReplayBuffer, reuse_batches=True",
        "TensorDictReplayBuffer",
        lambda: {"reuse_batches": True},
        target={"floor": 1 / 1.65},
        beside=True,
    )
    no_release = ours(
        "sample_generator_reuse",
        "sample(256), 100 k rows, reuse_batches=True, engram.Generator",
        "ReplayBuffer",
        without_release,
        target={"beside": 4},
        beside=True,
    )
    ahead = ours(
        "sample_prefetch",
        "sample(256), 100 k rows, prefetch=1",
        "ReplayBuffer",
        lambda: {"prefetch": 1},
        target={"own": 1.1},
        own_of="sample_small",
    )
    no_release_ahead = ours(
        "sample_generator_prefetch",
        "sample(256), 100 k rows, reuse_batches=True, engram.Generator, prefetch=1",
        "ReplayBuffer",
        lambda: without_release(prefetch=1),
        target={"own": 1.1},
        own_of="sample_generator_reuse",
    )
    rows = [small, indexed, again, indexed_again, no_release, ahead, no_release_ahead]
    threads = [by_threads(small, dict), by_threads(no_release, without_release)]
    yield [*rows, *threads, as_numpy, *_big(quick)]


def _big(quick: bool) -> list[Row]:
    """The buffers of 10 M rows; fewer when the memory for three of them is not there."""
    wanted = CHUNK if quick else BIG
    fits = int(available_memory() * 0.7 / (3 * row_bytes(CARTPOLE_LEAVES)))
    capacity = min(wanted, max(SMALL, fits))

    @functools.cache
    def full(library: str) -> Any:
        return big_buffer(library, cartpole_chunks(capacity), capacity, batch=BATCH)

    def sampling(library: str) -> Call:
        rb = full(library)
        return lambda: rb.sample(BATCH)

    def again() -> Call:
        rb = replay_buffers(OURS).ReplayBuffer(storage=full(OURS).storage, batch_size=BATCH, reuse_batches=True)
        return lambda: rb.sample(BATCH)

    note = [] if capacity == BIG else [f"{capacity:,} rows instead of {BIG:,}: " + ("--quick" if quick else "memory")]
    title, warm_up = f"sample(256) from {capacity / 1e6:.3g} M rows in memory", 0 if quick else WARM_UP
    return [
        Row(
            "sample_big",
            title,
            {"engram": calling(lambda: sampling("engram")), "torchrl": calling(lambda: sampling("torchrl"))},
            floor=lambda: floors.gather(CARTPOLE_LEAVES, capacity, BATCH),
            target={"floor": 1.0},
            own_of="sample_small",
            beside=True,
            warm_up=warm_up,
            notes=note,
        ),
        Row(
            "sample_big_reuse",
            f"{title}, reuse_batches=True",
            {"engram": calling(again)},
            floor=lambda: floors.gather(CARTPOLE_LEAVES, capacity, BATCH),
            target={"floor": 1 / 0.6},
            own_of="sample_small_reuse",
            warm_up=warm_up,
        ),
    ]
