"""Stores, codecs, and rows that are a function of their write number, with arrays of numpy in the place of tensors."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engram import _native

HEADER_BYTES, LANE_BYTES = 1024, 512  # docs/store-format.md
INCARNATION, EDITS, LOG_HEAD, BOOT_ID = 512, 576, 584, 640
STORE_ID = bytes(range(16))

Array = np.ndarray[Any, Any]

_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}  # DLPack's, of numpy's kinds


class ArrayTensor(np.ndarray):
    """What stands for a tensor where there is no torch: it is what the core returns, and a plain array an array."""

    def contiguous(self) -> ArrayTensor:
        return self.copy()


def use_arrays() -> None:
    """Lets the native core return arrays where it otherwise returns tensors."""
    _native.use_torch(ArrayTensor, None, lambda array: False, _describe, _over)


def _describe(array: ArrayTensor) -> tuple[int, int, int, tuple[int, ...]] | None:
    """Address, DLPack dtype code and bits, shape and strides in items; None where there are no such strides."""
    if array.dtype.kind not in _CODES or any(stride % array.itemsize for stride in array.strides):
        return None
    strides = (stride // array.itemsize for stride in array.strides)
    return array.ctypes.data, _CODES[array.dtype.kind], 8 * array.itemsize, (*array.shape, *strides)


def _over(memory: Array, code: int, bits: int, shape: list[int]) -> ArrayTensor:
    """An array of this dtype over the bytes of another one."""
    kind = next(kind for kind, other in _CODES.items() if other == code)
    return memory.view(f"{kind}{bits // 8}").reshape(shape).view(ArrayTensor)


def codec(*leaves: tuple[str, tuple[int, ...]]) -> tuple[Any, int]:
    """A codec for lists of leaves of these dtypes (as "i8") and shapes, and the bytes of a row; largest items first."""
    specs, at = [], 0
    for name, shape in leaves:
        dtype = np.dtype(name)
        specs.append((_CODES[dtype.kind], 8 * dtype.itemsize, shape, at))
        at += dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    return _native.Codec(specs, None, dict, None, tuple, np.ndarray, np.generic), max(1, at)


def words(n: int) -> tuple[Any, int]:
    """A codec for one leaf of n int64."""
    return codec(("i8", (n,)))


def store(
    payload: int,
    capacity: int,
    *,
    lanes: int = 1,
    strands: int = 1,
    trailer: bool = False,
    fd: int = -1,
    alignment: int = 8,
    layout: bytes = b"{}",
    extents: bool = False,
    ragged: bool = False,
) -> _native.Store:
    if fd >= 0:
        size = _native.Store.size_needed(lanes, capacity, strands, payload, alignment, trailer, len(layout))
        os.ftruncate(fd, max(size, os.fstat(fd).st_size))
    how = (fd, lanes, capacity, strands, payload, alignment, trailer, layout, STORE_ID, extents)
    return _native.Store.create(*how, ragged=ragged)


@contextlib.contextmanager
def file_store(path: Path, payload: int, capacity: int, **options: Any) -> Iterator[_native.Store]:
    """A store with trailers in a new file."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield store(payload, capacity, trailer=True, fd=fd, **options)
    finally:
        os.close(fd)


def open_image(path: Path, image: bytes | bytearray | Array) -> tuple[_native.Store, int]:
    """Writes a file and opens the store in it; the caller closes the descriptor."""
    path.write_bytes(bytes(image))
    fd = os.open(path, os.O_RDWR)
    try:
        return _native.Store.open(fd, os.fstat(fd).st_size), fd
    except BaseException:
        os.close(fd)
        raise


def row_words(numbers: Array, n: int, edition: int = 0) -> Array:
    """int64 [len(numbers), n]: every word of a row is a function of its write number and its place."""
    return numbers.reshape(-1, 1) * 1_000_003 + np.arange(n) * 7 + edition * (1 << 50)


def numbers_of(rows: Array) -> tuple[Array, Array]:
    """The write number that each row of `row_words` was made from, and whether every word agrees with it."""
    first = rows[:, 0]
    number, edition = first % (1 << 50) // 1_000_003, first // (1 << 50)
    expected = row_words(number, rows.shape[1]) + edition.reshape(-1, 1) * (1 << 50)
    return number, (expected == rows).all(1)


def append_words(s: _native.Store, code: Any, n: int, lane: int = 0) -> Array:
    """Appends the next n rows of `row_words` to a lane of one strand; returns their slots."""
    first = s.lane(lane)["published"]
    return s.append(lane, code.check_list([row_words(np.arange(first, first + n), s.payload_bytes // 8)], 1, 0))


def append_strands(s: _native.Store, code: Any, n: int, lane: int = 0) -> Array:
    """The same for several strands: strand e of time t holds number t * strands + e."""
    width, first = s.payload_bytes // 8, s.lane(lane)["published"]
    numbers = np.arange(first, first + n).reshape(-1, 1) * s.envs + np.arange(s.envs)
    rows = row_words(numbers.reshape(-1), width).reshape(n, s.envs, width)
    return s.append(lane, code.check_list([rows], 2, 0))


def slots(*numbers: int) -> Array:
    return np.array(numbers, dtype=np.int64)


def powers(start: int, stop: int) -> list[int]:
    """2**start - 1, 2**start, 2**start + 1, ...: where widths and classes change."""
    return list(itertools.chain.from_iterable((2**i - 1, 2**i, 2**i + 1) for i in range(start, stop)))
