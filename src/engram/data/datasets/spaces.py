"""Spaces as Minari's metadata have them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engram.data.datasets.roles import INDEX
from engram.data.replay_buffers.layout import LeafSpec


def space_of(leaves: Sequence[tuple[tuple[str, ...], LeafSpec]]) -> dict[str, Any]:
    """The widest space with these leaves, named as datasets are: JSON."""
    (name, leaf), *_ = leaves
    if not name:
        return _widest(leaf)
    below: dict[str, list[tuple[tuple[str, ...], LeafSpec]]] = {}
    for (first, *rest), leaf in leaves:
        below.setdefault(first, []).append((tuple(rest), leaf))
    parts = {key: space_of(found) for key, found in below.items()}
    if all(key.startswith(INDEX) for key in parts):
        return {"type": "Tuple", "subspaces": [parts[f"{INDEX}{i}"] for i in range(len(parts))]}
    return {"type": "Dict", "subspaces": parts}


def _widest(leaf: LeafSpec) -> dict[str, Any]:
    shape = list(leaf.shape)
    name = str(leaf.dtype).removeprefix("torch.")
    if name == "bool":
        return {"type": "MultiBinary", "n": shape or 1}
    low, high = (-np.inf, np.inf) if leaf.dtype.is_floating_point else _limits(name)
    bounds = [np.full(shape, limit, object).tolist() for limit in (low, high)]
    return {"type": "Box", "dtype": name, "shape": shape, "low": bounds[0], "high": bounds[1]}


def _limits(name: str) -> tuple[int, int]:
    info = np.iinfo(name)
    return int(info.min), int(info.max)


def space_json(space: Any) -> dict[str, Any]:
    """A gymnasium space as JSON, by the name of its class.

    Raises:
        TypeError: a space without a fixed shape.
    """
    for cls in type(space).__mro__:
        if cls.__name__ in _KINDS:
            return {"type": cls.__name__, **_KINDS[cls.__name__](space)}
    raise TypeError(f"a space of type {type(space).__name__} is not written; there are {', '.join(_KINDS)}")


def _box(s: Any) -> dict[str, Any]:
    return {"dtype": str(s.dtype), "shape": list(s.shape), "low": s.low.tolist(), "high": s.high.tolist()}


_KINDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "Box": _box,
    "Discrete": lambda s: {"dtype": str(s.dtype), "start": int(s.start), "n": int(s.n)},
    "MultiBinary": lambda s: {"n": list(s.n) if isinstance(s.n, tuple | list | np.ndarray) else int(s.n)},
    "MultiDiscrete": lambda s: {
        "dtype": str(s.dtype), "nvec": s.nvec.tolist(), "start": np.asarray(s.start).tolist()
    },
    "Dict": lambda s: {"subspaces": {key: space_json(part) for key, part in s.spaces.items()}},
    "Tuple": lambda s: {"subspaces": [space_json(part) for part in s.spaces]},
}  # fmt: skip


def dumped(space: dict[str, Any]) -> str:
    return json.dumps(space)
