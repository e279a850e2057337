"""Files that are read from start to end while their checksum is computed."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from engram.errors import CorruptCheckpointError

PIECE = 1 << 20  # hashed while it is still in the cache
_BLOCK = 1 << 22
_SMALL = 1 << 16  # read at once for many takes of a few bytes

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of a file, as the manifest lists them."""

    nbytes: int
    xxh3_128: str


class ChecksummedFile:
    """A file that is read once, from start to end, and compared with its checksum at the end."""

    def __init__(self, fd: int, path: str, record: FileRecord) -> None:
        self._fd = fd
        self._path = path
        self._record = record
        self._hasher = xxhash.xxh3_128()
        self._ahead = memoryview(b"")  # read and hashed, not yet handed out
        self.position = 0

    @property
    def remaining(self) -> int:
        return self._record.nbytes - self.position

    def take(self, buffer: Bytes) -> None:
        """Fills `buffer` with the next bytes."""
        view = buffer.data
        while len(view):
            if not self._ahead and len(view) < _SMALL:
                ahead = memoryview(bytearray(min(_SMALL, self.remaining) or 1))
                self._ahead = ahead[: self._read_into(ahead)]
            got = self._take_ahead(view) or self._read_into(view)
            self.position += got
            view = view[got:]

    def skip(self, nbytes: int) -> None:
        """Skips bytes that are not needed; they are part of the checksum."""
        block = np.empty(min(nbytes, _BLOCK), np.uint8)
        while nbytes > 0:
            self.take(block[:nbytes])
            nbytes -= min(nbytes, len(block))

    def finish(self) -> None:
        """Reads the rest; CorruptCheckpointError where the checksum of the whole file is not the saved one."""
        self.skip(self.remaining)
        if self._hasher.hexdigest() != self._record.xxh3_128:
            raise CorruptCheckpointError(self._path, "its checksum is not that of the bytes that were saved")

    def __enter__(self) -> ChecksummedFile:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        os.close(self._fd)

    def _take_ahead(self, view: memoryview) -> int:
        got = min(len(view), len(self._ahead))
        view[:got], self._ahead = self._ahead[:got], self._ahead[got:]
        return got

    def _read_into(self, view: memoryview) -> int:
        try:
            got = os.readv(self._fd, [view[:PIECE]])
        except OSError as error:
            raise CorruptCheckpointError(self._path, f"it cannot be read ({error.strerror})") from error
        if not got:
            raise CorruptCheckpointError(
                self._path, f"it ends at byte {self.position}, {self._record.nbytes} were saved"
            )
        self._hasher.update(view[:got])
        return got
