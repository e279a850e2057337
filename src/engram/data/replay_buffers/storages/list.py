"""A storage of any objects."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from engram.data.replay_buffers.reuse import may_reuse
from engram.data.replay_buffers.state.items import SavedItems, check_room
from engram.data.replay_buffers.storages.base import (
    _NO_LIMIT,
    Checked,
    Storage,
    warn_of_items,
)
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
from engram.specs.tensors import usable_device
from engram.store.border import ItemBorder
from engram.store.copies import CopiedAsPlain
from engram.store.indexing import Selection
from engram.store.item_rows import ROW, ItemRows, NewItemRows
from engram.store.lanes import Lanes
from engram.store.layout import LeafSpec
from engram.store.tables import Rows
from engram.store.views import ChangeTracker


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

    _holds_items: ClassVar[bool] = True
    _takes_lists: ClassVar[bool] = True
    # Whether items of one form are packed, and rows of other batches stay in them; else each has a form of its own.
    _keeps_batches: ClassVar[bool] = True
    _default_collate: ClassVar[Any] = staticmethod(collate_items)

    def __init__(
        self,
        max_size: int | None = None,
        *,
        copy: bool = True,
        device: torch.device | str | None = None,
        checkpointer: Any = None,
        compilable: bool = False,
    ) -> None:
        super().__init__(max_size, checkpointer)
        self.device = self._written_to = usable_device(device, "device")
        self._copies = copy
        self._items = self._no_items()
        self._sequences: dict[int, int] = {}  # by slot, of items that were put in the place of others out of turn
        self._start(max_size)

    def _start(self, max_size: int | None) -> None:
        self._lanes = Lanes.in_memory(max_size or _NO_LIMIT)
        self._lanes.mutex = self.mutex
        self._lanes.own_sequences = functools.partial(_own_sequences, self._sequences)
        self._border = ItemBorder(self._lanes)

    def _no_items(self) -> _Items:
        """An empty list for items; it hands out what `_stored_form` made of them as they were."""
        return _Items()

    def _stored_form(self, items: list[Any]) -> list[Any]:
        """Items, which are this storage's own, as its list keeps them."""
        return items

    def _copy_arguments(self) -> dict[str, Any]:
        device = {} if self._written_to is None else {"device": str(self._written_to)}
        return {"max_size": self._max_size, **({} if self._copies else {"copy": False}), **device}

    def _limit(self, max_size: int) -> None:
        if self._max_size is not None:
            super()._limit(max_size)
        if self._items:
            raise ValueError(f"the storage has {len(self)} items and max_size={self._max_size}: too late for a limit")
        self._max_size = max_size
        self._start(max_size)

    @property
    def lanes(self) -> Lanes:
        return self._lanes

    @property
    def _storage(self) -> list[Any]:
        return self._items

    @property
    def nbytes(self) -> int:
        return self._items.nbytes

    def check(
        self,
        items: Any,
        single: bool,
        time_dim: int = 0,
        index_key: str | None = None,
        index: Tensor | None = None,
    ) -> Checked:
        # A copy: what the caller does to its own object later must not change what is stored. Of a batch once, whole;
        # its items are then views of that copy.
        if not single and not self._items and has_batch_size(items) and len(items.batch_size) > 1:
            warn_of_items(items)
        if self._written_to is not None:
            items = _moved(items, self._written_to)
        packed = self._pack(items, single, time_dim, index_key, index)
        if packed is not None:
            return Checked(len(packed), packed)
        whole = not single and not time_dim and self._keeps_batches and self._copies and type(items) is TensorDict
        if whole and items.ndim and _has_only_tensors(items):
            return self._check_batch(items, index_key, index)
        items = clone(items) if self._copies else items
        rows = [items] if single else unstack(items, time_dim)
        if not rows:
            raise ValueError("nothing to add: the batch has no items")
        if index_key is not None:
            slots = self._lanes.next_slots(len(rows)) if index is None else index.clone()
            rows = [_with_index(row, index_key, slot) for row, slot in zip(rows, slots, strict=True)]
        return Checked(len(rows), self._stored_form(rows))

    def _pack(
        self, items: Any, single: bool, time_dim: int, index_key: str | None, index: Tensor | None
    ) -> NewItemRows | None:
        """Copies of items as packed rows; None: they, or one of them, must be objects. The first item has the form."""
        if not self._copies or not self._keeps_batches:
            return None
        packed = self._items.packed
        if not self._items:
            packed = self._form_of(items, single, time_dim, index_key)
        if packed is None:
            return None
        batch = not single and type(items) is not list
        if batch and (time_dim or not (type(items) is Tensor or has_keys(items))):
            return None
        rows = packed.look(items, single=single, index_key=index_key, batch=batch)
        if rows is not None and index_key is not None:
            rows.set_index(self._lanes.next_slots(len(rows)) if index is None else index)
        return rows

    def _form_of(self, items: Any, single: bool, time_dim: int, index_key: str | None) -> ItemRows | None:
        """Room for rows of the form of the first of some items; None: it must be an object."""
        first = items
        if not single:
            if type(items) is list:
                first = items[0] if items else None
            elif time_dim or not ItemRows.can_hold(items, batch=True):
                return None
            else:
                try:
                    first = unstack(map_outermost(items, lambda part: part[:1]), 0)[0]
                except (IndexError, ValueError, RuntimeError):  # a TensorDict without batch: a RuntimeError
                    return None  # which is said when they are taken apart
        if not ItemRows.can_hold(first):
            return None
        if index_key is not None:
            first = _with_index(first, index_key, torch.zeros((), dtype=torch.int64))
        try:
            return ItemRows(first, self._max_size)
        except (ValueError, TypeError):
            return None

    def _check_batch(self, items: TensorDict, index_key: str | None, index: Tensor | None) -> Checked:
        if not len(items):
            raise ValueError("nothing to add: the batch has no items")
        batch = clone(items) if self._copies else items.clone(recurse=False)
        if index_key is not None:
            slots = self._lanes.next_slots(len(batch)) if index is None else index.clone()
            set_per_item(batch, index_key, slots)
        return Checked(len(batch), _Batch(batch))

    def append(self, checked: Checked, most: int | None = None) -> Tensor:
        capacity, rows = self._max_size or _NO_LIMIT, checked.data[:most]
        begins = self._border.begins(self._items, capacity, self._items.readable(rows), self._form_of_newest())
        if type(rows) is NewItemRows:
            first = self._lanes.next_slot()
            self._items.reserve_rows(rows, first, capacity)
            slots = self._lanes.advance(len(rows), begins)
            self._items.put_rows(rows, first, capacity)
            self._forget_sequences(slots)
            return slots
        slots = self._lanes.advance(len(rows), begins)
        if type(rows) is _Batch:
            self._items.put_batch(rows, int(slots[0]), capacity)
            self._forget_sequences(slots)
            return slots
        for slot, item in zip(slots.tolist(), rows, strict=True):
            if slot < len(self._items):
                self._items[slot] = item
                if self._sequences:
                    self._sequences.pop(slot, None)
            else:
                self._items.append(item)
        return slots

    def _form_of_newest(self) -> Any:
        """For the border: the same object for all packed rows, which have the same names; None: it is none of these."""
        items = self._items
        if items.packed is None or not items:
            return None
        return items.packed if list.__getitem__(items, self._lanes.next_slot() - 1) is ROW else None

    def _forget_sequences(self, slots: Tensor) -> None:
        """Items in these slots have those that their lane counts."""
        if self._sequences:
            for slot in slots.tolist():
                self._sequences.pop(slot, None)

    def replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> None:
        first = self._lanes.reserve_sequences(checked.steps)
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            if type(checked.data) is NewItemRows:
                self._items.put_row(checked.data, row, slot)
            else:
                # A copy: a single row would keep its whole batch in memory.
                own = self._keeps_batches and self._copies
                self._items[slot] = clone(checked.data[row]) if own else checked.data[row]
            self._sequences[slot] = first + row
        self._lanes.store.note_edits(slots)

    def overwrite(self, slots: Tensor, items: Any, index_key: str | None = None) -> None:
        absent = [slot for slot in slots.tolist() if not 0 <= slot < len(self._items)]
        if absent:
            raise IndexError(f"index {absent[0]} has not been written; {len(self)} items are stored")
        rows = unstack(items if self._written_to is None else _moved(items, self._written_to), 0)
        if len(rows) != len(slots):
            raise ValueError(f"{len(slots)} items are indexed, {len(rows)} given; nothing was written")
        pairs = zip(rows, slots, strict=True)
        own = [row if index_key is None else _with_index(row, index_key, slot) for row, slot in pairs]
        packed = self._items.packed.look(own, single=False) if self._items.packed is not None else None
        if packed is not None:
            for i, slot in enumerate(slots.tolist()):
                self._items.put_row(packed, i, slot)
            self._lanes.store.note_edits(slots)
            return
        own = [clone(item) for item in own] if self._copies else own
        for slot, item in zip(slots.tolist(), self._stored_form(own), strict=True):
            self._items[slot] = item
        self._lanes.store.note_edits(slots)

    def set(self, cursor: Any, data: Any, index_key: str | None = None, *, set_cursor: bool = True) -> None:
        if isinstance(data, tuple) and isinstance(cursor, range | list | Tensor | np.ndarray):
            data = list(data)  # a sequence of items, not one pytree
        super().set(cursor, data, index_key)

    def _is_single(self, items: Any, env_dims: int = 0) -> bool:
        return (isinstance(items, Tensor) or has_batch_size(items)) and not items.shape

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
        return self._read(slots, sequences)

    def _read(self, slots: Tensor, sequences: bool, reuse: bool = False) -> Rows:
        """As `read`; `reuse` as `ItemRows.pick`."""
        if self._lanes.unused_since_fork:
            self._lanes.join_after_fork()
        with self.mutex:
            positions, n = slots.tolist(), len(self._items)
            if positions and (min(positions) < 0 or max(positions) >= self._lanes.capacity):
                raise IndexError(f"an index lies outside 0 to {self._lanes.capacity - 1}")
            absent = [k for k, i in enumerate(positions) if i >= n]
            generations = self._lanes.generations(slots) if sequences else None
            if absent:
                items = [self._items[i] if i < n else None for i in positions]
            else:
                items = self._items.at(positions, reuse)
            return Rows(items, absent=absent or None, sequences=generations)

    def _read_items(
        self,
        slots: Tensor,
        extra: dict[str, Any] | None,
        sequences: bool,
        collated: bool,
    ) -> Rows:
        """As `read`, for a batch: the caller's own items. With `collated` they may come as one batch, if they stack.

        The default collate function copies: for it, objects are the stored ones. `extra` is for what is no list.
        """
        if self._overrides & {"get", "read"}:
            rows = self.read(slots, None, extra, sequences)
            return rows if collated else rows._replace(batch=[self._own(item) for item in rows.batch])
        if self._lanes.unused_since_fork:
            self._lanes.join_after_fork()
        with self.mutex:
            packed = self._items.packed
            if collated and packed is not None:
                batch = packed.gather(self._items, slots, extra)
                if batch is not None:
                    return Rows(batch, sequences=self._lanes.generations(slots) if sequences else None)
            if collated:
                return self._read(slots, sequences)
            return self._with_own_items(self._read(slots, sequences, may_reuse()), slots)

    def _own(self, item: Any) -> Any:
        """An item that was read, for a caller who may change it; with `copy=False` the stored one."""
        return clone(item) if self._copies else item

    def _with_own_items(self, rows: Rows, slots: Tensor) -> Rows:
        """Items that were just read, as `_own`; those of packed rows are new anyhow."""
        if not self._copies:
            return rows
        if rows.absent is not None:
            return rows._replace(batch=[clone(item) for item in rows.batch])
        stored = list(map(functools.partial(list.__getitem__, self._items), slots.tolist()))
        if all(map(operator.is_, stored, itertools.repeat(ROW))):
            return rows
        pairs = zip(rows.batch, stored, strict=True)
        return rows._replace(batch=[item if held is ROW else clone(item) for item, held in pairs])

    @property
    def _item_shape(self) -> tuple[int, ...]:
        """That of the oldest item."""
        oldest = self._items[0] if self._items else None
        return tuple(oldest.batch_size) if has_batch_size(oldest) else ()

    def leaf(self, path: KeyPath) -> LeafSpec | None:
        """That of the oldest item."""
        value = get_entry(self._items[0], path) if self._items else None
        if value is None:
            return None
        tensor = as_tensor(value, path)
        return LeafSpec(path, tensor.dtype, tuple(tensor.shape))

    def column(self, path: KeyPath, slots: Tensor) -> Tensor:
        if self._items.packed is not None:
            leaf = get_entry(self._items.packed.gather(self._items, slots, None), path)
            if type(leaf) is Tensor:
                return leaf
        values = [get_entry(self._items[slot], path) for slot in slots.tolist()]
        if any(value is None for value in values):
            raise KeyError(f"some of the stored items have no {format_key(path)}")
        return torch.stack([as_tensor(value, path) for value in values])

    def _read_selection(self, selection: Selection) -> Rows:
        rows = self._with_own_items(self._read_rows(selection.slots), selection.slots)
        return Rows(rows.batch[0] if selection.shape == () else rows.batch, absent=rows.absent)

    def _bytes_per_row(self) -> int:
        """On average."""
        stored = len(self)
        return self.nbytes // stored if stored else 0

    def _empty(self) -> None:
        """Called before all rows are forgotten, of a child that overrides it as TorchRL's users do."""

    def empty(self, reset_count: bool = True) -> None:
        with self._replacing("empty"):
            super().empty(reset_count)
            self._items.clear()
            self._sequences.clear()

    # ---- checkpoints: the ItemSource and ItemSink that a checkpointer sees ----
    def _default_checkpointer(self) -> Any:
        from engram.data.replay_buffers.checkpointers.objects import ListStorageCheckpointer

        return ListStorageCheckpointer()

    def items(self) -> list[Any]:
        """The items, oldest first."""
        with self.mutex:
            lane, capacity = self._lanes.store.lane(0), self._max_size or _NO_LIMIT
            first = max(lane["base"], lane["first"])
            start, stop = first % capacity, first % capacity + lane["published"] - first
            before, after = self._items.at(range(max(0, stop - capacity))), self._items[start:stop]
            return [*after, *before]

    def sequences(self) -> list[int]:
        """The sequences that the items carry, oldest first; 0 where an item has the one that its lane counts."""
        with self.mutex:
            lane, capacity = self._lanes.store.lane(0), self._max_size or _NO_LIMIT
            first = max(lane["base"], lane["first"])
            return [self._sequences.get(w % capacity, 0) for w in range(first, lane["published"])]

    def counters(self) -> dict[str, Any]:
        """Counters as JSON."""
        return {"lane_capacity": self._max_size, "envs": 1, "lanes": self._lanes.saved_states()}

    def identity(self) -> dict[str, Any]:
        """As `Lanes.identity`."""
        return ChangeTracker(self._lanes).identity()

    def edited(self, since: dict[str, Any]) -> list[tuple[int, int]] | None:
        """Items replaced since `identity()` returned `since`; None where the log does not reach back so far."""
        return ChangeTracker(self._lanes).edited(since)

    @property
    def saved_form(self) -> SavedItems:
        return SavedItems(self)

    def check_restore(self, counters: dict[str, Any]) -> None:
        """A ValueError where the items do not fit."""
        check_room(self._max_size, counters)

    def restore_items(self, items: list[Any], counters: dict[str, Any], sequences: list[int]) -> None:
        """Replaces everything by what was saved, items and their sequences oldest first."""
        self.check_restore(counters)
        lane = counters["lanes"][0]
        with self._replacing("loads"):
            capacity, oldest = self._max_size or _NO_LIMIT, lane["base"]
            # Sequences stay where the oldest item stays in its slot; else it gets sequence 0, in the first slot.
            stays = counters["lane_capacity"] == self._max_size and (oldest % capacity == 0 or len(items) == capacity)
            shift = 0 if stays else oldest
            base = oldest - shift
            first = capacity - base % capacity
            by_slot = items[first:] + items[:first]
            packed = self._packed_whole(by_slot)
            by_slot = self._stored_form(by_slot) if packed is None else [ROW] * len(by_slot)
            own = {(base + i) % capacity: sequence for i, sequence in enumerate(sequences) if sequence}
            self._take_over(by_slot, packed, own, lane, shift)

    def _take_over(
        self,
        by_slot: list[Any],
        packed: ItemRows | None,
        sequences: dict[int, int],
        lane: dict[str, Any],
        shift: int,
    ) -> None:
        """Puts items in the place of all others; `lane` counts them, each sequence `shift` more than from now on."""
        store, base, published = self._lanes.store, lane["base"] - shift, lane["published"] - shift
        self._lanes.hold()  # as the writer of what is loaded: trajectories go on
        store.begin_restore()
        self._items.packed = packed
        self._items[:] = by_slot
        self._sequences.clear()
        self._sequences.update(sequences)
        store.set_seams(0, base, published, [seam - shift for seam in lane["seams"] if seam > lane["base"]])
        self._lanes.restore_lane(0, lane, shift)
        store.end_restore()

    def _packed_whole(self, items: list[Any]) -> ItemRows | None:
        """Rows of these items, in the slots from 0 on; None: not all of them have one form."""
        if not (self._copies and self._keeps_batches and items):
            return None
        packed = self._form_of(items, False, 0, None)
        rows = None if packed is None else packed.look(items, single=False)
        if rows is None:
            return None
        rows.put(0, len(rows))
        return packed

    def restore_point(self) -> Callable[[], None]:
        """A function that puts everything back as it is now.

        Rows that are packed are kept as they are: where there was no memory for a load, nothing is packed anew.
        """
        by_slot, packed, sequences = list.copy(self._items), self._items.packed, dict(self._sequences)
        lane = self.counters()["lanes"][0]

        def undo() -> None:
            with self._replacing("loads"):
                self._take_over(by_slot, packed, sequences, lane, 0)

        return undo


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


class _Items(CopiedAsPlain, list[Any]):
    """Items by slot; rows and those of a batch become objects when somebody reads them."""

    _plain: ClassVar[Any] = list
    #: Where the items are that are rows, in whose places the list has `ROW`.
    packed: ItemRows | None = None

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
        return item

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

    def readable(self, rows: Any) -> Any:
        """New items, in the form in which they are stored, as somebody reads them."""
        return rows

    def at(self, slots: Iterable[int], reuse: bool = False) -> list[Any]:
        """The items in these slots; `reuse` as `ItemRows.pick`."""
        packed = self.packed
        items = list(map(super().__getitem__, slots)) if packed is None else packed.pick(self, list(slots), reuse)
        return [self[slot] for slot in slots] if _Batch in map(type, items) else items

    def reserve_rows(self, rows: NewItemRows, first: int, capacity: int) -> None:
        """Takes all memory that `put_rows` needs."""
        if not self:
            self.packed = rows.of
        rows.reserve(first, capacity)

    def put_rows(self, rows: NewItemRows, first: int, capacity: int) -> None:
        """Puts rows in the slots from `first` on, round a ring; of more than fit the last ones stay."""
        rows.put(first, capacity)
        self._put(ROW, len(rows), first, capacity)

    def put_row(self, rows: NewItemRows, i: int, slot: int) -> None:
        """Puts one of some new rows in the place of an item."""
        rows.put_one(i, slot)
        self[slot] = ROW

    def put_batch(self, batch: _Batch, first: int, capacity: int) -> None:
        """Puts a batch in the slots from `first` on, round a ring; of a longer one the last rows stay."""
        n = len(batch)
        skipped = max(0, n - capacity)
        td = batch.td[skipped:] if skipped else batch.td
        self._put(_Batch(td, (first + skipped) % capacity, capacity), n, first, capacity)

    def _put(self, item: Any, n: int, first: int, capacity: int) -> None:
        skipped = max(0, n - capacity)
        first, n = (first + skipped) % capacity, n - skipped
        until_end = min(n, capacity - first)
        self[: n - until_end] = [item] * (n - until_end)  # first: a longer batch fills all slots of a new list
        self[first : first + until_end] = [item] * until_end

    @property
    def nbytes(self) -> int:
        """The bytes of the items' tensors."""
        stored, batches = 0, dict[int, list[Any]]()
        row_bytes = 0 if self.packed is None else self.packed.rows.item_bytes
        for item in super().__iter__():
            if type(item) is _Batch:
                batches.setdefault(id(item), [item, 0])[1] += 1
            else:
                stored += row_bytes if item is ROW else count_bytes(item)
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
