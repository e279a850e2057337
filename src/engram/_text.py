"""Texts that files and users give, made safe for a terminal or a log; and the library's logger and warnings."""

from __future__ import annotations

import logging
import sys
import traceback
import warnings


def visible(text: object) -> str:
    r"""A text on one line in which nothing acts on a terminal: what cannot be printed is written as its escape.

    These are control characters (escape sequences begin with one), line and paragraph separators, marks that turn the
    direction of the text, and halves of surrogate pairs, as undecodable paths have.

    Example:
        >>> print(visible("reward\x1b[2J\u202e\n"))
        reward\x1b[2J\u202e\n
    """
    shown = str(text)
    return shown if shown.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)


def visible_lines(text: object) -> str:
    """As `visible`, for texts of several lines, as tracebacks: line feeds and tabs stay."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in shown)


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line of the user's code that called this library, however deep in it the reason was found."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("engram.", "contextlib")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


class _VisibleRecords(logging.Filter):
    """Makes what is logged visible: messages on one line, tracebacks in lines."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = visible(record.getMessage()), None
        if record.exc_info and not record.exc_text:  # handlers use a text that is there
            record.exc_text = visible_lines("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))
        return True


#: The one logger of the library.
log = logging.getLogger("engram")
log.addFilter(_VisibleRecords())
