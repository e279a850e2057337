"""Transforms along time against slow loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.each import each
from engram.collectors import SyncDataCollector
from engram.data import LazyTensorStorage, ListStorage, ReplayBuffer, SliceSampler, TensorDictReplayBuffer
from engram.envs import GymEnv
from engram.transforms import (
    CatFrames,
    Compose,
    InitTracker,
    NextStateReconstructor,
    Reward2GoTransform,
    RewardSum,
    StepCounter,
    TrajCounter,
)
from transforms.data import steps

done_of = st.lists(st.booleans(), min_size=1, max_size=20)


def dict_of(done, *more):
    n = len(done)
    return {
        "x": torch.arange(1.0, n + 1).unsqueeze(-1),
        "next": {
            "x": torch.arange(1.0, n + 1).unsqueeze(-1) + 0.5,
            "reward": torch.arange(1.0, n + 1).double().unsqueeze(-1),
            "done": torch.tensor(done).unsqueeze(-1),
        },
    }


def trajectories(done):
    found, start = [], 0
    for t, d in enumerate(done):
        if d or t == len(done) - 1:
            found.append(range(start, t + 1))
            start = t + 1
    return found


@settings(max_examples=30, deadline=None)
@given(done=done_of, gamma=st.sampled_from([0.0, 0.3, 0.99, 1.0]))
def test_sums_counts_marks_and_returns_are_those_of_a_loop(done, gamma):
    total, count, init, to_go = ([0.0] * len(done) for _ in range(4))
    for steps_of in trajectories(done):
        for t in steps_of:
            total[t] = sum(k + 1.0 for k in steps_of if k <= t)
            count[t], init[t] = t - steps_of[0], t == steps_of[0]
            to_go[t] = sum(gamma ** (k - t) * (k + 1) for k in steps_of if k >= t)
    assert RewardSum()(dict_of(done))["next"]["episode_reward"].flatten().tolist() == total
    assert StepCounter()(dict_of(done))["step_count"].flatten().tolist() == count
    assert InitTracker()(dict_of(done))["is_init"].flatten().tolist() == init
    if any(done):
        found = Reward2GoTransform(gamma).inv(dict_of(done))["reward_to_go"]
        torch.testing.assert_close(found.flatten(), torch.tensor(to_go).double())


@each("done_key", ["done", ("next", "done"), None])
def test_rewards_to_go_end_at_the_flag_of_their_own_step(done_key):
    done = torch.tensor([False, True, False, True]).unsqueeze(-1)
    batch = {"done": done.roll(1, 0), "next": {"reward": torch.ones(4, 1), "done": done}}
    found = Reward2GoTransform(done_key=done_key).inv(batch)["reward_to_go"]
    assert found.flatten().tolist() == [2, 1, 2, 1]


def test_rewards_to_go_end_at_the_root_flag_of_batches_without_next():
    done = torch.tensor([False, True, False, True]).unsqueeze(-1)
    found = Reward2GoTransform(done_key="done").inv({"reward": torch.ones(4, 1), "done": done})["reward_to_go"]
    assert found.flatten().tolist() == [2, 1, 2, 1]


@settings(max_examples=30, deadline=None)
@given(done=done_of, n=st.integers(1, 5), padding=st.sampled_from(["same", "constant"]))
def test_frames_are_those_of_a_loop(done, n, padding):
    def padded(frames, first):
        pad = -1.0 if padding == "constant" else first
        return [pad] * (n - len(frames)) + frames[-n:]

    root, following = [None] * len(done), [None] * len(done)
    for steps_of in trajectories(done):
        first = steps_of[0] + 1.0
        for t in steps_of:
            frames = [k + 1.0 for k in steps_of if k <= t]
            root[t] = padded(frames, first)
            following[t] = padded([*frames[-n:], t + 1.5], first) if n > 1 else [t + 1.5]
    frames = CatFrames(n, -1, ["x", ("next", "x")], padding=padding, padding_value=-1.0)
    out = frames(dict_of(done))
    assert out["x"].tolist() == root
    assert out["next"]["x"].tolist() == [f[-n:] for f in following]
    alone = CatFrames(n, -1, [("next", "x")], [("next", "y")], padding=padding, padding_value=-1.0)(dict_of(done))
    assert alone["next"]["y"].tolist() == [f[-n:] for f in following]


def test_frames_of_images_are_concatenated_along_channels():
    batch = steps(5, feature=(3, 4, 4), dtype=torch.uint8)
    out = CatFrames(4, -3, ["x"])(batch.clone())["x"]
    assert out.shape == (5, 12, 4, 4) and out.dtype == torch.uint8
    assert torch.equal(out[4], batch["x"][1:5].reshape(12, 4, 4))
    no_root = CatFrames(2, -1, [("next", "only")], ["z"])(
        {"next": {"only": torch.ones(3, 2), "done": torch.zeros(3, 1)}}
    )
    assert no_root["z"].shape == (3, 4)


def test_frames_refuse_bad_settings_and_frames_that_do_not_fit():
    for bad in ({"N": 0, "dim": -1}, {"N": 2, "dim": 0}, {"N": 2, "dim": -1, "padding": "mirror"}):
        with pytest.raises(ValueError):
            CatFrames(in_keys=["x"], **bad)
    with pytest.raises(ValueError, match="dim=-3 needs frames of 3 dimensions"):
        CatFrames(2, -3, ["x"])(steps(4))


def test_large_returns_and_infinities_stay_in_their_trajectory():
    done = torch.zeros(4000, 1, dtype=torch.bool)
    done[1999] = done[-1] = True
    reward = torch.full((4000, 1), 0.1)
    reward[1000] = float("inf")
    batch = {"next": {"reward": reward, "done": done}}
    for gamma in (0.5, 0.999, 1.0):
        to_go = Reward2GoTransform(gamma).inv(batch)["reward_to_go"]
        assert torch.isfinite(to_go[1001:]).all() and torch.isinf(to_go[1000])
        exact = 0.1 * 2000 if gamma == 1 else 0.1 * (1 - gamma**2000) / (1 - gamma)
        assert abs(to_go[2000].item() - exact) < 1e-4 * exact
    total = RewardSum()(batch)["next"]["episode_reward"]
    assert torch.isfinite(total[:1000]).all() and torch.isfinite(total[2000:]).all()
    reward[0] = 1e9
    total = RewardSum()({"next": {"reward": reward, "done": done}})["next"]["episode_reward"]
    torch.testing.assert_close(total[-1], torch.tensor([200.0]), rtol=1e-5, atol=0)


@each("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.bool])
def test_sums_keep_floating_dtypes_and_widen_integers(dtype):
    batch = dict_of([False] * 5 + [True])
    batch["next"]["reward"] = torch.ones(6, 1).to(dtype)
    wide = dtype if dtype.is_floating_point else torch.int64
    total = RewardSum()(batch)["next"]["episode_reward"]
    assert total.dtype == wide and total.flatten().tolist() == [1, 2, 3, 4, 5, 6]
    to_go = Reward2GoTransform(1.0).inv(batch)["reward_to_go"]
    assert to_go.dtype == (dtype if dtype.is_floating_point else torch.float32) and to_go[0] == 6


def test_counts_mark_what_is_over_the_limit():
    out = StepCounter(max_steps=3)(steps(2, 5))
    over = [False, False, True, True, True]
    for flag in ("truncated", "done"):
        assert out["next", flag].squeeze(-1).tolist() == [over, over]
    assert out["next", "terminated"].squeeze(-1).tolist() == [[False] * 4 + [True]] * 2
    kept = StepCounter(max_steps=3, update_done=False, truncated_key="cut", step_count_key="n")(steps(5))
    assert kept["next", "cut"].flatten().tolist() == over and kept["next", "done"].sum() == 1
    assert kept["n"].dtype == torch.int64 and kept["n"].shape == (5, 1)
    with pytest.raises(ValueError, match="max_steps"):
        StepCounter(max_steps=0)


def test_counts_with_a_limit_go_on_where_the_data_do():
    rb = ReplayBuffer(storage=LazyTensorStorage(20))
    rb.append_transform(StepCounter(max_steps=3), invert=True)
    whole = steps(7)
    for start, stop in ((0, 2), (2, 3), (3, 7)):
        rb.extend(whole[start:stop])
    assert rb[:]["step_count"].flatten().tolist() == list(range(7))
    assert rb[:]["next", "truncated"].flatten().tolist() == [False] * 2 + [True] * 5


def test_names_of_keys_can_be_chosen_and_missing_ones_are_named():
    batch = {"reward": torch.ones(3, 1), "end": torch.tensor([[False], [True], [False]])}
    total = RewardSum(["reward"], ["sum"], done_key="end")(dict(batch))["sum"]
    assert total.flatten().tolist() == [1, 2, 1]
    assert RewardSum(["reward"], done_key="end")(dict(batch))["episode_reward"].shape == (3, 1)
    with pytest.raises(KeyError, match=r"RewardSum needs the key \('next', 'done'\) or 'done'; the batch has.*'end'"):
        RewardSum()(dict(batch))
    with pytest.raises(KeyError, match="traj"):
        StepCounter(done_key="end", traj_key="traj")(dict(batch))
    with pytest.raises(TypeError, match="has none"):
        StepCounter()(torch.zeros(3))
    with pytest.raises(ValueError, match="in_keys"):
        RewardSum(out_keys=["sum"])
    with pytest.raises(ValueError, match="in a batch"):
        RewardSum()({"next": {"reward": torch.ones(4, 1), "done": torch.zeros(3, 1)}})
    for transform in (StepCounter(), RewardSum(), CatFrames(2, -1, ["x"]), InitTracker(), Reward2GoTransform()):
        assert transform(steps(4)[:0]).shape == (0,) and transform.inv(steps(3, 4)[:0]).shape == (0, 4)
        rb = ReplayBuffer(storage=LazyTensorStorage(20))
        rb.append_transform(transform, invert=not isinstance(transform, Reward2GoTransform))
        with pytest.raises(ValueError, match="nothing to add"):
            rb.extend(steps(4)[:0])
        assert len(rb) == 0
    ids = StepCounter(traj_key="run")({"run": torch.tensor([5, 5, 6]), "done": torch.zeros(3, 1, dtype=torch.bool)})
    assert ids["step_count"].flatten().tolist() == [0, 1, 0]


def test_ids_say_whether_a_write_goes_on():
    rb = ReplayBuffer(storage=LazyTensorStorage(30))
    rb.append_transform(InitTracker(), invert=True)
    whole = steps(6)
    whole["next", "done"].zero_()
    for number in (4, 4, 5, 4):
        rb.extend(whole.clone().set(("collector", "traj_ids"), torch.full((6,), number)))
    assert rb[:]["is_init"].flatten().nonzero().flatten().tolist() == [0, 12, 18]


def test_a_second_collector_continues_no_trajectory_of_the_first():
    rb = ReplayBuffer(storage=LazyTensorStorage(30))
    for transform in (StepCounter(), RewardSum(), InitTracker(), TrajCounter()):
        rb.append_transform(transform, invert=True)
    for _ in range(2):  # both number their trajectory 0
        for _ in SyncDataCollector(GymEnv("CartPole-v1"), frames_per_batch=4, total_frames=8, replay_buffer=rb):
            pass
    rows = rb[:]
    assert rows["collector", "traj_ids"].tolist() == [0] * 16
    assert rows["step_count"].flatten().tolist() == [*range(8)] * 2
    assert rows["next", "episode_reward"].flatten().tolist() == [*range(1, 9)] * 2
    assert rows["is_init"].flatten().nonzero().flatten().tolist() == [0, 8]
    assert rows["traj_count"].flatten().tolist() == [0] * 8 + [1] * 8


def test_padding_of_slices_is_no_step_of_a_trajectory():
    """The running episode is shorter than a slice, and its padding has no flag: the next slice begins behind it."""
    torch.manual_seed(0)
    sampler = SliceSampler(slice_len=4, end_key=("next", "done"), strict_length=False, pad_output=True)
    frames = CatFrames(2, -1, ["x"], ["stack"])
    following = NextStateReconstructor(["x"], traj_key=None)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(30),
        sampler=sampler,
        batch_size=16,
        transform=Compose(StepCounter(), RewardSum(), InitTracker(), TrajCounter(), frames, following),
    )
    rb.extend(torch.cat([steps(7), steps(9)[:2]]))
    for _ in range(10):
        batch = rb.sample().reshape(-1, 4)
        for part in batch:
            part = part[part["collector", "mask"]]
            n = len(part)
            assert part["step_count"].flatten().tolist() == list(range(n))
            assert torch.equal(part["next", "episode_reward"], part["next", "reward"].cumsum(0))
            assert part["is_init"].flatten().tolist() == [True] + [False] * (n - 1)
            assert len(part["traj_count"].unique()) == 1
            assert torch.equal(part["stack"][0], part["x"][0].repeat(2))
            assert torch.equal(part["next", "x"][:-1], part["x"][1:]) and part["next", "x"][-1].isnan().all()
        assert len(batch["traj_count"][batch["collector", "mask"]].unique()) == 4


def test_what_follows_written_padding_begins_a_trajectory():
    rb = ReplayBuffer(storage=LazyTensorStorage(30))
    rb.append_transform(StepCounter(), invert=True)
    batch = steps(9)[:8]
    batch["collector", "mask"] = torch.tensor([True, True, True, False] * 2)
    for part in batch.split(4):
        rb.extend(part)
    assert rb[:]["step_count"].flatten().tolist() == [0, 1, 2, 0] * 2


# ---- what is still earned ----
def test_returns_are_computed_on_writing_and_left_alone_on_reading():
    for storage in (LazyTensorStorage(20), ListStorage(20)):
        rb = ReplayBuffer(storage=storage, transform=Reward2GoTransform(0.5), batch_size=4)
        batch = steps(6)
        rb.extend(batch)
        rb.extend([batch[i] for i in range(6)])
        expected = Reward2GoTransform(0.5).inv(batch)["reward_to_go"]
        assert "reward_to_go" not in batch.keys()
        for half in (slice(0, 6), slice(6, 12)):
            found = rb[half]
            found = torch.stack(found) if isinstance(found, list) else found
            assert torch.equal(found["reward_to_go"], expected)
        assert rb.sample()["reward_to_go"].shape == (4, 1)
    rb[3] = batch[0].set("reward_to_go", torch.tensor([9.0]))
    assert rb[3]["reward_to_go"] == 9


def test_returns_need_the_end_of_a_trajectory():
    rb = ReplayBuffer(storage=LazyTensorStorage(20), transform=Reward2GoTransform(0.5))
    for write in (lambda: rb.add(steps(6)[0]), lambda: rb.extend(steps(6)[:4])):
        with pytest.raises(ValueError, match="extend by whole trajectories"):
            write()
        assert len(rb) == 0
    assert rb.extend(torch.stack([steps(4), steps(4)])).tolist() == [0, 1], "rows that are trajectories"
    with pytest.raises(ValueError, match="gamma"):
        Reward2GoTransform(1.2)


def test_environments_have_returns_of_their_own_whatever_dimension_is_time():
    batch = steps(3, 5)
    expected = Reward2GoTransform(0.5).inv(batch)["reward_to_go"]
    for dim_extend in (0, 1):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(30, ndim=2), dim_extend=dim_extend, transform=Reward2GoTransform(0.5)
        )
        rb.extend(batch if dim_extend else batch.transpose(0, 1))
        found = rb[:]["reward_to_go"]
        assert torch.equal(found if dim_extend else found.transpose(0, 1), expected)


def test_inverted_returns_are_computed_on_reading():
    rb = ReplayBuffer(storage=LazyTensorStorage(20))
    rb.append_transform(Reward2GoTransform(0.5), invert=True)
    rb.extend(steps(6))
    assert "reward_to_go" in rb[:].keys() and "reward_to_go" not in rb.storage[:].keys()
    assert (
        repr(rb._transform[0])
        == "inverted Reward2GoTransform(gamma=0.5, in_keys=['reward'], out_keys=['reward_to_go'])"
    )
