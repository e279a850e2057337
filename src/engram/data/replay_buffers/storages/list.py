"""Any objects, one after the other."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engram.data.replay_buffers.storages.base import Checked, Rows, Storage
from engram.data.replay_buffers.storages.staging import StagedItems
from engram.errors import CheckpointMisfitError
from engram.pytree import (
    KeyPath,
    as_tensor,
    clone,
    count_bytes,
    format_key,
    get_entry,
    has_batch_size,
    has_keys,
    is_tensorclass,
    repeat_per_step,
    unstack,
    with_entry,
)
from engram.store.border import ItemBorder
from engram.store.counters import Counters, check_sequences
from engram.store.indexing import Selection
from engram.store.lanes import Lanes
from engram.store.layout import LeafSpec
from engram.store.views import Changes, FrozenItems

_NO_LIMIT = 1 << 40


class ListStorage(Storage):
    """Keeps any objects in a list.

    Args:
        max_size: items that fit; without limit if None.

    Example:
        >>> storage = ListStorage(10)
        >>> rb = ReplayBuffer(storage=storage, collate_fn=lambda items: items)
        >>> rb.extend(["a", {"b": 1}])
        tensor([0, 1])
        >>> rb[:]
        ['a', {'b': 1}]
    """

    def __init__(self, max_size: int | None = None, *, checkpointer: Any = None) -> None:
        super().__init__(max_size, checkpointer)
        self._items: list[Any] = []
        self._sequences: dict[int, int] = {}  # by slot, of items that were put in the place of others out of turn
        self._start(max_size)

    def _start(self, max_size: int | None) -> None:
        self._lanes = Lanes.in_memory(max_size or _NO_LIMIT)
        self._lanes.mutex = self.mutex
        self._lanes.own_sequences = functools.partial(_own_sequences, self._sequences)
        self._border = ItemBorder(self._lanes)

    def settings(self) -> dict[str, Any]:
        return {"max_size": self._max_size}

    def copy_rows_into(self, other: Any, memo: dict[int, Any]) -> None:
        state = self.state_dict()  # tensors are copies already; other objects are the stored ones
        items = [
            item if (isinstance(item, Tensor) or has_batch_size(item)) else copy.deepcopy(item, memo)
            for item in state["items"]
        ]
        other.load_state_dict({**state, "items": items})

    def limit(self, max_size: int) -> None:
        """Gives an empty storage without limit a size."""
        if self._max_size is not None or self._items:
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
        return sum(count_bytes(item) for item in self._items)

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
        rows = [clone(items)] if single else unstack(clone(items), time_dim)
        if not rows:
            raise ValueError("nothing to add: the batch has no items")
        if index_key is not None:
            slots = self._lanes.next_slots(len(rows)) if index is None else index.clone()
            rows = [_with_index(row, index_key, slot) for row, slot in zip(rows, slots, strict=True)]
        return Checked(len(rows), rows)

    def append(self, checked: Checked, most: int | None = None) -> Tensor:
        rows = checked.data[:most]
        begins = self._border.begins(self._items, self._max_size or _NO_LIMIT, rows)
        slots = self._lanes.advance(len(rows), begins)
        for slot, item in zip(slots.tolist(), rows, strict=True):
            if slot < len(self._items):
                self._items[slot] = item
                if self._sequences:
                    self._sequences.pop(slot, None)
            else:
                self._items.append(item)
        return slots

    def replace(self, checked: Checked, rows: Tensor, slots: Tensor) -> None:
        first = self._lanes.reserve_sequences(checked.steps)
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            # A copy: a row alone would keep its whole batch in memory.
            self._items[slot] = clone(checked.data[row])
            self._sequences[slot] = first + row
        self._lanes.store.note_edits(slots)

    def overwrite(self, slots: Tensor, items: Any, index_key: str | None = None) -> None:
        absent = [slot for slot in slots.tolist() if not 0 <= slot < len(self._items)]
        if absent:
            raise IndexError(f"index {absent[0]} has not been written; {len(self)} items are stored")
        rows = unstack(items, 0)
        if len(rows) != len(slots):
            raise ValueError(f"{len(slots)} items are indexed, {len(rows)} given; nothing was written")
        pairs = zip(rows, slots, strict=True)
        own = [clone(row if index_key is None else _with_index(row, index_key, slot)) for row, slot in pairs]
        for slot, item in zip(slots.tolist(), own, strict=True):
            self._items[slot] = item
        self._lanes.store.note_edits(slots)

    def _set(self, selection: Selection, items: Any, index_key: str | None) -> None:
        has_shape = isinstance(items, Tensor) or has_batch_size(items)
        if selection.shape == () or (has_shape and not items.shape):
            items = [items] * len(selection.slots)  # one item is written at every index
        self.overwrite(selection.slots, items, index_key)

    def read(
        self,
        slots: Tensor,
        shape: tuple[int, ...] | None = None,
        extra: dict[str, Any] | None = None,
        numbers: bool = False,
    ) -> Rows:
        """The items themselves, as a list; `extra` is for batches and ignored."""
        if self._lanes.asleep:
            self._lanes.wake()
        with self.mutex:
            found, n = slots.tolist(), len(self._items)
            if found and (min(found) < 0 or max(found) >= self._lanes.capacity):
                raise IndexError(f"an index lies outside 0 to {self._lanes.capacity - 1}")
            absent = [k for k, i in enumerate(found) if i >= n]
            generation = self._lanes.generations(slots) if numbers else None
            return [self._items[i] if i < n else None for i in found], None, absent or None, generation

    @property
    def item_shape(self) -> tuple[int, ...]:
        """As the oldest item has it."""
        oldest = self._items[0] if self._items else None
        return tuple(oldest.batch_size) if has_batch_size(oldest) else ()

    def leaf(self, path: KeyPath) -> LeafSpec | None:
        """As the oldest item has it."""
        found = get_entry(self._items[0], path) if self._items else None
        if found is None:
            return None
        tensor = as_tensor(found, path)
        return LeafSpec(path, tensor.dtype, tuple(tensor.shape))

    def column(self, path: KeyPath, slots: Tensor) -> Tensor:
        found = [get_entry(self._items[slot], path) for slot in slots.tolist()]
        if any(value is None for value in found):
            raise KeyError(f"some of the stored items have no {format_key(path)}")
        return torch.stack([as_tensor(value, path) for value in found])

    def _read_shaped(self, selection: Selection) -> Rows:
        found, _, absent, _ = self.read(selection.slots)
        items = [clone(item) for item in found]
        return items[0] if selection.shape == () else items, None, absent, None

    def _empty(self, reset_count: bool) -> None:
        super()._empty(reset_count)
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
            return self._items[start:stop] + self._items[: max(0, stop - capacity)]

    def sequences(self) -> list[int]:
        """The sequences that the items carry, oldest first; 0 where an item has the one that its lane counts."""
        with self.mutex:
            lane, capacity = self._lanes.store.lane(0), self._max_size or _NO_LIMIT
            first = max(lane["base"], lane["first"])
            return [self._sequences.get(w % capacity, 0) for w in range(first, lane["published"])]

    def counters(self) -> dict[str, Any]:
        """Counters as JSON."""
        return {"lane_capacity": self._max_size, "strands": 1, "lanes": self._lanes.saved_states()}

    def identity(self) -> dict[str, Any]:
        """What names these items, as `Lanes.identity`."""
        return Changes(self._lanes).identity()

    def edited(self, since: dict[str, Any]) -> list[tuple[int, int]] | None:
        """Items replaced since `identity()` was `since`; None if that is not known."""
        return Changes(self._lanes).edited(since)

    def freeze(self) -> FrozenItems:
        """The items as they are now, for a save in the background; the caller holds the mutex."""
        return FrozenItems(self._lanes, self)

    def check_restore(self, counters: dict[str, Any]) -> None:
        """A ValueError where the items do not fit."""
        lane = counters["lanes"][0]
        n = lane["published"] - lane["base"]
        if self._max_size is not None and n > self._max_size:
            said = f"room for {self._max_size} items here, {n} saved there"
            raise CheckpointMisfitError("the checkpoint does not fit this storage", [said])

    def restore_items(self, items: list[Any], counters: dict[str, Any], sequences: list[int]) -> None:
        """Replaces everything by what was saved, items and their sequences oldest first."""
        self.check_restore(counters)
        lane, store = counters["lanes"][0], self._lanes.store
        with self.replacing("loads"):
            capacity, oldest = self._max_size or _NO_LIMIT, lane["base"]
            # The oldest is number 0 in another list, and in one that is not full: it must begin at the first place.
            stays = counters["lane_capacity"] == self._max_size and (oldest % capacity == 0 or len(items) == capacity)
            shift = 0 if stays else oldest
            base, published = oldest - shift, lane["published"] - shift
            first = capacity - base % capacity
            self._lanes.hold()  # as the writer of what is loaded: trajectories go on
            store.begin_restore()
            self._items[:] = items[first:] + items[:first]
            self._sequences.clear()
            self._sequences.update({(base + i) % capacity: own for i, own in enumerate(sequences) if own})
            store.set_seams(0, base, published, [seam - shift for seam in lane["seams"] if seam > lane["base"]])
            self._lanes.restore_lane(0, lane, shift)
            store.end_restore()
            self.shifts = [shift]

    def state_dict(self) -> dict[str, Any]:
        items = [clone(item) for item in self.items()]
        return {"items": items, "counters": self.counters(), "sequences": self.sequences()}

    def check_state(self, state: dict[str, Any]) -> None:
        try:
            known, n = Counters(state["counters"]), len(state["items"])
            check_sequences(state["sequences"], n)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the state of the storage is not one that state_dict gave ({error!r})") from error
        if (known.lanes, known.rows) != (1, n):
            raise ValueError(f"{n} items stand beside counters of {known.rows} in {known.lanes} lanes")
        self.check_restore(state["counters"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state(state)
        items = [clone(item) for item in state["items"]]
        with self.replacing("load_state_dict"):
            self.restore_items(items, state["counters"], state["sequences"])

    def staging(self) -> StagedItems:
        return StagedItems(self)

    def kept(self) -> Callable[[], None]:
        return functools.partial(self.restore_items, self.items(), self.counters(), self.sequences())


def _own_sequences(sequences: dict[int, int], slots: Tensor) -> Tensor:
    """The sequences that the items in these slots carry: int64 [n]."""
    return torch.tensor([sequences.get(slot, 0) for slot in slots.tolist()], dtype=torch.int64)


def _with_index(item: Any, key: str, slot: Tensor) -> Any:
    if has_keys(item) and (not is_tensorclass(item) or hasattr(item, key)):
        within = () if isinstance(item, dict) else tuple(item.batch_size)
        return with_entry(item, key, repeat_per_step(slot, 0, within) if within else slot)
    return item
