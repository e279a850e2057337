"""Stacks of frames that a buffer makes of single ones are those that an environment gives."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from engram.envs.transforms import CatFrames, Compose, RewardScaling
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


@each("padding", ["same", "constant"])
@each("kind", [ReplayBuffer, TensorDictReplayBuffer])
@each("where", [{"traj_key": "episode"}, {"end_key": ("next", "done")}])
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
