"""Lists whose batches are lazy stacks, lists whose tensors are compressed, and batches that stay whole in a list."""

import copy
import functools
import pickle

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from engram.data import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram.data.replay_buffers.state.items import SavedItems
from engram.store.items import ItemRows
from engram.store.places import Objects, TableSize
from engram.store.table import Table
from engram.testing import StorageContract, numbers, steps


def test_storages_have_the_parents_that_torchrl_gives_them():
    assert issubclass(LazyMemmapStorage, LazyTensorStorage) and issubclass(LazyTensorStorage, TensorStorage)
    assert issubclass(CompressedListStorage, ListStorage) and issubclass(LazyStackStorage, ListStorage)


class ItemContract(StorageContract):
    def shaped(self, n):
        batch = super().shaped(n)
        return batch if n.ndim < 2 else list(batch.reshape(-1).unbind(0))


class TestLazyStackStorage(ItemContract):
    def make(self, capacity, path):
        return LazyStackStorage(capacity)


class TestCompressedListStorage(ItemContract):
    def make(self, capacity, path):
        return CompressedListStorage(capacity)


def of_lengths(*lengths):
    return [TensorDict({"n": torch.full((k,), float(k))}, [k]) for k in lengths]


@pytest.mark.parametrize("stack_dim", [0, -1])
def test_items_of_one_shape_are_stacked_along_the_dimension(stack_dim):
    rb = TensorDictReplayBuffer(storage=LazyStackStorage(10, stack_dim=stack_dim), batch_size=2)
    with pytest.warns(UserWarning, match="ndim=2"):
        rb.extend(TensorDict({"n": torch.arange(6).view(3, 2)}, [3, 2]))
    batch = rb.sample()
    assert isinstance(batch, LazyStackedTensorDict) and batch.batch_size == (2, 2)
    assert batch.stack_dim == (0 if stack_dim == 0 else 1)
    assert torch.equal(batch["n"] // 2, batch["index"])


def test_items_of_any_shape_and_keys_are_one_batch_and_each_knows_its_index():
    sampler = PrioritizedSampler(10, 1.0, 1.0, 0.0)
    rb = TensorDictReplayBuffer(storage=LazyStackStorage(10), sampler=sampler, batch_size=4)
    rb.extend(of_lengths(1, 2, 3))
    rb.add(TensorDict({"n": torch.full((4,), 4.0), "more": torch.zeros(4)}, [4]))
    for item in rb.sample().tensordicts:
        length = item.batch_size[0]
        assert item["n"].tolist() == [float(length)] * length and item["index"].tolist() == [length - 1] * length
        assert item["priority_weight"].shape == (length,)
    assert "index" in rb[0].keys() and "priority_weight" not in rb[0].keys()


def test_other_items_are_refused():
    rb = ReplayBuffer(storage=LazyStackStorage(10))
    for write, data in ((rb.extend, [1, 2]), (rb.add, torch.zeros(2)), (rb.extend, torch.zeros(2))):
        with pytest.raises(TypeError, match="TensorDicts"):
            write(data)
    assert len(rb) == 0


def test_compressed_items_take_less_memory_and_come_back_exactly():
    rb, plain = (ReplayBuffer(storage=cls(20), batch_size=4) for cls in (CompressedListStorage, ListStorage))
    pixels = torch.zeros(8, 3, 32, 32, dtype=torch.uint8)
    pixels[:, 0] = torch.arange(8, dtype=torch.uint8).view(8, 1, 1)
    data = TensorDict({"pixels": pixels, "half": torch.randn(8, 5).half(), "none": torch.zeros(8, 0)}, [8])
    for one in (rb, plain):
        one.extend(data)
    assert rb.storage.nbytes < plain.storage.nbytes / 20
    assert all(bool((a == b).all()) for a, b in zip(rb[:], plain[:], strict=True))
    assert rb[3]["half"].dtype == torch.float16 and rb.sample()["pixels"].shape == (4, 3, 32, 32)


@pytest.mark.parametrize("item", [torch.arange(5), {"a": torch.ones(2), "b": (torch.zeros(3), 4)}])
def test_compressed_items_are_of_any_form_that_holds_tensors(item):
    rb = ReplayBuffer(storage=CompressedListStorage(10))
    rb.add(item)
    stored = rb[0]
    assert type(stored) is type(item)
    assert torch.equal(stored["b"][0], item["b"][0]) if isinstance(item, dict) else torch.equal(stored, item)
    with pytest.raises(TypeError, match="a str"):
        rb.add({"a": "text"})
    assert len(rb) == 1


def halved(tensor):
    return tensor.to(torch.float16).view(torch.uint8)


def restored(content, form):
    return content.view(torch.float16).reshape(form["shape"]).to(form["dtype"])


def test_user_functions_compress():
    storage = CompressedListStorage(10, compression_fn=halved, decompression_fn=restored)
    rb = ReplayBuffer(storage=storage)
    rb.extend(TensorDict({"n": torch.arange(8.0).view(4, 2)}, [4]))
    assert rb[1]["n"].tolist() == [2.0, 3.0] and storage.nbytes == 16
    for twin in (copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))):
        assert twin[1]["n"].tolist() == [2.0, 3.0] and twin.storage.nbytes == 16
    with pytest.raises(ValueError, match="or none of them"):
        CompressedListStorage(10, compression_fn=halved)
    wrong = ReplayBuffer(
        storage=CompressedListStorage(10, compression_fn=halved, decompression_fn=lambda content, form: content)
    )
    with pytest.raises(ValueError, match="decompression_fn gave"):
        wrong.add(TensorDict({"n": torch.zeros(2)}, []))
    assert len(wrong) == 0


@pytest.mark.parametrize("cls", [CompressedListStorage, LazyStackStorage])
def test_they_are_sampled_by_slices_saved_and_kept_by_rank_as_lists_are(cls, tmp_path):
    n = torch.arange(8)
    data = TensorDict({"n": n, "episode": n // 4}, [8])
    rb, twin = (
        ReplayBuffer(storage=cls(10), sampler=SliceSampler(slice_len=4, traj_key="episode"), batch_size=8)
        for _ in range(2)
    )
    rb.extend(data)
    rb.dumps(tmp_path)
    twin.loads(tmp_path)
    assert {tuple(part.tolist()) for part in twin.sample()["n"].split(4)} <= {(0, 1, 2, 3), (4, 5, 6, 7)}
    best = TensorDictReplayBuffer(storage=cls(3), writer=TensorDictMaxValueWriter(rank_key="n"))
    best.extend(data)
    assert sorted(int(best[i]["n"]) for i in range(3)) == [5, 6, 7]


# ---- batches in a ListStorage ----
def kinds(rb):
    """The objects that the list holds, without reading them."""
    return {id(item) for item in list.__iter__(rb.storage._storage)}


class UnpackedRows(ItemRows):
    def _as_rows(self, *args):
        return None


class Unpacked(ListStorage):
    """As where an item of another form came first: batches are kept as they are."""

    def __init__(self, max_size):
        rows = UnpackedRows(max_size)
        table = Table(TableSize(max_size, None, 1, None), Objects({}), rows)
        self._hold(table, None, functools.partial(SavedItems, rows=rows))


@pytest.mark.parametrize("storage", [ListStorage, Unpacked])
def test_extend_of_a_tensordict_makes_no_object_for_a_row(storage):
    rb = ReplayBuffer(storage=storage(2000), batch_size=5)
    rb.extend(steps(0, 1000))
    assert len(kinds(rb)) == 1 and rb.storage.nbytes == 1000 * (rb[0].bytes())
    rb.sample()
    assert len(kinds(rb)) <= (7 if storage is Unpacked else 1)
    assert numbers(rb[:]) == list(range(1000))


@pytest.mark.parametrize("storage", [ListStorage, Unpacked])
def test_round_the_ring_and_beyond_it_each_slot_has_its_own_row(storage):
    rb, at = ReplayBuffer(storage=storage(10)), 0
    expected = [-1] * 10
    for n in (3, 4, 25, 1, 10, 9, 2, 13):
        index = rb.extend(steps(at, at + n)).tolist()
        for slot, number in zip(index, range(at, at + n), strict=True):
            expected[slot] = number
        at += n
        if n % 2:
            rb.add(steps(at, at + 1)[0])
            expected[(index[-1] + 1) % 10] = at
            at += 1
        assert numbers(rb[:]) == [e for e in expected if e >= 0]
    rb.empty()
    assert rb.extend(steps(0, 25)).tolist()[-1] == 4 and numbers(rb[:]) == [20, 21, 22, 23, 24, 15, 16, 17, 18, 19]


@pytest.mark.parametrize("storage", [ListStorage, Unpacked])
def test_what_the_caller_does_to_a_batch_later_changes_nothing_and_rows_are_copies(storage):
    rb, data = ReplayBuffer(storage=storage(10)), steps(0, 4)
    rb.extend(data)
    data["n"].zero_()
    rb[1]["n"].zero_()
    assert numbers(rb[:]) == [0, 1, 2, 3]


# ---- whole trajectories where single steps may have been meant ----
@pytest.mark.parametrize("storage", [ListStorage, LazyTensorStorage])
def test_a_batch_of_environments_by_time_is_stored_as_items_with_a_warning_the_first_time(storage, recwarn):
    rb = ReplayBuffer(storage=storage(10), batch_size=2)
    batch = TensorDict({"n": torch.arange(12).view(3, 4)}, [3, 4])
    with pytest.warns(UserWarning, match=r"\[3, 4\] is stored as 3 items of 4 steps each.*ndim=2.*reshape"):
        rb.extend(batch)
    assert len(rb) == 3 and rb.sample().batch_size == (2, 4)
    recwarn.clear()
    rb.extend(batch)
    ReplayBuffer(storage=storage(10)).extend(batch.reshape(-1))
    ReplayBuffer(storage=storage(10)).add(batch[0])
    if storage is LazyTensorStorage:
        ReplayBuffer(storage=storage(12, ndim=2)).extend(batch)
    assert not len(recwarn)


@pytest.mark.parametrize("stack_dim", [0, -1])
def test_steps_of_a_lazy_stack_storage_at_an_index_are_a_lazy_stack(stack_dim):
    storage = LazyStackStorage(10, stack_dim=stack_dim)
    rb = ReplayBuffer(storage=storage)
    rb.extend([TensorDict({"x": torch.full((3, k), float(k))}, [3]) for k in (1, 2)])
    for rows in (storage[:], storage.get([0, 1]), rb[:], rb[torch.tensor([0, 1])]):
        assert isinstance(rows, LazyStackedTensorDict)
        assert list(rows.batch_size) == ([2, 3] if stack_dim == 0 else [3, 2])
    assert rb[1]["x"].tolist() == [[2.0, 2.0]] * 3 and storage[0:0] == []


def test_a_collate_function_gets_the_items_of_a_lazy_stack_storage():
    rb = ReplayBuffer(storage=LazyStackStorage(10), collate_fn=tuple, batch_size=2)
    rb.extend([TensorDict({"x": torch.ones(k)}, []) for k in (1, 2)])
    assert type(rb[:]) is tuple and type(rb.sample()) is tuple
