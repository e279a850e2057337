"""Rolling gymnasium environments forward with raw values: tensors are made once a batch."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from engram.collectors.actions import ModuleActions, RandomActions, TensorDictActions
from engram.collectors.observations import Observations, Rows, in_time
from engram.envs.gym_engine import GymEngine
from engram.envs.policies import FLAGS, RandomPolicy, TensorDictPolicy, direct_module

Source = ModuleActions | RandomActions | TensorDictActions


class GymRoller:
    """Does what `TensorDictRoller` does, for one or several gymnasium environments, key by key the same.

    Per step there are the environment, the policy, a copy of the observation and a list append or two. A slot is
    `t * width + env`.
    """

    def __init__(
        self, env: Any, engines: list[GymEngine], policy: TensorDictPolicy, max_frames_per_traj: int | None
    ) -> None:
        self._engines = engines
        self._policy = policy
        self._limit = max_frames_per_traj
        self._batch_size: torch.Size = env.batch_size
        self._device = env.device
        self._codec = engines[0].action
        self._random = RandomActions(RandomPolicy(env.action_spec), self._codec, self._batch_size)
        if isinstance(policy, RandomPolicy):
            self._random = RandomActions(policy, self._codec, self._batch_size)
        self._on_tensordicts = TensorDictActions(policy, self._codec, self._batch_size, self._device)
        self.restart()

    def restart(self) -> None:
        """Every environment is reset before its next step."""
        self._to_reset = list(range(len(self._engines)))
        self._last_slots: dict[int, int] = {}  # by environment: where its last allowed state goes
        self._first_row: Rows | None = None

    def roll(self, steps: int, random_steps: int) -> TensorDictBase:
        """`[*batch_size, steps]` in TED, the first `random_steps` with random actions."""
        batch = _RawBatch(Observations(self._engines[0].leaves, steps, self._batch_size, self._first_row))
        source = self._source(batch.observations)
        try:
            self._run_all(batch, steps, steps if source is self._random else random_steps, source)
        except BaseException:
            self.restart()  # half a batch is lost: no trajectory may go on across the gap
            raise
        self._first_row = batch.observations.last_row()
        self._last_slots = {env: slot - steps * len(self._engines) for env, slot in self._last_slots.items()}
        return self._assembled(batch, steps, source.extras())

    def _run_all(self, batch: _RawBatch, steps: int, random_steps: int, source: Source) -> None:
        if random_steps:
            encoded, raws = self._random.draw(random_steps, source)
            batch.actions.append(encoded)
            self._run(batch, raws, range(random_steps), source)
        if random_steps < steps:
            record: list[Any] = []
            times = range(random_steps, steps)
            self._run(batch, chain.from_iterable(map(source.recorder(record), times)), times, source)
            batch.actions.append(self._codec.encode_rows(record))

    def _source(self, observations: Observations) -> Source:
        if isinstance(self._policy, RandomPolicy):
            return self._random
        direct = direct_module(self._policy)  # looked at again for each batch: hooks come and go
        if direct is not None:
            return ModuleActions(direct, self._codec, observations)
        return self._on_tensordicts.begin(observations)

    def _run(self, batch: _RawBatch, raws: Iterable[Any], times: range, source: Source) -> None:
        width, end = len(self._engines), times.stop * len(self._engines)
        for env in self._to_reset:
            self._reset(batch, times.start * width + env, env, source)
        self._to_reset.clear()
        steps, step = [engine.step for engine in self._engines], self._engines[0].step
        observations, keep_reward, limits = batch.observations.slots, batch.rewards.append, self._last_slots
        for slot, raw in enumerate(raws, (times.start + 1) * width):  # the slot of the state that follows
            if width > 1:
                step = steps[slot % width]
            observation, reward, terminated, truncated, _ = step(raw)
            observations[slot] = observation
            keep_reward(reward)
            if terminated or truncated or (limits and limits[slot % width] == slot):
                env = slot % width
                batch.ends.append((slot - width, bool(terminated), bool(truncated) or limits.get(env) == slot))
                if slot < end:
                    self._reset(batch, slot, env, source)
                else:
                    self._to_reset.append(env)  # when it is needed: the last state must stay, and a restart may come

    def _reset(self, batch: _RawBatch, slot: int, env: int, source: Source) -> None:
        batch.observations.put_first(slot, self._engines[env].reset())
        source.forget(env)
        if self._limit is not None:
            self._last_slots[env] = slot + self._limit * len(self._engines)

    def _assembled(self, batch: _RawBatch, steps: int, extras: TensorDictBase | None) -> TensorDictBase:
        shape = torch.Size((*self._batch_size, steps))
        action = in_time(batch.actions[0] if len(batch.actions) == 1 else torch.cat(batch.actions), self._batch_size)
        flags = {key: torch.zeros(*shape, 1, dtype=torch.bool) for key in FLAGS}
        before = {**batch.observations.before(), "action": action, **flags}
        after = {**batch.observations.after(), **batch.outcomes(self._batch_size)}
        following = TensorDict(after, batch_size=shape, device=self._device)
        td = TensorDict({**before, "next": following}, batch_size=shape, device=self._device)
        return td if extras is None else extras.update(td)


class _RawBatch:
    """What grows while a batch is collected."""

    def __init__(self, observations: Observations) -> None:
        self.observations = observations
        self.actions: list[Any] = []  # encoded, in blocks
        self.rewards: list[Any] = []
        self.ends: list[tuple[int, bool, bool]] = []  # slot, terminated, truncated

    def outcomes(self, batch_size: torch.Size) -> dict[str, torch.Tensor]:
        """Reward and flags, `[*batch_size, steps, 1]`."""
        slots = len(self.rewards)
        flags = np.zeros((2, slots, 1), dtype=np.bool_)
        if self.ends:
            ended, terminated, truncated = zip(*self.ends, strict=True)
            flags[:, ended, 0] = terminated, truncated
        columns = {
            "reward": np.asarray(self.rewards, dtype=np.float32).reshape(slots, 1),
            "done": flags[0] | flags[1],
            "terminated": flags[0].copy(),
            "truncated": flags[1].copy(),
        }
        return {key: in_time(torch.from_numpy(column), batch_size) for key, column in columns.items()}
