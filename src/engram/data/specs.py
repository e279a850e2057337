"""Specs: the shape, dtype, device and domain of a tensor, and what can be drawn from it.

A spec is a value: nothing changes it after it exists (`Composite` may be given more entries). `shape` is the whole
shape of a tensor, with batch dimensions first. All draws come from torch's global generator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.nn.functional import one_hot

__all__ = [
    "Binary",
    "Bounded",
    "Categorical",
    "Composite",
    "MultiCategorical",
    "MultiOneHot",
    "OneHot",
    "Spec",
    "Unbounded",
]

Self = TypeVar("Self", bound="Spec")
Device = torch.device | str | int | None


def _device(device: Device) -> torch.device | None:
    return None if device is None else torch.device(device)


def _one_hot_shape(shape: Sequence[int] | None, width: int, name: str) -> torch.Size:
    shape = torch.Size((width,) if shape is None else shape)
    if not shape or shape[-1] != width:
        raise ValueError(f"{name} of width {width} got shape {tuple(shape)}; its last dimension must be {width}")
    return shape


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


class _Leaf(Spec):
    """One tensor. Children say what their domain is: `_draw`, `_inside`, `_nearest`."""

    def __init__(self, shape: Sequence[int], device: Device, dtype: torch.dtype) -> None:
        self.shape = torch.Size(shape)
        self.device = _device(device)
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
        assert isinstance(self, _Leaf)
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
        assert isinstance(self, _Leaf)
        new = torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        if len(new) < self.ndim or new[len(new) - self.ndim :] != self.shape:
            raise ValueError(
                f"cannot expand {tuple(self.shape)} to {tuple(new)}: the new shape must end in the old one"
            )
        return self._rebuilt(shape=new)

    def to(self: Self, dest: torch.device | torch.dtype | str) -> Self:
        assert isinstance(self, _Leaf)
        return self._rebuilt(dtype=dest) if isinstance(dest, torch.dtype) else self._rebuilt(device=dest)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, _Leaf)
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


class Unbounded(_Leaf):
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


class Bounded(_Leaf):
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


class Categorical(_Leaf):
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
        return (value >= 0) & (value < self.n)

    def _nearest(self, value: Tensor) -> Tensor:
        return value.clamp(0, self.n - 1)


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


class MultiCategorical(_Leaf):
    """Vectors of integers, the i-th in `[0, nvec[i])`: shape `[..., len(nvec)]`.

    >>> MultiCategorical([2, 3]).project(torch.tensor([5, 1]))
    tensor([1, 1])
    """

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
        return (value >= 0) & (value < torch.tensor(self.nvec, device=value.device))

    def _nearest(self, value: Tensor) -> Tensor:
        return value.clamp(min=0).minimum(torch.tensor(self.nvec, device=value.device, dtype=value.dtype) - 1)


class MultiOneHot(_Leaf):
    """One-hot vectors of the lengths `nvec`, one after the other: shape `[..., sum(nvec)]`.

    >>> MultiOneHot([2, 3]).rand().sum()
    tensor(2)
    """

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

    def encode(self, choice: Tensor) -> Tensor:
        """One-hot vectors `[..., sum(nvec)]` of the spec's dtype from integers `[..., len(nvec)]`."""
        parts = [one_hot(column, n) for column, n in zip(choice.long().unbind(-1), self.nvec, strict=True)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).to(self.dtype)

    def decode(self, value: Tensor) -> Tensor:
        """Integers `[..., len(nvec)]`, int64, from one-hot vectors; of other vectors the largest entry wins."""
        numbers = value.byte() if value.dtype is torch.bool else value
        return torch.stack([part.argmax(-1) for part in torch.split(numbers, list(self.nvec), -1)], -1)


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

    def encode(self, choice: Tensor) -> Tensor:
        """One-hot vectors `[..., n]` of the spec's dtype from integers `[..., 1]`; others are torch's RuntimeError."""
        blank = torch.zeros((*choice.shape[:-1], self.n), dtype=self.dtype, device=choice.device)
        return blank.scatter_(-1, choice.long(), 1)


class Composite(Spec):
    """Named specs, nested as a TensorDict is; `shape` is the batch shape that every entry's shape starts with.

    >>> spec = Composite(observation=Unbounded((4,)), inner=Composite(flag=Binary(1)))
    >>> sorted(spec.rand((2,)).keys(include_nested=True, leaves_only=True), key=str)
    [('inner', 'flag'), 'observation']
    """

    dtype = None

    def __init__(
        self,
        entries: Mapping[str, Spec] | None = None,
        *,
        shape: Sequence[int] = (),
        device: Device = None,
        **more: Spec,
    ) -> None:
        self.shape = torch.Size(shape)
        self.device = _device(device)
        self._entries: dict[str, Spec] = {}
        for key, spec in {**(entries or {}), **more}.items():
            self[key] = spec

    def __setitem__(self, key: str | tuple[str, ...], spec: Spec) -> None:
        name, *rest = (key,) if isinstance(key, str) else key
        if rest:
            self._entries.setdefault(name, Composite(shape=self.shape, device=self.device))
            self._entries[name][tuple(rest)] = spec  # type: ignore[index]
            return
        if spec.shape[: self.ndim] != self.shape:
            raise ValueError(
                f"{name!r} has shape {tuple(spec.shape)}, which does not start with the batch shape "
                f"{tuple(self.shape)}; expand it first"
            )
        self._entries[name] = spec if self.device in (None, spec.device) else spec.to(self.device)

    def __getitem__(self, key: str | tuple[str, ...]) -> Any:
        name, *rest = (key,) if isinstance(key, str) else key
        return self._entries[name][tuple(rest)] if rest else self._entries[name]  # type: ignore[index]

    def __contains__(self, key: str | tuple[str, ...]) -> bool:
        return key in self.keys() or key in self.leaves()

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def keys(self) -> list[str]:
        """Names of the direct entries."""
        return list(self._entries)

    def items(self) -> list[tuple[str, Spec]]:
        """Direct entries."""
        return list(self._entries.items())

    def leaves(self) -> dict[str | tuple[str, ...], Spec]:
        """Every spec that is not a Composite, under a string at the root and under a tuple below it."""
        found: dict[str | tuple[str, ...], Spec] = {}
        for name, spec in self._entries.items():
            inner = spec.leaves() if isinstance(spec, Composite) else {(): spec}
            for path, leaf in inner.items():
                whole = (name, *((path,) if isinstance(path, str) else path))
                found[whole if len(whole) > 1 else name] = leaf
        return found

    def rand(self, shape: Sequence[int] = ()) -> TensorDictBase:
        return self._dict({key: spec.rand(shape) for key, spec in self._entries.items()}, shape)

    def zero(self, shape: Sequence[int] = ()) -> TensorDictBase:
        return self._dict({key: spec.zero(shape) for key, spec in self._entries.items()}, shape)

    def _dict(self, entries: dict[str, Any], shape: Sequence[int]) -> TensorDictBase:
        return TensorDict(entries, batch_size=(*shape, *self.shape), device=self.device)

    def is_in(self, value: Any) -> bool:
        if not isinstance(value, TensorDictBase):
            return False
        return all(spec.is_in(value.get(key, None)) for key, spec in self._entries.items())

    def project(self, value: TensorDictBase) -> TensorDictBase:
        return value.copy().update({key: spec.project(value.get(key)) for key, spec in self._entries.items()})

    def expand(self: Self, *shape: Any) -> Self:
        assert isinstance(self, Composite)
        new = torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        entries = {k: spec.expand((*new, *spec.shape[self.ndim :])) for k, spec in self._entries.items()}
        return type(self)(entries, shape=new, device=self.device)

    def to(self: Self, dest: torch.device | torch.dtype | str) -> Self:
        assert isinstance(self, Composite)
        device = self.device if isinstance(dest, torch.dtype) else dest
        entries = {key: spec.to(dest) for key, spec in self._entries.items()}
        return type(self)(entries, shape=self.shape, device=device)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Composite):
            return NotImplemented
        return (self.shape, self.device, self._entries) == (other.shape, other.device, other._entries)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        inner = "".join(f"\n    {key}: {spec!r}".replace("\n", "\n    ") for key, spec in self._entries.items())
        return f"Composite(shape={tuple(self.shape)}, device={self.device},{inner})"
