"""Batches by priority and of epochs, which one native call makes, while a thread overwrites their rows."""

import threading
import time

import pytest
import torch
from tensordict import TensorDict

from engram.data import (
    LazyTensorStorage,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

CAPACITY, WIDE = 40, 400  # a batch of 256 of these rows is over 256 KB: it is copied without the GIL
PRIORITIES = 7  # from 1 on; CAPACITY is no multiple of it, so that the next row in a slot has another one


def rows(start, n):
    numbers = torch.arange(start, start + n)
    wide = numbers.reshape(-1, 1).expand(-1, WIDE)
    return TensorDict({"first": numbers, "wide": wide, "td_error": 1.0 + numbers % PRIORITIES}, [n])


def check(batch):
    """Every row is one that was written, whole and in its place; returns their numbers."""
    numbers = batch["first"]
    assert torch.equal(numbers % CAPACITY, batch["index"])
    assert bool((batch["wide"] == numbers.reshape(-1, 1)).all())
    return numbers


class Writing:
    """A thread that writes `n` rows at a time to a buffer, whose rows it fills first."""

    def __init__(self, rb, n, pause=0.0):
        rb.extend(rows(0, CAPACITY))
        self._rb, self._n, self._pause, self._stop = rb, n, pause, threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)

    def _write(self):
        while not self._stop.is_set():
            self._rb.extend(rows(self._rb.write_count, self._n))
            time.sleep(self._pause)

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(300)


@pytest.mark.quick
def test_each_row_of_a_batch_by_priority_has_its_own_weight():
    rb = TensorDictPrioritizedReplayBuffer(1.0, 1.0, eps=0.0, storage=LazyTensorStorage(CAPACITY))
    newest, changed = 0, 0
    with Writing(rb, 5):
        until = time.monotonic() + 200
        while changed < 50 and time.monotonic() < until:
            batch = rb.sample(256)
            numbers = check(batch)
            assert torch.allclose(batch["priority_weight"], 1 / (1.0 + numbers % PRIORITIES))
            before, newest = newest, int(numbers.max())
            changed += newest != before
    assert changed >= 50


@pytest.mark.quick
def test_no_row_comes_twice_in_an_epoch():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=SamplerWithoutReplacement(), batch_size=4)
    epochs, overwritten = 0, 0
    with Writing(rb, 1, pause=0.001):
        until = time.monotonic() + 200
        while (epochs < 100 or not overwritten) and time.monotonic() < until:
            numbers = torch.cat([check(batch) for batch in rb])
            assert len(numbers.unique()) == len(numbers) <= CAPACITY
            epochs += 1
            overwritten += len(numbers) < CAPACITY
    assert epochs >= 100 and overwritten
