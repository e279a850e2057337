"""Which loop an environment gets, and transforms that follow whole batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from engram.collectors.gym_rollout import GymRoller
from engram.collectors.rollout import Rolled, Roller, TensorDictRoller, ask, is_cpu
from engram.collectors.trajectories import FrameMarks
from engram.collectors.vector_rollout import BatchRoller
from engram.envs.batched import Autoreset
from engram.envs.modules import is_hooked
from engram.envs.policies import CallablePolicy, ObservationPolicy, RandomPolicy, TensorDictPolicy
from engram.step_clocks import StepClock, Timed
from engram.transforms.afterwards import Afterwards, afterwards_of

RawRollers = Callable[[Any, TensorDictPolicy, "int | None", FrameMarks], Any]
StepRollers = Callable[[Any, "int | None"], TensorDictRoller]


def roller_for(
    env: Any,
    policy: TensorDictPolicy,
    max_frames_per_traj: int | None,
    marks: FrameMarks,
    *,
    reset_when_done: bool = True,
    clock: StepClock | None = None,
) -> Roller:
    """The fastest roller that `env` allows: stepped together, one by one, with transforms that follow, or through its
    TensorDict interface.

    Steps and resets are entered in `clock`. Raises ValueError where environments that reset themselves are asked not
    to, or cannot be cut one by one.
    """

    def by_steps(env: Any, limit: int | None) -> TensorDictRoller:
        timed = env if clock is None else Timed(env, clock, 0)
        return TensorDictRoller(timed, policy, limit, marks, reset_when_done=reset_when_done)

    engine = ask(env, "batch_engine")
    if not reset_when_done:
        if engine is not None and engine.autoreset is not Autoreset.DISABLED:
            raise ValueError("reset_when_done=False: these environments reset themselves; make them without autoreset")
        return by_steps(env, max_frames_per_traj)
    raw = partial(_raw_roller, clock)
    fast = raw(env, policy, max_frames_per_traj, marks)
    if fast is None:
        fast = later_roller(env, policy, max_frames_per_traj, marks, raw, by_steps)
    return by_steps(env, max_frames_per_traj) if fast is None else fast


def _raw_roller(
    clock: StepClock | None, env: Any, policy: TensorDictPolicy, limit: int | None, marks: FrameMarks
) -> Roller | None:
    engine, engines = ask(env, "batch_engine"), ask(env, "engines")
    if engine is not None and is_cpu(env.device):
        timed: Any = engine if clock is None else Timed(engine, clock, 0)
        return BatchRoller(env, timed, policy, limit, marks)
    if engines is not None and is_cpu(env.device):
        if clock is not None:
            engines = [Timed(engine, clock, i) for i, engine in enumerate(engines)]
        return GymRoller(env, engines, policy, limit, marks)
    return None


class LaterRoller:
    """Steps the environment below with raw values, and lets the transforms change its batches.

    Key by key what `TensorDictRoller` gives, which takes over for good, with new trajectories, once the environment has
    got other transforms.
    """

    def __init__(
        self,
        env: Any,
        limit: int | None,
        marks: FrameMarks,
        below: Any,
        plan: list[Afterwards],
        by_steps: StepRollers,
    ) -> None:
        self._env, self._limit, self._marks, self._make_by_steps = env, limit, marks, by_steps
        self._below, self._plan, self._made_for = below, plan, _signature(env)
        self._by_steps: TensorDictRoller | None = None
        self.is_random = below.is_random
        self.restart()

    def restart(self) -> None:
        """Every environment is reset before its next step."""
        self._below.restart()
        self._begins: Tensor | None = None  # bool [N]: whose next frame follows a reset; None: all
        if self._by_steps is not None:
            self._by_steps.restart()

    def roll(self, steps: int, random_steps: int) -> Rolled:
        """`[*batch_size, steps]` in TED, the first `random_steps` with random actions."""
        if self._by_steps is None and _signature(self._env) != self._made_for:
            self._marks.ids.restart()
            self._by_steps = self._make_by_steps(self._env, self._limit)
        if self._by_steps is not None:
            return self._by_steps.roll(steps, random_steps)
        try:
            batch, error = self._below.roll(steps, random_steps)
            done = batch.get(("next", "done")).reshape(-1, batch.shape[-1])
            starts = torch.ones_like(done)
            starts[:, 1:] = done[:, :-1]
            if self._begins is not None:
                starts[:, 0] = self._begins
            self._begins = done[:, -1].clone()
            for part in self._plan:
                part.apply(batch, starts)
        except BaseException:
            self.restart()
            raise
        if error is not None:
            self.restart()
        return Rolled(batch, error)


def _signature(env: Any) -> list[Any]:
    parts = ask(env, "later_parts")
    return [] if parts is None else [[(id(p), getattr(p, "max_steps", None)) for p in parts], *_signature(env.base_env)]


def later_roller(
    env: Any,
    policy: TensorDictPolicy,
    limit: int | None,
    marks: FrameMarks,
    raw: RawRollers,
    by_steps: StepRollers,
) -> LaterRoller | None:
    """A roller for an environment with transforms that can wait; None where one of them, or the policy, cannot.

    `raw` makes rollers that step an environment with raw values, or None where it has none; `by_steps` those that take
    over where the transforms have changed.
    """
    parts = ask(env, "later_parts")
    if parts is None or not is_cpu(env.device):
        return None
    plan = [later for part in parts if (later := afterwards_of(part)) is not None]
    used = _used_by(policy)
    if len(plan) < len(parts) or used is None or used & {key for part in plan for key in part.writes}:
        return None
    limits = [n for n in (limit, *(part.limit for part in plan)) if n is not None]
    base, least = env.base_env, min(limits, default=None)
    if ask(base, "later_parts") is not None:
        below = later_roller(base, policy, least, marks, raw, by_steps)
    else:
        try:
            below = raw(base, policy, least, marks)
        except ValueError:  # it cannot be cut one by one, and tells so where it is asked to
            return None
    return None if below is None else LaterRoller(env, limit, marks, below, plan, by_steps)


def _used_by(policy: TensorDictPolicy) -> set[Any] | None:
    """The entries that a policy reads or writes; None: nobody knows."""
    if isinstance(policy, RandomPolicy):
        return set()
    if isinstance(policy, ObservationPolicy):
        return {policy.in_key}
    module = policy.function if isinstance(policy, CallablePolicy) else None
    if not isinstance(module, TensorDictModuleBase):
        return None
    members = [m for m in module.modules() if isinstance(m, TensorDictModuleBase)]
    if any(type(m).__module__.split(".")[0] != "tensordict" or is_hooked(m) for m in members):
        return None  # a class of somebody else's may read more than its keys
    return {*module.in_keys, *module.out_keys}
