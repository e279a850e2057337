"""The stored trajectories of a storage: their lengths and returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engram.cli.returns import NO_ENDS, sum_rewards
from engram.data import Storage
from engram.kernel.replay import stored_trajectories
from engram.kernel.rows import IDS, EpisodeIndex, outcome_path, without_removed
from engram.pytree import KeyPath


class Trajectories(NamedTuple):
    """Every stored trajectory: where it lies, int64 [n] each, and of each lane the sequences of its steps."""

    lane: Tensor
    env: Tensor
    start: Tensor
    length: Tensor
    rows: list[range]


def trajectories_of(storage: Storage, end_key: KeyPath | None = None, *, left_only: bool = False) -> Trajectories | str:
    """Every stored trajectory, with the steps of the same moment; or a text that says why none can be counted.

    Args:
        end_key: the flags; None: `("next", "done")`, or `"done"` of flat rows. Ids come first, unless other flags than
            `("next", "done")` are named.
        left_only: without removed steps; what lies before and behind such steps is a trajectory each.
    """
    if storage.layout is None and len(storage):
        return "steps are stored as items of any form: episodes are not looked for"
    has_ids = any(storage.leaf(path) is not None for path in IDS)
    if end_key is None and not has_ids:
        end_key = _outcome(storage, "done")
    counted = stored_trajectories(storage, EpisodeIndex(end_key=end_key))
    if counted is None:
        return NO_ENDS
    trajectories, rows = counted
    if left_only:
        trajectories, _ = without_removed(storage.lanes.store, trajectories, rows)
    return Trajectories(*trajectories, rows)


def has_rewards(storage: Storage) -> bool:
    """Whether steps have `("next", "reward")`, or, as flat rows, `"reward"`."""
    return storage.leaf(_outcome(storage, "reward")) is not None


def episode_returns(
    storage: Storage, trajectories: Trajectories, advance: Callable[[int], None] = lambda steps: None
) -> npt.NDArray[np.float64]:
    """The sum of rewards over each trajectory: float64 [n]; NaN where rows were overwritten meanwhile."""
    lanes = storage.lanes
    capacity, envs, store = lanes.store.lane_capacity, lanes.envs, lanes.store
    reward = _outcome(storage, "reward")

    def read(lane: int, steps: range) -> npt.NDArray[np.float64]:
        slots = lane * capacity + torch.arange(steps.start, steps.stop, device="cpu") % capacity
        rewards = read_column(storage, reward, slots).double()
        summed: npt.NDArray[np.float64] = rewards.reshape(len(steps), envs, -1).sum(-1).numpy()
        return summed

    columns = tuple(values.numpy() for values in trajectories[:4])
    return sum_rewards(columns, read, lambda lane: int(store.lane(lane)["first"]), advance)


def _outcome(storage: Storage, name: str) -> KeyPath:
    return outcome_path(() if storage.layout is None else storage.layout.paths, name)


def read_column(storage: Storage, path: KeyPath, slots: Tensor) -> Tensor:
    """One leaf of the steps at these time slots: [n, *envs, ...]. Of steps overwritten meanwhile it may be anything."""
    with storage.mutex:
        return storage.access.validated(lambda: storage.column(path, slots))


def column_blocks(storage: Storage, path: KeyPath, rows: list[range], steps: int) -> Iterator[tuple[Tensor, int]]:
    """One leaf of the steps with these sequences of each lane, oldest first: blocks `[n, *envs, ...]`.

    Without those that a writer overwrote before they were read; how many these are comes with each block.
    """
    lanes = storage.lanes
    capacity = lanes.store.lane_capacity
    for lane, stored in enumerate(rows):
        for start in range(stored.start, stored.stop, steps):
            times = torch.arange(start, min(start + steps, stored.stop), device="cpu")
            values = read_column(storage, path, lane * capacity + times % capacity)
            gone = min(max(0, lanes.store.lane(lane)["first"] - start), len(times))
            yield values[gone:], gone
