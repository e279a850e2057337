"""What a buffer does before its first write, and once its storage is closed: there are lanes, which count no rows."""

import warnings

import pytest
import torch
from tensordict import TensorDict

from contracts.children import Child
from engram.data import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    QueueSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SampleToInsertRatio,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StorageEnsemble,
)

SAMPLERS = {
    "uniform": RandomSampler,
    "epochs": SamplerWithoutReplacement,
    "full epochs": lambda: SamplerWithoutReplacement(drop_last=True),
    "priorities": lambda: PrioritizedSampler(40, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=2),
    "slices in epochs": lambda: SliceSamplerWithoutReplacement(slice_len=2),
    "slices by priority": lambda: PrioritizedSliceSampler(40, 0.7, 0.5, slice_len=2),
}
STORAGES = {
    "memory": lambda: LazyTensorStorage(40),
    "shared": lambda: LazyTensorStorage(40, shared_init=True),
    "file": lambda: LazyMemmapStorage(40),
    "list": lambda: ListStorage(40),
}


def steps(n):
    done = torch.zeros(n, 1, dtype=torch.bool)
    done[4::5] = True
    return TensorDict({"n": torch.arange(n), "next": {"done": done}}, [n])


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("storage", STORAGES)
def test_a_draw_from_nothing_is_refused_and_changes_no_draw_that_follows(sampler, storage):
    drawn = []
    for tries in (0, 2):
        rb = ReplayBuffer(storage=STORAGES[storage](), sampler=SAMPLERS[sampler](), batch_size=4)
        rb.set_rng(torch.Generator().manual_seed(3))
        for _ in range(tries):
            with pytest.raises(RuntimeError, match="empty storage"):
                rb.sample()
        assert not rb.can_sample(4)
        rb.extend(steps(20))
        batches = [rb.sample() for _ in range(3)]
        drawn.append([torch.stack(list(batch["n"])).tolist() for batch in batches])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_one_sampler_over_several_storages_finds_nothing_to_draw(sampler):
    storages = [LazyTensorStorage(40), LazyTensorStorage(40)]
    for storage in storages:
        ReplayBuffer(storage=storage).extend(steps(10))
    rb = ReplayBuffer(
        storage=StorageEnsemble(*storages), sampler=SAMPLERS[sampler](), writer=ImmutableDatasetWriter(), batch_size=4
    )
    with pytest.raises(RuntimeError, match="empty storage"):
        rb.sample()


@pytest.mark.parametrize("index", [(0, 1), (slice(None), 1)])
def test_rows_of_several_dimensions_cannot_be_edited_before_the_first_write(index):
    rb = ReplayBuffer(storage=LazyTensorStorage(40, ndim=2))
    with pytest.raises(IndexError, match="the storage is empty; extend it first"):
        rb[index] = steps(1)
    assert len(rb) == 0 and not rb.storage.initialized


def test_priorities_of_a_closed_storage_are_refused_and_new_rows_get_the_highest_all_the_same():
    rb = ReplayBuffer(storage=LazyMemmapStorage(40), sampler=PrioritizedSampler(40, 0.7, 0.5), batch_size=4)
    rb.extend(steps(10))
    rb.update_priority(0, 3.0)
    rb.storage.close()
    with pytest.raises(IndexError, match="nothing has been written to this storage yet"):
        rb.update_priority(0, 5.0)
    assert rb.sampler.totals(rb.storage).new_priority == 3.0


@pytest.mark.parametrize("make", [ListStorage, LazyTensorStorage])
def test_a_child_that_only_asks_whether_it_can_sample_is_warned_that_its_rows_are_its_own(make):
    rb = ReplayBuffer(storage=make(40), sampler=PrioritizedSampler(40, 0.7, 0.5), batch_size=4)

    def ask():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rb.can_sample(4)
        return sum("uses a copy of its replay buffer" in str(one.message) for one in caught)

    assert Child(ask).result() == 1


@pytest.mark.parametrize("storage", STORAGES)
def test_priorities_that_were_loaded_before_the_rows_outlive_a_draw_from_nothing(storage):
    saved = ReplayBuffer(storage=LazyTensorStorage(40), sampler=PrioritizedSampler(40, 0.7, 0.5), batch_size=4)
    saved.extend(steps(10))
    saved.update_priority(torch.arange(10), 2.0 + torch.arange(10))
    totals = []
    for tries in (0, 2):
        rb = ReplayBuffer(storage=STORAGES[storage](), sampler=PrioritizedSampler(40, 0.7, 0.5), batch_size=4)
        rb.sampler.load_state_dict(saved.sampler.state_dict())
        for _ in range(tries):
            with pytest.raises(RuntimeError, match="empty storage"):
                rb.sample()
        rb.extend(steps(10))
        totals.append(rb.sampler.totals(rb.storage))
    assert totals[0] == totals[1]


@pytest.mark.parametrize("first", ["read", "column", "overwrite"])
def test_the_first_call_finds_the_rows_that_another_storage_of_the_folder_has_written(first, tmp_path):
    mine, others = (LazyMemmapStorage(40, scratch_dir=tmp_path / "store", existsok=True) for _ in range(2))
    others.append(others.check({"x": torch.arange(3)}, False))
    slots = torch.tensor([0, 2])
    if first == "read":
        assert mine.read(slots).batch["x"].tolist() == [0, 2]
    elif first == "column":
        assert mine.column(("x",), slots).tolist() == [0, 2]
    else:
        mine.overwrite(slots, {"x": torch.tensor([5, 6])})
        assert others.read(torch.arange(3)).batch["x"].tolist() == [5, 1, 6]


LOADS = {
    "state": lambda rb, saved, folder: rb.load_state_dict(saved.state_dict()),
    "disk": lambda rb, saved, folder: (saved.dumps(folder), rb.loads(folder)),
}


@pytest.mark.parametrize("load", LOADS)
def test_a_save_of_before_the_first_write_is_loaded_over_rows_of_several_lanes(load, tmp_path):
    used, saved = (ReplayBuffer(storage=LazyTensorStorage(30, shared=True, lanes=3), batch_size=4) for _ in range(2))
    used.extend(steps(10))
    LOADS[load](used, saved, tmp_path)
    assert len(used) == 0
    used.extend(steps(10))
    assert used[:]["n"].tolist() == list(range(10))


@pytest.mark.parametrize("load", LOADS)
def test_a_save_of_before_the_first_write_leaves_no_counts_of_draws_of_other_rows(load, tmp_path):
    limiter = SampleToInsertRatio(1.0, 4, error_buffer=8)
    used, saved = (
        ReplayBuffer(storage=LazyTensorStorage(30), batch_size=4, rate_limiter=limiter) for _ in range(2)
    )  # fmt: skip
    used.extend(steps(10))
    used.sample()
    LOADS[load](used, saved, tmp_path)
    assert used.stats().samples == 0
    used.extend(steps(10))
    assert used.stats().samples == 0 and used.can_sample(12)
    used, saved = (
        ReplayBuffer(storage=LazyTensorStorage(4), batch_size=1, sampler=QueueSampler(full="overwrite"))
        for _ in range(2)
    )
    used.extend(steps(10))
    used.sample()
    used.sampler.consumer_version = 5
    assert used.stats().missed == 6
    LOADS[load](used, saved, tmp_path / "queue")
    used.extend(steps(3))
    assert (used.stats().missed, used.sampler.consumer_version) == (0, 0)
