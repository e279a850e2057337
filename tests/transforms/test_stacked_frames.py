"""Stacks of frames that a buffer makes of single ones are those that an environment gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from contracts.each import each
from engram.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from engram.envs.transforms import CatFrames, Compose, RewardScaling
from engram.testing import chi_square
from engram.testing.transform import assert_equal

LENGTHS = (7, 1, 2, 5)
ENDS = torch.tensor(LENGTHS).cumsum(0) - 1


def frames():
    """Whole trajectories, `[steps]`, whose frames tell them apart."""
    x = torch.arange(1.0, sum(LENGTHS) + 1).unsqueeze(-1)
    done = torch.zeros(len(x), 1, dtype=torch.bool)
    done[ENDS] = True
    following = {"x": x + 0.5, "done": done, "reward": x.clone()}
    ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    return TensorDict({"x": x, "episode": ids, "next": following}, [len(x)])


def stack_of(frames, at, first, stacks, newest=None):
    """The stack of step `at` of one environment, whose trajectory starts at `first`, frame by frame."""
    past = []
    for place in range(at - stacks.N + 1 + (newest is not None), at + 1):
        is_missing = place < first and stacks.padding == "constant"
        past.append(torch.full_like(frames[0], stacks.padding_value) if is_missing else frames[max(place, first)])
    return torch.cat(past if newest is None else [*past, newest], stacks.dim)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 4),
    feature=st.sampled_from([(3,), (1, 4, 4), (2, 3)]),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.float16, torch.bool]),
    done=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=3),
    padding=st.sampled_from(["same", "constant"]),
    form=st.sampled_from(["plain", "time first", "with gradients", "other dtype"]),
    data=st.data(),
)
def test_stacks_of_any_frames_are_those_of_a_loop(n, feature, dtype, done, padding, form, data):
    dim, done = -data.draw(st.integers(1, len(feature))), torch.tensor(done)
    shape = (*done.shape, *feature)
    x, following = (torch.randint(0, 250, shape).to(dtype) for _ in range(2))
    if form == "time first":  # a view, whose environments do not lie together
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif form == "with gradients":
        x = x.float().requires_grad_()
    elif form == "other dtype":
        following = following.double()
    batch = TensorDict({"x": x, "next": {"x": following, "done": done.unsqueeze(-1)}}, done.shape)
    stacks = CatFrames(n, dim, ["x", ("next", "x")], ["s", ("next", "s")], padding=padding, padding_value=1)
    out = stacks(batch)
    for env in range(len(done)):
        first = 0
        for t in range(6):
            assert torch.equal(out["s"][env, t], stack_of(x[env], t, first, stacks))
            assert torch.equal(out["next", "s"][env, t], stack_of(x[env], t, first, stacks, following[env, t]))
            first = t + 1 if done[env, t] else first
    assert out["s"].requires_grad == (form == "with gradients")
    assert out["s"].is_contiguous() and torch.equal(out["x"], x)


@each("padding", ["same", "constant"])
@each("kind", [ReplayBuffer, TensorDictReplayBuffer])
@each("where", [{"traj_key": "episode"}, {"end_key": ("next", "done")}, {"traj_key": "episode", "weight": "steps"}])
def test_a_drawn_stack_is_that_of_the_whole_trajectory(padding, kind, where):
    torch.manual_seed(0)
    stacks = CatFrames(3, -1, ["x"], ["stack"], padding=padding)
    transform, sampler = stacks.make_rb_transform_and_sampler(batch_size=16, **where)
    rb = kind(
        storage=LazyTensorStorage(20),
        sampler=sampler,
        transform=Compose(transform, RewardScaling(0.0, 2.0)),
        batch_size=16,
    )
    rb.extend(frames())
    both = CatFrames(3, -1, ["x", ("next", "x")], ["stack", ("next", "stack")], padding=padding)
    expected = both(frames())
    drawn = set()
    for _ in range(20):
        batch = rb.sample()
        assert batch.batch_size == (16,) and "_slice" not in batch.keys()
        at = batch["x"].flatten().long() - 1
        drawn.update(at.tolist())
        for key in ("stack", ("next", "stack"), ("next", "x"), ("next", "done"), "episode"):
            assert_equal(batch[key], expected[at][key])
        assert_equal(batch["next", "reward"], 2 * batch["x"])
        if kind is TensorDictReplayBuffer:
            assert_equal(batch["index"].flatten(), at)
    assert drawn == set(range(len(expected)))  # every step, also the first ones of each trajectory
    assert rb.sample(4).batch_size == (4,)
    assert "stack" not in rb[:].keys()


def test_stacks_end_in_every_step_with_the_same_probability_where_steps_are_weighed():
    torch.manual_seed(0)
    stacks, sampler = CatFrames(3, -1, ["x"]).make_rb_transform_and_sampler(3000, traj_key="episode", weight="steps")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, transform=stacks, batch_size=3000)
    rb.extend(frames())
    assert chi_square(rb.sample()["index"].flatten().bincount(minlength=sum(LENGTHS))) > 1e-6


@each("dtype", [torch.uint8, torch.float32])
@each("out_keys", [["x"], ["stack"]])
@each("form", ["TensorDict", "dict", "with gradients"])
def test_slices_of_images_become_rows_of_stacks(dtype, out_keys, form):
    x, following = (torch.randint(0, 250, (9, 2, 3, 3)).to(dtype) for _ in range(2))
    if form == "with gradients":
        x = x.float().requires_grad_()
    lengths = [3, 1, 2, 3]
    ids = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    entries = {"x": x, "n": torch.arange(9), "_slice": ids, "next": {"x": following}}
    stacks = CatFrames(3, -3, ["x"], out_keys)
    transform, _ = stacks.make_rb_transform_and_sampler(4)
    out = transform(entries if form == "dict" else TensorDict(entries, [9]))
    [key], ends, first = out_keys, [2, 3, 5, 8], [0, 3, 4, 6]
    assert out["n"].tolist() == ends and "_slice" not in out
    for row, (at, begin) in enumerate(zip(ends, first, strict=True)):
        assert torch.equal(out[key][row], stack_of(x, at, begin, stacks))
        assert torch.equal(out["next"][key][row], stack_of(x, at, begin, stacks, following[at]))
        assert key == "x" or torch.equal(out["x"][row], x[at])
    assert out[key].requires_grad == (form == "with gradients")


def test_slices_whose_frames_do_not_fit_are_refused():
    ids = torch.tensor([0, 0, 1])
    transform, _ = CatFrames(2, -3, ["x"]).make_rb_transform_and_sampler(2)
    with pytest.raises(ValueError, match="dim=-3 needs frames of 3 dimensions"):
        transform({"x": torch.zeros(3, 1), "_slice": ids})
    with pytest.raises(ValueError, match=r"'x' has shape \[2, 1\] in a batch \[3\]"):
        transform({"x": torch.zeros(2, 1), "_slice": ids})
    with pytest.raises(KeyError, match="CatFrames needs the key 'x'"):
        transform({"y": torch.zeros(3, 1), "_slice": ids})


def test_only_trajectories_that_are_long_enough_where_strict():
    transform, sampler = CatFrames(3, -1, ["x"]).make_rb_transform_and_sampler(
        8, traj_key="episode", strict_length=True, span=False
    )
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, transform=transform, batch_size=8)
    rb.extend(frames())
    seen = torch.cat([rb.sample()["x"] for _ in range(30)])
    assert set(seen[:, -1].long().tolist()) == {3, 4, 5, 6, 7, 13, 14, 15}
    assert bool((seen.diff(dim=1) == 1).all())


def test_bad_settings_are_refused():
    for bad in ("slice_len", "num_slices"):
        with pytest.raises(TypeError, match=bad):
            CatFrames(3, -1).make_rb_transform_and_sampler(8, **{bad: 2})
    with pytest.raises(ValueError, match="batch_size"):
        CatFrames(3, -1).make_rb_transform_and_sampler(0)


def test_a_checkpoint_of_such_a_buffer_goes_on_the_same(tmp_path):
    def make():
        transform, sampler = CatFrames(3, -1, ["x"]).make_rb_transform_and_sampler(8, traj_key="episode")
        return ReplayBuffer(
            storage=LazyTensorStorage(20),
            sampler=sampler,
            transform=transform,
            batch_size=8,
            generator=torch.Generator().manual_seed(0),
        )

    rb, twin = make(), make()
    rb.extend(frames())
    rb.sample()
    rb.dumps(tmp_path)
    twin.loads(tmp_path)
    assert_equal(twin.sample(), rb.sample())


def test_in_an_environment_the_buffers_transform_is_refused():
    transform, _ = CatFrames(3, -1, ["x"]).make_rb_transform_and_sampler(8)
    with pytest.raises(TypeError, match="use CatFrames"):
        transform.for_env(None)
