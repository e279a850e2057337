"""Steps of environments that step together, until whole batches can be cut out of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from engram.envs.mdp import stack_steps
from engram.transforms.in_env import IDLE

Array = np.ndarray[Any, Any]


class FrameIndex:
    """Which calls of `step` are frames of which environment, and which frames no batch has taken yet.

    Each call steps all `n` environments. An environment that a call only resets has no frame of that call: the other
    environments then have more frames than it, which open the next batch, in their order.

    >>> index = FrameIndex(2)
    >>> for idle in (None, np.array([True, False]), None):
    ...     index.add(idle)
    >>> index.count()
    >>> index.waiting.tolist()
    [2, 3]
    >>> calls, dropped = index.take(2)
    >>> calls.tolist(), dropped, index.waiting.tolist()
    ([[0, 2], [0, 1]], 2, [0, 1])
    """

    def __init__(self, n: int) -> None:
        self.waiting = np.zeros(n, np.int64)  # frames that no batch has taken, by environment
        self._taken = np.zeros(n, np.int64)  # frames of the calls in this index, each environment's first ones
        self._idle: list[bytes] = []  # bool [n] by call; bytes: a tenth of the cost of small arrays
        self._none_idle = bytes(n)
        self._counted = 0

    def add(self, idle: Array | None) -> None:
        """Adds one call; `idle`, bool `[n]`, says which environments it only reset (None: no environment)."""
        self._idle.append(self._none_idle if idle is None else idle.tobytes())

    def count(self, calls: int | None = None) -> None:
        """Makes waiting frames of the calls since the last count, or of the first `calls` of them."""
        new = self._idle[self._counted :] if calls is None else self._idle[self._counted : self._counted + calls]
        self._counted += len(new)
        self.waiting += len(new) - self._as_array(new).sum(0)

    def take(self, steps: int) -> tuple[Array, int]:
        """Takes the first `steps` waiting frames of each environment, oldest first.

        Returns which call made each, int64 `[n, steps]`, where call 0 is the oldest one in this index; and the number
        of calls, from the oldest on, that hold no waiting frame any more: the index drops them.
        """
        total, waiting = self._counted, self.waiting
        are_frames = ~self._as_array(self._idle[:total]).T
        frames, counts = np.flatnonzero(are_frames), self._taken + waiting
        starts = counts.cumsum() - counts + self._taken  # where in `frames` the first waiting frame of each stands
        calls = frames[starts[:, None] + np.arange(steps)] - np.arange(0, total * len(waiting), total)[:, None]
        waiting -= steps
        self._taken += steps
        first_waiting = frames.take((starts + steps)[waiting > 0]) % total
        dropped = int(first_waiting.min()) if len(first_waiting) else total
        del self._idle[:dropped]
        self._counted -= dropped
        self._taken -= are_frames[:, :dropped].sum(1)
        return calls, dropped

    def _as_array(self, idle: list[bytes]) -> Array:
        return np.frombuffer(bytearray().join(idle), np.bool_).reshape(-1, len(self.waiting))


class FrameQueue:
    """Stepped TensorDicts of shape `batch_size`, until whole batches can be cut out of them.

    A row whose `"_idle"` holds was a reset and is no frame, see `FrameIndex`. `version` is any number that a call's
    frames carry.

    >>> from tensordict import TensorDict
    >>> queue = FrameQueue([2])
    >>> for number, idle in enumerate([[False, False], [True, False], [False, False]]):
    ...     idle = torch.tensor(idle).unsqueeze(1)
    ...     queue.add(TensorDict({"x": torch.full((2,), number), "_idle": idle, "next": {}}, [2]), version=number)
    >>> batch, versions = queue.take(queue.least)
    >>> batch["x"].tolist(), versions.tolist(), queue.least
    ([[0, 2], [0, 1]], [[0, 2], [0, 1]], 0)
    """

    def __init__(self, batch_size: Sequence[int]) -> None:
        self._batch_size = torch.Size(batch_size)
        self._steps: list[TensorDictBase] = []
        self._versions: list[int] = []
        self._index: FrameIndex | None = None  # once a call has marks

    @property
    def least(self) -> int:
        """The number of waiting frames that every environment has."""
        return len(self._steps) if self._index is None else int(self._index.waiting.min())

    @property
    def waiting(self) -> Array:
        """The number of waiting frames of each environment, int64 `[environments]`."""
        return np.full(self._batch_size.numel(), self.least) if self._index is None else self._index.waiting

    def add(self, td: TensorDictBase, version: int = 0) -> None:
        """Adds what one call of `step` gave."""
        idle = td.get(IDLE, None)
        if idle is not None:
            td = td.exclude(IDLE, ("next", IDLE))
            if self._index is None:
                self._index = FrameIndex(self._batch_size.numel())
            self._index.add(idle.reshape(-1).cpu().numpy())
            self._index.count()
        self._steps.append(td)
        self._versions.append(version)

    def take(self, steps: int) -> tuple[TensorDictBase, Array]:
        """The first `steps` frames of each environment, `[*batch_size, steps]`, and their versions `[envs, steps]`."""
        n, total = self._batch_size.numel(), len(self._steps)
        batch = stack_steps(self._steps, len(self._batch_size))
        versions = np.array(self._versions, np.int64)
        if self._index is None:
            calls, dropped = np.broadcast_to(np.arange(steps), (n, steps)), steps
        else:
            calls, dropped = self._index.take(steps)
        del self._steps[:dropped], self._versions[:dropped]
        if steps < total:
            rows = batch.reshape(n, total)[torch.arange(n)[:, None], torch.from_numpy(calls.copy())]
            batch = rows.reshape(*self._batch_size, steps)
        return batch, versions[calls]
