"""Runs of pytest, each in a fork of this process, which has imported torch once for all of them."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import importlib.util
import os
import resource
import runpy
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterable
from pathlib import Path

HOOK = Path(__file__).parent / "hook"
MEMORY = 12 << 30  # bytes of data of a process: a mutant may ask for any number
PRELOADED = ("numpy", "torch", "tensordict", "gymnasium", "hypothesis", "pytest")


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of pytest: its arguments, what it adds to the environment, after how many seconds it is ended."""

    arguments: list[str]
    names: dict[str, str]
    seconds: float
    log: Path


#: A job yields runs, and is sent the exit status of each: None where its time was over.
Job = Generator[Run, "int | None", None]


def finish(jobs: Iterable[Job], workers: int) -> None:
    """Goes through all jobs, with so many runs at a time."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and end what runs
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for name in PRELOADED:
        importlib.import_module(name)
    waiting = iter(jobs)
    running: dict[int, tuple[Job, Run, float]] = {}

    def go_on(job: Job, status: int | None) -> None:
        with contextlib.suppress(StopIteration):
            run = job.send(status)
            running[_start(run)] = job, run, time.monotonic() + run.seconds

    try:
        while True:
            while len(running) < workers and (job := next(waiting, None)) is not None:
                go_on(job, None)
            if not running:
                return
            for pid, (job, run, deadline) in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                late = time.monotonic() > deadline
                if ended or late:
                    del running[pid]
                    _end(pid, run, reaped=bool(ended))
                    go_on(job, os.waitstatus_to_exitcode(status) if ended else None)
            time.sleep(0.02)
    finally:
        for pid, (job, run, _) in running.items():
            _end(pid, run, reaped=False)
            job.close()


def _start(run: Run) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        with open(run.log, "wb") as log, open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0), os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
        os.environ.update(run.names, PYTHONPATH=str(HOOK), ENGRAM_RUN=str(run.log))
        sys.path.insert(0, str(HOOK))
        spec = importlib.util.spec_from_file_location("sitecustomize", HOOK / "sitecustomize.py")
        sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["sitecustomize"])
        sys.argv = ["pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "mutation_plugin", *run.arguments]
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
        os._exit(code)


def _end(pid: int, run: Run, *, reaped: bool) -> None:
    """Ends a run and what it has left behind: its group, and the programs that have its name in their environment."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not reaped:
        os.waitpid(pid, 0)
    mark = f"ENGRAM_RUN={run.log}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in entry.read_bytes().split(b"\0"):
                os.kill(int(entry.parent.name), signal.SIGKILL)
