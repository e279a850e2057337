"""Columns that are checked once and appended part by part: as batches of these rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from contracts.each import each
from engram import _native
from engram.store.layout import RowLayout
from native.core.support import store

ROOM = 12


def columns(room: int = ROOM) -> list[Any]:
    obs = np.arange(4.0 * (room + 1), dtype=np.float32).reshape(-1, 4)
    return [obs[:-1], obs[1:], np.arange(room) % 5 == 4]


def layout_of(given: list[Any]) -> RowLayout:
    return RowLayout.of({"obs": given[0], "next": {"obs": given[1], "done": given[2]}}, 1)


LAYOUT = layout_of(columns())


def rows_of(s: _native.Store) -> Any:
    n = min(s.lane(0)["published"], s.lane_capacity)
    return s.gather(LAYOUT.codec, torch.arange(n), None, None, False, False)[0]


def same_rows(one: _native.Store, other: _native.Store) -> bool:
    a, b = rows_of(one), rows_of(other)
    return torch.equal(a["obs"], b["obs"]) and all(torch.equal(a["next"][k], b["next"][k]) for k in ("obs", "done"))


@each("parts", [[(0, 12)], [(0, 1), (1, 1), (2, 5), (11, 1)], [(7, 5), (0, 3)]])
def test_parts_are_appended_as_slices_are(parts: list[tuple[int, int]]) -> None:
    one, other = store(LAYOUT.payload_bytes, 20), store(LAYOUT.payload_bytes, 20)
    checked = LAYOUT.codec.check_columns(columns(), 1, 0)
    assert checked is not None
    for first, steps in parts:
        assert one.append(0, checked, first, steps, False)
        _native.push_columns(other, LAYOUT.codec, 0, [c[first : first + steps] for c in columns()], 1, 0)
    assert same_rows(one, other) and one.lane(0)["published"] == sum(steps for _, steps in parts)


def test_what_is_written_into_the_arrays_afterwards_is_appended() -> None:
    s, given = store(LAYOUT.payload_bytes, 20), columns()
    checked = LAYOUT.codec.check_columns(given, 1, 0)
    given[0][3] = 77
    del given
    assert checked is not None and s.append(0, checked, 3, 1, False)
    assert rows_of(s)["obs"].tolist() == [[77.0] * 4]


@each("first, steps", [(0, ROOM + 1), (ROOM, 1), (ROOM + 1, 0), (3, ROOM - 2), (2**63, 2**63)])
def test_rows_that_the_columns_do_not_have_are_refused(first: int, steps: int) -> None:
    s = store(LAYOUT.payload_bytes, 20)
    checked = LAYOUT.codec.check_columns(columns(), 1, 0)
    assert checked is not None
    with pytest.raises(IndexError, match="fewer steps"):
        s.append(0, checked, first, steps, False)
    assert s.lane(0)["published"] == 0


def test_no_rows_change_nothing() -> None:
    s, checked = store(LAYOUT.payload_bytes, 20), LAYOUT.codec.check_columns(columns(), 1, 0)
    assert checked is not None and s.append(0, checked, ROOM, 0, False) and s.lane(0)["published"] == 0


@each("place", range(3))
def test_columns_whose_memory_may_move_are_not_checked(place: int) -> None:
    given = columns()
    given[place] = torch.from_numpy(given[place].copy())
    assert LAYOUT.codec.check_columns(given, 1, 0) is None


@each("change", [lambda c: c[:2], lambda c: [c[0], c[1].astype(np.float64), c[2]], lambda c: [c[0], c[1][:3], c[2]]])
def test_columns_of_other_rows_are_not_checked(change: Any) -> None:
    assert LAYOUT.codec.check_columns(change(columns()), 1, 0) is None


def test_the_arrays_cannot_be_resized_while_they_may_be_appended() -> None:
    given = [column.copy() for column in columns()]
    checked = LAYOUT.codec.check_columns(given, 1, 0)
    with pytest.raises(ValueError, match="resize"):
        given[0].resize((2, 4))
    assert checked is not None


def test_a_store_of_smaller_rows_or_without_the_lane_is_refused() -> None:
    checked = LAYOUT.codec.check_columns(columns(), 1, 0)
    assert checked is not None
    with pytest.raises(ValueError, match="outside the row"):
        store(LAYOUT.payload_bytes - 8, 20).append(0, checked, 0, 1)
    with pytest.raises(IndexError, match="lane 1 of 1"):
        store(LAYOUT.payload_bytes, 20).append(1, checked, 0, 1)


def test_a_store_of_several_environments_takes_none() -> None:
    s = store(LAYOUT.payload_bytes, 20, strands=2)
    checked = LAYOUT.codec.check_columns(columns(), 1, 0)
    assert checked is not None
    with pytest.raises(ValueError, match="the batch has 1 environments, the store 2"):
        s.append(0, checked, 0, 1)
    assert s.lane(0)["published"] == 0


def test_rows_that_store_their_own_index_get_it() -> None:
    n = np.arange(6)
    layout = RowLayout.of({"index": n, "x": n}, 1)
    s = store(layout.payload_bytes, 4)
    own = next(k for k, leaf in enumerate(layout.leaves) if leaf.path == ("index",))
    given: list[Any] = [None if k == own else n for k in range(2)]
    checked = layout.codec.check_columns(given, 1, 0, own)
    assert checked is not None
    assert s.append(0, checked, 0, 3, False) and s.append(0, checked, 3, 3, False)
    rows = s.gather(layout.codec, torch.arange(4), None, None, False, False)[0]
    assert rows["index"].tolist() == [0, 1, 2, 3] and rows["x"].tolist() == [4, 5, 2, 3]
