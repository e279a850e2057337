"""Rings of packed TED rows: trajectories whose observations follow each other, with and without exceptions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from contracts.checkpointer import RowRings
from engram.store.layout import RowLayout


def ted_steps(n: int, salt: Any = 0, length: float = 10.0, exceptions: float = 0.0) -> TensorDict:
    """TED `[n]` with trajectories of about `length` steps; in a part `exceptions` of the steps the rule is broken."""
    rng = np.random.default_rng(salt)
    obs = torch.from_numpy(rng.integers(0, 2**32, (n + 1, 3), np.uint32).view(np.float32))  # NaN and all
    done = torch.from_numpy(rng.random((n, 1)) < 1 / length)
    first = obs[:-1].clone()
    first[1:][done[:-1, 0]] = 0.5  # a reset
    following = obs[1:].clone()
    broken = torch.from_numpy(rng.random(n) < exceptions)
    following[broken] = -0.0
    ids = torch.cumsum(done[:, 0].long(), 0) - done[:, 0].long()
    return of_parts(first, following, done, ids, torch.from_numpy(rng.integers(0, 3, n)))


def of_parts(first: Tensor, following: Tensor, done: Tensor, ids: Tensor, action: Tensor) -> TensorDict:
    n = len(first)
    nothing = torch.zeros(n, 1, dtype=torch.bool)
    data = {
        "next": {
            "obs": following, "deep": {"x": (ids + 1).to(torch.int16)}, "done": done, "terminated": done,
            "truncated": nothing, "reward": torch.ones(n, 1), "only_next": action.double(),
        },
        "obs": first, "deep": {"x": ids.to(torch.int16)}, "done": nothing, "terminated": nothing, "truncated": nothing,
        "action": action, "collector": {"traj_ids": ids}, "reward": torch.zeros(n, 1), "empty": torch.zeros(n, 0),
    }  # fmt: skip
    return TensorDict(data, [n])


class TedRings(RowRings):
    """Packed rows of `ted_steps`: the RowSource and RowSink that the checkpointers of episode data are tested with."""

    def __init__(
        self, lane_capacity: int = 100, lanes: int = 1, strands: int = 1, exceptions: float = 0.0, length: float = 10.0
    ) -> None:
        self._layout = RowLayout.of(ted_steps(1), 1)
        self._exceptions, self._length = exceptions, length
        super().__init__(lane_capacity, lanes, strands, self._layout.payload_bytes)

    def append(self, lane: int, count: int, salt: int = 0) -> None:
        self.written = True
        start = self.lanes[lane]["published"]
        for strand in range(self.strands if count else 0):
            td = ted_steps(count, [lane, strand, start, salt], self._length, self._exceptions)
            self.memory[lane, strand, np.arange(start, start + count) % self.lane_capacity] = packed(self._layout, td)
        self.lanes[lane]["published"] += count

    def layout_state(self) -> dict[str, Any] | None:
        return {**self._layout.to_json(), "envs": [self.strands], "ndim": 2} if self.written else None

    def row_layout(self) -> RowLayout | None:
        return self._layout if self.written else None

    def private_rows(self) -> None:
        return None


def packed(layout: RowLayout, td: TensorDict) -> Any:
    """uint8 [n, row_bytes]."""
    rows = np.zeros((len(td), layout.payload_bytes), np.uint8)
    for leaf in layout.leaves:
        if leaf.nbytes:
            raw = td[leaf.path].contiguous().reshape(len(td), -1).view(torch.uint8).numpy()
            rows[:, leaf.offset : leaf.offset + leaf.nbytes] = raw
    return rows
