"""Trajectories of flat data: `find_start_stop_traj` against a loop in Python, and `iter_trajectories`."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as s
from tensordict import TensorDict, tensorclass

from contracts.each import each
from engram.data import LazyTensorStorage, ReplayBuffer, find_start_stop_traj, iter_trajectories


def by_hand(ends, at_capacity, cursor):
    """(env, first, last) of each trajectory of a ring of one environment, in the order of the last steps."""
    n = len(ends)
    last = [t for t in range(n) if ends[t] or (at_capacity and t == cursor) or (not at_capacity and t == n - 1)]
    last = last or [n - 1]
    return [((last[k - 1] + 1) % n, t) for k, t in enumerate(last)]


@given(s.data())
@settings(max_examples=60, deadline=None)
def test_trajectory_bounds_equal_those_of_a_plain_loop(data):
    n, envs = data.draw(s.integers(1, 12)), data.draw(s.integers(1, 3))
    flags = data.draw(s.lists(s.lists(s.booleans(), min_size=envs, max_size=envs), min_size=n, max_size=n))
    at_capacity = data.draw(s.booleans())
    cursor = data.draw(s.none() | s.integers(0, n - 1))
    start, stop, length = find_start_stop_traj(end=torch.tensor(flags), at_capacity=at_capacity, cursor=cursor)
    expected = [
        ([first, env], [last, env], (last - first) % n + 1)
        for env in range(envs)
        for first, last in by_hand([row[env] for row in flags], at_capacity, cursor)
    ]
    assert list(zip(start.tolist(), stop.tolist(), length.tolist(), strict=True)) == expected
    if at_capacity or cursor is None:
        assert int(length.sum()) == n * envs


def test_ids_end_where_another_one_follows_around_the_ring_too():
    ids = torch.tensor([4, 4, 1, 1, 4])
    found = [t.tolist() for t in find_start_stop_traj(trajectory=ids, at_capacity=True)]
    assert found == [[[4], [2]], [[1], [3]], [3, 2]]
    found = [t.tolist() for t in find_start_stop_traj(trajectory=ids, at_capacity=False)]
    assert found == [[[0], [2], [4]], [[1], [3], [4]], [2, 2, 1]]


@each("cursor", [2, torch.tensor(2), torch.tensor([1, 2]), range(1, 3)])
def test_a_cursor_is_the_last_step_that_was_written(cursor):
    _, stop, _ = find_start_stop_traj(end=torch.zeros(6).bool(), at_capacity=True, cursor=cursor)
    assert stop.tolist() == [[2]]


def test_wrong_arguments_are_refused():
    end = torch.zeros(3).bool()
    with pytest.raises(TypeError, match="exactly one"):
        find_start_stop_traj(at_capacity=True)
    with pytest.raises(TypeError, match="exactly one"):
        find_start_stop_traj(end=end, trajectory=end, at_capacity=True)
    with pytest.raises(RuntimeError, match="empty"):
        find_start_stop_traj(end=end[:0], at_capacity=True)
    with pytest.raises(IndexError):
        find_start_stop_traj(end=end, at_capacity=True, cursor=3)


# ---- one after the other ----
DONE = torch.tensor([0, 1, 0, 0, 1, 0]).bool().unsqueeze(1)
IDS = torch.tensor([7, 7, 3, 3, 3, 7])


def flat(**more):
    following = {"reward": torch.arange(6.0).unsqueeze(1), "done": DONE}
    return TensorDict({"x": torch.arange(6), "next": following, **more}, [6])


def cut(data, key=None):
    return [t.data["x"].tolist() for t in iter_trajectories(data, key)]


def test_a_change_of_id_begins_a_trajectory():
    data = flat(collector={"traj_ids": IDS}, episode=torch.arange(6))
    trajectories = list(iter_trajectories(data))
    assert [t.data["x"].tolist() for t in trajectories] == [[0, 1], [2, 3, 4], [5]]
    assert [t.length for t in trajectories] == [len(t) for t in trajectories] == [2, 3, 1]
    assert [t.total_reward.item() for t in trajectories] == [1, 9, 5]
    assert trajectories[1].batch_size == torch.Size([3]) == trajectories[1].data.batch_size
    assert cut(data, "episode") == [[k] for k in range(6)]
    assert cut(flat(traj_ids=IDS)) == [[0, 1], [2, 3, 4], [5]]


def test_without_ids_flags_decide_with_a_warning():
    with pytest.warns(UserWarning, match="no trajectory ids"):
        assert cut(flat()) == [[0, 1], [2, 3, 4], [5]]
    data = flat().set("done", ~DONE)  # of the root, where those under next are
    data["next", "truncated"] = torch.zeros(6, 1).bool()
    data["next", "truncated"][3] = True
    with pytest.warns(UserWarning):
        assert cut(data) == [[0, 1], [2, 3], [4], [5]]
    with pytest.warns(UserWarning):
        assert cut(TensorDict({"x": torch.arange(6), "done": DONE}, [6])) == [[0, 1], [2, 3, 4], [5]]


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(KeyError, match="traj_ids"):
        iter_trajectories(flat().exclude("next"))
    with pytest.raises(KeyError, match="'missing'"):
        iter_trajectories(flat(), "missing")
    with pytest.raises(ValueError, match="single batch dimension"):
        iter_trajectories(torch.stack([flat(), flat()]))
    with pytest.raises(KeyError, match="reward"):
        _ = next(iter_trajectories(flat(episode=IDS).exclude("next"))).total_reward


@tensorclass
class Steps:
    x: torch.Tensor
    episode: torch.Tensor


def test_classes_dicts_and_no_steps_are_cut_too():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts = list(iter_trajectories(Steps(x=torch.arange(6), episode=IDS, batch_size=[6])))
        assert [type(t.data) for t in parts] == [Steps] * 3 and [t.length for t in parts] == [2, 3, 1]
        assert [t.data["x"].tolist() for t in iter_trajectories({"x": torch.arange(6), "episode": IDS})][1] == [2, 3, 4]
        assert not list(iter_trajectories(flat(episode=IDS)[:0]))


def test_stored_steps_are_cut_as_they_were_written():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(flat(episode=IDS))
    assert cut(rb[:]) == [[0, 1], [2, 3, 4], [5]]


@each("ids", [True, False])
def test_padding_is_no_step_of_a_trajectory(ids):
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 1, 0]).bool()
    data = TensorDict({"x": torch.arange(8), "collector": {"mask": mask}}, [8])
    data["episode" if ids else "done"] = torch.zeros(8, dtype=torch.bool)
    with nullcontext() if ids else pytest.warns(UserWarning, match="no trajectory ids"):
        found = [trajectory.data["x"].tolist() for trajectory in iter_trajectories(data)]
    assert found == [[1, 2], [5, 6]]
