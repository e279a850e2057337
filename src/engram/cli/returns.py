"""Returns of stored trajectories, summed up from rewards that are read a block at a time. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

NO_ENDS = (
    "no key says where episodes end: ('next', 'done'), or 'done' of flat rows, or ids under ('collector', 'traj_ids') "
    "or 'episode'"
)
NO_REWARDS = "there are no returns: rows have neither ('next', 'reward') nor, as flat ones, 'reward'"

_AT_ONCE = 1 << 16  # time steps of which rewards are read at once

Numbers = npt.NDArray[np.float64]


def sum_rewards(
    trajectories: tuple[Any, ...],
    read: Callable[[int, range], Numbers],
    oldest: Callable[[int], int],
    advance: Callable[[int], None],
) -> Numbers:
    """The sum of rewards over each trajectory: float64 [n]; NaN where rows were overwritten meanwhile.

    Args:
        trajectories: lane, environment, first sequence and length of each: int64 [n].
        read: the rewards of a lane's steps with these sequences: float64 [steps, envs].
        oldest: the oldest sequence that a lane has now.
        advance: called with how many steps were read.
    """
    lane_of, env_of, start_of, length_of = trajectories
    sums = np.zeros(len(length_of))
    for lane in np.unique(lane_of):
        here = np.flatnonzero(lane_of == lane)
        begin, end = int(start_of[here].min()), int((start_of[here] + length_of[here]).max())
        for at in range(begin, end, _AT_ONCE):
            until = min(at + _AT_ONCE, end)
            rewards = read(int(lane), range(at, until))
            totals = np.concatenate([np.zeros((1, rewards.shape[1])), rewards.cumsum(0)])
            inside = here[(start_of[here] < until) & (start_of[here] + length_of[here] > at)]
            first = np.maximum(start_of[inside], at) - at
            last = np.minimum(start_of[inside] + length_of[inside], until) - at
            sums[inside] += totals[last, env_of[inside]] - totals[first, env_of[inside]]
            advance(until - at)
        sums[here[start_of[here] < oldest(int(lane))]] = np.nan  # after the rows were read
    return sums
