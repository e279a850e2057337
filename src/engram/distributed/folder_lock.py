"""The lock of a shard's folder, by which others on its machine see without a call whether its process lives."""

from __future__ import annotations

import os
import shutil
import time
import weakref
from pathlib import Path

from engram.errors import NoFreeLaneError
from engram.kernel.disk import FirstByte
from engram.kernel.tools import open_regular

_NAME = "shard.lock"
_PAUSE = 0.02  # seconds between two tries
_INTERVAL = 0.005  # seconds for which a look holds: one costs a tenth of a batch


class FolderLock:
    """The lock of a folder, held by its shard until `close`, or until its process ends, however it does.

    Args:
        timeout: seconds to wait for another shard that is just ending.

    Raises:
        NoFreeLaneError: another shard holds it, and went on doing so.
    """

    def __init__(self, folder: Path, timeout: float) -> None:
        self._byte = _first_byte(folder)
        deadline = time.monotonic() + timeout
        while not self._byte.take():
            if time.monotonic() > deadline:
                self.close()
                raise NoFreeLaneError(
                    f"{folder} is that of another shard, which has gone on for {timeout:g} seconds; end it first, or "
                    "choose another scratch_dir"
                )
            time.sleep(_PAUSE)

    @property
    def is_removed(self) -> bool:
        """Whether the folder was deleted."""
        return not self._byte.has_name()

    def close(self) -> None:
        """Lets it go."""
        self._byte.close()


def _first_byte(folder: Path) -> FirstByte:
    return FirstByte(open_regular(folder / _NAME, os.O_RDWR | os.O_CREAT, mode=0o600))


def watch_folder(folder: str | os.PathLike[str]) -> FolderWatch | None:
    """The watch of a folder that a living shard of this machine holds; None where none does.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> lock = FolderLock(folder, timeout=0.0)
        >>> watch = watch_folder(folder)
        >>> lock.close()
        >>> watch.look(), watch_folder(folder)
        (False, None)
    """
    try:
        watch = FolderWatch(FirstByte(open_regular(Path(folder) / _NAME)))
    except OSError:
        return None
    if watch.look():
        return watch
    watch.close()
    return None


class FolderWatch:
    """Looks whether a shard lives in a folder of this machine; `byte`: its lock, closed here."""

    def __init__(self, byte: FirstByte) -> None:
        self._byte = byte
        self._closer = weakref.finalize(self, byte.close)
        self._next = 0.0  # when it looks again

    def is_held(self) -> bool:
        """Whether it did 5 ms ago or later."""
        return time.monotonic() < self._next or self.look()

    def look(self) -> bool:
        """Whether it does now, and the folder has not been deleted."""
        held = self._byte.is_taken() and self._byte.has_name()
        self._next = time.monotonic() + _INTERVAL if held else 0.0
        return held

    def close(self) -> None:
        """Ends its use."""
        self._closer()


def remove_folder(folder: Path) -> bool:
    """Removes a folder that no shard holds; returns whether it is gone."""
    try:
        byte = _first_byte(folder)
    except OSError:  # another user's
        return False
    try:
        if not byte.take():
            return False
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()
    finally:
        byte.close()
