"""Storages of large plain rows say what storing observations once would save."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.data import Compact, LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from engram.envs.transforms import MultiStepTransform
from engram.specs import Bounded, Composite

PIXELS = 48  # of a side: a stack of four takes 9 KB
CAPACITY = 10_000


def stacks(n: int, frames: int = 4) -> TensorDict:
    """n steps of one episode, whose observations are stacks."""
    shown = torch.randint(0, 256, (n + frames + 1, PIXELS, PIXELS), dtype=torch.uint8)
    pixels = shown.unfold(0, frames, 1).movedim(-1, 1).contiguous()
    return TensorDict({"pixels": pixels[:n], "next": {"pixels": pixels[1 : n + 1]}}, [n])


def warnings_of(steps: TensorDict, capacity: int = CAPACITY, **settings: Any) -> list[str]:
    """What the first two writes of a storage warn of."""
    rb = ReplayBuffer(storage=LazyTensorStorage(capacity, **settings))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rb.extend(steps)
        rb.extend(steps)
    return [str(warning.message) for warning in caught]


def test_a_plain_storage_of_stacks_says_once_what_it_would_save() -> None:
    (message,) = warnings_of(stacks(20))
    assert "'pixels': stacks of 4 frames" in message and "compact=True" in message and "compact=False" in message
    plain, once = (LazyTensorStorage.nbytes_for(stacks(1)[0], CAPACITY, compact=x) // CAPACITY for x in (False, True))
    assert f"{plain} bytes a step" in message and f"{once} bytes a step" in message and plain > 7 * once


def test_one_step_of_a_stack_tells_as_much() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    with pytest.warns(UserWarning, match="stacks of 4 frames"):
        rb.add(stacks(1)[0])


def one_frame(shares: bool) -> TensorDict:
    """Steps of large frames without a stack, of which the next is that of the next step, or is not."""
    steps = stacks(20)
    steps["pixels"] = torch.randint(0, 256, (20, 4, PIXELS, PIXELS), dtype=torch.uint8)
    steps["next", "pixels"] = torch.roll(steps["pixels"], -1, 0) if shares else torch.flip(steps["pixels"], [2])
    return steps


def test_frames_that_two_steps_share_are_advice_enough() -> None:
    (message,) = warnings_of(one_frame(True))
    assert "('pixels')" in message and "stacks" not in message


SILENT: list[tuple[TensorDict, dict[str, Any]]] = [
    (stacks(20), {"compact": False}),
    (stacks(20), {"compact": True}),
    (stacks(20), {"capacity": 1_000}),
    (stacks(20).apply(lambda t: t[..., :4, :4]), {"capacity": 1_000_000}),
    (one_frame(False), {}),
    (stacks(20).exclude("next"), {}),
]


@each("steps, settings", SILENT)
def test_it_is_silent_where_nothing_is_to_be_said(steps: TensorDict, settings: dict[str, Any]) -> None:
    assert warnings_of(steps, **settings) == []


def test_the_bytes_of_rows_with_observations_stored_once_are_known_before() -> None:
    step = stacks(1)[0]
    step["pixels"] = step["pixels"][:1].repeat(4, 1, 1)  # as an episode begins
    step["next", "pixels"][:3] = step["pixels"][:3]
    storage = LazyTensorStorage(500, compact=True)
    ReplayBuffer(storage=storage).add(step)
    assert LazyTensorStorage.nbytes_for(step, 500, compact=True) == storage.nbytes
    assert LazyTensorStorage.nbytes_for(step, 500) == LazyTensorStorage.nbytes_for(step, 500, compact=False)
    spec = Composite({key: Bounded(0, 255, (4, PIXELS, PIXELS), dtype=torch.uint8) for key in ("pixels",)})
    spec["next"] = Composite(pixels=spec["pixels"])
    assert LazyTensorStorage.nbytes_for(spec, 500, compact="pixels") == storage.nbytes
    with pytest.raises(ValueError, match="no 'frames'"):
        LazyTensorStorage.nbytes_for(step, 500, compact="frames")


def test_the_bytes_of_a_folder_with_observations_stored_once_are_known_before(tmp_path: Path) -> None:
    step = stacks(1)[0]
    step["pixels"] = step["pixels"][:1].repeat(4, 1, 1)  # as an episode begins
    step["next", "pixels"][:3] = step["pixels"][:3]
    storage = LazyMemmapStorage(500, tmp_path, compact=True)
    ReplayBuffer(storage=storage).add(step)
    assert LazyMemmapStorage.nbytes_for(step, 500, compact=True) == storage.nbytes


def test_mapped_and_shared_storages_say_it_too(tmp_path: Path) -> None:
    for storage in (LazyMemmapStorage(CAPACITY, tmp_path), LazyTensorStorage(CAPACITY, shared=True)):
        with pytest.warns(UserWarning, match="stacks of 4 frames"):
            ReplayBuffer(storage=storage).extend(stacks(20))


@each("batched", [False, True])
def test_a_transform_of_n_step_returns_says_its_n(batched: bool) -> None:
    """Also by `add`, of which the first row that must fit is held back, and reaches one step on."""
    steps = stacks(12)
    steps["next", "reward"] = torch.ones(12, 1)
    steps["next", "done"] = torch.zeros(12, 1, dtype=torch.bool)
    storage = LazyTensorStorage(100, compact=True)
    rb = ReplayBuffer(storage=storage, transform=MultiStepTransform(3, 0.9))
    for at in range(12):
        _ = rb.extend(steps[at : at + 1]) if batched else rb.add(steps[at])
    assert storage.compact == Compact(["pixels"], {"pixels": 4}, 3) and len(rb) == 10
    assert np.array_equal(rb[:]["next", "pixels"], steps["next", "pixels"][2:12])


def test_n_step_rows_of_a_collectors_postproc_say_their_n() -> None:
    steps = stacks(12)[:1]
    steps["steps_to_next_obs"] = torch.full((1, 1), 5)
    storage = LazyTensorStorage(100, compact=True)
    ReplayBuffer(storage=storage).extend(steps)
    assert storage.compact == Compact(["pixels"], {"pixels": 4}, 5)


@each("argument", ["next_of", "stack_compress", "stack_size", "optimize_memory_usage", "stack_num", "ignore_obs_next"])
@each("cls", [ReplayBuffer, TensorDictReplayBuffer, LazyTensorStorage, LazyMemmapStorage])
def test_what_others_call_it_is_a_type_error_that_names_compact(cls: Any, argument: str) -> None:
    with pytest.raises(TypeError, match=rf"^{cls.__name__}\({argument}='obs'\): .*compact=True\)? stores each"):
        cls(100, **{argument: "obs"})


def test_the_horizon_of_dopamine_is_a_type_error_that_names_the_transform() -> None:
    with pytest.raises(TypeError, match=r"MultiStepTransform\(n, gamma\)"):
        ReplayBuffer(storage=LazyTensorStorage(100), update_horizon=3)
