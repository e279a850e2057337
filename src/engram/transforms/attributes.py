"""The attributes of an object, so that what a write did to them can be undone."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

from tensordict import TensorDict
from torch import nn

Place = tuple[int, str]  # which namespace, and the attribute's name
Snapshot = list[dict[str, tuple[Any, Any]]]  # of each namespace: what an attribute is, and a copy of its content

ABSENT = object()
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def namespaces(obj: Any) -> list[dict[str, Any]]:
    """Where the attributes of an object are: of an `nn.Module` also its buffers, and all that of modules in it."""
    if not isinstance(obj, nn.Module):
        return [vars(obj)] if hasattr(obj, "__dict__") else []
    return [names for module in obj.modules() for names in (vars(module), module._buffers)]


def _names(space: dict[str, Any]) -> Iterator[str]:
    return (name for name in list(space) if name not in _OF_EVERY_MODULE)


def snapshot(obj: Any) -> Snapshot:
    """Its attributes as they are; of tensors only which they are, not their values."""
    return [{name: (space[name], content(space[name])) for name in _names(space)} for space in namespaces(obj)]


def changed(obj: Any, before: Snapshot) -> list[Place]:
    """The attributes that are others now, or have another content."""
    return [
        (i, name)
        for i, (space, known) in enumerate(zip(namespaces(obj), before, strict=False))
        for name in dict.fromkeys((*_names(space), *known))
        if _differs(space.get(name, ABSENT), known.get(name))
    ]


def restore(obj: Any, before: Snapshot) -> None:
    """Makes its attributes what they were."""
    spaces = namespaces(obj)
    for i, name in changed(obj, before):
        assign(spaces[i], name, before[i][name][1] if name in before[i] else ABSENT)


def assign(space: dict[str, Any], name: str, value: Any) -> None:
    """Sets an attribute to a copy of `value`; takes it away where that is `ABSENT`."""
    if value is ABSENT:
        space.pop(name, None)
    else:
        space[name] = content(value)


def content(value: Any) -> Any:
    """Containers of its own with the same values, of a container; else the value itself."""
    plain = type(value) in (list, dict, set, deque, OrderedDict)
    return value.copy() if plain or (type(value) is TensorDict and not value.is_locked) else value


def _differs(now: Any, known: tuple[Any, Any] | None) -> bool:
    if known is None or now is not known[0]:
        return True
    if now is known[1]:
        return False
    if isinstance(now, dict | TensorDict):
        mine, its = list(now.items()), list(known[1].items())
    else:
        mine, its = list(enumerate(now)), list(enumerate(known[1]))
    return len(mine) != len(its) or any(a[0] != b[0] or a[1] is not b[1] for a, b in zip(mine, its, strict=True))
