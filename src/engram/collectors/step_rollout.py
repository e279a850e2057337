"""Stepping one gymnasium environment a few steps at a time, where making a batch would take longer than its steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.collectors.action_sources import RandomActions
from engram.collectors.gym_rollout import GymRollout, OneEpisode
from engram.collectors.output_columns import OutputColumns
from engram.collectors.rollout import RolloutResult, StepColumns, Steps
from engram.collectors.stats import StepsWay
from engram.collectors.trajectories import StepTags
from engram.envs.codecs import Array, ArrayCodec, DiscreteCodec, Rewards, SpaceLeaf, TextCodec, flag_of, rewards_of
from engram.envs.engines import GymEngine, action_check
from engram.envs.policies import ObservationPolicy, RandomPolicy, TensorDictPolicy, as_observation_policy

FEW_STEPS = 32  # of a batch: with more of them what is done once a batch does not count
WINDOW_STEPS, WINDOW_BYTES = 256, 1 << 20  # the room of a window: so many steps, or so many bytes of observations

_BY_STEPS = StepsWay("steps")


class StepRollout:
    """Steps one gymnasium environment with raw values; row by row the same as `GymRollout`.

    Small batches are parts of a window: columns for many steps, which are filled one batch after the other, so that
    nothing is made for each batch. Their policy is random, or a module on observations that gives the action; batches
    with more steps, or of other policies, are left to `general`.
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
        self._codec = codec if isinstance(codec, ArrayCodec) else None
        if isinstance(codec, TextCodec):
            self._codec = None  # an action is a text, or more than one array
        self._check, self._decode = action_check(codec), codec.decode_one
        self._known, self._action_shape = self._known_action(codec), codec.spec.shape
        random = policy if isinstance(policy, RandomPolicy) else RandomPolicy(env.action_spec)
        self._steps_way = _BY_STEPS
        self._random = RandomActions(random, codec, env.batch_size, tags.weights)
        self.restart()

    @property
    def steps_way(self) -> StepsWay:
        return self._general.steps_way if self._window is None else self._steps_way

    def restart(self) -> None:
        self._general.restart()
        self._window: _Window | None = None  # None: `general` has collected last
        self._must_reset = True
        self._left: int | None = None  # steps until the episode is cut; None: it is not

    def collect(self, steps: int, *, random_steps: int) -> RolloutResult:
        random_steps = steps if self.is_random else min(steps, random_steps)
        policy = as_observation_policy(self._policy)  # looked up again for each batch: hooks come and go
        if self._codec is None or steps > FEW_STEPS or not self._goes_by_steps(policy, random_steps):
            return self._collect_generally(steps, random_steps)
        return self._collect_few(self._codec, policy, steps, random_steps)

    def _goes_by_steps(self, policy: ObservationPolicy | None, random_steps: int) -> bool:
        if policy is None:
            return self.is_random
        has_zeros = random_steps and policy.outputs != 1  # in the place of outputs that a policy has besides its action
        return not has_zeros and self._keys.issuperset(policy.in_keys)

    def _collect_generally(self, steps: int, random_steps: int) -> RolloutResult:
        if self._window is not None:
            self._general.episode = OneEpisode(self._window.last_row(), self._must_reset, self._left)
            self._window = None
        return self._general.collect(steps, random_steps=random_steps)

    def _window_for(self, codec: ArrayCodec, steps: int) -> _Window:
        """A window with room for so many steps more."""
        window = self._window
        if window is None:
            row, self._must_reset, self._left = self._general.episode
        elif window.stop + steps <= window.room:
            return window
        else:
            row = window.last_row()
        self._window = _Window(self._leaves, codec, row)
        return self._window

    def _collect_few(
        self, codec: ArrayCodec, policy: ObservationPolicy | None, steps: int, random_steps: int
    ) -> RolloutResult:
        window = self._window_for(codec, steps)
        batch = _FewSteps(window, self._device, policy)
        try:
            self._run(window, batch, steps, random_steps)
        except BaseException as error:
            return self._cut_short(batch, rewards_of(batch.rewards), error)
        rewards = rewards_of(batch.rewards)
        if rewards.error is not None:
            return self._cut_short(batch, rewards, rewards.error)
        window.stop += steps
        return RolloutResult(self._steps_of(batch, rewards.values))

    def _cut_short(self, batch: _FewSteps, rewards: Rewards, error: BaseException) -> RolloutResult:
        """The whole steps before an error; restarts: no trajectory continues after it."""
        self.restart()
        error = error if rewards.error is None else rewards.error  # the earlier one
        if not len(rewards.values):
            raise error
        return RolloutResult(self._steps_of(batch, rewards.values), error)

    def _run(self, window: _Window, batch: _FewSteps, steps: int, random_steps: int) -> None:
        weights, step, rewards = self._tags.weights, self._step, batch.rewards
        raws = self._random.draw_rows(random_steps)[1] if random_steps else ()
        version = weights.version
        array, dtype, shape = window.first_array, window.dtype, window.shape
        for number, slot in enumerate(range(window.stop, window.stop + steps)):
            if self._must_reset:
                self._reset(window, slot)
            if number < random_steps:
                raw = raws[number]
            else:
                with weights.call_lock:
                    version = weights.begin_call()
                    action = batch.choose(slot)
                raw = self._raw_of(action, number, is_first=number == random_steps)
            window.actions[slot] = raw
            batch.versions.append(version)
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
            rewards.append(reward)  # last: a step with a reward is whole
            self._must_reset = is_over

    def _reset(self, window: _Window, slot: int) -> None:
        window.put_first(slot, self._reset_env())
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

    def _known_action(self, codec: Any) -> Callable[[Any], Any]:
        """A function that gives the raw form of an action, and None, or raises, for one that needs a closer look."""
        if isinstance(codec, DiscreteCodec) and codec.has_tables:
            return codec.known_action
        if not isinstance(codec, ArrayCodec) or isinstance(codec, DiscreteCodec):
            return lambda action: codec.decode_one(action) if self._check.accepts(action) else None

        def known(action: Any) -> Any:
            array = self._check.array_of(action)
            return None if array is None else codec.raw_of(array)

        return known

    def _steps_of(self, batch: _FewSteps, rewards: Array) -> Steps:
        before, after, outcomes = batch.window.columns(batch.first, rewards)
        shape = torch.Size((len(rewards),))
        done = outcomes["done"].reshape(1, -1)
        tags = self._tags.tag(done, shape, lambda: np.array([batch.versions[: len(rewards)]], np.int64))
        self._steps_way, outputs = batch.outputs_of(len(rewards))
        return StepColumns(before, after, outcomes, tags, outputs, shape=shape, device=self._device, is_kept=False)


class _FewSteps:
    """The steps of one batch, which begins in a slot of a window, while it is collected."""

    def __init__(self, window: _Window, device: torch.device | None, policy: ObservationPolicy | None) -> None:
        self.window, self.first, self._device, self._policy = window, window.stop, device, policy
        self.rewards: list[Any] = []
        self.versions: list[int] = []  # by step, of the weights that chose the actions
        self._outputs: OutputColumns | None = None  # of a policy that gives more than the action
        if policy is not None:
            self._module, self._may_be_action = policy.module, policy.may_be_action
            self._row, *self._more_rows = [window.rows[key] for key in policy.in_keys]

    def choose(self, slot: int) -> Any:
        """The action of the policy for the observation in a slot."""
        row, more = self._row(slot), self._more_rows
        out = self._module(row, *[rows(slot) for rows in more]) if more else self._module(row)
        return out if type(out) is Tensor and self._may_be_action else self._action_of(out)

    def _action_of(self, out: Any) -> Any:
        assert self._policy is not None
        action, others = self._policy.split(out)
        outputs = {key: value for key, value in others.items() if key not in self.window.rows}
        if outputs and self._outputs is None:
            self._outputs = OutputColumns(torch.Size(), self._device, capacity=FEW_STEPS)
        if self._outputs is not None:
            self._outputs.put(len(self.rewards), outputs)
        return action

    def outputs_of(self, steps: int) -> tuple[StepsWay, TensorDictBase | None]:
        """What the policy gave besides the action, `[steps]`, and how; None where it was nothing."""
        if self._outputs is None:
            return _BY_STEPS, None
        return self._outputs.way, self._outputs.take(steps)


class _Window:
    """The columns of many steps of one environment, `[room, ...]`; a batch is a part of them.

    Slot t has step t and the observation before it, the one after it is in slot t + 1: no slot is written twice, but
    that of the last observation of an episode, in whose place the first of the next one comes. In a batch it is kept
    apart until the next batch begins.
    """

    def __init__(self, leaves: list[SpaceLeaf], codec: ArrayCodec, first_row: list[Array] | None) -> None:
        self._leaves, self._codec = [(leaf, _is_raw(leaf.codec)) for leaf in leaves], codec
        step = sum(leaf.codec.raw_dtype.itemsize * math.prod(leaf.codec.raw_shape) for leaf in leaves)
        self.room = max(FEW_STEPS, min(WINDOW_STEPS, WINDOW_BYTES // max(1, step)))
        self.stop = 0  #: the slot of the next step
        self._observations = [np.empty((self.room + 1, *leaf.codec.raw_shape), leaf.codec.raw_dtype) for leaf in leaves]
        for array, row in zip(self._observations, first_row or (), strict=first_row is not None):
            array[0] = row[0]
        self.first_array, first = self._observations[0], leaves[0].codec
        takes_any_value = len(leaves) == 1 and not leaves[0].path and first.limits is None
        self.dtype = first.raw_dtype if takes_any_value else None  # None: several arrays, or `put` compares values
        self.shape = first.raw_shape
        self.rows = {leaf.key: _rows(leaf, array) for leaf, array in zip(leaves, self._observations, strict=True)}
        self.actions, self._has_plain_actions = np.empty((self.room, *codec.raw_shape), codec.raw_dtype), _is_raw(codec)
        self._rewards = np.empty((self.room, 1), np.float32)
        self._done, self._terminated, self._truncated = (np.zeros((self.room, 1), np.bool_) for _ in range(3))
        self._outcomes = {
            "reward": self._rewards,
            "done": self._done,
            "terminated": self._terminated,
            "truncated": self._truncated,
        }
        self._lasts: list[tuple[int, list[Array]]] = []  # slots, and the last observations that were there

    def put(self, slot: int, raw: Any) -> None:
        """Stores an observation. Raises ValueError where it is not of the space; nothing is changed then."""
        values = [leaf.value(raw) for leaf, _ in self._leaves]
        for array, value in zip(self._observations, values, strict=True):
            array[slot] = value

    def put_first(self, slot: int, raw: Any) -> None:
        """Stores the first observation of an episode. Raises ValueError as `put`."""
        values = [leaf.value(raw) for leaf, _ in self._leaves]
        if slot > self.stop:  # in the middle of a batch, which has the last one of the episode before
            self._lasts.append((slot, [array[slot].copy() for array in self._observations]))
        for array, value in zip(self._observations, values, strict=True):
            array[slot] = value

    def end(self, slot: int, terminated: Any, truncated: Any, *, is_cut: bool) -> bool:
        """Notes and returns whether an episode ends with a step. Raises ValueError for flags that are not bools."""
        is_terminated, is_truncated = flag_of(terminated, "terminated"), flag_of(truncated, "truncated") or is_cut
        self._terminated[slot], self._truncated[slot] = is_terminated, is_truncated
        self._done[slot] = is_over = is_terminated or is_truncated
        return is_over

    def last_row(self) -> list[Array]:
        """The observations after the last step."""
        return [array[self.stop : self.stop + 1].copy() for array in self._observations]

    def columns(self, first: int, rewards: Array) -> tuple[dict[Any, Any], dict[Any, Any], dict[str, Array]]:
        """Steps from a slot on, with these rewards: the entries at the root and under next, and the outcomes."""
        stop = first + len(rewards)
        before, after = {}, {}
        for number, (leaf, is_plain) in enumerate(self._leaves):
            column, following = self._observations[number][first:stop], self._observations[number][first + 1 : stop + 1]
            if self._lasts:
                following = following.copy()
                for slot, rows in self._lasts:
                    if slot <= stop:
                        following[slot - 1 - first] = rows[number]
            before[leaf.key] = column if is_plain else leaf.codec.encode(column)
            after[leaf.key] = following if is_plain else leaf.codec.encode(following)
        self._lasts.clear()
        actions = self.actions[first:stop]
        before["action"] = actions if self._has_plain_actions else self._codec.encode(actions)
        self._rewards[first:stop, 0] = rewards
        outcomes = {key: column[first:stop] for key, column in self._outcomes.items()}
        return before, after, outcomes


def _is_raw(codec: ArrayCodec) -> bool:
    """Whether a tensor has the very numbers of the raw array."""
    is_choice = isinstance(codec, DiscreteCodec) and codec.spec.shape == () and codec.start == 0
    return codec.is_plain or (is_choice and codec.raw_dtype == np.int64)


def _rows(leaf: SpaceLeaf, array: Array) -> Callable[[int], Tensor]:
    """A function from a slot to the observation that is stored there."""
    if _is_raw(leaf.codec):
        return torch.from_numpy(array).unbind(0).__getitem__  # views: a third of the cost of one index each
    return lambda slot: leaf.codec.encode(array[slot])
