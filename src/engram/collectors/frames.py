"""Stepped TensorDicts, until whole batches can be cut out of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.envs.base import stack_steps
from engram.transforms.base import IDLE


class FrameQueue:
    """Takes what calls of `env.step` gave, and cuts batches of whole rows out of it.

    A row whose `"_idle"` holds was a reset and is no frame: other environments then have more frames than it, which
    open the next batch, in their order.
    """

    def __init__(self, batch_size: torch.Size) -> None:
        self._batch_size = batch_size
        self._steps: list[TensorDictBase] = []
        self._versions: list[int] = []
        self._waits: list[Tensor] = []  # by call, once there are marks: bool [environments], a frame nobody took yet
        self._counts = torch.zeros(batch_size.numel(), dtype=torch.int64)

    @property
    def least(self) -> int:
        """So many frames wait of each environment."""
        return int(self._counts.min()) if self._waits else len(self._steps)

    def add(self, td: TensorDictBase, version: int) -> None:
        """Takes one call, which had that version of the policy."""
        self._versions.append(version)
        idle = td.get(IDLE, None)
        if idle is None:
            self._steps.append(td)
            return
        self._steps.append(td.exclude(IDLE, ("next", IDLE)))
        self._waits.append(~idle.reshape(-1).cpu())
        self._counts += self._waits[-1]

    def take(self, steps: int) -> tuple[TensorDictBase, np.ndarray[Any, Any]]:
        """The first `steps` frames of each environment, `[*batch_size, steps]`, and their versions `[envs, steps]`."""
        batch = stack_steps(self._steps, len(self._batch_size))
        versions = torch.tensor(self._versions).expand(self._counts.numel(), len(self._versions))
        if not self._waits:
            self._steps, self._versions = [], []
            return batch, versions.numpy()
        waits = torch.stack(self._waits, -1)
        taken = waits & (waits.cumsum(-1) <= steps)
        self._drop(waits & ~taken, steps)
        rows, columns = taken.nonzero(as_tuple=True)
        chosen = batch.reshape(taken.shape)[rows, columns].reshape(*self._batch_size, steps)
        return chosen, versions[rows, columns].reshape(-1, steps).numpy()

    def _drop(self, waits: Tensor, steps: int) -> None:
        some = waits.any(0)
        first = int(some.int().argmax()) if bool(some.any()) else len(self._steps)
        del self._steps[:first], self._versions[:first]
        self._waits = list(waits[:, first:].unbind(-1))
        self._counts -= steps
