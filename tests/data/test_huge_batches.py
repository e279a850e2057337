"""A batch that no memory can hold is refused, at once, with nothing lost."""

import pickle

import pytest
import torch

from contracts.each import each
from data.samplers.episode_data import episodes
from engram import errors
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SequenceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorStorage,
)
from engram.data.replay_buffers.reading import reader as reading

HUGE = [4 * 10**10, 4 * 10**12, 4 * 10**18, 4 * 10**30]
REFUSED = {  # whose batches have as many rows as are asked for
    "random": RandomSampler,
    "priorities": lambda: PrioritizedSampler(None, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=4),
    "slices by step": lambda: SliceSampler(slice_len=4, weight="steps"),
    "short slices": lambda: SliceSampler(slice_len=4, strict_length=False),
    "slices by priority": lambda: PrioritizedSliceSampler(None, 0.7, 0.5, slice_len=4),
    "sequences": lambda: SequenceSampler(slice_len=4),
    "two sequences": lambda: SequenceSampler(num_slices=2, strict_length=False),
    "two sequences by step": lambda: SequenceSampler(num_slices=2, weight="steps"),
}
SHORT = {  # whose batches have no more rows than there are, or than there are twice
    "epochs": SamplerWithoutReplacement,
    "epochs in order": lambda: SamplerWithoutReplacement(shuffle=False),
    "slice epochs": lambda: SliceSamplerWithoutReplacement(slice_len=4),
    "two short slices": lambda: SliceSampler(num_slices=2, strict_length=False),
    "two short slices by step": lambda: SliceSampler(num_slices=2, strict_length=False, weight="steps"),
}
STORAGES = {
    "memory": lambda: LazyTensorStorage(40),
    "mapped": lambda: LazyMemmapStorage(40),
    "list": lambda: ListStorage(40),
    "columns": lambda: TensorStorage(episodes([40])),
}


def filled(sampler, storage=STORAGES["memory"], **how):
    torch.manual_seed(0)
    rb = ReplayBuffer(storage=storage(), sampler=sampler(), generator=torch.Generator().manual_seed(1), **how)
    rb.empty()
    rb.extend(episodes([9, 8, 6, 10, 7]))
    return rb


@pytest.mark.pairwise
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("sampler", REFUSED)
def test_a_batch_larger_than_memory_is_an_error_that_says_so_and_the_next_batches_are_those_that_would_have_come(
    sampler, storage, prefetch
):
    rb, twin = (filled(REFUSED[sampler], STORAGES[storage], prefetch=prefetch) for _ in range(2))
    assert rb.sample(8)["n"].tolist() == twin.sample(8)["n"].tolist()
    for n in HUGE:
        with pytest.raises(errors.OutOfMemoryError, match=rf"batch_size={n} needs .*; sample fewer. Nothing was drawn"):
            rb.sample(n)
    for _ in range(4):
        assert rb.sample(8)["n"].tolist() == twin.sample(8)["n"].tolist()


@each("sampler", SHORT)
def test_samplers_that_give_what_there_is_give_it(sampler):
    rb = filled(SHORT[sampler])
    assert 0 < len(rb.sample(4 * 10**12)) <= 80
    assert len(rb.sample(8)) <= 8
    with pytest.raises(errors.OutOfMemoryError):
        rb.sample(4 * 10**30)


@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement])
def test_slices_longer_than_any_trajectory_are_refused_by_that(kind):
    rb = filled(lambda: kind(num_slices=2))
    with pytest.raises(RuntimeError, match="no trajectory has 2000000000000 steps; the longest that is stored has 10"):
        rb.sample(4 * 10**12)
    assert len(rb.sample(8)) == 8


@pytest.mark.parametrize("member", [RandomSampler, SamplerWithoutReplacement])
def test_an_ensemble_refuses_it_too_though_its_members_begin_epochs_anew(member):
    rb = ReplayBufferEnsemble(filled(member), filled(member))
    for n in HUGE:
        with pytest.raises(errors.OutOfMemoryError, match="sample fewer"):
            rb.sample(n)
    assert rb.sample(8).shape == (2, 4)


def test_a_batch_size_of_the_constructor_is_looked_at_where_it_is_used():
    rb = filled(RandomSampler, batch_size=10**12)
    for use in (rb.sample, lambda: next(iter(rb))):
        with pytest.raises(errors.OutOfMemoryError, match="batch_size=1000000000000 needs"):
            use()


def test_a_batch_that_fits_by_the_numbers_and_gets_no_memory_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(reading, "free_memory", lambda: None)  # unknown
    rb = filled(RandomSampler)
    with pytest.raises(
        errors.OutOfMemoryError, match=r"no memory for a batch of 4000000000000 rows \(.*\); sample fewer"
    ):
        rb.sample(4 * 10**12)
    assert len(rb.sample(8)) == 8


def test_what_is_free_decides_and_a_small_batch_does_not_ask(monkeypatch):
    asked = []
    monkeypatch.setattr(reading, "free_memory", lambda: asked.append(1) or 10_000_000)
    rb = filled(RandomSampler)
    assert len(rb.sample(1000)) == 1000 and not asked
    with pytest.raises(errors.OutOfMemoryError, match=r"batch_size=2000000 needs .* MB, 10 MB are free"):
        rb.sample(2_000_000)
    assert asked


def test_the_error_is_a_memory_error_and_can_be_sent():
    error = pickle.loads(pickle.dumps(errors.OutOfMemoryError("no room")))
    assert isinstance(error, MemoryError) and isinstance(error, errors.EngramError) and str(error) == "no room"
