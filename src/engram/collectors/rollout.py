"""Stepping environments forward, batch after batch, through their TensorDict interface."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.collectors.trajectories import FrameMarks
from engram.envs.mdp import reset_where, stack_steps, step_mdp
from engram.envs.policies import CallablePolicy, RandomPolicy, TensorDictPolicy
from engram.transforms.in_env import IDLE


class Rolled(NamedTuple):
    """A batch; with an `error`, the whole rows `[*batch_size, fewer steps]` that were stepped before it.

    A roller that has stepped no whole row raises the error itself. Either way it has restarted then.
    """

    batch: TensorDictBase
    error: BaseException | None = None


class Roller(Protocol):
    """Steps environments forward, batch after batch; `is_random` says that only random actions are taken."""

    is_random: bool

    def roll(self, steps: int, random_steps: int) -> Rolled:
        """`[*batch_size, steps]` in TED, the first `random_steps` with random actions."""

    def restart(self) -> None:
        """Every environment is reset before its next step."""


def ask(env: Any, name: str) -> Any:
    """What the method `name` of an environment gives; None where its class has none.

    The class is looked at, because environments of other libraries look for unknown names in places of their own.
    """
    method = getattr(type(env), name, None)
    return None if method is None else method(env)


def is_cpu(device: torch.device | None) -> bool:
    """Whether tensors there are in main memory; None is no device at all, which is."""
    return device is None or device.type == "cpu"


def extras_of(policy: TensorDictPolicy, td: TensorDictBase) -> TensorDictBase:
    """Zeros for every entry that `policy` adds to `td` besides the action, under `"next"` too.

    Random steps carry them, so that all batches of a collector have the same keys. The policy is called once, on a
    copy; torch's random numbers are as they were afterwards.
    """
    if not isinstance(policy, CallablePolicy):
        return td.empty()
    with torch.random.fork_rng():
        out = policy(td.clone())
    known = set(td.keys(True, True)) | {"action"}
    return out.select(*[key for key in out.keys(True, True) if key not in known]).apply(torch.zeros_like)


class TensorDictRoller:
    """Steps `env` with `policy`; episodes go on from one batch to the next.

    Resets wait until the state is needed: the last state of a batch stays under `next`, and nothing is reset twice.
    """

    is_random = False  # whatever the policy: the environment may hold one

    def __init__(
        self,
        env: Any,
        policy: TensorDictPolicy,
        max_frames_per_traj: int | None,
        marks: FrameMarks,
        *,
        reset_when_done: bool = True,
    ) -> None:
        self._env = env
        self._marks = marks
        self._policy = policy
        self._random = RandomPolicy(env.action_spec)
        self._limit = max_frames_per_traj
        self._state: TensorDictBase | None = None
        self._resets = reset_when_done
        self._over: Tensor | None = None
        self._lengths = torch.zeros(*env.batch_size, 1, dtype=torch.int64)
        self._frames = FrameQueue(env.batch_size)
        self._extras: TensorDictBase | None = None

    def restart(self) -> None:
        """Every environment is reset before its next step; frames that wait for the next batch are dropped."""
        self._state = None
        self._lengths.zero_()
        self._frames = FrameQueue(self._env.batch_size)

    def roll(self, steps: int, random_steps: int) -> Rolled:
        """`[*batch_size, steps]` in TED, the first `random_steps` with random actions."""
        frames, version = self._frames, self._marks.version
        error: BaseException | None = None
        try:
            while (least := frames.least) < steps:
                frames.add(self._step(is_random=least < random_steps), version)
        except BaseException as failure:
            error = failure
            self.restart()  # no trajectory may go on across what is lost
            steps = min(steps, frames.least)
            if steps == 0:
                raise
        return Rolled(self._taken(frames, steps), error)

    def _taken(self, frames: FrameQueue, steps: int) -> TensorDictBase:
        try:
            batch, versions = frames.take(steps)
        except BaseException:
            self.restart()
            raise
        done = batch.get(("next", "done")).reshape(-1, steps).cpu().numpy()
        ends = done if self._resets else np.zeros_like(done)
        for name, entry in self._marks.entries(ends, batch.shape, lambda: versions).items():
            batch.set(("collector", name), entry)
        return batch

    def _step(self, is_random: bool) -> TensorDictBase:
        td = self._env.step(self._with_action(self._ready_state(), is_random))
        following = td.get("next")
        if self._limit is not None:
            self._truncate(td, following, self._limit)
        self._over = following.get("done")
        self._state = step_mdp(td)
        return td

    def _ready_state(self) -> TensorDictBase:
        if self._state is None:
            return self._env.reset()
        if self._resets and self._over is not None and bool(self._over.any()):
            return reset_where(self._env, self._state, self._over)
        return self._state.copy()

    def _with_action(self, state: TensorDictBase, is_random: bool) -> TensorDictBase:
        if is_random:
            if self._extras is None:
                self._extras = extras_of(self._policy, state)
            td = self._random(state.update(self._extras.clone()))
        else:
            td = self._policy(state)
        dtype = self._env.action_spec.dtype
        action = td.get("action")
        return td if dtype is None or action.dtype == dtype else td.set("action", action.to(dtype))

    def _truncate(self, td: TensorDictBase, following: TensorDictBase, limit: int) -> None:
        self._lengths += 1
        done = following.get("done")
        too_long = (self._lengths >= limit).to(done.device).reshape(done.shape)
        truncated = following.get("truncated", None)  # some environments know no truncation
        following.set("truncated", too_long if truncated is None else truncated | too_long)
        if td.get("truncated", None) is None:
            td.set("truncated", torch.zeros_like(done))
        following.set("done", done | too_long)
        self._lengths[following.get("done").cpu().reshape(self._lengths.shape)] = 0


class FrameQueue:
    """Takes what calls of `env.step` gave, and cuts batches of whole rows out of it.

    A row whose `"_idle"` holds was a reset and is no frame: other environments then have more frames than it, which
    open the next batch, in their order.
    """

    def __init__(self, batch_size: torch.Size) -> None:
        self._batch_size = batch_size
        self._steps: list[TensorDictBase] = []
        self._versions: list[int] = []
        self._waits: list[Tensor] = []  # by call, once there are marks: bool [environments], a frame nobody took yet
        self._counts = torch.zeros(batch_size.numel(), dtype=torch.int64)

    @property
    def least(self) -> int:
        """So many frames wait of each environment."""
        return int(self._counts.min()) if self._waits else len(self._steps)

    def add(self, td: TensorDictBase, version: int) -> None:
        """Takes one call, which had that version of the policy."""
        self._versions.append(version)
        idle = td.get(IDLE, None)
        if idle is None:
            self._steps.append(td)
            return
        self._steps.append(td.exclude(IDLE, ("next", IDLE)))
        self._waits.append(~idle.reshape(-1).cpu())
        self._counts += self._waits[-1]

    def take(self, steps: int) -> tuple[TensorDictBase, np.ndarray[Any, Any]]:
        """The first `steps` frames of each environment, `[*batch_size, steps]`, and their versions `[envs, steps]`."""
        batch = stack_steps(self._steps, len(self._batch_size))
        versions = torch.tensor(self._versions).expand(self._counts.numel(), len(self._versions))
        if not self._waits:
            self._steps, self._versions = [], []
            return batch, versions.numpy()
        waits = torch.stack(self._waits, -1)
        taken = waits & (waits.cumsum(-1) <= steps)
        self._drop(waits & ~taken, steps)
        rows, columns = taken.nonzero(as_tuple=True)
        chosen = batch.reshape(taken.shape)[rows, columns].reshape(*self._batch_size, steps)
        return chosen, versions[rows, columns].reshape(-1, steps).numpy()

    def _drop(self, waits: Tensor, steps: int) -> None:
        some = waits.any(0)
        first = int(some.int().argmax()) if bool(some.any()) else len(self._steps)
        del self._steps[:first], self._versions[:first]
        self._waits = list(waits[:, first:].unbind(-1))
        self._counts -= steps
