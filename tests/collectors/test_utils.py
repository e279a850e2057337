"""split_trajectories."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from engram.collectors.utils import split_trajectories
from engram.data import LazyTensorStorage, ReplayBuffer, SliceSampler


def make(rows):
    """A batch `[envs, time]` with the given trajectory ids and a running number."""
    ids = torch.tensor(rows)
    number = torch.arange(ids.numel()).reshape(ids.shape)
    return TensorDict({"collector": {"traj_ids": ids}, "number": number, "x": torch.rand(*ids.shape, 2)}, ids.shape)


@given(st.integers(1, 3).flatmap(lambda e: st.lists(st.lists(st.integers(1, 5), min_size=e, max_size=e), min_size=1)))
def test_no_step_is_lost_or_mixed_up(columns):
    rows = torch.tensor(columns).cumsum(0).t() + torch.arange(len(columns[0])).unsqueeze(1) * 1000
    batch = make(rows.tolist())
    split = split_trajectories(batch)
    mask = split["collector", "mask"]
    assert torch.equal(split["number"][mask], batch["number"].reshape(-1))
    assert torch.equal(split["x"][mask], batch["x"].reshape(-1, 2))
    for trajectory, valid in zip(split["collector", "traj_ids"], mask, strict=True):
        assert trajectory[valid].unique().numel() == 1


def test_padding_is_zero_and_comes_last():
    split = split_trajectories(make([[7, 7, 7, 8]]))
    assert split["number"].tolist() == [[0, 1, 2], [3, 0, 0]]
    assert split["collector", "mask"].tolist() == [[True] * 3, [True, False, False]]


def test_without_ids_the_ends_of_episodes_divide():
    done = torch.tensor([[False, True, False]]).unsqueeze(-1)
    split = split_trajectories(TensorDict({"next": {"done": done}, "x": torch.tensor([[1, 2, 3]])}, [1, 3]))
    assert split["x"].tolist() == [[1, 2], [3, 0]]


@pytest.mark.parametrize("ids", [True, False])
def test_slices_of_one_episode_that_follow_each_other_in_a_sampled_batch_stay_two(ids):
    torch.manual_seed(0)
    data = TensorDict({"number": torch.arange(9), "next": {"done": torch.zeros(9, 1).bool()}}, [9])
    if ids:
        data["collector", "traj_ids"] = torch.zeros(9).long()
    rb = ReplayBuffer(storage=LazyTensorStorage(9), sampler=SliceSampler(slice_len=3), batch_size=6)
    rb.extend(data)
    for _ in range(20):  # also two slices one after the other, or one twice
        batch = rb.sample()
        split = split_trajectories(batch)
        assert split.shape == (2, 3) and torch.equal(split["number"], batch["number"].reshape(2, 3))


def test_a_single_step_is_a_trajectory():
    assert split_trajectories(make([[4], [5]])).shape == (2, 1)


def test_the_batch_itself_stays_as_it_is():
    batch = make([[0, 0, 1]])
    kept = batch.clone()
    split_trajectories(batch)
    assert bool((batch == kept).all()) and set(batch.keys(True)) == set(kept.keys(True))


def test_an_empty_batch_and_an_unknown_key_are_refused():
    with pytest.raises(ValueError, match="with steps"):
        split_trajectories(TensorDict({}, []))
    with pytest.raises(KeyError, match="no trajectory key 'episode'"):
        split_trajectories(make([[0, 1]]), trajectory_key="episode")
    with pytest.raises(KeyError, match="no trajectory ids and no"):
        split_trajectories(TensorDict({"x": torch.zeros(1, 2)}, [1, 2]))
