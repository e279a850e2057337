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
from engram.data.replay_buffers.buffers.batch_writer import ColumnRows
from engram.envs import GymEnv, TransformedEnv
from engram.envs.transforms import CatFrames

SIDE, LENGTH = 6, 13


class Noise(gymnasium.Env[np.ndarray[Any, Any], int]):
    """Frames of noise; episodes of `length` steps end by a time limit, each second one by a termination."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, shape: tuple[int, ...] = (SIDE, SIDE), seed: int = 0, length: int = LENGTH) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
        self._draw, self._episode, self._length = np.random.default_rng(seed), 0, length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._at, self._episode = 0, self._episode + 1
        return self._frame(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._at += 1
        is_over = self._at == self._length
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


def pointers(column: Any) -> int:
    return column.data_ptr() if isinstance(column, torch.Tensor) else column.ctypes.data


def large(stacked: bool) -> Any:
    """An environment with episodes of 100 steps, whose observations are more bytes than are kept as such."""
    if stacked:
        return GymEnv(FrameStackObservation(Noise((20, 20), length=100), 4), categorical_action_encoding=True)
    game = GymEnv(Noise((1, 40, 40), length=100), categorical_action_encoding=True)
    return TransformedEnv(game, CatFrames(4, dim=-3, in_keys=["observation"]))


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("stacked", [True, False])
def test_observations_that_only_a_storage_reads_are_not_copied_for_it(
    stacked: bool, compact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X of a step is next.X of the one before, in one memory, unless an episode has ended between them."""
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(400, compact=compact), batch_size=8)
    shared, append = [], ColumnRows.append

    def note(rows: ColumnRows, columns: list[Any]) -> bool:
        x, after = (columns[rows.paths.index(path)] for path in (("observation",), ("next", "observation")))
        shared.append(pointers(after) == pointers(x) + x[0].nbytes)
        return append(rows, columns)

    monkeypatch.setattr(ColumnRows, "append", note)
    with SyncDataCollector(large(stacked), None, frames_per_batch=40, total_frames=400, replay_buffer=rb) as collector:
        list(collector)
    rows = rb[:]
    ends = rows["next", "done"].squeeze(-1)
    follows = (rows["next", "observation"][:-1] == rows["observation"][1:]).flatten(1).all(1)
    assert torch.equal(follows, ~ends[:-1]) and int(ends.sum()) == 4
    assert not stacked or shared == [k not in (2, 7) for k in range(1, 10)]  # the first one makes the rows


@pytest.mark.parametrize("stacked", [True, False])
def test_a_batch_that_is_handed_out_has_memory_of_its_own_for_what_follows(stacked: bool) -> None:
    with SyncDataCollector(large(stacked), None, frames_per_batch=40, total_frames=160) as collector:
        for batch in collector:
            before = batch["next", "observation"].clone()
            batch["observation"].zero_()
            assert torch.equal(batch["next", "observation"], before) and before.any()
