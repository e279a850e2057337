"""The index of episodes equals what a plain-Python oracle finds, however it came to know the steps."""

import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.tiers import in_quick
from data.samplers.episode_oracle import World
from engram import _native
from engram.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, TensorStorage
from engram.store.episodes import EpisodeIndex
from processes.held_lanes import HeldLaneCount

CAPACITY = 12


def writers(kind, path):
    """A buffer for each lane of a storage; each object of a mapped store takes a lane of its own."""
    if kind == "rows":
        return [ReplayBuffer(storage=LazyTensorStorage(CAPACITY))]
    if kind == "environments":
        return [ReplayBuffer(storage=LazyTensorStorage(3 * CAPACITY, ndim=2))]
    if kind == "list":
        return [ReplayBuffer(storage=ListStorage(CAPACITY))]
    if kind == "columns":
        return [columns()]
    store = LazyMemmapStorage(2 * CAPACITY, path, lanes=HeldLaneCount(2))
    return [
        ReplayBuffer(storage=store),
        ReplayBuffer(storage=LazyMemmapStorage(2 * CAPACITY, path, existsok=True, lanes=HeldLaneCount(2))),
    ]


def columns():
    """A buffer over tensors that exist, emptied."""
    data = World([ReplayBuffer(storage=LazyTensorStorage(1))], True, torch.int64).batch(torch.zeros(CAPACITY, 1))
    rb = ReplayBuffer(storage=TensorStorage(data))
    rb.empty()
    return rb


OPERATIONS = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 1), st.lists(st.integers(0, 2), min_size=1, max_size=30)),
    st.tuples(st.just("append"), st.integers(0, 1), st.lists(st.just(1), min_size=1, max_size=8)),
    st.tuples(st.just("edit"), st.integers(-3, CAPACITY), st.integers(0, 2)),
    st.tuples(st.just("release"), st.integers(0, 1)),
    st.tuples(st.just("empty")),
)


def check(world, grown):
    """The index that grew and a fresh one say what the oracle says, and draw the same."""
    fresh = made(world)
    expected = world.trajectories()
    for index in (grown, fresh):
        assert list(zip(*(t.tolist() for t in index.trajectories(world.storage)), strict=True)) == expected
    for length, need in ((1, 1), (2, 2), (5, 5), (CAPACITY, CAPACITY), (4, 1)):
        rule = _native.SliceRule(length, need)
        drawn = [index.draw(world.storage, rule, torch.tensor([9]), 25) for index in (grown, fresh)]
        long_enough = [t for t in expected if t[3] >= need]
        if not long_enough:
            assert drawn == [None, None]
            continue
        slots, ids = (d.slots() for d in drawn), drawn[0].ids().tolist()
        slots = [*slots]
        assert slots[0].tolist() == slots[1].tolist()
        found = world.steps_of(slots[0])
        for k in range(25):
            one = [step for step, i in zip(found, ids, strict=True) if i == k]
            lane, strand, start, size = next(
                t for t in long_enough if t[:2] == one[0][:2] and t[2] <= one[0][2] < t[2] + t[3]
            )
            first = one[0][2]
            assert one == [(lane, strand, first + i) for i in range(min(length, size))]
            assert start <= first and first + len(one) <= start + size


def made(world):
    key = ("next", "value")
    return EpisodeIndex(traj_key=key) if world.by_id else EpisodeIndex(end_key=key)


KINDS = ["rows", "environments", "list", "columns", "lanes"]


@pytest.mark.parametrize("kind", in_quick(KINDS, ["environments", "lanes"]))
@settings(max_examples=25, deadline=None)
@given(
    operations=st.lists(st.tuples(OPERATIONS, st.booleans()), max_size=14),
    by_id=st.booleans(),
    dtype=st.sampled_from(["int64", "uint8", "float32"]),
)
def test_the_index_says_what_the_oracle_says(kind, operations, by_id, dtype):
    with tempfile.TemporaryDirectory() as path:
        kind_of = torch.int64 if kind == "columns" else getattr(torch, dtype) if by_id else torch.bool
        world = World(writers(kind, path), by_id or kind == "columns", kind_of)
        if kind == "columns":
            world.skip_to(CAPACITY)  # what the tensors held before
        grown = made(world)
        for lane in range(len(world.writers)):
            world.append(lane, [1])
        for operation, look in operations:
            run(world, *operation)
            if look:
                check(world, grown)
        check(world, grown)


def run(world, what, *how):
    alone = len(world.writers) == 1
    if what == "append":
        world.append(0 if alone else how[0], how[1])
    elif what == "edit" and alone:
        world.edit(*how)
    elif what == "release":
        world.release(0 if alone else how[0])
    elif what == "empty" and alone:
        world.empty()


@pytest.mark.parametrize("by_id", [True, False])
def test_an_edit_of_the_newest_step_decides_whether_the_next_goes_on(by_id):
    for value in (0, 1):
        world = World([ReplayBuffer(storage=LazyTensorStorage(CAPACITY))], by_id, torch.int64 if by_id else torch.bool)
        world.append(0, [1 - value] * 4)
        grown = made(world)
        check(world, grown)
        world.edit(-1, value)
        world.append(0, [value, 1])
        check(world, grown)
        world.edit(-1, value)
        check(world, grown)
        world.append(0, [value] * 3)
        check(world, grown)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_float_ids_are_ids_where_they_are_whole_numbers(dtype):
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    rb.extend({"episode": torch.tensor([0, -0.0, 1, 1, 1, 7], dtype=dtype)})
    assert EpisodeIndex().trajectories(rb.storage).length.tolist() == [2, 3, 1]
    given = EpisodeIndex(trajectories=rb[:]["episode"])
    assert given.trajectories(rb.storage).length.tolist() == [2, 3, 1]
    rb.extend({"episode": torch.tensor([7, 8.5], dtype=dtype)})
    with pytest.raises(ValueError, match=r"'episode' has 8\.5; a trajectory id is a whole number"):
        EpisodeIndex().trajectories(rb.storage)
    with pytest.raises(ValueError, match=r"trajectories has 8\.5; a trajectory id is a whole number"):
        EpisodeIndex(trajectories=rb[:]["episode"])
