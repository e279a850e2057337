"""Who holds what of a store that several processes share: byte-range locks that die with their process.

Open file description locks (`fcntl(2)`): they belong to the description that took them, so a process that dies
leaves nothing behind, and a forked child that closes the inherited description does not unlock its parent's lane.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
import weakref
from collections.abc import Callable, Iterator

from engram._system import open_regular
from engram.errors import StorageError, StorageInUseError

# Far behind the last byte of any store: locks need no bytes behind them.
_EVERYBODY = 1 << 60
_LANES = _EVERYBODY + 1
_DESCRIPTORS = "/proc/self/fd"
_PATIENCE = 10.0  # seconds that an opener waits for one who is alone with the store

_live: weakref.WeakSet[LaneLocks] = weakref.WeakSet()


class LaneLocks:
    """The locks of one open store in this process.

    Everybody who has the store open holds one byte shared; to be alone is to hold it exclusively. Each lane has a
    byte that its writer holds.

    Args:
        fd: a descriptor of the file, opened by this object's owner and closed here.
        reopen: a path that opens the same file again; "" for a file without a name.
        needs, mend: what to do, alone, before anybody uses a store that was left in the middle of something.
    """

    def __init__(
        self, fd: int, reopen: str = "", needs: Callable[[], bool] | None = None, mend: Callable[[], None] | None = None
    ) -> None:
        self.fd = fd
        self._reopen = reopen
        self._broken = ""
        # A description of its own for the locks: a map keeps the description that it was made through alive, so a
        # process that dies would hold its locks for as long as a child that it had forked keeps the map.
        try:
            # A file without a name, where there is no /proc, cannot be opened again; then forked children are refused.
            self._locked = self._own_description() if reopen or os.path.isdir(_DESCRIPTORS) else os.dup(fd)
        except BaseException:
            os.close(fd)
            raise
        self._closer = weakref.finalize(self, _close, fd, self._locked)
        try:
            self._join(needs, mend)
        except BaseException:
            self._closer()  # now: the error may be kept for long, and with it what it came through
            raise
        _live.add(self)

    def take_lane(self, lane: int) -> bool:
        """Takes a lane unless somebody has it."""
        return _lock(self._locked, fcntl.F_WRLCK, _LANES + lane)

    def free_lane(self, lane: int) -> None:
        _lock(self._locked, fcntl.F_UNLCK, _LANES + lane)

    def try_alone(self) -> bool:
        """Becomes alone with the store, if nobody else has it open; `not_alone` ends that."""
        return _lock(self._locked, fcntl.F_WRLCK, _EVERYBODY)

    def not_alone(self) -> None:
        _lock(self._locked, fcntl.F_RDLCK, _EVERYBODY)

    @contextlib.contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Runs `what` while nobody else has the store open; a StorageInUseError where somebody has."""
        if not self.try_alone():
            raise StorageInUseError(
                f"{what} needs the store alone, and another process or object has it open; close it there first"
            )
        try:
            yield
        finally:
            self.not_alone()

    def close(self) -> None:
        """Gives everything back."""
        self._closer()
        self.fd = -1
        _live.discard(self)

    def after_fork(self) -> None:
        """In a child: a description of its own in the place of the parent's, whose locks stay as they are.

        The child does not count as a user of the store before `join`: most children never touch it.
        """
        if self.fd < 0:
            return
        try:
            mine = self._own_description()
        except (OSError, StorageError) as error:
            # With the parent's description the child would believe to hold what its parent holds.
            self._broken = f"this forked process could not open the store for itself: {error}"
            return
        os.dup2(mine, self._locked, inheritable=False)
        os.close(mine)

    def join(self) -> None:
        """Becomes one of those who have the store open.

        Raises:
            StorageError: this is a forked process that could not open the store for itself.
        """
        if self._broken:
            raise StorageError(self._broken)
        self._join()

    def _own_description(self) -> int:
        try:
            return os.open(f"{_DESCRIPTORS}/{self.fd}", os.O_RDWR | os.O_CLOEXEC)  # whatever the file is called now
        except OSError:
            if not self._reopen:
                raise
        fd = open_regular(self._reopen, os.O_RDWR)
        if not os.path.samestat(os.fstat(fd), os.fstat(self.fd)):
            os.close(fd)
            raise StorageError(f"{self._reopen} is another file by now")
        return fd

    def _join(self, needs: Callable[[], bool] | None = None, mend: Callable[[], None] | None = None) -> None:
        """Takes the shared lock; whoever comes first, alone, mends before."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            if mend is not None and self.try_alone():
                mend()
                self.not_alone()
                return
            if _lock(self._locked, fcntl.F_RDLCK, _EVERYBODY):
                if needs is None or not needs():
                    # Whoever was here before us has looked for what is only seen, and mended, alone; and if they died
                    # before they had, we are alone now.
                    if mend is not None and self.try_alone():
                        mend()
                        self.not_alone()
                    return
                # Whoever was mending died in the middle of it: come in again, alone if possible.
                _lock(self._locked, fcntl.F_UNLCK, _EVERYBODY)
            if time.monotonic() > deadline:
                raise StorageInUseError("another process has the store for itself alone; try again when it is done")
            time.sleep(0.002)


def in_use(fd: int) -> bool:
    """Whether somebody has the store of this descriptor open, asked without a lock of one's own."""
    asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, _EVERYBODY, 1, 0)
    found: tuple[int, ...] = struct.unpack("hhqqi4x", fcntl.fcntl(fd, _GET, asked))
    return found[0] != fcntl.F_UNLCK


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def _lock(fd: int, kind: int, byte: int) -> bool:
    flock = struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0)
    try:
        fcntl.fcntl(fd, _SET, flock)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


_SET = getattr(fcntl, "F_OFD_SETLK", 37)
_GET = getattr(fcntl, "F_OFD_GETLK", 36)


def _after_fork() -> None:
    for locks in list(_live):
        locks.after_fork()


os.register_at_fork(after_in_child=_after_fork)


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
