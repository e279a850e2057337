"""A replay buffer whose shards lie in processes that have joined with `torch.distributed.rpc`, and a client of them."""

from __future__ import annotations

import collections
import operator
import pickle
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import rpc

from engram import __version__
from engram.data import RandomSampler, ReplayBuffer, Sampler, Storage, TensorDictReplayBuffer
from engram.distributed.client import PendingCall, ShardLink
from engram.distributed.shard import ReplayShard
from engram.distributed.sharded import ShardedReplayBuffer, ShardedSettings, Timeouts, arguments_of_shards
from engram.errors import ShardUnavailableError, ShardVersionError
from engram.kernel.replay import describe
from engram.kernel.tools import user_path

if not rpc.is_available():
    raise ImportError("RpcReplayBuffer needs torch.distributed.rpc, which this build of torch leaves out")

_LOST = 60.0  # seconds after which calls count as lost
_LONG = {"verify": 3600.0, "verify_pieces": 3600.0, "loads": 3600.0, "load_pieces": 3600.0}  # seconds
_shards: dict[str, ReplayShard] = {}  # of this process, by name
_settings: dict[str, dict[str, Any]] = {}  # with which each was made
_making = threading.Lock()


def _serve(name: str, version: str, arguments: dict[str, Any], folder: str | None) -> str:
    """Makes a shard in this process, if there is none of this name; returns the version of engram here.

    Raises:
        ValueError: there is one that was made with other arguments.
    """
    if version == __version__:
        settings = _settings_of(arguments, folder)
        with _making:
            if name not in _shards:
                _shards[name], _settings[name] = ReplayShard(**arguments, scratch_dir=folder), settings
            there = _settings.get(name, settings)
        if differences := [
            f"{what} {there[what]}, not {settings[what]}" for what in there if there[what] != settings[what]
        ]:
            raise ValueError(
                f"a buffer of this name has a shard {name} already, made with {'; '.join(differences)}: give the same, "
                "or another name="
            )
    return __version__


def _settings_of(arguments: dict[str, Any], folder: str | None) -> dict[str, Any]:
    """What clients of one shard must agree on, in a form that can be compared and shown."""
    sampler, compact = describe(arguments["sampler"]), arguments["compact"]
    made_with = sampler["arguments"]  # None: of a class of a user's own, of which only the name is known
    given = [] if made_with is None else [*made_with["args"], *made_with["kwargs"].items()]
    return {
        "room for": f"{arguments['capacity']} rows",
        "lanes of": arguments["lanes"],
        "the sampler": f"{sampler['kind']}({', '.join(map(str, given))})",
        "compact": None if compact is None else compact.to_json(),
        "the folder": folder,
    }


def _answers(name: str, calls: bytes) -> bytes:
    """Answers calls of a shard of this process, one after the other; errors are answers, too."""
    answers: list[tuple[Any, Exception | None]] = []
    for method, arguments in pickle.loads(calls):
        try:
            answers.append((operator.methodcaller(method, *arguments)(_shards[name]), None))
        except Exception as error:
            answers.append((None, error))
    return pickle.dumps(answers)


def _end(name: str) -> None:
    with _making:
        shard = _shards.pop(name, None)
        _settings.pop(name, None)
    if shard is not None:
        shard.close()


class _RpcCall(PendingCall):
    def __init__(self, method: str, arguments: tuple[Any, ...]) -> None:
        self.method, self.arguments = method, arguments
        self._came = threading.Event()
        self._answer: tuple[Any, Exception | None] = (None, None)

    def take(self, answer: Any, error: Exception | None) -> None:
        """Takes the answer in."""
        self._answer = answer, error
        self._came.set()

    def result(self, timeout: float) -> Any:
        if not self._came.wait(timeout):
            raise TimeoutError(f"{self.method} has not been answered within {timeout:g} seconds")
        answer, error = self._answer
        if error is not None:
            raise error
        return answer

    def has_come(self) -> bool:
        return self._came.is_set()


class _RpcLink(ShardLink):
    """Carries calls to a shard, one message at a time, as torch keeps no order among several.

    Calls that come while one is on its way go together in the next.
    """

    def __init__(self, worker: str, name: str) -> None:
        self._worker, self._name = worker, name
        self._lock = threading.Lock()
        self._waiting: collections.deque[_RpcCall] = collections.deque()
        self._sent: list[_RpcCall] = []

    def call(self, method: str, *arguments: Any, answer_bytes: int = 0) -> PendingCall:
        made = _RpcCall(method, arguments)
        with self._lock:
            self._waiting.append(made)
        self._send()
        return made

    def _send(self) -> None:
        """Sends what waits, unless something is on its way."""
        with self._lock:
            if self._sent or not self._waiting:
                return
            self._sent = list(self._waiting)
            self._waiting.clear()
            message = pickle.dumps([(call.method, call.arguments) for call in self._sent])
            limit = max(_LONG.get(call.method, _LOST) for call in self._sent)
        try:
            future = rpc.rpc_async(self._worker, _answers, args=(self._name, message), timeout=limit)
        except Exception as error:  # the worker is unknown, or this process has left
            self._take(None, error)
            return
        future.add_done_callback(self._arrived)

    def _arrived(self, future: torch.futures.Future[bytes]) -> None:
        try:
            self._take(pickle.loads(future.value()), None)
        except Exception as error:  # the worker, or the way to it, is lost
            self._take(None, error)
        self._send()

    def _take(self, answers: list[tuple[Any, Exception | None]] | None, lost: Exception | None) -> None:
        with self._lock:
            sent, self._sent = self._sent, []
        for k, call in enumerate(sent):
            if answers is None:
                reason = " ".join(str(lost).split())
                call.take(None, ShardUnavailableError(f"{self._worker} does not answer: {reason}"))
            else:
                call.take(*answers[k])


class RpcReplayBuffer(ShardedReplayBuffer):
    """A replay buffer whose rows lie in processes of a `torch.distributed.rpc` group, used like one in this process.

    The shards are those of a `RayReplayBuffer`: one ring each for any number of producers, draws that are divided
    exactly, and each row in once, whichever message is lost. Each process that makes one with the same workers and name
    is another client of the same rows. Torch does not start a process again: the rows of one that has died are there
    for a new group with the same `scratch_dir`.

    Args:
        workers: names of the processes that hold a shard each, as `rpc.init_rpc` was given them.
        storage: as RayReplayBuffer.
        name: of the buffer, in its group.
        scratch_dir: a folder for the rows, which then outlive the processes: `shard-0` and so on in it. None: memory.
        sampler, transform, batch_size, replay_buffer_cls, lanes, batches_per_call, max_batch_age, timeout,
            priority_key, generator: as RayReplayBuffer.

    Raises:
        ValueError, TypeError: a setting that is not allowed, or a sampler whose draws cannot be divided; or another
            process made a buffer of this name with another size, sampler, `lanes` or folder.
        ShardVersionError: a worker runs another version of engram.
        RuntimeError: this process has not joined with `rpc.init_rpc`, or a worker does not answer.

    Example, in a group with processes named "replay0" and "replay1":
        >>> rb = RpcReplayBuffer(["replay0", "replay1"], storage=LazyTensorStorage(100_000), batch_size=256)
        ... # doctest: +SKIP
        >>> rb.extend(steps)  # doctest: +SKIP
        >>> batch = rb.sample()  # doctest: +SKIP
    """

    def __init__(
        self,
        workers: Sequence[str],
        *,
        storage: Storage | Callable[[], Storage],
        name: str = "replay",
        sampler: Sampler | Callable[[], Sampler] | None = None,
        transform: Any = None,
        batch_size: int | None = None,
        replay_buffer_cls: type[ReplayBuffer[Any]] = TensorDictReplayBuffer,
        lanes: int = 8,
        scratch_dir: str | Path | None = None,
        batches_per_call: int | None = None,
        max_batch_age: float | None = None,
        timeout: float | Timeouts = 1.0,
        priority_key: str = "td_error",
        generator: torch.Generator | None = None,
    ) -> None:
        if not workers:
            raise ValueError("workers= names no process: at least one must hold rows")
        sampler = RandomSampler() if sampler is None else sampler if isinstance(sampler, Sampler) else sampler()
        attaches, waits = issubclass(replay_buffer_cls, TensorDictReplayBuffer), Timeouts.of(timeout)
        settings = ShardedSettings(
            sampler, transform, batch_size, attaches, priority_key, batches_per_call, waits.answer, max_batch_age,
            waits.extend,
        )  # fmt: skip
        settings.check()
        arguments = arguments_of_shards(storage, len(workers), lanes, sampler, transform)
        self._served = [(worker, f"{name}-{k}") for k, worker in enumerate(workers)]
        below = None if scratch_dir is None else user_path(scratch_dir)
        folders = [None if below is None else str(below / f"shard-{k}") for k in range(len(workers))]
        made = [
            rpc.rpc_async(worker, _serve, args=(shard, __version__, arguments, folder))
            for (worker, shard), folder in zip(self._served, folders, strict=True)
        ]
        for version in torch.futures.wait_all(made):
            if version != __version__:
                raise ShardVersionError(version, __version__)
        super().__init__([_RpcLink(*served) for served in self._served], settings, generator=generator)

    def shutdown(self) -> None:
        """Closes this object and ends the shards; rows stay only where there is a `scratch_dir`."""
        try:
            self.close()
        finally:
            for worker, shard in self._served:
                rpc.rpc_sync(worker, _end, args=(shard,))
