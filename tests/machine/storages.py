"""The storages that the machine drives: how to make each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from engram.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, Storage, TensorStorage
from machine.ring import Step, as_data


class StorageKind(NamedTuple):
    """`make(total, envs, index_key, new_folder)` gives an empty one."""

    make: Callable[[int, int, bool, Callable[[], Path]], Storage]
    takes_envs: bool = True
    reopens: bool = False
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
    "list": StorageKind(lambda total, envs, key, folder: ListStorage(total), takes_envs=False, keeps_index=False),
    "memory": StorageKind(lambda total, envs, key, folder: LazyTensorStorage(total, ndim=_ndim(envs))),
    "shared": StorageKind(lambda total, envs, key, folder: LazyTensorStorage(total, ndim=_ndim(envs), shared=True)),
    "temporary": StorageKind(lambda total, envs, key, folder: LazyMemmapStorage(total, ndim=_ndim(envs))),
    "named": StorageKind(
        lambda total, envs, key, folder: LazyMemmapStorage(total, scratch_dir=folder(), ndim=_ndim(envs)), reopens=True
    ),
    "tensors": StorageKind(_tensors),
}
