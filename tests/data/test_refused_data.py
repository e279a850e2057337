"""Data and arguments that would be stored wrongly are refused, with a message that names them; nothing is changed."""

from collections import OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack, tensorclass

from contracts.each import each
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram.transforms import MultiStepTransform, RenameTransform, RewardSum

TABLES = [LazyTensorStorage, LazyMemmapStorage]
MASKED = np.ma.masked_array(np.arange(12.0).reshape(4, 3), mask=np.eye(4, 3, dtype=bool))


@tensorclass
class Step:
    x: torch.Tensor


# ---- lazy stacks ----
def uneven(nested=False):
    """A lazy stack whose second member has an entry of its own, "b"."""
    first, second = {"a": torch.zeros(3)}, {"a": torch.ones(3), "b": torch.ones(1)}
    return lazy_stack([TensorDict({"next": one}) if nested else TensorDict(one) for one in (first, second)])


@each("storage", TABLES)
@each("nested, name", [(False, "'b'"), (True, r"\('next', 'b'\)")])
def test_an_entry_that_only_some_members_of_a_lazy_stack_have_is_refused_by_name(storage, nested, name):
    rb = ReplayBuffer(storage=storage(10))
    for _ in range(2):  # as the first batch, and as a later one
        with pytest.raises(ValueError, match=f"only some members of a lazy stack have {name}"):
            rb.extend(uneven(nested))
        rb.extend(uneven(nested)[:1].clone())
    assert len(rb) == 2


def test_nor_is_it_dropped_in_place_in_a_dict_in_columns_or_behind_a_transform():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(TensorDict({"a": torch.zeros(4, 3)}, [4]))
    for write in (
        lambda: rb.__setitem__(slice(0, 2), uneven()),
        lambda: ReplayBuffer(storage=LazyTensorStorage(10)).extend({"within": uneven()}),
        lambda: TensorStorage(uneven()),
        lambda: ReplayBuffer(storage=LazyTensorStorage(10), transform=RenameTransform(["a"], ["c"])).extend(uneven()),
        lambda: ReplayBuffer(storage=LazyTensorStorage(10)).extend(lazy_stack([uneven(), uneven()])[0]),
    ):
        with pytest.raises(ValueError, match="only some members"):
            write()
    assert torch.equal(rb[:]["a"], torch.zeros(4, 3))


def test_a_lazy_stack_whose_entries_do_not_stack_is_refused_by_name():
    stack = lazy_stack([TensorDict({"a": torch.zeros(3)}), TensorDict({"a": torch.zeros(4)})])
    with pytest.raises(ValueError, match="'a' has different shapes"):
        ReplayBuffer(storage=LazyTensorStorage(10)).extend(stack)


def test_a_list_keeps_the_entries_of_each_member():
    rb = ReplayBuffer(storage=ListStorage(10), collate_fn=list)
    rb.extend(uneven())
    assert [set(item.keys()) for item in rb[:]] == [{"a"}, {"a", "b"}]


# ---- masked arrays ----
@each("storage", [*TABLES, ListStorage])
def test_masked_arrays_are_refused_wherever_data_come_in(storage):
    rb, fresh = ReplayBuffer(storage=storage(10)), ReplayBuffer(storage=storage(10))
    rb.extend({"a": np.zeros((4, 3))})
    for write in (
        lambda: rb.extend({"a": MASKED}),
        lambda: rb.add({"a": MASKED[0]}),
        lambda: rb.extend([{"a": MASKED[0]}]),
        lambda: rb.__setitem__(slice(0, 4), {"a": MASKED}),
        lambda: rb.__setitem__(0, {"a": MASKED[0]}),
        lambda: fresh.extend({"a": MASKED}),
        lambda: fresh.extend(MASKED),
        lambda: fresh.add({"a": np.ma.masked}),
        lambda: fresh.extend({"next": {"a": MASKED}}),
    ):
        with pytest.raises(TypeError, match="masked array"):
            write()
    assert len(rb) == 4 and len(fresh) == 0
    stored = rb[:] if storage is not ListStorage else {"a": np.stack([item["a"] for item in rb[:]])}
    assert not np.asarray(stored["a"]).any()


def test_transforms_priorities_and_indices_take_no_masked_arrays_either():
    rb = PrioritizedReplayBuffer(1.0, 1.0, storage=LazyTensorStorage(10))
    index = rb.extend({"a": np.zeros((4, 3))})
    one_masked = np.ma.masked_array(np.arange(4), mask=[1, 0, 0, 0])
    transformed = ReplayBuffer(storage=LazyTensorStorage(10), transform=RenameTransform(["a"], ["b"]))
    for take, error in (
        (lambda: TensorStorage({"a": MASKED}), TypeError),
        (lambda: transformed.extend({"a": MASKED}), TypeError),
        (lambda: rb.update_priority(index, MASKED[:, 0]), TypeError),
        (lambda: rb.update_priority(one_masked, torch.ones(4)), IndexError),
        (lambda: rb[one_masked], IndexError),
    ):
        with pytest.raises(error, match="masked array"):
            take()
    assert rb.sampler.priorities(index, storage=rb.storage).tolist() == [1.0] * 4


Pair = namedtuple("Pair", "a b")


# ---- graphs ----
@each("item", [lambda x: x, lambda x: {"x": x}, lambda x: TensorDict({"x": x}), lambda x: Step(x=x, batch_size=[])])
@each("storage", [LazyTensorStorage, ListStorage])
def test_nothing_that_is_stored_keeps_the_graph_that_it_was_computed_by(storage, item):
    weight = torch.ones(3, requires_grad=True)
    rb = ReplayBuffer(storage=storage(10), batch_size=2)
    rb.add(item(weight * 2))
    rb.extend([item(weight * 2)])
    rb[0] = item(weight * 2)
    for batch in (rb.sample(), rb[0], rb[1]):
        leaf = batch if isinstance(batch, torch.Tensor) else batch["x"] if isinstance(batch, dict) else batch.get("x")
        assert not leaf.requires_grad and leaf.grad_fn is None


@each(
    "kind",
    [lambda x: Pair(x, [x]), lambda x: OrderedDict(a=x), lambda x: defaultdict(list, a=x), lambda x: deque([x], 2)],
)
def test_a_list_copies_the_containers_of_the_standard_library_with_what_is_in_them(kind):
    weight, given = torch.ones(3, requires_grad=True), np.zeros(3)
    rb = ReplayBuffer(storage=ListStorage(10))
    rb.add(kind(weight * 2))
    rb.add(kind(given))
    given[:] = 7
    computed, kept = rb[0], rb[1]
    assert type(computed) is type(kind(0)) and getattr(computed, "maxlen", 2) == 2
    first, second = (next(iter(item.values() if isinstance(item, dict) else item)) for item in (computed, kept))
    assert not first.requires_grad and not second.any()
    with pytest.raises(TypeError, match="masked array"):
        rb.add(kind(MASKED))


def test_nor_does_what_transforms_carry_on():
    weight = torch.ones(1, requires_grad=True)
    for transform in (RewardSum(), MultiStepTransform(2, 0.9)):
        rb = ReplayBuffer(storage=ListStorage(10))
        rb.append_transform(transform, invert=isinstance(transform, RewardSum))
        rb.extend(TensorDict({"next": {"reward": weight.expand(3, 1) * 2, "done": torch.zeros(3, 1).bool()}}, [3]))
        state = transform.state_dict()
        carried = state["leaves"] if "leaves" in state else state["value"]
        assert carried and not any(leaf.requires_grad for leaf in carried)


# ---- shapes ----
@each("data", [{"a": [1, 2, 3]}, {"a": (1, 2, 3)}, {"next": {"a": [1, 2, 3]}}])
def test_a_list_of_numbers_in_a_batch_is_told_from_a_column(data):
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    with pytest.raises(ValueError, match=r"'a'.* is a list or tuple, .*give a tensor or an array"):
        rb.extend(data)
    assert len(rb) == 0


ONE_D = TensorDict({"a": torch.zeros(4, 3)}, [4])


@each("first, write, said",
    [
        (ONE_D, lambda rb: rb.extend(torch.stack([ONE_D, ONE_D])), "2 batch dimensions instead of 1.*ndim=2"),
        (torch.zeros(4), lambda rb: rb.extend(torch.zeros(4, 2)), "2 batch dimensions instead of 1.*ndim=2"),
        (ONE_D, lambda rb: rb.add(ONE_D), "a batch of steps is for extend"),
        (ONE_D, lambda rb: rb.extend(ONE_D[0]), "one step is for add"),
    ])  # fmt: skip
def test_data_with_other_batch_dimensions_say_what_to_do(first, write, said):
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(first)
    with pytest.raises(ValueError, match=said):
        write(rb)
    assert len(rb) == 4


@each("data", [torch.tensor(3.0), {"a": torch.tensor(3.0)}, TensorDict({"a": torch.zeros(3)}, [])])
def test_a_list_storage_is_extended_by_batches_alone(data):
    rb = ReplayBuffer(storage=ListStorage(10))
    with pytest.raises(ValueError, match="use add"):
        rb.extend(data)
    assert len(rb) == 0


# ---- priorities ----
@each("index", [None, "a", [None], {}, object(), [[1], [1, 2]], 2**70, b"x", ...])
def test_invalid_priority_index_is_named(index):
    rb = PrioritizedReplayBuffer(1.0, 1.0, storage=LazyTensorStorage(10))
    rb.extend(torch.arange(4))
    for update in (lambda: rb.update_priority(index, 2.0), lambda: rb.mark_update(index)):
        with pytest.raises(IndexError, match=r"an index is an integer, or .* found a"):
            update()
    assert rb.sampler.priorities(slice(None), storage=rb.storage).tolist() == [1.0] * 4


@each(
    "priority",
    [None, "a", "1.0", [None, 1.0], {}, object(), [[1], [1, 2]], 2**2000, torch.ones(2, device="meta"),
     torch.ones(2).to_sparse(), np.array([1, 2], dtype=object), TensorDict({"a": torch.ones(2)}, [2])],
)  # fmt: skip
def test_invalid_priority_is_named(priority):
    rb = PrioritizedReplayBuffer(1.0, 1.0, storage=LazyTensorStorage(10))
    index = rb.extend(torch.arange(2))
    with pytest.raises(TypeError, match=r"priorities are a number, or .* found a"):
        rb.update_priority(index, priority)
    assert rb.sampler.priorities(index, storage=rb.storage).tolist() == [1.0] * 2


@each("generation", ["a", object(), [None, 1], 1.5, [0.0, 1.0], torch.zeros(2), {}, True])
def test_invalid_generation_is_named(generation):
    rb = PrioritizedReplayBuffer(1.0, 1.0, storage=LazyTensorStorage(10))
    index = rb.extend(torch.arange(2))
    with pytest.raises(TypeError, match=r"generations are sequences, int64, .* found a"):
        rb.update_priority(index, 2.0, generation)
    assert rb.sampler.priorities(index, storage=rb.storage).tolist() == [1.0] * 2


@each("batch", [None, 1, torch.ones(2), [1, 2]])
def test_what_has_no_keys_has_no_priorities(batch):
    rb = TensorDictPrioritizedReplayBuffer(1.0, 1.0, storage=LazyTensorStorage(10))
    rb.extend(TensorDict({"a": torch.arange(2)}, [2]))
    with pytest.raises(TypeError, match=r"a batch with keys, .* found a"):
        rb.update_tensordict_priority(batch)


def test_no_priorities_of_no_steps_change_nothing():
    rb = PrioritizedReplayBuffer(1.0, 1.0, storage=LazyTensorStorage(10))
    rb.extend(torch.arange(2))
    rb.update_priority([], [])
    assert rb.sampler.priorities(slice(None), storage=rb.storage).tolist() == [1.0] * 2
