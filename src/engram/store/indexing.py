"""Indices as users write them between brackets, as slots: converted once, at the public edge."""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

import engram._native as _native
from engram.errors import is_masked
from engram.pytree import to_tensor
from engram.store.lanes import Lanes

_T = TypeVar("_T")
_LOOKS = 500  # for rows that a writer is overwriting: about two seconds
_PAUSE, _LONGEST_PAUSE = 1e-5, 0.005  # seconds between two of them


class Selection(NamedTuple):
    """Slots (int64 [n]) and the batch shape of their rows; `()` is one row."""

    slots: Tensor
    shape: tuple[int, ...]


class MissingRowError(IndexError):
    """No row lies at an index. One may at the next look, where a writer is overwriting the oldest rows of a ring."""


def stored_slots(store: _native.Store) -> Tensor:
    """Every slot that holds a row, removed or not, in the order of slots: int64 [n]."""
    lanes = [store.lane(i) for i in range(store.lanes)]
    ranges = [(s["first"], max(0, s["published"] - s["first"])) for s in lanes]
    walk = _native.EpochWalk(store, 0, False, ranges, with_removed=True)
    slots, _ = walk.take(store, 0, len(walk))
    return slots


def last_of_each(slots: Tensor) -> Tensor | None:
    """Where each slot is named for the last time: bool [n]; None where none is named twice."""
    last = {slot: k for k, slot in enumerate(slots.tolist())}
    if len(last) == len(slots):
        return None
    mask = torch.zeros(len(slots), dtype=torch.bool, device="cpu")
    mask[list(last.values())] = True
    return mask


def look_again(store: _native.Store, look: Callable[[], _T]) -> _T:
    """What `look` returns, after a first look that met a row which was not there.

    While a writer of another process overwrites the oldest rows of a full ring, their slots hold neither the old row
    nor the new one. That no row is there counts where nobody was overwriting rows since the look before.

    Raises:
        MissingRowError: as the last look.
    """
    before: list[dict[str, Any]] = []
    for attempt in range(_LOOKS):
        full = _full_lanes(store)
        if full == before and all(lane["claimed"] == lane["published"] for lane in full):
            break
        before = full
        time.sleep(min(_LONGEST_PAUSE, _PAUSE * attempt))
        with contextlib.suppress(MissingRowError):
            return look()
    return look()


def _full_lanes(store: _native.Store) -> list[dict[str, Any]]:
    """The counters of lanes in which rows have been overwritten."""
    lanes = [store.lane(i) for i in range(store.lanes)]
    return [lane for lane in lanes if lane["claimed"] - lane["base"] > store.lane_capacity]


def select(store: _native.Store, index: Any, env_shape: tuple[int, ...]) -> Selection:
    """The slots that an index means.

    Args:
        store: the native store, whose counters say which rows exist.
        index: int, slice, range, list, bool mask, tensor or array over the stored time steps; the further entries of a
            tuple index environments.
        env_shape: the shape of the environments, `()` for ndim=1.

    Raises:
        IndexError: a slot that does not exist or has not been written; the message says which.
        MissingRowError: one of these that depends on which rows are stored now.
    """
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    if isinstance(index, str):
        raise IndexError(f"{index!r} is a key; steps are indexed by numbers, slices and masks")
    if not env_shape:
        flat = _one_dimension(store, index)
        if flat is not None:
            return flat
    elif isinstance(index, tuple) and len(index) == 1 + len(env_shape) and all(isinstance(i, Tensor) for i in index):
        return _points(store, index, env_shape)
    grid = stored_slots(store).reshape(-1, *env_shape)
    try:
        slots = grid[_torch_index(index)]
    except IndexError as error:
        raise MissingRowError(f"{index!r:.80} does not index the stored steps {list(grid.shape)}: {error}") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise IndexError(f"{index!r:.80} does not index the stored steps {list(grid.shape)}: {error}") from error
    return Selection(slots.reshape(-1).contiguous(), tuple(slots.shape))


def _one_dimension(store: _native.Store, index: Any) -> Selection | None:
    """The selection of an index over one dimension, without listing all stored slots; None: that is needed."""
    if isinstance(index, bool | np.bool_) or _is_single_bool(index):
        raise IndexError("a single bool is no index; a mask has one entry for each stored step")
    if hasattr(index, "__index__") and not (isinstance(index, Tensor | np.ndarray) and index.ndim):
        i = operator.index(index)
        if i >= 0:
            _check_written(store, i)
            return Selection(torch.tensor([i], device="cpu"), ())
        return None
    if isinstance(index, range):
        index = torch.tensor(list(index), dtype=torch.int64, device="cpu")
    elif isinstance(index, list | np.ndarray):
        index = _listed(index)
    if isinstance(index, Tensor) and index.dtype != torch.bool:
        if index.dtype.is_floating_point or index.dtype.is_complex:
            if index.numel() == 0:
                return Selection(torch.empty(0, dtype=torch.int64, device="cpu"), tuple(index.shape))
            raise IndexError(f"indices must be integers or bools, found {index.dtype}")
        index = index.cpu().to(torch.int64)
        if index.numel() and int(index.min()) < 0:
            stored = stored_slots(store)
            if int(index.min()) < -len(stored):
                raise MissingRowError(f"index {int(index.min())} is out of range for the {len(stored)} stored steps")
            index = torch.where(index < 0, stored[index.clamp(max=-1)], index)
        return Selection(index.reshape(-1).contiguous(), tuple(index.shape))
    return None


def _is_single_bool(index: Any) -> bool:
    return isinstance(index, Tensor) and index.ndim == 0 and index.dtype == torch.bool


def _listed(index: Any) -> Tensor:
    """A list or array of indices as a tensor; an empty one is one of integers."""
    try:
        array = np.asarray(_whole(index))
        return to_tensor(array if array.size or array.dtype == np.bool_ else array.astype(np.int64))
    except (TypeError, ValueError, OverflowError) as error:
        raise IndexError(f"{index!r:.80} is no list of indices: {error}") from None


def _whole(index: Any) -> Any:
    """The index itself; an IndexError for a numpy masked array, whose masked entries are no indices."""
    if is_masked(index):
        raise IndexError(f"{index!r:.80} is a masked array, and no index; use index.compressed()")
    return index


def tensor_of(index: Any) -> Tensor:
    """An index, or one part of it, as a tensor; an empty list is one of integers.

    Raises:
        IndexError: it is no index.
    """
    try:
        return to_tensor(_whole(index), dtype=torch.int64 if type(index) is list and not index else None)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise IndexError(
            f"an index is an integer, or a tensor, array or list of integers, found a {type(index).__name__}: "
            f"{index!r:.80}; nothing was changed"
        ) from None


def _check_written(store: _native.Store, slot: int) -> None:
    if slot >= store.lanes * store.lane_capacity * store.envs:
        raise unwritten(store, slot, IndexError)
    if int(store.generations(torch.tensor([slot], device="cpu"))[0]) < 0:
        raise unwritten(store, slot)


def unwritten(store: _native.Store, slot: int, kind: type[IndexError] = MissingRowError) -> IndexError:
    """The error for a slot that holds no row."""
    return kind(f"index {slot} has not been written; {store.rows()} steps are stored")


def _points(store: _native.Store, index: tuple[Tensor, ...], env_shape: tuple[int, ...]) -> Selection:
    """The selection of (time, env, ...) tensors, as samplers return them."""
    parts = torch.broadcast_tensors(*(i.cpu().to(torch.int64) for i in index))  # type: ignore[no-untyped-call]
    sizes = (store.lanes * store.lane_capacity, *env_shape)
    slots = torch.zeros_like(parts[0])
    for part, size in zip(parts, sizes, strict=True):
        if part.numel() and (int(part.min()) < -size or int(part.max()) >= size):
            raise IndexError(f"an index lies outside the storage's {list(sizes)}")
        slots = slots * size + torch.where(part < 0, part + size, part)
    return Selection(slots.reshape(-1).contiguous(), tuple(slots.shape))


def _torch_index(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(_torch_index(i) for i in index)
    if isinstance(index, range):
        return torch.tensor(list(index), dtype=torch.int64, device="cpu")
    if isinstance(index, list | np.ndarray):
        return _listed(index)
    return index.cpu() if isinstance(index, Tensor) else index


def from_slots(slots: Tensor, env_shape: tuple[int, ...]) -> Tensor | tuple[Tensor, ...]:
    """Slots as users see them: int64 [n], or a tuple (time, env, ...) of such with several dimensions."""
    if not env_shape:
        return slots
    parts = []
    for size in reversed(env_shape):
        parts.append(slots % size)
        slots = slots // size
    return (slots, *reversed(parts))


def to_slots(index: Any, env_shape: tuple[int, ...], capacity: int) -> Tensor:
    """The slots of an index that a sampler returned or a user hands back: int64 [n].

    Raises:
        IndexError: an index that lies outside the storage.
    """
    if env_shape:
        if isinstance(index, Tensor) and index.ndim >= 1 and index.shape[-1] == 1 + len(env_shape):
            index = index.unbind(-1)
        parts = [tensor_of(i).cpu().to(torch.int64).reshape(-1) for i in index]
        slots = torch.zeros_like(parts[0])
        for part, size in zip(parts, (capacity, *env_shape), strict=True):
            if part.numel() and (int(part.min()) < 0 or int(part.max()) >= size):
                raise IndexError(f"an index lies outside the storage's {[capacity, *env_shape]}")
            slots = slots * size + part
        return slots
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    slots = tensor_of(index).cpu().to(torch.int64).reshape(-1)
    return slots.contiguous()


def named_slots(lanes: Lanes, index: Any, env_shape: tuple[int, ...], max_size: int) -> Selection:
    """The slots of an index of any form, whether they hold rows or not; of a slice or a mask those of stored steps.

    Args:
        index: int, int64 [n], a slice, a bool mask; with environments a tuple (time, env) of such, or [n, 2].

    Raises:
        IndexError: it is no index, or lies outside the storage.
    """
    if isinstance(index, slice | range) or (isinstance(index, Tensor) and index.dtype == torch.bool):
        return select(lanes.store, index, env_shape)
    parts = [tensor_of(i) for i in index] if isinstance(index, tuple) else [tensor_of(index)]
    if any(p.dtype == torch.bool or p.is_floating_point() or p.is_complex() for p in parts):
        raise IndexError(f"indices must be integers, found {[p.dtype for p in parts]}; nothing was changed")
    dims, given = 1 + len(env_shape), parts[0]
    if dims > 1 and (len(parts) != dims if isinstance(index, tuple) else given.shape[-1:] != (dims,)):
        found = f"a tuple of {len(parts)}" if isinstance(index, tuple) else f"shape {list(given.shape)}"
        raise IndexError(
            f"with ndim={dims} an index is a tuple (time, env) or ends in a dimension of {dims}, found {found}; "
            "nothing was changed"
        )
    slots = to_slots(tuple(parts) if isinstance(index, tuple) else given, env_shape, max_size)
    shape = tuple(given.shape)
    return Selection(slots, shape[:-1] if env_shape and not isinstance(index, tuple) else shape)


def generations_given(generation: Any) -> Tensor:
    """Generations of any form: int64 [n]; a TypeError for what are none."""
    try:
        given = to_tensor(generation).cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        given = None
    if given is None or given.dtype == torch.bool or given.is_floating_point() or given.is_complex():
        raise TypeError(
            f"generations are sequences, int64, as info['generation'] has them, found a "
            f"{type(generation).__name__}: {generation!r:.80}; nothing was changed"
        )
    return given.to(torch.int64).reshape(-1)


def check_stored(lanes: Lanes, env_shape: tuple[int, ...], index: Any) -> None:
    """An IndexError where an index means a step that is not stored."""
    slots = select(lanes.store, index, env_shape).slots
    if outside := slots[slots >= lanes.capacity].tolist():
        raise unwritten(lanes.store, outside[0], IndexError)
    if missing := slots[lanes.store.generations(slots) < 0].tolist():
        raise unwritten(lanes.store, missing[0])


def stored_generations(lanes: Lanes, slots: Tensor) -> Tensor:
    """The sequence of the row in each slot (int64 [n]); -1 where there is none, as for slot -1, which writers give to
    what they refuse.
    """
    return torch.where(slots < 0, -1, lanes.generations(slots.clamp(min=0)))


def generations_at(lanes: Lanes, env_shape: tuple[int, ...], max_size: int | None, index: Any) -> Tensor:
    """The sequence of the row in each place, int64 in the shape of the index; -1: there is none."""
    slots = to_slots(index, env_shape, max_size or 0)
    if isinstance(index, tuple):
        shape = tuple(np.shape(index[0]))
    else:
        shape = tuple(np.shape(index))[:-1] if env_shape else tuple(np.shape(index))
    return stored_generations(lanes, slots).reshape(shape)


def returned_index(slots: Any, ndim: int, env_shape: tuple[int, ...], *, single: bool) -> Any:
    """Slots as `add` (`single`) and `extend` return them."""
    if ndim > 1:
        # Before the first write a storage does not know its environments; there is nothing to point at, either.
        if not len(slots):
            return slots.new_empty(0, ndim)
        return torch.stack(tuple(from_slots(slots, env_shape)), -1)
    if not single:
        return slots
    return slots if type(slots) is int else int(slots[0])
