"""Memory that several processes see, and that nothing remembers when they are gone."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from multiprocessing import reduction
from typing import Any

import numpy as np

from engram._system import free_memory, human_bytes

Array = np.ndarray[Any, Any]
ALIGNMENT = 64


class SharedMemory:
    """Memory without a name. Whoever has it, by a fork or sent to a process that is being started, sees the same.

    It has a size once one of them has called `allocate`; the others then `attach` with the same sizes. It goes when the
    last process that has it ends or drops it, and needs no cleaning up. Arrays taken from it stay usable as long as
    somebody holds them.

    >>> memory = SharedMemory()
    >>> a, b = memory.allocate([3, 5])
    >>> a[:] = 7
    >>> memory.attach([3, 5])[0].tolist(), len(b)
    ([7, 7, 7], 5)
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create("engram", os.MFD_CLOEXEC)
        else:
            self._fd, name = tempfile.mkstemp(prefix="engram")
            os.unlink(name)

    def allocate(self, sizes: Sequence[int]) -> list[Array]:
        """Zeroed uint8 arrays of so many bytes each. Raises MemoryError where there is no room for them."""
        total = max(1, sum(_rounded(size) for size in sizes))
        free = free_memory()
        if free is not None and total > free:  # the kernel would promise it, and end processes when it is used
            raise MemoryError(f"no room for {human_bytes(total)} of shared memory: {human_bytes(free)} are free")
        try:
            os.ftruncate(self._fd, total)
        except OSError as error:  # a limit of this process (RLIMIT_FSIZE) counts for it, too
            raise MemoryError(f"no {human_bytes(total)} of shared memory: {error.strerror}") from error
        return self.attach(sizes)

    def attach(self, sizes: Sequence[int]) -> list[Array]:
        """The arrays that `allocate` gave, as this process sees them."""
        whole = np.frombuffer(mmap.mmap(self._fd, 0), np.uint8)
        starts = np.cumsum([0, *(_rounded(size) for size in sizes)]).tolist()
        return [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    def close(self) -> None:
        """Gives the descriptor back, here; arrays stay. A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()

    def __getstate__(self) -> Any:
        return reduction.DupFd(self._fd)

    def __setstate__(self, handle: Any) -> None:
        self._fd = handle.detach()


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
