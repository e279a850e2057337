"""What goes wrong in a ParallelEnv is told at once, and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import time

import pytest

from contracts.gym_worlds import Countdown
from contracts.waiting import NEVER, allowed, has_named_memory, is_gone
from engram.envs import GymEnv, ParallelEnv
from engram.errors import WorkerError


class Plain(GymEnv):
    """Has no raw steps."""


class Faulty(Countdown):
    def __init__(self, step=None, reset=None):
        super().__init__((100,))
        self.on_step, self.on_reset = step, reset

    def reset(self, **kwargs):
        if self.on_reset is not None and self.episode >= 0:
            self.on_reset()
        return super().reset(**kwargs)

    def step(self, action):
        if self.on_step is not None:
            self.on_step()
        return super().step(action)


def fail():
    raise KeyError("what the environment did")


KINDS = pytest.mark.parametrize("cls", [GymEnv, Plain])


@pytest.fixture
def made():
    envs = []

    def make(cls=GymEnv, n=2, **faults):
        makers = [lambda: cls(Countdown((100,))), *[lambda: cls(Faulty(**faults))] * (n - 1)]
        envs.append(ParallelEnv(n, makers, num_workers=n))
        return envs[-1]

    yield make
    for env in envs:
        env.close()


def caught(function):
    began = time.monotonic()
    with pytest.raises(WorkerError) as error:
        function()
    assert time.monotonic() - began < allowed(1)
    return str(error.value)


def is_of_no_more_use(env):
    for call in (env.reset, lambda: env.set_seed(0), env.rand_step):
        with pytest.raises(WorkerError):
            call()
    pids = env.pids
    env.close()
    assert all(is_gone(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="this ParallelEnv was closed"):
        env.rand_step()


@pytest.mark.quick
@KINDS
def test_an_exception_in_a_step_brings_its_traceback(made, cls):
    env = made(cls, step=fail)
    td = env.rand_action(env.reset())
    assert "in fail" in caught(lambda: env.step(td))
    is_of_no_more_use(env)


@KINDS
def test_an_exception_in_a_reset_brings_its_traceback(made, cls):
    env = made(cls, reset=fail)
    env.reset()
    assert "in fail" in caught(env.reset)
    is_of_no_more_use(env)


def test_an_exception_in_make_env_brings_its_traceback_though_another_one_takes_long():
    def slow():
        time.sleep(1000)

    began = time.monotonic()
    with pytest.raises(WorkerError, match="in fail"):
        ParallelEnv(2, [slow, fail], num_workers=2)
    assert time.monotonic() - began < allowed(2)  # starting two processes counts, too


@pytest.mark.quick
@KINDS
def test_a_killed_worker_is_named(made, cls):
    env = made(cls, step=lambda: os.kill(os.getpid(), signal.SIGKILL))
    td = env.rand_action(env.reset())
    assert "environment worker 1 was killed by SIGKILL" in caught(lambda: env.step(td))
    is_of_no_more_use(env)


@KINDS
def test_a_worker_killed_between_steps_is_named_at_the_next(made, cls):
    env = made(cls)
    td = env.rand_action(env.reset())
    os.kill(env.pids[0], signal.SIGKILL)
    assert is_gone(env.pids[0])
    assert "environment worker 0 was killed by SIGKILL" in caught(lambda: env.step(td))


def test_ctrl_c_in_the_middle_of_a_step_can_be_gone_on_from(made):
    env = made(step=lambda: time.sleep(0.3))
    td = env.rand_action(env.reset())
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(KeyboardInterrupt):
        env.step(td)
    signal.signal(signal.SIGALRM, old)
    assert env.reset()["observation"][:, 0].tolist() == [100, 100]
    assert env.rand_step(env.reset())["next", "observation"][:, 0].tolist() == [99, 99]


def test_closing_ends_a_worker_that_is_stuck_in_a_step():
    env = ParallelEnv(1, lambda: GymEnv(Faulty(step=lambda: time.sleep(1000))), patience=0.3)
    td = env.rand_action(env.reset())
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(KeyboardInterrupt):
        env.step(td)
    signal.signal(signal.SIGALRM, old)
    pid, began = env.pids[0], time.monotonic()
    env.close()
    env.close()
    assert is_gone(pid) and time.monotonic() - began < allowed(2)


@KINDS
def test_a_fork_of_the_owner_says_so_and_does_no_harm(made, cls):
    env = made(cls)
    td = env.rand_action(env.reset())
    pid = os.fork()
    if pid == 0:
        try:
            env.step(td)
        except RuntimeError as error:
            env.close()
            os._exit(0 if "fork" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert env.step(td)["next", "observation"][:, 0].tolist() == [99, 99]


@KINDS
def test_an_environment_that_is_dropped_ends_its_workers(cls):
    env = ParallelEnv(2, lambda: cls(Countdown()), num_workers=2)
    env.rollout(2)
    pids = env.pids
    del env
    gc.collect()
    assert all(is_gone(pid) for pid in pids)


def test_environments_are_closed_in_their_workers(tmp_path):
    class Closes(Countdown):
        def close(self):
            (tmp_path / str(os.getpid())).touch()

    env = ParallelEnv(2, lambda: GymEnv(Closes()), num_workers=2)
    pids = env.pids
    env.close()
    assert {file.name for file in tmp_path.iterdir()} == {str(pid) for pid in pids}


OWNER = """
    import os, sys, time
    from engram.envs import GymEnv, ParallelEnv

    def make():
        return GymEnv("CartPole-v1")

    if __name__ == "__main__":
        env = ParallelEnv(2, make, num_workers=2, start_method="{method}")
        env.rollout(3)
        print(*env.pids, flush=True)
        sys.stdin.readline()
        {then}
"""


@pytest.mark.parametrize(
    "method, then, ends",
    [
        pytest.param("fork", "time.sleep(1000)", signal.SIGKILL, marks=pytest.mark.long),
        ("fork", "while True: env.rollout(50)", signal.SIGKILL),
        ("fork", "while True: env.rollout(50)", signal.SIGINT),
        pytest.param("fork", "pass", None, marks=pytest.mark.long),
        ("fork", "raise ValueError", None),
        pytest.param("spawn", "while True: env.rollout(50)", signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_an_owner_that_ends_leaves_nothing(script, method, then, ends):
    process = script(OWNER, method=method, then=then)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2 and not any(has_named_memory(pid) for pid in (process.pid, *pids))
    began = time.monotonic()
    process.stdin.write("go on\n")
    process.stdin.flush()
    if ends is not None:
        time.sleep(0.05)
        process.send_signal(ends)
    said = process.stderr.read()
    process.wait(NEVER)
    assert time.monotonic() - began < allowed(10)  # ends by itself
    assert all(is_gone(pid) for pid in pids)  # and with them the memory, which has no name
    assert ("KeyboardInterrupt" in said) == (ends == signal.SIGINT) and "leaked" not in said


def test_memory_goes_with_the_environment():
    def maps():
        gc.collect()
        with open("/proc/self/maps") as file:
            return sum("memfd:engram" in line for line in file)

    before = maps()
    env = ParallelEnv(2, lambda: GymEnv(Countdown()), num_workers=2)
    env.rollout(2)
    assert maps() > before
    env.close()
    del env
    assert maps() == before
