"""Programs in processes of their own that start at once: forks of a process that has imported torch and engram.

A test that asks what an import itself does starts Python instead.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from types import ModuleType
from typing import IO, Any

from contracts.waiting import can_be_read

_DIES_WITH_ITS_PARENT = 1  # prctl's PR_SET_PDEATHSIG
_TESTS = str(Path(__file__).parents[1])
#: What has been imported where a program begins.
ENGRAM = ("engram.collectors", "engram.data", "engram.envs")


#: What a program's keeper sends: its pid when it starts, at its end the status and the CPU seconds.
_STARTED, _ENDED = struct.Struct("i"), struct.Struct("id")


class Cpu:
    """Seconds of all programs that have ended: they are no children of this process, which would count them."""

    seconds = 0.0


cpu = Cpu()


class Program:
    """A Python file that runs; what is used of `subprocess.Popen` in text mode with pipes."""

    def __init__(
        self,
        file: Path,
        *arguments: Any,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        imported: tuple[str, ...] = ENGRAM,
    ) -> None:
        pipes = [os.pipe() for _ in range(3)]
        self._status, status = socket.socketpair()
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1], status.fileno()]
        argv = [str(file), *map(str, arguments)]
        environment = dict(os.environ if env is None else env)
        socket.send_fds(_template(imported), [pickle.dumps((argv, str(cwd or os.getcwd()), environment))], theirs)
        for fd in theirs[:3]:
            os.close(fd)
        status.close()
        self.args, self.returncode, self._waiting = argv, None, Lock()
        self.stdin, self.stdout, self.stderr = os.fdopen(pipes[0][1], "w"), _reader(pipes[1]), _reader(pipes[2])
        (self.pid,) = self._receive(_STARTED)

    def _receive(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self._status.recv(form.size, socket.MSG_WAITALL))

    def poll(self) -> int | None:
        if self.returncode is None and can_be_read(self._status, 0):
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._waiting:  # threads may ask at once
            if self.returncode is None:
                if not can_be_read(self._status, timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
                status, used = self._receive(_ENDED)
                self.returncode = os.waitstatus_to_exitcode(status)
                cpu.seconds += used
            return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it wrote until its end, to its output and to its errors."""
        self.stdin.close()
        texts = ["", ""]
        threads = [Thread(target=_read, args=(pipe, texts, k)) for k, pipe in enumerate((self.stdout, self.stderr))]
        for thread in threads:
            thread.daemon = True
            thread.start()
        self.wait(timeout)
        for thread in threads:
            thread.join(timeout)
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it is gone, and its exit status is still on the way here
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_program(
    code: str,
    *arguments: Any,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
    imported: tuple[str, ...] = ENGRAM,
) -> subprocess.CompletedProcess[str]:
    """Runs this code to its end."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(textwrap.dedent(code))
        return finished(Program(file, *arguments, env=env, imported=imported), timeout)


def finished(program: Program, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """What came of it; it is killed if it takes longer."""
    try:
        output, errors = program.communicate(timeout)
    finally:
        program.kill()
    return subprocess.CompletedProcess(program.args, program.wait(), output, errors)


def _reader(pipe: tuple[int, int]) -> IO[str]:
    return os.fdopen(pipe[0])


def _read(pipe: IO[str], texts: list[str], k: int) -> None:
    texts[k] = "" if pipe.closed else pipe.read()


# ---- the processes that they are forks of ----
_connections: dict[tuple[str, ...], socket.socket] = {}


def _template(imported: tuple[str, ...]) -> socket.socket:
    """The way to the one that has imported these modules; starts it at the first call."""
    if imported not in _connections:
        _connections[imported], theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = "import sys; sys.path.append(sys.argv[1]); from contracts.programs import serve; serve(*sys.argv[2:])"
        subprocess.Popen(
            [sys.executable, "-c", code, _TESTS, str(theirs.fileno()), *imported],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
            preexec_fn=_die_with_parent,
        )  # fmt: skip
        theirs.close()
    return _connections[imported]


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DIES_WITH_ITS_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell that runs tests in the background ignores it


def serve(fd: str, *imported: str) -> None:
    """Forks itself for every program that is asked for; in the fork, runs it in an empty `__main__` and returns."""
    for name in imported:
        importlib.import_module(name)
    # At its end each fork looks for cycles in its own objects only: in those of torch that takes a second.
    gc.freeze()
    connection = socket.socket(fileno=int(fd))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, fds, _, _ = socket.recv_fds(connection, 1 << 20, 4)
        if not request:
            return
        if os.fork() == 0:
            connection.close()
            _start(fds)
            _run(*pickle.loads(request))
            return
        for one in fds:
            os.close(one)


def _start(fds: list[int]) -> None:
    """Forks once more: returns in the program's process, and reports pid and status of it from the other."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _die_with_parent()
    pid = os.fork()
    if pid == 0:
        _die_with_parent()
        os.setsid()
        for to, one in enumerate(fds[:3]):
            os.dup2(one, to)
        for one in fds:
            os.close(one)
        return
    for one in fds[:3]:
        os.close(one)
    os.write(fds[3], _STARTED.pack(pid))
    _, status, used = os.wait4(pid, 0)
    os.write(fds[3], _ENDED.pack(status, used.ru_utime + used.ru_stime))
    os._exit(0)


def _run(argv: list[str], folder: str, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[:] = argv
    sys.path[0] = str(Path(argv[0]).parent)
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(__file__=argv[0], __builtins__=__builtins__)
    exec(compile(Path(argv[0]).read_text(), argv[0], "exec"), vars(main))
