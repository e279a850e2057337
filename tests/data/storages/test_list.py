"""ListStorage."""

import copy
import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.data import ListStorage, ReplayBuffer, TensorDictReplayBuffer
from engram.errors import StorageError
from engram.pytree import collate_items
from engram.testing import StorageContract, numbers, steps


class TestListStorage(StorageContract):
    settings = {"kind": "list", "lanes": 1}

    def make(self, capacity, path):
        return ListStorage(capacity)

    def shaped(self, n):
        made = super().shaped(n)
        return made if n.ndim < 2 else list(made.reshape(-1).unbind(0))


def test_any_objects_are_stored():
    rb = ReplayBuffer(storage=ListStorage(10), collate_fn=lambda items: items)
    things = ["a", {"b": 1}, None, (1, [2]), object(), {1, 2}]
    rb.extend(things)
    assert rb[:] == things and rb[4] is things[4]
    assert all(item in things for item in rb.sample(20))


def test_without_a_limit_it_grows():
    rb = ReplayBuffer(storage=ListStorage())
    for start in range(0, 3000, 300):
        rb.extend(list(range(start, start + 300)))
    assert len(rb) == 3000 and rb[2999] == 2999 and rb[-1] == 2999 and rb.storage.max_size is None
    assert not rb.storage._is_full


def test_a_storage_without_a_limit_takes_the_buffers_capacity():
    rb = ReplayBuffer(5, storage=ListStorage())
    rb.extend(list(range(7)))
    assert rb[:] == [5, 6, 2, 3, 4] and rb.storage.max_size == 5


def test_the_default_storage_has_room_for_1000_or_the_capacity():
    assert ReplayBuffer().storage.max_size == 1000 and ReplayBuffer(7).storage.max_size == 7


def test_items_of_an_emptied_storage_are_saved_in_their_order(tmp_path):
    for storage in (ListStorage(10), ListStorage()):
        rb = ReplayBuffer(storage=storage)
        rb.extend(list(range(6)))
        rb.empty()
        rb.extend([1, 2, 3, 4])
        rb.dumps(tmp_path / "saved")
        twin = ReplayBuffer(storage=ListStorage(storage.max_size))
        twin.loads(tmp_path / "saved")
        assert twin[:] == [1, 2, 3, 4] and storage[:] == [1, 2, 3, 4]


def test_what_is_added_after_a_load_goes_on_where_the_saved_items_ended():
    rb, twin = ReplayBuffer(storage=ListStorage(10)), ReplayBuffer(storage=ListStorage(10))
    rb.extend([1, 2, 3])
    twin.load_state_dict(rb.state_dict())
    for b in (rb, twin):
        b.extend([4])
    assert twin.storage.lanes.states()[0]["seams"] == rb.storage.lanes.states()[0]["seams"]


def test_a_dict_a_tuple_and_arrays_are_split_into_items():
    rb = ReplayBuffer(storage=ListStorage(10))
    rb.extend({"a": torch.arange(3), "b": {"c": np.arange(6).reshape(3, 2)}})
    assert rb[1]["a"] == 1 and rb[1]["b"]["c"].tolist() == [2, 3]
    rb.empty()
    rb.extend((torch.arange(3), np.arange(3)))
    assert rb[2] == (2, 2)
    rb.empty()
    rb.extend(np.arange(4))
    assert rb[:] == [0, 1, 2, 3]


def test_parts_of_different_lengths_are_refused():
    rb = ReplayBuffer(storage=ListStorage(10))
    for data in ({"a": torch.arange(3), "b": torch.arange(4)}, (torch.arange(3), torch.arange(4))):
        with pytest.raises(ValueError, match=r"3.*4"):
            rb.extend(data)
    for nothing in ([], torch.zeros(0), {"a": torch.zeros(0)}):
        with pytest.raises(ValueError, match="nothing to add"):
            rb.extend(nothing)
    with pytest.raises(TypeError, match=r"int.*add"):
        rb.extend(3)
    assert len(rb) == 0


def test_the_default_collate_stacks():
    rb = ReplayBuffer(storage=ListStorage(10))
    rb.extend(steps(0, 5))
    batch = rb.sample(7)
    assert isinstance(batch, TensorDict) and batch.batch_size == (7,)
    numbers(batch)
    rb.empty()
    rb.extend([{"x": 1.0, "y": (torch.zeros(2), "s")}] * 3)
    batch = rb.sample(4)
    assert batch["x"].shape == (4,) and batch["y"][0].shape == (4, 2) and batch["y"][1] == ["s"] * 4


def test_the_live_view_is_the_list():
    rb = ReplayBuffer(storage=ListStorage(3))
    rb.extend(["a", "b", "c", "d"])
    assert rb.storage._storage == ["d", "b", "c"]


@each("size", [0, -1, 2.5, True])
def test_a_bad_size_is_refused(size):
    with pytest.raises(ValueError, match="max_size"):
        ListStorage(size)


def test_it_cannot_be_sent_to_another_process_and_says_what_can():
    with pytest.raises(StorageError, match="LazyTensorStorage"):
        ForkingPickler.dumps(ListStorage(3))


def test_column_that_an_item_lacks_is_an_error():
    rb = ReplayBuffer(storage=ListStorage(10))
    rb.extend([{"a": torch.tensor(1)}, {"b": torch.tensor(2)}])
    assert rb.storage.column(("a",), torch.tensor([0])).tolist() == [1]
    with pytest.raises(KeyError, match="some of the stored items have no 'a'"):
        rb.storage.column(("a",), torch.tensor([0, 1]))


def test_a_place_that_is_not_there_leaves_the_others_as_they_were():
    rb = ReplayBuffer(storage=ListStorage(5), collate_fn=list)
    rb.extend(["a", "b"])
    with pytest.raises(IndexError, match="index 3 has not been written"):
        rb[torch.tensor([0, 3])] = ["x", "y"]
    with pytest.raises(TypeError, match="masked array"):
        rb[torch.tensor([0, 1])] = ["x", np.ma.masked]
    assert rb[:] == ["a", "b"]


def test_one_item_is_written_at_every_index():
    rb = ReplayBuffer(storage=ListStorage(5), collate_fn=list)
    rb.extend(torch.arange(3))
    rb[torch.tensor([0, 2])] = torch.tensor(7)
    assert [int(item) for item in rb[:]] == [7, 1, 7]


class TestListOfReferences(TestListStorage):
    """Without copies; the contract changes none of what it has stored."""

    def make(self, capacity, path):
        return ListStorage(capacity, copy=False)


def test_without_copies_the_callers_own_objects_are_stored_and_read():
    rb = ReplayBuffer(storage=ListStorage(10, copy=False))
    tensor, item, batch = torch.zeros(2), steps(0, 1)[0], steps(1, 4)
    rb.add(tensor)
    rb.extend([tensor, item])
    rb.extend(batch)
    assert rb.storage[0] is rb.storage[1] is rb[0] is tensor and rb[2] is item
    rb[1] = item
    assert rb[1] is item
    batch["n"] += 50
    assert [int(rb[slot]["n"]) for slot in (3, 4, 5)] == [51, 52, 53]


def test_without_copies_the_callers_batch_gets_no_index():
    item, batch = steps(0, 1)[0], steps(1, 4)
    rb = TensorDictReplayBuffer(storage=ListStorage(10, copy=False), batch_size=20)
    rb.add(item)
    rb.extend(batch)
    assert "index" not in item.keys() and "index" not in batch.keys()
    sampled = rb.sample()
    assert torch.equal(sampled["index"], sampled["n"])


def test_a_copy_of_a_list_of_references_has_items_of_its_own():
    rb, batch = ReplayBuffer(storage=ListStorage(10, copy=False)), steps(0, 3)
    rb.extend(batch)
    twins = [copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))]
    batch["n"] += 50
    for twin in twins:
        assert [int(twin[slot]["n"]) for slot in range(3)] == [0, 1, 2]
        twin.add(item := torch.zeros(1))
        assert twin[3] is item


def test_by_default_a_list_holds_copies():
    rb, item, batch = ReplayBuffer(storage=ListStorage(10)), steps(0, 1)[0], steps(1, 4)
    rb.add(item)
    rb.extend(batch)
    for data in (item, batch, rb[0], rb[2]):
        data["n"] += 50
    assert [int(rb[slot]["n"]) for slot in range(4)] == [0, 1, 2, 3]


@each(
    ("items", "difference"),
    [
        ([torch.zeros(1), torch.zeros(2)], r"it is torch.float32 \[2\] in item 1, and torch.float32 \[1\] in item 0"),
        ([torch.zeros(1), "a"], "it is a str in item 1, and torch.float32"),
        ([np.zeros(1), np.zeros(2)], r"it is float64 \[2\] in item 1, and float64 \[1\]"),
        ([1.0, "a"], "it is a str in item 1, and a float in item 0"),
        ([{"a": torch.zeros(1)}, {"a": torch.zeros(2)}], r"entry 'a' is torch.float32 \[2\] in item 1"),
        ([{"a": 1}, {"a": 1, "b": 2}], "entry 'b' is a int in item 1, and missing in item 0"),
        ([{"a": 1, "b": 2}, {"a": 1}], "entry 'b' is missing in item 1"),
        ([{"a": 1}, "a"], "entry 'a' is missing in item 1"),
        ([{"a": (1, 2)}, {"a": (1,)}], r"entry 'a' is a tuple of 1 entries in item 1, and a tuple of 2"),
        ([(1,), (1, 2)], r"entry \(?1,?\)? is a int in item 1, and missing in item 0"),
        ([TensorDict({"a": torch.zeros(1)}), TensorDict({"a": torch.zeros(2)})], "entry 'a' is torch.float32"),
        ([TensorDict({"a": {"b": 1}}), TensorDict({"a": {"c": 1}})], r"entry \('a', 'b'\) is missing in item 1"),
    ],
)
def test_items_that_do_not_stack_are_told_apart_with_what_stores_and_samples_them(items, difference):
    with pytest.raises(RuntimeError, match=f"do not stack: {difference}(.|\n)*collate_fn=list(.|\n)*LazyStackStorage"):
        collate_items(items)
    rb = ReplayBuffer(storage=ListStorage(10), collate_fn=list)
    rb.extend(items)
    assert isinstance(rb.sample(4), list)


def test_a_batch_of_list_items_for_which_there_is_no_memory_says_so_and_not_that_they_do_not_stack():
    huge = torch.empty(1).expand(2**50)
    with pytest.raises(RuntimeError, match="allocate"):
        collate_items([huge, huge])


@each("how", ["same", "dtypes", "shapes", "few"])
def test_tensors_that_a_collate_function_gets_are_copies_of_their_own_form(how):
    items = [torch.full((2,), float(n)) for n in range(3 if how == "few" else 20)]
    if how != "few":
        items[7] = {"same": items[7], "dtypes": torch.tensor([7, 7]), "shapes": torch.full((3,), 7.0)}[how]

    def changed(got):
        for item in got:
            item += 100
        return got

    rb = ReplayBuffer(storage=ListStorage(20), collate_fn=changed, batch_size=60)
    rb.extend(items)
    batch, info = rb.sample(return_info=True)
    assert len(batch) == 60
    for item, n in zip(batch, info["index"].tolist(), strict=True):
        assert item.dtype is items[n].dtype and torch.equal(item, items[n] + 100)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(rb.storage[:], items, strict=True))


@pytest.mark.parametrize("items", [list(torch.rand(20, 2)), TensorDict({"x": torch.rand(20, 2)}, [20])])
def test_stack_as_collate_function_gives_what_it_gives_of_the_items(items):
    rb = ReplayBuffer(storage=ListStorage(20), collate_fn=torch.stack, batch_size=30)
    rb.extend(items)
    batch, info = rb.sample(return_info=True)
    expected = torch.stack([items[n] for n in info["index"].tolist()])
    assert type(batch) is type(expected) and batch.shape == expected.shape and bool((batch == expected).all())
