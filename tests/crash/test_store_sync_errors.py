"""Disks that fail twice in a row under a store: an error each time, no row of an error believed, and then it goes on.

After a sync that failed the kernel may take for clean what has not reached the disk: the next sync would succeed, and
mean nothing. So what was not synced is written again first.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from crash import stores, tracer
from crash.stores import numbers, steps
from engram.data import LazyMemmapStorage, ReplayBuffer
from engram.errors import StorageError
from engram.store import files as recovery

pytestmark = pytest.mark.quick

CAPACITY, WIDE = 24, 20_000


class FailingDisk:
    """`os.fsync` that reports an error `times` times: the pages are clean by then, as after one of the kernel's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self._sync, self.times, self.dirty = os.fsync, times, 0
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, fd: int) -> None:
        ours = os.readlink(f"/proc/self/fd/{fd}").endswith("rows.engram")
        self.dirty = dirty_bytes() if ours else self.dirty
        self._sync(fd)
        if ours and self.times:
            self.times -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def dirty_bytes() -> int:
    """Of maps of stores: what waits to be written to the disk."""
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    ours = [one for one in maps if one.split("\n")[0].endswith("rows.engram")]
    return sum(int(kb) * 1024 for one in ours for kb in re.findall(r"^(?:Shared|Private)_Dirty: +(\d+) kB", one, re.M))


def filled(folder: Path, rows: int = WIDE) -> ReplayBuffer:
    rb = ReplayBuffer(storage=LazyMemmapStorage(WIDE, scratch_dir=folder))
    rb.extend(steps(0, 10))
    rb.flush()
    if dirty_bytes():
        pytest.skip("this file system has no disk behind it")
    rb.extend(steps(10, rows))
    return rb


def unsynced_bytes(rb: ReplayBuffer) -> int:
    """Of rows that no sync of ours has confirmed: the system may have written some of them for another program."""
    return (WIDE - durable(rb)) * int(rb.storage.lanes.store.row_stride)


def durable(rb: ReplayBuffer) -> int:
    return int(rb.storage.lanes.states()[0]["durable"])


def test_a_flush_after_two_that_failed_writes_everything_again(tmp_path, monkeypatch):
    rb = filled(tmp_path / "store")
    disk = FailingDisk(monkeypatch, times=2)
    at_stake = unsynced_bytes(rb)
    for _ in range(2):
        with pytest.raises(StorageError, match=r"store/rows.engram.*Input/output error"):
            rb.flush()
        assert durable(rb) == 10
    assert dirty_bytes() == 0, "the kernel holds nothing for dirty"
    rb.flush()
    assert disk.dirty >= at_stake > 100_000 and durable(rb) == WIDE
    assert numbers(rb[:]) == list(range(WIDE))
    rb.flush()
    assert disk.dirty < at_stake, "and not for ever"
    rb.storage.close()


def test_a_row_that_was_dropped_after_a_failed_sync_is_never_reported_as_flushed(tmp_path, monkeypatch):
    rb = filled(tmp_path / "store", 1000)
    disk = FailingDisk(monkeypatch, times=1)
    with pytest.raises(StorageError):
        rb.flush()
    store = rb.storage.lanes.store
    store.memory()[store.rows_offset + 500 * store.row_stride] ^= 1  # as the disk has it, which the kernel reads again
    for _ in range(2):
        with pytest.raises(StorageError, match="row 500 of lane 0 is lost"):
            rb.flush()
    assert durable(rb) == 10 and disk.times == 0


def test_whoever_opens_a_store_after_a_failed_flush_writes_the_rows_again(tmp_path, monkeypatch):
    rb = filled(tmp_path / "store")
    disk = FailingDisk(monkeypatch, times=2)
    at_stake = unsynced_bytes(rb)
    with pytest.raises(StorageError):
        rb.flush()
    with pytest.raises(StorageError):
        rb.storage.close()
    del rb
    again = ReplayBuffer.open(tmp_path / "store")
    assert numbers(again[:]) == list(range(WIDE)) and dirty_bytes() < at_stake
    again.flush()
    assert disk.dirty >= at_stake > 100_000 and durable(again) == WIDE
    again.storage.close()


def story(root: Path) -> tuple[list[int], list[str]]:
    """Everything that waits for the disk, each thing until it succeeds: the rows, and what the errors say."""
    said: list[str] = []

    def insist(act):
        for _ in range(3):
            try:
                return act()
            except StorageError as error:
                said.append(str(error))
        raise AssertionError(said)

    def edit() -> None:
        rb[3:5] = steps(103, 105)

    def close() -> ReplayBuffer:
        try:
            rb.storage.close()
        except StorageError as error:
            said.append(str(error))
        return insist(lambda: ReplayBuffer.open(root / "store"))

    tracer.start()
    rb = ReplayBuffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=root / "store"))
    insist(lambda: rb.extend(steps(0, 10)))
    insist(rb.storage.flush)
    insist(edit)
    insist(lambda: rb.extend(steps(10, 12)))
    insist(rb.storage.flush)
    rb = close()
    insist(lambda: rb.extend(steps(12, 14)))
    insist(edit)
    rb = close()
    found = numbers(rb[:])
    insist(rb.storage.flush)
    assert durable(rb) == 14 and not rb.storage.lanes.store.interrupted
    rb.storage.close()
    return found, said


def check_every_sync(root: Path, every: int) -> None:
    syncs = tracer.run(lambda: story(root / "sound"), root, kinds=tracer.SYNC).counted
    assert syncs > 15
    for at in range(1, syncs + 1, every):
        traced = tracer.run(
            lambda at=at: story(root / f"p{at}"), root, tracer.FAIL_TWO_SYNCS, at, error=errno.EIO, kinds=tracer.SYNC
        )
        rows, said = traced.result
        assert rows == [0, 1, 2, 103, 104, *range(5, 14)], (at, rows)
        assert len(said) == 2, (at, traced.call, traced.path, said)
        assert all("Input/output error" in one for one in said), said


@pytest.fixture(autouse=True)
def boots(monkeypatch):
    monkeypatch.setattr(recovery, "boot_id", recovery.boot_id)


def test_a_sync_of_a_store_that_fails_twice_is_two_errors_and_costs_nothing(ram_path):
    check_every_sync(ram_path, every=4)


@pytest.mark.deep
def test_each_sync_of_a_store_fails_twice(ram_path):
    check_every_sync(ram_path, every=1)


def test_the_name_of_a_new_store_is_synced_although_its_first_sync_failed(ram_path):
    heard: list[tuple[str, str]] = []

    def make() -> None:
        tracer.start()
        rb = ReplayBuffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=ram_path))
        for _ in range(2):
            with pytest.raises(StorageError):
                rb.extend(steps(0, 10))
        rb.extend(steps(0, 10))

    def listen(call: str, path: str, path2: str, args: list[int]) -> None:
        heard.append((call, path))

    kinds = tracer.SYNC | tracer.NAME
    traced = tracer.run(make, ram_path, tracer.FAIL_TWO_SYNCS, 2, error=errno.EIO, kinds=kinds, listen=listen)
    names = [at for at, (call, _) in enumerate(heard) if call.startswith("link")]
    folders = [at for at, (call, path) in enumerate(heard) if call == "fsync" and path == str(ram_path)]
    assert traced.done and len(folders) == 2 and names[0] < folders[0] < names[-1] < folders[1], heard


def test_a_change_that_a_kill_interrupted_is_finished_by_the_third_open_where_the_disk_fails_twice(ram_path):
    if not tracer.can_watch():
        pytest.skip("stores are watched on x86-64 only")
    rb = stores.opened(ram_path / "store")
    rb.extend(steps(0, 10))
    rb.storage.close()

    def change() -> None:
        rb = stores.opened(ram_path / "store")
        stores.watch(rb.storage.lanes.store, (stores.REDO,))
        tracer.start()
        rb[3:5] = steps(103, 105)

    assert tracer.run(change, ram_path, tracer.KILL, 2, kinds=tracer.STORE).killed

    def reopen() -> list[int]:
        tracer.start()
        for _ in range(2):
            with pytest.raises(StorageError, match=r"rows.engram.*Input/output error"):
                stores.opened(ram_path / "store")
        return numbers(stores.opened(ram_path / "store")[:])

    traced = tracer.run(reopen, ram_path, tracer.FAIL_TWO_SYNCS, 1, error=errno.EIO, kinds=tracer.SYNC)
    assert traced.done and traced.result == [0, 1, 2, 103, 104, *range(5, 10)]
