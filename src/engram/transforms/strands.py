"""Time in batches: where trajectories end, and sums along them.

A batch `[*lead, T]` is seen as S strands of T steps. Nothing here loops over rows.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.transforms.entries import Key, find, get, is_class
from engram.transforms.scale import first_key

DONES: tuple[Key, ...] = (("next", "done"), "done")
_IDS: tuple[Key, ...] = (("collector", "traj_ids"), "episode")


class Strands(NamedTuple):
    """The batch dimensions: of leaves `[*shape, ...]`, the last one is time."""

    shape: tuple[int, ...]  # () for a single step

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def steps(self) -> int:
        return self.shape[-1] if self.shape else 1

    def split(self, leaf: Tensor, key: Key) -> Tensor:
        """A leaf as [S, T, ...].

        Raises:
            ValueError: it does not have the batch dimensions.
        """
        n = len(self.shape)
        if tuple(leaf.shape[:n]) != tuple(self.shape):
            raise ValueError(f"{key!r} has shape {list(leaf.shape)} in a batch {list(self.shape)}")
        return leaf.reshape(self.rows, self.steps, *leaf.shape[n:])

    def join(self, leaf: Tensor) -> Tensor:
        """[S, T, ...] as it is in the batch."""
        return leaf.reshape((*self.shape, *leaf.shape[2:]))


class Trajectories(NamedTuple):
    """Where trajectories start and end in a batch; all [S, T]."""

    strands: Strands
    done: Tensor  # flags at the end of each step
    ids: Tensor | None
    starts: Tensor  # whether is_init says that a trajectory starts here
    ends: Tensor  # the last steps of trajectories, for whatever reason, as far as the batch shows

    @property
    def position(self) -> Tensor:
        """int64 [T]."""
        return torch.arange(self.strands.steps, device=self.ends.device)

    def first(self) -> Tensor:
        """int64 [S, T]: where in the batch each step's trajectory starts."""
        begins = torch.zeros_like(self.ends)
        begins[:, 1:] = self.ends[:, :-1]
        return torch.where(begins, self.position, 0).cummax(1).values

    def last(self) -> Tensor:
        """int64 [S, T]: where in the batch each step's trajectory ends, or the batch does."""
        far = self.strands.steps - 1
        return torch.where(self.ends, self.position, far).flip(1).cummin(1).values.flip(1)


def trajectories_of(
    batch: Any,
    who: str,
    done_key: Key | None = None,
    traj_key: Key | None = None,
    mask_key: Key | None = None,
    dims: int | None = None,
) -> Trajectories:
    """Trajectories by flags (`("next", "done")`, or `"done"` without it), ids, `"is_init"`, and the end of a mask.

    `dims` is the number of batch dimensions, for dicts, which do not say it.

    Raises:
        KeyError: there are no flags, or not those that were named.
    """
    done_key = first_key(batch, DONES, who) if done_key is None else done_key
    flag = get(batch, done_key, who)
    strands = _strands_of(batch, flag, dims)
    done = _flags(strands, flag, done_key)
    found = None if traj_key is None else get(batch, traj_key, who)
    ids = _ids(strands, batch) if found is None else strands.split(found, str(traj_key)).flatten(1)
    init = find(batch, "is_init")
    starts = torch.zeros_like(done) if init is None else _flags(strands, init, "is_init")
    ends = done.clone()
    if ids is not None:
        ends[:, :-1] |= ids[:, 1:] != ids[:, :-1]
    ends[:, :-1] |= starts[:, 1:]
    mask = None if mask_key is None else find(batch, mask_key)
    if mask is not None and mask_key is not None:
        there = _flags(strands, mask, mask_key)
        ends |= ~there  # steps of padding stand alone
        ends[:, :-1] |= ~there[:, 1:]
    return Trajectories(strands, done, ids, starts, ends)


def _strands_of(batch: Any, flag: Tensor, dims: int | None) -> Strands:
    if isinstance(batch, TensorDictBase) or is_class(batch):
        return Strands(tuple(batch.batch_size))
    shape = tuple(flag.shape)
    if dims is not None:
        return Strands(shape[:dims])
    # Flags end in a dimension of 1.
    return Strands(shape[:-1] if len(shape) > 1 and shape[-1] == 1 else shape)


def _flags(strands: Strands, flag: Tensor, key: Key) -> Tensor:
    split = strands.split(flag, key).to(torch.bool)
    return split.flatten(2).any(-1) if split.ndim > 2 else split


def _ids(strands: Strands, batch: Any) -> Tensor | None:
    for key in _IDS:
        ids = find(batch, key)
        if isinstance(ids, Tensor) and not ids.is_floating_point() and ids.numel() == strands.rows * strands.steps:
            return ids.reshape(strands.rows, strands.steps)
    return None


# Doubling: after k rounds each step holds the sum of up to 2**k steps of its trajectory. Differences of prefix sums
# would cancel, and divisions by powers of gamma overflow.
def running_sum(x: Tensor, first: Tensor) -> Tensor:
    """[S, T, F]: sums from the first step of each trajectory up to each step; `first` as `Trajectories.first`."""
    behind = torch.arange(x.shape[1], device=x.device) - first
    reach, most = 1, int(behind.max())
    while reach <= most:
        there = (behind[:, reach:] >= reach).unsqueeze(-1)
        x = torch.cat([x[:, :reach], x[:, reach:] + torch.where(there, x[:, :-reach], 0)], 1)
        reach *= 2
    return x


def discounted_to_go(x: Tensor, last: Tensor, gamma: float) -> Tensor:
    """[S, T, F]: `x[t] + gamma * x[t + 1] + ...` to the end of each trajectory; `last` as `Trajectories.last`."""
    ahead = last - torch.arange(x.shape[1], device=x.device)
    reach, most, weight = 1, int(ahead.max()), gamma
    while reach <= most:
        there = (ahead[:, :-reach] >= reach).unsqueeze(-1)
        x = torch.cat([x[:, :-reach] + weight * torch.where(there, x[:, reach:], 0), x[:, -reach:]], 1)
        reach, weight = 2 * reach, weight * weight
    return x


def summable(x: Tensor) -> Tensor:
    """[S, T, F] in a dtype to sum in."""
    x = x.reshape(*x.shape[:2], math.prod(x.shape[2:]))
    if x.dtype in (torch.float16, torch.bfloat16):
        return x.to(torch.float32)
    return x if x.is_floating_point() else x.to(torch.int64)
