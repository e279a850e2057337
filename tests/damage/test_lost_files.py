"""Files of mapped stores with holes, cut short, or deleted while they are open: errors and warnings, never a signal."""

import os
import shutil
import signal
import warnings
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from contracts.children import Child
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram.errors import StorageError
from engram.testing import steps

N = 2000


def batch(n=N):
    ids = torch.arange(n) // 20
    return TensorDict({"n": torch.arange(n), "id": ids, "next": {"reward": torch.rand(n, 1)}}, [n])


def made(folder, sampler=RandomSampler, **kwargs):
    rb = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(N, scratch_dir=folder), sampler=sampler(), batch_size=32, **kwargs
    )
    rb.extend(batch())
    rb.sample()
    return rb


# ---- holes ----
def sparse_copy(source, target):
    """As `cp --sparse=always`, whatever this system's cp knows."""
    with open(source, "rb") as file, open(target, "wb") as copy:
        while block := file.read(4096):
            copy.seek(len(block), os.SEEK_CUR) if not any(block) else copy.write(block)
        copy.truncate(os.stat(source).st_size)


def holes(file):
    with open(file, "rb") as f:
        return os.lseek(f.fileno(), 0, os.SEEK_HOLE) < os.fstat(f.fileno()).st_size


@pytest.fixture
def small_disk(mount):
    """A disk of two megabytes."""
    return mount("2m")


def fill(folder, left):
    """Leaves so many bytes of a disk."""
    with open(folder / "filler", "wb") as filler:
        found = os.statvfs(folder)
        filler.write(bytes(max(0, found.f_bavail * found.f_frsize - left)))


def extend_whole(folder):
    """In a child, which a signal ends: the ring written to its end."""

    def work():
        rb = ReplayBuffer(storage=LazyMemmapStorage.open(folder))
        rb.extend(steps(0, N))
        return len(rb)

    return Child(work).result()


def test_a_sparse_copy_on_a_full_disk_is_refused_when_it_is_opened(small_disk, tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(N, scratch_dir=tmp_path / "dense"))
    rb.extend(steps(0, 5))
    rb.storage.close()
    (small_disk / "copy").mkdir()
    sparse_copy(tmp_path / "dense" / "rows.engram", small_disk / "copy" / "rows.engram")
    fill(small_disk, left=8192)
    before = (small_disk / "copy" / "rows.engram").read_bytes()
    for _ in range(2):  # nothing is held by who was refused
        with pytest.raises(
            StorageError, match=r"not enough disk space: .*rows\.engram has holes .* need [\d.]+ (KB|MB)"
        ):
            LazyMemmapStorage.open(small_disk / "copy")
    assert (small_disk / "copy" / "rows.engram").read_bytes() == before
    (small_disk / "filler").unlink()
    assert extend_whole(small_disk / "copy") == N


@pytest.mark.quick
def test_a_sparse_copy_takes_its_space_when_it_is_opened(small_disk, tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(N, scratch_dir=tmp_path / "dense"))
    rb.extend(steps(0, 5))
    rb.storage.close()
    (small_disk / "copy").mkdir()
    sparse_copy(tmp_path / "dense" / "rows.engram", small_disk / "copy" / "rows.engram")

    def work():
        storage = LazyMemmapStorage.open(small_disk / "copy")
        fill(small_disk, left=0)
        rb = ReplayBuffer(storage=storage)
        rb.extend(steps(0, N))
        return len(rb)

    assert Child(work).result() == N


def test_one_missing_block_is_found_among_those_that_are_there(tmp_path, monkeypatch):
    """A file may have more blocks than it has bytes: their number alone does not say that none is missing."""
    made(tmp_path).storage.close()
    file = tmp_path / "rows.engram"
    content = file.read_bytes()
    missing = next(at for at in range(4096, len(content), 4096) if not any(content[at : at + 4096]))
    with open(tmp_path / "copy", "wb") as copy:
        copy.write(content[:missing])
        copy.seek(missing + 4096)
        copy.write(content[missing + 4096 :])
        copy.flush()
        os.fsync(copy.fileno())  # its blocks are counted from then on
    os.replace(tmp_path / "copy", file)
    before = os.stat(file).st_blocks
    if not holes(file):
        pytest.skip("this file system knows no holes")
    real = os.fstat

    def with_a_block_of_the_file_systems_own(fd):
        found = real(fd)
        fields = {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}
        return SimpleNamespace(**{**fields, "st_blocks": found.st_blocks + 8})

    monkeypatch.setattr(os, "fstat", with_a_block_of_the_file_systems_own)
    again = LazyMemmapStorage.open(tmp_path)
    assert os.stat(file).st_blocks == before + 8 and again.get(slice(None))["n"].tolist() == list(range(N))


def test_a_store_without_holes_is_not_reserved_again(tmp_path, monkeypatch):
    made(tmp_path).storage.close()
    with open(tmp_path / "rows.engram", "r+b") as file:
        content = file.read()
        file.seek(0)
        file.write(content)  # space that was only reserved counts as a hole
        os.fsync(file.fileno())
    monkeypatch.setattr(os, "posix_fallocate", None)
    assert len(LazyMemmapStorage.open(tmp_path)) == N


# ---- cut short ----
SLICES = {"slice_len": 4, "traj_key": "id"}
USES = {
    "sample": (RandomSampler, lambda rb: rb.sample()),
    "epoch": (SamplerWithoutReplacement, lambda rb: rb.sample()),
    "priorities": (lambda: PrioritizedSampler(None, 1.0, 1.0), lambda rb: rb.sample()),
    "update": (
        lambda: PrioritizedSampler(None, 1.0, 1.0),
        lambda rb: rb.update_priority(torch.arange(9), torch.ones(9)),
    ),
    "slices": (lambda: SliceSampler(**SLICES), lambda rb: rb.sample()),
    "extend": (RandomSampler, lambda rb: rb.extend(batch(500))),
    "add": (RandomSampler, lambda rb: rb.add(batch(1)[0])),
    "read": (RandomSampler, lambda rb: rb[:]),
    "view": (RandomSampler, lambda rb: rb.storage[3:9]),
    "len": (RandomSampler, lambda rb: len(rb)),
    "count": (RandomSampler, lambda rb: rb.write_count),
    "in place": (RandomSampler, lambda rb: rb.storage.set(3, batch(1)[0])),
    "empty": (RandomSampler, lambda rb: rb.empty()),
    "state": (RandomSampler, lambda rb: rb.state_dict()),
    "flush": (RandomSampler, lambda rb: rb.storage.flush()),
    "repr": (RandomSampler, lambda rb: repr(rb.storage)),
}


@pytest.mark.parametrize("left", [0, 4096, "half"])
@pytest.mark.parametrize("use", USES)
def test_a_file_that_was_cut_short_is_an_error_and_no_signal(use, left, tmp_path):
    sampler, act = USES[use]

    def work():
        rb = made(tmp_path, sampler)
        size = os.stat(tmp_path / "rows.engram").st_size
        os.truncate(tmp_path / "rows.engram", size // 2 if left == "half" else left)
        with pytest.raises(StorageError, match="the store's file was cut short"):
            act(rb)

    Child(work).result()


def test_a_max_value_buffer_and_saves_say_that_a_file_was_cut_short(tmp_path):
    def work():
        rb = made(tmp_path / "store", writer=TensorDictMaxValueWriter(rank_key=("next", "reward")))
        handle = rb.dumps(tmp_path / "a", blocking=False)
        handle.result()
        os.truncate(tmp_path / "store" / "rows.engram", 0)
        for act in (
            lambda: rb.extend(batch(50)),
            lambda: rb.dumps(tmp_path / "b"),
            lambda: rb.dumps(tmp_path / "b", blocking=False).result(),
            lambda: rb.loads(tmp_path / "a"),
        ):
            with pytest.raises(StorageError, match="the store's file was cut short"):
                act()

    Child(work).result()


def test_a_save_that_is_going_on_when_the_file_is_cut_short_ends_with_the_error(tmp_path):
    rb = made(tmp_path / "store")

    def work():
        frozen = rb.storage.saved_form.source(background=True)
        os.truncate(tmp_path / "store" / "rows.engram", 0)
        with pytest.raises(StorageError, match="the store's file was cut short"):
            frozen.read_block(0, 0, N)

    Child(work).result()


@pytest.mark.quick
def test_a_store_that_was_cut_short_can_be_closed(tmp_path):
    rb = made(tmp_path)

    def work():
        os.truncate(tmp_path / "rows.engram", 0)
        with pytest.raises(StorageError, match="the store's file was cut short"):
            rb.storage.close()
        assert not rb.storage.initialized
        rb.storage.close()

    Child(work).result()


def test_a_temporary_file_is_looked_at_too():
    rb = ReplayBuffer(storage=LazyMemmapStorage(N), batch_size=32)
    rb.extend(batch())

    def work():
        os.truncate(f"/proc/self/fd/{rb.storage.lanes.locks.fd}", 0)
        with pytest.raises(StorageError, match="cut short"):
            rb.sample()

    Child(work).result()


def test_shared_memory_cannot_be_cut_short():
    rb = ReplayBuffer(storage=LazyTensorStorage(N, shared=True), batch_size=32)
    rb.extend(batch())
    with pytest.raises(PermissionError):
        os.ftruncate(rb.storage.lanes.locks.fd, 0)
    assert len(rb.sample()) == 32


def test_a_forked_child_is_told_too(tmp_path):
    rb = made(tmp_path)
    os.truncate(tmp_path / "rows.engram", os.stat(tmp_path / "rows.engram").st_size - 4096)

    def work():
        with pytest.raises(StorageError, match="cut short"):
            rb.sample()

    Child(work).result()


# ---- deleted ----
@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_flush_close_and_a_new_writer_say_that_the_file_is_gone(how, tmp_path):
    rb = made(tmp_path)
    made(tmp_path / "other").storage.close()
    late = TensorDictReplayBuffer(storage=LazyMemmapStorage.open(tmp_path))
    if how == "deleted":
        (tmp_path / "rows.engram").unlink()
    else:
        os.replace(tmp_path / "other" / "rows.engram", tmp_path / "rows.engram")
    assert len(rb.sample()) == 32  # who reads has what there was
    with pytest.raises(StorageError, match=r"rows\.engram was deleted or replaced: its rows go when the last process"):
        rb.storage.flush()
    rb.storage.release()
    for buffer in (late, rb):
        with pytest.raises(StorageError, match="was deleted or replaced; what is written to it now would be lost"):
            buffer.extend(batch(5))
    with pytest.warns(UserWarning, match=r"rows\.engram was deleted or replaced while it was open: its rows are lost"):
        rb.storage.close()
    assert not rb.storage.initialized


def test_a_file_that_only_moved_is_not_gone(tmp_path):
    rb = made(tmp_path / "here")
    shutil.move(tmp_path / "here", tmp_path / "there")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb.storage.flush()
        rb.extend(batch(5))
        rb.storage.close()
    assert LazyMemmapStorage.open(tmp_path / "there").lanes.write_count == N + 5


def test_who_only_read_a_deleted_store_closes_it_without_a_word(tmp_path):
    made(tmp_path).storage.close()
    reader = LazyMemmapStorage.open(tmp_path)
    (tmp_path / "rows.engram").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reader.close()


assert signal.SIGBUS  # what all of this is about
