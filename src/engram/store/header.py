"""A store's file as somebody finds it who only looks: its name, its header, and whether anybody uses it.

Loads no torch: `engram info` reads headers, and torch would take longer than all the rest.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from engram import _native
from engram._system import boot_id, open_regular
from engram.errors import StorageError, StorageInUseError
from engram.store.locks import is_open_elsewhere
from engram.store.nodes import refuse_other_node

FILE_NAME = "rows.engram"


def has_store(folder: Path) -> bool:
    """Whether a folder has an entry with the name of a store's file; StorageError where it cannot be read."""
    try:
        os.lstat(folder / FILE_NAME)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise StorageError(f"{folder} cannot be looked into: {error.strerror}") from error
    return True


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


def observe_store(folder: Path) -> tuple[_native.Store, int]:
    """The store in a folder, mapped read-only, and its descriptor; without a lock, beside whoever writes it.

    Raises:
        StorageError: there is none, it is damaged, or it needs a repair, which only a writing process makes.
        StorageInUseError: it is on a network file system, and another node may be using it.
    """
    path = folder / FILE_NAME
    fd, _ = open_store(folder, os.O_RDONLY)
    try:
        store = _native.Store.open(fd, read_only=True)
        _check_repaired(store, fd, path)
    except StorageInUseError:
        os.close(fd)
        raise
    except (RuntimeError, ValueError) as error:
        os.close(fd)
        raise StorageError(f"{path} cannot be opened: {error}") from error
    except BaseException:
        os.close(fd)
        raise
    return store, fd


def refuse_used(folder: Path) -> None:
    """A StorageError where a process has the store in a folder open, or where its file is no store."""
    path = folder / FILE_NAME
    fd = open_regular(path)
    try:
        if is_open_elsewhere(fd):
            raise StorageInUseError("it is in use")
        refuse_other_node(_native.Store.open(fd, read_only=True), boot_id(), fd, path)
    except StorageInUseError:
        raise
    except RuntimeError as error:
        raise StorageError(f"{FILE_NAME}: {error}") from error
    finally:
        os.close(fd)


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
