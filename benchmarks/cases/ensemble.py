"""Sampling from two buffers as one, against sampling from one of them; and where both transform what is drawn."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from benchmarks.cases import Row, calling
from benchmarks.cases.resize import PLACES
from benchmarks.data import cartpole
from benchmarks.libraries import SAME_API, Call, buffer, replay_buffers

SMALL, CAPACITY, BATCH, MEMBERS = 10_000, 100_000, 256, 2


def groups(*, quick: bool) -> Iterator[list[Row]]:
    """`sample(256)` of a member and of the ensemble."""
    data = cartpole(SMALL if quick else CAPACITY)

    def member(library: str) -> Call:
        rb = buffer(library, data, batch=BATCH)
        return lambda: rb.sample(BATCH)

    def ensemble(library: str) -> Call:
        made = replay_buffers(library).ReplayBufferEnsemble
        rb = made(*(buffer(library, data, batch=BATCH) for _ in range(MEMBERS)), batch_size=BATCH)
        return lambda: rb.sample(BATCH)

    def transformed(library: str) -> Call:
        scaling = importlib.import_module(PLACES[library]).RewardScaling
        members = [buffer(library, data, batch=BATCH) for _ in range(MEMBERS)]
        for rb in members:
            rb.append_transform(scaling(0.0, 2.0, in_keys=[("next", "reward")]))
        rb = replay_buffers(library).ReplayBufferEnsemble(*members, batch_size=BATCH)
        return lambda: rb.sample(BATCH)

    yield [
        Row(
            "ensemble_member",
            f"sample(256) of one member, {len(data) // 1000} k rows",
            {name: calling(lambda name=name: member(name)) for name in SAME_API},
        ),
        Row(
            "ensemble",
            f"ensemble of {MEMBERS}: sample(256) as [{MEMBERS}, {BATCH // MEMBERS}]",
            {name: calling(lambda name=name: ensemble(name)) for name in SAME_API},
            target={"own": 2.5},
            own_of="ensemble_member",
        ),
        Row(
            "ensemble_transformed",
            f"the same, RewardScaling in each of the {MEMBERS}",
            {name: calling(lambda name=name: transformed(name)) for name in SAME_API},
            target={"torchrl": 20},
        ),
    ]
