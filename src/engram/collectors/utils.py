"""Splitting collected batches into trajectories."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram._system import SIGNED

Key = str | tuple[str, ...]


def split_trajectories(
    batch: TensorDictBase,
    *,
    trajectory_key: Key | None = None,
    done_key: Key = ("next", "done"),
    mask_key: Key = ("collector", "mask"),
) -> TensorDictBase:
    """The trajectories of `batch` `[*, time]`, one a row, padded with zeros: `[trajectories, longest]`.

    Rows come in the order of `batch`, environment by environment. `mask_key` (bool `[trajectories, longest]`) is True
    for steps, False for padding. Boundaries are changes of `trajectory_key` (None: `("collector", "traj_ids")` if it is
    there) and ends of episodes by `done_key` (or `truncated` beside it), so that two slices of one episode that follow
    each other in a sampled batch stay two. Raises ValueError for a batch without steps.

    >>> from tensordict import TensorDict
    >>> ids = torch.tensor([0, 0, 1])
    >>> batch = TensorDict({"collector": {"traj_ids": ids}, "x": torch.tensor([5, 6, 7])}, batch_size=[3])
    >>> split_trajectories(batch)["x"].tolist()
    [[5, 6], [7, 0]]
    """
    if batch.ndim == 0 or batch.numel() == 0:
        raise ValueError(f"split_trajectories needs a batch [*, time] with steps, got shape {tuple(batch.shape)}")
    rows = batch.reshape(-1, batch.shape[-1])
    is_start = _starts(rows, trajectory_key, done_key).reshape(-1)
    starts = is_start.nonzero().squeeze(1)
    lengths = torch.diff(starts, append=starts.new_tensor([is_start.numel()]))
    trajectory = is_start.cumsum(0) - 1
    position = torch.arange(is_start.numel(), device=starts.device) - starts[trajectory]
    shape = (starts.numel(), int(lengths.max()))

    def pad(leaf: Tensor) -> Tensor:
        signed = leaf.view(SIGNED.get(leaf.dtype, leaf.dtype))
        padded = signed.new_zeros(*shape, *leaf.shape[1:])
        padded[trajectory, position] = signed
        return padded.view(leaf.dtype)

    split = rows.reshape(-1).apply(pad, batch_size=shape)
    mask = torch.arange(shape[1], device=starts.device) < lengths.unsqueeze(1)
    return split.set(mask_key, mask)


def _starts(rows: TensorDictBase, trajectory_key: Key | None, done_key: Key) -> Tensor:
    ids: Any = rows.get(("collector", "traj_ids") if trajectory_key is None else trajectory_key, None)
    if ids is None and trajectory_key is not None:
        raise KeyError(f"there is no trajectory key {trajectory_key!r}; there are {list(rows.keys(True, True))}")
    done = rows.get(done_key, None)
    if ids is None and done is None:
        raise KeyError(f"there are no trajectory ids and no {done_key!r}; there are {list(rows.keys(True, True))}")
    if ids is not None:
        changes = ids[:, 1:] != ids[:, :-1]
    else:
        changes = torch.zeros(rows.shape[0], rows.shape[1] - 1, dtype=torch.bool, device=rows.device)
    # Slices of one episode have one id: their done and truncated flags say where each ends.
    for flags in (done, rows.get((*_path(done_key)[:-1], "truncated"), None)):
        if flags is not None:
            changes = changes | flags.reshape(*rows.shape, -1).any(-1)[:, :-1]
    return torch.cat([torch.ones_like(changes[:, :1]) if changes.shape[1] else _one_each(rows), changes], 1)


def _path(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _one_each(rows: TensorDictBase) -> Tensor:
    return torch.ones(rows.shape[0], 1, dtype=torch.bool, device=rows.device)
