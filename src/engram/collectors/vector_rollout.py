"""Stepping vectorised environments with raw values: tensors are made once a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.collectors.action_sources import (
    ActionSource,
    MaskedRandom,
    ModuleActions,
    RandomActions,
    TensorDictActions,
    skipping,
)
from engram.collectors.output_columns import OutputColumns, OutputsWay
from engram.collectors.rollout import RolloutResult, StepColumns, Steps
from engram.collectors.trajectories import StepTags
from engram.envs.base import FrameIndex
from engram.envs.codecs import (
    BOOL,
    DOUBLE,
    SINGLE,
    ArrayCodec,
    SpaceLeaf,
    flag_row,
    narrow_rewards,
    reward_row,
    space_leaves,
)
from engram.envs.engines import Autoreset, VectorEngine, VectorStep
from engram.envs.policies import RandomPolicy, TensorDictPolicy, as_observation_policy

Array = np.ndarray[Any, Any]
MOST_AHEAD = 100_000  # frames that an environment may have more than another one that waits for the end of its episode


class VectorRollout:
    """Steps environments of a `VectorEngine` together; key by key the same as `TensorDictRollout`.

    A call that only resets an environment (NEXT_STEP) is not a frame of it: environments with long episodes then have
    more frames than others, and a batch is complete when each has its steps. **Frames beyond those open the next batch,
    in their order**; `restart` drops them.

    Where `max_frames_per_traj` cuts an episode and the environment cannot be reset without the others, its steps until
    the episode ends by itself are not frames. When all wait for that at once, all are reset.
    """

    def __init__(
        self,
        env: Any,
        engine: VectorEngine,
        policy: TensorDictPolicy,
        tags: StepTags,
        *,
        max_frames_per_traj: int | None,
    ) -> None:
        self._engine, self._policy, self._tags = engine, policy, tags
        self._max_frames = max_frames_per_traj
        self._codec, self._batch_size, self._device = engine.action, torch.Size((engine.n,)), env.device
        self.is_random = isinstance(policy, RandomPolicy)
        random = policy if isinstance(policy, RandomPolicy) else RandomPolicy(env.action_spec)
        self._random = RandomActions(random, self._codec, self._batch_size, tags.weights)
        self._log = StepLog(engine.n, engine.leaves, space_leaves(engine.action, ("action",)), self._device)
        self._tensordict_actions = TensorDictActions(policy, self._codec, self._batch_size, tags.weights, self._device)
        self._tensordict_actions.start(self._log, self._log)
        self.outputs_way = OutputsWay("columns")
        self.restart()

    def restart(self) -> None:
        self._log.clear()
        self._to_reset = np.zeros(self._engine.n, np.bool_)
        self._lengths = np.zeros(self._engine.n, np.int64)
        self._drains = np.zeros(self._engine.n, np.bool_)  # cut, and not reset before their episode ends by itself

    def collect(self, steps: int, *, random_steps: int) -> RolloutResult:
        try:
            self._run_all(steps, random_steps)
        except BaseException as error:
            return self._cut_short(steps, error)
        try:
            return RolloutResult(self._steps_of(self._log.take(steps), steps))
        except BaseException:
            self.restart()  # half a batch is lost: no trajectory may go on across the gap
            raise

    def _cut_short(self, steps: int, error: BaseException) -> RolloutResult:
        """Makes a batch of the steps before an error that every environment has, and restarts."""
        try:
            try:
                self._log.count()
            except ValueError as earlier:
                error = earlier
            steps = min(steps, int(self._log.waiting.min()))
            if steps == 0:
                raise error
            return RolloutResult(self._steps_of(self._log.take(steps), steps), error)
        finally:
            self.restart()

    def _run_all(self, steps: int, random_steps: int) -> None:
        source = self._source()
        if self._log.is_empty:
            self._log.begin(self._engine.reset())
            source.reset_envs(range(self._engine.n))
        waiting = self._log.waiting
        while (missing := steps - int(waiting.min())) > 0:
            if self._drains.any() and int(waiting.max()) - steps > MOST_AHEAD:
                raise_endless(self._drains, self._max_frames)
            if self._to_reset.any():  # only now: the last state of a batch must stay, and a restart may come
                self._reset(source)
            if self.is_random:
                self._run(self._random_actions(missing), source, missing)
            elif (surely_random := random_steps - int(waiting.max())) > 0:
                calls = min(missing, surely_random)
                self._run(skipping(source, self._random_actions(calls)), source, calls)
            elif int(waiting.min()) < random_steps:  # some have had their random steps, others not
                mixed = MaskedRandom(
                    waiting < random_steps, self._random, source, self._codec, self._batch_size, self._tags.weights
                )
                self._run(self._chosen(mixed, 1), mixed, 1)
            else:
                self._run(self._chosen(source, missing), source, missing)

    def _source(self) -> ActionSource:
        if self.is_random:
            return self._random
        direct = as_observation_policy(self._policy)  # looked up again for each batch: hooks come and go
        if direct is not None and set(direct.in_keys) <= {*self._log.keys}:
            size, weights, device = self._batch_size, self._tags.weights, self._device
            return ModuleActions(direct, self._codec, size, weights, device, self._log, self._log)
        return self._tensordict_actions

    def _chosen(self, source: ActionSource, calls: int) -> Iterator[Any]:
        log, codec, first = self._log, self._codec, int(self._log.waiting.min())
        return source.raw_actions(
            range(first, first + calls),
            codec.decode_batch,
            known=source.known_by(codec.raw_of) if isinstance(codec, ArrayCodec) else None,
            record=log.add_action,
            record_version=log.note_version,
        )

    def _random_actions(self, calls: int) -> Iterator[Any]:
        if not self._random.is_one_array:
            return self._chosen(self._random, calls)
        raws = self._random.draw_batches(calls)
        self._log.add_actions(raws)
        self._log.note_version(self._tags.weights.version)
        return iter(raws)

    def _run(self, raws: Iterator[Any], source: ActionSource, calls: int) -> None:
        log, step = self._log, self._engine.step
        ends_matter = self._engine.autoreset is Autoreset.DISABLED or self._max_frames is not None
        can_reset_some = self._engine.can_reset_some
        may_drain = self._max_frames is not None and not can_reset_some
        idle_lost = can_reset_some and self._engine.autoreset is Autoreset.SAME_STEP
        for number, raw in enumerate(raws, 1):
            out = step(raw)
            if may_drain:
                out = self._without_drained(out)
            log.add(out)
            if out.idle is not None:
                source.reset_envs(out.idle)
                if idle_lost:
                    self._cut(out.idle)
            if out.last:
                source.reset_envs([env for env, _ in out.last])
            if ends_matter and self._note_ends(out) and number < calls:
                self._reset(source)
        log.count()

    def _note_ends(self, out: VectorStep) -> bool:
        """Notes which episodes end with this call; returns whether environments have to be reset."""
        natural = self._log.last_ends()
        self._to_reset = natural
        if self._max_frames is not None:
            self._lengths += 1 if out.idle is None else ~out.idle
            too_long = self._lengths >= self._max_frames
            self._log.truncate(too_long)
            ended = natural | too_long
            self._lengths[ended] = 0
            self._to_reset = ended if self._engine.autoreset is Autoreset.DISABLED else too_long & ~natural
            if not self._engine.can_reset_some:
                self._let_drain(ended if out.idle is None else ended | out.idle)
        return bool(np.count_nonzero(self._to_reset))

    def _cut(self, idle: Array) -> None:
        """Ends the trajectories of environments (bool `[n]`) that the last call only reset, where none had ended."""
        self._log.count()
        for env in np.flatnonzero(idle).tolist():
            if not self._log.cut(env):
                self._tags.cut(env)
        self._lengths[idle] = 0

    def _let_drain(self, are_over: Array) -> None:
        """Lets environments drain that were cut; where no environment is in the middle of an episode, all are reset."""
        waiting = self._drains | self._to_reset
        resets = bool(are_over.all()) and bool(waiting.any())
        self._drains = np.zeros_like(waiting) if resets else waiting
        self._to_reset = np.full_like(waiting, resets)

    def _without_drained(self, out: VectorStep) -> VectorStep:
        """The step with environments that drain as idle; those whose episode is over drain no longer."""
        drains = self._drains
        if not drains.any():
            return out
        has_begun = out.idle
        if self._engine.autoreset is Autoreset.SAME_STEP:
            has_begun = np.logical_or(out.terminated, out.truncated)
        idle = drains if out.idle is None else drains | out.idle
        self._drains = drains if has_begun is None else drains & ~has_begun
        last = [(env, observation) for env, observation in out.last if not drains[env]]
        terminated, truncated = (np.logical_and(flag, ~drains) for flag in (out.terminated, out.truncated))
        return VectorStep(out.observation, out.reward, terminated, truncated, last, idle.copy())

    def _reset(self, source: ActionSource) -> None:
        envs = self._to_reset.copy()
        self._log.reset_envs(envs, self._engine.reset(None if envs.all() else envs))
        self._to_reset[:] = False
        source.reset_envs(envs)

    def _steps_of(self, window: StepWindow, steps: int) -> Steps:
        shape = torch.Size((self._engine.n, steps))
        done = window.terminated | window.truncated
        self.outputs_way = window.outputs_way
        outcomes = {
            "reward": window.reward,
            "done": done,
            "terminated": window.terminated,
            "truncated": window.truncated,
        }
        tags = self._tags.tag(done[..., 0], shape, window.versions)
        return StepColumns(
            {**window.before, **window.action},
            window.after,
            outcomes,
            tags,
            window.policy_outputs,
            shape=shape,
            device=self._device,
        )


def raise_endless(drains: Array, max_frames: int | None) -> NoReturn:
    """Raises RuntimeError for environments (bool `[n]`) that end no episode and cannot be reset."""
    raise RuntimeError(
        f"environments {np.flatnonzero(drains).tolist()} were cut after max_frames_per_traj={max_frames} frames, and "
        f"have not ended their episodes since, while others made {MOST_AHEAD} frames; they can only be reset all "
        "together. Use a time limit of their own (gymnasium.make_vec(..., max_episode_steps=...)), or SerialEnv"
    )


class _LastObservations(NamedTuple):
    """The last observations of the episodes that a call ended in `envs`, where a reset wrote over them."""

    call: int
    envs: list[int]
    rows: list[bytes]  # by leaf: those of all `envs`, one after the other


class StepLog:
    """The results of calls of `VectorEngine.step`, until their frames are in a batch.

    A *frame* is a step of one environment; a call that only resets an environment is not a frame of it. Row c of the
    observations is what the environments showed before call c, row c + 1 what they showed after it; where a reset wrote
    over the latter, the last observation of the episode is kept apart. All arrays are copied at once.
    """

    def __init__(self, n: int, leaves: list[SpaceLeaf], actions: list[SpaceLeaf], device: torch.device | None) -> None:
        self._outputs = OutputColumns(torch.Size((n,)), device)  # of the policy, besides the action
        self._n, self._leaves, self._action_leaves = n, leaves, actions
        codec, is_single = leaves[0].codec, len(leaves) == 1 and not leaves[0].path
        # None: there are several arrays, or their values must be checked.
        self._dtype = codec.raw_dtype if is_single and codec.limits is None else None
        self._action_dtype = None if actions[0].path else actions[0].codec.raw_dtype  # None: several arrays
        self._shape, self._flat = (n, *codec.raw_shape), (n,)
        self._reward_row = np.dtype((np.void, n * SINGLE.itemsize))
        self.clear()

    def clear(self) -> None:
        """Drops everything, frames that wait for a batch included."""
        self._shown: list[list[Array]] = [[] for _ in self._leaves]
        self._actions: list[list[Any]] = [[] for _ in self._action_leaves]
        self._rewards: list[bytes] = []  # bytes: a tenth of the cost of small arrays, to make and to join
        self._uncounted: list[bytes] = []  # the rewards of the calls since the last `count`, in a dtype that fits all
        self._reward_dtype: np.dtype[Any] = SINGLE
        self._terminated: list[bytes] = []
        self._truncated: list[bytes] = []
        self._last_of_episodes: list[_LastObservations] = []
        self._outputs.clear()
        self._versions: list[int] = []
        self._version = 0
        self._dropped = 0
        self._frames = FrameIndex(self._n)

    @property
    def waiting(self) -> Array:
        """Frames of each environment that no batch has taken, int64 `[n]`."""
        return self._frames.waiting

    @property
    def is_empty(self) -> bool:
        """Whether the environments have not been reset yet."""
        return not self._shown[0]

    @property
    def keys(self) -> list[Any]:
        """The keys of the observations."""
        return [leaf.key for leaf in self._leaves]

    def rows(self, key: Any) -> Callable[[int], Tensor]:
        """A function that returns the newest observation `[n, *shape]`; it ignores its argument."""
        index = self.keys.index(key)
        encode = self._leaves[index].codec.encode
        return lambda t: encode(self._shown[index][-1])

    def begin(self, observation: Any) -> None:
        """Adds the observation after the first reset. Raises ValueError where it is not of the spaces."""
        for rows, shown in zip(self._rows_of(observation), self._shown, strict=True):
            shown.append(rows)

    def _rows_of(self, observation: Any) -> list[Array]:
        """Copies of the leaves `[n, ...]` of batched observations. Raises ValueError where one is not of its space."""
        if type(observation) is np.ndarray and observation.dtype is self._dtype and observation.shape == self._shape:
            return [observation.copy()]
        return [np.array(leaf.rows(observation, self._n), order="C") for leaf in self._leaves]

    def add_action(self, action: Any) -> None:
        """Adds the raw action of the next call."""
        if type(action) is np.ndarray and action.dtype is self._action_dtype:
            self._actions[0].append(action.tobytes())  # a tenth of the cost of a copy
            return
        for leaf, actions in zip(self._action_leaves, self._actions, strict=True):
            actions.append(np.array(leaf.pick(action), leaf.codec.raw_dtype, order="C"))

    def add_actions(self, actions: Array) -> None:
        """Adds the raw actions `[calls, n, ...]` of the next calls, where an action is one array."""
        self._actions[0].extend(np.array(actions, self._action_leaves[0].codec.raw_dtype, order="C"))

    def store_outputs(self, outputs: Mapping[str, Any]) -> None:
        self._outputs.put(self._calls, outputs)

    def store_tensordict(self, outputs: TensorDictBase, reason: str) -> None:
        self._outputs.put_tensordict(self._calls, outputs, reason)

    def note_version(self, version: int) -> None:
        """Notes the version of the weights that choose the actions from the next call on."""
        self._version = version

    def add(self, out: VectorStep) -> None:
        """Adds one call. Raises ValueError where a value is not of the spaces, and adds nothing then.

        Rewards beyond float32 are an error of `count`.
        """
        rows, reward, terminated, truncated = self._rows_of(out.observation), out.reward, out.terminated, out.truncated
        flat, ndarray = self._flat, np.ndarray  # no function call for rows of the right dtype: it costs as much
        if type(reward) is not ndarray or reward.dtype is not self._reward_dtype or reward.shape != flat:
            reward = self._widened(reward_row(reward, self._n))
        if type(terminated) is not ndarray or terminated.dtype is not BOOL or terminated.shape != flat:
            terminated = flag_row(terminated, self._n, "terminated")
        if type(truncated) is not ndarray or truncated.dtype is not BOOL or truncated.shape != flat:
            truncated = flag_row(truncated, self._n, "truncated")
        last = self._last_rows(out.last) if out.last else None
        for row, shown in zip(rows, self._shown, strict=True):
            shown.append(row)
        self._frames.add(out.idle)
        self._terminated.append(terminated.tobytes())
        self._truncated.append(truncated.tobytes())
        self._versions.append(self._version)
        if last is not None:
            self._last_of_episodes.append(_LastObservations(self._last_call + 1, *last))
        self._uncounted.append(reward.tobytes())  # last: a call with rewards is whole

    def _last_rows(self, last: Sequence[tuple[int, Any]]) -> tuple[list[int], list[bytes]]:
        """Environments, and by leaf their last observations. Raises ValueError where one is not of its space."""
        envs, raws = zip(*last, strict=True)
        dtype, shape = self._dtype, self._shape[1:]
        if dtype is None:
            return list(envs), [b"".join([leaf.value(raw).tobytes() for raw in raws]) for leaf in self._leaves]
        value, ndarray = self._leaves[0].value, np.ndarray  # no function call for the right dtype, as in `add`
        rows = [
            (raw if type(raw) is ndarray and raw.dtype is dtype and raw.shape == shape else value(raw)).tobytes()
            for raw in raws
        ]
        return list(envs), [b"".join(rows)]

    def _widened(self, reward: Array) -> Array:
        """Rewards of another dtype than those before them, in a dtype that fits all that are not counted yet."""
        if not self._uncounted:
            self._reward_dtype = SINGLE if reward.dtype == SINGLE else DOUBLE
        elif self._reward_dtype is SINGLE:
            self._uncounted = [
                row.tobytes() for row in _rows(self._uncounted, len(self._uncounted), SINGLE, self._n).astype(DOUBLE)
            ]
            self._reward_dtype = DOUBLE
        return reward.astype(self._reward_dtype)

    @property
    def _last_call(self) -> int:
        return self._dropped + self._calls - 1

    @property
    def _calls(self) -> int:
        return len(self._rewards) + len(self._uncounted)

    def last_ends(self) -> Array:
        """Whether the last call ended the episode of each environment, bool `[n]`."""
        terminated, truncated = self._terminated[-1], self._truncated[-1]
        return np.frombuffer(terminated, np.bool_) | np.frombuffer(truncated, np.bool_)

    def truncate(self, envs: Array) -> None:
        """Marks the last call as truncating the episodes of `envs` (bool `[n]`)."""
        self._truncated[-1] = (np.frombuffer(self._truncated[-1], np.bool_) | envs).tobytes()

    def cut(self, env: int) -> bool:
        """Marks the newest frame of an environment as truncated if it ends no episode; False: a batch has taken it."""
        call = self._frames.last_frame(env)
        if call is None:
            return False
        if not self._terminated[call][env]:
            row = bytearray(self._truncated[call])
            row[env] = True
            self._truncated[call] = bytes(row)
        return True

    def reset_envs(self, envs: Array, observation: Any) -> None:
        """Takes the `observation` of a reset of `envs` (bool `[n]`) after the last call."""
        begun, ended = self._rows_of(observation), envs.copy()
        call = self._last_call
        for last in reversed(self._last_of_episodes):
            if last.call < call:
                break
            ended[last.envs] = False  # the engine reset them itself in this call, and their last observation is here
        rows_of_ended = [shown[-1][ended].tobytes() for shown in self._shown]
        self._last_of_episodes.append(_LastObservations(call, np.flatnonzero(ended).tolist(), rows_of_ended))
        for rows, shown in zip(begun, self._shown, strict=True):
            shown[-1][envs] = rows[envs]

    def count(self) -> None:
        """Counts the calls since the last count as waiting frames.

        Raises ValueError for a reward beyond float32; only the calls before it are counted, the others are dropped.
        """
        rewards = narrow_rewards(_rows(self._uncounted, len(self._uncounted), self._reward_dtype, self._n))
        self._uncounted.clear()
        self._rewards.extend(rewards.values.view(self._reward_row)[:, 0].tolist())  # bytes of each call
        self._frames.count(len(rewards.values))
        if rewards.error is not None:
            raise rewards.error

    def take(self, steps: int) -> StepWindow:
        """Takes the first `steps` waiting frames of each environment, oldest first."""
        calls, dropped = self._frames.take(steps)
        window = StepWindow(calls, self._versions)
        self._fill(window)
        self._drop(dropped)
        return window

    def _fill(self, window: StepWindow) -> None:
        slots, n = window.slots, self._n
        # No frame reads a call before the first of this log.
        lasts, before = self._last_of_episodes, 1 - self._dropped
        last_slots = [(last.call + before) * n + env for last in lasts for env in last.envs]
        for leaf_number, (leaf, shown) in enumerate(zip(self._leaves, self._shown, strict=True)):
            rows = _rows(shown, len(shown) * n, leaf.codec.raw_dtype, *leaf.codec.raw_shape)
            window.before[leaf.key] = leaf.codec.encode(rows.take(slots, 0))
            if last_slots:
                rows_of_leaf = [last.rows[leaf_number] for last in lasts]
                rows[last_slots] = _rows(rows_of_leaf, len(last_slots), rows.dtype, *rows.shape[1:])
            window.after[leaf.key] = leaf.codec.encode(rows.take(slots + n, 0))
        for leaf, actions in zip(self._action_leaves, self._actions, strict=True):
            rows = _rows(actions, len(actions) * n, leaf.codec.raw_dtype, *leaf.codec.raw_shape)
            window.action[leaf.key] = leaf.codec.encode(rows.take(slots, 0))
        window.reward = _rows(self._rewards, len(self._rewards) * n, np.float32, 1).take(slots, 0)
        window.terminated = _rows(self._terminated, len(self._terminated) * n, np.bool_, 1).take(slots, 0)
        window.truncated = _rows(self._truncated, len(self._truncated) * n, np.bool_, 1).take(slots, 0)
        window.outputs_way = self._outputs.way
        window.policy_outputs = self._outputs.at(torch.from_numpy(slots), self._calls)

    def _drop(self, calls: int) -> None:
        self._outputs.drop(calls)
        flat: list[list[Any]] = [self._rewards, self._terminated, self._truncated]
        for column in (*self._shown, *self._actions, *flat):
            del column[:calls]
        self._versions = self._versions[calls:]  # the window has the old list
        self._dropped += calls
        self._last_of_episodes = [entry for entry in self._last_of_episodes if entry.call >= self._dropped]


class StepWindow:
    """The frames of a batch `[n, time]`: tensors by key, and arrays `[n, time, 1]`.

    `calls` `[n, time]` says which call of the log each frame is of, `slots` which of its rows `call * n + env`.
    """

    reward: Array
    terminated: Array
    truncated: Array
    outputs_way: OutputsWay

    def __init__(self, calls: Array, versions: list[int]) -> None:
        self._calls, self._versions = calls, versions
        self.slots = calls * len(calls) + np.arange(len(calls))[:, None]
        self.before: dict[Any, Tensor] = {}
        self.after: dict[Any, Tensor] = {}
        self.action: dict[Any, Tensor] = {}
        self.policy_outputs: TensorDictBase | None = None

    def versions(self) -> Array:
        """The versions of the policy that acted, int64 `[n, time]`."""
        return np.array(self._versions, np.int64).take(self._calls)


def _rows(chunks: Sequence[Any], rows: int, dtype: Any, *shape: int) -> Array:
    """Joins arrays, or bytes, of one dtype to a new array `[rows, *shape]`, at a third of the cost of `concatenate`."""
    return np.frombuffer(bytearray().join(chunks), dtype).reshape(rows, *shape)
