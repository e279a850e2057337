"""Rolling any environment forward through its TensorDict interface."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.collectors.extras import extras_of
from engram.collectors.frames import FrameQueue
from engram.collectors.rolled import Rolled
from engram.collectors.trajectories import FrameMarks
from engram.envs.base import reset_where, step_mdp
from engram.envs.policies import RandomPolicy, TensorDictPolicy


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
