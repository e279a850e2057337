"""Specs of choices: integers, zeros and ones, and one-hot vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from engram.data.specs.base import Device, TensorSpec
from engram.data.specs.integers import ordered


def _one_hot_shape(shape: Sequence[int] | None, width: int, name: str) -> torch.Size:
    shape = torch.Size((width,) if shape is None else shape)
    if not shape or shape[-1] != width:
        raise ValueError(f"{name} of width {width} got shape {tuple(shape)}; its last dimension must be {width}")
    return shape


class Categorical(TensorSpec):
    """Integers in `[0, n)`.

    >>> Categorical(4).is_in(torch.tensor(3)), Categorical(4).is_in(torch.tensor(4))
    (True, False)
    """

    def __init__(
        self, n: int, shape: Sequence[int] = (), device: Device = None, dtype: torch.dtype = torch.int64
    ) -> None:
        if n < 1:
            raise ValueError(f"n must be 1 or more, got {n}")
        super().__init__(shape, device, dtype)
        self.n = n

    def _domain(self) -> dict[str, Any]:
        return {"n": self.n}

    def _draw(self, shape: torch.Size) -> Tensor:
        return torch.randint(self.n, shape, device=self.device)

    def _inside(self, value: Tensor) -> Tensor:
        return _is_below(value, torch.tensor(self.n, device=value.device))

    def _nearest(self, value: Tensor) -> Tensor:
        return ordered(value, torch.int64).clamp(0, self.n - 1)

    def to_one_hot_spec(self) -> OneHot:
        """The one-hot vectors (bool) of the same choices: shape `[*self.shape, n]`."""
        return OneHot(self.n, (*self.shape, self.n), self.device)


class Binary(Categorical):
    """Vectors of `n` zeros and ones: shape `[..., n]`.

    >>> Binary(3).rand().shape
    torch.Size([3])
    """

    def __init__(
        self,
        n: int | None = None,
        shape: Sequence[int] | None = None,
        device: Device = None,
        dtype: torch.dtype = torch.int8,
    ) -> None:
        if n is None and shape is None:
            raise ValueError("Binary needs n or shape")
        whole = torch.Size(shape or ()) if n is None else _one_hot_shape(shape, n, "Binary")
        super().__init__(2, whole, device, dtype)

    def _domain(self) -> dict[str, Any]:
        return {}


class MultiCategorical(TensorSpec):
    """Vectors of integers, the i-th in `[0, nvec[i])`: shape `[..., len(nvec)]`.

    >>> MultiCategorical([2, 3]).project(torch.tensor([5, 1]))
    tensor([1, 1])
    """

    domain_ndim = 1

    def __init__(
        self,
        nvec: Sequence[int],
        shape: Sequence[int] | None = None,
        device: Device = None,
        dtype: torch.dtype = torch.int64,
    ) -> None:
        self.nvec = tuple(int(n) for n in nvec)
        if not self.nvec or min(self.nvec) < 1:
            raise ValueError(f"nvec must hold one or more numbers of 1 or more, got {self.nvec}")
        super().__init__(_one_hot_shape(shape, len(self.nvec), type(self).__name__), device, dtype)

    def _domain(self) -> dict[str, Any]:
        return {"nvec": self.nvec}

    def _draw(self, shape: torch.Size) -> Tensor:
        return torch.stack([torch.randint(n, shape[:-1], device=self.device) for n in self.nvec], -1)

    def _inside(self, value: Tensor) -> Tensor:
        return _is_below(value, torch.tensor(self.nvec, device=value.device))

    def _nearest(self, value: Tensor) -> Tensor:
        return ordered(value, torch.int64).clamp(min=0).minimum(torch.tensor(self.nvec, device=value.device) - 1)

    def to_one_hot_spec(self) -> MultiOneHot:
        """The one-hot vectors (bool) of the same choices: shape `[..., sum(nvec)]`."""
        return MultiOneHot(self.nvec, (*self.shape[:-1], sum(self.nvec)), self.device)


class MultiOneHot(TensorSpec):
    """One-hot vectors of the lengths `nvec`, one after the other: shape `[..., sum(nvec)]`.

    >>> MultiOneHot([2, 3]).rand().sum()
    tensor(2)
    """

    domain_ndim = 1

    def __init__(
        self,
        nvec: Sequence[int],
        shape: Sequence[int] | None = None,
        device: Device = None,
        dtype: torch.dtype = torch.bool,
    ) -> None:
        self.nvec = tuple(int(n) for n in nvec)
        if not self.nvec or min(self.nvec) < 1:
            raise ValueError(f"nvec must hold one or more numbers of 1 or more, got {self.nvec}")
        super().__init__(_one_hot_shape(shape, sum(self.nvec), type(self).__name__), device, dtype)

    def _domain(self) -> dict[str, Any]:
        return {"nvec": self.nvec}

    def _draw(self, shape: torch.Size) -> Tensor:
        return self.encode(torch.stack([torch.randint(n, shape[:-1], device=self.device) for n in self.nvec], -1))

    def _inside(self, value: Tensor) -> Tensor:
        in_part = [
            ((p == 0) | (p == 1)).all(-1) & (p != 0).sum(-1).eq(1) for p in torch.split(value, list(self.nvec), -1)
        ]
        return torch.stack(in_part, -1).all(-1)

    def _nearest(self, value: Tensor) -> Tensor:
        return self.encode(self.decode(value))

    def encode(self, value: Any) -> Tensor:
        """One-hot vectors `[..., sum(nvec)]` of the spec's dtype from integers `[..., len(nvec)]`.

        Integers without a one-hot vector are torch's RuntimeError.
        """
        choice = torch.as_tensor(value, device=self.device)
        parts = [one_hot(column, n) for column, n in zip(choice.long().unbind(-1), self.nvec, strict=True)]
        return torch.cat(parts, -1).to(self.dtype)

    def decode(self, value: Tensor) -> Tensor:
        """Integers `[..., len(nvec)]`, int64, from one-hot vectors; of other vectors the largest entry wins."""
        numbers = value if value.dtype.is_floating_point else ordered(value, torch.int64)
        return torch.stack([part.argmax(-1) for part in torch.split(numbers, list(self.nvec), -1)], -1)

    def to_numpy(self, value: Tensor) -> Any:
        self.assert_is_in(value)
        return self.decode(value.detach()).cpu().numpy()

    def to_categorical_spec(self) -> MultiCategorical | Categorical:
        """The integers of the same choices: shape `[..., len(nvec)]`, int64."""
        return MultiCategorical(self.nvec, (*self.shape[:-1], len(self.nvec)), self.device)


class OneHot(MultiOneHot):
    """One-hot vectors of length `n`: shape `[..., n]`.

    >>> OneHot(3, dtype=torch.int64).project(torch.tensor([0.1, 0.7, 0.2]))
    tensor([0, 1, 0])
    """

    def __init__(
        self, n: int, shape: Sequence[int] | None = None, device: Device = None, dtype: torch.dtype = torch.bool
    ) -> None:
        super().__init__((n,), shape, device, dtype)
        self.n = n

    def _domain(self) -> dict[str, Any]:
        return {"n": self.n}

    def _draw(self, shape: torch.Size) -> Tensor:
        return self.encode(torch.randint(self.n, shape[:-1], device=self.device))

    def encode(self, value: Any) -> Tensor:
        """One-hot vectors `[..., n]` of the spec's dtype from integers `[...]`; others are torch's RuntimeError."""
        choice = torch.as_tensor(value, device=self.device)
        blank = torch.zeros((*choice.shape, self.n), dtype=self.dtype, device=choice.device)
        return blank.scatter_(-1, choice.long().unsqueeze(-1), 1)

    def decode(self, value: Tensor) -> Tensor:
        """Integers `[...]`, int64, from one-hot vectors; of other vectors the largest entry wins."""
        return super().decode(value).squeeze(-1)

    def to_categorical_spec(self) -> Categorical:
        """The integers of the same choices: shape `[...]`, int64."""
        return Categorical(self.n, self.shape[:-1], self.device)


def _is_below(value: Tensor, end: Tensor) -> Tensor:
    number = ordered(value, torch.int64)
    fits = (number >= 0) & (number < end)
    return fits & (number == value) if value.dtype.is_floating_point else fits
