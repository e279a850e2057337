"""`auto_cleanup=`: a store in a folder that goes with who made it, and with nobody else."""

import copy
import gc
import os
import pickle
import time
from threading import Thread

import pytest
import torch

from contracts.children import Child, fork
from contracts.programs import run_program
from engram.data import LazyMemmapStorage, ReplayBuffer
from engram.errors import StorageError


def made(folder, **settings):
    storage = LazyMemmapStorage(10, scratch_dir=folder, **settings)
    ReplayBuffer(storage=storage).extend(torch.arange(7))
    return storage


class _Reader:
    """A process that has the store open inside the block."""

    def __init__(self, folder):
        opened, opening = os.pipe()
        ended, self._ending = os.pipe()
        self._pid = fork(lambda: self._work(folder, opening, ended))
        self._opened = opened
        os.close(ended)

    def _work(self, folder, opening, ended):
        os.close(self._ending)
        storage = LazyMemmapStorage.open(folder)
        os.write(opening, b"%d" % len(storage))
        os.read(ended, 1)

    def __enter__(self):
        assert os.read(self._opened, 10) == b"7"

    def __exit__(self, *error):
        os.close(self._ending)
        assert os.waitpid(self._pid, 0)[1] == 0


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "made" / "store"


def test_close_waits_until_the_call_of_another_thread_is_over(folder):
    storage = made(folder, auto_cleanup=True)
    closing = Thread(target=storage.close)
    with storage.mutex:  # as in every call that reads or writes
        closing.start()
        closing.join(0.1)
        assert len(storage) == 7 and folder.exists()
    closing.join()
    assert not folder.exists()


@pytest.mark.parametrize("way", ["close", "collected"])
@pytest.mark.parametrize("cleans", [True, False, None])
def test_a_store_goes_with_its_object_where_that_is_said(folder, way, cleans):
    storage = made(folder, auto_cleanup=cleans)
    view = storage[2:5]
    if way == "close":
        storage.close()
    del storage
    gc.collect()
    assert folder.exists() == (not cleans)
    if not cleans:
        assert len(LazyMemmapStorage.open(folder)) == 7
    if way == "collected":
        assert view.tolist() == [2, 3, 4]


@pytest.mark.deep
def test_a_store_goes_with_its_process(folder):
    code = (
        "import torch\nfrom engram.data import *\n"
        "for cleans in (True, False):\n"
        f"    globals()[f'kept {{cleans}}'] = rb = ReplayBuffer(storage=LazyMemmapStorage(\n"
        f"        10, scratch_dir={str(folder)!r} + str(cleans), auto_cleanup=cleans))\n"
        "    rb.extend(torch.arange(7))\n"
    )
    done = run_program(code)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.parent.iterdir()] == ["storeFalse"]


def test_a_folder_that_was_there_and_other_files_stay(tmp_path):
    made(tmp_path, auto_cleanup=True).close()
    assert tmp_path.exists() and not os.listdir(tmp_path)
    storage = made(tmp_path / "new", auto_cleanup=True)
    (tmp_path / "new" / "notes").write_text("mine")
    storage.close()
    assert os.listdir(tmp_path / "new") == ["notes"]


def test_a_store_that_another_process_has_open_stays(folder):
    storage = made(folder, auto_cleanup=True)
    with _Reader(folder):
        storage.close()
        assert folder.exists()
    assert len(LazyMemmapStorage.open(folder)) == 7


def test_a_forked_child_deletes_nothing(folder):
    storage = made(folder, auto_cleanup=True)

    def end():
        storage.close()
        return True

    assert Child(end).result() and folder.exists()
    assert len(storage) == 7
    storage.close()
    assert not folder.exists()


def test_copies_delete_nothing(folder):
    storage = made(folder, auto_cleanup=True)
    for twin in (copy.deepcopy(storage), pickle.loads(pickle.dumps(storage))):
        assert len(twin) == 7
        twin.close()
        assert folder.exists()
    storage.close()
    assert not folder.exists()


def test_another_store_under_the_same_name_stays(folder):
    storage = made(folder, auto_cleanup=True)
    (folder / "rows.engram").rename(folder / "moved")
    other = made(folder)
    storage.close()
    assert len(other) == 7 and sorted(os.listdir(folder)) == ["moved", "rows.engram"]


def test_cleanup_deletes_at_once_and_the_rows_stay_readable_until_close(folder):
    storage = LazyMemmapStorage(10, scratch_dir=folder)
    assert storage.cleanup() is False
    ReplayBuffer(storage=storage).extend(torch.arange(7))
    assert storage.cleanup() is True and not folder.exists()
    assert storage.get(slice(None)).tolist() == list(range(7))
    with pytest.raises(StorageError, match="deleted"):
        storage.flush()
    assert storage.cleanup() is False
    storage.close()
    assert LazyMemmapStorage(10).cleanup() is False


def test_a_forked_child_that_outlives_its_parent_deletes_nothing(folder):
    closed, closing = os.pipe()

    def work():
        storage, parent = made(folder, auto_cleanup=True), os.getpid()
        if os.fork():
            os._exit(0)  # as if it were killed
        while os.getppid() == parent:
            time.sleep(0.001)
        storage.close()
        os.write(closing, b"closed")

    os.waitpid(fork(work), 0)
    assert os.read(closed, 10) == b"closed"
    assert len(LazyMemmapStorage.open(folder)) == 7
