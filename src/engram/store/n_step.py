"""Returns over several steps (Sutton, 1988), of stored rewards and flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engram.store.indexing import unwritten
from engram.store.lanes import Lanes


class NSteps(NamedTuple):
    """n steps, each with those that follow on it: to the first that is done, or the newest.

    Attributes:
        rewards: of each of these steps, float32 [n, steps]; 0 behind the last.
        last: the slot of the last, int64 [n].
        counts: how many they are, int64 [n].
        returns: the sum of the rewards times their discounts, float32 [n, 1].
        discounts: the discount of what comes after the last, float32 [n, 1].
    """

    rewards: Tensor
    last: Tensor
    counts: Tensor
    returns: Tensor
    discounts: Tensor


def read_n_steps(
    lanes: Lanes,
    slots: Tensor,
    discounts: npt.NDArray[np.float32],
    read: Callable[[Tensor], tuple[Tensor, Tensor] | None],
) -> NSteps | None:
    """The steps in slots, int64 [n], and those that follow on each. None: rows were overwritten meanwhile.

    Args:
        discounts: float32 [steps + 1].
        read: the rewards of the rows in slots, float32 [m], and whether each is done, bool [m]; None: some are lost.

    Raises:
        MissingRowError: a slot holds no row.
    """
    store, envs, steps = lanes.store, lanes.envs, len(discounts) - 1
    first = store.generations(slots)
    if bool((first < 0).any()):
        raise unwritten(store, int(slots[first < 0][0]))
    lane, env = slots // (store.lane_capacity * envs), slots % envs
    newest = torch.tensor([counters["published"] - 1 for counters in lanes.counters()], device="cpu")[lane]
    ahead = torch.arange(steps, device="cpu")
    sequences = torch.minimum(first[:, None] + ahead, newest[:, None])
    at = lanes.slots_of(lane.repeat_interleave(steps), sequences.reshape(-1), env.repeat_interleave(steps))
    found = read(at)
    if found is None or not torch.equal(store.generations(at), sequences.reshape(-1)):
        return None
    rewards, done, at = (column.reshape(len(slots), steps) for column in (*found, at))
    done |= sequences == newest[:, None]
    done[:, -1] = True
    counts = done.int().argmax(1) + 1
    rewards[ahead >= counts[:, None]] = 0
    products: np.ndarray[Any, Any] = rewards.numpy() * discounts[:-1]
    returns = torch.from_numpy(products.sum(1, keepdims=True))
    last = at.gather(1, counts[:, None] - 1)[:, 0]
    return NSteps(rewards, last, counts, returns, torch.from_numpy(discounts)[counts][:, None])
