"""The floors, measured in the same rounds: `native/floor.cpp` through ctypes, its loop on the native side."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from benchmarks.data import row_bytes
from benchmarks.timing import Turn

LIBRARY = Path(__file__).parent / "native" / "floor.so"
MODES = {"touch": 0, "readahead": 1, "io_uring": 2}


def library() -> ctypes.CDLL:
    """The built floors; an error that says how to build them when they are not there."""
    if not LIBRARY.exists():
        raise FileNotFoundError(f"{LIBRARY.name} is not built: run `make bench`, which builds it with a C++ compiler")
    lib = ctypes.CDLL(str(LIBRARY))
    lib.floor_table.restype = ctypes.c_void_p
    for name in ("floor_gather", "floor_scatter", "floor_make_file", "floor_mapped"):
        getattr(lib, name).restype = ctypes.c_double
    return lib


def _sizes(leaves: dict[str, int]) -> tuple[ctypes.Array[ctypes.c_size_t], ctypes.c_size_t]:
    values = list(leaves.values())
    return (ctypes.c_size_t * len(values))(*values), ctypes.c_size_t(len(values))


class Table:
    """Packed rows in memory; `gather` and `scatter` are turns."""

    def __init__(self, leaves: dict[str, int], rows: int, batch: int) -> None:
        self._lib = library()
        width = ctypes.c_size_t(row_bytes(leaves))
        table = self._lib.floor_table(ctypes.c_size_t(rows), width, *_sizes(leaves), ctypes.c_size_t(batch))
        if not table:
            raise MemoryError(f"no memory for {rows} rows of {width.value} bytes")
        self._table = ctypes.c_void_p(table)

    def gather(self, n: int) -> float:
        """Copy `n` batches of random rows into one array a leaf."""
        return float(self._lib.floor_gather(self._table, ctypes.c_size_t(n)))

    def scatter(self, n: int) -> float:
        """Copy `n` batches from one array a leaf to the write cursor."""
        return float(self._lib.floor_scatter(self._table, ctypes.c_size_t(n)))

    def __del__(self) -> None:
        if hasattr(self, "_table"):
            self._lib.floor_free(self._table)


def gather(leaves: dict[str, int], rows: int, batch: int) -> Turn:
    """The floor of `sample`."""
    return Table(leaves, rows, batch).gather


def scatter(leaves: dict[str, int], rows: int, batch: int) -> Turn:
    """The floor of `extend` and `add`."""
    return Table(leaves, rows, batch).scatter


def make_file(path: Path, size: int) -> None:
    """Write a file of `size` bytes, sync it and drop it from the page cache."""
    _check(library().floor_make_file(os.fsencode(path), ctypes.c_size_t(size)), path)


def mapped(path: Path, leaves: dict[str, int], rows: int, batch: int, mode: str, batches: int) -> list[float]:
    """Seconds of each of `batches` reads of random rows of a mapped file."""
    seconds = (ctypes.c_double * batches)()
    took = library().floor_mapped(
        os.fsencode(path),
        ctypes.c_size_t(rows),
        ctypes.c_size_t(row_bytes(leaves)),
        *_sizes(leaves),
        ctypes.c_size_t(batch),
        MODES[mode],
        ctypes.c_size_t(batches),
        seconds,
    )
    _check(took, path)
    return list(seconds)


def _check(result: float, path: Path) -> None:
    if result < 0:
        raise OSError(int(-result), os.strerror(int(-result)), str(path))
