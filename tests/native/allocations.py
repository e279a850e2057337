"""Calls whose native allocations fail, and what must be true after each failure.

`failing_alloc.cpp` stands between the native core and its allocator. A case runs in a forked child, so that a crash is
a result, too: of a new world the first allocation of a call fails, of another one the second, ..., until the call needs
no more. After a failure all is as it was, and the same call made again does what it would have done.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
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
    loaded.alloc_arm.argtypes = [ctypes.c_long, ctypes.c_bool]
    loaded.alloc_disarm.restype = ctypes.c_long
    # nanobind's own table of objects ends the process where it cannot grow: it has grown already.
    del [_native.SliceRule(1, 1) for _ in range(4096)][:]
    return loaded


@dataclass
class World:
    """Something that is called, and all that can be seen of what it may change."""

    act: Callable[[], Any]
    seen: Callable[[], dict[str, Any]]
    result: Callable[[Any], Any] = lambda result: None
    keeps_open: bool = False  # a file that is made once, and stays although the rest of the call failed


def check(make: Callable[[], World]) -> int:
    """Lets each allocation of the call fail, in a child; how many of them were an error."""
    shim = library()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            torch.set_num_threads(1)  # OpenMP's threads wait for ever after a fork
            with os.fdopen(write, "wb") as pipe:
                for said in _attempts(make, shim):
                    pickle.dump(said, pipe)
                    pipe.flush()
        finally:
            os._exit(0)
    os.close(write)
    reached, found = 0, None
    with os.fdopen(read, "rb") as pipe, contextlib.suppress(EOFError):
        while True:
            kind, reached = pickle.load(pipe)
            if kind != "at":
                found = kind, reached
    status = os.waitpid(pid, 0)[1]
    assert found is not None, f"the process died when allocation {reached} failed: {os.waitstatus_to_exitcode(status)}"
    assert found[0] == "done", found[1]
    return found[1]


def _attempts(make: Callable[[], World], shim: Any) -> Iterator[tuple[str, Any]]:
    try:
        assert shim.alloc_hook(_native.__file__.encode()) > 0
        gc.collect()
        gc.freeze()  # only what comes now is looked at
        twin = _made(make)
        result, failed = _called(twin, shim, 0, False)[0], 0
        after = {"result": twin.result(result), **twin.seen()}
        before = _made(make).seen()  # a look may take in what the call would have
        del result
        for at in range(1, MOST):
            yield "at", at
            needed, error = _fail_one(make, shim, at, before, after)
            if needed < at:
                yield "done", failed
                return
            failed += error
        raise AssertionError(f"a call with more than {MOST} allocations")
    except BaseException as error:
        yield "failed", f"{type(error).__name__}: {error}"


def _fail_one(
    make: Callable[[], World], shim: Any, at: int, before: dict[str, Any], after: dict[str, Any]
) -> tuple[int, bool]:
    """The `at`-th allocation of a call fails, then in another call all from it on, and the third call has its way.

    How many allocations there were, and whether the failure was an error. One that was must not have done anything.
    """
    world = _made(make)
    before = {**before, "files": _files(world)}
    result, needed, error = _called(world, shim, at, False)
    where = f"allocation {at} failed: {error}"
    if error:
        _compare(before, _seen(world), where)
        result, _, error = _called(world, shim, at, True)
        if error:
            _compare(before, _seen(world), f"allocation {at} and all after it failed: {error}")
            result = _called(world, shim, 0, False)[0]
        where += "\nin the call after it"
    _compare(after, {"result": world.result(result), **world.seen()}, where)
    return needed, "\n" in where


def _called(world: World, shim: Any, at: int, rest: bool) -> tuple[Any, int, str]:
    """What a call gives, the number of its allocations and, as a text, its error.

    In a thread of its own and with no memory left in the pool, so that nothing is at hand from an earlier call.
    """
    found: list[Any] = [None, 0, ""]

    def call() -> None:
        torch.manual_seed(1)
        _native.testing.empty_pool()
        shim.alloc_arm(at, rest)
        try:
            found[0] = world.act()
        except (MemoryError, StorageError) as problem:
            found[1] = shim.alloc_disarm()
            found[2] = f"{problem!r}, in\n" + "".join(traceback.format_tb(problem.__traceback__)[-3:])
        except BaseException as problem:
            found[1:] = shim.alloc_disarm(), problem
        else:
            found[1] = shim.alloc_disarm()

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if isinstance(found[2], BaseException):
        raise AssertionError(f"allocation {at} failed") from found[2]
    assert at or not found[2], f"an error without a failure: {found[2]}"
    return found[0], found[1], found[2]


def _made(make: Callable[[], World]) -> World:
    torch.manual_seed(0)
    return make()


def _seen(world: World) -> dict[str, Any]:
    return {**world.seen(), "files": _files(world)}


def _files(world: World) -> int:
    gc.collect()  # an error's traceback holds what it went through
    return 0 if world.keeps_open else len(os.listdir("/proc/self/fd"))


def _compare(before: dict[str, Any], after: dict[str, Any], where: str) -> None:
    for key in before:
        assert before[key] == after[key], f"{where}: {key} was {before[key]!r:.300} and is {after[key]!r:.300}"
