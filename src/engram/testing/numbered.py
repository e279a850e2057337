"""Steps whose every value is a function of one number, and ways to say which numbers a batch holds."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor


def steps(start: int, stop: int) -> TensorDict:
    """Steps number `start` to `stop`, with leaves of several sizes."""
    return of_numbers(torch.arange(start, stop))


def of_numbers(n: Tensor) -> TensorDict:
    """Steps of these numbers, of any shape."""
    data = {
        "n": n,
        "obs": torch.stack([n * 3.0, n + 0.5, -n], -1).float(),
        "done": (n % 5 == 0).unsqueeze(-1),
        "next": {"reward": (n * 2).double().unsqueeze(-1), "small": (n % 100).to(torch.int8)},
    }
    return TensorDict(data, batch_size=n.shape)


def env_steps(envs: int, start: int, stop: int) -> TensorDict:
    """Data [envs, time]: environment e at time t has the number 1000 * e + t."""
    return of_numbers(torch.arange(envs).unsqueeze(1) * 1000 + torch.arange(start, stop))


def numbers(batch: Any) -> Any:
    """The numbers of a batch, as nested lists; fails unless every value of every step belongs to its number."""
    if isinstance(batch, list):
        return [numbers(item) for item in batch]
    n = batch["n"]
    expected = of_numbers(n)
    for key in ("obs", "done", ("next", "reward"), ("next", "small")):
        found = batch[key]
        assert found.dtype == expected[key].dtype and found.shape == expected[key].shape
        assert torch.equal(found, expected[key]), f"{key}: a step is made of parts of several"
    return n.tolist()


def state_of(rb: Any) -> Any:
    """What two equal buffers agree in, in a form that `==` compares."""
    lanes = rb.storage.lanes
    if lanes is None:
        return 0, 0, 0, []
    rows = numbers(rb[:]) if len(rb) else []
    return len(rb), rb.write_count, rb.writer._cursor, rows
