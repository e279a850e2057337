"""Priorities of a shard's rows in a file beside its store, so that they come back with the rows."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.errors import StorageError
from engram.kernel.tools import open_regular

FILE_NAME = "priorities"

_HEADER = np.dtype([("magic", "S8"), ("slots", "<i8"), ("store", "S40"), ("highest", "<f8")])
_HEADER_BYTES = 4096
# `next` is the row's sequence + 1, so that zeros are not a record. A record never lies in two sectors of a disk.
_RECORD = np.dtype([("next", "<i8"), ("priority", "<f8")])
_MAGIC = b"engramp1"


class PriorityFile:
    """The priority of each row that was given one, by its slot and sequence; and the highest that any row ever had.

    Each record names its row, so a record of an overwritten row, or one that a killed process left half-written, does
    not count. For one process at a time.

    Args:
        slots: how many the store has; a file takes 16 bytes for each.

    Raises:
        StorageError: there is no room for it, or another file has its name.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> file = PriorityFile(folder / FILE_NAME, 10)
        >>> file.restart("store 1", 1.0)
        >>> file.note(torch.tensor([3]), torch.tensor([13]), torch.tensor([0.5]), 1.0)
        >>> file.close()
        >>> file = PriorityFile(folder / FILE_NAME, 10)
        >>> file.store, file.highest
        ('store 1', 1.0)
        >>> file.of(torch.arange(10) + 10).isnan().logical_not().nonzero()
        tensor([[3]])
    """

    def __init__(self, path: Path, slots: int) -> None:
        size = _HEADER_BYTES + slots * _RECORD.itemsize
        try:
            fd = open_regular(path, os.O_RDWR | os.O_CREAT, mode=0o600)
        except OSError as error:
            raise StorageError(f"{path} cannot be opened: {error.strerror}") from error
        with open(fd, "r+b") as file:
            held = os.fstat(fd).st_size
            if held not in (0, size):
                raise StorageError(f"{path} has {held} bytes, priorities of {slots} rows need {size}; delete it")
            try:
                os.posix_fallocate(fd, 0, size)  # a write to a mapped page without room would end the process
            except OSError as error:
                raise StorageError(f"there is no room for {path}, {size} bytes: {error.strerror}") from error
            memory: Any = np.memmap(file, np.uint8, "r+", shape=(size,))
        self._header = memory[: _HEADER.itemsize].view(_HEADER)
        self._records = memory[_HEADER_BYTES:].view(_RECORD)
        if self._header["magic"][0] not in (b"", _MAGIC) or int(self._header["slots"][0]) not in (0, slots):
            raise StorageError(f"{path} is not a file of priorities of {slots} rows; delete it")
        self._header["slots"], self._header["magic"] = slots, _MAGIC

    @property
    def store(self) -> str:
        """The store that its rows are in; "" if a process died in the middle of `restart`."""
        return str(self._header["store"][0].decode("ascii", "replace"))

    @property
    def highest(self) -> float:
        """The highest priority that any row ever had: new rows get it."""
        highest = float(self._header["highest"][0])
        return highest if math.isfinite(highest) and highest >= 0 else 1.0

    def restart(self, store: str, highest: float) -> None:
        """Forgets all priorities, and is that of this store from now on."""
        self._header["store"] = b""
        self._records["next"] = 0
        self._header["highest"] = highest
        self._header["store"] = store.encode()

    def note(self, slots: Tensor, sequences: Tensor, priorities: Tensor, highest: float) -> None:
        """Keeps the priorities of rows: int64, int64 and floats [n]. Of a row that comes twice the last one counts."""
        at = slots.numpy()
        self._records["next"][at] = 0
        self._records["priority"][at] = priorities.numpy()
        self._records["next"][at] = sequences.numpy() + 1
        self._header["highest"] = highest

    def has(self, slots: Tensor, sequences: Tensor) -> Tensor:
        """Whether rows were given a priority: bool [n], of int64 [n] each."""
        return torch.from_numpy(self._records["next"][slots.numpy()] == sequences.numpy() + 1)

    def of(self, sequences: Tensor) -> Tensor:
        """The priority of the row that each slot holds, whose sequences these are: float64 [slots]; NaN: has none."""
        priorities = np.where(self._records["next"] == sequences.numpy() + 1, self._records["priority"], np.nan)
        # A sequence of -1 is a slot without a row.
        priorities[(sequences.numpy() < 0) | ~np.isfinite(priorities) | (priorities < 0)] = np.nan
        return torch.from_numpy(priorities)

    def close(self) -> None:
        """Ends its use."""
        del self._header, self._records
