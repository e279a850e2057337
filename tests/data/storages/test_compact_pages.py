"""A mapped store that keeps each observation once, larger than memory: which pages a batch brings, and how."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import engram._native as _native
from engram.data import Compact, LazyMemmapStorage, ReplayBuffer

ROWS = 400
PAGE = mmap.PAGESIZE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store whose pages are on the disk, and not in memory."""
    frames = torch.from_numpy(np.random.default_rng(0).integers(0, 255, (ROWS + 4, 84, 84), dtype=np.uint8))
    stacks = frames.unfold(0, 4, 1).movedim(-1, 1)
    rb = ReplayBuffer(storage=LazyMemmapStorage(ROWS, scratch_dir=tmp_path / "s", compact=Compact("x", frames=4)))
    rb.extend(TensorDict({"n": torch.arange(ROWS), "x": stacks[:-1], "next": {"x": stacks[1:]}}, [ROWS]))
    rb.storage.flush()
    rb.storage.close()
    drop_from_memory(tmp_path / "s")
    if pages_in_memory(tmp_path / "s") > 10:
        pytest.skip("the file system of the tests keeps its files in memory")
    return tmp_path / "s"


def drop_from_memory(folder: Path) -> None:
    """Drops the pages of the store's file that no process has touched."""
    with (folder / "rows.engram").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def pages_in_memory(folder: Path) -> int:
    """How many pages of the store's file the page cache has."""
    with (folder / "rows.engram").open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        states = (ctypes.c_ubyte * -(-len(memory) // PAGE))()
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(at), ctypes.c_size_t(len(memory)), states) == 0
        return sum(state & 1 for state in states)


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


def opened(folder: Path) -> ReplayBuffer:
    """The store, whose rows are in memory, while their observations are not."""
    rb = ReplayBuffer.open(folder)
    assert int(rb.storage.lanes.store.memory().sum()) > 0
    drop_from_memory(folder)  # what was read with the header
    return rb


def test_a_row_brings_the_pages_of_its_frames_and_no_others(folder):
    rb = opened(folder)
    before = pages_in_memory(folder)
    for slot in range(20, ROWS, 50):
        assert rb.storage.get(slot)["n"] == slot
    frames = 5 * 84 * 84 // PAGE + 3  # of a row, with a page at either end
    assert pages_in_memory(folder) - before <= len(range(20, ROWS, 50)) * frames + 16
    rb.storage.close()


def test_the_frames_of_a_batch_are_asked_for_before_the_first_is_touched(folder):
    rb = opened(folder)
    store, before = rb.storage.lanes.store, faults()
    slots = torch.arange(10, ROWS, 8)
    assert torch.equal(rb.storage.get(slots)["n"], slots)
    assert _native.testing.reads_ahead(store)
    alone = faults() - before  # the first 16 rows show that pages are missing
    assert alone < len(slots) * 5  # each row has pages of five frames, of 1.7 pages each
    rb.storage.close()
