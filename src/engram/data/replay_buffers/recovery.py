"""Sessions of a store that outlives its processes: what is synced when, and what `open` mends.

docs/memory-model.md, "Power loss", has the reasons.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from engram import _native
from engram.data.replay_buffers.files import FILE_NAME, open_store, remove_leftovers, reserve_holes, sync_folder
from engram.data.replay_buffers.locks import LaneLocks
from engram.data.replay_buffers.utils import boot_id
from engram.errors import StorageError

_DELETED = "was deleted or replaced"

_log = logging.getLogger("engram")


class Session:
    """One process's use of a named store, from `open` to `close`."""

    def __init__(self, folder: Path) -> None:
        path = folder / FILE_NAME
        fd, self._found = open_store(folder)
        self._path, self._fd = path, fd
        try:
            self.store = _native.Store.open(fd)
        except (RuntimeError, ValueError) as error:
            os.close(fd)
            raise StorageError(f"{path} cannot be opened: {error}") from error
        except BaseException:
            os.close(fd)
            raise
        self.dropped = 0
        self._wrote = False
        self._name_synced = False
        try:
            self.locks = LaneLocks(fd, str(path.absolute()), needs=self._needs_mending, mend=self._mend)
        except OSError as error:
            raise StorageError(f"{path} cannot be locked: {error}") from error
        # Rows that somebody wrote and did not flush: a sync may have failed for them there.
        self._failures_mended = -1 if self.store.unflushed else self.store.sync_failures
        if self.dropped:
            _log.warning("%s: %d rows that a power cut had torn were dropped", path, self.dropped)

    def on_take(self, lane: int) -> None:
        """Before the first write to a lane; a StorageError where nobody would ever find what is written."""
        if self._is_deleted():
            raise StorageError(f"{self._path} {_DELETED}; what is written to it now would be lost")
        self.store.raise_term(lane)
        self._begin()
        self._wrote = True  # only now: where the sync failed the next change tries again

    def on_alone(self) -> None:
        """Before a change of stored rows or counters."""
        if not self._wrote:
            self._begin()
            self._wrote = True
        if self.store.interrupted:  # by a disk that failed
            with self._told("a change of stored rows"):
                self.store.finish_interrupted()

    def _begin(self) -> None:
        """From here on an unclean stop of the machine means a scan."""
        self.store.boot_id = boot_id()
        self.store.clean = False
        with self._told("the beginning of a session"):
            self.store.sync_header()

    def flush(self) -> None:
        """Every row appended so far survives a power cut, until it is overwritten."""
        if self._is_deleted():
            raise StorageError(f"{self._path} {_DELETED}: its rows go when the last process closes it, flushed or not")
        self._sync()

    def _is_deleted(self) -> bool:
        return os.fstat(self.locks.fd).st_nlink == 0

    def _sync(self) -> None:
        published = [self.store.lane(i)["published"] for i in range(self.store.lanes)]
        failures = self.store.sync_failures
        with self._told("rows"):
            if failures != self._failures_mended:
                self.store.dirty_again(published)
            self._sync_name()
            os.fsync(self.locks.fd)
            self.store.mark_durable(published)
            self.store.sync_header()
        self._failures_mended = failures

    def _sync_name(self) -> None:
        """Once: who made the file may have died, or failed, before its name was on the disk."""
        if self._name_synced:
            return
        with contextlib.suppress(FileNotFoundError):  # moved by somebody, who has given it the name that it has now
            sync_folder(self._path.parent)
        self._name_synced = True

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """What a disk says, as a StorageError; nothing that is not synced yet is believed to be after it."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            self.store.count_sync_failure()
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise StorageError(
                f"{self._path}: {what} may not be on the disk: {reason}; rows are as they were in memory, and the next "
                "flush writes again what this one did not"
            ) from error

    def close(self) -> None:
        """Marks the store clean if nobody else has it open; warns where its file is gone, and the rows with it."""
        if self._wrote:
            if self._is_deleted():
                warnings.warn(
                    f"{self._path} {_DELETED} while it was open: its rows are lost with this close", stacklevel=4
                )
            self._sync()
            if self.locks.try_alone():
                self.store.clean = True
                self.store.sync_header()
        self._wrote = False

    # ---- when nobody else has the store open ----
    def _needs_mending(self) -> bool:
        whole, clean, boot = self.store.left_as()
        return not whole or self._machine_stopped(clean, boot, unless_known=False)

    def _machine_stopped(self, clean: bool, boot: bytes, unless_known: bool) -> bool:
        """Whether the machine stopped while somebody wrote; `unless_known` where the system does not say."""
        if clean:  # as nearly every store is: the system is not asked
            return False
        now = boot_id()
        if not any(now) or not any(boot):
            return unless_known
        return boot != now

    def _mend(self) -> None:
        reserve_holes(self._fd, self._found, self.store.total_bytes, self._path)
        whole, clean, boot = self.store.repair()
        if not whole:
            with self._told("a change of stored rows that was interrupted"):
                self.store.finish_interrupted()
        # Alone, and nothing says that the machine is the same as then: the rows do.
        if self._machine_stopped(clean, boot, unless_known=True):
            self.dropped = self.store.recover()
            self.store.boot_id = boot_id()  # for whoever opens it next; after another power cut all is scanned again


def open_session(folder: Path) -> Session:
    """Opens the store in a folder.

    Raises:
        StorageError: there is none, or its file is damaged.
        StorageInUseError: somebody is alone with it for a long time.
    """
    try:
        remove_leftovers(folder)
    except OSError as error:
        raise StorageError(f"there is no folder {folder}: {error.strerror}") from error
    return Session(folder)
