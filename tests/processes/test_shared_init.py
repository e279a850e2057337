"""`shared_init=True`: processes share a storage that nothing was written to; the first one that writes makes it."""

import copy
import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time
import warnings
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from tensordict import TensorDict

from contracts.waiting import NEVER
from engram._copies import passing_fds
from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from engram.data.replay_buffers.state.rows import RowLoad
from engram.errors import StorageError, StorageInUseError
from engram.store import first_writers
from engram.store.files import StoreSpec
from engram.store.layout import RowLayout
from engram.store.places import PrivateMemory

FORK = multiprocessing.get_context("fork")
KINDS = ["memory", "temporary file", "folder"]
pytestmark = pytest.mark.filterwarnings("ignore:this process and process")  # which take turns


def make(kind, folder, size=200, **settings):
    if kind == "memory":
        return LazyTensorStorage(size, shared_init=True, **settings)
    place = {"scratch_dir": folder / "store"} if kind == "folder" else {}
    return LazyMemmapStorage(size, shared_init=True, **place, **settings)


def steps(first, n=5):
    return TensorDict({"n": torch.arange(first, first + n)}, [n])


def in_children(*functions):
    def run(function):
        torch.set_num_threads(1)
        function()

    children = [FORK.Process(target=run, args=(function,)) for function in functions]
    for child in children:
        child.start()
    for child in children:
        child.join(300)
    return [child.exitcode for child in children]


def sent(thing):
    """The object as it arrives in another process, here in the same one."""
    with passing_fds([]) as descriptors:
        packed = bytes(ForkingPickler.dumps(thing))
    with passing_fds(descriptors):
        return pickle.loads(packed)


@pytest.mark.parametrize("turns", [3, pytest.param(60, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_of_processes_that_write_at_once_one_makes_it_and_no_row_is_lost(kind, turns, tmp_path):
    for turn in range(turns):
        folder = tmp_path / str(turn)
        folder.mkdir()
        rb = TensorDictReplayBuffer(storage=make(kind, folder), batch_size=4)
        barrier = FORK.Barrier(3)

        def write(k, rb=rb, barrier=barrier):
            barrier.wait()
            for i in range(3):
                rb.extend(steps(100 * k + 5 * i))

        assert in_children(*[lambda k=k: write(k) for k in range(3)]) == [0, 0, 0]
        assert sorted(rb[:]["n"].tolist()) == [100 * k + i for k in range(3) for i in range(15)]
        assert torch.equal(rb[:]["index"], torch.arange(45))
        starts = rb[:]["n"].reshape(-1, 5)
        assert torch.equal(starts, starts[:, :1] + torch.arange(5))  # each extend is whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_that_only_reads_sees_what_another_one_made(kind, tmp_path):
    rb = ReplayBuffer(storage=make(kind, tmp_path), batch_size=4)
    assert len(rb) == 0 and rb.storage.layout is None and rb.stats().rows == 0
    with pytest.raises(IndexError):
        rb[:1]
    assert in_children(lambda: rb.extend(steps(0))) == [0]
    assert rb.storage.nbytes > 0 and len(rb) == 5
    assert set(rb.sample()["n"].tolist()) <= set(range(5))
    rb.extend(steps(5))
    assert rb[:]["n"].tolist() == list(range(10))


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_was_sent_unwritten_is_the_same_storage(kind, tmp_path):
    rb = ReplayBuffer(storage=make(kind, tmp_path), batch_size=4)
    other = sent(rb)
    other.extend(steps(0))
    rb.extend(steps(5))
    assert len(rb) == len(other) == 10 and sent(rb)[:]["n"].tolist() == list(range(10))


def test_without_it_an_unwritten_storage_is_not_sent():
    with pytest.raises(RuntimeError, match=r"has not been initialized.*shared_init=True"):
        sent(LazyTensorStorage(10, shared=True))
    with pytest.raises(RuntimeError, match=r"has not been initialized.*shared_init=True"):
        sent(LazyMemmapStorage(10))


def test_a_store_in_a_folder_that_a_child_made_is_found_without_it(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path / "store"), batch_size=4)
    assert not rb.can_sample()
    assert in_children(lambda: rb.extend(steps(0))) == [0]
    assert rb.can_sample() and len(rb) == 5
    rb.extend(steps(5))
    assert rb[:]["n"].tolist() == list(range(10))


def test_a_closed_store_is_not_opened_again_by_a_look(tmp_path):
    storage = LazyMemmapStorage(100, scratch_dir=tmp_path / "store")
    ReplayBuffer(storage=storage).extend(steps(0))
    storage.close()
    assert len(storage) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_storages_of_their_own(kind, tmp_path):
    storage = make(kind, tmp_path)
    other = copy.deepcopy(storage)
    ReplayBuffer(storage=other).extend(steps(0))
    assert len(other) == 5 and len(storage) == 0
    ReplayBuffer(storage=storage).extend(steps(0, 3))
    assert len(other) == 5 and len(storage) == 3


@pytest.mark.parametrize("kind", ["memory", "temporary file"])
def test_what_a_process_left_half_made_is_made_anew(kind, tmp_path, monkeypatch):
    rb = ReplayBuffer(storage=make(kind, tmp_path))

    def die_halfway(spec, fd):
        os.pwrite(fd, b"\xff" * spec.total_bytes, 0)
        os.kill(os.getpid(), signal.SIGKILL)

    def write():
        monkeypatch.setattr(StoreSpec, "create", die_halfway)
        rb.extend(TensorDict({"n": torch.zeros(4, 1000)}, [4]))

    assert in_children(write) == [-signal.SIGKILL]
    assert len(rb) == 0
    rb.extend(steps(0))
    assert rb[:]["n"].tolist() == list(range(5))


def test_a_store_is_not_opened_before_it_is_whole(monkeypatch):
    storage = LazyTensorStorage(100, shared_init=True)
    other, create, seen = sent(storage), StoreSpec.create, []

    def look(spec, fd):
        store = create(spec, fd)
        seen.append(len(other))
        return store

    monkeypatch.setattr(StoreSpec, "create", look)
    ReplayBuffer(storage=storage).extend(steps(0))
    assert seen == [0] and len(other) == 5


def test_who_waits_for_a_process_that_was_stopped_gets_an_error(monkeypatch):
    monkeypatch.setattr(first_writers, "_MAKE_TIMEOUT", 0.05)
    storage = LazyTensorStorage(100, shared_init=True)
    rb, checked = ReplayBuffer(storage=sent(storage)), []

    def look(spec, fd):
        with pytest.raises(StorageInUseError, match="has been making this storage"):
            rb.extend(steps(0))
        checked.append(len(rb))
        return create(spec, fd)

    create = StoreSpec.create
    monkeypatch.setattr(StoreSpec, "create", look)
    ReplayBuffer(storage=storage).extend(steps(7))
    monkeypatch.setattr(StoreSpec, "create", create)
    rb.extend(steps(12))
    assert checked == [0] and rb[:]["n"].tolist() == list(range(7, 17))


def test_a_child_of_a_process_that_died_while_it_made_it_keeps_nobody_waiting(monkeypatch):
    monkeypatch.setattr(first_writers, "_MAKE_TIMEOUT", 5)
    rb, reader = ReplayBuffer(storage=LazyTensorStorage(100, shared_init=True)), os.pipe()

    def fork_and_die(spec, fd):
        if not (pid := os.fork()):
            signal.pause()
        os.write(reader[1], pid.to_bytes(8, "little"))
        os.kill(os.getpid(), signal.SIGKILL)

    if not (child := os.fork()):  # its own children hold no pipe that a Process is waited for by
        try:
            monkeypatch.setattr(StoreSpec, "create", fork_and_die)
            rb.extend(steps(0))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    try:
        rb.extend(steps(3))
    finally:
        os.kill(int.from_bytes(os.read(reader[0], 8), "little"), signal.SIGKILL)
        for end in reader:
            os.close(end)
    assert rb[:]["n"].tolist() == list(range(3, 8))


def test_where_it_cannot_be_made_another_process_still_can(monkeypatch):
    storage = LazyTensorStorage(100, shared_init=True)
    rb, other = ReplayBuffer(storage=storage), ReplayBuffer(storage=sent(storage))
    monkeypatch.setattr(StoreSpec, "create", lambda spec, fd: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(StorageError, match="no space"):
        rb.extend(steps(0))
    monkeypatch.undo()
    other.extend(steps(3))
    assert rb[:]["n"].tolist() == other[:]["n"].tolist() == list(range(3, 8))


@pytest.mark.parametrize("kind", ["memory", "temporary file"])
def test_a_batch_that_does_not_fit_what_another_process_made_is_refused(kind, tmp_path):
    rb = ReplayBuffer(storage=make(kind, tmp_path))
    other = sent(rb)
    other.extend(steps(0))
    with pytest.raises((ValueError, KeyError), match="x"):
        rb.extend(TensorDict({"x": torch.zeros(3)}, [3]))
    assert len(rb) == 5


def test_environments_of_another_shape_than_another_process_made_are_refused():
    storage = LazyTensorStorage(120, ndim=3, shared_init=True)
    rb, other = ReplayBuffer(storage=storage), ReplayBuffer(storage=sent(storage))
    other.extend(TensorDict({"n": torch.arange(24).reshape(2, 3, 4)}, [2, 3, 4]))
    with pytest.raises(ValueError, match=r"shape \[3, 2\], this storage \[2, 3\]"):
        rb.extend(TensorDict({"n": torch.zeros(3, 2, 4, dtype=torch.int64)}, [3, 2, 4]))
    assert len(rb) == 24 and rb[:].shape == (2, 3, 4)


def test_others_see_what_is_loaded_into_it_when_all_is_there(tmp_path, monkeypatch):
    saved = ReplayBuffer(storage=LazyTensorStorage(100))
    saved.extend(steps(0, 50))
    saved.dumps(tmp_path / "saved")
    rb = ReplayBuffer(storage=LazyTensorStorage(100, shared_init=True))
    other, seen = sent(rb), []
    end = RowLoad.end_restore

    def end_restore(load, *counters):
        seen.append(other.storage.layout)
        end(load, *counters)

    monkeypatch.setattr(RowLoad, "end_restore", end_restore)
    rb.loads(tmp_path / "saved")
    assert seen == [None] and other[:]["n"].tolist() == list(range(50))


def test_a_forked_child_that_makes_the_store_in_a_folder_does_not_delete_it(tmp_path):
    storage = LazyMemmapStorage(100, scratch_dir=tmp_path / "store", auto_cleanup=True, shared_init=True)
    rb = ReplayBuffer(storage=storage)

    def write():
        rb.extend(steps(0))
        storage.close()

    assert in_children(write) == [0]
    assert rb[:]["n"].tolist() == list(range(5))
    storage.close()
    assert not (tmp_path / "store").exists()


def test_a_closed_one_is_not_opened_again(tmp_path):
    storage = LazyMemmapStorage(100, scratch_dir=tmp_path / "store", shared_init=True)
    ReplayBuffer(storage=storage).extend(steps(0))
    storage.close()
    assert len(storage) == 0 and len(LazyMemmapStorage.open(tmp_path / "store")) == 5


@pytest.mark.parametrize("order", ["set, extend", "extend, adopt"])
def test_threads_that_write_the_first_rows_in_different_ways_do_not_wait_for_each_other(order, monkeypatch):
    rb = ReplayBuffer(storage=LazyTensorStorage(20, shared_init=True), batch_size=4)
    lock = first_writers.UnmadeStore._lock

    def slowly(store):
        lock(store)
        time.sleep(0.3)

    calls = {
        "set": lambda: rb.storage.set(range(3), torch.arange(3)),
        "extend": lambda: rb.extend(torch.arange(3)),
        "adopt": lambda: rb.storage.adopt(RowLayout.of(torch.arange(3), 1)),
    }
    monkeypatch.setattr(first_writers.UnmadeStore, "_lock", slowly)
    threads = [threading.Thread(target=calls[name], daemon=True) for name in order.split(", ")]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(NEVER)
        assert not thread.is_alive()
    assert len(rb) == (6 if "set" in order else 3)


class Queued:
    """A lock that says when a thread has to wait for it."""

    def __init__(self):
        self._lock, self.waits = threading.RLock(), threading.Event()

    def __enter__(self):
        if not self._lock.acquire(blocking=False):
            self.waits.set()
            self._lock.acquire()

    def __exit__(self, *error):
        self._lock.release()


@pytest.mark.quick
def test_of_two_threads_that_check_the_first_rows_without_a_buffer_one_makes_the_table(monkeypatch):
    storage, making = LazyTensorStorage(20), PrivateMemory.make
    lock = storage.access.table._make_lock = Queued()
    second = threading.Thread(target=lambda: storage.check(steps(5), False), daemon=True)
    layouts = []

    def slowly(place, new):
        layouts.append(new.layout)
        if len(layouts) == 1:
            second.start()
            assert lock.waits.wait(NEVER)
        return making(place, new)

    monkeypatch.setattr(PrivateMemory, "make", slowly)
    storage.check(steps(0), False)
    second.join(NEVER)
    assert len(layouts) == 1 and not second.is_alive()


@pytest.mark.quick
def test_a_thread_waits_for_another_one_that_makes_a_store_for_all_processes(monkeypatch):
    storage, lock = LazyTensorStorage(20, shared_init=True), first_writers.UnmadeStore._lock
    mutex = storage.access.table.place.unmade()._mutex = Queued()
    second = threading.Thread(target=lambda: storage.check(steps(5), False), daemon=True)
    takes = []

    def slowly(store):
        takes.append(threading.current_thread())
        if len(takes) == 1:
            second.start()
            assert mutex.waits.wait(NEVER)
            assert second not in takes
        mutex.waits.set()
        lock(store)

    monkeypatch.setattr(first_writers.UnmadeStore, "_lock", slowly)
    storage.check(steps(0), False)
    second.join(NEVER)
    assert not second.is_alive()


@pytest.mark.quick
def test_a_layout_is_compared_with_that_of_a_process_which_made_the_store_while_this_one_waited(monkeypatch):
    rb, parent, lock = (
        ReplayBuffer(storage=LazyTensorStorage(20, shared_init=True)),
        os.getpid(),
        first_writers.UnmadeStore._lock,
    )

    def after_a_child(store):
        if os.getpid() == parent:
            assert in_children(lambda: rb.extend(steps(0))) == [0]
        lock(store)

    monkeypatch.setattr(first_writers.UnmadeStore, "_lock", after_a_child)
    with pytest.raises(ValueError, match="another layout"):
        rb.storage.adopt(RowLayout.of(torch.zeros(3), 1))
    assert rb[:]["n"].tolist() == list(range(5))


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["memory", "temporary file"])
def test_a_storage_that_was_sent_before_its_first_write_makes_no_copies_in_children(kind, tmp_path):
    rb = ReplayBuffer(storage=sent(make(kind, tmp_path)))

    def write():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(rb) == 0
            rb.extend(steps(0))

    assert in_children(write) == [0]
    assert rb[:]["n"].tolist() == list(range(5))


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["memory", "temporary file"])
def test_what_nobody_has_written_to_leaves_no_file_open(kind, tmp_path):
    gc.collect()  # files of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    storage = make(kind, tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    del storage
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.quick
def test_a_storage_in_memory_that_is_closed_leaves_its_only_lane_to_another_process():
    rb = ReplayBuffer(storage=LazyTensorStorage(20, shared=True, lanes=1))
    rb.extend(steps(0))
    rb.storage.close()
    assert in_children(lambda: rb.extend(steps(5))) == [0]
    assert rb[:]["n"].tolist() == list(range(10))
