"""Storages of several environments."""

import torch

from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorStorage
from engram.testing import StrandsContract, numbers, of_numbers


class TestLazyTensorStorage(StrandsContract):
    settings = {"kind": "memory", "lanes": 1}

    def make(self, capacity, path, ndim=2):
        return LazyTensorStorage(capacity, ndim=ndim)


class TestShared(StrandsContract):
    settings = {"kind": "shared", "lanes": 1}

    def make(self, capacity, path, ndim=2):
        return LazyTensorStorage(capacity, ndim=ndim, shared=True)


class TestTemporaryFile(StrandsContract):
    settings = {"kind": "temporary file", "lanes": 1}

    def make(self, capacity, path, ndim=2):
        return LazyMemmapStorage(capacity, ndim=ndim)


class TestNamedFile(StrandsContract):
    settings = {"kind": "named file", "lanes": 1}

    def make(self, capacity, path, ndim=2):
        return LazyMemmapStorage(capacity, scratch_dir=path, ndim=ndim)


def test_existing_tensors_can_be_of_environments():
    data = of_numbers(torch.arange(34).unsqueeze(1) + 1000 * torch.arange(3))
    rb = ReplayBuffer(storage=TensorStorage(data, ndim=2), batch_size=9)
    assert len(rb) == 102 and rb[:].shape == (3, 34) and numbers(rb[5]) == [5, 1005, 2005]
    batch, info = rb.sample(return_info=True)
    assert numbers(batch) == (info["index"][0] + 1000 * info["index"][1]).tolist()
    rb.extend(of_numbers(torch.arange(6).reshape(3, 2) + 5000))
    assert data["n"][:2].tolist() == [[5000, 5002, 5004], [5001, 5003, 5005]]
    twin = ReplayBuffer(storage=TensorStorage(data.clone().zero_(), ndim=2))
    twin.load_state_dict(rb.state_dict())
    assert numbers(twin[:]) == numbers(rb[:])
