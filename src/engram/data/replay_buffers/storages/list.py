"""A storage of any objects."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from engram.data.replay_buffers.storages.base import Checked, StagedItems, Storage, check_room
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
from engram.store.indexing import Selection
from engram.store.lanes import Lanes
from engram.store.layout import LeafSpec
from engram.store.tables import Rows
from engram.store.views import ChangeTracker, ItemSnapshot

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

    _holds_items: ClassVar[bool] = True

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

    def _copy_arguments(self) -> dict[str, Any]:
        return {"max_size": self._max_size}

    def _copy_rows_to(self, other: Any, memo: dict[int, Any]) -> None:
        state = self.state_dict()  # tensors are copies already; other objects are the stored ones
        items = [
            item if (isinstance(item, Tensor) or has_batch_size(item)) else copy.deepcopy(item, memo)
            for item in state["items"]
        ]
        other.load_state_dict({**state, "items": items})

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
            # A copy: a single row would keep its whole batch in memory.
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
        if self._lanes.unused_since_fork:
            self._lanes.join_after_fork()
        with self.mutex:
            positions, n = slots.tolist(), len(self._items)
            if positions and (min(positions) < 0 or max(positions) >= self._lanes.capacity):
                raise IndexError(f"an index lies outside 0 to {self._lanes.capacity - 1}")
            absent = [k for k, i in enumerate(positions) if i >= n]
            generations = self._lanes.generations(slots) if sequences else None
            items = [self._items[i] if i < n else None for i in positions]
            return Rows(items, absent=absent or None, sequences=generations)

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
        values = [get_entry(self._items[slot], path) for slot in slots.tolist()]
        if any(value is None for value in values):
            raise KeyError(f"some of the stored items have no {format_key(path)}")
        return torch.stack([as_tensor(value, path) for value in values])

    def _read_selection(self, selection: Selection) -> Rows:
        rows = self.read(selection.slots)
        items = [clone(item) for item in rows.batch]
        return Rows(items[0] if selection.shape == () else items, absent=rows.absent)

    def _bytes_per_row(self) -> int:
        """On average."""
        stored = len(self)
        return self.nbytes // stored if stored else 0

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
            return self._items[start:stop] + self._items[: max(0, stop - capacity)]

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

    def _snapshot_view(self) -> ItemSnapshot:
        return ItemSnapshot(self._lanes, self)

    def check_restore(self, counters: dict[str, Any]) -> None:
        """A ValueError where the items do not fit."""
        check_room(self._max_size, counters)

    def restore_items(self, items: list[Any], counters: dict[str, Any], sequences: list[int]) -> None:
        """Replaces everything by what was saved, items and their sequences oldest first."""
        self.check_restore(counters)
        lane, store = counters["lanes"][0], self._lanes.store
        with self._replacing("loads"):
            capacity, oldest = self._max_size or _NO_LIMIT, lane["base"]
            # Sequences stay where the oldest item stays in its slot; else it gets sequence 0, in the first slot.
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
            self._sequence_shifts = [shift]

    def state_dict(self) -> dict[str, Any]:
        items = [clone(item) for item in self.items()]
        return {"items": items, "counters": self.counters(), "sequences": self.sequences()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._check_state(state)
        items = [clone(item) for item in state["items"]]
        with self._replacing("load_state_dict"):
            self.restore_items(items, state["counters"], state["sequences"])

    def _staging(self) -> StagedItems:
        return StagedItems(self)

    def _restore_point(self) -> Callable[[], None]:
        return functools.partial(self.restore_items, self.items(), self.counters(), self.sequences())


def _own_sequences(sequences: dict[int, int], slots: Tensor) -> Tensor:
    """The sequences that the items in these slots carry: int64 [n]."""
    return torch.tensor([sequences.get(slot, 0) for slot in slots.tolist()], dtype=torch.int64)


def _with_index(item: Any, key: str, slot: Tensor) -> Any:
    if has_keys(item) and (not is_tensorclass(item) or hasattr(item, key)):
        within = () if isinstance(item, dict) else tuple(item.batch_size)
        return with_entry(item, key, repeat_per_step(slot, 0, within) if within else slot)
    return item
