"""How many bytes a step takes where each observation is stored once, in few lanes and in many short ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer

STEPS, EPISODE = 20_000, 20


def private(path: Path, **lanes: int) -> Any:
    return LazyTensorStorage(STEPS, compact="pixels", **lanes)


def shared(path: Path, **lanes: int) -> Any:
    return LazyTensorStorage(STEPS, compact="pixels", shared=True, **lanes)


def mapped(path: Path, **lanes: int) -> Any:
    return LazyMemmapStorage(STEPS, compact="pixels", scratch_dir=path, **lanes)


def episode() -> TensorDict:
    """Steps with stacks of four frames, the first of which repeats its frame."""
    frames = torch.randint(0, 255, (EPISODE + 4, 84, 84), dtype=torch.uint8)
    frames[:4] = frames[3]
    stacks = frames.unfold(0, 4, 1).movedim(-1, 1)
    after = {"pixels": stacks[1:], "reward": torch.zeros(EPISODE, 1), "done": torch.arange(EPISODE) == EPISODE - 1}
    return TensorDict({"pixels": stacks[:-1], "next": after}, [EPISODE])


# With lanes=64 there are 125 lanes of 160 rows, of which each has three frames more than rows, and tails of two rows.
@pytest.mark.deep
@each(
    "made, lanes, most",
    [
        (private, {}, 7_450), (shared, {}, 7_450), (shared, {"lanes": 8}, 7_500), (shared, {"lanes": 64}, 8_000),
        (mapped, {}, 7_500), (mapped, {"lanes": 8}, 7_600), (mapped, {"lanes": 64}, 8_400),
    ],
)  # fmt: skip
def test_pixels_of_short_episodes_take_little_more_than_a_frame(
    ram_path: Path, made: Any, lanes: dict[str, int], most: int
) -> None:
    storage = made(ram_path, **lanes)
    rb = ReplayBuffer(storage=storage)
    for _ in range(STEPS * 11 // 10 // EPISODE):
        rb.extend(episode())
    assert len(rb) == STEPS
    assert storage.nbytes / STEPS <= most


def small_steps(n: int) -> TensorDict:
    """Steps as those of CartPole, of 55 bytes, in episodes whose last next observation no row has."""
    ends = torch.arange(n) % EPISODE == EPISODE - 1
    shown = torch.randn(n + 1, 4)
    following = torch.where(ends.unsqueeze(1), torch.randn(n, 4), shown[1:])
    after = {"observation": following, "reward": torch.ones(n), "done": ends, "terminated": ends, "truncated": ends}
    now = {
        "observation": shown[:-1],
        "action": torch.zeros(n, dtype=torch.int64),
        "episode": torch.arange(n) // EPISODE,
    }
    return TensorDict({**now, "next": after}, [n])


def test_small_rows_take_three_quarters_of_plain_ones() -> None:
    n = 5 * STEPS
    storages = [LazyTensorStorage(n, compact=compact) for compact in (True, False)]
    for storage in storages:
        rb = ReplayBuffer(storage=storage)
        for _ in range(2):
            rb.extend(small_steps(n))
    compact, plain = storages
    assert compact.nbytes <= 0.75 * plain.nbytes
