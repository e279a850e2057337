"""Worker processes: messages, failures, endings."""

import os
import signal
import time

import pytest
import torch

from contracts.tiers import in_ci
from contracts.waiting import NEVER, allowed, is_gone
from engram.errors import WorkerError
from engram.processes.worker import ChannelClosed, CloudpickleWrapper, Worker, close_all, wait_for_any

METHODS = ["fork", "spawn"]


def double(channel):
    while True:
        channel.send(channel.receive() * 2)


def apply(channel, function, *args):
    channel.send(function(*args))
    channel.receive()


def sleep(channel):
    channel.send("asleep")
    time.sleep(1000)


@pytest.fixture
def start():
    workers = []

    def make(run, *args, **kwargs):
        workers.append(Worker(run, args, **{"name": "worker 0", **kwargs}))
        return workers[-1]

    yield make
    close_all(workers, timeout=0.2)


@pytest.mark.parametrize("method", in_ci(METHODS, ["fork"]))
def test_a_worker_answers(start, method):
    worker = start(double, start_method=method)
    worker.send(21)
    assert worker.receive(NEVER) == 42


@pytest.mark.parametrize("method", METHODS)
def test_a_users_lambda_goes_along(start, method):
    n = 5
    assert start(apply, CloudpickleWrapper(lambda: n + 1), start_method=method).receive(NEVER) == 6


@pytest.mark.quick
def test_a_failure_is_an_error_with_the_workers_traceback_and_its_cause(start):
    def fails():
        raise KeyError("what the user did")

    worker = start(apply, CloudpickleWrapper(fails))
    with pytest.raises(WorkerError, match="in fails") as caught:
        worker.receive(NEVER)
    assert isinstance(caught.value.__cause__, KeyError) and "what the user did" in str(caught.value)
    with pytest.raises(WorkerError, match="in fails"):
        worker.send(1)


def test_a_failure_that_cannot_be_sent_still_says_its_text(start):
    class Odd(Exception):
        def __reduce__(self):
            raise TypeError("never")

    def fails():
        raise Odd("text of the odd one")

    with pytest.raises(WorkerError, match="text of the odd one"):
        start(apply, CloudpickleWrapper(fails)).receive(NEVER)


def test_a_failure_that_cannot_be_read_back_still_says_its_text(start):
    class TwoArguments(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} and {two}")

    def fails():
        raise TwoArguments("this", "that")

    with pytest.raises(WorkerError, match="this and that"):
        start(apply, CloudpickleWrapper(fails)).receive(NEVER)


def test_what_a_worker_said_before_it_failed_comes_first(start):
    def run(channel):
        channel.send(1)
        raise ValueError("then")

    worker = start(run, start_method="fork")
    assert is_gone(worker.pid)
    assert worker.receive(NEVER) == 1
    with pytest.raises(WorkerError, match="then"):
        worker.receive(NEVER)


@pytest.mark.quick
def test_a_killed_worker_is_noticed_within_a_second(start):
    worker = start(sleep)
    assert worker.receive(NEVER) == "asleep"
    began = time.monotonic()
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="worker 0 was killed by SIGKILL"):
        worker.receive()
    assert time.monotonic() - began < allowed(1)


def test_a_killed_worker_is_noticed_though_a_sibling_and_a_grandchild_hold_its_pipe(start):
    def run(channel):
        grandchild = os.fork()
        if grandchild == 0:
            time.sleep(1000)
            os._exit(0)
        channel.send(grandchild)
        time.sleep(1000)

    worker = start(run, start_method="fork")
    start(double)
    grandchild = worker.receive(NEVER)
    try:
        began = time.monotonic()
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="SIGKILL"):
            worker.receive()
        assert time.monotonic() - began < allowed(1)
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_a_message_to_a_dead_worker_says_how_it_died(start):
    worker = start(sleep)
    worker.receive(NEVER)
    os.kill(worker.pid, signal.SIGKILL)
    assert is_gone(worker.pid)
    until = time.monotonic() + NEVER
    with pytest.raises(WorkerError, match="SIGKILL"):
        while time.monotonic() < until:
            worker.send(b"x")
            time.sleep(0.05)


def test_waiting_for_any_finds_who_speaks_and_who_died(start):
    silent, speaks, dies = start(double), start(double), start(sleep)
    dies.receive(NEVER)
    assert wait_for_any([silent, speaks, dies], 0.05) == []
    speaks.send(1)
    assert wait_for_any([silent, speaks, dies], NEVER) == [speaks]
    speaks.receive(NEVER)
    os.kill(dies.pid, signal.SIGKILL)
    assert wait_for_any([silent, speaks, dies], NEVER) == [dies]


def test_nothing_said_in_time_is_a_timeout(start):
    with pytest.raises(TimeoutError, match=r"worker 0 sent no message within 0\.05 s"):
        start(double).receive(0.05)


@pytest.mark.quick
def test_closing_ends_who_listens_at_once(start):
    worker = start(double)
    pid, began = worker.pid, time.monotonic()
    worker.close()
    worker.close()
    assert is_gone(pid) and time.monotonic() - began < allowed(1)
    with pytest.raises(RuntimeError, match="was closed"):
        worker.send(1)


def test_closing_ends_who_does_not_listen_in_its_time(start):
    def deaf(channel):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        channel.send(1)
        while True:
            time.sleep(1)

    workers = [start(deaf, start_method="fork") for _ in range(3)]
    pids = [worker.pid for worker in workers]
    for worker in workers:
        worker.receive(NEVER)
    began = time.monotonic()
    close_all(workers, timeout=0.2)
    assert all(is_gone(pid) for pid in pids) and time.monotonic() - began < allowed(3)


def test_closing_ends_who_is_in_the_middle_of_a_long_message(start):
    def talkative(channel):
        while True:
            channel.send_bytes_to_owner(b"x" * 5_000_000)

    worker = start(talkative, start_method="fork")
    pid = worker.pid
    time.sleep(0.1)
    began = time.monotonic()
    worker.close(timeout=0.3)
    assert is_gone(pid) and time.monotonic() - began < allowed(2)


def test_random_numbers_of_workers_differ_and_repeat(start):
    def draw():
        import random

        import numpy as np

        return random.random(), np.random.rand(), torch.rand(()).item()

    def drawn():
        torch.manual_seed(3)
        return [start(apply, CloudpickleWrapper(draw)).receive(NEVER) for _ in range(2)]

    first, again = drawn(), drawn()
    assert first == again and len({value for draws in first for value in draws}) == 6


def test_a_workers_own_workers_end_with_it(start):
    def run(channel):
        inner = Worker(sleep, name="inner")
        inner.receive(NEVER)
        channel.send(inner.pid)
        channel.receive()

    closed, killed = start(run, start_method="fork"), start(run, start_method="fork")
    pids = [closed.receive(NEVER), killed.receive(NEVER)]
    closed.close()
    os.kill(killed.pid, signal.SIGKILL)
    assert is_gone(pids[0]) and is_gone(pids[1])


OWNER = """
    import sys, time
    from engram.processes.worker import Worker

    def run(channel):
        channel.send(1)
        while {loop}: time.sleep(0.01)
        channel.receive()

    if __name__ == "__main__":
        workers = [Worker(run, name=str(i), start_method="{method}") for i in range(2)]
        [worker.receive() for worker in workers]
        print(*(worker.pid for worker in workers), flush=True)
        {then}
"""


@pytest.fixture
def owner(script):
    def start(**names):
        process = script(OWNER, **{"method": "fork", "loop": "True", **names})
        return process, [int(pid) for pid in process.stdout.readline().split()]

    return start


@pytest.mark.parametrize("method", in_ci(METHODS, ["fork"]))
def test_workers_end_when_their_owner_is_killed(owner, method):
    process, pids = owner(method=method, then="time.sleep(1000)")
    process.kill()
    process.wait()
    assert len(pids) == 2 and all(is_gone(pid) for pid in pids)


@pytest.mark.parametrize("then", ["pass", "raise ValueError", "sys.exit(3)"])
def test_an_owner_that_ends_without_closing_does_not_hang(owner, then):
    process, pids = owner(loop="True", then=then)
    began = time.monotonic()
    process.wait(NEVER)
    assert time.monotonic() - began < allowed(6) and all(is_gone(pid) for pid in pids)


def test_ctrl_c_is_the_owners(owner):
    process, pids = owner(loop="False", then="time.sleep(1000)")
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    time.sleep(0.1)
    assert not any(is_gone(pid, 0.05) for pid in pids)
    process.send_signal(signal.SIGINT)
    process.wait(NEVER)
    assert all(is_gone(pid) for pid in pids)


def test_another_start_method_is_refused():
    with pytest.raises(ValueError, match=r"start method must be one of fork.*got 'clone'"):
        Worker(double, name="w", start_method="clone")


def test_closed_is_raised_in_a_worker_whose_owner_closes():
    read, write = os.pipe()

    def run(channel):
        try:
            channel.receive()
        except ChannelClosed:
            os.write(write, b"closed")
            raise

    worker = Worker(run, name="w", start_method="fork")
    os.close(write)
    worker.close()
    assert os.read(read, 100) == b"closed"
    os.close(read)
