"""Files and folders that appear under their names whole, or not at all."""

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
        FileExistsError: there is something at `path`, and not `overwrite`; or it is no file.
    """
    _refuse_existing(path, overwrite, "a file", Path.is_file)
    with _aside(path) as folder:
        made = folder / path.name
        yield made
        _sync(made)
        _rename(made, path, overwrite)


@contextlib.contextmanager
def new_folder(path: Path, overwrite: bool, ours: Callable[[Path], bool]) -> Iterator[Path]:
    """The same for a folder with files; `overwrite` replaces a folder only if `ours(path)`.

    Raises:
        FileExistsError: there is something at `path`, and not `overwrite`; or it is something else.
    """
    _refuse_existing(path, overwrite, "a dataset of this kind", ours)
    with _aside(path) as made:
        yield made
        for folder, _, files in os.walk(made, topdown=False):
            for name in files:
                _sync(Path(folder, name))
            _sync(Path(folder))
        _rename(made, path, overwrite)


def _refuse_existing(path: Path, overwrite: bool, wanted: str, is_one: Callable[[Path], bool]) -> None:
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise FileExistsError(errno.EEXIST, "there is something already; overwrite=True replaces it", str(path))
    if path.is_symlink() or not is_one(path):
        raise FileExistsError(errno.EEXIST, f"overwrite=True replaces {wanted} only, and this is none", str(path))


@contextlib.contextmanager
def _aside(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, which goes again unless it was renamed. A lock says that somebody is at it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    made = path.parent / f".{path.name}.{os.urandom(6).hex()}{_SUFFIX}"
    made.mkdir()
    fd = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield made
    finally:
        if made.is_dir():  # after an exchange: what was there before
            shutil.rmtree(made)
        os.close(fd)


def _remove_leftovers(path: Path) -> None:
    """What killed writers of the same path left behind: their locks died with them."""
    for found in path.parent.glob(f".{_escaped(path.name)}.*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            fd = os.open(found, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(found)
            finally:
                os.close(fd)


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _rename(made: Path, path: Path, overwrite: bool) -> None:
    if overwrite and os.path.lexists(path):
        # Files replace each other; a folder with something in it has to change places with the new one.
        if not path.is_dir():
            os.replace(made, path)
        elif not _rename_with(made, path, _EXCHANGE):
            old = made.parent / f"{made.name[: -len(_SUFFIX)]}.old{_SUFFIX}"
            os.rename(path, old)
            os.rename(made, path)
            shutil.rmtree(old)
    elif not _rename_with(made, path, _NO_REPLACE):
        _refuse_existing(path, False, "", Path.exists)
        os.rename(made, path)
    _sync(path.parent)


def _rename_with(source: Path, target: Path, flag: int) -> bool:
    """renameat2; False where system or file system do not know it."""
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
        raise FileExistsError(number, "somebody else has made it meanwhile; overwrite=True replaces it", str(target))
    raise OSError(number, os.strerror(number), str(target))


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
