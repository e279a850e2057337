"""What an inverse leaves on an object from one write to the next, where the object itself says nothing about it."""

from __future__ import annotations

import warnings
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

Place = tuple[int, str]  # which namespace, and the attribute's name
Snapshot = list[dict[str, tuple[Any, Any]]]  # of each namespace: what an attribute is, and a copy of its content

MEMORY = "_memory_of_writes"  # where a transform keeps its `Memory`
_LEFT_OUT = frozenset([*vars(nn.Module()), MEMORY])


class _Absent:
    """In the place of an attribute that is not there; the same after a copy or in another process."""

    def __reduce__(self) -> str:
        return "_ABSENT"


_ABSENT = _Absent()


class Memory:
    """What the inverse of an object has changed of its attributes (and those of modules in a module).

    Of tensors it sees which they are, not what is written into them in place.
    """

    def __init__(self) -> None:
        self.holds_back = False  # whether it has ever given another number of steps than it got
        self._before: dict[Place, Any] = {}  # what was changed, as it was before the first write

    def note(self, owner: Any, before: Snapshot, holds_back: bool) -> None:
        """Takes in what a write has changed."""
        for i, name in _changed(owner, before):
            known = before[i].get(name)
            self._before.setdefault((i, name), _ABSENT if known is None else known[1])
        self.holds_back = self.holds_back or holds_back

    def remember(self, owner: Any) -> Any:
        return snapshot(owner), dict(self._before), self.holds_back

    def undo(self, owner: Any, remembered: Any) -> None:
        before, self._before, self.holds_back = remembered
        spaces = _namespaces(owner)
        for i, name in _changed(owner, before):
            _assign(spaces[i], name, before[i][name][1] if name in before[i] else _ABSENT)

    def forget(self, owner: Any) -> None:
        """Makes the attributes what they were before the first write."""
        spaces = _namespaces(owner)
        for (i, name), value in self._before.items():
            _assign(spaces[i], name, value)
        self._before, self.holds_back = {}, False

    # ---- state ----
    def state_dict(self, owner: Any, who: str) -> dict[str, Any]:
        """The changed attributes, as far as they consist of tensors, TensorDicts, numbers and strings."""
        spaces, kept, lost = _namespaces(owner), [], []
        for (i, name), first in self._before.items():
            value = spaces[i].get(name, _ABSENT)
            if value is first or value is _ABSENT:
                continue
            if (packed := _packed(value)) is None:
                lost.append(f"{name} (a {type(value).__name__})")
            else:
                kept.append({"place": i, "name": name, "value": packed})
        if lost:
            warnings.warn(
                f"{who} has changed {', '.join(lost)} on writing, which cannot be saved: where the state is loaded, it "
                "is as it was before the first write",
                stacklevel=2,
            )
        return {"attributes": kept, "holds_back": self.holds_back} if kept else {}

    def load_state_dict(self, owner: Any, state: dict[str, Any]) -> None:
        self.forget(owner)
        spaces = _namespaces(owner)
        for entry in state.get("attributes", []):
            i, name = entry["place"], entry["name"]
            self._before[i, name] = _content(spaces[i].get(name, _ABSENT))
            spaces[i][name] = _unpacked(entry["value"])
        self.holds_back = state.get("holds_back", False)

    def differences(self, owner: Any, who: str, state: dict[str, Any]) -> list[str]:
        n = len(_namespaces(owner))
        fits = all(0 <= entry["place"] < n for entry in state.get("attributes", []))
        return [] if fits else [f"{who} consists of other parts here than there"]


def _namespaces(obj: Any) -> list[dict[str, Any]]:
    """Where the attributes of an object are: of an `nn.Module` also its buffers, and all that of modules in it."""
    if not isinstance(obj, nn.Module):
        return [vars(obj)] if hasattr(obj, "__dict__") else []
    return [names for module in obj.modules() for names in (vars(module), module._buffers)]


def _names(space: dict[str, Any]) -> Iterator[str]:
    return (name for name in list(space) if name not in _LEFT_OUT)


def snapshot(obj: Any) -> Snapshot:
    """Its attributes as they are; of tensors only which they are, not their values."""
    return [{name: (space[name], _content(space[name])) for name in _names(space)} for space in _namespaces(obj)]


def _changed(obj: Any, before: Snapshot) -> list[Place]:
    """The attributes that are others now, or have another content."""
    return [
        (i, name)
        for i, (space, known) in enumerate(zip(_namespaces(obj), before, strict=False))
        for name in dict.fromkeys((*_names(space), *known))
        if _differs(space.get(name, _ABSENT), known.get(name))
    ]


def _assign(space: dict[str, Any], name: str, value: Any) -> None:
    """Sets an attribute to a copy of `value`; takes it away where that is `_ABSENT`."""
    if value is _ABSENT:
        space.pop(name, None)
    else:
        space[name] = _content(value)


def _content(value: Any) -> Any:
    """Containers of its own with the same values, of a container; else the value itself."""
    plain = type(value) in (list, dict, set, deque, OrderedDict)
    return value.copy() if plain or (type(value) is TensorDict and not value.is_locked) else value


def _differs(now: Any, known: tuple[Any, Any] | None) -> bool:
    if known is None or now is not known[0]:
        return True
    if now is known[1]:
        return False
    if isinstance(now, set):
        return bool(now != known[1])
    if isinstance(now, dict | TensorDict):
        mine, its = list(now.items()), list(known[1].items())
    else:
        mine, its = list(enumerate(now)), list(enumerate(known[1]))
    return len(mine) != len(its) or any(a[0] != b[0] or a[1] is not b[1] for a, b in zip(mine, its, strict=True))


def _packed(value: Any) -> dict[str, Any] | None:
    """A value as a state has it; None where that is not possible."""
    if type(value) is not TensorDict:
        return {"value": _content(value)} if _is_plain(value) else None
    entries = {key: _packed(value.get(key)) for key in value.keys()}  # noqa: SIM118 -- a TensorDict iterates over rows
    return None if None in entries.values() else {"entries": entries, "shape": list(value.batch_size)}


def _unpacked(packed: dict[str, Any]) -> Any:
    if "value" in packed:
        return _content(packed["value"])
    return TensorDict({key: _unpacked(entry) for key, entry in packed["entries"].items()}, packed["shape"])


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(type(key) is str and _is_plain(one) for key, one in value.items())
    of_numbers = type(value) is np.ndarray and value.dtype.kind in "biufc"
    return of_numbers or type(value) in (type(None), bool, int, float, str, Tensor, torch.Size)
