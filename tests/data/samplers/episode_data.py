"""Episodes whose every step says which it is, and what a batch of slices must look like."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor


def episodes(lengths: list[int], start: int = 0, first_id: int = 0, running: bool = False) -> TensorDict:
    """Episodes one after the other: `n` counts from `start`, `episode` from `first_id`; the last may go on."""
    total = sum(lengths)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) + first_id
    done = torch.zeros(total, 1, dtype=torch.bool)
    done[torch.tensor(lengths).cumsum(0) - 1] = True
    if running:
        done[-1] = False
    none = torch.zeros(total, 1, dtype=torch.bool)
    next_ = {"done": done, "terminated": done.clone(), "truncated": none, "reward": torch.ones(total, 1)}
    return TensorDict({"n": torch.arange(start, start + total), "id": ids, "next": next_}, [total])


def slices_of(batch: Any, info: dict[str, Any]) -> list[list[int]]:
    """The numbers of each slice; fails unless each is consecutive, of one episode, and marked at its end alone."""
    found = []
    slice_id: Tensor = info["slice_id"]
    assert slice_id.dtype == torch.int64 and len(slice_id) == len(batch["n"])
    assert slice_id.tolist() == sorted(slice_id.tolist())
    for k in range(int(slice_id.max()) + 1):
        part = batch[slice_id == k]
        n = part["n"].tolist()
        assert n == list(range(n[0], n[0] + len(n))), n
        assert len(set(part["id"].tolist())) == 1, (n, part["id"].tolist())
        last = [False] * (len(n) - 1) + [True]
        assert part["next", "truncated"].flatten().tolist() == last
        assert part["next", "done"].flatten().tolist() == last
        assert not bool(part["next", "terminated"][:-1].any())
        found.append(n)
    return found
