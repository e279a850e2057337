"""Specs: reshaping, masks, enumeration, locks and names of dimensions."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.specs import (
    Binary,
    Bounded,
    BoundedContinuous,
    BoundedDiscrete,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Stacked,
    StackedComposite,
    Unbounded,
    UnboundedContinuous,
    UnboundedDiscrete,
)

# ---- shapes: a spec's values, reshaped, are the reshaped spec's ----
SPECS = [
    Unbounded((2, 3)),
    Bounded(torch.arange(6.0).reshape(2, 3) - 9, torch.arange(6.0).reshape(2, 3)),
    Categorical(4, (2, 3), mask=torch.eye(4).bool()[torch.tensor([[0, 1, 2], [3, 0, 1]])]),
    Binary(3, (2, 3)),
    OneHot(3, (2, 3, 3), mask=torch.eye(3).bool().expand(2, 3, 3)),
    MultiOneHot([2, 3], (2, 3, 5)),
    MultiCategorical([2, 3], (2, 3, 2), mask=torch.tensor([True, False, True, True, False])),
    Composite(a=Bounded(0, torch.arange(6.0).reshape(2, 3)), b=OneHot(4, (2, 3, 4)), shape=(2, 3)),
    Composite(inner=Composite(c=Categorical(3, (2, 3)), shape=(2, 3)), shape=(2, 3), names=["env", "time"]),
]
every_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)


@every_spec
@each(
    "change",
    [
        lambda x, own: x.reshape(6, *own),
        lambda x, own: x.reshape(-1, *own),
        lambda x, own: x.view(3, 2, *own),
        lambda x, own: x.flatten(0, 1),
        lambda x, own: x.unflatten(1, (3, 1)),
        lambda x, own: x.unflatten(0, (1, 2)),
        lambda x, own: x.unbind(0)[1],
        lambda x, own: x.unbind(1)[2],
        lambda x, own: x.unsqueeze(0).squeeze(0),
        lambda x, own: x.unsqueeze(1).squeeze(),
    ],
)
def test_reshaped_values_lie_in_the_reshaped_spec(spec, change):
    own = spec.shape[2:]
    changed, value = change(spec, own), change(spec.rand(), own)
    assert changed.shape == value.shape and changed.is_in(value)
    assert type(changed) is type(spec)


@each("spec", [spec for spec in SPECS if spec.batch_ndim < spec.ndim])
def test_the_last_dimension_of_vectors_cannot_be_reshaped(spec):
    for change in (lambda: spec.reshape(-1), lambda: spec.flatten(0, 2), lambda: spec.unbind(-1)):
        with pytest.raises(ValueError, match="must remain unchanged"):
            change()


def test_dimensions_that_are_not_there_are_an_index_error():
    with pytest.raises(IndexError, match="-1 to 0"):
        Unbounded((3,)).unbind(1)


def test_dimensions_of_length_1_grow_in_expand():
    assert Bounded(0, 1, (1, 2)).expand(5, 2).shape == (5, 2)
    assert Composite(a=Unbounded((1, 3)), shape=(1,)).expand(4)["a"].shape == (4, 3)
    with pytest.raises(ValueError, match="must end in the old one"):
        OneHot(1).expand(3)


def test_stacks_are_unbound_into_their_members():
    members = [Composite(a=Unbounded((3,))), Composite(a=Unbounded((3,)), b=Categorical(2))]
    assert torch.stack(members, 0).unbind(0) == tuple(members)


# ---- masks ----
MASKED = [
    Categorical(3, mask=torch.tensor([True, False, True])),
    Categorical(3, (2,), mask=torch.tensor([[True, False, False], [False, True, True]])),
    OneHot(3, mask=torch.tensor([False, True, True])),
    MultiCategorical([2, 3], mask=torch.tensor([True, True, False, True, True])),
    MultiOneHot([2, 3], (4, 5), mask=torch.tensor([False, True, False, True, True])),
]
every_mask = pytest.mark.parametrize("spec", MASKED, ids=str)


@every_mask
def test_choices_that_a_mask_forbids_are_not_drawn_and_not_in_the_domain(spec):
    free = spec.clone()
    free.update_mask(None)
    values = free.rand((100,))
    assert spec.is_in(spec.rand((100,)))
    assert not spec.is_in(values)
    assert spec.is_in(spec.project(values))
    allowed = values[[spec.is_in(value) for value in values]]
    assert torch.equal(spec.project(allowed), allowed)


@every_mask
def test_masks_survive_copies_and_changes_of_shape(spec):
    for other in (spec.clone(), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec)), spec.to("cpu").to("cpu")):
        assert torch.equal(other.mask, spec.mask)
    assert spec.expand(7, *spec.shape).is_in(spec.rand((7,)))
    assert spec.expand(7, *spec.shape)[2] == spec
    other = spec.clone()
    other.update_mask(None)
    assert spec != other and spec == spec.clone()


def test_masks_hold_in_the_other_encoding():
    spec = Categorical(3, mask=torch.tensor([True, False, True]))
    assert spec.to_one_hot_spec().to_categorical_spec() == spec
    both = MultiOneHot([2, 2], mask=torch.tensor([True, False, True, True]))
    assert both.to_categorical_spec().to_one_hot_spec() == both


def test_projection_goes_to_the_nearest_choice_that_is_allowed():
    spec = Categorical(6, mask=torch.tensor([True, False, False, False, True, True]))
    assert spec.project(torch.arange(6)).tolist() == [0, 0, 0, 4, 4, 5]
    scores = torch.tensor([0.1, 0.9, 0.5])
    assert OneHot(3, mask=torch.tensor([True, False, True])).project(scores).tolist() == [False, False, True]


@each(
    ("mask", "error"),
    [
        (torch.ones(4, dtype=torch.bool), ValueError),
        (torch.zeros(3, dtype=torch.bool), ValueError),
        (torch.ones(3), TypeError),
    ],
)
def test_a_mask_that_does_not_fit_is_refused_and_the_old_one_stays(mask, error):
    spec = Categorical(3, mask=torch.tensor([True, False, True]))
    with pytest.raises(error, match="mask"):
        spec.update_mask(mask)
    assert spec.mask.tolist() == [True, False, True]


# ---- all values ----
@each("spec", [Categorical(3), OneHot(3), MultiOneHot([2, 3]), MultiCategorical([2, 3]), *MASKED])
def test_enumeration_has_every_value_once(spec):
    values = spec.enumerate(use_mask=False)
    assert values.shape == (spec.cardinality(), *spec.shape) and values.dtype is spec.dtype
    assert len(values.unique(dim=0)) == len(values)


def test_enumeration_leaves_out_what_a_mask_forbids():
    spec = MASKED[3]
    assert spec.enumerate(use_mask=True).tolist() == [[0, 1], [0, 2], [1, 1], [1, 2]]
    with pytest.raises(ValueError, match="different masks"):
        MASKED[1].enumerate(use_mask=True)


def test_enumeration_of_a_composite_has_all_combinations():
    spec = Composite(a=Categorical(2), b=Composite(c=OneHot(3)))
    values = spec.enumerate()
    assert values.batch_size == (6,) and spec.is_in(values)
    assert values["a"].tolist() == [0, 0, 0, 1, 1, 1]


def test_numbers_cannot_be_enumerated():
    with pytest.raises(NotImplementedError, match="rand"):
        Bounded(0, 1, (2,)).enumerate()


def test_stacks_enumerate_member_by_member():
    stack = Stacked(Categorical(2), Categorical(2, dtype=torch.int64), dim=0)
    assert stack.enumerate().tolist() == [[0, 0], [1, 1]]


def test_choices_index_the_last_dimension():
    table = torch.arange(6).reshape(2, 3)
    assert OneHot(3).index(torch.tensor([0, 1, 0]), table).tolist() == [1, 4]
    assert Categorical(3).index(torch.tensor([2, 0]), table).tolist() == [[2, 0], [5, 3]]
    with pytest.raises(NotImplementedError):
        Unbounded(3).index(torch.tensor(0), table)


# ---- locks ----
@pytest.fixture
def nested() -> Composite:
    return Composite(a=Unbounded((3,)), b=Composite(c=Categorical(2)))


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec.set("z", Unbounded((3,))),
        lambda spec: spec.__setitem__(("b", "z"), Unbounded((3,))),
        lambda spec: spec.__setitem__(("new", "z"), Unbounded((3,))),
        lambda spec: spec.update({"a": None}),
        lambda spec: spec.update({"b": Composite(x=None, shape=spec.shape)}),
        lambda spec: spec.pop("a"),
        lambda spec: spec.__delitem__(("b", "c")),
        lambda spec: spec.separates("a"),
    ],
)
@pytest.mark.parametrize("stacked", [False, True])
def test_a_locked_composite_does_not_change(nested, change, stacked):
    spec = torch.stack([nested, Composite(a=Unbounded((3,)), b=Composite(c=Categorical(2)), d=None)], 0)
    spec = (spec if stacked else nested).lock_()
    assert isinstance(spec, StackedComposite) == stacked
    before = spec.clone()
    with pytest.raises(RuntimeError, match="locked Composite"):
        change(spec)
    assert spec == before and spec.is_locked and not before.is_locked


def test_a_lock_holds_nested_ones_until_it_is_undone(nested):
    nested.lock_()
    with pytest.raises(RuntimeError, match="unlock that one first"):
        nested["b"].unlock_()
    nested.unlock_()["b", "d"] = Categorical(3)
    nested["b"].lock_()
    nested.lock_(recurse=False).unlock_()
    assert nested["b"].is_locked and not nested.unlock_(recurse=True)["b"].is_locked


# ---- names, entries ----
def test_names_of_dimensions_follow_the_spec_and_its_values():
    spec = Composite(a=Unbounded((2, 3)), shape=(2, 3), names=["env", "time"])
    assert spec.rand().names == ["env", "time"] and spec.zero((4,)).names == [None, "env", "time"]
    assert spec.expand(4, 2, 3).names == [None, "env", "time"] and spec[0].names == ["time"]
    assert spec.clone().to("cpu").names == spec.unsqueeze(0)[0].names == ["env", "time"]
    assert spec.flatten(0, 1).names == [None]


def test_names_are_refined():
    spec = Composite(shape=(2, 3))
    assert spec.names == [None, None] and spec.refine_names(..., "time").names == [None, "time"]
    with pytest.raises(RuntimeError, match="refine_names"):
        spec.refine_names("env", "step")
    with pytest.raises(ValueError, match="batch dimensions"):
        Composite(shape=(2,), names=["a", "b"])


def test_entries_of_a_tensordict_are_set_to_draws_zeros_or_ones():
    spec = Composite(a=Unbounded((2,)), b=Composite(c=Categorical(2)))
    td = TensorDict({"a": torch.full((4, 2), 7.0), "k": torch.full((4,), 7.0)}, [4])
    assert spec.ones_update(td) is td and td["a"].eq(1).all() and td["b", "c"].eq(1).all() and td["k"].eq(7).all()
    assert spec.zeros_update(td)["a"].eq(0).all() and spec.is_in(spec.rand_update(td))


def test_updates_reach_into_nested_composites():
    spec = Composite(b=Composite(c=Categorical(2)))
    assert spec.update({"b": Composite(d=Binary(3))}) is spec
    assert list(spec.leaves()) == [("b", "c"), ("b", "d")]


def test_separated_entries_leave_the_composite():
    spec = Composite(a=Unbounded(3), b=Composite(c=Categorical(2), d=Binary(3)))
    apart = spec.separates("a", ("b", "c"), "absent")
    assert list(apart.leaves()) == ["a", ("b", "c")] and list(spec.leaves()) == [("b", "d")]
    assert spec.separates("absent", default=5) == 5


def test_another_dtype_is_a_type_error():
    spec = Composite(a=Unbounded(3), b=Categorical(2))
    spec.type_check(spec.zero())
    spec.type_check(TensorDict({"a": torch.zeros(3)}), "a")
    with pytest.raises(TypeError, match=r"torch\.int32"):
        spec.type_check(TensorDict({"a": torch.zeros(3), "b": torch.zeros((), dtype=torch.int32)}))


def test_values_are_converted_without_a_check_where_asked():
    beyond = Bounded(0, 1, (2,))
    assert beyond.to_numpy(torch.full((2,), 5.0), safe=False).tolist() == [5.0, 5.0]
    with pytest.raises(ValueError, match="does not lie"):
        beyond.to_numpy(torch.full((2,), 5.0))


# ---- classes by dtype ----
def test_continuous_and_discrete_are_told_apart_by_the_dtype():
    assert UnboundedContinuous((3,)) == Unbounded((3,)) and BoundedContinuous(0, 1, (2,)) == Bounded(0, 1, (2,))
    assert UnboundedDiscrete((3,)) == Unbounded((3,), dtype=torch.int64)
    assert BoundedDiscrete(0, 5, (2,), dtype=torch.uint8).dtype is torch.uint8
    assert isinstance(Bounded(0, 1), BoundedContinuous) and not isinstance(Bounded(0, 1), BoundedDiscrete)
    assert not isinstance(Unbounded(), BoundedContinuous) and not isinstance(OneHot(3), UnboundedDiscrete)
    with pytest.raises(ValueError, match="every dtype"):
        UnboundedContinuous((3,), dtype=torch.int64)
