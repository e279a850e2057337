"""Specs and gymnasium's spaces say the same, for every space that has a tensor form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensordict import TensorDict, TensorDictBase

from engram.data import Composite, Spec, Unbounded, space_from_spec, spec_from_space
from engram.envs.codecs import codec_for

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
        assert everywhere(torch.equal, spec.project(spec.project(value)), spec.project(value))


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


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Graph(spaces.Box(0, 1, (2,)), None),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.OneOf([spaces.Discrete(2), spaces.Discrete(3)]),
    ],
    ids=lambda space: type(space).__name__,
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
