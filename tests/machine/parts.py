"""Storages, samplers and writers by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from engram.data import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RoundRobinWriter,
    Storage,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    TensorStorage,
    Writer,
)
from machine.prioritized import PRIORITIZED, PRIORITIZED_SLICES
from machine.queues import QUEUES
from machine.ring import Ring, Step, as_data, value_of
from machine.samplers import UNIFORM
from machine.slices import SLICES


# ---- the storages that the machine drives: how to make each ----
class StorageKind(NamedTuple):
    """`make(total, envs, index_key, new_folder)` gives an empty one."""

    make: Callable[[int, int, bool, Callable[[], Path]], Storage]
    takes_envs: bool = True
    reopens: bool = False
    is_private: bool = False  # in memory that no other process can open
    keeps_index: bool = True  # under "index" in rb[:], where the writer stores it


def _ndim(envs: int) -> int:
    return 2 if envs else 1


def _tensors(total: int, envs: int, index_key: bool, new_folder: Callable[[], Path]) -> Storage:
    """Around tensors that exist, emptied."""
    data = as_data([[Step(0, False, 0)] * max(envs, 1)] * (total // max(envs, 1)), envs)
    data = data.transpose(0, 1).contiguous() if envs else data
    if index_key:
        data["index"] = torch.zeros((*data.shape, 2) if envs else data.shape, dtype=torch.int64)
    storage = TensorStorage(data, ndim=_ndim(envs))
    storage.empty()
    return storage


STORAGES = {
    "list": StorageKind(
        lambda total, envs, key, folder: ListStorage(total), takes_envs=False, is_private=True, keeps_index=False
    ),
    "memory": StorageKind(lambda total, envs, key, folder: LazyTensorStorage(total, ndim=_ndim(envs)), is_private=True),
    "shared": StorageKind(lambda total, envs, key, folder: LazyTensorStorage(total, ndim=_ndim(envs), shared=True)),
    "temporary": StorageKind(lambda total, envs, key, folder: LazyMemmapStorage(total, ndim=_ndim(envs))),
    "named": StorageKind(
        lambda total, envs, key, folder: LazyMemmapStorage(total, scratch_dir=folder(), ndim=_ndim(envs)), reopens=True
    ),
    "tensors": StorageKind(_tensors, is_private=True),
}


# ---- the writers that the machine drives, each with its rule in plain Python ----
class RoundRobinOracle:
    """Behind the newest; in a full storage over the oldest."""

    stores_index = False
    takes_envs = True
    forbids = False  # any change is an error

    def make(self) -> Writer:
        return RoundRobinWriter()

    def write(self, ring: Ring, columns: list[list[Step]]) -> tuple[list[int], set[int]]:
        """Stores columns: the slot of each, -1 for one that is refused, and the slots that were written out of turn."""
        return ring.append(columns), set()


class TensorDictRoundRobinOracle(RoundRobinOracle):
    stores_index = True

    def make(self) -> Writer:
        return TensorDictRoundRobinWriter()


class ImmutableOracle(RoundRobinOracle):
    forbids = True

    def make(self) -> Writer:
        return ImmutableDatasetWriter()


class BestOracle(TensorDictRoundRobinOracle):
    """In a full storage over the lowest, of equal ones that in the first slot; what is not higher is refused."""

    takes_envs = False

    def make(self) -> Writer:
        return TensorDictMaxValueWriter(rank_key="value")

    def write(self, ring: Ring, columns: list[list[Step]]) -> tuple[list[int], set[int]]:
        where = []
        out_of_turn = set()
        for column in columns:
            if len(ring.stored()) < ring.capacity:
                where += ring.append([column])
                continue
            lowest = min(ring.stored(), key=lambda slot: (value_of(ring.step((slot, 0)).n), slot))
            better = value_of(column[0].n) > value_of(ring.step((lowest, 0)).n)
            where.append(lowest if better else -1)
            if better:
                ring.replace_out_of_turn(lowest, column)
                out_of_turn.add(lowest)
        return where, out_of_turn


WRITERS = {
    "round robin": RoundRobinOracle,
    "with index": TensorDictRoundRobinOracle,
    "immutable": ImmutableOracle,
    "best": BestOracle,
}


# ---- all that the machine can be made of ----
SAMPLERS = {**UNIFORM, **PRIORITIZED, **SLICES, **PRIORITIZED_SLICES, **QUEUES}
PLACES = [(name, envs) for name, kind in STORAGES.items() for envs in ((0, 2) if kind.takes_envs else (0,))]
# Writers that store the same, so that one may follow the other.
WRITERS_THAT_FOLLOW = [["round robin", "immutable"], ["with index"], ["best", "with index"]]
WRITERS_OF_QUEUES = ("round robin", "with index")

__all__ = ["PLACES", "SAMPLERS", "STORAGES", "WRITERS", "WRITERS_OF_QUEUES", "WRITERS_THAT_FOLLOW"]
