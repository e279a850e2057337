"""`VectorEnv`: the environments of a `VectorEngine` as one environment with the TensorDict interface."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.envs.base import EnvBase, steps_as
from engram.envs.codecs import flag_row, narrow_rewards, reward_row, reward_vector
from engram.envs.engines import (
    Array,
    Autoreset,
    VectorEngine,
    action_check,
    composite_spec,
)
from engram.specs import Categorical, Unbounded
from engram.transforms.base import IDLE


class VectorStepper:
    """Steps a VectorEngine with tensors, and tracks which environments need a reset.

    An environment is *over* after the last step of an episode, and *fresh* when the engine has started the next episode
    and `reset` has not yet returned its first observation.
    """

    def __init__(self, engine: VectorEngine, *, may_lose_episodes: bool = False) -> None:
        self.engine = engine
        self._postpones = engine.autoreset is Autoreset.NEXT_STEP and not engine.can_reset_some
        self.marks_idle = not engine.can_reset_some or may_lose_episodes
        spec = composite_spec(engine.leaves)
        self.observation_spec = spec.expand(engine.n)
        if self.marks_idle:
            self.observation_spec[IDLE] = Categorical(2, (engine.n, 1), dtype=torch.bool)
        self.action_spec = engine.action.spec.expand(engine.n, *engine.action.spec.shape)
        self._action_check = action_check(engine.action, (engine.n,))
        self._shown: dict[Any, Tensor] = {}
        self._clear_marks()

    def _clear_marks(self) -> None:
        self._over = np.zeros(self.engine.n, dtype=np.bool_)
        self._fresh = np.zeros(self.engine.n, dtype=np.bool_)
        self._drains = np.zeros(self.engine.n, dtype=np.bool_)  # their reset waits for the end of their episode

    def seed(self, seed: int) -> None:
        """Seeds environment i with `seed + i` at the next reset of all."""
        self._fresh[:] = False  # discards episodes that were started without the seed
        self.engine.seed(seed)

    def seed_alike(self, seed: int) -> None:
        """Seeds every environment with `seed` at the next reset of all."""
        self.engine.seed_alike(seed)
        self._fresh[:] = False

    def reset(self, mask: Tensor | None) -> dict[Any, Tensor]:
        """Observations after a reset of all, or where `mask` (bool `[n, 1]`) holds; the other rows are not read.

        An environment that is in the middle of an episode and cannot be reset without the others is marked as idle
        until its episode is over, or until all are: then all are reset.
        """
        rows = np.ones(self.engine.n, dtype=np.bool_) if mask is None else mask.cpu().numpy().reshape(-1)
        needed = rows & ~self._fresh
        is_running = needed & ~self._over
        postponed = np.zeros_like(needed)
        if mask is None:
            needed, self._drains = rows, postponed.copy()
        elif not self.engine.can_reset_some:
            self._drains |= is_running
            if self._drains.all() or (rows.all() and is_running.any()):
                needed = rows = np.ones_like(rows)
                self._drains = postponed.copy()
            else:
                postponed = needed | (rows & self._drains)
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
        """The observations, reward and flags after `td["action"]`. Marks rows in `td` that only reset.

        Raises ValueError for an action that does not fit its spec, RuntimeError if an environment must be reset first.
        """
        self._check_all_reset()
        action = td.get("action")
        self._action_check.require(action)
        raw = self.engine.action.decode_batch(action)
        observation, reward, terminated, truncated, last, idle = self.engine.step(raw)
        n = self.engine.n
        idle = np.zeros(n, dtype=np.bool_) if idle is None else idle.copy()
        shape = self.engine.reward_shape
        reward = reward_vector(reward, (n, *shape)) if shape else reward_row(reward, n)
        terminated, truncated = flag_row(terminated, n, "terminated"), flag_row(truncated, n, "truncated")
        ended = np.logical_or(terminated, truncated)
        fresh = ended | idle if self.engine.autoreset is Autoreset.SAME_STEP else idle.copy()
        idle |= self._drains
        self._drains &= ~fresh
        if shape:
            reward_column = torch.tensor(
                np.where(idle.reshape(n, *(1,) * len(shape)), np.float32(0), reward), device="cpu"
            )
        else:
            rewards = narrow_rewards(np.where(idle, 0, reward)[None])
            if rewards.error is not None:
                raise rewards.error
            reward_column = _column(rewards.values[0])
        values = self._encoded(observation)
        changes = bool((ended | idle).any())
        self._shown = {key: column.clone() if changes else column for key, column in values.items()}
        for env, raw_last in last:
            for leaf in self.engine.leaves:
                values[leaf.key][env] = leaf.codec.encode(leaf.value(raw_last)[None])[0]
        self._fresh = fresh
        self._over = ended & ~idle & ~self._fresh
        if self.marks_idle:
            td.set(IDLE, _column(idle))
            values[IDLE] = torch.zeros(self.engine.n, 1, dtype=torch.bool, device="cpu")
        values["reward"] = reward_column
        values["terminated"] = _column(terminated & ~idle)
        values["truncated"] = _column(truncated | idle)  # tells policies and transforms that a reset follows
        return values

    def _check_all_reset(self) -> None:
        unreset = self._fresh if self._postpones else self._fresh | self._over
        if unreset.any():
            raise RuntimeError(
                f"the episodes of environments {np.flatnonzero(unreset).tolist()} are over; reset them before the next "
                "step: env.maybe_reset(step_mdp(td)), or env.step_and_maybe_reset(td)"
            )

    def _encoded(self, raw: Any) -> dict[Any, Tensor]:
        """Batched raw observations as tensors in new memory, by key. Raises ValueError if they are not in the space."""
        return {leaf.key: leaf.codec.encode(leaf.rows(raw, self.engine.n)).clone() for leaf in self.engine.leaves}


class VectorEnv(EnvBase):
    """A VectorEngine with the TensorDict interface: batch `[n]`.

    A reset is never a step, and the last observation of an episode stays under `next`, in every autoreset mode of the
    engine. An engine that cannot reset some environments without the others (not `can_reset_some`) may need calls of
    `step` to reset one: to begin the next episode (NEXT_STEP), or until an episode that is cut short is over. Its
    environment has one more entry, `"_idle"` (bool `[n, 1]`): where it holds at the root, the step only resets, or
    waits for that. `reset` sets it for environments that could not be reset yet; a reset of all resets them at once.
    Such a row is not a step: its action is ignored, its reward is 0, and its `("next", "truncated")` is set so that a
    reset follows, which returns the first observation. `rollout` and the collectors leave these rows out; your own
    loops must, too.

    Raises RuntimeError for a step of an environment whose episode is over and that was not reset.

    >>> import gymnasium
    >>> from engram.envs.engines import GymVectorEngine
    >>> engine = GymVectorEngine(gymnasium.make_vec("CartPole-v1", num_envs=3), categorical=False)
    >>> VectorEnv(engine).rollout(2)["action"].shape
    torch.Size([3, 2, 2])
    """

    def __init__(self, engine: VectorEngine, *, device: torch.device | str | None = None) -> None:
        self._stepper = VectorStepper(engine)
        super().__init__(self._stepper.observation_spec, self._stepper.action_spec, batch_size=(engine.n,))
        if engine.reward_shape:
            self.reward_spec = Unbounded((engine.n, *engine.reward_shape))
        if device is not None:
            self.to(device)

    def vector_engine(self) -> VectorEngine | None:
        """The engine that steps with raw values, for collectors.

        None if a subclass has changed steps, or for vector rewards, which only the TensorDict interface supports.
        """
        is_raw = steps_as(self, VectorEnv) and not self._stepper.engine.reward_shape
        return self._stepper.engine if is_raw else None

    def _reset(self, mask: Tensor | None) -> TensorDictBase:
        return TensorDict(self._stepper.reset(mask), batch_size=self.batch_size, device=self.device)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        return TensorDict(self._stepper.step(td), batch_size=self.batch_size, device=self.device)

    def _set_seed(self, seed: int) -> None:
        self._stepper.seed(seed)

    def _set_same_seed(self, seed: int) -> None:
        self._stepper.seed_alike(seed)

    def _close(self) -> None:
        self._stepper.engine.close()


def _column(values: Array) -> Tensor:
    return torch.tensor(values, device="cpu").reshape(-1, 1)
