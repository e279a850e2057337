"""Which roller steps an environment: the environment is asked what it can be stepped by."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from engram.collectors.asking import ask
from engram.collectors.batched import BatchRoller
from engram.collectors.devices import is_cpu
from engram.collectors.later import later_roller
from engram.collectors.raw import GymRoller
from engram.collectors.rolled import Rolled
from engram.collectors.stepped import TensorDictRoller
from engram.collectors.trajectories import FrameMarks
from engram.envs.engines import Autoreset
from engram.envs.policies import TensorDictPolicy
from engram.processes.timeouts import CallTimer, TimedEnv


class Roller(Protocol):
    """Steps environments forward, batch after batch; `is_random` says that only random actions are taken."""

    is_random: bool

    def roll(self, steps: int, random_steps: int) -> Rolled:
        """`[*batch_size, steps]` in TED, the first `random_steps` with random actions."""

    def restart(self) -> None:
        """Every environment is reset before its next step."""


def roller_for(
    env: Any,
    policy: TensorDictPolicy,
    max_frames_per_traj: int | None,
    marks: FrameMarks,
    *,
    reset_when_done: bool = True,
    clock: CallTimer | None = None,
) -> Roller:
    """The fastest roller that `env` allows: stepped together, one by one, with transforms that follow, or through its
    TensorDict interface.

    Steps and resets are entered in `clock`. Raises ValueError where environments that reset themselves are asked not
    to, or cannot be cut one by one.
    """

    def by_steps(env: Any, limit: int | None) -> TensorDictRoller:
        timed = env if clock is None else TimedEnv(env, clock, 0)
        return TensorDictRoller(timed, policy, limit, marks, reset_when_done=reset_when_done)

    engine = ask(env, "vector_engine")
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
    clock: CallTimer | None, env: Any, policy: TensorDictPolicy, limit: int | None, marks: FrameMarks
) -> Roller | None:
    engine, engines = ask(env, "vector_engine"), ask(env, "engines")
    if engine is not None and is_cpu(env.device):
        timed: Any = engine if clock is None else TimedEnv(engine, clock, 0)
        return BatchRoller(env, timed, policy, limit, marks)
    if engines is not None and is_cpu(env.device):
        if clock is not None:
            engines = [TimedEnv(engine, clock, i) for i, engine in enumerate(engines)]
        return GymRoller(env, engines, policy, limit, marks)
    return None
