"""A saved state on its way into a storage that holds something: kept aside until all of it was found to be whole."""

from __future__ import annotations

import math
import os
import tempfile
import threading
from typing import Any

import numpy as np

from engram.checkpoint.protocols import Rows
from engram.errors import CheckpointError
from engram.store.counters import Counters

MOST_IN_MEMORY = 1 << 28  # bytes of rows; more than these are a matter of gigabytes


class TooManyRowsError(Exception):
    """More rows than are kept aside."""


class StagedRows:
    """The RowSink of a table: takes a saved state, which the table has after `commit`.

    Args:
        spill: rows beyond those that memory is taken for go to a temporary file; else they are too many.
    """

    def __init__(self, table: Any, spill: bool) -> None:
        self._table = table
        self._spill = spill
        self._blocks: list[tuple[int, int, Rows | _InFile]] = []
        self._lock = threading.Lock()  # checkpointers read several files at once
        self._in_memory = 0
        self._file: Any = None
        self._end = 0  # of the file

    def __len__(self) -> int:
        return 0  # filling this destroys nothing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)  # what the table is like

    def begin_restore(self, layout: dict[str, Any] | None, counters: dict[str, Any]) -> None:
        """Raises TooManyRowsError, before any of them was read."""
        self._table.check_restore(layout, counters)
        nbytes = 0 if layout is None else Counters(counters).rows * int(layout["row_bytes"])
        if nbytes > MOST_IN_MEMORY and not self._spill:
            raise TooManyRowsError
        self._layout, self._counters = layout, counters
        self._blocks.clear()

    def write_block(self, lane: int, start: int, rows: Rows) -> None:
        with self._lock:
            in_memory = self._in_memory + rows.nbytes <= MOST_IN_MEMORY
            kept = np.array(rows, order="C") if in_memory else self._spilled(rows)
            self._in_memory += rows.nbytes if in_memory else 0
            self._blocks.append((lane, start, kept))

    def end_restore(self) -> None:
        pass

    def abort_restore(self) -> None:
        self._blocks.clear()

    def commit(self) -> None:
        """Puts the rows in their places."""
        table = self._table
        table.begin_restore(self._layout, self._counters)
        try:
            for lane, start, rows in self._blocks:
                table.write_block(lane, start, rows.read() if isinstance(rows, _InFile) else rows)
            table.end_restore()
        except BaseException:
            table.abort_restore()
            raise

    def _spilled(self, rows: Rows) -> _InFile:
        content = np.ascontiguousarray(rows).reshape(-1)
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="engram-", buffering=0)  # noqa: SIM115 (lives as long as this)
            block = _InFile(self._file, self._end, rows.shape)
            view = content.data
            while len(view):
                done = os.pwrite(self._file.fileno(), view, self._end)
                view, self._end = view[done:], self._end + done
        except OSError as error:
            raise CheckpointError(
                "with load hooks, what is loaded into a buffer that holds rows waits in a temporary file until all of "
                f"it is known to be whole, and that cannot be written ({error.strerror}); set TMPDIR to a place with "
                "room for it, or empty() the buffer first"
            ) from error
        return block


class _InFile:
    """Rows in a temporary file."""

    def __init__(self, file: Any, at: int, shape: tuple[int, ...]) -> None:
        self._file, self._at, self._shape = file, at, shape

    def read(self) -> Rows:
        rows = np.empty(math.prod(self._shape), np.uint8)
        view, at = rows.data, self._at
        while len(view):
            done = os.preadv(self._file.fileno(), [view], at)
            if not done:
                raise CheckpointError("the temporary file of a load has been cut short")
            view, at = view[done:], at + done
        return rows.reshape(self._shape)


class StagedItems:
    """The ItemSink of a list: takes a saved state, which the list has after `commit`."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def __len__(self) -> int:
        return 0

    def check_restore(self, counters: dict[str, Any]) -> None:
        self._storage.check_restore(counters)

    def restore_items(self, items: list[Any], counters: dict[str, Any], sequences: list[int]) -> None:
        self._items, self._counters, self._sequences = items, counters, sequences

    def abort_restore(self) -> None:
        self._items = []

    def commit(self) -> None:
        self._storage.restore_items(self._items, self._counters, self._sequences)


class StagedParts:
    """The members of an ensemble, which have what they were given after `commit`."""

    def __init__(self, checkpointers: list[Any], staged: list[Any]) -> None:
        self._checkpointers, self._staged = checkpointers, staged

    def parts(self) -> list[tuple[Any, Any]]:
        return list(zip(self._checkpointers, self._staged, strict=True))

    def __len__(self) -> int:
        return len(self._staged)

    def commit(self) -> None:
        for one in self._staged:
            one.commit()
