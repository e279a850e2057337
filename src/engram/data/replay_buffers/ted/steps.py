"""Steps as bytes: where what follows a step is the step after it, and the ways to write that down once.

A column is uint8 [n, nbytes]: one leaf of n steps, strand after strand, each strand oldest first. Bytes are compared,
not numbers: NaN equals the same NaN, and -0.0 is not 0.0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.int64]

_FEW_WORDS = 8


def differs(a: Column, b: Column) -> Mask:
    """bool [n]: whether any byte differs."""
    a, b = _words(a), _words(b)
    width = a.shape[1]
    if not 0 < width <= _FEW_WORDS:
        found: Mask = (a != b).any(axis=1)
        return found
    found = a[:, 0] != b[:, 0]
    for word in range(1, width):  # numpy reduces short rows slowly
        found |= a[:, word] != b[:, word]
    return found


def broken(now: Column, following: Column, ends: Mask) -> Mask:
    """bool [n]: where `following[t]` is not `now[t + 1]`, and where there is no step after it (`ends`)."""
    out: Mask = ends.copy()
    out[:-1] |= differs(following[:-1], now[1:])
    return out


def with_last(now: Column, following: Column, ends: Mask) -> Column:
    """[n + trajectories, nbytes]: the column with what followed the last step of each trajectory put after it."""
    out = np.empty((len(now) + int(ends.sum()), now.shape[1]), np.uint8)
    last = last_places(ends)
    keep = np.ones(len(out), np.bool_)
    keep[last] = False
    out[keep] = now
    out[last] = following[ends]
    return out


def without_last(extended: Column, ends: Mask) -> tuple[Column, Column]:
    """`now` and, but for the exceptions, `following` of a column that `with_last` made."""
    keep = np.ones(len(extended), np.bool_)
    keep[last_places(ends)] = False
    shifted = np.zeros_like(keep)
    shifted[1:] = keep[:-1]  # the value after each step: another step, or the last one's successor
    return extended[keep], extended[shifted]


def last_places(ends: Mask) -> Positions:
    """Where the extra values of `with_last` lie."""
    at = np.flatnonzero(ends)
    return at + np.arange(1, len(at) + 1)


def followed(now: Column, at: Positions, values: Column) -> Column:
    """What follows each step: the step after it, but for the exceptions `at`."""
    out = np.empty_like(now)
    out[:-1] = now[1:]
    out[at] = values
    return out


def strand_ends(strands: int, steps: int) -> Mask:
    """bool [strands * steps]: the newest step of each strand."""
    ends = np.zeros((strands, steps), np.bool_)
    ends[:, -1:] = True
    return ends.reshape(-1)


def trajectory_ends(ends: Mask, flags: list[Column], ids: list[Column]) -> Mask:
    """`ends`, and where a flag is set or an id is another one in the next step."""
    out: Mask = ends.copy()
    for flag in flags:
        out |= flag.any(axis=1)
    for column in ids:
        out[:-1] |= differs(column[:-1], column[1:])
    return out


def run_starts(column: Column) -> Positions:
    """Where the column changes; step 0 is one."""
    start = np.ones(len(column), np.bool_)
    start[1:] = differs(column[1:], column[:-1])
    return np.flatnonzero(start)


def repeat_runs(starts: Positions, values: Column, n: int) -> Column:
    """The column of n steps whose runs begin at `starts`; ValueError when the first step is in none."""
    if n and (not len(starts) or starts[0] != 0):
        raise ValueError("nothing says what value the first step has")
    lengths = np.diff(starts, append=n)
    return np.repeat(values, lengths, axis=0)


def _words(column: Column) -> npt.NDArray[Any]:
    """The same bytes in the widest integers that fit: [n, fewer]."""
    column = np.ascontiguousarray(column)
    nbytes = column.shape[1]
    size = next(size for size in (8, 4, 2, 1) if nbytes % size == 0)
    return column.view(f"u{size}") if nbytes else column
