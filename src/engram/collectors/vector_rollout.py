"""Stepping vectorised environments with raw values: tensors are made once a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram._native import StepRecorder
from engram.collectors.action_sources import (
    ActionSource,
    MaskedRandom,
    ModuleActions,
    RandomActions,
    TensorDictActions,
    ZeroOutputs,
    skipping,
)
from engram.collectors.output_columns import OutputColumns
from engram.collectors.rollout import RolloutResult, StepColumns, Steps
from engram.collectors.stats import StepsWay
from engram.collectors.trajectories import StepTags
from engram.envs.codecs import (
    SpaceLeaf,
    flag_row,
    narrow_rewards,
    reward_row,
    space_leaves,
)
from engram.envs.engines import Autoreset, BareSteps, VectorEngine, VectorStep
from engram.envs.policies import FLAGS, RandomPolicy, TensorDictPolicy, as_observation_policy

Array = np.ndarray[Any, Any]
MOST_AHEAD = 100_000  # frames that an environment may have more than another one that waits for the end of its episode


class VectorRollout:
    """Steps environments of a `VectorEngine` together; key by key the same as `TensorDictRollout`.

    A call that only resets an environment (NEXT_STEP) is not a frame of it: environments with long episodes then have
    more frames than others, and a batch is complete when each has its steps. **Frames beyond those open the next batch,
    in their order**; `restart` drops them.

    Where `max_frames_per_traj` cuts an episode and the environment cannot be reset without the others, its steps until
    the episode ends by itself are not frames. When all wait for that at once, all are reset.

    `bare`: `engine.bare_steps()`, or None where its own `step` is to be called.
    """

    def __init__(
        self,
        env: Any,
        engine: VectorEngine,
        policy: TensorDictPolicy,
        tags: StepTags,
        *,
        max_frames_per_traj: int | None,
        bare: BareSteps | None = None,
    ) -> None:
        self._engine, self._policy, self._tags = engine, policy, tags
        self._max_frames = max_frames_per_traj
        self._codec, self._batch_size, self._device = engine.action, torch.Size((engine.n,)), env.device
        self._array_codec = self._codec.in_one_array
        self._read = self._array_codec.action_reader(self._batch_size) if self._array_codec else None
        self.is_random = isinstance(policy, RandomPolicy)
        random = policy if isinstance(policy, RandomPolicy) else RandomPolicy(env.action_spec)
        self._random = RandomActions(random, self._codec, self._batch_size, tags.weights)
        over = np.zeros(engine.n, np.bool_) if bare is None else bare.over
        self._log = StepLog(engine.n, engine.leaves, space_leaves(engine.action, ("action",)), self._device, over)
        #: The vector environment, where what its `step` returns needs no more than to be recorded.
        self._bare = bare.env if bare and max_frames_per_traj is None and self._log.takes_results else None
        self._tensordict_actions = TensorDictActions(policy, self._codec, self._batch_size, tags.weights, self._device)
        self._tensordict_actions.start(self._log, self._log)
        self._zeros = ZeroOutputs()
        self.steps_way = StepsWay("columns")
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
            self._log.recount()
            steps = min(steps, self._log.waiting_range[0])
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
        run = self._run if self._bare is None else self._run_bare
        while True:
            least, most = self._log.waiting_range
            missing = steps - least
            if missing <= 0:
                return
            if most - steps > MOST_AHEAD and self._drains.any():
                raise_endless(self._drains, self._max_frames)
            self._log.reserve(missing)
            if self._bare is None and self._to_reset.any():
                self._reset(source)  # only now: the last state of a batch must stay, and a restart may come
            if self.is_random:
                run(self._random_actions(missing), source, missing)
            elif random_steps > most:
                calls = min(missing, random_steps - most)
                run(skipping(source, self._random_actions(calls)), source, calls)
            elif least < random_steps:  # some have had their random steps, others not
                lack, size = self._log.waiting < random_steps, self._batch_size
                mixed = MaskedRandom(lack, self._random, source, self._codec, size, self._tags.weights)
                run(self._chosen(mixed, 1), mixed, 1)
            else:
                run(self._chosen(source, missing), source, missing)

    def _source(self) -> ActionSource:
        if self.is_random:
            return self._random
        direct = as_observation_policy(self._policy)  # looked up again for each batch: hooks come and go
        if direct is not None and set(direct.in_keys) <= {*self._log.keys}:
            size, weights, device = self._batch_size, self._tags.weights, self._device
            return ModuleActions(direct, self._codec, size, weights, device, self._log, self._log, self._zeros)
        return self._tensordict_actions

    def _chosen(self, source: ActionSource, calls: int) -> Iterator[Any]:
        log, codec, first = self._log, self._array_codec, int(self._log.waiting.min())
        return source.raw_actions(
            range(first, first + calls),
            self._codec.decode_batch,
            known=source.known_by(codec.raw_of, self._read) if codec else None,
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

    def _run_bare(self, raws: Iterator[Any], source: ActionSource, calls: int) -> None:
        """As `_run`, where a call does no more than to step environments or to begin their next episode."""
        assert self._bare is not None
        step, add, log = self._bare.step, self._log.add_result, self._log
        if source is self._random:  # which has no state of episodes
            for raw in raws:
                add(step(raw))
            return
        for raw in raws:
            if add(step(raw)):
                source.reset_envs(log.last_idle())

    def _run(self, raws: Iterator[Any], source: ActionSource, calls: int) -> None:
        log, step = self._log, self._engine.step
        ends_matter = self._engine.autoreset is Autoreset.DISABLED or self._max_frames is not None
        has_limit, can_reset_some = self._max_frames is not None, self._engine.can_reset_some
        may_drain = has_limit and not can_reset_some
        idle_lost = can_reset_some and self._engine.autoreset is Autoreset.SAME_STEP
        for number, raw in enumerate(raws, 1):
            out = step(raw)
            if may_drain:
                out = self._without_drained(out)
            ends = log.add(out)
            if out.idle is not None:
                source.reset_envs(out.idle)
                if idle_lost:
                    self._cut(out.idle)
            if out.last:
                source.reset_envs([env for env, _ in out.last])
            if ends_matter and (ends or has_limit) and self._note_ends(out) and number < calls:
                self._reset(source)

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
        self.steps_way = window.steps_way
        tags = self._tags.tag(window.done.numpy()[..., 0], shape, window.versions)
        return StepColumns(
            window.before,
            window.after,
            window.outcomes,
            tags,
            window.policy_outputs,
            shape=shape,
            device=self._device,
            flags=window.flags,
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

    A *frame* is a step of one environment; a call that only resets an environment is not a frame of it. All that a call
    gives is copied at once into columns `[calls, n, ...]`. Row c of the observations is what the environments showed
    before call c, row c + 1 what they showed after it; where a reset wrote over the latter, the last observation of the
    episode is kept apart. A batch is laid out from the columns in memory of its own, at once.

    The columns of one batch are used again for the next one.

    `over`, bool `[n]`, is shared with the engine: whose episode the last call ended, see `BareSteps`.
    """

    def __init__(
        self, n: int, leaves: list[SpaceLeaf], actions: list[SpaceLeaf], device: torch.device | None, over: Array
    ) -> None:
        self._outputs = OutputColumns(torch.Size((n,)), device)  # of the policy, besides the action
        self._n, self._leaves, self._action_leaves = n, leaves, actions
        self._waiting = np.zeros(n, np.int64)  # frames that no batch has taken
        self._taken = np.zeros(n, np.int64)  # frames of the calls in the columns that batches have taken
        self._recorder = StepRecorder(self._waiting, self._taken, over)
        self._record, self._record_result = self._recorder.add, self._recorder.add_result
        self._keys = [leaf.key for leaf in (*leaves, *actions)]
        self._no_last_rows = np.zeros(0, np.int64), np.zeros(0, np.int64), [np.zeros(0, np.uint8) for _ in leaves]
        self._are_plain = [leaf.codec.is_plain for leaf in (*leaves, *actions)]  # the tensor equals the raw array
        #: Whether an observation is one array, whose values need no check.
        self._is_one_array = len(leaves) == 1 and not leaves[0].path and leaves[0].codec.limits is None
        #: Whether `add_result` takes what gymnasium's `step` returns.
        self.takes_results = self._is_one_array
        self._action_dtype = None if actions[0].path else actions[0].codec.raw_dtype  # None: several arrays
        self.clear()

    def clear(self) -> None:
        """Drops everything, frames that wait for a batch included."""
        self._is_begun = False
        self._last_of_episodes: list[_LastObservations] = []
        self._outputs.clear()
        self._has_outputs = False
        self._versions = [(0, 0)]  # each with the call from which on it chose the actions
        self._dropped = 0
        self._calls = 0
        self._waiting[:] = 0
        self._taken[:] = 0
        self._allocate(0, None)

    def _allocate(self, room: int, kept: tuple[int, int] | None) -> None:
        """Makes columns with room for so many calls; `kept`: a first call and a number of calls that go on in these."""
        n, self._room = self._n, room
        self._shown = [np.empty((room + 1, n, *leaf.codec.raw_shape), leaf.codec.raw_dtype) for leaf in self._leaves]
        self._actions = [
            np.empty((room, n, *leaf.codec.raw_shape), leaf.codec.raw_dtype) for leaf in self._action_leaves
        ]
        self._reward = np.empty((room, n, 1), np.float32)
        self._terminated, self._truncated, self._done = (np.empty((room, n, 1), np.bool_) for _ in range(3))
        self._idle = np.empty((room, n), np.bool_)  # whether the call only reset the environment
        flags = self._terminated, self._truncated, self._done, self._idle
        self._recorder.use(self._shown, self._actions, self._reward, *flags, kept)
        self._encoders: list[Callable[[int], Tensor] | None] = [None] * len(
            self._leaves
        )  # of the observations of a call

    def _keep(self, first: int, room: int) -> None:
        """Keeps the calls from the columns' row `first` on, which becomes row 0, with room for `room` calls in all."""
        left = self._calls - first
        if room != self._room:
            self._allocate(room, (first, left))
        else:
            self._recorder.keep(first, left)
        self._calls = left

    def reserve(self, calls: int) -> None:
        """Makes room for so many more calls."""
        needed = self._calls + calls
        if needed > self._room:  # of a log that has calls some more: resets take calls, as they will in later batches
            self._keep(0, needed + self._calls // 4)

    @property
    def waiting(self) -> Array:
        """Frames of each environment that no batch has taken, int64 `[n]`."""
        return self._waiting

    @property
    def waiting_range(self) -> tuple[int, int]:
        """The fewest and the most of `waiting`."""
        return self._recorder.waiting()

    @property
    def is_empty(self) -> bool:
        """Whether the environments have not been reset yet."""
        return not self._is_begun

    @property
    def keys(self) -> list[Any]:
        """The keys of the observations."""
        return self._keys[: len(self._leaves)]

    def rows(self, key: Any) -> Callable[[int], Tensor]:
        """A function that returns a copy of the newest observation `[n, *shape]`; it ignores its argument."""
        index = self.keys.index(key)
        codec = self._leaves[index].codec

        def newest(t: int) -> Tensor:
            encoder = self._encoders[index]
            if encoder is None:
                encoder = self._encoders[index] = codec.row_encoder(self._shown[index])
            return encoder(self._calls)

        return newest

    def begin(self, observation: Any) -> None:
        """Adds the observation after the first reset. Raises ValueError where it is not of the spaces."""
        for rows, shown in zip(self._rows_of(observation), self._shown, strict=True):
            shown[0] = rows
        self._is_begun = True

    def _rows_of(self, observation: Any) -> tuple[Array, ...]:
        """The leaves `[n, ...]` of batched observations. Raises ValueError where one is not of its space."""
        return tuple([leaf.rows(observation, self._n) for leaf in self._leaves])

    def add_action(self, action: Any) -> None:
        """Adds the raw action of the next call."""
        if type(action) is np.ndarray and action.dtype is self._action_dtype:
            self._actions[0][self._calls] = action
            return
        for leaf, actions in zip(self._action_leaves, self._actions, strict=True):
            actions[self._calls] = leaf.codec.array_of_batch(leaf.pick(action))

    def add_actions(self, actions: Array) -> None:
        """Adds the raw actions `[calls, n, ...]` of the next calls, where an action is one array."""
        self._actions[0][self._calls : self._calls + len(actions)] = actions

    def store_outputs(self, outputs: Mapping[str, Any]) -> None:
        self._has_outputs = True
        self._outputs.put(self._calls, outputs)

    def store_tensordict(self, outputs: TensorDictBase, reason: str) -> None:
        self._has_outputs = True
        self._outputs.put_tensordict(self._calls, outputs, reason)

    def note_version(self, version: int) -> None:
        """Notes the version of the weights that choose the actions from the next call on."""
        if version != self._versions[-1][1]:
            self._versions.append((self._dropped + self._calls, version))

    def add(self, out: VectorStep) -> bool:
        """Adds one call; returns whether it ends an episode. Raises ValueError where a value is not of the spaces.

        Nothing is added then. A reward beyond float32 is such a value, too.
        """
        observation, reward, terminated, truncated, last, idle = out
        if last:
            self._last_of_episodes.append(_LastObservations(self._last_call + 1, *self._last_rows(last)))
        arrays = (observation,) if self._is_one_array else self._rows_of(observation)
        ends = self._record(self._calls, arrays, reward, terminated, truncated, idle)
        if ends < 0:
            ends = self._record_converted(out)
        self._calls += 1
        return ends > 0

    def add_result(self, result: Any) -> bool:
        """Adds one call by what gymnasium's `step` returned; returns whether it only reset some environments.

        It did with those whose episode the call before ended. Raises ValueError as `add`.
        """
        found = self._record_result(self._calls, result)
        if found < 0:
            found = self._record_result(self._calls, self._converted_result(*result))
        self._calls += 1
        return found > 1

    def _converted_result(self, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> Any:
        """A result of the columns' dtypes and shapes. Raises ValueError where it is not of the spaces."""
        flags = flag_row(terminated, self._n, "terminated"), flag_row(truncated, self._n, "truncated")
        return (*self._rows_of(observation), self._narrow(reward), *flags, info)

    def last_idle(self) -> Array:
        """Whether the last call only reset each environment, bool `[n]`."""
        idle: Array = self._idle[self._calls - 1].copy()
        return idle

    def _record_converted(self, out: VectorStep) -> int:
        """Records values that are not exactly of the columns' dtypes and shapes. Raises ValueError as `add`."""
        arrays, reward = self._rows_of(out.observation), reward_row(out.reward, self._n)
        terminated = flag_row(out.terminated, self._n, "terminated")
        truncated = flag_row(out.truncated, self._n, "truncated")
        ends = self._record(self._calls, arrays, self._narrow(reward), terminated, truncated, out.idle)
        assert ends >= 0, "converted values are of the columns' form"
        return ends

    def _narrow(self, reward: Any) -> Array:
        """Rewards `[n]`. Raises ValueError where they are no numbers, or beyond float32."""
        row = reward_row(reward, self._n)
        error = narrow_rewards(row[None]).error
        if error is not None:
            raise error
        return row

    def _last_rows(self, last: Sequence[tuple[int, Any]]) -> tuple[list[int], list[bytes]]:
        """Environments, and by leaf their last observations. Raises ValueError where one is not of its space."""
        envs, raws = zip(*last, strict=True)
        return list(envs), [b"".join([leaf.value(raw).tobytes() for raw in raws]) for leaf in self._leaves]

    @property
    def _last_call(self) -> int:
        return self._dropped + self._calls - 1

    def last_ends(self) -> Array:
        """Whether the last call ended the episode of each environment, bool `[n]`."""
        ends: Array = self._done[self._calls - 1, :, 0].copy()
        return ends

    def truncate(self, envs: Array) -> None:
        """Marks the last call as truncating the episodes of `envs` (bool `[n]`)."""
        self._truncated[self._calls - 1, :, 0] |= envs
        self._done[self._calls - 1, :, 0] |= envs

    def cut(self, env: int) -> bool:
        """Marks the newest frame of an environment as truncated if it ends no episode; False: a batch has taken it."""
        if not self._waiting[env]:
            return False
        call = np.flatnonzero(~self._idle[: self._calls, env])[-1]
        self._truncated[call, env] |= ~self._terminated[call, env]
        self._done[call, env] = True
        return True

    def reset_envs(self, envs: Array, observation: Any) -> None:
        """Takes the `observation` of a reset of `envs` (bool `[n]`) after the last call."""
        begun, ended = self._rows_of(observation), envs.copy()
        call = self._last_call
        for last in reversed(self._last_of_episodes):
            if last.call < call:
                break
            ended[last.envs] = False  # the engine reset them itself in this call, and their last observation is here
        rows_of_ended = [shown[self._calls][ended].tobytes() for shown in self._shown]
        self._last_of_episodes.append(_LastObservations(call, np.flatnonzero(ended).tolist(), rows_of_ended))
        for rows, shown in zip(begun, self._shown, strict=True):
            shown[self._calls][envs] = rows[envs]

    def recount(self) -> None:
        """Counts the frames of the calls that were added as a whole: an interrupt may come in the middle of `add`."""
        self._waiting[:] = (~self._idle[: self._calls]).sum(0) - self._taken

    def take(self, steps: int) -> StepWindow:
        """Takes the first `steps` waiting frames of each environment, oldest first."""
        asks_calls = self._has_outputs or len(self._versions) > 1
        tensors, calls, dropped = self._recorder.take(self._calls, steps, asks_calls, *self._last_rows_kept())
        leaves, acted = len(self._leaves), len(self._leaves) + len(self._action_leaves)
        before = [self._encoded(k, tensors[k]) for k in range(acted)]
        reward, terminated, truncated, done, *flags = tensors[acted : acted + 7]
        after = [self._encoded(k, tensors[acted + 7 + k]) for k in range(leaves)]
        window = StepWindow(
            dict(zip(self._keys, before, strict=True)),
            dict(zip(self._keys[:leaves], after, strict=True)),
            {"reward": reward, "done": done, "terminated": terminated, "truncated": truncated},
            dict(zip(FLAGS, flags, strict=True)),
            self._outputs.way,
            self._outputs_of(steps, calls),
            self._versions,
            self._dropped,
            calls,
        )
        self._drop(dropped, steps)
        return window

    def _last_rows_kept(self) -> tuple[Array, Array, list[Array]]:
        """The calls and environments of last observations of episodes, and these, by leaf, as bytes."""
        # No frame reads what was shown after a call before the first of this log.
        lasts = [last for last in self._last_of_episodes if last.call >= self._dropped]
        if not lasts:
            return self._no_last_rows
        calls = np.array([last.call - self._dropped for last in lasts for _ in last.envs], np.int64)
        envs = np.array([env for last in lasts for env in last.envs], np.int64)
        numbers = range(len(self._leaves))
        return calls, envs, [np.frombuffer(b"".join([last.rows[k] for last in lasts]), np.uint8) for k in numbers]

    def _encoded(self, number: int, raw: Tensor) -> Any:
        """Raw values `[n, time, ...]` of a leaf as the tensor that batches have."""
        if self._are_plain[number]:
            return raw
        return (*self._leaves, *self._action_leaves)[number].codec.encode(raw.numpy())

    def _outputs_of(self, steps: int, calls: Array | None) -> TensorDictBase | None:
        """What the policy wrote besides the actions, `[n, steps]`; None: nothing."""
        if not self._has_outputs:
            return None
        frames = np.broadcast_to(np.arange(steps), (self._n, steps)) if calls is None else calls
        return self._outputs.at(torch.from_numpy(frames * self._n + np.arange(self._n)[:, None]), self._calls)

    def _drop(self, calls: int, steps: int) -> None:
        if self._has_outputs:
            self._outputs.drop(calls)
        self._dropped += calls
        if len(self._versions) > 1:
            past = sum(start <= self._dropped for start, _ in self._versions)
            self._versions = self._versions[max(0, past - 1) :]  # the window has the old list
        self._last_of_episodes = [entry for entry in self._last_of_episodes if entry.call >= self._dropped]
        left = self._calls - calls
        self._keep(calls, min(self._room, left + 2 * steps))


class StepWindow(NamedTuple):
    """The frames of a batch `[n, time]`: tensors by key."""

    before: dict[Any, Any]  # observations and action
    after: dict[Any, Any]  # observations
    outcomes: dict[str, Tensor]  # the reward and the flags after each step, [n, time, 1]
    flags: dict[str, Tensor]  # the flags before each step, which are never set, [n, time, 1]
    steps_way: StepsWay
    policy_outputs: TensorDictBase | None
    version_starts: list[tuple[int, int]]  # versions of the policy, each with the call from which on it chose
    first_call: int
    calls: Array | None  # of each frame, from `first_call` on; None: frame t is of call t, or there is one version

    @property
    def done(self) -> Tensor:
        """Whether each step ended an episode, bool `[n, time, 1]`."""
        return self.outcomes["done"]

    def versions(self) -> Array:
        """The versions of the policy that acted, int64 `[n, time]`."""
        n, steps = self.done.shape[:2]
        calls = np.broadcast_to(np.arange(steps), (n, steps)) if self.calls is None else self.calls
        starts, versions = np.array(self.version_starts, np.int64).T
        chosen: Array = versions.take(starts.searchsorted(self.first_call + calls, "right") - 1)
        return chosen
