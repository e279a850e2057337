"""A later save writes what has changed and links the rest; each snapshot is whole by itself."""

from __future__ import annotations

import errno
import itertools
import os
import shutil

import pytest
import torch

from contracts.checkpointer import ItemList, RowRings
from contracts.children import Child
from engram import verify
from engram.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer
from engram.data.replay_buffers.checkpointers import open_snapshot, rows, save_snapshot
from engram.data.replay_buffers.state.checkpointers.items import ITEMS_PER_CHUNK, ListStorageCheckpointer
from engram.data.replay_buffers.state.checkpointers.rows import TensorStorageCheckpointer
from engram.errors import CorruptCheckpointError
from engram.testing.helpers import state_of, steps


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 240)  # ten rows of RowRings


def save(path, rings, checkpointer=None, keep_last=1):
    return save_snapshot(path, {}, (checkpointer or TensorStorageCheckpointer(), rings), keep_last=keep_last)


def loaded(path, snapshot=None, capacity=100):
    twin = RowRings(lane_capacity=capacity)
    with open_snapshot(path, snapshot) as saved:
        saved.load_storage(TensorStorageCheckpointer(), twin)
    return twin.contents()


def files(path, snapshot):
    """Inode of each chunk by its name."""
    return {p.name: p.stat().st_ino for p in (path / snapshot / "storage").iterdir()}


def shared(path, before, after):
    old, new = files(path, before), files(path, after)
    return sorted(name for name in new if old.get(name) == new[name])


def test_chunks_that_have_not_changed_are_the_same_files(tmp_path):
    rings = RowRings()
    rings.append(0, 35)
    first = save(tmp_path, rings, keep_last=2)
    rings.append(0, 3)
    second = save(tmp_path, rings, keep_last=2)
    assert len(shared(tmp_path, first, second)) == 3 and len(files(tmp_path, second)) == 4
    assert loaded(tmp_path) == rings.contents()


def test_a_snapshot_stays_whole_when_the_one_it_took_files_from_is_removed(tmp_path):
    rings = RowRings()
    for _ in range(6):
        rings.append(0, 13)
        save(tmp_path, rings)
        assert loaded(tmp_path) == rings.contents() and verify(tmp_path).ok
    assert len([p for p in tmp_path.iterdir() if p.name.startswith("g-")]) == 1


def test_an_older_snapshot_is_as_it_was(tmp_path):
    rings = RowRings()
    rings.append(0, 95)
    first, then = save(tmp_path, rings, keep_last=3), rings.contents()
    for _ in range(2):
        rings.append(0, 33)
        save(tmp_path, rings, keep_last=3)
    assert loaded(tmp_path, first) == then and loaded(tmp_path) == rings.contents()


def test_the_oldest_chunk_of_a_ring_that_wrapped_is_linked_too(tmp_path):
    rings = RowRings()
    rings.append(0, 100)
    first = save(tmp_path, rings, keep_last=2)
    rings.append(0, 5)  # rows 0 to 4 are gone
    second = save(tmp_path, rings, keep_last=2)
    assert "rows-00000-00000000.bin" in shared(tmp_path, first, second)
    assert loaded(tmp_path) == rings.contents()


def test_a_chunk_with_a_row_that_was_changed_in_place_is_written_again(tmp_path):
    rings = RowRings()
    rings.append(0, 35)
    first = save(tmp_path, rings, keep_last=2)
    rings.memory[0, 0, 12] ^= 255
    rings.changed.append((0, 12))
    second = save(tmp_path, rings, keep_last=2)
    assert shared(tmp_path, first, second) == [f"rows-00000-0000000{c}.bin" for c in (0, 2, 3)]
    assert loaded(tmp_path) == rings.contents()


def test_rows_of_another_store_are_written_again(tmp_path):
    for salt in (1, 2):
        rings = RowRings()
        rings.append(0, 35, salt)
        save(tmp_path, rings)
        assert loaded(tmp_path) == rings.contents()


def test_saves_through_hooks_share_no_files_with_others(tmp_path):
    rb, seen = ReplayBuffer(storage=LazyTensorStorage(60)), []
    rb.extend(steps(0, 35))
    names = [rb.dumps(tmp_path, keep_last=5)]
    rb.register_save_hook(lambda td: seen.append(td["n"].tolist()) or td)
    names += [rb.dumps(tmp_path, keep_last=5), rb.dumps(tmp_path, keep_last=5)]
    rb.storage.checkpointer.save_hooks.clear()
    names += [rb.dumps(tmp_path, keep_last=5), rb.dumps(tmp_path, keep_last=5)]
    pairs = [shared(tmp_path, a, b) for a, b in itertools.pairwise(names)]
    assert seen == [list(range(35))] * 2 and pairs[:3] == [[], [], []] and len(pairs[3]) > 1
    twin = ReplayBuffer(storage=LazyTensorStorage(60))
    twin.loads(tmp_path)
    assert state_of(twin) == state_of(rb)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_where_there_are_no_links_files_are_copied(tmp_path, monkeypatch, code):
    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    rings = RowRings()
    rings.append(0, 35)
    first = save(tmp_path, rings, keep_last=2)
    monkeypatch.setattr(os, "link", refuse)
    rings.append(0, 3)
    second = save(tmp_path, rings, keep_last=2)
    assert shared(tmp_path, first, second) == [] and loaded(tmp_path) == rings.contents()
    chunk = tmp_path / second / "storage" / "rows-00000-00000000.bin"
    assert oct(chunk.stat().st_mode & 0o777) == "0o444"


def test_a_copy_that_is_not_what_was_saved_is_written_from_memory(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EXDEV, "no links")

    rings = RowRings()
    rings.append(0, 35)
    first = save(tmp_path, rings)
    chunk = tmp_path / first / "storage" / "rows-00000-00000001.bin"
    chunk.chmod(0o644)
    data = bytearray(chunk.read_bytes())
    data[5] ^= 1
    chunk.write_bytes(data)
    monkeypatch.setattr(os, "link", refuse)
    save(tmp_path, rings)
    assert loaded(tmp_path) == rings.contents() and verify(tmp_path).ok


def test_a_linked_chunk_that_rots_is_bad_in_every_snapshot_that_has_it(tmp_path):
    rings = RowRings()
    rings.append(0, 35)
    save(tmp_path, rings, keep_last=2)
    second = save(tmp_path, rings, keep_last=2)
    chunk = tmp_path / second / "storage" / "rows-00000-00000001.bin"
    chunk.chmod(0o644)
    data = bytearray(chunk.read_bytes())
    data[5] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"rows-00000-00000001\.bin.*no other snapshot"):
        loaded(tmp_path)


def test_after_a_damaged_pointer_everything_is_written_again(tmp_path):
    rings = RowRings()
    rings.append(0, 35)
    save(tmp_path, rings)
    (tmp_path / "CURRENT").write_bytes(b"nonsense")
    save(tmp_path, rings)
    assert loaded(tmp_path) == rings.contents()


def test_lists_take_over_their_full_chunks(tmp_path):
    items = ItemList(capacity=None)
    items.append(list(range(2 * ITEMS_PER_CHUNK + 5)))
    first = save(tmp_path, items, ListStorageCheckpointer(), keep_last=2)
    items.append(["more"])
    second = save(tmp_path, items, ListStorageCheckpointer(), keep_last=2)
    assert len(shared(tmp_path, first, second)) == 4
    twin = ItemList(capacity=None)
    with open_snapshot(tmp_path) as saved:
        saved.load_storage(ListStorageCheckpointer(), twin)
    assert twin.contents() == items.contents()


@pytest.mark.parametrize("kind", ["list", "memory", "mapped"])
def test_buffers_that_change_in_every_way_are_equal_after_each_save(tmp_path, kind):
    storage = {
        "list": lambda: ListStorage(60),
        "memory": lambda: LazyTensorStorage(60),
        "mapped": lambda: LazyMemmapStorage(60, scratch_dir=tmp_path / "store"),
    }[kind]()
    rb = ReplayBuffer(storage=storage)
    generator = torch.Generator().manual_seed(0)
    at = 0
    for round_ in range(16):
        n = int(torch.randint(1, 9, (), generator=generator))
        rb.extend(steps(at, at + n))
        at += n
        if round_ % 3 == 1:
            rb[int(torch.randint(len(rb), (), generator=generator))] = steps(1000 + round_, 1001 + round_)[0]
        if round_ == 11:
            rb.empty()
            rb.extend(steps(5, 9))
        rb.dumps(tmp_path / "saved")
        if round_ == 13:
            rb.loads(tmp_path / "saved")
        twin = ReplayBuffer(storage=LazyTensorStorage(60) if kind != "list" else ListStorage(60))
        twin.loads(tmp_path / "saved")
        assert state_of(twin) == state_of(rb)


@pytest.mark.parametrize("make", [lambda: ListStorage(60), lambda: LazyTensorStorage(60)], ids=["list", "memory"])
def test_rows_that_have_the_numbers_of_others_are_not_taken_for_them(tmp_path, make):
    rbs = [ReplayBuffer(storage=make()) for _ in range(2)]
    for k, rb in enumerate(rbs):
        rb.extend(steps(100 * k, 100 * k + 50))
        rb.dumps(tmp_path / "shared")
        rb.dumps(tmp_path / str(k))
    for source in (tmp_path / "0", tmp_path / "1"):
        rbs[0].loads(source)
        rbs[0].dumps(tmp_path / "shared")
        twin = ReplayBuffer(storage=make())
        twin.loads(tmp_path / "shared")
        assert state_of(twin) == state_of(rbs[0])


def test_one_percent_more_writes_about_one_percent(tmp_path):
    rows.CHUNK_BYTES = 1 << 14
    rb = ReplayBuffer(storage=LazyTensorStorage(100_000))
    rb.extend(steps(0, 99_000))
    rb.dumps(tmp_path, keep_last=2)
    rb.extend(steps(99_000, 100_000))
    rb.dumps(tmp_path, keep_last=2)
    first, second = sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("g-"))
    new = [p for p in (tmp_path / second / "storage").iterdir() if p.stat().st_nlink == 1]
    total = sum(p.stat().st_size for p in (tmp_path / second / "storage").iterdir())
    assert sum(p.stat().st_size for p in new) < 0.03 * total
    assert len(shared(tmp_path, first, second)) > 100


@pytest.mark.parametrize("make", [lambda: ListStorage(60), lambda: LazyTensorStorage(60)], ids=["list", "memory"])
def test_rows_of_a_forked_process_are_not_taken_for_those_of_its_parent(tmp_path, make):
    rb = ReplayBuffer(storage=make())
    rb.extend(steps(0, 5))

    def go_on_otherwise():
        rb.extend(steps(700, 740))
        rb.dumps(tmp_path)

    Child(go_on_otherwise).result()
    rb.extend(steps(5, 45))
    rb.dumps(tmp_path)
    twin = ReplayBuffer(storage=make())
    twin.loads(tmp_path)
    assert state_of(twin) == state_of(rb)


def test_a_store_that_was_put_back_from_a_backup_is_not_taken_for_what_became_of_it(tmp_path):
    def going_on(start):
        rb = ReplayBuffer.open(tmp_path / "store")
        rb.extend(steps(start, start + 40))
        rb.dumps(tmp_path / "saved")
        found = state_of(rb)
        rb.storage.close()
        return found

    rb = ReplayBuffer(storage=LazyMemmapStorage(60, scratch_dir=tmp_path / "store"))
    rb.extend(steps(0, 5))
    rb.storage.close()
    shutil.copytree(tmp_path / "store", tmp_path / "backup")
    going_on(700)
    shutil.copytree(tmp_path / "backup", tmp_path / "store", dirs_exist_ok=True)
    expected = going_on(5)
    twin = ReplayBuffer(storage=LazyTensorStorage(60))
    twin.loads(tmp_path / "saved")
    assert state_of(twin) == expected
