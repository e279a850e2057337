"""What a rollout is, the rollout of any environment through its TensorDict interface, and what the others share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.collectors.trajectories import StepTags
from engram.envs.base import FrameQueue, reset_where, step_mdp
from engram.envs.policies import FLAGS, RandomPolicy, TensorDictPolicy, zero_outputs

Array = np.ndarray[Any, Any]


class RolloutResult(NamedTuple):
    """A batch; with an `error`, the whole rows `[*batch_size, fewer steps]` that were stepped before it.

    Without a whole row a rollout raises the error itself. After an error it has restarted.
    """

    batch: TensorDictBase
    error: BaseException | None = None


class Rollout(Protocol):
    """Steps environments forward, batch after batch; `is_random` says that all actions are random."""

    is_random: bool

    def collect(self, steps: int, *, random_steps: int) -> RolloutResult:
        """A batch `[*batch_size, steps]` in TED; the first `random_steps` of each environment have random actions."""

    def restart(self) -> None:
        """Resets every environment before its next step; frames that wait for the next batch are dropped."""


class TensorDictRollout:
    """Steps any environment with a policy on TensorDicts; episodes go on from one batch to the next.

    Resets wait until the state is needed: the last state of a batch stays under `next`, and nothing is reset twice.
    """

    is_random = False  # whatever the policy: the environment may hold one

    def __init__(
        self,
        env: Any,
        policy: TensorDictPolicy,
        tags: StepTags,
        *,
        max_frames_per_traj: int | None,
        reset_when_done: bool = True,
    ) -> None:
        self._env = env
        self._tags = tags
        self._policy = policy
        self._random = RandomPolicy(env.action_spec)
        self._max_frames = max_frames_per_traj
        self._state: TensorDictBase | None = None
        self._resets = reset_when_done
        self._ended: Tensor | None = None
        self._lengths = torch.zeros(*env.batch_size, 1, dtype=torch.int64)
        self._frames = FrameQueue(env.batch_size)
        self._zero_outputs: TensorDictBase | None = None

    def restart(self) -> None:
        self._state = None
        self._lengths.zero_()
        self._frames = FrameQueue(self._env.batch_size)

    def collect(self, steps: int, *, random_steps: int) -> RolloutResult:
        frames, version = self._frames, self._tags.version
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
        return RolloutResult(self._batch_of(frames, steps), error)

    def _batch_of(self, frames: FrameQueue, steps: int) -> TensorDictBase:
        try:
            batch, versions = frames.take(steps)
        except BaseException:
            self.restart()
            raise
        done = batch.get(("next", "done")).reshape(-1, steps).cpu().numpy()
        ends = done if self._resets else np.zeros_like(done)
        for name, tag in self._tags.tag(ends, batch.shape, lambda: versions).items():
            batch.set(("collector", name), tag)
        return batch

    def _step(self, *, is_random: bool) -> TensorDictBase:
        td = self._env.step(self._with_action(self._ready_state(), is_random=is_random))
        following = td.get("next")
        if self._max_frames is not None:
            self._truncate(td, following, self._max_frames)
        self._ended = following.get("done")
        self._state = step_mdp(td)
        return td

    def _ready_state(self) -> TensorDictBase:
        if self._state is None:
            return self._env.reset()
        if self._resets and self._ended is not None and bool(self._ended.any()):
            return reset_where(self._env, self._state, self._ended)
        return self._state.copy()

    def _with_action(self, state: TensorDictBase, *, is_random: bool) -> TensorDictBase:
        if is_random:
            if self._zero_outputs is None:
                self._zero_outputs = zero_outputs(self._policy, state)
            td = self._random(state.update(self._zero_outputs.clone()))
        else:
            td = self._policy(state)
        dtype = self._env.action_spec.dtype
        action = td.get("action")
        return td if dtype is None or action.dtype == dtype else td.set("action", action.to(dtype))

    def _truncate(self, td: TensorDictBase, following: TensorDictBase, max_frames: int) -> None:
        self._lengths += 1
        done = following.get("done")
        too_long = (self._lengths >= max_frames).to(done.device).reshape(done.shape)
        truncated = following.get("truncated", None)  # some environments have no such flag
        following.set("truncated", too_long if truncated is None else truncated | too_long)
        if td.get("truncated", None) is None:
            td.set("truncated", torch.zeros_like(done))
        following.set("done", done | too_long)
        self._lengths[following.get("done").cpu().reshape(self._lengths.shape)] = 0


def ted_batch(
    before: Mapping[Any, Any],
    after: Mapping[Any, Any],
    outcomes: Mapping[str, Array],
    tags: Mapping[str, Tensor],
    policy_outputs: TensorDictBase | None,
    *,
    shape: torch.Size,
    device: torch.device | None,
) -> TensorDictBase:
    """Puts entries `[*shape, ...]` together into a batch in TED.

    `before` is what stands at the root (observations, action), `after` the observations under `"next"`, `outcomes` the
    reward and the flags, `tags` what goes under `"collector"`. `policy_outputs` has what the policy wrote besides.
    """

    def of_batch(entries: dict[Any, Any]) -> TensorDict:
        return TensorDict(entries, batch_size=shape, device=device)

    flags = {key: torch.from_numpy(np.zeros((*shape, 1), dtype=np.bool_)) for key in FLAGS}
    columns = {key: torch.from_numpy(column) for key, column in outcomes.items()}
    following = of_batch({**after, **columns})
    td = of_batch({**before, **flags, "collector": of_batch({**tags}), "next": following})
    return td if policy_outputs is None else policy_outputs.update(td)


def call_if_present(env: Any, name: str) -> Any:
    """Calls the method `name` of an environment of any library; None where its class has no such method.

    The class is looked at, because other libraries' environments look up unknown names in places of their own.
    """
    method = getattr(type(env), name, None)
    return None if method is None else method(env)


def is_cpu(device: torch.device | None) -> bool:
    """Whether tensors on `device` are in main memory, as those without a device (None) are."""
    return device is None or device.type == "cpu"
