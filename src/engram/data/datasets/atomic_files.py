"""New files and folders that are written aside and renamed: they appear whole, or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

_AT_FDCWD, _NO_REPLACE, _EXCHANGE = -100, 1, 2
_SUFFIX = ".engram-tmp"


@contextlib.contextmanager
def new_file(path: Path, overwrite: bool) -> Iterator[Path]:
    """A path to write to; the file is synced and takes the name `path` when the block ends without an error.

    Raises:
        FileExistsError: `path` exists and not `overwrite`, or it is not a file.
    """
    _refuse_existing(path, overwrite, "a file", Path.is_file)
    with _temporary_folder(path) as folder:
        new = folder / path.name
        yield new
        _sync(new)
        _rename(new, path, overwrite)


@contextlib.contextmanager
def new_folder(path: Path, overwrite: bool, ours: Callable[[Path], bool]) -> Iterator[Path]:
    """As `new_file`, for a folder with files; `overwrite` replaces a folder only if `ours(path)`.

    Raises:
        FileExistsError: `path` exists and not `overwrite`, or it is not such a folder.
    """
    _refuse_existing(path, overwrite, "a dataset of this kind", ours)
    with _temporary_folder(path) as new:
        yield new
        for folder, _, files in os.walk(new, topdown=False):
            for name in files:
                _sync(Path(folder, name))
            _sync(Path(folder))
        _rename(new, path, overwrite)


def _refuse_existing(path: Path, overwrite: bool, kind: str, is_one: Callable[[Path], bool]) -> None:
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise FileExistsError(errno.EEXIST, "it exists already; overwrite=True replaces it", str(path))
    if path.is_symlink() or not is_one(path):
        raise FileExistsError(errno.EEXIST, f"overwrite=True replaces {kind} only, and this is none", str(path))


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
    for folder in path.parent.glob(f".{_escaped(path.name)}.*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(fd)


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _rename(new: Path, path: Path, overwrite: bool) -> None:
    if overwrite and os.path.lexists(path):
        # A rename replaces a file, but not a folder with entries: that one is exchanged with the new one.
        if not path.is_dir():
            os.replace(new, path)
        elif not _rename_with(new, path, _EXCHANGE):
            old = new.parent / f"{new.name[: -len(_SUFFIX)]}.old{_SUFFIX}"
            os.rename(path, old)
            os.rename(new, path)
            shutil.rmtree(old)
    elif not _rename_with(new, path, _NO_REPLACE):
        _refuse_existing(path, False, "", Path.exists)
        os.rename(new, path)
    _sync(path.parent)


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
        raise FileExistsError(number, "somebody else has created it meanwhile; overwrite=True replaces it", str(target))
    raise OSError(number, os.strerror(number), str(target))


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
