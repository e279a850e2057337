"""split_trajectories."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from contracts.each import each
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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_trajectories_are_the_padded_ones_without_padding():
    batch = make([[0, 0, 1], [2, 2, 2]])
    batch["next", "y"] = torch.rand(2, 3)
    padded, nested = split_trajectories(batch), split_trajectories(batch, as_nested=True)
    assert nested.batch_size == torch.Size([3, -1]) and ("collector", "mask") not in nested.keys(True)
    for key in batch.keys(True, True):
        rows = [row[mask] for row, mask in zip(padded[key], padded["collector", "mask"], strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(nested[key].unbind(), rows, strict=True))
    with pytest.raises(TypeError, match=r"cannot nest 'z', of dtype torch.uint16"):
        split_trajectories(batch.set("z", torch.zeros(2, 3, dtype=torch.uint16)), as_nested=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@each("ids", [[[0, 0], [1, 1]], [[0, 0, 0]], [[0, 1]]])
def test_nested_trajectories_of_one_length_say_that_length(ids):
    batch = make(ids)
    trajectories = len({trajectory for row in ids for trajectory in row})
    nested = split_trajectories(batch, as_nested=True)
    assert nested.batch_size == torch.Size([trajectories, batch.numel() // trajectories])
    for key in batch.keys(True, True):
        assert nested[key].is_nested and torch.equal(torch.cat(list(nested[key].unbind())), batch[key].flatten(0, 1))


@pytest.mark.parametrize("arguments", [{"prefix": "episode"}, {"trajectory_key": ("episode", "traj_ids")}])
def test_ids_and_mask_may_be_elsewhere(arguments):
    batch = make([[0, 0, 1], [2, 2, 2]])
    renamed = batch.clone()
    renamed["episode"] = renamed.pop("collector")
    renamed["collector", "traj_ids"] = torch.arange(6).reshape(2, 3)  # nobody asks for these
    split, expected = split_trajectories(renamed, **arguments), split_trajectories(batch)
    assert torch.equal(split["episode", "mask"], expected["collector", "mask"])
    assert torch.equal(split["x"], expected["x"]) and ("collector", "mask") not in split.keys(True)


def test_ids_that_are_not_under_the_prefix_are_made_from_the_ends_of_episodes():
    done = torch.tensor([[False, True, False]]).unsqueeze(-1)
    ids = torch.tensor([[7, 8, 9]])
    batch = TensorDict({"next": {"done": done}, "collector": {"traj_ids": ids}}, [1, 3])
    split = split_trajectories(batch, prefix=("a", "b"))
    assert split["a", "b", "traj_ids"].tolist() == [[0, 0], [1, 0]]
    assert split["a", "b", "mask"].tolist() == [[True, True], [True, False]] and "a" not in batch.keys()


@each(
    ("entries", "arguments", "ids_key"),
    [
        ({}, {}, "traj_ids"),
        ({"collector": {"policy_version": torch.zeros(1, 3)}}, {}, ("collector", "traj_ids")),
        ({"traj_ids": torch.tensor([[4, 4, 6]])}, {}, "traj_ids"),
        ({}, {"trajectory_key": ("episode", "id")}, ("episode", "id")),
    ],
)
def test_ids_and_mask_stand_where_the_batch_has_a_collector_entry_or_at_the_root(entries, arguments, ids_key):
    next_td = {"done": torch.tensor([[False, True, False]]).unsqueeze(-1)}
    batch = TensorDict({"next": next_td, "number": torch.tensor([[1, 2, 3]]), **entries}, [1, 3])
    split = split_trajectories(batch, **arguments)
    mask_key = "mask" if isinstance(ids_key, str) else (ids_key[0], "mask")
    assert split[mask_key].tolist() == [[True, True], [True, False]]
    assert split["number"].tolist() == [[1, 2], [3, 0]]
    assert split[ids_key].tolist() == ([[4, 4], [6, 0]] if "traj_ids" in entries else [[0, 0], [1, 0]])
    added = set(split.keys(True, True)) - set(batch.keys(True, True))
    assert added == {mask_key} if "traj_ids" in entries else added == {mask_key, ids_key}


@each("done_key", ["over", ("next", "over"), ("agents", "over"), "ended"])
def test_done_key_is_read_under_next_and_at_the_root_where_there_is_none(done_key):
    over, wrong = torch.tensor([[False, True, False]]).unsqueeze(-1), torch.ones(1, 3, 1).bool()
    next_td = {"done": wrong, "over": over, "agents": {"over": over}}
    batch = TensorDict({"next": next_td, "over": wrong, "ended": over, "number": torch.tensor([[1, 2, 3]])}, [1, 3])
    assert split_trajectories(batch, done_key=done_key)["number"].tolist() == [[1, 2], [3, 0]]


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
    with pytest.raises(KeyError, match="no trajectory ids 'episode' and no"):
        split_trajectories(make([[0, 1]]), trajectory_key="episode")
    with pytest.raises(KeyError, match="no trajectory ids 'traj_ids' and no"):
        split_trajectories(TensorDict({"x": torch.zeros(1, 2)}, [1, 2]))


def test_ids_and_mask_stand_at_the_root_of_a_batch_without_collector():
    done = torch.tensor([False, True, False]).unsqueeze(-1)
    batch = TensorDict({"x": torch.arange(3), "next": TensorDict({"done": done}, [3])}, [3])
    split = split_trajectories(batch)
    assert split["mask"].tolist() == [[True, True], [True, False]]
    assert split["traj_ids"].tolist() == [[0, 0], [1, 0]] and "collector" not in split.keys()
