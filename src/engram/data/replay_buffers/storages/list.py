"""A storage of any objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from engram.data.replay_buffers.state.items import SavedItems
from engram.data.replay_buffers.storages.base import Checked, ItemReader, Storage, warn_of_items
from engram.pytree import KeyPath, has_batch_size
from engram.specs.tensors import usable_device
from engram.store.indexing import Selection
from engram.store.items import COPIES, ITEMS_THEMSELVES, ItemCodec, ItemTable
from engram.store.lanes import Lanes
from engram.store.layout import LeafSpec
from engram.store.tables import Rows


class ListStorage(Storage):
    """Keeps any objects in a list; the default storage of a buffer.

    What it keeps are copies. Tensors, TensorDicts and dicts of tensors that have the form of the first item are kept as
    packed rows: each read makes a new object of them, and the default batch of them is gathered at once. All others,
    and with `copy=False` every item, are kept as objects.

    Args:
        max_size: items that fit; without limit if None.
        copy: if False, the items themselves are kept and handed out, not copies of them: who changes one changes what
            is stored. (With an index that is stored along, it is a shallow copy.)
        device: where the tensors of items are moved to when they are written; they stay where they are if None.
        compilable: accepted, without effect.

    Example:
        >>> storage = ListStorage(10)
        >>> rb = ReplayBuffer(storage=storage, collate_fn=lambda items: items)
        >>> rb.extend(["a", {"b": 1}])
        tensor([0, 1])
        >>> rb[:]
        ['a', {'b': 1}]
    """

    _takes_lists: ClassVar[bool] = True

    def __init__(
        self,
        max_size: int | None = None,
        *,
        copy: bool = True,
        device: torch.device | str | None = None,
        checkpointer: Any = None,
        compilable: bool = False,
    ) -> None:
        self._copies = copy
        self._hold_items(max_size, COPIES if copy else ITEMS_THEMSELVES, checkpointer, usable_device(device, "device"))

    def _hold_items(
        self, max_size: int | None, codec: ItemCodec, checkpointer: Any, device: torch.device | None = None
    ) -> None:
        super().__init__(max_size)
        self.device = self._written_to = device
        self._take_table(ItemTable(self._max_size, codec, device))
        self.checkpointer = checkpointer

    def _take_table(self, table: ItemTable) -> None:
        self._table = table
        table.lanes.mutex = self.mutex

    @property
    def item_reader(self) -> ItemReader:
        return _ReaderByOverride(self, self._table) if self._overrides & {"get", "read"} else self._table

    def _copy_arguments(self) -> dict[str, Any]:
        device = {} if self._written_to is None else {"device": str(self._written_to)}
        return {"max_size": self._max_size, **({} if self._copies else {"copy": False}), **device}

    def _limit(self, max_size: int) -> None:
        if self._max_size is not None:
            super()._limit(max_size)
        self._table.limit(max_size)
        self._max_size = max_size

    @property
    def lanes(self) -> Lanes:
        return self._table.lanes

    @property
    def _storage(self) -> list[Any]:
        return self._table.by_slot

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    @property
    def _default_collate(self) -> Callable[[list[Any]], Any]:
        return self._table.codec.collate

    def check(
        self,
        items: Any,
        single: bool,
        time_dim: int = 0,
        index_key: str | None = None,
        index: Tensor | None = None,
    ) -> Checked:
        if not single and not len(self._table) and has_batch_size(items) and len(items.batch_size) > 1:
            warn_of_items(items)
        return Checked(*self._table.fit(items, single, time_dim, index_key, index))

    def append(self, checked: Checked, most: int | None = None) -> Tensor:
        return self._table.append(checked.data, most)

    def replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> None:
        self._prepare_replace(checked, rows, slots)()

    def _prepare_replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> Callable[[], None]:
        return self._table.prepare_replace(checked.steps, checked.data, rows, slots)

    def overwrite(self, slots: Tensor, items: Any, index_key: str | None = None) -> None:
        self._table.overwrite(slots, items, index_key)

    def set(self, cursor: Any, data: Any, index_key: str | None = None, *, set_cursor: bool = True) -> None:
        if isinstance(data, tuple) and isinstance(cursor, range | list | Tensor | np.ndarray):
            data = list(data)  # a sequence of items, not one pytree
        super().set(cursor, data, index_key)

    def _is_single(self, items: Any, env_dims: int = 0) -> bool:
        return self._table.is_single(items)

    def _set(self, selection: Selection, items: Any, index_key: str | None) -> None:
        if selection.shape == () or self._is_single(items):
            items = [items] * len(selection.slots)  # one item replaces all that are indexed
        self.overwrite(selection.slots, items, index_key)

    def read(
        self,
        slots: Tensor,
        shape: tuple[int, ...] | None = None,
        extra: dict[str, Any] | None = None,
        sequences: bool = False,
    ) -> Rows:
        """The items themselves, as a list; `extra` is for batches and ignored."""
        return self._table.read(slots, shape, extra, sequences)

    def _read_selection(self, selection: Selection) -> Rows:
        rows = self._table.own(self._read_rows(selection.slots), selection.slots)
        return Rows(rows.batch[0] if selection.shape == () else rows.batch, absent=rows.absent)

    @property
    def _item_shape(self) -> tuple[int, ...]:
        return self._table.item_shape

    def leaf(self, path: KeyPath) -> LeafSpec | None:
        return self._table.leaf(path)

    def column(self, path: KeyPath, slots: Tensor) -> Tensor:
        return self._table.column(path, slots)

    def _bytes_per_row(self) -> int:
        return self._table.row_bytes

    def _empty(self) -> None:
        """Called before all rows are forgotten, of a child that overrides it as TorchRL's users do."""

    def empty(self, reset_count: bool = True) -> None:
        with self._replacing("empty"):
            super().empty(reset_count)
            self._table.clear()

    # ---- saving ----
    def _default_checkpointer(self) -> Any:
        from engram.data.replay_buffers.checkpointers.objects import ListStorageCheckpointer

        return ListStorageCheckpointer()

    @property
    def saved_form(self) -> SavedItems:
        return SavedItems(self, self._table)


class _ReaderByOverride:
    """Reads the items of a storage whose class has a `get` or `read` of its own, by calling that."""

    def __init__(self, storage: ListStorage, table: ItemTable) -> None:
        self._given, self._copy = storage, table.codec.copy

    def read_batch(self, slots: Tensor, extra: dict[str, Any] | None, sequences: bool) -> Rows:
        return self._given.read(slots, None, extra, sequences)

    def read_own(self, slots: Tensor, sequences: bool, reuse: bool) -> Rows:
        rows = self._given.read(slots, None, None, sequences)
        return rows if rows.batch is None else rows._replace(batch=[self._copy(item) for item in rows.batch])
