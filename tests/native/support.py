"""Codecs, and rows that are a function of their write number, as tensors; the stores are those of `core/support.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from engram import _native
from engram.store import layout as _layout  # tells the core which torch there is

del _layout

_DLPACK = {
    torch.int8: (0, 8), torch.int16: (0, 16), torch.int32: (0, 32), torch.int64: (0, 64),
    torch.uint8: (1, 8), torch.uint16: (1, 16), torch.uint32: (1, 32), torch.uint64: (1, 64),
    torch.float16: (2, 16), torch.float32: (2, 32), torch.float64: (2, 64), torch.bfloat16: (4, 16),
    torch.complex64: (5, 64), torch.complex128: (5, 128), torch.bool: (6, 8),
}  # fmt: skip
DTYPES = list(_DLPACK)


def codec(*leaves: tuple[torch.dtype, tuple[int, ...]]) -> tuple[Any, int]:
    """A codec for lists of these leaves, and the bytes of a row; largest items must come first."""
    specs, at = [], 0
    for dtype, shape in leaves:
        specs.append((*_DLPACK[dtype], shape, at))
        at += dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    return _native.Codec(specs, None, TensorDict, None, torch.Size, np.ndarray, np.generic), max(1, at)


def words(n: int) -> tuple[Any, int]:
    """A codec for one leaf of n int64."""
    return codec((torch.int64, (n,)))


def row_words(numbers: Tensor, n: int, edition: int = 0) -> Tensor:
    """int64 [len(numbers), n]: every word of a row is a function of its write number and its place."""
    numbers = numbers.reshape(-1, 1)
    return numbers * 1_000_003 + torch.arange(n) * 7 + edition * (1 << 50)


def numbers_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The write number that each row of `row_words` was made from, and whether every word agrees with it."""
    first = rows[:, 0]
    number = first.remainder(1 << 50).div(1_000_003, rounding_mode="floor")
    edition = first.div(1 << 50, rounding_mode="floor")
    made = row_words(number, rows.shape[1]) + edition.reshape(-1, 1) * (1 << 50)
    return number, (made == rows).all(1)


def append_words(s: _native.Store, code: Any, n: int, lane: int = 0) -> Tensor:
    """Appends the next n rows of `row_words` to a lane of one strand; returns their slots."""
    width = s.payload_bytes // 8
    first = s.lane(lane)["published"]
    return s.append(lane, code.check_list([row_words(torch.arange(first, first + n), width)], 1, 0))


def append_strands(s: _native.Store, code: Any, n: int, lane: int = 0) -> Tensor:
    """The same for several strands: strand e of time t holds number t * strands + e."""
    width, first = s.payload_bytes // 8, s.lane(lane)["published"]
    numbers = torch.arange(first, first + n).reshape(-1, 1) * s.envs + torch.arange(s.envs)
    rows = row_words(numbers.reshape(-1), width).reshape(n, s.envs, width)
    return s.append(lane, code.check_list([rows], 2, 0))


def slots(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)
