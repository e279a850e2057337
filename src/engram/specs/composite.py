"""`Composite`: named specs, nested as a TensorDict is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram._advice import advised
from engram.pytree import Key, key_path
from engram.specs.tensors import Device, Spec, as_device, as_shape, as_sizes, require_expandable, shape_after
from engram.specs.torchrl import own_spec

Self = TypeVar("Self", bound=Spec)
_NOTHING = object()


@advised
class Composite(Spec):
    """Named specs, nested as a TensorDict is; `shape` is the batch shape that every entry's shape starts with.

    Keys are strings, or tuples of them for nested entries; anything else in brackets indexes the batch dimensions. An
    entry may be None: the key exists, and any value or none is allowed. `batch_size=` is `shape=`. `names` are those of
    the batch dimensions, which values have too. `data_cls=TensorDict` and `step_mdp_static=False` have no effect.

    >>> from engram.specs import Binary, Unbounded
    >>> spec = Composite(observation=Unbounded((4,)), inner=Composite(flag=Binary(1)))
    >>> sorted(spec.rand((2,)).keys(include_nested=True, leaves_only=True), key=str)
    [('inner', 'flag'), 'observation']
    >>> spec.expand(3)[0] == spec
    True
    """

    dtype = None
    _names: list[str | None] | None = None

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
        names: Sequence[str | None] | None = None,
        **more: Spec | None,
    ) -> None:
        given = [one for one in (shape, batch_size) if one is not None]
        if len(given) == 2:
            raise TypeError("shape and batch_size are the same: give one of them")
        self.shape = as_shape(given[0] if given else ())
        self.device = as_device(device)
        self._set_up_lock()
        self.names = names
        self._entries: dict[str, Spec | None] = {}
        given_entries: dict[Any, Spec | None] = {**dict((entries or {}).items()), **more}
        self.update(given_entries)

    @property
    def batch_size(self) -> torch.Size:
        """`shape`."""
        return self.shape

    @property
    def _device(self) -> torch.device | None:
        """`device`, under the name by which TorchRL's environments read it of the specs that they are given."""
        return self.device

    # ---- names of dimensions ----
    @property
    def names(self) -> list[str | None]:
        """The names of the batch dimensions, None where one has none; may be set."""
        return [None] * self.ndim if self._names is None else list(self._names)

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        if names is not None and len(names) != self.ndim:
            raise ValueError(f"there are {self.ndim} batch dimensions, got the names {list(names)}")
        self._names = None if names is None else list(names)

    def refine_names(self: Self, *names: Any) -> Self:
        """Names dimensions, in place: a name for each, `...` for those between; returns the spec itself.

        Raises RuntimeError for a dimension that has another name, or a number of names that does not fit.
        """
        assert isinstance(self, Composite)
        given = list(names)
        if ... in given:
            at = given.index(...)
            n_between = self.ndim - len(given) + 1
            given[at : at + 1] = self.names[at : at + n_between]
        pairs = list(zip(self.names, given, strict=False))
        if len(given) != self.ndim or any(old not in (None, new) for old, new in pairs):
            raise RuntimeError(f"refine_names: cannot give {list(names)} to dimensions named {self.names}")
        self.names = given
        return self

    # ---- locks ----
    def _set_up_lock(self) -> None:
        self._locked = False
        self._n_holders = 0  # locked Composites that this one is in
        self._held: list[Composite] = []

    @property
    def is_locked(self) -> bool:
        """Whether entries can neither be set nor deleted."""
        return self._locked or self._n_holders > 0

    @property
    def locked(self) -> bool:
        """`is_locked`."""
        return self.is_locked

    def nested(self) -> list[Composite]:
        """All Composites in this one, at any depth."""
        return [spec for spec in self.values(include_nested=True) if isinstance(spec, Composite)]

    def lock_(self: Self, recurse: bool | None = None) -> Self:
        """Makes setting and deleting entries a RuntimeError, also in nested ones unless `recurse=False`.

        Returns the spec itself; copies of it are not locked.
        """
        assert isinstance(self, Composite)
        if not self._locked:
            self._locked = True
            self._held = [] if recurse is False else self.nested()
            for inner in self._held:
                inner._n_holders += 1
        return self

    def unlock_(self: Self, recurse: bool | None = None) -> Self:
        """Undoes `lock_`; with `recurse=True` of nested ones that were locked by themselves, too.

        Raises RuntimeError for a Composite in one that is locked.
        """
        assert isinstance(self, Composite)
        if self._n_holders:
            raise RuntimeError("Cannot unlock a Composite that is in a locked one: unlock that one first")
        for inner in self._held:
            inner._n_holders -= 1
        self._held, self._locked = [], False
        for inner in self.nested() if recurse else ():
            inner.unlock_()
        return self

    def _require_unlocked(self) -> None:
        if self.is_locked:
            raise RuntimeError("Cannot modify a locked Composite: call unlock_() first, or change a clone()")

    def _specs(self) -> dict[str, Spec]:
        return {key: spec for key, spec in self._entries.items() if spec is not None}

    def __setitem__(self, key: Key, spec: Spec | None) -> None:
        name, *rest = key_path(key)
        if rest:
            if name not in self._entries:
                self[name] = Composite(shape=self.shape, device=self.device)
            inner = self._entries[name]
            if not isinstance(inner, Composite):
                raise KeyError(f"{name!r} is {inner}, which has no entries; delete it before you set {key!r}")
            inner[tuple(rest)] = spec
            return
        self._require_unlocked()
        if spec is None:
            self._entries[name] = None
            return
        spec = own_spec(spec)
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
        name, *rest = key_path(key)
        entry: Any = self._entries.get(name, _NOTHING)
        if rest:
            entry = entry.get(tuple(rest), _NOTHING) if isinstance(entry, Composite) else _NOTHING
        if entry is _NOTHING:
            raise KeyError(f"there is no entry {key!r}, there are {list(self.leaves())}")
        return entry

    def __delitem__(self, key: Key) -> None:
        name, *rest = key_path(key)
        self[key]
        if rest:
            del self._entries[name][tuple(rest)]  # type: ignore[union-attr]
        else:
            self._require_unlocked()
            del self._entries[name]

    def __contains__(self, key: Key) -> bool:
        return self.get(key, _NOTHING) is not _NOTHING

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, item: Key, default: Any = None) -> Any:
        """The entry, or `default`."""
        try:
            return self[item]
        except KeyError:
            return default

    def set(self: Self, name: Key, spec: Spec) -> Self:
        """Adds or replaces an entry; returns the spec itself."""
        assert isinstance(self, Composite)
        self[name] = spec
        return self

    def pop(self, key: Key, default: Any = _NOTHING) -> Any:
        """Removes an entry and returns it. Where it does not exist: `default`, or KeyError if there is none."""
        if default is not _NOTHING and key not in self:
            return default
        entry = self[key]
        del self[key]
        return entry

    def update(self: Self, dict_or_spec: Mapping[Any, Any] | Composite) -> Self:
        """Adds or replaces entries, also within nested Composites and dicts; returns the spec itself."""
        assert isinstance(self, Composite)
        for key, spec in dict_or_spec.items():
            present = self.get(key)
            if isinstance(spec, Mapping):
                present = present if isinstance(present, Composite) else self.set(key, Composite(shape=self.shape))[key]
                present.update(spec)
            elif isinstance(present, Composite) and isinstance(spec, Composite) and present.shape == spec.shape:
                present.update(spec)
            else:
                self[key] = spec
        return self

    def separates(self, *keys: Key, default: Any = None) -> Any:
        """Removes these entries and returns them, as a Composite of the same shape; `default` where there is none."""
        apart = self.empty()
        for key in keys:
            if key in self:
                apart[key] = self.pop(key)
        return apart if len(apart) else default

    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: Callable[[type], bool] | None = None,
        step_mdp_static_only: bool = False,
    ) -> list[Any]:
        """The keys of the entries: with nested ones if `include_nested`, without Composites if `leaves_only`.

        `is_leaf`: tells of an entry's class whether it is a leaf. `step_mdp_static_only` leaves out what no step
        changes, and has no effect: there are no such entries.
        """
        return [key for key, _ in self._listed(include_nested, leaves_only, is_leaf)]

    def values(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: Callable[[type], bool] | None = None,
        step_mdp_static_only: bool = False,
    ) -> list[Any]:
        """The entries of `keys`."""
        return [spec for _, spec in self._listed(include_nested, leaves_only, is_leaf)]

    def items(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: Callable[[type], bool] | None = None,
        step_mdp_static_only: bool = False,
    ) -> list[tuple[Any, Any]]:
        """The entries of `keys` with their keys."""
        return self._listed(include_nested, leaves_only, is_leaf)

    def _listed(
        self, include_nested: bool, leaves_only: bool, is_leaf: Callable[[type], bool] | None
    ) -> list[tuple[Any, Any]]:
        entries: list[tuple[Any, Any]] = []
        for name, spec in self._entries.items():
            is_one = not isinstance(spec, Composite) if is_leaf is None else is_leaf(type(spec))
            if is_one or not leaves_only:
                entries.append((name, spec))
            if include_nested and isinstance(spec, Composite):
                inner = spec.items(True, leaves_only, is_leaf=is_leaf)
                entries += [((name, *key_path(key)), part) for key, part in inner]
        return entries

    def leaves(self) -> dict[str | tuple[str, ...], Spec]:
        """Every spec that is not a Composite, by key: a string at the root, a tuple for nested ones."""
        return {key: spec for key, spec in self.items(True, True) if spec is not None}

    def empty(self) -> Composite:
        """A Composite of the same shape, names and device, without entries."""
        return Composite(shape=self.shape, device=self.device, names=self._names)

    def is_empty(self, recurse: bool = True) -> bool:
        """Whether there is no leaf; with `recurse=False` whether there is no entry."""
        return not self.leaves() if recurse else not len(self)

    def rand(self, shape: Sequence[int] = ()) -> TensorDictBase:
        return self._dict({key: spec.rand(shape) for key, spec in self._specs().items()}, shape)

    def zero(self, shape: Sequence[int] = ()) -> TensorDictBase:
        return self._dict({key: spec.zero(shape) for key, spec in self._specs().items()}, shape)

    def one(self, shape: Sequence[int] = ()) -> TensorDictBase:
        return self._dict({key: spec.one(shape) for key, spec in self._specs().items()}, shape)

    def _dict(self, entries: dict[str, Any], shape: Sequence[int]) -> TensorDictBase:
        names = None if self._names is None else [*[None] * len(tuple(shape)), *self._names]
        return TensorDict(entries, batch_size=(*shape, *self.shape), device=self.device, names=names)

    def rand_update(self, val: TensorDictBase) -> TensorDictBase:
        """Sets the entries of a TensorDict to draws, in place; returns it."""
        return val.update(self.rand(self._batch_of(val)))

    def zeros_update(self, val: TensorDictBase) -> TensorDictBase:
        """Sets the entries of a TensorDict to zeros, in place; returns it."""
        return val.update(self.zero(self._batch_of(val)))

    def ones_update(self, val: TensorDictBase) -> TensorDictBase:
        """Sets the entries of a TensorDict to ones, in place; returns it."""
        return val.update(self.one(self._batch_of(val)))

    def _batch_of(self, val: TensorDictBase) -> torch.Size:
        """The batch dimensions of a TensorDict before those of this spec."""
        batch = torch.Size(val.batch_size[: val.ndim - self.ndim])
        if (*batch, *self.shape) != tuple(val.batch_size):
            raise ValueError(
                f"batch size {tuple(val.batch_size)} does not end in {tuple(self.shape)}, the spec's shape"
            )
        return batch

    def enumerate(self, use_mask: bool = False) -> TensorDictBase:
        """All combinations of the entries' values, along a new first dimension; errors as of the entries."""
        each = {key: spec.enumerate(use_mask) for key, spec in self._specs().items()}
        if not each:
            return self._dict({}, ())
        numbers = torch.cartesian_prod(*(torch.arange(len(values), device="cpu") for values in each.values())).reshape(
            -1, len(each)
        )
        columns = zip(each.items(), numbers.unbind(-1), strict=True)
        return self._dict({key: values[number] for (key, values), number in columns}, (len(numbers),))

    def is_in(self, val: Any) -> bool:
        if not isinstance(val, TensorDictBase | dict):
            return False
        return all(spec.is_in(val.get(key, None)) for key, spec in self._specs().items())

    def type_check(self, value: Any, selected_keys: Any = None) -> None:
        if not isinstance(value, TensorDictBase):
            self[selected_keys].type_check(value)
            return
        keys = [selected_keys] if isinstance(selected_keys, str) else selected_keys
        for key in list(self._specs()) if keys is None else keys:
            self[key].type_check(value[key])

    def clear_device_(self: Self) -> Self:
        assert isinstance(self, Composite)
        self.device = None
        for spec in self._specs().values():
            spec.clear_device_()
        return self

    def project(self, val: TensorDictBase) -> TensorDictBase:
        """`project` of each entry; entries without a spec stay. Raises KeyError if an entry is missing."""
        if missing := [key for key in self._specs() if val.get(key, None) is None]:
            raise KeyError(f"cannot project on {missing}: there are only {list(val.keys())}")
        return val.copy().update({key: spec.project(val.get(key)) for key, spec in self._specs().items()})

    def encode(self, val: Any, *, ignore_device: bool = False) -> TensorDictBase:
        specs = self._specs()
        encoded = {key: spec.encode(val[key], ignore_device=ignore_device) for key, spec in specs.items()}
        batches = [part.shape[: part.ndim - specs[key].ndim] for key, part in encoded.items()]
        return self._dict(encoded, batches[0] if batches else ())

    def to_numpy(self, val: TensorDictBase, safe: bool | None = None) -> dict[str, Any]:
        return {key: spec.to_numpy(val.get(key), safe) for key, spec in self._specs().items()}

    def _mapped(
        self: Self,
        change: Callable[[Any], Any],
        *,
        shape: Sequence[int],
        device: Device,
        names: Sequence[str | None] | None = None,
    ) -> Self:
        assert isinstance(self, Composite)
        entries = {key: None if spec is None else change(spec) for key, spec in self._entries.items()}
        return type(self)(entries, shape=shape, device=device, names=names)

    def cardinality(self) -> int | float:
        return math.prod(spec.cardinality() for spec in self._specs().values())

    def expand(self: Self, *shape: Any) -> Self:
        assert isinstance(self, Composite)
        new = as_sizes(shape)
        require_expandable(self.shape, new, self.ndim)
        names = None if self._names is None else [*[None] * (len(new) - self.ndim), *self._names]
        return self._mapped(
            lambda spec: spec.expand((*new, *spec.shape[self.ndim :])), shape=new, device=self.device, names=names
        )

    def to(self: Self, dest: torch.device | torch.dtype | str) -> Self:
        assert isinstance(self, Composite)
        device = self.device if isinstance(dest, torch.dtype) else dest
        return self._mapped(lambda spec: spec.to(dest), shape=self.shape, device=device, names=self._names)

    def clone(self: Self) -> Self:
        assert isinstance(self, Composite)
        return self._mapped(lambda spec: spec.clone(), shape=self.shape, device=self.device, names=self._names)

    def with_batch(self: Self, ndim: int, change: Callable[[Tensor], Tensor]) -> Self:
        assert isinstance(self, Composite)
        shape = (*shape_after(self.shape[:ndim], change), *self.shape[ndim:])
        return self._mapped(
            lambda spec: spec.with_batch(ndim, change),
            shape=shape,
            device=self.device,
            names=self._names_after(ndim, change),
        )

    def _names_after(self, ndim: int, change: Callable[[Any], Any]) -> list[str | None] | None:
        if self._names is None:
            return None
        changed: TensorDictBase = change(TensorDict({}, self.shape[:ndim], names=self._names[:ndim]))
        return [*changed.names, *self._names[ndim:]]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, Composite)
        return (self.shape, self.device, self._entries) == (other.shape, other.device, dict(other.items()))

    def __hash__(self) -> int:
        return hash((Composite, self.shape, self.device))  # entries may be added while it is a key

    def __repr__(self) -> str:
        inner = "".join(f"\n    {key}: {spec!r}".replace("\n", "\n    ") for key, spec in self._entries.items())
        return f"Composite(shape={tuple(self.shape)}, device={self.device},{inner})"


def _is_key(key: Any) -> bool:
    return isinstance(key, str) or (isinstance(key, tuple) and bool(key) and all(isinstance(k, str) for k in key))
