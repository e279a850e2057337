"""Values that are not finite spoil no statistics."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.collectors.stats import EpisodeStats
from engram.data import LazyTensorStorage, ReplayBuffer
from engram.envs import TransformedEnv
from engram.errors import CheckpointMisfitError
from engram.testing.helpers import assert_equal
from engram.testing.transform import Replayed
from engram.transforms import Compose, ObservationNorm, RewardSum, VecNorm
from transforms.data import steps

BAD = [math.nan, math.inf, -math.inf]


def left_out():
    return pytest.warns(UserWarning, match="left out of its statistics")


def spoilt(*shape, rows, value=math.nan, key="x"):
    """Steps of which these rows, counted over all dimensions, have one bad value."""
    data = steps(*shape)
    data[key].view(-1, data[key].shape[-1])[list(rows), 0] = value
    return data


@each("value", BAD)
@each("decay", [1.0, 0.9])
def test_a_norm_learns_from_the_finite_rows_of_a_batch_only(value, decay):
    norm, clean = VecNorm(["x"], decay=decay), VecNorm(["x"], decay=decay)
    keep = torch.ones(12, dtype=torch.bool)
    keep[[0, 7]] = False
    with left_out():
        norm.learn(spoilt(12, rows=(0, 7), value=value))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warned of once
        norm.learn(spoilt(12, rows=(0, 7), value=value))
    clean.learn(steps(12)[keep])
    clean.learn(steps(12)[keep])
    assert_equal(norm.loc, clean.loc)
    assert_equal(norm.scale, clean.scale)
    assert norm.nonfinite == 4 and clean.nonfinite == 0


def test_a_norm_leaves_values_out_whose_squares_are_infinite():
    norm = VecNorm(["x"], decay=1.0)
    with left_out():
        norm.learn({"x": torch.tensor([1.0, 3.0, 1e200, -1e308, 1.7e308], dtype=torch.float64)})
    assert float(norm.loc["x"]) == 2 and norm.nonfinite == 3
    for _ in range(3):
        norm.learn({"x": torch.tensor([1e139, -1e139], dtype=torch.float64)})
    assert norm({"x": torch.tensor([1e139, -1e139], dtype=torch.float64)})["x"].isfinite().all()


def test_other_entries_learn_from_rows_of_which_one_entry_is_not_finite():
    norm, clean = VecNorm(["x", ("next", "x")]), VecNorm(["x", ("next", "x")])
    with left_out():
        norm.learn(spoilt(6, rows=range(6)))
    assert norm.nonfinite == 6
    clean.learn(steps(6))
    norm.learn(steps(6))
    assert_equal(norm.loc["x"], clean.loc["x"])
    clean.learn(steps(6))
    assert_equal(norm.loc["next", "x"], clean.loc["next", "x"])


def test_an_entry_of_which_nothing_finite_has_come_passes_as_it_is():
    norm = VecNorm(["x"])
    with pytest.raises(RuntimeError, match="no statistics yet"):
        norm.forward(steps(3))
    with left_out():
        out = norm(spoilt(3, rows=range(3)))
    assert_equal(out, spoilt(3, rows=range(3)))
    with pytest.raises(RuntimeError, match="no statistics yet"):
        norm.loc  # noqa: B018
    assert norm(steps(3))["x"].isfinite().all()


@pytest.mark.parametrize("invert", [False, True])
def test_a_row_that_is_not_finite_is_stored_and_the_others_are_normalised(invert, tmp_path):
    rb, clean = (ReplayBuffer(storage=LazyTensorStorage(50)) for _ in range(2))
    for buffer in (rb, clean):
        buffer.append_transform(VecNorm(["x"], decay=1.0), invert=invert)
    with left_out():
        rb.extend(spoilt(6, rows=(2,)))
    rb.add(steps(8)[7])
    clean.extend(steps(6)[torch.tensor([0, 1, 3, 4, 5])])
    clean.add(steps(8)[7])
    kept = torch.tensor([0, 1, 3, 4, 5, 6])
    torch.testing.assert_close(rb[:]["x"][kept], clean[:]["x"])
    assert rb[2]["x"][0].isnan() and rb[2]["x"][1:].isfinite().all()
    rb.dumps(tmp_path)
    twin = ReplayBuffer(storage=LazyTensorStorage(50))
    twin.append_transform(VecNorm(["x"], decay=1.0), invert=invert)
    twin.loads(tmp_path)
    assert_equal(twin.transform.state_dict(), rb.transform.state_dict())
    assert twin.state_dict()["transform"]["transforms"][0]["state"]["nonfinite"] == [1]


def test_a_refused_write_counts_no_rows():
    norm = VecNorm(["x"])
    rb = ReplayBuffer(storage=LazyTensorStorage(50), transform=norm)
    rb.extend(steps(3))
    bad = spoilt(3, rows=(0,))
    bad["next", "reward"] = bad["next", "reward"].double()
    with left_out(), pytest.raises(ValueError, match="reward"):
        rb.extend(bad)
    assert norm.nonfinite == 0 and norm.loc["x"].isfinite().all()


def test_several_environments_that_share_a_norm_spoil_it_for_none():
    norm = VecNorm(["x"], decay=1.0)
    one, other = (TransformedEnv(Replayed(spoilt(2, 20, rows=rows), [3, 4]), norm) for rows in ((0, 5), (3,)))
    with left_out():
        one.rollout(8, break_when_any_done=False)
    found = other.rollout(8, break_when_any_done=False)
    assert norm.loc["x"].isfinite().all() and norm.scale["x"].isfinite().all() and norm.nonfinite >= 3
    assert found["next", "x"].isfinite().float().mean() > 0.9


def test_an_environment_that_begins_with_a_nan_goes_on():
    single = TransformedEnv(Replayed(spoilt(1, 20, rows=(0,)), [9]), VecNorm(["x"]))
    with left_out():
        first = single.reset()
    assert first["x"].flatten().isnan().tolist() == [True, False, False]
    batch = single.rollout(5)
    assert batch["next", "x"].isfinite().all()


# ---- states ----
def saved(mean, squares, weight=3.0):
    stats = (weight, torch.as_tensor(mean).double(), torch.as_tensor(squares).double())
    return {"stats": [stats], "learns": True, "nonfinite": [0]}


@each("state",
    [saved([0.0], [-1.0]), saved([0.0], [1.0], weight=0.0), saved([0.0], [1.0], weight=math.nan),
     saved([0.0], [1.0], weight=math.inf), saved([0.0], [1.0, 2.0]), saved([math.nan], [1.0]), saved([0.0], [math.nan]),
     saved([0.0, 1.0], [math.inf, 1.0])])  # fmt: skip
def test_statistics_that_cannot_be_are_refused(state):
    norm = VecNorm(["x"])
    entry = {"kind": "VecNorm", "nth": 0, "state": state, "settings": norm.state_settings()}
    with pytest.raises(ValueError, match="impossible statistics of 'x'"):
        Compose(norm).load_state_dict({"transforms": [entry]})
    assert norm.state_dict() == {}


@each("value", BAD)
def test_statistics_are_not_taken_from_data_that_are_not_finite(value):
    norm = ObservationNorm(in_keys=["x"], standard_normal=True)
    norm.init_stats(steps(6))
    before = copy.deepcopy(norm.state_dict())
    with pytest.raises(ValueError, match="1 values of 18 that are not finite"):
        norm.init_stats(spoilt(6, rows=(2,), value=value))
    assert_equal(norm.state_dict(), before)


def test_statistics_of_half_precision_do_not_overflow():
    norm = ObservationNorm(in_keys=["x"], standard_normal=True)
    norm.init_stats({"x": torch.tensor([60000.0, -60000.0], dtype=torch.float16)})
    assert float(norm.scale) == 60000
    assert norm({"x": torch.tensor([60000.0], dtype=torch.float16)})["x"].tolist() == [1.0]


def test_a_saved_norm_of_data_that_were_not_finite_is_refused(tmp_path):
    def made():
        norm = ObservationNorm(in_keys=["x"], standard_normal=True)
        norm.init_stats(steps(6))
        return ReplayBuffer(storage=LazyTensorStorage(9), transform=norm)

    rb, other = made(), made()
    rb.extend(steps(3))
    rb.transform[0]._stats = (torch.tensor(math.nan), torch.tensor(1.0))
    rb.dumps(tmp_path)
    with pytest.raises(CheckpointMisfitError, match="must be finite"):
        other.loads(tmp_path)
    assert len(other) == 0 and other.transform[0].loc.isfinite().all()


# ---- episodes ----
@each("value", BAD)
@each("batch", [1, 2, 6])
def test_a_reward_that_is_not_finite_is_in_the_return_of_its_own_episode_only(value, batch):
    reward = np.array([[1.0, value, 3, 4, 5, 6], [1, 2, 3, 4, value, 6]])
    done = np.array([[0, 0, 1, 0, 1, 0], [0, 1, 0, 0, 0, 1]], dtype=bool)
    episodes = EpisodeStats(2)
    for t in range(0, 6, batch):
        episodes.add(reward[:, t : t + batch], done[:, t : t + batch])
    episodes.add(np.array([[1.0], [1.0]]), np.array([[True], [True]]))
    np.testing.assert_equal(list(episodes.returns), [3, value, 9, value, 7, 1])


@each("value", BAD)
def test_a_sum_of_rewards_that_is_not_finite_ends_with_its_trajectory(value):
    data = spoilt(2, 20, rows=(3,), value=value, key="x")
    data["next", "reward"][0, 3] = value
    sums = TransformedEnv(Replayed(data, [5, 7]), RewardSum()).rollout(12, break_when_any_done=False)
    bad = ~sums["next", "episode_reward"].isfinite().squeeze(-1)
    assert bad.nonzero().tolist() == [[0, 3], [0, 4]]


def test_batches_of_tensordicts_and_dicts_are_cleaned_alike():
    one, other = VecNorm(["x"]), VecNorm(["x"])
    data = spoilt(4, rows=(1,))
    for norm, batch in ((one, data), (other, TensorDict.to_dict(data))):
        with left_out():
            norm.learn(batch)
    assert_equal(one.state_dict(), other.state_dict())
