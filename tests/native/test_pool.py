"""Output blocks: used again when every tensor of theirs is gone, and never before."""

from __future__ import annotations

import gc
import random
import threading

import pytest
import torch
from torch import Tensor

from contracts.children import Child
from engram import _native
from native.core.support import store
from native.support import append_words, codec, numbers_of, row_words, slots, words


def three_leaves() -> tuple[_native.Store, object]:
    code, width = codec((torch.int64, (4,)), (torch.int64, ()), (torch.uint8, (3,)))
    s = store(width, 64)
    n = torch.arange(64)
    s.append(0, code.check_list([row_words(n, 4), n, n.to(torch.uint8).expand(3, 64).T], 1, 0))
    return s, code


def test_a_kept_leaf_keeps_its_memory_when_the_batch_and_the_other_leaves_are_gone() -> None:
    s, code = three_leaves()
    draw, kept = random.Random(0), []
    for _ in range(500):
        where = torch.randint(0, 64, (draw.choice((1, 7, 64, 300)),))
        leaves, _, _, numbers = s.gather(code, where, sequences=True)
        kept.append((where, draw.randrange(3), draw.choice([leaves, [*leaves]])))
        kept[-1] = (where, kept[-1][1], kept[-1][2][kept[-1][1]])
        assert torch.equal(numbers, where)
        if len(kept) > 50:
            kept.pop(draw.randrange(50))
    del leaves
    gc.collect()
    for where, k, leaf in kept:
        expected = [row_words(where, 4), where, where.to(torch.uint8).expand(3, len(where)).T][k]
        assert torch.equal(leaf, expected)


@pytest.fixture
def nobody_elses_blocks() -> None:
    """Batches that earlier tests left to the garbage collection do not come back to the pool during this one."""
    gc.collect()


@pytest.mark.usefixtures("nobody_elses_blocks")
def test_blocks_come_back_and_are_used_again() -> None:
    s, code = three_leaves()
    where = torch.zeros(200, dtype=torch.int64)
    first = s.gather(code, where)[0]
    address = first[0].data_ptr()
    before = _native.testing.pool_bytes()
    del first
    assert _native.testing.pool_bytes() > before
    again = s.gather(code, where)[0]
    assert again[0].data_ptr() == address and _native.testing.pool_bytes() == before


@pytest.mark.usefixtures("nobody_elses_blocks")
def test_what_is_kept_can_be_given_back() -> None:
    s, code = three_leaves()
    held = s.gather(code, torch.zeros(200, dtype=torch.int64))[0]
    expected = [leaf.clone() for leaf in held]
    s.gather(code, torch.zeros(200_000, dtype=torch.int64))
    _native.testing.empty_pool()
    assert _native.testing.pool_bytes() == 0
    assert all(torch.equal(a, b) for a, b in zip(held, expected, strict=True))
    s.gather(code, torch.zeros(200, dtype=torch.int64))
    assert _native.testing.pool_bytes() > 0


@pytest.mark.parametrize("n", [1, 100, 1000, 40_000])
def test_each_leaf_lies_on_a_cache_line_in_blocks_of_every_size(n: int) -> None:
    code, width = codec((torch.int64, (4,)), (torch.uint8, ()), (torch.uint8, (3,)))
    s = store(width, 8)
    s.append(0, code.check_list([torch.ones(8, 4, dtype=torch.int64), torch.ones(8, dtype=torch.uint8),
                                 torch.ones(8, 3, dtype=torch.uint8)], 1, 0))  # fmt: skip
    leaves = s.gather(code, torch.zeros(n, dtype=torch.int64))[0]
    assert all(x.data_ptr() % 64 == 0 and bool((x == 1).all()) for x in leaves)


def test_a_large_leaf_has_a_block_of_its_own() -> None:
    code, width = codec((torch.float64, (1024,)), (torch.uint8, ()))
    s = store(width, 64)
    s.append(0, code.check_list([torch.ones(64, 1024, dtype=torch.float64), torch.arange(64, dtype=torch.uint8)], 1, 0))
    large, small = s.gather(code, torch.arange(64))[0]
    address = large.data_ptr()
    del large  # 512 KB go back while the small one lives
    large = s.gather(code, torch.arange(64))[0][0]
    assert large.data_ptr() == address and small.tolist() == list(range(64))


def test_what_a_caller_does_to_a_batch_changes_nothing_stored() -> None:
    s, code = three_leaves()
    leaves = s.gather(code, slots(5))[0]
    leaves[0].zero_()
    assert torch.equal(s.gather(code, slots(5))[0][0], row_words(slots(5), 4))


def test_tensors_may_be_dropped_by_any_thread() -> None:
    s, code = three_leaves()
    faults: list[str] = []
    shared: list[Tensor] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(2000):
            where = torch.randint(0, 64, (draw.randrange(1, 200),))
            leaves = s.gather(code, where)[0]
            shared.append(leaves[1])
            if len(shared) > 20:
                shared.pop(draw.randrange(10))
            if not torch.equal(leaves[0], row_words(where, 4)):
                faults.append("a batch that is not its rows")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not faults


@pytest.mark.deep
def test_a_forked_child_uses_its_own_pool_while_threads_use_the_parents() -> None:
    s, code = three_leaves()
    kept = s.gather(code, torch.arange(64))[0]
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            s.gather(code, torch.arange(64))

    def use() -> int:
        at_first = _native.testing.pool_bytes()
        for _ in range(50):
            rows = s.gather(code, torch.arange(64))[0][0]
            assert numbers_of(rows)[1].all()
        kept.clear()
        return at_first

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(15):
            assert Child(use).result() == 0
    finally:
        stop.set()
        thread.join()
    assert torch.equal(kept[1], torch.arange(64))


def test_long_copies_release_the_lock_of_the_interpreter_and_short_ones_do_not_need_to() -> None:
    code, width = words(8192)
    s = store(width, 32)
    append_words(s, code, 32)  # 2 MB
    rows, missing, _, _ = s.gather(code, torch.arange(32))
    assert missing is None and numbers_of(rows[0])[1].all()
