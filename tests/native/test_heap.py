"""The max-value writer's heap and the sequences of rows: what they refuse, and that they fit plain Python."""

import heapq
import os
import random

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram import _native
from native.core.support import store as store_of_words
from native.support import append_words, slots, words


def store(capacity=8, lanes=1, strands=1):
    return _native.Store.create(-1, lanes, capacity, strands, 0, 8, False, b"", os.urandom(16))


def append(s, n):
    _native.testing.publish(s, 0, _native.testing.claim(s, 0, n), n)


def ranks(*values):
    return torch.tensor(values, dtype=torch.float64)


@each("capacity", [1, 7, 8, 9, 64, 65, 700])
def test_each_replacement_takes_the_lowest_rank_and_slot(capacity):
    rng = random.Random(capacity)
    heap, s = _native.RankHeap(capacity), store(capacity)
    heap.behind(s)
    rows = {}
    for _ in range(60):
        batch = [float(rng.randrange(20)) for _ in range(rng.randrange(1, 40))]
        slots, appended, items, targets = heap.place(s, torch.tensor(batch).double(), "sum")
        expected, last = [], {}
        for i, rank in enumerate(batch):
            slot = len(rows) if len(rows) < capacity else min(rows, key=lambda k: (rows[k], k))
            if len(rows) == capacity and not rank > rows[slot]:
                slot = -1
            else:
                rows[slot] = rank
                if i >= appended:
                    last[slot] = i
            expected.append(slot)
        assert slots.tolist() == expected
        assert ({} if items is None else dict(zip(targets.tolist(), items.tolist(), strict=True))) == last
        append(s, appended)
        heap.written(s)


@pytest.mark.parametrize("values", [20, 1 << 40])
def test_replacements_in_a_heap_that_no_cache_holds_take_the_lowest_ones_too(values):
    capacity, rng = (1 << 16) + 9, random.Random(values)
    heap, s = _native.RankHeap(capacity), store(capacity)
    heap.behind(s)
    rows = [float(rng.randrange(values)) for _ in range(capacity)]
    heap.place(s, ranks(*rows), "sum")
    append(s, capacity)
    heap.written(s)
    lowest = [(rank, slot) for slot, rank in enumerate(rows)]
    heapq.heapify(lowest)
    for n in (1, 2, 3, 64, 500, 64):
        batch = [float(rng.randrange(values)) for _ in range(n)]
        expected = []
        for rank in batch:
            expected.append(lowest[0][1] if rank > lowest[0][0] else -1)
            if rank > lowest[0][0]:
                heapq.heapreplace(lowest, (rank, lowest[0][1]))
        assert heap.place(s, ranks(*batch), "sum")[0].tolist() == expected


def test_a_placement_can_be_taken_back():
    heap, s = _native.RankHeap(2), store(2)
    heap.behind(s)
    heap.place(s, ranks(1, 2), "sum")
    append(s, 2)
    heap.written(s)
    for _ in range(3):
        assert heap.place(s, ranks(3, 4, 5), "sum")[0].tolist() == [0, 1, 0]
        heap.undo()


def test_a_heap_refuses_what_it_cannot_hold():
    with pytest.raises(ValueError, match="2\\^40"):
        _native.RankHeap(0)
    with pytest.raises(ValueError, match="2\\^40"):
        _native.RankHeap(1 << 60)
    heap, s = _native.RankHeap(8), store()
    with pytest.raises(ValueError, match="does not follow"):
        heap.place(s, ranks(1), "sum")
    for other in (store(9), store(8, lanes=2), store(8, strands=2)):
        with pytest.raises(ValueError, match="another shape"):
            heap.behind(other)
    heap.behind(s)
    with pytest.raises(IndexError, match="outside the heap"):
        heap.put(torch.tensor([8]), ranks(1), "sum")
    with pytest.raises(IndexError, match="outside the heap"):
        heap.put(torch.tensor([-1]), ranks(1), "sum")
    with pytest.raises(ValueError, match="one rank"):
        heap.put(torch.tensor([1, 2]), ranks(1), "sum")
    with pytest.raises(ValueError, match="reduction"):
        heap.place(s, ranks(1), "best")


@each("values",
    [torch.zeros(4, 2).t(), torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.complex64), "no", [1.0],
     torch.zeros(4, device="meta"), torch.zeros(3).to_sparse(), np.zeros((4, 2)).T])  # fmt: skip
def test_values_that_are_no_plain_numbers_are_refused(values):
    with pytest.raises(TypeError):
        _native.ranks(values, "sum")


def test_values_without_rows_or_numbers_are_refused():
    with pytest.raises(ValueError, match="dimension"):
        _native.ranks(torch.tensor(1.0), "sum")
    with pytest.raises(ValueError, match="no values"):
        _native.ranks(torch.zeros(3, 0), "sum")
    assert _native.ranks(torch.zeros(0, 3), "sum") == []


@each("make", [torch.tensor, np.array])
@each("reduction", ["sum", "mean", "max", "min", "median"])
def test_a_nan_among_the_values_is_the_rank(make, reduction):
    for row in ([1.0, float("nan"), 3.0], [float("nan"), 1.0, 2.0], [1.0, 2.0, float("nan")]):
        found = _native.ranks(make([row, [1.0, 2.0, 6.0]]), reduction)
        assert np.isnan(found[0]) and found[1] == {"sum": 9, "mean": 3, "max": 6, "min": 1, "median": 2}[reduction]


def test_sequences_are_given_once_and_a_damaged_count_of_them_is_no_harm():
    s = store()
    assert [s.reserve_sequences(3) - _native.FIRST_REPLACED, s.reserve_sequences(1) - _native.FIRST_REPLACED] == [0, 3]
    for damaged in (2**64 - 1, 2**63):
        s.replaced = damaged
        assert _native.FIRST_REPLACED <= s.reserve_sequences(2**64 - 1) < 2**63


def carrying(capacity):
    """A store of rows of one word, which carry their sequence behind it; its codec, and the codec of the whole row."""
    kinds = (TensorDict, None, torch.Size, np.ndarray, np.generic)
    code = _native.Codec([(0, 64, (1,), 0)], None, *kinds, 8)
    whole = _native.Codec([(0, 64, (2,), 0)], None, *kinds)
    return store_of_words(16, capacity), code, whole


def test_a_row_and_its_sequence_are_written_together():
    s, code, whole = carrying(4)
    s.append(0, code.check_list([torch.arange(4).reshape(4, 1)], 1, 0))
    assert s.gather(whole, torch.arange(4))[0][0].tolist() == [[0, 0], [1, 0], [2, 0], [3, 0]]
    plan = code.check_list([torch.arange(100, 106).reshape(6, 1)], 1, 0)
    s.prepare_overwrite(slots(3, 0), plan, slots(5, 1), 70).write()
    s.overwrite(slots(3, 2), plan, slots(0, 4))  # in place: each keeps the sequence that it has
    assert s.gather(whole, torch.arange(4))[0][0].tolist() == [[101, 71], [1, 0], [104, 0], [100, 75]]
    s.append(0, code.check_list([torch.tensor([[9]])], 1, 0))
    assert s.gather(whole, torch.tensor([0]))[0][0].tolist() == [[9, 0]]


def test_rows_without_a_place_for_their_sequence_get_none():
    s, code = word_store(4)
    append_words(s, code, 4)
    plan = code.check_list([torch.arange(2).reshape(2, 1)], 1, 0)
    with pytest.raises(ValueError, match="no place for their sequence"):
        s.prepare_overwrite(slots(0, 1), plan, None, 5)
    with pytest.raises(ValueError, match="does not fit the rows"):
        s.gather(carrying(4)[1], torch.tensor([0]))


def test_a_longer_copy_of_a_store_has_its_rows_counters_and_identity():
    s, code = word_store(4)
    append_words(s, code, 6)
    s.note_edits(slots(2))
    longer = s.widened(16, 8, b"{}", [(0, 8, 8)])
    behind = _native.Codec([(0, 64, (1,), 8)], None, TensorDict, None, torch.Size, np.ndarray, np.generic)
    every = torch.arange(4)
    assert longer.gather(behind, every)[0][0].tolist() == s.gather(code, every)[0][0].tolist()
    for name in ("store_id", "incarnation", "log_head"):
        assert getattr(longer, name) == getattr(s, name)
    assert longer.lane(0) == s.lane(0) and longer.log(0) == [2] and longer.layout == b"{}"


@each("move", [(0, 0, 9), (9, 0, 1), (0, 9, 8), (2**64 - 1, 0, 2), (0, 2**64 - 1, 2), (0, 0, 2**64 - 1)])
def test_a_longer_copy_never_takes_bytes_from_outside_of_a_row(move):
    s, _ = word_store(4)
    with pytest.raises(ValueError, match="outside the row"):
        s.widened(16, 8, b"", [move])
    with pytest.raises(ValueError, match="private memory"):
        store().widened(16, 8, b"", [])


def test_chosen_rows_of_a_plan_are_written_where_they_exist():
    s, code = word_store(4)
    append_words(s, code, 4)
    plan = code.check_list([torch.arange(100, 106).reshape(6, 1)], 1, 0)
    s.overwrite(slots(3, 0), plan, slots(5, 1))
    assert s.gather(code, torch.arange(4))[0][0].flatten()[[0, 3]].tolist() == [101, 105]
    for rows in (slots(6, 0), slots(0, -1)):
        with pytest.raises(IndexError, match="outside the batch"):
            s.overwrite(slots(1, 2), plan, rows)
    with pytest.raises(ValueError, match="one row"):
        s.overwrite(slots(1, 2), plan, slots(1))
    assert s.append(0, plan, 0, 2).tolist() == [0, 1] and s.append(0, plan).tolist() == [2, 3, 0, 1, 2, 3]
    assert s.append(0, plan, 4).tolist() == [0, 1] and s.append(0, plan, 5, 1, False) is True
    assert s.gather(code, torch.arange(4))[0][0].flatten().tolist() == [104, 105, 105, 105]


def word_store(capacity):
    code, payload = words(1)
    return store_of_words(payload, capacity), code
