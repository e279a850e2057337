"""Draws among the rows that are left beside removed ones: each as likely as it should be, at 1, 50 and 99 % removed."""

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.data import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from engram.testing import chi_square

ROWS = 400
LEAST = 1e-4  # of the probability that counts deviate as far as they do
PERCENT = [1, 50, 99]
ALPHA, BETA = 0.7, 0.4
LENGTHS = [5, 15] * 20  # of the episodes
ENDS = torch.zeros(ROWS, dtype=torch.bool)
ENDS[torch.tensor(LENGTHS).cumsum(0) - 1] = True
PRIORITIES = 1.0 + torch.arange(ROWS) % 7
LENGTH = 2  # of slices


@pytest.fixture(autouse=True)
def _same_draws():
    torch.manual_seed(0)


def filled(sampler, storage=None, start=0, **parts):
    storage = LazyTensorStorage(ROWS) if storage is None else storage
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=1000, **parts)
    shift = ROWS // 4  # the ring has come round
    n = start + torch.arange(-shift, ROWS)
    done = torch.cat([ENDS[-shift:], ENDS])
    rb.extend(TensorDict({"n": n, "next": {"done": done.unsqueeze(-1)}}, [len(n)]))
    return rb


def remove(rb, percent, seed=1, together=False):
    """Removes so many rows, chosen at random, or all but some that follow each other; which are left, bool [rows]."""
    gone = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))[: ROWS * percent // 100]
    left = torch.ones(ROWS, dtype=torch.bool)
    left[gone] = False
    if together:
        left = torch.zeros(ROWS, dtype=torch.bool)
        left[85 : 85 + ROWS - ROWS * percent // 100] = True
    rows = rb[:]
    first = min(int(row["n"]) for row in rows) if isinstance(rows, list) else int(rows["n"].min())
    assert rb.remove(lambda rows: ~left[rows["n"] - first]) == ROWS * percent // 100
    return left


def counted(batches):
    return torch.bincount(torch.cat([batch["n"].flatten() for batch in batches]), minlength=ROWS)


def assert_drawn(counts, weights):
    """Draws are in proportion to the weights, and there are none where these are 0."""
    assert int(counts[weights == 0].sum()) == 0
    there = weights > 0
    if int(there.sum()) > 1:
        assert chi_square(counts[there], weights[there]) > LEAST


@each("percent", PERCENT)
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage, lambda n: LazyTensorStorage(n, shared=True)])
def test_uniform_draws_give_each_row_that_is_left_as_often(storage, percent):
    rb = filled(RandomSampler(), storage(ROWS))
    left = remove(rb, percent)
    assert_drawn(counted(rb.sample() for _ in range(20)), left.double())
    assert_drawn(counted(rb.sample(return_info=True)[0] for _ in range(20)), left.double())


@each("percent", PERCENT)
def test_uniform_draws_of_many_lanes_and_environments_give_each_row_as_often(percent):
    lanes = filled(RandomSampler(), LazyTensorStorage(2 * ROWS, shared=True, lanes=3))
    stored = lanes[:]["n"]
    left = torch.rand(len(stored)) * 100 >= percent
    lanes.remove(left.logical_not().nonzero().flatten())
    both = torch.stack([torch.cat([lanes.sample()["index"] for _ in range(20)])])
    counts = torch.bincount(both.flatten(), minlength=len(left))
    assert_drawn(counts[: len(left)], left.double())
    envs = ReplayBuffer(storage=LazyTensorStorage(ROWS, ndim=2), batch_size=1000)
    envs.extend(TensorDict({"n": torch.arange(ROWS).reshape(4, -1)}, [4, ROWS // 4]))
    left = remove(envs, percent)
    assert_drawn(counted(envs.sample() for _ in range(20)), left.double())


@each("percent", PERCENT)
@pytest.mark.parametrize("when", ["before the priorities", "after them"])
def test_draws_by_priority_are_in_proportion_and_their_weights_right(when, percent):
    rb = filled(PrioritizedSampler(None, ALPHA, BETA, 0.0))
    left = remove(rb, percent) if when == "before the priorities" else None
    rb.update_priority(torch.arange(ROWS), PRIORITIES[rb[:]["n"]])
    left = remove(rb, percent) if left is None else left
    batches = [rb.sample() for _ in range(20)]
    leaves = torch.where(left, PRIORITIES.double() ** ALPHA, 0.0)
    assert_drawn(counted(batches), leaves)
    lowest = leaves[left].min()
    for batch in batches:
        expected = (leaves[batch["n"]] / lowest) ** -BETA
        torch.testing.assert_close(batch["priority_weight"].double(), expected, rtol=1e-5, atol=0)
    assert rb.sampler.totals(rb.storage).share == pytest.approx(float(leaves.sum()))


def windows(left):
    """Of each row whether a slice without removed rows begins there, and how many windows its episode has."""
    begins, of_episode = torch.zeros(ROWS, dtype=torch.bool), torch.zeros(ROWS)
    start = 0
    for length in LENGTHS:
        for at in range(start, start + length - LENGTH + 1):
            begins[at] = bool(left[at : at + LENGTH].all())
        of_episode[start : start + length] = length - LENGTH + 1
        start += length
    return begins, of_episode.double()


def starts(rb, batches):
    """How often a slice began at each row."""
    slices = torch.cat([rb.sample()["n"].reshape(-1, LENGTH) for _ in range(batches)])
    assert bool((slices[:, 1] == slices[:, 0] + 1).all())
    return torch.bincount(slices[:, 0], minlength=ROWS)


@each("percent", PERCENT)
@pytest.mark.parametrize("weight", ["trajectories", "steps"])
def test_slices_that_are_left_are_drawn_in_proportion(weight, percent):
    rb = filled(SliceSampler(slice_len=LENGTH, weight=weight))
    left = remove(rb, percent, together=percent > 90)
    rb = rb if percent < 90 else _with_small_batches(rb)
    begins, of_episode = windows(left)
    expected = torch.where(begins, 1 / of_episode if weight == "trajectories" else 1.0, 0.0)
    assert_drawn(starts(rb, 20 if percent < 90 else 100), expected)


def _with_small_batches(rb):
    return TensorDictReplayBuffer(storage=rb.storage, sampler=rb.sampler, batch_size=8 * LENGTH)


@each("percent", PERCENT)
def test_slices_by_priority_begin_in_proportion_at_those_that_are_left(percent):
    rb = filled(PrioritizedSliceSampler(None, ALPHA, BETA, 0.0, slice_len=LENGTH))
    rb.update_priority(torch.arange(ROWS), PRIORITIES[rb[:]["n"]])
    left = remove(rb, percent, together=percent > 90)
    begins, _ = windows(left)
    assert_drawn(starts(rb, 20), torch.where(begins, PRIORITIES.double() ** ALPHA, 0.0))


@each("percent", PERCENT)
def test_members_of_an_ensemble_draw_those_that_are_left_alike(percent):
    members = [filled(RandomSampler()), filled(RandomSampler(), start=ROWS)]
    lefts = [remove(members[0], percent), remove(members[1], 100 - percent, seed=2)]
    both = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=1000)
    numbers = torch.cat([both.sample()["n"] for _ in range(30)], 1)
    for member, left in zip(numbers, lefts, strict=True):
        assert_drawn(torch.bincount(member % ROWS, minlength=ROWS), left.double())


@each("percent", PERCENT)
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("when", ["before", "within"])
def test_an_epoch_has_each_row_that_is_left_once(when, shuffle, percent):
    rb = filled(SamplerWithoutReplacement(shuffle=shuffle))
    rb = TensorDictReplayBuffer(storage=rb.storage, sampler=rb.sampler, batch_size=16)
    first = [rb.sample()["n"] for _ in range(3)] if when == "within" else []
    left = remove(rb, percent)
    drawn = torch.cat([*first, *(batch["n"] for batch in rb)])
    before = torch.zeros(ROWS, dtype=torch.bool)
    before[torch.cat([drawn[:0], *first])] = True  # these were drawn while they were there
    assert sorted(drawn.tolist()) == (left | before).nonzero().flatten().tolist()
    for _ in range(2):
        assert sorted(torch.cat([batch["n"] for batch in rb]).tolist()) == left.nonzero().flatten().tolist()


@each("percent", PERCENT)
@pytest.mark.parametrize("shuffle", [True, False])
def test_several_ranks_give_equally_many_of_the_rows_that_are_left(shuffle, percent):
    rb = filled(RandomSampler())
    left = remove(rb, percent)
    drawn, each_rank = [], int(left.sum()) // 4
    for rank in range(4):
        sampler = SamplerWithoutReplacement(shuffle=shuffle, rank=rank, world_size=4, seed=5)
        loop = TensorDictReplayBuffer(storage=rb.storage, sampler=sampler, batch_size=16)
        for _ in range(2):
            given = [n for batch in loop for n in batch["n"].tolist()]
            assert len(given) == each_rank
            drawn += given
    assert len(drawn) == 8 * each_rank and set(drawn) <= set(left.nonzero().flatten().tolist())
    assert all(drawn.count(n) <= 2 for n in set(drawn))  # once in each of the two epochs


@each("percent", [1, 50])
def test_an_epoch_of_slices_has_one_of_each_trajectory_that_has_one_left(percent):
    rb = filled(SliceSamplerWithoutReplacement(slice_len=LENGTH))
    left = remove(rb, percent)
    begins, _ = windows(left)
    episode = torch.cat([torch.zeros(1), ENDS.cumsum(0)])[:-1].long()
    for _ in range(3):
        first = torch.cat([batch["n"].reshape(-1, LENGTH)[:, 0] for batch in rb])
        assert bool(begins[first].all())
        assert sorted(episode[first].tolist()) == sorted(set(episode[begins].tolist()))
