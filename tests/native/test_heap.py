"""The max-value writer's heap and the numbers of replaced rows: what they refuse, and that they fit plain Python."""

import os
import random

import numpy as np
import pytest
import torch

from engram import _native
from native.support import append_words, slots, words
from native.support import store as store_of_words


def store(capacity=8, lanes=1, strands=1):
    return _native.Store.create(-1, lanes, capacity, strands, 0, 8, False, b"", os.urandom(16))


def append(s, n):
    _native.testing.publish(s, 0, _native.testing.claim(s, 0, n), n)


def ranks(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("capacity", [1, 7, 8, 9, 64, 65, 700])
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


@pytest.mark.parametrize(
    "values",
    [torch.zeros(4, 2).t(), torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.complex64), "no", [1.0],
     torch.zeros(4, device="meta"), torch.zeros(3).to_sparse(), np.zeros((4, 2)).T],
    ids=str,
)  # fmt: skip
def test_values_that_are_no_plain_numbers_are_refused(values):
    with pytest.raises(TypeError):
        _native.ranks(values, "sum")


def test_values_without_rows_or_numbers_are_refused():
    with pytest.raises(ValueError, match="dimension"):
        _native.ranks(torch.tensor(1.0), "sum")
    with pytest.raises(ValueError, match="no values"):
        _native.ranks(torch.zeros(3, 0), "sum")
    assert _native.ranks(torch.zeros(0, 3), "sum") == []


@pytest.mark.parametrize("make", [torch.tensor, np.array], ids=["tensor", "array"])
@pytest.mark.parametrize("reduction", ["sum", "mean", "max", "min", "median"])
def test_a_nan_among_the_values_is_the_rank(make, reduction):
    for row in ([1.0, float("nan"), 3.0], [float("nan"), 1.0, 2.0], [1.0, 2.0, float("nan")]):
        found = _native.ranks(make([row, [1.0, 2.0, 6.0]]), reduction)
        assert np.isnan(found[0]) and found[1] == {"sum": 9, "mean": 3, "max": 6, "min": 1, "median": 2}[reduction]


def test_numbers_of_replaced_rows_belong_to_a_store_of_one_size():
    with pytest.raises(ValueError, match="one lane"):
        _native.RowNumbers(store(lanes=2))
    s = store()
    append(s, 8)
    numbers = _native.RowNumbers(s)
    for wrong in ([8], [-(2**62), 8]):
        with pytest.raises(IndexError, match="outside"):
            numbers.replaced(s, torch.tensor(wrong))
    larger = store(16)
    for call in (
        lambda: numbers.replaced(larger, torch.tensor([12])),
        lambda: numbers.generations(larger, torch.tensor([12])),
        lambda: numbers.restore(larger, torch.zeros(16, dtype=torch.int64), 1),
    ):
        with pytest.raises(ValueError, match="another size"):
            call()
    with pytest.raises(ValueError, match="more numbers"):
        numbers.restore(s, torch.zeros(9, dtype=torch.int64), 1)


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
    assert s.append(0, plan, 2).tolist() == [0, 1] and s.append(0, plan, 99).tolist() == [2, 3, 0, 1, 2, 3]


def word_store(capacity):
    code, payload = words(1)
    return store_of_words(payload, capacity), code
