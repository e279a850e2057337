"""Rows that are taken out of what is drawn: which of them a user means, and the rows that a predicate looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.data.replay_buffers.storages.base import Storage
from engram.data.replay_buffers.storages.single_steps import read_leaves
from engram.pytree import Key, as_path, format_key, get_entry, has_keys, to_tensor
from engram.store.indexing import generations_given, named_slots, stored_generations, tensor_of
from engram.store.lanes import Lanes

_BLOCK_STEPS = 1 << 15  # time steps that a predicate looks at together
_BLOCK_BYTES = 1 << 26  # and of long rows fewer, so that a batch of them has no more than this


class RowBlock:
    """Some of the stored rows, whose entries are read when they are asked for: what a predicate of `remove` gets.

    Attributes:
        index: of the rows, as users name them: int64 [n], with ndim=2 a tuple (time, env) of such.
        generation: of each row, int64 [n].

    Example:
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(TensorDict({"reward": torch.tensor([0.0, float("nan"), 2.0])}, [3]))
        >>> rb.remove(lambda rows: rows["reward"].isnan())
        1
    """

    def __init__(self, storage: Storage, slots: Tensor, generation: Tensor) -> None:
        self._storage, self._slots, self._generation = storage, slots, generation

    @property
    def index(self) -> Any:
        return self._storage.from_slots(self._slots.clone())  # a predicate may change what it is given

    @property
    def generation(self) -> Tensor:
        return self._generation.clone()

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, key: Key) -> Tensor:
        """An entry of the rows, [n, ...]; a KeyError where they have none of this name."""
        path = as_path(key)
        storage, layout = self._storage, self._storage.layout
        if layout is None:  # items, of which each may have another form
            items = storage.read(self._slots).batch
            entries = [get_entry(item, path) if has_keys(item) else None for item in items]
            if any(entry is None for entry in entries):
                raise KeyError(f"some of the stored items have no {format_key(path)}")
            return torch.stack([to_tensor(entry) for entry in entries])
        if path not in layout.paths:
            raise KeyError(f"the stored rows have no {format_key(path)}; there are {', '.join(map(str, self.keys()))}")
        values: Tensor = read_leaves(storage, self._slots, (path,)).batch[0]
        return values

    def keys(self) -> list[Any]:
        """The names of the entries: strings, or tuples of strings where they are nested."""
        layout = self._storage.layout
        paths = [] if layout is None else layout.paths
        named = (path for path in paths if path and all(isinstance(part, str) for part in path))
        return [path[0] if len(path) == 1 else path for path in named]

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys())

    def batch(self) -> Any:
        """The whole rows as a batch [n], or a list of them where they are items that make none: as they are stored,
        without the buffer's transforms.
        """
        batch = self._storage.read(self._slots).batch
        if type(batch) is list and batch and all(isinstance(item, Tensor) for item in batch):
            return torch.stack(batch) if len({item.shape for item in batch}) == 1 else batch
        return batch


def remove_at(storage: Storage, index: Any, generation: Any) -> int:
    """As `ReplayBuffer.remove` of an index."""
    lanes = storage.lanes
    if not storage.initialized:
        raise IndexError("nothing has been written yet")
    slots = _named(storage, lanes, index)
    if generation is None:
        expected = stored_generations(lanes, slots)
        if bool((expected < 0).any()):
            raise IndexError(f"index {int(slots[expected < 0][0])} has not been written; nothing was removed")
    else:
        expected = generations_given(generation)
        if len(expected) != len(slots):
            raise ValueError(f"{len(slots)} rows are indexed, {len(expected)} generations given; nothing was removed")
        there = slots >= 0  # -1 is what writers return for what they refuse
        slots, expected = slots[there], expected[there]
    with storage.mutex:
        return lanes.remove(slots, lanes.counted(slots, expected).contiguous())


def remove_where(storage: Storage, choose: Callable[[Any], Any]) -> int:
    """As `ReplayBuffer.remove` of a predicate. Only what it has chosen of a block is removed in a turn."""
    lanes, removed = storage.lanes, 0
    incarnation = lanes.store.incarnation
    for slots, expected in _blocks(storage, lanes):
        if gone := lanes.store.removed(slots):
            left = torch.ones(len(slots), dtype=torch.bool, device="cpu")
            left[gone] = False
            slots, expected = slots[left], expected[left]
        if not len(slots):
            continue
        chosen = _mask(choose(RowBlock(storage, slots, expected)), len(slots))
        with storage.mutex:
            if storage.lanes is not lanes or lanes.store.incarnation != incarnation:
                break  # all rows were replaced by others meanwhile, which have these generations, too
            if bool(chosen.any()):
                removed += lanes.remove(slots[chosen], lanes.counted(slots[chosen], expected[chosen]).contiguous())
    return removed


def _blocks(storage: Storage, lanes: Lanes) -> Iterator[tuple[Tensor, Tensor]]:
    """Slots and generations (int64 [n]) of the rows that are stored now, some at a time."""
    row_bytes = 1 if storage.layout is None else max(1, storage.layout.payload_bytes)
    capacity, envs = lanes.store.lane_capacity, lanes.envs
    most = max(1, min(_BLOCK_STEPS, _BLOCK_BYTES // (row_bytes * envs)))
    for lane, state in enumerate(lanes.counters()):
        sequence = state["first"]
        while sequence < state["published"]:
            slot = sequence % capacity
            n = min(most, state["published"] - sequence, capacity - slot)
            start = (lane * capacity + slot) * envs
            slots = torch.arange(start, start + n * envs, device="cpu")
            counted = torch.arange(sequence, sequence + n, device="cpu")
            counted = counted if envs == 1 else counted.repeat_interleave(envs)
            yield slots, counted if lanes.own_sequences is None else stored_generations(lanes, slots)
            sequence += n


def _mask(chosen: Any, n: int) -> Tensor:
    """What a predicate returned, as bool [n]."""
    if not isinstance(chosen, Tensor | np.ndarray | list):
        raise TypeError(
            f"the predicate must return a bool for each of the {n} rows that it is given, as a tensor or array [n]; it "
            f"returned a {type(chosen).__name__}. Use the entries of `rows`, as in `lambda rows: rows['episode'] == 17`"
        )
    mask = to_tensor(np.asarray(chosen) if isinstance(chosen, list) else chosen).cpu()
    if mask.dtype != torch.bool or mask.numel() != n:
        raise TypeError(
            f"the predicate must return a bool for each of the {n} rows that it is given; it returned {mask.dtype} "
            f"{list(mask.shape)}. Nothing of these rows was removed"
        )
    return mask.reshape(n)


def _named(storage: Storage, lanes: Lanes, index: Any) -> Tensor:
    """The slots of an index: int64 [n]; -1 is what writers return for what they refuse."""
    if isinstance(index, list | np.ndarray) and (mask := tensor_of(index)).dtype == torch.bool:
        index = mask
    slots = named_slots(lanes, index, storage.env_shape, storage.max_size or 0).slots
    outside = slots[(slots < -1) | (slots >= lanes.capacity)]
    if len(outside):
        raise IndexError(f"index {int(outside[0])} lies outside 0 to {lanes.capacity - 1}; nothing was removed")
    return slots
