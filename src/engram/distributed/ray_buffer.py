"""A replay buffer on a Ray cluster: a shard in each of some actors, and a client of them all."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from engram import __version__
from engram.data import RandomSampler, ReplayBuffer, RoundRobinWriter, Sampler, Storage, TensorDictReplayBuffer
from engram.distributed.blocks import Block
from engram.distributed.client import PendingCall, ShardLink
from engram.distributed.node_folders import PREFIX, FolderOwner, claim_folder, remove_abandoned_folders
from engram.distributed.shard import ReplayShard
from engram.distributed.sharded import (
    ShardedReplayBuffer,
    ShardedSettings,
    Timeouts,
    arguments_of_shards,
)
from engram.errors import ShardGoneError, ShardUnavailableError, ShardVersionError
from engram.kernel.advice import advised
from engram.kernel.tools import count, packages, user_path

_NAMESPACE = "engram"  # of Ray, in which buffers with names are found
_END_TIMEOUT = 30.0  # seconds that an actor has to remove its folder; it may be starting again
_MEMORY = Path("/dev/shm")
_MOST_INLINE = 90_000  # bytes of arrays in a message that is one piece
_PIECE = 98_304  # bytes of one; Ray puts objects over 102,400 into its object store
_MOST_PIECES = 32  # of a message: each one costs some CPU, so the object store carries larger ones with less
_SMALL_ARRAY = 4096  # bytes
_ALIGNED = 64  # bytes, where arrays begin


def import_ray() -> Any:
    """Imports Ray, an optional package.

    Raises:
        ImportError: it is not installed.
    """
    with packages("RayReplayBuffer", "engram[ray]", ray="ray"):
        import ray
        import ray.util.scheduling_strategies
    return ray


def _to_send(message: Any, most: int) -> tuple[Any, ...]:
    """A message as Ray carries it with the least work: in pieces that travel in a call itself, `most` at most.

    Larger objects go through the object stores of both nodes, which takes several times as long, and as much CPU again
    in Ray's own processes. Only where a message is too large for pieces it is one such object: tensors are arrays,
    which are in pickle without a copy, and come as memory of the object store.
    """
    message = _with_arrays(message)
    if _array_bytes(message) <= _MOST_INLINE:
        return (pickle.dumps(message, protocol=5),)
    parts: list[Any] = []
    sizes: list[int] = []

    def set_aside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _SMALL_ARRAY:
            return True  # it is pickled with the rest
        sizes.append(raw.nbytes)
        parts.extend((raw, bytes(-raw.nbytes % _ALIGNED)))
        return False

    head = pickle.dumps(message, protocol=5, buffer_callback=set_aside)
    if 1 - sum(map(len, parts)) // -_PIECE > most:
        return (message,)
    return (pickle.dumps((head, sizes), protocol=5), *_cut(parts))  # the first one says what is in the others


def _pieces_for(nbytes: int) -> int:
    """How many pieces an answer with arrays of about so many bytes may have; 1: the object store shall carry it."""
    nbytes += _SMALL_ARRAY  # of what it has besides
    pieces = 1 if nbytes <= _MOST_INLINE else 2 + nbytes // _PIECE
    return pieces if pieces <= _MOST_PIECES else 1


def _cut(parts: list[Any]) -> Iterator[bytes]:
    """All bytes of some memory, in order, in pieces."""
    piece: list[Any] = []
    room = _PIECE
    for part in parts:
        left = memoryview(part)
        while len(left) >= room:
            yield b"".join((*piece, left[:room]))
            left, piece, room = left[room:], [], _PIECE
        piece.append(left)
        room -= len(left)
    if room < _PIECE:
        yield b"".join(piece)


def _received(pieces: Sequence[Any]) -> Any:
    """The message that `_to_send` packed. Tensors are writable; arrays of blocks are not if they came as one object."""
    first, *rest = pieces
    if not isinstance(first, bytes):
        return _with_tensors(first, shared=True)
    if not rest or not rest[0]:
        return _with_tensors(pickle.loads(first), shared=False)
    head, sizes = pickle.loads(first)
    memory = memoryview(np.empty(sum(map(len, rest)), np.uint8))  # type: ignore[arg-type]
    at = 0
    for piece in rest:
        memory[at : at + len(piece)] = piece
        at += len(piece)
    starts = itertools.accumulate((size + -size % _ALIGNED for size in sizes), initial=0)
    arrays = [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    return _with_tensors(pickle.loads(head, buffers=arrays), shared=False)


def _with_arrays(message: Any) -> Any:
    if isinstance(message, Tensor):
        return message.numpy()
    if isinstance(message, tuple):
        return _rebuilt(message, map(_with_arrays, message))
    return message


def _with_tensors(message: Any, shared: bool) -> Any:
    """`shared`: arrays lie in the object store, whose memory is read-only, so tensors are copies."""
    if isinstance(message, np.ndarray):
        return torch.from_numpy(message.copy() if shared or not message.flags.writeable else message)
    if isinstance(message, tuple):
        return _rebuilt(message, (_with_tensors(part, shared) for part in message))
    return message


def _rebuilt(message: tuple[Any, ...], parts: Iterable[Any]) -> tuple[Any, ...]:
    """A tuple, or a NamedTuple of the same class, with other parts."""
    return tuple(parts) if type(message) is tuple else type(message)(*parts)


def _array_bytes(message: Any) -> int:
    if isinstance(message, np.ndarray):
        return message.nbytes
    if isinstance(message, Block):
        return message.nbytes
    return sum(map(_array_bytes, message)) if isinstance(message, tuple) else 0


class _Introduction(NamedTuple):
    """What each shard tells those who only know the name of the buffer."""

    number: int  # of shards
    stays: list[bool]
    settings: ShardedSettings


class _ShardActor:
    """A shard in a process of its own; `introduction`: an `_Introduction` in pickle, for others."""

    def __init__(
        self, arguments: dict[str, Any], folder: str | None, name: str, namespace: str, introduction: bytes
    ) -> None:
        torch.set_num_threads(1)
        self._owns_folder = folder is None
        self._introduction = introduction
        memory = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
        self._folder = Path(folder) if folder is not None else memory / name
        if self._owns_folder:
            _claim(self._folder, namespace)
        remove_abandoned_folders(memory, str(import_ray().get_runtime_context().gcs_address), _lives)
        self._shard = ReplayShard(**arguments, scratch_dir=self._folder)
        self._remover = weakref.finalize(self, _remove, str(self._folder)) if self._owns_folder else None

    def place(self) -> tuple[str, int]:
        """Its node, and its process."""
        return str(import_ray().get_runtime_context().get_node_id()), os.getpid()

    def introduce(self) -> bytes:
        """What others have to know to be clients of the buffer."""
        return self._introduction

    def call(self, answers: int, *request: Any) -> Any:
        """Calls a method of the shard; `request`: its name and arguments, as `_to_send` makes them.

        The answer is as many objects as `answers` says: pieces, and empty ones after these.
        """
        method, *arguments = _received(request)
        pieces = _to_send(getattr(self._shard, method)(*arguments), answers)
        return pieces[0] if answers == 1 else pieces + (b"",) * (answers - len(pieces))

    def close(self) -> None:
        self._shard.close()
        if self._remover is not None:
            self._remover()


def _claim(folder: Path, namespace: str) -> None:
    """Makes the folder of this actor."""
    context = import_ray().get_runtime_context()
    owner = FolderOwner.of_this_process(str(context.gcs_address), namespace, context.get_actor_name() or "")
    if not _lives(owner):  # it is in another namespace, and cannot be found from here
        owner = dataclasses.replace(owner, name="")
    claim_folder(folder, owner)


def _lives(owner: FolderOwner) -> bool:
    """Whether an actor of this cluster lives, or is being started again; True where that is not known."""
    if not owner.name or not owner.namespace:
        return True
    try:
        import_ray().get_actor(owner.name, namespace=owner.namespace)
    except ValueError:  # the cluster has no such actor
        return False
    except (TimeoutError, import_ray().exceptions.RayError):
        return True
    return True


def _remove(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)


class _RayCall(PendingCall):
    def __init__(self, references: list[Any]) -> None:
        self._references = references  # of the pieces of the answer

    def result(self, timeout: float) -> Any:
        try:
            return _received(import_ray().get(self._references, timeout=timeout))
        except import_ray().exceptions.RayTaskError as error:
            raise error.cause or error from None  # None: it could not be sent
        except import_ray().exceptions.GetTimeoutError as error:
            raise TimeoutError(str(error)) from error
        except import_ray().exceptions.ActorDiedError as error:  # one that is started again is unavailable meanwhile
            raise ShardGoneError(_in_a_line(error)) from error
        except import_ray().exceptions.RayError as error:  # the actor, its node, or an object on its way
            raise ShardUnavailableError(_in_a_line(error)) from error

    def has_come(self) -> bool:
        ready, _ = import_ray().wait(self._references[:1], timeout=0, fetch_local=False)
        return bool(ready)


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class _RayLink(ShardLink):
    def __init__(self, actor: Any, node: str) -> None:
        self._actor = actor
        self.place = f", on node {node[:12]} when this client was made,"
        self._calls: dict[int, Any] = {}  # by the number of objects in the answer

    def call(self, method: str, *arguments: Any, answer_bytes: int = 0) -> PendingCall:
        answers = _pieces_for(answer_bytes)
        call = self._calls.get(answers)
        if call is None:
            call = self._calls[answers] = self._actor.call.options(num_returns=answers)
        references = call.remote(answers, *_to_send((method, *arguments), _MOST_PIECES))
        return _RayCall([references] if answers == 1 else references)


@advised
class RayReplayBuffer(ShardedReplayBuffer):
    """A replay buffer whose rows lie on the nodes of a Ray cluster, used like one in this process.

    Each shard is a store of one node, in shared memory or a mapped file, behind an actor. Every process that writes is
    a producer of one shard, where no trajectory mixes with another, and each row goes in once, whichever process dies.
    A shard is one ring of `max_size / num_shards` rows, which one producer fills, or any number. When it is full its
    producer moves on to another one that has no more producers, so one alone fills all; those with a name of their own
    (`producing_as`) stay, unless they are made with `moves_on=True`, as collectors are. A producer on the node of its
    shard writes into the store, and reads from it, directly.

    Sent to other processes (as an argument of Ray's tasks and actors) it is the same rows, and another producer. Other
    programs find it by its name (`attach`).

    The shards end with the program that made the buffer, or with `shutdown` in any: from then on every call of every
    client raises `ShardGoneError`. With a `name` and `remote_config={"lifetime": "detached"}` they go on without it.

    Args:
        name: by which other programs of the cluster find the buffer; None: they do not.
        storage: how many rows all shards have room for together, and which observations they store once: a storage with
            that `max_size` and `compact`, or something without arguments that makes one; rows are kept in shards all
            the same.
        sampler: `RandomSampler`, `PrioritizedSampler`, `SliceSampler(slice_len=...)` or `PrioritizedSliceSampler`.
        writer: None, or a RoundRobinWriter: another one has no place in a shard.
        transform: applied here: on writing its inverse, before rows are sent, on reading after they came.
        batch_size: rows of a batch, where `sample` does not say it.
        replay_buffer_cls: `TensorDictReplayBuffer` (or a child): batches carry `"index"`, `"generation"` and, with
            priorities, `"priority_weight"`. `ReplayBuffer`: these are in the info only.
        ray_init_config: arguments of `ray.init`, where Ray has not been started.
        remote_config: options of the actors, as `ray.remote` takes them. `{"num_cpus": 0}`, and for a buffer with a
            name `{"namespace": "engram"}`.
        num_shards, lanes: how many shards, and about how many producers write to each side by side; more are welcome.
        placement: "SPREAD": shards go to the nodes in turn, and stay there while these live; or a scheduling strategy
            of Ray. With another name of one, as "DEFAULT", a shard may move, so all rows go through its actor.
        scratch_dir: a folder on each node for the rows, which then outlive the actors; None: shared memory.
        batches_per_call: at most so many batches are asked for in a call; None: as many as the learner takes until they
            would be too old.
        max_batch_age: seconds; a batch is of rows that were drawn no longer ago, or for which it has just waited. A
            learner that is faster costs less, one that is slower waits for each batch. None: 0.1, and 0.004 more for
            each shard. `math.inf`: rows are used however old they are; then `batches_per_call` decides.
        timeout: seconds that `sample` and others wait for shards that are away; `extend` waits 30 seconds, or as long
            as this if it is more. Or `Timeouts`, which says each of them.
        priority_key: as TensorDictReplayBuffer.
        generator: of the client's draws.
        prefetch: accepted, without effect: rows are on their way ahead anyhow.

    Raises:
        ImportError: without Ray.
        ValueError, TypeError: a setting that is not allowed, or a sampler whose draws cannot be divided; or another
            buffer of the cluster has the name.
        NoFreeLaneError, StorageError: the folder of a shard is in use, or holds another store.
        ShardUnavailableError: the actors have not started within two minutes (`Timeouts.start`); all are ended.

    Example:
        >>> rb = RayReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=256)  # doctest: +SKIP
        >>> rb.extend(steps)  # doctest: +SKIP
        >>> batch = rb.sample()  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        storage: Storage | Callable[[], Storage],
        name: str | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Any = None,
        transform: Any = None,
        batch_size: int | None = None,
        replay_buffer_cls: type[ReplayBuffer[Any]] = TensorDictReplayBuffer,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        num_shards: int = 1,
        lanes: int = 8,
        placement: Any = "SPREAD",
        scratch_dir: str | os.PathLike[str] | None = None,
        batches_per_call: int | None = None,
        max_batch_age: float | None = None,
        timeout: float | Timeouts = 1.0,
        priority_key: str = "td_error",
        generator: torch.Generator | None = None,
    ) -> None:
        num_shards = count(num_shards, "num_shards")
        if name is not None and not (isinstance(name, str) and name):
            raise ValueError(f"name must be a text, got {name!r}")
        waits = Timeouts.of(timeout)
        if writer is not None and not isinstance(writer, RoundRobinWriter):
            raise TypeError(
                f"{writer!r} has no place in shards, to which producers append: leave writer out, or use a "
                "ReplayBuffer on one machine"
            )
        sampler = RandomSampler() if sampler is None else sampler if isinstance(sampler, Sampler) else sampler()
        arguments = arguments_of_shards(storage, num_shards, lanes, sampler, transform)
        settings = ShardedSettings(
            sampler, transform, batch_size, issubclass(replay_buffer_cls, TensorDictReplayBuffer), priority_key,
            batches_per_call, waits.answer, None if max_batch_age is None else float(max_batch_age), waits.extend,
        )  # fmt: skip
        settings.check()
        if not import_ray().is_initialized():
            import_ray().init(**(ray_init_config or {}))
        own = {} if name is None else {"namespace": _NAMESPACE}
        options = {"num_cpus": 0, **own, **(remote_config or {}), "max_restarts": -1, "max_task_retries": 0}
        strategies = _strategies(placement, num_shards, options)
        self._stays = [_stays(strategy) for strategy in strategies]
        introduction = _Introduction(num_shards, self._stays, settings)
        self._actors = _start_shards(arguments, strategies, options, scratch_dir, name, introduction)
        try:
            nodes = _nodes_of(self._actors, waits.start)
        except BaseException:
            _kill(self._actors)  # detached ones would go on
            raise
        self._connect(nodes, settings, generator)

    @classmethod
    def attach(
        cls,
        name: str,
        *,
        namespace: str = _NAMESPACE,
        ray_init_config: Mapping[str, Any] | None = None,
        timeout: float = Timeouts().start,
        generator: torch.Generator | None = None,
    ) -> Self:
        """Another client of a buffer that a program of this cluster has made with this name.

        It has the settings of that buffer, and is a producer of its own.

        Args:
            namespace: of Ray, in which the buffer was made.
            ray_init_config: arguments of `ray.init`, where Ray has not been started; `{"address": "auto"}`: a cluster
                that runs.
            timeout: seconds to wait for shards that are just starting, or are away.
            generator: as RayReplayBuffer.

        Raises:
            ImportError: without Ray.
            ShardGoneError: the cluster has no such buffer, or not any more.
            ShardUnavailableError: a shard does not answer for so long.

        Example:
            >>> rb = RayReplayBuffer.attach("experiment 7")  # doctest: +SKIP
            >>> batch = rb.sample()  # doctest: +SKIP
        """
        if not import_ray().is_initialized():
            import_ray().init(**{"address": "auto", **(ray_init_config or {})})
        first = _actor_of(name, 0, namespace)
        (told,) = _answers([first.introduce.remote()], timeout)
        introduction: _Introduction = pickle.loads(told)
        self = cls.__new__(cls)
        self._actors = [first, *(_actor_of(name, k, namespace) for k in range(1, introduction.number))]
        self._stays = introduction.stays
        self._connect(_nodes_of(self._actors, timeout), introduction.settings, generator)
        return self

    def _connect(self, nodes: list[str], settings: ShardedSettings, generator: torch.Generator | None) -> None:
        self._nodes = nodes
        here = str(import_ray().get_runtime_context().get_node_id())
        super().__init__(
            [_RayLink(actor, node) for actor, node in zip(self._actors, nodes, strict=True)], settings,
            local=[stays and node == here for stays, node in zip(self._stays, nodes, strict=True)],
            generator=generator,
        )  # fmt: skip

    @property
    def nodes(self) -> list[str]:
        """The nodes on which its shards were when it was made, by Ray's ids, one for each shard."""
        return list(self._nodes)

    # ---- other processes ----
    def __getstate__(self) -> dict[str, Any]:
        settings = self._settings_of_another()
        return {
            "actors": self._actors, "nodes": self._nodes, "stays": self._stays, "settings": settings,
            "version": __version__,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        """ShardVersionError: it was sent by another version of engram."""
        if state.get("version") != __version__:
            raise ShardVersionError(str(state.get("version", "before 0.1")), __version__)
        self._actors, self._stays = state["actors"], state["stays"]
        self._connect(state["nodes"], state["settings"], None)

    # ---- life ----
    def shutdown(self) -> None:
        """Closes this object and ends the actors; rows stay only where there is a `scratch_dir`."""
        try:
            self.close()
        finally:
            for actor in self._actors:
                try:
                    import_ray().get(actor.close.remote(), timeout=_END_TIMEOUT)
                except (import_ray().exceptions.RayError, TimeoutError):
                    pass  # it is gone, or is ended now
            _kill(self._actors)


def _start_shards(
    arguments: dict[str, Any],
    strategies: list[Any],
    options: Mapping[str, Any],
    scratch_dir: Any,
    given_name: str | None,
    introduction: _Introduction,
) -> list[Any]:
    folder_name = f"{PREFIX}{uuid.uuid4().hex[:12]}"
    name = folder_name if given_name is None else f"{PREFIX}{given_name}"
    namespace = options.get("namespace") or import_ray().get_runtime_context().namespace
    told = import_ray().cloudpickle.dumps(introduction)
    actors: list[Any] = []
    for k, strategy in enumerate(strategies):
        folder = None if scratch_dir is None else str(user_path(scratch_dir).absolute() / f"shard-{k}")
        own = {"name": f"{name}-{k}", **options, "scheduling_strategy": strategy}  # by its name it is asked for
        actor_class = import_ray().remote(**own)(_ShardActor)
        try:
            actors.append(actor_class.remote(arguments, folder, f"{folder_name}-{k}", namespace, told))
        except ValueError as error:  # also of the one that began at the same time
            _kill(actors)
            if given_name is None:
                raise
            raise ValueError(
                f"name={given_name!r}: the cluster has a buffer of this name, or one that is just ending; "
                f"RayReplayBuffer.attach({given_name!r}) is another client of it"
            ) from error
    return actors


def _kill(actors: Iterable[Any]) -> None:
    """Ends actors for good."""
    for actor in actors:
        import_ray().kill(actor)


def _actor_of(name: str, shard: int, namespace: str) -> Any:
    """The actor of a shard of a buffer with a name. ShardGoneError: there is none."""
    try:
        return import_ray().get_actor(f"{PREFIX}{name}-{shard}", namespace=namespace)
    except ValueError as error:
        raise ShardGoneError(
            f"this cluster has no buffer {name!r} in the namespace {namespace!r}: none was made, or it has ended with "
            "the program that made it, or by shutdown()"
        ) from error


def _stays(strategy: Any) -> bool:
    """Whether an actor that died comes back to its node, if that lives.

    Where Ray may choose another node, no process opens the store directly: it would not notice the move.
    """
    return not isinstance(strategy, str)


def _strategies(placement: Any, number: int, options: Mapping[str, Any]) -> list[Any]:
    """How each actor is placed; a node that is gone may be replaced by another one."""
    if placement != "SPREAD":
        return [placement] * number
    needed = {**options.get("resources", {}), "CPU": options["num_cpus"]}
    nodes = [
        node["NodeID"]
        for node in import_ray().nodes()
        if node["Alive"] and all(node["Resources"].get(what, 0) >= much for what, much in needed.items())
    ]
    if not nodes:
        return ["SPREAD"] * number
    strategy = import_ray().util.scheduling_strategies.NodeAffinitySchedulingStrategy
    return [strategy(nodes[k % len(nodes)], soft=True) for k in range(number)]


def _nodes_of(actors: list[Any], timeout: float) -> list[str]:
    return [str(node) for node, _ in _answers([actor.place.remote() for actor in actors], timeout)]


def _answers(references: list[Any], timeout: float) -> list[Any]:
    """The first answers of actors that are just starting."""
    try:
        answers: list[Any] = import_ray().get(references, timeout=timeout)
    except import_ray().exceptions.GetTimeoutError as error:
        ready, _ = import_ray().wait(references, num_returns=len(references), timeout=0, fetch_local=False)
        away = [k for k, reference in enumerate(references) if reference not in ready]
        raise ShardUnavailableError(
            f"the processes of shards {away} have not started within {timeout:g} seconds: the cluster has no room for "
            f"them, or is slow ({error})"
        ) from error
    except import_ray().exceptions.ActorDiedError as error:
        raise ShardGoneError(f"the processes of the shards have ended: {_in_a_line(error)}") from error
    except import_ray().exceptions.RayError as error:
        raise ShardUnavailableError(f"the processes of the shards cannot start: {error}") from error
    return answers
