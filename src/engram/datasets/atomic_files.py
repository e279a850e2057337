"""New files and folders that are written aside and renamed: they appear whole, or not at all.

An existing file or folder is replaced only if engram wrote all of it, and in one step: a process that is killed in the
middle leaves the old one or the new one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from engram.kernel.tools import open_regular, visible

_AT_FDCWD, _NO_REPLACE, _EXCHANGE = -100, 1, 2
_SUFFIX = ".engram-tmp"


class Replaceable(NamedTuple):
    """A kind of file or folder that may be replaced: its name, and a function that says why a path may not be."""

    name: str
    refusal: Callable[[Path], str | None]


def replaceable_file(name: str, is_one: Callable[[BinaryIO], bool]) -> Replaceable:
    """A regular file, no link, of which `is_one` says that engram wrote it."""

    def refusal(path: Path) -> str | None:
        if path.is_symlink():
            return "it is a symbolic link"
        try:
            with open(open_regular(path), "rb") as file:
                return None if is_one(file) else "engram did not write it"
        except OSError as error:
            return error.strerror or "it cannot be opened"

    return Replaceable(name, refusal)


@contextlib.contextmanager
def new_file(path: Path, overwrite: bool, replaceable: Replaceable) -> Iterator[Path]:
    """A path to write to; the file is synced and takes the name `path` when the block ends without an error.

    Raises:
        FileExistsError: `path` exists and not `overwrite`, or it is not replaceable.
    """
    refuse_existing(path, overwrite, replaceable)
    with _temporary_folder(path) as folder:
        new = folder / path.name
        yield new
        _sync(open_regular(new))
        _rename(new, path, overwrite, replaceable)


@contextlib.contextmanager
def new_folder(path: Path, overwrite: bool, replaceable: Replaceable) -> Iterator[Path]:
    """As `new_file`, for a folder with files.

    Raises:
        FileExistsError: `path` exists and not `overwrite`, or it is not replaceable.
    """
    refuse_existing(path, overwrite, replaceable)
    with _temporary_folder(path) as new:
        yield new
        for folder, _, files in os.walk(new, topdown=False):
            for name in files:
                _sync(open_regular(Path(folder, name)))
            _sync(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        _rename(new, path, overwrite, replaceable)


def refuse_existing(path: Path, overwrite: bool, replaceable: Replaceable) -> None:
    """FileExistsError where `path` exists and not `overwrite`, or it is not replaceable."""
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise FileExistsError(errno.EEXIST, "it exists already; overwrite=True replaces it", str(path))
    reason = replaceable.refusal(path)
    if reason is not None:
        raise _refused(path, replaceable, reason)


def _refused(path: Path, replaceable: Replaceable, reason: str) -> FileExistsError:
    why = f"only {replaceable.name} is replaced, and this is none ({visible(reason)})"
    text = f"{why}; move it away, or choose another path"
    return FileExistsError(errno.EEXIST, text, str(path))


@contextlib.contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, deleted at the end unless it was renamed; locked as long as its writer lives."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    folder = path.parent / f".{path.name}.{os.urandom(6).hex()}{_SUFFIX}"
    folder.mkdir()
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield folder
    finally:
        if folder.is_dir():  # after an exchange it is the folder that was replaced
            shutil.rmtree(folder)
        os.close(fd)


def _remove_leftovers(path: Path) -> None:
    """Deletes what killed writers of the same path left behind, whose locks are gone."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{12}}{re.escape(_SUFFIX)}")
    for name in filter(ours.fullmatch, os.listdir(path.parent)):
        folder = path.parent / name
        with contextlib.suppress(OSError):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(fd)


def _rename(new: Path, path: Path, overwrite: bool, replaceable: Replaceable) -> None:
    if not overwrite or not os.path.lexists(path):
        if not _rename_with(new, path, _NO_REPLACE):
            refuse_existing(path, False, replaceable)
            os.rename(new, path)
    elif not _exchanged(new, path, replaceable):
        refuse_existing(path, overwrite, replaceable)
        if path.is_dir():
            raise OSError(errno.ENOTSUP, "this file system replaces no folder in one step; delete it first", str(path))
        os.replace(new, path)
    _sync(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def _exchanged(new: Path, path: Path, replaceable: Replaceable) -> bool:
    """Exchanges the two, and looks at what was replaced once more: it may have changed while the new one was written.

    False where the file system does not support it.

    Raises:
        FileExistsError: it may not be replaced, and has its name again.
    """
    with _locked(path):  # a folder: under its new name it looks like one that a killed writer left
        if not _rename_with(new, path, _EXCHANGE):
            return False
        reason = replaceable.refusal(new)
        if reason is not None:
            _rename_with(new, path, _EXCHANGE)
            raise _refused(path, replaceable, reason)
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Locks a folder, as its writer does; a file lies in a locked folder."""
    if path.is_symlink() or not path.is_dir():
        yield
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _rename_with(source: Path, target: Path, flag: int) -> bool:
    """renameat2 with a flag; False where the system or the file system does not support it."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    if number == errno.EEXIST:
        raise FileExistsError(number, "another process created it meanwhile; overwrite=True replaces it", str(target))
    raise OSError(number, os.strerror(number), str(target))


def _sync(fd: int) -> None:
    """Waits until a file, or the names in a folder, are on the disk, and closes it."""
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def path_of(file: BinaryIO) -> str:
    """A path that opens the file of a descriptor again, even if it was renamed: for libraries that take paths."""
    return f"/proc/self/fd/{file.fileno()}"
