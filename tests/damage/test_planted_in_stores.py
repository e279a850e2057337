"""What is not a file under the name of a store's file, what cannot be opened, and limits of the process."""

import os
import resource
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from contracts.children import Child
from contracts.corruption import KINDS, OUTSIDE, plant, within
from contracts.each import each
from contracts.waiting import NEVER
from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from engram.errors import CheckpointError, StorageError
from engram.processes.shared_memory import SharedMemory
from engram.store import files as recovery
from engram.store import locks

pytestmark = pytest.mark.quick

STEPS = TensorDict({"n": torch.arange(20)}, [20])


def made(folder, lanes=1):
    rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=folder, lanes=lanes), batch_size=4)
    rb.extend(STEPS)
    return rb


@each("kind", [kind for kind in KINDS if kind != "hard link"])
def test_only_a_file_is_opened_as_a_store(kind, tmp_path):
    folder = tmp_path / "store"
    made(folder).storage.close()
    (folder / "rows.engram").rename(folder / "away")
    plant(kind, folder / "rows.engram", tmp_path / "outside")
    with within(NEVER):
        with pytest.raises(StorageError, match=r"rows\.engram cannot be opened"):
            LazyMemmapStorage.open(folder)
        with pytest.raises(StorageError, match=r"rows\.engram cannot be opened"):
            LazyMemmapStorage(100, scratch_dir=folder, existsok=True)
        with pytest.raises(StorageError, match="holds a store already"):
            LazyMemmapStorage(100, scratch_dir=folder)
    assert (tmp_path / "outside").read_bytes() == OUTSIDE and not (tmp_path / "nothing").exists()


def test_a_link_to_a_store_is_not_followed_and_the_error_says_so(tmp_path):
    made(tmp_path / "real").storage.close()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "rows.engram").symlink_to(tmp_path / "real" / "rows.engram")
    with pytest.raises(StorageError, match="it is a symbolic link, which is not followed; open the folder"):
        LazyMemmapStorage.open(tmp_path / "other")


def test_a_folder_that_is_a_link_is_opened(tmp_path):
    made(tmp_path / "real").storage.close()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert len(LazyMemmapStorage.open(tmp_path / "link")) == 20


@each("kind", KINDS)
def test_what_lies_there_under_the_name_of_a_file_being_made_is_never_opened_for_writing(kind, tmp_path, monkeypatch):
    """A file system without nameless files: a store is made under a temporary name."""
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY | os.O_WRONLY)
    folder = tmp_path / "store"
    folder.mkdir()
    plant(kind, folder / ".rows-abc.tmp", tmp_path / "outside")
    with within(NEVER):
        rb = made(folder)
        assert len(rb) == 20
        rb.storage.close()
        assert len(LazyMemmapStorage.open(folder)) == 20
    assert (tmp_path / "outside").read_bytes() == OUTSIDE and not (tmp_path / "nothing").exists()


@pytest.fixture
def open_folder():
    """A folder that everybody may look into."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("what, said", [
    ("file", r"rows\.engram cannot be opened: Permission denied; a store is opened for reading and writing"),
    ("folder", "cannot be looked into: Permission denied"),
])  # fmt: skip
def test_what_may_not_be_read_is_an_error_of_ours(what, said, open_folder):
    made(open_folder / "store").storage.close()
    os.chmod(open_folder / "store" / "rows.engram", 0 if what == "file" else 0o644)
    os.chmod(open_folder / "store", 0 if what == "folder" else 0o755)

    def tries():
        if os.geteuid() == 0:
            os.seteuid(65534)
        found = []
        for act in (
            lambda: LazyMemmapStorage.open(open_folder / "store"),
            lambda: LazyMemmapStorage(100, scratch_dir=open_folder / "store", existsok=True),
        ):
            with pytest.raises(StorageError, match=said) as error:
                act()
            found.append(str(error.value))
        return found

    Child(tries).result()
    os.chmod(open_folder / "store", 0o755)


@pytest.mark.parametrize("what", ["a file", "a folder of somebody else", "below a file"])
def test_where_no_store_can_be_made_the_first_write_says_so(what, open_folder):
    (open_folder / "file").write_bytes(b"")
    (open_folder / "other").mkdir(mode=0o755)
    place = {"a file": "file", "a folder of somebody else": "other", "below a file": "file/below"}[what]

    def tries():
        if os.geteuid() == 0:
            os.seteuid(65534)
        elif what == "a folder of somebody else":
            os.chmod(open_folder / "other", 0o555)
        storage = LazyMemmapStorage(100, scratch_dir=open_folder / place)
        with pytest.raises(StorageError, match="a store cannot be made in"):
            ReplayBuffer(storage=storage).extend(STEPS)
        assert not storage.initialized

    Child(tries).result()


def test_no_folder_for_temporary_files_is_an_error_of_ours(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/nowhere/at/all")
    with pytest.raises(StorageError, match=r"a temporary file cannot be made: .*TMPDIR"):
        ReplayBuffer(storage=LazyMemmapStorage(100)).extend(STEPS)


def limited(work, nbytes=100_000):
    """What work raises in a process whose files may have so many bytes."""

    def tries():
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))
        try:
            work()
        except Exception as error:
            return type(error), str(error)

    return Child(tries).result()


@pytest.mark.parametrize("storage", [
    lambda path: LazyMemmapStorage(100_000, scratch_dir=path / "store"),
    lambda path: LazyMemmapStorage(100_000),
    lambda path: LazyTensorStorage(100_000, shared=True),
])  # fmt: skip
def test_a_limit_for_files_is_told_when_a_store_is_made(storage, tmp_path):
    kind, said = limited(lambda: ReplayBuffer(storage=storage(tmp_path)).extend(STEPS))
    assert kind is StorageError and "may have 100 KB (RLIMIT_FSIZE, `ulimit -f`)" in said
    assert list(tmp_path.iterdir()) == []


def test_a_limit_for_files_is_told_when_a_buffer_is_saved_and_the_last_save_stays(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(100_000))
    rb.extend(STEPS)
    rb.dumps(tmp_path)
    rb.extend(TensorDict({"n": torch.arange(50_000)}, [50_000]))
    kind, said = limited(lambda: rb.dumps(tmp_path))
    assert kind is CheckpointError and "may have 100,000 bytes (RLIMIT_FSIZE" in said
    other = ReplayBuffer(storage=LazyTensorStorage(100_000))
    other.loads(tmp_path)
    assert len(other) == 20


def test_a_limit_for_files_is_a_memory_error_for_shared_memory():
    assert limited(lambda: SharedMemory().allocate([1_000_000]))[0] is MemoryError


# ---- systems that say less ----
def no_boot_id(monkeypatch):
    from engram.store import places

    for module in (recovery, places):
        monkeypatch.setattr(module, "boot_id", lambda: bytes(16))


@pytest.mark.parametrize("first", ["known", "unknown"])
def test_a_second_opener_without_a_boot_id_does_not_wait(first, tmp_path, monkeypatch):
    if first == "unknown":
        no_boot_id(monkeypatch)
    rb = made(tmp_path, lanes=2)
    no_boot_id(monkeypatch)
    monkeypatch.setattr(locks, "_OPEN_TIMEOUT", 2.0 * NEVER)
    with within(NEVER):
        other = LazyMemmapStorage.open(tmp_path)
        assert len(other) == 20 and other.dropped == 0
    other.close()
    rb.storage.close()


def cut(tmp_path):
    """A store in tmp_path / "cut" as the disk has it when the power goes: not closed, its newest row torn."""
    storage = made(tmp_path / "store").storage
    offset = storage.lanes.store.rows_offset + 19 * storage.lanes.store.row_stride
    shutil.copytree(tmp_path / "store", tmp_path / "cut")
    with open(tmp_path / "cut" / "rows.engram", "r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * 8)


@pytest.mark.parametrize("unknown", ["then", "now"])
def test_rows_torn_on_a_machine_without_a_boot_id_are_dropped_when_nobody_has_the_store_open(
    unknown, tmp_path, monkeypatch
):
    real = recovery.boot_id
    if unknown == "then":
        no_boot_id(monkeypatch)
    cut(tmp_path)
    if unknown == "now":
        no_boot_id(monkeypatch)
    else:
        monkeypatch.setattr(recovery, "boot_id", real)
    found = LazyMemmapStorage.open(tmp_path / "cut")
    assert found.dropped == 1 and found.get(slice(None))["n"].tolist() == list(range(19))


def test_who_waited_for_one_that_died_while_it_looked_looks_again(tmp_path, monkeypatch):
    no_boot_id(monkeypatch)
    cut(tmp_path)
    real, tries = locks.LaneLocks.try_exclusive, []

    def somebody_else_first(self):
        tries.append(self)
        return len(tries) > 1 and real(self)

    monkeypatch.setattr(locks.LaneLocks, "try_exclusive", somebody_else_first)
    assert LazyMemmapStorage.open(tmp_path / "cut").dropped == 1


def test_a_named_store_is_shared_where_no_descriptor_can_be_opened_again(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "_DESCRIPTORS", "/nowhere")
    rb = made(tmp_path, lanes=2)
    other = ReplayBuffer(storage=LazyMemmapStorage.open(tmp_path))
    other.extend(STEPS)
    assert len(rb) == 40
    with pytest.raises(StorageError, match="needs the store alone"):
        rb.empty()
    other.storage.close()
    rb.empty()


def test_a_store_without_a_name_works_in_its_process_where_no_descriptor_can_be_opened_again(monkeypatch):
    monkeypatch.setattr(locks, "_DESCRIPTORS", "/nowhere")
    rb = ReplayBuffer(storage=LazyTensorStorage(100, shared=True), batch_size=4)
    rb.extend(STEPS)
    assert len(rb.sample()) == 4

    def child():
        with pytest.raises(StorageError, match="could not open the store for itself"):
            rb.sample()

    Child(child).result()


def test_a_store_whose_file_was_replaced_is_not_locked_through_the_new_one(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "_DESCRIPTORS", "/nowhere")
    rb = made(tmp_path / "a")
    made(tmp_path / "b").storage.close()
    os.replace(tmp_path / "b" / "rows.engram", tmp_path / "a" / "rows.engram")

    def child():
        with pytest.raises(StorageError, match="is another file by now"):
            rb.sample()

    Child(child).result()
