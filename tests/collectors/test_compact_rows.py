"""Environments that show stacks feed a storage that keeps each frame once: its rows are those of a plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import FrameStackObservation

from engram.collectors import SyncDataCollector
from engram.data import LazyTensorStorage, TensorDictReplayBuffer
from engram.envs import GymEnv, TransformedEnv
from engram.envs.transforms import CatFrames

SIDE, LENGTH = 6, 13


class Noise(gymnasium.Env[np.ndarray[Any, Any], int]):
    """Frames of noise; episodes of `LENGTH` steps end by a time limit, each second one by a termination."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, shape: tuple[int, ...] = (SIDE, SIDE), seed: int = 0) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
        self._draw, self._episode = np.random.default_rng(seed), 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._at, self._episode = 0, self._episode + 1
        return self._frame(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._at += 1
        is_over = self._at == LENGTH
        return self._frame(), 1.0, is_over and self._episode % 2 == 0, is_over and self._episode % 2 == 1, {}

    def _frame(self) -> np.ndarray[Any, Any]:
        return self._draw.integers(0, 256, self.observation_space.shape).astype(np.uint8)


def wrapped() -> GymEnv:
    return GymEnv(FrameStackObservation(Noise(), 4), categorical_action_encoding=True)


def concatenated() -> TransformedEnv:
    game = GymEnv(Noise((1, SIDE, SIDE)), categorical_action_encoding=True)
    return TransformedEnv(game, CatFrames(4, dim=-3, in_keys=["observation"]))


def side_by_side(mode: AutoresetMode) -> GymEnv:
    makers = [lambda seed=seed: FrameStackObservation(Noise(seed=seed), 4) for seed in range(3)]
    return GymEnv(SyncVectorEnv(makers, autoreset_mode=mode), categorical_action_encoding=True)


ENVIRONMENTS: dict[str, Callable[[], Any]] = {
    "FrameStackObservation": wrapped,
    "CatFrames": concatenated,
    "vector, next step": lambda: side_by_side(AutoresetMode.NEXT_STEP),
    "vector, same step": lambda: side_by_side(AutoresetMode.SAME_STEP),
}


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("way", ["batches", "replay_buffer"])
def test_rows_of_an_environment_that_shows_stacks_are_those_of_a_plain_storage(environment: str, way: str) -> None:
    ndim = 2 if environment.startswith("vector") else 1
    rows, buffers = [], []
    for compact in (False, True):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(120, ndim=ndim, compact=compact), batch_size=8)
        to_buffer = {"replay_buffer": rb} if way == "replay_buffer" else {}
        torch.manual_seed(0)
        with SyncDataCollector(
            ENVIRONMENTS[environment], None, frames_per_batch=30, total_frames=180, **to_buffer
        ) as collector:
            for batch in collector:
                if way == "batches":
                    rb.extend(batch)
        rows.append(rb[:].exclude("action"))
        buffers.append(rb)
    assert (rows[0] == rows[1]).all()
    shares = buffers[1].stats().compact
    assert shares is not None and shares.frames == {"observation": 4} and shares.whole == 0
    assert shares.same > 0.8
    assert str(shares).startswith(f"{shares.bytes_per_step:,.0f} bytes a step, 'observation' in stacks of 4 frames: ")
