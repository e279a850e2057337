"""Specs by key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from engram.data.specs.base import Device, Self, Spec, as_device


class Composite(Spec):
    """Named specs, nested as a TensorDict is; `shape` is the batch shape that every entry's shape starts with.

    >>> from engram.data.specs import Binary, Unbounded
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
        self.device = as_device(device)
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
