"""Small observations of one environment, kept as bytes."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from engram.collectors.observations import Rows
from engram.envs.codecs import SpaceLeaf

LARGEST = 1024  # bytes of one observation: above, the second copy costs more than one write into an array


def can_pack(leaves: list[SpaceLeaf]) -> bool:
    """Whether an environment's observation is one small array, of whose values nothing is asked."""
    is_single = len(leaves) == 1 and not leaves[0].path and leaves[0].codec.limits is None
    return is_single and len(leaves[0].codec.raw_shape) > 0 and 0 < _size(leaves[0]) <= LARGEST


def _size(leaf: SpaceLeaf) -> int:
    return int(math.prod(leaf.codec.raw_shape) * leaf.codec.raw_dtype.itemsize)


class PackedObservations:
    """What `Observations` is, for one environment, while nobody reads the observations.

    `rows` grows by the bytes of one observation a step. Who extends it has looked at the array's `dtype` and `shape`,
    which bytes do not have; `pack` makes bytes of anything else that the space allows.
    """

    def __init__(self, leaf: SpaceLeaf, first_row: Rows | None) -> None:
        self._leaf = leaf
        self.dtype = leaf.codec.raw_dtype
        self.shape = leaf.codec.raw_shape
        self._size = _size(leaf)
        self.rows = bytearray() if first_row is None else bytearray(first_row[0].tobytes())
        self._moved: dict[int, bytearray] = {}  # by step: the last observation of an episode

    def pack(self, raw: Any) -> bytes:
        """The bytes of one observation. Raises ValueError where it is not of the space."""
        return self._leaf.value(raw).tobytes()

    def put_first(self, slot: int, raw: Any) -> None:
        """The first observation of an episode. Raises ValueError as `pack`."""
        first = self.pack(raw)
        if slot:
            self._moved[slot - 1] = self.rows[-self._size :]
        self.rows[slot * self._size :] = first

    def cut(self, steps: int) -> None:
        """Only the first `steps` steps were made."""
        del self.rows[(steps + 1) * self._size :]
        self._moved = {step: last for step, last in self._moved.items() if step < steps}

    def last_row(self) -> Rows:
        """What the environment shows after the last step."""
        return [self._array[-1:].copy()]

    def before(self) -> dict[Any, Tensor]:
        """The observations before the steps, `[steps, *shape]` under their key."""
        return self._tensor(self._array[:-1])

    def after(self) -> dict[Any, Tensor]:
        """The observations after the steps, the last ones of episodes included; own memory."""
        following = self._array[1:].copy()
        if self._moved:
            moved = np.frombuffer(b"".join(self._moved.values()), self.dtype)
            following[list(self._moved)] = moved.reshape((-1, *self.shape))
        return self._tensor(following)

    @cached_property
    def _array(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.rows, self.dtype).reshape((-1, *self.shape))

    def _tensor(self, array: np.ndarray[Any, Any]) -> dict[Any, Tensor]:
        return {self._leaf.key: self._leaf.codec.encode(array)}
