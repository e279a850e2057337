"""Priorities that are wrong by one."""

from __future__ import annotations

from typing import Any

import torch

from engram.data import PrioritizedSampler, PrioritizedSliceSampler, Storage
from machine.mutants.base import Mutant, around
from machine.mutants.uniform import one_further


def weights_of_the_neighbour(sample: Any, sampler: Any, storage: Storage, n: int) -> Any:
    slots, info = sample()
    return slots, {**info, "priority_weight": info["priority_weight"].roll(1)}


def one_further_is_updated(update: Any, sampler: Any, index: Any, *rest: Any, **more: Any) -> None:
    update((torch.as_tensor(index) + 1) % len(more["storage"]), *rest, **more)


def newest_has_half(sample: Any, sampler: Any, storage: Storage, n: int) -> Any:
    newest = storage.lanes.generations(torch.arange(storage.max_size)).argmax()
    sampler.update_priority(newest, sampler.priorities(newest, storage=storage) / 2, storage=storage)
    return sample()


PRIORITY_MUTANTS = {
    "weights of the neighbour": Mutant(
        around(PrioritizedSampler, "sample", weights_of_the_neighbour), sampler="priorities"
    ),
    "priorities that go to the next row": Mutant(
        around(PrioritizedSampler, "update_priority", one_further_is_updated), sampler="priorities"
    ),
    "draws by priority that are one further": Mutant(
        around(PrioritizedSampler, "sample", one_further), sampler="priorities as they are"
    ),
    "the newest row has half of its priority": Mutant(
        around(PrioritizedSampler, "sample", newest_has_half), sampler="priorities as they are"
    ),
    "slices with the weights of their neighbours": Mutant(
        around(PrioritizedSliceSampler, "sample", weights_of_the_neighbour), sampler="slices by priority"
    ),
    "slices by priority that start one further": Mutant(
        around(PrioritizedSliceSampler, "sample", one_further), sampler="short slices by priority"
    ),
}
