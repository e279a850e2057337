"""How far something long is, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from engram.kernel.tools import visible

_SECONDS_APART = 0.1


@contextmanager
def progress_bar(what: str, total: int | None, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that adds to a count of steps, shown on standard error if `shown` and that is a terminal.

    The count is a bar where rich is installed (`pip install "engram[progress]"`), else a line of text.
    """
    what = visible(what)
    if not shown:
        yield lambda steps: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        with _progress_line(what, total, sys.stderr) as advance:
            yield advance
        return
    console = Console(stderr=True)
    if not console.is_terminal:  # a bar that shows nothing ends with an empty line, in rich 13
        yield lambda steps: None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda steps: bar.advance(task, steps)


@contextmanager
def _progress_line(what: str, total: int | None, screen: TextIO | None) -> Iterator[Callable[[int], None]]:
    if screen is None or not screen.isatty():
        yield lambda steps: None
        return
    line, count, next_time = "", 0, 0.0

    def advance(steps: int) -> None:
        nonlocal line, count, next_time
        count += steps
        if time.monotonic() < next_time:
            return
        next_time = time.monotonic() + _SECONDS_APART
        line = f"{what}: {count:,} steps" if total is None else f"{what}: {count:,} of {total:,} steps"
        print(f"\r{line}", end="", file=screen, flush=True)

    advance(0)
    try:
        yield advance
    finally:
        print(f"\r{' ' * len(line)}\r", end="", file=screen, flush=True)
