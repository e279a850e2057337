"""The interface `Spec` and its classes of one tensor."""

from __future__ import annotations

import math
import operator
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from engram._advice import advised
from engram._providers import PROVIDERS
from engram.errors import OutsideSpecError
from engram.pytree import SIGNED, to_tensor
from engram.specs.torchrl import torchrl_spec

Self = TypeVar("Self", bound="Spec")
Device = torch.device | str | int | None


def as_device(device: Device) -> torch.device | None:
    """`device` as a `torch.device`; None stays None."""
    return None if device is None else torch.device(device)


def usable_device(device: Device, name: str) -> torch.device | None:
    """The device that an argument names; None stays None. CUDA is not initialised, so that processes can still fork.

    Raises:
        ValueError: this machine, or this build of torch, has no such device.
        TypeError: the argument is not a device.
    """
    if device is None:
        return None
    try:
        requested = torch.device(device)
    except (RuntimeError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name}={device!r} is no device; give 'cpu', 'cuda:0' or a torch.device: {error}") from None
    if requested.type == "cuda":
        count = torch.cuda.device_count()
        if (requested.index or 0) >= count:
            built = "" if torch.version.cuda or torch.version.hip else ", and this torch was built without CUDA"
            raise ValueError(f"{name}={device!r}: this process sees {count} CUDA devices{built}; use device='cpu'")
    elif requested.type not in ("cpu", "meta"):
        try:
            torch.empty(0, device=requested)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise ValueError(f"{name}={device!r} cannot be used here: {error}") from error
    return requested


def as_shape(shape: Sequence[int] | int) -> torch.Size:
    """`shape` as a `torch.Size`; a number is a single dimension."""
    return torch.Size((shape,) if isinstance(shape, int) else shape)


def as_sizes(sizes: tuple[Any, ...]) -> torch.Size:
    """Sizes that were given one by one, or as one sequence."""
    return torch.Size(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)


def require_expandable(shape: torch.Size, new: torch.Size, n_batch: int) -> None:
    """Raises ValueError unless `new` ends in `shape`; of its first `n_batch` dimensions those of length 1 may grow."""
    ends = new[len(new) - len(shape) :]
    fits = len(new) >= len(shape) and all(
        end == size or (size == 1 and i < n_batch) for i, (size, end) in enumerate(zip(shape, ends, strict=True))
    )
    if not fits:
        raise ValueError(
            f"cannot expand {tuple(shape)} to {tuple(new)}: the new shape must end in the old one, in which batch "
            "dimensions of length 1 may grow"
        )


def shape_after(shape: Sequence[int], change: Callable[[Tensor], Tensor]) -> torch.Size:
    """The shape of `change(tensor)` for a tensor of `shape`."""
    return change(torch.empty((), device="cpu").expand(tuple(shape))).shape


@advised
class Spec(ABC):
    """Describes a tensor: `shape`, `dtype`, `device` (None: torch's default) and the domain of its values.

    Users draw (`rand`), test (`is_in`), convert (`project`, `encode`, `to_numpy`) and reshape (`expand`, indexing) with
    it. A spec of one's own derives from `LeafTensorSpec` and implements `_draw`, `_inside` and `_nearest`.
    """

    shape: torch.Size
    dtype: torch.dtype | None
    device: torch.device | None

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """`torch.stack(specs, dim)`; no other function of torch takes specs."""
        if function is not torch.stack:
            return NotImplemented
        return PROVIDERS["stack_specs"]()(*args, **(kwargs or {}))

    @property
    def ndim(self) -> int:
        """Number of dimensions, batch dimensions included."""
        return len(self.shape)

    @abstractmethod
    def rand(self, shape: Sequence[int] = ()) -> Any:
        """A draw of shape `[*shape, *self.shape]`."""

    @abstractmethod
    def zero(self, shape: Sequence[int] = ()) -> Any:
        """Zeros of shape `[*shape, *self.shape]`, whether or not the domain has them."""

    @abstractmethod
    def is_in(self, val: Any) -> bool:
        """Whether `val` has this dtype and this shape (after any batch dimensions), and is in the domain."""

    @abstractmethod
    def project(self, val: Any) -> Any:
        """`val` if it is in the domain, else the nearest value that is; in the spec's dtype."""

    @abstractmethod
    def expand(self: Self, *shape: Any) -> Self:
        """The same spec with more batch dimensions: `shape` is the new shape, and ends in the present one.

        Batch dimensions of length 1 may grow.
        """

    @abstractmethod
    def to(self: Self, dest: torch.device | torch.dtype | str) -> Self:
        """The same spec on another device, or with another dtype."""

    @abstractmethod
    def one(self, shape: Sequence[int] = ()) -> Any:
        """Ones of shape `[*shape, *self.shape]`, whether or not the domain has them."""

    @abstractmethod
    def clone(self: Self) -> Self:
        """An equal spec that shares no memory with this one."""

    @abstractmethod
    def encode(self, val: Any, *, ignore_device: bool = False) -> Any:
        """`val`, an array, number or list (for a Composite a mapping), as a tensor of this spec.

        With `ignore_device` a tensor stays on its device. Raises ValueError for values outside of the domain.
        """

    @abstractmethod
    def to_numpy(self, val: Any, safe: bool | None = None) -> Any:
        """A tensor of this spec as numpy arrays: one-hot vectors become integers, a Composite becomes a dict.

        Raises ValueError, unless `safe=False`, for values outside of the domain.
        """

    @property
    @abstractmethod
    def batch_ndim(self) -> int:
        """Number of leading dimensions that can be indexed: all but the last one of one-hot vectors and the like."""

    @abstractmethod
    def with_batch(self: Self, ndim: int, change: Callable[[Tensor], Tensor]) -> Self:
        """The spec of a tensor whose first `ndim` dimensions were reshaped or indexed by `change`."""

    def sample(self, shape: Sequence[int] = ()) -> Any:
        """`rand`."""
        return self.rand(shape)

    def zeros(self, shape: Sequence[int] = ()) -> Any:
        """`zero`."""
        return self.zero(shape)

    def ones(self, shape: Sequence[int] = ()) -> Any:
        """`one`."""
        return self.one(shape)

    def contains(self, item: Any) -> bool:
        """`is_in`."""
        return self.is_in(item)

    @abstractmethod
    def type_check(self, value: Any, selected_keys: Any = None) -> None:
        """Raises TypeError where a tensor has another dtype than its spec.

        `selected_keys`: the entry of a Composite, or the entries, that `value` is, or that alone are compared.
        """

    def enumerate(self, use_mask: bool = False) -> Any:
        """All values of the domain, along a new first dimension; every place of a batch has the same one.

        With `use_mask` without those that a mask forbids, which must be the same in the whole batch (else ValueError).
        Raises NotImplementedError for domains of numbers.

        >>> Categorical(3).enumerate(), MultiCategorical([2, 2]).enumerate().tolist()
        (tensor([0, 1, 2]), [[0, 0], [0, 1], [1, 0], [1, 1]])
        """
        raise NotImplementedError(f"the values of a {type(self).__name__} cannot be enumerated; draw some by rand([n])")

    def index(self, index: Any, tensor_to_index: Any) -> Any:
        """`tensor_to_index[..., choice]` for the choices of `index`, values of this spec.

        Raises NotImplementedError for specs of anything but one choice a value.
        """
        raise NotImplementedError(f"a {type(self).__name__} is no spec of choices; index the tensor itself")

    @abstractmethod
    def cardinality(self) -> int | float:
        """The number of choices that one value has, batch dimensions apart; `inf` for numbers.

        That of a Composite is the product of its entries'.
        """

    def to_torchrl(self) -> Any:
        """The same spec as an object of TorchRL's class of this name. Raises ImportError unless torchrl is imported."""
        return torchrl_spec(self)

    def cpu(self: Self) -> Self:
        """The same spec on the CPU."""
        assert isinstance(self, Spec)
        return self.to("cpu")

    def cuda(self: Self, device: Device = None) -> Self:
        """The same spec on a CUDA device."""
        assert isinstance(self, Spec)
        return self.to("cuda" if device is None else torch.device(device))

    def unsqueeze(self: Self, dim: int) -> Self:
        """One more batch dimension of length 1."""
        assert isinstance(self, Spec)
        return self.with_batch(self.batch_ndim, lambda tensor: tensor.unsqueeze(dim))

    def squeeze(self: Self, dim: int | None = None) -> Self:
        """Without batch dimension `dim` (None: without each one), if it has length 1."""
        assert isinstance(self, Spec)
        if dim is None:
            return self.with_batch(self.batch_ndim, lambda tensor: tensor.squeeze())
        return self.with_batch(self.batch_ndim, lambda tensor: tensor.squeeze(dim))

    def ndimension(self) -> int:
        """`ndim`."""
        return self.ndim

    def reshape(self: Self, *shape: Any) -> Self:
        """The spec of a tensor that was reshaped, one size may be -1; others than batch dimensions must stay.

        >>> OneHot(4, (2, 3, 4)).reshape(-1, 4).shape
        torch.Size([6, 4])
        """
        assert isinstance(self, Spec)
        n_batch = self.batch_ndim
        kept = self.shape[n_batch:]
        new = as_sizes(shape)
        if -1 not in kept:
            new = shape_after(self.shape, lambda tensor: tensor.reshape(new))
        batch = new[: len(new) - len(kept)]
        if (*batch, *kept) != tuple(new):
            raise ValueError(
                f"cannot reshape {tuple(self.shape)} to {tuple(new)}: the last {len(kept)} sizes are the domain's own "
                "and must remain unchanged"
            )
        return self.with_batch(n_batch, lambda tensor: tensor.reshape(batch))

    def view(self: Self, *shape: Any) -> Self:
        """`reshape`."""
        assert isinstance(self, Spec)
        return self.reshape(*shape)

    def flatten(self: Self, start_dim: int = 0, end_dim: int = -1) -> Self:
        """The spec of a tensor whose batch dimensions from `start_dim` to `end_dim` became one."""
        assert isinstance(self, Spec)
        start, end = self._batch_dim(start_dim), self._batch_dim(end_dim)
        return self.with_batch(self.batch_ndim, lambda tensor: tensor.flatten(start, end))

    def unflatten(self: Self, dim: int, sizes: Sequence[int]) -> Self:
        """The spec of a tensor whose batch dimension `dim` became several of these sizes."""
        assert isinstance(self, Spec)
        at, parts = self._batch_dim(dim), list(sizes)

        def unflattened(tensor: Tensor) -> Tensor:
            parted: Tensor = tensor.unflatten(at, parts)  # type: ignore[no-untyped-call]
            return parted

        return self.with_batch(self.batch_ndim, unflattened)

    def unbind(self: Self, dim: int = 0) -> tuple[Self, ...]:
        """The specs of the parts of a tensor along its batch dimension `dim`."""
        assert isinstance(self, Spec)
        at = self._batch_dim(dim)
        places = ((*[slice(None)] * at, i) for i in range(self.shape[at]))
        return tuple(self.with_batch(self.batch_ndim, operator.itemgetter(place)) for place in places)

    def _batch_dim(self, dim: int) -> int:
        """A batch dimension as a number of 0 or more. Raises IndexError, or ValueError for another dimension."""
        if not -self.ndim <= dim < self.ndim:
            raise IndexError(f"dim must be {-self.ndim} to {self.ndim - 1}, got {dim}")
        at = dim % self.ndim
        if at >= self.batch_ndim:
            raise ValueError(
                f"dimension {dim} of {tuple(self.shape)} is the domain's own and must remain unchanged: the first "
                f"{self.batch_ndim} are batch dimensions"
            )
        return at

    @abstractmethod
    def clear_device_(self: Self) -> Self:
        """Sets `device` to None, in place; returns the spec itself."""

    def assert_is_in(self, value: Any) -> None:
        """Raises OutsideSpecError (a ValueError and AssertionError) with value and spec unless `is_in(value)`."""
        if not self.is_in(value):
            is_tensor = isinstance(value, Tensor)
            text = f"{value.dtype} {tuple(value.shape)}: {value}" if is_tensor else repr(value)
            raise OutsideSpecError(f"the value does not lie in the spec.\n  found:   {text}\n  allowed: {self}")


class LeafTensorSpec(Spec):
    """A spec of one tensor. Subclasses define their domain by `_draw`, `_inside` and `_nearest`.

    `spec[index]` is the spec of `tensor[index]`; the last dimension of one-hot vectors and of `MultiCategorical` is no
    batch dimension and cannot be indexed.
    """

    domain_ndim = 0  # trailing dimensions that are not batch dimensions: 1 for vectors like one-hot

    def __init__(self, shape: Sequence[int] | int, device: Device, dtype: torch.dtype) -> None:
        self.shape = as_shape(shape)
        self.device = as_device(device)
        self.dtype: torch.dtype = dtype

    def _draw(self, shape: torch.Size) -> Tensor:
        """Random values of this whole shape."""
        raise NotImplementedError

    def _inside(self, value: Tensor) -> Tensor | bool:
        """Whether values are in the domain; their shape and dtype fit."""
        raise NotImplementedError

    def _nearest(self, value: Tensor) -> Tensor:
        """The nearest values in the domain."""
        raise NotImplementedError

    def domain_arguments(self) -> dict[str, Any]:
        """Constructor arguments besides shape, device and dtype."""
        return {}

    def _rebuilt(self: Self, **changes: Any) -> Self:
        assert isinstance(self, LeafTensorSpec)
        arguments = {
            "shape": self.shape,
            "device": self.device,
            "dtype": self.dtype,
            **self.domain_arguments(),
            **changes,
        }
        return type(self)(**arguments)

    def rand(self, shape: Sequence[int] = ()) -> Tensor:
        return self._draw(torch.Size((*shape, *self.shape))).to(self.dtype)

    def zero(self, shape: Sequence[int] = ()) -> Tensor:
        return torch.zeros((*shape, *self.shape), dtype=self.dtype, device=self.device or "cpu")

    def is_in(self, val: Any) -> bool:
        fits = isinstance(val, Tensor) and val.dtype == self.dtype and self.has_shape(val)
        return fits and bool(to_tensor(self._inside(val)).all())

    def type_check(self, value: Any, selected_keys: Any = None) -> None:
        if value.dtype != self.dtype:
            raise TypeError(f"the value has dtype {value.dtype}, and its spec says {self.dtype}: {self}")

    def clear_device_(self: Self) -> Self:
        assert isinstance(self, LeafTensorSpec)
        self.device = None
        return self

    def has_shape(self, value: Tensor) -> bool:
        """Whether the last dimensions of `value` are this spec's shape."""
        return value.ndim >= self.ndim and value.shape[value.ndim - self.ndim :] == self.shape

    def project(self, val: Tensor) -> Tensor:
        if not self.has_shape(val):
            raise ValueError(f"cannot project a tensor of shape {tuple(val.shape)} on {self}: the shapes differ")
        return val if self.is_in(val) else self._nearest(val).to(self.dtype)

    def one(self, shape: Sequence[int] = ()) -> Tensor:
        return torch.ones((*shape, *self.shape), dtype=self.dtype, device=self.device or "cpu")

    def cardinality(self) -> int | float:
        return float("inf")

    @property
    def space(self) -> Any:
        """The domain of one value: a `ContinuousBox` (`low`, `high`), a `CategoricalBox` (`n`), or a list of those."""
        raise NotImplementedError(f"a {type(self).__name__} has no `space`")

    def clone(self: Self) -> Self:
        assert isinstance(self, LeafTensorSpec)
        return self._rebuilt(**{k: v.clone() for k, v in self.domain_arguments().items() if isinstance(v, Tensor)})

    def encode(self, val: Any, *, ignore_device: bool = False) -> Tensor:
        tensor = val if isinstance(val, Tensor) else to_tensor(np.asarray(val))
        encoded = tensor.to(device=None if ignore_device else self.device, dtype=self.dtype)
        is_rounded = tensor.is_floating_point() and encoded.is_floating_point()
        is_same = (
            torch.equal(encoded.isfinite(), tensor.isfinite()) if is_rounded else (encoded.to(tensor) == tensor).all()
        )
        if not (self.is_in(encoded) and is_same):
            self.assert_is_in(encoded)
            raise ValueError(f"{val!r} cannot be written as {self.dtype} without loss")
        return encoded

    def to_numpy(self, val: Tensor, safe: bool | None = None) -> Any:
        if safe is not False:
            self.assert_is_in(val)
        return val.detach().cpu().numpy()

    def __getitem__(self: Self, index: Any) -> Self:
        assert isinstance(self, LeafTensorSpec)
        if isinstance(index, str):
            raise KeyError(f"{self} has no entry {index!r}: only a Composite has entries")
        return self.with_batch(self.batch_ndim, lambda tensor: tensor[index])

    @property
    def batch_ndim(self) -> int:
        return self.ndim - self.domain_ndim

    def with_batch(self: Self, ndim: int, change: Callable[[Tensor], Tensor]) -> Self:
        assert isinstance(self, LeafTensorSpec)
        return self._rebuilt(shape=(*shape_after(self.shape[:ndim], change), *self.shape[ndim:]))

    def expand(self: Self, *shape: Any) -> Self:
        assert isinstance(self, LeafTensorSpec)
        new = as_sizes(shape)
        require_expandable(self.shape, new, self.batch_ndim)
        return self._rebuilt(shape=new)

    def to(self: Self, dest: torch.device | torch.dtype | str) -> Self:
        assert isinstance(self, LeafTensorSpec)
        return self._rebuilt(dtype=dest) if isinstance(dest, torch.dtype) else self._rebuilt(device=dest)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, LeafTensorSpec)
        mine, theirs = self.domain_arguments(), other.domain_arguments()
        same = (self.shape, self.dtype, self.device) == (other.shape, other.dtype, other.device)
        return same and mine.keys() == theirs.keys() and all(_is_same(mine[k], theirs[k]) for k in mine)

    def __hash__(self) -> int:
        return hash((type(self), self.shape, self.dtype, self.device))

    def __repr__(self) -> str:
        domain = "".join(f"{key}={_short(value)}, " for key, value in self.domain_arguments().items())
        return f"{type(self).__name__}({domain}shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


class ContinuousBox(NamedTuple):
    """The lowest and the highest values, both in the spec's shape and dtype."""

    low: Tensor
    high: Tensor


class CategoricalBox(NamedTuple):
    """The choices 0 to `n - 1`."""

    n: int


class BoxList(tuple[CategoricalBox, ...]):
    """The choices of each of several variables."""

    @property
    def boxes(self) -> list[CategoricalBox]:
        """The same as a list."""
        return list(self)


def _is_same(mine: Any, other: Any) -> bool:
    if isinstance(mine, Tensor) and isinstance(other, Tensor):
        return bool(torch.equal(mine, other))
    return bool(mine == other)


def _short(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    numbers = value.detach().cpu().numpy().reshape(-1)
    if numbers.size == 0:
        return "[]"
    low, high = numbers.min().item(), numbers.max().item()
    return str(low) if low == high else f"[{low} .. {high}]"


LOWEST, HIGHEST = -(2**63), 2**63 - 1
_LARGEST_DOUBLE = 2.0**63 - 1024  # below 2 ** 63


def as_ordered_int64(value: Tensor, dtype: torch.dtype) -> Tensor:
    """int64 in the same order as `value`, to be compared or clamped before a cast to the integer `dtype`.

    Floats are rounded, NaN is 0. Values that int64 (uint64 if that is `dtype`) cannot hold become its nearest value.

    >>> as_ordered_int64(torch.tensor([0.6, -1e30, float("nan")]), torch.int64).tolist()
    [1, -9223372036854775808, 0]
    """
    to_unsigned = dtype is torch.uint64
    if value.dtype.is_floating_point:
        number = value.double().nan_to_num(0.0).round()
        number = number.clamp(min=0) - 2.0**63 if to_unsigned else number
        return torch.where(number >= 2.0**63, HIGHEST, number.clamp(LOWEST, _LARGEST_DOUBLE).long())
    if value.dtype is torch.uint64:
        bits = value.view(torch.int64)
        return bits ^ LOWEST if to_unsigned else torch.where(bits < 0, HIGHEST, bits)
    number = value.long()
    return number.clamp(min=0) ^ LOWEST if to_unsigned else number


def from_ordered_int64(number: Tensor, dtype: torch.dtype) -> Tensor:
    """The reverse of `as_ordered_int64`, for numbers that `dtype` can hold."""
    return (number ^ LOWEST).view(torch.uint64) if dtype is torch.uint64 else number.to(dtype)


def ordered_limits(dtype: torch.dtype) -> tuple[int, int]:
    """The lowest and highest integer of `dtype`, as `as_ordered_int64` returns them."""
    if dtype is torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return (LOWEST, HIGHEST) if dtype is torch.uint64 else (info.min, info.max)


@advised
class Unbounded(LeafTensorSpec):
    """Any value of the dtype; draws are normal for floats, uniform over the dtype for integers and booleans.

    >>> Unbounded(shape=(3,)).rand((2,)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self, shape: Sequence[int] | int = (1,), device: Device = None, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(shape, device, dtype)

    @property
    def space(self) -> ContinuousBox:
        if self.dtype.is_floating_point:
            low, high = -math.inf, math.inf
        elif self.dtype is torch.bool:
            low, high = 0, 1
        else:
            low, high = torch.iinfo(self.dtype).min, torch.iinfo(self.dtype).max
        ends = (
            torch.full((), end, dtype=self.dtype, device=self.device or "cpu").expand(self.shape) for end in (low, high)
        )
        return ContinuousBox(*ends)

    def _draw(self, shape: torch.Size) -> Tensor:
        if self.dtype.is_floating_point:
            return torch.randn(shape, dtype=self.dtype, device=self.device or "cpu")
        low, high = ordered_limits(self.dtype)
        return from_ordered_int64(
            torch.randint(low, min(high + 1, HIGHEST), shape, device=self.device or "cpu"), self.dtype
        )

    def _inside(self, value: Tensor) -> bool:
        return True

    def _nearest(self, value: Tensor) -> Tensor:
        if self.dtype.is_floating_point:
            return value
        return from_ordered_int64(as_ordered_int64(value, self.dtype).clamp(*ordered_limits(self.dtype)), self.dtype)


@advised
class Bounded(LeafTensorSpec):
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
        shape: Sequence[int] | int | None = None,
        device: Device = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        lowest, highest = (to_tensor(end, dtype).to(device) for end in (low, high))
        common = np.broadcast_shapes(lowest.shape, highest.shape) if shape is None else as_shape(shape)
        super().__init__(common, device, dtype)
        self.low, self.high = lowest.expand(self.shape), highest.expand(self.shape)
        # For comparisons: as they are, or as int64 in the same order, as torch cannot compare every integer dtype.
        self._ends = (self._comparable(self.low), self._comparable(self.high))
        if not bool((self._ends[0] <= self._ends[1]).all()):
            raise ValueError(f"low must be at most high everywhere, got low={low} and high={high}")

    def _comparable(self, value: Tensor) -> Tensor:
        return value if self.dtype.is_floating_point else as_ordered_int64(value, self.dtype)

    def domain_arguments(self) -> dict[str, Any]:
        return {"low": self.low, "high": self.high}

    @property
    def space(self) -> ContinuousBox:
        return ContinuousBox(self.low, self.high)

    def _register_batch_size(self, batch_size: Sequence[int]) -> None:
        """Nothing: TorchRL's Composites tell a Bounded their batch size, which is part of `shape` here."""

    def _draw(self, shape: torch.Size) -> Tensor:
        low, high = (end.double() for end in self._ends)
        uniform = torch.rand(shape, dtype=torch.float64, device=self.device or "cpu")
        if not self.dtype.is_floating_point:
            number = (low + uniform * (high - low + 1)).floor().clamp(LOWEST, 2.0**63 - 1024).long()
            return from_ordered_int64(self._clamped(number), self.dtype)
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
        number = self._comparable(value)
        return torch.logical_and(number >= self._ends[0], number <= self._ends[1])

    def _nearest(self, value: Tensor) -> Tensor:
        if not self.dtype.is_floating_point:
            return from_ordered_int64(self._clamped(as_ordered_int64(value, self.dtype)), self.dtype)
        number = (
            value.to(self.dtype)
            if value.dtype.is_floating_point
            else as_ordered_int64(value, torch.int64).to(self.dtype)
        )
        return self._clamped(torch.where(number.isnan(), torch.zeros_like(number), number))

    def _rebuilt(self: Self, **changes: Any) -> Self:
        assert isinstance(self, Bounded)
        shape = changes.get("shape", self.shape)
        if "low" in changes:
            return super()._rebuilt(**changes)
        return super()._rebuilt(**{"low": self.low.expand(shape), "high": self.high.expand(shape), **changes})

    def with_batch(self: Self, ndim: int, change: Callable[[Tensor], Tensor]) -> Self:
        assert isinstance(self, Bounded)
        low, high = (_with_batch(end, ndim, change) for end in (self.low, self.high))
        return self._rebuilt(shape=low.shape, low=low, high=high)


class _ByDtype(ABCMeta):
    """The classes of objects of `base` whose dtype is a float's, or is none: calling one makes an object of `base`."""

    base: type[LeafTensorSpec]
    usual: torch.dtype

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = cls.base(*args, **{"dtype": cls.usual, **kwargs})
        if not isinstance(made, cls):
            raise ValueError(f"{cls.__name__} got dtype={made.dtype}; {cls.base.__name__} takes every dtype")
        return made

    def __instancecheck__(cls, instance: Any) -> bool:
        is_same_kind = isinstance(instance, cls.base)
        return is_same_kind and instance.dtype.is_floating_point == cls.usual.is_floating_point


class UnboundedContinuous(metaclass=_ByDtype):
    """`Unbounded` of floats.

    >>> isinstance(Unbounded(3), UnboundedContinuous), isinstance(Unbounded(3), UnboundedDiscrete)
    (True, False)
    """

    base, usual = Unbounded, torch.float32


class UnboundedDiscrete(metaclass=_ByDtype):
    """`Unbounded` of integers or flags; int64 unless `dtype` is given."""

    base, usual = Unbounded, torch.int64


class BoundedContinuous(metaclass=_ByDtype):
    """`Bounded` of floats."""

    base, usual = Bounded, torch.float32


class BoundedDiscrete(metaclass=_ByDtype):
    """`Bounded` of integers; int64 unless `dtype` is given."""

    base, usual = Bounded, torch.int64


def _with_batch(tensor: Tensor, ndim: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The tensor after `change` of its first `ndim` dimensions."""
    batch = tensor.shape[:ndim]
    positions = change(torch.arange(batch.numel(), device=tensor.device).reshape(batch))
    signed = tensor.view(SIGNED.get(tensor.dtype, tensor.dtype))  # others are not indexed by older torches
    return signed.reshape(batch.numel(), *tensor.shape[ndim:])[positions].view(tensor.dtype)


def _one_hot_shape(shape: Sequence[int] | int | None, width: int, name: str) -> torch.Size:
    shape = as_shape(width if shape is None else shape)
    if not shape or shape[-1] != width:
        raise ValueError(f"{name} of width {width} got shape {tuple(shape)}; its last dimension must be {width}")
    return shape


class ChoiceSpec(LeafTensorSpec):
    """Values that stand for one choice, or for several, of the numbers of choices `nvec`.

    `mask`, bool `[*batch, sum(nvec)]`, forbids those choices where it is False: they are not drawn, not in the domain,
    and `project` goes to the nearest one that is allowed.
    """

    nvec: tuple[int, ...]
    mask: Tensor | None = None

    def numbers_of(self, value: Tensor) -> Tensor:
        """The choices, int64 `[..., len(nvec)]`, of values in the domain."""
        raise NotImplementedError

    def values_of(self, choice: Tensor) -> Tensor:
        """The values of choices `[..., len(nvec)]`."""
        raise NotImplementedError

    def update_mask(self, mask: Tensor | None) -> None:
        """Replaces the mask, in place; None allows all choices.

        Raises:
            TypeError: the mask is not a tensor of bools.
            ValueError: it does not broadcast to `[*batch, sum(nvec)]`, or allows no choice somewhere.
        """
        if mask is None:
            self.mask = None
            return
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
            raise TypeError(f"mask must be a tensor of bools, got {mask!r:.100}")
        shape = (*self.shape[: self.batch_ndim], sum(self.nvec))
        try:
            whole = mask.to(self.device).expand(shape)
        except RuntimeError:
            raise ValueError(
                f"mask has shape {tuple(mask.shape)}, and {tuple(shape)} is needed: cannot expand"
            ) from None
        if not all(bool(part.any(-1).all()) for part in self._parts(whole)):
            raise ValueError(f"mask allows no choice somewhere: {mask}")
        self.mask = whole.clone()

    def _parts(self, mask: Tensor) -> tuple[Tensor, ...]:
        return torch.split(mask, list(self.nvec), -1)

    def _mask_argument(self) -> dict[str, Any]:
        return {} if self.mask is None else {"mask": self.mask}

    def _draw(self, shape: torch.Size) -> Tensor:
        batch = shape[: len(shape) - self.domain_ndim]
        if self.mask is None:
            drawn = [torch.randint(n, batch, device=self.device or "cpu") for n in self.nvec]
        else:
            weights = [part.float().expand(*batch, -1) for part in self._parts(self.mask)]
            drawn = [torch.multinomial(each.reshape(-1, each.shape[-1]), 1).reshape(batch) for each in weights]
        return self.values_of(torch.stack(drawn, -1))

    def _allowed(self, choice: Tensor) -> Tensor:
        """Which of the choices `[..., len(nvec)]` the mask allows."""
        assert self.mask is not None
        parts = zip(self._parts(self.mask), choice.unbind(-1), strict=True)
        one = [part.to(c.device).expand(*c.shape, -1).gather(-1, c.unsqueeze(-1)) for part, c in parts]
        return torch.cat(one, -1)

    def _nearest_allowed(self, choice: Tensor) -> Tensor:
        if self.mask is None:
            return choice
        columns = []
        for part, column in zip(self._parts(self.mask), choice.unbind(-1), strict=True):
            n = part.shape[-1]
            distance = (torch.arange(n, device=column.device) - column.unsqueeze(-1)).abs()
            columns.append(distance.masked_fill(~part.to(column.device), n).argmin(-1))
        return torch.stack(columns, -1)

    def _rebuilt(self: Self, **changes: Any) -> Self:
        assert isinstance(self, ChoiceSpec)
        if self.mask is None or "mask" in changes or "shape" not in changes:
            return super()._rebuilt(**changes)
        new = torch.Size(changes["shape"])  # of `expand`
        batch = new[: len(new) - self.domain_ndim]
        return super()._rebuilt(**changes, mask=self.mask.expand(*batch, -1))

    def with_batch(self: Self, ndim: int, change: Callable[[Tensor], Tensor]) -> Self:
        assert isinstance(self, ChoiceSpec)
        if self.mask is None:
            return super().with_batch(ndim, change)
        shape = (*shape_after(self.shape[:ndim], change), *self.shape[ndim:])
        return self._rebuilt(shape=shape, mask=_with_batch(self.mask, ndim, change))

    def enumerate(self, use_mask: bool = False) -> Tensor:
        choices = torch.cartesian_prod(*(torch.arange(n, device=self.device or "cpu") for n in self.nvec))
        choices = choices.reshape(-1, len(self.nvec))
        if use_mask and self.mask is not None:
            rows = self.mask.reshape(-1, self.mask.shape[-1])
            if not bool((rows == rows[:1]).all()):
                raise ValueError("places of the batch have different masks: enumerate single ones, spec[i]")
            each = [part[0].gather(0, choices[:, i]) for i, part in enumerate(self._parts(rows))]
            choices = choices[torch.stack(each).all(0)]
        batch = self.shape[: self.batch_ndim]
        rows = choices.reshape(len(choices), *[1] * len(batch), len(self.nvec))
        return self.values_of(rows.expand(-1, *batch, -1)).to(self.dtype)

    def cardinality(self) -> int:
        return math.prod(self.nvec)


def _as_nvec(nvec: Any) -> tuple[int, ...]:
    numbers = tuple(int(n) for n in ([nvec] if isinstance(nvec, int) else nvec))
    if not numbers or min(numbers) < 1:
        raise ValueError(f"nvec must hold one or more numbers of 1 or more, got {numbers}")
    return numbers


@advised
class Categorical(ChoiceSpec):
    """Integers in `[0, n)`, without those that `mask`, bool `[*shape, n]`, forbids.

    >>> Categorical(4).is_in(torch.tensor(3)), Categorical(4).is_in(torch.tensor(4))
    (True, False)
    >>> Categorical(3, mask=torch.tensor([True, False, True])).project(torch.tensor(1))
    tensor(0)
    """

    def __init__(
        self,
        n: int,
        shape: Sequence[int] | int | None = None,
        device: Device = None,
        dtype: torch.dtype = torch.int64,
        mask: Tensor | None = None,
    ) -> None:
        if n < 1:
            raise ValueError(f"n must be 1 or more, got {n}")
        super().__init__(() if shape is None else shape, device, dtype)
        self.n = n
        self.nvec = (n,)
        self.update_mask(mask)

    def domain_arguments(self) -> dict[str, Any]:
        return {"n": self.n, **self._mask_argument()}

    def _draw(
        self, shape: torch.Size
    ) -> Tensor:  # of each step of a random policy: the general way costs twice as much
        return torch.randint(self.n, shape, device=self.device or "cpu") if self.mask is None else super()._draw(shape)

    def numbers_of(self, value: Tensor) -> Tensor:
        return value.long().unsqueeze(-1)

    def values_of(self, choice: Tensor) -> Tensor:
        return choice.squeeze(-1)

    def _inside(self, value: Tensor) -> Tensor:
        inside = _is_below(value, torch.tensor(self.n, device=value.device))
        if self.mask is None or not bool(inside.all()):
            return inside
        return self._allowed(self.numbers_of(value)).squeeze(-1)

    def _nearest(self, value: Tensor) -> Tensor:
        choice = as_ordered_int64(value, torch.int64).clamp(0, self.n - 1)
        return self.values_of(self._nearest_allowed(choice.unsqueeze(-1)))

    @property
    def space(self) -> CategoricalBox:
        return CategoricalBox(self.n)

    def index(self, index: Any, tensor_to_index: Tensor) -> Tensor:
        return tensor_to_index[..., index.long()]

    def to_one_hot(self, val: Tensor, safe: bool | None = None) -> Tensor:
        """One-hot vectors (bool) `[*val.shape, n]` of integers; ValueError, unless `safe=False`, for other values."""
        if safe is not False:
            self.assert_is_in(val)
        return self.to_one_hot_spec().encode(val)

    def to_one_hot_spec(self) -> OneHot:
        """The one-hot vectors (bool) of the same choices: shape `[*self.shape, n]`."""
        return OneHot(self.n, (*self.shape, self.n), self.device, mask=self.mask)

    def to_categorical(self, val: Tensor, safe: bool | None = None) -> Tensor:
        """`val` itself; ValueError, unless `safe=False`, for values out of range."""
        if safe is not False:
            self.assert_is_in(val)
        return val

    def to_categorical_spec(self) -> Categorical:
        """This spec itself."""
        return self


@advised
class Binary(Categorical):
    """Vectors of `n` zeros and ones: shape `[..., n]`.

    >>> Binary(3).rand().shape
    torch.Size([3])
    """

    def __init__(
        self,
        n: int | None = None,
        shape: Sequence[int] | int | None = None,
        device: Device = None,
        dtype: torch.dtype = torch.int8,
        mask: Tensor | None = None,
    ) -> None:
        if n is None and shape is None:
            raise ValueError("Binary needs n or shape")
        whole = as_shape(() if shape is None else shape) if n is None else _one_hot_shape(shape, n, "Binary")
        super().__init__(2, whole, device, dtype, mask)

    def domain_arguments(self) -> dict[str, Any]:
        return self._mask_argument()


@advised
class MultiCategorical(ChoiceSpec):
    """Vectors of integers, the i-th in `[0, nvec[i])`: shape `[..., len(nvec)]`.

    `mask`, bool `[..., sum(nvec)]`: what it forbids of each, one after the other. `remove_singleton` has no effect:
    vectors of one integer stay vectors.

    >>> MultiCategorical([2, 3]).project(torch.tensor([5, 1]))
    tensor([1, 1])
    """

    domain_ndim = 1

    def __init__(
        self,
        nvec: Sequence[int] | Tensor | int,
        shape: Sequence[int] | int | None = None,
        device: Device = None,
        dtype: torch.dtype = torch.int64,
        mask: Tensor | None = None,
    ) -> None:
        self.nvec = _as_nvec(nvec)
        super().__init__(_one_hot_shape(shape, len(self.nvec), type(self).__name__), device, dtype)
        self.update_mask(mask)

    def domain_arguments(self) -> dict[str, Any]:
        return {"nvec": self.nvec, **self._mask_argument()}

    def numbers_of(self, value: Tensor) -> Tensor:
        return value.long()

    def values_of(self, choice: Tensor) -> Tensor:
        return choice

    def _inside(self, value: Tensor) -> Tensor:
        inside = _is_below(value, torch.tensor(self.nvec, device=value.device))
        return inside if self.mask is None or not bool(inside.all()) else self._allowed(self.numbers_of(value))

    def _nearest(self, value: Tensor) -> Tensor:
        last = torch.tensor(self.nvec, device=value.device) - 1
        return self._nearest_allowed(as_ordered_int64(value, torch.int64).clamp(min=0).minimum(last))

    @property
    def space(self) -> BoxList:
        return BoxList(CategoricalBox(n) for n in self.nvec)

    def to_one_hot(self, val: Tensor, safe: bool | None = None) -> Tensor:
        """One-hot vectors (bool) `[..., sum(nvec)]`; ValueError, unless `safe=False`, for values out of range."""
        if safe is not False:
            self.assert_is_in(val)
        return self.to_one_hot_spec().encode(val)

    def to_one_hot_spec(self) -> MultiOneHot:
        """The one-hot vectors (bool) of the same choices: shape `[..., sum(nvec)]`."""
        return MultiOneHot(self.nvec, (*self.shape[:-1], sum(self.nvec)), self.device, mask=self.mask)

    def to_categorical(self, val: Tensor, safe: bool | None = None) -> Tensor:
        """`val` itself; ValueError, unless `safe=False`, for values out of range."""
        if safe is not False:
            self.assert_is_in(val)
        return val

    def to_categorical_spec(self) -> MultiCategorical:
        """This spec itself."""
        return self


class _OneHotVectors(ChoiceSpec):
    """Concatenated one-hot vectors of the lengths `nvec`: shape `[..., sum(nvec)]`."""

    domain_ndim = 1

    def __init__(
        self,
        nvec: Sequence[int],
        shape: Sequence[int] | int | None = None,
        device: Device = None,
        dtype: torch.dtype = torch.bool,
        mask: Tensor | None = None,
    ) -> None:
        self.nvec = _as_nvec(nvec)
        super().__init__(_one_hot_shape(shape, sum(self.nvec), type(self).__name__), device, dtype)
        self.update_mask(mask)

    def domain_arguments(self) -> dict[str, Any]:
        return {"nvec": self.nvec, **self._mask_argument()}

    def numbers_of(self, value: Tensor) -> Tensor:
        numbers = value if value.dtype.is_floating_point else as_ordered_int64(value, torch.int64)
        return torch.stack([part.argmax(-1) for part in self._parts(numbers)], -1)

    def values_of(self, choice: Tensor) -> Tensor:
        parts = [one_hot(column, n) for column, n in zip(choice.unbind(-1), self.nvec, strict=True)]
        return torch.cat(parts, -1)

    def _inside(self, value: Tensor) -> Tensor:
        in_part = [((p == 0) | (p == 1)).all(-1) & (p != 0).sum(-1).eq(1) for p in self._parts(value)]
        inside = torch.stack(in_part, -1).all(-1)
        if self.mask is None or not bool(inside.all()):
            return inside
        return self._allowed(self.numbers_of(value))

    def _nearest(self, value: Tensor) -> Tensor:
        if self.mask is None:
            return self.values_of(self.numbers_of(value))
        allowed = torch.where(self.mask.to(value.device), value.double(), -math.inf)
        return self.values_of(self.numbers_of(allowed))

    def encode(self, val: Any, *, ignore_device: bool = False) -> Tensor:
        """One-hot vectors `[..., sum(nvec)]` of the spec's dtype from integers `[..., len(nvec)]`.

        Raises torch's RuntimeError for integers out of range.
        """
        choice = to_tensor(val).to(None if ignore_device else self.device)
        return self.values_of(choice.long()).to(self.dtype)

    def decode(self, value: Tensor) -> Tensor:
        """Integers `[..., len(nvec)]`, int64, from one-hot vectors; of other vectors the largest entry wins."""
        return self.numbers_of(value)

    def to_numpy(self, val: Tensor, safe: bool | None = None) -> Any:
        if safe is not False:
            self.assert_is_in(val)
        return self.decode(val.detach()).cpu().numpy()

    def to_categorical(self, val: Tensor, safe: bool | None = None) -> Tensor:
        """The integers (int64) of one-hot vectors; ValueError, unless `safe=False`, for other vectors."""
        if safe is not False:
            self.assert_is_in(val)
        return self.decode(val)

    def to_categorical_spec(self) -> MultiCategorical | Categorical:
        """The integers of the same choices: shape `[..., len(nvec)]`, int64."""
        return MultiCategorical(self.nvec, (*self.shape[:-1], len(self.nvec)), self.device, mask=self.mask)

    def to_one_hot(self, val: Tensor, safe: bool | None = None) -> Tensor:
        """`val` itself; ValueError, unless `safe=False`, for other vectors."""
        if safe is not False:
            self.assert_is_in(val)
        return val

    def to_one_hot_spec(self: Self) -> Self:
        """This spec itself."""
        return self


@advised
class MultiOneHot(_OneHotVectors):
    """Concatenated one-hot vectors of the lengths `nvec`: shape `[..., sum(nvec)]`.

    `mask`, bool of that shape: what it forbids. `use_register=False` has no effect.

    >>> MultiOneHot([2, 3]).rand().sum()
    tensor(2)
    """

    @property
    def space(self) -> BoxList:
        return BoxList(CategoricalBox(n) for n in self.nvec)


@advised
class OneHot(_OneHotVectors):
    """One-hot vectors of length `n`: shape `[..., n]`.

    `mask`, bool of that shape: what it forbids. `use_register=False` has no effect.

    >>> OneHot(3, dtype=torch.int64).project(torch.tensor([0.1, 0.7, 0.2]))
    tensor([0, 1, 0])
    """

    def __init__(
        self,
        n: int,
        shape: Sequence[int] | int | None = None,
        device: Device = None,
        dtype: torch.dtype = torch.bool,
        mask: Tensor | None = None,
    ) -> None:
        super().__init__((n,), shape, device, dtype, mask)
        self.n = n

    def domain_arguments(self) -> dict[str, Any]:
        return {"n": self.n, **self._mask_argument()}

    def _draw(self, shape: torch.Size) -> Tensor:  # as that of `Categorical`
        if self.mask is not None:
            return super()._draw(shape)
        return self.encode(torch.randint(self.n, shape[:-1], device=self.device or "cpu"))

    def encode(self, val: Any, *, ignore_device: bool = False) -> Tensor:
        """One-hot vectors `[..., n]` of the spec's dtype from integers `[...]`; RuntimeError for those out of range."""
        choice = to_tensor(val).to(None if ignore_device else self.device)
        blank = torch.zeros((*choice.shape, self.n), dtype=self.dtype, device=choice.device)
        return blank.scatter_(-1, choice.long().unsqueeze(-1), 1)

    def values_of(self, choice: Tensor) -> Tensor:
        return self.encode(choice.squeeze(-1))

    def decode(self, value: Tensor) -> Tensor:
        """Integers `[...]`, int64, from one-hot vectors; of other vectors the largest entry wins."""
        return super().decode(value).squeeze(-1)

    def index(self, index: Any, tensor_to_index: Tensor) -> Tensor:
        return tensor_to_index[..., self.decode(index)]

    @property
    def space(self) -> CategoricalBox:
        return CategoricalBox(self.n)

    def to_categorical_spec(self) -> Categorical:
        """The integers of the same choices: shape `[...]`, int64."""
        return Categorical(self.n, self.shape[:-1], self.device, mask=self.mask)


def _is_below(value: Tensor, end: Tensor) -> Tensor:
    number = as_ordered_int64(value, torch.int64)
    fits = (number >= 0) & (number < end)
    return fits & (number == value) if value.dtype.is_floating_point else fits
