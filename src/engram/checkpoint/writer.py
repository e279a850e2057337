"""Commit: writes a snapshot so that a save killed at any instruction leaves the old one current, or the new one.

    <path>/CURRENT                       the name of the current snapshot and the hash of its manifest
    <path>/LOCK                          flock: one save at a time
    <path>/g-000042/ENGRAM-SNAPSHOT      the marker; readers hold a shared flock on it
    <path>/g-000042/manifest.json        what the snapshot holds: every file with size and hash
    <path>/g-000042/...                  the files

Writes named files of bytes; `docs/format.md` describes each byte.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Union

import numpy as np
import numpy.typing as npt
import xxhash

from engram._system import advise_disk, open_regular, sync_directory, user_path
from engram._text import visible
from engram.checkpoint.directory import (
    FORMAT,
    LOCK,
    MANIFEST,
    MARKER,
    MARKER_CONTENT,
    VERSION,
    CheckpointDirectory,
    Pointer,
    digest,
    is_file_name,
    to_checksummed_json,
)
from engram.checkpoint.reader import SnapshotReader
from engram.errors import CheckpointError, CorruptCheckpointError, EngramError
from engram.store.locks import FileLock

_MOST_OPEN_FILES = 64
_FILES_BEHIND = 3  # that the disk may still be writing
_SPACE_FOR_METADATA = 1 << 16
_PIECE = 1 << 20  # written while it is still in the cache from hashing

Block = Union[bytes, memoryview, npt.NDArray[Any]]


@dataclass
class _SpaceNeeded:
    """How many bytes a save will write, for the error of a full disk."""

    nbytes: int = 0


@contextmanager
def saving(path: str | os.PathLike[str], *, keep_last: int = 1) -> Iterator[SnapshotWriter]:
    """A writer of the next snapshot at `path`, which becomes current when the block ends without an exception.

    Then the newest `keep_last` snapshots stay and older ones are removed, except those that are being read.

    Raises:
        CheckpointError: another save runs here, the disk is full or fails, or the directory cannot be written; the
            snapshot that was current still is.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as path:
    ...     with saving(path) as writer:
    ...         writer.write_file("greeting.bin", [b"hello"])
    ...         writer.body["answer"] = 42
    ...     writer.name
    'g-000001'
    """
    if keep_last < 1:
        raise ValueError(f"keep_last must be 1 or more, got {keep_last}: the snapshot just saved is one of them")
    directory = CheckpointDirectory(os.path.abspath(user_path(path)))
    with _as_checkpoint_errors(directory.root) as needs:
        _make_directories(directory.root)
        with _only_saver(directory):
            listing = directory.listing()
            directory.refuse_foreign(listing)
            older = directory.clean(listing, keep_last)
            name = directory.next_name()
            with (
                _current_snapshot(directory, listing.pointer) as previous,
                SnapshotWriter(directory, name, previous, needs) as writer,
            ):
                yield writer
                writer.commit()
            _prune(directory, older, keep_last)


class SnapshotWriter:
    """Writes the files of one snapshot. `body` (JSON) becomes a part of its manifest when it is committed."""

    def __init__(
        self, directory: CheckpointDirectory, name: str, previous: SnapshotReader | None, needs: _SpaceNeeded
    ) -> None:
        self.name = name
        self.body: dict[str, Any] = {}
        #: Names of what a reader of this snapshot must know.
        self.features: set[str] = set()
        #: The body of the current snapshot, which this one will replace; empty where there is none.
        self.previous: dict[str, Any] = {} if previous is None else previous.body
        self._previous = previous
        self._needed = needs
        self._written = 0
        self._directory = directory
        self._files: dict[str, dict[str, Any]] = {}
        self._unsynced: list[int] = []
        self._folders = [directory.path(name)]

    def need(self, nbytes: int) -> None:
        """CheckpointError where the disk has no room for this many bytes. Called before they are written."""
        self._needed.nbytes = nbytes
        _check_space(self._directory.root, nbytes)

    @property
    def progress(self) -> float:
        """The fraction of the needed bytes that is written."""
        return self._written / max(1, self._needed.nbytes)

    def reuse(self, *names: str) -> bool:
        """Takes files over from the current snapshot, by hard links where the file system has them.

        Returns False where one of them is missing or damaged: then all of them must be written.
        """
        if self._previous is None or not self._previous.files.keys() >= {*names}:
            return False
        for name in names:
            self._check_name(name)
            self._make_folder(os.path.dirname(name))
            record = self._previous.copy(name, self._directory.path(self.name, name))
            if record is None:
                for linked in set(names) & set(self._files):
                    os.unlink(self._directory.path(self.name, linked))
                    del self._files[linked]
                return False
            self._files[name] = {"nbytes": record.nbytes, "xxh3_128": record.xxh3_128}
        return True

    def write_file(self, name: str, blocks: Iterable[Block]) -> None:
        """Writes blocks to a new file of this snapshot; `name` is relative, with `/` between folders."""
        self._check_name(name)
        self._make_folder(os.path.dirname(name))
        fd = self._create(name)
        self._unsynced.append(fd)
        nbytes, hasher = 0, xxhash.xxh3_128()
        for block in blocks:
            whole = _as_bytes(block)
            for begin in range(0, len(whole), _PIECE):
                hasher.update(whole[begin : begin + _PIECE])
                _write_all(fd, whole[begin : begin + _PIECE])
                self._written += len(whole[begin : begin + _PIECE])
            nbytes += len(whole)
        self._finish(name, fd, nbytes, hasher.hexdigest())

    @contextmanager
    def written_by_path(self, name: str) -> Iterator[str]:
        """The path of a new file of this snapshot, which a library writes inside the block; it is hashed afterwards."""
        self._check_name(name)
        self._make_folder(os.path.dirname(name))
        os.close(self._create(name))
        path = self._directory.path(self.name, name)
        yield path
        fd = open_regular(path, os.O_RDWR)
        self._unsynced.append(fd)
        nbytes, hasher = 0, xxhash.xxh3_128()
        while block := os.read(fd, _PIECE):
            hasher.update(block)
            nbytes += len(block)
        self._finish(name, fd, nbytes, hasher.hexdigest())

    @contextmanager
    def scratch_folder(self) -> Iterator[str]:
        """A folder on the disk of this snapshot for files that are needed inside the block only."""
        folder = self._directory.path(self.name, "scratch")
        os.mkdir(folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    def commit(self) -> None:
        """Makes the snapshot current: files are synced first, then folders, then the manifest; CURRENT moves last."""
        about = {"format": FORMAT, "version": VERSION, "features": sorted(self.features), "snapshot": self.name}
        manifest = to_checksummed_json({**about, "files": self._files, "body": self.body})
        self._unsynced.append(self._create(MANIFEST))
        _write_all(self._unsynced[-1], memoryview(manifest))
        self._sync_files(down_to=0)
        for folder in reversed(self._folders):
            sync_directory(folder)
        sync_directory(self._directory.root)
        self._directory.point_to(Pointer(self.name, digest(manifest)))

    def __enter__(self) -> SnapshotWriter:
        try:
            self._begin()
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._close_files()
        if kind is not None:
            self._discard()

    def _check_name(self, name: str) -> None:
        if not is_file_name(name) or name in self._files or name in (MANIFEST, MARKER):
            raise ValueError(f"{name!r} is not a name for a new file of a snapshot; use letters, digits, '_', '-', '.'")

    def _finish(self, name: str, fd: int, nbytes: int, digest_of_file: str) -> None:
        os.fchmod(fd, 0o444)
        # The disk works while the next file is made. What an earlier file had in memory is on the disk by now.
        for written in (fd, *self._unsynced[-1 - _FILES_BEHIND : -_FILES_BEHIND]):
            advise_disk(written, "DONTNEED")  # else a save would push the buffer's own pages out of the cache
        self._files[name] = {"nbytes": nbytes, "xxh3_128": digest_of_file}
        self._sync_files(down_to=_MOST_OPEN_FILES)

    def _begin(self) -> None:
        os.mkdir(self._folders[0])
        fd = self._create(MARKER)
        self._unsynced.append(fd)
        _write_all(fd, memoryview(MARKER_CONTENT))
        self._sync_files(down_to=0)

    def _create(self, name: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self._directory.path(self.name, name), flags, 0o644)

    def _make_folder(self, name: str) -> None:
        folder = os.path.join(self._folders[0], name)
        if name and folder not in self._folders:
            if "/" in name:
                self._make_folder(os.path.dirname(name))
            os.mkdir(folder)
            self._folders.append(folder)

    def _sync_files(self, down_to: int) -> None:
        # Not one by one as they are written: the first fsync commits the journal for all, the others then cost little.
        while len(self._unsynced) > down_to:
            fd = self._unsynced.pop(0)
            try:
                os.fsync(fd)
                advise_disk(fd, "DONTNEED")
            finally:
                os.close(fd)

    def _close_files(self) -> None:
        while self._unsynced:
            os.close(self._unsynced.pop())

    def _discard(self) -> None:
        """Removes the snapshot, unless CURRENT names it or may name it: an error can come after CURRENT was moved."""
        self._close_files()
        try:
            pointer = self._directory.current()
            if pointer is not None and pointer.snapshot == self.name:
                return
            if self.name in self._directory.snapshots():
                self._directory.remove(self.name)
            elif os.path.isdir(self._folders[0]):
                os.rmdir(self._folders[0])
        except (OSError, CorruptCheckpointError):
            pass  # the next save removes it; the error that ended this save is the one to report


@contextmanager
def _only_saver(directory: CheckpointDirectory) -> Iterator[None]:
    path = directory.path(LOCK)
    fd = _open_lock(path)
    try:
        lock = FileLock(fd, exclusive=True)
    except BlockingIOError:
        raise CheckpointError(
            f"another save to {directory.root} is running (it holds {path}); wait for it, or save to another directory"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _open_lock(path: str) -> int:
    try:
        return open_regular(path, os.O_RDWR)
    except FileNotFoundError:
        pass
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except FileExistsError:  # another save was first
        return open_regular(path, os.O_RDWR)


@contextmanager
def _current_snapshot(directory: CheckpointDirectory, pointer: Pointer | None) -> Iterator[SnapshotReader | None]:
    """The current snapshot; None where there is none, or its manifest or the size of a file is damaged."""
    try:
        reader = None if pointer is None else SnapshotReader(directory, pointer.snapshot, pointer.manifest)
    except CheckpointError:
        reader = None
    with contextlib.nullcontext() if reader is None else reader:
        yield reader


@contextmanager
def _as_checkpoint_errors(root: str) -> Iterator[_SpaceNeeded]:
    needs = _SpaceNeeded()
    try:
        yield needs
    except EngramError:  # of the saving part, and possibly an OSError as well: an absent shard is a TimeoutError
        raise
    except OSError as error:
        what = f"cannot save to {root}: {error.strerror or error}"
        if error.filename is not None and error.filename != root:
            what += f" ({error.filename})"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what += f"; the save needs about {needs.nbytes:,} bytes, {_free_bytes(root):,} are free now"
        if error.errno == errno.EFBIG:
            most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            limited = most != resource.RLIM_INFINITY
            what += f"; files of this process may have {most:,} bytes (RLIMIT_FSIZE, `ulimit -f`)" if limited else ""
        raise CheckpointError(f"{what}; what was saved there before is untouched") from error


def _check_space(root: str, expected_bytes: int) -> None:
    needed, free = expected_bytes + _SPACE_FOR_METADATA, _free_bytes(root)
    if needed > free:
        raise CheckpointError(
            f"cannot save to {root}: the save needs about {needed:,} bytes and {free:,} are free "
            "(the snapshot before it stays until the new one is whole); what was saved there before is untouched"
        )


def _free_bytes(root: str) -> int:
    try:
        space = os.statvfs(root)
    except OSError:
        return 0
    return space.f_frsize * (space.f_bfree if os.geteuid() == 0 else space.f_bavail)


def _make_directories(root: str) -> None:
    if os.path.isdir(root):
        return
    parent = os.path.dirname(root)
    _make_directories(parent)
    try:
        os.mkdir(root)
    except FileExistsError:
        if not os.path.isdir(root):
            raise
    try:
        sync_directory(parent)
    except OSError:
        # The next save would see the directory and not know that a power cut can lose it with all that is in it.
        with contextlib.suppress(OSError):
            os.rmdir(root)
        raise


def _prune(directory: CheckpointDirectory, older: list[str], keep_last: int) -> None:
    """Removes all but the newest snapshots; those being read stay until a later save."""
    try:
        for name in older[keep_last - 1 :]:
            directory.remove(name)
    except OSError as error:  # the save itself has succeeded
        why = visible(f"{directory.root}: older snapshots could not be removed ({error})")
        warnings.warn(f"{why}; the next save tries again")


def _as_bytes(block: Block) -> memoryview:
    if isinstance(block, np.ndarray):
        return np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
    return memoryview(block)


def _write_all(fd: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(fd, view) :]
