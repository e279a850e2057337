"""Making and opening the memory behind a store: private, shared, a temporary file, a file that stays."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import resource
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from engram import _native
from engram._system import boot_id, free_memory, human_bytes, open_regular
from engram.errors import StorageError
from engram.store.layout import RowLayout
from engram.store.locks import LaneLocks

FILE_NAME = "rows.engram"


class StoreSize:
    """How many rows of which layout: what a new store is made from."""

    def __init__(self, layout: RowLayout, lanes: int, lane_capacity: int, strands: int, trailer: bool) -> None:
        self.layout = layout
        self.lanes, self.lane_capacity, self.strands, self.trailer = lanes, lane_capacity, strands, trailer
        self.layout_bytes = layout.to_bytes()
        self.total_bytes = _native.Store.size_needed(
            lanes, lane_capacity, strands, layout.payload_bytes, layout.alignment, trailer, len(self.layout_bytes)
        )

    def create(self, fd: int) -> _native.Store:
        """A new store in private memory (fd -1) or in a file that has room for it."""
        return _native.Store.create(
            fd, self.lanes, self.lane_capacity, self.strands, self.layout.payload_bytes, self.layout.alignment,
            self.trailer, self.layout_bytes, os.urandom(16),
        )  # fmt: skip

    def create_in(self, fd: int) -> _native.Store:
        """A new store in a file of its own, which is closed where that fails."""
        try:
            return self.create(fd)
        except BaseException:
            os.close(fd)
            raise

    def __str__(self) -> str:
        """Size and shape of each key, as it is logged and put into errors."""
        rows = self.lanes * self.lane_capacity * self.strands
        keys = ", ".join(
            f"{'.'.join(map(str, x.path)) or 'tensor'}: {[rows, *x.shape]} {human_bytes(rows * x.nbytes)}"
            for x in self.layout.leaves
        )
        return f"{rows} steps, {human_bytes(self.total_bytes)} ({keys})"


def refuse_if_memory_is_short(size: StoreSize) -> None:
    """A StorageError with the numbers, before anything breaks."""
    free = free_memory()
    if free is not None and size.total_bytes > free:
        raise StorageError(
            f"not enough memory: the storage needs {human_bytes(size.total_bytes)}, {human_bytes(free)} are free. "
            "Use a smaller max_size or LazyMemmapStorage, which keeps its rows in a file. "
            f"It would hold {size}"
        )


def open_shared_memory(size: StoreSize) -> int:
    """A descriptor of memory that processes share and that goes with the last of them."""
    refuse_if_memory_is_short(size)
    fd = os.memfd_create("engram", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size.total_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # nobody needs to look whether it still has its size
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            raise _no_file(error, size.total_bytes, "shared memory") from error
        raise
    return fd


def open_temporary(size: StoreSize) -> int:
    """A descriptor of an unlinked file in TMPDIR, with its space reserved."""
    try:
        folder = tempfile.gettempdir()
        handle, path = tempfile.mkstemp(prefix="engram-", dir=folder)
        os.unlink(path)
    except OSError as error:
        raise StorageError(f"a temporary file cannot be made: {error}; set TMPDIR to a folder for it") from error
    try:
        reserve(handle, size, folder)
    except BaseException:
        os.close(handle)
        raise
    return handle


def reserve(fd: int, size: StoreSize, folder: str | os.PathLike[str]) -> None:
    """Takes the file's space now: a full disk is an exception here, and not a bus error at some later write."""
    free = os.statvfs(folder)
    available = free.f_bavail * free.f_frsize
    if size.total_bytes > available:
        raise _disk_full(size, folder, available)
    try:
        os.posix_fallocate(fd, 0, size.total_bytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(size, folder, available) from error
        raise _no_file(error, size.total_bytes, os.fspath(folder)) from error


def _no_file(error: OSError, nbytes: int, where: str) -> StorageError:
    """The error for a file that cannot get its size."""
    said = f"cannot reserve {human_bytes(nbytes)} in {where}: {error.strerror or error}"
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if error.errno == errno.EFBIG and most != resource.RLIM_INFINITY and nbytes > most:
        said += f". Files of this process may have {human_bytes(most)} (RLIMIT_FSIZE, `ulimit -f`): raise that limit"
    elif error.errno == errno.EFBIG:
        said += ". The file system has no files of this size"
    return StorageError(said)


def _disk_full(size: StoreSize, folder: Any, available: int) -> StorageError:
    return StorageError(
        f"not enough disk space: the storage needs {human_bytes(size.total_bytes)}, {os.fspath(folder)} has "
        f"{human_bytes(available)} free. Free some, use a smaller max_size, or another scratch_dir (TMPDIR for "
        f"temporary files). It would hold {size}"
    )


def create_named(folder: Path, size: StoreSize, prepare: Any) -> bool:
    """Makes the store's file whole and then gives it its name; False if somebody else was first.

    `prepare(store)` sets what the header must say before anybody sees the file.
    """
    with (
        _as_storage_errors(folder),
        _made(folder),
        _nameless(folder) as (fd, source),
        _directory(folder) as fd_of_folder,
    ):
        reserve(fd, size, folder)
        store = size.create(fd)
        prepare(store)
        os.fsync(fd)
        made = True
        try:
            # With a directory given, Python calls linkat and follows /proc's link to the nameless file.
            os.link(source, folder / FILE_NAME, src_dir_fd=fd_of_folder, follow_symlinks=True)
        except FileExistsError:
            made = False
        os.fsync(fd_of_folder)  # also of a name that is there: who gave it may have failed here
    return made


def has_store(folder: Path) -> bool:
    """Whether something has the name of a store's file in a folder; StorageError where the system does not say."""
    try:
        os.lstat(folder / FILE_NAME)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise StorageError(f"{folder} cannot be looked into: {error.strerror}") from error
    return True


def open_store(folder: Path, flags: int = os.O_RDWR) -> tuple[int, os.stat_result]:
    """A descriptor of the store's file in a folder, and what the system says of it.

    Raises:
        StorageError: there is none, or what has its name cannot be opened as one.
    """
    path = folder / FILE_NAME
    try:
        fd = open_regular(path, flags)
        return fd, os.fstat(fd)
    except FileNotFoundError:
        raise StorageError(f"there is no store in {folder} (no file {FILE_NAME})") from None
    except OSError as error:
        reason = error.strerror
        if path.is_symlink():
            reason = "it is a symbolic link, which is not followed; open the folder that the file lies in"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            reason = f"{reason}; a store is opened for reading and writing (read_only=True: for reading)"
        raise StorageError(f"{path} cannot be opened: {reason}") from error


def reserve_holes(fd: int, found: os.stat_result, nbytes: int, path: Path) -> None:
    """Takes the space that a copy has left out (`cp --sparse`, `rsync -S`).

    A write there could find the disk full, which is a bus error in a map.

    The caller is alone with the file, of which the system said `found`: where the file system cannot do it, the library
    writes into each block.
    """
    # Either alone is not enough: a file has blocks that are not its bytes, and space that nobody wrote yet is a hole.
    whole = found.st_blocks * 512 >= nbytes and _first_hole(fd) >= nbytes
    if whole or not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return  # nothing can be reserved there
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise _no_file(error, nbytes, str(path)) from error
        missing, free = nbytes - os.fstat(fd).st_blocks * 512, os.statvfs(path.parent)
        raise StorageError(
            f"not enough disk space: {path} has holes (a copy that leaves zeros out makes them), which need "
            f"{human_bytes(max(missing, 0))}, and {human_bytes(free.f_bavail * free.f_frsize)} are free there. Free "
            "some, or copy it to another disk; it is unchanged"
        ) from error


def _first_hole(fd: int) -> int:
    try:
        return os.lseek(fd, 0, os.SEEK_HOLE)
    except (OSError, AttributeError):  # a file system, or a system, that does not say
        return 0


@contextlib.contextmanager
def _as_storage_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"a store cannot be made in {folder}: {error}") from error


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Makes a folder and those above it; those that it made go again when the block fails."""
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for made in missing:  # a store whose folder a power cut forgets is gone, flushed or not
            sync_folder(made.parent)
        yield
    except BaseException:
        for made in missing:
            try:
                made.rmdir()
            except OSError:
                break  # somebody else uses it by now
        raise


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    with _directory(folder) as fd:
        os.fsync(fd)


@contextlib.contextmanager
def _directory(folder: Path) -> Iterator[int]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _nameless(folder: Path) -> Iterator[tuple[int, str]]:
    """A new file without a name, and a path that links it; where that is not possible, a temporary name."""
    try:
        fd, source, name = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o644), "", None
        source = f"/proc/self/fd/{fd}"
    except (OSError, AttributeError):
        fd, name = _named(folder)
        source = name
    try:
        yield fd, source
    finally:
        os.close(fd)
        if name is not None:
            os.unlink(name)


_PREFIX, _SUFFIX = ".rows-", ".tmp"


def _named(folder: Path) -> tuple[int, str]:
    """A new file with a temporary name, which holds a lock on itself for as long as it is being made."""
    remove_leftovers(folder)
    while True:
        fd, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX, dir=folder)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd, name
        os.close(fd)  # somebody found it before it was locked


def remove_leftovers(folder: Path) -> None:
    """Removes what makers that were killed left under a temporary name."""
    try:
        names = os.listdir(folder)
    except PermissionError:  # what is in it may be used by name all the same
        return
    for name in names:
        if not (name.startswith(_PREFIX) and name.endswith(_SUFFIX)):
            continue
        with contextlib.suppress(OSError):  # somebody is making it, or another has just removed it
            fd = open_regular(folder / name, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(folder / name)
            finally:
                os.close(fd)


_DELETED = "was deleted or replaced"

_log = logging.getLogger("engram")


class Session:
    """One process's use of a named store, from `open` to `close`."""

    def __init__(self, folder: Path) -> None:
        path = folder / FILE_NAME
        fd, self._found = open_store(folder)
        self._path, self._fd = path, fd
        try:
            self.store = _native.Store.open(fd)
        except (RuntimeError, ValueError) as error:
            os.close(fd)
            raise StorageError(f"{path} cannot be opened: {error}") from error
        except BaseException:
            os.close(fd)
            raise
        self.dropped = 0
        self._wrote = False
        self._name_synced = False
        try:
            self.locks = LaneLocks(fd, str(path.absolute()), needs=self._needs_mending, mend=self._mend)
        except OSError as error:
            raise StorageError(f"{path} cannot be locked: {error}") from error
        # Rows that somebody wrote and did not flush: a sync may have failed for them there.
        self._failures_mended = -1 if self.store.unflushed else self.store.sync_failures
        if self.dropped:
            _log.warning("%s: %d rows that a power cut had torn were dropped", path, self.dropped)

    def on_take(self, lane: int) -> None:
        """Before the first write to a lane; a StorageError where nobody would ever find what is written."""
        if self._is_deleted():
            raise StorageError(f"{self._path} {_DELETED}; what is written to it now would be lost")
        self.store.raise_term(lane)
        self._begin()
        self._wrote = True  # only now: where the sync failed the next change tries again

    def on_alone(self) -> None:
        """Before a change of stored rows or counters."""
        if not self._wrote:
            self._begin()
            self._wrote = True
        if self.store.interrupted:  # by a disk that failed
            with self._told("a change of stored rows"):
                self.store.finish_interrupted()

    def _begin(self) -> None:
        """From here on an unclean stop of the machine means a scan."""
        self.store.boot_id = boot_id()
        self.store.clean = False
        with self._told("the beginning of a session"):
            self.store.sync_header()

    def flush(self) -> None:
        """Every row appended so far survives a power cut, until it is overwritten."""
        if self._is_deleted():
            raise StorageError(f"{self._path} {_DELETED}: its rows go when the last process closes it, flushed or not")
        self._sync()

    def _is_deleted(self) -> bool:
        return os.fstat(self.locks.fd).st_nlink == 0

    def _sync(self) -> None:
        published = [self.store.lane(i)["published"] for i in range(self.store.lanes)]
        failures = self.store.sync_failures
        with self._told("rows"):
            if failures != self._failures_mended:
                self.store.dirty_again(published)
            self._sync_name()
            os.fsync(self.locks.fd)
            self.store.mark_durable(published)
            self.store.sync_header()
        self._failures_mended = failures

    def _sync_name(self) -> None:
        """Once: who made the file may have died, or failed, before its name was on the disk."""
        if self._name_synced:
            return
        with contextlib.suppress(FileNotFoundError):  # moved by somebody, who has given it the name that it has now
            sync_folder(self._path.parent)
        self._name_synced = True

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """What a disk says, as a StorageError; nothing that is not synced yet is believed to be after it."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            self.store.count_sync_failure()
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise StorageError(
                f"{self._path}: {what} may not be on the disk: {reason}; rows are as they were in memory, and the next "
                "flush writes again what this one did not"
            ) from error

    def close(self) -> None:
        """Marks the store clean if nobody else has it open; warns where its file is gone, and the rows with it."""
        if self._wrote:
            if self._is_deleted():
                warnings.warn(
                    f"{self._path} {_DELETED} while it was open: its rows are lost with this close", stacklevel=4
                )
            self._sync()
            if self.locks.try_alone():
                self.store.clean = True
                self.store.sync_header()
        self._wrote = False

    # ---- when nobody else has the store open ----
    def _needs_mending(self) -> bool:
        whole, clean, boot = self.store.left_as()
        return not whole or self._machine_stopped(clean, boot, unless_known=False)

    def _machine_stopped(self, clean: bool, boot: bytes, unless_known: bool) -> bool:
        """Whether the machine stopped while somebody wrote; `unless_known` where the system does not say."""
        if clean:  # as nearly every store is: the system is not asked
            return False
        now = boot_id()
        if not any(now) or not any(boot):
            return unless_known
        return boot != now

    def _mend(self) -> None:
        reserve_holes(self._fd, self._found, self.store.total_bytes, self._path)
        whole, clean, boot = self.store.repair()
        if not whole:
            with self._told("a change of stored rows that was interrupted"):
                self.store.finish_interrupted()
        # Alone, and nothing says that the machine is the same as then: the rows do.
        if self._machine_stopped(clean, boot, unless_known=True):
            self.dropped = self.store.recover()
            self.store.boot_id = boot_id()  # for whoever opens it next; after another power cut all is scanned again


def open_session(folder: Path) -> Session:
    """Opens the store in a folder.

    Raises:
        StorageError: there is none, or its file is damaged.
        StorageInUseError: somebody is alone with it for a long time.
    """
    try:
        remove_leftovers(folder)
    except OSError as error:
        raise StorageError(f"there is no folder {folder}: {error.strerror}") from error
    return Session(folder)


_carriers = threading.local()


@contextmanager
def carried_by(descriptors: list[int]) -> Iterator[list[int]]:
    """Who sends descriptors by its own means: what is pickled in here adds them, what is unpickled takes them."""
    before = getattr(_carriers, "descriptors", None)
    _carriers.descriptors = descriptors
    try:
        yield descriptors
    finally:
        _carriers.descriptors = before


def sends(cls: type) -> None:
    """Objects of a class travel by their `__getstate__` when they are sent to a process, whatever `pickle` does."""
    reduction.ForkingPickler.register(cls, _as_sent)


def _as_sent(part: Any) -> Any:
    return object.__reduce_ex__(part, 4)


def is_sent() -> bool:
    """Whether what is being pickled here is carried to another process."""
    return getattr(_carriers, "descriptors", None) is not None


class _Carried:
    """The place of a descriptor among those that are carried."""

    def __init__(self, place: int) -> None:
        self._place = place

    def detach(self) -> int:
        return os.dup(_carriers.descriptors[self._place])


def share_descriptor(fd: int) -> Any:
    """An object that gives another process the same file: its `detach()` there is a descriptor.

    It travels through `multiprocessing`'s own channels, or by who has said `carried_by`.
    """
    carried = getattr(_carriers, "descriptors", None)
    if carried is None:
        return reduction.DupFd(fd)
    carried.append(fd)
    return _Carried(len(carried) - 1)


def store_of_descriptor(handle: Any) -> tuple[_native.Store, LaneLocks, RowLayout]:
    """The store behind a descriptor that has arrived, through a description of its own."""
    inherited = handle.detach()
    fd = os.open(f"/proc/self/fd/{inherited}", os.O_RDWR | os.O_CLOEXEC)
    os.close(inherited)
    try:
        store = _native.Store.open(fd)
    except BaseException:
        os.close(fd)
        raise
    return store, LaneLocks(fd), RowLayout.from_json(json.loads(store.layout))
