"""What every spec can do, and what all specs of one tensor share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Self = TypeVar("Self", bound="Spec")
Device = torch.device | str | int | None


def as_device(device: Device) -> torch.device | None:
    """`device` as torch has it; None stays None."""
    return None if device is None else torch.device(device)


def usable_device(device: Device, name: str) -> torch.device | None:
    """The device of an argument; None stays None. CUDA is not initialised, so that processes may still be forked.

    Raises:
        ValueError: this machine, or this build of torch, has no such device.
        TypeError: it is no device at all.
    """
    if device is None:
        return None
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name}={device!r} is no device; give 'cpu', 'cuda:0' or a torch.device: {error}") from None
    if wanted.type == "cuda":
        there = torch.cuda.device_count()
        if (wanted.index or 0) >= there:
            built = "" if torch.version.cuda or torch.version.hip else ", and this torch was built without CUDA"
            raise ValueError(f"{name}={device!r}: this process sees {there} CUDA devices{built}; use device='cpu'")
    elif wanted.type not in ("cpu", "meta"):
        try:
            torch.empty(0, device=wanted)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise ValueError(f"{name}={device!r} cannot be used here: {error}") from error
    return wanted


def changed(shape: Sequence[int], change: Callable[[Tensor], Tensor]) -> torch.Size:
    """The shape of what `change` makes of a tensor of `shape`."""
    return change(torch.empty(()).expand(tuple(shape))).shape


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

    @abstractmethod
    def one(self, shape: Sequence[int] = ()) -> Any:
        """Ones of shape `[*shape, *self.shape]`; they need not lie in the domain."""

    @abstractmethod
    def clone(self: Self) -> Self:
        """A spec of its own, equal to this one."""

    @abstractmethod
    def encode(self, value: Any) -> Any:
        """`value`, an array, number or list (for a Composite a mapping), as a tensor of this spec.

        Raises ValueError for what does not lie in the domain.
        """

    @abstractmethod
    def to_numpy(self, value: Any) -> Any:
        """A tensor of this spec as numpy has it: arrays, of one-hot vectors the choices, of a Composite a dict."""

    @property
    @abstractmethod
    def batch_ndim(self) -> int:
        """Number of leading dimensions that can be indexed: all, but for the last of vectors that belong together."""

    @abstractmethod
    def with_batch(self: Self, ndim: int, change: Callable[[Tensor], Tensor]) -> Self:
        """The spec whose first `ndim` dimensions are what `change` makes of a tensor of these dimensions."""

    def sample(self, shape: Sequence[int] = ()) -> Any:
        """`rand`."""
        return self.rand(shape)

    def unsqueeze(self: Self, dim: int) -> Self:
        """One more batch dimension of length 1."""
        assert isinstance(self, Spec)
        return self.with_batch(self.batch_ndim, lambda tensor: tensor.unsqueeze(dim))

    def squeeze(self: Self, dim: int) -> Self:
        """Without batch dimension `dim`, if it has length 1."""
        assert isinstance(self, Spec)
        return self.with_batch(self.batch_ndim, lambda tensor: tensor.squeeze(dim))

    def assert_is_in(self, value: Any) -> None:
        """Raises ValueError that says what was found and what is allowed, unless `is_in(value)`."""
        if not self.is_in(value):
            is_tensor = isinstance(value, Tensor)
            found = f"{value.dtype} {tuple(value.shape)}: {value}" if is_tensor else repr(value)
            raise ValueError(f"the value does not lie in the spec.\n  found:   {found}\n  allowed: {self}")


class TensorSpec(Spec):
    """A spec of one tensor. Children say what their domain is: `_draw`, `_inside`, `_nearest`.

    `spec[index]` is the spec of `tensor[index]`; the last dimension of one-hot vectors and of `MultiCategorical` is no
    batch dimension and cannot be indexed.
    """

    domain_ndim = 0  # trailing dimensions that belong together: batch dimensions are those before

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
        return value if self.is_in(value) else self._nearest(value).to(self.dtype)

    def one(self, shape: Sequence[int] = ()) -> Tensor:
        return torch.ones((*shape, *self.shape), dtype=self.dtype, device=self.device)

    def clone(self: Self) -> Self:
        assert isinstance(self, TensorSpec)
        return self._rebuilt(**{k: v.clone() for k, v in self._domain().items() if isinstance(v, Tensor)})

    def encode(self, value: Any) -> Tensor:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
        encoded = tensor.to(device=self.device, dtype=self.dtype)
        if not (self.is_in(encoded) and torch.equal(encoded.to(tensor), tensor)):
            self.assert_is_in(encoded)
            raise ValueError(f"{value!r} cannot be written as {self.dtype} without loss")
        return encoded

    def to_numpy(self, value: Tensor) -> Any:
        self.assert_is_in(value)
        return value.detach().cpu().numpy()

    def __getitem__(self: Self, index: Any) -> Self:
        assert isinstance(self, TensorSpec)
        return self.with_batch(self.batch_ndim, lambda tensor: tensor[index])

    @property
    def batch_ndim(self) -> int:
        return self.ndim - self.domain_ndim

    def with_batch(self: Self, ndim: int, change: Callable[[Tensor], Tensor]) -> Self:
        assert isinstance(self, TensorSpec)
        return self._rebuilt(shape=(*changed(self.shape[:ndim], change), *self.shape[ndim:]))

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
    numbers = value.detach().cpu().numpy().reshape(-1)
    if numbers.size == 0:
        return "[]"
    low, high = numbers.min().item(), numbers.max().item()
    return str(low) if low == high else f"[{low} .. {high}]"
