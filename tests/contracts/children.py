"""Work in forked children, with its result or its error brought back."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable
from typing import Any


class Child:
    """A forked child that runs `work`; at most for `seconds`."""

    def __init__(self, work: Callable[[], Any], seconds: int = 60) -> None:
        self._read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            signal.alarm(seconds)
            os.close(self._read)
            try:
                result: tuple[str, Any] = ("result", work())
            except BaseException as error:
                error.__traceback__ = None
                result = ("error", (error, traceback.format_exc()))
            with os.fdopen(write, "wb") as pipe:
                pipe.write(pickle.dumps(result))
            os._exit(0)
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


class Signal:
    """One process waits, another goes on."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def send(self) -> None:
        os.write(self._write, b"!")

    def wait(self) -> None:
        assert os.read(self._read, 1) == b"!"
