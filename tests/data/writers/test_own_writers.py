"""Writers of a user's own with only `add` and `extend`, and those that change what a parent's do; writers alone."""

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    Writer,
)
from engram.errors import CheckpointMisfitError
from engram.testing import RoundRobinWriterContract, numbers, steps


class AddsAndExtends(Writer):
    """Goes round the ring by a cursor of its own, in TorchRL's form."""

    def add(self, data):
        slot = self._cursor
        self._storage[slot] = data
        self._cursor = (slot + 1) % self._storage.max_size
        return slot

    def extend(self, data):
        n = len(data)
        slots = torch.arange(self._cursor, self._cursor + n) % self._storage.max_size
        self._storage.set(slots, data)
        self._cursor = (self._cursor + n) % self._storage.max_size
        return slots


class AddsAndExtendsAlone:
    """The same, and inherits from nothing."""

    def __init__(self):
        self._cursor = 0

    def register_storage(self, storage):
        self._storage = storage

    def state_dict(self):
        return {"cursor": self._cursor}

    def load_state_dict(self, state):
        self._cursor = state["cursor"]

    def empty(self):
        self._cursor = 0

    add = AddsAndExtends.add
    extend = AddsAndExtends.extend


class BeginsInTheClass(AddsAndExtends):
    """Says in its class where its cursor begins."""

    _cursor = 0


class ForgetsInTorchRLsForm:
    """Inherits from nothing, and what forgets everything is called `_empty`."""

    def __init__(self):
        self._empty()

    def _empty(self):
        self._cursor = 0

    register_storage = AddsAndExtendsAlone.register_storage
    add = AddsAndExtends.add
    extend = AddsAndExtends.extend


class Reservoir(Writer):
    """Puts each step in a slot of its own choice, once the storage is full."""

    def add(self, data):
        n = len(self._storage)
        slot = n if n < self._storage.max_size else (7 * int(data["n"])) % n
        self._storage.set(slot, data)
        return slot

    def extend(self, data):
        return torch.tensor([self.add(step) for step in data])


class Counting(RoundRobinWriter):
    """Counts batches, and lets its parent write them."""

    batches = 0

    def extend(self, data):
        self.batches += 1
        return super().extend(data)


class TestAddsAndExtends(RoundRobinWriterContract):
    def make(self):
        return AddsAndExtends()


class TestCounting(RoundRobinWriterContract):
    def make(self):
        return Counting()


STORAGES = [
    ListStorage,
    LazyTensorStorage,
    LazyMemmapStorage,
    lambda n: LazyTensorStorage(n, shared=True),
]


@each("storage", STORAGES)
@each("writer", [AddsAndExtends, AddsAndExtendsAlone, BeginsInTheClass, ForgetsInTorchRLsForm])
def test_user_writer_needs_only_add_and_extend(writer, storage):
    rb = ReplayBuffer(storage=storage(10), writer=writer(), batch_size=4)
    assert rb.extend(steps(0, 8)).tolist() == list(range(8)) and rb.add(steps(8, 9)[0]) == 8
    assert rb.extend(steps(9, 13)).tolist() == [9, 0, 1, 2]
    assert numbers(rb[:]) == [10, 11, 12, 3, 4, 5, 6, 7, 8, 9]
    assert (len(rb), rb.write_count, rb.writer._cursor) == (10, 13, 3)
    rb.empty()
    assert rb.extend(steps(0, 2)).tolist() == [0, 1] and numbers(rb[:]) == [0, 1]


@pytest.mark.parametrize("storage", STORAGES)
def test_what_such_a_writer_puts_in_the_place_of_a_row_is_another_row(storage):
    rb = TensorDictReplayBuffer(
        storage=storage(4), writer=Reservoir(), sampler=PrioritizedSampler(4, 1.0, 1.0, 0.0), batch_size=4
    )
    rb.extend(steps(0, 4))
    before = rb.storage.lanes.generations(torch.arange(4))
    rb.update_priority(torch.arange(4), torch.tensor([0.0, 5.0, 0.0, 0.0]))
    slot = rb.add(steps(7, 8)[0])
    assert slot == 1 and numbers(rb[1]) == 7
    rb.update_priority(torch.arange(4), torch.full((4,), 9.0), before)
    priorities = rb.sampler.priorities(torch.arange(4), storage=rb.storage)
    assert priorities.tolist() == [9.0, 5.0, 9.0, 9.0] and rb.sampler.skipped == 1


def test_with_several_environments_such_a_writer_writes_time_steps():
    rb = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2), writer=AddsAndExtends())
    index = rb.extend(TensorDict({"n": torch.arange(4).view(2, 2)}, [2, 2]))
    assert index.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]] and rb[:]["n"].tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("writer", [AddsAndExtends, BeginsInTheClass])
def test_the_cursor_of_such_a_writer_is_saved_with_its_buffer(writer, tmp_path):
    rb, twin = (ReplayBuffer(storage=LazyTensorStorage(10), writer=writer()) for _ in range(2))
    rb.extend(steps(0, 13))
    rb.dumps(tmp_path)
    twin.loads(tmp_path)
    assert twin.writer._cursor == 3
    assert twin.extend(steps(13, 15)).tolist() == rb.extend(steps(13, 15)).tolist() == [3, 4]


def test_an_extend_around_the_parents_is_called_by_the_buffer():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), writer=Counting())
    rb.extend(steps(0, 3))
    rb.writer.extend(steps(3, 5))
    rb.add(steps(5, 6)[0])
    assert rb.writer.batches == 2 and numbers(rb[:]) == [0, 1, 2, 3, 4, 5]
    wide = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2), writer=Counting())
    assert wide.extend(torch.arange(4).view(2, 2)).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_nothing_is_put_into_the_class_of_a_user():
    members = {
        "add": lambda self, data: 0, "extend": lambda self, data: [0], "_empty": lambda self: None, "_cursor": 0,
        "__module__": __name__,
    }  # fmt: skip
    for base in (Writer, RoundRobinWriter, TensorDictMaxValueWriter):
        assert vars(type("Mine", (base,), dict(members))).keys() - {"__doc__", "__orig_bases__"} == members.keys()


def test_a_cursor_that_begins_in_the_class_goes_on_from_a_pickle_of_before():
    writer = BeginsInTheClass.__new__(BeginsInTheClass)
    writer.__setstate__({"_own_cursor": 3})
    assert writer._cursor == 3


def test_write_of_a_built_in_child_is_called_for_every_batch():
    class EverySecond(RoundRobinWriter, built_in=True):
        def write(self, storage, items, single, time_dim):
            return super().write(storage, items if single else items[::2], single, time_dim)

    rb = ReplayBuffer(storage=LazyTensorStorage(10), writer=EverySecond())
    for start in (0, 4):
        rb.extend(steps(start, start + 4))
    assert numbers(rb[:]) == [0, 2, 4, 6]


def test_a_class_with_neither_write_nor_add_and_extend_is_no_writer():
    class Nothing(Writer):
        def add(self, data):
            return 0

    with pytest.raises(TypeError, match="abstract"):
        Nothing()
    with pytest.raises(TypeError, match="add\\(item\\) and extend"):
        ReplayBuffer(storage=LazyTensorStorage(10)).set_writer(object())


def test_a_writer_without_a_storage_says_what_it_needs():
    for write in (RoundRobinWriter().add, RoundRobinWriter().extend):
        with pytest.raises(RuntimeError, match="register_storage"):
            write(torch.zeros(3))


def test_the_cursor_of_our_own_writers_is_not_for_setting():
    with pytest.raises(AttributeError, match="counters"):
        RoundRobinWriter()._cursor = 3


def test_a_list_is_a_list_of_items():
    writer = RoundRobinWriter()
    writer.register_storage(LazyTensorStorage(10))
    assert writer.extend([torch.tensor(i) for i in range(3)]).tolist() == [0, 1, 2]
    writer.register_storage(ListStorage(10))
    assert writer.extend([1, "x", None]).tolist() == [0, 1, 2]


def test_the_state_of_another_writer_or_sampler_is_refused(tmp_path):
    TensorDictMaxValueWriter(rank_key="r").dumps(tmp_path / "writer")
    with pytest.raises(CheckpointMisfitError, match="a RoundRobinWriter here, a TensorDictMaxValueWriter there"):
        RoundRobinWriter().loads(tmp_path / "writer")
    with pytest.raises(CheckpointMisfitError, match="rank_key"):
        TensorDictMaxValueWriter(rank_key="other").loads(tmp_path / "writer")
    RandomSampler().dumps(tmp_path / "sampler")
    with pytest.raises(CheckpointMisfitError, match="RandomSampler there"):
        SliceSampler(slice_len=2, traj_key="episode").loads(tmp_path / "sampler")


def test_the_state_of_a_writer_that_inherits_from_nothing_is_loaded_with_the_buffer():
    rb, twin = (ReplayBuffer(storage=LazyTensorStorage(10), writer=AddsAndExtendsAlone()) for _ in range(2))
    rb.extend(steps(0, 4))
    twin.load_state_dict(rb.state_dict())
    assert twin.extend(steps(4, 6)).tolist() == [4, 5] and numbers(twin[:]) == list(range(6))


class CountsWrites(AddsAndExtends):
    """Says itself what its state is."""

    writes = 0

    def extend(self, data):
        self.writes += 1
        return super().extend(data)

    def state_dict(self):
        return {**super().state_dict(), "writes": self.writes}

    def load_state_dict(self, state):
        self.writes = state["writes"]
        super().load_state_dict({name: value for name, value in state.items() if name != "writes"})


def test_a_writer_that_says_what_its_state_is_is_saved_with_all_of_it(tmp_path):
    rb, twin = (ReplayBuffer(storage=LazyTensorStorage(10), writer=CountsWrites()) for _ in range(2))
    for first in (0, 4):
        rb.extend(steps(first, first + 4))
    rb.dumps(tmp_path)
    twin.loads(tmp_path)
    assert twin.writer.writes == 2 and twin.extend(steps(8, 10)).tolist() == [8, 9]
