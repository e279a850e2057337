"""Replacing worker processes that failed or died: how often, with which seeds, and the warning about each."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from engram.errors import WorkerError


class Restarts:
    """The replacements of workers that are still allowed, over all workers.

    >>> restarts = Restarts(2)
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     restarts.use(WorkerError("worker 1", exit_code=-9), pid=1234)
    1
    >>> restarts.left, str(caught[0].message)[:32]
    (1, 'worker 1 was killed by SIGKILL; ')
    """

    def __init__(self, allowed: int) -> None:
        self.allowed = self.left = allowed

    def use(self, error: WorkerError, pid: int) -> int:
        """Counts one replacement, of the process `pid`, and warns of it; returns its number, from 1 on.

        Raises `error` where none is left.
        """
        if not self.left:
            raise error
        self.left -= 1
        warnings.warn(
            f"{error}\n{error.worker} (process {pid}) is replaced, and its open episodes are lost; {self.left} of "
            f"{self.allowed} restarts are left",
            RuntimeWarning,
            stacklevel=2,
        )
        return self.allowed - self.left


def validate_restarts(restarts: Any) -> int:
    """Returns `restarts`. Raises TypeError or ValueError where it is no number of 0 or more."""
    if isinstance(restarts, bool) or not isinstance(restarts, int):
        raise TypeError(f"restarts is how many workers may be replaced, an int, got a {type(restarts).__name__}")
    if restarts < 0:
        raise ValueError(f"restarts must be 0 or more, got {restarts}")
    return restarts


def seed_after(seed: int, restart: int) -> int:
    """The seed of a worker's random numbers after its restart number `restart`, in [0, 2**31)."""
    return int(np.random.SeedSequence([seed % 2**64, restart]).generate_state(1)[0]) >> 1
