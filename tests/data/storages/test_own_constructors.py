"""Storages of a user's classes that are derived from ours, with constructors and attributes of their own."""

import copy
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from tensordict import TensorDict

from engram.data import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorStorage,
)
from engram.data.replay_buffers.storages.users import own_attributes


class NamedTensors(LazyTensorStorage):
    def __init__(self, name):
        super().__init__(10)
        self.name = name


class NamedFile(LazyMemmapStorage):
    def __init__(self, name):
        super().__init__(10)
        self.name = name


class NamedList(ListStorage):
    def __init__(self, name):
        super().__init__(10)
        self.name = name


CLASSES = [NamedTensors, NamedFile, NamedList]
COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda part: pickle.loads(pickle.dumps(part))}


def filled(storage):
    rb = ReplayBuffer(storage=storage, batch_size=2)
    rb.extend(TensorDict({"a": torch.arange(4)}, [4]))
    return rb


def rows(rb):
    return [int(rb[i]["a"]) for i in range(len(rb))]


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("cls", CLASSES)
def test_a_storage_with_a_constructor_of_its_own_is_copied_with_its_attributes(cls, how):
    storage = cls(["walker"])
    filled(storage)
    twin = COPIES[how](storage)
    assert (type(twin), twin.name, twin.max_size) == (cls, ["walker"], 10)
    assert rows(ReplayBuffer(storage=twin, batch_size=2)) == [0, 1, 2, 3]
    assert (twin.name is storage.name) == (how == "copy")


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("cls", CLASSES)
def test_a_buffer_is_copied_with_such_a_storage(cls, how):
    twin = COPIES[how](filled(cls("walker")))
    assert (type(twin.storage), twin.storage.name, rows(twin)) == (cls, "walker", [0, 1, 2, 3])


class NamedShared(LazyTensorStorage):
    def __init__(self, name):
        super().__init__(10, shared=True)
        self.name = name


def test_another_process_gets_such_a_storage_with_its_attributes_and_the_same_rows():
    storage = NamedShared("walker")
    rb = filled(storage)
    sent = pickle.loads(bytes(ForkingPickler.dumps(storage)))
    rb.extend(TensorDict({"a": torch.arange(4, 6)}, [2]))
    assert (type(sent), sent.name, len(sent)) == (NamedShared, "walker", 6)


@pytest.mark.parametrize("how", COPIES)
def test_what_a_user_keeps_in_a_storage_of_ours_is_copied(how):
    storage = LazyTensorStorage(10)
    storage.note = "seed 3"
    assert COPIES[how](storage).note == "seed 3"


def test_a_deep_copy_of_what_points_at_its_storage_points_at_the_copy():
    storage = NamedTensors("walker")
    storage.itself = [storage]
    filled(storage)
    twin = copy.deepcopy(storage)
    assert twin.itself[0] is twin


def test_a_new_storage_has_no_attributes_but_ours(tmp_path):
    made = [
        LazyTensorStorage(10),
        LazyTensorStorage(10, shared=True),
        LazyTensorStorage(10, shared=True, shared_init=True),
        LazyMemmapStorage(10),
        LazyMemmapStorage(10, scratch_dir=tmp_path / "store"),
        TensorStorage(TensorDict({"a": torch.arange(4)}, [4])),
        ListStorage(10),
        LazyStackStorage(10),
        CompressedListStorage(10),
    ]
    for storage in made:
        assert not own_attributes(storage), type(storage)
