"""Sampling in proportion to priorities, which learners set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engram import _native
from engram.data.replay_buffers.indexing import inward
from engram.data.replay_buffers.samplers.base import EMPTY, Index, put_rows
from engram.data.replay_buffers.samplers.priorities import HasPriorities

if TYPE_CHECKING:
    from engram.data.replay_buffers.lanes import Lanes
    from engram.data.replay_buffers.storages.base import Storage


class DrawnInfo(dict[str, Any]):
    """What is said of a batch of rows that were drawn by priority, and which rows these are; a copy is a plain dict."""

    __slots__ = ("drawn", "store")
    drawn: _native.DrawnRows
    store: _native.Store

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class PrioritizedSampler(HasPriorities):
    """Draws a step with probability proportional to `(p + eps) ** alpha` (Schaul et al., 2016), with replacement.

    `info["priority_weight"]` holds `(P_i / P_min) ** -beta`, [batch], P_min over all stored steps that can be drawn.
    New steps, and steps that were changed in place, get the highest priority seen so far, which is 1.0 at first; steps
    that are overwritten lose theirs. Priorities follow one storage: used with another one, the sampler starts anew.
    Probabilities and weights have the precision of a float32, weights of dtype float64 that of a float64.

    Args:
        max_capacity: the largest storage that it may be used with; None: any.
        alpha: how much priorities count; 0: uniform.
        beta: how much weights correct for it; 1: fully. May be assigned at any time.
        eps: added to each priority.
        dtype: of the weights.
        reduction: of priorities with more dimensions than the index: "max", "min", "mean" or "median".
        max_priority_within_buffer: new steps get the highest priority among the steps that are stored when they come.

    Raises:
        ValueError: a setting that is not allowed.

    Example:
        >>> sampler = PrioritizedSampler(10, alpha=1.0, beta=1.0)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4)
        >>> index = rb.extend(torch.arange(5))
        >>> rb.update_priority(index, torch.tensor([0.0, 0.0, 3.0, 0.0, 0.0]))
        >>> rb.sample().tolist()
        [2, 2, 2, 2]
    """

    def __init__(
        self,
        max_capacity: int | None,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
    ) -> None:
        super().__init__()
        self._set_up(max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer)

    # ---- sampling ----
    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        lanes = storage.lanes
        with self.lock:
            drawn = None if lanes is None else self._draw(self._following(storage, lanes), storage, lanes, batch_size)
        if drawn is None or lanes is None:
            raise RuntimeError(f"{EMPTY} Add or extend it first.")
        slots, weights, rows = drawn
        info = DrawnInfo()
        info["priority_weight"] = weights
        info.drawn, info.store = rows, lanes.store
        return (storage.outward(slots) if storage.ndim > 1 else slots), info

    def _draw(
        self, priorities: _native.Priorities, storage: Storage, lanes: Lanes, n: int
    ) -> tuple[Tensor, Tensor, _native.DrawnRows] | None:
        seed, wide = self.draw_seed(storage), self.dtype is torch.float64
        drawn = priorities.draw(lanes.store, seed, n, self._beta, wide)
        if drawn is None:
            drawn = lanes.look_again(lambda: priorities.draw(lanes.store, seed, n, self._beta, wide))
            if drawn is None:
                return None
        slots, weights, rows = drawn
        return slots, weights if weights.dtype is self.dtype else weights.to(self.dtype), rows

    # ---- after the read: a row that came in the place of the one that was drawn would have that one's weight ----
    def replaced(self, storage: Storage, slots: Tensor, info: dict[str, Any]) -> list[int] | None:
        if type(info) is not DrawnInfo:
            return None  # a sampler of the user's own says something else of its rows
        stale: Any = info.drawn.stale(info.store, slots)
        return stale  # type: ignore[no-any-return]

    def redraw(self, storage: Storage, slots: Tensor, info: dict[str, Any], places: list[int]) -> Tensor:
        if type(info) is not DrawnInfo:
            return super().redraw(storage, slots, info, places)
        index, fresh = self.sample(storage, len(places))
        assert type(fresh) is DrawnInfo
        slots, at = slots.clone(), torch.tensor(places)
        slots[at] = inward(index, storage.inner, storage.max_size or 0)
        put_rows(info, fresh, at, len(slots))
        info.drawn.replace(places, fresh.drawn)
        return slots

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={getattr(self, name)}" for name in ("alpha", "beta", "eps", "reduction"))
        return f"{type(self).__name__}({settings})"
