"""Processes that work for this one: started, listened to, closed.

A worker never outlives the process that made it, whatever happens to that one, and closing one never waits longer than
its time. What goes wrong in it reaches its owner as a `WorkerError` with the traceback, at once.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import random
import select
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from engram import _native
from engram._system import SIGNED
from engram.errors import WorkerError
from engram.processes.eventfd import Bell
from engram.store.files import passing_fds

PATIENCE = 5.0  # seconds that a worker has to end by itself
QUICKLY = 0.2  # the same where there is an error to be told
_FAILED, _SAID = b"F", b"S"
_alive: set[Worker] = set()  # until they are closed, by this process


class Closed(Exception):
    """Raised inside a worker by `Channel.receive` when its owner wants it to end, or is gone."""


class Portable:
    """A user's function that may go to another process, lambdas and local ones included."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __getstate__(self) -> bytes:
        return cloudpickle.dumps(self.function)  # type: ignore[no-any-return]

    def __setstate__(self, state: bytes) -> None:
        self.function = cloudpickle.loads(state)


class Channel:
    """The worker's end: what `run` receives from its owner, and says to it."""

    def __init__(self, connection: Connection, bell: Bell, owners_bell: Bell) -> None:
        self._connection = connection
        self._bell, self._owners_bell = bell, owners_bell

    def receive(self) -> Any:
        """The owner's next message. Raises Closed when there will be none."""
        return _unpacked(self.receive_bytes(), self._connection)

    def receive_bytes(self) -> bytes:
        """The same for `Worker.send_bytes`."""
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            raise Closed from None

    def has_message(self) -> bool:
        """Whether `receive` would return, or raise, at once."""
        return self._connection.poll()

    def wait_for_ring(self) -> None:
        """Sleeps until the owner rings. Raises Closed when it wants this process to end."""
        if not self._bell.wait():
            raise Closed

    def ring(self) -> None:
        """Rings for the owner: a tenth of a message's cost."""
        self._owners_bell.ring()

    def say(self, message: Any) -> None:
        """Sends a message to the owner; shared storages go along as they are, not copied."""
        packed, descriptors = _packed(message)
        self.say_bytes(packed)
        _send_descriptors(self._connection, descriptors)

    def say_bytes(self, message: bytes) -> None:
        """Sends bytes to the owner. Raises Closed when it is gone."""
        try:
            self._connection.send_bytes(_SAID + message)
        except OSError:
            raise Closed from None

    def fail(self, error: BaseException) -> None:
        """Sends what went wrong to the owner, as far as it can be sent."""
        text = "".join(traceback.format_exception(error))
        try:
            said = cloudpickle.dumps((error, text))
            cloudpickle.loads(said)  # some exceptions can be written and not be read
        except Exception:  # a user's exception may do anything here
            said = cloudpickle.dumps((None, text))
        try:
            self._connection.send_bytes(_FAILED + said)
        except OSError:
            pass  # nobody listens any more


class Worker:
    """A process that calls `run(channel, *args)`, and the owner's end of its channel.

    `run` ends by returning, or by the `Closed` that `channel.receive` raises. Its random numbers (Python's, numpy's,
    torch's) start from a seed drawn from torch's global generator here. It has one torch thread, leaves Ctrl-C to its
    owner, and ends when its owner's process does.

    Args:
        run: with "spawn", what `pickle` can send; wrap users' functions in `Portable`.
        args: the same holds for them.
        name: how errors call it.
        start_method: "fork", "spawn" or "forkserver"; None: fork unless CUDA is in use, where that cannot work.

    Raises:
        ValueError: no such start method.
    """

    def __init__(
        self, run: Callable[..., None], args: Sequence[Any] = (), *, name: str, start_method: str | None = None
    ) -> None:
        method = checked_start_method(start_method)
        context: Any = get_context(method)
        self.name = name
        self._owner = os.getpid()
        self._connection, theirs = context.Pipe()
        seed = int(torch.randint(2**31, ()))
        self._its_bell, self.bell = Bell(), Bell()
        told = ((theirs, self._its_bell, self.bell), self._owner, method != "forkserver", seed, run, tuple(args))
        # Not a daemon: those may have no processes of their own, and an environment may want some.
        self._process: Any = context.Process(target=_main, args=told, name=name)
        self._process.start()
        theirs.close()  # only the worker holds it: its end is seen here
        self._poll = select.poll()
        self._end_fd = self._descriptor_of_end()
        for fd in (self.fileno(), self._end_fd):
            self._poll.register(fd, select.POLLIN)
        self._error: WorkerError | None = None
        self.is_closed = False
        _alive.add(self)

    def _descriptor_of_end(self) -> int:
        try:  # the sentinel of `multiprocessing` is a pipe, which a process that the worker forked keeps open
            fd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            return int(self._process.sentinel)
        weakref.finalize(self, os.close, fd)
        return fd

    @property
    def pid(self) -> int:
        """The process's number."""
        return int(self._process.pid)

    def ring(self) -> None:
        """Wakes the worker from `Channel.wait_for_ring`. Its own rings come to `bell`."""
        self._its_bell.ring()

    def send(self, message: Any) -> None:
        """Sends a message; shared storages go along as they are. Raises WorkerError where the worker failed or died."""
        packed, descriptors = _packed(message)
        self.send_bytes(packed)
        try:
            _send_descriptors(self._connection, descriptors)
        except OSError:
            self.raise_failure()

    def post(self, message: Any) -> None:
        """Sends a message without storages; a failure is told by `receive` only, after all that the worker said."""
        self._refuse_if_closed()
        with contextlib.suppress(OSError):
            self._connection.send_bytes(_packed(message)[0])

    def send_bytes(self, message: bytes) -> None:
        """Sends bytes, for `Channel.receive_bytes`."""
        self._refuse_if_closed()
        try:
            self._connection.send_bytes(message)
        except OSError:
            self.raise_failure()

    def receive(self, timeout: float | None = None) -> Any:
        """The worker's next message.

        Raises:
            WorkerError: it failed, with its traceback, or died.
            TimeoutError: nothing came in `timeout` seconds.
        """
        packed = self.receive_bytes(timeout)
        try:
            return _unpacked(packed, self._connection)
        except EOFError:
            raise self._failure(b"") from None

    def receive_bytes(self, timeout: float | None = None) -> bytes:
        """The same for `Channel.say_bytes`."""
        self._refuse_if_closed()
        ready = self._poll.poll(None if timeout is None else max(0.0, timeout) * 1000)
        if not ready:
            raise TimeoutError(f"{self.name} said nothing for {timeout} s")
        try:
            message = self._connection.recv_bytes() if any(fd == self.fileno() for fd, _ in ready) else b""
        except (EOFError, OSError):
            message = b""
        if message[:1] == _SAID:
            return message[1:]
        raise self._failure(message[1:])

    def fileno(self) -> int:
        """Readable when there is a message, or none will come: for `wait_for_any`."""
        return int(self._connection.fileno())

    def end_fileno(self) -> int:
        """Readable when the process has ended."""
        return self._end_fd

    def kill(self, reason: str) -> NoReturn:
        """Ends the process at once, whatever it does, and raises the WorkerError that says why."""
        self._refuse_if_closed()
        self._process.kill()
        self._process.join()
        self._error = WorkerError(self.name, "", self._process.exitcode, reason)
        raise self._error

    def raise_failure(self) -> NoReturn:
        """The WorkerError of one that has failed or ended; what it said before is dropped."""
        while True:  # what it said before it ended is read first; the failure is the last
            self.receive_bytes(PATIENCE)

    def _failure(self, said: bytes) -> WorkerError:
        if self._error is None:
            cause, text = cloudpickle.loads(said) if said else (None, "")
            if not text:
                self._drain(time.monotonic() + PATIENCE)
            self._error = WorkerError(self.name, text, self._process.exitcode if not text else None)
            self._error.__cause__ = cause
        return self._error

    def _refuse_if_closed(self) -> None:
        if self._error is not None:
            raise self._error
        if self.is_closed or os.getpid() != self._owner:
            raise RuntimeError(f"{self.name} " + ("was closed" if self.is_closed else "belongs to another process"))

    def close(self, patience: float = PATIENCE) -> None:
        """Ends the worker: asked first, after `patience` seconds by force. A second call does nothing."""
        close_all([self], patience)

    def _ask_to_end(self) -> None:
        with socket.socket(fileno=os.dup(self._connection.fileno())) as ours, contextlib.suppress(OSError):
            ours.shutdown(socket.SHUT_WR)  # it reads the end, whoever else has inherited our side
        self._its_bell.ring_last()

    def _end(self, until: float) -> None:
        """Waits until a moment of `time.monotonic`, then kills."""
        for force in (None, self._process.terminate, self._process.kill):
            if force is not None:
                force()
                until = time.monotonic() + 0.5
            self._drain(until)
            if self._process.exitcode is not None:
                break
        self._process.join()
        self._connection.close()
        self._its_bell.close()
        self.bell.close()
        self._process.close()

    def _drain(self, until: float) -> None:
        while self._process.exitcode is None and (left := until - time.monotonic()) > 0:
            self._poll.poll(min(left, 0.05) * 1000)  # it may be in the middle of saying something long
            try:
                if self._connection.poll() and not os.read(self._connection.fileno(), 1 << 20):
                    time.sleep(0.001)  # it has closed its side and is about to end
            except OSError:
                time.sleep(0.001)

    def __repr__(self) -> str:
        return f"Worker({self.name!r}, pid={'-' if self.is_closed else self.pid})"


def _packed(message: Any) -> tuple[bytes, list[int]]:
    packed = io.BytesIO()
    with passing_fds([]) as descriptors:
        _Pickler(packed).dump(message)
    return len(descriptors).to_bytes(1, "little") + packed.getvalue(), descriptors


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes the wide unsigned tensors too, which torch's own way does not know."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and obj.dtype in SIGNED:
            return Tensor.view, (obj.view(SIGNED[obj.dtype]), obj.dtype)
        return super().reducer_override(obj)


def _unpacked(packed: bytes, connection: Connection) -> Any:
    descriptors = [_receive_descriptor(connection) for _ in range(packed[0])]
    try:
        with passing_fds(descriptors):
            return cloudpickle.loads(memoryview(packed)[1:])
    finally:
        for fd in descriptors:
            os.close(fd)


def _send_descriptors(connection: Connection, descriptors: list[int]) -> None:
    for fd in descriptors:
        with socket.socket(fileno=os.dup(connection.fileno())) as wire:
            socket.send_fds(wire, [b"d"], [fd])


def _receive_descriptor(connection: Connection) -> int:
    with socket.socket(fileno=os.dup(connection.fileno())) as wire:
        _, descriptors, _, _ = socket.recv_fds(wire, 1, 1)
    if not descriptors:
        raise EOFError("the other process ended before its descriptors had come")
    return descriptors[0]


def close_all(workers: Iterable[Worker], patience: float = PATIENCE) -> None:
    """Closes workers side by side: all are asked before the first is waited for. Those of other processes are left."""
    mine = [worker for worker in workers if not worker.is_closed and worker._owner == os.getpid()]
    for worker in mine:
        worker.is_closed = True
        worker._ask_to_end()
    until = time.monotonic() + patience
    for worker in mine:
        worker._end(until)
        _alive.discard(worker)


def wait_for_any(workers: Sequence[Worker], timeout: float | None = None) -> list[Worker]:
    """The workers that have something to say, or have ended; empty after `timeout` seconds."""
    poll = select.poll()
    by_fd = {worker.fileno(): worker for worker in workers}
    for fd, worker in [*by_fd.items(), *((worker._end_fd, worker) for worker in workers)]:
        poll.register(fd, select.POLLIN)
        by_fd[fd] = worker
    ready = poll.poll(None if timeout is None else max(0.0, timeout) * 1000)
    return list(dict.fromkeys(by_fd[fd] for fd, _ in ready))


def checked_start_method(method: str | None) -> str:
    """`method`, or the one that suits this process. Raises ValueError where there is no such method."""
    if method is None:
        uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return "spawn" if uses_cuda or "fork" not in get_all_start_methods() else "fork"
    if method not in get_all_start_methods():
        raise ValueError(f"start method must be one of {', '.join(get_all_start_methods())}, or None, got {method!r}")
    return method


def _main(
    ends: tuple[Connection, Bell, Bell],
    owner: int,
    is_child: bool,
    seed: int,
    run: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    _alive.clear()  # a fork has its siblings there
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _end_with(owner, is_child)
    torch.set_num_threads(1)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    channel = Channel(*ends)
    try:
        run(channel, *args)
    except Closed:
        pass
    except BaseException as error:  # the owner must hear of every one
        channel.fail(error)
    finally:
        close_all(list(_alive), patience=1.0)  # sooner than the owner's own patience ends
        ends[0].close()


def _end_with(owner: int, is_child: bool) -> None:
    """Ends this process when its owner's ends, however that happens, and whatever is done here then."""
    try:
        watch = os.pidfd_open(owner)
    except (AttributeError, OSError):  # no such call, or the owner has gone already
        threading.Thread(target=_end_with_parent, args=(owner, is_child), daemon=True).start()
        return
    if is_child and os.getppid() != owner:  # the number is another process's by now
        os._exit(1)
    _native.exit_when_readable(watch)


def _end_with_parent(owner: int, is_child: bool) -> None:
    while is_child and os.getppid() == owner:
        time.sleep(0.2)
    os._exit(1)


@atexit.register
def _close_those_left() -> None:
    is_uncaught = getattr(sys, "last_value", None) is not None  # Ctrl-C, most of all
    close_all(list(_alive), patience=QUICKLY if is_uncaught else 1.0)
