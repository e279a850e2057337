"""The protocol of rollouts, the rollout of any environment through its TensorDict interface, and shared functions."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.collectors.stats import EpisodeStats, StepsWay
from engram.collectors.trajectories import EpisodeSteps, StepTags
from engram.data.replay_buffers.buffers.batch_writer import ColumnRows
from engram.envs.action_checks import EntriesCheck
from engram.envs.base import (
    EnvBase,
    FrameQueue,
    StepRecord,
    given_entries,
    lost_episodes,
    own_reset,
    reset_where,
    returns_own_tensors,
    step_mdp_of,
)
from engram.envs.policies import FLAGS, TensorDictPolicy, random_policy, zero_outputs
from engram.processes.timeouts import CallTimer, TimedEnv
from engram.pytree import KeyPath
from engram.store.layout import tensordict_of

Array = np.ndarray[Any, Any]


class Steps(Protocol):
    """Steps `[*batch_size, time]` that a rollout has collected; a batch of them is made when it is wanted."""

    shape: torch.Size

    def count_episodes(self, episodes: EpisodeStats) -> None:
        """Adds the rewards, and where episodes end."""

    def count_steps(self, counter: EpisodeSteps) -> None:
        """Adds `step_count` at the root and under `next`, unless there is such an entry."""

    def append_to(self, rows: ColumnRows, places: ColumnPlaces) -> bool:
        """Appends the columns in these places to rows. False: nothing was written, as there are not exactly these."""

    def batch(self) -> TensorDictBase:
        """A batch in TED."""


class RolloutResult(NamedTuple):
    """Steps; with an `error`, the whole rows `[*batch_size, fewer steps]` that were stepped before it.

    Without a whole row a rollout raises the error itself. After an error it has restarted.
    """

    steps: Steps
    error: BaseException | None = None


class BatchSteps:
    """Steps that are a batch already."""

    def __init__(self, batch: TensorDictBase) -> None:
        self._batch = batch
        self.shape = batch.shape

    def count_episodes(self, episodes: EpisodeStats) -> None:
        episodes.add_batch(self._batch)

    def count_steps(self, counter: EpisodeSteps) -> None:
        batch = self._batch
        if batch.get("step_count", None) is None:
            done = batch.get(("next", "done")).reshape(-1, batch.shape[-1]).cpu().numpy()
            count = torch.from_numpy(counter.before(done)).reshape(*batch.shape, 1)
            batch.set("step_count", count).set(("next", "step_count"), count + 1)

    def append_to(self, rows: ColumnRows, places: ColumnPlaces) -> bool:
        return False

    def batch(self) -> TensorDictBase:
        return self._batch


class Rollout(Protocol):
    """Steps environments forward, batch after batch; `is_random` says that all actions are random."""

    is_random: bool

    @property
    def steps_way(self) -> StepsWay:
        """Which way the steps of the last batch went."""

    def collect(self, steps: int, *, random_steps: int) -> RolloutResult:
        """The next steps `[*batch_size, steps]`; the first `random_steps` of each environment have random actions."""

    def restart(self) -> None:
        """Resets every environment before its next step; frames that wait for the next batch are dropped."""


class TensorDictRollout:
    """Steps any environment with a policy on TensorDicts; episodes go on from one batch to the next.

    Resets wait until the state is needed: the last state of a batch stays under `next`, and nothing is reset twice.
    """

    def __init__(
        self,
        env: Any,
        policy: TensorDictPolicy,
        tags: StepTags,
        *,
        max_frames_per_traj: int | None,
        reset_when_done: bool = True,
        clock: CallTimer | None = None,
    ) -> None:
        self.is_random = False  # whatever the policy: the environment may hold one
        self.steps_way = StepsWay("tensordicts", "the environment is stepped through its TensorDict interface")
        self._env = env if clock is None else TimedEnv(env, clock, 0)
        self._is_own, self._given = returns_own_tensors(env), given_entries(env)
        self._tags = tags
        self._policy, self._weights = policy, tags.weights
        self._random = random_policy(env)
        self._check = EntriesCheck(env)
        self._step_mdp = step_mdp_of(env)
        self._max_frames = max_frames_per_traj
        self._state: TensorDictBase | None = None
        self._resets = reset_when_done
        self._ended: Tensor | None = None
        self._lost: Array | None = None  # the environments whose episode the last step only found to have broken off
        self._agents_end = False
        self._lengths = torch.zeros(*env.batch_size, 1, dtype=torch.int64, device="cpu")
        self._frames = FrameQueue(env.batch_size)
        self._zero_outputs: TensorDictBase | None = None

    def restart(self) -> None:
        self._state = None
        self._lengths.zero_()
        self._frames = FrameQueue(self._env.batch_size)

    def collect(self, steps: int, *, random_steps: int) -> RolloutResult:
        frames = self._frames
        error: BaseException | None = None
        try:
            while (least := frames.least) < steps:
                frames.add(*self._step(least, is_random=least < random_steps))
                if self._lost is not None:
                    for env in frames.cut(self._lost):
                        self._tags.cut(env)
        except BaseException as failure:
            error = failure
            self.restart()  # no trajectory may go on across what is lost
            steps = min(steps, frames.least)
            if steps == 0:
                raise
        return RolloutResult(BatchSteps(self._batch_of(frames, steps)), error)

    def _batch_of(self, frames: FrameQueue, steps: int) -> TensorDictBase:
        try:
            batch, versions = frames.take(steps)
        except BaseException:
            self.restart()
            raise
        done = batch.get(("next", "done")).reshape(-1, steps).cpu().numpy()
        ends = done if self._resets else np.zeros_like(done)
        for name, tag in self._tags.tag(ends, batch.shape, lambda: versions).items():
            batch.set(("collector", name), torch.from_numpy(tag))
        return batch

    def _step(self, number: int, *, is_random: bool) -> tuple[TensorDictBase, int]:
        """Makes a step of the batch; returns it, and the version of the policy that acted."""
        is_first = self._state is None
        record = StepRecord(self._ready_state(), self._given)
        acted, version = self._with_action(record.shown, number, is_random=is_random)
        record.add_outputs(acted)
        td = record.of(self._env.step(acted), is_own=self._is_own)
        following = td.get("next")
        if following.get("done", None) is None:  # another library's, where agents have flags of their own
            self._agents_end = True
            _set_root_flags(td)
        self._lost = lost_episodes(td, None if is_first else self._ended)
        if self._max_frames is not None:
            self._truncate(td, following, self._max_frames)
        self._ended = following.get("done")
        self._state = self._step_mdp(td)
        return td, version

    def _ready_state(self) -> TensorDictBase:
        if self._state is None:
            return own_reset(self._env)
        if self._resets and self._ended is not None and bool(self._ended.any()):
            return self._reset_where(self._state, self._ended)
        return self._state

    def _reset_where(self, state: TensorDictBase, ended: Tensor) -> TensorDictBase:
        if not self._agents_end:
            return reset_where(self._env, state, ended)
        masks = _reset_masks(state, ended)
        return reset_where(self._env, state.copy().update(masks), ended).exclude(*masks.keys(True, True))

    def _with_action(self, state: TensorDictBase, number: int, *, is_random: bool) -> tuple[TensorDictBase, int]:
        weights = self._weights
        if is_random:
            if self._zero_outputs is None:
                self._zero_outputs = zero_outputs(self._policy, state)
            td, version = self._random(state.update(self._zero_outputs.clone())), weights.version
        else:
            with weights.call_lock:
                version = weights.begin_call()
                td = self._policy(state)
            self._check.require(td, number)
        dtype = self._env.action_spec.dtype
        action = td.get("action", None)  # None: of another name
        if dtype is not None and action is not None and action.dtype != dtype:
            td.set("action", action.to(dtype))
        return td, version

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


def _set_root_flags(td: TensorDictBase) -> None:
    """Puts flags at the root and under `next` that hold where they do for any agent. KeyError: there are none."""
    following = td.get("next")
    done = _any_agent(following, "done")
    if done is None:
        raise KeyError(
            f"the environment gave no 'done', at the root or of agents, but {sorted(map(str, following.keys()))}"
        )
    terminated, truncated = _any_agent(following, "terminated"), _any_agent(following, "truncated")
    truncated = torch.zeros_like(done) if truncated is None else truncated
    following.set("done", done).set("terminated", done & ~truncated if terminated is None else terminated)
    following.set("truncated", truncated)
    for flag in FLAGS:
        before = _any_agent(td.exclude("next"), flag)
        td.set(flag, torch.zeros_like(done) if before is None else before)


def _any_agent(td: TensorDictBase, flag: str) -> Tensor | None:
    """bool `[*batch, 1]`: whether the flag holds for any agent; None where no agent has it."""
    flags = [td.get(key) for key in td.keys(True, True) if isinstance(key, tuple) and key[-1] == flag]
    if not flags:
        return None
    return torch.cat([leaf.reshape(*td.batch_size, -1) for leaf in flags], -1).any(-1, keepdim=True)


def _reset_masks(td: TensorDictBase, mask: Tensor) -> TensorDictBase:
    """`_reset` for the agents that have a `done` of their own, beside which other libraries look for it."""
    masks = td.empty()
    for key in td.keys(True, True):
        if isinstance(key, tuple) and key[-1] == "done":
            done = td.get(key)
            flat = mask.reshape(*td.batch_size, *(1 for _ in range(done.ndim - td.ndim)))
            masks.set((*key[:-1], "_reset"), flat.expand(done.shape).clone())
    return masks


class ColumnPlaces:
    """Where `StepColumns` has the entries with these paths; `left_out` is one of them that it does not have."""

    def __init__(self, paths: Sequence[KeyPath], left_out: KeyPath | None = None) -> None:
        self.paths = [None if path == left_out else path for path in paths]
        self.places = [_LEFT_OUT if path == left_out else _place_of(path) for path in paths]
        self.wanted = len(self.places) - self.places.count(_LEFT_OUT)


OUTCOMES = ("reward", "done", "terminated", "truncated")
_BEFORE, _FLAGS, _TAGS, _AFTER, _OUTCOMES = range(5)  # the parts of the columns
_LEFT_OUT = (5, "")
_NOTHING = {"": None}


def _place_of(path: KeyPath) -> tuple[int, Any]:
    """Which part has the entry with a path, and under which key."""
    root, below = path[0], path[1] if len(path) == 2 else path[1:]
    if root == "next" and below:
        return (_OUTCOMES if below in OUTCOMES else _AFTER), below
    if root == "collector" and below:
        return _TAGS, below
    return (_FLAGS if path[0] in FLAGS else _BEFORE), path[0] if len(path) == 1 else path


class StepColumns:
    """Steps whose entries lie in columns, arrays or tensors `[*shape, ...]` by key.

    Args:
        before: what stands at the root (observations, action).
        after: the observations under `"next"`.
        outcomes: `[*shape, 1]`, the reward and the flags.
        tags: arrays, what goes under `"collector"`.
        policy_outputs: what the policy wrote besides.
        is_kept: whether the memory is nobody else's, so that a batch can be made of it; else it is copied.
        shares_after: whether observations under `"next"` are those before the next steps, in one memory: they are
            copied for a batch, and not where only a storage reads them.
        flags: those at the root, never set, `[*shape, 1]`; None: they are made for a batch.
    """

    def __init__(
        self,
        before: Mapping[Any, Any],
        after: Mapping[Any, Any],
        outcomes: Mapping[str, Any],
        tags: Mapping[str, Array],
        policy_outputs: TensorDictBase | None,
        *,
        shape: torch.Size,
        device: torch.device | None,
        is_kept: bool = True,
        shares_after: bool = False,
        flags: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._before, self._after, self._outcomes, self._tags = before, after, outcomes, tags
        self._policy_outputs, self._flags = policy_outputs, flags
        self._device, self._is_kept, self._shares_after = device, is_kept, shares_after
        self.shape = shape

    def count_episodes(self, episodes: EpisodeStats) -> None:
        rows = (-1, self.shape[-1])
        reward, done = np.asarray(self._outcomes["reward"]), np.asarray(self._outcomes["done"])
        episodes.add(reward.reshape(rows), done.reshape(rows))

    def count_steps(self, counter: EpisodeSteps) -> None:
        if "step_count" not in self._before:
            done = np.asarray(self._outcomes["done"]).reshape(-1, self.shape[-1])
            count = counter.before(done).reshape(*self.shape, 1)
            self._before = {**self._before, "step_count": count}
            self._after = {**self._after, "step_count": count + 1}

    def append_to(self, rows: ColumnRows, places: ColumnPlaces) -> bool:
        columns = self._columns(places)
        if columns is None:
            return False
        dims, frames = len(self.shape), self.shape.numel()
        if dims != rows.ndim:
            lead = (frames,) if rows.ndim == 1 else (frames // self.shape[-1], self.shape[-1])
            columns = [None if column is None else column.reshape(*lead, *column.shape[dims:]) for column in columns]
        return rows.append(columns)

    def _columns(self, places: ColumnPlaces) -> list[Any] | None:
        """The columns in these places, `[*batch_size, time, ...]`; None where there are others."""
        if self._policy_outputs is not None:
            return None
        flags = dict.fromkeys(FLAGS, _no_flags(self.shape))
        parts: tuple[Mapping[Any, Any], ...] = (self._before, flags, self._tags, self._after, self._outcomes)
        if sum(map(len, parts)) != places.wanted:
            return None
        parts = (*parts, _NOTHING)
        try:
            return [parts[part][key] for part, key in places.places]
        except KeyError:
            return None

    def batch(self) -> TensorDictBase:
        if not self._is_kept:
            self._before, self._after = _copied(self._before), _copied(self._after)
            self._outcomes, self._tags = _copied(self._outcomes), _copied(self._tags)
            self._is_kept, self._shares_after = True, False
        if self._shares_after:
            self._after, self._shares_after = _copied(self._after), False
        following = self._batch_of({**self._after, **self._outcomes})
        flags: Mapping[str, Any] = self._flags or {key: np.zeros((*self.shape, 1), np.bool_) for key in FLAGS}
        collector = {"collector": self._batch_of(self._tags)} if self._tags else {}
        td = self._batch_of({**self._before, **flags, **collector, "next": following})
        return td if self._policy_outputs is None else self._policy_outputs.update(td)

    def _batch_of(self, entries: Mapping[Any, Any]) -> TensorDict:
        values = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in entries.items()}
        kinds = {*map(type, values), *map(type, values.values())}
        if self._device is None and kinds <= {str, Tensor, TensorDict}:  # no nested keys, nothing to convert
            return tensordict_of(values, self.shape, device=None)
        return TensorDict(values, batch_size=self.shape, device=self._device)


def _copied(columns: Mapping[Any, Any]) -> dict[Any, Any]:
    """Columns of the same keys in memory of their own."""
    return {key: c.copy() if isinstance(c, np.ndarray) else c.clone() for key, c in columns.items()}


@functools.lru_cache(maxsize=8)
def _no_flags(shape: torch.Size) -> Array:
    """A flag that is never set, `[*shape, 1]`, for reading."""
    flags = np.zeros((*shape, 1), np.bool_)
    flags.setflags(write=False)
    return flags


def is_environment(value: Any) -> bool:
    """Whether this is an environment, of any library, and not something that makes one."""
    return hasattr(value, "step") and not isinstance(value, type)


def random_state_of(env: Any) -> Any:
    """The state of the random generators of an environment; None where it cannot be read, or is of another library."""
    return env.random_state() if isinstance(env, EnvBase) else None


def is_cpu(device: torch.device | None) -> bool:
    """Whether tensors on `device` are in main memory, as those without a device (None) are."""
    return device is None or device.type == "cpu"
