"""What a disk may hold after a power cut.

Of a mapped store (`Disk`) each page as at any moment since it was last synced; of a folder (`Folder`) of each file and
each name in it any version since its sync, which is stricter than file systems with a journal are: names are lost one
by one, in any order.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

PAGE = 4096
_SYNCS = ("fsync", "fdatasync")


class Disk:
    """Versions of each page of one file or memory."""

    def __init__(self, read: Callable[[], bytes], seed: int) -> None:
        self._read = lambda: np.frombuffer(read(), np.uint8).reshape(-1, PAGE)
        self.random = random.Random(seed)
        self._last = self._read()
        self._versions: list[list[bytes]] = [[page.tobytes()] for page in self._last]
        self._lengths = [len(self._last)]  # of the file, in pages, since its last sync

    def look(self) -> None:
        """Any page may be written back now, as it is."""
        now = self._read()
        if len(now) > len(self._last):
            self._lengths.append(len(now))
            more = np.zeros((len(now) - len(self._last), PAGE), np.uint8)
            self._last = np.concatenate([self._last, more])
            self._versions += [[page.tobytes()] for page in more]
        for page in np.flatnonzero((now != self._last).any(1)):
            versions = self._versions[page]
            versions.append(now[page].tobytes())
            if len(versions) > 12:  # fewer than a disk may have: each is one that it may have
                del versions[self.random.randrange(len(versions) - 1)]
        self._last = now

    def forget(self, pages: range | None = None) -> None:
        """A sync of these pages (of all) has returned since `look`: older versions are gone."""
        for page in range(len(self._versions)) if pages is None else pages:
            del self._versions[page][:-1]
        if pages is None:
            del self._lengths[:-1]

    def image(self) -> bytes:
        """One of the things that the disk may hold."""
        pages, recent = [], self.random.random()
        for versions in self._versions:
            pages.append(self.random.choice(versions) if self.random.random() > recent else versions[-1])
        return b"".join(pages[: self.random.choice(self._lengths)])

    def images(self) -> Iterator[bytes]:
        """Everything that the disk may hold; for a few versions of a few pages."""
        return map(b"".join, itertools.product(*self._versions))


class Cut(Protocol):
    """A store whose writers live, die and flush while its disk is looked at, until the power is cut."""

    draw: random.Random
    disk: Disk
    fd: int

    def extend(self) -> None: ...
    def kill_inside(self) -> None: ...
    def flush(self) -> None: ...
    def cut(self) -> None: ...


def live_and_cut(world: Cut, extends: int, kills: int) -> None:
    """Some lives of a store, each of which ends with a power cut; so many extends and kills come for each flush."""
    try:
        for _ in range(world.draw.randrange(1, 4)):
            for _ in range(world.draw.randrange(5, 40)):
                world.draw.choices((world.extend, world.kill_inside, world.flush), (extends, kills, 1))[0]()
                world.disk.look()
            world.cut()
    finally:
        os.close(world.fd)


class MappedFile(Disk):
    """A disk with one file, as the system calls of the process that has mapped it make versions possible."""

    def __init__(self, file: Path, seed: int) -> None:
        super().__init__(file.read_bytes, seed)
        self._name = file.name
        self.maps: list[int] = []  # where its process has mapped it
        self._pending: tuple[str, list[int]] | None = None

    def heard(self, call: str, path: str, args: list[int]) -> None:
        """An event of its process; a sync that it begins has returned by the next one."""
        if self._pending is not None:
            self.synced(*self._pending)
        self.look()
        ours = call == "msync" or (call in _SYNCS and path.endswith(self._name))
        self._pending = (call, args) if ours else None

    def synced(self, call: str, args: list[int]) -> None:
        """A sync has returned since `look`: older versions of its pages are gone."""
        if call in _SYNCS:
            self.forget()
            return
        inside = ((args[0] - at) // PAGE for at in self.maps)
        first = min(page for page in inside if page >= 0)  # of the map that begins next before it
        self.forget(range(first, first + -(-args[1] // PAGE)))


# ---- folders ----
PIECE = 512  # of a file: smaller than any disk's pages, as chunks of the tests are small

_CHANGES_NOTHING = ("fsync", "fdatasync", "close", "flock", "fcntl", "fadvise64", "fchmod", "mmap")
Name = tuple[int, str]  # the folder's inode, the name in it


class Folder:
    """Versions of the files and names below `root`, as the system calls of its users make them possible."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.random = random.Random(seed)
        self._files: dict[int, list[bytes]] = {}  # content of inodes; the first version is what was synced last
        self._names: dict[Name, list[int | None]] = {}  # inodes that a name stood for; None: there was no such name
        self._folders: set[int] = set()
        self._doubtful: set[Name | int] = set()  # what a sync failed for, until it is written again
        self.look()
        for versions in (*self._files.values(), *self._names.values()):
            del versions[:-1]  # what was there before is on the disk

    def look(self, call: str = "", path: str = "") -> None:
        """What is there now, after this call, may be written back."""
        if call in _CHANGES_NOTHING:
            return
        if "write" in call:
            self._add(os.stat(path).st_ino, Path(path))
            return
        seen: dict[Name, int] = {}
        self._walk(self.root, seen)
        for name in {*self._names, *seen}:
            versions = self._names.setdefault(name, [None])
            if versions[-1] != seen.get(name):
                self._doubtful.discard(name)
                versions.append(seen.get(name))

    def _walk(self, folder: Path, seen: dict[Name, int]) -> None:
        here = folder.stat().st_ino
        self._folders.add(here)
        for entry in os.scandir(folder):
            seen[here, entry.name] = entry.inode()
            if entry.is_dir(follow_symlinks=False):
                self._walk(Path(entry.path), seen)
            else:
                self._add(entry.inode(), Path(entry.path))

    def _add(self, inode: int, path: Path) -> None:
        versions, content = self._files.setdefault(inode, [b""]), path.read_bytes()
        if versions[-1] != content:
            versions.append(content)

    def synced(self, path: str) -> None:
        """A sync of this file or folder has returned since `look`; it means nothing for what one has failed for."""
        try:
            inode = os.stat(path).st_ino
        except FileNotFoundError:
            return
        if inode in self._files and inode not in self._doubtful:
            del self._files[inode][:-1]
        for name, versions in self._names.items():
            if name[0] == inode and name not in self._doubtful:
                del versions[:-1]

    def sync_failed(self, path: str) -> None:
        """The kernel may take for clean what has not reached the disk."""
        inode = os.stat(path).st_ino
        self._doubtful.add(inode)
        self._doubtful |= {name for name, versions in self._names.items() if name[0] == inode and len(versions) > 1}

    def image(self, target: Path) -> None:
        """Makes one of the folders that the disk may hold."""
        recent = self.random.random()
        self._make(self.root.stat().st_ino, target, recent, {})

    def _make(self, folder: int, target: Path, recent: float, made: dict[int, bytes]) -> None:
        target.mkdir()
        for (parent, name), versions in self._names.items():
            if parent != folder:
                continue
            inode = versions[-1] if self.random.random() < recent else self.random.choice(versions)
            if inode in self._folders:
                self._make(inode, target / name, recent, made)
            elif inode is not None:
                if inode not in made:
                    made[inode] = self._content(self._files[inode], recent)
                (target / name).write_bytes(made[inode])

    def _content(self, versions: list[bytes], recent: float) -> bytes:
        """Pages of any version since the last sync, zeros where one has none; as long as any of them."""
        if len(versions) == 1 or self.random.random() < recent:
            return versions[-1]
        out = bytearray()
        length = len(self.random.choice(versions))
        for at in range(0, length, PIECE):
            page = self.random.choice(versions)[at : at + PIECE]
            out += page + bytes(PIECE - len(page))
        return bytes(out[:length])
