"""Storages of a user's own in TorchRL's form: `get`, `set`, `__len__`, and `_empty` for buffers that are emptied."""

import copy
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from tensordict import TensorDict

from engram.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    Storage,
    TensorDictReplayBuffer,
    Writer,
)
from engram.testing import numbers, steps


class DictStorage(Storage):
    """Keeps steps in a dict; `get` of several gives a TensorDict."""

    def __init__(self, max_size):
        super().__init__(max_size)
        self.rows = {}

    def get(self, index):
        if isinstance(index, int):
            if index not in range(-len(self.rows), len(self.rows)):
                raise IndexError(f"index {index} has not been written")
            return self.rows[index % len(self.rows)].clone()
        return torch.stack(self.listed(index))

    def listed(self, index):
        at = torch.arange(len(self.rows))[index if not isinstance(index, range) else list(index)]
        return [self.rows[int(i)].clone() for i in at]

    def set(self, index, data):
        if isinstance(index, int):
            self.rows[index] = data
        else:
            self.rows.update(zip(torch.as_tensor(index).tolist(), data, strict=True))

    def __len__(self):
        return len(self.rows)


class Emptied(DictStorage):
    def _empty(self):
        self.rows.clear()


class ListedStorage(Emptied):
    """The same, whose `get` of several gives a list."""

    def get(self, index):
        return super().get(index) if isinstance(index, int) else self.listed(index)


def buffer(storage=Emptied, cls=TensorDictReplayBuffer, **parts):
    return cls(storage=storage(10), batch_size=8, **parts)


def test_who_looks_at_it_before_its_first_row_does_not_fix_how_many_rows_it_has():
    storage = Emptied(5)
    assert repr(storage) == "Emptied(max_size=5, len=0, ndim=1)"
    for i in range(3):
        storage.set(i, steps(i, i + 1)[0])
    rb = ReplayBuffer(storage=storage)
    assert rb.extend(steps(7, 8)).tolist() == [3] and numbers(rb[:]) == [0, 1, 2, 7]


@pytest.mark.parametrize("storage", [Emptied, ListedStorage])
class TestInABuffer:
    def test_user_storage_is_written_read_and_emptied(self, storage):
        rb = buffer(storage)
        assert rb.extend(steps(0, 4)).tolist() == [0, 1, 2, 3] and rb.add(steps(4, 5)[0]) == 4
        assert numbers(rb[3]) == 3 and numbers(rb[:]) == [0, 1, 2, 3, 4] and len(rb) == 5
        assert rb.extend(steps(5, 13)).tolist() == [5, 6, 7, 8, 9, 0, 1, 2]
        assert numbers(rb[:]) == [10, 11, 12, 3, 4, 5, 6, 7, 8, 9] and rb.write_count == 13
        assert rb.extend(steps(13, 40))[-3:].tolist() == [7, 8, 9]
        assert numbers(rb[:]) == list(range(30, 40)) and rb.writer._cursor == 0
        rb.empty()
        assert len(rb) == 0 and rb.extend(steps(0, 2)).tolist() == [0, 1] and numbers(rb[:]) == [0, 1]

    def test_a_sample_says_which_rows_it_is_of(self, storage):
        rb = buffer(storage, sampler=PrioritizedSampler(10, 1.0, 1.0, 0.0), track_generations=True)
        rb.extend(steps(0, 13))
        rb.update_priority(torch.arange(10), torch.arange(10.0))
        batch, info = rb.sample(return_info=True)
        assert batch.shape == (8,) and numbers(batch) == [numbers(rb[int(i)]) for i in batch["index"]]
        assert 0 not in batch["index"] and torch.equal(info["generation"], torch.tensor(numbers(batch)))
        assert batch["priority_weight"].shape == (8,)

    def test_samplers_of_slices_and_epochs_work(self, storage):
        rb = buffer(storage, sampler=SliceSampler(slice_len=4, traj_key="episode"))
        n = torch.arange(8)
        rb.extend(TensorDict({"n": n, "episode": n // 4}, [8]))
        assert {tuple(part.tolist()) for part in rb.sample()["n"].split(4)} <= {(0, 1, 2, 3), (4, 5, 6, 7)}
        rb.set_sampler(SamplerWithoutReplacement())
        assert sorted(rb.sample()["n"].tolist()) == list(range(8))

    def test_rows_are_replaced_by_index(self, storage):
        rb = buffer(storage)
        rb.extend(steps(0, 6))
        rb[2] = steps(50, 51)[0]
        rb[[0, 4]] = steps(60, 62)
        assert numbers(rb[:]) == [60, 1, 50, 3, 61, 5]
        with pytest.raises(IndexError):
            rb[7] = steps(0, 1)[0]
        with pytest.raises(ValueError, match="2 steps are indexed"):
            rb[[0, 1]] = steps(0, 3)
        assert numbers(rb[:]) == [60, 1, 50, 3, 61, 5]

    def test_a_collate_function_gets_what_get_returns(self, storage):
        seen = []
        rb = buffer(storage, ReplayBuffer, collate_fn=lambda got: seen.append(type(got)) or got)
        rb.extend(steps(0, 6))
        rb.sample()
        assert seen == [list if storage is ListedStorage else TensorDict]

    def test_what_is_saved_is_loaded(self, storage, tmp_path):
        rb, twin = buffer(storage), buffer(storage)
        rb.extend(steps(0, 13))
        rb.dumps(tmp_path)
        twin.loads(tmp_path)
        assert numbers(twin[:]) == numbers(rb[:])
        for one in (rb, twin):
            one.extend(steps(13, 15))
        assert numbers(twin[:]) == numbers(rb[:]) and twin.write_count == rb.write_count == 15


def test_pytrees_and_lists_are_written():
    class Items(Emptied):
        def get(self, index):
            return self.rows[index] if isinstance(index, int) else [self.rows[int(i)] for i in index]

    rb = ReplayBuffer(storage=Items(10), batch_size=2, collate_fn=lambda items: items)
    assert rb.extend(["a", "b", "c"]).tolist() == [0, 1, 2] and rb.add("d") == 3
    assert rb[2] == "c" and set(rb.sample(50)) <= set("abcd")


def test_rows_that_are_in_it_already_are_found():
    storage = Emptied(10)
    storage.set(torch.arange(3), steps(0, 3))
    rb = buffer(lambda n: storage, ReplayBuffer)
    assert len(rb) == 3 and rb.extend(steps(3, 5)).tolist() == [3, 4]
    assert set(numbers(rb.sample(50))) == {0, 1, 2, 3, 4}


def test_a_set_that_fails_counts_no_row():
    class Failing(Emptied):
        def set(self, index, data):
            if len(self.rows) >= 4:
                raise OSError("the disk is full")
            super().set(index, data)

    rb = buffer(Failing)
    rb.extend(steps(0, 4))
    with pytest.raises(OSError, match="disk"):
        rb.extend(steps(4, 6))
    assert (len(rb), rb.write_count, rb.writer._cursor) == (4, 4, 4) and max(numbers(rb.sample(50))) < 4


def test_without_a_method_for_it_a_storage_is_not_emptied():
    rb = buffer(DictStorage)
    rb.extend(steps(0, 4))
    with pytest.raises(RuntimeError, match="no method _empty"):
        rb.empty()
    assert numbers(rb[:]) == [0, 1, 2, 3]


def test_a_class_with_only_some_of_the_methods_is_no_storage():
    class Half(Storage):
        def get(self, index):
            return None

    with pytest.raises(TypeError, match="abstract"):
        Half(10)
    assert isinstance(LazyTensorStorage(10), Storage)


@pytest.mark.parametrize("storage", [Emptied, ListedStorage])
@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_a_patch_of_some_entries_keeps_the_others(storage, cls):
    rb = buffer(storage, cls)
    rb.extend(steps(0, 13))
    index = torch.tensor([1, 2, 4])
    generation = rb.writer.generations_of(index) - torch.tensor([0, 10, 0])
    result = rb.update_if_present(
        index=index, generation=generation, patch={("next", "reward"): -torch.ones(3, 1, dtype=torch.float64)}
    )
    assert rb.storage.supports_conditional_update and result.updated.tolist() == [True, False, True]
    rows = [rb.storage.rows[i] for i in range(10)]
    assert [float(row["next", "reward"]) < 0 for row in rows] == [False, True, False, False, True] + [False] * 5
    assert [int(row["n"]) for row in rows] == [10, 11, 12, *range(3, 10)] and "obs" in rows[1]


class SettingWriter(Writer):
    """Stores every second step by `set` of its storage."""

    at = 0

    def add(self, item):
        self._storage.set(index := self.at % self._storage.max_size, item)
        self.at += 1
        return index

    def extend(self, items):
        items = items[::2]
        index = torch.arange(self.at, self.at + len(items)) % self._storage.max_size
        self._storage.set(index, items)
        self.at += len(items)
        return index


@pytest.mark.parametrize("cls", [DictStorage, ListedStorage])
def test_what_an_own_writer_sets_in_an_own_storage_is_stored_round_the_ring(cls):
    rb = ReplayBuffer(storage=cls(10), writer=SettingWriter(), batch_size=500)
    for start in range(0, 48, 8):
        rb.extend(TensorDict({"a": torch.arange(start, start + 8)}, [8]))
    rb.add(TensorDict({"a": torch.tensor(100)}, []))
    assert len(rb) == 10 and rb.write_count == 25
    assert set(rb.sample()["a"].tolist()) == {*range(30, 48, 2), 100}


class OwnState(Emptied):
    """Says itself what a copy is made of."""

    def __getstate__(self):
        return {"rows": self.rows}

    def __setstate__(self, state):
        self.__init__(10)
        self.rows = dict(state["rows"])


class AllAttributes(Emptied):
    def __getstate__(self):
        return vars(self)


class UpdatedAttributes(Emptied):
    def __getstate__(self):
        return dict(self.__dict__)

    def __setstate__(self, state):
        self.__dict__.update(state)


def pickled(obj):
    return pickle.loads(pickle.dumps(obj))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
class TestCopies:
    @pytest.mark.pairwise
    @pytest.mark.parametrize("storage", [DictStorage, Emptied, ListedStorage])
    @pytest.mark.parametrize("n", [0, 7, 13])
    def test_a_copy_of_its_buffer_has_rows_of_its_own(self, copied, storage, n):
        rb = buffer(storage)
        if n:
            rb.extend(steps(0, n))
        twin = copied(rb)
        assert (len(twin), twin.writer._cursor, twin.write_count) == (len(rb), rb.writer._cursor, rb.write_count)
        expected = numbers(rb[:]) if n else []
        twin.extend(steps(50, 53))
        assert (numbers(rb[:]) if n else []) == expected and len(rb) == min(n, 10)
        at = n % 10
        assert numbers(twin[list(range(at, min(at + 3, 10)))]) == [50, 51, 52][: 10 - at]
        rb.extend(steps(60, 63))
        assert 60 not in numbers(twin[:])

    def test_a_copy_draws_as_the_buffer_does(self, copied):
        rb = buffer(sampler=PrioritizedSampler(10, alpha=1.0, beta=1.0))
        rb.extend(steps(0, 13))
        rb.update_priority(torch.arange(10), torch.arange(10.0))
        rb.set_rng(torch.Generator().manual_seed(3))
        twin = copied(rb)
        assert numbers(twin.sample()) == numbers(rb.sample())

    def test_trajectories_go_on_in_a_copy(self, copied):
        rb = buffer(sampler=SliceSampler(slice_len=4, end_key="done"))
        rb.extend(steps(1, 3))
        twin = copied(rb)
        twin.extend(steps(3, 5))
        assert numbers(twin.sample())[:4] == [1, 2, 3, 4]

    def test_a_storage_that_refers_to_itself_is_copied_with_that(self, copied):
        storage = Emptied(10)
        storage.me = storage
        twin = copied(storage)
        assert twin.me is twin and twin is not storage and twin.mutex is not storage.mutex

    def test_a_class_may_say_itself_what_is_copied(self, copied):
        storage = OwnState(10)
        storage.set(torch.arange(3), steps(0, 3))
        assert numbers(copied(storage)[:]) == [0, 1, 2]

    @pytest.mark.parametrize("storage", [AllAttributes, UpdatedAttributes])
    @pytest.mark.parametrize("of_buffer", [False, True])
    def test_a_class_may_say_that_all_its_attributes_are_copied(self, copied, storage, of_buffer):
        rb = buffer(storage)
        rb.extend(steps(0, 13))
        rb.storage.note = {"seen": rb.storage}
        twin = copied(rb) if of_buffer else buffer(lambda n: copied(rb.storage))
        assert twin.storage.note["seen"] is twin.storage is not rb.storage
        assert twin.storage.max_size == 10 and twin.storage.mutex is not rb.storage.mutex
        twin.extend(steps(13, 15))
        assert numbers(twin[:]) == [10, 11, 12, 13, 14, *range(5, 10)] and twin.write_count == 15
        assert numbers(rb[:]) == [10, 11, 12, *range(3, 10)]


def test_user_storage_cannot_be_sent_to_a_process():
    rb = buffer()
    rb.extend(steps(0, 3))
    for part in (rb, rb.storage):
        with pytest.raises(RuntimeError, match="Cannot share a storage of type Emptied"):
            ForkingPickler.dumps(part)
