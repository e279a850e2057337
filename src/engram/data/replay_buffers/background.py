"""Saves that run while training goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from engram.data.replay_buffers.checkpointers.commit import SnapshotWriter

log = logging.getLogger("engram")


class SaveHandle:
    """A save in the background, as `dumps(path, blocking=False)` returns it.

    The interpreter waits for it before it ends.

    Example:
        >>> import tempfile
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(5))
        >>> with tempfile.TemporaryDirectory() as path:
        ...     handle = rb.dumps(path, blocking=False)
        ...     _ = rb.extend(torch.arange(5, 10))
        ...     handle.result(), handle.done(), handle.progress, handle.rows_left_out
        ('g-000001', True, 1.0, 0)
    """

    def __init__(self, work: Callable[[SaveHandle], str], source: Any, finish: Callable[[], None]) -> None:
        self._work = work
        self._source = source
        self._finish = finish
        self._writer: SnapshotWriter | None = None
        self._name: str | None = None
        self._error: BaseException | None = None
        self._left_out = 0
        self._begun, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="engram-save")
        self._thread.start()
        self._begun.wait()
        if self._writer is None:  # it could not even begin: somebody else saves there, ...
            assert self._error is not None
            raise self._error

    def began(self, writer: SnapshotWriter) -> None:
        """Called by the work when nobody else saves at the path."""
        self._writer = writer
        self._begun.set()

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> str:
        """Waits for the end, at most `timeout` seconds; the name of the snapshot.

        Raises:
            TimeoutError: it has not ended yet.
            CheckpointError: it failed; what was saved there before is untouched.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the save has not ended after {timeout} seconds ({self.progress:.0%} is written)")
        if self._error is not None:
            raise self._error
        assert self._name is not None
        return self._name

    @property
    def progress(self) -> float:
        """The part that is written, 0 to 1; 1 when the snapshot is in force."""
        if self._name is not None:
            return 1.0
        return 0.0 if self._writer is None else min(0.99, self._writer.progress)

    @property
    def rows_left_out(self) -> int:
        """Rows, the oldest ones, that other processes overwrote before they were saved."""
        return self._left_out if self.done() else int(self._source.left_out)

    def _run(self) -> None:
        try:
            self._name = self._work(self)
        except BaseException as error:
            self._error = error
            if self._writer is not None:  # else `dumps` itself raises it
                log.error("a save in the background failed: %s", error)
        finally:
            self._begun.set()  # before `finish`, which may have to wait until whoever waits for this lets go
            self._left_out = int(self._source.left_out)
            self._finish()
            self._ended.set()

    def __repr__(self) -> str:
        state = f"{self.progress:.0%}" if not self.done() else "failed" if self._error else self._name
        return f"{type(self).__name__}({state})"
