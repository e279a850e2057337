"""Making and opening the memory behind a store: private, shared, a temporary file, a file that stays."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engram._native as _native
from engram._system import (
    boot_id,
    free_memory,
    human_bytes,
    memory_file,
    open_regular,
    seal_size,
    sync_directory,
)
from engram._text import log, visible, warn_user
from engram.errors import StorageError
from engram.store.header import FILE_NAME, open_store, opened_store
from engram.store.layout import ObservationKeys, RowLayout, StoredLayout
from engram.store.locks import LaneLocks
from engram.store.nodes import network_file_system, note_node, refuse_other_node, warn_of_network


class StoreSpec:
    """What a new store is made from: its layout and its sizes.

    Args:
        trailer: whether each row ends in a trailer, by which rows torn by a power cut are recognised.
        layout_extra: JSON that the header holds beside the layout.
        extents: whether lanes tell whose rows they have.
        observations: those that are stored once, beside the rows.
    """

    def __init__(
        self,
        layout: RowLayout,
        lanes: int,
        lane_capacity: int,
        envs: int,
        trailer: bool,
        layout_extra: dict[str, Any] | None = None,
        extents: bool = False,
        observations: ObservationKeys | None = None,
    ) -> None:
        self.layout, stored = layout, StoredLayout(layout, observations, apart=trailer)
        self.stored = stored
        self.row_bytes, self.alignment = stored.row_bytes, stored.alignment
        self.lanes, self.lane_capacity, self.envs, self.trailer = lanes, lane_capacity, envs, trailer
        self.extents = extents
        extra, observation_bytes = layout_extra or {}, 0
        if observations is not None:
            sizes = _native.Store.observation_sizes(
                lanes, lane_capacity, envs, self.row_bytes, self.alignment, trailer, observations.n_steps,
                stored.frames, stored.in_row,
            )  # fmt: skip
            extra = {**extra, "observations": stored.observations_json(sizes)}
            observation_bytes = sizes[-1]
        self.layout_bytes = layout.to_bytes()
        if extra:
            self.layout_bytes = json.dumps({**layout.to_json(), **extra}, separators=(",", ":")).encode()
        self.total_bytes = _native.Store.size_needed(
            lanes, lane_capacity, envs, self.row_bytes, self.alignment, trailer, len(self.layout_bytes)
        )
        self.total_bytes += observation_bytes

    def create(self, fd: int) -> _native.Store:
        """A new store in private memory (fd -1) or in a file that has room for it."""
        store = _native.Store.create(
            fd, self.lanes, self.lane_capacity, self.envs, self.row_bytes, self.alignment,
            self.trailer, self.layout_bytes, os.urandom(16), self.extents, self.stored.observations is not None,
        )  # fmt: skip
        if self.stored.observations is not None:
            store.keep_observations(self.stored.observations.n_steps, self.stored.frames, self.stored.in_row)
        return store

    def create_in(self, fd: int) -> _native.Store:
        """A new store in a file, whose descriptor is closed where that fails."""
        try:
            return self.create(fd)
        except BaseException:
            os.close(fd)
            raise

    def __str__(self) -> str:
        """Size and shape of each key, for logs and errors."""
        rows = self.lanes * self.lane_capacity * self.envs
        keys = ", ".join(
            f"{'.'.join(map(str, x.path)) or 'tensor'}: {[rows, *x.shape]} {human_bytes(rows * x.nbytes)}"
            for x in self.layout.leaves
        )
        return f"{rows} steps, {human_bytes(self.total_bytes)} ({keys})"


def refuse_if_memory_is_short(size: StoreSpec) -> None:
    """A StorageError, with the numbers, where less memory is free than the store needs."""
    free = free_memory()
    if free is not None and size.total_bytes > free:
        raise StorageError(
            f"not enough memory: the storage needs {human_bytes(size.total_bytes)}, {human_bytes(free)} are free. "
            "Use a smaller max_size or LazyMemmapStorage, which keeps its rows in a file. "
            f"It would hold {size}"
        )


def open_shared_memory(size: StoreSpec) -> int:
    """A descriptor of memory that processes share and that is freed with the last of them."""
    refuse_if_memory_is_short(size)
    fd = memory_file("engram")
    try:
        os.ftruncate(fd, size.total_bytes)
        seal_size(fd)  # its size need not be checked again
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            raise _no_file(error, size.total_bytes, "shared memory") from error
        raise
    return fd


def open_temporary(size: StoreSpec) -> int:
    """A descriptor of an unlinked file in TMPDIR, with its space reserved."""
    handle = open_unnamed()
    try:
        reserve(handle, size, tempfile.gettempdir())
    except BaseException:
        os.close(handle)
        raise
    return handle


def open_unnamed() -> int:
    """A descriptor of an empty, unlinked file in TMPDIR."""
    try:
        handle, path = tempfile.mkstemp(prefix="engram-", dir=tempfile.gettempdir())
        os.unlink(path)
    except OSError as error:
        raise StorageError(f"a temporary file cannot be made: {error}; set TMPDIR to a folder for it") from error
    return handle


def reserve(fd: int, size: StoreSpec, folder: str | os.PathLike[str]) -> None:
    """Reserves the file's space: a full disk is an exception here, and not a bus error at some later write."""
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
    message = f"cannot reserve {human_bytes(nbytes)} in {where}: {error.strerror or error}"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if error.errno == errno.EFBIG and limit != resource.RLIM_INFINITY and nbytes > limit:
        message += f". Files of this process may have {human_bytes(limit)} (RLIMIT_FSIZE, `ulimit -f`): raise it"
    elif error.errno == errno.EFBIG:
        message += ". The file system has no files of this size"
    return StorageError(message)


def _disk_full(size: StoreSpec, folder: Any, available: int) -> StorageError:
    return StorageError(
        f"not enough disk space: the storage needs {human_bytes(size.total_bytes)}, {os.fspath(folder)} has "
        f"{human_bytes(available)} free. Free some, use a smaller max_size, or another scratch_dir (TMPDIR for "
        f"temporary files). It would hold {size}"
    )


def create_named(folder: Path, size: StoreSpec, prepare: Any) -> bool:
    """Makes the store's whole file, then gives it its name; False if another process was first.

    `prepare(store)` sets header fields before any other process sees the file.
    """
    with (
        _as_storage_errors(folder),
        _new_folder(folder),
        _unnamed_file(folder) as (fd, source),
        _directory(folder) as fd_of_folder,
    ):
        reserve(fd, size, folder)
        store = size.create(fd)
        prepare(store)
        os.fsync(fd)
        created = True
        try:
            # With a directory given, Python calls linkat and follows /proc's link to the nameless file.
            os.link(source, folder / FILE_NAME, src_dir_fd=fd_of_folder, follow_symlinks=True)
        except FileExistsError:
            created = False
        os.fsync(fd_of_folder)  # an existing name, too: the process that made it may have died before its sync
    return created


def reserve_holes(fd: int, stat: os.stat_result, nbytes: int, path: Path) -> None:
    """Reserves the space of holes that a sparse copy of the file has (`cp --sparse`, `rsync -S`).

    A write into a hole on a full disk is a bus error in a memory map. The caller holds the exclusive lock: where the
    file system cannot reserve space, libc writes into each block.
    """
    # Both are needed: a file has blocks that are not its bytes, and reserved space that was never written is a hole.
    whole = stat.st_blocks * 512 >= nbytes and _first_hole(fd) >= nbytes
    if whole:
        return
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return  # the file system reserves no space
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
    except (OSError, AttributeError):  # a file system, or a system, without SEEK_HOLE
        return 0


@contextlib.contextmanager
def _as_storage_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"a store cannot be made in {folder}: {error}") from error


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """Makes a folder and its parents; removes those that it made when the block fails."""
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for new in missing:  # a power cut that loses the folder's name loses the store, flushed or not
            sync_directory(new.parent)
        yield
    except BaseException:
        for new in missing:
            try:
                new.rmdir()
            except OSError:
                break  # another process uses it by now
        raise


@contextlib.contextmanager
def _directory(folder: Path) -> Iterator[int]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _unnamed_file(folder: Path) -> Iterator[tuple[int, str]]:
    """A new file without a name, and a path to link it by; where the system has none, a file with a temporary name."""
    try:
        fd, source, name = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o644), "", None
        source = f"/proc/self/fd/{fd}"
    except (OSError, AttributeError):
        fd, name = _temporary_file(folder)
        source = name
    try:
        yield fd, source
    finally:
        os.close(fd)
        if name is not None:
            os.unlink(name)


_PREFIX, _SUFFIX = ".rows-", ".tmp"


def _temporary_file(folder: Path) -> tuple[int, str]:
    """A new file with a temporary name, locked for as long as it is being written."""
    remove_leftovers(folder)
    while True:
        fd, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX, dir=folder)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd, name
        os.close(fd)  # another process removed it before it was locked


def remove_leftovers(folder: Path) -> None:
    """Removes temporary files of processes that were killed while they made a store."""
    try:
        names = os.listdir(folder)
    except PermissionError:  # files in it can be opened by name all the same
        return
    for name in names:
        if not (name.startswith(_PREFIX) and name.endswith(_SUFFIX)):
            continue
        with contextlib.suppress(OSError):  # another process is writing it, or has just removed it
            fd = open_regular(folder / name, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(folder / name)
            finally:
                os.close(fd)


_DELETED = "was deleted or replaced"


class StoreSession:
    """One process's use of the store in a folder, from opening to `close`.

    Args:
        take_over: open a store on a network file system that another node left open, and has stopped using.

    Attributes:
        dropped: rows torn by a power cut that the opening removed.

    Raises:
        StorageError: there is no store, or its file is damaged.
        StorageInUseError: another process holds it exclusively for a long time; or another node has it open.
    """

    def __init__(self, folder: Path, take_over: bool = False) -> None:
        try:
            remove_leftovers(folder)
        except OSError as error:
            raise StorageError(f"there is no folder {folder}: {error.strerror}") from error
        path = folder / FILE_NAME
        fd, self._stat = open_store(folder)
        self._path, self._fd = path, fd
        try:
            self.store = opened_store(fd, complete=False)  # a repair may be due
        except (RuntimeError, ValueError) as error:
            os.close(fd)
            raise StorageError(f"{path} cannot be opened: {error}") from error
        except BaseException:
            os.close(fd)
            raise
        self.dropped = 0
        self._wrote = False
        self._name_synced = False
        self._on_network = network_file_system(fd) is not None
        self._takes_over = take_over
        try:
            self._refuse_other_node()
        except BaseException:
            os.close(fd)
            raise
        warn_of_network(fd, path)
        try:
            self.locks = LaneLocks(fd, str(path.absolute()), needs_repair=self._needs_repair, repair=self._repair)
        except OSError as error:
            raise StorageError(f"{path} cannot be locked: {error}") from error
        if not self.store.has_all_segments:
            self.locks.close()
            raise StorageError(
                f"{path} was cut short: it lacks observations that its rows have; put it back from a copy"
            )
        # For rows that another process wrote and did not flush a sync may have failed there.
        self._handled_failures = -1 if self.store.unflushed else self.store.sync_failures
        if self.dropped:
            log.warning("%s: %d rows that a power cut had torn were dropped", path, self.dropped)
        if self._on_network:  # from now on: another node that opens it is refused before either has written
            try:
                self._begin()
            except BaseException:
                self.locks.close()
                raise
            self._wrote = True
        self._takes_over = False  # a node that takes it over from this one is not overwritten

    def _refuse_other_node(self) -> None:
        """A StorageInUseError where another node may be using the store."""
        if self._on_network and not self._takes_over:
            refuse_other_node(self.store, boot_id(), self._fd, self._path)

    def on_take(self, lane: int | None) -> None:
        """Before the first write to a lane; a StorageError where the file has been deleted.

        None: to lanes where each change of writer has a seam, so that rows of both may have one term.
        """
        if self._is_deleted():
            raise StorageError(f"{self._path} {_DELETED}; what is written to it now would be lost")
        if lane is not None:
            self.store.raise_term(lane)
        self._begin()
        self._wrote = True  # only now: where the sync failed, the next change tries again

    def on_exclusive(self) -> None:
        """Before a change of stored rows or counters."""
        if not self._wrote:
            self._begin()
            self._wrote = True
        if self.store.interrupted:  # by a failing disk
            with self._disk_errors("a change of stored rows"):
                self.store.finish_interrupted()

    def _begin(self) -> None:
        """Marks the store as in use: from here on, opening it after an unclean stop of the machine scans its rows."""
        self._refuse_other_node()
        note_node(self.store, boot_id())
        self.store.clean = False
        with self._disk_errors("the beginning of a session"):
            self.store.sync_header()

    def flush(self) -> None:
        """Every row appended so far survives a power cut, until it is overwritten."""
        if self._is_deleted():
            raise StorageError(f"{self._path} {_DELETED}: its rows go when the last process closes it, flushed or not")
        self._sync()

    def _is_deleted(self) -> bool:
        return os.fstat(self.locks.fd).st_nlink == 0

    def _sync(self) -> None:
        with self._flushing():
            published = self.store.keep_durable_tails()
            failures = self.store.sync_failures
            with self._disk_errors("rows"):
                if failures != self._handled_failures:
                    self.store.dirty_again(published)
                self._sync_name()
                os.fsync(self.locks.fd)
                self.store.mark_durable(published)
                self.store.sync_header()
            self._handled_failures = failures

    @contextlib.contextmanager
    def _flushing(self) -> Iterator[None]:
        """A block in which nobody else flushes, where a flush keeps copies of what later rows overwrite."""
        if not self.store.has_observations:
            yield
            return
        with self.locks.flushing():
            yield

    def _sync_name(self) -> None:
        """Syncs the file's name, once: the process that made the file may have died before it did."""
        if self._name_synced:
            return
        with contextlib.suppress(FileNotFoundError):  # the user has moved it
            sync_directory(self._path.parent)
        self._name_synced = True

    @contextlib.contextmanager
    def _disk_errors(self, what: str) -> Iterator[None]:
        """Errors of the disk as a StorageError; after one, no row counts as synced that did not before."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            self.store.count_sync_failure()
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise StorageError(
                f"{self._path}: {what} may not be on the disk: {reason}; rows are as they were in memory, and the next "
                "flush writes again what this one did not"
            ) from error

    def remove(self) -> bool:
        """Deletes the store's file; False where another process has it open, or it is not there under its name.

        This process may go on with its rows until it closes them.
        """
        if not self.locks.try_exclusive():
            return False
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path, follow_symlinks=False), os.fstat(self.locks.fd)):
                os.unlink(self._path)
                self._wrote = False  # nothing is left to sync
                return True
        self.locks.end_exclusive()
        return False

    def close(self) -> None:
        """Marks the store clean if no other process has it open; warns where its file, and so the rows, are gone."""
        if self._wrote:
            if self._is_deleted():
                warn_user(
                    f"{visible(self._path)} {_DELETED} while it was open: its rows are lost with this close",
                )
            self._refuse_other_node()  # one that has taken it over is not to find it clean
            self._sync()
            if self.locks.try_exclusive():
                self.store.clean = True
                self.store.sync_header()
        self._wrote = False

    # ---- repairs, under the exclusive lock ----
    def _needs_repair(self) -> bool:
        self._refuse_other_node()
        whole, clean, boot = self.store.left_as()
        return not whole or self._machine_stopped(clean, boot, unless_known=False)

    def _machine_stopped(self, clean: bool, boot: bytes, unless_known: bool) -> bool:
        """Whether the machine stopped while the store was written; `unless_known` where boots have no ids."""
        if clean:  # the usual case: needs no look at the boot id
            return False
        now = boot_id()
        if not any(now) or not any(boot):
            return unless_known
        return boot != now

    def _repair(self) -> None:
        self._refuse_other_node()
        reserve_holes(self._fd, self._stat, max(self.store.total_bytes, self._stat.st_size), self._path)
        whole, clean, boot = self.store.repair()
        if not whole:
            with self._disk_errors("a change of stored rows that was interrupted"):
                self.store.finish_interrupted()
        # Without boot ids nothing says that the machine has not stopped since: the rows are scanned.
        if self._machine_stopped(clean, boot, unless_known=True):
            with self._disk_errors("which rows were removed"):
                self.dropped = self.store.recover()
            note_node(self.store, boot_id())  # opened again in this boot, it is not scanned again


def open_passed_store(handle: Any) -> tuple[_native.Store, LaneLocks, StoredLayout]:
    """The store of a descriptor that has arrived, opened anew, so that its locks are this process's own."""
    inherited = handle.detach()
    fd = os.open(f"/proc/self/fd/{inherited}", os.O_RDWR | os.O_CLOEXEC)
    os.close(inherited)
    try:
        store = opened_store(fd)
    except BaseException:
        os.close(fd)
        raise
    return store, LaneLocks(fd), StoredLayout.from_json(json.loads(store.layout))
