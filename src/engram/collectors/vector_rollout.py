"""Stepping environments together with raw values: tensors are made once a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.collectors.rollout import Rolled, extras_of
from engram.collectors.trajectories import FrameMarks
from engram.envs.batched import Autoreset, BatchEngine, BatchStep
from engram.envs.gym_codecs import Leaf, leaves_of
from engram.envs.gym_engine import check_action
from engram.envs.gym_values import BOOL, DOUBLE, SINGLE, flag_row, narrow_rewards, reward_row
from engram.envs.mdp import merge_where, stack_steps, zero_where
from engram.envs.policies import FLAGS, ObservationPolicy, RandomPolicy, TensorDictPolicy, direct_module

Array = np.ndarray[Any, Any]


class BatchRoller:
    """Does what `TensorDictRoller` does, for a `BatchEngine`, key by key the same.

    A call that only resets an environment (NEXT_STEP) is no frame of it: environments whose episodes are long then have
    more frames than others, and a batch is there when each has its steps. **Frames beyond those open the next batch, in
    their order**; `restart` drops them.
    """

    def __init__(
        self,
        env: Any,
        engine: BatchEngine,
        policy: TensorDictPolicy,
        max_frames_per_traj: int | None,
        marks: FrameMarks,
    ) -> None:
        if max_frames_per_traj is not None and not engine.can_reset_some:
            raise ValueError(
                f"max_frames_per_traj={max_frames_per_traj} cuts episodes one by one, and these environments can only "
                "be reset all together; use a time limit of their own (gymnasium.make_vec(..., "
                f"max_episode_steps={max_frames_per_traj})), or SerialEnv"
            )
        self._engine, self._policy, self._limit, self._marks = engine, policy, max_frames_per_traj, marks
        self._device = env.device
        self.is_random = isinstance(policy, RandomPolicy)
        self._random = BatchRandom(
            policy if isinstance(policy, RandomPolicy) else RandomPolicy(env.action_spec), engine
        )
        self._on_tensordicts = BatchTensorDicts(policy, engine, self._device)
        self._log = CallLog(engine.n, engine.leaves, leaves_of(engine.action, ("action",)))
        self.restart()

    def restart(self) -> None:
        """Every environment is reset before its next step; frames that wait for the next batch are dropped."""
        self._log.clear()
        self._over = np.zeros(self._engine.n, np.bool_)
        self._ages = np.zeros(self._engine.n, np.int64)

    def roll(self, steps: int, random_steps: int) -> Rolled:
        """`[n, steps]` in TED, the first `random_steps` of each environment with random actions."""
        try:
            self._fill(steps, random_steps)
        except BaseException as error:
            return self._cut_short(steps, error)
        try:
            return Rolled(self._assembled(self._log.take(steps), steps))
        except BaseException:
            self.restart()  # half a batch is lost: no trajectory may go on across the gap
            raise

    def _cut_short(self, steps: int, error: BaseException) -> Rolled:
        """What every environment has stepped before an error: no trajectory goes on after it."""
        try:
            try:
                self._log.count()
            except ValueError as earlier:
                error = earlier
            steps = min(steps, int(self._log.waiting.min()))
            if steps == 0:
                raise error
            return Rolled(self._assembled(self._log.take(steps), steps), error)
        finally:
            self.restart()

    def _fill(self, steps: int, random_steps: int) -> None:
        source = self._source()
        if self._log.is_empty:
            self._log.begin(self._engine.reset())
            source.forget(np.ones(self._engine.n, np.bool_))
        waiting = self._log.waiting
        while (missing := steps - int(waiting.min())) > 0:
            if self.is_random:
                self._run(source, missing)
            elif (surely_random := random_steps - int(waiting.max())) > 0:
                self._run(RandomInstead(self._random, source), min(missing, surely_random))
            elif int(waiting.min()) < random_steps:  # some have had their random steps, others not
                self._run(RandomWhere(waiting < random_steps, self._random, source), 1)
            else:
                self._run(source, missing)

    def _source(self) -> BatchSource:
        if self.is_random:
            return self._random
        direct = direct_module(self._policy)  # looked at again for each batch: hooks come and go
        if direct is not None:
            return BatchModule(direct, self._engine)
        return self._on_tensordicts

    def _run(self, source: BatchSource, calls: int) -> None:
        log, step, version = self._log, self._engine.step, self._marks.version
        has_ends = self._engine.autoreset is Autoreset.DISABLED or self._limit is not None
        if self._over.any():  # only now: the last state of a batch must stay, and a restart may come
            self._reset_over(source)
        for left, action in enumerate(source.actions(calls, log), 1 - calls):
            out = step(action)
            log.add(out, version)
            if out.idle is not None:
                source.forget(out.idle)
            elif out.last:
                source.forget(self._mask_of([env for env, _ in out.last]))
            if has_ends and self._ends(out) and left:
                self._reset_over(source)
        log.count()

    def _ends(self, out: BatchStep) -> bool:
        """Takes in which episodes end with this call; says whether environments have to be reset."""
        natural = self._log.last_ends()
        self._over = natural
        if self._limit is not None:
            self._ages += 1 if out.idle is None else ~out.idle
            cut = self._ages >= self._limit
            self._log.cut(cut)
            self._ages[natural | cut] = 0
            self._over = natural | cut if self._engine.autoreset is Autoreset.DISABLED else cut & ~natural
        return bool(np.count_nonzero(self._over))

    def _reset_over(self, source: BatchSource) -> None:
        envs = self._over.copy()
        self._log.restart(envs, self._engine.reset(None if envs.all() else envs))
        self._over[:] = False
        source.forget(envs)

    def _mask_of(self, envs: list[int]) -> Array:
        mask = np.zeros(self._engine.n, np.bool_)
        mask[envs] = True
        return mask

    def _assembled(self, frames: Frames, steps: int) -> TensorDictBase:
        def of_batch(entries: dict[Any, Any]) -> TensorDict:
            return TensorDict(entries, batch_size=shape, device=self._device)

        shape = torch.Size((self._engine.n, steps))
        outcomes = {
            "reward": frames.reward,
            "done": frames.terminated | frames.truncated,
            "terminated": frames.terminated,
            "truncated": frames.truncated,
        }
        marks = self._marks.entries(outcomes["done"][..., 0], shape, frames.versions)
        flags = {key: torch.from_numpy(np.zeros((*shape, 1), dtype=np.bool_)) for key in FLAGS}
        columns = {key: torch.from_numpy(column) for key, column in outcomes.items()}
        following = of_batch({**columns, **frames.after})
        td = of_batch({**flags, "collector": of_batch(marks), "next": following, **frames.before, **frames.action})
        return td if frames.extras is None else frames.extras.update(td)


class CallLog:
    """The calls of `n` environments that step together, and which of them are frames nobody has taken yet.

    A *frame* is a step of one environment. Calls that only reset an environment are none for it. What an environment
    showed before call c is row c of the observations, what it showed after is row c + 1; where a reset wrote over the
    latter, the old value is kept aside. All arrays are copied when they come.
    """

    def __init__(self, n: int, leaves: list[Leaf], actions: list[Leaf]) -> None:
        self._n, self._leaves, self._action_leaves = n, leaves, actions
        self._none = bytes(n)
        self._numbers = np.arange(n)[:, None]
        codec, is_single = leaves[0].codec, len(leaves) == 1 and not leaves[0].path
        self._dtype = codec.raw_dtype if is_single else None  # None: several arrays
        self._shape, self._flat = (n, *codec.raw_shape), (n,)
        self._reward_row = np.dtype((np.void, n * SINGLE.itemsize))
        self.clear()

    def clear(self) -> None:
        """Forgets everything, the frames that wait for a batch too."""
        self._shown: list[list[Array]] = [[] for _ in self._leaves]
        self._actions: list[list[Array]] = [[] for _ in self._action_leaves]
        self._rewards: list[bytes] = []  # bytes: a tenth of the cost of small arrays, to make and to join
        self._uncounted: list[bytes] = []  # the rewards of the calls since the last `count`, in a dtype that fits all
        self._reward_dtype: np.dtype[Any] = SINGLE
        self._terminated: list[bytes] = []
        self._truncated: list[bytes] = []
        self._idle: list[bytes] = []  # those which the call has only reset
        self._moved: list[tuple[int, Any, list[Array]]] = []  # by call: which environments, what they showed at last
        self._extras: list[TensorDictBase | None] = []
        self._noted: TensorDictBase | None = None
        self._versions: list[int] = []
        self._dropped = 0
        self.waiting = np.zeros(self._n, dtype=np.int64)
        self._taken = np.zeros(self._n, dtype=np.int64)  # frames of this log, each environment's first ones

    @property
    def is_empty(self) -> bool:
        """Whether the environments have not been reset yet."""
        return not self._shown[0]

    def row(self, leaf: int) -> Array:
        """What the environments show now, `[n, *raw_shape]` of that leaf."""
        return self._shown[leaf][-1]

    def begin(self, observation: Any) -> None:
        """What the environments show after the first reset. Raises ValueError where it is not of their spaces."""
        for rows, shown in zip(self._rows_of(observation), self._shown, strict=True):
            shown.append(rows)

    def _rows_of(self, observation: Any) -> list[Array]:
        """Copies of the leaves `[n, ...]` of batched observations. Raises ValueError where one is not of its space."""
        if type(observation) is np.ndarray and observation.dtype is self._dtype and observation.shape == self._shape:
            return [observation.copy()]
        return [np.array(leaf.rows(observation, self._n), order="C") for leaf in self._leaves]

    def act(self, action: Any) -> None:
        """Keeps the raw action of the next call."""
        for leaf, kept in zip(self._action_leaves, self._actions, strict=True):
            kept.append(np.array(leaf.pick(action), leaf.codec.raw_dtype, order="C"))

    def act_often(self, actions: Array) -> None:
        """Keeps the raw actions `[calls, n, ...]` of the next calls, where an action is one array."""
        self._actions[0].extend(np.array(actions, self._action_leaves[0].codec.raw_dtype, order="C"))

    def note(self, extras: TensorDictBase) -> None:
        """Keeps what the policy writes besides the action of the next call, in the place of what was noted for it."""
        self._noted = extras

    def add(self, out: BatchStep, version: int) -> None:
        """Keeps one call. Raises ValueError where something of it is not what it should be, and keeps nothing then.

        Rewards beyond float32 are told of by `count`.
        """
        rows, reward, terminated, truncated = self._rows_of(out.observation), out.reward, out.terminated, out.truncated
        flat, ndarray = self._flat, np.ndarray  # rows of their dtype are not handed to a function: that costs as much
        if type(reward) is not ndarray or reward.dtype is not self._reward_dtype or reward.shape != flat:
            reward = self._widened(reward_row(reward, self._n))
        if type(terminated) is not ndarray or terminated.dtype is not BOOL or terminated.shape != flat:
            terminated = flag_row(terminated, self._n, "terminated")
        if type(truncated) is not ndarray or truncated.dtype is not BOOL or truncated.shape != flat:
            truncated = flag_row(truncated, self._n, "truncated")
        lasts = out.last and [(env, [leaf.value(last).copy() for leaf in self._leaves]) for env, last in out.last]
        for row, shown in zip(rows, self._shown, strict=True):
            shown.append(row)
        self._idle.append(self._none if out.idle is None else out.idle.tobytes())
        self._terminated.append(terminated.tobytes())
        self._truncated.append(truncated.tobytes())
        self._versions.append(version)
        self._extras.append(self._noted)
        self._noted = None
        for env, last in lasts:
            self._moved.append((self._last_call + 1, env, last))
        self._uncounted.append(reward.tobytes())  # last: a call with rewards is whole

    def _widened(self, reward: Array) -> Array:
        """Rewards that are not of the dtype of those before them, in one that fits all which are not counted yet."""
        if not self._uncounted:
            self._reward_dtype = SINGLE if reward.dtype == SINGLE else DOUBLE
        elif self._reward_dtype is SINGLE:
            self._uncounted = [row.tobytes() for row in _rows(self._uncounted, SINGLE, self._n).astype(DOUBLE)]
            self._reward_dtype = DOUBLE
        return reward.astype(self._reward_dtype)

    @property
    def _last_call(self) -> int:
        return self._dropped + len(self._rewards) + len(self._uncounted) - 1

    def last_ends(self) -> Array:
        """Where the last call ended an episode, bool `[n]`."""
        terminated, truncated = self._terminated[-1], self._truncated[-1]
        return np.frombuffer(terminated, np.bool_) | np.frombuffer(truncated, np.bool_)

    def cut(self, envs: Array) -> None:
        """The episodes of `envs` (bool `[n]`) end with the last call, by truncation."""
        self._truncated[-1] = (np.frombuffer(self._truncated[-1], np.bool_) | envs).tobytes()

    def restart(self, envs: Array, observation: Any) -> None:
        """`envs` (bool `[n]`) were reset after the last call, and show `observation`."""
        begun = self._rows_of(observation)
        self._moved.append((self._last_call, envs, [shown[-1][envs] for shown in self._shown]))
        for rows, shown in zip(begun, self._shown, strict=True):
            shown[-1][envs] = rows[envs]

    def count(self) -> None:
        """The calls since the last count become waiting frames.

        Raises ValueError for rewards beyond float32; the calls before count, that one and those after it are dropped.
        """
        made = narrow_rewards(_rows(self._uncounted, self._reward_dtype, self._n))
        self._uncounted.clear()
        counted, calls = len(self._rewards), len(made.values)
        self._rewards.extend(made.values.view(self._reward_row)[:, 0].tolist())  # bytes of each call
        self.waiting += calls - _rows(self._idle[counted : counted + calls], np.bool_, self._n).sum(0)
        if made.error is not None:
            raise made.error

    def take(self, steps: int) -> Frames:
        """The first `steps` waiting frames of each environment, oldest first; they wait no more."""
        n, total = self._n, len(self._rewards)
        are_frames = ~_rows(self._idle[:total], np.bool_, n).T
        found, counts = np.flatnonzero(are_frames), self._taken + self.waiting
        starts = counts.cumsum() - counts + self._taken  # where in `found` the first waiting frame of each stands
        slots = found[starts[:, None] + np.arange(steps)]
        calls = slots - self._numbers * total
        slots = calls * n + self._numbers
        frames = Frames(slots, calls, self._versions)
        self._fill(frames)
        self.waiting -= steps
        self._taken += steps
        following = found.take((starts + steps)[self.waiting > 0]) % total
        self._drop_before(int(following.min()) if len(following) else total, are_frames)
        return frames

    def _fill(self, frames: Frames) -> None:
        slots, n = frames.slots, self._n
        for leaf_number, (leaf, shown) in enumerate(zip(self._leaves, self._shown, strict=True)):
            rows = _rows(shown, leaf.codec.raw_dtype, *leaf.codec.raw_shape)
            frames.before[leaf.key] = leaf.codec.encode(rows.take(slots, 0))
            for call, envs, last in self._moved:  # a call before the first of this log has nobody who reads it
                rows[(call + 1 - self._dropped) * n :][:n][envs] = last[leaf_number]
            frames.after[leaf.key] = leaf.codec.encode(rows.take(slots + n, 0))
        for leaf, actions in zip(self._action_leaves, self._actions, strict=True):
            rows = _rows(actions, leaf.codec.raw_dtype, *leaf.codec.raw_shape)
            frames.action[leaf.key] = leaf.codec.encode(rows.take(slots, 0))
        frames.reward = _rows(self._rewards, np.float32, 1).take(slots, 0)
        frames.terminated = _rows(self._terminated, np.bool_, 1).take(slots, 0)
        frames.truncated = _rows(self._truncated, np.bool_, 1).take(slots, 0)
        noted = next((extras for extras in self._extras if extras is not None), None)
        if noted is not None:
            by_call = [noted.empty() if extras is None else extras for extras in self._extras]
            frames.extras = stack_steps(by_call, 0).reshape(-1)[torch.from_numpy(slots)]

    def _drop_before(self, calls: int, are_frames: Array) -> None:
        flat: list[list[Any]] = [self._rewards, self._terminated, self._truncated, self._idle, self._extras]
        for column in (*self._shown, *self._actions, *flat):
            del column[:calls]
        self._versions = self._versions[calls:]  # the last frames have the old ones
        self._taken -= are_frames[:, :calls].sum(1)
        self._dropped += calls
        self._moved = [entry for entry in self._moved if entry[0] >= self._dropped]


def _rows(chunks: Sequence[Any], dtype: Any, *shape: int) -> Array:
    """Arrays, or bytes, of one dtype as the rows `[-1, *shape]` of a new one: a third of the cost of `concatenate`."""
    return np.frombuffer(bytearray().join(chunks), dtype).reshape(-1, *shape)


class Frames:
    """A batch `[n, time]` cut out of a log: tensors by key, and arrays `[n, time, 1]`.

    `calls` `[n, time]` says which call of the log each frame is, `slots` where in its flat rows; `versions` of the
    policy go by call.
    """

    reward: Array
    terminated: Array
    truncated: Array

    def __init__(self, slots: Array, calls: Array, versions: list[int]) -> None:
        self.slots, self._calls, self._versions = slots, calls, versions
        self.before: dict[Any, Tensor] = {}
        self.after: dict[Any, Tensor] = {}
        self.action: dict[Any, Tensor] = {}
        self.extras: TensorDictBase | None = None

    def versions(self) -> Array:
        """Of the policy, int64 `[n, time]`."""
        return np.array(self._versions, np.int64).take(self._calls)


class BatchSource:
    """A source that keeps nothing from call to call and writes nothing but the action."""

    def __init__(self, engine: BatchEngine) -> None:
        self.engine, self._codec = engine, engine.action

    def act(self, log: CallLog) -> Any:
        """The action `[n, *spec.shape]` in the state that the log shows."""
        raise NotImplementedError

    def actions(self, calls: int, log: CallLog) -> Iterator[Any]:
        """One raw batched action for each of so many calls, when its turn comes."""
        decode = self._codec.decode_batch
        for call in range(calls):
            action = self.act(log)
            if call == 0:  # one look a stretch: a wrong shape or a score instead of a choice shows at once
                check_action(self._codec, action, (self.engine.n,))
            try:
                raw = decode(action)
            except Exception:
                check_action(self._codec, action, (self.engine.n,))  # says what came and what is allowed
                raise
            log.act(raw)
            yield raw

    def forget(self, envs: Array) -> None:
        """Environments `envs` (bool `[n]`) start anew: nothing of their last episodes goes on."""

    def skip(self, log: CallLog) -> None:
        """All actions of the next call are random ones from elsewhere."""

    def disown(self, envs: Array, log: CallLog) -> None:
        """For `envs` (bool `[n]`) the action that `act` gave last was replaced by a random one."""


class BatchRandom(BatchSource):
    """Random actions, drawn for many calls at once."""

    def __init__(self, policy: RandomPolicy, engine: BatchEngine) -> None:
        super().__init__(engine)
        self._spec = policy.action_spec
        self._is_codec_spec = self._spec == self._codec.spec.expand(engine.n, *self._codec.spec.shape)
        self._is_one_array = not leaves_of(self._codec, ("action",))[0].path

    def act(self, log: CallLog) -> Any:
        return self._spec.rand(())

    def actions(self, calls: int, log: CallLog) -> Iterator[Any]:
        if not self._is_one_array:
            return super().actions(calls, log)
        raws = self._drawn(calls)
        log.act_often(raws)
        return iter(raws)

    def _drawn(self, calls: int) -> Array:
        if self._is_codec_spec:
            return np.asarray(self._codec.random_batch((calls, self.engine.n)))
        drawn = self._spec.rand((calls,))
        check_action(self._codec, drawn, (calls, self.engine.n))
        return np.asarray(self._codec.decode_batch(drawn))


class BatchModule(BatchSource):
    """A module from one observation tensor to the action, called with nothing in between."""

    def __init__(self, policy: ObservationPolicy, engine: BatchEngine) -> None:
        super().__init__(engine)
        self._module = policy.module
        self._leaf = [leaf.key for leaf in engine.leaves].index(policy.in_key)
        self._encode = engine.leaves[self._leaf].codec.encode

    def act(self, log: CallLog) -> Any:
        return self._module(self._encode(log.row(self._leaf)))


class BatchTensorDicts(BatchSource):
    """A policy on TensorDicts. What it writes besides the action is kept, stored, and handed to it at the next step."""

    def __init__(self, policy: TensorDictPolicy, engine: BatchEngine, device: Any) -> None:
        super().__init__(engine)
        self._policy = policy
        self._kept = TensorDict(batch_size=[engine.n], device=device)
        self._flag = torch.zeros(engine.n, 1, dtype=torch.bool)
        self._keys = [leaf.key for leaf in engine.leaves]
        self._blank: TensorDictBase | None = None
        self._last: TensorDictBase = self._kept

    def act(self, log: CallLog) -> Any:
        out = self._policy(self._state(log))
        self._note(out, log)
        return out.get("action")

    def skip(self, log: CallLog) -> None:
        state = self._state(log)
        self._note(state.update(self._blanks(state)), log)

    def disown(self, envs: Array, log: CallLog) -> None:
        log.note(zero_where(_as_mask(envs), self._last))
        self._kept = zero_where(_as_mask(envs), self._kept)

    def forget(self, envs: Array) -> None:
        if not self._kept.is_empty() and envs.any():
            self._kept = zero_where(_as_mask(envs), self._kept)

    def _blanks(self, state: TensorDictBase) -> TensorDictBase:
        if self._blank is None:
            self._blank = extras_of(self._policy, state)
        return self._blank.clone()

    def _state(self, log: CallLog) -> TensorDictBase:
        td = self._kept.copy()
        for index, leaf in enumerate(self.engine.leaves):
            td.set(leaf.key, leaf.codec.encode(log.row(index)))
        return td.update(dict.fromkeys(FLAGS, self._flag))

    def _note(self, out: TensorDictBase, log: CallLog) -> None:
        self._last = extras = out.exclude("action", *FLAGS, *self._keys)
        log.note(extras)
        following = extras.get("next", None)
        kept = extras.exclude("next").copy()
        self._kept = kept if following is None else kept.update(following.copy())


class RandomInstead(BatchSource):
    """Random actions; the source that they stand in for skips the steps."""

    def __init__(self, random: BatchRandom, source: BatchSource) -> None:
        super().__init__(random.engine)
        self._random, self._source = random, source

    def forget(self, envs: Array) -> None:
        self._source.forget(envs)

    def actions(self, calls: int, log: CallLog) -> Iterator[Any]:
        for raw in self._random.actions(calls, log):
            self._source.skip(log)
            yield raw


class RandomWhere(BatchSource):
    """Random actions for `envs` (bool `[n]`), those of a source for the others."""

    def __init__(self, envs: Array, random: BatchRandom, source: BatchSource) -> None:
        super().__init__(random.engine)
        self._envs, self._random, self._source = envs, random, source

    def forget(self, envs: Array) -> None:
        self._source.forget(envs)

    def act(self, log: CallLog) -> Any:
        chosen = self._source.act(log)
        self._source.disown(self._envs, log)
        random, mask = self._random.act(log), _as_mask(self._envs)
        if isinstance(chosen, Tensor):
            return torch.where(mask.reshape(-1, *(1,) * (chosen.ndim - 1)), random.to(chosen.dtype), chosen)
        return merge_where(mask, random, chosen)


def _as_mask(envs: Array) -> Tensor:
    return torch.from_numpy(envs).unsqueeze(1)
