"""`ParallelEnv`: environments in worker processes, which exchange steps through shared memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.envs.base import EnvBase
from engram.envs.codecs import SpaceCodec, SpaceLeaf, flag_of, reward_of, space_leaves
from engram.envs.engines import Array, Autoreset, GymEngine, VectorEngine, VectorStep
from engram.envs.serial import check_same_specs, env_makers
from engram.envs.vector_env import VectorStepper
from engram.processes.lockstep import LockstepPool, WorkerSlot, usable_cores
from engram.processes.shared_memory import SharedMemory
from engram.processes.timeouts import TimedEnv, validate_timeout
from engram.processes.worker import CLOSE_TIMEOUT, Channel, CloudpickleWrapper
from engram.pytree import Key
from engram.specs.tensors import usable_device

_STEP, _RESET, _SEED = range(3)
_TRUE = np.True_.tobytes()


class RawLayout:
    """The shared arrays of `n` gymnasium environments: `[n, ...]` for each leaf, rewards, flags, a mask of resets."""

    def __init__(self, n: int, action: SpaceCodec, leaves: Sequence[SpaceLeaf]) -> None:
        self.n, self.action, self.leaves = n, action, list(leaves)
        self.action_leaves = space_leaves(action, ("action",))
        flag = (np.dtype(np.bool_), (n,))
        observations = [(leaf.codec.raw_dtype, (n, *leaf.codec.raw_shape)) for leaf in self.leaves]
        actions = [(leaf.codec.raw_dtype, (n, *leaf.codec.raw_shape)) for leaf in self.action_leaves]
        self._fields = [*observations, *observations, *actions, (np.dtype(np.float64), (n,)), flag, flag, flag]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each array, for `SharedMemory`."""
        return [int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for dtype, shape in self._fields]

    def arrays(self, blocks: Sequence[Array]) -> RawArrays:
        """The arrays over memory blocks of these sizes."""
        pairs = zip(blocks, self._fields, strict=True)
        arrays = iter([block.view(dtype).reshape(shape) for block, (dtype, shape) in pairs])
        current, final = ([next(arrays) for _ in self.leaves] for _ in range(2))
        return RawArrays(current, final, [next(arrays) for _ in self.action_leaves], *arrays)

    def serve(self, envs: Sequence[Any], memory: SharedMemory, start: int, slot: WorkerSlot) -> None:
        """Runs a worker until it is stopped; `envs` are the environments from index `start` on."""
        engines: list[Any] = [engine for env in envs for engine in env.engines()]
        if slot.clock is not None:
            engines = [TimedEnv(engine, slot.clock, start + i) for i, engine in enumerate(engines)]
        GymWorker(engines, self, memory, start).serve(slot)


class RawArrays(NamedTuple):
    """`current`: the present observations, by leaf; `final`: the last observations of episodes that a step ended."""

    current: list[Array]
    final: list[Array]
    actions: list[Array]
    reward: Array
    terminated: Array
    truncated: Array
    mask: Array


class GymWorker:
    """A worker that steps gymnasium environments `start` to `start + len(engines) - 1` with raw values."""

    def __init__(self, engines: Sequence[GymEngine], layout: RawLayout, memory: SharedMemory, start: int) -> None:
        rows = slice(start, start + len(engines))
        arrays = layout.arrays(memory.attach(layout.sizes))
        self._engines, self._start, self._layout = list(engines), start, layout
        self._steps = [engine.step for engine in engines]
        self._current = [array[rows] for array in arrays.current]
        self._final = [array[rows] for array in arrays.final]
        self._actions = nest_like(layout.action_leaves, [array[rows] for array in arrays.actions])
        self._reward, self._mask = arrays.reward[rows], arrays.mask[rows]
        self._terminated, self._truncated = arrays.terminated[rows], arrays.truncated[rows]
        self._have_ended = True  # whether a flag may be set
        # An environment is fresh from the reset in a step until the reset that the owner asks for.
        self._is_fresh = [False] * len(engines)
        is_single = len(layout.leaves) == 1 and not layout.leaves[0].path
        codec = layout.leaves[0].codec
        # None: there are several arrays, or `_write` must check the values.
        self._only_dtype = codec.raw_dtype if is_single and codec.limits is None else None

    def serve(self, slot: WorkerSlot) -> None:
        """Executes the commands of the owner's `ParallelEngine` until the worker is stopped."""
        while True:
            command = slot.recv_command()
            if command == _STEP:
                self._step_all()
            elif command == _RESET:
                self._reset_masked()
            else:
                self._seed_all(slot.recv_message())
            slot.complete()

    def _step_all(self) -> None:
        if self._have_ended:
            self._terminated[:] = self._truncated[:] = False
            self._have_ended = False
        rewards, only, ndarray = self._reward, self._current[0], np.ndarray
        dtype, shape = self._only_dtype, self._layout.leaves[0].codec.raw_shape
        raws = self._layout.action.unbatch(self._actions)
        for i, (step, raw) in enumerate(zip(self._steps, raws, strict=True)):
            observation, reward, terminated, truncated, _ = step(raw)
            rewards[i] = reward if type(reward) is float else reward_of(reward)
            self._is_fresh[i] = False
            if terminated is not False or truncated is not False:
                terminated, truncated = flag_of(terminated, "terminated"), flag_of(truncated, "truncated")
            if terminated or truncated:
                self._have_ended = True
                self._terminated[i], self._truncated[i] = terminated, truncated
                self._write(self._final, i, observation)
                self._reset_one(i)
                self._is_fresh[i] = True
            elif type(observation) is ndarray and observation.dtype is dtype and observation.shape == shape:
                only[i] = observation
            else:
                self._write(self._current, i, observation)

    def _reset_masked(self) -> None:
        for i in np.flatnonzero(self._mask).tolist():
            if not self._is_fresh[i]:
                self._reset_one(i)
            self._is_fresh[i] = False

    def _seed_all(self, seed: int) -> None:
        for i, engine in enumerate(self._engines):
            engine.seed(seed + self._start + i)
            self._is_fresh[i] = False

    def _reset_one(self, i: int) -> None:
        self._write(self._current, i, self._engines[i].reset())

    def _write(self, columns: list[Array], i: int, observation: Any) -> None:
        for leaf, column in zip(self._layout.leaves, columns, strict=True):
            column[i] = leaf.value(observation)


class ParallelEngine(VectorEngine):
    """Steps the gymnasium environments of all workers at once; the arrays that it returns are in shared memory.

    Where an episode ends, the next one starts in the same step, without another round trip. The reset that follows then
    returns its first observation.
    """

    autoreset = Autoreset.SAME_STEP
    can_reset_some = True

    def __init__(self, pool: LockstepPool, layout: RawLayout, memory: SharedMemory, starts: Sequence[int]) -> None:
        self.n, self.action, self.leaves = layout.n, layout.action, layout.leaves
        self._pool = pool
        self._starts = list(starts)
        self._arrays = layout.arrays(memory.allocate(layout.sizes))
        self._observation = nest_like(layout.leaves, self._arrays.current)
        self._action_columns = list(zip(layout.action_leaves, self._arrays.actions, strict=True))

    def seed(self, seed: int) -> None:
        self._pool.execute(_SEED, messages=[seed] * len(self._pool))

    def reset(self, mask: Array | None = None) -> Any:
        self._pool.wait_idle()
        if mask is not None and (mask.shape != (self.n,) or mask.dtype != np.bool_):
            raise ValueError(f"a mask must be bool [{self.n}], got {mask.dtype} {list(mask.shape)}")
        self._arrays.mask[:] = True if mask is None else mask
        self._pool.execute(_RESET, None if mask is None else self._workers_of(mask))
        return self._observation

    def _workers_of(self, mask: Array) -> list[int]:
        has_reset = np.logical_or.reduceat(mask, self._starts)
        return [int(i) for i in np.flatnonzero(has_reset)]

    def step(self, actions: Any) -> VectorStep:
        self._pool.wait_idle()
        for leaf, column in self._action_columns:
            value = np.asarray(leaf.pick(actions))
            if value.shape != column.shape:
                raise ValueError(f"actions must have shape {list(column.shape)}, got {list(value.shape)}")
            np.copyto(column, value, casting="same_kind")
        self._pool.execute(_STEP)
        _, _, _, reward, terminated, truncated, _ = self._arrays
        has_ended = _TRUE in terminated.tobytes() or _TRUE in truncated.tobytes()  # a tenth of what `any` takes
        return VectorStep(
            self._observation, reward, terminated, truncated, self._final_observations() if has_ended else ()
        )

    def _final_observations(self) -> list[tuple[int, Any]]:
        ended = np.flatnonzero(self._arrays.terminated | self._arrays.truncated).tolist()
        final = self._arrays.final
        return [(i, nest_like(self.leaves, [column[i].copy() for column in final])) for i in ended]

    def close(self) -> None:
        self._pool.close()


def nest_like(leaves: Sequence[SpaceLeaf], values: Sequence[Any]) -> Any:
    """Nests the values of leaves as a raw value: Dicts for names in the leaves' paths, Tuples for numbers.

    >>> from gymnasium.spaces import Dict, Discrete, Tuple
    >>> from engram.envs.codecs import codec_for
    >>> space = Tuple([Discrete(2), Dict(a=Discrete(2))])
    >>> nest_like(space_leaves(codec_for(space), ("observation",)), [1, 2])
    (1, {'a': 2})
    """
    return _nested([leaf.path for leaf in leaves], list(values))


def _nested(paths: list[tuple[Any, ...]], values: list[Any]) -> Any:
    if paths == [()]:
        return values[0]
    groups: dict[Any, tuple[list[Any], list[Any]]] = {}
    for path, value in zip(paths, values, strict=True):
        inner = groups.setdefault(path[0], ([], []))
        inner[0].append(path[1:])
        inner[1].append(value)
    built = {name: _nested(*inner) for name, inner in groups.items()}
    return tuple(built.values()) if all(type(name) is int for name in built) else built


_TD_STEP, _TD_STEP_WITH_EXTRAS, _TD_RESET, _TD_SEED = range(4)
Columns = dict[Key, Tensor]


class ExtraEntries(NamedTuple):
    """The difference between one environment's TensorDict and the columns: columns without an entry, other entries."""

    absent: tuple[Key, ...] = ()
    rest: TensorDictBase | None = None


class TensorDictLayout:
    """The shared columns `[n, ...]` of `n` environments, one for each leaf of `fake`, a fake step of one environment.

    `root` has the entries that a step reads and a reset returns, `following` those that a step returns.
    """

    def __init__(self, n: int, fake: TensorDictBase, batch_size: Sequence[int]) -> None:
        self.n, self.batch_size = n, torch.Size(batch_size)
        self.following = fake.get("next").detach().cpu()
        self.root = fake.exclude("next").detach().cpu()
        self._leaves = [_leaves(self.root), _leaves(self.following)]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each column, for `SharedMemory`; the mask of resets comes first."""
        leaves = [leaf for group in self._leaves for leaf in group.values()]
        mask = self.n * self.batch_size.numel()
        return [mask, *(self.n * math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)]

    def columns(self, memory_blocks: Sequence[Any]) -> tuple[Tensor, Columns, Columns]:
        """The mask `[n, *batch, 1]`, and the columns of `root` and `following`, in blocks of these sizes."""
        blocks = iter([torch.from_numpy(block) for block in memory_blocks])
        mask = next(blocks).view(torch.bool).reshape(self.n, *self.batch_size, 1)
        root, following = (
            {key: next(blocks).view(leaf.dtype).reshape(self.n, *leaf.shape) for key, leaf in group.items()}
            for group in self._leaves
        )
        return mask, root, following

    def serve(self, envs: Sequence[Any], memory: SharedMemory, start: int, slot: WorkerSlot) -> None:
        """Runs a worker until it is stopped; `envs` are the environments from index `start` on."""
        if slot.clock is not None:
            envs = [TimedEnv(env, slot.clock, start + i) for i, env in enumerate(envs)]
        TensorDictWorker(envs, self, memory, start).serve(slot)


class TensorDictWorker:
    """A worker that steps environments `start` to `start + len(envs) - 1` with TensorDicts."""

    def __init__(self, envs: Sequence[Any], layout: TensorDictLayout, memory: SharedMemory, start: int) -> None:
        self._envs, self._layout = list(envs), layout
        columns = layout.columns(memory.attach(layout.sizes))
        rows = slice(start, start + len(envs))
        self._mask = columns[0][rows]
        self._root, self._following = ({key: column[rows] for key, column in group.items()} for group in columns[1:])

    def serve(self, slot: WorkerSlot) -> None:
        """Executes the commands of the owner's `TensorDictStepper` until the worker is stopped."""
        while True:
            command = slot.recv_command()
            if command == _TD_SEED:
                slot.complete(self._seeded(slot.recv_message()))
                continue
            if command == _TD_RESET:
                replies = [self._reset(i) for i in range(len(self._envs))]
            else:
                extras = slot.recv_message() if command == _TD_STEP_WITH_EXTRAS else [ExtraEntries()] * len(self._envs)
                replies = [self._step(i, extra) for i, extra in enumerate(extras)]
            slot.complete(*([replies] if any(reply != ExtraEntries() for reply in replies) else []))

    def _seeded(self, seed: int) -> int:
        for env in self._envs:
            seed = env.set_seed(seed)
        return seed

    def _reset(self, i: int) -> ExtraEntries:
        env, mask = self._envs[i], self._mask[i].clone()
        if not bool(mask.any()):
            return ExtraEntries()
        td = None
        if not bool(mask.all()):
            td = self._layout.root.exclude("action").apply(torch.zeros_like).set("_reset", mask).to(_device_of(env))
        return _write_row(env.reset(td).exclude("_reset", "action"), self._root, i)

    def _step(self, i: int, extra: ExtraEntries) -> ExtraEntries:
        env = self._envs[i]
        td = _row(self._layout.root, self._root, i, extra).to(_device_of(env))
        return _write_row(
            env.step(td if env.device is not None else td.clear_device_()).get("next"), self._following, i
        )


class TensorDictStepper:
    """Steps the environments of all workers at once with TensorDicts.

    Entries of a step that are not in the environments' specs, or have another shape or dtype, are sent as messages
    instead of shared memory, which costs about 100 us. All environments must return the same entries: a ValueError
    names those that only some return.
    """

    engine: VectorEngine | None = None  # there are no raw values

    def __init__(
        self, pool: LockstepPool, layout: TensorDictLayout, memory: SharedMemory, starts: Sequence[int]
    ) -> None:
        self._pool, self._layout, self._bounds = pool, layout, [*starts, layout.n]
        self._mask, self._root, self._following = layout.columns(memory.allocate(layout.sizes))
        self._actions = {key: column for key, column in self._root.items() if "action" in (key, key[0])}
        self._reset_columns = {key: column for key, column in self._root.items() if key not in self._actions}

    def seed(self, seed: int) -> None:
        """Seeds the environments as `set_seed` of one after the other does."""
        for worker in range(len(self._pool)):
            seed = self._pool.execute(_TD_SEED, [worker], [seed] * len(self._pool))[worker]

    def reset(self, mask: Tensor | None) -> dict[str, Any]:
        """Entries after a reset of all, or where `mask` (bool `[n, *batch, 1]`) holds; the other rows are not read."""
        self._pool.wait_idle()
        self._mask.copy_(torch.ones_like(self._mask) if mask is None else mask)
        indices = [row for row in range(self._layout.n) if bool(self._mask[row].any())]
        return self._collected(
            self._layout.root.exclude("action"), self._reset_columns, self._pool.execute(_TD_RESET), indices
        )

    def step(self, td: TensorDictBase) -> dict[str, Any]:
        """The entries after `td["action"]`. Raises ValueError for an action of another shape than the spec's."""
        self._check_action_shapes(td)
        self._pool.wait_idle()
        entries = td.exclude("next")
        absent = tuple(key for key, column in self._root.items() if not _copied(entries.get(key, None), column))
        rest = _without(entries, self._root.keys() - set(absent))
        if not absent and rest is None:
            replies = self._pool.execute(_TD_STEP)
        else:
            rows = [None] * self._layout.n if rest is None else [row.clone() for row in rest.cpu().unbind(0)]
            more = [ExtraEntries(absent, row) for row in rows]
            pairs = zip(self._bounds, self._bounds[1:], strict=False)
            replies = self._pool.execute(_TD_STEP_WITH_EXTRAS, messages=[more[start:stop] for start, stop in pairs])
        return self._collected(self._layout.following, self._following, replies, range(self._layout.n))

    def _check_action_shapes(self, td: TensorDictBase) -> None:
        for key, column in self._actions.items():
            value = td.get(key, None)
            if value is None or value.shape != column.shape:
                where = "" if key == "action" else f" {key!r}"
                given = "nothing" if value is None else f"{value.dtype} {tuple(value.shape)}"
                raise ValueError(
                    f"action{where} is not what the environment takes.\n"
                    f"  found:   {given}\n  allowed: {column.dtype} {tuple(column.shape)}"
                )

    def _collected(
        self, frame: TensorDictBase, columns: Columns, replies: dict[int, list[ExtraEntries]], indices: Sequence[int]
    ) -> dict[str, Any]:
        if replies:
            return dict(self._stacked(frame, columns, replies, indices).items())
        td = frame.empty(recurse=True).expand(self._layout.n, *frame.batch_size).clear_device_()
        for key, column in columns.items():
            td.set(key, column.clone())
        return dict(td.items())

    def _stacked(
        self, frame: TensorDictBase, columns: Columns, replies: dict[int, list[ExtraEntries]], indices: Sequence[int]
    ) -> TensorDictBase:
        extras = [ExtraEntries()] * self._layout.n
        for worker, reply in replies.items():
            extras[self._bounds[worker] : self._bounds[worker + 1]] = reply
        rows = {i: _row(frame, columns, i, extras[i]) for i in indices}
        common = set.intersection(*(set(row.keys(True, True)) for row in rows.values()))
        for i, row in rows.items():
            if others := set(row.keys(True, True)) - common:
                raise ValueError(
                    f"environment {i} returned {sorted(others, key=str)}, and not all others did; a batch needs the "
                    "same entries of all: put them in observation_spec, or leave them out"
                )
        blank = next(iter(rows.values()))  # in place of rows that nobody reads
        return torch.stack([rows.get(i, blank) for i in range(self._layout.n)])


def _leaves(td: TensorDictBase) -> Columns:
    return {key: td.get(key) for key in td.keys(True, True) if isinstance(td.get(key), Tensor)}


def _row(frame: TensorDictBase, columns: Columns, i: int, extra: ExtraEntries) -> TensorDictBase:
    """Environment i's TensorDict, in new memory."""
    td = frame.empty(recurse=True).clear_device_()
    for key, column in columns.items():
        if key not in extra.absent:
            td.set(key, column[i].clone())
    return td if extra.rest is None else td.update(extra.rest)


def _write_row(td: TensorDictBase, columns: Columns, i: int) -> ExtraEntries:
    """Writes the entries that have columns; returns the difference."""
    absent = tuple(key for key, column in columns.items() if not _copied(td.get(key, None), column[i]))
    rest = _without(td, columns.keys() - set(absent))
    return ExtraEntries(absent, None if rest is None else rest.detach().cpu().clone())


def _copied(value: Any, column: Tensor) -> bool:
    """Copies a value into a column of its shape and dtype; False if it has others."""
    fits = isinstance(value, Tensor) and value.shape == column.shape and value.dtype == column.dtype
    if fits:
        column.copy_(value.detach())
    return fits


def _without(td: TensorDictBase, keys: Any) -> TensorDictBase | None:
    """The entries of `td` other than `keys`; None if there are none."""
    rest = [key for key in td.keys(True, True) if key not in keys]
    return td.select(*rest) if rest else None


def _device_of(env: Any) -> torch.device:
    return torch.device("cpu") if env.device is None else torch.device(env.device)


ERROR_CLOSE_TIMEOUT = 0.2  # seconds that workers have to stop after an error


class ParallelEnv(EnvBase):
    """`n` environments in worker processes: batch `[n, *batch of one]`, with the same values as `SerialEnv`.

    Gymnasium environments with the same spaces are stepped with raw values in shared memory, and start the next episode
    in the step that ends one. Environments of any other kind are stepped with TensorDicts, whose leaves are in shared
    memory if they have specs. Workers poll for the next step for half a millisecond before they sleep, so that fast
    steps need no wake-up if each worker has a core.

    Args:
        n: the number of environments.
        make_env: creates one environment, in its worker, or is a list of n such functions; may be a lambda.
        num_workers: the number of processes; None: one for each core that this process may use, at most n. More than
            that can help if environments wait for something.
        start_method: "fork", "spawn" or "forkserver"; None: fork unless CUDA is in use.
        cpus: the cores on which workers run, worker i on `cpus[i % len(cpus)]` only; None: the system schedules them,
            and a worker on the core of another one moves away. Pinning can help on an idle machine, and harms on a busy
            one.
        device: the device of all outputs; None: that of the environments.
        patience: seconds that `close` waits for a worker in the middle of a step before it kills the worker.
        timeout: seconds that one step or one reset of one environment may take; creating it is not limited. After
            that its worker is killed, and the WorkerError names the environment, the worker and the step, counted from
            1. None: no limit.

    Raises:
        ValueError: different specs, a list of another length, unknown start methods or cores, a timeout of 0 or less.
        TypeError: a timeout that is no number.
        WorkerError: an environment failed in its worker, with the worker's traceback, or a worker was killed. The
            environment cannot be used any more: every call but `close` raises the error again.
        RuntimeError: it was closed, or this is a fork of the process that created it.

    >>> from engram.envs import GymEnv
    >>> env = ParallelEnv(3, lambda: GymEnv("CartPole-v1"), num_workers=2)
    >>> env.rollout(2)["observation"].shape
    torch.Size([3, 2, 4])
    >>> env.close()
    """

    def __init__(
        self,
        n: int,
        make_env: Callable[[], Any] | Sequence[Callable[[], Any]],
        *,
        num_workers: int | None = None,
        start_method: str | None = None,
        cpus: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        patience: float = CLOSE_TIMEOUT,
        timeout: float | None = None,
    ) -> None:
        validate_timeout(timeout)
        target = usable_device(device, "device")  # before an environment is created
        makers = [CloudpickleWrapper(make) for make in env_makers("ParallelEnv", n, make_env)]
        workers = _checked_workers(num_workers, n)
        cores = _cores(workers, cpus)
        starts = [n * i // workers for i in range(workers)]
        memory = SharedMemory()
        arguments = [
            (memory, makers[start:stop], start, core)
            for start, stop, core in zip(starts, [*starts[1:], n], cores, strict=True)
        ]
        self._pool = LockstepPool(
            _run,
            arguments,
            name="environment worker",
            start_method=start_method,
            close_timeout=patience,
            timeout=timeout,
        )
        try:
            one, self._stepper = _connect(self._pool, memory, starts, n)
        except BaseException:
            self._pool.close(ERROR_CLOSE_TIMEOUT)
            raise
        finally:
            memory.close()
        self._name = one.name
        super().__init__(
            one.observation_spec.expand(n, *one.observation_spec.shape),
            one.action_spec.expand(n, *one.action_spec.shape),
            batch_size=(n, *one.batch_size),
            device=one.device,
        )
        self.reward_spec = one.reward_spec.expand(n, *one.reward_spec.shape)
        self.done_spec = one.done_spec.expand(n, *one.done_spec.shape)
        if target is not None:
            self.to(target)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return self._pool.pids

    def vector_engine(self) -> VectorEngine | None:
        """The engine of gymnasium environments; None for others, and if a subclass has changed steps."""
        cls = type(self)
        is_changed = (cls._step, cls._reset, cls.step, cls.reset) != _UNCHANGED_METHODS
        return None if is_changed else self._stepper.engine

    def _reset(self, mask: torch.Tensor | None) -> TensorDictBase:
        return TensorDict(self._stepper.reset(mask), batch_size=self.batch_size, device=self.device)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        return TensorDict(self._stepper.step(td), batch_size=self.batch_size, device=self.device)

    def _check_values(self, td: TensorDictBase) -> None:
        """Nothing: each environment has checked its own values."""

    def _set_seed(self, seed: int) -> None:
        self._check_open()
        self._stepper.seed(seed)

    def _close(self) -> None:
        self._pool.close()

    def __repr__(self) -> str:
        return f"ParallelEnv({self.batch_size[0]} x {self._name}, num_workers={len(self._pool)})"


_UNCHANGED_METHODS = (ParallelEnv._step, ParallelEnv._reset, ParallelEnv.step, ParallelEnv.reset)


class _EnvDescription(NamedTuple):
    """What a worker tells the owner about an environment."""

    name: str
    batch_size: torch.Size
    device: torch.device | None
    observation_spec: Any
    action_spec: Any
    reward_spec: Any
    done_spec: Any
    spaces: Any  # of a single gymnasium environment; None for other environments
    raw: Any  # the codecs of these spaces
    fake: TensorDictBase

    @classmethod
    def of(cls, env: Any) -> _EnvDescription:
        engines = getattr(env, "engines", lambda: None)()
        engine = engines[0] if engines is not None and len(env.batch_size) == 0 else None
        return cls(
            repr(env),
            env.batch_size,
            env.device,
            env.observation_spec,
            env.action_spec,
            env.reward_spec,
            env.done_spec,
            None if engine is None else (engine.env.action_space, engine.env.observation_space),
            None if engine is None else (engine.action, engine.leaves),
            env.fake_tensordict(),
        )


def _run(
    channel: Channel,
    slot: WorkerSlot,
    memory: SharedMemory,
    makers: Sequence[Callable[[], Any]],
    start: int,
    core: int | None,
) -> None:
    """The main function of a worker: creates its environments, describes them, and executes commands."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    slot.attach(channel)
    envs: list[Any] = []
    try:
        for make in makers:
            envs.append(make())
        channel.send([_EnvDescription.of(env) for env in envs])
        channel.receive().serve(envs, memory, start, slot)
    finally:
        for env in envs:
            env.close()


def _connect(
    pool: LockstepPool, memory: SharedMemory, starts: Sequence[int], n: int
) -> tuple[_EnvDescription, VectorStepper | TensorDictStepper]:
    """The description of one environment, and the stepper of all."""
    members = [member for of_worker in pool.handshake() for member in of_worker]
    one = members[0]
    for index, member in enumerate(members):
        check_same_specs(index, member, one)
    if one.spaces is not None and all(member.spaces == one.spaces for member in members):
        raw = RawLayout(n, *one.raw)
        stepper = VectorStepper(ParallelEngine(pool, raw, memory, starts))
        pool.broadcast(raw)
        return one, stepper
    layout = TensorDictLayout(n, one.fake, one.batch_size)
    steps = TensorDictStepper(pool, layout, memory, starts)
    pool.broadcast(layout)
    return one, steps


def _checked_workers(num_workers: int | None, n: int) -> int:
    if num_workers is None:
        return min(n, len(usable_cores()))
    if not 1 <= num_workers <= n:
        raise ValueError(f"num_workers must be between 1 and the number of environments, {n}, got {num_workers}")
    return num_workers


def _cores(workers: int, cpus: Sequence[int] | None) -> list[int | None]:
    """The core of each worker; None: the system schedules it."""
    if cpus is None:
        return [None] * workers
    usable = usable_cores()
    if not cpus or not set(cpus) <= set(usable):
        raise ValueError(f"cpus must be cores that this process may use, {usable}, got {list(cpus)}")
    return [cpus[i % len(cpus)] for i in range(workers)]
