"""Stepping gymnasium environments one by one with raw values: tensors are made once a batch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.collectors.action_sources import (
    ActionSource,
    ModuleActions,
    ObservedSteps,
    OutputSink,
    RandomActions,
    TensorDictActions,
    ZeroOutputs,
    skipping,
)
from engram.collectors.output_columns import OutputColumns
from engram.collectors.rollout import RolloutResult, StepColumns, Steps
from engram.collectors.trajectories import StepTags
from engram.envs.codecs import Array, ArrayCodec, DiscreteCodec, Rewards, SpaceLeaf, flag_of, reward_of, rewards_of
from engram.envs.engines import GymEngine
from engram.envs.policies import ObservationPolicy, RandomPolicy, TensorDictPolicy, as_observation_policy

Rows = list[np.ndarray[Any, Any]]
LARGEST_AS_BYTES = 1024  # bytes of one observation: above, the second copy costs more than one write into an array


class OneEpisode(NamedTuple):
    """Where a single environment is between two batches: its observation, whether it is reset, steps until a cut."""

    row: Rows | None
    must_reset: bool
    left: int | None


class GymRollout:
    """Steps one or several gymnasium environments; key by key the same as `TensorDictRollout`.

    A step costs the environment, the policy, a copy of the observation and a list append or two. A slot is
    `t * environments + env`.

    There are two loops over steps. `_step_as_bytes` is for one environment with random actions and small observations,
    which it keeps as bytes: without it each frame of CartPole costs 3 % more instructions.
    """

    def __init__(
        self,
        env: Any,
        engines: list[GymEngine],
        policy: TensorDictPolicy,
        tags: StepTags,
        *,
        max_frames_per_traj: int | None,
    ) -> None:
        self._engines = engines
        self._policy = policy
        self._max_frames = max_frames_per_traj
        self._tags = tags
        self._batch_size: torch.Size = env.batch_size
        self._device = env.device
        self._codec = engines[0].action
        self.is_random = isinstance(policy, RandomPolicy)
        random = policy if isinstance(policy, RandomPolicy) else RandomPolicy(env.action_spec)
        self._random = RandomActions(random, self._codec, self._batch_size, tags.weights)
        self._keeps_bytes = self.is_random and not self._batch_size and can_keep_bytes(engines[0].leaves)
        self.tensordict_actions = TensorDictActions(policy, self._codec, self._batch_size, tags.weights, self._device)
        self._zeros, self._outputs = ZeroOutputs(), OutputColumns(self._batch_size, self._device)
        self.steps_way = self._outputs.way
        self.restart()

    def restart(self) -> None:
        self._to_reset = list(range(len(self._engines)))
        self._last_slots: dict[int, int] = {}  # by environment: the slot of its last state before it is truncated
        self._first_row: Rows | None = None
        self._outputs.clear()

    @property
    def episode(self) -> OneEpisode:
        """Where the only environment is; may be replaced between two batches."""
        return OneEpisode(self._first_row, bool(self._to_reset), self._last_slots.get(0))

    @episode.setter
    def episode(self, episode: OneEpisode) -> None:
        self._first_row, self._to_reset = episode.row, [0] if episode.must_reset else []
        self._last_slots = {} if episode.left is None else {0: episode.left}

    def collect(self, steps: int, *, random_steps: int) -> RolloutResult:
        batch = _StepBuffer(self._empty_observations(steps), self._outputs, len(self._engines))
        source = self._source(batch)
        try:
            self._run_all(batch, source, steps, steps if self.is_random else min(steps, random_steps))
        except BaseException as error:
            return self._cut_short(batch, rewards_of(batch.rewards), error)
        rewards = rewards_of(batch.rewards)
        if rewards.error is not None:
            return self._cut_short(batch, rewards, rewards.error)
        self._first_row = batch.observations.last_row()
        self._last_slots = {env: slot - steps * len(self._engines) for env, slot in self._last_slots.items()}
        return RolloutResult(self._steps_of(batch, rewards.values, steps))

    def _cut_short(self, batch: _StepBuffer, rewards: Rewards, error: BaseException) -> RolloutResult:
        """Makes a batch of the whole rows before an error, and restarts: no trajectory continues after it."""
        try:
            error = error if rewards.error is None else rewards.error  # the earlier one
            steps = len(rewards.values) // len(self._engines)
            if steps == 0:
                raise error
            batch.observations.cut(steps)
            return RolloutResult(self._steps_of(batch, rewards.values[: steps * len(self._engines)], steps), error)
        finally:
            self.restart()

    def _empty_observations(self, steps: int) -> Observations | ByteObservations:
        leaves = self._engines[0].leaves
        if self._keeps_bytes:
            return ByteObservations(leaves[0], self._first_row)
        return Observations(leaves, steps, self._batch_size, self._first_row)

    def _source(self, batch: _StepBuffer) -> ActionSource:
        if isinstance(batch.observations, ByteObservations) or self.is_random:
            return self._random
        direct = as_observation_policy(self._policy)  # looked up again for each batch: hooks come and go
        if direct is not None and set(direct.in_keys) <= {*batch.observations.keys}:
            return self.module_actions(direct, batch.observations, batch)
        return self.tensordict_actions.start(batch.observations, batch)

    def module_actions(self, policy: ObservationPolicy, observed: ObservedSteps, sink: OutputSink) -> ModuleActions:
        """The actions of a policy for the observations of `observed`; `sink` gets what it returns besides."""
        weights = self._tags.weights
        return ModuleActions(policy, self._codec, self._batch_size, weights, self._device, observed, sink, self._zeros)

    def _run_all(self, batch: _StepBuffer, source: ActionSource, steps: int, random_steps: int) -> None:
        if random_steps:
            encoded, raws = self._random.draw_rows(random_steps)
            batch.actions.append(encoded)
            batch.versions += [self._tags.weights.version] * random_steps
            replaced = raws if source is self._random else skipping(source, raws, per_step=len(self._engines))
            self._run(batch, replaced, range(random_steps), source)
        if random_steps < steps:
            chosen: list[Any] = []
            times = range(random_steps, steps)
            try:
                self._run(batch, self._chosen(batch, source, times, chosen), times, source)
            finally:
                if chosen:
                    batch.actions.append(self._codec.encode_rows(chosen))

    def _chosen(self, batch: _StepBuffer, source: ActionSource, times: range, record: list[Any]) -> Iterator[Any]:
        """Yields the raw actions of the policy, one environment after the other; adds a copy of each to `record`."""
        codec, add, extend, add_version = self._codec, record.append, record.extend, batch.versions.append
        known: Callable[[Any], Any] | None = None
        if self._batch_size:
            keep_rows = codec.keep_rows
            if isinstance(codec, ArrayCodec):
                unstacked, raw_of = codec.unstacked, codec.raw_of
                known = source.known_by(lambda array: unstacked(raw_of(array)))
            rows = source.raw_actions(
                times,
                codec.decode_rows,
                known=known,
                record=lambda raws: extend(keep_rows(raws)),
                record_version=add_version,
            )
            return chain.from_iterable(rows)
        known, keep = source.quickly_decoded, codec.keep
        kept = add if isinstance(codec, DiscreteCodec) else lambda raw: add(keep(raw))  # integers: nothing to copy
        return source.raw_actions(times, codec.decode_one, known=known, record=kept, record_version=add_version)

    def _run(self, batch: _StepBuffer, raws: Iterable[Any], times: range, source: ActionSource) -> None:
        width, end = len(self._engines), times.stop * len(self._engines)
        for env in self._to_reset:
            self._reset(batch, times.start * width + env, env, source)
        self._to_reset.clear()
        if isinstance(batch.observations, ByteObservations):
            return self._step_as_bytes(batch, batch.observations, raws, end)
        steps, step = [engine.step for engine in self._engines], self._engines[0].step
        put, array, ndarray = batch.observations.put, batch.observations.first_array, np.ndarray
        dtype, shape = batch.observations.dtype, batch.observations.shape
        keep_reward, last_slots = batch.rewards.append, self._last_slots
        for slot, raw in enumerate(raws, (times.start + 1) * width):  # the slot of the state that follows
            if width > 1:
                step = steps[slot % width]
            observation, reward, terminated, truncated, _ = step(raw)
            if type(observation) is ndarray and observation.dtype is dtype and observation.shape == shape:
                array[slot] = observation
            else:
                put(slot, observation)
            is_over = terminated is not False or truncated is not False
            if is_over or last_slots:
                is_cut = bool(last_slots) and last_slots[slot % width] == slot
                is_over = (is_over or is_cut) and batch.end(slot - width, terminated, truncated, is_cut=is_cut)
            keep_reward(reward if type(reward) is float else reward_of(reward))  # last: a step with a reward is whole
            if is_over:
                env = slot % width
                if slot < end:
                    self._reset(batch, slot, env, source)
                else:
                    self._to_reset.append(env)  # when it is needed: the last state must stay, and a restart may come

    def _step_as_bytes(self, batch: _StepBuffer, observations: ByteObservations, raws: Iterable[Any], end: int) -> None:
        step, reset, max_frames = self._engines[0].step, self._engines[0].reset, self._max_frames
        keep, to_bytes = observations.rows.extend, observations.to_bytes
        ndarray, dtype, shape = np.ndarray, observations.dtype, observations.shape
        rewards, last_slots = batch.rewards, self._last_slots
        keep_reward = rewards.append
        for raw in raws:
            observation, reward, terminated, truncated, _ = step(raw)
            if type(observation) is ndarray and observation.dtype is dtype and observation.shape == shape:
                keep(observation.tobytes())  # bytes say nothing of dtype and shape: any other goes through numpy
            else:
                keep(to_bytes(observation))
            is_over = terminated is not False or truncated is not False
            if is_over or last_slots:
                is_cut = bool(last_slots) and last_slots[0] == len(rewards) + 1
                is_over = (is_over or is_cut) and batch.end(len(rewards), terminated, truncated, is_cut=is_cut)
            keep_reward(reward if type(reward) is float else reward_of(reward))  # last: a step with a reward is whole
            if is_over:
                slot = len(rewards)
                if slot == end:
                    self._to_reset.append(0)
                    continue
                observations.put_first(slot, reset())
                if max_frames is not None:
                    last_slots[0] = slot + max_frames

    def _reset(self, batch: _StepBuffer, slot: int, env: int, source: ActionSource) -> None:
        batch.observations.put_first(slot, self._engines[env].reset())
        source.reset_envs([env])
        if self._max_frames is not None:
            self._last_slots[env] = slot + self._max_frames * len(self._engines)

    def _steps_of(self, batch: _StepBuffer, rewards: Array, steps: int) -> Steps:
        self.steps_way = batch.outputs.way
        outcomes = batch.outcomes(rewards, self._batch_size)
        shape = torch.Size((*self._batch_size, steps))
        actions = batch.actions[0] if len(batch.actions) == 1 else torch.cat(batch.actions)
        actions = actions if len(actions) == len(rewards) else actions[: len(rewards)]
        after, shares_after = batch.observations.after()
        return StepColumns(
            {**batch.observations.before(), "action": in_time(actions, self._batch_size)},
            after,
            outcomes,
            self._tags.tag(outcomes["done"].reshape(-1, steps), shape, lambda: batch.versions_of(steps)),
            batch.outputs.take(steps),
            shape=shape,
            device=self._device,
            shares_after=shares_after,
        )


class _StepBuffer:
    """The steps of one batch, while it is collected."""

    def __init__(self, observations: Observations | ByteObservations, outputs: OutputColumns, width: int) -> None:
        self.observations = observations
        self.outputs = outputs
        self._width = width  # environments
        self.actions: list[Any] = []  # encoded, in blocks
        self.versions: list[int] = []  # by step, of the weights that chose the actions
        self.rewards: list[float] = []
        self._ends: list[tuple[int, bool, bool]] = []  # slot, terminated, truncated

    def end(self, slot: int, terminated: Any, truncated: Any, *, is_cut: bool) -> bool:
        """Records and returns whether an episode ends with a step. Raises ValueError for flags that are not bools."""
        is_terminated, is_truncated = flag_of(terminated, "terminated"), flag_of(truncated, "truncated") or is_cut
        if is_terminated or is_truncated:
            self._ends.append((slot, is_terminated, is_truncated))
        return is_terminated or is_truncated

    def store_outputs(self, outputs: Mapping[str, Any]) -> None:
        self.outputs.put(len(self.rewards) // self._width, outputs)

    def store_tensordict(self, outputs: TensorDictBase, reason: str) -> None:
        self.outputs.put_tensordict(len(self.rewards) // self._width, outputs, reason)

    def versions_of(self, steps: int) -> Array:
        """The versions of the policy that acted in the first steps, int64 `[environments, steps]`."""
        return np.tile(np.array(self.versions[:steps], np.int64), (self._width, 1))

    def outcomes(self, rewards: Array, batch_size: torch.Size) -> dict[str, Array]:
        """Reward and flags of the first steps, `[*batch_size, steps, 1]`, each with memory of its own."""
        slots = len(rewards)
        terminated, truncated, done = (np.zeros((slots, 1), dtype=np.bool_) for _ in range(3))
        for slot, is_terminated, is_truncated in self._ends:  # few: most flags stay zero
            if slot < slots:
                terminated[slot], truncated[slot], done[slot] = is_terminated, is_truncated, True
        columns = {"reward": rewards.reshape(slots, 1), "done": done, "terminated": terminated, "truncated": truncated}
        return {key: in_time(column, batch_size) for key, column in columns.items()} if batch_size else columns


class Observations:
    """The raw observations of one batch of `n` environments and `steps` steps, in one array for each leaf.

    Slot `t * n + env` holds the observation of `env` before step t; the one after it is in slot `(t + 1) * n + env`.
    An observation is copied at once, because environments may go on writing into the arrays that they gave. A caller
    that has compared `dtype` and `shape` may write an observation to `first_array` without `put`. A reset takes the
    slot of the last observation of the old episode, which is kept apart.
    """

    def __init__(self, leaves: list[SpaceLeaf], steps: int, batch_size: torch.Size, first_row: Rows | None) -> None:
        self._leaves = leaves
        self._steps = steps
        self.batch_size = batch_size
        self._n = batch_size.numel()
        slots = (steps + 1) * self._n
        self._arrays = [np.empty((slots, *leaf.codec.raw_shape), leaf.codec.raw_dtype) for leaf in leaves]
        self._last_slots: list[int] = []
        self._last_of_episodes: list[Rows] = [[] for _ in leaves]
        for array, row in zip(self._arrays, first_row or (), strict=first_row is not None):
            array[: self._n] = row
        is_single = len(leaves) == 1 and not leaves[0].path
        self.first_array = self._arrays[0]
        codec = leaves[0].codec
        takes_any_value = is_single and codec.limits is None
        self.dtype = codec.raw_dtype if takes_any_value else None  # None: several arrays, or `put` compares values
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
        """Stores an observation. Raises ValueError where it is not of the space; nothing is changed then."""
        if type(raw) in self._scalars and self._low <= raw <= self._high:
            with contextlib.suppress(OverflowError):  # an int beyond 64 bits is refused below
                self.first_array[slot] = raw
                return
        values = [leaf.value(raw) for leaf in self._leaves]
        for array, value in zip(self._arrays, values, strict=True):
            array[slot] = value

    def put_first(self, slot: int, raw: Any) -> None:
        """Stores the first observation of an episode. Raises ValueError as `put`."""
        values = [leaf.value(raw) for leaf in self._leaves]
        if slot >= self._n:
            self._last_slots.append(slot - self._n)
            for array, last in zip(self._arrays, self._last_of_episodes, strict=True):
                last.append(array[slot].copy())
        for array, value in zip(self._arrays, values, strict=True):
            array[slot] = value

    def cut(self, steps: int) -> None:
        """Drops all but the first `steps` steps."""
        slots = (steps + 1) * self._n
        self._steps, self._arrays = steps, [array[:slots] for array in self._arrays]
        inside = [k for k, slot in enumerate(self._last_slots) if slot < steps * self._n]
        self._last_slots = [self._last_slots[k] for k in inside]
        self._last_of_episodes = [[last[k] for k in inside] for last in self._last_of_episodes]

    def last_row(self) -> Rows:
        """The observations after the last step, for the next batch."""
        return [array[-self._n :].copy() for array in self._arrays]

    def rows(self, key: Any) -> Callable[[int], Tensor]:
        """A function from t to a copy of the observation `[*batch_size, *shape]` before step t, once that is stored."""
        index = self.keys.index(key)
        codec, array = self._leaves[index].codec, self._arrays[index]
        return codec.row_encoder(array.reshape(self._steps + 1, *self.batch_size, *codec.raw_shape))

    def before(self) -> dict[Any, Tensor]:
        """All observations before the steps, `[*batch_size, steps, *shape]` by key."""
        return self._tensors([array[: -self._n] for array in self._arrays])

    def after(self) -> tuple[dict[Any, Tensor], bool]:
        """All observations after the steps, the last ones of episodes included.

        And whether they are in the memory of `before`, one step on: where no episode has ended between two steps.
        """
        if not self._last_slots and not self.batch_size and all(leaf.codec.is_plain for leaf in self._leaves):
            return self._tensors([array[self._n :] for array in self._arrays]), True
        columns = [array[self._n :].copy() for array in self._arrays]
        if self._last_slots:
            for column, last in zip(columns, self._last_of_episodes, strict=True):
                column[self._last_slots] = last
        return self._tensors(columns), False

    def _tensors(self, columns: Rows) -> dict[Any, Tensor]:
        pairs = zip(self._leaves, columns, strict=True)
        return {leaf.key: in_time(leaf.codec.encode(column), self.batch_size) for leaf, column in pairs}


def _scalars_of(dtype: Any) -> frozenset[type]:
    """The types of Python and NumPy numbers that `dtype` holds exactly."""
    python: dict[str, type] = {"int64": int, "float64": float}
    return frozenset({dtype.type} | ({python[dtype.name]} if dtype.name in python else set()))


def in_time(rows: Any, batch_size: torch.Size) -> Any:
    """Reshapes a tensor, array or TensorDict `[time * envs, ...]` to `[*batch_size, time, ...]`."""
    if not batch_size:
        return rows
    n = batch_size.numel()
    by_time = rows.reshape(rows.shape[0] // n, n, *rows.shape[1:])
    if isinstance(rows, np.ndarray):
        return np.ascontiguousarray(by_time.swapaxes(0, 1))
    return by_time.transpose(0, 1).contiguous()


def can_keep_bytes(leaves: list[SpaceLeaf]) -> bool:
    """Whether an environment's observation is one small array that may have any values of its dtype."""
    is_single = len(leaves) == 1 and not leaves[0].path and leaves[0].codec.limits is None
    return is_single and len(leaves[0].codec.raw_shape) > 0 and 0 < _size(leaves[0]) <= LARGEST_AS_BYTES


def _size(leaf: SpaceLeaf) -> int:
    return int(math.prod(leaf.codec.raw_shape) * leaf.codec.raw_dtype.itemsize)


class ByteObservations:
    """The raw observations of one batch of one environment, as bytes, for policies that read none of them.

    `rows` grows by the bytes of one observation a step. A caller that extends it has compared the `dtype` and `shape`
    of the array, which bytes do not have; `to_bytes` takes anything else that the space allows.
    """

    def __init__(self, leaf: SpaceLeaf, first_row: Rows | None) -> None:
        self._leaf = leaf
        self.dtype = leaf.codec.raw_dtype
        self.shape = leaf.codec.raw_shape
        self._size = _size(leaf)
        self.rows = bytearray() if first_row is None else bytearray(first_row[0].tobytes())
        self._last_of_episodes: dict[int, bytearray] = {}  # by step

    def to_bytes(self, raw: Any) -> bytes:
        """The bytes of one observation. Raises ValueError where it is not of the space."""
        return self._leaf.value(raw).tobytes()

    def put_first(self, slot: int, raw: Any) -> None:
        """Stores the first observation of an episode. Raises ValueError as `to_bytes`."""
        first = self.to_bytes(raw)
        if slot:
            self._last_of_episodes[slot - 1] = self.rows[-self._size :]
        self.rows[slot * self._size :] = first

    def cut(self, steps: int) -> None:
        """Drops all but the first `steps` steps."""
        del self.rows[(steps + 1) * self._size :]
        self._last_of_episodes = {step: last for step, last in self._last_of_episodes.items() if step < steps}

    def last_row(self) -> Rows:
        """The observation after the last step, for the next batch."""
        return [self._array[-1:].copy()]

    def before(self) -> dict[Any, Tensor]:
        """The observations before the steps, `[steps, *shape]` under their key."""
        return self._tensor(self._array[:-1])

    def after(self) -> tuple[dict[Any, Tensor], bool]:
        """The observations after the steps, the last ones of episodes included; False: in memory of their own."""
        following = self._array[1:].copy()
        if self._last_of_episodes:
            last = np.frombuffer(b"".join(self._last_of_episodes.values()), self.dtype)
            following[list(self._last_of_episodes)] = last.reshape((-1, *self.shape))
        return self._tensor(following), False

    @cached_property
    def _array(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.rows, self.dtype).reshape((-1, *self.shape))

    def _tensor(self, array: np.ndarray[Any, Any]) -> dict[Any, Tensor]:
        return {self._leaf.key: self._leaf.codec.encode(array)}
