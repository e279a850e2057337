"""Stored steps as `rb[...]` names and changes them: of several environments, with time at the buffer's dimension."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engram.data.replay_buffers.buffers.conditional import kept_entries
from engram.pytree import KeyPath, key_path, move_dim, set_existing, to_tensor
from engram.store.indexing import select, stored_slots, to_slots
from engram.store.steps import Steps

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage


def is_int(index: Any) -> bool:
    """Whether an index names one step."""
    return hasattr(index, "__index__") and not (isinstance(index, Tensor) and index.ndim)


def as_index(index: Any) -> Any:
    """An index as users write it; of `(i,)` what is in it, as for arrays."""
    return index[0] if isinstance(index, tuple) and len(index) == 1 else index


def grid_index(storage: Storage, time_dim: int, index: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Time and environment of each step that an index of several dimensions means: as `rb[:]` has them.

    Raises IndexError where it means none.
    """
    if not storage.initialized:
        raise IndexError(f"index {index!r:.80} has not been written: the storage is empty; extend it first")
    slots = stored_slots(storage.lanes.store).reshape(-1, *storage.env_shape).movedim(0, time_dim)
    try:
        chosen: Tensor = slots[index]
    except (IndexError, TypeError, ValueError, OverflowError) as error:
        raise IndexError(
            f"{index!r:.80} does not index the stored steps {list(slots.shape)}: {error}; nothing was written"
        ) from error
    time_and_env = storage.from_slots(chosen.reshape(-1))
    assert isinstance(time_and_env, tuple)
    return tuple(part.reshape(chosen.shape) for part in time_and_env)


def change_entries(
    storage: Storage, time_dim: int, values: Mapping[Any, Any], index: Any, index_key: str | None
) -> None:
    """Sets some entries of the stored steps at an index. The caller has the storage alone."""
    index = as_index(index)
    access, along_time = storage.access, storage.ndim > 1 and not is_int(index)
    if along_time and isinstance(index, tuple) and len(index) > 1:
        index, along_time = grid_index(storage, time_dim, index), False
    rows = access.get_to_write(storage, index)
    if along_time:
        rows = move_dim(rows, 0, time_dim)
    for key, value in values.items():
        set_existing(rows, key, value)
    if along_time:
        rows = move_dim(rows, time_dim, 0)
    kept: Mapping[int, frozenset[KeyPath]] = {}
    if access.writes_as_read:
        slots, shape = select(storage.lanes.store, index, storage.env_shape)
        changed = [set(map(key_path, values))] * len(slots)
        kept = kept_entries(slots, rows if shape else [rows], len(shape), changed)
    with access.keeping(kept):
        access.assign(index, Steps(rows, index_key=index_key))


def in_index_order(storage: Storage, time_dim: int, index: Any, priority: Any) -> Any:
    """Priorities in the form of data of several environments as one for each step of an index, where they are."""
    ndim, env_shape = storage.ndim, storage.env_shape
    envs = math.prod(env_shape)
    if not isinstance(index, Tensor) or index.ndim != 2 or index.shape[-1] != ndim or not env_shape:
        return priority
    values = to_tensor(priority)
    if values.ndim != ndim or values.numel() != len(index) or len(values) == len(index):
        return priority
    values = values.movedim(time_dim, 0)
    slots = to_slots(index, env_shape, storage.max_size or 0)
    whole_steps = tuple(values.shape[1:]) == env_shape
    if whole_steps:
        by_step = slots.reshape(-1, envs)
        whole_steps = torch.equal(by_step, by_step[:, :1] // envs * envs + torch.arange(envs, device="cpu"))
    if not whole_steps:
        # Of a part of the batch, or in another order, nobody knows which priority is of which step.
        raise ValueError(
            f"priorities of shape {list(np.shape(priority))} for {len(index)} steps of environments "
            f"{list(env_shape)}: in the form of data they belong to an index as `extend` returned it, whole time "
            "steps with all environments of each. Nothing was changed"
        )
    return values.reshape(-1)
