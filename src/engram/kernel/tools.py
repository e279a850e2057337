"""Files, memory, forms, texts and warnings, as all read, measure, check and say them here. Needs no torch."""

from engram import _forms as forms
from engram._checks import count
from engram._figures import ReadAsMapping
from engram._packages import packages
from engram._system import (
    check_memory,
    free_memory,
    human_bytes,
    open_regular,
    parse_bytes,
    user_path,
)
from engram._text import log, visible, warn_user

__all__ = [
    "ReadAsMapping",
    "check_memory",
    "count",
    "forms",
    "free_memory",
    "human_bytes",
    "log",
    "open_regular",
    "packages",
    "parse_bytes",
    "user_path",
    "visible",
    "warn_user",
]
