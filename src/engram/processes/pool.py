"""Workers that are started, waited for, replaced and closed together: processes here, or what else starts some."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from engram.processes.restarts import seed_after
from engram.processes.timeouts import CallTimer
from engram.processes.worker import CLOSE_TIMEOUT, Worker, close_all, wait_for_any


class PoolWorker(Protocol):
    """The owner's end of a worker of a pool."""

    def reading(self) -> tuple[float, str] | None:
        """For how many seconds the call has lasted that it is in the middle of, and which one; None: in none."""
        ...

    def close(self, timeout: float) -> None:
        """Ends it: asks it first, and kills it after `timeout` seconds."""
        ...


W = TypeVar("W", bound=PoolWorker)


class Transport(Protocol[W]):
    """What starts the workers of a pool, and reaches them."""

    def start(self, name: str, args: Sequence[Any], *, before: W | None, life: int, timed: bool) -> W:
        """Starts a worker; `before` is the one that it replaces, for the `life`-th time, `timed`: it has a clock."""
        ...

    def wait_for_any(self, workers: Sequence[W], timeout: float | None) -> list[W]:
        """Waits for a message: the workers that have sent one, or have ended; empty after `timeout` seconds."""
        ...

    def close_all(self, workers: Iterable[W], timeout: float) -> None:
        """Ends workers together: asks all, and kills those that have not ended within `timeout` seconds."""
        ...


class Processes:
    """The transport to processes of this machine, which call `run(channel, *args)`; see `Worker`."""

    def __init__(self, run: Callable[..., None], start_method: str | None = None) -> None:
        self._run, self._start_method = run, start_method
        self.wait_for_any, self.close_all = wait_for_any, close_all

    def start(self, name: str, args: Sequence[Any], *, before: Worker | None, life: int, timed: bool) -> Worker:
        """Starts a process, whose random numbers follow from those of the one before."""
        seed = None if before is None else seed_after(before.seed, life)
        clock = CallTimer() if timed else None
        return Worker(self._run, args, name=name, start_method=self._start_method, seed=seed, clock=clock)


class WorkerPool(Generic[W]):
    """Workers with a limit for the time of their calls, of which those that fail are replaced by their owner.

    They are closed when the pool is, or is dropped.

    Args:
        transport: what starts them.
        names: of the workers, in errors.
        timeout: seconds that a call may last, as the worker says. None: no limit.
        argument: of the owner, which sets that limit.
        close_timeout: seconds that a worker has to end by itself when it is closed.

    >>> def double(channel):
    ...     while True:
    ...         channel.send(2 * channel.receive())
    >>> pool = WorkerPool(Processes(double), ["worker 0"])
    >>> pool.start(0)
    >>> pool.workers[0].post(21)
    >>> pool.wait([0]), pool.workers[0].receive()
    ([0], 42)
    >>> pool.close()
    """

    def __init__(
        self,
        transport: Transport[W],
        names: Sequence[str],
        *,
        timeout: float | None = None,
        argument: str = "timeout={} s",
        close_timeout: float = CLOSE_TIMEOUT,
    ) -> None:
        self._transport, self._names, self._close_timeout = transport, names, close_timeout
        self._timeout, self._argument = math.inf if timeout is None else timeout, argument
        self.replaced = [0] * len(names)  #: by worker: how often
        self.workers: list[W] = []  #: as they are now
        self._finalizer = weakref.finalize(self, transport.close_all, self.workers, close_timeout)
        self._finalizer.atexit = False  # `engram.processes.worker` has its own at exit, with a shorter timeout

    def start(self, i: int, *args: Any) -> None:
        """Starts worker i, for the first time or after it was ended."""
        life = self.replaced[i]
        before = self.workers[i] if life else None
        worker = self._transport.start(self._names[i], args, before=before, life=life, timed=self._timeout < math.inf)
        self.workers[i : i + 1] = [worker]

    def end(self, i: int) -> int:
        """Ends worker i, which has failed, before it is started anew; returns how often it was replaced then."""
        self.workers[i].close(self._close_timeout)  # what it held is free once it has ended
        self.replaced[i] += 1
        return self.replaced[i]

    def seed_of(self, i: int, seed: int) -> int:
        """The seed of worker i, where its first life has `seed`: each has its own."""
        return seed_after(seed, self.replaced[i]) if self.replaced[i] else seed

    def wait(self, chosen: Iterable[int], seconds: float = math.inf) -> list[int]:
        """Waits for a message: those of the `chosen` workers that have sent one, or have ended.

        Empty after so many seconds, and when a call may be `overdue`.
        """
        seconds = min(seconds, self.remaining())
        ready = self._transport.wait_for_any(
            [self.workers[i] for i in chosen], None if seconds == math.inf else seconds
        )
        return [self.workers.index(worker) for worker in ready]

    def _readings(self) -> list[tuple[int, float, str]]:
        """The workers that are in the middle of a call, for how long, and of which."""
        if self._timeout == math.inf:
            return []
        readings = ((i, worker.reading()) for i, worker in enumerate(self.workers))
        return [(i, *reading) for i, reading in readings if reading is not None]

    def remaining(self) -> float:
        """Seconds until a call can be overdue."""
        return max(0.0, self._timeout - max((seconds for _, seconds, _ in self._readings()), default=0.0)) + 0.001

    def overdue(self) -> tuple[int, str] | None:
        """The first worker whose call lasts longer than the timeout, and the reason for its error."""
        for i, seconds, call in self._readings():
            if seconds >= self._timeout:
                return i, f"{call} did not end within {self._argument.format(self._timeout)}"
        return None

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return not self._finalizer.alive

    def close(self, timeout: float | None = None) -> None:
        """Ends the workers: asks them first, and kills them after `timeout` seconds. A second call does nothing."""
        if self._finalizer.detach() is not None:
            self._transport.close_all(self.workers, self._close_timeout if timeout is None else timeout)
