"""Slices of trajectories: 8 x 32 steps from ever more rows, and what the index of episodes costs an append."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import floors
from benchmarks.cases import Row, calling
from benchmarks.cases.prioritized import words
from benchmarks.data import CARTPOLE_LEAVES, cartpole, cartpole_chunks
from benchmarks.libraries import SAME_API, Call, big_buffer

BATCH, SLICES, EPISODE = 256, 8, 200
APPENDED, APPENDS_A_SAMPLE = 64, 16
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
MOST_FOR_PEERS = 1_000_000
WARM_UP = 40_000
"""Batches of the largest, which touch all its pages: those that were not read lately are slow in a virtual machine."""
TRAJECTORY = ("collector", "traj_ids")


def groups(*, quick: bool) -> Iterator[list[Row]]:
    """`sample(256)` as 8 slices of 32 from episodes of 200, then appends."""
    yield [_row(capacity) for capacity in (SIZES[:2] if quick else SIZES)]
    yield _appends(SIZES[1] if quick else SIZES[2])


def _parts(cached: bool) -> Callable[[Any], dict[str, Any]]:
    def made(data: Any) -> dict[str, Any]:
        return {"sampler": data.SliceSampler(num_slices=SLICES, traj_key=TRAJECTORY, cache_values=cached)}

    return made


def _full(library: str, capacity: int, parts: Callable[[Any], dict[str, Any]]) -> Any:
    chunks = cartpole_chunks(capacity, episode=EPISODE)
    return big_buffer(library, chunks, capacity, batch=BATCH, parts=parts)


def _row(capacity: int) -> Row:
    def sampling(library: str, cached: bool = False) -> Call:
        rb = _full(library, capacity, _parts(cached))
        return lambda: rb.sample(BATCH)

    contenders = {"engram": calling(lambda: sampling("engram"))}
    if capacity <= MOST_FOR_PEERS:
        contenders["torchrl"] = calling(lambda: sampling("torchrl", cached=True))
    smallest = capacity == SIZES[0]
    return Row(
        f"slices_{capacity}",
        f"sample(256) as 8 slices of 32, {words(capacity)}",
        contenders,
        floor=lambda: floors.Table(CARTPOLE_LEAVES, capacity, BATCH).runs(BATCH // SLICES),
        target={} if smallest else {"own": 1.3},
        own_of=None if smallest else f"slices_{SIZES[0]}",
        beside=capacity == SIZES[1],
        warm_up=WARM_UP if capacity == SIZES[-1] else 0,
        notes=["torchrl: cache_values=True, which holds until the next write; without it see the appends"]
        if smallest
        else [],
    )


def _appends(capacity: int) -> list[Row]:
    """Writes with a batch now and then: uniform rows need no index, slices need one that is up to date."""
    steps = cartpole(APPENDED, episode=APPENDED)
    title = f"{APPENDS_A_SAMPLE} x extend(64) and sample(256), {words(capacity)}"

    def cycle(library: str, parts: Callable[[Any], dict[str, Any]]) -> Call:
        rb = _full(library, capacity, parts)

        def call() -> None:
            for _ in range(APPENDS_A_SAMPLE):
                rb.extend(steps)
            rb.sample(BATCH)

        return call

    def contenders(parts: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {name: calling(lambda name=name: cycle(name, parts)) for name in SAME_API}

    return [
        Row("appends_plain", f"{title}, uniform rows", contenders(lambda _: {})),
        Row(
            "appends_slices",
            f"{title}, 8 slices of 32",
            contenders(_parts(cached=False)),
            target={"own": 1.3},
            own_of="appends_plain",
        ),
    ]
