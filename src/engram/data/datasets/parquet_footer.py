"""A checksum for the end of a Parquet file, which pyarrow believes: a wrong byte there can end the process.

The format has checksums for pages, but none for the footer that says where they are. Between the last page and the
footer a file may hold anything: engram puts the footer's hash there, which other readers never see.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import xxhash

_MAGIC = b"PAR1"
_SEAL = b"ENGRAM-FOOTER-01"
_DIGEST_BYTES = 16


def seal(path: Path) -> None:
    """Puts the footer's hash before it."""
    with open(path, "r+b") as file:
        at, end = _footer(file)
        file.seek(at)
        file.write(_SEAL + xxhash.xxh3_128_digest(end) + end)


def check(path: Path) -> None:
    """ValueError where the file has no footer, or has one that is sealed and not what it was."""
    with open(path, "rb") as file:
        at, end = _footer(file)
        size = len(_SEAL) + _DIGEST_BYTES
        file.seek(max(0, at - size))
        sealed = file.read(size)
    if sealed.startswith(_SEAL) and sealed[len(_SEAL) :] != xxhash.xxh3_128_digest(end):
        raise ValueError("its footer is not the one that was written")


def _footer(file: BinaryIO) -> tuple[int, bytes]:
    """Where the footer begins, and all bytes from there on."""
    size = file.seek(0, 2)
    file.seek(max(0, size - 8))
    last = file.read(8)
    at = size - 8 - int.from_bytes(last[:4], "little")
    if last[4:] != _MAGIC or at < len(_MAGIC):
        raise ValueError("it has no footer that lies in it")
    file.seek(at)
    return at, file.read()
