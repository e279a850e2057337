"""`Composite`: named specs, nested as a TensorDict is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.pytree import Key, key_path
from engram.specs.tensors import Device, Spec, as_device, as_shape, shape_after

Self = TypeVar("Self", bound=Spec)


class Composite(Spec):
    """Named specs, nested as a TensorDict is; `shape` is the batch shape that every entry's shape starts with.

    Keys are strings, or tuples of them for nested entries; anything else in brackets indexes the batch dimensions. An
    entry may be None: the key exists, and any value or none is allowed. `batch_size=` is `shape=`.

    >>> from engram.specs import Binary, Unbounded
    >>> spec = Composite(observation=Unbounded((4,)), inner=Composite(flag=Binary(1)))
    >>> sorted(spec.rand((2,)).keys(include_nested=True, leaves_only=True), key=str)
    [('inner', 'flag'), 'observation']
    >>> spec.expand(3)[0] == spec
    True
    """

    dtype = None

    @property
    def batch_ndim(self) -> int:
        return self.ndim

    def __init__(
        self,
        entries: Mapping[str, Spec | None] | None = None,
        *,
        shape: Sequence[int] | int | None = None,
        batch_size: Sequence[int] | int | None = None,
        device: Device = None,
        **more: Spec | None,
    ) -> None:
        given = [one for one in (shape, batch_size) if one is not None]
        if len(given) == 2:
            raise TypeError("shape and batch_size are the same: give one of them")
        self.shape = as_shape(given[0] if given else ())
        self.device = as_device(device)
        self._entries: dict[str, Spec | None] = {}
        given_entries: dict[Any, Spec | None] = {**dict((entries or {}).items()), **more}
        self.update(given_entries)

    @property
    def batch_size(self) -> torch.Size:
        """`shape`."""
        return self.shape

    def _specs(self) -> dict[str, Spec]:
        return {key: spec for key, spec in self._entries.items() if spec is not None}

    def __setitem__(self, key: Key, spec: Spec | None) -> None:
        name, *rest = key_path(key)
        if rest:
            inner = self._entries.setdefault(name, Composite(shape=self.shape, device=self.device))
            if not isinstance(inner, Composite):
                raise KeyError(f"{name!r} is {inner}, which has no entries; delete it before you set {key!r}")
            inner[tuple(rest)] = spec
            return
        if spec is None:
            self._entries[name] = None
            return
        if not isinstance(spec, Spec):
            raise TypeError(f"{name!r} must be a spec, got {type(spec).__name__}")
        if spec.shape[: self.ndim] != self.shape:
            raise ValueError(
                f"{name!r} has shape {tuple(spec.shape)}, which does not start with the batch shape "
                f"{tuple(self.shape)}; expand it first"
            )
        self._entries[name] = spec if self.device in (None, spec.device) else spec.to(self.device)

    def __getitem__(self, key: Any) -> Any:
        if not _is_key(key):
            return self.with_batch(self.ndim, lambda tensor: tensor[key])
        entry: Any = self
        for name in key_path(key):
            if not isinstance(entry, Composite) or name not in entry._entries:
                raise KeyError(f"there is no entry {key!r}, there are {list(self.leaves())}")
            entry = entry._entries[name]
        return entry

    def __delitem__(self, key: Key) -> None:
        name, *rest = key_path(key)
        self[key]
        if rest:
            del self._entries[name][tuple(rest)]  # type: ignore[union-attr]
        else:
            del self._entries[name]

    def __contains__(self, key: Key) -> bool:
        absent = object()
        return self.get(key, absent) is not absent

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key, default: Any = None) -> Any:
        """The entry, or `default`."""
        try:
            return self[key]
        except KeyError:
            return default

    def set(self: Self, key: Key, spec: Spec) -> Self:
        """Adds or replaces an entry; returns the spec itself."""
        assert isinstance(self, Composite)
        self[key] = spec
        return self

    def pop(self, key: Key) -> Any:
        """Removes an entry and returns it. Raises KeyError if it does not exist."""
        entry = self[key]
        del self[key]
        return entry

    def update(self, entries: Mapping[Any, Spec | None] | Composite) -> None:
        """Adds or replaces entries."""
        for key, spec in entries.items():
            self[key] = spec

    def keys(self, include_nested: bool = False, leaves_only: bool = False) -> list[Any]:
        """The keys of the entries: with nested ones if `include_nested`, without Composites if `leaves_only`."""
        return [key for key, _ in self.items(include_nested, leaves_only)]

    def values(self, include_nested: bool = False, leaves_only: bool = False) -> list[Any]:
        """The entries of `keys`."""
        return [spec for _, spec in self.items(include_nested, leaves_only)]

    def items(self, include_nested: bool = False, leaves_only: bool = False) -> list[tuple[Any, Any]]:
        """The entries of `keys` with their keys."""
        entries: list[tuple[Any, Any]] = []
        for name, spec in self._entries.items():
            if not (leaves_only and isinstance(spec, Composite)):
                entries.append((name, spec))
            if include_nested and isinstance(spec, Composite):
                entries += [((name, *key_path(key)), inner) for key, inner in spec.items(True, leaves_only)]
        return entries

    def leaves(self) -> dict[str | tuple[str, ...], Spec]:
        """Every spec that is not a Composite, by key: a string at the root, a tuple for nested ones."""
        return {key: spec for key, spec in self.items(True, True) if spec is not None}

    def empty(self) -> Composite:
        """A Composite of the same shape and device, without entries."""
        return Composite(shape=self.shape, device=self.device)

    def is_empty(self) -> bool:
        """Whether there is no leaf."""
        return not self.leaves()

    def rand(self, shape: Sequence[int] = ()) -> TensorDictBase:
        return self._dict({key: spec.rand(shape) for key, spec in self._specs().items()}, shape)

    def zero(self, shape: Sequence[int] = ()) -> TensorDictBase:
        return self._dict({key: spec.zero(shape) for key, spec in self._specs().items()}, shape)

    def one(self, shape: Sequence[int] = ()) -> TensorDictBase:
        return self._dict({key: spec.one(shape) for key, spec in self._specs().items()}, shape)

    def _dict(self, entries: dict[str, Any], shape: Sequence[int]) -> TensorDictBase:
        return TensorDict(entries, batch_size=(*shape, *self.shape), device=self.device)

    def is_in(self, value: Any) -> bool:
        if not isinstance(value, TensorDictBase):
            return False
        return all(spec.is_in(value.get(key, None)) for key, spec in self._specs().items())

    def project(self, value: TensorDictBase) -> TensorDictBase:
        """`project` of each entry; entries without a spec stay. Raises KeyError if an entry is missing."""
        if missing := [key for key in self._specs() if value.get(key, None) is None]:
            raise KeyError(f"cannot project on {missing}: there are only {list(value.keys())}")
        return value.copy().update({key: spec.project(value.get(key)) for key, spec in self._specs().items()})

    def encode(self, value: Any) -> TensorDictBase:
        specs = self._specs()
        encoded = {key: spec.encode(value[key]) for key, spec in specs.items()}
        batches = [part.shape[: part.ndim - specs[key].ndim] for key, part in encoded.items()]
        return self._dict(encoded, batches[0] if batches else ())

    def to_numpy(self, value: TensorDictBase) -> dict[str, Any]:
        return {key: spec.to_numpy(value.get(key)) for key, spec in self._specs().items()}

    def _mapped(self: Self, change: Callable[[Any], Any], *, shape: Sequence[int], device: Device) -> Self:
        assert isinstance(self, Composite)
        entries = {key: None if spec is None else change(spec) for key, spec in self._entries.items()}
        return type(self)(entries, shape=shape, device=device)

    def cardinality(self) -> int | float:
        return math.prod(spec.cardinality() for spec in self._specs().values())

    def expand(self: Self, *shape: Any) -> Self:
        assert isinstance(self, Composite)
        new = torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        return self._mapped(lambda spec: spec.expand((*new, *spec.shape[self.ndim :])), shape=new, device=self.device)

    def to(self: Self, dest: torch.device | torch.dtype | str) -> Self:
        assert isinstance(self, Composite)
        device = self.device if isinstance(dest, torch.dtype) else dest
        return self._mapped(lambda spec: spec.to(dest), shape=self.shape, device=device)

    def clone(self: Self) -> Self:
        assert isinstance(self, Composite)
        return self._mapped(lambda spec: spec.clone(), shape=self.shape, device=self.device)

    def with_batch(self: Self, ndim: int, change: Callable[[Tensor], Tensor]) -> Self:
        assert isinstance(self, Composite)
        shape = (*shape_after(self.shape[:ndim], change), *self.shape[ndim:])
        return self._mapped(lambda spec: spec.with_batch(ndim, change), shape=shape, device=self.device)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, Composite)
        return (self.shape, self.device, self._entries) == (other.shape, other.device, other._entries)

    def __hash__(self) -> int:
        return hash((Composite, self.shape, self.device))  # entries may be added while it is a key

    def __repr__(self) -> str:
        inner = "".join(f"\n    {key}: {spec!r}".replace("\n", "\n    ") for key, spec in self._entries.items())
        return f"Composite(shape={tuple(self.shape)}, device={self.device},{inner})"


def _is_key(key: Any) -> bool:
    return isinstance(key, str) or (isinstance(key, tuple) and bool(key) and all(isinstance(k, str) for k in key))
