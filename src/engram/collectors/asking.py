"""Environments of any library are asked for what they may not have."""

from __future__ import annotations

from typing import Any


def ask(env: Any, name: str) -> Any:
    """What the method `name` of an environment gives; None where its class has none.

    The class is looked at, because environments of other libraries look for unknown names in places of their own.
    """
    method = getattr(type(env), name, None)
    return None if method is None else method(env)
