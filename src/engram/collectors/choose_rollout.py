"""The choice of the fastest loop that an environment allows, and transforms that are applied to whole batches.

It imports all loops, each of which imports what they share from `rollout`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from engram.collectors.gym_rollout import GymRollout
from engram.collectors.rollout import Rollout, RolloutResult, TensorDictRollout, call_if_present, is_cpu
from engram.collectors.trajectories import StepTags
from engram.collectors.vector_rollout import VectorRollout
from engram.envs.engines import Autoreset
from engram.envs.policies import CallablePolicy, ObservationPolicy, RandomPolicy, TensorDictPolicy, is_hooked
from engram.processes.timeouts import CallTimer, TimedEnv
from engram.transforms.base import Deferred


def make_rollout(
    env: Any,
    policy: TensorDictPolicy,
    tags: StepTags,
    *,
    max_frames_per_traj: int | None,
    reset_when_done: bool = True,
    clock: CallTimer | None = None,
) -> Rollout:
    """The fastest rollout that `env` allows.

    That is with raw values, as a vector or one environment after the other; the same below transforms that can be
    applied to whole batches; or through its TensorDict interface. Steps and resets are entered in `clock`.

    Raises ValueError where environments that reset themselves are to go without resets, or cannot be cut one by one.
    """
    choice = _Choice(policy, tags, clock, reset_when_done)
    if not reset_when_done:
        engine = call_if_present(env, "vector_engine")
        if engine is not None and engine.autoreset is not Autoreset.DISABLED:
            raise ValueError("reset_when_done=False: these environments reset themselves; make them without autoreset")
        return choice.by_tensordicts(env, max_frames_per_traj)
    fast = choice.by_raw_values(env, max_frames_per_traj)
    if fast is None:
        fast = choice.with_deferred_transforms(env, max_frames_per_traj)
    return choice.by_tensordicts(env, max_frames_per_traj) if fast is None else fast


class _Choice(NamedTuple):
    """Makes each kind of rollout, with the settings that they share."""

    policy: TensorDictPolicy
    tags: StepTags
    clock: CallTimer | None
    resets: bool

    def by_tensordicts(self, env: Any, max_frames: int | None) -> Rollout:
        """A rollout through the TensorDict interface, which every environment has."""
        timed = env if self.clock is None else TimedEnv(env, self.clock, 0)
        return TensorDictRollout(
            timed, self.policy, self.tags, max_frames_per_traj=max_frames, reset_when_done=self.resets
        )

    def by_raw_values(self, env: Any, max_frames: int | None) -> Rollout | None:
        """A rollout with raw values; None where the environment has none, or is not in main memory."""
        engine, engines = call_if_present(env, "vector_engine"), call_if_present(env, "engines")
        clock = self.clock
        if engine is not None and is_cpu(env.device):
            timed: Any = engine if clock is None else TimedEnv(engine, clock, 0)
            return VectorRollout(env, timed, self.policy, self.tags, max_frames_per_traj=max_frames)
        if engines is not None and is_cpu(env.device):
            if clock is not None:
                engines = [TimedEnv(engine, clock, i) for i, engine in enumerate(engines)]
            return GymRollout(env, engines, self.policy, self.tags, max_frames_per_traj=max_frames)
        return None

    def with_deferred_transforms(self, env: Any, max_frames: int | None) -> Rollout | None:
        """A rollout with transforms of whole batches; None where a transform, or the policy, needs every step."""
        transforms = call_if_present(env, "deferrable_transforms")
        if transforms is None or not is_cpu(env.device):
            return None
        plan = [deferred for one in transforms if (deferred := one.deferred()) is not None]
        used = _keys_used_by(self.policy)
        if len(plan) < len(transforms) or used is None or used & {key for deferred in plan for key in deferred.writes}:
            return None
        limits = [n for n in (max_frames, *(deferred.limit for deferred in plan)) if n is not None]
        base, least = env.base_env, min(limits, default=None)
        if call_if_present(base, "deferrable_transforms") is not None:
            below = self.with_deferred_transforms(base, least)
        else:
            try:
                below = self.by_raw_values(base, least)
            except ValueError:  # it cannot be cut one by one: the TensorDict interface raises that where it has to
                return None
        if below is None:
            return None
        return DeferredTransformRollout(env, below, plan, self.tags, lambda: self.by_tensordicts(env, max_frames))


class DeferredTransformRollout:
    """Steps the environment below with raw values, and applies the transforms to its batches.

    Key by key the same as `TensorDictRollout`, which takes over for good, with new trajectories, once the environment
    has other transforms.
    """

    def __init__(
        self, env: Any, below: Rollout, plan: list[Deferred], tags: StepTags, make_fallback: Callable[[], Rollout]
    ) -> None:
        self._env, self._below, self._plan, self._tags = env, below, plan, tags
        self._make_fallback = make_fallback
        self._fallback: Rollout | None = None
        self._transforms = _transforms_of(env)
        self.is_random = below.is_random
        self.restart()

    def restart(self) -> None:
        self._below.restart()
        self._begins: Tensor | None = None  # bool [N]: whose next frame follows a reset; None: all
        if self._fallback is not None:
            self._fallback.restart()

    def collect(self, steps: int, *, random_steps: int) -> RolloutResult:
        if self._fallback is None and _transforms_of(self._env) != self._transforms:
            self._tags.ids.restart()
            self._fallback = self._make_fallback()
        if self._fallback is not None:
            return self._fallback.collect(steps, random_steps=random_steps)
        try:
            batch, error = self._below.collect(steps, random_steps=random_steps)
            done = batch.get(("next", "done")).reshape(-1, batch.shape[-1])
            starts = torch.ones_like(done)
            starts[:, 1:] = done[:, :-1]
            if self._begins is not None:
                starts[:, 0] = self._begins
            self._begins = done[:, -1].clone()
            for deferred in self._plan:
                deferred.apply(batch, starts)
        except BaseException:
            self.restart()
            raise
        if error is not None:
            self.restart()
        return RolloutResult(batch, error)


def _transforms_of(env: Any) -> list[Any]:
    """The identities and limits of the transforms of an environment and of those below it, to notice changes."""
    transforms = call_if_present(env, "deferrable_transforms")
    if transforms is None:
        return []
    return [[(id(one), getattr(one, "max_steps", None)) for one in transforms], *_transforms_of(env.base_env)]


def _keys_used_by(policy: TensorDictPolicy) -> set[Any] | None:
    """The entries that a policy reads or writes; None where they are not known."""
    if isinstance(policy, RandomPolicy):
        return set()
    if isinstance(policy, ObservationPolicy):
        return {policy.in_key}
    module = policy.function if isinstance(policy, CallablePolicy) else None
    if not isinstance(module, TensorDictModuleBase):
        return None
    members = [m for m in module.modules() if isinstance(m, TensorDictModuleBase)]
    if any(type(m).__module__.split(".")[0] != "tensordict" or is_hooked(m) for m in members):
        return None  # a class of another package may read more than its keys
    return {*module.in_keys, *module.out_keys}
