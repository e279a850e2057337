"""Lists of objects: every item comes back with its type; what cannot be saved is named."""

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from contracts.checkpointer import CheckpointerContract, ItemList
from contracts.each import each
from engram.data.replay_buffers.checkpointers import (
    ListStorageCheckpointer,
    open_snapshot,
    save_snapshot,
)
from engram.data.replay_buffers.checkpointers import (
    objects as list,
)


class TestListStorageCheckpointer(CheckpointerContract):
    def make(self):
        return ListStorageCheckpointer()

    def make_filled(self, salt=0):
        store = ItemList()
        store.append([{"number": i, "salt": salt, "text": f"item {i}", "bytes": bytes([i, salt])} for i in range(130)])
        return store

    def make_empty(self):
        return ItemList()

    def make_misfit(self):
        store = ItemList(capacity=3)
        store.append([1, 2])
        return store

    @pytest.fixture(params=[None, 7], ids=["one chunk", "chunks of 7"], autouse=True)
    def chunks(self, request, monkeypatch):
        if request.param:
            monkeypatch.setattr(list, "ITEMS_PER_CHUNK", request.param)

    def test_a_list_without_limit_comes_back(self, tmp_path):
        store = ItemList(capacity=None)
        store.append([1, "two", 3.0, None])
        self.save(tmp_path, store)
        assert self.load(tmp_path, ItemList(capacity=None)).contents() == store.contents()

    def test_hooks_get_a_list_of_items_that_do_not_stack(self, tmp_path):
        checkpointer, store, loaded = self.make(), ItemList(), ItemList()
        store.append([1, "two", 3])
        checkpointer.register_save_hook(lambda items: [item * 2 for item in items])
        checkpointer.register_load_hook(lambda items: [item * 3 for item in items])
        save_snapshot(tmp_path, {}, (checkpointer, store))
        with open_snapshot(tmp_path) as opened:
            opened.load_storage(checkpointer, loaded)
        assert loaded.stored == [6, "two" * 6, 18] and loaded.own == store.own


def round_trip(tmp_path, item):
    store, loaded = ItemList(), ItemList()
    store.append([item])
    save_snapshot(tmp_path, {}, (ListStorageCheckpointer(), store))
    with open_snapshot(tmp_path) as opened:
        opened.load_storage(ListStorageCheckpointer(), loaded)
    return loaded.stored[0]


def test_tensordicts_come_back_with_batch_size_names_and_nesting(tmp_path):
    inner = TensorDict({"b": torch.arange(6).reshape(3, 2)}, [3, 2])
    item = TensorDict({"a": torch.randn(3), "inner": inner, "empty": TensorDict({}, [3])}, [3], names=["time"])
    loaded = round_trip(tmp_path, item)
    assert type(loaded) is TensorDict
    assert loaded.batch_size == item.batch_size and loaded.names == ["time"] and loaded.device is None
    assert loaded["inner"].batch_size == inner.batch_size and "empty" in loaded.keys()
    assert (loaded == item).all()


def test_the_device_of_a_tensordict_comes_back(tmp_path):
    assert round_trip(tmp_path, TensorDict({"a": torch.zeros(2)}, [2], device="cpu")).device == torch.device("cpu")


def test_non_tensor_data_in_a_tensordict_comes_back(tmp_path):
    item = TensorDict({"a": torch.zeros(2), "text": NonTensorData("hello", batch_size=[2])}, [2])
    assert round_trip(tmp_path, item)["text"] == "hello"


def test_a_loaded_tensor_is_writable_and_alone(tmp_path):
    first, second = round_trip(tmp_path, [torch.zeros(4), np.zeros(4)])
    first += 1
    second += 2
    assert first.tolist() == [1] * 4 and second.tolist() == [2] * 4


@each(
    ("item", "said"),
    [
        (object(), "item 1 is a builtins.object"),
        ({"a": [0, {1, 2}]}, r"item 1\['a'\]\[1\] is a builtins.set"),
        (torch.eye(3).to_sparse(), "item 1 is a torch.float32 tensor with layout torch.sparse_coo"),
        (torch.empty(2, device="meta"), "on meta"),
        (torch.nn.Parameter(torch.zeros(1)), "item 1 is a torch.nn.parameter.Parameter"),
        (np.array([object()]), "numpy array of object"),
        (lambda: 0, "item 1 is a builtins.function"),
        ({object(): 1}, "item 1 has the key"),
    ],
)
def test_an_item_that_cannot_be_saved_is_named_and_nothing_is_written(tmp_path, item, said):
    store = ItemList()
    store.append([0, item])
    with pytest.raises(TypeError, match=said):
        save_snapshot(tmp_path / "new", {}, (ListStorageCheckpointer(), store))
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == ["LOCK"]


class OwnStack(LazyStackedTensorDict):
    """A subclass would come back as something else."""


def stack(kind):
    return kind(TensorDict({"a": torch.zeros(1)}, []), TensorDict({"a": torch.ones(1)}, []))


def test_a_lazy_stack_comes_back_as_one(tmp_path):
    back = round_trip(tmp_path, stack(LazyStackedTensorDict))
    assert type(back) is LazyStackedTensorDict and back.stack_dim == 0 and back["a"].tolist() == [[0.0], [1.0]]


def test_a_subclass_of_lazy_stacks_is_refused_with_its_type(tmp_path):
    store = ItemList()
    store.append([stack(OwnStack)])
    with pytest.raises(TypeError, match="OwnStack"):
        save_snapshot(tmp_path, {}, (ListStorageCheckpointer(), store))
