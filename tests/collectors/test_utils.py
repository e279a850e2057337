"""split_trajectories."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from contracts.each import each
from engram.collectors.joining import padded
from engram.collectors.utils import split_trajectories
from engram.data import LazyTensorStorage, ReplayBuffer, SequenceSampler, SliceSampler, TensorDictReplayBuffer


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


# ---- padded batches ----
def sampled(sampler, flags, size=15):
    """Padded slices of episodes of 3, 3 and 7 steps, whose numbers begin at 0, 1000 and 2000."""
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=size)
    for episode, n in enumerate((3, 3, 7)):
        number, done = torch.arange(n) + 1000 * episode, torch.zeros(n, 1, dtype=torch.bool)
        done[-1] = True
        rows = {"number": number, "episode": torch.full((n,), episode)}
        if flags:
            rows["next"] = {"number": number + 1, "done": done, "truncated": torch.zeros_like(done)}
        rb.extend(TensorDict(rows, [n]))
    return rb.sample()


def runs_of(batch, mask, length):
    """The steps of each slice."""
    rows = zip(batch["number"].reshape(-1, length), mask.reshape(-1, length), strict=True)
    return [row[steps].tolist() for row, steps in rows]


PADDED = {
    "slices": lambda: SliceSampler(slice_len=5, traj_key="episode", strict_length=False, pad_output=True),
    "sequences": lambda: SequenceSampler(slice_len=5, burn_in=2, traj_key="episode", strict_length=False),
    "last steps": lambda: SequenceSampler(slice_len=5, burn_in=4, traj_key="episode", weight="steps"),
}


@each("sampler", PADDED)
@each("flags", [False, True])
@each(
    ("arguments", "mask_key"),
    [
        ({}, ("collector", "mask")),
        ({"trajectory_key": "episode"}, "mask"),
        ({"prefix": ("a", "b")}, ("a", "b", "mask")),
        ({"mask_key": "steps"}, "steps"),
    ],
)
@each("envs", [False, True])
def test_padding_of_slices_is_no_step(sampler, flags, arguments, mask_key, envs):
    torch.manual_seed(0)
    for _ in range(5):
        batch = sampled(PADDED[sampler](), flags)
        expected = runs_of(batch, batch["collector", "mask"], 5)
        split = split_trajectories(batch.reshape(3, 5) if envs else batch, **arguments)
        assert runs_of(split, split[mask_key], split.shape[1]) == expected
        assert torch.equal(split["collector", "mask"], split[mask_key])
        again = split_trajectories(split, **arguments)
        assert bool((again == split).all()) and set(again.keys(True, True)) == set(split.keys(True, True))


def test_the_mask_of_a_sequence_sampler_may_have_another_key():
    torch.manual_seed(0)
    sampler = SequenceSampler(slice_len=5, burn_in=2, traj_key="episode", strict_length=False, mask_key=("seq", "real"))
    batch = sampled(sampler, True)
    split = split_trajectories(batch, trajectory_key="episode", mask_key=("seq", "real"))
    assert runs_of(split, split["seq", "real"], split.shape[1]) == runs_of(batch, batch["seq", "real"], 5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_trajectories_of_padded_slices_have_neither_padding_nor_mask():
    torch.manual_seed(0)
    batch = sampled(PADDED["slices"](), True)
    nested = split_trajectories(batch, trajectory_key="episode", as_nested=True)
    assert ("collector", "mask") not in nested.keys(True) and "mask" not in nested.keys()
    expected = runs_of(batch, batch["collector", "mask"], 5)
    assert [row.tolist() for row in nested["number"].unbind()] == expected


def test_ids_are_made_of_steps_only():
    done = torch.tensor([[True, False, True, True]]).unsqueeze(-1)
    mask = torch.tensor([[False, True, True, False]])
    batch = TensorDict({"next": {"done": done}, "collector": {"mask": mask}, "x": torch.arange(4)[None]}, [1, 4])
    split = split_trajectories(batch)
    assert split["x"].tolist() == [[1, 2]] and split["collector", "traj_ids"].tolist() == [[0, 0]]


def test_padding_of_a_worker_that_was_stopped_early_is_no_step():
    batches = [make([[0, 0, 1], [2, 2, 2]]), make([[5, 5], [0, 0]])]
    batch = torch.cat([padded(batch, 3) for batch in batches])
    split = split_trajectories(batch)
    assert split["number"][split["collector", "mask"]].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert split["collector", "mask"].sum(1).tolist() == [2, 1, 3, 2, 2]


def test_a_mask_that_is_none_and_a_batch_of_padding_are_refused():
    batch = make([[0, 0, 1]])
    with pytest.raises(ValueError, match=r"mask_key='x' is an entry of this batch, and no mask"):
        split_trajectories(batch, mask_key="x")
    batch["collector", "mask"] = torch.zeros(1, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="all 3 rows are padding"):
        split_trajectories(batch)
    batch["collector", "mask"] = torch.zeros(1, 3, 4, dtype=torch.bool)  # of four agents, say
    assert split_trajectories(batch)["collector", "mask"].tolist() == [[True, True], [True, False]]
