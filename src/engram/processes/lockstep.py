"""Workers that do the same thing at the same time, in rounds."""

from __future__ import annotations

import os
import select
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engram._native import AtomicInts
from engram.errors import WorkerError
from engram.processes.shared_memory import SharedMemory
from engram.processes.timeouts import StepClock, Timeout
from engram.processes.worker import PATIENCE, Channel, Worker, close_all, wait_for_any

# What stands on the board for each worker, in a cache line of its own: the last round asked for and the last one done,
# the command, how many messages came with it, whether each side sleeps and has to be rung for, and the worker's core.
_ASKED, _DONE, _COMMAND, _SPOKE, _WORKER_SLEEPS, _OWNER_SLEEPS, _CORE = range(7)
_STRIDE = 8

# Who waits looks for a while before it sleeps: to wake a core that has nothing to do takes longer (50 to 150 us in a
# virtual machine) than a step of many environments. `sched_yield` hands the core to whoever has work meanwhile.
LOOKS_OF_OWNER = 50e-6
LOOKS_OF_WORKER = 500e-6  # where its last wait was as short as that
_AT_ONCE = 50e-6  # after so long, Python gets a chance to do something else

_MOVES_AFTER = 0.01  # seconds between two moves to another core


class Seat:
    """A worker's place in its crew: `run(channel, seat, *args)` gets it. `sit` comes first.

    `clock` is there where calls have a timeout: the worker enters them in it.
    """

    def __init__(self, board: SharedMemory, size: int, index: int, looks: bool, clock: StepClock | None = None) -> None:
        self._memory, self._size, self.index, self._looks, self.clock = board, size, index, looks, clock

    def sit(self, channel: Channel) -> None:
        """Takes the place."""
        self._channel, self._cells = channel, _cells(self._memory.attach([_bytes(self._size)]))
        base = self.index * _STRIDE
        self._asked, self._done, self._command, self._spoke, self._sleeps, self._owner_sleeps, self._core = (
            base + field for field in range(7)
        )
        self._is_quick, self._moved = False, 0.0

    def next_command(self) -> int:
        """The command of the next round. Raises Closed when there will be none."""
        cells, wanted = self._cells, self._cells[self._done] + 1
        began = time.perf_counter()
        if not (self._looks and self._is_quick and self._seen(wanted, began + LOOKS_OF_WORKER)):
            cells[self._core] = -1
            if cells.exchange(self._sleeps, 1, self._asked) < wanted:
                self._channel.wait_for_ring()
                while cells[self._asked] < wanted:  # a ring for a round that is done means nothing
                    self._channel.wait_for_ring()
            cells[self._sleeps] = 0
            self._is_quick = time.perf_counter() - began < LOOKS_OF_WORKER
        if self._looks and cells.shares_core(self._core, _CORE, _STRIDE, self.index):
            self._move_to_another_core()
        cells[self._spoke] = 0
        return cells[self._command]

    def _seen(self, wanted: int, until: float) -> bool:
        while not self._cells.reaches(self._asked, wanted, _AT_ONCE):
            if time.perf_counter() > until:
                return False
        return True

    def _move_to_another_core(self) -> None:
        """Where a scheduler has brought two workers together, the one with the higher number goes; it stays free to."""
        now = time.monotonic()
        if now - self._moved < _MOVES_AFTER or not hasattr(os, "sched_setaffinity"):
            return
        self._moved, allowed = now, os.sched_getaffinity(0)
        free = allowed - {self._cells[_STRIDE * i + _CORE] for i in range(self._size)}
        if free:
            os.sched_setaffinity(0, free)
            os.sched_setaffinity(0, allowed)

    def message(self) -> Any:
        """What `Crew.round` has sent along."""
        return self._channel.receive()

    def done(self, *said: Any) -> None:
        """Ends the round, with a message for the owner if there is one."""
        cells, number = self._cells, self._cells[self._asked]
        if said:
            cells[self._spoke] = len(said)
            for message in said:
                self._channel.say((number, message))
        if cells.exchange(self._done, number, self._owner_sleeps):
            self._channel.ring()


class Crew:
    """Workers that each call `run(channel, seat, *args)`, and then do what `round` says, all at once.

    Rounds that follow each other quickly need no process to be woken: which one is asked for and which one is done
    stands in shared memory, where both sides look for a moment before they sleep (not where there are more workers than
    cores). A round that an exception here (Ctrl-C) left in the middle is ended, by those whom it had reached, before
    the next.

    Args:
        run: see `Worker`.
        args: for each worker, what `run` gets after its channel and its seat.
        name: how errors call one; its number follows.
        start_method: see `Worker`.
        patience: seconds that a worker has to end by itself when the crew is closed or dropped.
        timeout: seconds that a call in a worker's clock may last; the worker is killed then. None: any time.
    """

    def __init__(
        self,
        run: Callable[..., None],
        args: Sequence[Sequence[Any]],
        *,
        name: str,
        start_method: str | None = None,
        patience: float = PATIENCE,
        timeout: float | None = None,
    ) -> None:
        self._owner = os.getpid()
        self._patience = patience
        self._error: Exception | None = None
        self._is_settled, self._round, self.is_closed = True, 0, False
        size = len(args)
        self._memory = SharedMemory()
        self._cells = _cells(self._memory.allocate([_bytes(size)]))
        self._looks = size <= len(usable_cores())
        clocks = [None if timeout is None else StepClock() for _ in args]
        self._timeout = None if timeout is None else Timeout(timeout, [c for c in clocks if c is not None])
        self._workers: list[Worker] = []
        try:
            for i, more in enumerate(args):
                seated = (Seat(self._memory, size, i, self._looks, clocks[i]), *more)
                self._workers.append(Worker(run, seated, name=f"{name} {i}", start_method=start_method))
        except BaseException:
            close_all(self._workers, 0.2)
            raise
        self._polls = [self._poll_of(worker) for worker in self._workers]
        self._all = tuple(reversed(range(size)))  # the last to be woken is waited for first: fewer wake-ups here
        self._said: dict[int, Any] = {}  # by worker: its last message
        self._finalizer = weakref.finalize(self, close_all, self._workers, patience)
        self._finalizer.atexit = False  # `engram.processes.worker` has its own, with less patience

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
            late = [i for i in self._all if self._cells[_STRIDE * i + _DONE] < self._cells[_STRIDE * i + _ASKED]]
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
        if messages is None:
            self._ask(asked, command)
        else:
            self._send(asked, command, messages)
        self._wait(asked)
        self._is_settled = True
        return {i: self._message_of(i) for i in asked if self._cells[_STRIDE * i + _SPOKE]}

    def _ask(self, who: Sequence[int], command: int) -> None:
        cells, number = self._cells, self._round
        for i in who:
            base = _STRIDE * i
            cells[base + _COMMAND] = command
            if cells.exchange(base + _ASKED, number, base + _WORKER_SLEEPS):
                self._workers[i].ring()

    def _send(self, who: Sequence[int], command: int, messages: Sequence[Any]) -> None:
        try:
            self._ask(who, command)  # whoever has heard of the round waits for its message
            for i in who:
                self._workers[i].send(messages[i])
        except WorkerError as error:
            self._error = error
            raise
        except BaseException:
            self._break("speaking to")  # half a message is nothing to go on from
            raise

    def _wait(self, who: Sequence[int]) -> None:
        cells, looks = self._cells, LOOKS_OF_OWNER if self._looks else 0.0
        for i in who:
            base = _STRIDE * i
            asked = cells[base + _ASKED]
            if cells.reaches(base + _DONE, asked, looks):
                continue
            if cells.exchange(base + _OWNER_SLEEPS, 1, base + _DONE) < asked:
                self._hear(i)
                while cells[base + _DONE] < asked:
                    self._hear(i)
            cells[base + _OWNER_SLEEPS] = 0

    def _hear(self, i: int) -> None:
        """Sleeps until something has happened that concerns worker i, or one has ended."""
        worker = self._workers[i]
        for fd, _ in self._polls[i].poll(None if self._timeout is None else self._timeout.left() * 1000 + 1):
            if fd == worker.bell.fileno():
                worker.bell.wait()
            elif fd == worker.fileno():
                self._take_message(i)
            else:
                self._take_failure(fd)
        if self._timeout is not None and (late := self._timeout.late()) is not None:
            self._kill(*late)

    def _kill(self, i: int, reason: str) -> None:
        try:
            self._workers[i].kill(reason)
        except WorkerError as error:
            self._error = error
            raise

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


def usable_cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def _bytes(size: int) -> int:
    return _STRIDE * 8 * size


def _cells(blocks: list[Any]) -> AtomicInts:
    return AtomicInts(blocks[0].view(np.int64))
