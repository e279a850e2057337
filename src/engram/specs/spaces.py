"""Specs from gymnasium's spaces, and spaces from specs.

Spaces are recognised by the names of their classes, so that reading them does not import gymnasium.
"""

from __future__ import annotations

import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from engram._checks import attribute
from engram._packages import packages
from engram.pytree import KeyPath
from engram.specs.composite import Composite
from engram.specs.tensors import (
    Binary,
    Bounded,
    Categorical,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Spec,
    Unbounded,
    as_ordered_int64,
    ordered_limits,
)
from engram.specs.text import Text


def spec_from_space(space: Any, categorical: bool = False) -> Spec:
    """The spec of a gymnasium space's values as tensors.

    Box: `Bounded`, or `Unbounded` if no bound restricts its dtype. Discrete and MultiDiscrete: int64,
    one-hot vectors (`OneHot`, `MultiOneHot`), or with `categorical=True` integers that count from 0 whatever the
    space's `start` (`Categorical`, `MultiCategorical`); a grid is flattened. MultiBinary: `Binary`. Dict and Tuple:
    `Composite`, a Tuple's keys are "0", "1", ... Text: `Text` of its charset and lengths; other spaces of `str`: `Text`
    of `TEXT_BYTES`. Raises TypeError for spaces without a tensor form (Graph, Sequence, OneOf, a Box of long doubles).

    >>> import gymnasium
    >>> spec_from_space(gymnasium.spaces.Discrete(3))
    OneHot(n=3, shape=(3,), dtype=torch.int64, device=None)
    """
    spec: Spec = for_space_class(space, _SPECS)(space, categorical)
    return spec


#: Bytes of a text of a space of `str` that has no `max_length`, such as a mission of MiniGrid.
TEXT_BYTES = 256

_VARIABLE = {
    "Sequence": "its values have any length",
    "Graph": "its values have any number of nodes and edges",
    "OneOf": "its values are now of one space, now of another",
}


def for_space_class(space: Any, kinds: dict[str, Any]) -> Any:
    """The entry of `kinds` for the class of `space`. Raises TypeError for spaces without a tensor form."""
    names = [cls.__name__ for cls in type(space).__mro__]
    if attribute(space, "dtype.kind") == "U":
        names.append("Text")
    for name in names:
        if name in kinds:
            if name == "Dict":
                _require_distinct_names(space)
            return kinds[name]
    reason = next((_VARIABLE[name] for name in names if name in _VARIABLE), "its values have no fixed shape")
    raise TypeError(
        f"a space of type {type(space).__name__} has no tensor form, as {reason}; leave it out or convert it by a "
        "wrapper (gymnasium.wrappers.FilterObservation, TransformObservation), or step the environment yourself and "
        "add dicts to ReplayBuffer(storage=ListStorage(n), collate_fn=list), which holds such values as they are; "
        f"these have a tensor form: {', '.join(kinds)}"
    )


def _require_distinct_names(space: Any) -> None:
    names = [str(key) for key in space.spaces]
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise ValueError(f"{space} has two keys that are called {twice!r}; rename one of them by a wrapper")


def _box(space: Any, categorical: bool) -> Spec:
    try:
        low, high = (
            torch.tensor(end.astype(space.dtype.type), device="cpu") for end in (space.low, space.high)
        )  # native byte order
    except TypeError as error:
        raise TypeError(
            f"a Box of {space.dtype} has no tensor form, as torch has no such numbers; give it another dtype by a "
            "wrapper (gymnasium.wrappers.TransformObservation, TransformAction)"
        ) from error
    dtype = low.dtype
    if dtype.is_floating_point:
        is_bounded = bool(torch.isfinite(low).any() or torch.isfinite(high).any())
    else:
        first, last = ordered_limits(dtype)
        is_restricted = bool(
            (as_ordered_int64(low, dtype) > first).any() or (as_ordered_int64(high, dtype) < last).any()
        )
        is_bounded = is_restricted or dtype.itemsize < 8  # the full range of uint8 is a bound that users expect
    if not is_bounded:
        return Unbounded(space.shape, dtype=dtype)
    return Bounded(low, high, shape=space.shape, dtype=dtype)


def _text(space: Any, categorical: bool) -> Spec:
    longest = attribute(space, "max_length")
    if longest is None:
        return Text(TEXT_BYTES)
    characters, shortest = space.character_set, int(space.min_length)
    return Text(text_width(longest, characters), charset=characters, min_length=shortest, max_length=longest)


def text_width(max_length: int | None, characters: Iterable[str]) -> int:
    """The bytes that a text of so many of these characters has at most; None: that a text of any length gets."""
    if max_length is None:
        return TEXT_BYTES
    widest = max((len(character.encode(errors="surrogatepass")) for character in characters), default=1)
    return max(1, max_length * widest)


def _discrete(space: Any, categorical: bool) -> Spec:
    return Categorical(int(space.n)) if categorical else OneHot(int(space.n), dtype=torch.int64)


def _multi_discrete(space: Any, categorical: bool) -> Spec:
    nvec = [int(n) for n in np.asarray(space.nvec).reshape(-1)]
    return MultiCategorical(nvec) if categorical else MultiOneHot(nvec, dtype=torch.int64)


def _dict(space: Any, categorical: bool) -> Spec:
    return Composite({str(key): spec_from_space(part, categorical) for key, part in space.spaces.items()})


def _tuple(space: Any, categorical: bool) -> Spec:
    return Composite({str(key): spec_from_space(part, categorical) for key, part in enumerate(space.spaces)})


_SPECS: dict[str, Callable[[Any, bool], Spec]] = {
    "Box": _box,
    "Discrete": _discrete,
    "MultiDiscrete": _multi_discrete,
    "MultiBinary": lambda space, categorical: Binary(shape=space.shape),
    "Dict": _dict,
    "Tuple": _tuple,
    "Text": _text,
}


def space_from_spec(spec: Spec) -> Any:
    """The gymnasium space of the same values, batch dimensions included.

    One-hot vectors and categories become Discrete or MultiDiscrete, flags and `Binary` MultiBinary, numbers Box,
    `Text` Text (of printable ASCII where it has no charset), `Composite` Dict. Of every spec that `spec_from_space`
    returns, `spec_from_space(space_from_spec(spec), categorical)` is the same, but for such texts. Raises TypeError for
    a spec of another class, ImportError where gymnasium is missing: `pip install "engram[gym]"`.

    >>> space_from_spec(Composite(position=Bounded(-1, 1, (2,)), gear=Categorical(5)))
    Dict('gear': Discrete(5), 'position': Box(-1.0, 1.0, (2,), float32))
    """
    for cls in type(spec).__mro__:
        if cls in _SPACES:
            return _SPACES[cls](spec, _gymnasium_spaces())
    raise TypeError(
        f"a {type(spec).__name__} has no gymnasium space; these have: {', '.join(c.__name__ for c in _SPACES)}"
    )


def _gymnasium_spaces() -> Any:
    with packages("space_from_spec", "engram[gym]", gymnasium="gymnasium"):
        from gymnasium import spaces
    return spaces


def _box_of(spec: Any, spaces: Any) -> Any:
    low, high = spec.low.cpu().numpy(), spec.high.cpu().numpy()
    return spaces.Box(low, high, tuple(spec.shape), low.dtype)


def _unbounded_box(spec: Any, spaces: Any) -> Any:
    if spec.dtype is torch.bool:
        return spaces.MultiBinary(tuple(spec.shape))
    dtype = spec.zero().numpy().dtype
    ends = (-np.inf, np.inf) if spec.dtype.is_floating_point else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return spaces.Box(*ends, tuple(spec.shape), dtype)


def _choice(spec: Any, spaces: Any) -> Any:
    if spec.dtype is torch.bool and spec.n == 2:
        return spaces.MultiBinary(tuple(spec.shape))
    return spaces.MultiDiscrete(np.full(tuple(spec.shape), spec.n)) if spec.ndim else spaces.Discrete(spec.n)


def _choices(spec: Any, spaces: Any) -> Any:
    return spaces.MultiDiscrete(np.broadcast_to(np.array(spec.nvec), (*spec.shape[:-1], len(spec.nvec))).copy())


def _text_space(spec: Any, spaces: Any) -> Any:
    if spec.ndim > 1:
        raise TypeError(f"gymnasium has no space of several texts at once, got {spec}; take one, spec[i]")
    charset = string.printable if spec.charset is None else spec.charset
    return spaces.Text(spec.max_length, min_length=spec.min_length, charset=charset)


_SPACES: dict[type, Callable[[Any, Any], Any]] = {
    Binary: lambda spec, spaces: spaces.MultiBinary(tuple(spec.shape)),
    Categorical: _choice,
    OneHot: lambda spec, spaces: _choice(spec.to_categorical_spec(), spaces),
    MultiCategorical: _choices,
    MultiOneHot: lambda spec, spaces: _choices(spec.to_categorical_spec(), spaces),
    Bounded: _box_of,
    Unbounded: _unbounded_box,
    Text: _text_space,
    Composite: lambda spec, spaces: spaces.Dict({key: space_from_spec(part) for key, part in spec.items()}),
}


class LeafSpace(NamedTuple):
    """A space that has no parts, and its place in the whole: the keys of Dicts and the numbers of Tuples around it."""

    space: Any
    place: tuple[str | int, ...]


class EncodedSpaces(NamedTuple):
    """The spaces that the tensors of an environment's observations and actions stand for."""

    specs: Mapping[KeyPath, Spec]  #: the spec of each entry, by key
    batch_dims: int  #: the first dimensions of these specs, which are those of the environment's batch
    #: The gymnasium spaces of those entries whose values are encoded values of such a space: `specs` does not tell
    #: where a Discrete starts, or which entries a Tuple has.
    spaces: Mapping[KeyPath, LeafSpace]

    @classmethod
    def of(cls, origin: Any) -> EncodedSpaces | None:
        """The spaces of an environment's steps, or of a collector's; None for any other object."""
        return origin.encoded_spaces() if isinstance(origin, HasSpaces) else None


class HasSpaces(ABC):
    """An environment or a collector: it knows the spaces of its steps."""

    @abstractmethod
    def encoded_spaces(self) -> EncodedSpaces:
        """The specs of observations and actions, and the gymnasium spaces behind them."""


def leaf_spaces(space: Any, path: KeyPath, place: tuple[str | int, ...] = ()) -> dict[KeyPath, LeafSpace]:
    """The spaces below a Dict or Tuple by key path, as `spec_from_space` has them; a space of another kind alone.

    >>> import gymnasium
    >>> leaf_spaces(gymnasium.spaces.Dict(gear=gymnasium.spaces.Discrete(3, start=1)), ())
    {('gear',): LeafSpace(space=Discrete(3, start=1), place=('gear',))}
    """
    kind = for_space_class(space, _SPECS)
    parts: list[tuple[str | int, Any]]
    if kind is _dict:
        parts = [(str(key), part) for key, part in space.spaces.items()]
    elif kind is _tuple:
        parts = list(enumerate(space.spaces))
    else:
        return {path: LeafSpace(space, place)}
    below = [leaf_spaces(part, (*path, str(key)), (*place, key)) for key, part in parts]
    return {key: leaf for leaves in below for key, leaf in leaves.items()}


def observation_path(space: Any, key: str) -> tuple[str, ...]:
    """The keys of observations: the entries of a Dict have their own, any other observation has `key`."""
    return () if isinstance(attribute(space, "spaces"), dict) else (key,)


def common_spaces(members: Sequence[EncodedSpaces]) -> dict[KeyPath, LeafSpace]:
    """The spaces that all of these have."""
    first, *others = (member.spaces for member in members)
    return {path: space for path, space in first.items() if all(other.get(path) == space for other in others)}
