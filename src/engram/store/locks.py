"""Locks of a store that several processes share: byte-range locks that end with their process.

Open file description locks (`fcntl(2)`): they belong to the description that took them, so a process that dies
leaves nothing behind, and a forked child that closes the inherited description does not unlock its parent's lane.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator

from engram._system import fork_registry, notice_fork, open_regular, run_after_fork
from engram.errors import StorageError, StorageInUseError

# Far behind the last byte of any store: locks need no bytes behind them.
_OPEN_BYTE = 1 << 60
_FIRST_LANE_BYTE = _OPEN_BYTE + 1
_FIRST_WRITER_BYTE = 1 << 61
_FLUSH_BYTE = _OPEN_BYTE - 1
_SETTING_BYTE = _OPEN_BYTE - 2
_DESCRIPTORS = "/proc/self/fd"
_FLUSH_TIMEOUT = 60.0  # seconds that a flush waits for that of another process
_OPEN_TIMEOUT = 10.0  # seconds that opening waits for a process that holds the store exclusively


class LaneLocks:
    """The locks of one open store in this process.

    Every process that has the store open holds one byte shared; exclusive use holds it exclusively. Each lane has a
    byte that its writer holds; writers that take turns, or move from lane to lane, hold them shared, and each a byte of
    its own, which says that it lives.

    Args:
        fd: a descriptor of the file, opened by this object's owner and closed here.
        reopen: a path that opens the same file again; "" for a file without a name.
        needs_repair, repair: run before the store is used: `repair` under the exclusive lock where nobody else has it
            open, or where `needs_repair` says that a process died in the middle of a change.
    """

    def __init__(
        self,
        fd: int,
        reopen: str = "",
        needs_repair: Callable[[], bool] | None = None,
        repair: Callable[[], None] | None = None,
    ) -> None:
        self.fd = fd
        self._reopen = reopen
        self._fork_error = ""
        self._flush_mutex = threading.Lock()
        # The locks get an open file description of their own: a memory map keeps the description that it was made
        # through alive, so a dead process would hold its locks for as long as a child that it had forked keeps the map.
        try:
            # A file without a name, where there is no /proc, cannot be opened again; then forked children are refused.
            self._lock_fd = self._open_again() if reopen or os.path.isdir(_DESCRIPTORS) else os.dup(fd)
        except BaseException:
            os.close(fd)
            raise
        self._closer = weakref.finalize(self, _close, fd, self._lock_fd)
        try:
            self._lock_shared(needs_repair, repair)
        except BaseException:
            self._closer()  # now: the error may be held for long, and its traceback holds this object
            raise
        _live.add(self)

    def take_lanes(self, lanes: int, shared: bool) -> bool:
        """Takes all lanes (`shared`: with others that write there); False where another process holds one."""
        return _lock(self._own_fd(), fcntl.F_RDLCK if shared else fcntl.F_WRLCK, _FIRST_LANE_BYTE, lanes)

    def free_lanes(self, lanes: int) -> None:
        """Frees all lanes."""
        _lock(self._own_fd(), fcntl.F_UNLCK, _FIRST_LANE_BYTE, lanes)

    def writer_bytes(self) -> tuple[int, int]:
        """The descriptor through which native code asks whether writers live, and the byte of writer 0."""
        return self._own_fd(), _FIRST_WRITER_BYTE

    def take_writer(self, number: int) -> bool:
        """Takes the byte of a writer's number for as long as this object is open; False: another writer has it."""
        return _lock(self._own_fd(), fcntl.F_WRLCK, _FIRST_WRITER_BYTE + number)

    def free_writer(self, number: int) -> None:
        _lock(self._own_fd(), fcntl.F_UNLCK, _FIRST_WRITER_BYTE + number)

    def is_writer_alive(self, number: int) -> bool:
        """Whether another process or object that took this number has the store open."""
        return _is_locked(self._own_fd(), _FIRST_WRITER_BYTE + number)

    def is_open_elsewhere(self) -> bool:
        """Whether another process or object has the store open."""
        return _is_locked(self._lock_fd, _OPEN_BYTE)

    def try_exclusive(self) -> bool:
        """Locks the store exclusively, until `end_exclusive`; False where somebody else has it open."""
        return _lock(self._own_fd(), fcntl.F_WRLCK, _OPEN_BYTE)

    def end_exclusive(self) -> None:
        _lock(self._own_fd(), fcntl.F_RDLCK, _OPEN_BYTE)

    @contextlib.contextmanager
    def flushing(self) -> Iterator[None]:
        """A block in which nobody else flushes; a StorageInUseError where another process has done so for a minute."""
        with self._flush_mutex, self._alone(_FLUSH_BYTE, "flushing this store", "the disk is slow"):
            yield

    @contextlib.contextmanager
    def settling(self) -> Iterator[None]:
        """A block in which nobody else decides what all users of the store keep to; errors as `flushing`."""
        with self._flush_mutex, self._alone(_SETTING_BYTE, "setting the rate limiter of this store", "is held up"):
            yield

    @contextlib.contextmanager
    def _alone(self, byte: int, doing: str, slow: str) -> Iterator[None]:
        deadline = time.monotonic() + _FLUSH_TIMEOUT
        while not _lock(self._own_fd(), fcntl.F_WRLCK, byte):
            if time.monotonic() > deadline:
                raise StorageInUseError(
                    f"another process has been {doing} for {_FLUSH_TIMEOUT:g} seconds: it was stopped, or {slow}. Let "
                    "it go on or end it"
                )
            time.sleep(0.001)
        try:
            yield
        finally:
            _lock(self._own_fd(), fcntl.F_UNLCK, byte)

    @contextlib.contextmanager
    def exclusive(self, operation: str) -> Iterator[None]:
        """A block in which nobody else has the store open; a StorageInUseError where somebody has."""
        if not self.try_exclusive():
            raise StorageInUseError(
                f"{operation} needs the store alone, and another process or object has it open; close it there first"
            )
        try:
            yield
        finally:
            self.end_exclusive()

    def close(self) -> None:
        """Releases all locks and closes the descriptors."""
        self._closer()
        self.fd = -1
        _live.discard(self)

    def after_fork(self) -> None:
        """In a child: opens the file anew in the place of the parent's description, whose locks stay as they are.

        The child does not count as a user of the store before `join`: most children never touch it.
        """
        self._flush_mutex = threading.Lock()
        if self.fd < 0:
            return
        try:
            fd = self._open_again()
        except (OSError, StorageError) as error:
            # With the parent's description the child would seem to hold the locks that its parent holds.
            self._fork_error = f"this forked process could not open the store for itself: {error}"
            return
        os.dup2(fd, self._lock_fd, inheritable=False)
        os.close(fd)

    def join(self) -> None:
        """Takes the shared lock in a forked child: it has the store open from here on.

        Raises:
            StorageError: this is a forked process that could not open the store for itself.
        """
        if self._fork_error:
            raise StorageError(self._fork_error)
        self._lock_shared()

    def _own_fd(self) -> int:
        """The descriptor that this process's locks belong to: after a fork that Python did not see, its own, too."""
        notice_fork()
        return self._lock_fd

    def _open_again(self) -> int:
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

    def _lock_shared(
        self, needs_repair: Callable[[], bool] | None = None, repair: Callable[[], None] | None = None
    ) -> None:
        """Takes the shared lock; where nobody else has the store open, repairs it first."""
        deadline = time.monotonic() + _OPEN_TIMEOUT
        while True:
            if repair is not None and self.try_exclusive():
                repair()
                self.end_exclusive()
                return
            if _lock(self._own_fd(), fcntl.F_RDLCK, _OPEN_BYTE):
                if needs_repair is None or not needs_repair():
                    # Whoever opened it before us has checked and repaired it under the exclusive lock; had they died
                    # before the end of that, we would get that lock now.
                    if repair is not None and self.try_exclusive():
                        repair()
                        self.end_exclusive()
                    return
                # Whoever repaired it died in the middle of that: open it again, exclusively if possible.
                _lock(self._lock_fd, fcntl.F_UNLCK, _OPEN_BYTE)
            if time.monotonic() > deadline:
                raise StorageInUseError("another process holds the store exclusively; try again when it is done")
            time.sleep(0.002)


def is_open_elsewhere(fd: int) -> bool:
    """Whether another process has the store of this descriptor open; takes no lock."""
    return _is_locked(fd, _OPEN_BYTE)


def has_writer(fd: int, lane: int) -> bool:
    """Whether another process holds a lane of the store of this descriptor; takes no lock."""
    return _is_locked(fd, _FIRST_LANE_BYTE + lane)


def is_writer_alive(fd: int, number: int) -> bool:
    """Whether another process with this writer's number has the store of this descriptor open; takes no lock."""
    return _is_locked(fd, _FIRST_WRITER_BYTE + number)


class FirstByte:
    """The first byte of the open file `fd`, closed here, which one description at a time holds until its process ends.

    A forked child does not hold it, and has closed the file.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._query = _request(fcntl.F_WRLCK, 0)

    def take(self) -> bool:
        """Takes it; False where another description holds it."""
        if not _lock(self._fd, fcntl.F_WRLCK, 0):
            return False
        _first_bytes.add(self)
        return True

    def is_taken(self) -> bool:
        """Whether another description holds it; disturbs nobody."""
        return fcntl.fcntl(self._fd, _GET, self._query)[:2] != _UNLOCKED

    def has_name(self) -> bool:
        """Whether nobody has deleted the file."""
        return os.fstat(self._fd).st_nlink > 0

    def close(self) -> None:
        """Lets it go; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _is_locked(fd: int, byte: int) -> bool:
    """Whether another description holds this byte, shared or not."""
    return fcntl.fcntl(fd, _GET, _request(fcntl.F_WRLCK, byte))[:2] != _UNLOCKED


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def _lock(fd: int, kind: int, byte: int, count: int = 1) -> bool:
    try:
        fcntl.fcntl(fd, _SET, _request(kind, byte, count))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _request(kind: int, byte: int, count: int = 1) -> bytes:
    """A `struct flock` of so many bytes."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, count, 0)


_UNLOCKED = struct.pack("h", fcntl.F_UNLCK)  # how the answer begins where nobody holds the byte
_SET = getattr(fcntl, "F_OFD_SETLK", 37)
_GET = getattr(fcntl, "F_OFD_GETLK", 36)


_first_bytes: weakref.WeakSet[FirstByte] = fork_registry(FirstByte.close)
_live: weakref.WeakSet[LaneLocks] = fork_registry(LaneLocks.after_fork)


class FileLock:
    """A lock on the open file `fd`, which it owns from now on; `BlockingIOError` when somebody else holds it.

    Never waits: a second saver must get its error at once, and a reader whose snapshot is being removed must go on to
    the newer one.
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
        """Unlocks and closes the file; a second call does nothing, nor does one in a forked child."""
        notice_fork()
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


def _close_inherited() -> None:
    # A flock belongs to the description that parent and child share: a child that kept it open would hold the lock
    # beyond the death of its parent.
    while _held:
        _held.pop().close_descriptor()


run_after_fork(_close_inherited)
