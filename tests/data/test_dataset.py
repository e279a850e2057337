"""A buffer as a dataset of batches, in this process and in workers of a data loader."""

import itertools

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)

pytestmark = pytest.mark.filterwarnings("ignore:this process was forked:RuntimeWarning")


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def buffer(sampler=None, rows=50, cls=ReplayBuffer, storage=None, **settings):
    rb = cls(storage=LazyTensorStorage(100) if storage is None else storage, sampler=sampler, batch_size=4, **settings)
    rb.extend(torch.arange(rows) if cls is ReplayBuffer else TensorDict({"x": torch.arange(rows)}, [rows]))
    return rb


def batches(rb, workers=0, limit=None, **settings):
    dataset = rb.as_iterable_dataset(limit)
    return [b.tolist() for b in DataLoader(dataset, batch_size=None, num_workers=workers, **settings)]


def test_without_workers_it_is_iterating_over_the_buffer():
    one, other = (buffer(SamplerWithoutReplacement(), generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert batches(one) == [b.tolist() for b in other]
    torch.manual_seed(0)
    drawn = list(buffer().as_iterable_dataset(3))
    torch.manual_seed(0)
    assert len(drawn) == 3 and torch.equal(drawn[0], buffer().sample())


@pytest.mark.parametrize(
    ("workers", "shuffle"),
    [(1, False), (2, True), *[pytest.param(w, s, marks=pytest.mark.long) for w, s in ((1, True), (2, False))]],
)
def test_workers_share_an_epoch_and_give_each_row_once(workers, shuffle):
    rb = buffer(SamplerWithoutReplacement(shuffle=shuffle))
    first, second = (flat(batches(rb, workers)) for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(50))
    assert (first == second) is not shuffle


@pytest.mark.parametrize("generator", [False, True])
def test_workers_draw_independently_and_as_the_seed_says(generator):
    own = {"generator": torch.Generator().manual_seed(3)} if generator else {}
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(batches(buffer(RandomSampler(), **own), 2, limit=7))
    assert runs[0] == runs[1] != runs[2] and len(runs[0]) == 7
    assert runs[0][0::2] != runs[0][1::2]  # of the two workers


def test_workers_that_stay_give_another_epoch_each_time():
    dataset = buffer(SamplerWithoutReplacement()).as_iterable_dataset()
    loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    first, second = ([row for b in loader for row in b.tolist()] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(50)) and first != second


def test_learners_with_workers_share_one_epoch():
    parts = []
    for rank in range(2):
        torch.manual_seed(rank)
        parts.append(flat(batches(buffer(SamplerWithoutReplacement(rank=rank, world_size=2)), 2)))
    assert sorted(flat(parts)) == list(range(50)) and len(parts[0]) == len(parts[1])


def test_learners_choose_the_epoch_of_their_workers():
    rb = buffer(SamplerWithoutReplacement(rank=1, world_size=2))
    dataset, runs = rb.as_iterable_dataset(), []
    for epoch in (0, 1, 0):
        dataset.set_epoch(epoch)
        runs.append([b.tolist() for b in DataLoader(dataset, batch_size=None, num_workers=2)])
    assert runs[0] == runs[2] != runs[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_tensordicts_come_as_they_are(workers):
    dataset = buffer(SamplerWithoutReplacement(), cls=TensorDictReplayBuffer).as_iterable_dataset()
    got = list(DataLoader(dataset, batch_size=None, num_workers=workers, collate_fn=dataset.collate))
    assert all(isinstance(b, TensorDict) and torch.equal(b["x"], b["index"]) for b in got)
    assert sorted(torch.cat([b["x"] for b in got]).tolist()) == list(range(50))


def test_the_number_of_batches_is_that_of_all_workers_and_epochs_follow_each_other():
    rb = buffer(SamplerWithoutReplacement(), rows=10)
    for workers in (0, 2):
        got = batches(rb, workers, limit=9)
        assert len(got) == 9
    dataset = rb.as_iterable_dataset(9)
    assert len(dataset) == len(DataLoader(dataset, batch_size=None)) == 9
    with pytest.raises(TypeError):
        len(rb.as_iterable_dataset())


@pytest.mark.long  # with shared memory docs/getting-started.md does it in CI
def test_started_workers_read_a_mapped_store(tmp_path):
    rb = buffer(SamplerWithoutReplacement(), storage=LazyMemmapStorage(100, scratch_dir=tmp_path))
    assert sorted(flat(batches(rb, 2, multiprocessing_context="spawn"))) == list(range(50))


def test_prefetching_buffers_work_in_workers():
    rb = buffer(SamplerWithoutReplacement(), prefetch=2)
    rb.sample()
    assert sorted(flat(batches(rb, 2))) == list(range(50))


@pytest.mark.deep
def test_what_workers_would_do_wrong_is_refused():
    with pytest.raises(RuntimeError, match="cannot be shared between processes"):
        batches(buffer(PrioritizedSampler(100, 0.7, 0.5)), 1, limit=2)
    with pytest.raises(RuntimeError, match="every worker of this data loader would give all of the epochs"):
        slices = SliceSamplerWithoutReplacement(slice_len=2, traj_key="x")
        list(
            DataLoader(buffer(slices, cls=TensorDictReplayBuffer).as_iterable_dataset(), batch_size=None, num_workers=2)
        )
    with pytest.raises(RuntimeError, match="Batch_size was not specified"):
        ReplayBuffer(storage=LazyTensorStorage(10)).as_iterable_dataset()
    with pytest.raises(ValueError, match="batches must be 0 or more"):
        buffer().as_iterable_dataset(-1)
