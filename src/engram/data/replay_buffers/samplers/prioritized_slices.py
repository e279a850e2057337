"""Sub-trajectories whose starts are drawn in proportion to priorities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engram import _native
from engram.data.replay_buffers.episodes import DONE, Key
from engram.data.replay_buffers.samplers.base import Index
from engram.data.replay_buffers.samplers.priorities import HasPriorities
from engram.data.replay_buffers.samplers.slices import TRUNCATED, SliceSampler

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage


class PrioritizedSliceSampler(HasPriorities, SliceSampler):
    """Slices of trajectories that start at a step with probability proportional to `(p + eps) ** alpha` of that step.

    A step can be a start when a whole slice from it on lies in its trajectory; with `strict_length=False` any step can,
    and a slice may be cut by the end of its trajectory. `info["priority_weight"]` has for each row the weight of its
    slice's start, P_min over the steps that can be starts. Batches and `info` are otherwise those of `SliceSampler`,
    priorities those of `PrioritizedSampler`.

    Args:
        max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer: as `PrioritizedSampler`.
        Others: as `SliceSampler`; `span` must be False, as windows that begin before their trajectory have no start.
            There is no `weight`: priorities decide.

    Raises:
        ValueError: a setting that is not allowed.

    Example:
        >>> sampler = PrioritizedSliceSampler(100, 1.0, 1.0, slice_len=3, end_key="end", truncated_key=None)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler)
        >>> end = torch.tensor([0, 0, 0, 1, 0, 0, 0, 1]).bool()
        >>> index = rb.extend(TensorDict({"step": torch.arange(8), "end": end}, [8]))
        >>> rb.update_priority(index, torch.tensor([0.0, 0, 0, 0, 0, 1, 0, 0]))
        >>> rb.sample(6)["step"].tolist()
        [5, 6, 7, 5, 6, 7]
    """

    _starts_only = True

    def __init__(
        self,
        max_capacity: int | None,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Key = DONE,
        traj_key: Key | None = None,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        cache_values: bool = False,
        truncated_key: Key | None = TRUNCATED,
        strict_length: bool = True,
        span: bool | tuple[bool, bool] = False,
        slice_key: Key | None = None,
    ) -> None:
        super().__init__(
            num_slices=num_slices, slice_len=slice_len, end_key=end_key, traj_key=traj_key, ends=ends,
            trajectories=trajectories, cache_values=cache_values, truncated_key=truncated_key,
            strict_length=strict_length, span=span, slice_key=slice_key,
        )  # fmt: skip
        if any(self.span):
            raise ValueError(f"span must be False with priorities, got {span}; strict_length=False cuts slices at ends")
        self._set_up(max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer)

    def _drawn(self, storage: Storage, rule: _native.SliceRule, seed: Tensor, n: int) -> _native.SliceBatch | None:
        if storage.lanes is None:
            return None
        return self.episodes.draw_starts(storage, self._following(storage, storage.lanes), rule, seed, n)

    def _said(self, storage: Storage, slices: _native.SliceBatch) -> tuple[Index, dict[str, Any]]:
        index, info = super()._said(storage, slices)
        wide = self.dtype is torch.float64
        info["priority_weight"] = self._priorities.start_weights(slices, self.beta, wide).to(self.dtype)
        return index, info

    def __repr__(self) -> str:
        said = f"num_slices={self.num_slices}" if self.slice_len is None else f"slice_len={self.slice_len}"
        settings = ", ".join(f"{name}={getattr(self, name)}" for name in ("alpha", "beta", "eps", "reduction"))
        return f"{type(self).__name__}({said}, strict_length={self.strict_length}, {settings})"
