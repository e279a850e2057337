"""A store's file as somebody finds it who only looks: its name, its header, and whether anybody uses it.

Loads no torch: `engram info` reads headers, and torch would take longer than all the rest.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import engram._native as _native
from engram._system import boot_id, open_regular
from engram.errors import StorageError, StorageInUseError
from engram.store.locks import has_writer, is_open_elsewhere, is_writer_alive
from engram.store.nodes import refuse_other_node

FILE_NAME = "rows.engram"


def open_store(folder: Path, flags: int = os.O_RDWR) -> tuple[int, os.stat_result]:
    """A descriptor of the store's file in a folder, and its `stat`.

    Raises:
        StorageError: there is none, or it cannot be opened as a regular file.
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


def opened_store(fd: int, *, read_only: bool = False, complete: bool = True) -> _native.Store:
    """The store in an open file, with the observations that it keeps beside its rows; `complete`: none may be missing.

    Raises:
        RuntimeError, ValueError: it is none, or it is damaged.
    """
    store = _native.Store.open(fd, read_only=read_only)
    if store.has_observations:
        try:
            said = json.loads(store.layout)["observations"]
            keys = [(key["frames"], key["frame_bytes"]) for key in said["keys"]]
            in_row, sizes = said["in_row"], said["sizes"]
            store.keep_observations(said["n_steps"], keys, None if in_row is None else (in_row[0], in_row[1]), sizes)
        except (KeyError, TypeError, IndexError, MemoryError) as error:
            raise RuntimeError(f"its header does not say where its observations are: {error!r}") from error
        if complete and not store.has_all_segments:
            raise RuntimeError("it was cut short: it lacks observations that its rows have")
    return store


class StoreFile:
    """A store's file, open for somebody who only looks: without a lock, beside whoever writes it.

    `store` maps it, where that was asked for.

    Raises:
        StorageError: there is none in the folder, or it cannot be opened as a regular file.
    """

    NAME = FILE_NAME
    store: _native.Store

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether a folder has an entry with the name of a store's file; StorageError where it cannot be read."""
        try:
            os.lstat(folder / FILE_NAME)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise StorageError(f"{folder} cannot be looked into: {error.strerror}") from error
        return True

    @staticmethod
    def refuse_used(folder: Path) -> None:
        """A StorageError where a process has the store in a folder open, or where its file is no store."""
        path = folder / FILE_NAME
        fd = open_regular(path)
        try:
            if is_open_elsewhere(fd):
                raise StorageInUseError("it is in use")
            refuse_other_node(opened_store(fd, read_only=True), boot_id(), fd, path)
        except StorageInUseError:
            raise
        except RuntimeError as error:
            raise StorageError(f"{FILE_NAME}: {error}") from error
        finally:
            os.close(fd)

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self.fd, _ = open_store(folder, os.O_RDONLY)

    @classmethod
    def observed(cls, folder: Path) -> StoreFile:
        """With `store`, mapped read-only.

        Raises:
            StorageError: there is none, it is damaged, or it needs a repair, which only a writing process makes.
            StorageInUseError: it is on a network file system, and another node may be using it.
        """
        opened = cls(folder)
        try:
            opened.store = opened_store(opened.fd, read_only=True)
            _check_repaired(opened.store, opened.fd, opened.path)
        except BaseException as error:
            opened.close()
            if isinstance(error, RuntimeError | ValueError) and not isinstance(error, StorageInUseError):
                raise StorageError(f"{opened.path} cannot be opened: {error}") from error
            raise
        return opened

    @property
    def nbytes(self) -> int:
        """Its size on disk."""
        return os.fstat(self.fd).st_size

    @property
    def is_in_use(self) -> bool:
        """Whether another process or object has it open."""
        return is_open_elsewhere(self.fd)

    def has_writer(self, lane: int, store: _native.Store) -> bool:
        """Whether another process holds a lane of this store.

        Where writers move from lane to lane, whether the one that wrote there last has the store open.
        """
        if store.keeps_extents:
            last = store.last_writer(lane)
            return bool(last) and is_writer_alive(self.fd, last >> _native.PID_BITS)
        return has_writer(self.fd, lane)

    def last_pid(self, lane: int) -> int:
        """The process that wrote a lane's newest row, and may have ended; 0: the store does not tell."""
        return self.store.last_writer(lane) & ((1 << _native.PID_BITS) - 1)

    def close(self) -> None:
        """Closes the descriptor; what is mapped stays."""
        os.close(self.fd)

    def __enter__(self) -> StoreFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check_repaired(store: _native.Store, fd: int, path: Path) -> None:
    """A StorageError where the store needs a repair, which only a writing process makes, or is another node's."""
    now = boot_id()
    refuse_other_node(store, now, fd, path)
    in_use = is_open_elsewhere(fd)
    has_boot_ids = any(now) and any(store.boot_id)
    stopped = not store.clean and (store.boot_id != now if has_boot_ids else not in_use)
    halfway = store.interrupted or any(n % 2 for n in store.epoch())
    if stopped or (halfway and not in_use):
        why = "the machine stopped while it was written" if stopped else "a process died in the middle of a change"
        raise StorageError(f"{path}: {why}. Open it once for writing, which mends it")
