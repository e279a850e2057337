"""Dicts whose keys are integers: rows come back under the same keys, everywhere."""

import copy
import pickle

import pytest
import torch

from contracts.each import each
from engram.data import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NestedStorageCheckpointer,
    ReplayBuffer,
    TensorStorageCheckpointer,
)


def batch(n):
    return {0: torch.arange(n), "inner": {7: torch.arange(n) * 2.0, "name": (torch.ones(n),)}}


def check(rows, n):
    assert list(rows) == [0, "inner"] and list(rows["inner"]) == [7, "name"]
    assert torch.equal(rows[0], torch.arange(n)) and torch.equal(rows["inner"][7], torch.arange(n) * 2.0)


@each("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_rows_come_back_under_the_same_keys(storage):
    rb = ReplayBuffer(storage=storage(10), batch_size=3)
    rb.extend(batch(4))
    rb.add({0: torch.tensor(4), "inner": {7: torch.tensor(8.0), "name": (torch.tensor(1.0),)}})
    sample = rb.sample()
    assert torch.equal(sample["inner"][7], sample[0] * 2.0)
    for same in (rb, copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))):
        rows = [same[i] for i in range(5)]
        assert [int(row[0]) for row in rows] == [0, 1, 2, 3, 4] and rows[2]["inner"][7] == 4.0
    if storage is not ListStorage:
        check(rb[:], 5)
        with pytest.raises(ValueError, match="7"):
            rb.extend({0: torch.arange(2), "inner": {8: torch.zeros(2), "name": (torch.ones(2),)}})


def test_a_named_store_is_reopened_with_the_same_keys(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path))
    rb.extend(batch(4))
    rb.storage.close()
    check(LazyMemmapStorage.open(tmp_path).get(slice(None)), 4)


@each(
    "checkpointer",
    [TensorStorageCheckpointer, FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer],
)
def test_what_is_saved_is_loaded_under_the_same_keys(checkpointer, tmp_path):
    done = {"next": {"done": torch.zeros(4, 1, dtype=torch.bool)}}
    rb, twin = (ReplayBuffer(storage=LazyTensorStorage(10), checkpointer=checkpointer()) for _ in range(2))
    rb.extend({**batch(4), **done})
    rb.dumps(tmp_path)
    twin.loads(tmp_path)
    rows = twin[:]
    assert torch.equal(rows.pop("next")["done"], done["next"]["done"])
    check(rows, 4)


def test_other_keys_and_two_of_one_name_are_refused():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    for key in (True, 1.5, None, (1,)):
        with pytest.raises(TypeError, match="strings or integers"):
            rb.extend({key: torch.zeros(3)})
    with pytest.raises(TypeError, match="one name in a file"):
        rb.extend({1: torch.zeros(3), "1": torch.zeros(3)})
    assert not rb.storage.initialized
