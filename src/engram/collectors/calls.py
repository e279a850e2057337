"""What the calls of a batched environment gave, until whole batches can be cut out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.envs.base import stack_steps
from engram.envs.codecs import BOOL, DOUBLE, SINGLE, SpaceLeaf, flag_row, narrow_rewards, reward_row
from engram.envs.engines import VectorStep

Array = np.ndarray[Any, Any]


class CallLog:
    """The calls of `n` environments that step together, and which of them are frames nobody has taken yet.

    A *frame* is a step of one environment. Calls that only reset an environment are none for it. What an environment
    showed before call c is row c of the observations, what it showed after is row c + 1; where a reset wrote over the
    latter, the old value is kept aside. All arrays are copied when they come.
    """

    def __init__(self, n: int, leaves: list[SpaceLeaf], actions: list[SpaceLeaf]) -> None:
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

    def add(self, out: VectorStep, version: int) -> None:
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
