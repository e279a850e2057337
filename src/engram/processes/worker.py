"""Worker processes: started, sent messages to and received from, closed.

A worker never outlives its owner, the process that started it, however that ends; closing one never waits longer than
its timeout. An exception in it reaches the owner at once as a `WorkerError` with the worker's traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import os
import pickle
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
from multiprocessing import get_all_start_methods, get_context, reduction
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

import engram._native as _native
from engram._copies import MadeAnew, passing_fds
from engram._packages import packages
from engram.errors import WorkerError
from engram.processes.timeouts import CallTimer
from engram.pytree import SIGNED

CLOSE_TIMEOUT = 5.0  # seconds that a worker has to end by itself
ERROR_CLOSE_TIMEOUT = 0.2  # the same while an exception is on its way to the user
_WAKE, _CLOSE = (n.to_bytes(8, sys.byteorder) for n in (1, 2**32))  # what an EventFd adds up
_FAILURE, _MESSAGE = b"F", b"S"
_live_workers: set[Worker] = set()  # of this process, until they are closed


class EventFd(MadeAnew):
    """One process calls `set`, one other `wait`; calls of `set` before the next `wait` count as one.

    It can be pickled to a process that is being started. Unlike a pipe or a socket it does not make the scheduler bring
    both processes to the same core.

    >>> event = EventFd()
    >>> event.set()
    >>> event.wait()
    True
    """

    _fd = -1  # until there is one

    def __init__(self, handle: Any = None) -> None:
        """`handle` is that of a descriptor which another process has sent."""
        self._fd = os.eventfd(0, os.EFD_CLOEXEC) if handle is None else handle.detach()

    def set(self) -> None:
        """Wakes the process that waits, or lets its next `wait` return at once."""
        os.write(self._fd, _WAKE)

    def close_remote(self) -> None:
        """Wakes the process that waits for the last time: its `wait` returns False."""
        os.write(self._fd, _CLOSE)

    def wait(self) -> bool:
        """Sleeps until `set` is called; False after `close_remote`."""
        return int.from_bytes(os.read(self._fd, 8), sys.byteorder) < 2**32

    def fileno(self) -> int:
        """Readable when `wait` would return at once."""
        return self._fd

    def close(self) -> None:
        """Closes the descriptor in this process; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def _made_from(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return EventFd, (reduction.DupFd(self._fd),)


class ChannelClosed(Exception):
    """Raised inside a worker by `Channel.receive` when its owner wants it to end, or is gone."""


class CloudpickleWrapper(MadeAnew):
    """A user's function that can be pickled to another process, lambdas and local functions included."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def _made_from(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _unwrapped, (_cloudpickle().dumps(self.function),)


def _unwrapped(pickled: bytes) -> CloudpickleWrapper:
    return CloudpickleWrapper(pickle.loads(pickled))


def packed_exception(error: BaseException) -> bytes:
    """An exception and its traceback, pickled; None and the traceback where the exception cannot be pickled."""
    text = "".join(traceback.format_exception(error))
    try:
        packed: bytes = _cloudpickle().dumps((error, text))
        pickle.loads(packed)  # some exceptions can be pickled but not unpickled
    except Exception:  # a user's exception class may raise anything here
        packed = pickle.dumps((None, text))
    return packed


class Channel:
    """The worker's end of the connection to its owner."""

    def __init__(
        self, connection: Connection, wakeup: EventFd, owner_wakeup: EventFd, clock: CallTimer | None = None
    ) -> None:
        self._connection, self.clock = connection, clock
        self._wakeup, self._owner_wakeup = wakeup, owner_wakeup

    def receive(self) -> Any:
        """Waits for the owner's next message. Raises ChannelClosed when the owner has closed its end."""
        return _unpacked(self.receive_bytes(), self._connection)

    def receive_bytes(self) -> bytes:
        """As `receive`, for bytes that `Worker.send_bytes` sent."""
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            raise ChannelClosed from None

    def has_message(self) -> bool:
        """Whether `receive` would return, or raise, at once."""
        return self._connection.poll()

    def wait_for_wakeup(self) -> None:
        """Sleeps until the owner calls `Worker.wake`. Raises ChannelClosed when it wants this process to end."""
        if not self._wakeup.wait():
            raise ChannelClosed

    def wake_owner(self) -> None:
        """Wakes the owner, at a tenth of a message's cost."""
        self._owner_wakeup.set()

    def send(self, message: Any) -> None:
        """Sends a message to the owner; shared storages in it are passed by descriptor, not copied."""
        packed, descriptors = _packed(message)
        self.send_bytes(packed)
        _send_descriptors(self._connection, descriptors)

    def send_bytes(self, message: bytes) -> None:
        """Sends bytes to the owner. Raises ChannelClosed when the owner has ended."""
        try:
            self._connection.send_bytes(_MESSAGE + message)
        except OSError:
            raise ChannelClosed from None

    def send_exception(self, error: BaseException) -> None:
        """Sends an exception and its traceback to the owner; only the traceback where it cannot be pickled."""
        try:
            self._connection.send_bytes(_FAILURE + packed_exception(error))
        except OSError:
            pass  # the owner has ended


class Worker:
    """A process that calls `run(channel, *args)`, and the owner's end of the connection to it.

    `run` ends by returning, or by the `ChannelClosed` that `channel.receive` raises. The worker's random generators
    (Python's, NumPy's, torch's) are seeded from a draw of torch's global generator in this process. It uses one torch
    thread, ignores Ctrl-C, and ends when its owner does.

    Args:
        run: with "spawn", a function that `pickle` can send; wrap users' functions in `CloudpickleWrapper`.
        args: likewise.
        name: the worker's name in errors.
        start_method: "fork", "spawn" or "forkserver"; None: fork unless CUDA is in use, where that cannot work.
        seed: seeds the worker's random generators instead of such a draw.
        clock: `channel.clock`, where the worker records calls that have a timeout.

    Raises:
        ValueError: no such start method.
        ImportError: cloudpickle is missing: `pip install "engram[workers]"`.
    """

    def __init__(
        self,
        run: Callable[..., None],
        args: Sequence[Any] = (),
        *,
        name: str,
        start_method: str | None = None,
        seed: int | None = None,
        clock: CallTimer | None = None,
    ) -> None:
        method = validate_start_method(start_method)
        _cloudpickle()  # raises ImportError before anything is made; a forked worker inherits the module
        context: Any = get_context(method)
        self.name = name
        self._owner = os.getpid()
        self._connection, theirs = context.Pipe()
        self.seed = int(torch.randint(2**31, (), device="cpu")) if seed is None else seed
        self._worker_wakeup, self.wakeup = EventFd(), EventFd()
        self.clock = clock
        main_args = (
            (theirs, self._worker_wakeup, self.wakeup, clock),
            self._owner,
            method != "forkserver",
            self.seed,
            run,
            tuple(args),
        )
        # Not a daemon: those may not start processes of their own, which an environment may do.
        self._process: Any = context.Process(target=_main, args=main_args, name=name)
        self._process.start()
        theirs.close()  # only the worker holds it, so that this process sees when it ends
        self._poll = select.poll()
        self._end_fd = self._descriptor_of_end()
        for fd in (self.fileno(), self._end_fd):
            self._poll.register(fd, select.POLLIN)
        self._error: WorkerError | None = None
        self.is_closed = False
        _live_workers.add(self)

    def _descriptor_of_end(self) -> int:
        try:  # the sentinel of `multiprocessing` is a pipe, which a process that the worker forked keeps open
            fd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            return int(self._process.sentinel)
        weakref.finalize(self, os.close, fd)
        return fd

    @property
    def pid(self) -> int:
        """The process id."""
        return int(self._process.pid)

    def reading(self) -> tuple[float, str] | None:
        """For how many seconds the call has lasted that it is in the middle of, and which one; None: in none."""
        return None if self.clock is None else self.clock.reading()

    def wake(self) -> None:
        """Wakes the worker from `Channel.wait_for_wakeup`. Its calls of `wake_owner` arrive at `wakeup`."""
        self._worker_wakeup.set()

    def send(self, message: Any) -> None:
        """Sends a message; shared storages go by descriptor. Raises WorkerError where the worker failed or died."""
        packed, descriptors = _packed(message)
        self.send_bytes(packed)
        try:
            _send_descriptors(self._connection, descriptors)
        except OSError:
            self.raise_failure()

    def post(self, message: Any) -> None:
        """Sends a message without storages; a failure is raised by `receive` only, after all messages of the worker."""
        self._refuse_if_closed()
        with contextlib.suppress(OSError):
            self._connection.send_bytes(_packed(message)[0])

    def send_bytes(self, message: bytes) -> None:
        """Sends bytes to `Channel.receive_bytes`."""
        self._refuse_if_closed()
        try:
            self._connection.send_bytes(message)
        except OSError:
            self.raise_failure()

    def receive(self, timeout: float | None = None) -> Any:
        """Waits for the worker's next message.

        Raises:
            WorkerError: the worker failed (with its traceback) or died.
            TimeoutError: no message came within `timeout` seconds.
        """
        packed = self.receive_bytes(timeout)
        try:
            return _unpacked(packed, self._connection)
        except EOFError:
            raise self._failure(b"") from None

    def receive_bytes(self, timeout: float | None = None) -> bytes:
        """As `receive`, for bytes that `Channel.send_bytes` sent."""
        self._refuse_if_closed()
        ready = self._poll.poll(None if timeout is None else max(0.0, timeout) * 1000)
        if not ready:
            raise TimeoutError(f"{self.name} sent no message within {timeout} s")
        try:
            message = self._connection.recv_bytes() if any(fd == self.fileno() for fd, _ in ready) else b""
        except (EOFError, OSError):
            message = b""
        if message[:1] == _MESSAGE:
            return message[1:]
        raise self._failure(message[1:])

    def fileno(self) -> int:
        """A descriptor that is readable when there is a message, or when the worker has closed its end."""
        return int(self._connection.fileno())

    def end_fileno(self) -> int:
        """A descriptor that is readable when the process has ended."""
        return self._end_fd

    def kill(self, reason: str) -> NoReturn:
        """Kills the process and raises a WorkerError with this reason."""
        self._refuse_if_closed()
        self._process.kill()
        self._process.join()
        self._error = WorkerError(self.name, "", self._process.exitcode, reason)
        raise self._error

    def raise_failure(self) -> NoReturn:
        """Raises the WorkerError of a worker that has failed or ended; messages that it sent before are dropped."""
        while True:  # the failure is the last message
            self.receive_bytes(CLOSE_TIMEOUT)

    def _failure(self, pickled: bytes) -> WorkerError:
        if self._error is None:
            cause, text = pickle.loads(pickled) if pickled else (None, "")
            if not text:
                self._drain(time.monotonic() + CLOSE_TIMEOUT)
            self._error = WorkerError(self.name, text, self._process.exitcode if not text else None)
            self._error.__cause__ = cause
        return self._error

    def _refuse_if_closed(self) -> None:
        if self._error is not None:
            raise self._error
        if self.is_closed or os.getpid() != self._owner:
            raise RuntimeError(f"{self.name} " + ("was closed" if self.is_closed else "belongs to another process"))

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Ends the worker: asks it first, and kills it after `timeout` seconds. A second call does nothing."""
        close_all([self], timeout)

    def begin_close(self) -> Callable[[float], None] | None:
        """Asks the process to end; returns what waits for it until a time of `time.monotonic`, and then kills it.

        None where it is closed already, or another process's.
        """
        if self.is_closed or self._owner != os.getpid():
            return None
        self.is_closed = True
        with socket.socket(fileno=os.dup(self._connection.fileno())) as ours, contextlib.suppress(OSError):
            # The worker reads end-of-file even where forks of this process hold the socket.
            ours.shutdown(socket.SHUT_WR)
        self._worker_wakeup.close_remote()
        return self._end

    def _end(self, until: float) -> None:
        for force in (None, self._process.terminate, self._process.kill):
            if force is not None:
                force()
                until = time.monotonic() + 0.5
            self._drain(until)
            if self._process.exitcode is not None:
                break
        self._process.join()
        self._connection.close()
        self._worker_wakeup.close()
        self.wakeup.close()
        self._process.close()
        _live_workers.discard(self)

    def _drain(self, until: float) -> None:
        while self._process.exitcode is None and (left := until - time.monotonic()) > 0:
            self._poll.poll(min(left, 0.05) * 1000)  # the worker may be in the middle of a long message
            try:
                if self._connection.poll() and not os.read(self._connection.fileno(), 1 << 20):
                    time.sleep(0.001)  # the worker has closed its end and is about to exit
            except OSError:
                time.sleep(0.001)

    def __repr__(self) -> str:
        return f"Worker({self.name!r}, pid={'-' if self.is_closed else self.pid})"


def _packed(message: Any) -> tuple[bytes, list[int]]:
    packed = io.BytesIO()
    with passing_fds([]) as descriptors:
        _pickler()(packed).dump(message)
    return len(descriptors).to_bytes(1, "little") + packed.getvalue(), descriptors


def _cloudpickle() -> Any:
    """The cloudpickle package; an ImportError says how to get it."""
    with packages("a worker process", "engram[workers]", cloudpickle="cloudpickle"):
        import cloudpickle
    return cloudpickle


@functools.cache
def _pickler() -> Any:
    class Pickler(_cloudpickle().Pickler):  # type: ignore[misc]
        """Pickles uint16, uint32 and uint64 tensors too, which torch does not."""

        def reducer_override(self, obj: Any) -> Any:
            if type(obj) is Tensor and obj.dtype in SIGNED:
                return Tensor.view, (obj.view(SIGNED[obj.dtype]), obj.dtype)
            return super().reducer_override(obj)

    return Pickler


def _unpacked(packed: bytes, connection: Connection) -> Any:
    descriptors: list[int] = []
    try:
        for _ in range(packed[0]):
            descriptors.append(_receive_descriptor(connection))
        with passing_fds(descriptors):
            return pickle.loads(memoryview(packed)[1:])
    finally:
        for fd in descriptors:
            os.close(fd)


def _send_descriptors(connection: Connection, descriptors: list[int]) -> None:
    for fd in descriptors:
        with socket.socket(fileno=os.dup(connection.fileno())) as wire:
            socket.send_fds(wire, [b"d"], [fd])


def _receive_descriptor(connection: Connection) -> int:
    descriptors: list[int] = []
    with socket.socket(fileno=os.dup(connection.fileno())) as wire, contextlib.suppress(ConnectionError):
        _, descriptors, _, _ = socket.recv_fds(wire, 1, 1)  # reset where the other process had messages to read
    if not descriptors:
        raise EOFError("the other process ended before it sent its descriptors")
    return descriptors[0]


def close_all(workers: Iterable[Worker], timeout: float = CLOSE_TIMEOUT) -> None:
    """Closes workers together: asks all to end before it waits for the first. Skips those that other processes own."""
    waits = [wait for worker in workers if (wait := worker.begin_close()) is not None]
    until = time.monotonic() + timeout
    for wait in waits:
        wait(until)


def wait_for_any(workers: Sequence[Worker], timeout: float | None = None) -> list[Worker]:
    """Waits for a message of any worker: those with a message or that have ended; empty after `timeout` seconds."""
    poll = select.poll()
    by_fd = {worker.fileno(): worker for worker in workers}
    for fd, worker in [*by_fd.items(), *((worker.end_fileno(), worker) for worker in workers)]:
        poll.register(fd, select.POLLIN)
        by_fd[fd] = worker
    ready = poll.poll(None if timeout is None else max(0.0, timeout) * 1000)
    return list(dict.fromkeys(by_fd[fd] for fd, _ in ready))


def validate_start_method(method: str | None) -> str:
    """The start method to use: `method`, or for None the default. Raises ValueError where there is no such method."""
    if method is None:
        uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return "spawn" if uses_cuda else "fork"
    if method not in get_all_start_methods():
        raise ValueError(f"start method must be one of {', '.join(get_all_start_methods())}, or None, got {method!r}")
    return method


def _main(
    ends: tuple[Connection, EventFd, EventFd, CallTimer | None],
    owner: int,
    is_child: bool,
    seed: int,
    run: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    _live_workers.clear()  # a forked child inherits entries of its siblings
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
    except ChannelClosed:
        pass
    except BaseException as error:  # every one is reported to the owner
        channel.send_exception(error)
    finally:
        close_all(list(_live_workers), timeout=1.0)  # sooner than the owner's own timeout
        ends[0].close()


def _end_with(owner: int, is_child: bool) -> None:
    """Makes this process exit when its owner ends, however that happens and whatever runs here then."""
    try:
        watch = os.pidfd_open(owner)
    except (AttributeError, OSError):  # no such call, or the owner has ended already
        threading.Thread(target=_end_with_parent, args=(owner, is_child), daemon=True).start()
        return
    if is_child and os.getppid() != owner:  # the owner has ended and another process has its id
        os._exit(1)
    _native.exit_when_readable(watch)


def _end_with_parent(owner: int, is_child: bool) -> None:
    while is_child and os.getppid() == owner:
        time.sleep(0.2)
    os._exit(1)


@atexit.register
def _close_at_exit() -> None:
    is_uncaught = getattr(sys, "last_value", None) is not None  # usually Ctrl-C
    close_all(list(_live_workers), timeout=ERROR_CLOSE_TIMEOUT if is_uncaught else 1.0)
