"""Numbers of something: whole floats are taken for them (1e6, as YAML files have it); all else is refused."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from contracts.each import each
from engram import transforms
from engram.collectors import Evaluator, MultiSyncDataCollector, SyncDataCollector
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    LinearScheduler,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerEnsemble,
    SliceSampler,
)
from engram.envs import GymEnv, ParallelEnv, SerialEnv

cart_pole = functools.partial(GymEnv, "CartPole-v1")


def collected(**numbers: Any) -> int:
    with SyncDataCollector(cart_pole(), **{"frames_per_batch": 4, "total_frames": 8, **numbers}) as collector:
        return sum(batch.numel() for batch in collector)


#: Each argument that is a number of something, and whether it may be 0.
COUNTS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "frames_per_batch": (lambda n: collected(frames_per_batch=n), 1),
    "total_frames": (lambda n: collected(total_frames=n), 1),
    "max_frames_per_traj": (lambda n: collected(max_frames_per_traj=n), 1),
    "init_random_frames": (lambda n: collected(init_random_frames=n), 0),
    "trajs_per_batch": (lambda n: collected(trajs_per_batch=n, total_frames=1) > 0, 1),
    "num_trajectories": (lambda n: Evaluator(cart_pole(), num_trajectories=n).shutdown(), 1),
    "n of a SerialEnv": (lambda n: SerialEnv(n, cart_pole).batch_size, 1),
    "num_envs": (lambda n: cart_pole(num_envs=n).batch_size, 0),
    "frame_skip of an environment": (lambda n: cart_pole(frame_skip=n), 1),
    "max_steps of a rollout": (lambda n: cart_pole().rollout(n).shape, 1),
    "max_size": (lambda n: LazyTensorStorage(n).max_size, 1),
    "max_size of a store": (lambda n: LazyMemmapStorage(n).max_size, 1),
    "max_size of a list": (lambda n: ListStorage(n).max_size, 1),
    "lanes": (lambda n: LazyTensorStorage(100, lanes=n), 1),
    "ndim": (lambda n: LazyTensorStorage(100, ndim=n).ndim, 1),
    "batch_size": (lambda n: ReplayBuffer(storage=LazyTensorStorage(9), batch_size=n).batch_size, 1),
    "prefetch": (lambda n: ReplayBuffer(storage=LazyTensorStorage(9), batch_size=2, prefetch=n), 0),
    "max_capacity": (lambda n: PrioritizedSampler(n, 0.6, 0.4).max_capacity, 1),
    "num_slices": (lambda n: SliceSampler(num_slices=n, traj_key="t").num_slices, 1),
    "slice_len": (lambda n: SliceSampler(slice_len=n, traj_key="t").slice_len, 1),
    "num_buffer_sampled": (lambda n: SamplerEnsemble(RandomSampler(), RandomSampler(), num_buffer_sampled=n), 1),
    "num_steps of a scheduler": (
        lambda n: LinearScheduler(PrioritizedSampler(9, 0.6, 0.4), "beta", 1.0, num_steps=n),
        1,
    ),
    "n_steps": (lambda n: transforms.MultiStepTransform(n, 0.9).n_steps, 1),
    "N of CatFrames": (lambda n: transforms.CatFrames(n, -1, ["obs"]).N, 1),
    "max_steps of a StepCounter": (lambda n: transforms.StepCounter(n).max_steps, 1),
    "frame_skip": (lambda n: transforms.FrameSkipTransform(n).frame_skip, 1),
    "noops": (lambda n: transforms.NoopResetEnv(n).noops, 0),
    "max_horizon": (lambda n: transforms.RandomTruncationTransform(1, n).max_horizon, 1),
    "sub_seq_len": (lambda n: transforms.RandomCropTensorDict(n).sub_seq_len, 1),
    "w": (lambda n: transforms.CenterCrop(n).w, 1),
}
NO_COUNTS = [1.5, "100", True, math.nan, math.inf, -3, [2]]


@each("name", COUNTS)
@each("number", [1.0, np.float64(1)])
def test_a_whole_float_is_taken_as_the_integer(name: str, number: Any) -> None:
    make, _ = COUNTS[name]
    expected, found = make(1), make(number)
    assert type(found) is type(expected)
    if isinstance(expected, int | tuple):
        assert found == expected


@each("name", COUNTS)
@each("number", NO_COUNTS)
def test_anything_else_is_refused_in_the_same_words(name: str, number: Any) -> None:
    make, least = COUNTS[name]
    with pytest.raises(ValueError, match=rf"\w+ must be an integer of {least} or more, got"):
        make(number)


def test_workers_and_the_frames_of_each_are_such_numbers() -> None:
    with contextlib.closing(ParallelEnv(2.0, cart_pole, num_workers=1.0)) as env:
        assert env.batch_size == (2,)
    with MultiSyncDataCollector(cart_pole, num_workers=2.0, frames_per_batch=[4.0, 4.0], total_frames=8.0) as collector:
        assert [batch.numel() for batch in collector] == [8]
