"""Which methods a class has in place of those of a base."""

from __future__ import annotations

import functools
from typing import Any


def overrides(kind: type, base: type) -> frozenset[str]:
    """The names that a class, or a parent between it and `base`, defines otherwise than `base` has them.

    As they are when it is asked for the first time.
    """
    return _overrides(kind, base)


@functools.cache
def _overrides(kind: Any, base: Any) -> frozenset[str]:
    parents = kind.__mro__
    theirs = _members(base.__mro__)
    own = _members(parents[: parents.index(base)])
    return frozenset(name for name, value in own.items() if name not in theirs or value is not theirs[name])


def _members(parents: tuple[type, ...]) -> dict[str, Any]:
    return {name: value for parent in reversed(parents) for name, value in vars(parent).items()}
