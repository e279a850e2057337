"""Full disks, failing disks, directories that cannot be written: an error with the numbers, the old state intact."""

import errno
import os
import subprocess

import pytest
import torch

from contracts.checkpointer import RowRings
from contracts.each import each
from engram.checkpoint import writer as commit
from engram.data.replay_buffers.checkpointers import TensorStorageCheckpointer, open_snapshot, save_snapshot
from engram.errors import CheckpointError

FAILING = ("open", "write", "fsync", "replace", "mkdir", "fchmod")


def save(path, number, size=1000):
    tree = torch.full((size,), number, dtype=torch.int32)
    rings = RowRings(lanes=2)
    rings.append(0, 40, number)
    save_snapshot(path, {"tree": tree}, (TensorStorageCheckpointer(), rings))


def number_at(path):
    loaded, expected = RowRings(lanes=2), RowRings(lanes=2)
    with open_snapshot(path) as opened:
        opened.load_storage(TensorStorageCheckpointer(), loaded)
        tree = opened.components["tree"]
    expected.append(0, 40, int(tree[0]))
    assert loaded.contents() == expected.contents() and (tree == tree[0]).all()
    return int(tree[0])


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def test_a_save_that_cannot_fit_is_refused_before_anything_is_written(mount):
    disk = mount("1m")
    save(disk, 1)
    with pytest.raises(CheckpointError, match=r"needs about 4,\d\d\d,\d\d\d bytes and [\d,]+ are free"):
        save(disk, 2, size=1 << 20)
    assert names(disk) == ["CURRENT", "LOCK", "g-000001"] and number_at(disk) == 1


def test_a_disk_that_fills_up_during_a_save_is_an_error_with_the_numbers(mount, monkeypatch):
    disk = mount("1m")
    save(disk, 1)
    monkeypatch.setattr(commit, "_check_space", lambda root, expected: None)
    with pytest.raises(CheckpointError, match=r"No space left.*needs about 4,\d\d\d,\d\d\d bytes, [\d,]+ are free"):
        save(disk, 2, size=1 << 20)
    assert names(disk) == ["CURRENT", "LOCK", "g-000001"] and number_at(disk) == 1
    save(disk, 3)
    assert number_at(disk) == 3


def test_a_read_only_disk_can_be_read_and_not_saved_to(mount):
    disk = mount("1m")
    save(disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert number_at(disk) == 1
    with pytest.raises(CheckpointError, match=f"cannot save to {disk}: Read-only file system"):
        save(disk, 2)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        save(disk / "new" / "path", 2)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to any directory")
def test_a_directory_without_write_permission_is_an_error_that_names_it(tmp_path):
    save(tmp_path, 1)
    tmp_path.chmod(0o555)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        save(tmp_path, 2)
    tmp_path.chmod(0o755)
    assert number_at(tmp_path) == 1


def test_a_path_through_a_file_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=f"cannot save to {path}"):
            save(path, 1)


@each("code", [errno.EIO, errno.ENOSPC])
@each("name", FAILING)
def test_every_system_call_of_a_save_may_fail(ram_path, monkeypatch, name, code):
    """Fails the first, second, ... such call, until a save gets through without it."""
    save(ram_path, 1)
    number, failing = 1, 0
    while True:
        left = [failing]
        with monkeypatch.context() as patch:
            patch.setattr(os, name, _failing(getattr(os, name), left, code))
            try:
                save(ram_path, number + 1)
                break
            except CheckpointError as error:
                said = str(error)
        found = number_at(ram_path)
        assert os.strerror(code) in said and str(ram_path) in said
        # after CURRENT was moved only the sync of the move can fail: then the new state is in force
        assert found == number or (name in ("fsync", "open") and found == number + 1)
        assert set(names(ram_path)) - {"CURRENT", "LOCK"} <= {f"g-{n:06d}" for n in range(1000)}
        assert len(names(ram_path)) <= 4 and "CURRENT.new" not in names(ram_path)
        number, failing = found, failing + 1
    assert failing > 0 and number_at(ram_path) == number + 1
    save(ram_path, 77)
    assert len(names(ram_path)) == 3


def _failing(real, left, code):
    def wrapper(*arguments, **options):
        left[0] -= 1
        if left[0] == -1:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    return wrapper
