"""Slices of the newest trajectories."""

from __future__ import annotations

import pytest
import torch

from data.samplers.episode_data import episodes, slices_of
from engram.data import LazyTensorStorage, ListStorage, ReplayBuffer, SequenceSampler, SliceSampler
from engram.data.replay_buffers.samplers.runs import NewestRuns


def buffer(capacity=30, kind=SliceSampler, storage=LazyTensorStorage, **settings):
    sampler = kind(traj_key="id", **settings)
    sampler.storage_state = NewestRuns()
    return ReplayBuffer(storage=storage(capacity), sampler=sampler)


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_slices_are_the_ends_of_the_newest_trajectories_that_are_long_enough(storage):
    rb = buffer(storage=storage, slice_len=3)
    rb.extend(episodes([5, 2, 4, 3]))
    for _ in range(2):
        assert slices_of(*rb.sample(12, return_info=True)) == [[11, 12, 13], [8, 9, 10], [2, 3, 4], [11, 12, 13]]
    rb.extend(episodes([4], start=14, first_id=4))
    assert slices_of(*rb.sample(6, return_info=True)) == [[15, 16, 17], [11, 12, 13]]


def test_trajectories_that_were_overwritten_are_left_out():
    rb = buffer(10, slice_len=3)
    rb.extend(episodes([4, 4]))
    rb.extend(episodes([3], start=8, first_id=2))
    assert slices_of(*rb.sample(9, return_info=True)) == [[8, 9, 10], [5, 6, 7], [1, 2, 3]]
    rb.extend(episodes([2], start=11, first_id=3))
    assert slices_of(*rb.sample(9, return_info=True)) == [[8, 9, 10], [5, 6, 7], [8, 9, 10]]


def test_environments_take_turns():
    rb = buffer(storage=lambda n: LazyTensorStorage(2 * n, ndim=2), slice_len=2)
    rb.extend(torch.stack([episodes([3, 3]), episodes([4, 2], start=100)]))
    batch, info = rb.sample(8, return_info=True)
    assert slices_of(batch, info) == [[4, 5], [104, 105], [1, 2], [102, 103]]


def test_short_trajectories_are_whole_or_padded():
    rb = buffer(num_slices=3, strict_length=False)
    rb.extend(episodes([5, 2, 4]))
    assert slices_of(*rb.sample(9, return_info=True)) == [[8, 9, 10], [5, 6], [2, 3, 4]]
    rb = buffer(kind=SequenceSampler, num_slices=3, burn_in=1)
    rb.extend(episodes([5, 2, 4]))
    batch, info = rb.sample(9, return_info=True)
    assert batch["n"].reshape(3, 3).tolist() == [[8, 9, 10], [5, 5, 6], [2, 3, 4]]
    assert info["collector", "mask"].reshape(3, 3).tolist() == [[True] * 3, [False, True, True], [True] * 3]


def test_nothing_that_is_long_enough_is_an_error():
    rb = buffer(slice_len=3)
    assert not rb.can_sample(6)
    with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
        rb.sample(6)
    rb.extend(episodes([2, 2]))
    assert not rb.can_sample(6)
    with pytest.raises(RuntimeError, match="no trajectory has 3 steps; the longest that is stored has 2"):
        rb.sample(6)
    rb.extend(episodes([3], start=4, first_id=2))
    assert rb.can_sample(6)
    with pytest.raises(TypeError, match="cannot be divided among several storages"):
        rb.sampler.totals(rb.storage)


def test_slices_that_were_overwritten_are_drawn_again():
    rb = buffer(10, slice_len=3)
    rb.extend(episodes([4, 4]))
    draw = rb.sampler.draw_plan(rb.storage).draw(6)
    rb.extend(episodes([4], start=8, first_id=2))
    assert draw.lost(None, None) == [3, 4, 5]  # the second slice
    assert rb.storage[draw.redraw([3, 4, 5]).slots]["n"].tolist() == [5, 6, 7, 9, 10, 11]
