"""Arrays of other libraries, which say by `__dlpack__` or `__array__` what they hold, are stored as tensors."""

import numpy as np
import pytest
import torch

from contracts.each import each
from engram.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer


class DlpackArray:
    """As JAX's: not a sequence, not a tensor, not an array of NumPy."""

    def __init__(self, values):
        self.values = torch.as_tensor(values)
        self.shape = tuple(self.values.shape)

    def __dlpack__(self, **how):
        return self.values.__dlpack__(**how)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


class WithoutShape(DlpackArray):
    """The protocol itself, which has no `shape`."""

    def __init__(self, values):
        self.values = torch.as_tensor(values)


class NumpyLike:
    def __init__(self, values):
        self.values = np.asarray(values)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype=dtype)


class WithoutDlpackDtype(NumpyLike):
    def __dlpack__(self, **how):
        raise BufferError("no such dtype in DLPack")

    def __dlpack_device__(self):
        return 1, 0


class OfObjects(NumpyLike):
    def __init__(self):
        self.values = np.array([object(), object()])


@each("kind", [DlpackArray, WithoutShape, NumpyLike, WithoutDlpackDtype])
@each("storage", [LazyTensorStorage, LazyMemmapStorage])
@each("dtype", ["float32", "int64", "bool"])
def test_entries_of_dicts_are_stored_with_their_dtype_and_copied(kind, storage, dtype):
    rb = ReplayBuffer(storage=storage(10), batch_size=4)
    values = np.arange(6).reshape(3, 2).astype(dtype)
    array = kind(values)
    rb.extend({"obs": array, "next": {"obs": kind(values)}, "reward": torch.zeros(3)})
    array.values[:] = 1
    rb.add({"obs": kind(values[2].copy()), "next": {"obs": kind(values[1])}, "reward": 0.0})
    expected = torch.arange(6).reshape(3, 2).to(getattr(torch, dtype))
    stored = rb[:]
    assert torch.equal(stored["next"]["obs"][:3], expected) and torch.equal(stored["obs"][:3], expected)
    assert len(rb) == 4 and stored["obs"].dtype == expected.dtype


@each("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_batches_of_arrays_without_a_shape_are_stored(storage):
    rb = ReplayBuffer(storage=storage(10), batch_size=4)
    rb.extend({"obs": WithoutShape(np.arange(6.0).reshape(3, 2)), "number": WithoutShape(np.arange(3))})
    batch = rb.sample()
    assert len(rb) == 3 and torch.equal(batch["obs"][:, 0], 2.0 * batch["number"])


def test_array_without_numbers_is_refused_and_nothing_written():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    with pytest.raises(TypeError, match="'obs' is a numpy array of object"):
        rb.extend({"obs": OfObjects(), "reward": torch.zeros(2)})
    assert len(rb) == 0
