"""LazyTensorStorage and TensorStorage."""

import copy
import logging
import math
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from data.storages.several_lanes import SeveralLanes
from engram.data import LazyTensorStorage, ReplayBuffer, TensorStorage
from engram.errors import StorageError
from engram.store.lanes import Lanes
from engram.testing import TableContract, numbers, steps


class TestLazyTensorStorage(TableContract):
    settings = {"kind": "memory", "lanes": 1}

    def make(self, capacity, path):
        return LazyTensorStorage(capacity)


class TestSharedLazyTensorStorage(TableContract):
    settings = {"kind": "shared", "lanes": 1}

    def make(self, capacity, path):
        return LazyTensorStorage(capacity, shared=True)


class TestLazyTensorStorageWithLanes(SeveralLanes, TableContract):
    settings = {"kind": "shared", "lanes": "several"}

    def make(self, capacity, path):
        return LazyTensorStorage(capacity, shared=True, lanes=3)


class TestTensorStorage(TableContract):
    """Emptied, it is a storage like others whose layout is known from the start."""

    settings = {"kind": "existing tensors", "lanes": 1}
    fresh = False

    def make(self, capacity, path):
        storage = TensorStorage(steps(0, capacity))
        storage.empty()
        return storage

    @pytest.fixture
    def rb(self, storage, request):
        # Tests of other layouts need other tensors.
        first = {
            "exotic": {"n": torch.zeros(10).long(), "obs": torch.zeros(10, 3)},
            "vmap": {"n": torch.zeros(10).long(), "obs": torch.zeros(10, 3)},
            "lengths": {"n": torch.zeros(10).long(), "obs": torch.zeros(10, 3)},
            "any_kind": {"c": torch.zeros(10, 2).cfloat(), "x": torch.zeros(10, 4), "s": torch.zeros(10, 3, 2)},
            "numpy_arrays": {"a": torch.zeros(10, 2).int(), "b": torch.zeros(10)},
            "its_leaf_cannot": {"a": torch.zeros(10).to(torch.int8), "d": torch.zeros(10).bool()},
        }
        for name, data in first.items():
            if name in request.node.name:
                storage = TensorStorage(data)
                storage.empty()
        return ReplayBuffer(storage=storage, batch_size=4)

    def test_data_of_dtypes_that_fill_rows_unevenly_come_back(self):
        dtypes = [torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.complex64]
        bits = torch.randint(0, 2, (7, 3))
        rb = ReplayBuffer(storage=TensorStorage({str(d): torch.zeros(7, 3, dtype=d) for d in dtypes}))
        rb.extend({str(d): bits.to(d) for d in dtypes})
        for d in dtypes:
            assert rb[:][str(d)].dtype == d and torch.equal(rb[:][str(d)].to(torch.int64), bits)


def test_existing_tensors_are_the_stored_rows():
    data = steps(0, 10)
    storage = TensorStorage(data)
    rb = ReplayBuffer(storage=storage, batch_size=4)
    assert len(rb) == 10 and storage.max_size == 10 and numbers(rb[:]) == list(range(10))
    assert storage[:]["obs"].data_ptr() == data["obs"].data_ptr() == storage._storage["obs"].data_ptr()
    assert rb.extend(steps(50, 53)).tolist() == [0, 1, 2]
    assert data["n"].tolist() == [50, 51, 52, *range(3, 10)]
    rb[3] = steps(70, 71)[0]
    assert data["n"][3] == 70


@each("max_size, ndim", [(9, 1), (11, 1), (4, 2)])
def test_a_size_that_does_not_fit_the_tensors_is_refused(max_size, ndim):
    with pytest.raises(ValueError, match=str(max_size)):
        TensorStorage(torch.zeros(10, 2), max_size, ndim=ndim)


def test_tensors_of_different_lengths_and_empty_ones_are_refused():
    with pytest.raises(ValueError, match="'b'"):
        TensorStorage({"a": torch.zeros(3), "b": torch.zeros(4)})
    with pytest.raises(ValueError):
        TensorStorage(torch.zeros(0))
    with pytest.raises(ValueError):
        TensorStorage({})
    with pytest.raises(TypeError, match="'a'"):
        TensorStorage({"a": "text"})


def test_numpy_arrays_can_be_the_stored_rows():
    data = np.arange(6.0).reshape(6, 1)
    rb = ReplayBuffer(storage=TensorStorage(data))
    rb.extend(np.full((2, 1), 9.0))
    assert data[:, 0].tolist() == [9, 9, 2, 3, 4, 5]


def test_making_a_storage_logs_where_it_is_its_size_and_its_keys(caplog):
    with caplog.at_level(logging.INFO, "engram"):
        ReplayBuffer(storage=LazyTensorStorage(1000)).extend(steps(0, 3))
    assert "memory" in caplog.text and "1000 steps" in caplog.text
    assert "next.reward: [1000, 1] 8 KB" in caplog.text and "obs: [1000, 3] 12 KB" in caplog.text


@each("size", [0, -1, 2.5, True])
def test_a_bad_size_is_refused(size):
    with pytest.raises(ValueError, match="max_size"):
        LazyTensorStorage(size)


def test_settings_that_contradict_each_other_are_refused():
    for settings in ({"lanes": 2}, {"lanes": 0, "shared": True}, {"ndim": 0}, {"lanes": 2, "shared": True, "ndim": 2}):
        with pytest.raises(ValueError):
            LazyTensorStorage(10, **settings)


def test_capacity_rounds_up_to_equal_lanes():
    storage = LazyTensorStorage(103, shared=True, lanes=3)  # a prime number
    assert storage.max_size == 108
    ReplayBuffer(storage=storage).extend(steps(0, 140))
    assert storage.max_size == len(storage) == 108


def test_private_memory_cannot_be_sent_and_says_why():
    storage = LazyTensorStorage(10)
    ReplayBuffer(storage=storage).extend(steps(0, 3))
    with pytest.raises(StorageError, match=r"Cannot share a storage of type .*shared=True"):
        ForkingPickler.dumps(storage)
    with pytest.raises(StorageError, match="has not been initialized"):
        ForkingPickler.dumps(LazyTensorStorage(10, shared=True))


def test_a_first_batch_that_is_refused_decides_nothing():
    for bad in ({"a": torch.zeros(5), "b": torch.zeros(4)}, {"a": torch.zeros(0)}, [{"a": 1}, {"b": 1}], {"a": "text"}):
        storage = LazyTensorStorage(10)
        rb = ReplayBuffer(storage=storage)
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            rb.extend(bad)
        assert storage.layout is None and not storage.initialized
        rb.extend(TensorDict({"other": torch.zeros(3)}, [3]))
        assert len(rb) == 3


@each("envs", [(1,), (3,), (2, 3)])
def test_a_slice_of_a_dict_of_several_environments_has_their_shape(envs):
    storage = LazyTensorStorage(60, ndim=1 + len(envs))
    rows = {"x": torch.arange(4 * math.prod(envs) * 2).reshape(4, *envs, 2), "y": {"z": torch.ones(4, *envs)}}
    ReplayBuffer(storage=storage, dim_extend=0).extend(rows)
    view = storage[:]
    assert torch.equal(view["x"], rows["x"]) and view["y"]["z"].shape == (4, *envs)
    assert view["x"].data_ptr() == storage[:]["x"].data_ptr()  # a view, no copy


def test_device_auto_is_that_of_the_first_batch_and_initialized_tells_of_it():
    storage = LazyTensorStorage(4, device="auto")
    rb = ReplayBuffer(storage=storage)
    assert not storage.initialized
    rb.extend(torch.arange(3))
    assert storage.initialized and storage.device == torch.device("cpu") and rb[:].tolist() == [0, 1, 2]
    assert TensorStorage(torch.arange(3)).initialized


@each("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_columns_of_any_integer_are_written_read_and_saved(dtype):
    given = torch.tensor([1, 2**16 - 1, 3, 4], dtype=dtype)
    rb, twin = (ReplayBuffer(storage=TensorStorage({"x": x}), batch_size=4) for x in (given, torch.zeros_like(given)))
    rb.extend({"x": torch.tensor([5, 2**16 - 2], dtype=dtype)})
    rb[2] = {"x": torch.tensor(7, dtype=dtype)}
    assert given.tolist() == rb[:]["x"].tolist() == rb.storage[0:4]["x"].tolist() == [5, 2**16 - 2, 7, 4]
    assert rb.sample()["x"].dtype == rb.storage[0:4]["x"].dtype == dtype
    twin.load_state_dict(rb.state_dict())
    assert twin[:]["x"].tolist() == given.tolist() and copy.deepcopy(rb)[:]["x"].tolist() == given.tolist()


def test_columns_count_no_row_that_could_not_be_written(monkeypatch):
    rb = ReplayBuffer(storage=TensorStorage({"a": torch.zeros(4), "b": torch.zeros(4)}))
    monkeypatch.setattr(Lanes, "next_slots", lambda self, n: torch.arange(10, 10 + n))  # which no column has
    with pytest.raises(IndexError):
        rb.extend({"a": torch.ones(2), "b": torch.ones(2)})
    monkeypatch.undo()
    assert rb.write_count == 4 and rb.storage[0:4]["a"].tolist() == [0, 0, 0, 0]


@each("lead", [(4,), (2, 2)])
def test_rows_of_an_expanded_tensor_are_written_one_by_one(lead):
    given = TensorDict({"a": torch.zeros(4), "x": torch.zeros(1).expand(4)}, [4]).reshape(*lead)
    rb = ReplayBuffer(storage=TensorStorage(given, ndim=len(lead)), dim_extend=0)
    rb.extend(torch.ones_like(given)[:1])
    assert rb[:]["x"].tolist() == rb[:]["a"].tolist() and rb[:]["x"].sum() == math.prod(lead[1:])


def test_rows_that_are_windows_of_one_tensor_are_written_one_by_one():
    windows = torch.arange(6.0).unfold(0, 3, 1)
    rb = ReplayBuffer(storage=TensorStorage(windows))
    rb[1] = torch.full((3,), -1.0)
    assert rb[:].tolist() == [[0, 1, 2], [-1, -1, -1], [2, 3, 4], [3, 4, 5]]


@each("made", [lambda x: x, torch.t, lambda x: x[::2], lambda x: x[:, 1:], lambda x: x[:1], lambda x: x[:, :0]])
def test_rows_of_a_view_whose_elements_are_its_own_are_written_in_place(made):
    given = torch.zeros(4, 6)
    view = made(given)
    ReplayBuffer(storage=TensorStorage(view)).extend(torch.ones_like(view))
    assert given.sum() == view.numel()


@each("shared", [False, True])
def test_one_step_is_written_over_all_rows_that_are_named(shared):
    rb = ReplayBuffer(storage=LazyTensorStorage(10, shared=shared))
    rb.extend(TensorDict({"x": torch.arange(4)}, [4]))
    rb.storage.overwrite(torch.tensor([1, 3]), TensorDict({"x": torch.tensor(7)}, []))
    assert rb[:]["x"].tolist() == [0, 7, 2, 7]


def test_a_batch_of_other_environments_is_refused_with_both_shapes():
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    rb.extend(torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"the batch has environments of shape \[2\], this storage \[3\]"):
        rb.extend(torch.zeros(2, 2))
    assert len(rb) == 6


def test_lanes_that_processes_share_count_no_rows_that_lie_elsewhere():
    rb = ReplayBuffer(storage=LazyTensorStorage(10, shared=True))
    rb.extend(torch.arange(3))
    with pytest.raises(StorageError, match="the store that they lie in"):
        rb.storage.lanes.advance(1)
    assert len(rb) == 3


def test_copies_and_checkpoints_of_columns_take_an_entry_without_elements(tmp_path):
    given = TensorDict({"n": torch.arange(6.0), "none": torch.zeros(6, 0)}, [6])
    rb, twin = (ReplayBuffer(storage=TensorStorage(td)) for td in (given, torch.zeros_like(given)))
    rb.dumps(tmp_path)
    twin.loads(tmp_path)
    for other in (twin, copy.deepcopy(rb)):
        assert torch.equal(other[:]["n"], given["n"]) and other[:]["none"].shape == (6, 0)
