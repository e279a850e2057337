"""Removed rows and forks: a shared store has one set of them, private memory a copy in each process."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from contracts.children import Child
from contracts.each import each
from engram.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, PrioritizedSampler, ReplayBuffer

pytestmark = pytest.mark.quick

SHARED = {
    "shared memory": lambda path: LazyTensorStorage(20, shared=True),
    "shared memory, two lanes": lambda path: LazyTensorStorage(20, shared=True, lanes=2),
    "file": lambda path: LazyMemmapStorage(20, scratch_dir=path / "store"),
}
PRIVATE = {
    "tensors": lambda path: LazyTensorStorage(20),
    "list": lambda path: ListStorage(20),
}


def filled(storage, sampler=None):
    rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=200)
    rb.extend(TensorDict({"n": torch.arange(10)}, [10]))
    return rb


def drawn(rb):
    return set(rb.sample()["n"].tolist())


def left_of(rb):
    """What is drawn, and how many rows count as removed."""
    return sorted(drawn(rb)), rb.stats().removed


def where(rb, *numbers):
    """The slots of these rows."""
    rows = rb[:]
    at = torch.as_tensor([row["n"] for row in rows]) if isinstance(rows, list) else rows["n"]
    held = rb.storage.lanes.store.generations(torch.arange(20)) >= 0
    return torch.arange(20)[held][torch.isin(at, torch.tensor(numbers))]


@each("kind", SHARED)
def test_child_of_a_shared_store_sees_what_was_removed_before_and_after_the_fork_and_removes_for_all(kind, tmp_path):
    rb = filled(SHARED[kind](tmp_path))
    rb.remove(where(rb, 0, 1))

    def child():
        seen = left_of(rb)
        rb.remove(where(rb, 8, 9))
        return seen, left_of(rb)

    before, after = Child(child).result()
    assert before == (list(range(2, 10)), 2) and after == (list(range(2, 8)), 4)
    assert left_of(rb) == (list(range(2, 8)), 4)
    rb.remove(where(rb, 7))
    assert Child(lambda: left_of(rb)).result() == (list(range(2, 7)), 5)


@each("kind", PRIVATE)
def test_each_process_has_its_own_removed_rows_in_private_memory(kind, tmp_path):
    rb = filled(PRIVATE[kind](tmp_path))
    rb.remove(where(rb, 0, 1))

    def child():
        seen = left_of(rb)
        rb.remove(where(rb, 8, 9))
        return seen, left_of(rb)

    before, after = Child(child).result()
    assert before == (list(range(2, 10)), 2) and after == (list(range(2, 8)), 4)
    assert left_of(rb) == (list(range(2, 10)), 2)
    rb.remove(where(rb, 5))
    assert left_of(rb) == ([2, 3, 4, 6, 7, 8, 9], 3)


@each("kind", SHARED)
def test_priorities_of_a_parent_follow_what_a_child_removes(kind, tmp_path):
    rb = filled(SHARED[kind](tmp_path), PrioritizedSampler(None, 1.0, 1.0))
    assert drawn(rb) == set(range(10))
    Child(lambda: rb.remove(where(rb, 3, 4))).result()
    assert drawn(rb) == {0, 1, 2, 5, 6, 7, 8, 9}


def test_child_that_was_killed_while_it_had_removed_nothing_leaves_the_parent_free_to_remove(tmp_path):
    rb = filled(LazyTensorStorage(20, shared=True))
    lanes = rb.storage.lanes

    def child():
        with lanes._removing(0):
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)

    victim = Child(child)
    with pytest.raises((AssertionError, EOFError)):
        victim.result()
    assert lanes.store.lane(0)["turn"] != 0  # its turn, until somebody wants it
    assert rb.remove(where(rb, 2)) == 1
    assert lanes.store.lane(0)["turn"] == 0
