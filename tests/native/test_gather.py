"""Leaves are copied out of rows byte by byte, whatever lies beside them and however many are copied at a time."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from contracts.each import each
from engram import _native
from engram.data import LazyTensorStorage, ReplayBuffer

Placed = tuple[int, int]  # where a leaf of uint8 begins in a row, and its bytes
UINT8 = 1  # the code of DLPack


def codec_of(leaves: list[Placed]) -> Any:
    specs = [(UINT8, 8, () if size == 1 else (size,), at) for at, size in leaves]
    return _native.Codec(specs, None, TensorDict, None, torch.Size, np.ndarray, np.generic)


def row_bytes(leaves: list[Placed]) -> int:
    return max(at + size for at, size in leaves)


def check(rows: np.ndarray, leaves: list[Placed]) -> None:
    read = _native.unpack(codec_of(leaves), rows)
    for (at, size), leaf in zip(leaves, read, strict=True):
        expected = rows[:, at] if size == 1 else rows[:, at : at + size]
        assert np.array_equal(leaf.numpy(), expected), (leaves, at)


@st.composite
def placed_leaves(draw: st.DrawFn, most: int = 24) -> list[Placed]:
    """Leaves with gaps between them, most of them of one byte, in the order in which they lie in a row or another."""
    leaves, at = [], 0
    for _ in range(draw(st.integers(1, most))):
        at += draw(st.sampled_from([0, 0, 0, 0, 1, 5]))
        size = draw(st.sampled_from([1, 1, 1, 1, 1, 2, 4, 33]))
        leaves.append((at, size))
        at += size
    return draw(st.permutations(leaves)) if draw(st.booleans()) else leaves


@settings(max_examples=300)
@given(placed_leaves(), st.integers(0, 70), st.integers(0, 8), st.integers(0, 9))
def test_adjacent_bytes_come_out_as_they_lie_in_the_rows(
    leaves: list[Placed], n: int, before: int, between: int
) -> None:
    size = row_bytes(leaves)
    stride = size + between
    memory = np.random.default_rng(n).integers(0, 256, before + n * stride + 1, np.uint8)
    rows = np.lib.stride_tricks.as_strided(memory[before:], (n, size), (stride, 1), writeable=False)
    check(rows, leaves)


@each("lead", [0, 1, 7, 8])
@each("run", range(1, 19))
def test_runs_of_every_length_at_every_distance_from_the_end(run: int, lead: int) -> None:
    leaves = [(at, 1) for at in range(lead, lead + run)]
    for behind in range(10):  # bytes of another leaf
        all_leaves = [*leaves, (lead + run, behind)] if behind else leaves
        size = row_bytes(all_leaves)
        for n in (1, 7, 8, 9, 40):
            check(np.random.default_rng(n).integers(0, 256, (n, size), np.uint8), all_leaves)


@each("run", [2, 6, 7, 8, 9])
def test_no_byte_before_or_behind_the_rows_is_read(run: int) -> None:
    page, n = mmap.PAGESIZE, 16
    size, libc = max(8, run), ctypes.CDLL(None, use_errno=True)
    memory = mmap.mmap(-1, 3 * page)
    whole = np.frombuffer(memory, np.uint8)
    whole[:] = np.arange(whole.size) % 251
    address = whole.ctypes.data
    for start in (page, 2 * page - n * size):  # at the beginning of the readable page, and at its end
        rows = whole[start : start + n * size].reshape(n, size)
        for first in (0, size - run):
            leaves = [(at, 1) for at in range(first, first + run)] + [(size - 1, 1)] * (first + run < size)
            expected = rows[:, first].copy()
            for guard in (0, 2 * page):
                assert libc.mprotect(ctypes.c_void_p(address + guard), page, 0) == 0
            try:
                read = _native.unpack(codec_of(leaves), rows)
            finally:
                for guard in (0, 2 * page):
                    assert libc.mprotect(ctypes.c_void_p(address + guard), page, 3) == 0
            assert np.array_equal(read[0].numpy(), expected)


@settings(max_examples=60)
@given(st.integers(0, 50), st.integers(60, 250), st.booleans(), st.integers(0, 1 << 32))
def test_long_rows_of_many_leaves_come_out_as_they_lie(n: int, count: int, shuffled: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = random.choice([1, 4, 8, 16, 33, 700], count)
    ends = np.cumsum(sizes)
    leaves = [(int(end - size), int(size)) for end, size in zip(ends, sizes, strict=True)]
    if shuffled:
        random.shuffle(leaves)
    check(random.integers(0, 256, (n, int(ends[-1])), np.uint8), leaves)


def test_batches_of_a_thousand_keys_are_the_stored_rows() -> None:
    n = 40
    values = torch.arange(n * 1000).reshape(n, 1000)
    kinds = (torch.float32, torch.bool, torch.int64, torch.uint8)
    data = TensorDict({f"k{i}": values[:, i].to(kinds[i % 4]) for i in range(1000)}, [n])
    rb = ReplayBuffer(storage=LazyTensorStorage(n), batch_size=33)
    rb.extend(data)
    batch, info = rb.sample(return_info=True)
    assert (batch == data[info["index"]]).all()
    torch.manual_seed(3)
    natively = rb.sample()
    torch.manual_seed(3)
    assert (natively == rb.sample(return_info=True)[0]).all() and (rb[:] == data).all()
