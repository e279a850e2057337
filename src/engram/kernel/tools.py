"""Files, memory, texts and warnings, as everything here reads, measures and says them. Needs no torch."""

from engram._system import (
    check_memory,
    free_memory,
    human_bytes,
    open_regular,
    parse_bytes,
)
from engram._text import log, visible, warn_user

__all__ = [
    "check_memory",
    "free_memory",
    "human_bytes",
    "log",
    "open_regular",
    "parse_bytes",
    "visible",
    "warn_user",
]
