"""What the calls of a batched environment gave, until whole batches can be cut out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.envs.batched import BatchStep
from engram.envs.gym_codecs import Leaf
from engram.envs.mdp import stack_steps

Array = np.ndarray[Any, Any]


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
        self.clear()

    def clear(self) -> None:
        """Forgets everything, the frames that wait for a batch too."""
        self._shown: list[list[Array]] = [[] for _ in self._leaves]
        self._actions: list[list[Array]] = [[] for _ in self._action_leaves]
        self._rewards: list[bytes] = []  # bytes: a tenth of the cost of small arrays, to make and to join
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
        """What the environments show after the first reset. Raises ValueError for another shape than the space's."""
        refuse_other_shapes(self._leaves, observation, self._n)
        self._show(observation)

    def _show(self, observation: Any) -> None:
        for (_, path, codec), shown in zip(self._leaves, self._shown, strict=True):
            value = observation
            for step in path:
                value = value[step]
            shown.append(np.array(value, codec.raw_dtype, order="C"))

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
        """Keeps one call."""
        self._show(out.observation)
        self._idle.append(self._none if out.idle is None else out.idle.tobytes())
        self._rewards.append(np.asarray(out.reward, np.float32).tobytes())
        self._terminated.append(np.asarray(out.terminated, np.bool_).tobytes())
        self._truncated.append(np.asarray(out.truncated, np.bool_).tobytes())
        self._versions.append(version)
        self._extras.append(self._noted)
        self._noted = None
        for env, last in out.last:
            lasts = [np.array(leaf.pick(last), leaf.codec.raw_dtype) for leaf in self._leaves]
            self._moved.append((self._last_call, env, lasts))

    @property
    def _last_call(self) -> int:
        return self._dropped + len(self._rewards) - 1

    def cut(self, envs: Array) -> None:
        """The episodes of `envs` (bool `[n]`) end with the last call, by truncation."""
        self._truncated[-1] = (np.frombuffer(self._truncated[-1], np.bool_) | envs).tobytes()

    def restart(self, envs: Array, observation: Any) -> None:
        """`envs` (bool `[n]`) were reset after the last call, and show `observation`."""
        self._moved.append((self._last_call, envs, [shown[-1][envs] for shown in self._shown]))
        for leaf, shown in zip(self._leaves, self._shown, strict=True):
            shown[-1][envs] = np.asarray(leaf.pick(observation))[envs]

    def count(self, calls: int) -> None:
        """The last `calls` calls count as waiting frames."""
        self.waiting += calls - _rows(self._idle[-calls:], np.bool_, self._n).sum(0)

    def take(self, steps: int) -> Frames:
        """The first `steps` waiting frames of each environment, oldest first; they wait no more."""
        n, total = self._n, len(self._rewards)
        are_frames = ~_rows(self._idle, np.bool_, n).T
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


def refuse_other_shapes(leaves: Sequence[Leaf], observation: Any, n: int) -> None:
    """Raises ValueError for a batched observation of another shape than `n` of the space's."""
    for leaf in leaves:
        found = np.shape(leaf.pick(observation))
        if found != (n, *leaf.codec.raw_shape):
            raise ValueError(
                f"the environments gave observations {leaf.key!r} of shape {found}, and the space of each says "
                f"{leaf.codec.raw_shape} for {n} of them; correct the environments or their space"
            )
