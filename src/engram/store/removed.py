"""Rows that are taken out of what is drawn: which of them a user means, and the rows that a predicate looks at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import engram._native as _native
from engram.pytree import Key, as_path, format_key, get_entry, has_keys, to_tensor
from engram.store.episodes import StoredTrajectories
from engram.store.indexing import select, stored_generations, stored_slots, tensor_of, to_slots
from engram.store.lanes import Lanes
from engram.store.layout import RowLayout

_BLOCK_STEPS = 1 << 14  # time steps that a predicate looks at together
_BLOCK_BYTES = 1 << 26  # and of long rows fewer, so that a batch of them has no more than this


class RowsOfTable(Protocol):
    """A storage, as it is read here."""

    mutex: Any

    @property
    def lanes(self) -> Lanes | None: ...
    @property
    def layout(self) -> RowLayout | None: ...
    @property
    def ndim(self) -> int: ...
    @property
    def env_shape(self) -> tuple[int, ...]: ...
    @property
    def max_size(self) -> int | None: ...
    def read(self, slots: Tensor) -> Any: ...
    def column(self, path: tuple[str, ...], slots: Tensor) -> Tensor: ...
    def from_slots(self, slots: Tensor) -> Any: ...


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

    def __init__(self, storage: RowsOfTable, slots: Tensor, generation: Tensor) -> None:
        self._storage, self._slots, self.generation = storage, slots, generation
        self.index: Any = storage.from_slots(slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, key: Key) -> Tensor:
        """An entry of the rows, [n, ...]; a KeyError where they have none of this name."""
        path = as_path(key)
        storage = self._storage
        layout, envs = storage.layout, math.prod(storage.env_shape)
        if layout is not None and path not in layout.paths:
            raise KeyError(f"the stored rows have no {format_key(path)}; there are {', '.join(map(str, self.keys()))}")
        if layout is None:  # items, of which each may have another form
            values = get_entry(self.batch(), path)
            if values is None:
                raise KeyError(f"the stored rows have no {format_key(path)}")
            return to_tensor(values)
        with storage.mutex:
            if envs == 1:
                return storage.column(path, self._slots).reshape(len(self), *_inner(layout, path))
            listed, which = np.unique((self._slots // envs).numpy(), return_inverse=True)
            steps, where = to_tensor(listed), to_tensor(which)
            column = storage.column(path, steps)
            return column.reshape(len(steps), envs, *column.shape[1 + len(storage.env_shape) :])[
                where, self._slots % envs
            ]

    def keys(self) -> list[Any]:
        """The names of the entries: strings, or tuples of strings where they are nested."""
        layout = self._storage.layout
        paths = [] if layout is None else layout.paths
        return [path[0] if len(path) == 1 else path for path in paths]

    def batch(self) -> Any:
        """The whole rows as a batch [n], as they are stored: without the buffer's transforms."""
        with self._storage.mutex:
            batch = self._storage.read(self._slots).batch
        if type(batch) is list and batch and all(has_keys(item) or isinstance(item, Tensor) for item in batch):
            return torch.stack(batch)
        return batch


def _inner(layout: RowLayout, path: tuple[str, ...]) -> tuple[int, ...]:
    return next(tuple(leaf.shape) for leaf in layout.leaves if leaf.path == path)


def remove_at(storage: RowsOfTable, index: Any, generation: Any) -> int:
    """As `ReplayBuffer.remove` of an index."""
    lanes = storage.lanes
    if lanes is None:
        raise IndexError("nothing has been written yet")
    slots = _named(storage, lanes, index)
    if generation is None:
        expected = stored_generations(lanes, slots)
        if bool((expected < 0).any()):
            raise IndexError(f"index {int(slots[expected < 0][0])} has not been written; nothing was removed")
    else:
        expected = to_tensor(generation).cpu().reshape(-1).to(torch.int64)
        if len(expected) != len(slots):
            raise ValueError(f"{len(slots)} rows are indexed, {len(expected)} generations given; nothing was removed")
        there = slots >= 0  # -1 is what writers return for what they refuse
        slots, expected = slots[there], expected[there]
    with storage.mutex:
        return lanes.remove(slots, lanes.counted(slots, expected).contiguous())


def remove_where(storage: RowsOfTable, choose: Callable[[Any], Any]) -> int:
    """As `ReplayBuffer.remove` of a predicate. Only what it has chosen of a block is removed in a turn."""
    lanes, removed = storage.lanes, 0
    if lanes is None:
        return 0
    for slots in _blocks(storage, lanes):
        expected = stored_generations(lanes, slots)
        block = RowBlock(storage, slots, expected)
        chosen = _mask(choose(block), len(slots))
        if bool(chosen.any()):
            removed += remove_at(storage, storage.from_slots(slots[chosen]), expected[chosen])
    return removed


def _blocks(storage: RowsOfTable, lanes: Lanes) -> Iterator[Tensor]:
    slots = stored_slots(lanes.store)
    row_bytes = 1 if storage.layout is None else max(1, storage.layout.payload_bytes)
    steps = max(1, min(_BLOCK_STEPS, _BLOCK_BYTES // (row_bytes * lanes.envs)))
    return (block for block in torch.split(slots, steps * lanes.envs) if len(block))


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


def _named(storage: RowsOfTable, lanes: Lanes, index: Any) -> Tensor:
    """The slots of an index: int64 [n]."""
    given = index if isinstance(index, Tensor) else None
    if isinstance(index, slice | range) or (given is not None and given.dtype == torch.bool):
        return select(lanes.store, index, storage.env_shape).slots
    parts = [tensor_of(i) for i in index] if isinstance(index, tuple) else [tensor_of(index)]
    if any(part.dtype == torch.bool and part.ndim for part in parts):
        return select(lanes.store, index, storage.env_shape).slots
    if any(part.dtype == torch.bool or part.is_floating_point() or part.is_complex() for part in parts):
        raise IndexError(f"indices must be integers, found {[part.dtype for part in parts]}; nothing was removed")
    dims = 1 + len(storage.env_shape)
    if dims > 1 and (len(parts) != dims if isinstance(index, tuple) else parts[0].shape[-1:] != (dims,)):
        raise IndexError(
            f"steps of several environments are named by a tuple (time, {', '.join(['env'] * (dims - 1))}) of indices, "
            f"or [n, {dims}], got {index!r:.80}; nothing was removed"
        )
    slots = to_slots(tuple(parts) if isinstance(index, tuple) else parts[0], storage.env_shape, storage.max_size or 0)
    outside = slots[(slots < -1) | (slots >= lanes.capacity)]
    if len(outside):
        raise IndexError(f"index {int(outside[0])} lies outside 0 to {lanes.capacity - 1}; nothing was removed")
    return slots


# ---- for exports, which leave removed rows out ----
def removed_steps(store: _native.Store, lane: int, steps: range) -> npt.NDArray[np.bool_] | None:
    """Which rows of the steps with these sequences of a lane were removed: bool [steps, envs]; None: none was."""
    bits = store.removed_bits(lane, steps.start, max(steps.start, steps.stop))
    if not bits:
        return None
    flags = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(steps) * store.envs, bitorder="little")
    return flags.astype(np.bool_).reshape(len(steps), store.envs)


def without_removed(
    store: _native.Store, trajectories: StoredTrajectories, rows: list[range]
) -> tuple[StoredTrajectories, list[npt.NDArray[np.bool_] | None]]:
    """What is left of trajectories, and the removed rows of each lane.

    No trajectory goes on over removed steps: what lies before them and what lies behind them is one each.

    Args:
        rows: of each lane the sequences of the steps that the trajectories are made of.
    """
    removed = [removed_steps(store, lane, steps) for lane, steps in enumerate(rows)]
    if all(one is None for one in removed):
        return trajectories, removed
    columns = np.stack([values.numpy() for values in trajectories], 1)
    parts = []
    for lane, env in dict.fromkeys(map(tuple, columns[:, :2].tolist())):
        own = columns[(columns[:, 0] == lane) & (columns[:, 1] == env)]
        gone = removed[lane]
        if gone is None or not gone[:, env].any():
            parts.append(own)
            continue
        left = ~gone[:, env]
        begins = left.copy()
        begins[1:] &= ~left[:-1]
        begins[own[:, 2] - rows[lane].start] = True
        begins &= left
        at = np.flatnonzero(begins)
        lengths = np.diff(np.append(np.cumsum(left)[at] - 1, left.sum()))
        parts.append(np.stack([np.full(len(at), lane), np.full(len(at), env), at + rows[lane].start, lengths], 1))
    joined = np.concatenate(parts) if parts else columns
    return StoredTrajectories(*map(to_tensor, np.ascontiguousarray(joined.T))), removed
