"""Values as something that `==` compares to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

# What names a store, and which nobody can draw from: the twin's has a name of its own, and counts its loads.
_OWN = ("incarnation", "store")


def frozen(value: Any) -> Any:
    """Types, dtypes, shapes, batch sizes and bits; dicts in any order."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), value.contiguous().reshape(-1).numpy().tobytes())
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, TensorDictBase):
        entries = {key: frozen(value.get(key)) for key in sorted(value.keys(), key=str)}
        return (type(value).__name__, tuple(value.batch_size), str(value.device), entries)
    if isinstance(value, dict):
        return {str(key): frozen(member) for key, member in value.items() if key not in _OWN}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(frozen, value)]
    if isinstance(value, float):
        return ("float", value.hex())
    return (type(value).__name__, value)


def difference(mine: Any, its: Any, where: str = "") -> str | None:
    """The first place where two frozen values differ; None: they are equal."""
    if mine == its:
        return None
    if isinstance(mine, dict) and isinstance(its, dict) and mine.keys() == its.keys():
        parts = [(f"{where}[{key!r}]", mine[key], its[key]) for key in mine]
    elif isinstance(mine, list | tuple) and isinstance(its, list | tuple) and len(mine) == len(its):
        if mine[:1] == ("tensor",) and mine[:3] == its[:3]:
            return f"{where}: {_shown(mine)} and {_shown(its)}"
        parts = [(f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(mine, its, strict=True))]
    else:
        return f"{where}: {mine!r:.300} and {its!r:.300}"
    return next(said for said in (difference(a, b, place) for place, a, b in parts) if said)


def _shown(value: Any) -> str:
    dtype = getattr(torch, value[1].removeprefix("torch."))
    made = torch.frombuffer(bytearray(value[3]), dtype=dtype) if value[3] else torch.empty(0)
    return f"{made.reshape(value[2]).tolist()!r:.600}"
