"""Work in a forked child that dies, or whose system call fails, at its n-th call that touches files below a folder.

`tracer.c` does it (ptrace and seccomp: raw calls of native code and calls of every thread are seen). Inside the child
`order` says from where on calls count; `mark` reports a number that the parent knows even if the child dies next.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pickle
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

OPEN, READ, WRITE, SIZE, SYNC, NAME, CLOSE, OTHER, MAP, STORE, STAT = (1 << i for i in range(11))
CALLS = OPEN | WRITE | SIZE | SYNC | NAME | CLOSE | OTHER | MAP
NOTHING, KILL, KILL_AFTER, FAIL, SHORTEN, SHORTEN_AND_KILL, FAIL_FROM_HERE, FAIL_TWO_SYNCS = range(8)
_START, _MARK, _WATCH, _STOP = 1, 2, 3, 4
_SECONDS = 300


class _Plan(ctypes.Structure):
    _fields_ = [("root", ctypes.c_char_p), ("at", ctypes.c_uint64), ("what", ctypes.c_int), ("error", ctypes.c_int),
                ("kinds", ctypes.c_uint64)]  # fmt: skip


class _Report(ctypes.Structure):
    _fields_ = [("counted", ctypes.c_uint64), ("mark", ctypes.c_uint64), ("status", ctypes.c_int),
                ("done", ctypes.c_int), ("name", ctypes.c_char * 32), ("path", ctypes.c_char * 512)]  # fmt: skip


_Listener = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64))


@dataclass
class Traced:
    """What became of a child: its result or error, calls counted, the last mark, and what was done at which call."""

    status: int
    counted: int
    mark: int
    done: bool
    call: str
    path: str
    result: Any

    @property
    def killed(self) -> bool:
        return os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == signal.SIGKILL


@functools.cache
def library() -> Any:
    """The compiled tracer; skips the test where there can be none."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("the tracer is for Linux on x86-64 and aarch64")
    if compiler is None:
        pytest.skip("there is no C compiler to make the tracer with")
    made = Path(tempfile.mkdtemp(prefix="engram-tracer-")) / "tracer.so"
    source = Path(__file__).with_name("tracer.c")
    try:
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
        loaded = ctypes.CDLL(str(made), use_errno=True)
    finally:
        shutil.rmtree(made.parent)
    loaded.crash_order.argtypes = [ctypes.c_uint64] * 3
    return loaded


def start() -> None:
    """In the child: from here on calls count."""
    library().crash_order(_START, 0, 0)


def stop() -> None:
    """In the child: from here on calls count no longer."""
    library().crash_order(_STOP, 0, 0)


def mark(number: int, more: int = 0) -> None:
    """In the child: tells the parent a number, at once."""
    library().crash_order(_MARK, number, more)


def watch(slot: int, address: int) -> None:
    """In the child: stores to these 8 bytes count, too (slots 0 to 3; x86-64 only)."""
    library().crash_order(_WATCH, slot, address)


def can_watch() -> bool:
    return platform.machine() == "x86_64"


def run(
    work: Callable[[], Any],
    root: str | os.PathLike[str],
    what: int = NOTHING,
    at: int = 0,
    *,
    error: int = 0,
    kinds: int = CALLS,
    listen: Callable[[str, str, str, list[int]], None] | None = None,
) -> Traced:
    """Runs `work` in a child; at the `at`-th event that counts (1, 2, ...) does `what`.

    FAIL_TWO_SYNCS: the `at`-th sync and the one after it fail, whatever else counts.
    """
    tracer = library()
    go, tell_go = os.pipe()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(work, go, write, tracer)
    os.close(go)
    os.close(write)
    plan = _Plan(os.fsencode(root), at, what, error, kinds)
    report, failed = _Report(), []
    try:
        code = tracer.crash_trace(pid, tell_go, ctypes.byref(plan), ctypes.byref(report), _listener(listen, failed))
    finally:
        os.close(tell_go)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    if code:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        pytest.skip(f"processes cannot be traced here: {os.strerror(code)}")
    if failed:
        raise failed[0]
    traced = Traced(report.status, report.counted, report.mark, bool(report.done), report.name.decode(),
                    os.fsdecode(report.path), pickle.loads(said) if said else None)  # fmt: skip
    _check_end(traced)
    return traced


def _child(work: Callable[[], Any], go: int, write: int, tracer: Any) -> None:
    try:
        signal.alarm(_SECONDS)
        torch.set_num_threads(1)  # OpenMP's threads wait for ever after a fork
        os.read(go, 1)
        if tracer.crash_ready() != 0:
            os._exit(77)
        try:
            said = ("result", work())
        except BaseException as error:
            error.__traceback__ = None
            said = ("error", error)
        os.write(write, pickle.dumps(said))
        os._exit(0)
    finally:
        os._exit(1)


def _listener(listen: Callable[..., None] | None, failed: list[BaseException]) -> Any:
    if listen is None:
        return _Listener()

    def heard(name: bytes, path: bytes, path2: bytes, args: Any) -> None:
        try:
            if not failed:
                listen(name.decode(), os.fsdecode(path), os.fsdecode(path2), args[:6])
        except BaseException as error:
            failed.append(error)

    return _Listener(heard)


def _check_end(traced: Traced) -> None:
    if os.WIFEXITED(traced.status) and os.WEXITSTATUS(traced.status) == 77:
        pytest.skip("system calls cannot be filtered here (seccomp)")
    if traced.killed:
        return
    assert traced.status == 0, f"the child ended with status {traced.status}, after {traced.call} of {traced.path}"
    kind, value = traced.result
    if kind == "error":
        raise value
    traced.result = value
