"""Saves that are killed: whatever the moment, the next load finds exactly the old state or the new one."""

import signal
from collections import Counter

import numpy as np
import pytest
import torch

from contracts.checkpointer import RowRings
from contracts.children import Signal
from contracts.kills import killed_after
from crash import tracer
from engram.data.replay_buffers.checkpointers import (
    TensorStorageCheckpointer,
    open_snapshot,
    rows,
    save_snapshot,
    verify,
)
from engram.errors import CheckpointError


class Counted(RowRings):
    """Rings whose rows are all a function of one number."""

    def __init__(self, number: int, size: int = 64) -> None:
        super().__init__(lane_capacity=size, lanes=2, strands=2, row_bytes=1024)
        self.memory[:] = np.arange(self.memory.size, dtype=np.uint32).reshape(self.memory.shape) * (number + 7) >> 8
        self.written = number > 0
        for lane in self.lanes:
            lane["published"] = number * size // 3


class Growing(RowRings):
    """Rings of one store that has gone on a bit at each number: a later save takes chunks over."""

    def __init__(self, number: int, size: int = 64) -> None:
        super().__init__(lane_capacity=size, lanes=2, strands=2, row_bytes=1024)
        self.written, self.name = number > 0, "the store"
        for lane in self.lanes:
            lane["published"] = number * (size // 16)
        for w in range(self.first(0), self.lanes[0]["published"]):
            self.memory[:, :, w % size] = np.arange(w, w + 1024, dtype=np.uint32).astype(np.uint8)


KINDS = [Counted, Growing]


def save(path, number, size=64, kind=Counted):
    components = {"sampler": {"number": number, "tree": torch.full((1000,), float(number))}}
    save_snapshot(path, components, (TensorStorageCheckpointer(), kind(number, size)), keep_last=1 + number % 2)


def state_at(path, size=64, kind=Counted):
    """The number that was saved, after a check that every part belongs to it; 0 when there is no checkpoint."""
    rings = kind(0, size)
    try:
        with open_snapshot(path) as opened:
            opened.load_storage(TensorStorageCheckpointer(), rings)
            sampler = opened.components["sampler"]
    except CheckpointError as error:
        assert "no checkpoint" in str(error)
        return 0
    number = sampler["number"]
    assert torch.equal(sampler["tree"], torch.full((1000,), float(number)))
    assert rings.contents() == kind(number, size).contents()
    return number


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 1 << 15)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("what", "calls"), [(tracer.KILL, tracer.CALLS), (tracer.SHORTEN_AND_KILL, tracer.WRITE)], ids=["at", "inside"]
)
def test_killed_at_every_system_call_a_save_leaves_the_old_state_or_the_new(ram_path, kind, what, calls, every):
    """And in the middle of every write, where a prefix of it is there. In CI at each third call."""
    every = every if what == tracer.KILL else 1
    number, at, kills, killed = 0, 1, Counter(), True
    while killed:

        def work(next_number=number + 1):
            tracer.start()
            save(ram_path, next_number, kind=kind)

        killed = tracer.run(work, ram_path, what, at, kinds=calls).killed
        state = state_at(ram_path, kind=kind)
        assert state in (number, number + 1)
        kills["old" if state == number else "new"] += killed
        # a first save that is killed early leaves the path without a checkpoint for the next kill, too
        number, at = state, at + every
    assert state == number and kills["old"] > 5 and (kills["new"] > 0) == (what == tracer.KILL)
    assert at > 60 or what == tracer.SHORTEN_AND_KILL
    assert verify(ram_path).ok and len(list(ram_path.glob("g-*"))) <= 4


@pytest.mark.quick
def test_a_reader_that_is_killed_blocks_no_save(tmp_path):
    save(tmp_path, 1)
    ready = Signal()

    def read():
        with open_snapshot(tmp_path):
            ready.send()
            signal.pause()

    def save_beside():
        ready.wait()
        save(tmp_path, 2)

    killed_after(save_beside, read)
    save(tmp_path, 4)
    assert [entry.name for entry in tmp_path.glob("g-*")] == ["g-000003"]
