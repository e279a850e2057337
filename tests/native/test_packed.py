"""Packed rows in and out: bytes are bytes, and nothing outside the arrays is read or written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from contracts.each import each
from engram import _native
from engram.data.replay_buffers.storages import LazyTensorStorage
from engram.store.layout import RowLayout
from engram.testing import numbers, of_numbers, steps
from native.core.support import store
from native.support import codec

LAYOUT = RowLayout.of(steps(0, 1), 1)


def packed(start: int, stop: int) -> torch.Tensor:
    return LAYOUT.pack(steps(start, stop))


def test_a_batch_comes_back_from_its_packed_rows() -> None:
    assert numbers(LAYOUT.unpack(packed(3, 40))) == list(range(3, 40))


def test_a_batch_without_steps_is_packed_too() -> None:
    assert packed(3, 3).shape == (0, LAYOUT.payload_bytes) and numbers(LAYOUT.unpack(packed(3, 3))) == []


def test_rows_of_forms_that_the_core_does_not_build_come_back() -> None:
    data = {"a": [torch.arange(4), torch.arange(8.0).reshape(4, 2)]}
    layout = RowLayout.of(data, 1)
    back = layout.unpack(layout.pack(data))
    assert torch.equal(back["a"][0], data["a"][0]) and torch.equal(back["a"][1], data["a"][1])


def test_many_rows_are_packed_as_few_are() -> None:
    n = torch.arange(200_000)
    assert torch.equal(LAYOUT.unpack(LAYOUT.pack(of_numbers(n)))["n"], n)


def test_read_only_rows_are_unpacked_into_memory_that_can_be_written() -> None:
    rows = packed(0, 3).numpy().copy()
    rows.flags.writeable = False
    batch = LAYOUT.unpack(rows)
    for leaf in batch.values(include_nested=True, leaves_only=True):
        leaf.zero_()
    assert numbers(LAYOUT.unpack(rows)) == [0, 1, 2]


def test_rows_with_gaps_between_them_are_unpacked() -> None:
    assert numbers(LAYOUT.unpack(packed(0, 10)[::3])) == [0, 3, 6, 9]


@each(
    "rows",
    [
        np.zeros((3, LAYOUT.payload_bytes - 1), np.uint8),
        np.zeros((3, LAYOUT.payload_bytes + 1), np.uint8),
        np.zeros((3, 2 * LAYOUT.payload_bytes), np.uint8)[:, ::2],
        np.zeros((LAYOUT.payload_bytes, 3), np.uint8).T,
    ],
)
def test_rows_of_another_form_are_refused(rows: np.ndarray) -> None:
    with pytest.raises(ValueError, match="bytes"):
        LAYOUT.unpack(rows)
    storage = LazyTensorStorage(10)
    storage.adopt(LAYOUT)
    with pytest.raises(ValueError, match="bytes"):
        storage.append_packed(rows)
    assert len(storage) == 0


@each("rows", [np.zeros((3, 5), np.int8), np.zeros(5, np.uint8), [[1, 2]]])
def test_what_are_no_bytes_is_no_row(rows: object) -> None:
    with pytest.raises(TypeError):
        LAYOUT.unpack(rows)  # type: ignore[arg-type]


def test_a_plan_whose_leaves_lie_outside_the_row_is_not_packed() -> None:
    plan = LAYOUT.plan(steps(0, 3), 1, 0)
    with pytest.raises(ValueError, match="outside the row"):
        _native.pack(plan, LAYOUT.payload_bytes - 1)
    with pytest.raises(MemoryError):
        _native.pack(plan, 1 << 62)


def test_steps_of_several_environments_are_not_packed() -> None:
    data = steps(0, 6).reshape(2, 3)
    with pytest.raises(ValueError, match="one environment"):
        _native.pack(RowLayout.of(data, 2).plan(data, 2, 1), LAYOUT.payload_bytes)


def test_bytes_that_belong_to_no_leaf_are_zero() -> None:
    plan = LAYOUT.plan(steps(5, 8), 1, 0)
    rows = _native.pack(plan, LAYOUT.payload_bytes + 64)
    assert not rows[:, LAYOUT.payload_bytes :].any() and torch.equal(rows[:, : LAYOUT.payload_bytes], packed(5, 8))


class TestAppendingPackedRows:
    @each(
        "message, of",
        [
            ("the batch has 1 environments, the store 2", {"payload_bytes": LAYOUT.payload_bytes, "strands": 2}),
            ("those of the store 0", {"payload_bytes": 0}),
            ("those of the store", {"payload_bytes": LAYOUT.payload_bytes + 8}),
        ],
    )
    def test_to_a_store_of_other_rows_is_refused(self, message: str, of: dict[str, Any]) -> None:
        s = store(of.pop("payload_bytes"), 4, **of)
        with pytest.raises(ValueError, match=message):
            s.append(0, LAYOUT.codec.check_packed(packed(0, 1)))
        assert s.lane(0)["published"] == 0

    def test_of_a_layout_that_the_check_of_borders_was_not_made_for_is_refused(self) -> None:
        step = {"obs": torch.zeros(1, 4), "next": {"obs": torch.zeros(1, 4), "done": torch.zeros(1, 1).bool()}}
        layout = RowLayout.of(step, 1)
        storage = LazyTensorStorage(10)
        storage.adopt(layout)
        wide = [(torch.uint8, (0,))] * (len(layout.leaves) - 1)
        other, _ = codec((torch.uint8, (layout.payload_bytes,)), *wide)
        with pytest.raises(ValueError, match="not that of the rows"):
            storage.lanes.store.append(0, other.check_packed(layout.pack(step)))
        assert len(storage) == 0

    def test_of_a_batch_that_was_checked_by_such_a_layout_is_refused(self) -> None:
        step = {"obs": torch.zeros(2, 4), "next": {"obs": torch.zeros(2, 4), "done": torch.zeros(2, 1).bool()}}
        layout = RowLayout.of(step, 1)
        storage = LazyTensorStorage(10)
        storage.adopt(layout)
        s = storage.lanes.store
        s.append(0, layout.codec.check(step, 1, 0))
        narrow, _ = codec(*[(leaf.dtype, (0,)) for leaf in layout.leaves])
        with pytest.raises(ValueError, match="not that of the rows"):
            s.append(0, narrow.check_list([torch.zeros(1, 0, dtype=leaf.dtype) for leaf in layout.leaves], 1, 0))
        fewer, _ = codec((torch.float32, (4,)))
        with pytest.raises(ValueError, match="not that of the rows"):
            s.append(0, fewer.check_list([torch.zeros(1, 4)], 1, 0))
        assert len(storage) == 2

    @each("write", ["push", "push of items", "push_columns", "push_step"])
    def test_of_what_is_checked_and_appended_at_once_by_such_a_layout_is_refused(self, write: str) -> None:
        whole, empty = (
            {"obs": torch.zeros(2, n), "next": {"obs": torch.zeros(2, n), "done": torch.zeros(2, 1).bool()}}
            for n in (4, 0)
        )
        layout, narrow = RowLayout.of(whole, 1), RowLayout.of(empty, 1)
        other, items = narrow.codec, narrow.item_codec(torch.device("cpu"))
        storage = LazyTensorStorage(10)
        storage.adopt(layout)
        s = storage.lanes.store
        s.append(0, layout.codec.check(whole, 1, 0))
        leaves = [torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(2, 1).bool()]
        step = {"obs": np.zeros((1, 0), np.float32), "next": {"obs": np.zeros((1, 0), np.float32), "done": np.zeros(1)}}
        one = {"obs": torch.zeros(0), "next": {"obs": torch.zeros(0), "done": torch.zeros(1).bool()}}
        given: dict[str, Any] = {
            "push": (empty, 1, 0),
            "push of items": ([one], 1, 0),
            "push_columns": (leaves, 1, 0),
            "push_step": (step,),
        }
        with pytest.raises(ValueError, match="not that of the rows"):
            getattr(_native, write.split()[0])(s, items if "items" in write else other, 0, *given[write])
        assert len(storage) == 2
