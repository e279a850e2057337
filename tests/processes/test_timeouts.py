"""An environment that never comes back from a step or a reset is ended with its process, and named."""

from __future__ import annotations

import ctypes
import os
import signal
import time

import gymnasium
import pytest

from contracts.batch_worlds import LoopEngine
from contracts.each import each
from contracts.gym_worlds import Countdown
from contracts.tiers import in_turns
from contracts.waiting import is_gone
from engram.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, SyncDataCollector
from engram.data import LazyTensorStorage, ReplayBuffer
from engram.envs import GymEnv, ParallelEnv, SerialEnv, TransformedEnv
from engram.envs.engines import Autoreset
from engram.envs.transforms import StepCounter
from engram.envs.vector_env import VectorEnv
from engram.errors import WorkerError

BOTH = [MultiSyncDataCollector, MultiaSyncDataCollector]


def in_python():
    time.sleep(1000)


def in_c():
    ctypes.PyDLL(None).sleep(1000)  # which holds the interpreter's lock


HANGS = [in_python, in_c]
PLACES = [("step", 3), ("reset", 2)]  # where it hangs, and the number that is told


class Hangs(Countdown):
    """Its third step, or its second reset, never ends."""

    def __init__(self, where, hang=in_python):
        super().__init__((4,) if where == "reset" else (1000,))
        self.where, self.hang, self.calls = where, hang, {"step": 0, "reset": 0}

    def reset(self, **kwargs):
        self.enter("reset", 2)
        return super().reset(**kwargs)

    def step(self, action):
        self.enter("step", 3)
        return super().step(action)

    def enter(self, name, last):
        self.calls[name] += 1
        if name == self.where and self.calls[name] == last:
            self.hang()


class Changed(GymEnv):
    """Not known to be stepped as gymnasium is."""


def calm():
    return GymEnv(Countdown((1000,)))


def ended(env):
    """What a ParallelEnv says that hangs, and none of whose processes is left."""
    with pytest.raises(WorkerError) as caught:
        env.rollout(20, break_when_any_done=False)
    with pytest.raises(WorkerError):
        env.reset()
    pids = env.pids
    env.close()
    assert all(is_gone(pid) for pid in pids)
    return str(caught.value)


@pytest.mark.parametrize(("kind", "place", "hang"), in_turns([GymEnv, Changed], PLACES, HANGS))
def test_a_parallel_env_names_worker_environment_and_step(kind, place, hang):
    where, number = place
    env = ParallelEnv(2, [lambda: kind(Countdown((4,))), lambda: kind(Hangs(where, hang))], num_workers=2, timeout=1.5)
    assert ended(env) == (
        f"environment worker 1 was killed: {where} {number} of environment 1 did not end within timeout=1.5 s"
    )


def test_of_several_environments_in_one_worker_the_one_that_hangs_is_named():
    env = ParallelEnv(3, [calm, calm, lambda: GymEnv(Hangs("step"))], num_workers=1, timeout=3.0)
    assert "worker 0 was killed: step 3 of environment 2 " in ended(env)


def test_only_one_step_has_to_end_in_time_not_those_of_all():
    class Slow(Countdown):
        def step(self, action):
            time.sleep(0.3)
            return super().step(action)

    env = ParallelEnv(5, lambda: GymEnv(Slow()), num_workers=1, timeout=1.4)
    assert env.rollout(1).shape == (5, 1)
    env.close()


def test_a_collector_hands_out_what_came_before_a_parallel_env_hung():
    env = ParallelEnv(2, [calm, lambda: GymEnv(Hangs("step"))], timeout=1.5)
    collector = SyncDataCollector(env, frames_per_batch=20)
    assert collector.rollout().shape == (2, 2)
    with pytest.raises(WorkerError, match="step 3 of environment 1"):
        collector.rollout()
    env.close()


def together(hang):
    return VectorEnv(LoopEngine([Countdown((1000,)), hang], Autoreset.SAME_STEP))


WAYS = {
    "raw": (GymEnv, "step 3 of environment 0"),
    "TensorDicts": (Changed, "step 3 of environment 0"),
    "a series": (lambda hang: SerialEnv(2, [calm, lambda: GymEnv(hang)]), "step 3 of environment 1"),
    "together": (together, "step 3 of environment 0"),
    "transformed": (lambda hang: TransformedEnv(GymEnv(hang), StepCounter()), "step 3 of environment 0"),
}


def failure(collector):
    """What a collector says whose worker hangs, and none of whose processes is left; and its batches."""
    pids, batches = [worker.pid for worker in collector._workers], []
    with pytest.raises(WorkerError) as caught:
        for batch in collector:
            batches.append(batch)
    assert collector.is_shut_down and all(is_gone(pid) for pid in pids)
    return str(caught.value), batches


@pytest.mark.parametrize(("cls", "way"), in_turns(BOTH, WAYS))
def test_a_collector_names_worker_environment_and_step(cls, way):
    make, place = WAYS[way]
    told, _ = failure(cls([calm, lambda: make(Hangs("step"))], frames_per_batch=20, timeout=1.5))
    assert told == f"worker 1 of {cls.__name__} was killed: {place} did not end within timeout=1.5 s"


@pytest.mark.parametrize(("cls", "place", "hang"), in_turns(BOTH, PLACES, HANGS))
def test_a_hanging_step_or_reset_of_a_collector_is_ended(cls, place, hang):
    where, number = place
    told, _ = failure(cls([lambda: GymEnv(Hangs(where, hang))], frames_per_batch=20, timeout=1.5))
    assert f"{where} {number} of environment 0" in told


def test_what_the_other_worker_has_handed_over_comes_first():
    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    makers = [calm, lambda: GymEnv(Hangs("step"))]
    _, batches = failure(MultiSyncDataCollector(makers, frames_per_batch=20, timeout=1.5))
    assert [tuple(batch.shape) for batch in batches] == [(1, 10)]
    failure(MultiSyncDataCollector(makers, frames_per_batch=20, timeout=1.5, replay_buffer=rb))
    assert len(rb) == 10


def test_a_question_to_a_worker_that_hangs_ends_too():
    collector = MultiaSyncDataCollector([calm, lambda: GymEnv(Hangs("step"))], frames_per_batch=20, timeout=1.5)
    collector.rollout()
    with pytest.raises(WorkerError, match=r"worker 1 .* was killed: step 3"):
        collector.state_dict()
    assert collector.is_shut_down


@pytest.mark.parametrize(("cls", "hang"), in_turns(BOTH, HANGS))
def test_shutdown_leaves_no_process_of_one_that_hangs_without_a_timeout(cls, hang):
    collector = cls([calm, lambda: GymEnv(Hangs("step", hang))], frames_per_batch=20)
    pids = [worker.pid for worker in collector._workers]
    for k in range(2):
        collector._post_collect(k)
    time.sleep(0.5)
    collector._shut_down_quickly()
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.quick
@each("kind", [ParallelEnv, *BOTH])
@each(("timeout", "error"), [(0, ValueError), (-1.0, ValueError), (float("nan"), ValueError)])
def test_a_timeout_that_is_no_time_is_refused(kind, timeout, error):
    def make(timeout):
        if kind is ParallelEnv:
            return ParallelEnv(1, calm, timeout=timeout)
        return kind([calm], frames_per_batch=4, timeout=timeout)

    with pytest.raises(error, match="more than 0 seconds"):
        make(timeout)
    for wrong in ("1", True):
        with pytest.raises(TypeError, match="a number of seconds"):
            make(wrong)


class Patient(Countdown):
    def __init__(self, timeout):
        super().__init__()
        self.timeout = timeout


gymnasium.register("engram/Patient-v0", entry_point=Patient)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SerialEnv(2, calm, timeout=1.0),
        lambda: GymEnv("CartPole-v1", timeout=1.0),
        lambda: GymEnv("CartPole-v1", num_envs=2, timeout=1.0),
        lambda: GymEnv(Countdown(), timeout=1.0),
        lambda: SyncDataCollector(calm, frames_per_batch=4, timeout=1.0),
    ],
)
def test_where_environments_run_in_this_process_a_timeout_says_where_it_exists(make):
    with pytest.raises(TypeError, match="timeout= is an argument of ParallelEnv, MultiSyncDataCollector and Multia"):
        make()


def test_a_timeout_that_the_environment_itself_knows_goes_there():
    assert GymEnv("engram/Patient-v0", timeout=3.0).gym_env.unwrapped.timeout == 3.0


OWNER = """
    import ctypes, time
    from engram.collectors import {cls}
    from engram.envs import GymEnv

    class Hangs(GymEnv):
        def engines(self):
            return None

        def _step(self, td):
            print("hanging", flush=True)
            ctypes.PyDLL(None).sleep(1000)

    if __name__ == "__main__":
        collector = {cls}([lambda: Hangs("CartPole-v1")], frames_per_batch=100)
        print(collector._workers[0].pid, flush=True)
        collector.rollout()
"""


@pytest.mark.parametrize("cls", ["MultiSyncDataCollector", "MultiaSyncDataCollector"])
def test_a_worker_that_hangs_in_c_ends_when_its_owner_is_killed(script, cls):
    process = script(OWNER, cls=cls)
    pid = int(process.stdout.readline())
    assert process.stdout.readline() == "hanging\n"
    os.kill(process.pid, signal.SIGKILL)
    assert is_gone(pid)
