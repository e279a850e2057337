"""Stepping one gymnasium environment a few steps at a time, where making a batch would take longer than its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from engram.collectors.action_sources import ActionSource, RandomActions
from engram.collectors.gym_rollout import GymRollout, OneEpisode
from engram.collectors.output_columns import OutputColumns, leaves_of
from engram.collectors.rollout import ColumnPlaces, RolloutResult, StepColumns
from engram.collectors.stats import EpisodeStats, StepsWay
from engram.collectors.trajectories import EpisodeSteps, StepTags
from engram.data.replay_buffers.buffers.batch_writer import ColumnRows
from engram.envs.codecs import Array, ArrayCodec, SpaceLeaf, flag_of, reward_of, rewards_of
from engram.envs.engines import GymEngine, action_check
from engram.envs.policies import FLAGS, RandomPolicy, TensorDictPolicy, as_observation_policy
from engram.pytree import KeyPath, key_path

FEW_STEPS = 32  # of a batch: with more of them what is done once a batch does not count
WINDOW_STEPS, WINDOW_BYTES = 256, 1 << 20  # the room of a window: so many steps, or so many bytes of observations

_BY_STEPS = StepsWay("steps")


class StepRollout:
    """Steps one gymnasium environment with raw values; row by row the same as `GymRollout`.

    Small batches are parts of a window: columns for many steps, which are filled one batch after the other, so that
    nothing is made for each batch. Batches with more steps, and actions that are not one array, are left to `general`.
    """

    def __init__(
        self,
        env: Any,
        engine: GymEngine,
        policy: TensorDictPolicy,
        tags: StepTags,
        general: GymRollout,
        *,
        max_frames_per_traj: int | None,
    ) -> None:
        self.is_random = general.is_random
        self._general, self._policy, self._tags = general, policy, tags
        self._step, self._reset_env = engine.step, engine.reset
        self._max_frames = max_frames_per_traj
        self._device = env.device
        self._leaves, codec = engine.leaves, engine.action
        self._keys = {leaf.key for leaf in engine.leaves}
        self._codec = codec.in_one_array
        self._check, self._decode = action_check(codec), codec.decode_one
        self._known, self._action_shape = codec.quick_decoder(self._check), codec.spec.shape
        random = policy if isinstance(policy, RandomPolicy) else RandomPolicy(env.action_spec)
        self._random = RandomActions(random, codec, env.batch_size, tags.weights)
        self._steps_way = _BY_STEPS
        self.restart()

    @property
    def steps_way(self) -> StepsWay:
        return self._general.steps_way if self._window is None else self._steps_way

    def restart(self) -> None:
        self._general.restart()
        self._window: _Window | None = None  # None: `general` has collected last
        self._source_of: tuple[Any, Any] = (None, None)  # the window and the policy of `_source`
        self._source: ActionSource = self._random
        self._must_reset = True
        self._left: int | None = None  # steps until the episode is cut; None: it is not

    def collect(self, steps: int, *, random_steps: int) -> RolloutResult:
        if self._codec is None or steps > FEW_STEPS:
            return self._collect_generally(steps, random_steps)
        window = self._window_for(self._codec, steps)
        source = self._random if self.is_random else self._source_in(window)
        try:
            self._run(window, source, steps, steps if self.is_random else random_steps)
        except BaseException as error:
            return self._cut_short(window, error)
        invalid = window.finish(steps)
        return RolloutResult(self._steps_of(window)) if invalid is None else self._cut_short(window, invalid)

    def _collect_generally(self, steps: int, random_steps: int) -> RolloutResult:
        if self._window is not None:
            self._general.episode = OneEpisode(self._window.last_row(), self._must_reset, self._left)
            self._window = None
        return self._general.collect(steps, random_steps=random_steps)

    def _window_for(self, codec: ArrayCodec, steps: int) -> _Window:
        """A window with room for so many steps more, which are a batch."""
        window = self._window
        if window is None:
            row, self._must_reset, self._left = self._general.episode
        elif window.stop + steps <= window.room:
            window.begin()
            return window
        else:
            row = window.last_row()
        self._window = _Window(self._leaves, codec, row, self._tags, self._device)
        return self._window

    def _source_in(self, window: _Window) -> ActionSource:
        """Where actions come from: the policy, which reads the observations of a window."""
        direct = as_observation_policy(self._policy)  # looked up again for each batch: hooks come and go
        if direct is None or not self._keys.issuperset(direct.in_keys):
            actions = self._general.tensordict_actions
            return actions.start(window, window)
        if self._source_of[0] is not window or self._source_of[1] is not direct:
            self._source = self._general.module_actions(direct, window, window)
            self._source_of = window, direct
        return self._source

    def _cut_short(self, window: _Window, error: BaseException) -> RolloutResult:
        """The whole steps before an error; restarts: no trajectory continues after it."""
        self.restart()
        earlier = window.finish(len(window.rewards))
        error = error if earlier is None else earlier
        if window.stop == window.first:
            raise error
        return RolloutResult(self._steps_of(window), error)

    def _run(self, window: _Window, source: ActionSource, steps: int, random_steps: int) -> None:
        weights, step, add_reward = self._tags.weights, self._step, window.rewards.append
        raws = self._random.draw_rows(min(steps, random_steps))[1] if random_steps else ()
        version, versions = weights.version, window.versions
        array, dtype, shape = window.first_array, window.dtype, window.shape
        for number, slot in enumerate(range(window.first, window.first + steps)):
            if self._must_reset:
                self._reset(window, slot, source)
            if number < random_steps:
                source.skip_step(slot)
                raw = raws[number]
            else:
                with weights.call_lock:
                    version = weights.begin_call()
                    action = source.choose(slot)
                raw = self._raw_of(action, number, is_first=number == random_steps)
            window.actions[slot] = raw
            if versions is not None:
                versions[slot] = version
            observation, reward, terminated, truncated, _ = step(raw)
            if type(observation) is np.ndarray and observation.dtype is dtype and observation.shape == shape:
                array[slot + 1] = observation
            else:
                window.put(slot + 1, observation)
            is_over = terminated is not False or truncated is not False
            if self._left is not None:
                self._left -= 1
                is_over = is_over or self._left == 0
            is_over = is_over and window.end(slot, terminated, truncated, is_cut=self._left == 0)
            add_reward(reward if type(reward) is float else reward_of(reward))  # last: a step with a reward is whole
            self._must_reset = is_over

    def _reset(self, window: _Window, slot: int, source: ActionSource) -> None:
        window.put_first(slot, self._reset_env())
        source.reset_envs([0])
        self._must_reset, self._left = False, self._max_frames

    def _raw_of(self, action: Any, number: int, *, is_first: bool) -> Any:
        """The raw form of the action of a step. Raises ValueError for one that is not of the environment's space."""
        try:  # of the first the shape is compared, too
            fits = not is_first or (type(action) is Tensor and action.shape == self._action_shape)
            raw = self._known(action) if fits else None
        except Exception:
            raw = None
        if raw is None:
            self._check.refuse(action, number)
            raw = self._decode(action)
        return raw

    def _steps_of(self, window: _Window) -> WindowSteps:
        window.tag(self._tags)
        steps = WindowSteps(window)
        self._steps_way = window.outputs.way
        return steps


class WindowSteps:
    """The steps of the last batch of a window, until the next one is collected."""

    def __init__(self, window: _Window) -> None:
        self._window = window
        self._first, self._stop = window.first, window.stop
        self.shape = torch.Size((self._stop - self._first,))
        self._columns: StepColumns | None = None  # of these steps alone, where they are wanted

    def count_episodes(self, episodes: EpisodeStats) -> None:
        episodes.add_part(*self._window.outcome_rows, self._first, self._stop)

    def count_steps(self, counter: EpisodeSteps) -> None:
        self._alone().count_steps(counter)

    def append_to(self, rows: ColumnRows, places: ColumnPlaces) -> bool:
        if self._columns is None and (columns := self._window.columns(places)) is not None:
            return rows.append_part(columns, self._first, self._stop - self._first)
        return self._alone().append_to(rows, places)

    def batch(self) -> TensorDictBase:
        return self._alone().batch()

    def _alone(self) -> StepColumns:
        if self._columns is None:
            self._columns = self._window.step_columns(self.shape)
        return self._columns


class _Window:
    """The columns of many steps of one environment, `[room, ...]`; a batch is a part of them, [first, stop).

    Slot t has step t and the observation before it, the one after it is in slot t + 1: no slot is written twice, but
    that of the last observation of an episode, in whose place the first of the next one comes. In a batch it is kept
    apart until the next batch begins.
    """

    def __init__(
        self,
        leaves: list[SpaceLeaf],
        codec: ArrayCodec,
        first_row: list[Array] | None,
        tags: StepTags,
        device: torch.device | None,
    ) -> None:
        self._leaves, self._codec, self._device = leaves, codec, device
        self.keys = [leaf.key for leaf in leaves]  #: of the observations
        step = sum(leaf.codec.raw_dtype.itemsize * math.prod(leaf.codec.raw_shape) for leaf in leaves)
        self.room = room = max(FEW_STEPS, min(WINDOW_STEPS, WINDOW_BYTES // max(1, step)))
        self.first = self.stop = 0
        self._observations = [np.empty((room + 1, *leaf.codec.raw_shape), leaf.codec.raw_dtype) for leaf in leaves]
        for array, row in zip(self._observations, first_row or (), strict=first_row is not None):
            array[0] = row[0]
        self.first_array, first = self._observations[0], leaves[0].codec
        takes_any_value = len(leaves) == 1 and not leaves[0].path and first.limits is None
        self.dtype = first.raw_dtype if takes_any_value else None  # None: several arrays, or `put` compares values
        self.shape = first.raw_shape
        self.actions = np.empty((room, *codec.raw_shape), codec.raw_dtype)
        self.rewards: list[float] = []  # of the steps of this batch
        self._rewards = np.empty((room, 1), np.float32)
        self._done, self._terminated, self._truncated = (np.zeros((room, 1), np.bool_) for _ in range(3))
        self.outcome_rows = self._rewards.reshape(1, room), self._done.reshape(1, room)
        self._ids = np.zeros((1, room), np.int64)
        self.versions = np.zeros(room, np.int64) if tags.tracks_version else None
        self._tracks_ids = tags.tracks_ids
        self.outputs = _WindowOutputs(room, device)
        self._lasts: list[tuple[int, list[Array]]] = []  # slots, and the last observations that were there
        self._rows: dict[Any, Callable[[int], Tensor]] = {}
        self._encoded: _Encoded | None = None
        self._columns: tuple[Any, Any, list[Any] | None] = (None, None, None)  # for places and outputs

    def begin(self) -> None:
        """Begins the next batch."""
        self.first = self.stop
        self.rewards.clear()
        self._lasts.clear()
        self.outputs.begin(self.first)

    def rows(self, key: Any) -> Callable[[int], Tensor]:
        """A function from a slot to a copy of the observation that is stored there."""
        found = self._rows.get(key)
        if found is None:
            number = self.keys.index(key)
            found = self._rows[key] = self._leaves[number].codec.row_encoder(self._observations[number])
        return found

    def store_outputs(self, outputs: Mapping[str, Any]) -> None:
        self.outputs.put(self.first + len(self.rewards), outputs)

    def store_tensordict(self, outputs: TensorDictBase, reason: str) -> None:
        self.outputs.put_tensordict(self.first + len(self.rewards), outputs, reason)

    def put(self, slot: int, raw: Any) -> None:
        """Stores an observation. Raises ValueError where it is not of the space; nothing is changed then."""
        values = [leaf.value(raw) for leaf in self._leaves]
        for array, value in zip(self._observations, values, strict=True):
            array[slot] = value

    def put_first(self, slot: int, raw: Any) -> None:
        """Stores the first observation of an episode. Raises ValueError as `put`."""
        values = [leaf.value(raw) for leaf in self._leaves]
        if slot > self.first:  # in the middle of a batch, which has the last one of the episode before
            self._lasts.append((slot, [array[slot].copy() for array in self._observations]))
        for array, value in zip(self._observations, values, strict=True):
            array[slot] = value

    def end(self, slot: int, terminated: Any, truncated: Any, *, is_cut: bool) -> bool:
        """Notes and returns whether an episode ends with a step. Raises ValueError for flags that are not bools."""
        is_terminated, is_truncated = flag_of(terminated, "terminated"), flag_of(truncated, "truncated") or is_cut
        self._terminated[slot], self._truncated[slot] = is_terminated, is_truncated
        self._done[slot] = is_over = is_terminated or is_truncated
        return is_over

    def finish(self, steps: int) -> BaseException | None:
        """The batch has so many steps, or those before the first invalid reward, about which is the error."""
        rewards, first = self.rewards, self.first
        if steps == 1 and -1e38 < rewards[0] < 1e38:
            self._rewards[first] = rewards[0]
            self.stop = first + 1
            return None
        values, error = rewards_of(rewards)
        self.stop = first + len(values)
        self._rewards[first : self.stop, 0] = values
        return error

    def tag(self, tags: StepTags) -> None:
        """Gives the steps of the batch their trajectories."""
        tags.ids.number_into(self._ids, self.outcome_rows[1], self.first, self.stop)
        self.outputs.finish(self.stop)

    def last_row(self) -> list[Array]:
        """The observations after the last step."""
        return [array[self.stop : self.stop + 1].copy() for array in self._observations]

    def columns(self, places: ColumnPlaces) -> list[Any] | None:
        """The columns of all steps in these places, where those of the batch lie in them; the same list for a window.

        None: what the rows have is not exactly in these columns, or not for the steps of this batch.
        """
        outputs = self.outputs.columns
        if outputs is None or self._lasts:
            return None
        if self._columns[0] is not places or self._columns[1] is not outputs:
            self._columns = places, outputs, self._columns_in(places, outputs)
        columns = self._columns[2]
        if columns is not None and self._encoded is not None:
            self._encoded.update(self.first, self.stop)
        return columns

    def _columns_in(self, places: ColumnPlaces, outputs: Mapping[Any, Array]) -> list[Any] | None:
        encoded = self._encoded = self._encoded or _Encoded(self._leaves, self._observations, self._codec, self.actions)
        found: dict[KeyPath, Any] = {key_path(key): column for key, column in outputs.items()}
        for leaf, array in zip(self._leaves, encoded.observations, strict=True):
            path = key_path(leaf.key)
            found[path], found[("next",) + path] = array[:-1], array[1:]  # noqa: RUF005
        found["action",] = encoded.actions
        found |= {("next", key): column for key, column in self._outcomes().items()}
        found |= {(flag,): np.zeros((self.room, 1), np.bool_) for flag in FLAGS}
        found |= {("collector", name): column for name, column in self._tags().items()}
        if len(found) != places.wanted:
            return None
        if any(path is not None and path not in found for path in places.paths):
            return None
        return [None if path is None else found[path] for path in places.paths]

    def _outcomes(self) -> dict[str, Array]:
        return {
            "reward": self._rewards,
            "done": self._done,
            "terminated": self._terminated,
            "truncated": self._truncated,
        }

    def _tags(self) -> dict[str, Array]:
        tags = {"traj_ids": self._ids[0]} if self._tracks_ids else {}
        return tags if self.versions is None else {**tags, "policy_version": self.versions}

    def step_columns(self, shape: torch.Size) -> StepColumns:
        """The steps of the batch, in columns of their own."""
        first, stop = self.first, self.stop
        before, after = {}, {}
        for number, leaf in enumerate(self._leaves):
            column, following = self._observations[number][first:stop], self._observations[number][first + 1 : stop + 1]
            if self._lasts:
                following = following.copy()
                for slot, rows in self._lasts:
                    if slot <= stop:
                        following[slot - 1 - first] = rows[number]
            before[leaf.key] = column if leaf.codec.is_raw else leaf.codec.encode(column)
            after[leaf.key] = following if leaf.codec.is_raw else leaf.codec.encode(following)
        actions = self.actions[first:stop]
        before["action"] = actions if self._codec.is_raw else self._codec.encode(actions)
        outcomes = {key: column[first:stop] for key, column in self._outcomes().items()}
        tags = {key: column[first:stop] for key, column in self._tags().items()}
        outputs = self.outputs.take(stop)
        return StepColumns(before, after, outcomes, tags, outputs, shape=shape, device=self._device, is_kept=False)


class _Encoded:
    """Observations and actions of a window as tensors have them, in arrays; what tensors have as it is is no copy."""

    def __init__(self, leaves: list[SpaceLeaf], observations: list[Array], codec: ArrayCodec, actions: Array) -> None:
        self._copies: list[tuple[ArrayCodec, Array, Array, int]] = []  # codec, from, to, and how many rows more
        self.observations = [
            self._array_of(leaf.codec, array, 1) for leaf, array in zip(leaves, observations, strict=True)
        ]
        self.actions = self._array_of(codec, actions, 0)

    def _array_of(self, codec: ArrayCodec, raw: Array, more: int) -> Array:
        if codec.is_raw:
            return raw
        encoded = torch.zeros((len(raw), *codec.spec.shape), dtype=codec.spec.dtype, device="cpu").numpy()
        self._copies.append((codec, raw, encoded, more))
        return encoded

    def update(self, first: int, stop: int) -> None:
        """Encodes the steps [first, stop)."""
        for codec, raw, encoded, more in self._copies:
            encoded[first : stop + more] = codec.encode(raw[first : stop + more]).numpy()


class _WindowOutputs:
    """What the policy writes besides its action in the steps of a window, in columns of it.

    That is so as long as each step has the same entries, plain tensors of one form. A batch with other steps has its
    outputs apart from the window, in `OutputColumns`; the one after it lays out columns anew.
    """

    def __init__(self, room: int, device: torch.device | None) -> None:
        self._room, self._device = room, device
        self._clear()
        self.begin(0)

    def _clear(self) -> None:
        self._columns: dict[Any, Tensor] = {}
        self._arrays: dict[Any, Array] = {}
        self._is_laid_out = False
        self._apart: OutputColumns | None = None

    def begin(self, first: int) -> None:
        """Begins the batch whose first step is in this slot."""
        self._first = self._next = first
        if self._apart is not None:
            self._clear()

    @property
    def way(self) -> StepsWay:
        return _BY_STEPS if self._apart is None else self._apart.way

    @property
    def columns(self) -> dict[Any, Array] | None:
        """All columns `[room, ...]`; None where the outputs of this batch are apart."""
        return self._arrays if self._apart is None else None

    def put(self, slot: int, outputs: Mapping[str, Any]) -> None:
        """Copies the outputs of the step in this slot."""
        if self._apart is None and slot == self._next and self._fits(outputs):
            self._next = slot + 1
            for column, value in zip(self._columns.values(), self._values, strict=True):
                column[slot] = value
            return
        self._move_apart().put(slot - self._first, outputs)

    def put_tensordict(self, slot: int, outputs: TensorDictBase, reason: str) -> None:
        """As `put`, of outputs that have no place in columns."""
        self._move_apart().put_tensordict(slot - self._first, outputs, reason)

    def finish(self, stop: int) -> None:
        """The batch ends before this slot. Steps without outputs have none in the window either."""
        if self._apart is None and self._next < stop and (self._columns or self._next > self._first):
            self._move_apart()

    def take(self, stop: int) -> TensorDictBase | None:
        """The outputs of this batch, `[stop - first]`, in memory of their own; None where there are none."""
        if self._apart is not None:
            return self._apart.take(stop - self._first)
        if not self._columns or self._next == self._first:
            return None
        found = {key: column[self._first : stop].clone() for key, column in self._columns.items()}
        return TensorDict(found, [stop - self._first], device=self._device)

    def _fits(self, outputs: Mapping[str, Any]) -> bool:
        if any(type(value) is not Tensor for value in outputs.values()):
            outputs = dict(leaves_of(outputs, torch.Size(), self._device))
        if not self._is_laid_out:
            self._lay_out(outputs)
        if [*outputs] != [*self._columns]:
            return False
        self._values = [*outputs.values()]
        for column, value in zip(self._columns.values(), self._values, strict=True):
            if type(value) is not Tensor or value.dtype != column.dtype or value.shape != column.shape[1:]:
                return False
        return True

    def _lay_out(self, outputs: Mapping[str, Any]) -> None:
        self._is_laid_out = True
        values = outputs.values()
        if not all(type(v) is Tensor and v.is_cpu and v.layout is torch.strided and not v.is_nested for v in values):
            return
        if self._room * sum(value.numel() * value.element_size() for value in values) > WINDOW_BYTES:
            return
        columns = {key: value.new_zeros((self._room, *value.shape)) for key, value in outputs.items()}
        try:
            self._arrays = {key: column.numpy() for key, column in columns.items()}
        except TypeError:  # numpy has no such dtype
            return
        self._columns = columns

    def _move_apart(self) -> OutputColumns:
        """Takes the outputs of this batch out of the window."""
        if self._apart is None:
            self._apart = OutputColumns(torch.Size(), self._device, capacity=FEW_STEPS)
            for slot in range(self._first, self._next):
                self._apart.put(slot - self._first, {key: column[slot] for key, column in self._columns.items()})
        return self._apart
