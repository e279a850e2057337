"""Checks of arguments that many classes have."""

from __future__ import annotations

from typing import Any


def is_integer(value: Any, least: int | None = None) -> bool:
    """Whether it is an integer of Python or another library, no bool, and `least` or more."""
    return not isinstance(value, bool) and hasattr(value, "__index__") and (least is None or value.__index__() >= least)
