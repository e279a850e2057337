"""Storages that are wrong by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engram.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, Storage
from engram.data.replay_buffers.state.rows import StoredRows
from engram.store.columnar_rows import ColumnarRows
from engram.store.items import ItemRows
from engram.store.packed_rows import PackedRows
from engram.store.rows import LayoutRows
from machine.mutants.base import Mutant, Patch, around


def next_row(read: Any, table: PackedRows | ItemRows, slots: Tensor, *rest: Any) -> Any:
    """Reads the row behind the one that was asked for."""
    return read((slots + table.lanes.envs) % max(len(table.lanes), 1), *rest)


def next_row_of_columns(read: Any, table: ColumnarRows, slots: Tensor, *rest: Any) -> Any:
    return read((slots + table.lanes.envs) % max(len(table.lanes), 1), *rest)


def last_row_before_the_wrap_is_lost(append: Any, storage: Storage, checked: Any) -> Any:
    """The newest row in the last slot is the one before it."""
    slots = append()
    if storage.max_size in (torch.as_tensor(slots).reshape(-1) + 1).tolist() and storage.max_size > 1:
        last = storage.max_size - 1
        storage.overwrite(torch.tensor([last]), storage.get(slice(last - 1, last)))
    return slots


def replaces_the_next(overwrite: Any, table: LayoutRows, slots: Tensor, *rest: Any) -> Any:
    return overwrite((slots + 1) % len(table.lanes), *rest)


def oldest_is_not_saved(counters: Any, rows: StoredRows) -> Any:
    saved = counters()
    for lane in saved["lanes"]:
        lane["base"] += lane["published"] > lane["base"]
    return saved


def rolled_when_saved(items: Any, table: ItemRows) -> Any:
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
            storage.lanes.store.restore_lane(0, lane["first"], lane["published"] - 1, lane["origin"])
            storage.lanes.store.end_restore()
        return storage

    patch.setattr(LazyMemmapStorage, "open", classmethod(opened))


STORAGE_MUTANTS = {
    "a list that reads the next row": Mutant(around(ItemRows, "_read", next_row), storage="list"),
    "a list that loses the last row before the wrap": Mutant(
        around(ListStorage, "append", last_row_before_the_wrap_is_lost), storage="list"
    ),
    "a list that is saved from its second row on": Mutant(around(ItemRows, "items", rolled_when_saved), storage="list"),
    "memory that reads the next row": Mutant(around(PackedRows, "read", next_row)),
    "memory that reads the next row of environments": Mutant(around(PackedRows, "read", next_row), envs=2),
    "memory that loses the last row before the wrap": Mutant(
        around(LazyTensorStorage, "append", last_row_before_the_wrap_is_lost)
    ),
    "shared memory that replaces the next row": Mutant(
        around(LayoutRows, "overwrite", replaces_the_next), storage="shared"
    ),
    "a temporary file whose oldest row is not saved": Mutant(
        around(StoredRows, "counters", oldest_is_not_saved), storage="temporary"
    ),
    "a named file that loses the last row before the wrap": Mutant(
        around(LazyMemmapStorage, "append", last_row_before_the_wrap_is_lost), storage="named"
    ),
    "a named file that is opened one row short": Mutant(opened_one_row_short, storage="named"),
    "tensors that are read one further": Mutant(around(ColumnarRows, "read", next_row_of_columns), storage="tensors"),
    "tensors that replace the next row": Mutant(around(LayoutRows, "overwrite", replaces_the_next), storage="tensors"),
}
