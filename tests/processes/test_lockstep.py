"""Crews: rounds of all workers, whatever happens in the middle of one."""

import os
import signal
import time

import numpy as np
import pytest

from contracts.tiers import in_ci
from contracts.waiting import NEVER, allowed, is_gone
from engram._native import AtomicInts
from engram.errors import WorkerError
from engram.processes import lockstep
from engram.processes.lockstep import LockstepPool, WorkerSlot, usable_cores
from engram.processes.shared_memory import SharedMemory
from engram.processes.worker import EventFd

COUNT, ECHO, SLEEP, FAIL = range(4)


def work(channel, slot, memory, size):
    slot.attach(channel)
    counts = memory.attach([size])[0]
    while True:
        command = slot.recv_command()
        said = ()
        if command == COUNT:
            counts[slot.index] += 1
        elif command == ECHO:
            said = (slot.recv_message(),)
        elif command == SLEEP:
            time.sleep(slot.recv_message())
            counts[slot.index] += 1
        elif command == FAIL:
            if slot.index == slot.recv_message():
                raise KeyError("the one that fails")
            time.sleep(1000)
        slot.complete(*said)


@pytest.fixture
def made():
    lockstep = []

    def make(size=2, **kwargs):
        memory = SharedMemory()
        counts = memory.allocate([size])[0]
        lockstep.append(LockstepPool(work, [(memory, size)] * size, name="worker", **kwargs))
        return lockstep[-1], counts

    yield make
    for pool in lockstep:
        pool.close(0.1)


def interrupt(seconds, error=KeyboardInterrupt):
    """Raises an error here after so many seconds."""

    def handler(*_):
        raise error

    old = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    return old


@pytest.mark.parametrize(("method", "size"), in_ci([("fork", 3), ("spawn", 2)], [("fork", 3)]))
def test_a_round_is_done_by_all_before_it_returns(made, method, size):
    pool, counts = made(size, start_method=method)
    for k in range(1, 20):
        pool.execute(COUNT)
        assert counts.tolist() == [k] * size


def test_a_round_can_be_for_some(made):
    pool, counts = made(3)
    pool.execute(COUNT, [2])
    pool.execute(COUNT, [0, 2])
    assert counts.tolist() == [1, 0, 2]


@pytest.mark.quick
def test_messages_go_and_come_whatever_their_size(made):
    pool, counts = made(2)
    long = np.arange(3_000_000)
    said = pool.execute(ECHO, messages=[long, "short"])
    assert (said[0] == long).all() and said[1] == "short"
    assert pool.execute(COUNT) == {} and counts.tolist() == [1, 1]


def test_a_round_that_was_interrupted_is_ended_before_the_next(made):
    pool, counts = made(2)
    interrupt(0.2)
    with pytest.raises(KeyboardInterrupt):
        pool.execute(SLEEP, messages=[0.5, 0.5])
    assert pool.execute(COUNT) == {} and counts.tolist() == [2, 2]
    assert pool.execute(ECHO, messages=[1, 2]) == {0: 1, 1: 2}


@pytest.mark.quick
def test_rounds_may_be_interrupted_anywhere(made):
    pool, counts = made(2)
    rounds = 0
    for k in range(60):
        try:
            interrupt(0.0005 + k * 0.00003)
            while True:
                pool.execute(COUNT)
                rounds += 1
        except KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)
    pool.wait_idle()
    before = counts.copy()
    for k in range(1, 6):
        pool.execute(COUNT)
        assert (counts - before).tolist() == [k, k] and rounds > 0
    assert pool.execute(ECHO, messages=["a", "b"]) == {0: "a", 1: "b"}


def test_a_dead_worker_is_noticed_while_another_one_is_waited_for(made):
    pool, _ = made(2)
    pid = pool.pids[0]  # the first is waited for last
    began = time.monotonic()
    signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(WorkerError, match="worker 0 was killed by SIGKILL"):
        pool.execute(SLEEP, messages=[1000, 1000])
    assert time.monotonic() - began < allowed(1.1)


@pytest.mark.parametrize("fails", [0, 1])
def test_a_failure_is_noticed_while_another_worker_is_busy_and_said_ever_after(made, fails):
    pool, _ = made(2)
    began = time.monotonic()
    with pytest.raises(WorkerError, match="the one that fails") as caught:
        pool.execute(FAIL, messages=[fails, fails])
    assert time.monotonic() - began < allowed(1)
    with pytest.raises(WorkerError) as again:
        pool.execute(COUNT)
    assert again.value is caught.value and caught.value.worker == f"worker {fails}"


def test_a_fork_of_the_owner_is_refused(made):
    pool, counts = made(2)
    pid = os.fork()
    if pid == 0:
        try:
            pool.execute(COUNT)
        except RuntimeError as error:
            os._exit(0 if "this is a fork of it" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    pool.execute(COUNT)
    assert counts.tolist() == [1, 1]


def test_a_crew_that_is_dropped_ends_its_workers():
    memory = SharedMemory()
    memory.allocate([2])
    pool = LockstepPool(work, [(memory, 2)] * 2, name="worker")
    pids = pool.pids
    began = time.monotonic()
    del pool
    assert all(is_gone(pid) for pid in pids) and time.monotonic() - began < allowed(2)


def test_closing_wakes_who_waits_for_a_ring(made):
    pool, _ = made(2)
    pool.execute(COUNT)
    pids, began = pool.pids, time.monotonic()
    pool.close()
    pool.close()
    assert all(is_gone(pid) for pid in pids) and time.monotonic() - began < allowed(2)
    with pytest.raises(RuntimeError, match="closed"):
        pool.execute(COUNT)


def test_closing_ends_who_does_not_come_back_by_force(made):
    pool, _ = made(2)
    interrupt(0.1)
    with pytest.raises(KeyboardInterrupt):
        pool.execute(SLEEP, messages=[1000, 1000])
    pids, began = pool.pids, time.monotonic()
    pool.close(0.3)
    assert all(is_gone(pid) for pid in pids) and time.monotonic() - began < allowed(3)


def test_descriptors_are_given_back():
    def open_now():
        return len(os.listdir("/proc/self/fd"))

    memory = SharedMemory()
    memory.allocate([2])
    before = open_now()
    for _ in range(3):
        pool = LockstepPool(work, [(memory, 2)] * 2, name="worker")
        pool.execute(COUNT)
        pool.close()
        del pool
    assert open_now() <= before


# ---- waiting ----
@pytest.mark.parametrize("looks", [0.0, 50e-6])
def test_both_sides_are_woken_from_sleep_and_from_looking(made, monkeypatch, looks):
    monkeypatch.setattr(lockstep, "OWNER_SPIN_SECONDS", looks)
    pool, counts = made(2)
    for pause in (0, 0, 0.02, 0, 0.02):  # a worker looks for half a millisecond
        time.sleep(pause)
        interrupt(NEVER, TimeoutError("nobody was woken"))
        pool.execute(COUNT)
        pool.execute(SLEEP, messages=[0.01, 0.0])
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert counts.tolist() == [10, 10]


def spent(pool, pause, rounds=100):
    """Seconds of processor time that each worker has used in rounds with a pause after each."""
    before = [_processor_time(pid) for pid in pool.pids]
    for _ in range(rounds):
        pool.execute(COUNT)
        time.sleep(pause)
    return [_processor_time(pid) - b for pid, b in zip(pool.pids, before, strict=True)]


def _processor_time(pid):
    with open(f"/proc/{pid}/schedstat") as file:
        return int(file.read().split()[0]) * 1e-9


def test_more_workers_than_cores_sleep_at_once(made, monkeypatch):
    monkeypatch.setattr(lockstep, "WORKER_SPIN_SECONDS", 0.02)
    monkeypatch.setattr(lockstep, "usable_cores", lambda: [0])
    pool, _ = made(2)
    assert max(spent(pool, pause=0.002)) < 0.1  # and not 0.2


def test_workers_that_wait_for_long_do_not_look(made, monkeypatch):
    pool, _ = made(2)
    quick = max(spent(pool, pause=0.002))
    monkeypatch.setattr(lockstep, "WORKER_SPIN_SECONDS", 0.0015)  # in which nothing can come
    pool, _ = made(2)
    assert max(spent(pool, pause=0.002)) < quick + 0.03  # and not 0.15


@pytest.mark.skipif(len(usable_cores()) < 2, reason="needs two cores")
def test_a_worker_leaves_the_core_of_one_before_it_and_may_come_back():
    memory = SharedMemory()
    cells = AtomicInts(memory.allocate([lockstep._bytes(2)])[0].view(np.int64))
    slot, allowed = WorkerSlot(memory, 2, 1, True), os.sched_getaffinity(0)
    slot.attach(None)
    here, there = usable_cores()[:2]
    try:
        for number, (other, expected) in enumerate([(here, there), (-1, here)], 1):
            os.sched_setaffinity(0, {here})
            os.sched_setaffinity(0, {here, there})
            cells[lockstep._CORE], cells[lockstep._STRIDE + lockstep._REQUESTED] = other, number
            slot.recv_command()
            cells.shares_core(lockstep._STRIDE + lockstep._CORE, 0, 1, 0)
            assert cells[lockstep._STRIDE + lockstep._CORE] == expected and os.sched_getaffinity(0) == {here, there}
            slot.complete()
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_worker_that_sleeps_is_on_no_core():
    memory, seen = SharedMemory(), []
    cells = AtomicInts(memory.allocate([lockstep._bytes(1)])[0].view(np.int64))

    class Channel:
        def wait_for_wakeup(self):
            seen.append((cells[lockstep._CORE], cells[lockstep._WORKER_SLEEPS]))
            cells[lockstep._REQUESTED] += 1

    slot = WorkerSlot(memory, 1, 0, True)
    slot.attach(Channel())
    for _ in range(2):
        time.sleep(0.001)
        slot.recv_command()
        assert (cells[lockstep._CORE] in usable_cores()) and not cells[lockstep._WORKER_SLEEPS]
        slot._is_quick = False
        slot.complete()
    assert seen == [(-1, 1), (-1, 1)]


@pytest.mark.quick
def test_cells_are_checked_before_memory_is_touched():
    array, allowed = np.arange(4) - 9, os.sched_getaffinity(0)
    cells = AtomicInts(array)
    for call in (
        lambda i: cells[i],
        lambda i: cells.exchange(i, 1, 0),
        lambda i: cells.exchange(0, 1, i),
        lambda i: cells.reaches(i, 0, 0),
        lambda i: cells.shares_core(i, 0, 1, 0),
        lambda i: cells.shares_core(0, i, 1, 1),
    ):
        for index in (-1, 4, 2**62, -(2**63)):
            with pytest.raises(IndexError, match="no such integer"):
                call(index)
    with pytest.raises(IndexError):
        cells[4] = 1
    for core in usable_cores():  # on none of them is the second one's
        os.sched_setaffinity(0, {core})
        with pytest.raises(IndexError):
            cells.shares_core(0, 1, 2**62, 4)
    os.sched_setaffinity(0, allowed)
    with pytest.raises(ValueError, match="aligned"):
        AtomicInts(np.frombuffer(bytearray(17), np.uint8)[1:].view(np.int64))
    with pytest.raises(TypeError):
        AtomicInts(np.zeros(3))
    frozen = np.arange(3)
    frozen.flags.writeable = False
    with pytest.raises(TypeError):
        AtomicInts(frozen)
    assert array[1:].tolist() == [-8, -7, -6] and len(cells) == 4


def test_a_cell_is_waited_for_for_as_long_as_was_said():
    cells = AtomicInts(np.zeros(1, np.int64))
    for seconds in (float("nan"), -1.0, 0.0, 1e-5, 3e9):
        began = time.monotonic()
        assert not cells.reaches(0, 1, seconds)
        assert time.monotonic() - began < allowed(0.1)
    assert cells.reaches(0, 0, 0.0) and cells.reaches(0, -5, 1e-5)


def test_memory_that_cannot_be_had_is_an_error_with_its_size():
    with pytest.raises(MemoryError, match=r"no room for 1e\+04 TB of shared memory: .* are free"):
        SharedMemory().allocate([10**16])


def test_shared_arrays_are_aligned_zeroed_and_outlive_the_memory():
    memory = SharedMemory()
    arrays = memory.allocate([1, 0, 100])
    again = memory.attach([1, 0, 100])
    memory.close()
    memory.close()
    arrays[2][:] = 3
    assert [array.size for array in arrays] == [1, 0, 100] and again[2].tolist() == [3] * 100 and again[0][0] == 0
    assert arrays[2].ctypes.data % 64 == 0


def test_rings_that_nobody_has_heard_add_up_to_one():
    event = EventFd()
    event.set()
    event.set()
    assert event.wait()
    event.close_remote()
    assert not event.wait()
    event.close()
    event.close()


@pytest.mark.quick
def test_an_interrupt_in_the_middle_of_a_reply_ends_the_use_of_the_workers(made, monkeypatch):
    pool, _ = made(2)

    def receive(self):  # some of the reply's bytes may have been read
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(pool._workers[0]), "receive", receive)
        pool.execute(ECHO, messages=["a", "b"])
    with pytest.raises(RuntimeError, match="was interrupted while receiving from its workers; close it and make a new"):
        pool.execute(COUNT)


@pytest.mark.parametrize("reached", [0, 1, 2])
def test_an_interrupt_before_the_messages_is_not_waited_for_for_ever(made, monkeypatch, reached):
    pool, _ = made(2)
    worker, sends = type(pool._workers[0]), []

    def send(self, message):
        if len(sends) == reached:
            raise KeyboardInterrupt
        sends.append(message)

    ask = pool._request
    if reached == 2:
        monkeypatch.setattr(pool, "_request", lambda *args: (ask(*args), interrupt(0.0001), time.sleep(1)))
    monkeypatch.setattr(worker, "send", send)
    with pytest.raises(KeyboardInterrupt):
        pool.execute(ECHO, messages=["a", "b"])
    interrupt(NEVER, TimeoutError("it waits"))
    with pytest.raises(RuntimeError, match="was interrupted while sending to its workers"):
        pool.execute(COUNT)
    signal.setitimer(signal.ITIMER_REAL, 0)
