"""The floors, measured in the same rounds: `native/floor.cpp` through ctypes, its loop on the native side."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from benchmarks.data import row_bytes
from benchmarks.timing import Turn

LIBRARY = Path(__file__).parent / "native" / "floor.so"
DOUBLES = (
    "floor_gather",
    "floor_scatter",
    "floor_tree_gather",
    "floor_tree_update",
    "floor_make_file",
    "floor_mapped",
)
MODES = {"touch": 0, "readahead": 1, "io_uring": 2}


def library() -> ctypes.CDLL:
    """The built floors; an error that says how to build them when they are not there."""
    if not LIBRARY.exists():
        raise FileNotFoundError(f"{LIBRARY.name} is not built: run `make bench`, which builds it with a C++ compiler")
    lib = ctypes.CDLL(str(LIBRARY))
    for name in ("floor_table", "floor_tree"):
        getattr(lib, name).restype = ctypes.c_void_p
    for name in DOUBLES:
        getattr(lib, name).restype = ctypes.c_double
    return lib


def _sizes(leaves: dict[str, int]) -> tuple[ctypes.Array[ctypes.c_size_t], ctypes.c_size_t]:
    values = list(leaves.values())
    return (ctypes.c_size_t * len(values))(*values), ctypes.c_size_t(len(values))


class Table:
    """Packed rows in memory; `gather`, `scatter` and what `runs` makes are turns."""

    def __init__(self, leaves: dict[str, int], rows: int, batch: int) -> None:
        self._lib = library()
        width = ctypes.c_size_t(row_bytes(leaves))
        table = self._lib.floor_table(ctypes.c_size_t(rows), width, *_sizes(leaves), ctypes.c_size_t(batch))
        if not table:
            raise MemoryError(f"no memory for {rows} rows of {width.value} bytes")
        self._table = ctypes.c_void_p(table)

    def gather(self, n: int) -> float:
        """Copy `n` batches of random rows into one array a leaf."""
        return self.runs(1)(n)

    def runs(self, length: int) -> Turn:
        """The same with rows that lie next to each other `length` at a time, as slices do."""
        return lambda n: float(self._lib.floor_gather(self._table, ctypes.c_size_t(length), ctypes.c_size_t(n)))

    @property
    def handle(self) -> ctypes.c_void_p:
        """What native code knows it by."""
        return self._table

    def scatter(self, n: int) -> float:
        """Copy `n` batches from one array a leaf to the write cursor."""
        return float(self._lib.floor_scatter(self._table, ctypes.c_size_t(n)))

    def __del__(self) -> None:
        if hasattr(self, "_table"):
            self._lib.floor_free(self._table)


class Priorities:
    """An 8-wide tree of sums over the rows of a table; `draw` and `update` are turns."""

    def __init__(self, leaves: dict[str, int], rows: int, batch: int) -> None:
        self._table = Table(leaves, rows, batch)
        self._lib = library()
        self._batch = ctypes.c_size_t(batch)
        self._tree = ctypes.c_void_p(self._lib.floor_tree(ctypes.c_size_t(rows)))

    def draw(self, n: int) -> float:
        """Draw `n` batches in proportion to their priorities, with weights, and copy their rows."""
        return float(self._lib.floor_tree_gather(self._tree, self._table.handle, ctypes.c_size_t(n)))

    def update(self, n: int) -> float:
        """Give `n` batches of random rows other priorities."""
        return float(self._lib.floor_tree_update(self._tree, self._batch, ctypes.c_size_t(n)))

    def __del__(self) -> None:
        if hasattr(self, "_tree"):
            self._lib.floor_tree_free(self._tree)


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
