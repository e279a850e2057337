"""Work in a forked child that is killed: before a certain line of engram's Python code, or at any moment.

`crash.tracer` kills at system calls, and at stores to watched addresses.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import engram
from contracts.children import fork

_OURS = str(Path(engram.__file__).parent)


class _Lines:
    """Counts the lines of engram that this thread runs."""

    def __init__(self, then: Callable[[int], None]) -> None:
        self.count, self._then = 0, then

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        if event == "line":
            self._then(self.count)
            self.count += 1
        return self


def lines_of(work: Callable[[], Any]) -> int:
    """How many lines of engram work runs through."""
    lines = _Lines(lambda count: None)
    sys.settrace(lines)
    try:
        work()
    finally:
        sys.settrace(None)
    return lines.count


def killed_at(line: int, work: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> bool:
    """Runs work in a child that kills itself with SIGKILL before this line; False: work had ended before.

    `prepare` comes first, in the child, and is not counted.
    """

    def traced() -> None:
        prepare()
        sys.settrace(_Lines(lambda count: os.kill(os.getpid(), signal.SIGKILL) if count == line else None))
        work()
        sys.settrace(None)

    _, status = os.waitpid(fork(traced), 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the work failed before it was killed"
    assert not os.WIFSIGNALED(status) or os.WTERMSIG(status) == signal.SIGKILL, "it waited for ever"
    return os.WIFSIGNALED(status)


def killed_after(wait: Callable[[], Any], work: Callable[[], Any], seconds: int = 300) -> None:
    """Runs work, which does not end by itself, in a child that is killed with SIGKILL as soon as `wait` returns."""
    pid = fork(work, seconds)
    try:
        wait()
    finally:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    assert status == signal.SIGKILL, "the child ended by itself"


def of_restarts(warned: Iterable[warnings.WarningMessage]) -> list[str]:
    """What engram said of processes that it replaced; from 3.12 on Python warns, too, where one with threads forks."""
    return [str(one.message) for one in warned if one.category is RuntimeWarning]
