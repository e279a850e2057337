"""Reading a few rows of a store with many lanes looks at the lanes of these rows only, and finds out the same."""

from __future__ import annotations

import threading

import pytest
import torch

from native.core.support import store
from native.support import append_strands, append_words, numbers_of, words

LANES, CAPACITY = 40, 5


@pytest.mark.parametrize("strands", [1, 2])
def test_rows_absent_slots_and_sequences_are_those_that_a_read_of_all_finds(strands: int) -> None:
    code, width = words(2)
    s = store(width, CAPACITY, lanes=LANES, strands=strands)
    for lane in range(LANES):
        append_strands(s, code, (lane * 7) % 13, lane)
    every = torch.arange(LANES * CAPACITY * strands)
    (rows,), overwritten, absent, sequences = s.gather(code, every, sequences=True)
    assert overwritten is None and absent
    for at in every.split(3):
        (some,), gone, lacking, numbers = s.gather(code, at, sequences=True)
        held = [i for i, slot in enumerate(at.tolist()) if slot not in absent]
        assert gone is None and (lacking or []) == [i for i, slot in enumerate(at.tolist()) if slot in absent]
        assert torch.equal(some[held], rows[at][held]) and torch.equal(numbers[held], sequences[at][held])


def test_no_slots_and_slots_outside_are_as_in_any_store() -> None:
    code, width = words(2)
    s = store(width, CAPACITY, lanes=LANES)
    append_words(s, code, 3, 1)
    (rows,), overwritten, absent, _ = s.gather(code, torch.arange(0))
    assert rows.shape == (0, 2) and overwritten is None and absent is None
    with pytest.raises(IndexError, match="outside 0 to 199"):
        s.gather(code, torch.tensor([5, 200]))


@pytest.mark.deep
def test_a_row_that_is_overwritten_while_it_is_copied_is_missing() -> None:
    code, width = words(50_000)  # of this length both let the GIL go
    s = store(width, 2, lanes=LANES)
    for lane in range(3):
        append_words(s, code, 2, lane)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for lane in range(3):
                append_words(s, code, 1, lane)

    writer = threading.Thread(target=write)
    writer.start()
    seen = 0
    try:
        while seen < 4:
            at = torch.tensor([0, 3, 5])
            (rows,), overwritten, absent, sequences = s.gather(code, at, sequences=True)
            whole = [i for i in range(3) if i not in (overwritten or []) and i not in (absent or [])]
            numbers, agree = numbers_of(rows[whole])
            assert agree.all() and torch.equal(numbers, sequences[whole])
            seen += len(overwritten or [])
    finally:
        stop.set()
        writer.join()
