"""Small observations of one environment, kept as bytes."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from engram.collectors.observations import Rows, check_shapes
from engram.envs.gym_codecs import Leaf

LARGEST = 1024  # bytes of one observation: above, the second copy costs more than one write into an array


def can_pack(leaves: list[Leaf], width: int) -> bool:
    """Whether the observations are one small array of one environment."""
    codec = leaves[0].codec
    is_single = width == 1 and len(leaves) == 1 and not leaves[0].path
    size = math.prod(codec.raw_shape) * codec.raw_dtype.itemsize
    return is_single and len(codec.raw_shape) > 0 and 0 < size <= LARGEST


class PackedObservations:
    """What `Observations` is, for one environment, while nobody reads the observations: a list append for each.

    `rows` grows by one observation a step. Who appends bytes has looked at `dtype` and `shape`; `pack` makes bytes of
    anything else, exactly as numpy assigns it to a row of an array.
    """

    def __init__(self, leaf: Leaf, first_row: Rows | None) -> None:
        self._leaf = leaf
        self.dtype = leaf.codec.raw_dtype
        self.shape = leaf.codec.raw_shape
        self.rows: list[bytes] = [] if first_row is None else [first_row[0].tobytes()]
        self._moved: dict[int, bytes] = {}  # by step: the last observation of an episode

    def pack(self, raw: Any) -> bytes:
        """The bytes of one observation. Raises ValueError where numpy cannot broadcast it to the space's shape."""
        row = np.empty(self.shape, self.dtype)
        row[...] = raw
        return row.tobytes()

    def put_first(self, slot: int, raw: Any) -> None:
        """The first observation of an episode. Raises ValueError for another shape than the space's."""
        rows = self.rows
        if rows:
            last = rows.pop()
            if slot:
                self._moved[slot - 1] = last
        if type(raw) is np.ndarray and raw.dtype is self.dtype and raw.shape == self.shape:
            rows.append(raw.tobytes())
        else:
            check_shapes([self._leaf], raw)
            rows.append(self.pack(raw))

    def last_row(self) -> Rows:
        """What the environment shows after the last step."""
        return [np.frombuffer(self.rows[-1], self.dtype).reshape((1, *self.shape))]

    def before(self) -> dict[Any, Tensor]:
        """The observations before the steps, `[steps, *shape]` under their key."""
        return self._tensor(self._joined[:-1])

    def after(self) -> dict[Any, Tensor]:
        """The observations after the steps, the last ones of episodes included; own memory."""
        following = self._joined[1:].copy()
        if self._moved:
            moved = np.frombuffer(b"".join(self._moved.values()), self.dtype)
            following[list(self._moved)] = moved.reshape((-1, *self.shape))
        return self._tensor(following)

    @cached_property
    def _joined(self) -> np.ndarray[Any, Any]:
        whole = bytearray().join(self.rows)  # not bytes: torch wants memory that may be written
        return np.frombuffer(whole, self.dtype).reshape((len(self.rows), *self.shape))

    def _tensor(self, array: np.ndarray[Any, Any]) -> dict[Any, Tensor]:
        return {self._leaf.key: self._leaf.codec.encode(array)}
