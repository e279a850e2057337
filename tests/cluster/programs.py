"""Other programs of a cluster: one that makes a buffer and is killed; and threads whose errors are the test's."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ray import cloudpickle

from engram.errors import ShardGoneError, ShardUnavailableError

_MAKES_SHARDS = """
import sys
import ray
from ray import cloudpickle
from distributed.shards import rows
from engram.data import LazyTensorStorage
from engram.distributed import RayReplayBuffer

init, settings = cloudpickle.loads(bytes.fromhex(sys.argv[1]))
ray.init(**init, log_to_driver=False)
rb = RayReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=64, timeout=20.0, **settings)
shards = settings["num_shards"]
for k in range(shards):
    writer = rb.producing_as(str(k))
    writer.extend(rows(100 // shards * k, 100 // shards * (k + 1)))
    writer.close()
print(cloudpickle.dumps(rb).hex(), flush=True)
sys.stdin.read()
"""


class Program:
    """A program that has made a buffer, in each shard of which are some of 100 rows."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self._buffer = process.stdout.readline()

    def buffer(self) -> Any:
        """Its buffer, as it comes to this process."""
        return cloudpickle.loads(bytes.fromhex(self._buffer))

    def kill(self) -> None:
        """Kills it."""
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def another_program(init: dict[str, Any], num_shards: int = 2, **settings: Any) -> Iterator[Program]:
    """A program that makes a buffer; it is killed at the end of the block.

    Args:
        init: arguments of its `ray.init`.
        settings: of its RayReplayBuffer.
    """
    told = cloudpickle.dumps((init, {"num_shards": num_shards, **settings})).hex()
    process = subprocess.Popen(
        [sys.executable, "-c", _MAKES_SHARDS, told], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=dict(os.environ),
    )  # fmt: skip
    try:
        yield Program(process)
    finally:
        process.kill()
        process.wait()


def is_told_gone(call: Callable[[], Any]) -> bool:
    """Whether a call says that the shards have ended for good."""
    try:
        call()
    except ShardGoneError:
        return True
    except ShardUnavailableError:
        pass
    return False


class Threads:
    """Threads of a test; `done` is set where one has failed, so that the others end.

    Attributes:
        failures: what they raised.
    """

    def __init__(self, done: threading.Event) -> None:
        self._done = done
        self.failures: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def start(self, work: Callable[..., None], *arguments: Any) -> None:
        """Begins one."""

        def run() -> None:
            try:
                work(*arguments)
            except BaseException as error:
                self.failures.append(error)
                self._done.set()

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def join(self) -> None:
        """Waits for the end of all; fails where one has failed."""
        for thread in self._threads:
            thread.join()
        assert not self.failures, self.failures
