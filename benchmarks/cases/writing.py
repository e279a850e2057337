"""Writing CartPole steps: 64 at a time, one at a time in both forms that people have them in, and lists of items."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks import floors
from benchmarks.cases import Row, calling
from benchmarks.data import CARTPOLE_LEAVES, cartpole, flat_numpy
from benchmarks.libraries import (
    SAME_API,
    Call,
    Cpprb,
    StableBaselines3,
    Tianshou,
    buffer,
    replay_buffers,
    stack_dicts,
    steps_of,
)

CAPACITY, BATCH = 100_000, 64


def groups(*, quick: bool) -> Iterator[list[Row]]:
    """`extend(64)` and `add`."""
    data = cartpole(CAPACITY)
    fixed = steps_of(data)
    batch, step = data[:BATCH].clone(), data[0].clone()
    arrays = {key: value[0] for key, value in flat_numpy(data).items()}
    nested = _nested(step)

    def extending(library: str) -> Call:
        rb = buffer(library, data, batch=BATCH)
        return lambda: rb.extend(batch)

    def adding(library: str) -> Call:
        rb = buffer(library, data, batch=BATCH)
        return lambda: rb.add(step)

    def adding_numpy(library: str) -> Call:
        if library == "torchrl":  # it takes such a step only as a TensorDict
            rb = buffer(library, data, batch=BATCH)
            return lambda: rb.add(TensorDict(nested))
        rb = buffer(library, data.to_dict(), batch=BATCH)
        return lambda: rb.add(nested)

    def adding_cpprb() -> Call:
        rb = Cpprb(data).rb
        return lambda: rb.add(**arrays)

    yield [
        Row(
            "extend",
            "extend(64)",
            {
                "engram": calling(lambda: extending("engram")),
                "torchrl": calling(lambda: extending("torchrl")),
                "cpprb": calling(lambda: Cpprb(data).extend(batch)),
                "tianshou": calling(lambda: Tianshou(*fixed).extend(BATCH)),
                "stable-baselines3": calling(lambda: StableBaselines3(*fixed, envs=BATCH).add()),
            },
            floor=lambda: floors.scatter(CARTPOLE_LEAVES, CAPACITY, BATCH),
            target={"floor": 1 / 1.6},
            beside=True,
            notes=["tianshou and stable-baselines3: one step of each of 64 environments"],
        ),
        Row(
            "add_tensordict",
            "add, TensorDict",
            {
                "engram": calling(lambda: adding("engram")),
                "torchrl": calling(lambda: adding("torchrl")),
            },
            floor=lambda: floors.scatter(CARTPOLE_LEAVES, CAPACITY, 1),
            beside=True,
        ),
        Row(
            "add_numpy",
            "add, dict of numpy",
            {
                "engram": calling(lambda: adding_numpy("engram")),
                "torchrl": calling(lambda: adding_numpy("torchrl")),
                "cpprb": calling(adding_cpprb),
                "tianshou": calling(lambda: Tianshou(*fixed).add()),
                "stable-baselines3": calling(lambda: StableBaselines3(*fixed).add()),
            },
            floor=lambda: floors.scatter(CARTPOLE_LEAVES, CAPACITY, 1),
            beside=True,
            notes=["torchrl: through TensorDict(...), which it needs; tianshou: a Batch of 6 keys"],
        ),
    ]
    yield _lists()


def _lists() -> list[Row]:
    """Items one by one: into packed rows, and into a list storage, which copies them once and keeps them packed."""
    items = [{"a": torch.randn(4), "b": torch.randn(4), "r": torch.randn(1)} for _ in range(BATCH)]
    leaves = {"a": 16, "b": 16, "r": 4}

    def held(library: str, storage: str) -> Any:
        data = replay_buffers(library)
        more = {"collate_fn": stack_dicts} if library == "torchrl" and storage == "ListStorage" else {}
        rb = data.ReplayBuffer(storage=getattr(data, storage)(CAPACITY // 5), batch_size=BATCH, **more)
        for _ in range(100):
            rb.extend(items)
        return rb

    def extending(library: str, storage: str) -> Call:
        rb = held(library, storage)
        return lambda: rb.extend(items)

    def sampling(library: str) -> Call:
        rb = held(library, "ListStorage")
        return lambda: rb.sample(BATCH)

    rows = [
        Row(
            f"extend_items_{key}",
            f"extend of a list of {BATCH} dicts of 3 tensors, {storage}",
            {name: calling(lambda name=name, storage=storage: extending(name, storage)) for name in SAME_API},
            floor=lambda: floors.scatter(leaves, CAPACITY, BATCH),
            target={"torchrl": 3.5 if key == "list" else 8},
        )
        for key, storage in {"memory": "LazyTensorStorage", "list": "ListStorage"}.items()
    ]
    rows[1].notes.append("torchrl keeps references: no tensor is copied")
    return [
        *rows,
        Row(
            "sample_items",
            f"sample({BATCH}) of the same ListStorage, stacked",
            {name: calling(lambda name=name: sampling(name)) for name in SAME_API},
            floor=lambda: floors.gather(leaves, CAPACITY, BATCH),
            target={"torchrl": 10},
        ),
        *_collated(),
    ]


FIRST_FIGURE = 128
"""Items of a batch, as in the figure of the first proposal of such buffers."""


def _collated() -> list[Row]:
    """Lists of items that a collate function of the user's own makes a batch of: each is to be the function's own."""
    n = FIRST_FIGURE
    values = torch.rand(n, 4)
    kinds: dict[str, tuple[list[Any], Any]] = {
        "tensors, torch.stack": (list(values), torch.stack),
        "tensors, a function": (list(values), lambda items: torch.stack(items)),
        "dicts, a function": ([{"a": row, "b": row, "c": row[:1]} for row in values], stack_dicts),
    }

    def sampling(library: str, items: list[Any], collate: Any) -> Call:
        data = replay_buffers(library)
        rb = data.ReplayBuffer(storage=data.ListStorage(1_000), batch_size=n, collate_fn=collate)
        rb.extend(items)
        return lambda: rb.sample()

    return [
        Row(
            f"sample_collated_{key.split()[0].strip(',')}_{number}",
            f"sample({n}) of a ListStorage of {key}",
            {name: calling(lambda name=name, kind=kind: sampling(name, *kind)) for name in SAME_API},
            notes=["torchrl hands out the stored items: a function that changes them changes what is stored"],
        )
        for number, (key, kind) in enumerate(kinds.items())
    ]


def _nested(step: TensorDict) -> dict[str, object]:
    """One step as nested dicts of numpy values."""
    return {key: _nested(value) if isinstance(value, TensorDict) else value.numpy() for key, value in step.items()}
