"""`ParallelEnv`: environments in worker processes that exchange steps through shared memory."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram._advice import advised
from engram._checks import count
from engram.envs.base import EnvBase, mark_truncated, steps_as
from engram.envs.codecs import SpaceCodec, SpaceLeaf, flag_of, nest_like, reward_of, space_leaves
from engram.envs.engines import Array, Autoreset, GymEngine, HasEngines, VectorEngine, VectorStep
from engram.envs.from_torchrl import as_env
from engram.envs.serial import SerialEnv, check_same_specs, env_makers, only_one, reject_shared_envs
from engram.envs.vector_env import VectorStepper
from engram.processes.lockstep import LockstepPool, WorkerSlot, usable_cores
from engram.processes.restarts import seed_after, validate_restarts
from engram.processes.shared_memory import SharedMemory
from engram.processes.timeouts import TimedEnv, validate_timeout
from engram.processes.worker import CLOSE_TIMEOUT, Channel, CloudpickleWrapper
from engram.pytree import Key, is_ragged
from engram.specs import Categorical
from engram.specs.spaces import EncodedSpaces, common_spaces
from engram.specs.tensors import usable_device
from engram.transforms.base import IDLE

_STEP, _RESET, _SEED = range(3)
_TRUE = np.True_.tobytes()


class _Seeds(NamedTuple):
    """Seeds of environments: `first`, `first + 1`, ...; with `alike` all have the first."""

    first: int
    alike: bool = False


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
        self._have_ended = True  # whether a flag in the shared array may be set
        # An environment is fresh from the automatic reset in a step until the owner requests a reset.
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

    def _seed_all(self, seeds: _Seeds) -> None:
        for i, engine in enumerate(self._engines):
            engine.seed(seeds.first if seeds.alike else seeds.first + self._start + i)
            self._is_fresh[i] = False

    def _reset_one(self, i: int) -> None:
        self._write(self._current, i, self._engines[i].reset())

    def _write(self, columns: list[Array], i: int, observation: Any) -> None:
        for leaf, column in zip(self._layout.leaves, columns, strict=True):
            column[i] = leaf.value(observation)


ResetWorker = Callable[[int], dict[int, Any]]  # resets the environments of a new worker; its reply, if it has one


class Replacements:
    """Replaces workers of a pool that have failed: new processes, whose environments were seeded and reset.

    Environments whose worker did not complete a step, or was replaced between two steps, lose their episodes: the next
    step only resets them.
    """

    def __init__(self, pool: LockstepPool, starts: Sequence[int], n: int, one: _EnvDescription) -> None:
        self._pool, self._bounds, self._one = pool, [*starts, n], one
        self._seeds: _Seeds | None = None
        self._begun: set[int] = set()  # workers that were replaced since the last step

    def connect(self, layout: RawLayout | TensorDictLayout, mask: Any, seed_command: int) -> None:
        """Sets the layout and the seed command that new workers receive, and how their environments are reset."""
        self._layout, self._mask, self._seed_command = layout, mask, seed_command

    def envs_of(self, worker: int) -> slice:
        """The environments of a worker."""
        return slice(self._bounds[worker], self._bounds[worker + 1])

    def note_seeds(self, seeds: _Seeds) -> None:
        """Records the seeds from which those of later workers are derived."""
        self._seeds = seeds

    def workers_to_step(self) -> list[int] | None:
        """The workers that execute the next step; None: all."""
        return [i for i in range(len(self._pool)) if i not in self._begun] if self._begun else None

    def after_step(self, reset: ResetWorker) -> list[int]:
        """Replaces failed workers; returns those whose environments the step only reset."""
        self._replace_lost(reset)
        lost = sorted(self._begun)
        self._begun.clear()
        return lost

    def after_reset(self, reset: ResetWorker, *, of_all: bool) -> dict[int, Any]:
        """Replaces failed workers after a reset; `of_all` if it reset all environments.

        Returns the new workers' replies to their resets.
        """
        replies = self._replace_lost(reset)
        if of_all:
            self._begun.clear()
        return replies

    def _replace_lost(self, reset: ResetWorker) -> dict[int, Any]:
        replies: dict[int, Any] = {}
        while lost := self._pool.lost():
            for i in lost:
                self._begun.add(i)
                replies.update(self._replace(i, reset))
        return replies

    def _replace(self, i: int, reset: ResetWorker) -> dict[int, Any]:
        while True:
            restart = self._pool.replace(i)
            if not self._pool.greet(i, self._layout_for):
                continue
            if self._seeds is not None:
                first, alike = self._seeds
                seeds = _Seeds(seed_after(first if alike else first + self._bounds[i], restart), alike)
                self._pool.execute(self._seed_command, [i], [seeds] * len(self._pool))
            if i not in self._pool.failed:
                self._mask[self.envs_of(i)] = True
                replies = reset(i)
                if i not in self._pool.failed:
                    return replies

    def _layout_for(self, members: Sequence[_EnvDescription]) -> RawLayout | TensorDictLayout:
        for member in members:
            check_same_specs(0, member, self._one)
        return self._layout


class ParallelEngine(VectorEngine):
    """Steps the gymnasium environments of all workers at once; the arrays that it returns are in shared memory.

    Where an episode ends, the next one starts in the same step, without another round trip. The reset that follows then
    returns its first observation.
    """

    autoreset = Autoreset.SAME_STEP

    def __init__(
        self,
        pool: LockstepPool,
        layout: RawLayout,
        memory: SharedMemory,
        starts: Sequence[int],
        replacements: Replacements,
    ) -> None:
        self.n, self.action, self.leaves = layout.n, layout.action, layout.leaves
        self._pool, self._replacements = pool, replacements
        self.can_reset_some, self._may_replace = True, pool.may_replace
        self._starts = list(starts)
        self._arrays = layout.arrays(memory.allocate(layout.sizes))
        self._observation = nest_like(layout.leaves, self._arrays.current)
        self._action_columns = list(zip(layout.action_leaves, self._arrays.actions, strict=True))
        replacements.connect(layout, self._arrays.mask, _SEED)

    def seed(self, seed: int) -> None:
        self._seed_all(_Seeds(seed))

    def seed_alike(self, seed: int) -> None:
        self._seed_all(_Seeds(seed, alike=True))

    def _seed_all(self, seeds: _Seeds) -> None:
        self._replacements.note_seeds(seeds)
        self._pool.execute(_SEED, messages=[seeds] * len(self._pool))
        self._replacements.after_reset(self._reset_worker, of_all=False)

    def reset(self, mask: Array | None = None) -> Any:
        self._pool.wait_idle()
        if mask is not None and (mask.shape != (self.n,) or mask.dtype != np.bool_):
            raise ValueError(f"a mask must be bool [{self.n}], got {mask.dtype} {list(mask.shape)}")
        self._arrays.mask[:] = True if mask is None else mask
        self._pool.execute(_RESET, None if mask is None else self._workers_of(mask))
        self._replacements.after_reset(self._reset_worker, of_all=mask is None)
        return self._observation

    def _reset_worker(self, worker: int) -> dict[int, Any]:
        return self._pool.execute(_RESET, [worker])

    def _workers_of(self, mask: Array) -> list[int]:
        has_reset = np.logical_or.reduceat(mask, self._starts)
        return [int(i) for i in np.flatnonzero(has_reset)]

    def step(self, actions: Any) -> VectorStep:
        self._pool.wait_idle()
        for leaf, column in self._action_columns:
            value = leaf.codec.array_of_batch(leaf.pick(actions))
            if value.shape != column.shape:
                raise ValueError(f"actions must have shape {list(column.shape)}, got {list(value.shape)}")
            np.copyto(column, value, casting="same_kind")
        replacements, idle = self._replacements, None
        self._pool.execute(_STEP, replacements.workers_to_step() if self._may_replace else None)
        if self._may_replace and (lost := replacements.after_step(self._reset_worker)):
            idle = self._mark_lost(lost)
        _, _, _, reward, terminated, truncated, _ = self._arrays
        has_ended = _TRUE in terminated.tobytes() or _TRUE in truncated.tobytes()  # a tenth of the cost of `any`
        last = self._final_observations() if has_ended else ()
        return VectorStep(self._observation, reward, terminated, truncated, last, idle)

    def _mark_lost(self, workers: Sequence[int]) -> Array:
        """Clears the results of these workers' step; returns their environments as bool `[n]`."""
        idle = np.zeros(self.n, np.bool_)
        for worker in workers:
            idle[self._replacements.envs_of(worker)] = True
        self._arrays.reward[idle] = 0
        self._arrays.terminated[idle] = self._arrays.truncated[idle] = False
        return idle

    def _final_observations(self) -> list[tuple[int, Any]]:
        ended = np.flatnonzero(self._arrays.terminated | self._arrays.truncated).tolist()
        final = self._arrays.final
        return [(i, nest_like(self.leaves, [column[i].copy() for column in final])) for i in ended]

    def close(self) -> None:
        self._pool.close()


_TD_STEP, _TD_STEP_WITH_EXTRAS, _TD_RESET, _TD_RESET_FROM, _TD_SEED = range(5)
Columns = dict[Key, Tensor]


class ExtraEntries(NamedTuple):
    """Differences of one environment's TensorDict from the columns: columns without an entry, and other entries."""

    absent: tuple[Key, ...] = ()
    rest: TensorDictBase | None = None


class TensorDictLayout:
    """The shared columns `[n, ...]` of `n` environments, one for each leaf of `fake`, a fake step of one environment.

    `root` has the entries that a step reads and a reset returns, `following` those that a step returns; the frames are
    the TensorDicts that the leaves of one environment are set into, before a step and after a step or a reset.
    """

    def __init__(
        self, n: int, fake: TensorDictBase, batch_size: Sequence[int], action_keys: Sequence[Key], *, reads_state: bool
    ) -> None:
        self.n, self.batch_size, self.action_keys = n, torch.Size(batch_size), list(action_keys)
        self.reads_state = reads_state  # whether resets get the caller's entries
        self.following = fake.get("next").detach().cpu()
        self.root = fake.exclude("next").detach().cpu()
        self._leaves = [_leaves(self.root), _leaves(self.following)]
        self.frame, self.frame_after_step = _frame(self.root), _frame(self.following)
        self.frame_after_reset = _frame(self.root.exclude(*self.action_keys))

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
            elif command == _TD_RESET_FROM:
                extras, is_partial, kwargs = slot.recv_message()
                replies = [self._reset_from(i, extra, kwargs, is_partial) for i, extra in enumerate(extras)]
            else:
                extras = slot.recv_message() if command == _TD_STEP_WITH_EXTRAS else [ExtraEntries()] * len(self._envs)
                replies = [self._step(i, extra) for i, extra in enumerate(extras)]
            slot.complete(*([replies] if any(reply != ExtraEntries() for reply in replies) else []))

    def _seeded(self, seeds: _Seeds) -> int:
        seed = seeds.first
        for env in self._envs:
            seed = env.set_seed(seed, static_seed=True) if seeds.alike else env.set_seed(seed)
        return seed

    def _reset(self, i: int) -> ExtraEntries:
        env, mask = self._envs[i], self._mask[i].clone()
        if not bool(mask.any()):
            return ExtraEntries()
        td = None
        if not bool(mask.all()):
            blank = self._layout.root.exclude(*self._layout.action_keys).apply(torch.zeros_like)
            td = blank.set("_reset", mask).to(_device_of(env))
        return self._write_fresh(env.reset(td), i)

    def _reset_from(self, i: int, extra: ExtraEntries, kwargs: dict[str, Any], is_partial: bool) -> ExtraEntries:
        """A reset of an environment that reads its state from the caller's TensorDict."""
        env, mask = self._envs[i], self._mask[i].clone()
        if not bool(mask.any()):
            return ExtraEntries()
        td = _row(self._layout.frame, self._root, i, extra).exclude(*self._layout.action_keys)
        td = (td.set("_reset", mask) if is_partial else td).to(_device_of(env))
        td = td if env.device is not None else td.clear_device_()
        return self._write_fresh(env.reset(td, **kwargs), i)

    def _write_fresh(self, fresh: TensorDictBase, i: int) -> ExtraEntries:
        columns = {key: column for key, column in self._root.items() if key not in self._layout.action_keys}
        return _write_row(fresh.exclude("_reset", *self._layout.action_keys), columns, i)

    def _step(self, i: int, extra: ExtraEntries) -> ExtraEntries:
        env = self._envs[i]
        td = _row(self._layout.frame, self._root, i, extra).to(_device_of(env))
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
        self,
        pool: LockstepPool,
        layout: TensorDictLayout,
        memory: SharedMemory,
        starts: Sequence[int],
        replacements: Replacements,
    ) -> None:
        self._pool, self._layout, self._bounds = pool, layout, [*starts, layout.n]
        self._replacements, self._marks_idle = replacements, pool.may_replace
        self._mask, self._root, self._following = layout.columns(memory.allocate(layout.sizes))
        self._actions = layout.action_keys
        self._action_columns = {key: self._root[key] for key in layout.action_keys if key in self._root}
        self._reset_columns = {key: column for key, column in self._root.items() if key not in self._actions}
        replacements.connect(layout, self._mask, _TD_SEED)

    def seed(self, seed: int) -> None:
        """Seeds the environments as `set_seed` of one after the other does."""
        self._seed_in_turn(_Seeds(seed))

    def seed_alike(self, seed: int) -> None:
        """Seeds every environment with `seed`."""
        self._seed_in_turn(_Seeds(seed, alike=True))

    def _seed_in_turn(self, seeds: _Seeds) -> None:
        self._replacements.note_seeds(seeds)
        for worker in range(len(self._pool)):
            replies: dict[int, Any] = {}
            while worker not in replies:
                replies = self._pool.execute(_TD_SEED, [worker], [seeds] * len(self._pool))
                self._replacements.after_reset(self._reset_worker, of_all=False)
            seeds = seeds._replace(first=replies[worker])

    def reset(self, mask: Tensor | None) -> dict[str, Any]:
        """Entries after a reset of all, or where `mask` (bool `[n, *batch, 1]`) holds; the other rows are not read."""
        self._begin_reset(mask)
        return self._collected_fresh(self._pool.execute(_TD_RESET), mask, self._reset_worker)

    def reset_from(self, td: TensorDictBase, mask: Tensor | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """`reset` for environments that read their state from `td`."""
        self._begin_reset(mask)
        extras = self._send(td.exclude("_reset", *self._actions))
        messages = [(part, mask is not None, kwargs) for part in extras]
        replies = self._pool.execute(_TD_RESET_FROM, messages=messages)
        return self._collected_fresh(replies, mask, self._reset_from_entries(td, kwargs))

    def _begin_reset(self, mask: Tensor | None) -> None:
        self._pool.wait_idle()
        self._mask.copy_(torch.ones_like(self._mask) if mask is None else mask)

    def _collected_fresh(
        self, replies: dict[int, list[ExtraEntries]], mask: Tensor | None, reset: ResetWorker
    ) -> dict[str, Any]:
        indices = [row for row in range(self._layout.n) if bool(self._mask[row].any())]
        replies.update(self._replacements.after_reset(reset, of_all=mask is None))
        values = self._collected(self._layout.frame_after_reset, self._reset_columns, replies, indices)
        return {**values, IDLE: torch.zeros_like(self._mask)} if self._marks_idle else values

    def step(self, td: TensorDictBase) -> dict[str, Any]:
        """The entries after `td["action"]`. Raises ValueError for an action of another shape than the spec's."""
        self._check_action_shapes(td)
        self._pool.wait_idle()
        workers = self._replacements.workers_to_step()
        extras = self._send(td)
        if extras[0][0] == ExtraEntries():  # then all are equal, as entries belong to the whole batch
            replies = self._pool.execute(_TD_STEP, workers)
        else:
            replies = self._pool.execute(_TD_STEP_WITH_EXTRAS, workers, extras)
        if self._marks_idle:
            return self._with_marks(td, replies)
        return self._collected(self._layout.frame_after_step, self._following, replies, range(self._layout.n))

    def _with_marks(self, td: TensorDictBase, replies: dict[int, list[ExtraEntries]]) -> dict[str, Any]:
        """The entries after a step; environments that it only reset are marked as idle in `td`, and as truncated."""
        idle = torch.zeros_like(self._mask)
        for worker in self._replacements.after_step(self._reset_from_entries(td, {})):
            rows = self._replacements.envs_of(worker)
            idle[rows] = True
            for key, column in self._following.items():
                shown = self._root.get(key)
                column[rows] = 0 if shown is None else shown[rows]
            replies.pop(worker, None)
        lost = idle.reshape(self._layout.n, -1).any(1)
        indices = [i for i, is_lost in enumerate(lost.tolist()) if not is_lost]
        values = self._collected(self._layout.frame_after_step, self._following, replies if indices else {}, indices)
        td.set(IDLE, idle.to(td.device or "cpu"))
        stepped = TensorDict({"next": values}, [self._layout.n])
        if bool(lost.any()):
            self._show_own_rows(stepped.get("next"), lost)
            mark_truncated(stepped, lost)  # tells policies and transforms that a reset follows
        return {**dict(stepped.get("next").items()), IDLE: torch.zeros_like(idle)}

    def _show_own_rows(self, following: TensorDictBase, lost: Tensor) -> None:
        """Copies the columns into rows that `_collected` left blank, as a reset may read its state there."""
        for key, column in self._following.items():
            value = following.get(key, None)
            if value is not None and value.shape == column.shape and value.dtype == column.dtype:
                value[lost] = column[lost]

    def _reset_worker(self, worker: int) -> dict[int, Any]:
        return self._pool.execute(_TD_RESET, [worker])

    def _reset_from_entries(self, td: TensorDictBase, kwargs: dict[str, Any]) -> ResetWorker:
        """Sets the reset of replaced workers: environments that read their state get the entries of `td`."""
        if not self._layout.reads_state:
            return self._reset_worker
        entries = td.exclude("next", "_reset", IDLE, *self._actions)

        def reset(worker: int) -> dict[int, Any]:
            rows = entries[self._replacements.envs_of(worker)].cpu().unbind(0)
            parts = [ExtraEntries(tuple(self._root), row.clone()) for row in rows]  # this call overwrites the columns
            messages = [(parts, False, kwargs)] * len(self._pool)
            return self._pool.execute(_TD_RESET_FROM, [worker], messages)

        return reset

    def _send(self, td: TensorDictBase) -> list[list[ExtraEntries]]:
        """Writes entries into their columns; returns the differences for each environment of each worker."""
        entries = td.exclude("next", IDLE) if self._marks_idle else td.exclude("next")
        absent = tuple(key for key, column in self._root.items() if not _copied(entries.get(key, None), column))
        rest = _without(entries, self._root.keys() - set(absent))
        if not absent and rest is None:
            return [
                [ExtraEntries()] * (stop - start) for start, stop in zip(self._bounds, self._bounds[1:], strict=False)
            ]
        rows = [None] * self._layout.n if rest is None else [row.clone() for row in rest.cpu().unbind(0)]
        more = [ExtraEntries(absent, row) for row in rows]
        return [more[start:stop] for start, stop in zip(self._bounds, self._bounds[1:], strict=False)]

    def _check_action_shapes(self, td: TensorDictBase) -> None:
        for key, column in self._action_columns.items():
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
        blank = next(iter(rows.values()))  # for rows that are never read
        return torch.stack([rows.get(i, blank) for i in range(self._layout.n)])


def _leaves(td: TensorDictBase) -> Columns:
    return {key: value for key, value in _entries(td) if isinstance(value, Tensor)}


def _entries(td: TensorDictBase, path: tuple[str, ...] = ()) -> list[tuple[Key, Any]]:
    """The leaves by key; a lazy stack of agents that differ is one entry, which no column holds."""
    entries: list[tuple[Key, Any]] = []
    for name, value in td.items():
        if isinstance(value, TensorDictBase) and not is_ragged(value):
            entries += _entries(value, (*path, name))
        else:
            entries.append(((*path, name) if path else name, value))
    return entries


def _frame(td: TensorDictBase) -> TensorDictBase:
    """A TensorDict's nested structure without leaves; lazy stacks of different agents, sent as one entry, are left out.

    (`empty(recurse=True)` of a lazy stack keeps the TensorDicts in its members, leaves and all.)
    """
    nested = [(name, value) for name, value in td.items() if isinstance(value, TensorDictBase) and not is_ragged(value)]
    return TensorDict({name: _frame(value) for name, value in nested}, td.batch_size)


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
    """Copies a value into a column; False if shape or dtype differ."""
    fits = isinstance(value, Tensor) and value.shape == column.shape and value.dtype == column.dtype
    if fits:
        column.copy_(value.detach())
    return fits


def _without(td: TensorDictBase, keys: Any) -> TensorDictBase | None:
    """The entries of `td` other than `keys`; None if there are none."""
    rest = [key for key, _ in _entries(td) if key not in keys]
    return td.select(*rest) if rest else None


def _device_of(env: Any) -> torch.device:
    return torch.device("cpu") if env.device is None else torch.device(env.device)


ERROR_CLOSE_TIMEOUT = 0.2  # seconds that workers have to stop after an error


@advised
class ParallelEnv(EnvBase):
    """`n` environments in worker processes: batch `[n, *batch of one]`, with the same values as `SerialEnv`.

    Gymnasium environments with the same spaces are stepped with raw values in shared memory, and start the next episode
    in the step that ends one. Environments of any other kind are stepped with TensorDicts, whose leaves are in shared
    memory if they have specs. Workers poll for the next step for half a millisecond before they sleep, so that fast
    steps need no wake-up if each worker has a core.

    Args:
        n: the number of environments.
        make_env: creates one environment, in its worker, or is a list of n such functions; may be a lambda.
        create_env_kwargs: arguments of `make_env`, or a list of n dicts of them.
        serial_for_single: True: for n = 1 a `SerialEnv` is made instead, without a worker; not with `timeout` or
            `restarts`, which need one.
        create_env_fn, mp_start_method: other names of `make_env` and `start_method`. Without `n`, `num_workers` is it.
        num_workers: the number of processes; None: one for each core that this process may use, at most n. More than
            that can help if environments wait for something.
        start_method: "fork", "spawn" or "forkserver"; None: fork unless CUDA is in use.
        cpus: the cores on which workers run, worker i on `cpus[i % len(cpus)]` only; None: the system schedules them,
            and a worker on the core of another one moves away. Pinning can help on an idle machine, and harms on a busy
            one.
        device: the device of all outputs; None: that of the environments.
        patience: seconds that `close` waits for a worker in the middle of a step before it kills the worker;
            `shutdown_timeout` is another name.
        timeout: seconds that one step or one reset of one environment may take; creating it is not limited. After
            that its worker is killed, and the WorkerError names the environment, the worker and the step, counted from
            1. None: no limit.
        restarts: how many workers, over all, may be replaced that fail, die or hang, also while they make their
            environments. Each is a RuntimeWarning that says which, how, and how many restarts are left; the next
            failure after the last one is the WorkerError.

    TorchRL's `consolidate`, `daemon`, `memmap`, `metadata_from_workers`, `non_blocking`, `num_threads`,
    `num_sub_threads`, `pin_memory`, `share_individual_td`, `shared_memory` and `use_buffers` have no effect.

    A worker that is replaced costs the open episodes of its environments. With `restarts` there is one more entry,
    `"_idle"` (bool `[n, *batch of one, 1]`), as in `VectorEnv`: where it holds at the root, the step found that the
    worker was gone, and only reset the environment. Such a row is not a step: its action was not taken, its reward
    is 0, and its `("next", "truncated")` is set so that a reset follows, which returns the first observation. `rollout`
    and the collectors leave these rows out, and mark the step before as truncated, or, where it is in an earlier batch,
    begin a new trajectory id, with a seam in the replay buffer; your own loops must, too. After `set_seed`, new
    environments have seeds that follow from the seed and the number of restarts of their worker.

    Raises:
        ValueError: different specs, a list of another length, unknown start methods or cores, a timeout of 0 or less.
        TypeError: a timeout that is not a number.
        WorkerError: an environment failed in its worker, with the worker's traceback, or a worker was killed. The
            environment cannot be used any more: every call but `close` raises the error again.
        RuntimeError: this is a fork of the process that created it; a step without a reset after `close`, which
            opens it again in new workers with new environments.

    >>> from engram.envs import GymEnv
    >>> env = ParallelEnv(3, lambda: GymEnv("CartPole-v1"), num_workers=2)
    >>> env.rollout(2)["observation"].shape
    torch.Size([3, 2, 4])
    >>> env.close()
    """

    def __new__(cls, n: int | None = None, *args: Any, serial_for_single: bool = False, **kwargs: Any) -> Any:
        needs_worker = kwargs.get("timeout") is not None or bool(kwargs.get("restarts"))
        if not serial_for_single or needs_worker or (kwargs.get("num_workers") if n is None else n) != 1:
            return super().__new__(cls)
        return SerialEnv(1, *args, **{key: kwargs[key] for key in kwargs.keys() & _OF_SERIAL_ENV})

    def __init__(
        self,
        n: int | None = None,
        make_env: Any = None,
        *,
        create_env_fn: Any = None,
        create_env_kwargs: Any = None,
        serial_for_single: bool = False,
        num_workers: int | None = None,
        start_method: str | None = None,
        mp_start_method: str | None = None,
        cpus: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        patience: float | None = None,
        shutdown_timeout: float | None = None,
        timeout: float | None = None,
        restarts: int = 0,
    ) -> None:
        validate_timeout(timeout)
        validate_restarts(restarts)
        target = usable_device(device, "device")  # raises before an environment is created
        if n is None:
            n, num_workers = only_one("n", n, "num_workers", num_workers), None
        n = count(n, "n")
        if mp_start_method is not None:
            start_method = only_one("start_method", start_method, "mp_start_method", mp_start_method)
        if shutdown_timeout is not None:
            patience = only_one("patience", patience, "shutdown_timeout", shutdown_timeout)
        patience = CLOSE_TIMEOUT if patience is None else patience
        make_env = only_one("make_env", make_env, "create_env_fn", create_env_fn)
        makers = [CloudpickleWrapper(make) for make in env_makers("ParallelEnv", n, make_env, create_env_kwargs)]
        workers = _checked_workers(num_workers, n)
        options = {"start_method": start_method, "close_timeout": patience, "timeout": timeout, "restarts": restarts}
        self._start_workers = functools.partial(_start_workers, makers, _cores(workers, cpus), options)
        self._pool, self._memory, self._one, self._stepper = self._start_workers()
        one = self._one
        super().__init__(batch_size=(n, *one.batch_size), device=one.device)
        self._take_specs(one, n)
        if restarts:
            self.observation_spec[IDLE] = Categorical(2, (n, *one.batch_size, 1), device=one.device, dtype=torch.bool)
        self._member_reads_state = one.reads_state
        self.policy_entries = one.policy_entries
        if target is not None:
            self.to(target)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return self._pool.pids

    def encoded_spaces(self) -> EncodedSpaces:
        return super().encoded_spaces()._replace(spaces=self._one.encoded.spaces)

    def vector_engine(self) -> VectorEngine | None:
        """The engine of gymnasium environments; None for other kinds, and if a subclass has changed steps."""
        if not steps_as(self, ParallelEnv):
            return None
        self.start()
        return self._stepper.engine

    def _reset_from(self, td: TensorDictBase | None, mask: Tensor | None, kwargs: dict[str, Any]) -> TensorDictBase:
        if td is None or not self._reads_state():
            return super()._reset_from(td, mask, kwargs)
        assert isinstance(self._stepper, TensorDictStepper)
        fresh = self._stepper.reset_from(td, mask, kwargs)
        return TensorDict(fresh, batch_size=self.batch_size, device=self.device)

    def _reads_state(self) -> bool:
        return self._member_reads_state

    def _reset(self, mask: torch.Tensor | None) -> TensorDictBase:
        return TensorDict(self._stepper.reset(mask), batch_size=self.batch_size, device=self.device)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        return TensorDict(self._stepper.step(td), batch_size=self.batch_size, device=self.device)

    def _check_values(self, td: TensorDictBase) -> None:
        """Does nothing: each environment has checked its own values."""

    def _set_seed(self, seed: int) -> None:
        self.start()
        self._stepper.seed(seed)

    def _set_same_seed(self, seed: int) -> None:
        self.start()
        self._stepper.seed_alike(seed)

    def _open(self) -> None:
        pool, memory, one, stepper = self._start_workers()
        try:
            check_same_specs(0, one, self._one)
        except ValueError:
            pool.close(ERROR_CLOSE_TIMEOUT)
            memory.close()
            raise
        self._pool, self._memory, self._stepper = pool, memory, stepper

    def _close(self) -> None:
        self._pool.close()
        self._memory.close()

    @property
    def num_workers(self) -> int:
        """The number of environments; one process may have several of them."""
        return int(self.batch_size[0])

    def __repr__(self) -> str:
        return f"ParallelEnv({self.batch_size[0]} x {self._one.name}, num_workers={len(self._pool)})"


_OF_SERIAL_ENV = {"create_env_fn", "create_env_kwargs", "make_env", "device"}


class _EnvDescription(NamedTuple):
    """A worker's description of an environment, for the owner."""

    name: str
    batch_size: torch.Size
    device: torch.device | None
    observation_spec: Any
    action_spec: Any
    reward_spec: Any
    done_spec: Any
    full_action_spec: Any
    full_reward_spec: Any
    full_done_spec: Any
    state_spec: Any
    action_keys: list[Key]  # required by a step
    reads_state: bool
    spaces: Any  # of a single gymnasium environment; None for other environments
    raw: Any  # the codecs of these spaces
    encoded: EncodedSpaces  # of the owner's description: the spaces that all environments share
    fake: TensorDictBase
    policy_entries: tuple[Any, ...]

    @classmethod
    def of(cls, env: Any) -> _EnvDescription:
        engines = env.engines() if isinstance(env, HasEngines) else None
        engine = engines[0] if engines is not None and len(env.batch_size) == 0 else None
        return cls(
            repr(env),
            env.batch_size,
            env.device,
            env.observation_spec,
            env.action_spec,
            env.reward_spec,
            env.done_spec,
            env.full_action_spec,
            env.full_reward_spec,
            env.full_done_spec,
            env.state_spec,
            env.action_keys,
            env._reads_state(),
            None if engine is None else (engine.env.action_space, engine.env.observation_space),
            None if engine is None else (engine.action, engine.leaves),
            env.encoded_spaces(),
            env.fake_tensordict(),
            env.policy_entries,
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
            envs.append(as_env(make(), "ParallelEnv"))
        reject_shared_envs(envs, start)
        channel.send([_EnvDescription.of(env) for env in envs])
        channel.receive().serve(envs, memory, start, slot)
    finally:
        for env in envs:
            env.close()


def _start_workers(
    makers: Sequence[Callable[[], Any]], cores: Sequence[int | None], options: dict[str, Any]
) -> tuple[LockstepPool, SharedMemory, _EnvDescription, VectorStepper | TensorDictStepper]:
    """Starts a worker for each of `cores`, and connects it."""
    n, workers = len(makers), len(cores)
    starts = [n * i // workers for i in range(workers)]
    memory = SharedMemory()
    arguments = [
        (memory, makers[start:stop], start, core)
        for start, stop, core in zip(starts, [*starts[1:], n], cores, strict=True)
    ]
    pool = LockstepPool(_run, arguments, name="environment worker", **options)
    try:
        one, stepper = _connect(pool, memory, starts, n)
    except BaseException:
        pool.close(ERROR_CLOSE_TIMEOUT)
        raise
    finally:
        if not options["restarts"]:  # otherwise it is needed again for new workers
            memory.close()
    return pool, memory, one, stepper


def _connect(
    pool: LockstepPool, memory: SharedMemory, starts: Sequence[int], n: int
) -> tuple[_EnvDescription, VectorStepper | TensorDictStepper]:
    """The description of one environment, and the stepper of all."""
    members = [member for of_worker in pool.handshake() for member in of_worker]
    encoded = [member.encoded for member in members]
    one = members[0]._replace(encoded=encoded[0]._replace(spaces=common_spaces(encoded)))
    replacements = Replacements(pool, starts, n, one)
    for index, member in enumerate(members):
        check_same_specs(index, member, one)
    if one.spaces is not None and all(member.spaces == one.spaces for member in members):
        raw = RawLayout(n, *one.raw)
        engine = ParallelEngine(pool, raw, memory, starts, replacements)
        stepper = VectorStepper(engine, may_lose_episodes=pool.may_replace)
        pool.broadcast(raw)
        return one, stepper
    layout = TensorDictLayout(n, one.fake, one.batch_size, one.action_keys, reads_state=one.reads_state)
    steps = TensorDictStepper(pool, layout, memory, starts, replacements)
    pool.broadcast(layout)
    return one, steps


def _checked_workers(num_workers: int | None, n: int) -> int:
    if num_workers is None:
        return min(n, len(usable_cores()))
    workers = count(num_workers, "num_workers")
    if workers > n:
        raise ValueError(f"num_workers must be between 1 and the number of environments, {n}, got {num_workers}")
    return workers


def _cores(workers: int, cpus: Sequence[int] | None) -> list[int | None]:
    """The core of each worker; None: the system schedules it."""
    if cpus is None:
        return [None] * workers
    usable = usable_cores()
    if not cpus or not set(cpus) <= set(usable):
        raise ValueError(f"cpus must be cores that this process may use, {usable}, got {list(cpus)}")
    return [cpus[i % len(cpus)] for i in range(workers)]
