"""Crews: rounds of all workers, whatever happens in the middle of one."""

import os
import signal
import time

import numpy as np
import pytest

from engram.bells import Bell
from engram.crews import Crew
from engram.errors import WorkerError
from engram.shared_memory import SharedMemory
from test_workers import is_gone

COUNT, ECHO, SLEEP, FAIL = range(4)


def work(channel, seat, memory, size):
    seat.sit(channel)
    counts = memory.attach([size])[0]
    while True:
        command = seat.next_command()
        said = ()
        if command == COUNT:
            counts[seat.index] += 1
        elif command == ECHO:
            said = (seat.message(),)
        elif command == SLEEP:
            time.sleep(seat.message())
            counts[seat.index] += 1
        elif command == FAIL:
            if seat.index == seat.message():
                raise KeyError("the one that fails")
            time.sleep(20)
        seat.done(*said)


@pytest.fixture
def made():
    crews = []

    def make(size=2, **kwargs):
        memory = SharedMemory()
        counts = memory.allocate([size])[0]
        crews.append(Crew(work, [(memory, size)] * size, name="worker", **kwargs))
        return crews[-1], counts

    yield make
    for crew in crews:
        crew.close(0.1)


def interrupt(seconds):
    """KeyboardInterrupt here after so many seconds."""

    def handler(*_):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    return old


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_round_is_done_by_all_before_it_returns(made, method):
    crew, counts = made(3, start_method=method)
    for k in range(1, 20):
        crew.round(COUNT)
        assert counts.tolist() == [k] * 3


def test_a_round_can_be_for_some(made):
    crew, counts = made(3)
    crew.round(COUNT, [2])
    crew.round(COUNT, [0, 2])
    assert counts.tolist() == [1, 0, 2]


def test_messages_go_and_come_whatever_their_size(made):
    crew, counts = made(2)
    long = np.arange(3_000_000)
    said = crew.round(ECHO, messages=[long, "short"])
    assert (said[0] == long).all() and said[1] == "short"
    assert crew.round(COUNT) == {} and counts.tolist() == [1, 1]


def test_a_round_that_was_interrupted_is_ended_before_the_next(made):
    crew, counts = made(2)
    interrupt(0.2)
    with pytest.raises(KeyboardInterrupt):
        crew.round(SLEEP, messages=[0.5, 0.5])
    assert crew.round(COUNT) == {} and counts.tolist() == [2, 2]
    assert crew.round(ECHO, messages=[1, 2]) == {0: 1, 1: 2}


def test_rounds_may_be_interrupted_anywhere(made):
    crew, counts = made(2)
    rounds = 0
    for k in range(60):
        interrupt(0.0005 + k * 0.00003)
        try:
            while True:
                crew.round(COUNT)
                rounds += 1
        except KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)
    crew.ready()
    before = counts.copy()
    for k in range(1, 6):
        crew.round(COUNT)
        assert (counts - before).tolist() == [k, k] and rounds > 0
    assert crew.round(ECHO, messages=["a", "b"]) == {0: "a", 1: "b"}


def test_a_dead_worker_is_noticed_while_another_one_is_waited_for(made):
    crew, _ = made(2)
    pid = crew.pids[0]  # the first is waited for last
    began = time.monotonic()
    signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(WorkerError, match="worker 0 was killed by SIGKILL"):
        crew.round(SLEEP, messages=[20, 20])
    assert time.monotonic() - began < 1.1


@pytest.mark.parametrize("fails", [0, 1])
def test_a_failure_is_noticed_while_another_worker_is_busy_and_said_ever_after(made, fails):
    crew, _ = made(2)
    began = time.monotonic()
    with pytest.raises(WorkerError, match="the one that fails") as caught:
        crew.round(FAIL, messages=[fails, fails])
    assert time.monotonic() - began < 1
    with pytest.raises(WorkerError) as again:
        crew.round(COUNT)
    assert again.value is caught.value and caught.value.worker == f"worker {fails}"


def test_a_fork_of_the_owner_is_refused(made):
    crew, counts = made(2)
    pid = os.fork()
    if pid == 0:
        try:
            crew.round(COUNT)
        except RuntimeError as error:
            os._exit(0 if "this is a fork of it" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    crew.round(COUNT)
    assert counts.tolist() == [1, 1]


def test_a_crew_that_is_dropped_ends_its_workers():
    memory = SharedMemory()
    memory.allocate([2])
    crew = Crew(work, [(memory, 2)] * 2, name="worker")
    pids = crew.pids
    began = time.monotonic()
    del crew
    assert all(is_gone(pid) for pid in pids) and time.monotonic() - began < 2


def test_closing_wakes_who_waits_for_a_ring(made):
    crew, _ = made(2)
    crew.round(COUNT)
    pids, began = crew.pids, time.monotonic()
    crew.close()
    crew.close()
    assert all(is_gone(pid) for pid in pids) and time.monotonic() - began < 2
    with pytest.raises(RuntimeError, match="closed"):
        crew.round(COUNT)


def test_closing_ends_who_does_not_come_back_by_force(made):
    crew, _ = made(2)
    interrupt(0.1)
    with pytest.raises(KeyboardInterrupt):
        crew.round(SLEEP, messages=[60, 60])
    pids, began = crew.pids, time.monotonic()
    crew.close(0.3)
    assert all(is_gone(pid) for pid in pids) and time.monotonic() - began < 3


def test_descriptors_are_given_back():
    def open_now():
        return len(os.listdir("/proc/self/fd"))

    memory = SharedMemory()
    memory.allocate([2])
    before = open_now()
    for _ in range(3):
        crew = Crew(work, [(memory, 2)] * 2, name="worker")
        crew.round(COUNT)
        crew.close()
        del crew
    assert open_now() <= before


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
    bell = Bell()
    bell.ring()
    bell.ring()
    assert bell.wait()
    bell.ring_last()
    assert not bell.wait()
    bell.close()
    bell.close()
