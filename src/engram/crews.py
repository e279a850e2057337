"""Workers that do the same thing at the same time, in rounds."""

from __future__ import annotations

import os
import select
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from engram.errors import WorkerError
from engram.shared_memory import SharedMemory
from engram.workers import PATIENCE, Channel, Worker, close_all, wait_for_any

_FIELDS = 4  # of a worker on the board, 8 bytes each: round asked for, round done, command, whether it said something


class Seat:
    """A worker's place in its crew: `run(channel, seat, *args)` gets it. `sit` comes first."""

    def __init__(self, board: SharedMemory, size: int, index: int) -> None:
        self._memory, self._size, self.index = board, size, index

    def sit(self, channel: Channel) -> None:
        """Takes the place."""
        self._channel = channel
        self._asked, self._done, self._command, self._spoke = _fields(self._memory.attach([_bytes(self._size)])[0])

    def next_command(self) -> int:
        """The command of the next round. Raises Closed when there will be none."""
        self._channel.wait_for_ring()  # even where the board says it already: the system call orders the memory
        while self._asked[self.index] == self._done[self.index]:  # a ring for a round that is done means nothing
            self._channel.wait_for_ring()
        self._spoke[self.index] = 0
        return self._command[self.index]

    def message(self) -> Any:
        """What `Crew.round` has sent along."""
        return self._channel.receive()

    def done(self, *said: Any) -> None:
        """Ends the round, with a message for the owner if there is one."""
        self._spoke[self.index] = len(said)
        for message in said:
            self._channel.say((self._asked[self.index], message))
        self._done[self.index] = self._asked[self.index]
        self._channel.ring()


class Crew:
    """Workers that each call `run(channel, seat, *args)`, and then do what `round` says, all at once.

    A round costs each worker two system calls, and its owner three for each. Which round is asked for and which one is
    done stands in shared memory: a round that an exception here (Ctrl-C) left in the middle is ended, by those whom it
    had reached, before the next.

    Args:
        run: see `Worker`.
        args: for each worker, what `run` gets after its channel and its seat.
        name: how errors call one; its number follows.
        start_method: see `Worker`.
        patience: seconds that a worker has to end by itself when the crew is closed or dropped.
    """

    def __init__(
        self,
        run: Callable[..., None],
        args: Sequence[Sequence[Any]],
        *,
        name: str,
        start_method: str | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self._owner = os.getpid()
        self._patience = patience
        self._error: Exception | None = None
        self._is_settled, self._round, self.is_closed = True, 0, False
        size = len(args)
        self._memory = SharedMemory()
        self._asked, self._done, self._command, self._spoke = _fields(self._memory.allocate([_bytes(size)])[0])
        self._workers: list[Worker] = []
        try:
            for i, more in enumerate(args):
                seated = (Seat(self._memory, size, i), *more)
                self._workers.append(Worker(run, seated, name=f"{name} {i}", start_method=start_method))
        except BaseException:
            close_all(self._workers, 0.2)
            raise
        self._polls = [self._poll_of(worker) for worker in self._workers]
        self._all = tuple(reversed(range(size)))  # the last to be woken is waited for first: fewer wake-ups here
        self._said: dict[int, Any] = {}  # by worker: its last message
        self._finalizer = weakref.finalize(self, close_all, self._workers, patience)
        self._finalizer.atexit = False  # `engram.workers` has its own, with less patience

    def _poll_of(self, worker: Worker) -> select.poll:
        poll = select.poll()
        for fd in (worker.bell.fileno(), worker.fileno(), *(each.end_fileno() for each in self._workers)):
            poll.register(fd, select.POLLIN)
        return poll

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def pids(self) -> list[int]:
        """The numbers of the processes."""
        return [worker.pid for worker in self._workers]

    def first_words(self) -> list[Any]:
        """The message with which each worker's `run` begins. Raises WorkerError as soon as one has failed."""
        said: dict[Worker, Any] = {}
        while missing := [worker for worker in self._workers if worker not in said]:
            for worker in wait_for_any(missing):
                said[worker] = worker.receive()
        return [said[worker] for worker in self._workers]

    def tell(self, message: Any) -> None:
        """Sends all workers a message, which they receive before their first round."""
        for worker in self._workers:
            worker.send(message)

    def ready(self) -> None:
        """Returns when all workers wait for a round: until then, what they share may not be written.

        Raises WorkerError where one has failed, now or earlier, and RuntimeError after `close` and in a forked child.
        """
        if self._error is not None:
            raise self._error
        if self.is_closed:
            raise RuntimeError("these workers were closed")
        if os.getpid() != self._owner:
            raise RuntimeError("these workers belong to the process that started them, and this is a fork of it")
        if not self._is_settled:
            late = [i for i in self._all if self._asked[i] != self._done[i]]
            for i in late:
                self._workers[i].ring()  # it may have been interrupted just before
            self._wait(late)
            self._is_settled = True

    def round(
        self, command: int, who: Sequence[int] | None = None, messages: Sequence[Any] | None = None
    ) -> dict[int, Any]:
        """One round of all workers, or of those in `who`; returns what was said, by worker.

        `messages[i]` goes to worker i. Raises as `ready` does.
        """
        self.ready()
        self._is_settled = False
        self._round += 1
        self._said.clear()
        asked = self._all if who is None else who
        for i in asked:
            self._command[i] = command
            self._asked[i] = self._round
            self._workers[i].ring()
        if messages is not None:
            self._send(asked, messages)
        self._wait(asked)
        self._is_settled = True
        return {i: self._message_of(i) for i in asked if self._spoke[i]} if any(self._spoke) else {}

    def _send(self, who: Sequence[int], messages: Sequence[Any]) -> None:
        try:
            for i in who:
                self._workers[i].send(messages[i])
        except WorkerError as error:
            self._error = error
            raise
        except BaseException:
            self._break("speaking to")  # half a message is nothing to go on from
            raise

    def _wait(self, who: Sequence[int]) -> None:
        asked, done = self._asked, self._done
        for i in who:
            self._hear(i)  # even where the board says it already: the system call orders the memory
            while asked[i] != done[i]:
                self._hear(i)

    def _hear(self, i: int) -> None:
        """Sleeps until something has happened that concerns worker i, or one has ended."""
        worker = self._workers[i]
        for fd, _ in self._polls[i].poll():
            if fd == worker.bell.fileno():
                worker.bell.wait()
            elif fd == worker.fileno():
                self._take_message(i)
            else:
                self._take_failure(fd)

    def _take_message(self, i: int) -> None:
        try:
            number, message = self._workers[i].receive()
        except WorkerError as error:
            self._error = error
            raise
        except BaseException:
            self._break("listening to")
            raise
        if number == self._round:  # else of a round that was interrupted
            self._said[i] = message

    def _take_failure(self, end_fd: int) -> None:
        ended = next(worker for worker in self._workers if worker.end_fileno() == end_fd)
        try:
            ended.raise_failure()
        except WorkerError as error:
            self._error = error
            raise

    def _message_of(self, i: int) -> Any:
        while i not in self._said:
            self._take_message(i)
        return self._said.pop(i)

    def _break(self, doing: str) -> None:
        self._error = RuntimeError(f"was interrupted while {doing} its workers; close it and make a new one")

    def close(self, patience: float | None = None) -> None:
        """Ends the workers: asked first, after `patience` seconds by force. A second call does nothing."""
        if not self.is_closed and os.getpid() == self._owner:
            self.is_closed = True
            close_all(self._workers, self._patience if patience is None else patience)
            self._finalizer.detach()
            self._memory.close()


def _bytes(size: int) -> int:
    return _FIELDS * 8 * size


def _fields(board: Any) -> list[memoryview]:
    """A memoryview of int64 for each field: a third of the cost of a numpy array."""
    whole = memoryview(board).cast("q")
    size = len(whole) // _FIELDS
    return [whole[k * size : (k + 1) * size] for k in range(_FIELDS)]
