"""What samplers draw from in one storage, for who divides draws among several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.data import (
    DrawTotals,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SequenceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)


def buffer(sampler: Any, lengths: tuple[int, ...] = (3, 10, 2, 5), capacity: int = 100) -> ReplayBuffer:
    rb = ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler)
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    rb.extend(TensorDict({"episode": ids, "step": torch.arange(len(ids))}, [len(ids)]))
    return rb


def share(rb: ReplayBuffer, **more: Any) -> float:
    return rb.sampler.totals(rb.storage, **more).share


def test_uniform_draws_have_a_share_of_their_rows() -> None:
    assert share(buffer(RandomSampler())) == 20 and share(buffer(RandomSampler(), capacity=8)) == 8


@each("sampler", [RandomSampler(), SliceSampler(slice_len=2), PrioritizedSampler(None, 1.0, 1.0)])
def test_a_storage_without_rows_has_none(sampler: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(5), sampler=sampler)
    assert share(rb) == 0 and rb.sampler.totals(rb.storage).lowest is None


def test_draws_by_priority_have_a_share_of_the_sum() -> None:
    rb = buffer(PrioritizedSampler(None, 1.0, 1.0, eps=0.5), lengths=(4,))
    rb.update_priority(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 0.0]))
    assert rb.sampler.totals(rb.storage) == DrawTotals(share=8.0, lowest=0.5, new_priority=3.0)


def test_what_came_since_the_last_draw_is_left_out_on_request() -> None:
    rb = buffer(PrioritizedSampler(None, 1.0, 1.0, eps=0.0), lengths=(4,))
    rb.sample(2)
    rb.extend(TensorDict({"episode": torch.zeros(2).long(), "step": torch.arange(2)}, [2]))
    assert share(rb, newest=False) == 4 and share(rb) == 6 and share(rb, newest=False) == 6


@each(
    ("sampler", "choices"),
    [
        (SliceSampler(slice_len=3), 3),
        (SliceSampler(slice_len=3, strict_length=False), 4),
        (SliceSampler(slice_len=3, weight="steps"), 1 + 8 + 3),
        (SliceSampler(slice_len=11), 0),
        (SequenceSampler(slice_len=4, burn_in=2), 4),
    ],
)
def test_slices_have_a_share_of_the_trajectories_or_windows(sampler: Any, choices: int) -> None:
    assert share(buffer(sampler)) == choices


def test_the_batch_size_decides_where_the_number_of_slices_is_given() -> None:
    rb = buffer(SliceSampler(num_slices=4))
    assert share(rb, batch_size=12) == 3 and share(rb, batch_size=20) == 2
    with pytest.raises(ValueError, match="pass batch_size"):
        share(rb)


def test_slices_by_priority_have_a_share_of_the_sum_over_steps_that_may_be_starts() -> None:
    rb = buffer(PrioritizedSliceSampler(None, 1.0, 1.0, eps=0.0, slice_len=3))
    rb.update_priority(torch.arange(20), torch.arange(20) + 1.0)
    starts = [0, *range(3, 11), 15, 16, 17]
    assert rb.sampler.totals(rb.storage) == DrawTotals(sum(s + 1.0 for s in starts), 1.0, 20.0)


@pytest.mark.parametrize("sampler", [SamplerWithoutReplacement(), SliceSamplerWithoutReplacement(slice_len=2)])
def test_an_epoch_cannot_be_divided(sampler: Any) -> None:
    with pytest.raises(TypeError, match="cannot be divided among several storages"):
        share(buffer(sampler))


class TestRaisingThePriorityOfNewRows:
    def rows(self, rb: ReplayBuffer) -> list[float]:
        return rb.sampler.priorities(torch.arange(len(rb)), storage=rb.storage).tolist()

    def more(self, rb: ReplayBuffer) -> None:
        rb.extend(TensorDict({"episode": torch.zeros(1).long(), "step": torch.zeros(1).long()}, [1]))

    def test_rows_that_come_later_get_it(self) -> None:
        rb = buffer(PrioritizedSampler(None, 1.0, 1.0), lengths=(2,))
        rb.sampler.raise_new_priority(7.0, storage=rb.storage)
        self.more(rb)
        assert self.rows(rb) == [1, 1, 7]

    def test_it_never_falls(self) -> None:
        rb = buffer(PrioritizedSampler(None, 1.0, 1.0), lengths=(2,))
        rb.sampler.raise_new_priority(0.5, storage=rb.storage)
        assert rb.sampler.totals(rb.storage).new_priority == 1

    def test_slices_by_priority_take_it_too(self) -> None:
        rb = buffer(PrioritizedSliceSampler(None, 1.0, 1.0, slice_len=1), lengths=(2,))
        rb.sampler.raise_new_priority(3.0, storage=rb.storage)
        self.more(rb)
        assert self.rows(rb) == [1, 1, 3]

    def test_other_samplers_ignore_it(self) -> None:
        buffer(RandomSampler()).sampler.raise_new_priority(3.0)

    @each("priority", [-1.0, float("nan"), float("inf"), "high"])
    def test_invalid_priority_is_refused(self, priority: Any) -> None:
        rb = buffer(PrioritizedSampler(None, 1.0, 1.0))
        with pytest.raises(ValueError, match="priority"):
            rb.sampler.raise_new_priority(priority, storage=rb.storage)
        assert rb.sampler.default_priority == 1

    def test_one_that_could_not_be_summed_is_refused(self) -> None:
        rb = buffer(PrioritizedSampler(None, 2.0, 1.0))
        with pytest.raises(ValueError, match="too large"):
            rb.sampler.raise_new_priority(1e200, storage=rb.storage)

    def test_raised_new_priority_is_refused_with_max_priority_within_buffer(self) -> None:
        rb = buffer(PrioritizedSampler(None, 1.0, 1.0, max_priority_within_buffer=True))
        with pytest.raises(ValueError, match="max_priority_within_buffer"):
            rb.sampler.raise_new_priority(2.0, storage=rb.storage)


def test_priorities_of_steps_open_no_starts() -> None:
    from engram import _native

    rb = buffer(SliceSampler(slice_len=2))
    rb.sample(2)
    steps = _native.Priorities(1.0, 0.0, False)
    with pytest.raises(ValueError, match="priorities of steps"):
        rb.sampler.episodes.poll_starts(rb.storage, steps, _native.SliceRule(2, 2))


def test_each_removal_leaves_fewer_slices() -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=2, traj_key="episode"), batch_size=4
    )
    rb.extend({"episode": torch.arange(12) // 4})  # three trajectories of three windows each
    shares = []
    for rows in ([0], [5], [1, 2, 3, 4, 6, 7]):
        rb.remove(torch.tensor(rows))
        shares.append(rb.sampler.totals(rb.storage, 4).share)
    assert shares == pytest.approx([3 - 1 / 3, 2, 1])
