"""How long an environment in a worker process has been in one step or reset, for its owner to see."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engram._native import AtomicInts
from engram.processes.shared_memory import SharedMemory

_SINCE, _KIND, _ENV, _COUNT = range(4)
_BYTES = 64
_KINDS = ("step", "reset")


class StepClock:
    """In memory that the owner sees even where the worker runs no Python any more, in C code that holds the GIL.

    It may be sent to a process that is being started.

    >>> clock = StepClock()
    >>> step = clock.timed(lambda action: clock.reading(), "step", 3)
    >>> seconds, place = step(0)
    >>> seconds >= 0, place, clock.reading()
    (True, 'step 1 of environment 3', None)
    """

    def __init__(self) -> None:
        self._memory = SharedMemory()
        self._cells = AtomicInts(self._memory.allocate([_BYTES])[0].view(np.int64))

    def timed(self, call: Callable[..., Any], kind: str, env: int) -> Callable[..., Any]:
        """`call`, which is a "step" or a "reset" of environment `env`, with its beginning and end entered here."""
        cells, number, code = self._cells, itertools.count(1), _KINDS.index(kind)

        def timed(*args: Any, **kwargs: Any) -> Any:
            cells[_KIND], cells[_ENV], cells[_COUNT] = code, env, next(number)
            cells[_SINCE] = time.monotonic_ns()
            try:
                return call(*args, **kwargs)
            finally:
                cells[_SINCE] = 0

        return timed

    def reading(self) -> tuple[float, str] | None:
        """Seconds since the present call began, and which one that is; None between two calls."""
        cells = self._cells
        while since := cells[_SINCE]:
            place = f"{_KINDS[cells[_KIND]]} {cells[_COUNT]} of environment {cells[_ENV]}"
            if cells[_SINCE] == since:
                return (time.monotonic_ns() - since) / 1e9, place
        return None

    def __getstate__(self) -> SharedMemory:
        return self._memory

    def __setstate__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._cells = AtomicInts(memory.attach([_BYTES])[0].view(np.int64))


class Timed:
    """An environment, or what steps one, whose steps and resets are entered in a clock; the rest is its own."""

    def __init__(self, inner: Any, clock: StepClock, env: int) -> None:
        self._inner = inner
        self.step = clock.timed(inner.step, "step", env)
        self.reset = clock.timed(inner.reset, "reset", env)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Timeout:
    """The longest that one call may last, for the owner of workers with clocks."""

    def __init__(self, seconds: float, clocks: Sequence[StepClock]) -> None:
        self.seconds, self._clocks = seconds, clocks

    def left(self) -> float:
        """In so many seconds one of the calls that last now, or begin from now on, can be late."""
        now = [reading[0] for clock in self._clocks if (reading := clock.reading()) is not None]
        return max(0.0, self.seconds - max(now, default=0.0))

    def late(self) -> tuple[int, str] | None:
        """The first worker whose call has lasted too long, and what to say about it; None: there is none."""
        for worker, clock in enumerate(self._clocks):
            reading = clock.reading()
            if reading is not None and reading[0] >= self.seconds:
                return worker, f"{reading[1]} did not end within timeout={self.seconds} s"
        return None


def checked_timeout(timeout: float | None) -> float | None:
    """`timeout` itself. Raises TypeError and ValueError for what is no number of seconds."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout is a number of seconds, or None for no limit, got a {type(timeout).__name__}")
    if not 0 < timeout < float("inf"):
        raise ValueError(f"timeout must be more than 0 seconds, or None for no limit, got {timeout}")
    return timeout


def refuse_timeout(timeout: Any, where: str) -> None:
    """Raises TypeError for a timeout where an environment runs in the caller's own process."""
    if timeout is not None:
        raise TypeError(
            f"{where} steps its environments in this process, which cannot be ended for one that hangs: timeout= is an "
            "argument of ParallelEnv, MultiSyncDataCollector and MultiaSyncDataCollector"
        )
