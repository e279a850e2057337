"""Crews: rounds of all workers, whatever happens in the middle of one."""

import os
import signal
import time

import numpy as np
import pytest

from engram._native import AtomicInts
from engram.errors import WorkerError
from engram.processes import lockstep as crews
from engram.processes.eventfd import Bell
from engram.processes.lockstep import Crew, Seat, usable_cores
from engram.processes.shared_memory import SharedMemory
from processes.test_workers import is_gone

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


def interrupt(seconds, error=KeyboardInterrupt):
    """Raises an error here after so many seconds."""

    def handler(*_):
        raise error

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


@pytest.mark.quick
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


@pytest.mark.quick
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


# ---- waiting ----
@pytest.mark.parametrize("looks", [0.0, 50e-6])
def test_both_sides_are_woken_from_sleep_and_from_looking(made, monkeypatch, looks):
    monkeypatch.setattr(crews, "LOOKS_OF_OWNER", looks)
    crew, counts = made(2)
    for pause in (0, 0, 0.02, 0, 0.02):  # a worker looks for half a millisecond
        time.sleep(pause)
        interrupt(5, TimeoutError("nobody was woken"))
        crew.round(COUNT)
        crew.round(SLEEP, messages=[0.01, 0.0])
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert counts.tolist() == [10, 10]


def spent(crew, pause, rounds=100):
    """Seconds of processor time that each worker has used in rounds with a pause after each."""
    before = [_processor_time(pid) for pid in crew.pids]
    for _ in range(rounds):
        crew.round(COUNT)
        time.sleep(pause)
    return [_processor_time(pid) - b for pid, b in zip(crew.pids, before, strict=True)]


def _processor_time(pid):
    with open(f"/proc/{pid}/schedstat") as file:
        return int(file.read().split()[0]) * 1e-9


def test_more_workers_than_cores_sleep_at_once(made, monkeypatch):
    monkeypatch.setattr(crews, "LOOKS_OF_WORKER", 0.02)
    monkeypatch.setattr(crews, "usable_cores", lambda: [0])
    crew, _ = made(2)
    assert max(spent(crew, pause=0.002)) < 0.1  # and not 0.2


def test_workers_that_wait_for_long_do_not_look(made, monkeypatch):
    crew, _ = made(2)
    quick = max(spent(crew, pause=0.002))
    monkeypatch.setattr(crews, "LOOKS_OF_WORKER", 0.0015)  # in which nothing can come
    crew, _ = made(2)
    assert max(spent(crew, pause=0.002)) < quick + 0.03  # and not 0.15


@pytest.mark.skipif(len(usable_cores()) < 2, reason="needs two cores")
def test_a_worker_leaves_the_core_of_one_before_it_and_may_come_back():
    memory = SharedMemory()
    cells = AtomicInts(memory.allocate([crews._bytes(2)])[0].view(np.int64))
    seat, allowed = Seat(memory, 2, 1, True), os.sched_getaffinity(0)
    seat.sit(None)
    here, there = usable_cores()[:2]
    try:
        for number, (other, expected) in enumerate([(here, there), (-1, here)], 1):
            os.sched_setaffinity(0, {here})
            os.sched_setaffinity(0, {here, there})
            cells[crews._CORE], cells[crews._STRIDE + crews._ASKED] = other, number
            seat.next_command()
            cells.shares_core(crews._STRIDE + crews._CORE, 0, 1, 0)
            assert cells[crews._STRIDE + crews._CORE] == expected and os.sched_getaffinity(0) == {here, there}
            seat.done()
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_worker_that_sleeps_is_on_no_core():
    memory, seen = SharedMemory(), []
    cells = AtomicInts(memory.allocate([crews._bytes(1)])[0].view(np.int64))

    class Channel:
        def wait_for_ring(self):
            seen.append((cells[crews._CORE], cells[crews._WORKER_SLEEPS]))
            cells[crews._ASKED] += 1

    seat = Seat(memory, 1, 0, True)
    seat.sit(Channel())
    for _ in range(2):
        time.sleep(0.001)
        seat.next_command()
        assert (cells[crews._CORE] in usable_cores()) and not cells[crews._WORKER_SLEEPS]
        seat._is_quick = False
        seat.done()
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
        assert time.monotonic() - began < 0.1
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
    bell = Bell()
    bell.ring()
    bell.ring()
    assert bell.wait()
    bell.ring_last()
    assert not bell.wait()
    bell.close()
    bell.close()


@pytest.mark.parametrize("reached", [0, 1, 2])
def test_an_interrupt_before_the_messages_is_not_waited_for_for_ever(made, monkeypatch, reached):
    crew, _ = made(2)
    worker, sends = type(crew._workers[0]), []

    def send(self, message):
        if len(sends) == reached:
            raise KeyboardInterrupt
        sends.append(message)

    ask = crew._ask
    if reached == 2:
        monkeypatch.setattr(crew, "_ask", lambda *args: (ask(*args), interrupt(0.0001), time.sleep(1)))
    monkeypatch.setattr(worker, "send", send)
    with pytest.raises(KeyboardInterrupt):
        crew.round(ECHO, messages=["a", "b"])
    interrupt(5, TimeoutError("it waits"))
    with pytest.raises(RuntimeError, match="was interrupted while speaking to its workers"):
        crew.round(COUNT)
    signal.setitimer(signal.ITIMER_REAL, 0)
