"""Forks by other code than Python's, of which no hook is told: parent and child never write to one lane."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import platform
import subprocess
import sys
import textwrap
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch

from contracts.children import Child, Signal
from engram import _native
from engram._copies import passing_fds
from engram.collectors.background import BackgroundThread
from engram.data import (
    Compact,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from engram.data.replay_buffers.reading import prefetch
from engram.data.replay_buffers.state.buffers import SaveHandle
from engram.data.replay_buffers.storages.single_steps import read_leaves, read_n_steps
from engram.errors import CheckpointError, NoFreeLaneError, StorageInUseError
from engram.store.episodes import EpisodeIndex
from engram.store.locks import FileLock
from engram.testing import env_steps, numbers, steps

pytestmark = pytest.mark.filterwarnings("ignore:this process and process:RuntimeWarning")

LIBC = ctypes.PyDLL(None)  # which keeps the GIL: no other thread has it in the child
FORKS = {"fork of libc": LIBC.fork}  # handlers of libc are called
if hasattr(LIBC, "_Fork"):
    FORKS["_Fork of libc"] = LIBC._Fork  # no handler is
if platform.machine() == "x86_64":
    FORKS["system call"] = lambda: LIBC.syscall(57)

KINDS = {
    "shared memory": lambda path, n, **kw: LazyTensorStorage(n, shared=True, **kw),
    "temporary file": lambda path, n, **kw: LazyMemmapStorage(n, **kw),
    "named file": lambda path, n, **kw: LazyMemmapStorage(n, scratch_dir=path / "store", **kw),
}
LANES = {"turns": {}, "lanes": {"lanes": 3}}
WAYS = {
    "add": lambda rb, a: [rb.add(steps(a, a + 1)[0])],
    "extend": lambda rb, a: rb.extend(steps(a, a + 1)).tolist(),
    "list": lambda rb, a: rb.extend([steps(a, a + 1)[0]]).tolist(),
    "dict": lambda rb, a: rb.extend(steps(a, a + 1).to_dict()).tolist(),
    "writer": lambda rb, a: rb.writer.extend(steps(a, a + 1)).tolist(),
    "set": lambda rb, a: set_next(rb, a),
}


def set_next(rb, a):
    index = rb.storage.lanes.next_slot()
    rb.storage.set(range(index, index + 1), steps(a, a + 1), rb.writer.index_key)
    return [index]


@pytest.fixture(params=FORKS)
def any_fork(request):
    return FORKS[request.param]


@pytest.fixture
def fork():
    """The one that fewest are told of."""
    return list(FORKS.values())[-1]


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture(params=LANES)
def lanes(request):
    return LANES[request.param]


@pytest.mark.pairwise
@pytest.mark.quick
def test_child_and_parent_write_lanes_or_turns_of_their_own(any_fork, kind, lanes, tmp_path):
    rb = ReplayBuffer(storage=kind(tmp_path, 300, **lanes), batch_size=8)
    rb.extend(steps(0, 5))
    go, done = Signal(), Signal()

    def write():
        index = rb.extend(steps(100, 103)).tolist()
        done.send()
        go.wait()
        return index + rb.extend(steps(103, 105)).tolist()

    child = Child(write, fork=any_fork)
    done.wait()
    index = rb.extend(steps(5, 8)).tolist()
    go.send()
    if lanes:
        assert index == [5, 6, 7] and child.result() == [50, 51, 52, 53, 54]
        assert [lane["seams"] for lane in rb.storage.lanes.states()][:3] == [[], [5], []]  # a stint would begin there
    else:
        assert index == [8, 9, 10] and child.result() == [5, 6, 7, 11, 12]
        assert rb.storage.lanes.states()[0]["seams"] == [5, 8, 11, 13]
    assert sorted(numbers(rb[:])) == [*range(8), *range(100, 105)]


@pytest.mark.pairwise
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
def test_every_way_of_writing_notices_it_with_the_first_row(fork, buffer, way, lanes):
    rb = buffer(storage=LazyTensorStorage(300, shared=True, **lanes))
    rb.extend(steps(0, 2))
    index = Child(lambda: WAYS[way](rb, 100), fork=fork).result()
    assert index == ([50] if lanes else [2])
    rb.extend(steps(2, 4))
    assert sorted(numbers(rb[:])) == [0, 1, 2, 3, 100]
    counters = rb.storage.lanes.counters()
    assert [lane["published"] for lane in counters] == ([4, 1, 0, 0, 0, 0] if lanes else [5])
    if buffer is TensorDictReplayBuffer:
        assert rb[:]["index"].tolist() == ([0, 1, 2, 3, 50] if lanes else [0, 1, 2, 3, 4])


@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
def test_rows_of_several_environments(fork, buffer):
    rb = buffer(storage=LazyTensorStorage(200, shared=True, ndim=2), dim_extend=1)
    rb.extend(env_steps(2, 0, 5))
    times = Child(lambda: rb.extend(env_steps(2, 5, 8))[..., 0].flatten().tolist(), fork=fork).result()
    assert sorted(times) == [5, 5, 6, 6, 7, 7]
    rb.extend(env_steps(2, 8, 9))
    assert rb.storage.lanes.states()[0]["seams"] == [5, 8]


@pytest.mark.quick
def test_packed_rows_of_a_child_begin_a_stint_of_its_own(fork):
    rb = ReplayBuffer(storage=LazyTensorStorage(30, shared=True, lanes=3))
    rb.extend(steps(0, 2))
    packed = rb.storage.layout.pack(steps(10, 12))
    parts = [packed[:, leaf.offset : leaf.offset + leaf.nbytes] for leaf in rb.storage.layout.leaves]
    for write in (lambda: rb.storage.append_packed(packed), lambda: rb.storage.append_leaves(parts)):
        assert Child(lambda write=write: write().tolist(), fork=fork).result()[0] not in range(3)
    assert rb.storage.append_packed(packed).tolist() == [2, 3]


@pytest.mark.quick
def test_a_native_append_is_refused_without_help_from_python(fork):
    rb = ReplayBuffer(storage=LazyTensorStorage(30, shared=True, lanes=3))
    rb.extend(steps(0, 2))
    store, plan = rb.storage.lanes.store, rb.storage.check(steps(10, 12), False).data

    def append():
        return store.append(0, plan), store.lane(0)["published"]

    assert Child(append, fork=fork).result() == (None, 2)


@pytest.mark.parametrize("fork", [os.fork, *FORKS.values()], ids=["os.fork", *FORKS])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_while_a_child_learns_of_its_fork_leaves_it_without_its_parents_lane(fork, monkeypatch):
    rb = ReplayBuffer(storage=LazyTensorStorage(300, shared=True, lanes=3))
    rb.extend(steps(0, 2))
    parent, random_bytes, interrupts = os.getpid(), os.urandom, []

    def interrupted(n):
        if os.getpid() != parent and not interrupts:
            interrupts.append(n)
            raise KeyboardInterrupt
        return random_bytes(n)

    def write():
        with contextlib.suppress(KeyboardInterrupt):  # which Python's hooks do not raise
            return rb.extend(steps(100, 102)).tolist()
        return rb.extend(steps(100, 102)).tolist()

    with monkeypatch.context() as patched:
        patched.setattr(os, "urandom", interrupted)  # called where a store learns of a fork
        patched.setattr(sys, "unraisablehook", lambda raised: None)
        index = Child(lambda: (write(), len(interrupts)), fork=fork).result()
    assert index == ([50, 51], 1)
    assert rb.extend(steps(2, 4)).tolist() == [2, 3]
    assert numbers(rb[:]) == [0, 1, 2, 3, 100, 101]


def test_a_child_that_waits_for_the_turn_of_its_parent_has_not_got_it(fork):
    rb = ReplayBuffer(storage=LazyTensorStorage(30, shared=True))
    rb.extend(steps(0, 2))
    begun = Signal()
    with rb.storage.mutex, rb.storage.lanes.turn():
        child = Child(lambda: (begun.send(), rb.extend(steps(10, 12)).tolist())[-1], fork=fork)
        begun.wait()
        assert rb.extend(steps(2, 4)).tolist() == [2, 3]
    assert child.result() == [4, 5]
    assert rb.storage.lanes.states()[0]["seams"] == [4, 6]


# ---- locks of descriptions that the child inherits ----
@pytest.mark.quick
def test_what_a_child_gives_back_is_not_its_parents(fork, kind, tmp_path):
    rb = ReplayBuffer(storage=kind(tmp_path, 30, lanes=1))
    rb.extend(steps(0, 2))
    Child(rb.storage.release, fork=fork).result()
    with pytest.raises(NoFreeLaneError):
        Child(lambda: rb.extend(steps(10, 12))).result()


@pytest.mark.parametrize("alone", ["empty", "in place", "load"])
def test_a_child_is_not_alone_with_the_store(fork, kind, alone, tmp_path):
    rb = ReplayBuffer(storage=kind(tmp_path, 30), batch_size=4)
    rb.extend(steps(0, 5))
    state = rb.state_dict()
    work = {
        "empty": rb.empty,
        "in place": lambda: rb.__setitem__(0, steps(50, 51)[0]),
        "load": lambda: rb.load_state_dict(state),
    }[alone]
    with pytest.raises(StorageInUseError):
        Child(work, fork=fork).result()
    assert numbers(rb[:]) == [0, 1, 2, 3, 4]


SAMPLERS = {
    "slices": lambda: SliceSampler(slice_len=2, end_key="done"),
    "priorities": lambda: PrioritizedSampler(30, 1.0, 1.0),
    "epochs": SamplerWithoutReplacement,
}
AT = torch.tensor([3])
READS = {
    "a draw": lambda rb: rb.sample(),
    "rows": lambda rb: rb[:],
    "some entries": lambda rb: read_leaves(rb.storage, AT, (("n",),)),
    "n-step returns": lambda rb: read_n_steps(rb.storage, AT, [1.0, 1.0], done=("done",)),
    "bytes": lambda rb: rb.storage.read_packed(AT),
    "trajectories": lambda rb: EpisodeIndex(end_key="done").trajectories(rb.storage),
}


@pytest.mark.parametrize(
    ("read", "sampler", "compact"),
    [
        *[("a draw", name, False) for name in (None, *SAMPLERS)],
        *[(read, None, compact) for read in ("rows", "some entries", "bytes") for compact in (False, True)],
        ("n-step returns", None, False),
        ("trajectories", None, False),
    ],
)
def test_a_child_that_reads_keeps_others_from_being_alone(fork, read, sampler, compact):
    storage = LazyTensorStorage(30, shared=True, compact=Compact("obs") if compact else None)
    rb = ReplayBuffer(storage=storage, sampler=None if sampler is None else SAMPLERS[sampler](), batch_size=4)
    rows = steps(0, 5)
    rows["next", "obs"] = steps(1, 6)["obs"]
    rb.extend(rows)
    there, go = Signal(), Signal()
    child = Child(lambda: (READS[read](rb), there.send(), go.wait(), numbers(rb[:]))[3], fork=fork)
    there.wait()
    try:
        with pytest.raises(StorageInUseError):
            rb.empty()
    finally:  # else the child waits for minutes
        go.send()
    assert child.result() == [0, 1, 2, 3, 4]
    rb.empty()


def test_a_child_that_draws_from_several_buffers_keeps_others_from_being_alone_with_any(fork):
    make = SamplerWithoutReplacement
    buffers = [ReplayBuffer(storage=LazyTensorStorage(30, shared=True), sampler=make(), batch_size=4) for _ in range(2)]
    for rb in buffers:
        rb.extend(steps(0, 5))
    both = ReplayBufferEnsemble(*buffers, batch_size=8, sample_from_all=True)
    there, go = Signal(), Signal()
    child = Child(lambda: (both.sample(), there.send(), go.wait(), [numbers(rb[:]) for rb in buffers])[3], fork=fork)
    there.wait()
    try:
        for rb in buffers:
            with pytest.raises(StorageInUseError):
                rb.empty()
    finally:
        go.send()
    assert child.result() == [[0, 1, 2, 3, 4]] * 2


def test_a_child_that_closes_or_cleans_up_leaves_its_parents_file(fork, tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(30, scratch_dir=tmp_path / "store", auto_cleanup=True))
    rb.extend(steps(0, 5))
    assert Child(rb.storage.cleanup, fork=fork).result() is False
    Child(rb.storage.close, fork=fork).result()
    assert not rb.storage.lanes.store.clean  # it is being written
    rb.extend(steps(5, 7))
    assert numbers(ReplayBuffer.open(tmp_path / "store", read_only=True)[:]) == [*range(7)]


def test_a_file_lock_stays_that_of_the_parent(fork, tmp_path):
    (tmp_path / "lock").touch()
    lock = FileLock(os.open(tmp_path / "lock", os.O_RDWR), exclusive=True)
    Child(lock.release, fork=fork).result()
    with pytest.raises(BlockingIOError):
        FileLock(os.open(tmp_path / "lock", os.O_RDWR), exclusive=True)
    lock.release()


# ---- the rest of what Python's hooks do ----
def test_a_copy_of_private_memory_is_told_as_such_and_goes_on_by_itself(any_fork):
    for storage in (LazyTensorStorage(30), ListStorage(30)):
        rb = ReplayBuffer(storage=storage, batch_size=4)
        rb.extend(steps(0, 5))

        def work(rb=rb):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                rb.extend(steps(10, 12))
                rb.sample()
            return [str(w.message) for w in caught if "forked" in str(w.message)], rb.write_count

        told, count = Child(work, fork=any_fork).result()
        assert count == 7 and len(told) <= 1
        if type(storage) is LazyTensorStorage:
            assert str(os.getpid()) in told[0]
        assert len(rb) == 5


def test_a_storage_that_is_made_at_the_first_write_is_shared(fork):
    rb = ReplayBuffer(storage=LazyTensorStorage(30, shared_init=True))
    assert Child(lambda: rb.extend(steps(0, 3)).tolist(), fork=fork).result() == [0, 1, 2]
    assert rb.extend(steps(3, 5)).tolist() == [3, 4]
    assert numbers(rb[:]) == [*range(5)]


def test_a_storage_that_a_child_sends_is_that_of_its_parent(fork):
    rb = ReplayBuffer(storage=LazyTensorStorage(300, shared=True, lanes=3))
    rb.extend(steps(0, 2))

    def send():
        fds = []
        with passing_fds(fds):
            sent = pickle.loads(pickle.dumps(rb.storage.__getstate__()))
            other = LazyTensorStorage.__new__(LazyTensorStorage)
            other.__setstate__(sent)
        got = ReplayBuffer(storage=other)
        return got.extend(steps(10, 12)).tolist(), rb.extend(steps(20, 22)).tolist()

    assert Child(send, fork=fork).result() == ([50, 51], [100, 101])
    assert rb.extend(steps(2, 3)).tolist() == [2]


def test_a_grandchild_that_python_forks_has_a_lane_of_its_own(fork):
    rb = ReplayBuffer(storage=LazyTensorStorage(30, shared=True, lanes=3))
    rb.extend(steps(0, 2))

    # NumPy's OpenBLAS ends its threads before a fork that it sees; in the grandchild's it would wait for them for ever.
    Child(lambda: None).result()

    def both():
        here = Child(lambda: rb.extend(steps(10, 12)).tolist())  # before this process has noticed that it is another
        mine = rb.extend(steps(20, 22)).tolist()
        return sorted([here.result()[0], mine[0]])

    assert Child(both, fork=fork).result() == [5, 10]
    assert rb.extend(steps(2, 3)).tolist() == [2]


def test_prefetched_batches_come_from_threads_of_the_child(fork, monkeypatch):
    monkeypatch.setattr(prefetch, "PAYS_FROM_S", 0)
    gate = SimpleNamespace(permits=threading.Semaphore(1), waiting=threading.Semaphore(0))

    def collate(batch):
        gate.waiting.release()
        gate.permits.acquire()
        return batch

    rb = ReplayBuffer(storage=LazyTensorStorage(30, shared=True), batch_size=4, prefetch=2, collate_fn=collate)
    rb.extend(steps(0, 20))
    rb.sample()
    for _ in range(3):  # that one and two more, in threads of this process, which hold no lock of libc while they wait
        gate.waiting.acquire()

    def sample():
        return [len(numbers(rb.sample())) for _ in range(5)]

    def sample_in_child():
        gate.permits = threading.Semaphore(100)  # a thread of the parent may have held a lock in the other one
        return sample()

    assert Child(sample_in_child, fork=fork).result() == [4] * 5
    gate.permits.release(100)
    assert sample() == [4] * 5


def test_a_save_in_the_background_is_that_of_the_parent(fork):
    go = threading.Event()

    def work(handle):
        handle.began(SimpleNamespace(progress=0.5))
        go.wait()
        return "g-000001"

    handle = SaveHandle(work, SimpleNamespace(left_out=0), lambda: None)
    with pytest.raises(CheckpointError, match="forked"):
        Child(handle.result, fork=fork).result()
    go.set()
    assert handle.result() == "g-000001"


def test_a_thread_in_the_background_is_that_of_the_parent(fork):
    inside, go = threading.Event(), threading.Event()

    class Work:
        def collect(self):
            inside.set()
            go.wait()
            return False

        def finish(self):
            pass

        def room(self):
            return None

        def report(self, error):
            pass

        def report_filling(self, begins):
            pass

    work = Work()
    parts = work.collect, work.finish, work.room, work.report, work.report_filling
    thread = BackgroundThread(*parts, "the thread of this test")
    thread.start()
    inside.wait()

    def use():
        active = thread.is_active
        with thread.held():
            thread.stop()
        return active

    assert Child(use, fork=fork).result() is False
    assert thread.is_active
    go.set()
    thread.stop()


# ---- the page ----
PROGRAM = """
    import ctypes, os, sys
    import torch
    from engram.data import LazyTensorStorage, ReplayBuffer
    rb = ReplayBuffer(storage=LazyTensorStorage(300, shared=True, lanes=3))
    rb.extend(torch.arange(2))
    pid = ctypes.PyDLL(None).fork()
    if pid == 0:
        os._exit(rb.extend(torch.arange(2)).tolist() != [50, 51])
    assert os.waitpid(pid, 0)[1] == 0
    assert rb.extend(torch.arange(2)).tolist() == [2, 3]
"""
REFUSING = """
    #define _GNU_SOURCE
    #include <errno.h>
    #include <stdio.h>
    #include <sys/mman.h>
    #include <sys/syscall.h>
    #include <unistd.h>
    int madvise(void *at, size_t bytes, int advice) {
      if (advice == MADV_WIPEONFORK) return fputs("refused\\n", stderr), errno = EINVAL, -1;
      return syscall(SYS_madvise, at, bytes, advice);
    }
"""


def test_where_the_kernel_does_not_wipe_pages_a_fork_of_libc_is_noticed_all_the_same(tmp_path):
    source, made = tmp_path / "refusing.c", tmp_path / "refusing.so"
    source.write_text(textwrap.dedent(REFUSING))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", made, source], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(made)}
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    ran = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0 and "refused" in ran.stderr, ran.stderr


def test_a_fork_of_pythons_is_no_unseen_one():
    assert not _native.is_new_process()
    assert Child(_native.is_new_process).result() is False
    assert Child(_native.is_new_process, fork=LIBC.fork).result() is True
