"""`reset` of collectors with workers: every environment begins anew, and nothing is joined over it."""

import pytest
import torch
from tensordict import TensorDict

from collectors.failing import cartpole
from engram.collectors import MultiAsyncCollector, MultiSyncCollector
from engram.collectors.trajectories import TrajectoryAssembler
from engram.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
from processes.test_restarts import Numbered, check

BOTH = [MultiSyncCollector, MultiAsyncCollector]
IDS = ("collector", "traj_ids")


def long_episodes(folder):
    return [lambda k=k: Numbered(k, folder, length=1000) for k in range(2)]


def collected(collector, *shown):
    """Batches up to the first after which all of these (worker, episode) were shown."""
    batches, missing = [], set(shown)
    while missing:
        assert len(batches) < 200
        batches.append(collector.rollout())
        missing -= {(int(row["worker"]), int(row["episode"])) for row in batches[-1].reshape(-1)}
    return batches


@pytest.mark.parametrize("cls", BOTH)
def test_every_environment_begins_anew_and_other_trajectories_stay_whole(cls, tmp_path):
    with cls(long_episodes(tmp_path), frames_per_batch=20, total_frames=-1) as collector:
        batches = collected(collector, (0, 0), (1, 0))
        collector.reset()
        batches += collected(collector, (0, 1), (1, 1))
    check(batches)


@pytest.mark.parametrize("cls", BOTH)
def test_only_the_workers_that_were_named_begin_anew(cls, tmp_path):
    with cls(long_episodes(tmp_path), frames_per_batch=20, total_frames=-1) as collector:
        batches = collected(collector, (0, 0), (1, 0))
        collector.reset([False, True])
        batches += [*collected(collector, (1, 1)), *collected(collector, (0, 0))]
    check(batches)
    assert {int(row["episode"]) for batch in batches for row in batch.reshape(-1) if int(row["worker"]) == 0} == {0}


@pytest.mark.parametrize("cls", BOTH)
def test_with_whole_trajectories_the_unfinished_ones_are_dropped(cls, tmp_path):
    settings = {"frames_per_batch": 20, "total_frames": -1, "trajs_per_batch": 1, "traj_format": "cat"}
    with cls([lambda k=k: Numbered(k, tmp_path, length=15) for k in range(2)], **settings) as collector:
        batches = [collector.rollout()]
        collector.reset()
        batches += [collector.rollout() for _ in range(6)]
    for batch in batches:
        assert batch["step"].flatten().tolist() == list(range(len(batch))) and bool(batch["next", "done"][-1])


def without_next_observations(batch):
    """What says that an episode begins is left out: only a seam can."""
    names = ("worker", "life", "seed", "episode", "step")
    return batch.exclude("collector", "episode", *[("next", name) for name in names])


@pytest.mark.parametrize("writes", ["here", "in the worker"])
def test_no_slice_in_the_buffer_goes_over_a_reset(writes, tmp_path):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(400, shared=writes == "in the worker"),
        sampler=SliceSampler(slice_len=2, end_key=("next", "done"), traj_key=None),
        batch_size=400,
    )
    make = [lambda: Numbered(0, tmp_path, length=1000)]
    changed = {"postproc": without_next_observations} if writes == "here" else {}
    with MultiSyncCollector(make, frames_per_batch=10, total_frames=-1, replay_buffer=rb, **changed) as collector:
        for _ in range(12):
            collector.rollout()
            collector.reset()
    step = rb.sample()["step"].reshape(-1, 2)
    assert torch.equal(step[:, 1], step[:, 0] + 1)


def test_whole_trajectories_hold_no_steps_of_those_that_were_dropped():
    whole = TrajectoryAssembler()
    steps = {"collector": {"traj_ids": torch.tensor([[0, 0], [1, 2]])}}
    steps["next"] = {"done": torch.tensor([[False, False], [True, False]]).unsqueeze(-1)}
    whole.add(TensorDict(steps, [2, 2]))
    whole.drop([0, 1])
    whole.cut([0, 1, 2])
    assert (whole.count, whole.take(2)["collector", "traj_ids"].tolist()) == (2, [1, 2])


def test_flags_of_another_number_of_workers_are_refused_and_reset_nothing():
    with MultiSyncCollector([cartpole] * 2, frames_per_batch=20, total_frames=-1) as collector:
        ids = collector.rollout()[IDS][:, -1]
        with pytest.raises(ValueError, match="3 flags for 2 workers"):
            collector.reset([True, True, True])
        following = collector.rollout()
    goes_on = following[IDS][:, 0] == ids
    assert bool(goes_on.any())


@pytest.mark.parametrize("cls", BOTH)
def test_a_static_seed_reaches_every_worker(cls, tmp_path):
    with cls(long_episodes(tmp_path), frames_per_batch=20, total_frames=-1) as collector:
        assert collector.set_seed(3, static_seed=True) == 3
        batches = collected(collector, (0, 0), (1, 0))
    assert {int(row["seed"]) for batch in batches for row in batch.reshape(-1)} == {3}
