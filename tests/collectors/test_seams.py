"""No slice joins rows that do not follow each other, whoever wrote them with whatever ids."""

from __future__ import annotations

import pytest
import torch

from contracts.each import each
from contracts.gym_worlds import Countdown
from engram.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, SyncDataCollector
from engram.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, SliceSampler
from engram.envs import GymEnv, SerialEnv
from engram.envs.transforms import MultiStepTransform

STORAGES = {
    "memory": lambda: LazyTensorStorage(1000),
    "shared": lambda: LazyTensorStorage(1000, shared=True),
    "mapped": lambda: LazyMemmapStorage(1000),
    "list": lambda: ListStorage(1000),
    "two dimensions": lambda: LazyTensorStorage(1000, ndim=2),
}


def endless():
    return GymEnv(Countdown((1000,)))


def several():
    return SerialEnv(2, endless)


def buffer_of(name):
    return ReplayBuffer(storage=STORAGES[name](), sampler=SliceSampler(slice_len=16), batch_size=160)


def assert_slices_are_whole(rb, steps):
    """Every slice is 16 consecutive steps; `steps` rows are there, or more where workers are ahead."""
    assert len(rb) >= steps
    for _ in range(10):
        rows = rb.sample().reshape(-1, 16)
        assert torch.equal(rows["next", "observation"][:, :-1], rows["observation"][:, 1:])


@each("name", STORAGES)
def test_two_collectors_one_after_the_other(name):
    rb, make = buffer_of(name), several if name == "two dimensions" else endless
    for _ in range(2):
        collector = SyncDataCollector(make(), frames_per_batch=48, replay_buffer=rb)
        collector.rollout()
    rows = rb[:]
    rows = torch.stack(rows) if isinstance(rows, list) else rows
    assert rows["collector", "traj_ids"].max() == make().batch_size.numel() - 1  # both count from 0
    assert_slices_are_whole(rb, 96)


@each("name", STORAGES)
def test_rows_before_and_after_a_reset(name):
    rb, make = buffer_of(name), several if name == "two dimensions" else endless
    collector = SyncDataCollector(make(), frames_per_batch=24, replay_buffer=rb)
    for _ in range(2):
        collector.rollout()
    collector._tags.ids.count = 0  # as a second collector would number them
    collector.reset()
    for _ in range(2):
        collector.rollout()
    assert_slices_are_whole(rb, 96)


def test_rows_before_and_after_load_state_dict():
    rb = buffer_of("memory")
    collector = SyncDataCollector(endless(), frames_per_batch=24, replay_buffer=rb)
    state = collector.state_dict()
    for _ in range(2):
        collector.rollout()
        collector.load_state_dict(state)
    assert rb[:]["collector", "traj_ids"].unique().tolist() == [0]
    assert_slices_are_whole(rb, 48)


def test_rows_before_and_after_an_error():
    class Breaks(Countdown):
        def step(self, action):
            if self.total == 30:
                self.total = 0
                raise ArithmeticError
            return super().step(action)

    rb = buffer_of("memory")
    collector = SyncDataCollector(GymEnv(Breaks((1000,))), frames_per_batch=24, replay_buffer=rb)
    collector.rollout()
    with pytest.raises(ArithmeticError):
        collector.rollout()
    collector._tags.ids.count = 0
    collector.rollout()
    assert_slices_are_whole(rb, 54)


def test_batches_of_one_collector_are_joined():
    rb = buffer_of("memory")
    collector = SyncDataCollector(endless(), frames_per_batch=8, replay_buffer=rb)
    for _ in range(2):
        collector.rollout()
    assert rb.sample().reshape(-1, 16)["observation"][:, 0, 0].unique().numel() == 1


def test_rows_that_a_transform_holds_back_are_written_before_the_seam():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(1000),
        sampler=SliceSampler(slice_len=4),
        batch_size=400,
        transform=MultiStepTransform(n_steps=3, gamma=1.0),
    )
    for k in range(2):
        SyncDataCollector(endless(), frames_per_batch=8, replay_buffer=rb).rollout()
        assert len(rb) == 8 * (k + 1) - 2  # the last two wait for those that would follow
    assert rb[:8]["observation"][:, 0].tolist() == list(range(1000, 992, -1))
    assert rb[6:8]["next", "observation"][:, 0].tolist() == [992, 992]
    left = rb.sample().reshape(-1, 4)["observation"][..., 0]
    assert (left[:, :-1] - left[:, 1:] == 1).all()


BOTH = [MultiSyncDataCollector, MultiaSyncDataCollector]


@pytest.mark.pairwise
@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("name", ["memory", "shared"])
@pytest.mark.parametrize("loads", [False, True])
def test_two_collectors_with_workers(cls, name, loads):
    rb = buffer_of(name)
    for _ in range(2):
        with cls([endless], frames_per_batch=24, replay_buffer=rb) as collector:
            state = collector.state_dict()
            collector.rollout()
            if loads:
                collector.load_state_dict(state)
            collector.rollout()
    assert_slices_are_whole(rb, 96)
