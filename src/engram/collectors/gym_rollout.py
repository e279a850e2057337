"""Stepping gymnasium environments one by one with raw values: tensors are made once a batch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.collectors.rollout import Rolled, extras_of
from engram.collectors.trajectories import FrameMarks
from engram.envs.gym_codecs import Codec, Leaf
from engram.envs.gym_engine import GymEngine, check_action
from engram.envs.gym_values import Array, Rewards, flag_of, rewards_of
from engram.envs.mdp import stack_steps, zero_where
from engram.envs.policies import FLAGS, ObservationPolicy, RandomPolicy, TensorDictPolicy, direct_module

Rows = list[np.ndarray[Any, Any]]
LARGEST = 1024  # bytes of one observation: above, the second copy costs more than one write into an array


class GymRoller:
    """Does what `TensorDictRoller` does, for one or several gymnasium environments, key by key the same.

    Per step there are the environment, the policy, a copy of the observation and a list append or two. A slot is
    `t * width + env`. Where no policy reads the observations and they are small, they are kept as bytes.
    `is_random` says that only random actions are taken.
    """

    def __init__(
        self,
        env: Any,
        engines: list[GymEngine],
        policy: TensorDictPolicy,
        max_frames_per_traj: int | None,
        marks: FrameMarks,
    ) -> None:
        self._engines = engines
        self._policy = policy
        self._limit = max_frames_per_traj
        self._marks = marks
        self._batch_size: torch.Size = env.batch_size
        self._device = env.device
        self._codec = engines[0].action
        self.is_random = isinstance(policy, RandomPolicy)
        random = policy if isinstance(policy, RandomPolicy) else RandomPolicy(env.action_spec)
        self._random = RandomActions(random, self._codec, self._batch_size)
        self._packs = self.is_random and not self._batch_size and can_pack(engines[0].leaves)
        self._on_tensordicts = TensorDictActions(policy, self._codec, self._batch_size, self._device)
        self.restart()

    def restart(self) -> None:
        """Every environment is reset before its next step."""
        self._to_reset = list(range(len(self._engines)))
        self._last_slots: dict[int, int] = {}  # by environment: where its last allowed state goes
        self._first_row: Rows | None = None

    def roll(self, steps: int, random_steps: int) -> Rolled:
        """`[*batch_size, steps]` in TED, the first `random_steps` with random actions."""
        batch = _RawBatch(self._empty_observations(steps))
        source = self._source(batch.observations)
        try:
            self._run_all(batch, steps, steps if self.is_random else min(steps, random_steps), source)
        except BaseException as error:
            return self._cut_short(batch, rewards_of(batch.rewards), error, source)
        made = rewards_of(batch.rewards)
        if made.error is not None:
            return self._cut_short(batch, made, made.error, source)
        self._first_row = batch.observations.last_row()
        self._last_slots = {env: slot - steps * len(self._engines) for env, slot in self._last_slots.items()}
        return Rolled(self._assembled(batch, made.values, steps, source.extras(steps)))

    def _cut_short(self, batch: _RawBatch, made: Rewards, error: BaseException, source: Source) -> Rolled:
        """What was stepped before an error, in whole rows: no trajectory goes on after it."""
        self.restart()
        error = error if made.error is None else made.error  # the earlier one
        steps = len(made.values) // len(self._engines)
        if steps == 0:
            raise error
        batch.observations.cut(steps)
        rewards = made.values[: steps * len(self._engines)]
        return Rolled(self._assembled(batch, rewards, steps, source.extras(steps)), error)

    def _empty_observations(self, steps: int) -> Observations | PackedObservations:
        leaves = self._engines[0].leaves
        if self._packs:
            return PackedObservations(leaves[0], self._first_row)
        return Observations(leaves, steps, self._batch_size, self._first_row)

    def _source(self, observations: Observations | PackedObservations) -> Source:
        if isinstance(observations, PackedObservations) or self.is_random:
            return self._random
        direct = direct_module(self._policy)  # looked at again for each batch: hooks come and go
        if direct is not None:
            return ModuleActions(direct, self._codec, observations)
        return self._on_tensordicts.begin(observations)

    def _run_all(self, batch: _RawBatch, steps: int, random_steps: int, source: Source) -> None:
        if random_steps:
            encoded, raws = self._random.draw(random_steps, source)
            batch.actions.append(encoded)
            self._run(batch, raws, range(random_steps), source)
        if random_steps < steps:
            record: list[Any] = []
            times = range(random_steps, steps)
            try:
                self._run(batch, source.raws(times, record), times, source)
            finally:
                if record:
                    batch.actions.append(self._codec.encode_rows(record))

    def _run(self, batch: _RawBatch, raws: Iterable[Any], times: range, source: Source) -> None:
        width, end = len(self._engines), times.stop * len(self._engines)
        for env in self._to_reset:
            self._reset(batch, times.start * width + env, env, source)
        self._to_reset.clear()
        if isinstance(batch.observations, PackedObservations):
            return self._step_packed(batch, batch.observations, raws, end)
        steps, step = [engine.step for engine in self._engines], self._engines[0].step
        put, only, ndarray = batch.observations.put, batch.observations.only, np.ndarray
        dtype, shape = batch.observations.dtype, batch.observations.shape
        keep_reward, limits = batch.rewards.append, self._last_slots
        for slot, raw in enumerate(raws, (times.start + 1) * width):  # the slot of the state that follows
            if width > 1:
                step = steps[slot % width]
            observation, reward, terminated, truncated, _ = step(raw)
            if type(observation) is ndarray and observation.dtype is dtype and observation.shape == shape:
                only[slot] = observation
            else:
                put(slot, observation)
            is_cut = bool(limits) and limits[slot % width] == slot
            is_over = is_cut or terminated is not False or truncated is not False
            if is_over:
                is_over = batch.end(slot - width, terminated, truncated, is_cut)
            keep_reward(reward)  # last: a step with a reward is whole
            if is_over:
                env = slot % width
                if slot < end:
                    self._reset(batch, slot, env, source)
                else:
                    self._to_reset.append(env)  # when it is needed: the last state must stay, and a restart may come

    def _step_packed(self, batch: _RawBatch, observations: PackedObservations, raws: Iterable[Any], end: int) -> None:
        step, reset, limit = self._engines[0].step, self._engines[0].reset, self._limit
        keep, pack = observations.rows.extend, observations.pack
        ndarray, dtype, shape = np.ndarray, observations.dtype, observations.shape
        rewards, limits = batch.rewards, self._last_slots
        keep_reward = rewards.append
        for raw in raws:
            observation, reward, terminated, truncated, _ = step(raw)
            if type(observation) is ndarray and observation.dtype is dtype and observation.shape == shape:
                keep(observation.tobytes())  # bytes say nothing of dtype and shape: any other goes through numpy
            else:
                keep(pack(observation))
            is_cut = bool(limits) and limits[0] == len(rewards) + 1
            is_over = is_cut or terminated is not False or truncated is not False
            if is_over:
                is_over = batch.end(len(rewards), terminated, truncated, is_cut)
            keep_reward(reward)  # last: a step with a reward is whole
            if is_over:
                slot = len(rewards)
                if slot == end:
                    self._to_reset.append(0)
                    continue
                observations.put_first(slot, reset())
                if limit is not None:
                    limits[0] = slot + limit

    def _reset(self, batch: _RawBatch, slot: int, env: int, source: Source) -> None:
        batch.observations.put_first(slot, self._engines[env].reset())
        source.forget(env)
        if self._limit is not None:
            self._last_slots[env] = slot + self._limit * len(self._engines)

    def _assembled(self, batch: _RawBatch, rewards: Array, steps: int, extras: TensorDictBase | None) -> TensorDictBase:
        def of_batch(entries: dict[Any, Any]) -> TensorDict:
            return TensorDict(entries, batch_size=shape, device=self._device)

        shape = torch.Size((*self._batch_size, steps))
        outcomes = batch.outcomes(rewards, self._batch_size)
        marks = self._marks.entries(outcomes["done"].reshape(-1, steps), shape)
        actions = batch.actions[0] if len(batch.actions) == 1 else torch.cat(batch.actions)
        actions = actions if len(actions) == len(rewards) else actions[: len(rewards)]
        before = {
            **batch.observations.before(),
            "action": in_time(actions, self._batch_size),
            **{key: torch.from_numpy(np.zeros((*shape, 1), dtype=np.bool_)) for key in FLAGS},
            "collector": of_batch(marks),
        }
        columns = {key: torch.from_numpy(column) for key, column in outcomes.items()}
        td = of_batch({**before, "next": of_batch({**batch.observations.after(), **columns})})
        return td if extras is None else extras.update(td)


class _RawBatch:
    """What grows while a batch is collected."""

    def __init__(self, observations: Observations | PackedObservations) -> None:
        self.observations = observations
        self.actions: list[Any] = []  # encoded, in blocks
        self.rewards: list[Any] = []
        self.ends: list[tuple[int, bool, bool]] = []  # slot, terminated, truncated

    def end(self, slot: int, terminated: Any, truncated: Any, is_cut: bool) -> bool:
        """Notes whether an episode ends with a step. Raises ValueError for flags that are neither true nor false."""
        is_terminated, is_truncated = flag_of(terminated, "terminated"), flag_of(truncated, "truncated") or is_cut
        if is_terminated or is_truncated:
            self.ends.append((slot, is_terminated, is_truncated))
        return is_terminated or is_truncated

    def outcomes(self, rewards: Array, batch_size: torch.Size) -> dict[str, Array]:
        """Reward and flags of the first steps, `[*batch_size, steps, 1]`, each with memory of its own."""
        slots = len(rewards)
        terminated, truncated, done = (np.zeros((slots, 1), dtype=np.bool_) for _ in range(3))
        for slot, is_terminated, is_truncated in self.ends:  # few: most flags stay zero
            if slot < slots:
                terminated[slot], truncated[slot], done[slot] = is_terminated, is_truncated, True
        columns = {"reward": rewards.reshape(slots, 1), "done": done, "terminated": terminated, "truncated": truncated}
        return {key: in_time(column, batch_size) for key, column in columns.items()} if batch_size else columns


class Observations:
    """Raw observations of `width` environments over `steps` steps.

    Slot `t * width + e` holds what environment e shows before step t; what follows step t is in the same place of row
    t + 1. `put(slot, raw)` takes an observation; it is copied at once, because environments may go on writing into the
    arrays that they gave. Where an observation is one array, whoever has looked at its `dtype` and `shape` may write it
    to `only` himself. A reset moves the last observation of the old episode aside.
    """

    def __init__(self, leaves: list[Leaf], steps: int, batch_size: torch.Size, first_row: Rows | None) -> None:
        self._leaves = leaves
        self._steps = steps
        self.batch_size = batch_size
        self._width = batch_size.numel()
        slots = (steps + 1) * self._width
        self._arrays = [np.empty((slots, *leaf.codec.raw_shape), leaf.codec.raw_dtype) for leaf in leaves]
        self._moved_slots: list[int] = []
        self._moved: list[Rows] = [[] for _ in leaves]
        for array, row in zip(self._arrays, first_row or (), strict=first_row is not None):
            array[: self._width] = row
        is_single = len(leaves) == 1 and not leaves[0].path
        self.only = self._arrays[0]
        codec = leaves[0].codec
        is_free = is_single and codec.limits is None
        self.dtype = codec.raw_dtype if is_free else None  # None: several arrays, or `put` looks at the values
        self.shape = codec.raw_shape
        self._scalars = _scalars_of(codec.raw_dtype) if is_single and not self.shape else frozenset()
        self._low: Any = -math.inf
        self._high: Any = math.inf
        if codec.limits is not None:
            self._low, self._high = codec.limits

    @property
    def keys(self) -> list[Any]:
        """The keys of the observations."""
        return [leaf.key for leaf in self._leaves]

    def put(self, slot: int, raw: Any) -> None:
        """An observation. Raises ValueError where it is not of the space, and changes nothing then."""
        if type(raw) in self._scalars and self._low <= raw <= self._high:
            with contextlib.suppress(OverflowError):  # an int beyond 64 bits is told of below
                self.only[slot] = raw
                return
        values = [leaf.value(raw) for leaf in self._leaves]
        for array, value in zip(self._arrays, values, strict=True):
            array[slot] = value

    def put_first(self, slot: int, raw: Any) -> None:
        """The first observation of an episode. Raises ValueError as `put`."""
        values = [leaf.value(raw) for leaf in self._leaves]
        if slot >= self._width:
            self._moved_slots.append(slot - self._width)
            for array, moved in zip(self._arrays, self._moved, strict=True):
                moved.append(array[slot].copy())
        for array, value in zip(self._arrays, values, strict=True):
            array[slot] = value

    def cut(self, steps: int) -> None:
        """Only the first `steps` steps were made."""
        slots = (steps + 1) * self._width
        self._steps, self._arrays = steps, [array[:slots] for array in self._arrays]
        kept = [k for k, slot in enumerate(self._moved_slots) if slot < steps * self._width]
        self._moved_slots = [self._moved_slots[k] for k in kept]
        self._moved = [[moved[k] for k in kept] for moved in self._moved]

    def last_row(self) -> Rows:
        """What the environments show after the last step."""
        return [array[-self._width :].copy() for array in self._arrays]

    def rows(self, key: Any) -> Callable[[int], Tensor]:
        """A function from t to the observation `[*batch_size, *shape]` before step t, once it is there."""
        index = self.keys.index(key)
        codec, array = self._leaves[index].codec, self._arrays[index]
        by_row = array.reshape(self._steps + 1, *self.batch_size, *codec.raw_shape)
        if codec.is_plain:
            return torch.from_numpy(by_row).unbind(0).__getitem__  # views: a third of the cost of one index each
        return lambda t: codec.encode(by_row[t])

    def before(self) -> dict[Any, Tensor]:
        """All observations before the steps, `[*batch_size, steps, *shape]` by key."""
        return self._tensors([array[: -self._width] for array in self._arrays])

    def after(self) -> dict[Any, Tensor]:
        """All observations after the steps, the last ones of episodes included; own memory."""
        columns = [array[self._width :].copy() for array in self._arrays]
        if self._moved_slots:
            for column, moved in zip(columns, self._moved, strict=True):
                column[self._moved_slots] = moved
        return self._tensors(columns)

    def _tensors(self, columns: Rows) -> dict[Any, Tensor]:
        pairs = zip(self._leaves, columns, strict=True)
        return {leaf.key: in_time(leaf.codec.encode(column), self.batch_size) for leaf, column in pairs}


def _scalars_of(dtype: Any) -> frozenset[type]:
    """The types of single numbers that `dtype` holds whatever their value."""
    python: dict[str, type] = {"int64": int, "float64": float}
    return frozenset({dtype.type} | ({python[dtype.name]} if dtype.name in python else set()))


def in_time(rows: Any, batch_size: torch.Size) -> Any:
    """`[time * envs, ...]`, tensor, array or TensorDict, as `[*batch_size, time, ...]`."""
    if not batch_size:
        return rows
    by_time = rows.reshape(-1, batch_size.numel(), *rows.shape[1:])
    if isinstance(rows, np.ndarray):
        return np.ascontiguousarray(by_time.swapaxes(0, 1))
    return by_time.transpose(0, 1).contiguous()


def can_pack(leaves: list[Leaf]) -> bool:
    """Whether an environment's observation is one small array, of whose values nothing is asked."""
    is_single = len(leaves) == 1 and not leaves[0].path and leaves[0].codec.limits is None
    return is_single and len(leaves[0].codec.raw_shape) > 0 and 0 < _size(leaves[0]) <= LARGEST


def _size(leaf: Leaf) -> int:
    return int(math.prod(leaf.codec.raw_shape) * leaf.codec.raw_dtype.itemsize)


class PackedObservations:
    """What `Observations` is, for one environment, while nobody reads the observations.

    `rows` grows by the bytes of one observation a step. Who extends it has looked at the array's `dtype` and `shape`,
    which bytes do not have; `pack` makes bytes of anything else that the space allows.
    """

    def __init__(self, leaf: Leaf, first_row: Rows | None) -> None:
        self._leaf = leaf
        self.dtype = leaf.codec.raw_dtype
        self.shape = leaf.codec.raw_shape
        self._size = _size(leaf)
        self.rows = bytearray() if first_row is None else bytearray(first_row[0].tobytes())
        self._moved: dict[int, bytearray] = {}  # by step: the last observation of an episode

    def pack(self, raw: Any) -> bytes:
        """The bytes of one observation. Raises ValueError where it is not of the space."""
        return self._leaf.value(raw).tobytes()

    def put_first(self, slot: int, raw: Any) -> None:
        """The first observation of an episode. Raises ValueError as `pack`."""
        first = self.pack(raw)
        if slot:
            self._moved[slot - 1] = self.rows[-self._size :]
        self.rows[slot * self._size :] = first

    def cut(self, steps: int) -> None:
        """Only the first `steps` steps were made."""
        del self.rows[(steps + 1) * self._size :]
        self._moved = {step: last for step, last in self._moved.items() if step < steps}

    def last_row(self) -> Rows:
        """What the environment shows after the last step."""
        return [self._array[-1:].copy()]

    def before(self) -> dict[Any, Tensor]:
        """The observations before the steps, `[steps, *shape]` under their key."""
        return self._tensor(self._array[:-1])

    def after(self) -> dict[Any, Tensor]:
        """The observations after the steps, the last ones of episodes included; own memory."""
        following = self._array[1:].copy()
        if self._moved:
            moved = np.frombuffer(b"".join(self._moved.values()), self.dtype)
            following[list(self._moved)] = moved.reshape((-1, *self.shape))
        return self._tensor(following)

    @cached_property
    def _array(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.rows, self.dtype).reshape((-1, *self.shape))

    def _tensor(self, array: np.ndarray[Any, Any]) -> dict[Any, Tensor]:
        return {self._leaf.key: self._leaf.codec.encode(array)}


class ActionSource:
    """A source that keeps nothing from step to step and writes nothing but the action."""

    def __init__(self, codec: Codec, batch_size: torch.Size) -> None:
        self._codec = codec
        self._batch_size = batch_size

    def act(self, t: int) -> Any:
        """The action `[*batch_size, *spec.shape]` for step t."""
        raise NotImplementedError

    def actions(self, times: range) -> Iterator[Any]:
        """`act` for each step, when its turn comes."""
        return map(self.act, times)

    def raws(self, times: range, record: list[Any]) -> Iterator[Any]:
        """One raw action per environment for each step, when its turn comes; each is also added to `record`."""
        return self._of_several(times, record) if self._batch_size else self._of_one(times, record)

    def _checked(self, times: range) -> Iterator[Any]:
        actions = self.actions(times)
        for first in actions:  # one look a batch: a wrong shape or a score instead of a choice shows at once
            check_action(self._codec, first, self._batch_size)
            return chain((first,), actions)
        return actions

    def _of_one(self, times: range, record: list[Any]) -> Iterator[Any]:
        decode, keep, add = self._codec.decode_one, self._codec.keep, record.append
        for action in self._checked(times):
            try:
                raw = decode(action)
            except Exception:
                check_action(self._codec, action, self._batch_size)  # says what came and what is allowed
                raise
            add(keep(raw))
            yield raw

    def _of_several(self, times: range, record: list[Any]) -> Iterator[Any]:
        decode, keep, add = self._codec.decode_rows, self._codec.keep_rows, record.extend
        for action in self._checked(times):
            try:
                raws = decode(action)
            except Exception:
                check_action(self._codec, action, self._batch_size)
                raise
            add(keep(raws))
            yield from raws

    def forget(self, env: int) -> None:
        """Environment `env` starts anew: nothing of its last episode goes on."""

    def skip(self, t: int) -> None:
        """Step t has a random action from elsewhere."""

    def extras(self, steps: int) -> TensorDictBase | None:
        """What the policy wrote in the first steps of this batch besides the action, `[*batch_size, steps]`."""
        return None


class RandomActions(ActionSource):
    """Random actions, drawn for many steps at once."""

    def __init__(self, policy: RandomPolicy, codec: Codec, batch_size: torch.Size) -> None:
        super().__init__(codec, batch_size)
        self._spec = policy.action_spec
        self._is_codec_spec = self._spec == codec.spec.expand(*batch_size, *codec.spec.shape)

    def draw(self, steps: int, source: ActionSource) -> tuple[Any, Any]:
        """Actions `[steps * environments, ...]`, and an iterable of the raw ones; `source` skips the steps."""
        encoded, raws = self._drawn(steps)
        return encoded, raws if source is self else _skipping(raws, source, self._batch_size.numel())

    def _drawn(self, steps: int) -> tuple[Any, list[Any]]:
        if self._is_codec_spec:
            return self._codec.random_rows(steps * self._batch_size.numel())
        drawn = self._spec.rand((steps,))
        check_action(self._codec, drawn, (steps, *self._batch_size))
        rows = drawn.flatten(0, 1) if self._batch_size else drawn
        raws = self._codec.decode_rows(rows)
        return self._codec.encode_rows(raws), raws


def _skipping(raws: list[Any], source: ActionSource, width: int) -> Any:
    for slot, raw in enumerate(raws):
        if slot % width == 0:
            source.skip(slot // width)
        yield raw


class ModuleActions(ActionSource):
    """A module from one observation tensor to the action, called with nothing in between."""

    def __init__(self, policy: ObservationPolicy, codec: Codec, observations: Observations) -> None:
        super().__init__(codec, observations.batch_size)
        self._module, self._row = policy.module, observations.rows(policy.in_key)

    def actions(self, times: range) -> Iterator[Any]:
        return map(self._module, map(self._row, times))


class TensorDictActions(ActionSource):
    """A policy on TensorDicts. What it writes besides the action is kept, stored, and handed to it at the next step."""

    def __init__(self, policy: TensorDictPolicy, codec: Codec, batch_size: torch.Size, device: Any) -> None:
        super().__init__(codec, batch_size)
        self._policy = policy
        self._kept = TensorDict(batch_size=batch_size, device=device)
        self._flag = torch.zeros(*batch_size, 1, dtype=torch.bool)
        self._blank: TensorDictBase | None = None

    def begin(self, observations: Observations) -> TensorDictActions:
        """Makes ready for one batch."""
        self._rows = {key: observations.rows(key) for key in observations.keys}
        self._steps: list[TensorDictBase] = []
        return self

    def act(self, t: int) -> Any:
        out = self._policy(self._state(t))
        self._note(out)
        return out.get("action")

    def skip(self, t: int) -> None:
        state = self._state(t)
        if self._blank is None:
            self._blank = extras_of(self._policy, state)
        self._note(state.update(self._blank.clone()))

    def forget(self, env: int) -> None:
        mask = torch.zeros_like(self._flag)
        mask.view(-1)[env] = True
        self._kept = zero_where(mask, self._kept)

    def extras(self, steps: int) -> TensorDictBase | None:
        stacked = stack_steps(self._steps[:steps], self._flag.ndim - 1)
        return None if stacked.is_empty() else stacked

    def _state(self, t: int) -> TensorDictBase:
        td = self._kept.copy()
        for key, row in self._rows.items():
            td.set(key, row(t))
        return td.update(dict.fromkeys(FLAGS, self._flag))

    def _note(self, out: TensorDictBase) -> None:
        extras = out.exclude("action", *FLAGS, *self._rows)
        self._steps.append(extras)
        following = extras.get("next", None)
        kept = extras.exclude("next").copy()
        self._kept = kept if following is None else kept.update(following.copy())


Source = ModuleActions | RandomActions | TensorDictActions
