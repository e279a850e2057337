"""Items of one form as packed rows: tensors, TensorDicts, tensorclasses or dicts of tensors. Others stay objects."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

import engram._native as _native
from engram.pytree import is_tensorclass, repeat_per_step
from engram.store.layout import RowLayout

#: Stands in a list for an item that is a row.
ROW = object()


class ItemRows:
    """The rows of items of one form, by slot: copied in, and built anew whenever they are read.

    Args:
        item: has the form.
        max_size: the number of slots; None: no limit is known.

    Raises:
        ValueError: no item of this form can be built again from a row (`can_hold`).
    """

    def __init__(self, item: Any, max_size: int | None) -> None:
        if not self.can_hold(item):
            raise ValueError(f"a {type(item).__name__} of this form stays an object")
        self._cls = None if type(item) in (Tensor, TensorDict, dict) else type(item)
        self._has_keys = self._cls is None and type(item) is not Tensor
        item = self._inside(item)
        self.layout = RowLayout.of(item, 0)
        if not self.layout.plain:
            raise ValueError("this tensordict builds its objects otherwise: all items stay objects")
        self.rows = _native.ItemRows(self.layout.codec_for(_device(item)), ROW, max_size or 0)

    @staticmethod
    def can_hold(item: Any, *, batch: bool = False) -> bool:
        """Whether items of this form can be rows: plain CPU tensors, and TensorDicts, tensorclasses and dicts of them.

        Their dimensions have no names; that of a `batch` of them may have one.
        """
        devices = set[Any]()
        if type(item) not in (Tensor, TensorDict, dict):
            if not is_tensorclass(item) or type(item._tensordict) is not TensorDict or item._non_tensordict:
                return False
            item = item._tensordict
        return _is_plain(item, devices, int(batch)) == _TENSORS and len(devices) <= 1

    def look(
        self, items: Any, *, single: bool, index_key: str | None = None, batch: bool = False
    ) -> NewItemRows | None:
        """The rows of a list of items, of one (`single`), or of a `batch` of them; None: one is of another form.

        With `index_key` the items are to store their own index there (`NewItemRows.set_index`).
        """
        own = None
        if index_key is not None and (self._has_keys or index_key in self._fields):  # others store no index
            own = self._own_leaf(index_key)
            if own is None:
                return None
        if self._cls is not None:
            each = [items] if single or batch else items
            if type(each) is not list or not all(type(item) is self._cls and not item._non_tensordict for item in each):
                return None
            items = items._tensordict if single or batch else [item._tensordict for item in items]
        rows = self.rows.look([items] if single else items, batch, own)
        return None if rows is None else NewItemRows(self, rows, own)

    @property
    def _fields(self) -> list[str]:
        return [] if self._cls is None else [field.name for field in dataclasses.fields(self._cls)]

    def _inside(self, item: Any) -> Any:
        return item if self._cls is None else item._tensordict

    def _outside(self, built: Any) -> Any:
        return built if self._cls is None else self._cls._from_tensordict(built)

    def _own_leaf(self, key: str) -> int | None:
        numbers = [k for k, leaf in enumerate(self.layout.leaves) if leaf.path == (key,)]
        return numbers[0] if numbers and self.layout.codec.holds_index(numbers[0]) else None

    def gather(self, items: list[Any], slots: Tensor, extra: dict[str, Any] | None) -> Any:
        """The items in these slots (int64 [n]) as one new batch, with these entries if they are no tensorclass.

        None: one of them is no row.
        """
        if extra and self.layout.within:
            extra = {key: repeat_per_step(value, 1, self.layout.within) for key, value in extra.items()}
        batch = self.rows.gather(items, slots, extra if self._cls is None else None)  # a class may have no such fields
        return None if batch is None else self._outside(batch)

    def item(self, slot: int) -> Any:
        """A new item of the row in a slot."""
        return self._outside(self.rows.item(slot))

    def new_item(self, rows: _native.NewItemRows, i: int) -> Any:
        """A new item of a row that is not stored yet."""
        return self._outside(self.rows.new_item(rows, i))

    def pick(self, items: list[Any], slots: list[int], reuse: bool = False) -> list[Any]:
        """What a list has in these slots, rows as new items.

        With `reuse` small items may have tensors of earlier ones that nobody has any more (`why_not_reusable`).
        """
        picked = self.rows.pick(items, slots, reuse)
        if self._cls is None:
            return picked
        stored = list.__getitem__
        pairs = zip(slots, picked, strict=True)
        return [self._outside(item) if stored(items, slot) is ROW else item for slot, item in pairs]


class NewItemRows:
    """Copies of items that are about to be stored, as rows; or a part of them."""

    __slots__ = ("_first", "_n", "_own", "_rows", "of")

    def __init__(self, of: ItemRows, rows: _native.NewItemRows, own: int | None, first: int = 0, n: int = -1) -> None:
        self.of = of
        self._rows = rows
        self._own = own
        self._first = first
        self._n = len(rows) if n < 0 else n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: Any) -> Any:
        """One as a new item; a slice of them as such rows."""
        if not isinstance(index, slice):
            return self.of.new_item(self._rows, self._first + range(self._n)[index])
        if index == slice(None):
            return self
        part = range(self._n)[index]
        if part.step != 1:
            raise ValueError("rows are cut in consecutive parts")
        return NewItemRows(self.of, self._rows, self._own, self._first + part.start, len(part))

    def set_index(self, slots: Tensor) -> None:
        """Each item stores its slot (int64 [n]), if it has room for it."""
        if self._own is not None:
            self.of.rows.set_index(self._rows, self._own, slots)

    def reserve(self, slot: int, capacity: int) -> None:
        """Takes the memory that `put` needs, which then cannot fail."""
        skipped = max(0, self._n - capacity)
        self.of.rows.reserve((slot + skipped) % capacity, self._n - skipped, capacity)

    def reserve_one(self, slot: int) -> None:
        """As `reserve`, for `put_one`."""
        self.of.rows.reserve(slot, 1, slot + 1)

    def put(self, slot: int, capacity: int) -> None:
        """Stores them from this slot on, round a ring of this size; of more than fit the last ones."""
        skipped = max(0, self._n - capacity)
        slot = (slot + skipped) % capacity
        self.of.rows.put(self._rows, self._first + skipped, self._n - skipped, slot, capacity)

    def put_one(self, i: int, slot: int) -> None:
        """Stores one of them."""
        self.of.rows.put(self._rows, self._first + range(self._n)[i], 1, slot, slot + 1)


_TENSORS, _NO_TENSORS, _OTHERS = 1, 0, -1


def _is_plain(value: Any, devices: set[Any], lead: int) -> int:
    """Whether an entry consists of tensors that rows can hold, of none, or of others; and its TensorDicts' devices.

    Dimensions after the first `lead` have no names.
    """
    kind = type(value)
    if kind is Tensor:
        is_plain = value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized
        return _TENSORS if is_plain and not value.is_nested else _OTHERS
    if kind is TensorDict:
        if any(name is not None for name in (value._td_dim_names or ())[lead:]):
            return _OTHERS
        devices.add(_device(value))
        value = value._tensordict
    elif kind is not dict:
        return _OTHERS
    kinds = {_is_plain(entry, devices, lead) for entry in value.values()}
    if _OTHERS in kinds or not all(type(key) is str for key in value):
        return _OTHERS
    return _TENSORS if _TENSORS in kinds else _NO_TENSORS


def _device(item: Any) -> Any:
    """The device of an item's TensorDicts, all of which have the same; None: they have none."""
    if type(item) is dict:
        return next((d for d in map(_device, item.values()) if d is not None), None)
    return item._device if type(item) is TensorDict else None
