"""Calls whose native allocations fail one after the other, and what must be true after each.

`failing_alloc.cpp` stands between the native core and its allocator. A case runs in a forked child, so that a crash is
a result, too: of the first allocation of a call, then of the second, ..., until one call needs no more.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engram import _native
from engram.errors import StorageError

MOST = 2000  # allocations of a call


@functools.cache
def library() -> Any:
    """The compiled shim, in place; skips the test where there can be none."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("the native core's allocations are hooked on Linux, with a C++ compiler")
    made = Path(tempfile.mkdtemp(prefix="engram-alloc-")) / "alloc.so"
    source = Path(__file__).with_name("failing_alloc.cpp")
    try:
        subprocess.run([compiler, "-std=c++17", "-O1", "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
        loaded = ctypes.PyDLL(str(made))
    finally:
        shutil.rmtree(made.parent)
    loaded.alloc_arm.argtypes = [ctypes.c_long]
    loaded.alloc_disarm.restype = ctypes.c_long
    return loaded


@dataclass
class World:
    """Something that is called, and all that can be seen of what it may change."""

    act: Callable[[], Any]
    seen: Callable[[], dict[str, Any]]
    result: Callable[[Any], Any] = lambda result: None


def check(make: Callable[[], World]) -> int:
    """Lets each allocation of the call fail once, in a child; how many there are."""
    shim = library()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)  # OpenMP's threads wait for ever after a fork
            try:
                said = ("done", _fail_each(make, shim))
            except BaseException as error:
                said = ("failed", f"{type(error).__name__}: {error}")
            os.write(write, pickle.dumps(said))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    status = os.waitpid(pid, 0)[1]
    assert status == 0 and answer, f"the process died: {os.waitstatus_to_exitcode(status)}"
    kind, value = pickle.loads(answer)
    assert kind == "done", value
    return int(value)


def _fail_each(make: Callable[[], World], shim: Any) -> int:
    assert shim.alloc_hook(_native.__file__.encode()) > 0
    twin = _made(make)
    torch.manual_seed(1)
    given = twin.result(twin.act())
    world, before, failed = None, None, 0
    for at in range(1, MOST):
        if world is None:
            world = _made(make)
            before = world.seen()
        torch.manual_seed(1)
        error = None
        shim.alloc_arm(at)
        try:
            result = world.act()
        except (MemoryError, StorageError) as problem:
            error = problem
        needed = shim.alloc_disarm()
        where = f"allocation {at} failed, {error!r}"
        if error is not None:
            assert needed >= at, f"an error without a failure: {error!r}"
            _compare(before, world.seen(), where)
            failed += 1
            continue
        _compare({"result": given}, {"result": world.result(result)}, where)
        _compare(twin.seen(), world.seen(), where)
        if needed < at:
            return failed
        world = None  # it went another way, to the same end
    raise AssertionError(f"a call with more than {MOST} allocations")


def _made(make: Callable[[], World]) -> World:
    torch.manual_seed(0)
    return make()


def _compare(before: dict[str, Any], after: dict[str, Any], where: str) -> None:
    for key in before:
        assert before[key] == after[key], f"{where}: {key} was {before[key]!r:.300} and is {after[key]!r:.300}"
