"""Rows of several shards' answers become batches in which each is as likely as in one buffer."""

from __future__ import annotations

import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram._native import RowPool
from engram.kernel.rows import RowLayout
from engram.testing import chi_square

LEAST = 1e-4  # of the probability that counts deviate as far as they do
WIDTH = 3
AS_PARTS = (None, False, None, True)  # of `take`: no codec, nothing attached, no weights


def answer(n: int, start: int = 0, **others: Any) -> dict[str, Any]:
    """An answer of n rows with the slots `start`, `start + 1`, ...; each row's bytes are its slot."""
    slots = torch.arange(start, start + n)
    part = np.repeat((slots.numpy() % 256).astype(np.uint8)[:, None], WIDTH, 1)
    fields = {
        "lowest": None, "parts": [part], "slots": slots, "generation": slots * 7, "ratio": None, "last": None,
        "mask": None, "first_index": 0, "low": 0,
    }  # fmt: skip
    return {**fields, **others}


def pool(shards: int, unit: int = 1, seed: int = 3) -> RowPool:
    return RowPool(shards, unit, [WIDTH], seed)


def test_shards_give_rows_in_proportion_to_their_shares() -> None:
    p, shares = pool(4), [1.0, 0.0, 2.5, 0.5]
    for k, share in enumerate(shares):
        p.put(k, share, **answer(40_000 if share else 0, first_index=100_000 * k))
    p.begin(20_000)
    assert p.fill() is None
    index = p.take(*AS_PARTS)[1]
    assert chi_square(torch.bincount(index // 100_000, minlength=4), shares) > LEAST


def test_without_memory_no_batch_is_begun() -> None:
    p = pool(1)
    p.put(0, 1.0, **answer(10))
    with pytest.raises(MemoryError):
        p.begin(1 << 44)
    with pytest.raises(ValueError, match="no batch was begun"):
        p.fill()
    p.begin(5)
    assert p.fill() is None and len(p.take(*AS_PARTS)[1]) == 5


def test_a_row_has_its_own_bytes_and_numbers_and_each_answer_is_taken_in_its_order() -> None:
    p = pool(3)
    for k in range(3):
        p.put(k, 1.0, **answer(100, 50 * k, first_index=1000 * k))
    p.begin(60)
    assert p.fill() is None
    (part,), index, generation, *_ = p.take(*AS_PARTS)
    shard, slots = index // 1000, index % 1000
    assert torch.equal(generation, slots * 7) and torch.equal(
        part, (slots % 256).to(torch.uint8)[:, None].expand(-1, 3)
    )
    for k in range(3):
        assert slots[shard == k].tolist() == list(range(50 * k, 50 * k + int((shard == k).sum())))


def test_no_row_is_drawn_between_the_last_one_of_an_answer_and_the_next_answer() -> None:
    p = pool(2)
    p.put(0, 1.0, **answer(5))
    p.put(1, 1.0, **answer(1000, first_index=1000))
    p.begin(100)
    assert p.fill() == 0 == p.fill() and p.left(0) == 0
    taken = 1000 - p.left(1)
    p.put(0, 1e9, **answer(1000, 5))
    assert p.fill() is None and 1000 - p.left(1) == taken  # which are as few as the new share says
    assert p.take(*AS_PARTS)[1][5 + taken :].tolist() == list(range(5, 100 - taken))


def test_each_row_is_uniform_over_what_shards_held_when_they_drew_while_one_grows_a_hundredfold() -> None:
    rng, torch_rng = random.Random(0), torch.Generator().manual_seed(0)
    p, held = pool(3), [100, 40, 300]
    of_answer = [0, 0, 0]

    def put(k: int) -> None:
        n = rng.randint(20, 60)
        of_answer[k] = held[k]
        p.put(k, float(held[k]), **answer(0, slots=torch.randint(held[k], (n,), generator=torch_rng),
              parts=[np.zeros((n, WIDTH), np.uint8)], generation=torch.zeros(n, dtype=torch.int64),
              first_index=1_000_000 * k))  # fmt: skip

    for k in range(3):
        put(k)
    ranks, batches = [], 3000
    for batch in range(batches):
        held[1] = 40 + 3960 * batch // batches
        p.begin(16)
        pictures: list[tuple[int, list[int]]] = []
        done = False
        while not done:
            before = [p.left(k) for k in range(3)]
            picture, used_up = list(of_answer), p.fill()
            pictures.append((sum(before) - sum(p.left(k) for k in range(3)), picture))
            done = used_up is None
            if used_up is not None:
                put(used_up)
        index, at = p.take(*AS_PARTS)[1].tolist(), 0
        for n, picture in pictures:
            for row in index[at : at + n]:
                k, slot = divmod(row, 1_000_000)
                ranks.append((sum(picture[:k]) + slot + rng.random()) / sum(picture))
            at += n
    assert held[1] > 95 * 40 and len(ranks) == 16 * batches
    assert chi_square(torch.histc(torch.tensor(ranks), 50, 0, 1)) > LEAST


def test_units_stay_together() -> None:
    p = pool(2, unit=4)
    for k in range(2):
        p.put(k, 1.0, **answer(400, first_index=1000 * k, last=torch.arange(400) % 4 == 3, mask=torch.ones(400) > 0))
    p.begin(80)
    assert p.fill() is None
    _, index, _, weight, last, mask = p.take(*AS_PARTS)
    assert bool((index.reshape(-1, 4).diff() == 1).all()) and weight is None
    assert last.reshape(-1, 4).tolist() == [[False, False, False, True]] * 20 and bool(mask.all())


@each("wide", [True, False])
def test_weights_are_powers_of_the_least_leaf_of_all_shards_over_that_of_each_row(wide: bool) -> None:
    p = pool(2)
    p.put(0, 1.0, **answer(50, lowest=0.5, ratio=torch.full((50,), 0.25, dtype=torch.float64)))
    p.put(1, 1e-300, **answer(50, lowest=0.1, ratio=torch.ones(50, dtype=torch.float64)))
    p.begin(20)
    assert p.fill() is None
    weight = p.take(None, False, 0.5, wide)[3]
    assert weight is not None and weight.dtype is (torch.float64 if wide else torch.float32)
    assert torch.allclose(weight, torch.full_like(weight, (0.1 / 2.0) ** 0.5))


def test_where_answers_have_no_ratios_or_no_beta_is_given_there_are_no_weights() -> None:
    p, ratio = pool(2), torch.ones(50, dtype=torch.float64)
    p.put(0, 1.0, **answer(50, lowest=0.5, ratio=ratio))
    p.begin(20)
    assert p.fill() is None and p.take(*AS_PARTS)[3] is None
    p.put(1, 1.0, **answer(50))
    p.begin(40)
    assert p.fill() is None and p.take(None, False, 1.0, True)[3] is None


def packed(start: int, n: int) -> tuple[RowLayout, TensorDict, dict[str, Any]]:
    """A layout, a batch of it with the numbers from `start` on, and an answer with its rows."""
    numbers = torch.arange(start, start + n)
    batch = TensorDict({"n": numbers, "next": {"x": numbers[:, None].expand(-1, 3) / 2, "done": numbers % 2 == 0}}, [n])
    layout = RowLayout.of(batch, 1)
    return layout, batch, answer(n, start, parts=[layout.pack(batch).numpy()])


@each("n", [100, 40_000])
def test_rows_become_a_batch_in_the_form_of_the_layout_with_what_is_attached(n: int) -> None:
    layout, batch, first = packed(0, n)
    p = RowPool(2, 1, [layout.payload_bytes], 3)
    ratio = torch.rand(n, dtype=torch.float64) + 0.5
    p.put(0, 1.0, **{**first, "lowest": 1.0, "ratio": ratio})
    p.put(1, 1.0, **{**packed(n, n)[2], "lowest": 1.0, "ratio": ratio})
    p.begin(n)
    assert p.fill() is None
    made, index, generation, weight, *_ = p.take(layout.batch_codec, True, 1.0, False)
    assert made.batch_size == (n,) and len(index.unique()) == n > len(batch[: n // 2])
    assert made["index"] is index and made["generation"] is generation and made["priority_weight"] is weight
    assert torch.equal(made["n"], index) and torch.equal(made["next", "x"], index[:, None].expand(-1, 3) / 2)
    assert torch.equal(made["next", "done"], index % 2 == 0) and torch.equal(generation, index * 7)
    assert torch.equal(weight, ratio[index % n].float())
    p.put(0, 1.0, **first)
    p.begin(n // 2)
    assert p.fill() is None
    assert set(p.take(layout.batch_codec, True, None, True)[0].keys()) == {"n", "next", "index"}
    p.begin(2)
    assert p.fill() is None
    assert set(p.take(layout.batch_codec, False, None, True)[0].keys()) == {"n", "next"}


def test_a_layout_of_other_rows_is_refused() -> None:
    layout = packed(0, 1)[0]
    p = pool(1)
    p.put(0, 1.0, **answer(4))
    p.begin(2)
    assert p.fill() is None
    with pytest.raises(ValueError, match="layout"):
        p.take(layout.batch_codec, False, None, True)
    with pytest.raises(ValueError, match="beta"):
        p.take(None, False, float("inf"), True)
    assert p.take(*AS_PARTS)[1].tolist() == [0, 1]


def test_an_answer_that_was_replaced_lives_until_its_rows_are_taken() -> None:
    p, first = pool(1), answer(3)
    lives = weakref.ref(first["parts"][0])
    p.put(0, 1.0, **first)
    del first
    p.begin(6)
    assert p.fill() == 0
    p.put(0, 1.0, **answer(3, 3))
    assert p.fill() is None and lives() is not None
    (part,), index, *_ = p.take(*AS_PARTS)
    assert index.tolist() == list(range(6)) == part[:, 0].tolist() and lives() is None


def test_rows_of_the_only_shard_are_a_part_of_its_answer() -> None:
    p = pool(2)
    p.put(0, 0.0, **answer(0))
    p.put(1, 2.0, **answer(10, low=3))
    assert p.take_run(4) == (1, 0) and p.low() == [] and p.take_run(4) == (1, 4) and p.low() == [1] == [1]
    assert p.take_run(4) is None and p.left(1) == 2
    p.put(0, 1.0, **answer(10))
    assert p.take_run(1) is None


def test_shards_with_few_rows_left_are_named_once() -> None:
    p = pool(2)
    p.put(0, 1.0, **answer(20, low=10))
    p.put(1, 1.0, **answer(1000))
    p.begin(60)
    p.fill()
    assert p.low() == [0] and p.low() == []


def test_a_shard_that_is_dropped_gives_nothing() -> None:
    p = pool(2)
    p.put(0, 1.0, **answer(5))
    p.put(1, 1.0, **answer(1000, first_index=1000))
    p.begin(100)
    assert p.fill() == 0
    p.drop(0)
    assert p.fill() is None and p.total == 1.0
    assert int((p.take(*AS_PARTS)[1] < 1000).sum()) == 5


def test_an_answer_without_rows_is_used_up_at_once() -> None:
    p = pool(1)
    p.put(0, 3.0, **answer(0))
    p.begin(1)
    assert p.fill() == 0


def test_no_batch_is_made_of_nothing() -> None:
    p = pool(1)
    with pytest.raises(ValueError, match="begun"):
        p.fill()
    p.begin(1)
    with pytest.raises(RuntimeError, match="share"):
        p.fill()
    with pytest.raises(ValueError, match="whole"):
        p.take(*AS_PARTS)


@each(
    ("wrong", "error"),
    [
        ({"ratio": torch.ones(4, dtype=torch.float64)}, ValueError),
        ({"ratio": torch.ones(4, dtype=torch.float64), "lowest": 0.0}, ValueError),
        ({"slots": torch.arange(3)}, ValueError),
        ({"generation": torch.arange(5)}, ValueError),
        ({"generation": torch.arange(4.0)}, TypeError),
        ({"generation": torch.arange(8)[::2]}, ValueError),
        ({"ratio": torch.ones(4)}, TypeError),
        ({"ratio": torch.ones(3, dtype=torch.float64), "lowest": 1.0}, ValueError),
        ({"last": torch.ones(4)}, TypeError),
        ({"mask": torch.ones(5) > 0}, ValueError),
        ({"parts": []}, ValueError),
        ({"parts": [np.zeros((4, WIDTH - 1), np.uint8)]}, ValueError),
        ({"parts": [np.zeros((3, WIDTH), np.uint8)]}, ValueError),
        ({"parts": [np.zeros((4, WIDTH), np.int16)]}, ValueError),
        ({"parts": [np.zeros((4, 2 * WIDTH), np.uint8)[:, ::2]]}, ValueError),
        ({"parts": [np.zeros(12, np.uint8)]}, ValueError),
        ({"parts": [torch.zeros(4, WIDTH)]}, TypeError),
        ({"share": -1.0}, ValueError),
        ({"share": float("nan")}, ValueError),
        ({"share": float("inf")}, ValueError),
        ({"shard": 1}, IndexError),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(wrong: dict[str, Any], error: type[Exception]) -> None:
    p = pool(1)
    p.put(0, 2.0, **answer(9))
    with pytest.raises(error):
        p.put(**{"shard": 0, "share": 1.0, **answer(4), **wrong})
    assert p.total == 2.0 and p.left(0) == 9


def test_batches_and_answers_have_whole_units() -> None:
    p = pool(1, unit=3)
    for call in (lambda: p.put(0, 1.0, **answer(4)), lambda: p.begin(4)):
        with pytest.raises(ValueError, match="units"):
            call()


def test_answers_may_be_strided_and_go_when_they_were_used() -> None:
    p, wide = pool(1), np.arange(40, dtype=np.uint8).reshape(4, 10)
    p.put(0, 1.0, **answer(4, parts=[wide[:, 2:5]]))
    p.begin(4)
    assert p.fill() is None
    assert p.take(*AS_PARTS)[0][0].tolist() == wide[:, 2:5].tolist()
