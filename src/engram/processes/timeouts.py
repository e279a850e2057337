"""Timeouts of environment steps: how long a worker process has been in one step or reset, visible to its owner."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from engram._native import AtomicInts
from engram.processes.shared_memory import SharedMemory

_SINCE, _KIND, _ENV, _COUNT = range(4)
_BYTES = 64
_KINDS = ("step", "reset")


class CallTimer:
    """The start time of a worker's present call, in shared memory: readable while the worker's C code holds the GIL.

    It can be pickled to a process that is being started.

    >>> clock = CallTimer()
    >>> step = clock.timed(lambda action: clock.reading(), "step", 3)
    >>> seconds, place = step(0)
    >>> seconds >= 0, place, clock.reading()
    (True, 'step 1 of environment 3', None)
    """

    def __init__(self) -> None:
        self._memory = SharedMemory()
        self._memory.allocate([_BYTES])

    @property
    def _cells(self) -> AtomicInts:
        return AtomicInts(self._memory.bytes.view(np.int64))

    def timed(self, call: Callable[..., Any], kind: str, env: int) -> Callable[..., Any]:
        """Wraps a "step" or "reset" of environment `env` so that its beginning and end are recorded here."""
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
        """Seconds since the present call began, and its description; None between two calls."""
        cells = self._cells
        while since := cells[_SINCE]:
            place = f"{_KINDS[cells[_KIND]]} {cells[_COUNT]} of environment {cells[_ENV]}"
            if cells[_SINCE] == since:
                return (time.monotonic_ns() - since) / 1e9, place
        return None


class TimedEnv:
    """An environment whose steps and resets are recorded in a timer; other attributes are the environment's."""

    def __init__(self, inner: Any, clock: CallTimer, env: int) -> None:
        self._inner = inner
        self.step = clock.timed(inner.step, "step", env)
        self.reset = clock.timed(inner.reset, "reset", env)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def validate_timeout(timeout: float | None) -> float | None:
    """Returns `timeout`. Raises TypeError or ValueError where it is no positive number of seconds."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout is a number of seconds, or None for no limit, got a {type(timeout).__name__}")
    if not 0 < timeout < float("inf"):
        raise ValueError(f"timeout must be more than 0 seconds, or None for no limit, got {timeout}")
    return timeout


def reject_timeout(timeout: Any, where: str) -> None:
    """Raises TypeError for a timeout where an environment runs in the caller's own process."""
    if timeout is not None:
        raise TypeError(
            f"{where} steps its environments in this process, which cannot be ended for one that hangs: timeout= is an "
            "argument of ParallelEnv, MultiSyncDataCollector and MultiaSyncDataCollector"
        )
