"""What clients rely on when they write."""

import copy
import gc
import json
import multiprocessing
import pickle
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, tensorclass

from clients.packages import Package, sentence
from contracts.waiting import NEVER

NO_TREES = "the segment trees of this release do not load beside this torch"


def numbers(n: int, start: int = 0) -> TensorDict:
    return TensorDict({"a": torch.arange(start, start + n)}, [n])


@contextmanager
def raises(kind: type[Exception], words: str = ""):
    try:
        yield
    except kind as error:
        assert words in str(error), f"{words!r} is not in {str(error)!r}"
    else:
        raise AssertionError(f"no {kind.__name__} ({words})")


# ---- writers ----
@sentence("Writers stand alone: after `register_storage`, `extend` stores a batch and moves `_cursor`")
def writers_stand_alone(rl: Package) -> None:
    writer = rl.data.RoundRobinWriter()
    storage = rl.data.LazyTensorStorage(10)
    writer.register_storage(storage)
    index = writer.extend(numbers(4))
    assert index.dtype == torch.int64 and index.tolist() == [0, 1, 2, 3]
    assert writer._cursor == 4 and len(storage) == 4
    assert type(writer.add(numbers(1)[0])) is int and writer._cursor == 5


@sentence("Writers stand alone: `add` stores one step and returns an int; a list is a list of items")
def writers_add_and_take_lists(rl: Package) -> None:
    writer = rl.data.RoundRobinWriter()
    writer.register_storage(storage := rl.data.ListStorage(10))
    index = writer.extend([1, "x"])
    assert index.dtype == torch.int64 and index.tolist() == [0, 1]
    added = writer.add(3.0)
    assert type(added) is int and added == 2 and writer._cursor == 3 and storage[1] == "x"


def own_writer(rl: Package):
    class OwnWriter(rl.data.Writer):
        def __init__(self):
            super().__init__()
            self._cursor = 0

        def add(self, data):
            slot = self._cursor
            self._storage[slot] = data
            self._cursor = (slot + 1) % self._storage.max_size
            return slot

        def extend(self, data):
            slots = torch.arange(self._cursor, self._cursor + len(data)) % self._storage.max_size
            self._storage.set(slots, data)
            self._cursor = (self._cursor + len(data)) % self._storage.max_size
            return slots

        # What TorchRL's base asks for besides; here it does nothing.
        def _empty(self, empty_write_count=True):
            self._cursor = 0

        def dumps(self, path):
            raise NotImplementedError

        loads = dumps

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    return OwnWriter()


@sentence("A user's own Writer that defines only `add` and `extend` works in a buffer, round the ring too")
def own_writers_work(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(10), writer=own_writer(rl), batch_size=4)
    rb.extend(numbers(8))
    rb.add(numbers(1, 8)[0])
    rb.extend(numbers(4, 9))
    stored = rb.storage.get(torch.arange(10))["a"]
    assert len(rb) == 10 and stored.tolist() == [10, 11, 12, 3, 4, 5, 6, 7, 8, 9]
    assert set(rb.sample(50)["a"].tolist()) <= set(range(3, 13))


@sentence(
    "A user's own Writer defines nothing but `add` and `extend`: its cursor, also one that begins in the class, is "
    "saved, and begins anew in an emptied buffer",
    not_in_torchrl="six more methods are abstract there",
)
def own_writers_define_two_methods(rl: Package) -> None:
    class Two(rl.data.Writer):
        _cursor = 0

        def add(self, data):
            return int(self.extend(data.unsqueeze(0))[0])

        def extend(self, data):
            slots = torch.arange(self._cursor, self._cursor + len(data)) % self._storage.max_size
            self._storage.set(slots, data)
            self._cursor = (self._cursor + len(data)) % self._storage.max_size
            return slots

    for storage in (rl.data.ListStorage, rl.data.LazyTensorStorage, rl.data.LazyMemmapStorage):
        rb, other = (rl.data.ReplayBuffer(storage=storage(10), writer=Two(), batch_size=4) for _ in range(2))
        rb.extend(numbers(8))
        rb.add(numbers(1, 8)[0])
        rb.extend(numbers(4, 9))
        other.load_state_dict(rb.state_dict())
        assert other.extend(numbers(1)).tolist() == [3]
        rb.empty()
        assert rb.extend(numbers(2)).tolist() == [0, 1] and len(rb) == 2


@sentence("`writer.dumps(path)` and `loads(path)`, twice to one path: with its rows a writer goes on where it was")
def writers_are_saved(rl: Package) -> None:
    for order in (("storage", "writer"), ("writer", "storage")):
        rb, other = (rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(10)) for _ in range(2))
        for start, n in ((0, 8), (8, 5)):
            rb.extend(numbers(n, start))
            for part in order:
                getattr(rb, part).dumps(Path(part))
        for part in order:
            getattr(other, part).loads(Path(part))
        assert other.writer._cursor == 3 and torch.as_tensor(other.extend(numbers(1))).tolist() == [3]


@sentence("The ranks of a TensorDictMaxValueWriter come back with its `loads(path)` and its rows")
def max_value_writers_are_saved(rl: Package) -> None:
    rb, other = (
        rl.data.TensorDictReplayBuffer(
            storage=rl.data.LazyTensorStorage(3), writer=rl.data.TensorDictMaxValueWriter(rank_key="r")
        )
        for _ in range(2)
    )
    rb.extend(TensorDict({"r": torch.tensor([3.0, 1.0, 2.0, 5.0])}, [4]))
    for part in ("storage", "writer"):
        getattr(rb, part).dumps(Path(part))
        getattr(other, part).loads(Path(part))
    assert sorted(other.writer._current_top_values) == sorted(rb.writer._current_top_values)
    other.extend(TensorDict({"r": torch.tensor([4.0, 1.0])}, [2]))
    assert sorted(other[:]["r"].tolist()) == [3.0, 4.0, 5.0]


@sentence("What `dumps` of writers and samplers saves is JSON, and verified", not_in_torchrl="it verifies nothing")
def saved_parts_are_verified(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(
        storage=rl.data.LazyTensorStorage(10), sampler=rl.data.SamplerWithoutReplacement(), batch_size=5
    )
    rb.extend(numbers(8))
    rb.sample()
    for name in ("writer", "sampler"):
        part = getattr(rb, name)
        part.dumps(name)
        files = [file for file in Path(name).rglob("*") if file.suffix == ".json"]
        assert files
        for file in files:
            content = file.read_bytes()
            json.loads(content.splitlines()[0])
            for damaged in (b"", content[: len(content) // 2], content.replace(b"1", b"2")):
                file.write_bytes(damaged)
                with raises(Exception, str(file.parent)):
                    part.loads(name)
            file.write_bytes(content)
        part.loads(name)


@sentence("`sampler.dumps(path)` and `loads(path)`, twice to one path; the epoch goes on")
def samplers_are_saved(rl: Package) -> None:
    storage = rl.data.LazyTensorStorage(10)
    rb = rl.data.ReplayBuffer(storage=storage, sampler=rl.data.SamplerWithoutReplacement(), batch_size=5)
    rb.extend(numbers(10))
    first = rb.sample()["a"].tolist()
    rb.sampler.dumps("saved")
    rb.sampler.dumps("saved")
    rb.set_sampler(rl.data.SamplerWithoutReplacement()) if hasattr(rb, "set_sampler") else None
    rb.sampler.loads("saved")
    assert sorted(first + rb.sample()["a"].tolist()) == list(range(10))


@sentence("TensorDictMaxValueWriter: a RuntimeError for data without a rank, a ValueError for several dimensions")
def max_value_writers_refuse(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(
        storage=rl.data.LazyTensorStorage(3), writer=rl.data.TensorDictMaxValueWriter(rank_key="r")
    )
    for write in (rb.extend, rb.add):
        with raises(RuntimeError, "expects data to be a tensor collection"):
            write(torch.arange(3.0))
    with raises(ValueError, "not compatible with storages with more than one dimension"):
        rl.data.TensorDictReplayBuffer(
            storage=rl.data.LazyTensorStorage(3, ndim=2), writer=rl.data.TensorDictMaxValueWriter(rank_key="r")
        )


@tensorclass
class Ranked:
    """Steps of a class that has no field for an index."""

    n: torch.Tensor
    r: torch.Tensor


@sentence("TensorDictMaxValueWriter takes tensorclasses, with and without a field for the index")
def max_value_writers_take_tensorclasses(rl: Package) -> None:
    writer = rl.data.TensorDictMaxValueWriter(rank_key="r")
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(3), writer=writer)
    rb.extend(Ranked(torch.arange(4), torch.tensor([3.0, 1.0, 2.0, 5.0]), batch_size=[4]))
    assert isinstance(rb[:], Ranked) and sorted(rb[:].n.tolist()) == [0, 2, 3]


@sentence("`_current_top_values` of a TensorDictMaxValueWriter: a list of (value, slot)")
def max_value_writers_show_ranks(rl: Package) -> None:
    writer = rl.data.TensorDictMaxValueWriter(rank_key="r")
    rb = rl.data.TensorDictReplayBuffer(storage=rl.data.LazyTensorStorage(3), writer=writer)
    rb.extend(TensorDict({"r": torch.tensor([3.0, 1.0, 2.0, 5.0])}, [4]))
    top = sorted(writer._current_top_values)
    assert top == [(2.0, top[0][1]), (3.0, 0), (5.0, top[2][1])] and {slot for _, slot in top} == {0, 1, 2}


# ---- storages ----
@sentence("`storage.set` at the slots that follow appends, makes an unmade storage and counts in `len`")
def set_appends(rl: Package) -> None:
    storage = rl.data.LazyTensorStorage(10)
    storage.set(range(3), numbers(3))
    storage.set(3, numbers(1, 3)[0])
    storage.set([4, 5], numbers(2, 4))
    storage.set(torch.tensor([6]), numbers(1, 6))
    assert len(storage) == 7 and storage.get(range(7))["a"].tolist() == list(range(7))


@sentence("`storage.set` takes a slice, too, of an unwritten storage and of the slots that follow")
def setting_a_slice_appends(rl: Package) -> None:
    for storage in (rl.data.LazyTensorStorage(10), rl.data.LazyMemmapStorage(10)):
        storage.set(slice(0, 3), numbers(3))
        storage.set(slice(3, 5), numbers(2, 3))
        assert len(storage) == 5 and storage[:5]["a"].tolist() == [0, 1, 2, 3, 4]


@sentence("`storage.set` on stored slots replaces; a list storage takes any sequence")
def set_replaces(rl: Package) -> None:
    storage = rl.data.ListStorage(10)
    storage.set(range(3), ("a", "b", "c"))
    storage.set([1, 3], ["x", "y"])
    storage.set(0, "z")
    assert len(storage) == 4 and [storage[i] for i in range(4)] == ["z", "x", "c", "y"]


@sentence(
    "`storage.set` takes TensorDicts and tensorclasses in every storage: what follows is appended, the rest replaced",
    not_in_torchrl="it counts replaced rows again",
)
def set_takes_tensordicts_and_tensorclasses(rl: Package) -> None:
    def steps(kind, *n):
        number = torch.tensor(n)
        if kind is TensorDict:
            return TensorDict({"n": number, "r": number * 2.0}, [len(n)])
        return Ranked(number, number * 2.0, batch_size=[len(n)])

    for make in (rl.data.LazyTensorStorage, rl.data.LazyMemmapStorage, rl.data.ListStorage):
        for kind in (TensorDict, Ranked):
            storage = make(10)
            storage.set(range(3), steps(kind, 0, 1, 2))
            storage.set([1], steps(kind, 10))
            storage.set(torch.tensor([2, 3]), steps(kind, 20, 30))
            storage.set(4, steps(kind, 40)[0])
            storage.set(0, steps(kind, 50)[0])
            rows = [storage.get(slot) for slot in range(5)]
            assert len(storage) == 5 and isinstance(rows[0], kind)
            assert [int(row.get("n")) for row in rows] == [50, 10, 20, 30, 40]


@sentence("`storage.set` replaces rows of pytrees, too", not_in_torchrl="it counts replaced rows again")
def set_replaces_pytrees(rl: Package) -> None:
    pytrees = rl.data.LazyTensorStorage(10)
    pytrees.set(range(3), {"a": torch.arange(3), "b": (torch.zeros(3),)})
    pytrees.set([0, 2], {"a": torch.tensor([8, 9]), "b": (torch.ones(2),)})
    assert len(pytrees) == 3 and pytrees.get(range(3))["a"].tolist() == [8, 1, 9]


@sentence(
    "A gap between what is stored and what is set is an error", not_in_torchrl="it stores the rows and loses them"
)
def a_gap_is_an_error(rl: Package) -> None:
    storage = rl.data.LazyTensorStorage(10)
    storage.set(range(3), numbers(3))
    with raises(IndexError, "has not been written"):
        storage.set(range(5, 7), numbers(2))


@sentence("With ndim=2, `rb[i, j] = ...` writes what `rb[i, j]` reads")
def a_grid_is_written(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(12, ndim=2))
    rb.extend(TensorDict({"a": torch.arange(8).view(2, 4)}, [2, 4]))
    rb[1, 3] = TensorDict({"a": torch.tensor(77)}, [])
    assert int(rb[1, 3]["a"]) == 77 and rb[:]["a"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 77]]


@sentence("Keys of a pytree may be integers; rows come back under the same keys")
def keys_may_be_integers(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(10), batch_size=3)
    rb.extend({0: torch.arange(4), "x": {1: torch.arange(4) * 2}})
    rows = rb[:4]
    assert list(rows) == [0, "x"] and torch.equal(rows["x"][1], rows[0] * 2)


@sentence(
    "Integer keys of a pytree come back from mapped stores, samples and checkpoints",
    not_in_torchrl="a checkpoint of a pytree does not load into a storage that was not written",
)
def integer_keys_come_back(rl: Package) -> None:
    data = {0: torch.arange(4), "x": {1: torch.arange(4) * 2, "0": torch.arange(4)}}
    for storage in (rl.data.LazyTensorStorage, rl.data.LazyMemmapStorage):
        rb, other = (rl.data.ReplayBuffer(storage=storage(10), batch_size=3) for _ in range(2))
        rb.extend(data)
        rb.dumps(folder := tempfile.mkdtemp())
        other.loads(folder)
        for rows in (rb.sample(), other.sample(), other[:]):
            assert list(rows) == [0, "x"] and list(rows["x"]) == [1, "0"] and torch.equal(rows["x"][1], rows[0] * 2)


@sentence("`TensorStorage(TensorDict({}, [n]))` is room for n steps whose entries the first write decides")
def room_without_entries(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.TensorStorage(TensorDict({}, [10])), batch_size=4)
    rb.extend(numbers(10))
    assert len(rb) == 10 and rb.storage.max_size == 10 and rb[:]["a"].tolist() == list(range(10))


@sentence("`TensorStorage(None)` and a `max_size` that is not the data's are a ValueError")
def bad_tensor_storages(rl: Package) -> None:
    with raises(ValueError, "non-null"):
        rl.data.TensorStorage(None)
    with raises(ValueError, "max_size=5"):
        rl.data.TensorStorage(torch.arange(4), max_size=5)


@sentence("A list that does not stack is a RuntimeError")
def lists_that_do_not_stack(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(10))
    for items in ([torch.zeros(3), torch.zeros(4)], [numbers(1)[0], TensorDict({"b": torch.tensor(1)}, [])]):
        with raises(RuntimeError):
            rb.extend(items)
    assert len(rb) == 0


@sentence("The RuntimeError of a list that does not stack names the item", not_in_torchrl="its message names none")
def lists_that_do_not_stack_name_the_item(rl: Package) -> None:
    with raises(RuntimeError, "item 1"):
        rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(10)).extend([torch.zeros(3), torch.zeros(4)])


# ---- priorities ----
@sentence(
    "`extend(data, update_priority=False)` leaves the priorities that come with data alone", not_in_torchrl=NO_TREES
)
def priorities_with_data_are_optional(rl: Package) -> None:
    sampler = rl.data.PrioritizedSampler(10, 1.0, 1.0, eps=0.0)
    rb = rl.data.TensorDictReplayBuffer(
        storage=rl.data.LazyTensorStorage(10), sampler=sampler, priority_key="p", batch_size=200
    )
    data = TensorDict({"a": torch.arange(4), "p": torch.tensor([0.0, 0.0, 0.0, 9.0])}, [4])
    rb.extend(data, update_priority=False)
    assert set(rb.sample()["a"].tolist()) == {0, 1, 2, 3}
    rb.empty()
    rb.extend(data)
    assert set(rb.sample()["a"].tolist()) == {3}


@sentence(
    "With ndim=2, `update_priority(index [n, 2], priority)` takes priorities [n] and [envs, time]",
    not_in_torchrl=NO_TREES,
)
def priorities_of_environments(rl: Package) -> None:
    sampler = rl.data.PrioritizedSampler(12, 1.0, 1.0, eps=0.0)
    rb = rl.data.TensorDictReplayBuffer(storage=rl.data.LazyTensorStorage(12, ndim=2), sampler=sampler, batch_size=100)
    index = rb.extend(TensorDict({"a": torch.arange(8).view(2, 4)}, [2, 4]))
    priorities = torch.zeros(2, 4)
    priorities[1, 2] = 1.0
    rb.update_priority(index, priorities)
    assert set(rb.sample()["a"].tolist()) == {6}
    one = torch.zeros(len(index))
    one[(index == torch.tensor([3, 0])).all(-1)] = 1.0
    rb.update_priority(index, one)
    assert set(rb.sample()["a"].tolist()) == {3}


# ---- whole trajectories ----
@sentence("Whole trajectories as items: `extend` of [3, 4] stores 3 items, a sample of 2 is a valid TensorDict [2, 4]")
def trajectories_are_items(rl: Package) -> None:
    for storage in (rl.data.ListStorage(10), rl.data.LazyTensorStorage(10)):
        rb = rl.data.TensorDictReplayBuffer(storage=storage, batch_size=2)
        n = torch.arange(12).view(3, 4)
        with quietly():
            index = rb.extend(TensorDict({"a": n, "next": TensorDict({"b": n + 1}, [3, 4])}, [3, 4]))
        batch = rb.sample()
        assert index.tolist() == [0, 1, 2] and len(rb) == 3
        assert batch.batch_size == (2, 4) and batch["next"].batch_size == (2, 4)
        assert batch["index"].shape == (2, 4) and torch.equal(batch["index"], batch["a"] // 4)
        batch.clone().reshape(-1)


@sentence("Whole trajectories as items: `priority_weight` is expanded to the batch's shape", not_in_torchrl=NO_TREES)
def trajectories_have_weights(rl: Package) -> None:
    for storage in (rl.data.ListStorage(10), rl.data.LazyTensorStorage(10)):
        sampler = rl.data.PrioritizedSampler(10, 0.7, 0.9)
        rb = rl.data.TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=2)
        with quietly():
            rb.extend(TensorDict({"a": torch.arange(12).view(3, 4)}, [3, 4]))
        batch = rb.sample()
        assert batch["priority_weight"].shape == (2, 4)
        rb.update_tensordict_priority(batch.set("td_error", torch.rand(2, 4)))


@contextmanager
def quietly():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@sentence(
    "The first [envs, time] batch in a buffer of ndim=1 warns of `ndim=2`", not_in_torchrl="a newer ability of ours"
)
def environments_in_one_dimension_warn(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(12), batch_size=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rb.extend(TensorDict({"a": torch.arange(8).view(2, 4)}, [2, 4]))
    assert len(rb) == 2 and any("ndim=2" in str(warning.message) for warning in caught)


@sentence("The default storage is a ListStorage, whose batches are TensorDicts")
def the_default_storage(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(batch_size=3)
    rb.extend(numbers(4))
    batch = rb.sample()
    assert isinstance(rb.storage, rl.data.ListStorage) and rb.storage.max_size == 1000
    assert isinstance(batch, TensorDictBase) and batch.batch_size == (3,)


# ---- arguments that everybody passes ----
@sentence("`compilable=` on storages, writers and buffers")
def compilable_is_accepted(rl: Package) -> None:
    data = rl.data
    for storage in (data.LazyTensorStorage, data.ListStorage, data.LazyMemmapStorage):
        for buffer in (data.ReplayBuffer, data.TensorDictReplayBuffer):
            writer = data.TensorDictRoundRobinWriter(compilable=True)
            rb = buffer(storage=storage(10, compilable=True), writer=writer, batch_size=2, compilable=True)
            rb.extend(numbers(4))
            assert rb.sample().batch_size == (2,)


@sentence(
    "`extend` of a TensorDict into the default storage makes one copy of the batch, not one object a row",
    not_in_torchrl="each row becomes an object",
)
def the_default_storage_copies_a_batch(rl: Package) -> None:
    rb = rl.data.ReplayBuffer()
    batch = numbers(500)
    gc.collect()
    before = sum(isinstance(thing, TensorDictBase) for thing in gc.get_objects())
    rb.extend(batch)
    after = sum(isinstance(thing, TensorDictBase) for thing in gc.get_objects())
    batch["a"] += 1000
    assert after - before < 10 and [int(rb[slot]["a"]) for slot in (0, 499)] == [0, 499]


@sentence("`compilable=` on samplers", not_in_torchrl="its samplers do not take it")
def compilable_is_accepted_by_samplers(rl: Package) -> None:
    rl.data.RandomSampler(compilable=True)
    rl.data.SamplerWithoutReplacement(compilable=True)
    rl.data.SliceSampler(slice_len=2, compilable=True)


@sentence("Under `torch.compile` a buffer is a graph break at `extend` and `sample`, no error")
def compiled_functions_use_buffers(rl: Package) -> None:
    storage = rl.data.LazyTensorStorage(10, compilable=True)
    rb = rl.data.ReplayBuffer(storage=storage, batch_size=3, compilable=True)

    @torch.compile(backend="eager")
    def step(x):
        rb.extend(TensorDict({"a": x + 1}, [4]))
        return rb.sample()["a"] * 2

    assert set(step(torch.arange(4.0)).tolist()) <= {2.0, 4.0, 6.0, 8.0} and len(rb) == 4


@sentence("`LazyMemmapStorage(device='cpu' | 'auto')`; another device is a ValueError")
def mapped_storages_take_a_device(rl: Package) -> None:
    for device in ("cpu", "auto"):
        assert rl.data.LazyMemmapStorage(10, device=device).device == torch.device("cpu")
    with raises(ValueError, "Memory map device other than CPU"):
        rl.data.LazyMemmapStorage(10, device="cuda:0")


@sentence("`storage.shape`, `flatten()`, `index in storage`, `attach`")
def storages_know_their_steps(rl: Package) -> None:
    storage = rl.data.LazyTensorStorage(12, ndim=2)
    rb = rl.data.ReplayBuffer(storage=storage)
    rb.extend(TensorDict({"a": torch.arange(8).view(2, 4)}, [2, 4]))
    assert storage.shape == torch.Size([4, 2]) and len(storage.flatten()) == 8
    assert storage.flatten()[:]["a"].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    items = rl.data.ListStorage(10)
    items.attach(rl.data.ReplayBuffer(storage=items))
    items.set(range(2), ["a", "b"])
    assert 1 in items and 7 not in items and len(items.flatten()) == 2


@sentence("`rb.share()` returns the buffer, whose mapped rows parent and child then both write")
def buffers_are_shared(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyMemmapStorage(10))
    assert rb.share() is rb
    rb.extend(numbers(3))

    def write() -> None:
        torch.set_num_threads(1)
        with quietly():
            rb.extend(numbers(2, 3))

    child = multiprocessing.get_context("fork").Process(target=write)
    child.start()
    child.join(NEVER)
    assert child.exitcode == 0 and len(rb) == 5 and rb[:]["a"].tolist() == [0, 1, 2, 3, 4]


# ---- users' parts ----
@sentence("A user's Storage with `get`, `set` and `__len__`")
def own_storages_work(rl: Package) -> None:
    class Own(rl.data.Storage):
        def __init__(self, max_size):
            super().__init__(max_size)
            self.rows = {}

        def get(self, index):
            if isinstance(index, int):
                return self.rows[index]
            return torch.stack([self.rows[int(i)] for i in torch.arange(len(self))[index]])

        def set(self, index, data):
            if isinstance(index, int):
                self.rows[index] = data
            else:
                self.rows.update(zip(index.tolist(), data, strict=True))

        def __len__(self):
            return len(self.rows)

        # What TorchRL's base asks for besides.
        def _empty(self):
            self.rows.clear()

        def contains(self, item):
            return item in self.rows

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    rb = rl.data.ReplayBuffer(storage=Own(10), batch_size=3, collate_fn=lambda batch: batch)
    assert rb.extend(numbers(4)).tolist() == [0, 1, 2, 3]
    assert rb.add(numbers(1, 4)[0]) == 4 and len(rb) == 5
    assert set(rb.sample(50)["a"].tolist()) == {0, 1, 2, 3, 4} and int(rb[3]["a"]) == 3


class DictOfSteps:
    """Keeps each step under its index."""

    def __init__(self, max_size):
        super().__init__(max_size)
        self.rows = {}

    def get(self, index):
        if isinstance(index, int):
            return self.rows[index]
        return torch.stack([self.rows[int(i)] for i in torch.arange(len(self))[index]])

    def set(self, index, data, **options):
        at = [index] if isinstance(index, int) else torch.as_tensor(index).tolist()
        self.rows.update(zip(at, [data] if isinstance(index, int) else data.unbind(0), strict=True))

    def __len__(self):
        return len(self.rows)

    def _empty(self):
        self.rows.clear()

    def contains(self, item):
        return item in self.rows

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@sentence("`copy.deepcopy` and `pickle` of a buffer over a user's Storage copy its rows")
def own_storages_are_copied(rl: Package) -> None:
    kind = type("DictStorage", (DictOfSteps, rl.data.Storage), {"__module__": __name__})
    globals()["DictStorage"] = kind  # where pickle looks for it
    rb = rl.data.ReplayBuffer(storage=kind(10), batch_size=3, collate_fn=torch.nn.Identity())
    rb.extend(numbers(4))
    for twin in (copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))):
        twin.extend(numbers(2, 4))
        assert len(twin) == 6 and len(rb) == 4 and [int(twin[i]["a"]) for i in range(6)] == [0, 1, 2, 3, 4, 5]


@sentence("A user's Sampler with `sample(storage, n) -> (index, info)`")
def own_samplers_work(rl: Package) -> None:
    class First(rl.module("data.replay_buffers.samplers").Sampler):
        emptied = 0

        def sample(self, storage, batch_size):
            return torch.arange(batch_size), {"mine": True}

        def _empty(self):
            self.emptied += 1

        def dumps(self, path):
            raise NotImplementedError

        loads = dumps

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    rb = rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(10), sampler=First(), batch_size=3)
    rb.extend(numbers(4))
    batch, info = rb.sample(return_info=True)
    assert batch["a"].tolist() == [0, 1, 2] and info["mine"]
    rb.empty()
    assert rb.sampler.emptied == 1


@sentence("A user's Transform with `_inv_call` changes what is stored")
def own_transforms_work(rl: Package) -> None:
    class Doubled(rl.module("envs.transforms").Transform):
        def _inv_call(self, tensordict):
            return tensordict.set("b", tensordict["a"] * 2)

        def forward(self, tensordict):
            return tensordict.set("c", tensordict["b"] + 1)

    rb = rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(10), transform=Doubled(), batch_size=3)
    rb.extend(numbers(4))
    assert rb.storage.get(range(4))["b"].tolist() == [0, 2, 4, 6]
    batch = rb.sample()
    assert torch.equal(batch["c"], batch["a"] * 2 + 1)


# ---- further names ----
@sentence("`LazyStackStorage`: items of any shapes, batches that are lazy stacks")
def lazy_stacks(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyStackStorage(10), batch_size=4)
    rb.extend([TensorDict({"a": torch.zeros(n)}, []) for n in (1, 2, 3)])
    batch = rb.sample()
    assert isinstance(batch, LazyStackedTensorDict) and batch.batch_size == (4,)
    turned = rl.data.ReplayBuffer(storage=rl.data.LazyStackStorage(10, stack_dim=-1), batch_size=3)
    with quietly():
        turned.extend(TensorDict({"a": torch.zeros(4, 2)}, [4, 2]))
    assert turned.sample().batch_size == (2, 3)


@sentence("`CompressedListStorage` holds fewer bytes than its items have, and gives them back")
def compressed_items(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.CompressedListStorage(10, compression_level=3), batch_size=2)
    pixels = torch.arange(4, dtype=torch.uint8).view(4, 1, 1).expand(4, 64, 64).contiguous()
    rb.extend(TensorDict({"pixels": pixels}, [4]))
    batch = rb.sample()
    assert batch["pixels"].shape == (2, 64, 64) and torch.equal(rb[2]["pixels"], pixels[2])


@sentence("`rb.set_`, `rb.set_at_` and `rb.update_` change entries of stored steps in place")
def entries_are_set(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.LazyTensorStorage(10))
    rb.extend(TensorDict({"a": torch.arange(4), "b": torch.zeros(4)}, [4]))
    assert rb.set_("a", torch.arange(4) + 10) is rb and rb[:]["a"].tolist() == [10, 11, 12, 13]
    assert rb.set_at_("a", torch.tensor([7, 8]), torch.tensor([0, 3])) is rb and rb[:]["a"].tolist() == [7, 11, 12, 8]
    assert rb.update_({"a": torch.arange(4), "b": torch.ones(4)}) is rb
    assert rb[:]["a"].tolist() == [0, 1, 2, 3] and rb[:]["b"].tolist() == [1.0] * 4
    with raises(KeyError):
        rb.set_("c", torch.arange(4))


@sentence("`rb.read_all_in_order(end=...)`: stored steps in the order of slots, as one batch")
def all_steps_are_read(rl: Package) -> None:
    rb = rl.data.ReplayBuffer(storage=rl.data.ListStorage(6))
    rb.extend(numbers(9))
    assert rb.read_all_in_order()["a"].tolist() == [6, 7, 8, 3, 4, 5]
    assert rb.read_all_in_order(end=2)["a"].tolist() == [6, 7]
