"""n-step returns of rows that another process overwrites: none is made of rows of two times."""

import time

import numpy as np
import pytest
import torch

import engram._native as _native
from contracts.children import Child
from engram.data import LazyTensorStorage, ReplayBuffer

CAPACITY, STEPS, TAKEN = 40, 12, 200
PATHS = ("next", "reward"), ("next", "done")


def steps(start, n):
    numbers = torch.arange(start, start + n)
    return {"next": {"reward": numbers.float(), "done": numbers % 9 == 0}}


@pytest.mark.quick
def test_rewards_are_those_of_steps_that_follow_on_each_other():
    rb = ReplayBuffer(storage=LazyTensorStorage(CAPACITY, shared=True))
    rb.extend(steps(0, CAPACITY))

    def write():
        for t in range(CAPACITY, 1 << 22, 5):
            rb.extend(steps(t, 5))

    storage = rb.storage
    leaves = [[leaf.path for leaf in storage.layout.leaves].index(path) for path in PATHS]
    slots = np.arange(CAPACITY // 2, CAPACITY).repeat(50)  # of which most hold rows at most times
    ones, taken, lost, newest = np.ones(STEPS + 1, np.float32), 0, 0, 0
    writer = Child(write)
    try:
        until = time.monotonic() + 200
        while taken < TAKEN and time.monotonic() < until:
            found = _native.read_n_steps(storage.lanes.store, storage.layout.codec, slots, ones, *leaves)
            if found is None:
                lost += 1
                continue
            rewards, last, counts = (tensor.numpy() for tensor in found[:3])
            first = rewards[:, 0]
            assert (first % CAPACITY == slots).all() and (last == (slots + counts - 1) % CAPACITY).all()
            within = np.arange(STEPS) < counts[:, None]
            assert (rewards == (first[:, None] + np.arange(STEPS)) * within).all()
            done = (first + counts - 1) % 9 == 0
            assert (done | (counts == STEPS) | (first + counts - 1 >= first.max())).all()
            taken, newest = taken + (first.max() != newest), first.max()
    finally:
        writer.kill()
    assert taken >= TAKEN and lost > 0
