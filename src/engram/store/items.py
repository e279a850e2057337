"""Items by slot: packed rows where they have one form, objects elsewhere."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from engram._copies import CopiedAsPlain
from engram.pytree import (
    KeyPath,
    as_tensor,
    clone,
    collate_items,
    count_bytes,
    format_key,
    get_entry,
    has_batch_size,
    has_keys,
    is_tensorclass,
    map_outermost,
    repeat_per_step,
    set_per_item,
    unstack,
    with_entry,
)
from engram.store.border import ItemBorder
from engram.store.indexing import Selection
from engram.store.item_rows import ROW, ItemRows, NewItemRows
from engram.store.lanes import Lanes
from engram.store.layout import LeafSpec
from engram.store.rows import Checked, Rows, warn_of_items
from engram.store.table import Table

#: A key at the root, and what each item also stores there (int64 [n]); None: the slots that `append` will give.
Extra = tuple[str, Tensor | None]


class ItemCodec(NamedTuple):
    """How items are kept that are objects, and how a batch is made of them.

    Attributes:
        copy: a copy of items that are written, and of objects for a caller who may change them.
        packs: whether items of one form are kept as rows, and the rows of other batches stay in their batch.
        check: raises an error for an item that is not taken; None: all are.
        keep: what is kept of an item; None: the item itself.
        read: a new item of what was kept.
        nbytes: the bytes of what is kept.
        collate: a batch of a list of items.
    """

    copy: Callable[[Any], Any] = clone
    packs: bool = True
    check: Callable[[Any], None] | None = None
    keep: Callable[[Any], Any] | None = None
    read: Callable[[Any], Any] | None = None
    nbytes: Callable[[Any], int] = count_bytes
    collate: Callable[[list[Any]], Any] = collate_items


def _itself(item: Any) -> Any:
    return item


#: Items are kept as copies of what was written.
COPIES = ItemCodec()
#: The items themselves are kept and handed out.
ITEMS_THEMSELVES = ItemCodec(copy=_itself, packs=False)


class ItemTable(Table):
    """Stored items, which may differ in form; those that have the form of the first one are packed rows.

    Writers and readers hold `lanes.mutex`.

    Args:
        max_size: items that fit; None: no limit.
        codec: how items are kept.
        device: where the tensors of items are moved to when they are written; None: they stay where they are.
    """

    def __init__(
        self,
        max_size: int | None,
        codec: ItemCodec = COPIES,
        device: torch.device | None = None,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(max_size)
        self.codec, self._device, self._arguments = codec, device, arguments or {}
        self.collate = codec.collate
        self._begin()

    def _begin(self) -> None:
        codec = self.codec
        self._lanes = self.known_lanes = Lanes.in_memory(self.max_size)
        #: The items by slot: a list, which reads them when it is asked for them.
        self.by_slot = _ItemList(codec)
        self._capacity = self._lanes.capacity
        self._sequences: dict[int, int] = {}  # by slot, of items that were put in the place of others out of turn
        self._lanes.own_sequences = functools.partial(_own_sequences, self._sequences)
        self._border = ItemBorder(self._lanes)

    @property
    def lanes(self) -> Lanes:
        return self._lanes

    @property
    def nbytes(self) -> int:
        """The bytes of the items' tensors."""
        return self.by_slot.nbytes

    @property
    def item_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        oldest = self.by_slot[0] if self.by_slot else None
        return tuple(oldest.batch_size) if has_batch_size(oldest) else ()

    @property
    def row_bytes(self) -> int:
        """On average."""
        return self.nbytes // len(self._lanes) if len(self._lanes) else 0

    def view(self) -> list[Any]:
        return self.by_slot

    def arguments(self) -> dict[str, Any]:
        return {"max_size": self.max_size, **self._arguments}

    def limit(self, max_size: int) -> None:
        if self.max_size is not None:
            super().limit(max_size)
        if self.by_slot:
            raise ValueError(f"the storage has {len(self._lanes)} items and max_size=None: too late for a limit")
        self._max_size = max_size
        self._begin()
        self.use(self.mutex)

    # ---- writing ----
    def fit(
        self, items: Any, single: bool, time_dim: int = 0, index_key: str | None = None, index: Tensor | None = None
    ) -> Checked:
        """As `check` of a storage, of a list of items, a batch of them, or one.

        The data are copies: what the caller does to its own objects later does not change them.
        """
        if not single and not self.by_slot and has_batch_size(items) and len(items.batch_size) > 1:
            warn_of_items(items)
        batch, extra = items, None if index_key is None else (index_key, index)
        if self.codec.check is not None:
            for item in batch if isinstance(batch, list) and not single else [batch]:
                self.codec.check(item)
        if self._device is not None:
            batch = _moved(batch, self._device)
        data: Any = self._as_rows(batch, single, time_dim, extra)
        if data is None:
            data = self._as_batch(batch, single, time_dim, extra)
        if data is None:
            items = self.codec.copy(batch)  # of a batch once, whole: its items are views of that copy
            data = self._kept([items] if single else unstack(items, time_dim), extra)
        if not len(data):
            raise ValueError("nothing to add: the batch has no items")
        return Checked(len(data), data)

    def _for_overwrite(self, rows: Any, extra: Extra | None) -> tuple[int, Any]:
        """The data of items for `overwrite`."""
        items = unstack(rows if self._device is None else _moved(rows, self._device), 0)
        if extra is not None and extra[1] is not None and len(extra[1]) != len(items):
            raise ValueError(f"{len(extra[1])} items are indexed, {len(items)} given; nothing was written")
        packed = self.by_slot.packed
        if packed is not None:
            new = packed.look(self._with_index(items, extra), single=False)
            if new is not None:
                return len(items), new
        return len(items), self._kept([self.codec.copy(item) for item in items], extra)

    def _as_rows(self, batch: Any, single: bool, time_dim: int, extra: Extra | None) -> NewItemRows | None:
        """Copies of items as packed rows; None: they, or one of them, must be objects. The first item has the form."""
        if not self.codec.packs:
            return None
        index_key = None if extra is None else extra[0]
        packed = self.by_slot.packed if self.by_slot else self._form_of(batch, single, time_dim, index_key)
        if packed is None:
            return None
        is_batch = not single and type(batch) is not list
        if is_batch and (time_dim or not (type(batch) is Tensor or has_keys(batch))):
            return None
        rows = packed.look(batch, single=single, index_key=index_key, batch=is_batch)
        if rows is not None and extra is not None:
            rows.set_index(self._index(extra, len(rows)))
        return rows

    def _form_of(self, batch: Any, single: bool, time_dim: int, index_key: str | None) -> ItemRows | None:
        """Room for rows of the form of the first of some items; None: it must be an object."""
        first = batch
        if not single:
            if type(batch) is list:
                first = batch[0] if batch else None
            elif time_dim or not ItemRows.can_hold(batch, batch=True):
                return None
            else:
                try:
                    first = unstack(map_outermost(batch, lambda part: part[:1]), 0)[0]
                except (IndexError, ValueError, RuntimeError):  # a TensorDict without batch: a RuntimeError
                    return None  # which is said when they are taken apart
        if not ItemRows.can_hold(first):
            return None
        if index_key is not None:
            first = _with_index(first, index_key, torch.zeros((), dtype=torch.int64))
        try:
            return ItemRows(first, self.max_size)
        except (ValueError, TypeError):
            return None

    def _as_batch(self, batch: Any, single: bool, time_dim: int, extra: Extra | None) -> _Batch | None:
        """A copy of a batch that stays whole; None: it is to be taken apart."""
        if single or time_dim or not self.codec.packs or type(batch) is not TensorDict:
            return None
        if not batch.ndim or not _has_only_tensors(batch):
            return None
        copied = self.codec.copy(batch)
        if extra is not None and len(copied):
            set_per_item(copied, extra[0], self._index(extra, len(copied)).clone())
        return _Batch(copied)

    def _kept(self, items: list[Any], extra: Extra | None) -> list[Any]:
        """What is kept of objects, which are the table's own."""
        items, keep = self._with_index(items, extra), self.codec.keep
        return items if keep is None else [keep(item) for item in items]

    def _with_index(self, items: list[Any], extra: Extra | None) -> list[Any]:
        if extra is None or not items:
            return items
        slots = self._index(extra, len(items)).clone()
        return [_with_index(item, extra[0], slot) for item, slot in zip(items, slots, strict=True)]

    def _index(self, extra: Extra, n: int) -> Tensor:
        return self._lanes.next_slots(n) if extra[1] is None else extra[1]

    def append(self, checked: Checked, most: int | None = None) -> Tensor:
        data = checked.data
        new, by_slot, capacity = data[:most], self.by_slot, self._capacity
        begins = self._border.begins(by_slot, capacity, by_slot.readable(new), self._form_of_newest())
        first = self._lanes.next_slot()
        if type(new) is NewItemRows:
            by_slot.reserve_rows(new, first, capacity)  # before they count: there may be no memory for them
        slots = self._lanes.advance(len(new), begins)
        by_slot.put(new, first, capacity)
        if self._sequences:
            for slot in slots.tolist():
                self._sequences.pop(slot, None)
        return slots

    def _form_of_newest(self) -> Any:
        """For the border: the same object for all packed rows, which have the same names; None: it is none of these."""
        by_slot = self.by_slot
        if by_slot.packed is None or not by_slot:
            return None
        return by_slot.packed if list.__getitem__(by_slot, self._lanes.next_slot() - 1) is ROW else None

    def overwrite(self, slots: Tensor, items: Any, index_key: str | None = None) -> None:
        n, data = self._for_overwrite(items, None if index_key is None else (index_key, slots))
        if n != len(slots):
            raise ValueError(f"{len(slots)} items are indexed, {n} given; nothing was written")
        places = slots.tolist()
        absent = [slot for slot in places if not 0 <= slot < len(self.by_slot)]
        if absent:
            raise IndexError(f"index {absent[0]} has not been written; {len(self._lanes)} items are stored")
        for i, slot in enumerate(places):
            self.by_slot.put_one(data, i, slot)
        self._lanes.store.note_edits(slots)

    def prepare_replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> Callable[[], None]:
        data, first = checked.data, self._lanes.reserve_sequences(checked.steps)
        chosen, places = rows.tolist(), slots.tolist()
        new: Any = data
        if type(data) is NewItemRows:
            for slot in places:
                data.reserve_one(slot)
        else:
            # A copy: a single row would keep its whole batch in memory.
            new = {row: self.codec.copy(data[row]) if self.codec.packs else data[row] for row in chosen}

        def write() -> None:
            for row, slot in zip(chosen, places, strict=True):
                self.by_slot.put_one(new, row, slot)
                self._sequences[slot] = first + row
            self._lanes.store.note_edits(slots)

        return write

    def is_single(self, items: Any, env_dims: int = 0) -> bool:
        return (isinstance(items, Tensor) or has_batch_size(items)) and not items.shape

    def for_selection(self, items: Any, selection: Selection) -> Any:
        """One item replaces all that are indexed; a tuple is a list of items."""
        if selection.shape != () and isinstance(items, tuple):
            return list(items)
        return [items] * len(selection.slots) if selection.shape == () or self.is_single(items) else items

    def for_steps(self, items: Any, steps: int, at_one: bool) -> Any:
        if at_one:
            return [items]
        return super().for_steps(list(items) if isinstance(items, tuple) else items, steps, at_one)

    def as_batch(self, items: Any, time_dim: int) -> Any:
        return items

    def clear(self, reset_count: bool = True) -> None:
        """Forgets all items, whose form the next ones need not have."""
        super().clear(reset_count)
        self.by_slot.clear()
        self._sequences.clear()

    # ---- reading ----
    def read(
        self,
        slots: Tensor,
        shape: tuple[int, ...] | None = None,
        extra: dict[str, Any] | None = None,
        sequences: bool = False,
    ) -> Rows:
        """The items as a list; objects are the stored ones. `extra` is for batches and ignored."""
        return self._read(slots, sequences)

    def _read(self, slots: Tensor, sequences: bool, reuse: bool = False) -> Rows:
        """As `read`; `reuse` as `ItemRows.pick`."""
        if self._lanes.unused_since_fork:
            self._lanes.join_after_fork()
        with self._lanes.mutex:
            positions, n = slots.tolist(), len(self.by_slot)
            if positions and (min(positions) < 0 or max(positions) >= self._capacity):
                raise IndexError(f"an index lies outside 0 to {self._capacity - 1}")
            absent = [k for k, i in enumerate(positions) if i >= n]
            generations = self._lanes.generations(slots) if sequences else None
            if absent:
                items = [self.by_slot[i] if i < n else None for i in positions]
            else:
                items = self.by_slot.at(positions, reuse)
            return Rows(items, absent=absent or None, sequences=generations)

    @property
    def item_reader(self) -> ItemTable:
        return self

    def read_batch(self, slots: Tensor, extra: dict[str, Any] | None, sequences: bool) -> Rows:
        """As `read`; items that are all rows come as one new batch, which has the entries of `extra`."""
        if self._lanes.unused_since_fork:
            self._lanes.join_after_fork()
        with self._lanes.mutex:
            packed = self.by_slot.packed
            batch = None if packed is None else packed.gather(self.by_slot, slots, extra)
            if batch is None:
                return self._read(slots, sequences)
            return Rows(batch, sequences=self._lanes.generations(slots) if sequences else None)

    def read_own(self, slots: Tensor, sequences: bool, reuse: bool) -> Rows:
        """As `read`, for a caller who may change the items. `reuse` as `ItemRows.pick`."""
        with self._lanes.mutex:
            return self.own(self._read(slots, sequences, reuse), slots)

    def of_selection(self, rows: Rows, selection: Selection) -> Rows:
        rows = self.own(rows, selection.slots)
        return Rows(rows.batch[0] if selection.shape == () else rows.batch, absent=rows.absent)

    def own(self, rows: Rows, slots: Tensor) -> Rows:
        """Items that were just read, for a caller who may change them; those of packed rows are new anyhow."""
        copy = self.codec.copy
        if copy is _itself:
            return rows
        if rows.absent is not None:
            return rows._replace(batch=[copy(item) for item in rows.batch])
        stored = list(map(functools.partial(list.__getitem__, self.by_slot), slots.tolist()))
        if all(map(operator.is_, stored, itertools.repeat(ROW))):
            return rows
        pairs = zip(rows.batch, stored, strict=True)
        return rows._replace(batch=[item if held is ROW else copy(item) for item, held in pairs])

    def leaf(self, path: KeyPath) -> LeafSpec | None:
        """Dtype and shape of one leaf of the oldest item; None: it has no such leaf."""
        value = get_entry(self.by_slot[0], path) if self.by_slot else None
        if value is None:
            return None
        tensor = as_tensor(value, path)
        return LeafSpec(path, tensor.dtype, tuple(tensor.shape))

    def column(self, path: KeyPath, slots: Tensor) -> Tensor:
        """As `Table.column`. KeyError: one of the items has no such leaf."""
        if self.by_slot.packed is not None:
            leaf = get_entry(self.by_slot.packed.gather(self.by_slot, slots, None), path)
            if type(leaf) is Tensor:
                return leaf
        values = [get_entry(self.by_slot[slot], path) for slot in slots.tolist()]
        if any(value is None for value in values):
            raise KeyError(f"some of the stored items have no {format_key(path)}")
        return torch.stack([as_tensor(value, path) for value in values])

    # ---- for saves ----
    def items(self) -> list[Any]:
        """The items, oldest first."""
        first, published = self._stored_range()
        start, stop = first % self._capacity, first % self._capacity + published - first
        before, after = self.by_slot.at(range(max(0, stop - self._capacity))), self.by_slot[start:stop]
        return [*after, *before]

    def sequences(self) -> list[int]:
        """The sequences that the items carry, oldest first; 0 where an item has the one that its lane counts."""
        return [self._sequences.get(w % self._capacity, 0) for w in range(*self._stored_range())]

    def _stored_range(self) -> tuple[int, int]:
        """The sequence of the oldest item, and the end."""
        lane = self._lanes.store.lane(0)
        return max(lane["base"], lane["first"]), lane["published"]

    def counters(self) -> dict[str, Any]:
        """Counters as JSON."""
        return {"lane_capacity": self.max_size, "envs": 1, "lanes": self._lanes.saved_states()}

    def restore(self, items: list[Any], counters: dict[str, Any], sequences: list[int]) -> None:
        """Replaces everything by what `items`, `counters` and `sequences` gave of a table; there is room for them."""
        lane, capacity = counters["lanes"][0], self._capacity
        # Sequences stay where the oldest item stays in its slot; else it gets sequence 0, in the first slot.
        oldest = lane["base"]
        stays = counters["lane_capacity"] == self.max_size and (oldest % capacity == 0 or len(items) == capacity)
        shift = 0 if stays else oldest
        base = oldest - shift
        first = capacity - base % capacity
        by_slot = items[first:] + items[:first]
        packed = self._all_as_rows(by_slot)
        by_slot = self._kept(by_slot, None) if packed is None else [ROW] * len(by_slot)
        own = {(base + i) % capacity: sequence for i, sequence in enumerate(sequences) if sequence}
        self._take_over(by_slot, packed, own, lane, shift)

    def _all_as_rows(self, items: list[Any]) -> ItemRows | None:
        """Rows of these items, in the slots from 0 on; None: not all of them have one form."""
        if not (self.codec.packs and items):
            return None
        packed = self._form_of(items, False, 0, None)
        rows = None if packed is None else packed.look(items, single=False)
        if rows is None:
            return None
        rows.put(0, len(rows))
        return packed

    def _take_over(
        self, by_slot: list[Any], packed: ItemRows | None, sequences: dict[int, int], lane: dict[str, Any], shift: int
    ) -> None:
        """Puts items in the place of all others; `lane` counts them, each sequence `shift` more than from now on."""
        store, base, published = self._lanes.store, lane["base"] - shift, lane["published"] - shift
        self._lanes.hold()  # as the writer of what is loaded: trajectories go on
        store.begin_restore()
        self.by_slot.packed = packed
        self.by_slot[:] = by_slot
        self._sequences.clear()
        self._sequences.update(sequences)
        store.set_seams(0, base, published, [seam - shift for seam in lane["seams"] if seam > lane["base"]])
        self._lanes.restore_lane(0, lane, shift)
        store.end_restore()

    def restore_point(self) -> Callable[[], None]:
        """A function that puts everything back as it is now.

        Rows that are packed are kept as they are: where there was no memory for a load, nothing is packed anew.
        """
        by_slot, packed, sequences = list.copy(self.by_slot), self.by_slot.packed, dict(self._sequences)
        return functools.partial(self._take_over, by_slot, packed, sequences, self._lanes.saved_states()[0], 0)


class _Batch:
    """A batch of which each row is an item, in consecutive slots of a ring."""

    __slots__ = ("capacity", "first", "td")

    def __init__(self, td: TensorDict, first: int = 0, capacity: int = 0) -> None:
        self.td = td
        self.first = first  # slot, of the first row
        self.capacity = capacity

    def __len__(self) -> int:
        return len(self.td)

    def __getitem__(self, index: Any) -> Any:
        """One row, or of a slice such a batch."""
        if not isinstance(index, slice):
            return self.td[index]
        return self if index == slice(None) else _Batch(self.td[index])

    def at(self, slot: int) -> Any:
        """The item in a slot."""
        return self.td[(slot - self.first) % self.capacity]


class _ItemList(CopiedAsPlain, list[Any]):
    """Items by slot; rows, those of a batch and what a codec kept become objects when somebody reads them."""

    _plain: ClassVar[Any] = list
    #: Where the items are that are rows, in whose places the list has `ROW`.
    packed: ItemRows | None = None

    def __init__(self, codec: ItemCodec) -> None:
        super().__init__()
        self._read, self._nbytes = codec.read, codec.nbytes

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.at(range(*index.indices(len(self))))
        item, packed = super().__getitem__(index), self.packed
        if item is ROW and packed is not None:
            return packed.item(index if index >= 0 else index + len(self))
        if type(item) is _Batch:
            slot = index if index >= 0 else index + len(self)
            item = item.at(slot)
            self[slot] = item
        return item if self._read is None else self._read(item)

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return bool(self[:] == other)

    __hash__ = None  # as every list

    def __contains__(self, item: object) -> bool:
        return item in self[:]

    def clear(self) -> None:
        super().clear()
        self.packed = None

    def readable(self, new: Any) -> Any:
        """New items as somebody reads them: of what a codec kept the first two, at which a border looks."""
        return new if self._read is None else [self._read(item) for item in new[:2]]

    def at(self, slots: Iterable[int], reuse: bool = False) -> list[Any]:
        """The items in these slots; `reuse` as `ItemRows.pick`."""
        packed = self.packed
        items = list(map(super().__getitem__, slots)) if packed is None else packed.pick(self, list(slots), reuse)
        if self._read is not None:
            return [self._read(item) for item in items]
        return [self[slot] for slot in slots] if _Batch in map(type, items) else items

    def reserve_rows(self, rows: NewItemRows, first: int, capacity: int) -> None:
        """Takes all memory that `put` needs."""
        if not self:
            self.packed = rows.of
        rows.reserve(first, capacity)

    def put(self, new: Any, first: int, capacity: int) -> None:
        """Puts new items in the slots from `first` on, round a ring; of more than fit the last ones stay."""
        skipped = max(0, len(new) - capacity)
        n, start = len(new) - skipped, (first + skipped) % capacity
        if type(new) is NewItemRows:
            new.put(first, capacity)
            kept = [ROW] * n
        elif type(new) is _Batch:
            kept = [_Batch(new.td[skipped:] if skipped else new.td, start, capacity)] * n
        else:
            kept = new[skipped:]
        until_end = min(n, capacity - start)
        self[: n - until_end] = kept[until_end:]  # first: a longer batch fills all slots of a new list
        self[start : start + until_end] = kept[:until_end]

    def put_one(self, new: Any, i: int, slot: int) -> None:
        """Puts one of some new items in the place of another."""
        if type(new) is NewItemRows:
            new.put_one(i, slot)
            self[slot] = ROW
        else:
            self[slot] = new[i]

    @property
    def nbytes(self) -> int:
        """The bytes of the items' tensors, or of what a codec kept."""
        stored, batches = 0, dict[int, list[Any]]()
        row_bytes = 0 if self.packed is None else self.packed.rows.item_bytes
        for item in super().__iter__():
            if type(item) is _Batch:
                batches.setdefault(id(item), [item, 0])[1] += 1
            else:
                stored += row_bytes if item is ROW else self._nbytes(item)
        for batch, rows in batches.values():
            stored += count_bytes(batch.td) // len(batch) * rows
        return int(stored)


def _moved(items: Any, device: torch.device) -> Any:
    """Data with their tensors on a device; other objects as they are."""
    if isinstance(items, Tensor) or has_batch_size(items):
        return items.to(device)
    if isinstance(items, dict):
        return {key: _moved(value, device) for key, value in items.items()}
    return type(items)(_moved(item, device) for item in items) if type(items) in (list, tuple) else items


def _has_only_tensors(td: TensorDict) -> bool:
    """Whether each row of a TensorDict can be taken out of it at any time: it consists of tensors and TensorDicts."""
    for value in td._tensordict.values():
        if type(value) is TensorDict:
            if not _has_only_tensors(value):
                return False
        elif type(value) is not Tensor:
            return False
    return True


def _own_sequences(sequences: dict[int, int], slots: Tensor) -> Tensor:
    """The sequences that the items in these slots carry: int64 [n]."""
    return torch.tensor([sequences.get(slot, 0) for slot in slots.tolist()], dtype=torch.int64)


def _with_index(item: Any, key: str, slot: Tensor) -> Any:
    if has_keys(item) and (not is_tensorclass(item) or hasattr(item, key)):
        within = () if isinstance(item, dict) else tuple(item.batch_size)
        return with_entry(item, key, repeat_per_step(slot, 0, within) if within else slot)
    return item
