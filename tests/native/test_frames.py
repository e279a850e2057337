"""Stacks of frames and rows of batches, copied natively: those of loops in Python; bad places are refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.each import each
from engram import _native

DTYPES = (torch.uint8, torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64)


def frames(n, *shape, dtype=torch.uint8, seed=0):
    return torch.randint(0, 200, (n, *shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def stack_of(frames, last, first, n, dim, newest=None, pad=None):
    """The stack of one step, frame by frame."""
    past = [
        frames[place] if place >= first else (frames[first] if pad is None else pad.expand_as(frames[first]))
        for place in range(last - n + 1 + (newest is not None), last + 1)
    ]
    return torch.cat(past if newest is None else [*past, newest], dim)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 5),
    shape=st.sampled_from([(1,), (3,), (1, 2, 2), (2, 3, 2), (0, 2)]),
    dtype=st.sampled_from(DTYPES),
    steps=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=6),
    behind=st.booleans(),
    padded=st.booleans(),
    data=st.data(),
)
def test_stacks_are_those_of_a_loop(n, shape, dtype, steps, behind, padded, data):
    dim = -data.draw(st.integers(1, len(shape)))
    given_frames, newest = frames(8, *shape, dtype=dtype), frames(5, *shape, dtype=dtype, seed=1)
    pad = torch.tensor(7, dtype=dtype) if padded else None
    last, first = [max(pair) for pair in steps], [min(pair) for pair in steps]
    rows = [row % 5 for row in range(len(steps))]
    numbers = [torch.tensor(values, dtype=torch.int64) for values in (last, first, rows)]
    stacks = _native.stack_frames(
        given_frames, numbers[0], numbers[1], n, dim, newest if behind else None, numbers[2] if behind else None, pad
    )
    assert stacks.dtype == dtype and len(stacks) == len(steps)
    for i, (a, b) in enumerate(zip(last, first, strict=True)):
        assert torch.equal(stacks[i], stack_of(given_frames, a, b, n, dim, newest[rows[i]] if behind else None, pad))


def test_stacks_share_no_memory_with_the_frames():
    given_frames = frames(4, 2)
    at = torch.arange(4)
    _native.stack_frames(given_frames, at, at, 1, -1).zero_()
    assert torch.equal(given_frames, frames(4, 2))


def test_long_stacks_are_copied_without_the_gil():
    given_frames, at = frames(80, 256, 256), torch.arange(80)
    stacks = _native.stack_frames(given_frames, at, torch.zeros_like(at), 2, -2)
    assert torch.equal(stacks[1:, :256], given_frames[:-1]) and torch.equal(stacks[:, 256:], given_frames)


@each(
    "at, first, newest_rows, error",
    [
        ([4], [0], [0], IndexError),
        ([-1], [-1], [0], IndexError),
        ([1], [-1], [0], IndexError),
        ([1], [2], [0], IndexError),
        ([1], [0], [4], IndexError),
        ([1], [0], [-1], IndexError),
        ([1], [0, 0], [0], ValueError),
        ([1], [0], [0, 0], ValueError),
        ([1.0], [0], [0], TypeError),
    ],
)
def test_places_outside_of_the_frames_are_refused(at, first, newest_rows, error):
    at, first, newest_rows = torch.tensor(at), torch.tensor(first), torch.tensor(newest_rows)
    with pytest.raises(error):
        _native.stack_frames(frames(4, 2), at, first, 2, -1, frames(4, 2), newest_rows)


def test_newest_frames_without_places_are_one_for_each_row():
    at = torch.tensor([0, 1])
    stacks = _native.stack_frames(frames(2, 1), at, at, 2, -1, frames(2, 1, seed=1))
    assert torch.equal(stacks, torch.cat([frames(2, 1), frames(2, 1, seed=1)], 1))
    with pytest.raises(IndexError):
        _native.stack_frames(frames(2, 1), at, at, 2, -1, frames(1, 1))


@each(
    "n, dim, pad",
    [(0, -1, None), (2, 0, None), (2, -3, None), (2, -(2**63), None), (2, -1, torch.zeros(1)), (2, -1, torch.zeros(2))],
)
def test_settings_that_do_not_fit_are_refused(n, dim, pad):
    at = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError):
        _native.stack_frames(frames(4, 2, 2), at, at, n, dim, None, None, pad)


def test_stacks_larger_than_any_memory_are_refused():
    at = torch.zeros(2, dtype=torch.int64)
    for shape in ((2,), (0,)):
        with pytest.raises(MemoryError):
            _native.stack_frames(frames(4, *shape), at, at, 1 << 50, -1)


@each(
    "unusual",
    [
        frames(4, 3).t(),
        frames(4, 3)[:, ::2],
        torch.empty(4, 3, device="meta"),
        torch.ones(4, 3).to_sparse(),
        torch.nn.Parameter(torch.ones(4, 3)),
        torch.ones(4, 3, dtype=torch.complex64).conj(),
        torch.ones(()),
        [1, 2],
    ],
)
def test_tensors_that_are_not_plain_are_left_to_the_caller(unusual):
    at = torch.zeros(1, dtype=torch.int64)
    assert _native.stack_frames(unusual, at, at, 2, -1) is None
    assert _native.take_rows([frames(4, 2), unusual], at) is None
    elsewhere = torch.empty(1, dtype=torch.int64, device="meta")
    assert _native.stack_frames(unusual, elsewhere, elsewhere, 2, -1) is None
    assert _native.take_rows([unusual], elsewhere) is None
    plain = torch.ones(4, 3)
    assert _native.stack_frames(plain, at, at, 2, -1, unusual, at) is None


@each("other", [frames(4, 2), frames(4, 3, dtype=torch.int64), frames(4, 3, 1)])
def test_newest_frames_of_another_form_are_left_to_the_caller(other):
    at = torch.zeros(1, dtype=torch.int64)
    assert _native.stack_frames(frames(4, 3), at, at, 2, -1, other, at) is None


@given(ids=st.lists(st.integers(0, 2), max_size=12))
def test_bounds_of_slices_are_those_of_a_loop(ids):
    last, first = _native.slice_bounds(torch.tensor(ids, dtype=torch.int64))
    ends = [i for i in range(len(ids)) if i + 1 == len(ids) or ids[i + 1] != ids[i]]
    assert last.tolist() == ends and first.tolist() == [0, *[end + 1 for end in ends[:-1]]][: len(ends)]


def test_rows_are_those_of_indexing():
    rows = torch.tensor([3, 0, 3])
    tensors = [frames(4, 2, 3), frames(5, dtype=torch.float32), frames(4, 0), frames(4, 1, dtype=torch.bool)]
    taken = _native.take_rows(tensors, rows)
    assert all(
        torch.equal(t, tensor[rows]) and t.dtype == tensor.dtype for t, tensor in zip(taken, tensors, strict=True)
    )
    assert _native.take_rows([], rows) == []
    large = frames(80, 512, 512)
    assert torch.equal(_native.take_rows([large], torch.arange(40))[0], large[:40])


@each("row", [-1, 4])
def test_rows_outside_of_any_tensor_are_refused(row):
    with pytest.raises(IndexError):
        _native.take_rows([frames(5, 2), frames(4, 2)], torch.tensor([row]))
