"""A torch without the DLPack exchange API: tensors go in and out in Python, and everything above does the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from data.samplers.test_slices import SliceContract
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SequenceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram.testing import RoundRobinWriterContract, SamplerContract, StrandsContract, TableContract, numbers, steps
from native import test_codec

pytestmark = pytest.mark.usefixtures("without_exchange")

SLICES: dict[str, Any] = {"slice_len": 2, "end_key": "done", "truncated_key": None}


class TestTensorsGoInAndOut(test_codec.TestTensorsGoInAndOut):
    pass


class TestArraysAndNumbers(test_codec.TestArraysAndNumbers):
    pass


class TestRefusals(test_codec.TestRefusals):
    pass


class TestStrands(test_codec.TestStrands):
    pass


@pytest.mark.deep
class TestMemory(TableContract):
    def make(self, capacity: int, path: Any) -> LazyTensorStorage:
        return LazyTensorStorage(capacity)


@pytest.mark.deep
class TestEnvironments(StrandsContract):
    def make(self, capacity: int, path: Any, ndim: int = 2) -> LazyMemmapStorage:
        return LazyMemmapStorage(capacity, path, ndim=ndim)


@pytest.mark.deep
class TestRandomSampler(SamplerContract):
    def make(self) -> RandomSampler:
        return RandomSampler()


@pytest.mark.deep
class TestSamplerWithoutReplacement(SamplerContract):
    def make(self) -> SamplerWithoutReplacement:
        return SamplerWithoutReplacement()


@pytest.mark.deep
class TestPrioritizedSampler(SamplerContract):
    def make(self) -> PrioritizedSampler:
        return PrioritizedSampler(60, alpha=0.7, beta=0.5)


@pytest.mark.deep
class TestSliceSampler(SliceContract):
    def make(self) -> SliceSampler:
        return SliceSampler(**SLICES)


@pytest.mark.deep
class TestSliceSamplerWithoutReplacement(SliceContract):
    def make(self) -> SliceSamplerWithoutReplacement:
        return SliceSamplerWithoutReplacement(**SLICES)


@pytest.mark.deep
class TestSequenceSampler(SliceContract):
    def make(self) -> SequenceSampler:
        return SequenceSampler(**SLICES)


@pytest.mark.deep
class TestRoundRobinWriter(RoundRobinWriterContract):
    def make(self) -> RoundRobinWriter:
        return RoundRobinWriter()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_priorities_are_set_read_and_weighed(dtype: torch.dtype) -> None:
    rb = PrioritizedReplayBuffer(1.0, 1.0, storage=LazyTensorStorage(10), batch_size=64, dtype=dtype)
    rb.extend(steps(0, 10))
    rb.update_priority(torch.arange(10), torch.tensor([1.0] * 5 + [4.0] * 5, dtype=dtype))
    batch, info = rb.sample(return_info=True)
    weight = info["priority_weight"]
    assert weight.dtype is dtype and weight.tolist() == pytest.approx([1 if n < 5 else 0.25 for n in numbers(batch)])
    assert rb.sampler.priorities(slice(3, 7)).tolist() == [1, 1, 4, 4]


def test_starts_of_slices_are_drawn_by_priority_and_marked() -> None:
    sampler = PrioritizedSliceSampler(100, 1.0, 1.0, slice_len=3, end_key="done")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler)
    rb.extend(steps(0, 10))
    rb.update_priority(torch.arange(10), torch.tensor([0.0, 1.0] + [0.0] * 8))
    batch = rb.sample(6)
    assert numbers(batch) == [1, 2, 3, 1, 2, 3] and len(set(batch["priority_weight"].tolist())) == 1
    assert batch["next", "truncated"].flatten().tolist() == [False, False, True] * 2


def test_the_best_items_stay() -> None:
    writer = TensorDictMaxValueWriter(rank_key="n")
    rb = ReplayBuffer(storage=LazyTensorStorage(4), writer=writer, batch_size=4)
    assert rb.extend(steps(0, 6)).tolist() == [0, 1, 2, 3, 0, 1] and sorted(numbers(rb[:])) == [2, 3, 4, 5]


def test_rows_of_several_buffers_make_one_batch() -> None:
    members = [ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2)]
    rb = ReplayBufferEnsemble(*members, batch_size=8, sample_from_all=True)
    for i, member in enumerate(members):
        member.extend(steps(10 * i, 10 * i + 10))
    batch, info = rb.sample(return_info=True)
    assert info["buffer_ids"].tolist() == [[0] * 4, [1] * 4]
    assert all(n // 10 == i for i, part in enumerate(batch) for n in numbers(part))


def test_memory_of_a_batch_is_used_again_when_all_of_it_is_gone() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=8)
    rb.extend(steps(0, 10))
    batch = rb.sample()
    address, leaf = batch["obs"].data_ptr(), batch["n"]
    expected = leaf.clone()
    del batch
    assert rb.sample()["obs"].data_ptr() != address and torch.equal(leaf, expected)
    del leaf
    assert address in {one["obs"].data_ptr() for one in [rb.sample() for _ in range(2)]}
