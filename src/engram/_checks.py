"""Checks of arguments that many classes have, and of what objects of other libraries have."""

from __future__ import annotations

from typing import Any


def is_integer(value: Any, least: int | None = None) -> bool:
    """Whether it is an integer of Python or another library, no bool, and `least` or more."""
    return not isinstance(value, bool) and hasattr(value, "__index__") and (least is None or value.__index__() >= least)


def count(value: Any, name: str, least: int = 1) -> int:
    """A number of something as an int; a whole float is one, too, as YAML and command lines read `1e6`.

    Raises:
        ValueError: it is none, or below `least`; the message has the name.

    >>> count(1e6, "max_size")
    1000000
    """
    if isinstance(value, float) and value.is_integer():  # NumPy's float64, too
        value = int(value)
    if not is_integer(value, least):
        raise ValueError(f"{name} must be an integer of {least} or more, got {value!r}")
    return int(value)


def count_or_none(value: Any, name: str, least: int = 1) -> int | None:
    """The same, of a number that may be left out."""
    return None if value is None else count(value, name, least)


def attribute(obj: Any, path: str) -> Any:
    """What an object of another library, of any release or class, has under a dotted path; None where it has no such.

    >>> attribute([], "__class__.__name__"), attribute([], "storage.ndim")
    ('list', None)
    """
    for name in path.split("."):
        obj = getattr(obj, name, None)
    return obj
