"""How soon collectors with worker processes tell what went wrong."""

import os
import signal
import subprocess
import time

import pytest

from collectors.failing import Fails, cartpole, raises
from contracts.waiting import NEVER, allowed
from engram.collectors import MultiaSyncDataCollector, MultiSyncDataCollector
from engram.errors import WorkerError

BOTH = [MultiSyncDataCollector, MultiaSyncDataCollector]


def busy():
    return Fails(15, lambda: time.sleep(1000))


def failing():
    return Fails(15, raises)


@pytest.mark.parametrize("cls", BOTH)
def test_an_error_is_told_within_a_second_while_another_worker_is_busy(cls):
    collector = cls([busy, failing], frames_per_batch=40)
    began = time.monotonic()
    with pytest.raises(WorkerError, match="simulator broke"):
        for _ in collector:
            pass
    assert time.monotonic() - began < allowed(1) and collector.is_shut_down


def test_an_error_while_environments_are_made_is_told_within_a_second():
    def slow():
        time.sleep(1000)

    began = time.monotonic()
    with pytest.raises(WorkerError, match="simulator broke"):
        MultiSyncDataCollector([raises, slow], frames_per_batch=40)
    assert time.monotonic() - began < allowed(1)


def test_an_error_of_the_consumer_is_told_within_a_second():
    with pytest.raises(KeyError), MultiaSyncDataCollector([cartpole, busy], frames_per_batch=40) as collector:
        collector.rollout()
        time.sleep(0.3)
        began = time.monotonic()
        raise KeyError
    assert time.monotonic() - began < allowed(1) and collector.is_shut_down


@pytest.fixture
def ctrl_c():
    """`ctrl_c(seconds)` comes so much later."""
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("method", ["state_dict", "set_seed", "load_state_dict"])
def test_a_question_that_is_interrupted_ends_the_collector(method, ctrl_c):
    with MultiaSyncDataCollector([cartpole, busy], frames_per_batch=40) as collector:
        state = collector.state_dict()
        arguments = {"state_dict": [], "set_seed": [0], "load_state_dict": [state]}[method]
        collector.rollout()
        time.sleep(0.3)
        ctrl_c(0.2)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            getattr(collector, method)(*arguments)
        assert time.monotonic() - began < allowed(1.2)
        with pytest.raises(RuntimeError, match="was shut down"):
            collector.rollout()


SCRIPT = """
    import time
    from engram.collectors import {cls}
    from engram.envs import GymEnv

    class Busy(GymEnv):
        left = 75

        def engines(self):
            return None

        def _step(self, td):
            self.left -= 1
            if self.left == 0:
                time.sleep(1000)
            return super()._step(td)

    if __name__ == "__main__":
        collector = {cls}([lambda: GymEnv("CartPole-v1"), lambda: Busy("CartPole-v1")], frames_per_batch=100)
        collector.rollout()
        print("going", flush=True)
        {then}
"""
PLACES = {
    "rollout": ("MultiSyncDataCollector", "list(collector)"),
    "consumer": ("MultiaSyncDataCollector", "time.sleep(1000)"),
}


def children_of(pid):
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    return found.stdout.split()


@pytest.mark.parametrize("place", PLACES)
def test_an_uncaught_ctrl_c_ends_workers_within_a_second_while_one_is_busy(script, place):
    cls, then = PLACES[place]
    process = script(SCRIPT, cls=cls, then=then)
    assert process.stdout.readline() == "going\n" and len(children_of(process.pid)) == 2
    time.sleep(0.5)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    while children_of(process.pid) and time.monotonic() - began < NEVER:
        time.sleep(0.01)
    assert time.monotonic() - began < allowed(1)
    assert "KeyboardInterrupt" in process.communicate(timeout=NEVER)[1]
