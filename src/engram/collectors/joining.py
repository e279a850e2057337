"""Batches of several workers, or of a worker and its successor, as one batch; or why they do not go into one."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from engram.collectors.worker import WroteFrames
from engram.envs.base import mark_truncated
from engram.pytree import MASK, is_ragged, map_leaves

ONE_BATCH = (
    "Make environments with the same spaces, and as many in each worker; or collect with a MultiaSyncDataCollector, "
    "each batch of which is of one worker"
)
_Layout = dict[Any, str]
WorkerLayout = tuple[int, _Layout]


def layout_of(batch: TensorDictBase) -> _Layout:
    """The entries of each step of a batch, by key; none of agents that differ."""
    if is_ragged(batch):
        return {}
    return {key: f"{leaf.dtype} {list(leaf.shape[batch.ndim :])}" for key, leaf in batch.items(True, True)}


def refuse_other_layout(first: WorkerLayout, other: WorkerLayout) -> None:
    """Raises ValueError for batches of two workers that do not go into one, with the first entry that differs."""
    (j, expected), (k, found) = first, other
    if expected == found:
        return
    key = next(key for key in {**expected, **found} if expected.get(key) != found.get(key))
    raise ValueError(
        f"the batches of workers {j} and {k} do not go into one: {key!r} is {expected.get(key, 'missing')} from worker "
        f"{j}, and {found.get(key, 'missing')} from worker {k}. {ONE_BATCH}"
    )


def padded(batch: TensorDictBase, length: int) -> TensorDictBase:
    """`[*, time]` padded with zeros to `[*, length]`, with a mask of the steps."""
    time, ndim = batch.shape[-1], batch.ndim
    mask = torch.zeros((*batch.shape[:-1], length), dtype=torch.bool, device="cpu")
    mask[..., :time] = True
    if time < length:

        def pad(leaf: torch.Tensor) -> torch.Tensor:
            rest = leaf.new_zeros((*batch.shape[:-1], length - time, *leaf.shape[ndim:]))
            return torch.cat([leaf, rest], ndim - 1)

        batch = map_leaves(batch, pad, (*batch.shape[:-1], length))
    return batch.set(MASK, mask)


def joined(first: TensorDictBase | WroteFrames, rest: TensorDictBase | WroteFrames) -> TensorDictBase | WroteFrames:
    """A batch whose first steps are of a worker that failed, and whose rest is of the one that replaced it.

    The last of the first steps is marked as truncated: the trajectory is not continued.
    """
    if isinstance(first, WroteFrames) or isinstance(rest, WroteFrames):
        return WroteFrames(sum(part.frames for part in (first, rest) if isinstance(part, WroteFrames)))
    mark_truncated(first, (*[slice(None)] * (first.ndim - 1), -1))
    return torch.cat([first, rest], -1)
