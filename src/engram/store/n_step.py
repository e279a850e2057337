"""The steps that follow on a stored one in its episode, as returns over several steps are made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engram.store.indexing import unwritten
from engram.store.lanes import Lanes


class Following(NamedTuple):
    """Of n steps, each with those that follow on it: up to the first that ends an episode, or the newest.

    Attributes:
        numbers: a number of each of these steps, [n, steps]; 0 behind the last.
        last: the slot of the last, int64 [n].
        counts: how many they are, int64 [n].
    """

    numbers: Tensor
    last: Tensor
    counts: Tensor


def follow(
    lanes: Lanes, slots: Tensor, steps: int, read: Callable[[Tensor], tuple[Tensor, Tensor] | None]
) -> Following | None:
    """The steps that follow on those in slots, int64 [n].

    Args:
        steps: at most so many, with the first one.
        read: the numbers of the rows in slots, [m], and whether each ends an episode, bool [m]; None: they are lost.

    Raises:
        MissingRowError: a slot holds no row.
    """
    store, envs = lanes.store, lanes.envs
    first = store.generations(slots)
    if bool((first < 0).any()):
        raise unwritten(store, int(slots[first < 0][0]))
    lane, env = slots // (store.lane_capacity * envs), slots % envs
    newest = torch.tensor([counters["published"] - 1 for counters in lanes.counters()])[lane]
    ahead = torch.arange(steps)
    sequences = torch.minimum(first[:, None] + ahead, newest[:, None])
    at = lanes.slots_of(lane.repeat_interleave(steps), sequences.reshape(-1), env.repeat_interleave(steps))
    found = read(at)
    if found is None or not torch.equal(store.generations(at), sequences.reshape(-1)):
        return None
    numbers, over, at = (column.reshape(len(slots), steps) for column in (*found, at))
    over |= sequences == newest[:, None]
    over[:, -1] = True
    counts = over.int().argmax(1) + 1
    numbers[ahead >= counts[:, None]] = 0
    return Following(numbers, at.gather(1, counts[:, None] - 1)[:, 0], counts)
