"""A way to wake another process that costs one short system call on either side."""

from __future__ import annotations

import os
import sys
from multiprocessing import reduction
from typing import Any

_RING, _LAST = (n.to_bytes(8, sys.byteorder) for n in (1, 2**32))


class Bell:
    """One process rings, one other waits; rings that nobody has heard yet add up to one.

    It may be sent to a process that is being started. An eventfd where there is such a thing: unlike a pipe or a
    socket, it does not ask the scheduler to bring both processes to the same core.

    >>> bell = Bell()
    >>> bell.ring()
    >>> bell.wait()
    True
    """

    def __init__(self) -> None:
        if sys.platform == "linux":
            self._read = self._write = os.eventfd(0, os.EFD_CLOEXEC)
        else:
            self._read, self._write = os.pipe()

    def ring(self) -> None:
        """Wakes who waits, or will."""
        os.write(self._write, _RING)

    def ring_last(self) -> None:
        """The same, and no ring will follow."""
        os.write(self._write, _LAST)

    def wait(self) -> bool:
        """Sleeps until it rings; False for the last ring."""
        return int.from_bytes(os.read(self._read, 8), sys.byteorder) < 2**32

    def fileno(self) -> int:
        """Readable when `wait` would return at once."""
        return self._read

    def close(self) -> None:
        """Gives the descriptors back, here; a second call does nothing."""
        for fd in {self._read, self._write} - {-1}:
            os.close(fd)
        self._read = self._write = -1

    def __del__(self) -> None:
        if hasattr(self, "_write"):
            self.close()

    def __getstate__(self) -> list[Any]:
        return [reduction.DupFd(fd) for fd in dict.fromkeys((self._read, self._write))]

    def __setstate__(self, handles: list[Any]) -> None:
        self._read, *other = [handle.detach() for handle in handles]
        self._write = other[0] if other else self._read
