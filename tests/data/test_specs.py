"""Specs, and those of gymnasium's spaces."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensordict import TensorDict, TensorDictBase

from contracts.each import each
from engram.data import Spec, space_from_spec, spec_from_space
from engram.data import specs as tensor_specs
from engram.envs.codecs import codec_for
from engram.specs import Binary, Bounded, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, Unbounded

# ---- draws, tests and projections stay within the domain ----
SPECS = [
    Unbounded((3,)),
    Unbounded((2,), dtype=torch.int64),
    Unbounded((2,), dtype=torch.uint8),
    Unbounded((2,), dtype=torch.bool),
    Bounded(-1.0, 2.0, (3, 2)),
    Bounded(0, 255, (4,), dtype=torch.uint8),
    Bounded(-3, 3, (4,), dtype=torch.int32),
    Bounded(torch.tensor([-1.0, -torch.inf, 0.0, -torch.inf]), torch.tensor([1.0, 0.0, torch.inf, torch.inf])),
    Bounded(-3e38, 3e38, (50,)),
    Categorical(4),
    Categorical(4, (3,)),
    OneHot(5),
    OneHot(5, dtype=torch.int64),
    MultiOneHot([2, 3]),
    MultiCategorical([2, 3, 4]),
    Binary(6),
]
every_spec = pytest.mark.parametrize("spec", SPECS, ids=str)


@every_spec
def test_draws_lie_in_the_domain(spec):
    drawn = spec.rand((200,))
    assert drawn.shape == (200, *spec.shape) and drawn.dtype == spec.dtype
    assert spec.is_in(drawn)


@every_spec
def test_draws_follow_torchs_global_generator(spec):
    torch.manual_seed(1)
    first = spec.rand((20,))
    torch.manual_seed(1)
    assert torch.equal(spec.rand((20,)), first)


@every_spec
def test_projection_keeps_values_inside_the_domain(spec):
    drawn = spec.rand((20,))
    assert torch.equal(spec.project(drawn), drawn)


@every_spec
@settings(max_examples=20)
@given(seed=st.integers(0, 1000), scale=st.floats(0.1, 1e4))
def test_whatever_is_projected_lies_in_the_domain(spec, seed, scale):
    value = torch.randn(7, *spec.shape, generator=torch.Generator().manual_seed(seed)) * scale
    assert spec.is_in(spec.project(value))


@every_spec
def test_an_expanded_spec_draws_with_the_batch_dimensions(spec):
    assert spec.expand(2, 3, *spec.shape).rand().shape == (2, 3, *spec.shape)


@every_spec
def test_a_spec_moved_and_rebuilt_is_equal_to_itself(spec):
    assert spec.to("cpu").to("cpu") == spec.to("cpu")
    assert spec.to(torch.float64).dtype is torch.float64
    assert spec == spec.expand(*spec.shape)


@every_spec
def test_zero_has_the_specs_shape_and_dtype(spec):
    zero = spec.zero((2,))
    assert zero.shape == (2, *spec.shape) and zero.dtype == spec.dtype and not zero.any()


def test_another_dtype_or_shape_does_not_lie_in_the_domain():
    spec = Bounded(-1, 1, (2,))
    assert not spec.is_in(torch.zeros(2, dtype=torch.float64))
    assert not spec.is_in(torch.zeros(3))
    assert not spec.is_in("a string")


@each("value", [[0, 0, 0], [1, 1, 0], [2, 0, 0], [-1, 1, 1]])
def test_a_one_hot_vector_has_exactly_one_one(value):
    assert not OneHot(3, dtype=torch.int64).is_in(torch.tensor(value))


def test_all_values_of_a_small_domain_are_drawn():
    assert Categorical(3).rand((200,)).unique().tolist() == [0, 1, 2]
    assert Bounded(-1, 1, (), dtype=torch.int64).rand((200,)).unique().tolist() == [-1, 0, 1]


def test_a_composite_draws_a_tensordict_of_its_shape():
    spec = Composite(a=Unbounded((2, 4)), b=Composite(c=OneHot(3).expand(2, 3), shape=(2,)), shape=(2,))
    drawn = spec.rand((5,))
    assert drawn.batch_size == (5, 2) and drawn["b", "c"].shape == (5, 2, 3)
    assert spec.is_in(drawn) and not spec.is_in(TensorDict({"a": drawn["a"]}, batch_size=[5, 2]))


@each("method", ["keys", "values", "items"])
def test_every_entry_of_a_composite_may_change_in_a_step(method):
    listed = getattr(Composite(a=Binary(1), b=Composite(c=Binary(1))), method)
    assert len(listed(True, True)) == 2 and listed(True, True, step_mdp_static_only=True) == listed(True, True)


def test_a_composite_takes_nested_keys():
    spec = Composite()
    spec["a", "b"] = Categorical(2)
    assert list(spec.leaves()) == [("a", "b")] and spec["a", "b"] == Categorical(2) and ("a", "b") in spec


def test_a_composite_expands_all_its_entries():
    spec = Composite(a=Unbounded((4,)), b=Composite(c=Categorical(2))).expand(3)
    assert spec["a"].shape == (3, 4) and spec["b", "c"].shape == (3,) and spec["b"].shape == (3,)


def test_a_composite_refuses_an_entry_without_its_batch_dimensions():
    with pytest.raises(ValueError, match="expand it first"):
        Composite(a=Unbounded((4,)), shape=(3,))


@each(
    "make",
    [
        lambda: Categorical(0),
        lambda: OneHot(3, shape=(4,)),
        lambda: Bounded(1, -1, (2,)),
        lambda: MultiCategorical([]),
        lambda: Unbounded((3,)).expand(2, 4),
        lambda: Unbounded((3,)).project(torch.zeros(4)),
        lambda: Binary(),
    ],
)
def test_invalid_spec_arguments_are_refused(make):
    with pytest.raises(ValueError):
        make()


def test_entries_of_a_composite_come_and_go():
    spec = Composite(a=Unbounded((4,)), b=Composite(c=Categorical(2), d=Binary(3)))
    clone = spec.clone()
    del spec["b", "c"]
    assert spec.keys(include_nested=True) == ["a", "b", ("b", "d")]
    assert spec.keys(include_nested=True, leaves_only=True) == ["a", ("b", "d")] == list(spec.leaves())
    assert spec.pop(("b", "d")) == Binary(3) and spec["b"].is_empty() and len(spec) == 2
    assert spec.set(("e", "f"), Categorical(3)).get(("e", "f")) == Categorical(3) and spec.get("g", 5) == 5
    assert clone["b", "c"] == Categorical(2) and ("b", "x") not in clone and "b" in clone
    assert clone.empty() == Composite() and clone.values(leaves_only=True) == [Unbounded((4,))]


@each("key", ["x", ("b", "x"), ("a", "x")])
def test_a_missing_entry_of_a_composite_is_a_key_error(key):
    spec = Composite(a=Unbounded((4,)), b=Composite(c=Categorical(2)))
    with pytest.raises(KeyError, match="there is no entry"):
        spec[key]
    with pytest.raises(KeyError, match="there is no entry"):
        del spec[key]


def test_a_composite_refuses_what_is_no_spec_and_entries_below_a_leaf():
    spec = Composite(a=Unbounded((4,)))
    with pytest.raises(TypeError, match="must be a spec"):
        spec["b"] = torch.zeros(3)
    with pytest.raises(KeyError, match="has no entries"):
        spec["a", "b"] = Categorical(2)
    with pytest.raises(KeyError, match="cannot project"):
        spec.project(TensorDict({}))


def test_bounds_are_indexed_with_the_batch():
    spec = Bounded(torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 2.0])).expand(3, 2)
    assert spec[0, 1] == Bounded(-2.0, 2.0, ()) and spec[:, 0] == Bounded(-1.0, 1.0, (3,))


def test_the_vector_of_a_choice_cannot_be_indexed():
    with pytest.raises(IndexError):
        OneHot(3, (2, 3))[:, 0]
    assert OneHot(3, (2, 3))[0] == OneHot(3)


@each(("value", "nearest"), [(300.0, 255), (-1.0, 0), (2.6, 3), (torch.nan, 0), (torch.inf, 255)])
def test_a_float_becomes_the_nearest_integer(value, nearest):
    assert Bounded(0, 255, (), dtype=torch.uint8).project(torch.tensor(value)).item() == nearest
    assert Unbounded((), dtype=torch.uint8).project(torch.tensor(value)).item() == nearest
    assert Categorical(256).project(torch.tensor(value)).item() == nearest


def test_draws_between_far_integers_reach_both_halves():
    low, high = -(2**63), 2**63 - 1
    drawn = Bounded(low + 1, high, (), dtype=torch.int64).rand((500,))
    assert (drawn < -(2**61)).any() and (drawn > 2**61).any() and (drawn.abs() < 2**61).any()


def test_choices_and_one_hot_vectors_are_converted():
    assert Categorical(3, (2,)).to_one_hot_spec() == OneHot(3, (2, 3))
    assert OneHot(3, (2, 3)).to_categorical_spec() == Categorical(3, (2,))
    assert MultiCategorical([2, 3]).to_one_hot_spec() == MultiOneHot([2, 3])
    assert MultiOneHot([2, 3]).to_categorical_spec() == MultiCategorical([2, 3])
    assert OneHot(3, dtype=torch.int64).encode(1).tolist() == [0, 1, 0]
    assert OneHot(3).decode(torch.tensor([[0, 1, 0], [1, 0, 0]])).tolist() == [1, 0]


def test_what_cannot_be_encoded_without_loss_is_refused():
    with pytest.raises(ValueError, match="does not lie in the spec"):
        Categorical(3).encode(3)
    with pytest.raises(ValueError, match="without loss"):
        Categorical(3).encode(1.5)
    with pytest.raises(ValueError, match=r"found:   torch.int64 \(\): 5"):
        Categorical(3).to_numpy(torch.tensor(5))


def test_a_category_is_a_whole_number():
    assert not Categorical(3, dtype=torch.float32).is_in(torch.tensor(0.5))
    assert Categorical(3, dtype=torch.float32).is_in(torch.tensor(2.0))


# ---- spaces of gymnasium that have a tensor form ----
SHAPES = hnp.array_shapes(min_dims=0, max_dims=2, max_side=3)
INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
FLOATS = [np.float16, np.float32, np.float64]
NAMES = st.text("abcdef", min_size=1, max_size=3)


@st.composite
def integer_boxes(draw):
    dtype, shape = draw(st.sampled_from(INTEGERS)), draw(SHAPES)
    info = np.iinfo(dtype)
    ends = hnp.arrays(dtype, shape, elements=st.integers(int(info.min), int(info.max)))
    first, second = draw(ends), draw(ends)
    return spaces.Box(np.minimum(first, second), np.maximum(first, second), shape, dtype)


@st.composite
def float_boxes(draw):
    dtype, shape = draw(st.sampled_from(FLOATS)), draw(SHAPES)
    width = np.dtype(dtype).itemsize * 8
    ends = hnp.arrays(dtype, shape, elements=st.floats(-100, 100, width=width))
    first, second = draw(ends), draw(ends)
    open_ends = hnp.arrays(np.bool_, shape)
    low = np.where(draw(open_ends), np.array(-np.inf, dtype), np.minimum(first, second))
    high = np.where(draw(open_ends), np.array(np.inf, dtype), np.maximum(first, second))
    return spaces.Box(low.astype(dtype), high.astype(dtype), shape, dtype)


NORMAL = (
    integer_boxes()
    | float_boxes()
    | st.integers(1, 5).map(spaces.Discrete)
    | st.lists(st.integers(1, 4), min_size=1, max_size=3).map(spaces.MultiDiscrete)
    | hnp.array_shapes(max_dims=2, max_side=3).map(spaces.MultiBinary)
)
OTHER = (
    st.tuples(st.integers(1, 5), st.integers(-9, 9)).map(lambda t: spaces.Discrete(t[0], start=t[1]))
    | st.just(spaces.MultiDiscrete([[2, 3], [4, 5]]))
    | st.just(spaces.MultiDiscrete([2, 3], start=[4, -5]))
)


def nested(leaves, with_tuples):
    def grow(inner):
        dicts = st.dictionaries(NAMES, inner, min_size=1, max_size=3).map(spaces.Dict)
        return dicts | st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple) if with_tuples else dicts

    return st.recursive(leaves, grow, max_leaves=5)


_every_space = given(space=nested(NORMAL | OTHER, with_tuples=True), categorical=st.booleans(), seed=st.integers(0, 99))


def every_space(test):
    return settings(max_examples=30)(_every_space(test))


@every_space
def test_a_spec_goes_through_its_space_unchanged(space, categorical, seed):
    spec = spec_from_space(space, categorical)
    assert spec_from_space(space_from_spec(spec), categorical) == spec


@settings(max_examples=30)
@given(space=nested(NORMAL, with_tuples=False), categorical=st.booleans())
def test_a_space_goes_through_its_spec_unchanged(space, categorical):
    assert space_from_spec(spec_from_space(space, categorical)) == space


@every_space
def test_what_a_space_samples_lies_in_the_spec_and_comes_back(space, categorical, seed):
    space.seed(seed)
    try:
        raws = [space.sample() for _ in range(3)]
    except ValueError:  # gymnasium 1.4 cannot draw from the widest boxes of integers
        reject()
    codec = codec_for(space, categorical=categorical)
    rows = codec.encode_rows(raws)
    assert spec_from_space(space, categorical).is_in(rows)
    assert all(same(a, b) for a, b in zip(raws, codec.decode_rows(rows), strict=True))


def same(a, b):
    if isinstance(a, dict):
        return set(a) == set(b) and all(same(a[key], b[key]) for key in a)
    return all(map(same, a, b)) if isinstance(a, tuple) else np.array_equal(a, b)


@every_space
def test_what_a_spec_draws_lies_in_the_space(space, categorical, seed):
    torch.manual_seed(seed)
    codec = codec_for(space, categorical=categorical)
    drawn = codec.spec.rand((4,))
    assert codec.spec.is_in(drawn)
    assert all(space.contains(raw) for raw in codec.decode_rows(drawn))


WILD = [torch.float16, torch.float32, torch.float64, torch.int8, torch.int64, torch.uint8, torch.uint64, torch.bool]


@every_space
def test_whatever_is_projected_lies_in_the_spec(space, categorical, seed):
    spec = spec_from_space(space, categorical)
    generator = torch.Generator().manual_seed(seed)
    for dtype in WILD:
        value = wild(spec, dtype, generator)
        assert spec.is_in(spec.project(value)), (spec, value)
        assert everywhere(are_equal, spec.project(spec.project(value)), spec.project(value))


def wild(spec, dtype, generator):
    if isinstance(spec, Composite):
        return TensorDict({key: wild(part, dtype, generator) for key, part in spec.items()}, batch_size=[2])
    value = torch.randn(2, *spec.shape, generator=generator, dtype=torch.float64) * 10.0 ** (seed_of(generator) % 25)
    if dtype.is_floating_point:
        value[..., :1] = torch.tensor([torch.nan, torch.inf, -torch.inf])[seed_of(generator) % 3]
    return (
        value.to(dtype) if dtype.is_floating_point else value.nan_to_num().clamp(-(2.0**62), 2.0**62).long().to(dtype)
    )


def seed_of(generator):
    return int(torch.randint(1000, (), generator=generator))


def are_equal(a, b):
    """Also where both are NaN, which a space without bounds has."""
    return a.dtype is b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def everywhere(compare, a, b):
    if isinstance(a, TensorDictBase):
        return all(everywhere(compare, a.get(key), b.get(key)) for key in a.keys())
    return compare(a, b)


@every_space
def test_an_equal_value_comes_back_from_numpy(space, categorical, seed):
    torch.manual_seed(seed)
    spec = spec_from_space(space, categorical)
    drawn = spec.rand((3,))
    assert everywhere(torch.equal, spec.encode(spec.to_numpy(drawn)), drawn)


@every_space
def test_an_expanded_spec_is_indexed_back(space, categorical, seed):
    spec = spec_from_space(space, categorical)
    many = spec.expand(2, 3, *spec.shape)
    assert many[0, 1] == spec and many[:, 0][1] == spec and many[torch.tensor([1, 0])][1, 2] == spec
    assert many.unsqueeze(0).shape == (1, 2, 3, *spec.shape) and many.unsqueeze(1).squeeze(1) == many
    assert many.is_in(many.rand()) and many[0].is_in(many.rand()[0])


@every_space
def test_a_clone_is_equal_and_its_own(space, categorical, seed):
    spec = spec_from_space(space, categorical)
    assert spec.clone() == spec and spec.clone() is not spec and spec.to("cpu").clone() == spec.to("cpu")
    assert repr(spec.clone()) == repr(spec)


@each(
    "space",
    [
        spaces.Graph(spaces.Box(0, 1, (2,)), None),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.OneOf([spaces.Discrete(2), spaces.Discrete(3)]),
    ],
)
def test_spaces_without_a_tensor_form_say_what_to_do(space):
    for within in (space, spaces.Dict({"a": space}), spaces.Tuple([space])):
        with pytest.raises(TypeError, match=f"type {type(space).__name__} has no tensor form.*FilterObservation"):
            spec_from_space(within)


def test_a_spec_of_another_class_has_no_space():
    class Own(Spec):
        __abstractmethods__ = frozenset()
        __init__ = object.__init__

    Own.__abstractmethods__ = frozenset()
    with pytest.raises(TypeError, match="Own has no gymnasium space"):
        space_from_spec(Own())


@given(st.sampled_from([torch.float32, torch.float64, torch.int8, torch.int64, torch.uint64]), SHAPES)
def test_numbers_without_bounds_have_the_box_of_their_dtype(dtype, shape):
    assume(0 not in shape)
    space = space_from_spec(Unbounded(shape, dtype=dtype))
    assert space.shape == shape and Unbounded(shape, dtype=dtype).is_in(torch.from_numpy(np.asarray(space.sample())))


# ---- hashes, spaces, choices ----
@every_spec
def test_equal_specs_have_equal_hashes(spec):
    composite = Composite(a=spec)
    assert hash(spec) == hash(spec.clone()) and hash(composite) == hash(composite.clone())
    before = hash(composite)
    composite["b"] = Unbounded(2)
    assert hash(composite) == before  # it stays the key that it was
    assert {spec: 1}[spec.clone()] == 1


@every_spec
def test_the_space_of_a_spec_bounds_its_draws(spec):
    space, draw = spec.space, spec.rand((20,))
    assert isinstance(space, tensor_specs.CategoricalBox | tensor_specs.ContinuousBox | tensor_specs.BoxList)
    if isinstance(spec, Unbounded | Bounded):
        assert space.low.shape == space.high.shape == spec.shape and space.low.dtype == spec.dtype
        assert bool(((draw.double() >= space.low.double()) & (draw.double() <= space.high.double())).all())
        assert spec.cardinality() == float("inf")
    elif isinstance(spec, MultiCategorical | MultiOneHot):
        assert [box.n for box in space] == list(spec.nvec) == [box.n for box in space.boxes]
        assert spec.cardinality() == int(np.prod(spec.nvec))
    else:
        assert space.n == spec.cardinality() == spec.n


def test_a_composite_counts_the_choices_of_all():
    assert Composite(a=OneHot(3), b=Composite(c=Categorical(2)), d=None).cardinality() == 6


@every_spec
def test_zeros_and_ones_have_two_names(spec):
    assert torch.equal(spec.zeros((2,)), spec.zero((2,))) and torch.equal(spec.ones(), spec.one())
    assert spec.contains(spec.rand()) and spec.cpu().device == torch.device("cpu")


@pytest.mark.parametrize(
    ("spec", "choice"),
    [(Categorical(3), torch.tensor([2, 0])), (MultiCategorical([2, 3]), torch.tensor([[1, 2], [0, 0]]))],
)
def test_choices_go_to_vectors_and_back(spec, choice):
    vectors = spec.to_one_hot(choice)
    assert spec.to_one_hot_spec().is_in(vectors)
    assert torch.equal(spec.to_one_hot_spec().to_categorical(vectors), choice)
    with pytest.raises(ValueError, match="does not lie in the spec"):
        spec.to_one_hot(choice + 1)
    with pytest.raises(ValueError, match="does not lie in the spec"):
        spec.to_one_hot_spec().to_categorical(torch.ones_like(vectors))
    assert spec.to_one_hot_spec().to_categorical(torch.ones_like(vectors), safe=False).sum() == 0


def test_shapes_may_be_numbers_and_a_composite_has_a_batch_size():
    assert Unbounded(3).shape == Bounded(0, 1, 3).shape == Categorical(2, 3).shape == OneHot(3, 3).shape == (3,)
    composite = Composite({"a": Unbounded((4, 3))}, batch_size=4)
    assert composite.shape == composite.batch_size == (4,)
    with pytest.raises(TypeError, match="shape and batch_size are the same"):
        Composite(shape=(4,), batch_size=(4,))


def test_an_entry_without_a_spec_allows_any_value():
    composite = Composite(a=Unbounded(2), b=None)
    assert "b" in composite and composite["b"] is None and list(composite.leaves()) == ["a"]
    assert composite.keys() == ["a", "b"] and set(composite.rand().keys()) == {"a"}
    assert composite.is_in(composite.zero().set("b", torch.ones(9)))
    for changed in (composite.clone(), composite.expand(3)[0], composite.to(torch.float32)):
        assert changed == composite


def test_encode_rounds_floating_point_numbers_to_the_spec():
    spec = Bounded(0.0, 1.0, (2,))
    for value in ([0.5, 0.2], np.array([0.5, 0.2]), torch.tensor([0.5, 0.2], dtype=torch.float64)):
        assert torch.equal(spec.encode(value), torch.tensor([0.5, 0.2]))
    with pytest.raises(ValueError, match="without loss"):
        Unbounded((2,)).encode([1e300, 0.0])
    with pytest.raises(ValueError, match="without loss"):
        Unbounded((2,), dtype=torch.int64).encode([1.5, 0.0])


@pytest.mark.parametrize("kind", [ValueError, AssertionError])
def test_value_outside_of_a_spec_is_a_value_error_and_an_assertion_error(kind):
    with pytest.raises(kind, match="does not lie in the spec"):
        Categorical(3).assert_is_in(torch.tensor(4))


def test_composite_is_updated_by_nested_dicts_and_checks_dicts():
    spec = Composite(a=Unbounded((3,)), b=Composite(c=Unbounded(1)))
    spec.update({"b": {"d": Unbounded(2)}, "e": {"f": Categorical(3)}})
    assert set(spec.leaves()) == {"a", ("b", "c"), ("b", "d"), ("e", "f")}
    assert Composite(a=Bounded(0.0, 1.0, (2,))).is_in({"a": torch.ones(2)})
    assert not Composite(a=Bounded(0.0, 1.0, (2,))).is_in({"a": 2 * torch.ones(2)})
