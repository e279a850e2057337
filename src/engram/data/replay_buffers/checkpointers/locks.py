"""Advisory locks on files (flock): released by the kernel when their holder dies, so never stale."""

from __future__ import annotations

import fcntl
import os


class FileLock:
    """A lock on the open file `fd`, which it owns from now on; `BlockingIOError` when somebody else holds it.

    Never waits: a saver that finds another one must say so at once, and a reader that finds a snapshot being removed
    must look for the newer one.
    """

    def __init__(self, fd: int, *, exclusive: bool) -> None:
        self._fd = fd
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        _held.add(self)

    def release(self) -> None:
        """Gives the lock back; a second call does nothing, nor does one in a forked child."""
        if self in _held:
            _held.discard(self)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            finally:
                os.close(self._fd)
                self._fd = -1

    def close_descriptor(self) -> None:
        """Closes the descriptor of this process; a forked process that shares the lock keeps it."""
        os.close(self._fd)
        self._fd = -1


_held: set[FileLock] = set()


def _forget_inherited() -> None:
    # A flock belongs to the description that parent and child share: a child that kept it open would hold the lock
    # beyond the death of its parent.
    while _held:
        _held.pop().close_descriptor()


os.register_at_fork(after_in_child=_forget_inherited)
