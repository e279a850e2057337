"""Too little disk or memory: an exception with the numbers at the first write, no signal, nothing left behind."""

import os

import pytest
import torch

from contracts.programs import run_program
from engram import _system
from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from engram.errors import StorageError
from engram.store import files
from engram.testing import steps


@pytest.fixture
def small_disk(mount):
    """A disk of one megabyte."""
    return mount("1m")


def free(folder):
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def test_a_full_disk_is_an_error_with_the_numbers_at_the_first_write(small_disk):
    before = free(small_disk)
    storage = LazyMemmapStorage(100_000, scratch_dir=small_disk / "a" / "b")
    rb = ReplayBuffer(storage=storage)
    for write in (lambda: rb.extend(steps(0, 5)), lambda: rb.add(steps(0, 1)[0])):
        with pytest.raises(
            StorageError, match=r"not enough disk space: .* needs [\d.]+ MB, .* has [\d.]+ (MB|KB) free"
        ):
            write()
    assert free(small_disk) == before and list(small_disk.iterdir()) == []
    assert len(rb) == 0 and not storage.initialized
    small = ReplayBuffer(storage=LazyMemmapStorage(1000, scratch_dir=small_disk / "a" / "b"))
    small.extend(steps(0, 1000))
    assert len(small) == 1000


def test_a_disk_that_fills_while_the_space_is_reserved_is_the_same_error(small_disk, monkeypatch):
    """The space was there when it was asked for, and gone when it was taken."""
    real = os.statvfs

    class Roomy:
        f_bavail, f_frsize = 1 << 30, 4096

    monkeypatch.setattr(files.os, "statvfs", lambda path: Roomy)
    with pytest.raises(StorageError, match="not enough disk space"):
        ReplayBuffer(storage=LazyMemmapStorage(100_000, scratch_dir=small_disk / "s")).extend(steps(0, 5))
    monkeypatch.setattr(files.os, "statvfs", real)
    assert list(small_disk.iterdir()) == []


def test_a_full_disk_for_temporary_files_names_tmpdir(small_disk, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))
    before = free(small_disk)
    rb = ReplayBuffer(storage=LazyMemmapStorage(100_000))
    with pytest.raises(StorageError, match=f"{small_disk}.*TMPDIR"):
        rb.extend(steps(0, 5))
    assert free(small_disk) == before and list(small_disk.iterdir()) == []


@pytest.mark.deep
def test_tmpdir_is_honoured_and_a_full_one_is_no_signal(small_disk):
    code = """
        import torch
        from engram.data import LazyMemmapStorage, ReplayBuffer
        from engram.errors import StorageError
        rb = ReplayBuffer(storage=LazyMemmapStorage(1000))
        rb.extend(torch.zeros(1000, 100, dtype=torch.uint8))
        try:
            ReplayBuffer(storage=LazyMemmapStorage(100_000)).extend(torch.zeros(10, 100))
        except StorageError as error:
            print("refused", error)
    """
    env = {**os.environ, "TMPDIR": str(small_disk)}
    done = run_program(code, env=env)
    assert done.returncode == 0 and str(small_disk) in done.stdout, done.stderr
    assert list(small_disk.iterdir()) == []


def test_a_reserved_store_writes_to_its_end_on_a_disk_that_others_fill(small_disk):
    rb = ReplayBuffer(storage=LazyMemmapStorage(3000, scratch_dir=small_disk / "s"))
    rb.extend(steps(0, 1))
    with pytest.raises(OSError), open(small_disk / "filler", "wb") as filler:
        while True:
            filler.write(bytes(4096))
            filler.flush()
    assert free(small_disk) == 0
    rb.extend(steps(1, 7000))
    assert len(rb) == 3000 and rb.write_count == 7000


@pytest.mark.parametrize("shared", [False, True])
def test_too_little_memory_is_an_error_with_the_numbers(shared):
    storage = LazyTensorStorage(100_000_000_000, shared=shared)
    rb = ReplayBuffer(storage=storage)
    with pytest.raises(StorageError, match=r"not enough memory: .* needs 1[\d.]+ TB, [\d.]+ (GB|MB) are free.*obs"):
        rb.extend({"obs": torch.zeros(3, 25)})
    assert not storage.initialized and storage.layout is None
    rb.set_storage(LazyTensorStorage(10))
    rb.extend({"obs": torch.zeros(3, 25)})


def test_ten_terabytes_on_disk_are_refused_too(tmp_path):
    with pytest.raises(StorageError, match=r"not enough disk space: .* needs 1[\d.]+ TB"):
        ReplayBuffer(storage=LazyMemmapStorage(100_000_000_000, scratch_dir=tmp_path / "s")).extend(torch.zeros(3, 25))
    assert not (tmp_path / "s").exists()


def test_a_capacity_beyond_all_numbers_is_an_error():
    for size in (1 << 62, 1 << 70):
        with pytest.raises((StorageError, ValueError, OverflowError)):
            ReplayBuffer(storage=LazyTensorStorage(size)).extend(torch.zeros(3, 25))


def test_the_limit_of_a_control_group_counts(monkeypatch):
    monkeypatch.setattr(_system, "_group_free", lambda: 1_000_000)
    with pytest.raises(StorageError, match=r"1 MB are free"):
        ReplayBuffer(storage=LazyTensorStorage(100_000)).extend(torch.zeros(3, 25))


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_group_above_the_process_is_found(tmp_path, monkeypatch, version):
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    outer, inner = tmp_path / "outer", tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    for folder, limit, used in ((outer, "5000", "3000"), (inner, "max" if version == 2 else str(1 << 62), "100")):
        (folder / names[0]).write_text(limit)
        (folder / names[1]).write_text(used)
        (folder / "memory.stat").write_text(f"anon 1\n{names[2]} 700\n")
    assert _system._limits(str(tmp_path), "/outer/inner", *names[:2], "memory.stat", names[2]) == [2700]


@pytest.mark.deep
def test_a_real_control_group_limits_a_real_process(tmp_path):
    """In a group of 300 MB, 400 MB are refused and 100 MB are not; nobody is killed."""
    made = _make_group()
    if made is None:
        pytest.skip("no control group for memory can be made here")
    group, limit = made
    code = f"""
        import os, torch
        from engram.data import LazyTensorStorage, ReplayBuffer
        from engram.errors import StorageError
        open({str(group)!r} + "/cgroup.procs", "w").write(str(os.getpid()))
        open({str(group)!r} + "/" + {limit!r}, "w").write(str(300 << 20))
        ReplayBuffer(storage=LazyTensorStorage(100_000)).extend(torch.zeros(100_000, 100, dtype=torch.uint8))
        try:
            ReplayBuffer(storage=LazyTensorStorage(1_000_000)).extend(torch.zeros(10, 100))
        except StorageError as error:
            print("refused", error)
    """
    try:
        done = run_program(code)
    finally:
        os.rmdir(group)
    assert done.returncode == 0 and "refused not enough memory" in done.stdout, done.stderr


def _make_group():
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = f"{root}/engram-test-{os.getpid()}"
        try:
            os.mkdir(group)
        except OSError:
            continue
        if os.access(f"{group}/{limit}", os.W_OK):
            return group, limit
        os.rmdir(group)
    return None
