"""What is stored in the benchmarks: CartPole steps, pixels, and the small items of the classic comparison."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

CARTPOLE_LEAVES = {
    "observation": 16,
    "action": 16,
    "done": 1,
    "terminated": 1,
    "truncated": 1,
    "next.observation": 16,
    "next.reward": 4,
    "next.done": 1,
    "next.terminated": 1,
    "next.truncated": 1,
    "collector.traj_ids": 8,
}
"""Bytes of each of the 11 leaves of one step."""

CHUNK = 1_000_000
"""Rows that a big buffer is filled with at a time."""

FRAMES = (4, 84, 84)


def row_bytes(leaves: dict[str, int]) -> int:
    """The length of a packed row: a multiple of 8."""
    return -(-sum(leaves.values()) // 8) * 8


def cartpole(n: int, *, episode: int = 20) -> TensorDict:
    """`n` steps as a collector makes them, in episodes of one length: 11 leaves of TED."""
    time = torch.arange(n)
    done = (time % episode == episode - 1).unsqueeze(-1)
    observation = torch.randn(n + 1, 4)
    no = torch.zeros(n, 1, dtype=torch.bool)
    return TensorDict(
        {
            "observation": observation[:-1].clone(),
            "action": torch.nn.functional.one_hot(torch.randint(0, 2, (n,)), 2),
            "done": no.clone(),
            "terminated": no.clone(),
            "truncated": no.clone(),
            "next": {
                "observation": observation[1:].clone(),
                "reward": torch.ones(n, 1),
                "done": done,
                "terminated": done.clone(),
                "truncated": no.clone(),
            },
            "collector": {"traj_ids": time // episode},
        },
        batch_size=[n],
    )


def cartpole_chunks(capacity: int, *, episode: int = 20) -> Iterator[TensorDict]:
    """`capacity` steps, a million at a time out of the same memory; trajectory ids go on from one to the next."""
    chunk = cartpole(min(CHUNK, capacity), episode=episode)
    for start in range(0, capacity, CHUNK):
        yield chunk[: capacity - start]
        chunk["collector", "traj_ids"].add_(CHUNK // episode)


def pixels(n: int) -> TensorDict:
    """`n` rows of two stacks of four 84 x 84 frames."""
    frames = torch.randint(0, 256, (n + 1, *FRAMES), dtype=torch.uint8)
    return TensorDict({"pixels": frames[:-1].clone(), "next": {"pixels": frames[1:].clone()}}, batch_size=[n])


PIXEL_LEAVES = {"pixels": 4 * 84 * 84, "next.pixels": 4 * 84 * 84}

CLASSIC_LEAVES = {"observation": 32, "action": 8, "reward": 4, "next_observation": 32}


def classic(kind: str, n: int) -> torch.Tensor | dict[str, torch.Tensor] | TensorDict:
    """`n` items of the classic comparison: a plain tensor, a dict of tensors, or a TensorDict."""
    if kind == "tensor":
        return torch.randn(n, 8)
    items = {
        "observation": torch.randn(n, 8),
        "action": torch.randint(0, 4, (n, 1)),
        "reward": torch.randn(n, 1),
        "next_observation": torch.randn(n, 8),
    }
    return items if kind == "dict" else TensorDict(items, batch_size=[n])


def length(items: Any) -> int:
    """How many items a batch has."""
    return len(next(iter(items.values()))) if isinstance(items, dict) else len(items)


def one_by_one(items: torch.Tensor | dict[str, torch.Tensor] | TensorDict) -> list[object]:
    """The same as a list of items, for storages that hold objects."""
    if isinstance(items, dict):
        return [{key: value[i] for key, value in items.items()} for i in range(length(items))]
    return list(items.unbind(0))


def flat_numpy(items: TensorDict | dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """One array a leaf, with nested names joined by a dot: the form of the libraries that know no TensorDict."""
    if isinstance(items, TensorDict):
        items = dict(items.flatten_keys(".").items())
    return {key: value.numpy() for key, value in items.items()}
