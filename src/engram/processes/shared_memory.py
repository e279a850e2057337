"""Anonymous shared memory, freed by the kernel when its last process ends."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engram._copies import MadeAnew, share_fd
from engram._system import free_memory, human_bytes, memory_file

Array = np.ndarray[Any, Any]
ALIGNMENT = 64


class SharedMemory(MadeAnew):
    """Anonymous memory shared with forked children and with processes that it is pickled to.

    It travels while a process is started, and in messages of a `Worker`.

    One process calls `allocate`; the others then call `attach` with the same sizes. The kernel frees it when the last
    process that holds it ends or drops it. Arrays taken from it stay valid as long as they are referenced.

    >>> memory = SharedMemory()
    >>> a, b = memory.allocate([3, 5])
    >>> a[:] = 7
    >>> memory.attach([3, 5])[0].tolist(), len(b)
    ([7, 7, 7], 5)
    """

    _fd = -1  # until there is one

    def __init__(self, handle: Any = None) -> None:
        if handle is not None:  # of the descriptor that another process has sent
            self._fd = handle.detach()
        else:
            self._fd = memory_file("engram")
        self._mapped: Array | None = None  # in this process

    def allocate(self, sizes: Sequence[int]) -> list[Array]:
        """Returns zeroed uint8 arrays of these sizes in bytes. Raises MemoryError where too little memory is free."""
        total = max(1, sum(_rounded(size) for size in sizes))
        free = free_memory()
        if free is not None and total > free:  # the kernel would grant it and kill processes when it is used
            raise MemoryError(f"no room for {human_bytes(total)} of shared memory: {human_bytes(free)} are free")
        try:
            os.ftruncate(self._fd, total)
        except OSError as error:  # RLIMIT_FSIZE applies to it, too
            raise MemoryError(f"no {human_bytes(total)} of shared memory: {error.strerror}") from error
        return self.attach(sizes)

    def attach(self, sizes: Sequence[int]) -> list[Array]:
        """The arrays that `allocate` returned, mapped in this process."""
        starts = np.cumsum([0, *(_rounded(size) for size in sizes)]).tolist()
        return [self.bytes[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    @property
    def bytes(self) -> Array:
        """All that was allocated, mapped in this process."""
        if self._mapped is None:
            self._mapped = np.frombuffer(mmap.mmap(self._fd, 0), np.uint8)
        return self._mapped

    def fileno(self) -> int:
        """The descriptor, for locks."""
        return self._fd

    def close(self) -> None:
        """Closes the descriptor in this process; arrays stay valid. A second call does nothing."""
        self._mapped = None
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __del__(self) -> None:
        self.close()

    def _made_from(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return SharedMemory, (share_fd(self._fd),)


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
