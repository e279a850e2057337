"""What lower parts use of higher ones without importing them: `engram` fills the table, and nothing is loaded before.

A name stands for a function that imports the part and returns it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PROVIDERS: dict[str, Callable[[], Any]] = {}
