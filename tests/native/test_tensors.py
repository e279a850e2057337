"""Tensors as slots and rows of a store; `core/test_store.py` does the same with arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from contracts.each import each
from native.core.support import store
from native.support import append_words, codec, words


@each("bad", [
    torch.zeros(1), torch.zeros(1, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int64).t(), torch.arange(8)[::2],
    torch.zeros(2, dtype=torch.int64, device="meta"), [0], None, b"12345678", np.arange(8)[::2], np.arange(2.0),
])  # fmt: skip
def test_only_contiguous_int64_slots_are_taken(bad: object) -> None:
    code, width = words(1)
    with pytest.raises(TypeError):
        store(width, 8).gather(code, bad)


def test_slots_of_several_dimensions_are_read_one_after_the_other() -> None:
    code, width = words(1)
    s = store(width, 8)
    append_words(s, code, 8)
    flat, grid = torch.tensor([5, 0, 3, 3]), torch.tensor([[5, 0], [3, 3]])
    assert torch.equal(s.gather(code, grid)[0][0], s.gather(code, flat)[0][0])


def test_two_leaves_of_one_row_come_from_the_same_row() -> None:
    code, width = codec((torch.int64, (5,)), (torch.int32, ()), (torch.uint8, (3,)))
    s = store(width, 100)
    n = torch.arange(250)
    s.append(0, code.check_list([n.reshape(-1, 1).expand(250, 5), n.int(), (n % 256).to(torch.uint8).expand(3, 250).T],
                                1, 0))  # fmt: skip
    a, b, c = s.gather(code, torch.randint(0, 100, (1000,)))[0]
    assert torch.equal(a[:, 0], b.long()) and torch.equal((b % 256).to(torch.uint8), c[:, 0])
