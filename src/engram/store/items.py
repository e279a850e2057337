"""Items by slot: packed rows where they have one form, objects elsewhere."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

import engram._native as _native
from engram._copies import CopiedAsPlain
from engram.errors import CheckpointMisfitError
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
    key_path,
    leaf_keys,
    map_outermost,
    repeat_per_step,
    set_entry,
    set_per_item,
    unstack,
    with_entry,
)
from engram.store.border import ItemBorder
from engram.store.indexing import Selection
from engram.store.lanes import Lanes
from engram.store.layout import LeafSpec, RowLayout
from engram.store.packed_rows import NativeCalls, PackedRows
from engram.store.rows import Checked, Rows, TableRows, warn_of_items
from engram.store.steps import Form, Steps

#: Stands in a list for an item that is a row.
ROW = object()


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
        joins: whether items that are read by an index that is no int are collated, too; else they are a list.
    """

    copy: Callable[[Any], Any] = clone
    packs: bool = True
    check: Callable[[Any], None] | None = None
    keep: Callable[[Any], Any] | None = None
    read: Callable[[Any], Any] | None = None
    nbytes: Callable[[Any], int] = count_bytes
    collate: Callable[[list[Any]], Any] = collate_items
    joins: bool = False


def _itself(item: Any) -> Any:
    return item


def _saved_items(items: list[Any], codec: ItemCodec) -> list[Any]:
    """What is kept of items that were saved; CheckpointMisfitError where one is not taken."""
    try:
        if codec.check is not None:
            for item in items:
                codec.check(item)
        return items if codec.keep is None else [codec.keep(item) for item in items]
    except (TypeError, ValueError) as error:  # as items are refused that are written
        raise CheckpointMisfitError("the saved items do not fit this storage", [str(error)]) from error


#: Items are kept as copies of what was written.
COPIES = ItemCodec()
#: The items themselves are kept and handed out.
ITEMS_THEMSELVES = ItemCodec(copy=_itself, packs=False)


class ItemRows(TableRows):
    """Stored items, which may differ in form; those that have the form of the first one are packed rows.

    Writers and readers hold `lanes.mutex`.

    Args:
        max_size: items that fit; None: no limit.
        codec: how items are kept.
        device: where the tensors of items are moved to when they are written; None: they stay where they are.
    """

    def __init__(self, max_size: int | None, codec: ItemCodec = COPIES, device: torch.device | None = None) -> None:
        self.codec, self._device, self._native = codec, device, NativeCalls()
        self.collate = codec.collate
        self._begin(max_size)

    def _begin(self, max_size: int | None) -> None:
        #: Items that fit; None: no limit.
        self.max_size = max_size
        self._lanes = self.lanes = Lanes.in_memory(max_size)
        #: The items by slot: a list, which reads them when it is asked for them.
        self.by_slot = _ItemList(self.codec, self._lanes.capacity)
        self._capacity = self._lanes.capacity
        self._sequences: dict[int, int] = {}  # by slot, of items that were put in the place of others out of turn
        self._lanes.own_sequences = functools.partial(_own_sequences, self._sequences)
        self._border = ItemBorder(self._lanes)

    def limit(self, max_size: int) -> None:
        """Gives room for so many items to what has none and no limit. ValueError: there are some."""
        if self.by_slot:
            raise ValueError(f"the storage has {len(self._lanes)} items and max_size=None: too late for a limit")
        self._begin(max_size)

    def bind(self, native: NativeCalls) -> None:
        self._native = native
        self._bind()

    def _bind(self) -> None:
        """Lets native calls append to rows, while there are no other items."""
        by_slot = self.by_slot
        takes_all = self.codec.check is None and self._device is None
        only_rows = by_slot.packed is not None and not by_slot.has_objects and not self._sequences
        self._native.bind_push(by_slot.push if takes_all and only_rows else None)

    @property
    def item_reader(self) -> ItemRows:  # type: ignore[override]
        return self

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

    def view(self, steps: range | None = None) -> list[Any] | None:
        return self.by_slot if steps is None else None

    # ---- writing ----
    def fit(self, steps: Steps) -> Checked:
        """As `check` of a storage, of a list of items, a batch of them, or one.

        The data are copies: what the caller does to its own objects later does not change them.
        """
        items, single, key = steps.items, steps.is_single, steps.index_key
        if not single and not self.by_slot and has_batch_size(items) and len(items.batch_size) > 1:
            warn_of_items(items)
        batch = items
        if self.codec.check is not None:
            for item in batch if isinstance(batch, list) and not single else [batch]:
                self.codec.check(item)
        if self._device is not None:
            batch = _moved(batch, self._device)
        steps = steps._replace(items=batch)
        data: Any = self._as_rows(steps)
        if data is None:
            new: Any = self._as_batch(steps)
            if new is None:
                items = self.codec.copy(batch)  # of a batch once, whole: its items are views of that copy
                new = [items] if single else unstack(items, steps.time)
            slots = self._lanes.next_slots(len(new)) if key is not None and steps.own_index is None else steps.own_index
            data = _NewObjects(self._kept(new, key, slots), key, slots)
        if not len(data):
            raise ValueError("nothing to add: the batch has no items")
        return Checked(len(data), data)

    def _as_rows(self, steps: Steps) -> _NewRows | None:
        """Items as packed rows; None: they, or one of them, must be objects. The first item has the form."""
        if not self.codec.packs:
            return None
        batch, single = steps.items, steps.is_single
        packed = self.by_slot.packed if self.by_slot else self._form_of(steps)
        if packed is None:
            return None
        is_batch = not single and type(batch) is not list
        if is_batch and (steps.time or not (type(batch) is Tensor or has_keys(batch))):
            return None
        plan = packed.plan(self.codec.copy(batch) if is_batch else batch, single, steps.index_key, steps.own_index)
        return None if plan is None else _NewRows(packed, plan)

    def _form_of(self, steps: Steps) -> PackedItems | None:
        """Room for rows of the form of the first of some items; None: it must be an object."""
        first = batch = steps.items
        if not steps.is_single:
            if type(batch) is list:
                first = batch[0] if batch else None
            elif steps.time or not PackedItems.can_hold(batch, batch=True):
                return None
            else:
                try:
                    first = unstack(map_outermost(batch, lambda part: part[:1]), 0)[0]
                except (IndexError, ValueError, RuntimeError):  # a TensorDict without batch: a RuntimeError
                    return None  # which is said when they are taken apart
        if not PackedItems.can_hold(first):
            return None
        if steps.index_key is not None:
            first = _with_index(first, steps.index_key, torch.zeros((), dtype=torch.int64, device="cpu"))
        try:
            return PackedItems(first, self._lanes)
        except (ValueError, TypeError):
            return None

    def _as_batch(self, steps: Steps) -> _Batch | None:
        """A copy of a batch that stays whole; None: it is to be taken apart."""
        batch = steps.items
        if steps.time or not self.codec.packs or type(batch) is not TensorDict:
            return None
        if not batch.ndim or not _has_only_tensors(batch):
            return None
        return _Batch(self.codec.copy(batch))

    def _kept(self, items: Any, key: str | None, slots: Tensor | None) -> Any:
        """What is kept of objects, which nobody else has; under a key they store the index of these slots."""
        if slots is not None and key is not None and len(items):
            slots = slots.clone()
            if type(items) is _Batch:
                td = items.td.clone(recurse=False)
                set_per_item(td, key, slots)
                return _Batch(td)
            items = [_with_index(item, key, slot) for item, slot in zip(items, slots, strict=True)]
        keep = self.codec.keep
        return items if keep is None or type(items) is _Batch else [keep(item) for item in items]

    def _placed(self, new: _NewObjects, slots: Tensor, rows: Any) -> Any:
        """These rows of new objects, which store the index of the slots that they get."""
        items = new.items[rows] if isinstance(rows, slice) else [new.items[row] for row in rows]
        if new.key is None or new.slots is None or torch.equal(new.slots[rows], slots):
            return items
        read = self.codec.read
        return self._kept(items if read is None else list(map(read, items)), new.key, slots)

    def append(self, checked: Checked, most: int | None = None) -> Tensor:
        data, by_slot, capacity = checked.data, self.by_slot, self._capacity
        if type(data) is _NewRows:
            slots = self._append_rows(data, most)
        else:
            self._lanes.check_room(len(data.items[:most]))
            first = self._lanes.next_slot()
            new = self._placed(data, self._lanes.next_slots(len(data.items[:most])), slice(most))
            begins = self._border.begins(by_slot, capacity, by_slot.readable(new))
            self._expect_objects()
            slots = self._lanes.advance(len(new), begins)
            by_slot.put(new, first)
        if self._sequences:
            for slot in slots.tolist():
                self._sequences.pop(slot, None)
        return slots

    def _append_rows(self, new: _NewRows, most: int | None) -> Tensor:
        self._lanes.check_room(new.plan.steps if most is None else min(most, new.plan.steps))
        by_slot, packed, first = self.by_slot, new.of, self._lanes.next_slot()
        begins_form = not by_slot
        if not begins_form and packed is not by_slot.packed:
            raise ValueError(
                "these items were checked when other ones, or none, were stored, whose form they have: check them "
                "again; nothing was written"
            )
        if begins_form:
            by_slot.packed = packed
        elif by_slot.has_objects and self._border.begins(by_slot, self._capacity, packed.first_items(new.plan)):
            self._lanes.mark_seam()
        slots = packed.rows.append_plan(new.plan, most)
        assert isinstance(slots, Tensor)
        by_slot.put([ROW] * len(slots), first)
        if begins_form:
            self._bind()
        return slots

    def _expect_objects(self) -> None:
        """Called before an item is kept as an object, perhaps beside rows."""
        by_slot = self.by_slot
        if by_slot.packed is not None and not by_slot.has_objects:
            by_slot.has_objects = True
            by_slot.packed.leave_borders()
            self._bind()

    def overwrite(self, slots: Tensor, steps: Steps) -> None:
        items = steps.items
        new = unstack(items if self._device is None else _moved(items, self._device), 0)
        if len(new) != len(slots):
            raise ValueError(f"{len(slots)} items are indexed, {len(new)} given; nothing was written")
        places, by_slot = slots.tolist(), self.by_slot
        absent = [slot for slot in places if not 0 <= slot < len(by_slot)]
        if absent:
            raise IndexError(f"index {absent[0]} has not been written; {len(self._lanes)} items are stored")
        if self.kept:
            each = [self.kept.get(slot, frozenset()) for slot in places]
            new = list(map(_with_kept, map(by_slot.__getitem__, places), new, each))
        key = steps.index_key
        rows = self._as_rows(Steps(new, index_key=key, own_index=None if key is None else slots))
        if rows is not None:
            rows.of.rows.overwrite_plan(slots, rows.plan)
            by_slot.put_each([ROW] * len(places), places)
            return
        objects = self._kept([self.codec.copy(item) for item in new], key, slots)
        self._expect_objects()
        by_slot.put_each(objects, places)
        self._lanes.store.note_edits(slots)

    def prepare_replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> Callable[[], None]:
        data, first = checked.data, self._lanes.reserve_sequences(checked.steps)
        chosen, places = rows.tolist(), slots.tolist()
        new: list[Any]
        if type(data) is _NewRows:
            new, write_rows = [ROW] * len(chosen), data.of.rows.prepare_overwrite(slots, data.plan, rows, None)
        else:
            new = self._placed(data, slots, chosen)
            if self.codec.packs:  # a single row would keep its whole batch in memory
                new = list(map(self.codec.copy, new))
            write_rows = functools.partial(self._lanes.store.note_edits, slots, True)
            self._expect_objects()

        def write() -> None:
            self.by_slot.put_each(new, places)
            self._sequences.update((slot, first + row) for row, slot in zip(chosen, places, strict=True))
            write_rows()
            self._bind()

        return write

    def is_single(self, items: Any, env_dims: int = 0) -> bool:
        return (isinstance(items, Tensor) or has_batch_size(items)) and not items.shape

    def each(self, items: Any, shape: tuple[int, ...], n: int, env_dims: int = 0) -> Any:
        """One item replaces all that are indexed; a tuple is a list of items."""
        if shape != () and isinstance(items, tuple):
            return list(items)
        return [items] * n if shape == () or self.is_single(items) else items

    def as_batch(self, items: Any, time_dim: int) -> Any:
        return items

    def clear(self, reset_count: bool = True) -> None:
        """Forgets all items, whose form the next ones need not have."""
        super().clear(reset_count)
        self.by_slot.clear()
        self._sequences.clear()
        self._bind()

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
        """As `read`; `reuse` as `PackedItems.pick`."""
        self._lanes.use()
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

    def read_batch(self, slots: Tensor, extra: dict[str, Any] | None, sequences: bool) -> Rows:
        """As `read`; items that are all rows come as one new batch, which has the entries of `extra`."""
        self._lanes.use()
        with self._lanes.mutex:
            packed, by_slot, batch = self.by_slot.packed, self.by_slot, None
            if packed is not None and (not by_slot.has_objects or by_slot.are_rows(slots.tolist())):
                batch = packed.gather(slots, extra)
            if batch is None:
                return self._read(slots, sequences)
            return Rows(batch, sequences=self._lanes.generations(slots) if sequences else None)

    def read_own(self, slots: Tensor, sequences: bool, reuse: bool) -> Rows:
        """As `read`, for a caller who may change the items. `reuse` as `PackedItems.pick`."""
        with self._lanes.mutex:
            return self.own(self._read(slots, sequences, reuse), slots)

    def of_selection(self, rows: Rows, selection: Selection) -> Rows:
        rows = self.own(rows, selection.slots)
        if selection.shape == ():
            return Rows(rows.batch[0], absent=rows.absent)
        joins = self.codec.joins and rows.absent is None and len(rows.batch) > 0
        return Rows(self.codec.collate(rows.batch) if joins else rows.batch, absent=rows.absent)

    def own(self, rows: Rows, slots: Tensor) -> Rows:
        """Items that were just read, for a caller who may change them; those of packed rows are new anyhow."""
        copy = self.codec.copy
        if copy is _itself:
            return rows
        if rows.absent is not None:
            return rows._replace(batch=[copy(item) for item in rows.batch])
        if self.by_slot.packed is not None and not self.by_slot.has_objects:
            return rows
        stored = self.by_slot.stored(slots.tolist())
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
        """As `TableRows.column`. KeyError: one of the items has no such leaf."""
        with self._lanes.mutex:
            packed, by_slot = self.by_slot.packed, self.by_slot
            if packed is not None and (not by_slot.has_objects or by_slot.are_rows(slots.tolist())):
                leaf = get_entry(packed.gather(slots, None), path)
                if type(leaf) is Tensor:
                    return leaf
            values = [get_entry(by_slot[slot], path) for slot in slots.tolist()]
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
        """Replaces everything by what `items`, `counters` and `sequences` gave; there is room for them.

        Raises:
            CheckpointMisfitError: such items are not taken here; nothing is changed.
        """
        lane, capacity = counters["lanes"][0], self._capacity
        # Sequences stay where the oldest item stays in its slot; else it gets sequence 0, in the first slot.
        oldest = lane["base"]
        stays = counters["lane_capacity"] == self.max_size and (oldest % capacity == 0 or len(items) == capacity)
        shift = 0 if stays else oldest
        base = oldest - shift
        first = capacity - base % capacity
        by_slot = items[first:] + items[:first]
        packed = self._all_as_rows(by_slot)
        by_slot = _saved_items(by_slot, self.codec) if packed is None else [ROW] * len(by_slot)
        own = {(base + i) % capacity: sequence for i, sequence in enumerate(sequences) if sequence}
        self._take_over(by_slot, packed, own, lane, shift)

    def _all_as_rows(self, items: list[Any]) -> PackedItems | None:
        """Rows of these items, in the slots from 0 on; None: not all of them have one form."""
        if not (self.codec.packs and items):
            return None
        packed = self._form_of(Steps(items))
        return packed if packed is not None and packed.hold(items) else None

    def _take_over(
        self,
        by_slot: list[Any],
        packed: PackedItems | None,
        sequences: dict[int, int],
        lane: dict[str, Any],
        shift: int,
    ) -> None:
        """Puts items in the place of all others; `lane` counts them, each sequence `shift` more than from now on."""
        store, base, published = self._lanes.store, lane["base"] - shift, lane["published"] - shift
        self._lanes.hold()  # as the writer of what is loaded: trajectories go on
        store.begin_restore()
        self.by_slot.take_over(by_slot, packed)
        self._sequences.clear()
        self._sequences.update(sequences)
        store.set_seams(0, base, published, [seam - shift for seam in lane["seams"] if seam > lane["base"]])
        self._lanes.restore_lane(0, lane, shift)
        store.end_restore()
        self._bind()

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


class _NewRows:
    """Items that are about to be stored as rows."""

    __slots__ = ("of", "plan")

    def __init__(self, of: PackedItems, plan: _native.Plan) -> None:
        self.of, self.plan = of, plan

    def __len__(self) -> int:
        return self.plan.steps


class _NewObjects:
    """Items, a list or a batch, about to be stored as objects; under a key they store the index of these slots."""

    __slots__ = ("items", "key", "slots")

    def __init__(self, items: Any, key: str | None, slots: Tensor | None) -> None:
        self.items, self.key, self.slots = items, key, slots

    def __len__(self) -> int:
        return len(self.items)


class _ItemList(CopiedAsPlain, list[Any]):
    """Items by slot; rows, those of a batch and what a codec kept become objects when somebody reads them."""

    _plain: ClassVar[Any] = list

    def __init__(self, codec: ItemCodec, capacity: int) -> None:
        super().__init__()
        #: Where the items are that are rows, in whose places the list has `ROW`.
        self.packed: PackedItems | None = None
        #: Whether there may be items that are no rows beside those.
        self.has_objects = False
        self._read, self._nbytes, self._capacity = codec.read, codec.nbytes, capacity

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
        self.packed, self.has_objects = None, False

    def take_over(self, items: list[Any], packed: PackedItems | None) -> None:
        """Has these instead of all others."""
        self[:] = items
        self.packed = packed
        self.has_objects = packed is not None and not self.are_rows(range(len(items)))

    def stored(self, slots: Iterable[int]) -> Iterator[Any]:
        """What the list has in these slots, unread."""
        return map(super().__getitem__, slots)

    def are_rows(self, slots: Iterable[int]) -> bool:
        """Whether the items in these slots, if there are any, are rows."""
        n = len(self)
        return all(map(operator.is_, self.stored(slot for slot in slots if 0 <= slot < n), itertools.repeat(ROW)))

    def readable(self, new: Any) -> Any:
        """New items as somebody reads them: of what a codec kept the first two, at which a border looks."""
        return new if self._read is None else [self._read(item) for item in new[:2]]

    def at(self, slots: Iterable[int], reuse: bool = False) -> list[Any]:
        """The items in these slots; `reuse` as `PackedItems.pick`."""
        packed = self.packed
        items = list(self.stored(slots)) if packed is None else packed.pick(self, list(slots), reuse)
        if self._read is not None:
            return [self._read(item) for item in items]
        return [self[slot] for slot in slots] if _Batch in map(type, items) else items

    def push(self, items: Any, form: Form) -> Tensor | int | None:
        """As `PackedRows.push`, of items of the form of the rows."""
        packed = self.packed
        if packed is None or (form.time > 0 and type(items) is not list):
            return None
        slots = packed.push(items, form)
        if slots is not None and len(self) < self._capacity:
            n = 1 if isinstance(slots, int) else slots.numel()
            self += [ROW] * min(n, self._capacity - len(self))
        return slots

    def put(self, new: Any, first: int) -> None:
        """Puts new items in the slots from `first` on, round a ring; of more than fit the last ones stay."""
        capacity = self._capacity
        skipped = max(0, len(new) - capacity)
        n, start = len(new) - skipped, (first + skipped) % capacity
        if type(new) is _Batch:
            kept = [_Batch(new.td[skipped:] if skipped else new.td, start, capacity)] * n
        else:
            kept = new[skipped:]
        until_end = min(n, capacity - start)
        self[: n - until_end] = kept[until_end:]  # first: a longer batch fills all slots of a new list
        self[start : start + until_end] = kept[:until_end]

    def put_each(self, new: list[Any], slots: list[int]) -> None:
        """Puts new items in the places of others."""
        for item, slot in zip(new, slots, strict=True):
            self[slot] = item

    @property
    def nbytes(self) -> int:
        """The bytes of the items' tensors, or of what a codec kept."""
        stored, batches = 0, dict[int, list[Any]]()
        row_bytes = 0 if self.packed is None else sum(leaf.nbytes for leaf in self.packed.layout.leaves)
        for item in super().__iter__():
            if type(item) is _Batch:
                batches.setdefault(id(item), [item, 0])[1] += 1
            else:
                stored += row_bytes if item is ROW else self._nbytes(item)
        for batch, rows in batches.values():
            stored += count_bytes(batch.td) // len(batch) * rows
        return int(stored)


class PackedItems:
    """Items of one form as packed rows: copied in, and built anew whenever they are read.

    Args:
        item: has the form.
        lanes: count the items.

    Raises:
        ValueError: no item of this form can be built again from a row (`can_hold`).
    """

    def __init__(self, item: Any, lanes: Lanes) -> None:
        if not self.can_hold(item):
            raise ValueError(f"a {type(item).__name__} of this form stays an object")
        self._cls = None if type(item) in (Tensor, TensorDict, dict) else type(item)
        self._has_keys = self._cls is None and type(item) is not Tensor
        item = item if self._cls is None else item._tensordict
        self.layout = RowLayout.of(item, 0)
        if not self.layout.plain:
            raise ValueError("this tensordict builds its objects otherwise: all items stay objects")
        self._lanes, self._codec = lanes, self.layout.item_codec(_device(item))
        self._store = lanes.store.with_growing_rows(self.layout.payload_bytes)
        self.rows = PackedRows(lanes, self.layout, mapped=False, store=self._store, codec=self._codec)
        self._reader = _native.ItemReader(self._store, self._codec, ROW)
        self._index_leaves: dict[str | None, int | None] = {None: None}

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

    # ---- in ----
    def plan(
        self, items: Any, single: bool, index_key: str | None = None, index: Tensor | None = None
    ) -> _native.Plan | None:
        """The rows of a list of items, of one (`single`), or of a batch of them; None: one is of another form.

        With `index_key` the items store their own index there: `index` (int64 [n]), or the one that `append` gives.
        """
        if self._index_leaf(index_key) == _NO_INDEX:
            return None
        items = [items] if single else items
        if self._cls is not None:
            each = items if type(items) is list else [items]
            if not all(type(item) is self._cls and not item._non_tensordict for item in each):
                return None
            items = [item._tensordict for item in items] if type(items) is list else items._tensordict
        extra = None if self._index_leaf(index_key) is None else (index_key, index)
        plan: _native.Plan | None = self._codec.check(items, 1, 0, extra)
        return plan

    def push(self, items: Any, form: Form) -> Tensor | int | None:
        """`plan` and `append` in one native call; None: nothing was written."""
        dims, time, key = form
        own = self._index_leaf(key)
        if own == _NO_INDEX or self._cls is not None:
            return None
        return _native.push(self._store, self._codec, self._lanes.hold(), items, dims, time, own)

    def _index_leaf(self, key: str | None) -> int | None:
        """The number of the leaf for the items' own index; None: they have none, `_NO_INDEX`: no place for it."""
        try:
            return self._index_leaves[key]
        except KeyError:
            pass
        fields = () if self._cls is None else [field.name for field in dataclasses.fields(self._cls)]
        own = None
        if self._has_keys or key in fields:  # others store no index
            own = next((k for k, leaf in enumerate(self.layout.leaves) if leaf.path == (key,)), _NO_INDEX)
            if own != _NO_INDEX and self._codec.index_dims(own) != 1:
                own = _NO_INDEX
        self._index_leaves[key] = own
        return own

    def hold(self, items: list[Any]) -> bool:
        """Puts items, which nobody has counted yet, in the slots from 0 on; False: one of them is of another form."""
        for start in range(0, len(items), _ITEMS_AT_ONCE):
            plan = self.plan(items[start : start + _ITEMS_AT_ONCE], single=False)
            if plan is None:
                return False
            self._store.put(0, start, _native.pack(plan, self.layout.payload_bytes).numpy()[None])
        return True

    def leave_borders(self) -> None:
        """Puts no seams any more: objects come between the rows, whose borders an `ItemBorder` knows."""
        self._store.set_border(self._codec, [], [], False, None)

    # ---- out ----
    def gather(self, slots: Tensor, extra: dict[str, Any] | None) -> Any:
        """The rows in these slots (int64 [n]) as one new batch, with these entries if they are no tensorclass.

        None: one of the slots holds nothing.
        """
        if self._cls is not None:
            extra = None  # a class may have no such fields
        elif extra and self.layout.within:
            extra = {key: repeat_per_step(value, 1, self.layout.within) for key, value in extra.items()}
        batch, _, absent, _ = self._store.gather(self._codec, slots, None, extra)
        return None if absent else batch if self._cls is None else self._outside(batch)

    def item(self, slot: int) -> Any:
        """A new item of the row in a slot."""
        return self._outside(self._reader.item(slot))

    def first_items(self, plan: _native.Plan) -> list[Any]:
        """The first two of some items, as new ones."""
        rows: Any = _native.pack(plan, self.layout.payload_bytes)[:2]
        batch = self._outside(_native.unpack(self._codec, rows))
        return [map_outermost(batch, operator.itemgetter(i)) for i in range(len(rows))]

    def pick(self, items: list[Any], slots: list[int], reuse: bool = False) -> list[Any]:
        """What a list has in these slots, rows as new items.

        With `reuse` small items may have tensors of earlier ones that nobody has any more (`why_not_reusable`).
        """
        picked = self._reader.pick(items, slots, reuse)
        if self._cls is None:
            return picked
        stored = list.__getitem__
        pairs = zip(slots, picked, strict=True)
        return [self._outside(item) if stored(items, slot) is ROW else item for slot, item in pairs]

    def _outside(self, built: Any) -> Any:
        return built if self._cls is None else self._cls._from_tensordict(built)


_NO_INDEX = -1
_ITEMS_AT_ONCE = 1024  # that a load packs
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


def _with_kept(stored: Any, item: Any, kept: frozenset[KeyPath]) -> Any:
    """An item that is written over another one, with the entries of that which stay as they are stored."""
    if not (has_keys(stored) and has_keys(item)):
        return item
    changed = clone(stored)
    for key in leaf_keys(item):
        if key_path(key) not in kept:
            set_entry(changed, key, get_entry(item, key))
    return changed


def _own_sequences(sequences: dict[int, int], slots: Tensor) -> Tensor:
    """The sequences that the items in these slots carry: int64 [n]."""
    return torch.tensor([sequences.get(slot, 0) for slot in slots.tolist()], dtype=torch.int64, device="cpu")


def _with_index(item: Any, key: str, slot: Tensor) -> Any:
    if has_keys(item) and (not is_tensorclass(item) or hasattr(item, key)):
        within = () if isinstance(item, dict) else tuple(item.batch_size)
        return with_entry(item, key, repeat_per_step(slot, 0, within) if within else slot)
    return item
