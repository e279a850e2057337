"""An epoch whose rows are written down, one by one: what another library saved of one that had begun."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram import _native


def check_list(rows: Any) -> None:
    """ValueError where a saved list of rows is none."""
    if not isinstance(rows, Tensor) or rows.dtype is not torch.int64 or rows.ndim != 1:
        raise ValueError(f"a saved epoch lists its rows as {rows!r:.80}")


class ListedWalk:
    """Takes the rows of a list in their order, those that exist no longer left out."""

    def __init__(self, listed: Tensor, strands: int, moved: int = 0) -> None:
        self._rows, self._strands, self._moved = listed.numpy(), strands, moved

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, store: _native.Store, position: int, n: int) -> tuple[Tensor, int]:
        """Up to n slots from `position` on, and the position after them."""
        lane, found = store.lane(0), np.empty(0, np.int64)
        while position < len(self._rows) and len(found) < n:
            rows = self._rows[position : position + n]
            numbers = rows // self._strands - self._moved
            there = np.flatnonzero((numbers >= lane["first"]) & (numbers < lane["published"]))[: n - len(found)]
            full = len(found) + len(there) == n
            position = position + int(there[-1]) + 1 if full and len(there) else min(position + n, len(self._rows))
            slots = numbers[there] % store.lane_capacity * self._strands + rows[there] % self._strands
            found = np.concatenate([found, slots])
        return torch.from_numpy(found), position
