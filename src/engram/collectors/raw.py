"""Rolling gymnasium environments forward with raw values: tensors are made once a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from engram.collectors.actions import Choose, ModuleActions, TensorDictActions, random_actions
from engram.collectors.observations import Observations, Rows, in_time
from engram.envs.gym_engine import GymEngine
from engram.envs.policies import RandomPolicy, TensorDictPolicy, direct_module

NEVER = -1


class GymRoller:
    """Does what `TensorDictRoller` does, for one or several gymnasium environments, key by key the same.

    Per step there are the environment, the policy, a copy of the observation and two list appends.
    """

    def __init__(
        self, env: Any, engines: list[GymEngine], policy: TensorDictPolicy, max_frames_per_traj: int | None
    ) -> None:
        self._engines = engines
        self._policy = policy
        self._limit = max_frames_per_traj
        self._batch_size: torch.Size = env.batch_size
        self._device = env.device
        self._action_spec = env.action_spec
        self._codec = engines[0].action
        self._on_tensordicts = TensorDictActions(policy, self._codec, self._batch_size, self._device)
        self.restart()

    def restart(self) -> None:
        """Every environment is reset before its next step."""
        self._to_reset = list(range(len(self._engines)))
        self._deadlines = [NEVER] * len(self._engines)  # the step of this batch that max_frames_per_traj makes the last
        self._first_row: Rows | None = None

    def roll(self, steps: int, random_steps: int) -> TensorDictBase:
        """`[*batch_size, steps]` in TED, the first `random_steps` with random actions."""
        batch = _RawBatch(Observations(self._engines[0].leaves, steps, self._batch_size, self._first_row))
        try:
            extras = self._run_all(batch, steps, random_steps)
        except BaseException:
            self.restart()  # half a batch is lost: no trajectory may go on across the gap
            raise
        self._first_row = batch.observations.last_row()
        self._deadlines = [NEVER if last == NEVER else last - steps for last in self._deadlines]
        return self._assembled(batch, steps, extras)

    def _run_all(self, batch: _RawBatch, steps: int, random_steps: int) -> TensorDictBase | None:
        if isinstance(self._policy, RandomPolicy):
            choose = random_actions(self._policy.action_spec, self._codec, self._batch_size, steps)
            self._run(batch, range(steps), choose, None)
            return None
        direct = direct_module(self._policy)  # looked at again for each batch: hooks come and go
        source: ModuleActions | TensorDictActions
        if direct is not None:
            source = ModuleActions(direct, self._codec, batch.observations)
        else:
            source = self._on_tensordicts.begin(batch.observations)
        if random_steps:
            drawn = random_actions(self._action_spec, self._codec, self._batch_size, random_steps)
            self._run(batch, range(random_steps), lambda t: source.skip(t) or drawn(t), source)
        self._run(batch, range(random_steps, steps), source.choose, source)
        return source.extras()

    def _run(
        self, batch: _RawBatch, times: range, choose: Choose, source: ModuleActions | TensorDictActions | None
    ) -> None:
        steps, deadlines, to_reset = [engine.step for engine in self._engines], self._deadlines, self._to_reset
        put, keep_action, keep_reward = batch.observations.put, batch.actions.extend, batch.rewards.append
        keep_rows, width = self._codec.keep_rows, len(steps)
        slot = times.start * width
        for t in times:
            if to_reset:
                self._reset(batch.observations, t, source)
            raws = choose(t)
            keep_action(keep_rows(raws))
            for env, step in enumerate(steps):
                observation, reward, terminated, truncated, _ = step(raws[env])
                put(slot + width, observation)
                keep_reward(reward)
                if terminated or truncated or t == deadlines[env]:
                    batch.ends.append((slot, bool(terminated), bool(truncated) or t == deadlines[env]))
                    to_reset.append(env)
                slot += 1

    def _reset(self, observations: Observations, t: int, source: ModuleActions | TensorDictActions | None) -> None:
        for env in self._to_reset:
            observations.put_first(t * len(self._engines) + env, self._engines[env].reset())
            self._deadlines[env] = NEVER if self._limit is None else t + self._limit - 1
        if source is not None:
            source.forget(self._to_reset)
        self._to_reset.clear()

    def _assembled(self, batch: _RawBatch, steps: int, extras: TensorDictBase | None) -> TensorDictBase:
        shape = torch.Size((*self._batch_size, steps))
        td = TensorDict(batch_size=shape, device=self._device) if extras is None else extras
        following = td.get("next", TensorDict(batch_size=shape, device=self._device))
        for key, value in batch.observations.before().items():
            td.set(key, value)
        td.set("action", in_time(self._codec.encode_rows(batch.actions), self._batch_size))
        for key in ("done", "terminated", "truncated"):
            td.set(key, torch.zeros(*shape, 1, dtype=torch.bool))
        for key, value in {**batch.observations.after(), **batch.outcomes(self._batch_size)}.items():
            following.set(key, value)
        return td.set("next", following)


class _RawBatch:
    """The lists that grow while a batch is collected."""

    def __init__(self, observations: Observations) -> None:
        self.observations = observations
        self.actions: list[Any] = []
        self.rewards: list[Any] = []
        self.ends: list[tuple[int, bool, bool]] = []  # slot, terminated, truncated

    def outcomes(self, batch_size: torch.Size) -> dict[str, torch.Tensor]:
        """Reward and flags, `[*batch_size, steps, 1]`."""
        slots = len(self.rewards)
        flags = np.zeros((2, slots, 1), dtype=np.bool_)
        for slot, terminated, truncated in self.ends:
            flags[:, slot, 0] = terminated, truncated
        columns = {
            "reward": np.asarray(self.rewards, dtype=np.float32).reshape(slots, 1),
            "done": flags[0] | flags[1],
            "terminated": flags[0],
            "truncated": flags[1],
        }
        return {key: in_time(torch.from_numpy(column), batch_size) for key, column in columns.items()}
