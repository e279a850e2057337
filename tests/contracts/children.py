"""Work in forked children, with its result or its error brought back."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from contracts.waiting import can_be_read


def alone_after_fork(seconds: int) -> None:
    """In a forked child: an end after some seconds, and no threads of OpenMP, which wait for ever after a fork."""
    signal.alarm(seconds)
    torch.set_num_threads(1)


def fork(work: Callable[[], Any], seconds: int = 300) -> int:
    """The pid of a forked child that runs `work`: status 0 at its end, 1 and a traceback after an error."""
    pid = os.fork()
    if pid:
        return pid
    try:
        alone_after_fork(seconds)
        work()
        os._exit(0)
    except BaseException:
        sys.settrace(None)
        traceback.print_exc()
    finally:
        os._exit(1)  # whatever happened: it must not go on with the tests of its parent


class Child:
    """A forked child that runs `work`; at most for `seconds`. `fork`: what forks, as `os.fork` does."""

    def __init__(self, work: Callable[[], Any], seconds: int = 300, fork: Callable[[], int] = os.fork) -> None:
        self._read, write = os.pipe()
        self.pid = fork()
        if self.pid == 0:
            try:
                alone_after_fork(seconds)
                os.close(self._read)
                with os.fdopen(write, "wb") as pipe:
                    pipe.write(pickle.dumps(_outcome(work)))
            finally:
                os._exit(0)  # whatever happened: it must not go on with the tests of its parent
        os.close(write)

    def result(self) -> Any:
        """What `work` returned; raises what it raised."""
        with os.fdopen(self._read, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(self.pid, 0)
        assert status == 0, f"the child ended with status {status}"
        kind, value = pickle.loads(said)
        if kind == "error":
            raise value[0]
        return value

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._read)


def _outcome(work: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "result", work()
    except BaseException as error:
        error.__traceback__ = None
        return "error", (error, traceback.format_exc())


class Signal:
    """One process waits, another goes on."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def send(self) -> None:
        os.write(self._write, b"!")

    def wait(self, within: float = 300) -> None:
        assert can_be_read(self._read, within), "the signal does not come: who was to send it has failed"
        assert os.read(self._read, 1) == b"!"
