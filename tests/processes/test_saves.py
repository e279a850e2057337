"""Checkpoints of a store to which other processes write meanwhile."""

from __future__ import annotations

import random
import time

import pytest
import torch

import engram
from contracts.children import Child, Signal
from contracts.tiers import in_turns
from contracts.waiting import comes
from engram.data import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    NestedStorageCheckpointer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    StorageEnsemble,
    TensorStorageCheckpointer,
)
from engram.store.snapshots import RowSnapshot
from processes.held_lanes import HeldLaneCount
from processes.rows import Faults, Maker, check_rows, check_slices, columns

LANES, LANE = 3, 3000
CHECKPOINTERS = {
    "tensor": TensorStorageCheckpointer,
    "flat": FlatStorageCheckpointer,
    "nested": NestedStorageCheckpointer,
    "h5": H5StorageCheckpointer,
}
STORES = {
    "shared memory": lambda path: LazyTensorStorage(LANES * LANE, shared=True, lanes=HeldLaneCount(LANES)),
    "mapped file": lambda path: LazyMemmapStorage(LANES * LANE, scratch_dir=path / "store", lanes=HeldLaneCount(LANES)),
}


def write(rb, session, ready, pause):
    """Writes for ever; a new writer (and so a seam) now and then."""
    draw, lanes = random.Random(session), rb.storage.lanes
    for k in range(1 << 20):
        lane = lanes.hold()
        at, maker = lanes.states()[lane]["published"], Maker(lane, (session << 20) + k)
        for _ in range(draw.randrange(20, 60)):
            n = draw.choice((1, 7, 64, 64, 200))
            rb.extend(maker.rows(at, n))
            at += n
            time.sleep(pause)
        if k == 0:
            ready.send()
        lanes.mark_seam()  # the next one is another writer, who does not go on where this one stopped
        rb.storage.release()


class Running:
    """A store, and two processes that write to it."""

    def __init__(self, kind, path, checkpointer=TensorStorageCheckpointer, sampler=None, pause=0.0003):
        self.storage = STORES[kind](path)
        self.storage.checkpointer = checkpointer()
        self.rb = ReplayBuffer(storage=self.storage, sampler=sampler, batch_size=32)
        self.rb.extend(Maker(0, 1).rows(0, 100))
        ready = Signal()
        self.children = [Child(lambda s=s: write(self.rb, s, ready, pause), seconds=300) for s in range(2, LANES + 1)]
        for _ in self.children:
            ready.wait()

    def end(self):
        for child in self.children:
            child.kill()

    def states(self):
        return self.storage.lanes.states()


@pytest.fixture
def running(request, tmp_path):
    made = []

    def make(*args, **kwargs):
        made.append(Running(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.end()


def slices_of(storage, **how):
    return ReplayBuffer(storage=storage, sampler=SliceSampler(**how), batch_size=240).sample()


def check_saved(rb, before, after, left_out=0):
    """Every row is whole and the one of its number, and each lane is what it was at one moment between two looks."""
    faults, lanes, kept, frozen = Faults(), rb.storage.lanes, 0, 0
    for lane, state in enumerate(lanes.states()):
        first, stop = state["first"], state["published"]
        there = torch.arange(first, stop)
        batch, gone, absent, numbers = rb.storage.read(there % LANE + lane * LANE, sequences=True)
        faults.check(gone is None and absent is None, "rows are missing")
        check_rows(faults, batch, numbers, there % LANE + lane * LANE, LANE, "saved")
        c = columns(batch)
        faults.check((c["n"] == there.numpy()).all(), "other rows than these")
        change = c["n"][1:][c["session"][1:] != c["session"][:-1]].tolist()
        faults.check(change == [s for s in state["seams"] if first < s < stop], f"seams {state['seams']} at {change}")
        low, high = before[lane]["published"], after[lane]["published"]
        faults.check(low <= stop <= high, f"{stop} rows are saved, there were {low} before and {high} after")
        kept += stop - first
        frozen += stop - max(0, stop - LANE)
    # What a save leaves out are the oldest rows; some may have been gone already when it began.
    assert 0 <= left_out <= frozen - kept, (left_out, frozen, kept)
    check_slices(faults, slices_of(rb.storage, slice_len=6, traj_key="always"), 6, False, "saved")
    check_slices(faults, slices_of(rb.storage, slice_len=3), 3, True, "saved")
    assert not faults, faults[:3]


def twin(checkpointer=TensorStorageCheckpointer):
    storage = LazyTensorStorage(LANES * LANE, shared=True, lanes=HeldLaneCount(LANES))
    storage.checkpointer = checkpointer()
    return ReplayBuffer(storage=storage, batch_size=32)


def saves(running, kind, checkpointer, path, times):
    """Blocking and background saves in turns, each loaded into a twin and checked."""
    here = running(kind, path, CHECKPOINTERS[checkpointer])
    lost, draw = 0, random.Random(1)
    for k in range(times):
        before = here.states()
        handle = here.rb.dumps(path / "saved", blocking=bool(k % 2))
        after = here.states()
        if not isinstance(handle, str):
            handle.result(300)
            lost += handle.rows_left_out
        engram.verify(path / "saved")
        other = twin(CHECKPOINTERS[checkpointer])
        other.loads(path / "saved")
        check_saved(other, before, after, 0 if isinstance(handle, str) else handle.rows_left_out)
        time.sleep(draw.uniform(0, 0.02))
    return lost


@pytest.mark.parametrize(("checkpointer", "kind"), in_turns(CHECKPOINTERS, STORES))
def test_saves_are_whole_while_other_processes_write(kind, checkpointer, running, tmp_path):
    saves(running, kind, checkpointer, tmp_path, 4)


@pytest.mark.long
@pytest.mark.parametrize("checkpointer", CHECKPOINTERS)
@pytest.mark.parametrize("kind", STORES)
def test_hundreds_of_saves_are_whole_while_other_processes_write(kind, checkpointer, running, tmp_path):
    saves(running, kind, checkpointer, tmp_path, 60)


def test_rows_that_were_overwritten_before_they_were_saved_are_counted_and_left_out(running, monkeypatch, tmp_path):
    """The rows are read slowly; the writers go round their lanes meanwhile."""
    here = running("shared memory", tmp_path)
    assert comes(lambda: sum(s["published"] - s["first"] for s in here.states()[1:]) >= 0.9 * (LANES - 1) * LANE)

    def read_when_overwritten(self, *place):
        """Reads when the writers have gone half around their lanes since the save began."""
        there = [s["published"] + LANE // 2 for s in before[1:]]
        assert comes(lambda: all(s["published"] >= n for s, n in zip(here.states()[1:], there, strict=True)))
        return read_block(self, *place)

    read_block = RowSnapshot.read_block
    monkeypatch.setattr(RowSnapshot, "read_block", read_when_overwritten)
    for blocking in (True, False):
        before = here.states()
        handle = here.rb.dumps(tmp_path / "saved", blocking=blocking)
        after = here.states()
        if not isinstance(handle, str):
            handle.result(300)
            assert handle.rows_left_out > 0
        other = twin()
        other.loads(tmp_path / "saved")
        if not isinstance(handle, str):
            frozen = [s["published"] - s["first"] for s in before]
            saved = [s["published"] - s["first"] for s in other.storage.lanes.states()]
            assert sum(saved) < sum(frozen)
        check_saved(other, before, after, 0 if isinstance(handle, str) else handle.rows_left_out)


@pytest.mark.quick
def test_a_state_in_memory_is_whole_while_other_processes_write(running, tmp_path):
    here = running("shared memory", tmp_path, pause=0.0)
    for _ in range(5):
        before = here.states()
        state = here.rb.state_dict()
        after = here.states()
        other = twin()
        other.load_state_dict(state)
        check_saved(other, before, after)


def test_an_ensemble_is_saved_whole_while_other_processes_write(running, tmp_path):
    here = running("shared memory", tmp_path)

    def ensemble(*storages):
        samplers = SamplerEnsemble(*(RandomSampler() for _ in storages))
        return ReplayBuffer(storage=StorageEnsemble(*storages), sampler=samplers)

    both = ensemble(here.storage, LazyTensorStorage(10))
    both.storage.storages[1].checkpointer = TensorStorageCheckpointer()
    ReplayBuffer(storage=both.storage.storages[1]).extend(Maker(0, 9).rows(0, 5))
    for blocking in (True, False):
        before = here.states()
        handle = both.dumps(tmp_path / "saved", blocking=blocking)
        after = here.states()
        if not isinstance(handle, str):
            handle.result(300)
        other, small = twin(), LazyTensorStorage(10)
        ensemble(other.storage, small).loads(tmp_path / "saved")
        assert len(small) == 5
        check_saved(other, before, after)


@pytest.mark.parametrize("sampler", [SamplerWithoutReplacement, lambda: PrioritizedSampler(None, 1.0, 1.0)])
def test_a_sampler_goes_on_from_what_was_saved_while_other_processes_wrote(sampler, running, tmp_path):
    here = running("mapped file", tmp_path, sampler=sampler())
    for blocking in (True, False):
        before = here.states()
        here.rb.sample()
        handle = here.rb.dumps(tmp_path / "saved", blocking=blocking)
        after = here.states()
        if not isinstance(handle, str):
            handle.result(300)
        other = twin()
        other.set_sampler(sampler())
        other.loads(tmp_path / "saved")
        for _ in range(5):
            batch, info = other.sample(return_info=True)
            faults = Faults()
            check_rows(faults, batch, None, info["index"], LANE, "sampled")
            assert not faults, faults
        check_saved(other, before, after)
