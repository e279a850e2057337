"""A process that is killed, wherever it is, blocks nobody and takes no published row with it."""

from __future__ import annotations

import mmap
import os
import random
import struct
import time

import pytest
import torch

from contracts.children import Child, Signal
from contracts.kills import killed_at, lines_of
from contracts.tiers import in_turns
from contracts.waiting import NEVER
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
)
from engram.errors import StorageInUseError
from processes.held_lanes import HeldLaneCount
from processes.rows import Faults, Maker, check_rows, check_slices

LANE = 200
SLICES = {"slice_len": 4, "traj_key": None}


class Store:
    """A store with two lanes: the first is held by this process, the second by those that die."""

    def __init__(self, kind, path):
        self.kind, self.path = kind, path
        if kind == "named file":
            storage = LazyMemmapStorage(2 * LANE, scratch_dir=path / "store", lanes=HeldLaneCount(2))
        elif kind == "temporary file":
            storage = LazyMemmapStorage(2 * LANE, lanes=HeldLaneCount(2))
        else:
            storage = LazyTensorStorage(2 * LANE, shared=True, lanes=HeldLaneCount(2))
        self.rb = ReplayBuffer(storage=storage, batch_size=8, sampler=SliceSampler(**SLICES))
        self.maker = Maker(0, 1)
        self.side = mmap.mmap(-1, 4096)
        self.write(30)

    def write(self, n):
        first = self.rb.write_count and self.rb.storage.lanes.states()[0]["published"]
        index = self.rb.extend(self.maker.rows(first, n))
        assert index.tolist() == [(first + k) % LANE for k in range(n)]

    # ---- in a child ----
    def open(self):
        if self.kind == "named file":
            storage = LazyMemmapStorage(None, self.path / "store", existsok=True, lanes=HeldLaneCount(2))
            return ReplayBuffer(storage=storage, sampler=SliceSampler(**SLICES), batch_size=8)
        return self.rb

    def extend(self, rb, session, n=20):
        """Writes to the second lane and says so."""
        lane = rb.storage.lanes.hold()
        first = rb.storage.lanes.states()[lane]["published"]
        maker = Maker(lane, session)
        rb.extend(maker.rows(first, n))
        struct.pack_into("q", self.side, 8 * lane, first + n)
        return lane

    # ---- after a kill ----
    def _heir(self):
        return self.extend(self.open(), 1 << 30 | os.getpid(), 5)

    def check(self):
        """This process and a new one go on; every row that had been written is there."""
        began = time.monotonic()
        self.write(3)
        faults = Faults()
        for _ in range(3):
            batch, info = self.rb.sample(return_info=True)
            check_rows(faults, batch, None, info["index"], LANE, "beside")
            check_slices(faults, batch, 4, True, "beside")
        for lane in range(2):
            self._check_lane(faults, lane)
        assert Child(self._heir).result() == 1
        self._check_lane(faults, 1)
        assert not faults, faults[:3]
        assert time.monotonic() - began < NEVER, "somebody waited for the process that was killed"

    def _check_lane(self, faults, lane):
        state = self.rb.storage.lanes.states()[lane]
        returned = struct.unpack_from("q", self.side, 8 * lane)[0]
        faults.check(state["published"] >= returned, f"{returned} rows had returned, {state['published']} are there")
        there = torch.arange(state["first"], state["published"])
        if len(there):
            slots = there % LANE + lane * LANE
            batch, gone, absent, number = self.rb.storage.read(slots, sequences=True)
            faults.check(gone is None and absent is None, f"rows are missing: {gone} {absent}")
            check_rows(faults, batch, number, slots, LANE, "after a kill")
            faults.check((number == there).numpy(), "other rows than these")


STORES = ["named file", "temporary file", "shared memory"]


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    return Store(request.param, tmp_path)


# What a process is killed in: what it does before, and then.
def _first_write(store):
    rb = store.open()
    return lambda: store.extend(rb, 1 << 20)


def _write(store):
    rb = store.open()
    store.extend(rb, 1 << 21, 150)
    return lambda: store.extend(rb, 1 << 20, 120)


def _sample(store):
    rb = store.open()
    return lambda: [rb.sample() for _ in range(2)]


def _dumps(store):
    rb = store.open()
    store.extend(rb, 1 << 21)
    return lambda: rb.dumps(store.path / "saved")


def _release(store):
    rb = store.open()
    store.extend(rb, 1 << 21)
    return rb.storage.release


def _close(store):
    rb = store.open()
    store.extend(rb, 1 << 21)
    return rb.storage.close


def _alone(store):
    def refused():
        with pytest.raises(StorageInUseError):
            store.open().empty()

    return refused


KILLED_IN = {
    "open": lambda store: store.open,
    "its first write": _first_write,
    "extend": _write,
    "sample": _sample,
    "dumps": _dumps,
    "release": _release,
    "close": _close,
    "empty, which is refused": _alone,
}


def kills_in(what, store, most):
    """Kills a process at about `most` lines of what it does; checks after each."""
    begin = KILLED_IN[what]

    def count():
        work = begin(store)
        return lines_of(work)

    n = Child(count).result()
    store.check()
    kills = 0
    for line in range(0, n, max(1, n // most)):
        work = []
        kills += killed_at(line, lambda w=work: w[0](), prepare=lambda w=work: w.append(begin(store)))
        store.check()
    return kills


@pytest.mark.parametrize(("what", "store"), in_turns(KILLED_IN, STORES), indirect=["store"])
def test_a_process_killed_at_some_line_blocks_nobody_and_loses_nothing(what, store):
    kills_in(what, store, 4)


@pytest.mark.long
@pytest.mark.parametrize("what", KILLED_IN)
def test_a_process_killed_at_any_line_blocks_nobody_and_loses_nothing(what, store):
    kills_in(what, store, 500)


def everything(store, session, say):
    """All that a process does with a store, for ever."""
    draw, k = random.Random(session), 0
    while True:
        rb, k = store.open(), k + 1
        for sampler in (RandomSampler(), SamplerWithoutReplacement(), PrioritizedSampler(None, 1.0, 1.0)):
            rb.set_sampler(sampler)
            rb.sample(8)
        for _ in range(draw.randrange(5)):
            k += 1
            store.extend(rb, (session << 12) + k, draw.choice((1, 5, 60, 190)))
        say.send()
        if draw.random() < 0.3:
            rb.dumps(store.path / f"saved-{draw.randrange(2)}")
        if draw.random() < 0.5:
            rb.storage.release()
        if store.kind == "named file":
            rb.storage.close()


def kills_anywhere(store, times):
    draw = random.Random(1)
    for k in range(times):
        said = Signal()
        child = Child(lambda k=k, said=said: everything(store, 2 + k, said))
        if draw.random() < 0.8:
            said.wait()
        time.sleep(draw.uniform(0, 0.03))
        store.write(2)
        child.kill()
        store.check()


def test_a_process_killed_at_a_random_moment_blocks_nobody_and_loses_nothing(store):
    kills_anywhere(store, 4)


@pytest.mark.long
def test_hundreds_of_kills_at_random_moments_block_nobody_and_lose_nothing(store):
    kills_anywhere(store, 350)
