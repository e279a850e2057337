"""What somebody else may have put in the place of a file: links, pipes, folders, devices."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

OUTSIDE = b"a file that is nobody's business here\n" * 100


def plant(kind: str, place: Path, outside: Path) -> None:
    """Puts something of a kind at `place`; links lead to `outside`."""
    outside.write_bytes(OUTSIDE)
    if place.is_dir() and not place.is_symlink():
        place = place / "into"
    if place.is_symlink() or place.exists():
        place.unlink()
    KINDS[kind](place, outside)


KINDS: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda place, outside: place.symlink_to(outside),
    "hard link": lambda place, outside: os.link(outside, place),
    "link to nothing": lambda place, outside: place.symlink_to(outside.with_name("nothing")),
    "link to a pipe": lambda place, outside: (
        os.mkfifo(outside.with_name("far pipe")),
        place.symlink_to(outside.with_name("far pipe")),
    ),
    "pipe": lambda place, outside: os.mkfifo(place),
    "folder": lambda place, outside: place.mkdir(),
    "full folder": lambda place, outside: (place.mkdir(), (place / "file").write_bytes(b"x")),
    "socket": lambda place, outside: os.mknod(place, 0o140600),
    "empty file": lambda place, outside: place.write_bytes(b""),
}


class TooLate(BaseException):
    """Not an OSError, as TimeoutError is, which a library may take for one of a file."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """TooLate where the block waits for ever."""

    def late(*_: object) -> None:
        raise TooLate(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
