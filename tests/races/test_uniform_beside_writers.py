"""Uniform batches, which one native call makes, while rows are overwritten: by a thread, by another process."""

import threading
import time

import pytest
import torch
from tensordict import TensorDict

from contracts.children import Child
from engram.data import LazyTensorStorage, TensorDictReplayBuffer

CAPACITY, WIDE = 40, 400  # a batch of 256 of these rows is over 256 KB: it is copied without the GIL


def rows(start, n):
    numbers = torch.arange(start, start + n)
    wide = numbers.reshape(-1, 1).expand(-1, WIDE)
    return TensorDict({"first": numbers, "wide": wide, "last": numbers.double()}, [n])


def buffer(**arguments):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY, **arguments))
    rb.extend(rows(0, CAPACITY + 7))
    return rb


def check(batch):
    """Every row is one that was written, whole and in its place; returns the newest."""
    numbers = batch["first"]
    assert torch.equal(numbers % CAPACITY, batch["index"])
    assert torch.equal(numbers, batch["last"].long())
    assert bool((batch["wide"] == numbers.reshape(-1, 1)).all())
    return int(numbers.max())


@pytest.mark.quick
def test_no_row_is_torn_beside_a_thread_that_writes():
    rb, stop, changed = buffer(), threading.Event(), 0

    def write():
        while not stop.is_set():
            rb.extend(rows(rb.write_count, 5))

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        newest = check(rb.sample(256))
        until = time.monotonic() + 200
        while changed < 50 and time.monotonic() < until:
            before, newest = newest, check(rb.sample(256))
            assert newest > before - CAPACITY
            changed += newest != before
    finally:
        stop.set()
        writer.join(300)
    assert changed >= 50


@pytest.mark.parametrize("batch_size", [16, 256])
def test_no_row_is_torn_beside_a_process_that_writes(batch_size):
    rb, changed = buffer(shared=True), 0

    def write():
        while True:
            rb.extend(rows(rb.write_count, 3))

    writer = Child(write)
    try:
        newest = check(rb.sample(256))
        until = time.monotonic() + 200
        while changed < 100 and time.monotonic() < until:
            before, newest = newest, check(rb.sample(batch_size))
            changed += newest != before
    finally:
        writer.kill()
    assert changed >= 100
