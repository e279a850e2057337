"""Blocks of restored rows: where they go, in memory and in files, and what is refused before memory is touched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.each import each
from engram import _native
from native.core.support import file_store, store

Rows = np.ndarray[Any, Any]


def made(seed: int, *shape: int) -> Rows:
    return np.random.default_rng(seed).integers(1, 256, shape, np.uint8)


def table(s: _native.Store) -> Rows:
    """The rows as they lie in the store: [lanes, strands, lane capacity, row stride]."""
    shape = (s.lanes, s.envs, s.lane_capacity, s.row_stride)
    return s.memory()[s.rows_offset : s.rows_offset + int(np.prod(shape))].reshape(shape)


@contextmanager
def any_store(kind: str, payload: int, capacity: int, lanes: int = 1, strands: int = 1) -> Iterator[_native.Store]:
    if kind == "memory":
        yield store(payload, capacity, lanes=lanes, strands=strands)
        return
    with (
        TemporaryDirectory() as folder,
        file_store(Path(folder) / "s", payload, capacity, lanes=lanes, strands=strands) as s,
    ):
        yield s


class TestRowsGoToTheirPlaces:
    @settings(max_examples=60, deadline=None)
    @given(
        kind=st.sampled_from(["memory", "file"]), payload=st.integers(1, 50), capacity=st.integers(1, 40),
        lane=st.integers(0, 1), strands=st.integers(1, 3), start=st.integers(0, 200), share=st.floats(0, 1),
        reversed_=st.booleans(), seed=st.integers(0, 99),
    )  # fmt: skip
    def test_and_nowhere_else(
        self, kind: str, payload: int, capacity: int, lane: int, strands: int, start: int, share: float,
        reversed_: bool, seed: int,
    ) -> None:  # fmt: skip
        n = round(share * capacity)
        rows = made(seed, strands, n + 2, payload)[:, 1 : n + 1]  # strands do not follow each other in memory
        rows = rows[:, ::-1] if reversed_ else rows
        with any_store(kind, payload, capacity, lanes=2, strands=strands) as s:
            table(s)[:] = old = made(seed + 1, *table(s).shape)
            s.put(lane, start, rows)
            expected = old[..., :payload].copy()
            for i in range(n):
                expected[lane, :, (start + i) % capacity] = rows[:, i]
            assert (table(s)[..., :payload] == expected).all()
            new = {(start + i) % capacity for i in range(n)}
            others = [slot for slot in range(capacity) if slot not in new]
            assert (table(s)[lane][:, others] == old[lane][:, others]).all()
            assert (table(s)[1 - lane] == old[1 - lane]).all()
            if kind == "file":
                whole = [(lane * strands + e) * capacity + slot for e in range(strands) for slot in new]
                assert all(_native.testing.is_whole(s, row) for row in whole)

    @each("payload", [1, 71, 4080, 5000, 300_000])
    def test_when_they_take_many_writes(self, payload: int, tmp_path: Path) -> None:
        n = 3_000_000 // (payload + 16)
        rows = made(payload, 1, n, payload)
        with file_store(tmp_path / "s", payload, n + 2) as s:
            s.put(0, 1, rows)
            assert (table(s)[0, 0, 1:-1, :payload] == rows[0]).all() and not table(s)[0, 0, [0, -1]].any()
            assert all(_native.testing.is_whole(s, i) for i in range(1, n + 1))
            lies = np.fromfile(tmp_path / "s", np.uint8)
            assert (lies == s.memory()[: len(lies)]).all()

    def test_when_threads_put_neighbours_into_one_page(self, tmp_path: Path) -> None:
        rows = made(0, 1, 4000, 20)
        with file_store(tmp_path / "s", 20, 4000) as s, ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda at: s.put(0, at, rows[:, at : at + 7]), range(0, 4000, 7)))
            assert (table(s)[0, 0, :, :20] == rows[0]).all()
            assert all(_native.testing.is_whole(s, i) for i in range(4000))

    def test_and_not_into_a_file_that_has_the_descriptors_number_by_now(self, tmp_path: Path) -> None:
        rows = made(0, 1, 10, 20)
        with file_store(tmp_path / "s", 20, 10) as s:
            there = (tmp_path / "s").stat().st_size
            (tmp_path / "other").write_bytes(bytes(there))
            other = os.open(tmp_path / "other", os.O_RDWR)
            os.dup2(other, s.fd)
            os.close(other)
            s.put(0, 0, rows)
            assert (table(s)[0, 0, :, :20] == rows[0]).all() and all(_native.testing.is_whole(s, i) for i in range(10))
            assert (tmp_path / "other").read_bytes() == bytes(there)


class TestRefused:
    @each("shape", [(2, 3, 20), (1, 11, 20), (1, 3, 21), (1, 3, 19), (0, 3, 20)])
    def test_blocks_of_another_shape(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="no more steps"):
            store(20, 10).put(0, 0, made(0, *shape))

    def test_rows_whose_bytes_do_not_lie_side_by_side(self) -> None:
        with pytest.raises(ValueError, match="side by side"):
            store(20, 10).put(0, 0, made(0, 1, 3, 40)[..., ::2])

    def test_numbers_that_wrap_around(self) -> None:
        with pytest.raises(ValueError, match="2\\^64"):
            store(20, 10).put(0, (1 << 64) - 3, made(0, 1, 4, 20))

    def test_stores_without_rows(self) -> None:
        with pytest.raises(ValueError, match="elsewhere"):
            store(0, 10).put(0, 0, made(0, 1, 4, 20))

    def test_anything_but_bytes(self) -> None:
        for rows in (np.zeros((1, 2, 20), np.int8), np.zeros((2, 20), np.uint8), [[b"x" * 20]]):
            with pytest.raises(TypeError):
                store(20, 10).put(0, 0, rows)
