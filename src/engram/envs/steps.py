"""The steps of a rollout, without the rows that are none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram.envs.mdp import stack_steps
from engram.transforms.in_env import IDLE


class Steps:
    """Stepped TensorDicts of shape `batch_size`, until every environment has `wanted` steps.

    A row whose `"_idle"` holds is no step. The k-th column of the result is the k-th step of each environment,
    whichever call made it. With `ends_when_done`, the column of the first step that is done is the last one.

    >>> from tensordict import TensorDict
    >>> steps = Steps([2], wanted=2, ends_when_done=False)
    >>> for number, idle in enumerate([[False, False], [True, False], [False, False]]):
    ...     idle = torch.tensor(idle).unsqueeze(1)
    ...     enough = steps.add(TensorDict({"x": torch.full((2,), number), "_idle": idle, "next": {}}, [2]))
    >>> enough, steps.stacked()["x"].tolist()
    (True, [[0, 2], [0, 1]])
    """

    def __init__(self, batch_size: Sequence[int], wanted: int, ends_when_done: bool) -> None:
        self._batch_size = torch.Size(batch_size)
        self._wanted = wanted
        self._ends_when_done = ends_when_done
        self._steps: list[TensorDictBase] = []
        self._real: list[Tensor] = []  # by call, if there are marks: bool [environments], where it was a step
        self._counts = torch.zeros(self._batch_size.numel(), dtype=torch.int64)

    def add(self, td: TensorDictBase) -> bool:
        """Takes what one call of `step` gave; whether that is enough."""
        idle = td.get(IDLE, None)
        if idle is not None:
            return self._add_marked(td, idle)
        self._steps.append(td)
        is_over = self._ends_when_done and bool(td.get(("next", "done")).any())
        return is_over or len(self._steps) >= self._wanted

    def _add_marked(self, td: TensorDictBase, idle: Tensor) -> bool:
        real = ~idle.reshape(-1).cpu()
        self._steps.append(td.exclude(IDLE, ("next", IDLE)))
        self._real.append(real)
        self._counts += real
        if self._ends_when_done:
            over = td.get(("next", "done")).reshape(-1).cpu() & real
            if bool(over.any()):
                self._wanted = min(self._wanted, int(self._counts[over].min()))
        return bool((self._counts >= self._wanted).all())

    def stacked(self) -> TensorDictBase:
        """The steps, `[*batch_size, steps]`."""
        batch = stack_steps(self._steps, len(self._batch_size))
        if not self._real or bool(torch.stack(self._real).all()):
            return batch
        real = torch.stack(self._real, -1)
        kept = real & (real.cumsum(-1) <= self._wanted)
        rows, columns = kept.nonzero(as_tuple=True)
        return batch.reshape(kept.shape)[rows, columns].reshape(*self._batch_size, self._wanted)
