"""The operating system: free memory, the boot id, regular files, forks; and the lock of torch's random numbers."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import stat
import threading
import weakref
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

import engram._native as _native
from engram._checks import is_integer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engram._generator import Generator

T = TypeVar("T")


def human_bytes(n: float) -> str:
    """12.3 MB: a size as people write it."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(n) < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"


def parse_bytes(size: int | str, argument: str) -> int:
    """A number of bytes, given as one or as people write it: "8GB" (10**9 each), "512 MiB" (2**20 each).

    Raises:
        ValueError, TypeError: it is neither, or less than a byte; the message names the argument.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b\s*", size.lower())
        if match is None:
            raise ValueError(f'{argument}={size!r} is no size: write a number of bytes, "8GB", "512MiB" or "1.5 TB"')
        number, unit, binary = match.groups()
        nbytes = int(Fraction(number) * (1024 if binary else 1000) ** " kmgt".index(unit or " "))
    elif not is_integer(size):
        raise TypeError(f'{argument} must be a number of bytes or a text as "8GB", got {size!r}')
    else:
        nbytes = int(size)
    if nbytes < 1:
        raise ValueError(f"{argument} must be at least one byte, got {size!r}")
    return nbytes


def user_path(path: str | os.PathLike[str]) -> Path:
    """A path that a user gives, in which `~` is the home folder."""
    return Path(os.path.expanduser(path))


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Waits until the names in a directory are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_regular(
    path: str | os.PathLike[str],
    flags: int = os.O_RDONLY,
    dir_fd: int | None = None,
    *,
    follow_links: bool = False,
    mode: int = 0o644,
) -> int:
    """Opens a file that is one: an OSError, at once, for pipes, sockets, devices and folders.

    So it is for links, unless they are followed. `mode`: of a file that `flags` create.
    """
    # O_NONBLOCK means nothing for files; a pipe put in one's place must not make us wait for its other end.
    flags |= (0 if follow_links else os.O_NOFOLLOW) | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    fd = os.open(path, flags, mode, dir_fd=dir_fd)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def advise_disk(fd: int, advice: str, start: int = 0, nbytes: int = 0) -> None:
    """Tells the system how a file will be used: "WILLNEED" or "DONTNEED".

    Args:
        nbytes: 0: all up to the end of the file.
    """
    os.posix_fadvise(fd, start, nbytes, getattr(os, f"POSIX_FADV_{advice}"))


# Pythons that were compiled with the headers of an older Linux lack these names, and some of these functions.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2
_F_ADD_SEALS, _F_SEAL_SHRINK = 1033, 2


def memory_file(name: str) -> int:
    """A descriptor of an empty file in memory, which processes can share and the kernel frees with the last of them."""
    flags = _MFD_CLOEXEC | _MFD_ALLOW_SEALING
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    fd: int = ctypes.CDLL(None, use_errno=True).memfd_create(os.fsencode(name), flags)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def seal_size(fd: int) -> None:
    """Lets nobody make a file of `memory_file` shorter."""
    fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK)


def map_privately(fd: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """The first bytes of a file, read from it when they are used; writes into them stay in this process's memory."""
    # Without a reservation: a file may be larger than all memory, and seldom is much of it written to.
    flags, protection = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    return np.frombuffer(mmap.mmap(fd, nbytes, flags, protection), np.uint8)


def boot_id() -> bytes:
    """16 bytes that change when the machine starts."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            return bytes.fromhex(f.read().strip().replace("-", ""))
    except OSError:
        return bytes(16)  # unknown: every start looks like the last one


def free_memory() -> int | None:
    """Bytes that this process may still take: of the machine, and of its control group; None if unknown."""
    free = [n for n in (_machine_free(), _group_free()) if n is not None]
    return min(free) if free else None


def check_memory(nbytes: int, what: str) -> None:
    """MemoryError, with the numbers, where what a file asks for is more than there is."""
    if nbytes < _SMALL:
        return
    free = free_memory()
    if free is not None and nbytes > free:  # the kernel would promise it, and end the process when it is used
        raise MemoryError(f"{what} needs {human_bytes(nbytes)} of memory, and {human_bytes(free)} are free")


_SMALL = 1 << 26  # bytes for which nobody asks the system


def _machine_free() -> int | None:
    try:
        with open("/proc/meminfo") as f:
            for line in f:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _group_free() -> int | None:
    """What the tightest control group above this process leaves; page cache counts as free."""
    try:
        with open("/proc/self/cgroup") as f:
            lines = [line.strip().split(":", 2) for line in f]
    except OSError:
        return None
    free = []
    for _, controllers, path in lines:
        if controllers == "":
            free += _limits("/sys/fs/cgroup", path, "memory.max", "memory.current", "memory.stat", "inactive_file")
        elif "memory" in controllers.split(","):
            root = "/sys/fs/cgroup/memory"
            free += _limits(
                root, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file"
            )
    return min(free) if free else None


def _limits(root: str, path: str, limit: str, usage: str, stat: str, cache: str) -> list[int]:
    free = []
    while True:
        folder = os.path.join(root, path.lstrip("/"))
        try:
            most = _read(os.path.join(folder, limit))
            if most.isdigit() and int(most) < 1 << 60:
                used = int(_read(os.path.join(folder, usage)))
                stats = dict(line.split() for line in _read(os.path.join(folder, stat)).splitlines())
                free.append(max(0, int(most) - used + int(stats.get(cache, 0))))
        except (OSError, ValueError):
            pass
        if path in ("", "/"):
            return free
        path = os.path.dirname(path)


def _read(path: str) -> str:
    with open(path) as f:
        return f.read().strip()


_fork_callbacks: list[Callable[[], object]] = []
_running_callbacks = threading.RLock()
_is_running = False


def run_after_fork(callback: Callable[[], object]) -> None:
    """Calls a function in every forked child, after those that were registered before it.

    After `os.fork` it is called at once; in a child that other code has forked (a C library, `libc.fork()`) before the
    child first uses a store, a lock or a thread of this library. If one of these functions is interrupted all of them
    are called again, before the next such use.
    """
    _fork_callbacks.append(callback)


# In a child where the callbacks have not run to their end: runs them.
notice_fork = _native.notice_fork


def run_fork_callbacks() -> None:
    """Runs all callbacks, in a child where they have not run; other threads of it wait meanwhile."""
    global _is_running
    with _running_callbacks:
        if _is_running or not _native.is_new_process():
            return
        try:
            _is_running = True
            with contextlib.ExitStack() as callbacks:  # each is run, whatever another one raises
                for callback in reversed(_fork_callbacks):
                    callbacks.callback(callback)
            _native.acknowledge_fork()  # not after an error: what was not told believes to be in the parent
        finally:
            _is_running = False


def fork_registry(restart: Callable[[T], object]) -> weakref.WeakSet[T]:
    """An empty set of objects, which it does not keep alive: `restart` is called with each of them in a forked child.

    Sets run in the order in which they were made, so a module's objects come after those of the modules it imports.
    """
    live: weakref.WeakSet[T] = weakref.WeakSet()

    def restart_all() -> None:
        for each in list(live):
            restart(each)

    run_after_fork(restart_all)
    return live


# The innermost lock: who holds it takes no other, so that a fork may wait for it whatever the forking thread holds.
# Reentrant, as a finaliser or a signal handler may fork or sample inside.
drawing = threading.RLock()

os.register_at_fork(before=drawing.acquire, after_in_parent=drawing.release, after_in_child=drawing.release)
os.register_at_fork(after_in_child=notice_fork)


def state_of(generator: torch.Generator | Generator) -> Tensor:
    """Where a generator stands: uint8 [n]."""
    with drawing:
        return generator.get_state()


def set_state(generator: torch.Generator | Generator, state: Tensor) -> None:
    """Puts a generator where it stood at a state."""
    with drawing:
        generator.set_state(state)
