"""What is left of stored trajectories beside removed rows, for exports, which leave these out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import engram._native as _native
from engram.pytree import to_tensor
from engram.store.episodes import StoredTrajectories


def removed_steps(store: _native.Store, lane: int, steps: range) -> npt.NDArray[np.bool_] | None:
    """Which rows of the steps with these sequences of a lane were removed: bool [steps, envs]; None: none was."""
    bits = store.removed_bits(lane, steps.start, max(steps.start, steps.stop))
    if not bits:
        return None
    flags = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(steps) * store.envs, bitorder="little")
    return flags.astype(np.bool_).reshape(len(steps), store.envs)


def without_removed(
    store: _native.Store, trajectories: StoredTrajectories, rows: list[range]
) -> tuple[StoredTrajectories, list[npt.NDArray[np.bool_] | None]]:
    """What is left of trajectories, and the removed rows of each lane.

    No trajectory goes on over removed steps: what lies before them and what lies behind them is one each.

    Args:
        rows: of each lane the sequences of the steps that the trajectories are made of.
    """
    removed = [removed_steps(store, lane, steps) for lane, steps in enumerate(rows)]
    if all(one is None for one in removed):
        return trajectories, removed
    columns = np.stack([values.numpy() for values in trajectories], 1)
    parts = []
    for lane, env in dict.fromkeys(map(tuple, columns[:, :2].tolist())):
        own = columns[(columns[:, 0] == lane) & (columns[:, 1] == env)]
        gone = removed[lane]
        if gone is None or not gone[:, env].any():
            parts.append(own)
            continue
        left = ~gone[:, env]
        begins = left.copy()
        begins[1:] &= ~left[:-1]
        begins[own[:, 2] - rows[lane].start] = True
        begins &= left
        at = np.flatnonzero(begins)
        lengths = np.diff(np.append(np.cumsum(left)[at] - 1, left.sum()))
        parts.append(np.stack([np.full(len(at), lane), np.full(len(at), env), at + rows[lane].start, lengths], 1))
    joined = np.concatenate(parts) if parts else columns
    return StoredTrajectories(*map(to_tensor, np.ascontiguousarray(joined.T))), removed
