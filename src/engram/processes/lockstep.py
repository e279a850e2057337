"""A pool of worker processes that execute the same command at the same time."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engram._native import AtomicInts
from engram.errors import WorkerError
from engram.processes.pool import Processes, WorkerPool
from engram.processes.restarts import Restarts
from engram.processes.shared_memory import SharedMemory
from engram.processes.timeouts import CallTimer
from engram.processes.worker import CLOSE_TIMEOUT, ERROR_CLOSE_TIMEOUT, Channel, Worker

# The control block in shared memory holds for each worker, in a cache line of its own: the number of the last round
# requested and of the last one completed, the command, how many messages the reply has, whether each side sleeps and
# has to be woken, and the core that the worker runs on.
_REQUESTED, _COMPLETED, _COMMAND, _REPLIES, _WORKER_SLEEPS, _OWNER_SLEEPS, _CORE = range(7)
_STRIDE = 8

# Both sides spin for a while before they sleep: waking an idle core takes longer (50 to 150 us in a virtual machine)
# than a step of many environments. `sched_yield` hands the core to whoever has work meanwhile.
OWNER_SPIN_SECONDS = 50e-6
WORKER_SPIN_SECONDS = 500e-6  # only where its last wait was as short as that
_SPIN_SLICE = 50e-6  # between two slices Python handles signals

_MOVES_AFTER = 0.01  # seconds between two moves to another core


class WorkerSlot:
    """A worker's end of a `LockstepPool`: `run(channel, slot, *args)` receives it and calls `attach` first."""

    def __init__(self, block: SharedMemory, size: int, index: int, spins: bool) -> None:
        self._memory, self._size, self.index, self._spins = block, size, index, spins

    def attach(self, channel: Channel) -> None:
        """Maps the control block in the worker process."""
        self._channel, self._cells = channel, _cells(self._memory.attach([_bytes(self._size)]))
        base = self.index * _STRIDE
        self._requested, self._completed, self._command, self._replies, self._sleeps, self._owner_sleeps, self._core = (
            base + field for field in range(7)
        )
        self._is_quick, self._moved = False, 0.0

    @property
    def clock(self) -> CallTimer | None:
        """Where the worker records calls that have a timeout."""
        return self._channel.clock

    def recv_command(self) -> int:
        """Waits for the next command and returns it. Raises ChannelClosed when the pool is closed."""
        cells, number = self._cells, self._cells[self._completed] + 1
        began = time.perf_counter()
        if not (self._spins and self._is_quick and self._spin_until(number, began + WORKER_SPIN_SECONDS)):
            cells[self._core] = -1
            if cells.exchange(self._sleeps, 1, self._requested) < number:
                self._channel.wait_for_wakeup()
                while cells[self._requested] < number:  # the wake-up may be of a round that is over
                    self._channel.wait_for_wakeup()
            cells[self._sleeps] = 0
            self._is_quick = time.perf_counter() - began < WORKER_SPIN_SECONDS
        if self._spins and cells.shares_core(self._core, _CORE, _STRIDE, self.index):
            self._move_to_another_core()
        cells[self._replies] = 0
        return cells[self._command]

    def _spin_until(self, number: int, until: float) -> bool:
        while not self._cells.reaches(self._requested, number, _SPIN_SLICE):
            if time.perf_counter() > until:
                return False
        return True

    def _move_to_another_core(self) -> None:
        """Leaves a core that the scheduler gave to two workers (called in the one with the higher index)."""
        now = time.monotonic()
        if now - self._moved < _MOVES_AFTER:
            return
        self._moved, allowed = now, os.sched_getaffinity(0)
        free = allowed - {self._cells[_STRIDE * i + _CORE] for i in range(self._size)}
        if free:
            os.sched_setaffinity(0, free)
            os.sched_setaffinity(0, allowed)

    def recv_message(self) -> Any:
        """The message that `LockstepPool.execute` sent to this worker with the command."""
        return self._channel.receive()

    def complete(self, *replies: Any) -> None:
        """Reports the command as executed, with a reply to the owner if one is given."""
        cells, number = self._cells, self._cells[self._requested]
        if replies:
            cells[self._replies] = len(replies)
            for reply in replies:
                self._channel.send((number, reply))
        if cells.exchange(self._completed, number, self._owner_sleeps):
            self._channel.wake_owner()


class LockstepPool:
    """Worker processes that each call `run(channel, slot, *args)` and then execute commands together, round by round.

    Rounds that follow each other quickly need no process to be woken: the numbers of the round requested and of the
    round completed are in shared memory, where both sides spin for a moment before they sleep (unless there are more
    workers than cores). A round that an exception here (Ctrl-C) interrupted is completed by the workers that it had
    reached before the next one begins.

    Args:
        run: see `Worker`.
        args: for each worker, the arguments of `run` after its channel and its slot.
        name: the name of a worker in errors, followed by its index.
        start_method: see `Worker`.
        close_timeout: seconds that a worker has to end by itself when the pool is closed or dropped.
        timeout: seconds that a recorded call of a worker may last; then the worker is killed. None: no limit.
        restarts: how many workers that fail may be replaced, over all; the next failure is raised, and the pool is of
            no more use then. A worker that fails while others may still be replaced is in `failed` until `replace`.
    """

    def __init__(
        self,
        run: Callable[..., None],
        args: Sequence[Sequence[Any]],
        *,
        name: str,
        start_method: str | None = None,
        close_timeout: float = CLOSE_TIMEOUT,
        timeout: float | None = None,
        restarts: int = 0,
    ) -> None:
        self._owner = os.getpid()
        self._args = [tuple(own) for own in args]
        self.failed: dict[int, WorkerError] = {}  #: workers that have to be replaced before they execute anything
        self._error: Exception | None = None
        self._is_idle, self._round, self.is_closed = True, 0, False
        size = len(args)
        self._memory = SharedMemory()
        self._cells = _cells(self._memory.allocate([_bytes(size)]))
        self._spins = size <= len(usable_cores())
        self._pool = WorkerPool(
            Processes(run, start_method),
            [f"{name} {i}" for i in range(size)],
            timeout=timeout,
            close_timeout=close_timeout,
        )
        self._restarts = Restarts(restarts)
        self._workers, self._has_timeout = self._pool.workers, timeout is not None
        try:
            for i in range(size):
                self._start_worker(i)
        except BaseException:
            self._pool.close(ERROR_CLOSE_TIMEOUT)
            raise
        self._polls = [self._poll_of(worker) for worker in self._workers]
        self._all = tuple(reversed(range(size)))  # the last to be woken is waited for first: fewer wake-ups here
        self._reply_of: dict[int, Any] = {}  # by worker: its last reply

    def _start_worker(self, i: int) -> None:
        self._pool.start(i, WorkerSlot(self._memory, len(self._args), i, self._spins), *self._args[i])

    def _poll_of(self, worker: Worker) -> select.poll:
        poll = select.poll()
        ends = [each.end_fileno() for i, each in enumerate(self._workers) if i not in self.failed]
        for fd in (worker.wakeup.fileno(), worker.fileno(), *ends):
            poll.register(fd, select.POLLIN)
        return poll

    def _note_failure(self, i: int, error: WorkerError) -> None:
        """Notes that worker i has to be replaced; raises its error where no worker may be."""
        if not self._restarts.left:
            self._error = error
            raise error
        self.failed[i] = error
        self._workers[i].clock = None
        self._polls = [self._poll_of(worker) for worker in self._workers]

    def lost(self) -> list[int]:
        """The workers that have failed and did not complete the last round."""
        return [i for i in self.failed if self._cells[_STRIDE * i + _COMPLETED] < self._round]

    @property
    def may_replace(self) -> bool:
        """Whether workers that fail are replaced, as long as restarts are left."""
        return self._restarts.allowed > 0

    def replace(self, i: int) -> int:
        """Starts worker i, which has failed, anew: it calls `run` as before. Returns how often it was replaced.

        Raises its WorkerError where no restart is left.
        """
        try:
            self._restarts.use(self.failed[i], self._workers[i].pid)
            restart, base = self._pool.end(i), _STRIDE * i
            for field, value in ((_REQUESTED, self._round), (_COMPLETED, self._round), (_CORE, -1)):
                self._cells[base + field] = value
            for field in (_REPLIES, _WORKER_SLEEPS, _OWNER_SLEEPS):
                self._cells[base + field] = 0
            self._start_worker(i)
        except WorkerError as error:
            self._error = error
            raise
        except BaseException:
            self._break("replacing")
            raise
        del self.failed[i]
        self._polls = [self._poll_of(worker) for worker in self._workers]
        return restart

    def greet(self, i: int, answer: Callable[[Any], Any]) -> bool:
        """Receives the first message of a worker that was started, and sends it the answer; False where it failed."""
        try:
            self._workers[i].send(answer(self._workers[i].receive()))
        except WorkerError as error:
            self._note_failure(i, error)
            return False
        except BaseException:
            self._break("replacing")
            raise
        return True

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [worker.pid for worker in self._workers]

    def handshake(self) -> list[Any]:
        """Waits for the first message of every worker. Raises WorkerError as soon as one has failed for good."""
        messages: dict[int, Any] = {}
        while missing := [i for i in range(len(self)) if i not in messages]:
            for i in self._pool.wait(missing):
                try:
                    messages[i] = self._workers[i].receive()
                except WorkerError as error:
                    self._note_failure(i, error)
                    self.replace(i)
        return [messages[i] for i in range(len(self))]

    def broadcast(self, message: Any) -> None:
        """Sends all workers a message, which they receive before their first command."""
        for i, worker in enumerate(self._workers):
            try:
                worker.send(message)
            except WorkerError as error:
                self._note_failure(i, error)

    def wait_idle(self) -> None:
        """Returns when all workers wait for a command; only then may the memory that they share be written.

        Raises WorkerError where one has failed, now or earlier, and RuntimeError after `close` and in a forked child.
        """
        if self._error is not None:
            raise self._error
        if self.is_closed:
            raise RuntimeError("these workers were closed")
        if os.getpid() != self._owner:
            raise RuntimeError("these workers belong to the process that started them, and this is a fork of it")
        if not self._is_idle:
            busy = [
                i for i in self._all if self._cells[_STRIDE * i + _COMPLETED] < self._cells[_STRIDE * i + _REQUESTED]
            ]
            busy = [i for i in busy if i not in self.failed]
            for i in busy:
                self._workers[i].wake()  # an exception may have come just before this call
            self._wait(busy)
            self._is_idle = True

    def execute(
        self, command: int, workers: Sequence[int] | None = None, messages: Sequence[Any] | None = None
    ) -> dict[int, Any]:
        """Has all workers, or those with these indices, execute a command; returns their replies by worker.

        `messages[i]` goes to worker i. Raises as `wait_idle` does. Workers that have failed are left out; those that
        did so in this round or before it are `lost()`.
        """
        self.wait_idle()
        self._is_idle = False
        self._round += 1
        self._reply_of.clear()
        chosen = self._all if workers is None else workers
        if self.failed:
            chosen = [i for i in chosen if i not in self.failed]
        if messages is None:
            self._request(chosen, command)
        else:
            self._send(chosen, command, messages)
        self._wait(chosen)
        self._is_idle = True
        if self._restarts.allowed:
            return self._replies_beside_failures(chosen)
        return {i: self._wait_for_reply(i) for i in chosen if self._cells[_STRIDE * i + _REPLIES]}

    def _replies_beside_failures(self, workers: Sequence[int]) -> dict[int, Any]:
        """The replies of those that completed the round; a worker whose reply is lost has not."""
        lost = self.lost()
        replies: dict[int, Any] = {}
        for i in workers:
            if i not in lost and self._cells[_STRIDE * i + _REPLIES]:
                try:
                    replies[i] = self._wait_for_reply(i)
                except WorkerError as error:
                    self._cells[_STRIDE * i + _COMPLETED] = 0
                    self._note_failure(i, error)
        return replies

    def _request(self, workers: Sequence[int], command: int) -> None:
        cells, number = self._cells, self._round
        for i in workers:
            base = _STRIDE * i
            cells[base + _COMMAND] = command
            if cells.exchange(base + _REQUESTED, number, base + _WORKER_SLEEPS):
                self._workers[i].wake()

    def _send(self, workers: Sequence[int], command: int, messages: Sequence[Any]) -> None:
        try:
            self._request(workers, command)  # a worker that has seen the command waits for its message
            for i in workers:
                try:
                    self._workers[i].send(messages[i])
                except WorkerError as error:
                    self._note_failure(i, error)
        except WorkerError:
            raise
        except BaseException:
            self._break("sending to")  # half a message cannot be continued
            raise

    def _wait(self, workers: Sequence[int]) -> None:
        cells, seconds = self._cells, OWNER_SPIN_SECONDS if self._spins else 0.0
        for i in workers:
            base = _STRIDE * i
            number = cells[base + _REQUESTED]
            if cells.reaches(base + _COMPLETED, number, seconds) or i in self.failed:
                continue
            if cells.exchange(base + _OWNER_SLEEPS, 1, base + _COMPLETED) < number:
                self._sleep_until_event(i)
                while cells[base + _COMPLETED] < number and i not in self.failed:
                    self._sleep_until_event(i)
            cells[base + _OWNER_SLEEPS] = 0

    def _sleep_until_event(self, i: int) -> None:
        """Sleeps until worker i has woken this process or sent a message, or any worker has ended."""
        worker = self._workers[i]
        for fd, _ in self._polls[i].poll(self._pool.remaining() * 1000 if self._has_timeout else None):
            if fd == worker.wakeup.fileno():
                worker.wakeup.wait()
            elif fd == worker.fileno():
                self._receive_reply(i)
            else:
                self._note_end(fd)
        if self._has_timeout and (overdue := self._pool.overdue()) is not None:
            self._kill(*overdue)

    def _kill(self, i: int, reason: str) -> None:
        try:
            self._workers[i].kill(reason)
        except WorkerError as error:
            self._note_failure(i, error)

    def _receive_reply(self, i: int) -> None:
        try:
            number, message = self._workers[i].receive()
        except WorkerError as error:
            self._note_failure(i, error)
            return
        except BaseException:
            self._break("receiving from")
            raise
        if number == self._round:  # otherwise it belongs to a round that was interrupted
            self._reply_of[i] = message

    def _note_end(self, end_fd: int) -> None:
        i, ended = next((i, worker) for i, worker in enumerate(self._workers) if worker.end_fileno() == end_fd)
        try:
            ended.raise_failure()
        except WorkerError as error:
            self._note_failure(i, error)

    def _wait_for_reply(self, i: int) -> Any:
        while i not in self._reply_of:
            self._receive_reply(i)
            if i in self.failed:
                raise self.failed[i]
        return self._reply_of.pop(i)

    def _break(self, doing: str) -> None:
        self._error = RuntimeError(f"was interrupted while {doing} its workers; close it and make a new one")

    def close(self, timeout: float | None = None) -> None:
        """Ends the workers: asks them first, and kills them after `timeout` seconds. A second call does nothing."""
        if not self.is_closed and os.getpid() == self._owner:
            self.is_closed = True
            self._pool.close(timeout)
            self._memory.close()


def usable_cores() -> list[int]:
    """The indices of the CPU cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def _bytes(size: int) -> int:
    return _STRIDE * 8 * size


def _cells(blocks: list[Any]) -> AtomicInts:
    return AtomicInts(blocks[0].view(np.int64))
