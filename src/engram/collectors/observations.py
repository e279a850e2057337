"""The observations of one batch, written as they come and made into tensors once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.envs.codecs import SpaceLeaf

Rows = list[np.ndarray[Any, Any]]


class Observations:
    """Raw observations of `width` environments over `steps` steps.

    Slot `t * width + e` holds what environment e shows before step t; what follows step t is in the same place of row
    t + 1. `put(slot, raw)` takes an observation; it is copied at once, because environments may go on writing into the
    arrays that they gave. Where an observation is one array, whoever has looked at its `dtype` and `shape` may write it
    to `only` himself. A reset moves the last observation of the old episode aside.
    """

    def __init__(self, leaves: list[SpaceLeaf], steps: int, batch_size: torch.Size, first_row: Rows | None) -> None:
        self._leaves = leaves
        self._steps = steps
        self.batch_size = batch_size
        self._width = batch_size.numel()
        slots = (steps + 1) * self._width
        self._arrays = [np.empty((slots, *leaf.codec.raw_shape), leaf.codec.raw_dtype) for leaf in leaves]
        self._moved_slots: list[int] = []
        self._moved: list[Rows] = [[] for _ in leaves]
        for array, row in zip(self._arrays, first_row or (), strict=first_row is not None):
            array[: self._width] = row
        is_single = len(leaves) == 1 and not leaves[0].path
        self.only = self._arrays[0]
        codec = leaves[0].codec
        is_free = is_single and codec.limits is None
        self.dtype = codec.raw_dtype if is_free else None  # None: several arrays, or `put` looks at the values
        self.shape = codec.raw_shape
        self._scalars = _scalars_of(codec.raw_dtype) if is_single and not self.shape else frozenset()
        self._low: Any = -math.inf
        self._high: Any = math.inf
        if codec.limits is not None:
            self._low, self._high = codec.limits

    @property
    def keys(self) -> list[Any]:
        """The keys of the observations."""
        return [leaf.key for leaf in self._leaves]

    def put(self, slot: int, raw: Any) -> None:
        """An observation. Raises ValueError where it is not of the space, and changes nothing then."""
        if type(raw) in self._scalars and self._low <= raw <= self._high:
            with contextlib.suppress(OverflowError):  # an int beyond 64 bits is told of below
                self.only[slot] = raw
                return
        values = [leaf.value(raw) for leaf in self._leaves]
        for array, value in zip(self._arrays, values, strict=True):
            array[slot] = value

    def put_first(self, slot: int, raw: Any) -> None:
        """The first observation of an episode. Raises ValueError as `put`."""
        values = [leaf.value(raw) for leaf in self._leaves]
        if slot >= self._width:
            self._moved_slots.append(slot - self._width)
            for array, moved in zip(self._arrays, self._moved, strict=True):
                moved.append(array[slot].copy())
        for array, value in zip(self._arrays, values, strict=True):
            array[slot] = value

    def cut(self, steps: int) -> None:
        """Only the first `steps` steps were made."""
        slots = (steps + 1) * self._width
        self._steps, self._arrays = steps, [array[:slots] for array in self._arrays]
        kept = [k for k, slot in enumerate(self._moved_slots) if slot < steps * self._width]
        self._moved_slots = [self._moved_slots[k] for k in kept]
        self._moved = [[moved[k] for k in kept] for moved in self._moved]

    def last_row(self) -> Rows:
        """What the environments show after the last step."""
        return [array[-self._width :].copy() for array in self._arrays]

    def rows(self, key: Any) -> Callable[[int], Tensor]:
        """A function from t to the observation `[*batch_size, *shape]` before step t, once it is there."""
        index = self.keys.index(key)
        codec, array = self._leaves[index].codec, self._arrays[index]
        by_row = array.reshape(self._steps + 1, *self.batch_size, *codec.raw_shape)
        if codec.is_plain:
            return torch.from_numpy(by_row).unbind(0).__getitem__  # views: a third of the cost of one index each
        return lambda t: codec.encode(by_row[t])

    def before(self) -> dict[Any, Tensor]:
        """All observations before the steps, `[*batch_size, steps, *shape]` by key."""
        return self._tensors([array[: -self._width] for array in self._arrays])

    def after(self) -> dict[Any, Tensor]:
        """All observations after the steps, the last ones of episodes included; own memory."""
        columns = [array[self._width :].copy() for array in self._arrays]
        if self._moved_slots:
            for column, moved in zip(columns, self._moved, strict=True):
                column[self._moved_slots] = moved
        return self._tensors(columns)

    def _tensors(self, columns: Rows) -> dict[Any, Tensor]:
        pairs = zip(self._leaves, columns, strict=True)
        return {leaf.key: in_time(leaf.codec.encode(column), self.batch_size) for leaf, column in pairs}


def _scalars_of(dtype: Any) -> frozenset[type]:
    """The types of single numbers that `dtype` holds whatever their value."""
    python: dict[str, type] = {"int64": int, "float64": float}
    return frozenset({dtype.type} | ({python[dtype.name]} if dtype.name in python else set()))


def in_time(rows: Any, batch_size: torch.Size) -> Any:
    """`[time * envs, ...]`, tensor, array or TensorDict, as `[*batch_size, time, ...]`."""
    if not batch_size:
        return rows
    by_time = rows.reshape(-1, batch_size.numel(), *rows.shape[1:])
    if isinstance(rows, np.ndarray):
        return np.ascontiguousarray(by_time.swapaxes(0, 1))
    return by_time.transpose(0, 1).contiguous()
