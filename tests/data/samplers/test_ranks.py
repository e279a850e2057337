"""Several learners share the epochs of one permutation, or draw other rows from one seed."""

import copy
import itertools

import pytest
import torch

from contracts.each import each
from engram import Generator
from engram.data import (
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
from engram.errors import CheckpointMisfitError


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def learners(world_size, rows=23, batch_size=4, capacity=100, **settings):
    """Buffers with equal rows, 0 to rows - 1, one for each learner."""
    buffers = []
    for rank in range(world_size):
        sampler = SamplerWithoutReplacement(rank=rank, world_size=world_size, **settings)
        buffers.append(ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler, batch_size=batch_size))
        buffers[-1].extend(torch.arange(rows))
    return buffers


def epochs(buffers):
    """What each learner gets of its next epoch."""
    return [torch.cat(list(buffer)).tolist() for buffer in buffers]


@each("world_size", [1, 2, 3, 5, 23])
@each("shuffle", [False, True])
def test_parts_are_disjoint_of_equal_size_and_leave_out_less_than_a_row_for_each(world_size, shuffle):
    buffers = learners(world_size, shuffle=shuffle)
    for _ in range(3):
        parts = epochs(buffers)
        rows = flat(parts)
        assert len(set(rows)) == len(rows) == 23 // world_size * world_size
        assert {len(part) for part in parts} == {23 // world_size}


def test_learners_make_equally_many_steps_with_and_without_short_batches():
    for drop_last in (False, True):
        counts = [len(list(buffer)) for buffer in learners(3, rows=100, batch_size=8, drop_last=drop_last)]
        assert counts == [4 if drop_last else 5] * 3


def test_permutations_follow_from_seed_and_epoch_and_not_from_the_generator():
    one, other = learners(2), learners(2)
    torch.manual_seed(1)
    first = epochs(one)
    torch.manual_seed(2)
    assert epochs(other) == first and epochs(one) != first
    assert epochs(learners(2, seed=5)) != first


def test_each_row_is_left_out_of_some_epochs_only():
    buffers = learners(4)
    seen = [set(flat(epochs(buffers))) for _ in range(40)]
    assert all(len(rows) == 20 for rows in seen) and set.union(*seen) == set(range(23))


def test_an_epoch_is_chosen_by_its_number():
    buffers = learners(2)
    by_number = [epochs(buffers) for _ in range(4)]
    for buffer in buffers:
        buffer.sampler.set_epoch(2)
    assert [epochs(buffers), epochs(buffers)] == by_number[2:]
    with pytest.raises(ValueError):
        buffers[0].sampler.set_epoch(-1)


@each("drawn", range(6))
def test_a_saved_learner_goes_on_in_its_part(drawn, tmp_path):
    for rank, buffer in enumerate(learners(2)):
        for _ in range(drawn):
            buffer.sample()
        buffer.dumps(tmp_path / str(rank))
        other = learners(2)[rank]
        other.loads(tmp_path / str(rank))
        twin = copy.deepcopy(buffer)
        assert epochs([buffer])[0] == epochs([other])[0] == epochs([twin])[0]


def test_the_state_of_another_learner_is_refused(tmp_path):
    first, second = learners(2)
    first.sample()
    first.dumps(tmp_path)
    with pytest.raises(CheckpointMisfitError, match="rank=1 here, 0 there"):
        second.loads(tmp_path)
    with pytest.raises(CheckpointMisfitError, match="SamplerWithoutReplacement of several learners there"):
        learners(1)[0].loads(tmp_path)


@pytest.mark.parametrize("drop_last", [False, True])
def test_rows_that_are_overwritten_are_left_out_and_no_other_part_is_touched(drop_last):
    buffers = learners(2, rows=40, capacity=40, drop_last=drop_last)
    whole = epochs(learners(2, rows=40, capacity=40))
    parts = [[buffer.sample().tolist()] for buffer in buffers]
    for rank, buffer in enumerate(buffers):
        buffer.extend(torch.full((25,), 1000))
        while not buffer.sampler.ran_out:
            parts[rank].append(buffer.sample().tolist())
        rest = flat(parts[rank][1:])
        expected = [row for row in whole[rank][4:] if row >= 25]
        assert rest == (expected[: len(expected) // 4 * 4] if drop_last else expected)


def test_what_is_left_of_a_part_is_listed():
    buffer = learners(2)[1]
    first = buffer.sample().tolist()
    assert first + buffer.sampler._sample_list.tolist() == epochs(learners(2))[1]


def test_prefetched_epochs_are_the_same():
    buffers = learners(3)
    ahead = [
        ReplayBuffer(
            storage=b.storage, sampler=SamplerWithoutReplacement(rank=i, world_size=3), batch_size=4, prefetch=3
        )
        for i, b in enumerate(buffers)
    ]
    assert [epochs(ahead), epochs(ahead)] == [epochs(buffers), epochs(buffers)]


def test_bad_parts_are_refused():
    for rank, world_size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="rank must be 0 to"):
            SamplerWithoutReplacement(rank=rank, world_size=world_size)
    with pytest.raises(ValueError, match="23 stored steps in 24 parts are too few"):
        learners(24)[0].sample()
    with pytest.raises(ValueError, match="full batches of 4"):
        learners(8, drop_last=True)[0].sample()


SLICES = {"slice_len": 2, "traj_key": "episode"}
SAMPLERS = {
    "uniform": RandomSampler,
    "prioritized": lambda **rank: PrioritizedSampler(100, 0.6, 0.4, **rank),
    "slices": lambda **rank: SliceSampler(**SLICES, **rank),
    "slices in epochs": lambda **rank: SliceSamplerWithoutReplacement(**SLICES, **rank),
    "sequences": lambda **rank: SequenceSampler(**SLICES, **rank),
    "prioritized slices": lambda **rank: PrioritizedSliceSampler(100, 0.6, 0.4, **SLICES, **rank),
}


def of_rank(make, generator=None, collate_fn=None, **rank):
    rb = ReplayBuffer(
        storage=LazyTensorStorage(100), sampler=make(**rank), generator=generator, collate_fn=collate_fn, batch_size=8
    )
    rb.extend({"n": torch.arange(60), "episode": torch.arange(60) // 6})
    return rb


def batches(rb, n=5):
    return [rb.sample()["n"].tolist() for _ in range(n)]


@each("kind", SAMPLERS)
@each("own", [False, True])
@each("collate_fn", [None, lambda batch: batch])  # with one no batch is drawn by native code alone
def test_ranks_with_one_seed_draw_other_rows_and_rank_0_those_that_it_has_without(kind, own, collate_fn):
    drawn = []
    for rank in ({}, {"rank": 0}, {"rank": 1}, {"rank": 2}):
        torch.manual_seed(3)
        generator = Generator(3) if own else None
        drawn.append(batches(of_rank(SAMPLERS[kind], generator, collate_fn, **rank)))
    assert drawn[0] == drawn[1]
    assert all(a != b for one, other in itertools.combinations(drawn[1:], 2) for a, b in zip(one, other, strict=True))


@each("own", [False, True])
def test_a_rank_draws_the_same_rows_with_and_without_native_batches(own):
    for kind in ("uniform", "slices", "prioritized"):
        drawn = []
        for collate_fn in (None, lambda batch: batch):
            torch.manual_seed(3)
            drawn.append(batches(of_rank(SAMPLERS[kind], Generator(3) if own else None, collate_fn, rank=2)))
        assert drawn[0] == drawn[1]


def test_copies_of_a_sampler_have_its_rank_and_a_checkpoint_fits_at_every_rank(tmp_path):
    first, second = of_rank(RandomSampler, Generator(3)), of_rank(RandomSampler, Generator(3), rank=1)
    twin = copy.deepcopy(second)
    first.dumps(tmp_path)
    expected = batches(second)
    assert batches(twin) == expected and batches(first) != expected
    second.loads(tmp_path)
    assert batches(second) == expected


def test_what_is_no_rank_is_refused():
    for rank in (-1, 1.5, None, "0"):
        for make in SAMPLERS.values():
            with pytest.raises(ValueError, match="rank is the number of this process, 0 or more"):
                make(rank=rank)
    with pytest.raises(ValueError, match="rank must be 0 to world_size - 1 = 0, got 1: learners share each epoch"):
        SamplerWithoutReplacement(rank=1)
