"""ReplayBuffer: forms of data, transforms, generators, iteration, parts, and what it refuses."""

import copy
import inspect
import threading
import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, tensorclass

from contracts.each import each
from contracts.waiting import is_taken
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
    WriterEnsemble,
)
from engram.testing import numbers, state_of, steps
from engram.transforms import Compose, ExcludeTransform, Transform

STORAGES = [ListStorage, LazyTensorStorage, LazyMemmapStorage]
TABLES = [LazyTensorStorage, LazyMemmapStorage]


def add_one_in_place(data):
    """SPEC's example."""
    return data.add_(1) if isinstance(data, torch.Tensor) else data.apply_(lambda x: x.add_(1))


@tensorclass
class Moment:
    n: torch.Tensor
    obs: torch.Tensor


FORMS = {
    "tensor": lambda n: n.double().unsqueeze(-1) * torch.ones(3),
    "tensor of numbers": lambda n: n,
    "dict": lambda n: {"a": n, "b": n.float().unsqueeze(-1)},
    "nested dict": lambda n: {"a": {"b": {"c": n}, "d": n.float()}, "e": n > 3},
    "tuple": lambda n: (n, n.float().unsqueeze(-1)),
    "tuple of dicts and lists": lambda n: ({"a": n}, [n + 1, (n + 2,)]),
    "TensorDict": lambda n: TensorDict({"a": n, "b": {"c": n.float()}}, n.shape),
    "nested batch sizes": lambda n: TensorDict(
        {"a": n, "b": TensorDict({"c": torch.stack([n, n + 1], -1)}, (*n.shape, 2))}, n.shape
    ),
    "tensorclass": lambda n: Moment(n=n, obs=torch.stack([n, n], -1), batch_size=n.shape),
    "TensorDict of a tensorclass": lambda n: TensorDict({"m": Moment(n=n, obs=n * 2, batch_size=n.shape)}, n.shape),
    "dict of TensorDicts": lambda n: {"td": TensorDict({"a": n}, n.shape), "x": n.float()},
    "empty leaf": lambda n: {"a": n, "none": torch.zeros(*n.shape, 0)},
}


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert type(found) is torch.Tensor and found.dtype == expected.dtype and found.shape == expected.shape
        assert torch.equal(found, expected)
    elif isinstance(expected, dict | TensorDict):
        assert type(found) is type(expected) and list(found.keys()) == list(expected.keys())
        assert getattr(found, "batch_size", None) == getattr(expected, "batch_size", None)
        for key in expected.keys():
            assert_same(found[key], expected[key])
    elif isinstance(expected, tuple | list):
        assert type(found) is type(expected) and len(found) == len(expected)
        for f, e in zip(found, expected, strict=True):
            assert_same(f, e)
    elif isinstance(expected, Moment):
        assert type(found) is Moment and found.batch_size == expected.batch_size
        assert_same(found.n, expected.n)
        assert_same(found.obs, expected.obs)
    else:
        assert type(found) is type(expected) and found == expected


# ---- forms ----
@each("storage", TABLES)
@each("form", FORMS)
@each("buffer", [ReplayBuffer, TensorDictReplayBuffer])
def test_data_come_back_in_the_form_they_went_in(storage, form, buffer):
    make = FORMS[form]
    rb = buffer(storage=storage(10), writer=RoundRobinWriter())
    rb.extend(make(torch.arange(6)))
    assert rb.add(make(torch.tensor(6))) == 6
    assert_same(rb[:], make(torch.arange(7)))
    assert_same(rb[2], make(torch.tensor(2)))
    assert_same(rb[[3, 1]], make(torch.tensor([3, 1])))
    assert_same(rb[[]], make(torch.arange(0)))
    assert_same(rb.storage[1:4], make(torch.arange(1, 4)))
    rb[1] = make(torch.tensor(50))
    rb[2:4] = make(torch.tensor([51, 52]))
    assert_same(rb[:], make(torch.tensor([0, 50, 51, 52, 4, 5, 6])))
    if buffer is ReplayBuffer:
        batch, info = rb.sample(5, return_info=True)
        assert_same(batch, make(torch.tensor([0, 50, 51, 52, 4, 5, 6])[info["index"]]))
    elif form in ("dict", "TensorDict", "nested dict", "nested batch sizes"):
        assert rb.sample(5)["index"].shape == (5,)


@each("form", FORMS)
@each("storage", STORAGES)
def test_a_list_of_items_is_the_batch_of_them(form, storage):
    make = FORMS[form]
    one, other = (ReplayBuffer(storage=storage(10), generator=torch.Generator()) for _ in range(2))
    one.extend([make(torch.tensor(n)) for n in range(6)])
    for n in range(6):
        other.add(make(torch.tensor(n)))
    for index in (0, 3, -1):
        assert_same(one[index], make(torch.tensor(index % 6)))
        assert_same(other[index], make(torch.tensor(index % 6)))
    batch, info = one.sample(5, return_info=True)
    assert_same(batch, other.sample(5))
    if storage is not ListStorage or "Dict" not in form:
        assert_same(batch, make(info["index"]))


@each("form", FORMS)
def test_list_storages_split_a_batch_into_items(form):
    make = FORMS[form]
    if form in ("tuple of dicts and lists", "dict of TensorDicts"):
        make = {"tuple of dicts and lists": lambda n: ({"a": n}, (n + 1,)), "dict of TensorDicts": FORMS["dict"]}[form]
    rb = ReplayBuffer(storage=ListStorage(10))
    rb.extend(make(torch.arange(6)))
    assert_same(rb[3], make(torch.tensor(3)))


@pytest.mark.parametrize("storage", TABLES, ids=lambda c: c.__name__)
def test_constants_that_are_no_tensors_live_in_the_layout(storage, tmp_path):
    def data(n, text="hi"):
        return TensorDict({"x": torch.arange(n), "env": NonTensorData(text, batch_size=[n])}, [n])

    rb = ReplayBuffer(storage=storage(10), batch_size=3)
    rb.extend(data(4))
    rb.add(data(1)[0])
    assert rb[:]["env"] == "hi" and rb[0]["env"] == "hi" and rb.sample()["env"] == "hi"
    rb.extend(torch.stack([data(1)[0], data(1)[0]]))
    with pytest.raises(ValueError, match=r"'env' is the constant 'hi'.*'ho'"):
        rb.extend(data(2, "ho"))
    with pytest.raises(ValueError, match="'env' is missing"):
        rb.extend(data(2).exclude("env"))
    rb.dumps(tmp_path)
    twin = ReplayBuffer(storage=storage(10), batch_size=3)
    twin.loads(tmp_path)
    assert twin[:]["env"] == "hi" and len(twin) == 7


@pytest.mark.parametrize("storage", TABLES, ids=lambda c: c.__name__)
def test_values_that_are_neither_tensors_nor_constants_name_the_leaf_and_the_list_storage(storage):
    varying = TensorDict({"x": torch.arange(2), "env": NonTensorStack("a", "b")}, [2])
    thing = TensorDict({"x": torch.arange(2), "env": NonTensorData(object(), batch_size=[2])}, [2])
    for data in (varying, thing, {"x": torch.arange(2), "env": "text"}, {"x": torch.arange(2), "env": None}):
        storage_ = storage(10)
        with pytest.raises(TypeError, match=r"'env'.*ListStorage"):
            ReplayBuffer(storage=storage_).extend(data)
        assert not storage_.initialized


def test_list_storages_keep_values_that_vary():
    rb = ReplayBuffer(storage=ListStorage(10), collate_fn=lambda items: items)
    rb.extend(TensorDict({"x": torch.arange(2), "env": NonTensorStack("a", "b")}, [2]))
    assert [item["env"] for item in rb[:]] == ["a", "b"]


def test_keys_that_are_no_strings_or_integers_are_refused():
    with pytest.raises(TypeError, match=r"1\.5"):
        ReplayBuffer(storage=LazyTensorStorage(10)).extend({1.5: torch.zeros(3)})


def test_numbers_become_tensors():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.add({"a": 1.5, "b": 2, "c": True, "d": np.float64(3)})
    rb.add({"a": 2, "b": np.int64(3), "c": False, "d": np.float64(4)})
    dtypes = {k: v.dtype for k, v in rb[0].items()}
    assert dtypes == {"a": torch.float32, "b": torch.int64, "c": torch.bool, "d": torch.float64}
    assert {k: v.tolist() for k, v in rb[:].items()} == {"a": [1.5, 2], "b": [2, 3], "c": [True, False], "d": [3, 4]}


def test_tensors_read_one_after_the_other_share_no_memory():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    rb.extend(steps(0, 10))
    batches = [rb.sample() for _ in range(20)]
    seen = [numbers(b) for b in batches]
    for b in batches[::2]:
        b.apply_(lambda x: x.zero_())
    assert [numbers(b) for b in batches[1::2]] == seen[1::2]


# ---- transforms ----
@pytest.mark.parametrize("storage", TABLES, ids=lambda c: c.__name__)
def test_a_transform_on_writing_gets_the_callers_own_object(storage):
    rb = ReplayBuffer(storage=storage(10), batch_size=4)
    assert rb.append_transform(add_one_in_place, invert=True) is rb
    data = torch.zeros(5, 2)
    rb.extend(data)
    assert (data == 1).all() and (rb[:] == 1).all() and (rb.sample() == 1).all()
    item = torch.zeros(2)
    rb.add(item)
    assert (item == 1).all() and (rb[5] == 1).all()
    items = [torch.zeros(2), torch.zeros(2)]
    other = ReplayBuffer(storage=storage(10))
    other.append_transform(lambda data: [add_one_in_place(x) for x in data], invert=True)
    other.extend(items)
    assert all((x == 1).all() for x in items) and (other[:] == 1).all()


@each("storage", STORAGES)
@each("prefetch", [0, 2])
def test_a_transform_on_reading_changes_nothing_that_is_stored(storage, prefetch):
    rb = ReplayBuffer(storage=storage(10), batch_size=4, transform=add_one_in_place, prefetch=prefetch)
    rb.extend(torch.zeros(5, 2))
    for _ in range(5):
        assert (rb.sample() == 1).all()
    assert storage is ListStorage or ((rb[:] == 1).all() and (rb[2] == 1).all() and (rb[[1]] == 1).all())
    assert all((x == 0).all() for x in rb.storage[0:5])
    assert [int(x.sum()) for x in rb.storage.get([0, 4])] == [0, 0]


def test_replacing_goes_through_the_transforms_too():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.append_transform(lambda x: x * 2, invert=True)
    rb.extend(torch.ones(3))
    rb[1] = torch.tensor(5.0)
    assert rb[:].tolist() == [2, 10, 2]


class Shift(Transform):
    def forward(self, batch):
        return batch + 10

    def inv(self, batch):
        return batch - 10


def test_transforms_run_in_order_on_reading_and_backwards_on_writing():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=Compose(Shift(), lambda x: x * 2))
    rb.extend(torch.tensor([10.0, 20.0]))
    assert rb.storage[0:2].tolist() == [0, 10] and rb[:].tolist() == [20, 40]
    rb.insert_transform(0, lambda x: x + 1)
    assert rb[:].tolist() == [22, 42]
    rb.append_transform(Shift(), invert=True)
    assert rb[:].tolist() == [12, 32]
    with pytest.raises(ValueError, match="4"):
        rb.insert_transform(9, Shift())
    with pytest.raises(TypeError, match="int"):
        rb.append_transform(3)
    with pytest.raises(TypeError, match="int"):
        ReplayBuffer(transform=3)
    assert len(rb._transform) == 4 and rb._transform[1].__class__ is Shift


class Noted(Transform):
    """Notes in which order it is called, and with which object."""

    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def forward(self, batch):
        self.notes.append((f"forward {self.name}", batch))
        return batch

    def inv(self, batch):
        self.notes.append((f"inv {self.name}", batch))
        return batch


@each("storage", STORAGES)
def test_each_way_in_and_out_goes_through_all_transforms_in_its_order(storage):
    notes = []
    rb = ReplayBuffer(storage=storage(10), transform=Compose(Noted("a", notes), Noted("b", notes)), batch_size=2)

    def noted(call):
        notes.clear()
        call()
        return [name for name, _ in notes], notes[0][1]

    data = steps(0, 4)
    written, read = ["inv b", "inv a"], ["forward a", "forward b"]
    names, given = noted(lambda: rb.extend(data))
    assert names == written and given is data
    names, given = noted(lambda: rb.add(data[0]))
    assert names == written and given.batch_size == ()
    row = steps(7, 8) if storage is not ListStorage else steps(7, 8)[0]
    names, given = noted(lambda: rb.__setitem__(1, row))
    assert names == written and given is row
    values = steps(8, 10) if storage is not ListStorage else [steps(8, 9)[0], steps(9, 10)[0]]
    generation = rb.storage.lanes.generations(torch.tensor([2, 3]))
    names, given = noted(lambda: rb.update_if_present(index=torch.tensor([2, 3]), generation=generation, patch=values))
    assert names == written and given is values
    for call in (rb.sample, lambda: rb[:], lambda: rb[2], lambda: rb[[1, 2]]):
        assert noted(call)[0] == read
    for call in (lambda: len(rb), lambda: rb.storage[0:2], rb.state_dict, rb.empty):
        notes.clear()
        call()
        assert not notes
    if storage is not ListStorage:
        assert not len(rb)


def test_values_written_if_present_go_through_the_transforms():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=Shift())
    rb.extend(torch.arange(10.0, 15.0))
    index = torch.tensor([1, 3])
    assert rb.update_if_present(
        index=index, generation=rb.writer.generations_of(index), patch=torch.tensor([50.0, 60.0])
    ).updated.all()
    assert rb[:].tolist() == [10, 50, 12, 60, 14] and rb.storage[1] == 40


def test_a_compose_handed_over_is_used_as_it_is():
    compose = Compose(Shift())
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=compose)
    assert rb._transform is compose


# ---- collating ----
def test_collate_functions_get_lists_from_lists_and_batches_from_others():
    seen = []

    def collate(data):
        seen.append(type(data))
        return data

    for storage in (ListStorage(10), LazyTensorStorage(10)):
        rb = ReplayBuffer(storage=storage, collate_fn=collate, batch_size=3)
        rb.extend(torch.arange(5))
        rb.sample()
        rb[:]
    assert seen == [list, list, torch.Tensor, torch.Tensor]
    assert "collate" in repr(rb)


def test_a_collate_function_may_change_what_it_gets():
    rb = ReplayBuffer(storage=ListStorage(10), collate_fn=lambda items: [x.zero_() for x in items], batch_size=3)
    rb.extend(torch.arange(1, 6))
    rb.sample()
    assert rb.storage[:] == [1, 2, 3, 4, 5]


def test_indices_are_put_into_what_a_collate_function_returns():
    rb = TensorDictReplayBuffer(storage=ListStorage(10), collate_fn=torch.stack, batch_size=4)
    rb.extend(steps(0, 5))
    batch = rb.sample()
    assert torch.equal(batch["index"], batch["n"])


# ---- batch sizes ----
def test_no_batch_size_anywhere_says_where_to_give_one():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(torch.arange(5))
    with pytest.raises(RuntimeError, match=r"batch_size not specified: .*sample\(batch_size\).*constructor"):
        rb.sample()
    with pytest.raises(RuntimeError, match=r"Batch_size was not specified.*constructor"):
        next(iter(rb))
    with pytest.raises(RuntimeError, match="constructor"):
        next(rb)


def test_another_generator_may_be_set_at_any_time_and_is_saved():
    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=20, prefetch=2)
    rb.extend(torch.arange(100))
    rb.sample()
    rb.set_rng(torch.Generator().manual_seed(3))
    drawn = [rb.sample() for _ in range(3)]
    saved = rb.state_dict()
    rb.set_rng(torch.Generator().manual_seed(3))
    assert all(torch.equal(rb.sample(), batch) for batch in drawn)
    rb.load_state_dict(saved)
    following = rb.sample()
    rb.load_state_dict(saved)
    assert torch.equal(rb.sample(), following)
    rb.set_rng(None)
    torch.manual_seed(0)
    first = rb.sample()
    torch.manual_seed(0)
    rb.set_rng(None)
    assert torch.equal(rb.sample(), first) and rb.generator is None


def test_a_transform_that_is_assigned_is_used_by_the_next_sample():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, prefetch=2)
    rb.extend(TensorDict({"a": torch.ones(5), "b": torch.ones(5)}, [5]))
    rb.sample()
    rb._transform = ExcludeTransform("b")
    assert set(rb.sample(include_info=True).keys()) == {"a", "index"}
    rb._transform = None
    assert set(rb.sample(include_info=False).keys()) == {"a", "b", "index"}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_conflict_of_batch_sizes_warns_and_the_call_wins(prefetch):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=3, prefetch=prefetch)
    rb.extend(torch.arange(5))
    with pytest.warns(UserWarning, match=r"batch_size=4.*batch_size=3; 4 is used") as caught:
        assert len(rb.sample(4)) == 4
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(rb.sample(3)) == 3 and len(rb.sample()) == 3


@each("size", [0, -1, 2.5, True, float("nan")])
def test_a_batch_size_is_a_positive_integer(size):
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(torch.arange(5))
    for call in (lambda: rb.sample(size), lambda: ReplayBuffer(batch_size=size)):
        with pytest.raises(ValueError, match="batch_size must be an integer of 1 or more"):
            call()
    assert len(rb.sample(np.int64(2))) == 2


# ---- iteration ----
def test_iterating_over_random_draws_never_ends():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=3)
    rb.extend(torch.arange(5))
    for k, batch in enumerate(rb):
        assert len(batch) == 3
        if k == 50:
            break


@each("prefetch", [0, 1, 5])
def test_iterating_without_replacement_is_an_epoch(prefetch):
    rb = ReplayBuffer(
        storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4, prefetch=prefetch
    )
    rb.extend(torch.arange(10))
    for _ in range(4):
        batches = [b.tolist() for b in rb]
        assert [len(b) for b in batches] == [4, 4, 2] and sorted(n for b in batches for n in b) == list(range(10))


def test_next_is_a_sample():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=3)
    rb.extend(torch.arange(5))
    assert next(rb).shape == (3,)


# ---- generations ----
def test_infos_say_the_generation_of_each_row_on_request():
    for track, told in ((True, True), (False, True)):
        rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, track_generations=track)
        rb.extend(torch.arange(13))
        batch, info = rb.sample(return_info=True)
        assert ("generation" in info) == told and torch.equal(info["generation"], batch)


@each("storage", STORAGES)
@each("form", ["tensor of numbers", "dict", "tuple", "TensorDict", "list"])
def test_rows_are_updated_only_if_they_are_still_there(storage, form):
    make = FORMS.get(form, lambda n: [{"a": x} for x in n])
    rb = ReplayBuffer(storage=storage(10), batch_size=4, track_generations=True)
    rb.extend(make(torch.arange(10)))
    index = torch.tensor([0, 3, 7, 9])
    generation = rb.storage.lanes.generations(index)
    rb.extend(make(torch.arange(10, 14)))
    done = rb.update_if_present(index=index, generation=generation, patch=make(torch.tensor([50, 51, 52, 53])))
    assert done.updated.tolist() == [False, False, True, True] and done.updated.dtype == torch.bool
    assert (done.applied, done.stale.tolist(), done.rejected.any()) == (2, [True, True, False, False], False)
    expected = [10, 11, 12, 13, 4, 5, 6, 52, 8, 53]
    for k, n in enumerate(expected):
        assert_same(rb[k], make(torch.tensor([n]))[0] if form == "list" else make(torch.tensor(n)))
    assert rb.write_count == 14
    assert not rb.update_if_present(
        index=index[:2], generation=generation[:2], patch=make(torch.tensor([1, 2]))
    ).applied
    for bad in (generation[:3], torch.full((4,), 5)):
        if len(bad) == 3:
            with pytest.raises(ValueError, match=r"4 steps.*3 generations"):
                rb.update_if_present(index=index, generation=bad, patch=make(torch.tensor([1, 2, 3, 4])))
    with pytest.raises((ValueError, TypeError)):
        rb.update_if_present(index=index, generation=generation, patch=make(torch.tensor([1, 2])))
    for k, n in enumerate(expected):
        assert_same(rb[k], make(torch.tensor([n]))[0] if form == "list" else make(torch.tensor(n)))


def test_no_slot_is_updated_by_the_generation_minus_one():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(torch.arange(3))
    done = rb.update_if_present(index=torch.tensor([5]), generation=torch.tensor([-1]), patch=torch.tensor([9]))
    assert not done.applied
    with pytest.raises(IndexError):
        rb.update_if_present(index=torch.tensor([10]), generation=torch.tensor([0]), patch=torch.tensor([9]))


# ---- parts ----
def test_parts_are_instances_or_make_them():
    rb = ReplayBuffer(storage=lambda: LazyTensorStorage(10), sampler=SamplerWithoutReplacement, writer=RoundRobinWriter)
    assert type(rb.storage) is LazyTensorStorage and type(rb.sampler) is SamplerWithoutReplacement
    assert (rb._storage, rb._sampler, rb._writer) == (rb.storage, rb.sampler, rb.writer)
    assert (rb._batch_size, rb._transform.__class__) == (None, Compose)
    for wrong in ({"storage": 3}, {"sampler": 3}, {"writer": "x"}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            ReplayBuffer(**wrong)


def test_setting_a_part_returns_the_old_one():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=3)
    rb.extend(torch.arange(5))
    storage, sampler, writer = rb.storage, rb.sampler, rb.writer
    assert rb.set_sampler(SamplerWithoutReplacement()) is sampler
    assert rb.set_writer(RoundRobinWriter()) is writer
    new = LazyTensorStorage(20)
    assert rb.set_storage(new) is storage and rb.storage is new and len(rb) == 0
    rb.extend(torch.arange(7))
    assert len(new) == 7 and len(storage) == 5 and rb.writer._cursor == 7
    assert sorted(n for b in rb for n in b.tolist()) == list(range(7))
    rb.set_storage(ListStorage(5), collate_fn=lambda items: len(items))
    rb.extend(torch.arange(3))
    assert rb.sample() == 3


@pytest.mark.parametrize("storage", [object(), LazyTensorStorage(8, ndim=2)], ids=["no storage", "two dimensions"])
def test_refused_storage_leaves_the_collate_function(storage):
    rb = ReplayBuffer(storage=ListStorage(5), writer=TensorDictMaxValueWriter(rank_key="r"), batch_size=2)
    rb.extend([TensorDict({"r": torch.tensor(1.0)}), TensorDict({"r": torch.tensor(2.0)})])
    with pytest.raises((TypeError, ValueError)):
        rb.set_storage(storage, collate_fn=len)
    assert rb.sample().shape == (2,) and len(rb[:]) == 2


def test_a_capacity_that_the_storage_contradicts_is_refused():
    with pytest.raises(ValueError, match=r"capacity=5.*max_size=10"):
        ReplayBuffer(5, storage=LazyTensorStorage(10))
    assert ReplayBuffer(10, storage=LazyTensorStorage(10)).storage.max_size == 10


def test_bad_settings_are_refused_at_once():
    for bad in ({"prefetch": -1}, {"dim_extend": 1}, {"dim_extend": -1}, {"shared": True}):
        with pytest.raises(ValueError):
            ReplayBuffer(**bad)


def test_shared_makes_a_lazy_storage_shared():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), shared=True)
    rb.extend(torch.arange(3))
    assert rb.storage.shared and rb.storage.lanes.locks is not None


def test_a_buffer_prints_its_parts():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=3, transform=Shift()
    )
    text = repr(rb)
    for word in ("ReplayBuffer(", "LazyTensorStorage(max_size=10", "SamplerWithoutReplacement(", "RoundRobinWriter(",
                 "batch_size=3", "Compose(\n        Shift())", "collate_fn=None"):  # fmt: skip
        assert word in text, text


def test_user_sampler_needs_one_method():
    class Last:
        def sample(self, storage, batch_size):
            return [len(storage) - 1] * batch_size, {"why": "last"}

    for storage in (LazyTensorStorage(10), ListStorage(10)):
        for prefetch in (0, 2):
            rb = ReplayBuffer(storage=storage, sampler=Last(), batch_size=3, prefetch=prefetch)
            rb.extend(torch.arange(5))
            batch, info = rb.sample(return_info=True)
            assert batch.tolist() == [rb[len(rb) - 1].item()] * 3 and info["why"] == "last"
            rb.update_priority(torch.tensor([1]), torch.tensor([1.0]))
            rb.mark_update(torch.tensor([1]))
    state = rb.state_dict()
    rb.load_state_dict(state)


def test_a_child_of_a_sampler_that_does_not_call_its_constructor_can_be_used():
    class First(Sampler):
        def __init__(self):
            pass

        def sample(self, storage, batch_size):
            return torch.zeros(batch_size, dtype=torch.int64), {}

    for prefetch in (0, 2):
        rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=First(), batch_size=3, prefetch=prefetch)
        rb.extend(torch.arange(5))
        assert rb.sample().tolist() == [0, 0, 0]
        rb.load_state_dict(rb.state_dict())


class NewestFirst:
    """A writer of one's own, which inherits from nothing."""

    index_key = "index"

    def write(self, storage, items, single, time_dim):
        items, time_dim = (items.unsqueeze(0), 0) if single else (items.flip(0), time_dim)
        return storage.append(storage.check(items, False, time_dim, self.index_key))


def test_user_writer_needs_one_method(tmp_path):
    writer = NewestFirst()
    given = ReplayBuffer(storage=LazyTensorStorage(10), writer=writer)
    exchanged = ReplayBuffer(storage=LazyTensorStorage(10))
    exchanged.set_writer(writer)
    for rb in (given, exchanged):
        assert rb.writer is writer
        rb.extend(TensorDict({"n": torch.arange(3), "index": torch.zeros(3, dtype=torch.int64)}, [3]))
        assert rb[:]["n"].tolist() == [2, 1, 0] and rb[:]["index"].tolist() == [0, 1, 2]
        rb.load_state_dict(rb.state_dict())
        rb.dumps(tmp_path)
        rb.loads(tmp_path)
        rb.empty()
    assert isinstance(exchanged.set_writer(RoundRobinWriter()), NewestFirst)
    both = ReplayBufferEnsemble(given, ReplayBuffer(storage=LazyTensorStorage(10)), batch_size=2)
    assert both.writer[0] is writer and repr(both.writer).startswith(f"WriterEnsemble(writers=[{writer!r}")


def test_invalid_sampler_or_writer_is_refused_by_the_constructor():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    for given in (object(), RandomSampler):
        for use in (rb.set_sampler, SamplerEnsemble):
            with pytest.raises(TypeError, match=r"object with sample\(storage, batch_size\)"):
                use(given)
    for given in (object(), RoundRobinWriter):
        for use in (rb.set_writer, WriterEnsemble):
            with pytest.raises(TypeError, match=r"object with write\(storage, items, single, time_dim\)"):
                use(given)
    for part in ("storage", "sampler", "writer"):
        with pytest.raises(TypeError, match=f"(?i){part} must be a {part},? or something"):
            ReplayBuffer(**{part: 3})
    assert isinstance(rb.sampler, RandomSampler) and isinstance(rb.writer, RoundRobinWriter)


def test_threads_draw_with_a_user_sampler_one_at_a_time():
    inside, most = [0], [0]

    class Slow:
        def sample(self, storage, batch_size):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.002)
            inside[0] -= 1
            return torch.zeros(batch_size, dtype=torch.int64), {}

    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=Slow(), batch_size=2)
    rb.extend(torch.arange(5))
    both = ReplayBufferEnsemble(rb, batch_size=2)
    again = ReplayBufferEnsemble(rb, batch_size=2)
    again.set_sampler(SamplerEnsemble(rb.sampler))
    works = [lambda one=one: [one.sample() for _ in range(20)] for one in (rb, both, again)]
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


@each("storage", STORAGES)
def test_a_sampler_that_returns_what_is_not_there_is_an_error(storage):
    at = [0]

    class Beyond(RandomSampler):
        def sample(self, storage, batch_size):
            return torch.tensor([at[0]] * batch_size), {}

    rb = ReplayBuffer(storage=storage(10), sampler=Beyond(), batch_size=2)
    rb.extend(torch.arange(5))
    for at[0] in (10, -1, 2**40):
        with pytest.raises(IndexError):
            rb.sample()
    at[0] = 7
    with pytest.raises((IndexError, RuntimeError)):
        rb.sample()


def test_keys_read_a_whole_column():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(steps(0, 5))
    assert rb["n"].tolist() == [0, 1, 2, 3, 4] and rb["next", "reward"].shape == (5, 1)


def test_hooks_reach_the_checkpointer(tmp_path):
    seen = []
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(torch.arange(5))
    rb.register_save_hook(lambda rows: seen.append("save") or rows)
    rb.register_load_hook(lambda rows: seen.append("load") or rows)
    rb.dumps(tmp_path)
    rb.loads(tmp_path)
    assert seen == ["save", "load"] and rb[:].tolist() == [0, 1, 2, 3, 4]


@each("blocking", [True, False])
def test_no_other_thread_writes_or_draws_while_the_state_of_a_buffer_is_saved(tmp_path, blocking):
    taken = []

    class SaysWhoWaits(RandomSampler):
        def state_dict(self):
            taken.append((is_taken(rb.storage.mutex), is_taken(self.lock)))
            return {}

    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SaysWhoWaits(), batch_size=2)
    rb.extend(torch.arange(5))
    handle = rb.dumps(tmp_path, blocking=blocking)
    if not blocking:
        handle.result()
    assert taken and all(both == (True, True) for both in taken)


def test_aliases_of_saving_and_loading(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(torch.arange(5))
    for k, (save, load) in enumerate((("dump", "load"), ("save", "loads"), ("dumps", "load"))):
        getattr(rb, save)(tmp_path / "deep" / str(k))
        twin = ReplayBuffer(storage=LazyTensorStorage(10))
        getattr(twin, load)(tmp_path / "deep" / str(k))
        assert state_equal(twin, rb)
    with pytest.raises(ValueError, match="parts"):
        rb.loads(tmp_path / "deep" / "0", parts=("storage", "colour"))


def state_equal(a, b):
    return a[:].tolist() == b[:].tolist() and (len(a), a.write_count) == (len(b), b.write_count)


def test_the_constructor_takes_what_the_specification_names():
    parameters = inspect.signature(ReplayBuffer.__init__).parameters
    assert list(parameters) == [
        "self", "capacity", "storage", "sampler", "writer", "collate_fn", "pin_memory", "prefetch", "transform",
        "batch_size", "dim_extend", "generator", "shared", "checkpointer", "track_generations", "compilable",
        "reuse_batches", "delayed_init", "transform_factory", "publish_stats", "rate_limiter",
    ]  # fmt: skip
    assert parameters["capacity"].kind is inspect.Parameter.POSITIONAL_ONLY


def test_generators_are_saved_with_the_buffer_and_the_global_one_is_not_rewound(tmp_path):
    rb = ReplayBuffer(storage=TensorStorage(torch.arange(50)), generator=torch.Generator().manual_seed(1), batch_size=5)
    rb.sample()
    rb.dumps(tmp_path)
    expected = [rb.sample().tolist() for _ in range(3)]
    before = torch.get_rng_state()
    rb.loads(tmp_path)
    assert [rb.sample().tolist() for _ in range(3)] == expected and torch.equal(torch.get_rng_state(), before)
    plain = ReplayBuffer(storage=TensorStorage(torch.arange(50)), batch_size=5)
    plain.dumps(tmp_path / "plain")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    plain.loads(tmp_path / "plain")
    assert torch.equal(torch.get_rng_state(), before)


def test_tensordicts_of_other_kinds_are_taken():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(steps(0, 4).lock_())
    lazy = TensorDict.lazy_stack([steps(n, n + 1)[0] for n in range(4, 6)])
    rb.extend(lazy)
    rb.extend(steps(6, 10)[::2])
    rb.extend(copy.copy(steps(0, 20))[9:10])
    assert numbers(rb[:]) == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    assert state_of(rb)[:3] == (9, 9, 9)


def test_user_sampler_gets_generations_only_if_it_returned_them():
    class Own(RandomSampler):
        def update_priority(self, index, priority, *, storage=None):
            seen.append((index.tolist(), priority.tolist()))

    class OfGenerations(RandomSampler):
        def update_priority(self, index, priority, *, generation, storage=None):
            seen.append((index.tolist(), generation.tolist()))

    for cls, given, said in ((Own, (), [0.5, 2.0]), (OfGenerations, (torch.tensor([3, 1]),), [3, 1])):
        seen = []
        rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=cls(), batch_size=2)
        rb.extend(torch.arange(5))
        rb.update_priority(torch.tensor([3, 1]), torch.tensor([0.5, 2.0]), *given)
        both = ReplayBufferEnsemble(rb, batch_size=2)
        both.update_priority(
            torch.tensor([[3, 1]]), torch.tensor([[0.5, 2.0]]), *given, buffer_ids=torch.zeros(1, 2, dtype=torch.int64)
        )
        assert seen == [([3, 1], said)] * 2
