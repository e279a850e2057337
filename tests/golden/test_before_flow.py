"""Stores and checkpoints from before rows could be removed: they work as they did, and `remove` says what to do."""

from __future__ import annotations

import gzip
import shutil
import struct
from pathlib import Path

import pytest
import torch

from engram import _native
from engram.data import LazyMemmapStorage, LazyTensorStorage, MinSize, QueueSampler, ReplayBuffer
from engram.errors import StorageError
from engram.store.header import FILE_NAME
from golden.make import DATA, REMOVED_STORE, STORE
from golden.steps import steps

CONSUMERS_OFFSET, FEATURES, FLOW = 248, 16, 8  # of the header; the bit of the feature


def copied(name: str, folder: Path) -> Path:
    shutil.copytree(DATA / name / "scratch", folder, copy_function=shutil.copyfile)
    return folder


def test_a_store_from_before_is_read_and_written_and_its_rows_cannot_be_removed(tmp_path: Path) -> None:
    folder = copied(STORE, tmp_path / "store")
    before = (folder / FILE_NAME).read_bytes()
    assert not struct.unpack_from("<Q", before, FEATURES)[0] & FLOW
    rb = ReplayBuffer.open(folder)
    with pytest.raises(StorageError, match=r"by an engram that removed no rows.*engram convert.*Nothing was removed"):
        rb.remove(0)
    with pytest.raises(StorageError, match=r"by an engram that had no rate limiter: `engram convert`"):
        rb.rate_limiter = MinSize(2)
    with pytest.raises(StorageError, match=r"by an engram whose stores were no queues: `engram convert`"):
        rb.set_sampler(QueueSampler())
    assert rb.stats().removed == 0 and rb.stats().waiting is None and not rb.fills_up
    rb.note_policy_version(1)
    rb.extend(steps(100, 5).select("obs", "action", "next"))
    assert len(rb.sample(30)) == 30 and len(rb) > 8
    rb.storage.close()
    after = (folder / FILE_NAME).read_bytes()
    assert struct.unpack_from("<Q", after, FEATURES) == struct.unpack_from("<Q", before, FEATURES)
    assert ReplayBuffer.open(folder, read_only=True).stats().removed == 0


def test_a_store_without_the_feature_works_as_one_with_it_and_refuses_to_remove() -> None:
    for flow in (False, True):
        store = _native.Store.create(-1, 1, 10, 1, 0, 8, False, b"", bytes(16), flow=flow)
        store.advance(0, 12)
        zero = torch.zeros(1, dtype=torch.int64)
        assert store.has_flow is flow and store.removed_rows == 0 and store.removed(zero) is None
        drawn = store.uniform(zero, 50)
        assert drawn is not None and set(drawn.tolist()) <= set(range(10))
        if not flow:
            with pytest.raises(ValueError, match="made by an engram that removed no rows"):
                store.remove(0, zero, zero)
            with pytest.raises(ValueError, match="made by an engram that removed no rows"):
                store.restore_removed(0, 2, b"\1")


def test_a_checkpoint_with_removed_rows_is_not_loaded_into_a_store_that_cannot_remove(tmp_path: Path) -> None:
    folder = copied(STORE, tmp_path / "store")
    rows = steps(0, 6).select("obs", "action", "next")
    saved = ReplayBuffer(storage=LazyTensorStorage(12))
    saved.extend(rows)
    saved.dumps(tmp_path / "none-removed")
    saved.remove(torch.tensor([2, 3]))
    saved.dumps(tmp_path / "removed")
    rb = ReplayBuffer.open(folder)
    before = rb.write_count
    with pytest.raises((StorageError, ValueError), match="removed no rows"):
        rb.loads(tmp_path / "removed")
    assert rb.write_count in (0, before)
    rb.loads(tmp_path / "none-removed")
    assert len(rb) == 6
    rb.storage.close()


def test_a_store_that_was_used_for_what_is_not_known_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    image = bytearray(gzip.decompress((DATA / REMOVED_STORE / f"{FILE_NAME}.gz").read_bytes()))
    (at,) = struct.unpack_from("<Q", image, CONSUMERS_OFFSET)
    assert struct.unpack_from("<Q", image, at) == (1,)  # its rows were removed
    struct.pack_into("<Q", image, at, 1 | 8)
    (folder / FILE_NAME).write_bytes(image)
    for how in ({}, {"read_only": True}):
        with pytest.raises(StorageError, match=r"used for what this engram does not know \(bits 8.*newer"):
            ReplayBuffer.open(folder, **how)
    assert (folder / FILE_NAME).read_bytes() == image
    struct.pack_into("<Q", image, at, 1)
    (folder / FILE_NAME).write_bytes(image)
    ReplayBuffer.open(folder).storage.close()


def test_a_store_that_removed_nothing_says_so_until_a_row_is_removed(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path))
    rb.extend(torch.arange(5))
    memory = rb.storage.lanes.store.memory()
    (at,) = struct.unpack_from("<Q", memory, CONSUMERS_OFFSET)
    assert struct.unpack_from("<Q", memory, FEATURES)[0] & FLOW and not memory[at : at + 4096].any()
    rb.remove(2)
    assert struct.unpack_from("<QQ", memory, at) == (1, 2)
    rb.storage.close()
