"""Each verb of pytree on each form that a batch can have."""

from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, tensorclass

from contracts.each import each
from engram import pytree
from engram.testing.helpers import assert_equal


@tensorclass
class Step:
    x: torch.Tensor
    next: TensorDict


Pair = namedtuple("Pair", ["x", "next"])


def leaves(*shape):
    n = int(np.prod(shape))
    return torch.arange(n).reshape(shape), torch.arange(2.0 * n).reshape(*shape, 2)


def nested(kind, *shape):
    """A batch of this shape with the leaves `x` `[*shape]` and `next, y` `[*shape, 2]`."""
    x, y = leaves(*shape)
    match kind:
        case "TensorDict":
            return TensorDict({"x": x, "next": {"y": y}}, shape)
        case "dict":
            return {"x": x, "next": {"y": y}}
        case "dict of TensorDicts":
            return {"x": x, "next": TensorDict({"y": y}, shape)}
        case "ordered dict":
            return OrderedDict(x=x, next={"y": y})
        case "tensorclass":
            return Step(x=x, next=TensorDict({"y": y}, shape), batch_size=shape)
        case "tuple":
            return x, (y,)
        case "list":
            return [x, [y]]
        case "named tuple":
            return Pair(x, {"y": y})
    raise AssertionError(kind)


KEYED = ["TensorDict", "dict", "dict of TensorDicts", "ordered dict", "tensorclass"]
ALL = [*KEYED, "tuple", "list", "named tuple"]


def paths(kind):
    if kind in KEYED:
        return "x", ("next", "y")
    return (0,), ((1, "y") if kind == "named tuple" else (1, 0))


def parts(kind, batch):
    return [pytree.get_entry(batch, path) for path in paths(kind)]


# ---- what is it? ----
def test_forms_are_told_apart():
    forms = [nested(kind, 3) for kind in ALL] + [torch.zeros(3), np.zeros(3), 1, Step]
    assert [pytree.has_keys(form) for form in forms] == [True] * 5 + [False] * 7
    assert [pytree.is_tensorclass(form) for form in forms] == [False] * 4 + [True] + [False] * 7
    assert [pytree.has_batch_size(form) for form in forms] == [True, False, False, False, True] + [False] * 7


# ---- keys ----
def test_a_key_of_one_string_is_that_string():
    assert pytree.as_keys([("a",), "b", ("next", "c")]) == ["a", "b", ("next", "c")]
    assert pytree.as_keys(("next", "c")) == [("next", "c")] and pytree.as_keys(None) == []


@each("key", [1, (), ("a", 1), ["a"], None])
def test_what_is_no_key_is_refused_with_the_name_of_the_argument(key):
    with pytest.raises(TypeError, match=r"^a key is a string or a tuple of strings"):
        pytree.as_key(key)
    with pytest.raises(TypeError, match=r"^end_key: a key is a string"):
        pytree.as_path(key, "end_key")


# ---- entries ----
@each("kind", ALL)
def test_entries_are_read_by_path(kind):
    batch = nested(kind, 3)
    assert all(torch.equal(a, b) for a, b in zip(parts(kind, batch), leaves(3), strict=True))
    for absent in [("z",), ("next", "z"), ("x", "z")] if kind in KEYED else [(7,), (1, 7), ("z",), (0, "z")]:
        assert pytree.get_entry(batch, absent) is None


def test_numbers_and_arrays_are_read_as_tensors():
    batch = {"n": 3, "next": {"a": np.ones(2, np.float32)}, "text": "t"}
    assert pytree.get_tensor(batch, "n").equal(torch.tensor(3))
    assert pytree.get_tensor(batch, ("next", "a")).dtype is torch.float32
    assert pytree.as_leaf(np.arange(3)[None][::-1]).equal(torch.arange(3)[None])
    assert pytree.get_tensor(batch, "text") == "t" and pytree.get_tensor(batch, "none") is None


@each("kind", KEYED)
def test_a_missing_entry_is_an_error_with_the_keys_that_exist(kind):
    with pytest.raises(KeyError, match=r"RewardSum needs the key 'reward'.*'x', \('next', 'y'\)"):
        pytree.require_tensor(nested(kind, 3), "reward", "RewardSum")


@each("kind", ["TensorDict", "dict", "dict of TensorDicts", "ordered dict"])
def test_entries_are_set_and_removed_in_place(kind):
    batch = nested(kind, 3)
    for key in ("z", ("next", "z"), ("new", "deep", "z")):
        pytree.set_entry(batch, key, torch.ones(3))
        assert torch.equal(pytree.get_entry(batch, key), torch.ones(3))
        pytree.remove_entry(batch, key)
        assert pytree.get_entry(batch, key) is None


def test_a_tensorclass_keeps_its_fields():
    batch = nested("tensorclass", 3)
    pytree.set_entry(batch, ("next", "z"), torch.ones(3))
    assert torch.equal(batch.next["z"], torch.ones(3))
    with pytest.raises(KeyError, match="no field 'z'; its fields are"):
        pytree.set_entry(batch, "z", torch.ones(3))
    with pytest.raises(TypeError, match="cannot lose its field 'x'"):
        pytree.remove_entry(batch, "x")


@each("kind", KEYED)
def test_an_entry_is_added_to_a_copy(kind):
    batch, key = nested(kind, 3), "x" if kind == "tensorclass" else "z"
    before = pytree.get_entry(batch, key)
    assert torch.equal(pytree.get_entry(pytree.with_entry(batch, key, torch.ones(3)), key), torch.ones(3))
    assert pytree.get_entry(batch, key) is before


@each("kind", ["TensorDict", "dict", "dict of TensorDicts", "ordered dict"])
def test_entries_are_left_out_of_a_copy(kind):
    batch = nested(kind, 3)
    rest = pytree.without_entries(batch, [("next", "y")])
    assert pytree.get_entry(rest, ("next", "y")) is None and pytree.get_entry(rest, "x") is not None
    assert pytree.get_entry(pytree.without_entries(batch, [("next",)]), "next") is None
    assert pytree.get_entry(batch, ("next", "y")) is not None
    with pytest.raises(ValueError, match="exclude names 'z', which the steps do not have"):
        pytree.without_entries(batch, [("z",)])


def test_a_value_for_each_item_is_repeated_for_its_steps():
    batch = nested("TensorDict", 3, 4)
    pytree.set_per_item(batch, "index", torch.arange(3))
    assert batch["index"].tolist() == [[i] * 4 for i in range(3)]


# ---- whole batches ----
@each("kind", ALL)
def test_dimensions_are_moved_and_flattened_in_every_form(kind):
    batch, (x, y) = nested(kind, 3, 4), leaves(3, 4)
    moved = parts(kind, pytree.move_dim(batch, 0, 1))
    assert torch.equal(moved[0], x.T) and torch.equal(moved[1], y.movedim(0, 1))
    flat = parts(kind, pytree.flatten_dims(batch, 0, 1))
    assert torch.equal(flat[0], x.flatten()) and torch.equal(flat[1], y.flatten(0, 1))
    assert pytree.move_dim(batch, 1, 1) is batch and pytree.flatten_dims(batch, 0, 0) is batch


@each("kind", ALL)
def test_one_step_is_expanded_to_many(kind):
    step = pytree.map_outermost(nested(kind, 3), lambda part: part[1])
    for part, leaf in zip(parts(kind, pytree.expand(step, 5)), leaves(3), strict=True):
        assert torch.equal(part, leaf[1].expand(5, *leaf.shape[1:]))


@each("kind", ALL)
def test_containers_are_rebuilt_as_they_were(kind):
    batch = nested(kind, 3)
    doubled = pytree.map_outermost(batch, lambda part: part + part if isinstance(part, torch.Tensor) else part)
    assert type(doubled) is (dict if kind == "ordered dict" else type(batch))


def test_a_leaf_that_is_no_tensor_is_named():
    with pytest.raises(TypeError, match=r"\('a', 1\) is a str"):
        pytree.flatten_dims({"a": [torch.zeros(2, 2), "text"]}, 0, 1)


@each("kind", ["TensorDict", "dict", "tensorclass", "tuple", "named tuple"])
def test_rows_are_selected_by_a_mask(kind):
    mask = torch.tensor([True, False, True])
    for part, leaf in zip(parts(kind, pytree.select_rows(nested(kind, 3), mask)), leaves(3), strict=True):
        assert torch.equal(part, leaf[mask])
    with pytest.raises(ValueError, match="3 steps are indexed, the values have 2"):
        pytree.select_rows(nested(kind, 2), mask)


@each("kind", ALL)
@each("rows", [[2, 0], [1], [], [0, 1, 2, 2]])
def test_rows_are_taken_by_number(kind, rows):
    batch, rows = nested(kind, 3), torch.tensor(rows, dtype=torch.int64)
    taken = pytree.take_rows(batch, rows)
    assert type(taken) is (dict if kind == "ordered dict" else type(batch))
    for part, leaf in zip(parts(kind, taken), leaves(3), strict=True):
        assert torch.equal(part, leaf[rows])
    for part, leaf in zip(parts(kind, batch), leaves(3), strict=True):
        assert torch.equal(part, leaf)


def test_rows_of_tensordicts_keep_all_that_indexing_keeps():
    x = torch.arange(6.0).reshape(3, 2)
    weight = torch.ones(3, requires_grad=True)
    stack = LazyStackedTensorDict(*[TensorDict({"x": torch.full((2,), n)}) for n in range(3)])
    rows = torch.tensor([2, 0])
    for batch in (
        TensorDict({"x": x.t().contiguous().t(), "next": TensorDict({"y": x}, [3])}, [3], names=["time"], device="cpu"),
        TensorDict({"x": x, "next": TensorDict({"y": x}, [3, 2])}, [3]),
        TensorDict({"x": x, "text": NonTensorStack("a", "b", "c")}, [3]),
        TensorDict({"x": x, "stack": stack}, [3]),
        TensorDict({"step": nested("tensorclass", 3)}, [3]),
        TensorDict({"x": x * weight.unsqueeze(1), "weight": weight}, [3]),
        TensorDict({"x": x, "none": {}}, [3]).lock_(),
        TensorDict({}, [3]),
    ):
        taken, expected = pytree.take_rows(batch, rows), batch[rows]
        for key in expected.keys(True, True):
            is_tensor = isinstance(expected[key], torch.Tensor)
            assert torch.equal(taken[key], expected[key]) if is_tensor else taken[key] == expected[key]
        assert (taken.batch_size, taken.names, taken.device) == (expected.batch_size, expected.names, expected.device)
        assert list(taken.keys(True)) == list(expected.keys(True)) and taken.is_locked == expected.is_locked
    assert taken.batch_size == (2,)
    assert pytree.take_rows(TensorDict({"x": x * weight.unsqueeze(1)}, [3]), rows)["x"].requires_grad


@each("kind", ["TensorDict", "dict", "dict of TensorDicts", "tensorclass", "tuple"])
def test_items_are_stacked_and_taken_apart_again(kind):
    batch = nested(kind, 3)
    items = pytree.unstack(batch, 0)
    assert len(items) == 3
    for joined in (pytree.stack(items, 0), pytree.collate_items(items)):
        for part, leaf in zip(parts(kind, joined), leaves(3), strict=True):
            assert torch.equal(part, leaf)


def test_items_of_different_forms_do_not_stack():
    with pytest.raises(RuntimeError, match="item 1 differs from item 0: 'x' is missing"):
        pytree.stack([{"x": torch.zeros(2)}, {}], 0)
    with pytest.raises(RuntimeError, match=r"'x' is torch.float32 \[3\] in item 1, torch.float32 \[2\] in item 0"):
        pytree.stack([{"x": torch.zeros(2)}, {"x": torch.zeros(3)}], 0)
    with pytest.raises(ValueError, match=r"different lengths: {'x': 2, 'y': 3}"):
        pytree.unstack({"x": torch.zeros(2), "y": torch.zeros(3)}, 0)


def test_what_does_not_stack_is_collated_to_a_list():
    items = [{"n": i, "text": str(i), "a": [torch.ones(2), "t"]} for i in range(2)]
    batch = pytree.collate_items(items)
    assert batch["n"].tolist() == [0, 1] and batch["text"] == ["0", "1"]
    assert torch.equal(batch["a"][0], torch.ones(2, 2)) and batch["a"][1] == ["t", "t"]
    with pytest.raises(TypeError, match="masked array"):
        pytree.collate_items([np.ma.masked_array([1.0], [True])])


@each("kind", ALL)
def test_a_clone_shares_no_memory(kind):
    batch = nested(kind, 3)
    twin = pytree.clone(batch)
    assert type(twin) is type(batch)
    for part, copy in zip(parts(kind, batch), parts(kind, twin), strict=True):
        assert torch.equal(part, copy) and part.data_ptr() != copy.data_ptr()


@each("kind", KEYED)
def test_a_copy_of_containers_shares_the_leaves_and_no_container(kind):
    batch = nested(kind, 3)
    twin = pytree.copy_containers(batch)
    assert all(a is b for a, b in zip(parts(kind, batch), parts(kind, twin), strict=True))
    pytree.set_entry(twin, ("next", "y"), torch.zeros(3))
    assert_equal(parts(kind, batch), parts(kind, nested(kind, 3)))


@each("kind", ["TensorDict", "dict", "tuple", "list"])
def test_bytes_of_all_tensors_are_counted(kind):
    assert pytree.count_bytes(nested(kind, 3)) == 3 * 8 + 6 * 4


# ---- the form without the data ----
@each("kind", [k for k in ALL if k not in ("named tuple", "ordered dict")])
def test_a_form_takes_a_batch_apart_and_puts_it_together(kind):
    batch = nested(kind, 3)
    form, found = pytree.describe(batch, 1)
    other = pytree.flatten(form, nested(kind, 3))
    assert all(torch.equal(a, b) for (_, a), b in zip(found, other, strict=True))
    assert [path for path, _ in found] == form.paths()
    whole = pytree.unflatten(form, other, (3,), None)
    assert type(whole) is type(batch)
    assert all(torch.equal(a, b) for a, b in zip(parts(kind, whole), leaves(3), strict=True))
    if kind != "tensorclass":  # whose class is in no file
        assert pytree.TreeSpec.from_json(form.to_json()) == form
