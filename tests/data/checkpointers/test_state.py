"""States come back with every type and every bit; what cannot is refused with its place."""

import struct
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensordict import NonTensorData, NonTensorStack

from contracts.each import each
from engram.checkpoint.encoding import CONTENT_CODECS, EncodedArrays, Encoder, decode, encode
from engram.data.replay_buffers.checkpointers import open_snapshot, save_snapshot
from engram.errors import CorruptCheckpointError

TORCH_DTYPES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16"),
    *("float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
]


def make_tensor(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    target = getattr(torch, dtype)
    size = int(np.prod(shape)) * target.itemsize
    if size == 0:
        return torch.empty(shape, dtype=target)
    raw = np.random.default_rng(size).integers(0, 2 if dtype == "bool" else 256, size, np.uint8)
    return torch.from_numpy(raw).view(target).reshape(shape)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0]),
    st.text(st.characters()),
    st.binary(),
)
keys = st.one_of(st.text(st.characters()), st.integers(), st.booleans(), st.none(), st.tuples(st.text(), st.integers()))
dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(),
    hnp.unsigned_integer_dtypes(),
    hnp.floating_dtypes(sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(sizes=(64, 128)),
    hnp.datetime64_dtypes(),
    hnp.timedelta64_dtypes(),
    hnp.unicode_string_dtypes(min_len=1, max_len=5),
    hnp.byte_string_dtypes(min_len=1, max_len=5),
)
arrays = dtypes.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=4)))
numbers = st.one_of(hnp.integer_dtypes(), hnp.floating_dtypes(sizes=(16, 32, 64)), hnp.boolean_dtypes())
numpy_scalars = numbers.flatmap(hnp.from_dtype)
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
tensors = st.builds(make_tensor, st.sampled_from(TORCH_DTYPES), shapes)
leaves = st.one_of(scalars, arrays, numpy_scalars, tensors, shapes.map(torch.Size))
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=12,
)


def assert_same(found, expected):
    """Equal in type and in every bit."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert [(type(key), key) for key in found] == [(type(key), key) for key in expected]
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        if expected.numel():
            assert found.reshape(-1).view(torch.uint8).tolist() == expected.reshape(-1).view(torch.uint8).tolist()
    elif isinstance(expected, np.ndarray | np.generic):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, float):
        assert struct.pack("<d", found) == struct.pack("<d", expected)
    else:
        assert found == expected


def round_trip(path, state):
    save_snapshot(path, {"state": state})
    with open_snapshot(path) as opened:
        return opened.components["state"]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=states)
def test_any_state_comes_back_exactly(ram_path, state):
    assert_same(round_trip(ram_path, state), state)


@each("dtype", TORCH_DTYPES)
@each("shape", [(), (0,), (3, 0, 2), (5,), (2, 3)])
def test_tensors_of_every_dtype_come_back(ram_path, dtype, shape):
    tensor = make_tensor(dtype, shape)
    assert_same(round_trip(ram_path, tensor), tensor)


def test_views_come_back_as_their_values(tmp_path):
    base = torch.randn(4, 6, dtype=torch.complex64)
    state = [base.T, base[:, ::2], base.conj(), base.conj().imag, base[0].expand(3, 6), base.real.requires_grad_()]
    state += [torch.ones(()).expand(1), torch.from_numpy(np.zeros(0, np.float32)), torch.ones(3, 0).expand(3, 0)]
    loaded = round_trip(tmp_path, state)
    assert all(torch.equal(one, other) for one, other in zip(loaded, state, strict=True))


def test_fortran_and_big_endian_arrays_come_back(tmp_path):
    state = [np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(3, dtype=">f4"), np.arange(10)[::-3]]
    loaded = round_trip(tmp_path, state)
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(loaded, state, strict=True))


def test_loaded_tensors_are_writable_and_share_nothing(tmp_path):
    one, two, array = round_trip(tmp_path, [torch.zeros(3), torch.zeros(3), np.zeros(3)])
    one += 1
    array += 2
    assert two.tolist() == [0, 0, 0] and one.tolist() == [1, 1, 1] and array.tolist() == [2, 2, 2]


def test_a_dict_that_looks_like_an_encoding_comes_back_as_it_is(tmp_path):
    state = {"$tensor": {"dtype": "int8", "shape": [1], "at": 0, "nbytes": 1}, "a": {"$": 1}, "b": {"$int": "0x1"}}
    assert_same(round_trip(tmp_path, state), state)


def test_two_lone_surrogates_stay_two(tmp_path):
    assert_same(round_trip(tmp_path, {"\ud83d\ude00": "\ud83d\ude00"}), {"\ud83d\ude00": "\ud83d\ude00"})


class Int(int):
    pass


@each("value", [Int(3), {1}, bytearray(b"a"), 1j, torch.float32, np.zeros(1, "i4,i4")])
def test_what_would_come_back_as_something_else_is_refused_with_its_place(value):
    with pytest.raises(TypeError, match=r"sampler\['a'\]\[1\] is a .* cannot be saved"):
        encode({"a": [0, value]}, EncodedArrays(), place="sampler")


def test_a_state_that_contains_itself_is_refused():
    state: list = []
    state.append(state)
    with pytest.raises(TypeError, match="contains itself"):
        encode(state, EncodedArrays())


@each("name", ["", "..", "a/b", "/a", ".hidden", "a\n"])
def test_a_component_name_that_is_no_file_name_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="not a name for a component"):
        save_snapshot(tmp_path, {name: 1})


@each(
    "edit",
    [
        lambda body: body.update(nbytes=2**40),
        lambda body: body.update(shape=[2**40], nbytes=2**42),
        lambda body: body.update(shape=[-1]),
        lambda body: body.update(shape=[2, 3]),
        lambda body: body.update(shape="ab"),
        lambda body: body.update(dtype="object"),
        lambda body: body.update(dtype="__class__"),
        lambda body: body.update(at=64),
        lambda body: body.update(at=-64),
        lambda body: body.pop("at"),
    ],
)
@each("value", [torch.arange(4, dtype=torch.float32), np.arange(4, dtype=np.float32)])
def test_a_forged_description_is_an_error_before_anything_is_allocated(tmp_path, monkeypatch, edit, value):
    from engram.checkpoint import snapshot

    class Forging(Encoder):
        def encode(self, value, blobs, place):
            tree = super().encode(value, blobs, place)
            edit(*tree.values())
            return tree

    def allocate(size, *arguments, **options):
        assert size <= value.nbytes
        return empty(size, *arguments, **options)

    monkeypatch.setattr(snapshot, "Encoder", Forging)
    save_snapshot(tmp_path, {"state": value})
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", allocate)
    with (
        pytest.raises(CorruptCheckpointError, match=r"manifest\.json is damaged: component state"),
        open_snapshot(tmp_path) as opened,
    ):
        opened.components["state"]


def test_a_stack_of_one_value_that_is_no_tensor_comes_back_or_is_an_error():
    stack = NonTensorStack(NonTensorData("a", batch_size=[2]), stack_dim=1)
    tree = encode(stack, EncodedArrays(), CONTENT_CODECS)
    found = decode(tree, None, CONTENT_CODECS)
    assert type(found) is NonTensorStack and found.batch_size == (2, 1) and found.stack_dim == 1
    for dim in (-1, 2, "x"):
        tree["$nontensorstack"]["stack_dim"] = dim
        with pytest.raises(ValueError, match="along dimension"):
            decode(tree, None, CONTENT_CODECS)


@each("tree", [{"$unknown": 1}, {"$tuple": 3}, {"$dict": [1]}, {"$dict": [[[], 1]]}, {"$float": "0"}])
def test_a_forged_tree_is_an_error(tmp_path, monkeypatch, tree):
    from engram.checkpoint import snapshot

    monkeypatch.setattr(snapshot.Encoder, "encode", lambda *arguments: tree)
    save_snapshot(tmp_path, {"state": 1})
    with (
        pytest.raises(CorruptCheckpointError, match=r"manifest\.json is damaged: component state"),
        open_snapshot(tmp_path) as opened,
    ):
        opened.components["state"]
