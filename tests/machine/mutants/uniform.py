"""Uniform samplers that are wrong by one."""

from __future__ import annotations

from typing import Any

import torch

from engram.data import RandomSampler, SamplerWithoutReplacement, Storage
from machine.mutants.base import Mutant, around


def newest_of(storage: Storage) -> int:
    generations = storage.lanes.generations(torch.arange(storage.max_size))
    return int(generations.argmax())


def never_the_newest(sample: Any, sampler: Any, storage: Storage, n: int) -> Any:
    slots, info = sample()
    return torch.where(slots == newest_of(storage), (slots + 1) % len(storage), slots), info


def one_further(sample: Any, sampler: Any, storage: Storage, n: int) -> Any:
    slots, info = sample()
    return (slots + 1) % storage.max_size, info


def repeats_its_first(sample: Any, sampler: Any, storage: Storage, n: int) -> Any:
    slots, info = sample()
    slots[-1] = slots[0]
    return slots, info


def one_short(sample: Any, sampler: Any, storage: Storage, n: int) -> Any:
    slots, info = sample()
    return slots[: max(1, len(slots) - 1)], info


def begins_at_the_second(begin: Any, sampler: Any, storage: Storage, lanes: Any) -> None:
    before = sampler.state_dict()["epoch"]
    begin()
    state = sampler.state_dict()
    if before is None and len(lanes) > 1:
        state["epoch"]["position"] = 1
        sampler.load_state_dict(state)
        begin()


UNIFORM_MUTANTS = {
    "random draws that never hit the newest row": Mutant(around(RandomSampler, "sample", never_the_newest)),
    "random draws one further": Mutant(around(RandomSampler, "sample", one_further)),
    "random draws one row short": Mutant(around(RandomSampler, "sample", one_short)),
    "an epoch that repeats a row": Mutant(
        around(SamplerWithoutReplacement, "sample", repeats_its_first), sampler="epoch"
    ),
    "an epoch that leaves out its first row": Mutant(
        around(SamplerWithoutReplacement, "_begin_if_needed", begins_at_the_second), sampler="epoch"
    ),
    "an epoch in order that begins at the second row": Mutant(
        around(SamplerWithoutReplacement, "sample", one_further), sampler="epoch in order"
    ),
    "an epoch that drops one row more than the last batch": Mutant(
        around(SamplerWithoutReplacement, "sample", one_short), sampler="epoch, last dropped"
    ),
}
