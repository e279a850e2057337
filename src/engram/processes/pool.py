"""Worker processes that are started, waited for, replaced and closed together."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from engram.errors import WorkerError
from engram.processes.restarts import Restarts, seed_after
from engram.processes.timeouts import CallTimer
from engram.processes.worker import CLOSE_TIMEOUT, Worker, close_all, wait_for_any


class WorkerPool:
    """Worker processes with a limit for the time of their calls, of which some may fail and be replaced.

    They are closed when the pool is, or is dropped.

    Args:
        run: see `Worker`.
        names: of the workers, in errors.
        start_method: see `Worker`.
        timeout: seconds that a call may last that a worker records in `channel.clock`. None: no limit.
        restarts: how many workers that fail may be replaced, over all.
        close_timeout: seconds that a worker has to end by itself when it is closed.

    >>> def double(channel):
    ...     while True:
    ...         channel.send(2 * channel.receive())
    >>> pool = WorkerPool(double, ["worker 0"])
    >>> pool.start(0)
    >>> pool.workers[0].post(21)
    >>> pool.wait([0]), pool.workers[0].receive()
    ([0], 42)
    >>> pool.close()
    """

    def __init__(
        self,
        run: Callable[..., None],
        names: Sequence[str],
        *,
        start_method: str | None = None,
        timeout: float | None = None,
        restarts: int = 0,
        close_timeout: float = CLOSE_TIMEOUT,
    ) -> None:
        self._run, self._names, self._start_method, self._close_timeout = run, names, start_method, close_timeout
        self._timeout = math.inf if timeout is None else timeout
        self._clocks = [] if timeout is None else [CallTimer() for _ in names]
        self.restarts = Restarts(restarts)
        self.replaced = [0] * len(names)  #: by worker: how often
        self.workers: list[Worker] = []  #: as they are now
        self._finalizer = weakref.finalize(self, close_all, self.workers, close_timeout)
        self._finalizer.atexit = False  # `engram.processes.worker` has its own at exit, with a shorter timeout

    def start(self, i: int, *args: Any) -> None:
        """Starts worker i, which calls `run(channel, *args)`, for the first time or after it was retired."""
        clock = self._clocks[i] if self._clocks else None
        seed = seed_after(self.workers[i].seed, self.replaced[i]) if self.replaced[i] else None
        name, method = self._names[i], self._start_method
        self.workers[i : i + 1] = [Worker(self._run, args, name=name, start_method=method, seed=seed, clock=clock)]

    def retire(self, i: int, error: WorkerError) -> int:
        """Ends worker i, which has failed, and warns of it, before it is started anew; returns how often that was.

        Raises `error` where no restart is left.
        """
        self.restarts.use(error, self.workers[i].pid)
        self.workers[i].close(self._close_timeout)  # what it held is free once it has ended
        self.forget_call(i)
        self.replaced[i] += 1
        return self.replaced[i]

    def forget_call(self, i: int) -> None:
        """Takes another timer for worker i, which has failed: its own may stand in the middle of a call."""
        if self._clocks:
            self._clocks[i] = CallTimer()

    def wait(self, chosen: Iterable[int], seconds: float = math.inf) -> list[int]:
        """Waits for a message: those of the `chosen` workers that have sent one, or have ended.

        Empty after so many seconds, and when a call may be `overdue`.
        """
        seconds = min(seconds, self.remaining())
        ready = wait_for_any([self.workers[i] for i in chosen], None if seconds == math.inf else seconds)
        return [self.workers.index(worker) for worker in ready]

    def remaining(self) -> float:
        """Seconds until a call can be overdue."""
        durations = [reading[0] for clock in self._clocks if (reading := clock.reading()) is not None]
        return max(0.0, self._timeout - max(durations, default=0.0)) + 0.001

    def overdue(self) -> tuple[int, str] | None:
        """The first worker whose call lasts longer than the timeout, and the reason for its error."""
        for i, clock in enumerate(self._clocks):
            reading = clock.reading()
            if reading is not None and reading[0] >= self._timeout:
                return i, f"{reading[1]} did not end within timeout={self._timeout} s"
        return None

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return not self._finalizer.alive

    def close(self, timeout: float | None = None) -> None:
        """Ends the workers: asks them first, and kills them after `timeout` seconds. A second call does nothing."""
        if self._finalizer.detach() is not None:
            close_all(self.workers, self._close_timeout if timeout is None else timeout)
