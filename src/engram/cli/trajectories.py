"""The stored trajectories of a storage: their lengths and returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engram.data import Storage
from engram.datasets.episodes import REWARD
from engram.kernel.replay import stored_trajectories
from engram.kernel.rows import EpisodeIndex
from engram.pytree import KeyPath

_AT_ONCE = 1 << 16  # time steps of which rewards are read at once


class Trajectories(NamedTuple):
    """Every stored trajectory: where it lies, int64 [n] each, and of each lane the sequences of its steps."""

    lane: Tensor
    env: Tensor
    start: Tensor
    length: Tensor
    rows: list[range]


def trajectories_of(storage: Storage) -> Trajectories | str:
    """Every stored trajectory, with the steps of the same moment; or a text that says why none can be counted."""
    if storage.layout is None and len(storage):
        return "steps are stored as items of any form: episodes are not looked for"
    counted = stored_trajectories(storage, EpisodeIndex())
    if counted is None:
        return "no key says where episodes end: ('next', 'done') or ('collector', 'traj_ids')"
    return Trajectories(*counted[0], counted[1])


def has_rewards(storage: Storage) -> bool:
    """Whether steps have `("next", "reward")`."""
    return storage.leaf(REWARD) is not None


def episode_returns(
    storage: Storage, trajectories: Trajectories, advance: Callable[[int], None] = lambda steps: None
) -> npt.NDArray[np.float64]:
    """The sum of `("next", "reward")` over each trajectory: float64 [n]; NaN where rows were overwritten meanwhile."""
    lanes = storage.lanes
    assert lanes is not None
    capacity, sums = lanes.store.lane_capacity, np.zeros(len(trajectories.length))
    lane_of, env_of, start_of, length_of = (values.numpy() for values in trajectories[:4])
    for lane in np.unique(lane_of):
        here = np.flatnonzero(lane_of == lane)
        begin, end = int(start_of[here].min()), int((start_of[here] + length_of[here]).max())
        for at in range(begin, end, _AT_ONCE):
            until = min(at + _AT_ONCE, end)
            slots = int(lane) * capacity + torch.arange(at, until) % capacity
            rewards = read_column(storage, REWARD, slots).double().reshape(until - at, lanes.envs, -1).sum(-1).numpy()
            totals = np.concatenate([np.zeros((1, lanes.envs)), rewards.cumsum(0)])
            inside = here[(start_of[here] < until) & (start_of[here] + length_of[here] > at)]
            first = np.maximum(start_of[inside], at) - at
            last = np.minimum(start_of[inside] + length_of[inside], until) - at
            sums[inside] += totals[last, env_of[inside]] - totals[first, env_of[inside]]
            advance(until - at)
        oldest = lanes.store.lane(int(lane))["first"]  # after the rows were read
        sums[here[start_of[here] < oldest]] = np.nan
    return sums


def read_column(storage: Storage, path: KeyPath, slots: Tensor) -> Tensor:
    """One leaf of the steps at these time slots: [n, *envs, ...]. Of steps overwritten meanwhile it may be anything."""
    with storage.mutex:
        return storage.access.validated(lambda: storage.column(path, slots))


def column_blocks(storage: Storage, path: KeyPath, rows: list[range], steps: int) -> Iterator[tuple[Tensor, int]]:
    """One leaf of the steps with these sequences of each lane, oldest first: blocks `[n, *envs, ...]`.

    Without those that a writer overwrote before they were read; how many these are comes with each block.
    """
    lanes = storage.lanes
    assert lanes is not None
    capacity = lanes.store.lane_capacity
    for lane, stored in enumerate(rows):
        for start in range(stored.start, stored.stop, steps):
            times = torch.arange(start, min(start + steps, stored.stop))
            values = read_column(storage, path, lane * capacity + times % capacity)
            gone = min(max(0, lanes.store.lane(lane)["first"] - start), len(times))
            yield values[gone:], gone
