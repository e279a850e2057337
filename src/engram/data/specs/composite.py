"""Specs by key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.data.specs.base import Device, Self, Spec, as_device, changed

Key = str | tuple[str, ...]


class Composite(Spec):
    """Named specs, nested as a TensorDict is; `shape` is the batch shape that every entry's shape starts with.

    Keys are strings, or tuples of them for nested entries; anything else in brackets indexes the batch dimensions.

    >>> from engram.data.specs import Binary, Unbounded
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
        entries: Mapping[str, Spec] | None = None,
        *,
        shape: Sequence[int] = (),
        device: Device = None,
        **more: Spec,
    ) -> None:
        self.shape = torch.Size(shape)
        self.device = as_device(device)
        self._entries: dict[str, Spec] = {}
        self.update({**(entries or {}), **more})

    def __setitem__(self, key: Key, spec: Spec) -> None:
        name, *rest = _path(key)
        if rest:
            inner = self._entries.setdefault(name, Composite(shape=self.shape, device=self.device))
            if not isinstance(inner, Composite):
                raise KeyError(f"{name!r} is {inner}, which has no entries; delete it before you set {key!r}")
            inner[tuple(rest)] = spec
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
        found: Any = self
        for name in _path(key):
            if not isinstance(found, Composite) or name not in found._entries:
                raise KeyError(f"there is no entry {key!r}, there are {list(self.leaves())}")
            found = found._entries[name]
        return found

    def __delitem__(self, key: Key) -> None:
        *parents, name = _path(key)
        self[key]
        inner = self[tuple(parents)] if parents else self
        del inner._entries[name]

    def __contains__(self, key: Key) -> bool:
        return self.get(key, None) is not None

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
        """Takes an entry out and returns it. Raises KeyError where there is none."""
        found = self[key]
        del self[key]
        return found

    def update(self, entries: Mapping[str, Spec] | Composite) -> None:
        """Adds or replaces entries."""
        for key, spec in entries.items():
            self[key] = spec

    def keys(self, include_nested: bool = False, leaves_only: bool = False) -> list[Any]:
        """Names of the entries: as in a TensorDict, nested ones on request, Composites unless `leaves_only`."""
        return [key for key, _ in self.items(include_nested, leaves_only)]

    def values(self, include_nested: bool = False, leaves_only: bool = False) -> list[Spec]:
        """The entries of `keys`."""
        return [spec for _, spec in self.items(include_nested, leaves_only)]

    def items(self, include_nested: bool = False, leaves_only: bool = False) -> list[tuple[Any, Spec]]:
        """The entries of `keys` with their names."""
        found: list[tuple[Any, Spec]] = []
        for name, spec in self._entries.items():
            if not (leaves_only and isinstance(spec, Composite)):
                found.append((name, spec))
            if include_nested and isinstance(spec, Composite):
                found += [((name, *_path(key)), inner) for key, inner in spec.items(True, leaves_only)]
        return found

    def leaves(self) -> dict[str | tuple[str, ...], Spec]:
        """Every spec that is not a Composite, under a string at the root and under a tuple below it."""
        return dict(self.items(include_nested=True, leaves_only=True))

    def empty(self) -> Composite:
        """A Composite of the same shape and device, without entries."""
        return Composite(shape=self.shape, device=self.device)

    def is_empty(self) -> bool:
        """Whether there is no leaf."""
        return not self.leaves()

    def rand(self, shape: Sequence[int] = ()) -> TensorDictBase:
        return self._dict({key: spec.rand(shape) for key, spec in self._entries.items()}, shape)

    def zero(self, shape: Sequence[int] = ()) -> TensorDictBase:
        return self._dict({key: spec.zero(shape) for key, spec in self._entries.items()}, shape)

    def one(self, shape: Sequence[int] = ()) -> TensorDictBase:
        return self._dict({key: spec.one(shape) for key, spec in self._entries.items()}, shape)

    def _dict(self, entries: dict[str, Any], shape: Sequence[int]) -> TensorDictBase:
        return TensorDict(entries, batch_size=(*shape, *self.shape), device=self.device)

    def is_in(self, value: Any) -> bool:
        if not isinstance(value, TensorDictBase):
            return False
        return all(spec.is_in(value.get(key, None)) for key, spec in self._entries.items())

    def project(self, value: TensorDictBase) -> TensorDictBase:
        """As for tensors; entries that have no spec stay. Raises KeyError where an entry is missing."""
        if missing := [key for key in self._entries if value.get(key, None) is None]:
            raise KeyError(f"cannot project on {missing}: there are only {list(value.keys())}")
        return value.copy().update({key: spec.project(value.get(key)) for key, spec in self._entries.items()})

    def encode(self, value: Any) -> TensorDictBase:
        encoded = {key: spec.encode(value[key]) for key, spec in self._entries.items()}
        batches = [part.shape[: part.ndim - self._entries[key].ndim] for key, part in encoded.items()]
        return self._dict(encoded, batches[0] if batches else ())

    def to_numpy(self, value: TensorDictBase) -> dict[str, Any]:
        return {key: spec.to_numpy(value.get(key)) for key, spec in self._entries.items()}

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

    def clone(self: Self) -> Self:
        assert isinstance(self, Composite)
        entries = {key: spec.clone() for key, spec in self._entries.items()}
        return type(self)(entries, shape=self.shape, device=self.device)

    def with_batch(self: Self, ndim: int, change: Callable[[Tensor], Tensor]) -> Self:
        assert isinstance(self, Composite)
        shape = (*changed(self.shape[:ndim], change), *self.shape[ndim:])
        entries = {key: spec.with_batch(ndim, change) for key, spec in self._entries.items()}
        return type(self)(entries, shape=shape, device=self.device)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Composite):
            return NotImplemented
        return (self.shape, self.device, self._entries) == (other.shape, other.device, other._entries)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        inner = "".join(f"\n    {key}: {spec!r}".replace("\n", "\n    ") for key, spec in self._entries.items())
        return f"Composite(shape={tuple(self.shape)}, device={self.device},{inner})"


def _is_key(key: Any) -> bool:
    return isinstance(key, str) or (isinstance(key, tuple) and bool(key) and all(isinstance(k, str) for k in key))


def _path(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key
