"""How soon collectors with worker processes tell what went wrong."""

import faulthandler
import os
import resource
import signal
import subprocess
import time

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from collectors.failing import Fails, cartpole, raises
from contracts.each import each
from contracts.tiers import in_ci
from contracts.waiting import NEVER, allowed
from engram.collectors import MultiaSyncDataCollector, MultiSyncDataCollector
from engram.data import LazyTensorStorage, ReplayBuffer
from engram.envs import GymEnv, SerialEnv
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


@pytest.mark.parametrize("method", in_ci(["state_dict", "set_seed", "load_state_dict"], ["state_dict"]))
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


def differing(first, second):
    """Makers of two environments with these observation spaces."""
    return [lambda space=space: GymEnv(Seen(space)) for space in (first, second)]


class Seen(gymnasium.Env):
    """Shows samples of a space, in episodes of three steps; `signum` ends its process in the fifth."""

    action_space = Discrete(2)

    def __init__(self, space, signum=None):
        self.observation_space, self.signum, self.steps = space, signum, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 5 and self.signum is not None:
            faulthandler.disable()  # pytest's, whose report is not wanted
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.kill(os.getpid(), self.signum)
        return self.observation_space.sample(), 0.0, self.steps % 3 == 0, False, {}


def box(*shape, dtype=np.float32):
    return Box(0, 1, shape, dtype)


#: Spaces of two workers, and what is said of the entry in which they differ.
DIFFERING = [
    (
        (box(3), box(4)),
        r"'observation' is torch.float32 \[3\] from worker 0, and torch.float32 \[4\] from worker 1",
    ),
    ((box(3), box(3, dtype=np.uint8)), "'observation' is torch.float32 .* and torch.uint8"),
    (
        (Dict(a=box(3), b=box(3)), Dict(a=box(3), c=box(3))),
        r"'b' is torch.float32 \[3\] .* and missing from worker 1",
    ),
    ((Dict(a=box(3)), Dict(a=box(3), c=box(3))), "'c' is missing from worker 0, and"),
]
ARGUMENTS = [{}, {"cat_results": 0}, {"trajs_per_batch": 3}, {"preemptive_threshold": 0.5}, {"replay_buffer": True}]
#: Of workers, which take long to start: each difference without an argument, and the first one with each.
DIFFERENCES = [
    pytest.param(*differing, arguments, marks=pytest.mark.quick if not arguments or differing is DIFFERING[0] else ())
    for differing in DIFFERING for arguments in ARGUMENTS
]  # fmt: skip


@pytest.mark.parametrize(("spaces", "entry", "arguments"), DIFFERENCES)
def test_workers_whose_batches_do_not_go_into_one_are_named_with_the_entry(spaces, entry, arguments):
    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    if "replay_buffer" in arguments:
        arguments = {"replay_buffer": rb}
    with (
        MultiSyncDataCollector(differing(*spaces), frames_per_batch=20, **arguments) as collector,
        pytest.raises(ValueError, match=f"workers 0 and 1 do not go into one: {entry}"),
    ):
        collector.rollout()
    assert collector.is_shut_down and len(rb) == 0


@pytest.mark.quick
def test_workers_that_take_turns_are_named_where_their_trajectories_do_not_go_into_one():
    with (
        MultiaSyncDataCollector(differing(box(3), box(4)), frames_per_batch=20, trajs_per_batch=200) as collector,
        pytest.raises(ValueError, match=r"workers \d and \d do not go into one: 'observation'"),
    ):
        collector.rollout()


def two():
    return SerialEnv(2, lambda: GymEnv(Seen(box(3))))


@pytest.mark.quick
@pytest.mark.parametrize("cat_results", ["stack", 1])
def test_workers_with_other_numbers_of_environments_are_named_with_their_shapes(cat_results):
    makers = [two, lambda: SerialEnv(1, lambda: GymEnv(Seen(box(3))))]
    with (
        MultiSyncDataCollector(makers, frames_per_batch=8, cat_results=cat_results) as collector,
        pytest.raises(
            ValueError, match=r"workers 0 and 1 do not go into one: they have the shapes \[2, 2\] and \[1, 4\]"
        ),
    ):
        collector.rollout()


@pytest.mark.quick
def test_workers_with_other_numbers_of_environments_fill_a_buffer():
    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    makers = [two, lambda: GymEnv(Seen(box(3)))]
    with MultiSyncDataCollector(makers, frames_per_batch=8, total_frames=16, replay_buffer=rb) as collector:
        list(collector)
    assert len(rb) == 16


@pytest.mark.deep
@pytest.mark.quick
@each(
    ("signum", "advice"),
    [
        (signal.SIGKILL, "is there memory enough"),
        (signal.SIGSEGV, "native code .* crashed in it: with PYTHONFAULTHANDLER=1"),
        (signal.SIGABRT, "native code .* crashed in it"),
        (signal.SIGBUS, "/dev/shm"),
        (signal.SIGXCPU, "CPU time"),
        (signal.SIGTERM, "another process may have sent it"),
        (signal.SIGUSR1, "another process may have sent it"),
    ],
)
def test_what_may_be_behind_a_signal_is_said_and_memory_of_sigkill_only(signum, advice):
    with (
        MultiSyncDataCollector([lambda: GymEnv(Seen(box(3), signum))], frames_per_batch=20) as collector,
        pytest.raises(WorkerError, match=f"was killed by {signum.name}; .*{advice}") as caught,
    ):
        collector.rollout()
    assert ("memory enough" in str(caught.value)) == (signum == signal.SIGKILL)
