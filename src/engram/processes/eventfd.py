"""Wake-ups between processes: one short system call on either side."""

from __future__ import annotations

import os
import sys
from multiprocessing import reduction
from typing import Any

_WAKE, _CLOSE = (n.to_bytes(8, sys.byteorder) for n in (1, 2**32))


class EventFd:
    """One process calls `set`, one other `wait`; calls of `set` before the next `wait` count as one.

    It can be pickled to a process that is being started. Linux: an eventfd, which unlike a pipe or a socket does not
    make the scheduler bring both processes to the same core. Elsewhere: a pipe.

    >>> event = EventFd()
    >>> event.set()
    >>> event.wait()
    True
    """

    def __init__(self) -> None:
        if sys.platform == "linux":
            self._read = self._write = os.eventfd(0, os.EFD_CLOEXEC)
        else:
            self._read, self._write = os.pipe()

    def set(self) -> None:
        """Wakes the process that waits, or lets its next `wait` return at once."""
        os.write(self._write, _WAKE)

    def close_remote(self) -> None:
        """Wakes the process that waits for the last time: its `wait` returns False."""
        os.write(self._write, _CLOSE)

    def wait(self) -> bool:
        """Sleeps until `set` is called; False after `close_remote`."""
        return int.from_bytes(os.read(self._read, 8), sys.byteorder) < 2**32

    def fileno(self) -> int:
        """Readable when `wait` would return at once."""
        return self._read

    def close(self) -> None:
        """Closes the descriptors in this process; a second call does nothing."""
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
