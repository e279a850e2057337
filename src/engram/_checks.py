"""Checks of arguments that many classes have, and of what objects of other libraries have."""

from __future__ import annotations

from typing import Any


def is_integer(value: Any, least: int | None = None) -> bool:
    """Whether it is an integer of Python or another library, no bool, and `least` or more."""
    return not isinstance(value, bool) and hasattr(value, "__index__") and (least is None or value.__index__() >= least)


def attribute(obj: Any, path: str) -> Any:
    """What an object of another library, of any release or class, has under a dotted path; None where it has no such.

    >>> attribute([], "__class__.__name__"), attribute([], "storage.ndim")
    ('list', None)
    """
    for name in path.split("."):
        obj = getattr(obj, name, None)
    return obj
