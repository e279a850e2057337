"""What a disk may hold of a mapped store after a power cut: each page as at any moment since it was last synced."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

PAGE = 4096
_SYNCS = ("fsync", "fdatasync")


class Disk:
    """Versions of each page of one file, as the system calls of its process make them possible."""

    def __init__(self, file: Path, seed: int) -> None:
        self._file = file
        self.random = random.Random(seed)
        self._last = self._read()
        self._versions: list[list[bytes]] = [[page.tobytes()] for page in self._last]
        self.maps: list[int] = []  # where its process has mapped it, newest first
        self._pending: tuple[str, list[int]] | None = None

    def heard(self, call: str, path: str, args: list[int]) -> None:
        """An event of its process; a sync that it begins has returned by the next one."""
        if self._pending is not None:
            self.synced(*self._pending)
        self.look()
        ours = call == "msync" or (call in _SYNCS and path.endswith(self._file.name))
        self._pending = (call, args) if ours else None

    def look(self) -> None:
        """Any page may be written back now, as it is."""
        now = self._read()
        for page in np.flatnonzero((now != self._last).any(1)):
            versions = self._versions[page]
            versions.append(now[page].tobytes())
            if len(versions) > 12:  # fewer than a disk may have: each is one that it may have
                del versions[self.random.randrange(len(versions) - 1)]
        self._last = now

    def synced(self, call: str, args: list[int]) -> None:
        """A sync has returned since `look`: older versions of its pages are gone."""
        if call in _SYNCS:
            pages = range(len(self._versions))
        else:
            inside = ((args[0] - at) // PAGE for at in self.maps)
            first = next(page for page in inside if 0 <= page < len(self._versions))
            pages = range(first, first + -(-args[1] // PAGE))
        for page in pages:
            del self._versions[page][:-1]

    def image(self) -> bytes:
        """One of the things that the disk may hold."""
        made, recent = [], self.random.random()
        for versions in self._versions:
            pick = self.random.choice(versions) if self.random.random() > recent else versions[-1]
            made.append(pick)
        return b"".join(made)

    def images(self) -> Iterator[bytes]:
        """Everything that the disk may hold; for a few versions of a few pages."""
        return map(b"".join, itertools.product(*self._versions))

    def _read(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._file.read_bytes(), np.uint8).reshape(-1, PAGE)
