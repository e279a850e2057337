"""Prioritised replay: draws with weights, updates, the loop of both, and what the index costs an append."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks import floors
from benchmarks.cases import Make, Row, calling
from benchmarks.data import CARTPOLE_LEAVES, CHUNK, cartpole, cartpole_chunks, flat_numpy
from benchmarks.libraries import OURS, SAME_API, Call, Cpprb, CpprbPrioritized, big_buffer, replay_buffers

Calls = dict[str, Callable[[Any], Call]]
"""For each library: from its full buffer to the call to measure."""

ALPHA, BETA = 0.6, 0.4
PEERS = ("cpprb", "torchrl")
BATCH, APPENDED, APPENDS_A_SAMPLE = 256, 64, 4
SMALL, SIZES = 100_000, (1_000_000, 10_000_000)
MOST_OF_FLOOR = {
    "sample": {SIZES[0]: 1.0, SIZES[1]: 1.3},
    "sample_reuse": {SIZES[0]: 1.1, SIZES[1]: 1.2},
    "update": {SIZES[0]: 2.7, SIZES[1]: 2.0},
    "loop": {SIZES[0]: 1.35, SIZES[1]: 1.5},
}
"""How many times the floor each call may take, by the number of rows."""
PLAIN, PRIORITIZED = "TensorDictReplayBuffer", "TensorDictPrioritizedReplayBuffer"
UPDATES = 64
"""Batches of indices and priorities made beforehand, taken in turn."""


def groups(*, quick: bool) -> Iterator[list[Row]]:
    """Draws and updates at each size, then appends."""
    for capacity in (SMALL,) if quick else SIZES:
        yield _rows(capacity)
    yield _appends(SMALL if quick else SIZES[0])


def words(capacity: int) -> str:
    """A number of rows as the tables write it."""
    return f"{capacity / 1e6:g} M rows" if capacity >= 1_000_000 else f"{capacity // 1000} k rows"


def _rows(capacity: int) -> list[Row]:
    held = functools.cache(lambda library: _full(library, capacity))
    floor = functools.cache(lambda: floors.Priorities(CARTPOLE_LEAVES, capacity, BATCH))

    def row(key: str, work: str, calls: Calls, native: Make) -> Row:
        contenders = {name: calling(lambda name=name: calls[name](held(name))) for name in calls}
        most = MOST_OF_FLOOR[key].get(capacity)
        target = {"floor": 1 / most} if most else {}
        if key == "sample":
            target |= dict.fromkeys(PEERS, 6)
        title = f"{work}, {words(capacity)}"
        return Row(f"prioritized_{key}_{capacity}", title, contenders, native, target, beside=capacity <= SIZES[0])

    indices = torch.randint(0, capacity, (UPDATES, BATCH))
    priorities = torch.rand(UPDATES, BATCH)
    return [
        row("sample", "prioritised sample(256) with weights", _sampling(), lambda: floor().draw),
        row("sample_reuse", "the same, reuse_batches=True", {OURS: _reusing}, lambda: floor().draw),
        row("update", "update_priority of 256", _updating(indices, priorities), lambda: floor().update),
        row(
            "loop",
            "both: sample(256), update what was drawn",
            _looping(priorities),
            lambda: lambda n: floor().draw(n) + floor().update(n),
        ),
    ]


def _full(library: str, capacity: int) -> Any:
    """A full buffer whose rows all have priorities of their own."""
    if library == "cpprb":
        theirs = CpprbPrioritized(cartpole_chunks(capacity), capacity, alpha=ALPHA, beta=BETA)
        for rows in _pieces(capacity):
            theirs.rb.update_priorities(rows.numpy(), torch.rand(len(rows)).numpy())
        return theirs
    rb = big_buffer(library, cartpole_chunks(capacity), capacity, batch=BATCH, kind=PRIORITIZED, parts=_settings)
    for rows in _pieces(capacity):
        rb.update_priority(rows, torch.rand(len(rows)))
    return rb


def _settings(_: Any) -> dict[str, Any]:
    return {"alpha": ALPHA, "beta": BETA}


def _pieces(capacity: int) -> Iterator[torch.Tensor]:
    yield from torch.arange(capacity).split(CHUNK)


def _sampling() -> Calls:
    return {name: lambda rb: lambda: rb.sample(BATCH) for name in (*SAME_API, "cpprb")}


def _reusing(full: Any) -> Call:
    """Draws from the rows and priorities of a full buffer, by a second one."""
    made = replay_buffers(OURS).TensorDictReplayBuffer
    rb = made(storage=full.storage, sampler=full.sampler, batch_size=BATCH, reuse_batches=True)
    return lambda: rb.sample(BATCH)


def _updating(indices: torch.Tensor, priorities: torch.Tensor) -> Calls:
    def ours(rb: Any) -> Call:
        batches = itertools.cycle(zip(indices.unbind(), priorities.unbind(), strict=True))
        return lambda: rb.update_priority(*next(batches))

    def cpprb(theirs: Any) -> Call:
        batches = itertools.cycle(zip(indices.numpy().astype(np.uint64), priorities.numpy(), strict=True))
        return lambda: theirs.rb.update_priorities(*next(batches))

    return {**dict.fromkeys(SAME_API, ours), "cpprb": cpprb}


def _looping(priorities: torch.Tensor) -> Calls:
    """What training does; an update that leaves its work to the next draw gains nothing here."""

    def ours(rb: Any) -> Call:
        errors = itertools.cycle(priorities.unbind())
        return lambda: rb.update_priority(rb.sample(BATCH)["index"], next(errors))

    def cpprb(theirs: Any) -> Call:
        errors = itertools.cycle(priorities.numpy())
        return lambda: theirs.rb.update_priorities(theirs.sample(BATCH)["indexes"], next(errors))

    return {**dict.fromkeys(SAME_API, ours), "cpprb": cpprb}


def _appends(capacity: int) -> list[Row]:
    """The same calls on a plain and on a prioritised buffer."""
    steps = cartpole(APPENDED)
    held = functools.cache(lambda library, kind: _appended(library, kind, capacity))
    verbs = {
        "extend": ("extend(64)", 1, False),
        "cycle": (f"{APPENDS_A_SAMPLE} x extend(64) and sample(256)", APPENDS_A_SAMPLE, True),
    }

    def contenders(kind: str, times: int, sampled: bool) -> dict[str, Make]:
        return {
            name: calling(lambda name=name: _appending(name, held(name, kind), steps, times, sampled))
            for name in (*SAME_API, "cpprb")
        }

    rows = []
    for verb, (title, times, sampled) in verbs.items():
        plain, prioritized = f"plain_{verb}", f"prioritized_{verb}"
        rows += [
            Row(plain, f"{title}, plain, {words(capacity)}", contenders(PLAIN, times, sampled)),
            Row(
                prioritized,
                f"{title}, prioritised, {words(capacity)}",
                contenders(PRIORITIZED, times, sampled),
                target={"own": 1.3},
                own_of=plain,
            ),
        ]
    return rows


def _appended(library: str, kind: str, capacity: int) -> Any:
    if kind == PRIORITIZED:
        return _full(library, capacity)
    if library == "cpprb":
        return Cpprb(TensorDict.cat([chunk.clone() for chunk in cartpole_chunks(capacity)]))
    return big_buffer(library, cartpole_chunks(capacity), capacity, batch=BATCH, kind=kind)


def _appending(library: str, held: Any, steps: TensorDict, times: int, sampled: bool) -> Call:
    if library == "cpprb":
        arrays, rb = flat_numpy(steps), held.rb
        extend = functools.partial(rb.add, **arrays)
    else:
        rb = held
        extend = functools.partial(rb.extend, steps)

    def call() -> None:
        for _ in range(times):
            extend()
        if sampled:
            rb.sample(BATCH)

    return call
