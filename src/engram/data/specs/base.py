"""What every spec can do, and what all specs of one tensor share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Self = TypeVar("Self", bound="Spec")
Device = torch.device | str | int | None


def as_device(device: Device) -> torch.device | None:
    """`device` as torch has it; None stays None."""
    return None if device is None else torch.device(device)


class Spec(ABC):
    """What a tensor may be: `shape`, `dtype`, `device` (None: torch's default) and a domain."""

    shape: torch.Size
    dtype: torch.dtype | None
    device: torch.device | None

    @property
    def ndim(self) -> int:
        """Number of dimensions, batch dimensions included."""
        return len(self.shape)

    @abstractmethod
    def rand(self, shape: Sequence[int] = ()) -> Any:
        """A draw of shape `[*shape, *self.shape]`."""

    @abstractmethod
    def zero(self, shape: Sequence[int] = ()) -> Any:
        """Zeros of shape `[*shape, *self.shape]`; they need not lie in the domain."""

    @abstractmethod
    def is_in(self, value: Any) -> bool:
        """Whether `value` has this shape (more leading dimensions are fine), this dtype, and lies in the domain."""

    @abstractmethod
    def project(self, value: Any) -> Any:
        """`value` where it lies in the domain, else the nearest that does; dtype as the spec's."""

    @abstractmethod
    def expand(self: Self, *shape: Any) -> Self:
        """The same spec with more batch dimensions: `shape` is the whole new shape and ends in the present one."""

    @abstractmethod
    def to(self: Self, dest: torch.device | torch.dtype | str) -> Self:
        """The same spec on another device, or with another dtype."""


class TensorSpec(Spec):
    """A spec of one tensor. Children say what their domain is: `_draw`, `_inside`, `_nearest`."""

    def __init__(self, shape: Sequence[int], device: Device, dtype: torch.dtype) -> None:
        self.shape = torch.Size(shape)
        self.device = as_device(device)
        self.dtype: torch.dtype = dtype

    def _draw(self, shape: torch.Size) -> Tensor:
        raise NotImplementedError

    def _inside(self, value: Tensor) -> Tensor | bool:
        raise NotImplementedError

    def _nearest(self, value: Tensor) -> Tensor:
        raise NotImplementedError

    def _domain(self) -> dict[str, Any]:
        """Constructor arguments besides shape, device and dtype."""
        return {}

    def _rebuilt(self: Self, **changes: Any) -> Self:
        assert isinstance(self, TensorSpec)
        arguments = {"shape": self.shape, "device": self.device, "dtype": self.dtype, **self._domain(), **changes}
        return type(self)(**arguments)

    def rand(self, shape: Sequence[int] = ()) -> Tensor:
        return self._draw(torch.Size((*shape, *self.shape))).to(self.dtype)

    def zero(self, shape: Sequence[int] = ()) -> Tensor:
        return torch.zeros((*shape, *self.shape), dtype=self.dtype, device=self.device)

    def is_in(self, value: Any) -> bool:
        fits = isinstance(value, Tensor) and value.dtype == self.dtype and self.has_shape(value)
        return fits and bool(torch.as_tensor(self._inside(value)).all())

    def has_shape(self, value: Tensor) -> bool:
        """Whether the last dimensions of `value` are this spec's shape."""
        return value.ndim >= self.ndim and value.shape[value.ndim - self.ndim :] == self.shape

    def project(self, value: Tensor) -> Tensor:
        if not self.has_shape(value):
            raise ValueError(f"cannot project a tensor of shape {tuple(value.shape)} on {self}: the shapes differ")
        return value.to(self.dtype) if self.is_in(value.to(self.dtype)) else self._nearest(value).to(self.dtype)

    def expand(self: Self, *shape: Any) -> Self:
        assert isinstance(self, TensorSpec)
        new = torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        if len(new) < self.ndim or new[len(new) - self.ndim :] != self.shape:
            raise ValueError(
                f"cannot expand {tuple(self.shape)} to {tuple(new)}: the new shape must end in the old one"
            )
        return self._rebuilt(shape=new)

    def to(self: Self, dest: torch.device | torch.dtype | str) -> Self:
        assert isinstance(self, TensorSpec)
        return self._rebuilt(dtype=dest) if isinstance(dest, torch.dtype) else self._rebuilt(device=dest)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, TensorSpec)
        same = (self.shape, self.dtype, self.device) == (other.shape, other.dtype, other.device)
        mine, theirs = self._domain(), other._domain()
        return same and all(bool(torch.equal(torch.as_tensor(mine[k]), torch.as_tensor(theirs[k]))) for k in mine)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        domain = "".join(f"{key}={_short(value)}, " for key, value in self._domain().items())
        return f"{type(self).__name__}({domain}shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _short(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    first = value.reshape(-1)[:1]
    return str(first.item()) if bool((value == first).all()) else f"[{value.min().item()} .. {value.max().item()}]"
