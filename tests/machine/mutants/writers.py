"""Writers that are wrong by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engram._native import FIRST_REPLACED
from engram.data import ImmutableDatasetWriter, RoundRobinWriter, Storage, TensorDictMaxValueWriter
from engram.store.columnar_rows import ColumnarRows
from engram.store.items import ItemRows
from engram.store.lanes import Lanes
from engram.store.packed_rows import PackedRows
from engram.store.rows import OwnIndex
from machine.mutants.base import Mutant, Patch, around


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


def replaces_the_second_lowest(following: Any, writer: Any, storage: Storage) -> Any:
    """The lowest counts as the highest."""
    heap = following()
    if 1 < len(storage) == storage.max_size:
        lowest = storage.column(("value",), torch.arange(len(storage))).argmin()
        heap.put(lowest.reshape(1), torch.tensor([torch.inf]), "sum")
    return heap


def ranks_one_higher(values: Any, writer: Any, items: Any, single: bool) -> Any:
    """So an item of the lowest rank replaces the lowest."""
    return values() + 0.5


def writes_beside_the_lowest(
    store: Any, writer: Any, storage: Storage, checked: Any, slots: Tensor, appended: int, rows: Any, targets: Any
) -> None:
    if targets is not None:
        targets = (torch.as_tensor(targets).clone() + 1) % storage.max_size
    store(storage, checked, slots, appended, rows, targets)


def no_sequences(prepare: Any, table: Any, slots: Tensor, plan: Any, rows: Tensor, first: int) -> Any:
    return prepare(slots, plan, rows, 0)


def keeps_sequences(append: Any, table: ItemRows, data: Any, *most: Any) -> Any:
    before = dict(table._sequences)
    slots = append()
    table._sequences.update(before)
    return slots


WRITER_MUTANTS = {
    "a cursor that is one further after the wrap": Mutant(cursor_after_the_wrap),
    "a writer that returns the next slot": Mutant(around(RoundRobinWriter, "write", returns_the_next_slot)),
    "a writer that leaves out the last row": Mutant(around(RoundRobinWriter, "write", writes_all_but_the_last)),
    "rows that store the index of the next": Mutant(around(OwnIndex, "of", next_index), writers=("with index",)),
    "an immutable data set that can be emptied": Mutant(
        around(ImmutableDatasetWriter, "check_mutable", lambda check, writer, operation: None),
        writers=("round robin", "immutable"),
    ),
    "a heap that replaces the second lowest": Mutant(
        around(TensorDictMaxValueWriter, "_following", replaces_the_second_lowest), writers=("best",)
    ),
    "a heap that gives way to equal ranks": Mutant(
        around(TensorDictMaxValueWriter, "_values", ranks_one_higher), writers=("best",)
    ),
    "rows that replace others without a sequence of their own": Mutant(
        around(PackedRows, "prepare_overwrite", no_sequences),
        storage="named",
        writers=("best",),
    ),
    "columns that replace others without a sequence of their own": Mutant(
        around(ColumnarRows, "prepare_overwrite", no_sequences),
        storage="tensors",
        writers=("best",),
    ),
    "items that replace others without a sequence of their own": Mutant(
        around(Lanes, "reserve_sequences", lambda reserve, lanes, n: 0), storage="list", writers=("best",)
    ),
    "sequences that are given twice": Mutant(
        around(Lanes, "reserve_sequences", lambda reserve, lanes, n: FIRST_REPLACED), writers=("best",)
    ),
    "sequences that stay when a row is appended over theirs": Mutant(
        around(ItemRows, "append", keeps_sequences), storage="list", writers=("best", "with index")
    ),
    "a heap that writes beside the lowest": Mutant(
        around(TensorDictMaxValueWriter, "_store", writes_beside_the_lowest), writers=("best",)
    ),
}
