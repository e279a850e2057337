"""Parts that are wrong by one, planted one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from engram.data import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    Storage,
    TensorStorage,
)
from engram.data.replay_buffers.storages.table import TableStorage

Patch = pytest.MonkeyPatch


class Mutant(NamedTuple):
    """`plant` patches it in; the machine runs with these parts."""

    plant: Callable[[Patch], None]
    storage: str = "memory"
    sampler: str = "random"
    writers: tuple[str, ...] = ("round robin",)
    envs: int = 0


def around(owner: Any, name: str, changed: Callable[..., Any]) -> Callable[[Patch], None]:
    """Calls `changed(original, self, *args)` in place of a method."""
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return changed(lambda *a, **k: original(self, *(a or args), **{**kwargs, **k}), self, *args)

    return lambda patch: patch.setattr(owner, name, method)


def next_row(read: Any, storage: Storage, slots: Tensor, *rest: Any) -> Any:
    """Reads the row behind the one that was asked for."""
    return read((slots + storage_strands(storage)) % max(len(storage), 1), *rest)


def storage_strands(storage: Storage) -> int:
    return storage.lanes.strands if storage.lanes is not None else 1


def last_row_before_the_wrap_is_lost(append: Any, storage: Storage, checked: Any) -> Any:
    """The newest row in the last slot is the one before it."""
    slots = append()
    if storage.max_size in (torch.as_tensor(slots) + 1).tolist() and storage.max_size > 1:
        last = storage.max_size - 1
        storage.overwrite(torch.tensor([last]), storage.get(slice(last - 1, last)))
    return slots


def replaces_the_next(overwrite: Any, storage: Storage, slots: Tensor, *rest: Any) -> Any:
    return overwrite((slots + 1) % len(storage), *rest)


def oldest_is_not_saved(counters: Any, storage: Storage) -> Any:
    saved = counters()
    for lane in saved["lanes"]:
        lane["base"] += lane["published"] > lane["base"]
    return saved


def rolled_when_saved(items: Any, storage: Storage) -> Any:
    saved = items()
    return saved[1:] + saved[:1]


def opened_one_row_short(patch: Patch) -> None:
    """A store that was opened again does not show its newest row."""
    original = LazyMemmapStorage.open.__func__

    def opened(cls: Any, *args: Any, **kwargs: Any) -> Any:
        storage = original(cls, *args, **kwargs)
        lane = storage.lanes.store.lane(0)
        if lane["published"] > lane["first"]:
            storage.lanes.store.begin_restore()
            storage.lanes.store.restore_lane(0, lane["first"], lane["published"] - 1, lane["origin"], [])
            storage.lanes.store.end_restore()
        return storage

    patch.setattr(LazyMemmapStorage, "open", classmethod(opened))


STORAGE_MUTANTS = {
    "a list that reads the next row": Mutant(around(ListStorage, "read", next_row), storage="list"),
    "a list that loses the last row before the wrap": Mutant(
        around(ListStorage, "append", last_row_before_the_wrap_is_lost), storage="list"
    ),
    "a list that is saved from its second row on": Mutant(
        around(ListStorage, "items", rolled_when_saved), storage="list"
    ),
    "memory that reads the next row": Mutant(around(LazyTensorStorage, "read", next_row)),
    "memory that reads the next row of environments": Mutant(around(LazyTensorStorage, "read", next_row), envs=2),
    "memory that loses the last row before the wrap": Mutant(
        around(LazyTensorStorage, "append", last_row_before_the_wrap_is_lost)
    ),
    "shared memory that replaces the next row": Mutant(
        around(LazyTensorStorage, "overwrite", replaces_the_next), storage="shared"
    ),
    "a temporary file whose oldest row is not saved": Mutant(
        around(TableStorage, "counters", oldest_is_not_saved), storage="temporary"
    ),
    "a named file that loses the last row before the wrap": Mutant(
        around(LazyMemmapStorage, "append", last_row_before_the_wrap_is_lost), storage="named"
    ),
    "a named file that is opened one row short": Mutant(opened_one_row_short, storage="named"),
    "tensors that are read one further": Mutant(around(TensorStorage, "read", next_row), storage="tensors"),
    "tensors that replace the next row": Mutant(
        around(TensorStorage, "overwrite", replaces_the_next), storage="tensors"
    ),
}


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


def begins_at_the_second(begin: Any, sampler: Any, lanes: Any) -> None:
    before = sampler.state_dict()["epoch"]
    begin()
    state = sampler.state_dict()
    if before is None and len(lanes) > 1:
        state["epoch"]["position"] = 1
        sampler.load_state_dict(state)
        begin()


SAMPLER_MUTANTS = {
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


def cursor_after_the_wrap(patch: Patch) -> None:
    original = RoundRobinWriter._cursor.fget

    def cursor(self: RoundRobinWriter) -> int:
        return original(self) + (self._storage is not None and self._storage._is_full)

    patch.setattr(RoundRobinWriter, "_cursor", property(cursor))


def returns_the_next_slot(write: Any, writer: Any, storage: Storage, *rest: Any) -> Any:
    return (torch.as_tensor(write()).reshape(-1) + 1) % storage.max_size


def writes_all_but_the_last(write: Any, writer: Any, storage: Storage, items: Any, single: bool, time_dim: int) -> Any:
    return write(storage, items if single or len(items) < 2 else items[:-1], single, time_dim)


def next_index(own: Any, storage: Any, *args: Any) -> Any:
    return own() + 1


WRITER_MUTANTS = {
    "a cursor that is one further after the wrap": Mutant(cursor_after_the_wrap),
    "a writer that returns the next slot": Mutant(around(RoundRobinWriter, "write", returns_the_next_slot)),
    "a writer that leaves out the last row": Mutant(around(RoundRobinWriter, "write", writes_all_but_the_last)),
    "rows that store the index of the next": Mutant(
        around(TableStorage, "_own_index", next_index), writers=("with index",)
    ),
    "an immutable data set that can be emptied": Mutant(
        around(ImmutableDatasetWriter, "allow", lambda allow, writer, what: None), writers=("round robin", "immutable")
    ),
}

MUTANTS = {**STORAGE_MUTANTS, **SAMPLER_MUTANTS, **WRITER_MUTANTS}
