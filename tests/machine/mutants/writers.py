"""Writers that are wrong by one."""

from __future__ import annotations

from typing import Any

import torch

from engram.data import ImmutableDatasetWriter, RoundRobinWriter, Storage
from engram.data.replay_buffers.storages.table import TableStorage
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
