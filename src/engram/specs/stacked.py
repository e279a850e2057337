"""Stacks of specs that differ in shape, domain or keys: the specs of agents that see and do different things.

`torch.stack(specs, dim)` makes them. Specs that differ in nothing but bounds become an ordinary spec with one more
batch dimension; all others a `Stacked` or, of Composites, a `StackedComposite`, whose values are lazy stacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor

from engram._advice import advised
from engram.pytree import Key
from engram.specs.composite import Composite
from engram.specs.tensors import Bounded, Spec, as_device, as_sizes, shape_after

Member = TypeVar("Member", bound=Spec)


def stack_specs(specs: Sequence[Any], dim: int = 0) -> Any:
    """The spec of `torch.stack(values, dim)` for a value of each spec; the same as `torch.stack(specs, dim)`.

    Raises:
        RuntimeError: there are no specs, or they differ in dtype, device, number of dimensions or batch shape, or a
            Composite is among leaves.
        IndexError: `dim` is not a batch dimension.

    >>> from engram.specs import Unbounded
    >>> spec = torch.stack([Composite(obs=Unbounded((3,))), Composite(obs=Unbounded((5,)))], 0)
    >>> spec.shape, spec["obs"].shape, [one["obs"].shape for one in spec.rand().unbind(0)]
    (torch.Size([2]), torch.Size([2, -1]), [torch.Size([3]), torch.Size([5])])
    """
    members = list(specs)
    if not members or not all(isinstance(one, Spec) for one in members):
        raise RuntimeError(f"torch.stack needs one spec or more, got {[type(one).__name__ for one in members]}")
    depth = min(one.batch_ndim for one in members)
    if not -depth - 1 <= dim <= depth:
        raise IndexError(f"dim must be {-depth - 1} to {depth}, got {dim}: the specs have {depth} batch dimensions")
    dim += depth + 1 if dim < 0 else 0
    if all(isinstance(one, Composite) for one in members):
        return _stacked_composites(members, dim)
    if any(isinstance(one, Composite) for one in members):
        raise RuntimeError("a Composite cannot be stacked with leaves: put each leaf in a Composite first")
    return _stacked_leaves(members, dim)


def _stacked_leaves(specs: list[Any], dim: int) -> Any:
    first, n = specs[0], len(specs)

    def with_dim(tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(dim).expand(*tensor.shape[:dim], n, *tensor.shape[dim:])

    if all(one == first for one in specs):
        return first.with_batch(first.batch_ndim, with_dim)
    same = {(type(one), one.shape, one.dtype, one.device) for one in specs}
    if isinstance(first, Bounded) and len(same) == 1:
        low, high = (torch.stack(ends, dim) for ends in zip(*((one.low, one.high) for one in specs), strict=True))
        return Bounded(low, high, low.shape, first.device, first.dtype)
    return Stacked(*specs, dim=dim)


def _stacked_composites(specs: list[Composite], dim: int) -> Composite:
    whole = StackedComposite(*specs, dim=dim)
    entries = dict(whole.items())
    is_whole = all(set(one) == set(entries) for one in specs)
    if is_whole and not any(isinstance(entry, Stacked | StackedComposite) for entry in entries.values()):
        return Composite(entries, shape=whole.shape, device=whole.device)
    return whole


def _common(name: str, values: Iterable[Any]) -> Any:
    """The value that all members have. RuntimeError where they differ."""
    each = list(values)
    if any(value != each[0] for value in each):
        raise RuntimeError(f"specs of one stack must have the same {name}, got {each}")
    return each[0]


def _common_shape(specs: Sequence[Spec], dim: int) -> torch.Size:
    """The shape of the stack: -1 where members differ."""
    sizes = zip(*(one.shape for one in specs), strict=True)
    shape = [size[0] if len(set(size)) == 1 else -1 for size in sizes]
    shape.insert(dim, len(specs))
    return torch.Size(shape)


def _expanded(spec: Any, shape: tuple[Any, ...]) -> Any:
    """The stack of the members, each with the dimensions that `shape` has before those of the stack."""
    new = as_sizes(shape)
    extra = new[: len(new) - spec.ndim]
    if len(new) < spec.ndim or new[len(extra) :] != spec.shape:
        raise ValueError(f"cannot expand {tuple(spec.shape)} to {tuple(new)}: the new shape must end in the old one")
    return type(spec)(*(one.expand(*extra, *one.shape) for one in spec.specs), dim=spec.dim + len(extra))


def _restacked(
    specs: Sequence[Member], dim: int, shape: torch.Size, ndim: int, change: Callable[[Tensor], Tensor]
) -> Any:
    """The spec after `change` of the first `ndim` dimensions of the stack's values."""
    if ndim <= dim:
        n_new = len(shape_after(shape[:ndim], change))
        return stack_specs([one.with_batch(ndim, change) for one in specs], dim + n_new - ndim)
    n, batch = len(specs), shape[:ndim]
    number = torch.arange(n, device="cpu").reshape([n if i == dim else 1 for i in range(ndim)]).expand(batch)
    members = change(number)  # which member each place of the result belongs to

    def changed(tensor: Tensor) -> Tensor:
        return change(tensor.unsqueeze(dim).expand(*tensor.shape[:dim], n, *tensor.shape[dim:]))

    if members.numel() and bool((members == members.reshape(-1)[0]).all()):
        return specs[int(members.reshape(-1)[0])].with_batch(ndim - 1, changed)
    for new_dim in range(members.ndim):
        rows = members.movedim(new_dim, 0).reshape(members.shape[new_dim], -1)
        if rows.numel() and bool((rows == rows[:, :1]).all()):
            parts = [
                specs[m].with_batch(ndim - 1, lambda tensor, i=i, at=new_dim: changed(tensor).select(at, i))
                for i, m in enumerate(rows[:, 0].tolist())
            ]
            return stack_specs(parts, new_dim)
    raise ValueError(
        f"a stack of {n} different specs cannot be reshaped or indexed so: dimension {dim}, along which they differ, "
        "must stay a dimension; take single members (`specs`)"
    )


def _select(dim: int, i: int, tensor: Tensor) -> Tensor:
    return tensor.select(dim, i)


@advised
class Stacked(Spec):
    """Leaf specs that differ, stacked along `dim`; `shape` is -1 where theirs differ, `specs` has the members.

    Values are tensors where all shapes are the same, else nested tensors (of `dim=0` and without further batch
    dimensions). The values of a stack of Composites, which are lazy stacks, have no such limits.

    >>> from engram.specs import Categorical
    >>> spec = torch.stack([Categorical(2), Categorical(5)], 0)
    >>> spec.is_in(torch.tensor([1, 4])), spec.is_in(torch.tensor([4, 1]))
    (True, False)
    """

    dtype: torch.dtype

    def __init__(self, *specs: Any, dim: int = 0) -> None:
        self.specs: tuple[Any, ...] = specs
        self.dim = dim
        self.dtype = _common("dtype", (one.dtype for one in specs))
        self.device = _common("device", (one.device for one in specs))
        _common("number of dimensions", (one.ndim for one in specs))
        self.shape = _common_shape(specs, dim)

    @property
    def stack_dim(self) -> int:
        """`dim`."""
        return self.dim

    def _together(self, values: Sequence[Tensor], n_extra: int) -> Tensor:
        """A value of each member as one tensor, after `n_extra` further batch dimensions."""
        if len({value.shape for value in values}) == 1:
            return torch.stack(list(values), n_extra + self.dim)
        if n_extra + self.dim:
            raise RuntimeError(
                f"values of the shapes {[tuple(value.shape) for value in values]} cannot be stacked along dimension "
                f"{n_extra + self.dim} as one nested tensor; draw from each of `specs`, or stack Composites, whose "
                "values are lazy stacks"
            )
        return torch.nested.nested_tensor(list(values))

    def _apart(self, value: Any) -> Sequence[Tensor] | None:
        """The members' values; None where this is not a value of such a stack."""
        if isinstance(value, list | tuple):
            return value if len(value) == len(self.specs) else None
        if not isinstance(value, Tensor):
            return None
        at = 0 if value.is_nested else value.ndim - self.ndim + self.dim
        if (value.is_nested and (self.dim or value.ndim != self.ndim)) or at < 0:
            return None
        parts = value.unbind(at)
        return parts if len(parts) == len(self.specs) else None

    def rand(self, shape: Sequence[int] = ()) -> Tensor:
        return self._together([one.rand(shape) for one in self.specs], len(tuple(shape)))

    def zero(self, shape: Sequence[int] = ()) -> Tensor:
        return self._together([one.zero(shape) for one in self.specs], len(tuple(shape)))

    def one(self, shape: Sequence[int] = ()) -> Tensor:
        return self._together([one.one(shape) for one in self.specs], len(tuple(shape)))

    def is_in(self, val: Any) -> bool:
        parts = self._apart(val)
        return parts is not None and all(one.is_in(part) for one, part in zip(self.specs, parts, strict=True))

    def project(self, val: Any) -> Tensor:
        parts = self._apart(val)
        if parts is None:
            raise ValueError(f"cannot project {val!r:.80} on {self}: it is no stack of {len(self.specs)}")
        projected = [one.project(part) for one, part in zip(self.specs, parts, strict=True)]
        return self._together(projected, projected[0].ndim - self.specs[0].ndim)

    def encode(self, val: Any, *, ignore_device: bool = False) -> Tensor:
        """A value for each member, in a list, as a tensor of this spec; ValueError for those outside of the domain."""
        if len(val) != len(self.specs):
            raise ValueError(f"a stack of {len(self.specs)} specs takes as many values, got {len(val)}")
        parts = zip(self.specs, val, strict=True)
        return self._together([one.encode(part, ignore_device=ignore_device) for one, part in parts], 0)

    def to_numpy(self, val: Any, safe: bool | None = None) -> list[Any]:
        """The members' values as numpy arrays, in a list."""
        parts = self._apart(val)
        if parts is None or safe is not False:
            self.assert_is_in(val)
        assert parts is not None
        return [one.to_numpy(part, safe) for one, part in zip(self.specs, parts, strict=True)]

    def type_check(self, value: Any, selected_keys: Any = None) -> None:
        if value.dtype != self.dtype:
            raise TypeError(f"the value has dtype {value.dtype}, and its spec says {self.dtype}: {self}")

    def enumerate(self, use_mask: bool = False) -> Tensor:
        return self._together([one.enumerate(use_mask) for one in self.specs], 1)

    def clear_device_(self) -> Any:
        for one in self.specs:
            one.clear_device_()
        self.device = None
        return self

    def cardinality(self) -> int | float:
        """Raises NotImplementedError: each of `specs` has its own."""
        raise NotImplementedError(f"the {len(self.specs)} members differ; ask each of `specs` for its cardinality")

    @property
    def batch_ndim(self) -> int:
        ragged = list(self.shape).index(-1) if -1 in self.shape else self.ndim
        common: int = min(one.batch_ndim for one in self.specs)
        return min(ragged, common + 1)

    def with_batch(self, ndim: int, change: Callable[[Tensor], Tensor]) -> Any:
        return _restacked(self.specs, self.dim, self.shape, ndim, change)

    def __getitem__(self, index: Any) -> Any:
        return self.with_batch(self.batch_ndim, lambda tensor: tensor[index])

    def expand(self, *shape: Any) -> Any:
        return _expanded(self, shape)

    def to(self, dest: torch.device | torch.dtype | str) -> Any:
        return Stacked(*(one.to(dest) for one in self.specs), dim=self.dim)

    def clone(self) -> Any:
        return Stacked(*(one.clone() for one in self.specs), dim=self.dim)

    def to_torchrl(self) -> Any:
        return torch.stack([one.to_torchrl() for one in self.specs], self.dim)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stacked):
            return NotImplemented
        return self.dim == other.dim and self.specs == other.specs

    def __hash__(self) -> int:
        return hash((Stacked, self.dim, self.specs))

    def __repr__(self) -> str:
        inner = "".join(f"\n    {one!r}," for one in self.specs)
        return f"Stacked(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, dim={self.dim},{inner})"


class StackedComposite(Composite):
    """Composites that differ, stacked along the batch dimension `dim`; `specs` has the members.

    Its entries are those that all members have, as stacks; values are lazy stacks, each member with all its own keys.
    Entries that are set are split among the members.

    >>> from engram.specs import Unbounded
    >>> spec = torch.stack([Composite(a=Unbounded((3,))), Composite(a=Unbounded((3,)), b=Unbounded((2,)))], 0)
    >>> list(spec), list(spec[1]), spec["a"].shape, spec.is_in(spec.rand((4,)))
    (['a'], ['a', 'b'], torch.Size([2, 3]), True)
    """

    def __init__(self, *specs: Composite, dim: int = 0) -> None:
        self._set_up_lock()
        _common("batch shape", (one.shape for one in specs))
        self.specs = tuple(one.clone() for one in specs)  # nobody else can add entries to them
        self.dim = dim
        self.shape = _common_shape(self.specs, dim)
        self.device = as_device(_common("device", (one.device for one in specs)))
        self._entries = self._shared_entries()

    @property
    def stack_dim(self) -> int:
        """`dim`."""
        return self.dim

    def _shared_entries(self) -> dict[str, Spec | None]:
        shared = [key for key in self.specs[0] if all(key in one for one in self.specs)]
        return {key: self._stacked_entry(key) for key in shared}

    def _stacked_entry(self, key: str) -> Spec | None:
        entries = [one[key] for one in self.specs]
        if any(entry is None for entry in entries):
            return None
        try:
            stacked: Spec = stack_specs(entries, self.dim)
        except RuntimeError as error:
            raise RuntimeError(f"{key!r} does not stack: {error}") from error
        return stacked

    def __setitem__(self, key: Key, spec: Spec | None) -> None:
        self._require_unlocked()
        if spec is not None and spec.shape[: self.ndim] != self.shape:
            raise ValueError(
                f"{key!r} has shape {tuple(spec.shape)}, which does not start with the batch shape "
                f"{tuple(self.shape)}; expand it first"
            )
        for i, one in enumerate(self.specs):
            one[key] = None if spec is None else spec.with_batch(self.ndim, functools.partial(_select, self.dim, i))
        self._entries = self._shared_entries()

    def __delitem__(self, key: Key) -> None:
        self._require_unlocked()
        self[key]
        for one in self.specs:
            del one[key]
        self._entries = self._shared_entries()

    def update(self, dict: Mapping[Any, Any] | Composite) -> Any:
        """Adds or replaces entries, split among the members; returns the spec itself."""
        for key, spec in dict.items():
            self[key] = spec
        return self

    def is_empty(self, recurse: bool = True) -> bool:
        return all(one.is_empty(recurse) for one in self.specs)

    def parts_of(self, value: TensorDictBase) -> Sequence[TensorDictBase] | None:
        """The members' parts of a stacked TensorDict; None where it is not a stack of as many."""
        at = value.ndim - self.ndim + self.dim
        if at < 0 or value.batch_size[at] != len(self.specs):
            return None
        parts: Sequence[TensorDictBase] = value.unbind(at)
        return parts

    def _require_parts(self, value: TensorDictBase) -> Sequence[TensorDictBase]:
        parts = self.parts_of(value)
        if parts is None:
            raise ValueError(
                f"a TensorDict of batch size {tuple(value.batch_size)} is no stack of {len(self.specs)} along "
                f"dimension {self.dim} of {tuple(self.shape)}"
            )
        return parts

    def _together(self, values: Sequence[TensorDictBase], n_extra: int) -> TensorDictBase:
        stacked = LazyStackedTensorDict(*values, stack_dim=n_extra + self.dim)
        if self._names is not None:
            stacked.names = [*[None] * n_extra, *self._names]
        return stacked

    def rand(self, shape: Sequence[int] = ()) -> TensorDictBase:
        return self._together([one.rand(shape) for one in self.specs], len(tuple(shape)))

    def zero(self, shape: Sequence[int] = ()) -> TensorDictBase:
        return self._together([one.zero(shape) for one in self.specs], len(tuple(shape)))

    def one(self, shape: Sequence[int] = ()) -> TensorDictBase:
        return self._together([one.one(shape) for one in self.specs], len(tuple(shape)))

    def is_in(self, val: Any) -> bool:
        if not isinstance(val, TensorDictBase):
            return False
        parts = self.parts_of(val)
        return parts is not None and all(one.is_in(part) for one, part in zip(self.specs, parts, strict=True))

    def project(self, val: TensorDictBase) -> TensorDictBase:
        parts = self._require_parts(val)
        projected = [one.project(part) for one, part in zip(self.specs, parts, strict=True)]
        return self._together(projected, val.ndim - self.ndim)

    def encode(self, val: Any, *, ignore_device: bool = False) -> TensorDictBase:
        """A value for each member, in a list, as a lazy stack."""
        if len(val) != len(self.specs):
            raise ValueError(f"a stack of {len(self.specs)} specs takes as many values, got {len(val)}")
        parts = zip(self.specs, val, strict=True)
        encoded = [one.encode(part, ignore_device=ignore_device) for one, part in parts]
        return self._together(encoded, encoded[0].ndim - self.specs[0].ndim)

    def to_numpy(self, val: TensorDictBase, safe: bool | None = None) -> Any:
        """The members' values as dicts of numpy arrays, in a list."""
        return [one.to_numpy(part, safe) for one, part in zip(self.specs, self._require_parts(val), strict=True)]

    def type_check(self, value: Any, selected_keys: Any = None) -> None:
        for one, part in zip(self.specs, self._require_parts(value), strict=True):
            one.type_check(part, selected_keys)

    def enumerate(self, use_mask: bool = False) -> TensorDictBase:
        return self._together([one.enumerate(use_mask) for one in self.specs], 1)

    def clear_device_(self) -> Any:
        for one in self.specs:
            one.clear_device_()
        self.device = None
        self._entries = self._shared_entries()
        return self

    def nested(self) -> list[Composite]:
        return [inner for one in self.specs for inner in (one, *one.nested())]

    def repr_exclusive_keys(self) -> str:
        """The entries that not all members have, member by member, as text."""
        exclusive = ([key for key in one.leaves() if key not in self] for one in self.specs)
        return "\n".join(f"{i}: {keys}" for i, keys in enumerate(exclusive) if keys)

    def cardinality(self) -> int | float:
        """Raises NotImplementedError: each of `specs` has its own."""
        raise NotImplementedError(f"the {len(self.specs)} members differ; ask each of `specs` for its cardinality")

    def mapped_members(self, change: Callable[[Composite], Composite]) -> Any:
        """The stack of the changed members, whose batch shapes stay."""
        return stack_specs([change(one) for one in self.specs], self.dim)

    def with_batch(self, ndim: int, change: Callable[[Tensor], Tensor]) -> Any:
        return _restacked(self.specs, self.dim, self.shape, ndim, change)

    def expand(self, *shape: Any) -> Any:
        return _expanded(self, shape)

    def to(self, dest: torch.device | torch.dtype | str) -> Any:
        return StackedComposite(*(one.to(dest) for one in self.specs), dim=self.dim)

    def clone(self) -> Any:
        return StackedComposite(*self.specs, dim=self.dim)

    def to_torchrl(self) -> Any:
        return torch.stack([one.to_torchrl() for one in self.specs], self.dim)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Composite):
            return NotImplemented
        return isinstance(other, StackedComposite) and (self.dim, self.specs) == (other.dim, other.specs)

    def __hash__(self) -> int:
        return hash((StackedComposite, self.shape, self.device))  # entries may be added while it is a key

    def __repr__(self) -> str:
        inner = "".join(f"\n{one!r},".replace("\n", "\n    ") for one in self.specs)
        return f"StackedComposite(shape={tuple(self.shape)}, device={self.device}, dim={self.dim},{inner})"
