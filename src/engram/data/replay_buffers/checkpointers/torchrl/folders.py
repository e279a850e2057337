"""Directories and files that somebody else wrote: opened without following a link, sized before they are read."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from engram._system import check_memory
from engram.checkpoint.directory import open_below
from engram.errors import CheckpointError, CorruptCheckpointError

Bytes = npt.NDArray[np.uint8]

_MOST_JSON = 1 << 24
_MOST_ITEMS = 1 << 56
_MOST_DIMS = 32
_CODE = (".pkl", ".pickle", ".pt", ".pth")

DTYPES: dict[str, torch.dtype] = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16",
        "float32", "float64", "complex64", "complex128",
    )
}  # fmt: skip


class Folder:
    """An open directory. Errors name the file: CorruptCheckpointError what cannot be, CheckpointError what is not read.

    What is opened is closed with `stack`.
    """

    def __init__(self, path: str, stack: ExitStack, fd: int | None = None) -> None:
        self.path, self._stack = path, stack
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if fd is None else fd
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened ({error.strerror})") from error
        stack.callback(os.close, self._fd)

    def names(self) -> list[str]:
        """What is in it, but for hidden files."""
        return sorted(name for name in os.listdir(self._fd) if not name.startswith("."))

    def has(self, name: str) -> bool:
        return name in os.listdir(self._fd)

    def nbytes(self, name: str) -> int:
        """Size of a file that is not opened."""
        try:
            return os.stat(_plain(name), dir_fd=self._fd, follow_symlinks=False).st_size
        except (OSError, ValueError) as error:
            raise self.bad(name, f"it cannot be found ({error})") from None

    def size(self, name: str, nothing: int) -> int:
        """Size of a file; where `nothing` is 0 there need not be one."""
        return self.nbytes(name) if nothing or self.has(name) else 0

    def is_folder(self, name: str) -> bool:
        """Whether it is a directory, and not a link to one."""
        return self.has(name) and stat.S_ISDIR(os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mode)

    def folder(self, name: str) -> Folder:
        try:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(_plain(name), flags, dir_fd=self._fd)
        except (OSError, ValueError) as error:
            raise self.bad(name, f"it is not a directory, or a link to one ({error})") from None
        return Folder(os.path.join(self.path, name), self._stack, fd)

    def only(self, expected: Collection[str]) -> None:
        """Refuses anything else that lies here: it would be lost without a word."""
        for name in self.names():
            if name not in expected:
                self.refuse_code(name)
                raise self.bad(name, "nothing in the directory's JSON files says what it is")

    def refuse_code(self, name: str) -> None:
        if name.endswith(_CODE):
            raise CheckpointError(
                f"{os.path.join(self.path, name)} is a pickle, which runs code when it is read: engram opens none. "
                "Save the buffer again without what is in it (data that are tensors, numbers and strings need none)"
            )

    def json(self, name: str) -> dict[str, Any]:
        """A small JSON file that holds an object."""
        with self.file(name) as file:
            if os.fstat(file.fileno()).st_size > _MOST_JSON:
                raise self.bad(name, f"it has more than {_MOST_JSON} bytes")
            text = file.read(_MOST_JSON)
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self.bad(name, f"it is not JSON ({error})") from None
        if not isinstance(found, dict):
            raise self.bad(name, "it does not hold a JSON object")
        return found

    def file(self, name: str) -> BinaryIO:
        try:
            return open(open_below(self._fd, _plain(name)), "rb", buffering=0)
        except (OSError, ValueError) as error:
            raise self.bad(name, f"it cannot be opened ({error})") from None

    def column(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], lead: int) -> Column:
        """A file of values in C order; an item is what lies behind the first `lead` dimensions."""
        count, item = math.prod(shape[:lead]), math.prod(shape[lead:]) * dtype.itemsize
        if not count * item:
            return Column(-1, os.path.join(self.path, name), count, item)
        file = self._stack.enter_context(self.file(name))
        found = os.fstat(file.fileno()).st_size
        if found != count * item:
            raise self.bad(name, f"it has {found} bytes, {count * item} are {dtype} {list(shape)}")
        return Column(file.fileno(), os.path.join(self.path, name), count, item)

    def dtype(self, name: str, value: Any) -> torch.dtype:
        """A dtype by its name; `name` is the file that says so."""
        found: torch.dtype | None = DTYPES.get(value) if isinstance(value, str) else None
        if found is None:
            raise self.bad(name, f"{value!r:.80} is not a dtype that engram stores ({', '.join(DTYPES)})")
        return found

    def shape(self, name: str, value: Any) -> tuple[int, ...]:
        """A shape; `name` is the file that says so."""
        if not isinstance(value, list) or len(value) > _MOST_DIMS or any(type(d) is not int or d < 0 for d in value):
            raise self.bad(name, f"{value!r:.80} is not a shape")
        if math.prod(max(1, d) for d in value) > _MOST_ITEMS:
            raise self.bad(name, f"{value!r:.80} is larger than any storage")
        return tuple(value)

    def count(self, name: str, value: Any) -> int:
        """A number of steps; `name` is the file that says so."""
        if type(value) is not int or not 0 <= value <= _MOST_ITEMS:
            raise self.bad(name, f"{value!r:.80} is not a count")
        return value

    def bad(self, name: str, reason: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(os.path.join(self.path, name), reason)


class Column:
    """Items of one size, one after the other in a file whose size was checked."""

    def __init__(self, fd: int, path: str, count: int, nbytes: int) -> None:
        self._fd, self._path, self.count, self.nbytes = fd, path, count, nbytes

    def read(self, start: int, stop: int) -> Bytes:
        """uint8 [stop - start, nbytes]."""
        check_memory((stop - start) * self.nbytes, self._path)
        out = np.empty((stop - start, self.nbytes), np.uint8)
        view, at = out.reshape(-1).data, start * self.nbytes
        while len(view):
            try:
                got = os.preadv(self._fd, [view[: 1 << 30]], at)
            except OSError as error:
                raise CorruptCheckpointError(self._path, f"it cannot be read ({error.strerror})") from error
            if not got:
                raise CorruptCheckpointError(self._path, f"it ends at byte {at}; it was longer before")
            view, at = view[got:], at + got
        return out


def _plain(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not a name of a file")
    return name
