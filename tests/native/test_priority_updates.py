"""Priorities on their way to shards: copies of what is given, and these divided by the shards of their rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from contracts.each import each
from engram._native import Priorities, copy_updates, divide_updates
from engram.data import LazyTensorStorage, PrioritizedSampler, ReplayBuffer


def update(*indices: int, generations: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Updates of rows: the priority of each is its index and a half, its generation the tenfold."""
    index = torch.tensor(indices, dtype=torch.int64)
    return index, index + torch.tensor(0.5, dtype=torch.float64), index * 10 if generations else None


@each("generations", [True, False])
def test_a_copy_keeps_what_was_given(generations: bool) -> None:
    given = update(3, 0, 9, generations=generations)
    copied = copy_updates(*given, 10)
    assert copied is not None
    for one in given:
        if one is not None:
            one.zero_()
    assert copied[0].tolist() == [3, 0, 9] and copied[1].tolist() == [3.5, 0.5, 9.5]
    assert (None if copied[2] is None else copied[2].tolist()) == ([30, 0, 90] if generations else None)


@each(
    "wrong",
    [
        {"index": torch.tensor([1, 10])},
        {"index": torch.tensor([1, -1])},
        {"index": torch.tensor([1])},
        {"index": torch.tensor([1.0, 2.0])},
        {"index": torch.arange(4)[::2]},
        {"index": [1, 2]},
        {"priority": torch.ones(2)},
        {"priority": torch.ones(3, dtype=torch.float64)},
        {"priority": torch.ones(4, dtype=torch.float64)[::2]},
        {"generation": torch.tensor([1, 2, 3])},
        {"generation": torch.ones(2)},
    ],
)
def test_what_is_no_plain_update_of_rows_inside_is_left_to_the_caller(wrong: dict[str, Any]) -> None:
    given = dict(zip(("index", "priority", "generation"), update(1, 2), strict=True))
    assert copy_updates(**given, end=10) is not None
    assert copy_updates(**{**given, **wrong}, end=10) is None


@each("generations", [True, False])
def test_each_shard_gets_the_updates_of_its_rows_in_their_order(generations: bool) -> None:
    torch.manual_seed(0)
    given = [update(*torch.randint(40, (n,)).tolist(), generations=generations) for n in (30, 0, 50)]
    outside, parts = divide_updates(given, 10, 3)
    index = torch.cat([one[0] for one in given])
    assert outside == int((index >= 30).sum()) > 0 and [number for number, _ in parts] == [0, 1, 2]
    for number, part in parts:
        mine = index[index // 10 == number]
        assert torch.equal(part[0], mine) and torch.equal(part[1], mine + 0.5)
        assert (part[2] is None) is not generations and (part[2] is None or torch.equal(part[2], mine * 10))


def test_shards_without_updates_are_not_named() -> None:
    outside, parts = divide_updates([update(45, 99, 41)], 10, 6)
    assert outside == 1 and [(number, part[0].tolist()) for number, part in parts] == [(4, [45, 41])]
    assert divide_updates([], 10, 6) == (0, [])


@each(
    ("wrong", "error"),
    [
        (([update(1), update(2, generations=False)], 10, 2), ValueError),
        (([update(-1)], 10, 2), IndexError),
        (([(torch.tensor([1, 2]), torch.ones(1, dtype=torch.float64), None)], 10, 2), ValueError),
        (([(torch.tensor([1]), torch.ones(1, dtype=torch.float64), torch.tensor([1, 2]))], 10, 2), ValueError),
        (([(torch.tensor([1]), torch.ones(1), None)], 10, 2), ValueError),
        (([update(1)], 0, 2), ValueError),
        (([update(1)], 10, 0), ValueError),
    ],
)
def test_what_cannot_be_divided_is_refused(wrong: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        divide_updates(*wrong)


def test_checked_priorities_are_copies_in_float64() -> None:
    priorities, given = Priorities(0.6, 1e-8, False), torch.tensor([0.0, 2.5])
    checked = priorities.checked(given, 2)
    given.zero_()
    assert checked is not None and checked.dtype is torch.float64 and checked.tolist() == [0.0, 2.5]
    assert priorities.checked(given, 3) is None and priorities.checked([1.0], 1) is None
    assert priorities.checked(torch.ones(2, dtype=torch.int64), 2) is None


def test_draws_beyond_all_memory_are_refused_before_they_wrap_around() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=PrioritizedSampler(10, 0.6, 0.4), batch_size=2)
    rb.extend(torch.arange(4))
    for n in (1 << 61, 1 << 60, (1 << 64) - 1):
        with pytest.raises(MemoryError):
            Priorities(0.6, 1e-8, False).draw(rb.storage.lanes.store, torch.tensor([1]), n, 0.4, False)


@each("wrong", [-1.0, float("nan"), float("inf"), 1e308])
def test_a_wrong_priority_is_named_with_its_place(wrong: float) -> None:
    with pytest.raises(ValueError, match="at position 1"):
        Priorities(1.5, 1e-8, False).checked(torch.tensor([1.0, wrong, 3.0], dtype=torch.float64), 3)
