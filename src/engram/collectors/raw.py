"""Rolling gymnasium environments forward with raw values: tensors are made once a batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from engram.collectors.actions import ModuleActions, RandomActions, TensorDictActions
from engram.collectors.observations import Observations, Rows, in_time
from engram.collectors.packed import PackedObservations, can_pack
from engram.collectors.rolled import Rolled
from engram.collectors.trajectories import FrameMarks
from engram.envs.codecs import Array, Rewards, flag_of, rewards_of
from engram.envs.engines import GymEngine
from engram.envs.policies import FLAGS, RandomPolicy, TensorDictPolicy, as_observation_policy

Source = ModuleActions | RandomActions | TensorDictActions


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
        direct = as_observation_policy(self._policy)  # looked at again for each batch: hooks come and go
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
