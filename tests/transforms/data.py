"""Batches for the tests of transforms."""

from __future__ import annotations

import math

import torch
from tensordict import TensorDict


def flags(done: torch.Tensor) -> dict[str, torch.Tensor]:
    done = done.unsqueeze(-1)
    return {"done": done.clone(), "terminated": done.clone(), "truncated": torch.zeros_like(done)}


def steps(*shape: int, feature: tuple[int, ...] = (3,), dtype: torch.dtype = torch.float32) -> TensorDict:
    """Steps with "x", a reward, and flags that end a trajectory with each last step."""
    n = math.prod(shape)
    x = (torch.arange(n * math.prod(feature)) * 7 % 251).reshape(*shape, *feature).to(dtype)
    done = torch.zeros(shape, dtype=torch.bool)
    done[..., -1:] = True
    reward = torch.arange(n, dtype=torch.float32).reshape(*shape, 1) - 2
    return TensorDict({"x": x, "next": {"x": x + 1, "reward": reward, **flags(done)}}, shape)


def trajectory(n: int, number: int) -> TensorDict:
    """A whole trajectory whose values depend on its number."""
    made = steps(n)
    made["x"] += 100 * number
    made["next", "x"] += 100 * number
    made["next", "reward"] = made["next", "reward"] * (number + 1)
    return made
