"""Splitting collected batches into trajectories."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.pytree import MASK, SIGNED, KeyPath, as_key, is_ragged, map_leaves, steps_of_padded

Key = str | tuple[str, ...]


def split_trajectories(
    batch: TensorDictBase,
    *,
    prefix: Key | None = None,
    trajectory_key: Key | None = None,
    done_key: Key | None = None,
    mask_key: Key | None = None,
    as_nested: bool = False,
) -> TensorDictBase:
    """The trajectories of `batch` `[*, time]`, one a row, padded with zeros: `[trajectories, longest]`.

    Rows come in the order of `batch`, environment by environment. `mask_key` (bool `[trajectories, longest]`) is True
    for steps, False for padding. With `as_nested` there is neither padding nor mask: entries are nested tensors, of as
    many steps as each trajectory has, in a TensorDict of batch size `[trajectories, -1]`, or `[trajectories, length]`
    if all trajectories have the same length (TorchRL returns plain tensors then).

    Boundaries are changes of `trajectory_key` and ends of episodes by `done_key`, which is read under `"next"` (None:
    `"done"`; or `truncated` beside it), so that two slices of one episode that follow each other in a sampled batch
    stay two. Ids that are not there are made from the ends of episodes, 0, 1, 2, ....

    `prefix` is where `traj_ids` and `mask` stand: None is `"collector"` where the batch has such an entry, else the
    root. Where `trajectory_key` is given, the mask stands beside it.

    Padding in `batch` is left out, and a trajectory ends at it: rows for which a mask (bool `[*, time]`) is False that
    stands where this one goes, or where samplers and collectors have theirs, `("collector", "mask")`. So batches of
    padded slices, and batches that were split before, give their steps. Pass the `mask_key` of a `SequenceSampler`.

    Raises ValueError for a batch without steps, or a `mask_key` that the batch has with something else, KeyError where
    nothing says where trajectories end, TypeError for dtypes that torch cannot nest.

    >>> from tensordict import TensorDict
    >>> ids = torch.tensor([0, 0, 1])
    >>> batch = TensorDict({"collector": {"traj_ids": ids}, "x": torch.tensor([5, 6, 7])}, batch_size=[3])
    >>> split_trajectories(batch)["x"].tolist()
    [[5, 6], [7, 0]]
    >>> [x.tolist() for x in split_trajectories(batch, as_nested=True)["x"].unbind()]
    [[5, 6], [7]]
    """
    if batch.ndim == 0 or batch.numel() == 0:
        raise ValueError(f"split_trajectories needs a batch [*, time] with steps, got shape {tuple(batch.shape)}")
    rows = batch.reshape(-1, batch.shape[-1])
    if trajectory_key is not None:
        beside = _path(trajectory_key)[:-1]
    elif prefix is not None:
        beside = _path(prefix)
    else:
        beside = ("collector",) if isinstance(rows.get("collector", None), TensorDictBase) else ()
    ids_key = (*beside, "traj_ids") if trajectory_key is None else _path(trajectory_key)
    ids = rows.get(ids_key, None)
    is_start = _starts(rows, ids_key, ids, done_key)
    mask_path = (*beside, "mask") if mask_key is None else _path(mask_key)
    masks = _masks_of(batch, mask_path, is_given=mask_key is not None)
    at: Tensor | slice = slice(None)  # the rows that are steps
    if masks:
        is_step = torch.stack(list(masks.values())).all(0).reshape(rows.shape).to(is_start.device)
        is_start[:, 1:] |= ~is_step[:, :-1]
        at = is_step.reshape(-1).nonzero().squeeze(1)
        if not len(at):
            raise ValueError(f"split_trajectories needs a batch with steps; all {is_step.numel()} rows are padding")
    is_start = is_start.reshape(-1)[at]
    trajectory = is_start.cumsum(0) - 1
    rows = batch.reshape(-1)
    if ids is None:
        made = torch.zeros(rows.shape, dtype=trajectory.dtype, device=trajectory.device)
        made[at] = trajectory
        rows = rows.copy().set(ids_key, made)
    starts = is_start.nonzero().squeeze(1)
    lengths = torch.diff(starts, append=starts.new_tensor([is_start.numel()]))
    if as_nested and is_ragged(rows):
        raise TypeError(
            "as_nested=True: torch cannot nest entries of agents with different shapes; leave as_nested out"
        )
    if as_nested:
        return _nested(rows.exclude(*masks) if masks else rows, at, lengths.tolist())
    position = torch.arange(is_start.numel(), device=starts.device) - starts[trajectory]
    shape = (starts.numel(), int(lengths.max()))

    def pad(leaf: Tensor) -> Tensor:
        signed = leaf.view(SIGNED.get(leaf.dtype, leaf.dtype))
        padded = signed.new_zeros(*shape, *leaf.shape[1:])
        padded[trajectory, position] = signed[at]
        return padded.view(leaf.dtype)

    split = map_leaves(rows, pad, shape)
    mask = torch.arange(shape[1], device=starts.device) < lengths.unsqueeze(1)
    return split.set(mask_path, mask)


def _masks_of(batch: TensorDictBase, path: tuple[str, ...], *, is_given: bool) -> dict[KeyPath, Tensor]:
    """The masks of padding of a batch: at the path of the result's, and at that of samplers."""
    masks = {key: steps_of_padded(batch, batch.shape, key) for key in (path, MASK)}
    if is_given and masks[path] is None and batch.get(path, None) is not None:
        raise ValueError(
            f"mask_key={as_key(path)!r} is an entry of this batch, and no mask of its padding, bool "
            f"{list(batch.shape)}: give the key of its mask, or another one for the mask of the result"
        )
    return {key: mask for key, mask in masks.items() if mask is not None}


def _nested(rows: TensorDictBase, at: Tensor | slice, lengths: list[int]) -> TensorDictBase:
    def nest(key: Any, leaf: Tensor) -> Tensor:
        if leaf.dtype in SIGNED:
            raise TypeError(f"as_nested=True: torch cannot nest {key!r}, of dtype {leaf.dtype}; leave as_nested out")
        return torch.nested.as_nested_tensor(list(torch.split(leaf[at], lengths)))

    # If all parts have one length, it is the size of a nested tensor, and the batch size must equal it.
    time = lengths[0] if len(set(lengths)) == 1 else -1
    return rows.named_apply(nest, nested_keys=True, batch_size=[len(lengths), time])


def _starts(rows: TensorDictBase, ids_key: Key, ids: Any, done_key: Key | None) -> Tensor:
    end_key = ("next", *_path(done_key or "done"))
    if done_key is not None and rows.get(end_key, None) is None:
        end_key = _path(done_key)  # given as ("next", "done"), or the flag of a flat batch without "next"
    done = rows.get(end_key, None)
    if ids is None and done is None:
        raise KeyError(
            f"there are no trajectory ids {as_key(ids_key)!r} and no {as_key(end_key)!r}; "
            f"there are {list(rows.keys(True, True))}"
        )
    if ids is not None:
        changes = ids[:, 1:] != ids[:, :-1]
    else:
        changes = torch.zeros(rows.shape[0], rows.shape[1] - 1, dtype=torch.bool, device=rows.device)
    # Slices of one episode have one id: their done and truncated flags say where each ends.
    for flags in (done, rows.get((*end_key[:-1], "truncated"), None)):
        if flags is not None:
            changes = changes | flags.reshape(*rows.shape, -1).any(-1)[:, :-1]
    return torch.cat([torch.ones_like(changes[:, :1]) if changes.shape[1] else _one_each(rows), changes], 1)


def _path(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _one_each(rows: TensorDictBase) -> Tensor:
    return torch.ones(rows.shape[0], 1, dtype=torch.bool, device=rows.device)
