"""A BatchEngine as an environment that reads and writes TensorDicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.data.specs import Categorical
from engram.envs.base import EnvBase
from engram.envs.batched import Array, Autoreset, BatchEngine
from engram.envs.gym_engine import check_action, composite_of
from engram.envs.gym_values import flag_row, narrow_rewards, reward_row
from engram.transforms.in_env import IDLE


class BatchStepper:
    """Steps a BatchEngine with tensors, and knows of each environment where in its episode it is.

    An environment is *over* after its last step, and *fresh* when a new episode has begun whose first observation
    nobody has been given yet: `reset` hands it out.
    """

    def __init__(self, engine: BatchEngine) -> None:
        self.engine = engine
        self.marks_idle = engine.autoreset is Autoreset.NEXT_STEP and not engine.can_reset_some
        spec = composite_of(engine.leaves)
        self.observation_spec = spec.expand(engine.n)
        if self.marks_idle:
            self.observation_spec[IDLE] = Categorical(2, (engine.n, 1), dtype=torch.bool)
        self.action_spec = engine.action.spec.expand(engine.n, *engine.action.spec.shape)
        self._shown: dict[Any, Tensor] = {}
        self._all_live()

    def _all_live(self) -> None:
        self._over = np.zeros(self.engine.n, dtype=np.bool_)
        self._fresh = np.zeros(self.engine.n, dtype=np.bool_)

    def seed(self, seed: int) -> None:
        """The next reset of all starts environment i from `seed + i`."""
        self._fresh[:] = False  # what has begun without the seed is not handed out
        self.engine.seed(seed)

    def reset(self, mask: Tensor | None) -> dict[Any, Tensor]:
        """Observations after a reset of all, or where `mask` (bool `[n, 1]`) holds; the rest is not read.

        Raises ValueError where an environment is in the middle of an episode and cannot be reset alone.
        """
        rows = np.ones(self.engine.n, dtype=np.bool_) if mask is None else mask.cpu().numpy().reshape(-1)
        needed = rows & ~self._fresh
        in_midst = needed & ~self._over
        if mask is None or (rows.all() and in_midst.any() and not self.engine.can_reset_some):
            needed = in_midst = rows
        postponed = needed if self.marks_idle and not in_midst.any() else np.zeros_like(needed)
        if needed.any() and not postponed.any():
            self._reset_now(needed)
        self._fresh[rows] = False
        self._over[rows & ~postponed] = False
        values = {key: column.clone() for key, column in self._shown.items()}
        return {**values, IDLE: _column(postponed)} if self.marks_idle else values

    def _reset_now(self, rows: Array) -> None:
        shown = self._encoded(self.engine.reset(None if rows.all() else rows))
        if not rows.all():
            where = torch.from_numpy(rows)
            for key, column in shown.items():
                column[~where] = self._shown[key][~where]
        self._shown = shown

    def step(self, td: TensorDictBase) -> dict[Any, Tensor]:
        """What follows `td["action"]`: observations, reward and flags. Marks in `td` where this is no step.

        Raises ValueError for an action that is not what the spec says, RuntimeError where a reset has to come first.
        """
        self._refuse_unreset()
        action = td.get("action")
        check_action(self.engine.action, action, (self.engine.n,))
        raw = self.engine.action.decode_batch(action)
        observation, reward, terminated, truncated, last, idle = self.engine.step(raw)
        n = self.engine.n
        idle = np.zeros(n, dtype=np.bool_) if idle is None else idle.copy()
        reward, terminated = reward_row(reward, n), flag_row(terminated, n, "terminated")
        truncated = flag_row(truncated, n, "truncated")
        rewards = narrow_rewards(np.where(idle, 0, reward)[None])
        if rewards.error is not None:
            raise rewards.error
        values = self._encoded(observation)
        ended = np.logical_or(terminated, truncated)
        changes = bool((ended | idle).any())  # the tensors that are given away may be written to
        self._shown = {key: column.clone() if changes else column for key, column in values.items()}
        for env, raw_last in last:
            for leaf in self.engine.leaves:
                values[leaf.key][env] = leaf.codec.encode(leaf.value(raw_last)[None])[0]
        self._fresh = ended & ~idle if self.engine.autoreset is Autoreset.SAME_STEP else idle
        self._over = ended & ~idle & ~self._fresh
        if self.marks_idle:
            td.set(IDLE, _column(idle))
            values[IDLE] = torch.zeros(self.engine.n, 1, dtype=torch.bool)
        values["reward"] = _column(rewards.values[0])
        values["terminated"] = _column(terminated & ~idle)
        values["truncated"] = _column(truncated | idle)  # a reset has to follow, which tells policies and transforms
        return values

    def _refuse_unreset(self) -> None:
        waiting = self._fresh if self.marks_idle else self._fresh | self._over
        if waiting.any():
            raise RuntimeError(
                f"the episodes of environments {np.flatnonzero(waiting).tolist()} are over; reset them before the next "
                "step: env.maybe_reset(step_mdp(td)), or env.step_and_maybe_reset(td)"
            )

    def _encoded(self, raw: Any) -> dict[Any, Tensor]:
        """Batched raw observations as tensors of their own memory, by key. Raises ValueError for what are none."""
        return {leaf.key: leaf.codec.encode(leaf.rows(raw, self.engine.n)).clone() for leaf in self.engine.leaves}


class BatchedEnv(EnvBase):
    """A BatchEngine with the TensorDict interface: batch `[n]`.

    A reset is never a step, and the last observation of an episode stays under `next`, whatever the engine's autoreset
    mode. An engine that takes a call to reset environments, and cannot do it at another time (NEXT_STEP without
    `can_reset_some`), cannot hide that call. Then there is one more entry, `"_idle"` (bool `[n, 1]`): where it holds
    at the root, the step only resets. `reset` sets it where it could not reset yet. Such a row has no meaning: its
    action is ignored, its reward is 0, its `("next", "truncated")` asks for the reset that hands out the first
    observation. `rollout` and the collectors leave these rows out; loops of your own must, too.

    Raises RuntimeError for a step where an episode is over that was not reset.

    >>> import gymnasium
    >>> from engram.envs.gym_vector import VectorEngine
    >>> engine = VectorEngine(gymnasium.make_vec("CartPole-v1", num_envs=3), categorical=False)
    >>> BatchedEnv(engine).rollout(2)["action"].shape
    torch.Size([3, 2, 2])
    """

    def __init__(self, engine: BatchEngine, *, device: torch.device | str | None = None) -> None:
        self._stepper = BatchStepper(engine)
        super().__init__(self._stepper.observation_spec, self._stepper.action_spec, batch_size=(engine.n,))
        if device is not None:
            self.to(device)

    def batch_engine(self) -> BatchEngine | None:
        """What steps the environments raw, for collectors; None where a child class has changed a step."""
        cls = type(self)
        is_changed = (cls._step, cls._reset, cls.step, cls.reset) != _ITS_OWN
        return None if is_changed else self._stepper.engine

    def _reset(self, mask: Tensor | None) -> TensorDictBase:
        return TensorDict(self._stepper.reset(mask), batch_size=self.batch_size, device=self.device)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        return TensorDict(self._stepper.step(td), batch_size=self.batch_size, device=self.device)

    def _set_seed(self, seed: int) -> None:
        self._stepper.seed(seed)

    def _close(self) -> None:
        self._stepper.engine.close()


_ITS_OWN = (BatchedEnv._step, BatchedEnv._reset, BatchedEnv.step, BatchedEnv.reset)


def _column(values: Array) -> Tensor:
    return torch.tensor(values).reshape(-1, 1)
