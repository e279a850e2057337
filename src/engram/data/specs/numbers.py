"""Specs of plain numbers: unbounded, or between bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.data.specs.base import Device, Self, TensorSpec
from engram.data.specs.integers import HIGHEST, LOWEST, limits, ordered, restored


class Unbounded(TensorSpec):
    """Any value of the dtype; draws are normal for floats, uniform over the dtype for integers and booleans.

    >>> Unbounded(shape=(3,)).rand((2,)).shape
    torch.Size([2, 3])
    """

    def __init__(self, shape: Sequence[int] = (1,), device: Device = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(shape, device, dtype)

    def _draw(self, shape: torch.Size) -> Tensor:
        if self.dtype.is_floating_point:
            return torch.randn(shape, dtype=self.dtype, device=self.device)
        low, high = limits(self.dtype)
        return restored(torch.randint(low, min(high + 1, HIGHEST), shape, device=self.device), self.dtype)

    def _inside(self, value: Tensor) -> bool:
        return True

    def _nearest(self, value: Tensor) -> Tensor:
        if self.dtype.is_floating_point:
            return value
        return restored(ordered(value, self.dtype).clamp(*limits(self.dtype)), self.dtype)


class Bounded(TensorSpec):
    """Values in `[low, high]`, both ends included; one or both may be infinite.

    `low` and `high` are numbers or tensors that broadcast to `shape` (None: their own shape). Draws are uniform between
    finite bounds, exponential from a single one, normal where there is none. Raises ValueError where low > high.

    >>> spec = Bounded(low=-1, high=1, shape=(2,))
    >>> spec.is_in(spec.rand()), spec.project(torch.tensor([-3.0, 0.5]))
    (True, tensor([-1.0000,  0.5000]))
    """

    def __init__(
        self,
        low: float | Tensor,
        high: float | Tensor,
        shape: Sequence[int] | None = None,
        device: Device = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        lowest = torch.as_tensor(low, dtype=dtype, device=device)
        highest = torch.as_tensor(high, dtype=dtype, device=device)
        common = np.broadcast_shapes(lowest.shape, highest.shape) if shape is None else shape
        super().__init__(common, device, dtype)
        self.low, self.high = lowest.expand(self.shape), highest.expand(self.shape)
        # For comparisons: as they are, or as integers that torch can compare.
        self._ends = (self._comparable(self.low), self._comparable(self.high))
        if not bool((self._ends[0] <= self._ends[1]).all()):
            raise ValueError(f"low must be at most high everywhere, got low={low} and high={high}")

    def _comparable(self, value: Tensor) -> Tensor:
        return value if self.dtype.is_floating_point else ordered(value, self.dtype)

    def _domain(self) -> dict[str, Any]:
        return {"low": self.low, "high": self.high}

    def _draw(self, shape: torch.Size) -> Tensor:
        low, high = (end.double() for end in self._ends)
        uniform = torch.rand(shape, dtype=torch.float64, device=self.device)
        if not self.dtype.is_floating_point:
            number = (low + uniform * (high - low + 1)).floor().clamp(LOWEST, 2.0**63 - 1024).long()
            return restored(self._clamped(number), self.dtype)
        if bool(torch.isfinite(low).all() and torch.isfinite(high).all()):
            return self._clamped((low * (1 - uniform) + high * uniform).to(self.dtype))
        return self._clamped(self._draw_with_infinite_ends(low, high, uniform).to(self.dtype))

    def _draw_with_infinite_ends(self, low: Tensor, high: Tensor, uniform: Tensor) -> Tensor:
        below, above = torch.isfinite(low), torch.isfinite(high)
        step = torch.empty_like(uniform).exponential_()
        between = torch.where(below, low, 0.0) * (1 - uniform) + torch.where(above, high, 0.0) * uniform
        one_sided = torch.where(below, low + step, torch.where(above, high - step, torch.randn_like(uniform)))
        return torch.where(below & above, between, one_sided)

    def _clamped(self, value: Tensor) -> Tensor:
        return torch.maximum(torch.minimum(value, self._ends[1]), self._ends[0])

    def _inside(self, value: Tensor) -> Tensor:
        found = self._comparable(value)
        return torch.logical_and(found >= self._ends[0], found <= self._ends[1])

    def _nearest(self, value: Tensor) -> Tensor:
        if not self.dtype.is_floating_point:
            return restored(self._clamped(ordered(value, self.dtype)), self.dtype)
        number = value.to(self.dtype) if value.dtype.is_floating_point else ordered(value, torch.int64).to(self.dtype)
        return self._clamped(torch.where(number.isnan(), torch.zeros_like(number), number))

    def _rebuilt(self: Self, **changes: Any) -> Self:
        assert isinstance(self, Bounded)
        shape = changes.get("shape", self.shape)
        if "low" in changes:
            return super()._rebuilt(**changes)
        return super()._rebuilt(**{"low": self.low.expand(shape), "high": self.high.expand(shape), **changes})

    def with_batch(self: Self, ndim: int, change: Callable[[Tensor], Tensor]) -> Self:
        assert isinstance(self, Bounded)
        batch = self.shape[:ndim]
        positions = change(torch.arange(batch.numel(), device=self.device).reshape(batch))
        ends = [end.reshape(batch.numel(), *self.shape[ndim:])[positions] for end in (self.low, self.high)]
        return self._rebuilt(shape=ends[0].shape, low=ends[0], high=ends[1])
