"""Children of our storages that override our methods: what buffers call of them.

What a `set` hands on, and what a `get` or `read` returns, may have other keys, shapes and dtypes than the buffer's
batches: rows are checked, and the storage made, when they reach the `set` of ours; `leaf` and `column` give the entries
of what `read` returns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engram import pytree
from engram.data.replay_buffers.storages.users import (
    OfStorage,
    UsersStorage,
    comes_first,
    count_steps,
    entry_of,
    leaf_as_read,
    read_by_get,
    read_in_parts,
)
from engram.pytree import KeyPath, to_tensor
from engram.store.items import ItemRows
from engram.store.lanes import Lanes
from engram.store.layout import LeafSpec
from engram.store.rows import NO_STEPS, Checked, ItemReader, Rows, expand_slots
from engram.store.steps import Steps
from engram.store.table import Table


class OuterMethods(OfStorage):
    """What our methods do in a child of one of our storages that overrides `set`, `get`, `read` or `_empty`.

    Buffers call these methods, which call the child's; its own call those of ours, which use the table.
    """

    def __init__(self, table: Table, storage: UsersStorage, own: frozenset[str]) -> None:
        self._table, self._storage, self._own = table, storage, own
        #: Whether rows are written by `set`, as buffers of TorchRL's do it, and read by `get`.
        self.writes_by_set = comes_first(type(storage), "set", {"check", "append"})
        self._reads_by_get = comes_first(type(storage), "get", {"read"})
        # Whether single entries are those of rows as the child reads them.
        self._takes_apart = bool(own & {"get", "read"}) and not own & {"leaf", "column"}

    @property
    def _name(self) -> str:
        return type(self._storage).__name__

    # ---- facts ----
    @property
    def lanes(self) -> Lanes:
        return self._table.lanes

    @property
    def env_shape(self) -> tuple[int, ...]:
        return self._table.rows.env_shape

    # ---- writing ----
    def fit(self, steps: Steps) -> Checked:
        if not self.writes_by_set:
            return self._table.rows.fit(steps)
        n = count_steps(steps)
        if not n:
            raise ValueError(NO_STEPS)
        return Checked(n, steps)  # to be handed to the `set`

    def append(self, checked: Checked, most: int | None = None) -> Tensor | int:
        if type(checked.data) is not Steps:
            return self._table.rows.append(checked, most)
        storage, given = self._storage, checked.data
        n = checked.steps if most is None else min(most, checked.steps)
        with storage.mutex, storage.access.turn(), storage.access.setting_new_rows() as appended:
            steps, data = self._table.lanes.next_slots(n), given.time_first()
            if n < checked.steps:
                data = data[:n] if isinstance(data, list) else pytree.select_rows(data, torch.arange(n, device="cpu"))
            self.set(int(steps[0]) if given.is_single else steps, given._replace(items=data))
            slots = torch.cat([to_tensor(part).reshape(-1) for part in appended]) if appended else steps[:0]
            if len(slots) != n * math.prod(storage.env_shape):
                raise RuntimeError(f"{self._name}.set was given {n} steps: it must hand all of them to super().set")
        return slots

    def set(self, index: Any, steps: Steps) -> None:
        """Calls `set`, which in TorchRL's form does not hand an index key on."""
        storage = self._storage
        access = storage.access
        before, access.index_key = access.index_key, steps.index_key
        try:
            storage.set(index, steps.items)
        finally:
            access.index_key = before

    def replace(self, index: Any, steps: Steps) -> None:
        """Replaces stored rows by `set`."""
        with self._storage.access.setting_stored_rows():
            self.set(index, steps)

    def overwrite(self, slots: Tensor, steps: Steps) -> None:
        if self.writes_by_set and "overwrite" not in self._own:
            self.replace(self._storage.from_slots(slots), steps)
        else:
            self._table.rows.overwrite(slots, steps)

    def expect_sequences(self, by_set: bool) -> None:
        if self.writes_by_set and not by_set:
            raise TypeError(
                f"{self._name}.set is called for rows that follow on others, and this writer puts rows in the place "
                "of any: use another writer, or override check and overwrite of the storage"
            )
        self._table.expect_sequences(by_set)

    def prepare_replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> Callable[[], None]:
        return self._table.rows.prepare_replace(checked, rows, slots)

    # ---- reading ----
    def read(self, slots: Tensor, *how: Any) -> Rows:
        if not self._reads_by_get:
            return self._table.rows.read(slots, *how)
        return read_by_get(self._storage, slots, *how)

    @property
    def item_reader(self) -> ItemReader | None:
        rows = self._table.rows
        if not isinstance(rows, ItemRows) or not self._own & {"get", "read"}:
            return rows.item_reader
        return _ReaderByOverride(self._storage, rows.codec.copy)

    def leaf(self, path: KeyPath) -> LeafSpec | None:
        return leaf_as_read(self._storage, path) if self._takes_apart else self._table.rows.leaf(path)

    def column(self, path: KeyPath, slots: Tensor) -> Tensor:
        if not self._takes_apart:
            return self._table.rows.column(path, slots)
        return read_in_parts(functools.partial(self._column_as_read, path), slots)

    def _column_as_read(self, path: KeyPath, slots: Tensor) -> Tensor:
        storage = self._storage
        batch = storage.read(to_tensor(expand_slots(slots, math.prod(storage.env_shape)))).batch
        if batch is None:  # other processes replace some of them
            return self._table.rows.column(path, slots)
        values = entry_of(batch, path)
        return values.reshape(len(slots), *storage.env_shape, *values.shape[1:])

    def clear(self, reset_count: bool = True) -> None:
        self._storage._empty()
        self._table.rows.clear(reset_count)


class _ReaderByOverride(OfStorage):
    """Reads items by the `read` or `get` of a user's child."""

    def __init__(self, storage: UsersStorage, copied: Callable[[Any], Any]) -> None:
        self._storage, self._copied = storage, copied

    def read_batch(self, slots: Tensor, extra: dict[str, Any] | None, sequences: bool) -> Rows:
        return self._storage.read(slots, None, extra, sequences)

    def read_own(self, slots: Tensor, sequences: bool, reuse: bool) -> Rows:
        rows = self._storage.read(slots, None, None, sequences)
        return rows._replace(batch=[self._copied(item) for item in rows.batch])
