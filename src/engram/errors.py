"""The errors of engram, as a tree.

    EngramError
    ├── StorageError                 a store cannot be made, opened or written
    │   ├── StorageInUseError        the operation needs the store alone
    │   ├── NoFreeLaneError          a store for one writer has one, or a producer's name
    │   ├── QueueFullError           a queue has no room for rows that were written past `extend`, which waits
    │   ├── IncarnationError         a call was meant for another life of a shard
    │   ├── ShardVersionError        a shard runs another version of engram than its client
    │   └── ShardUnavailableError    a shard does not answer (a TimeoutError, too)
    │       └── ShardGoneError       it never will: nobody starts it again
    ├── CheckpointError              a checkpoint cannot be written or read
    │   ├── CorruptCheckpointError   its bytes are not those that were saved
    │   └── CheckpointMisfitError    it is whole, and belongs to another kind of buffer (a ValueError, too)
    ├── DatasetError                 a dataset's file is not what it should be
    ├── OutsideSpecError             a value does not lie in a spec (a ValueError and an AssertionError)
    ├── OutOfMemoryError             a batch does not fit into memory (a MemoryError, too)
    └── WorkerError                  a worker process failed or died

Wrong arguments are the built-in `ValueError`, `TypeError`, `KeyError` and `IndexError`.
"""

from __future__ import annotations

import signal
import sys

from engram._text import visible, visible_lines


class EngramError(Exception):
    """Base of every error that is engram's own.

    Its text may have names from files and users in it: control characters are shown as escapes, on one line.
    """

    def __str__(self) -> str:
        return visible(self._message())

    def _message(self) -> str:
        return super().__str__()


class OutsideSpecError(EngramError, ValueError, AssertionError):
    """A value does not lie in the spec that it is checked against or encoded by."""

    def __str__(self) -> str:
        return visible_lines(self._message())


class StorageError(EngramError, RuntimeError):
    """A store cannot be made, opened or written."""


class StorageInUseError(StorageError):
    """The operation needs the store alone, and another process has it open."""


class NoFreeLaneError(StorageError):
    """A storage with `lanes=1` has its writer in another process, or a living process has a producer's name."""


class QueueFullError(StorageError):
    """A queue has no room for rows: others must be handed out first. `extend` and `add` of a buffer wait for that.

    Of `steps` time steps the first `done` were written, to `slots` (int64, of these the first `done`; None: there are
    none).
    """

    def __init__(self, done: int, steps: int, slots: object = None) -> None:
        super().__init__(done, steps, slots)
        self.done, self.steps, self.slots = done, steps, slots

    def _message(self) -> str:
        written = f"the first {self.done} of {self.steps} were written" if self.done else "nothing was written"
        return (
            f"the storage is a queue, and has no room for {self.steps} more time steps before rows of it are handed "
            f"out; {written}. `extend` and `add` of a buffer wait for room"
        )


class IncarnationError(StorageError):
    """A call was meant for another life of a shard: it was restarted, emptied or loaded since, or lives elsewhere."""


class ShardVersionError(StorageError):
    """A shard and its client run different versions of engram, which is nothing that waiting ends.

    `shard` and `client` are the versions.
    """

    def __init__(self, shard: str, client: str) -> None:
        super().__init__(shard, client)
        self.shard, self.client = shard, client

    def _message(self) -> str:
        return (
            f"the shard runs engram {self.shard}, its client engram {self.client}: install the same version on all "
            "machines. Nothing was changed"
        )


class ShardUnavailableError(StorageError, TimeoutError):
    """A shard of a buffer does not answer: its process or machine is gone, or slow."""

    def __str__(self) -> str:
        return visible_lines(self._message())  # Ray's reasons have lines


class ShardGoneError(ShardUnavailableError):
    """A shard has ended for good: the program that made the buffer has ended, or shut it down."""


class CheckpointError(EngramError, RuntimeError):
    """A checkpoint cannot be written or read."""


class CorruptCheckpointError(CheckpointError):
    """A file of a checkpoint does not hold the bytes that were saved; the message names it.

    `file` is the damaged file, `reason` what is wrong with it, `newest_whole` the name of the newest snapshot of the
    same checkpoint whose files all verify (None: there is none, or nobody has looked yet).
    """

    def __init__(self, file: str, reason: str = "", advice: str = "", newest_whole: str | None = None) -> None:
        super().__init__(file, reason, advice, newest_whole)
        self.file, self.reason, self.advice, self.newest_whole = file, reason, advice, newest_whole

    def _message(self) -> str:
        damage = f"{self.file} is damaged: {self.reason}" if self.reason else self.file
        return f"{damage}; {self.advice}" if self.advice else damage


class CheckpointMisfitError(CheckpointError, ValueError):
    """What was saved does not fit what shall take it, which is unchanged; `differences` are all that there are."""

    def __init__(self, what: str, differences: list[str] | tuple[str, ...] = (), advice: str = "") -> None:
        super().__init__(what, tuple(differences), advice)
        self.what, self.differences, self.advice = what, tuple(differences), advice

    def _message(self) -> str:
        text = f"{self.what}: {'; '.join(self.differences)}" if self.differences else self.what
        return f"{text}. {self.advice}" if self.advice else text


def differences_of(error: ValueError) -> tuple[str, ...]:
    """What an error of something that does not fit says, one by one."""
    return (isinstance(error, CheckpointMisfitError) and error.differences) or (str(error),)


def is_masked(value: object) -> bool:
    """Whether a value is a numpy masked array. There is none before somebody imports numpy.ma, which takes 30 ms."""
    ma = sys.modules.get("numpy.ma")
    return ma is not None and isinstance(value, ma.MaskedArray)


def masked_array(what: str) -> TypeError:
    """The error for a numpy masked array where data are taken: a tensor has no place for its mask."""
    return TypeError(
        f"{what} is a numpy masked array, and no tensor says which of its values are none; give a plain array: "
        "array.filled(value), with the mask as an entry of its own where it is needed"
    )


class DatasetError(EngramError, ValueError):
    """A dataset's file is damaged, holds what engram does not read, or does not fit; the message names file and key.

    `file` is its path, `reason` what is wrong, `rows_read` how many steps had been taken into the buffer before: these
    stay there, and nothing of what came after.
    """

    def __init__(self, file: str, reason: str = "", rows_read: int = 0) -> None:
        super().__init__(file, reason, rows_read)
        self.file, self.reason, self.rows_read = file, reason, rows_read

    def _message(self) -> str:
        progress = f"; {self.rows_read} steps were taken into the buffer before" if self.rows_read else ""
        return f"{self.file}: {self.reason}{progress}"


class OutOfMemoryError(EngramError, MemoryError):
    """A batch of so many rows does not fit into memory."""


class WorkerError(EngramError, RuntimeError):
    """A worker process failed, and `traceback` is what it said; or it died without a word, and `exit_code` says how.

    `worker` is its name; `exit_code` is that of `multiprocessing`: minus the signal's number after a signal. The
    exception itself, where it could be sent, is the cause. `reason` is why its owner has killed it, if that is so.
    """

    def __init__(self, worker: str, traceback: str = "", exit_code: int | None = None, reason: str = "") -> None:
        super().__init__(worker, traceback, exit_code, reason)
        self.worker, self.traceback, self.exit_code, self.reason = worker, traceback, exit_code, reason

    def __str__(self) -> str:
        return visible_lines(self._message())  # a traceback has lines

    def _message(self) -> str:
        if self.reason:
            return f"{self.worker} was killed: {self.reason}"
        if self.traceback:
            return f"{self.worker} failed:\n\n{self.traceback}"
        if self.exit_code is not None and self.exit_code < 0:
            return f"{self.worker} was killed by {_signal_name(-self.exit_code)}; {_ADVICE.get(-self.exit_code, _SENT)}"
        return (
            f"{self.worker} ended with exit code {self.exit_code}, without a word; what it printed may say why "
            "(with the start methods spawn and forkserver, a script needs its `if __name__ == '__main__':`)"
        )


_CRASHED = (
    "native code of the environment, the policy or a library crashed in it: with PYTHONFAULTHANDLER=1 in the "
    "environment of the program, the worker prints where"
)
_SENT = "another process may have sent it"
#: What may be behind a signal that ends a worker.
_ADVICE: dict[int, str] = {
    signal.SIGKILL: "is there memory enough?",
    signal.SIGBUS: "a file that it has mapped was cut, or there is no room left in the shared memory (/dev/shm)",
    signal.SIGXCPU: "a limit of its CPU time was reached (ulimit -t)",
    signal.SIGXFSZ: "a limit of the size of files was reached (ulimit -f)",
    **dict.fromkeys((signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGSYS), _CRASHED),
}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
