"""`NextStateReconstructor`: the observations after each step, from the steps that follow in a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engram.pytree import (
    Key,
    as_key,
    as_keys,
    collate_items,
    get_tensor,
    has_batch_size,
    key_path,
    missing_key_error,
    require_tensor,
    set_entry,
    steps_of_padded,
    unstack,
)
from engram.transforms.base import Transform
from engram.transforms.env_specs import EnvSpecs
from engram.transforms.trajectory import sibling_key, view_of


class NextStateReconstructor(Transform, built_in=True):
    """On reading, takes `("next", key)` from `key` in the next row of the batch, which saves half the storage.

    Args:
        keys: observations.
        traj_key: the trajectory's number; a step whose next row has another one has no next state. None: not used.
        done_key: where trajectories end, the last step of a slice (`truncated` beside it) included. None: not used.
        step_count_key: the step's number within its trajectory; the next row must have the following one. None: not
            used.
        fill_value: the next state of a step whose next row is not the step after it, one number for all keys.
        strict: a missing `traj_key`, `done_key` or `step_count_key` is an error; False: it is ignored.

    Batches are rows in the order of time, as `rb[:]` and samplers of slices return them: `[rows]`, or `[*, time]`;
    padding (`("collector", "mask")`) is no next row. The batch dimensions of a plain dict are those of its flags
    without a last dimension of 1.

    Raises:
        KeyError: an entry is missing; the message names it.
        TypeError: `fill_value` is NaN and an entry has integers, which cannot be NaN.

    Example:
        >>> done = torch.tensor([[False], [True], [False]])
        >>> batch = {"observation": torch.tensor([[1.0], [2.0], [3.0]]), "next": {"done": done}}
        >>> NextStateReconstructor(traj_key=None)(batch)["next"]["observation"].flatten()
        tensor([2., nan, nan])
    """

    def __init__(
        self,
        keys: Sequence[Key] = ("observation",),
        *,
        traj_key: Key | None = ("collector", "traj_ids"),
        done_key: Key | None = ("next", "done"),
        step_count_key: Key | None = None,
        fill_value: float = math.nan,
        strict: bool = True,
    ) -> None:
        super().__init__()
        self.keys = as_keys(list(keys) if isinstance(keys, tuple) else keys)
        if not self.keys:
            raise ValueError("NextStateReconstructor needs keys")
        self.traj_key = None if traj_key is None else as_key(traj_key)
        self.done_key = None if done_key is None else as_key(done_key)
        self.step_count_key = None if step_count_key is None else as_key(step_count_key)
        self.fill_value, self.strict = fill_value, strict

    @property
    def needs_order(self) -> bool:
        return self.step_count_key is None

    def for_env(self, specs: EnvSpecs) -> Any:
        raise TypeError(
            "NextStateReconstructor is for batches without next observations, which an environment has at each step: "
            "append it to the replay buffer"
        )

    def forward(self, batch: Any) -> Any:
        if type(batch) is list:
            return unstack(self.forward(collate_items(batch)), 0) if batch else batch
        values = [require_tensor(batch, key, "NextStateReconstructor") for key in self.keys]
        for key, value in zip(self.keys, values, strict=True):
            if not value.is_floating_point() and not math.isfinite(self.fill_value):
                raise TypeError(f"{key!r} is {value.dtype}, which has no {self.fill_value}: give a whole fill_value")
        shape = self._batch_shape(batch, values[0])
        time, goes_on = len(shape) - 1, self._goes_on(batch, shape)
        for key, value in zip(self.keys, values, strict=True):
            mask = goes_on.reshape(*shape, *[1] * (value.ndim - len(shape))).to(value.device)
            fill = torch.full((), self.fill_value, dtype=value.dtype, device=value.device)
            following = value.roll(-1, time) if shape else value
            set_entry(batch, ("next", *key_path(key)), torch.where(mask, following, fill))
        return batch

    def _batch_shape(self, batch: Any, value: Tensor) -> torch.Size:
        """The batch dimensions; of a dict those of its flags, or the first one of an entry."""
        flag = None if has_batch_size(batch) or self.done_key is None else get_tensor(batch, self.done_key)
        if has_batch_size(batch) or flag is not None:
            return torch.Size(view_of(batch, flag, None).shape)
        return value.shape[:1]

    def _goes_on(self, batch: Any, shape: torch.Size) -> Tensor:
        """Whether the next row is the next step of the trajectory; bool `[*batch]`."""
        done, ids, counts = (
            self._rows(batch, key, shape) for key in (self.done_key, self.traj_key, self.step_count_key)
        )
        goes_on = torch.ones(shape, dtype=torch.bool, device="cpu")
        if not shape:
            return goes_on.fill_(False)
        goes_on[..., -1:] = False
        if self.done_key is not None and done is not None:
            truncated = get_tensor(batch, sibling_key(self.done_key, "truncated"))  # set where slices end
            for flag in (done, *([] if truncated is None else [truncated.reshape(done.shape)])):
                goes_on &= ~flag.to("cpu", torch.bool).any(-1)
        if ids is not None:
            goes_on[..., :-1] &= (ids[..., 1:, :] == ids[..., :-1, :]).all(-1).cpu()
        is_step = steps_of_padded(batch, shape)
        if is_step is not None:
            goes_on[..., :-1] &= (is_step[..., 1:] & is_step[..., :-1]).cpu()
        if counts is not None:
            goes_on[..., :-1] &= (counts[..., 1:, :] == counts[..., :-1, :] + 1).all(-1).cpu()
        return goes_on

    def _rows(self, batch: Any, key: Key | None, shape: torch.Size) -> Tensor | None:
        """An entry as `[*batch, numbers of a step]`; None if it is not used."""
        value = None if key is None else get_tensor(batch, key)
        if key is not None and value is None and self.strict:
            raise missing_key_error(batch, [key], "NextStateReconstructor (strict=True)")
        return None if value is None else value.reshape(*shape, -1 if value.numel() else 1)

    def _settings(self) -> dict[str, Any]:
        return {"keys": self.keys, "fill_value": self.fill_value}
