"""Specs of plain numbers: unbounded, or between bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engram.data.specs.base import Device, Self, TensorSpec


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
        info = None if self.dtype is torch.bool else torch.iinfo(self.dtype)
        low, high = (0, 1) if info is None else (info.min, min(info.max, 2**63 - 2))
        return torch.randint(low, high + 1, shape, device=self.device)

    def _inside(self, value: Tensor) -> bool:
        return True

    def _nearest(self, value: Tensor) -> Tensor:
        return value


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
        common = (lowest + highest).shape if shape is None else shape
        super().__init__(common, device, dtype)
        self.low, self.high = lowest.expand(self.shape), highest.expand(self.shape)
        if bool((self.low > self.high).any()):
            raise ValueError(f"low must be at most high everywhere, got low={low} and high={high}")

    def _domain(self) -> dict[str, Any]:
        return {"low": self.low, "high": self.high}

    def _draw(self, shape: torch.Size) -> Tensor:
        low, high = self.low.double(), self.high.double()
        uniform = torch.rand(shape, dtype=torch.float64, device=self.device)
        if not self.dtype.is_floating_point:
            return torch.minimum((low + uniform * (high - low + 1)).floor(), high).to(self.dtype)
        if bool(torch.isfinite(low).all() and torch.isfinite(high).all()):
            return self._clamped(low * (1 - uniform) + high * uniform)
        return self._clamped(self._draw_with_infinite_ends(low, high, uniform))

    def _draw_with_infinite_ends(self, low: Tensor, high: Tensor, uniform: Tensor) -> Tensor:
        below, above = torch.isfinite(low), torch.isfinite(high)
        step = torch.empty_like(uniform).exponential_()
        between = torch.where(below, low, 0.0) * (1 - uniform) + torch.where(above, high, 0.0) * uniform
        one_sided = torch.where(below, low + step, torch.where(above, high - step, torch.randn_like(uniform)))
        return torch.where(below & above, between, one_sided)

    def _clamped(self, value: Tensor) -> Tensor:
        return torch.maximum(torch.minimum(value.to(self.dtype), self.high), self.low)

    def _inside(self, value: Tensor) -> Tensor:
        return torch.logical_and(value >= self.low, value <= self.high)

    def _nearest(self, value: Tensor) -> Tensor:
        common = torch.promote_types(value.dtype, self.dtype)  # a float just above an integer's range must not wrap
        return torch.maximum(torch.minimum(value.to(common), self.high.to(common)), self.low.to(common))

    def _rebuilt(self: Self, **changes: Any) -> Self:
        assert isinstance(self, Bounded)
        shape = changes.get("shape", self.shape)
        bounds = {"low": self.low.expand(shape), "high": self.high.expand(shape)}
        return super()._rebuilt(**{**bounds, **changes})
