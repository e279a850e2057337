"""Collecting in a thread into a buffer, while the caller does other things."""

from __future__ import annotations

import copy
import gc
import logging
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from contracts.children import Child
from contracts.each import each
from contracts.gym_loop import WORLDS, Proxy, Rule
from contracts.gym_worlds import Countdown
from contracts.waiting import NEVER, comes
from engram.collectors import SyncDataCollector, background
from engram.data import LazyTensorStorage, ListStorage, ReplayBuffer, SliceSampler
from engram.envs import GymEnv, SerialEnv
from engram.envs.policies import exploration_type
from engram.envs.utils import ExplorationType, set_exploration_type

pytestmark = pytest.mark.usefixtures("lock_order")


def countdown():
    return GymEnv(Countdown((1000,)))


def buffer(storage=LazyTensorStorage, **arguments):
    return ReplayBuffer(storage=storage(10_000), batch_size=16, **arguments)


class Gate(Rule):
    """A policy that waits at a gate from its nth call on."""

    def __init__(self, n=0):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.left, self.is_waiting, self.opened = n, threading.Event(), threading.Event()

    def forward(self, observation):
        self.left -= 1
        if self.left < 0:
            self.is_waiting.set()
            assert self.opened.wait(120)
        return super().forward(observation)


class Breaks(Countdown):
    """Fails once, at a step."""

    def __init__(self, at):
        super().__init__((1000,))
        self.left_steps = at

    def step(self, action):
        self.left_steps -= 1
        if self.left_steps == 0:
            raise ArithmeticError("the simulator broke")
        return super().step(action)


def ended(collector):
    """The collector, once it does not collect any more."""
    collector._background._thread.join(120)
    assert not collector.is_running()
    return collector


@each("storage", [LazyTensorStorage, ListStorage])
@each("path", ["raw", "stepped"])
def test_the_rows_are_those_that_are_collected_in_the_foreground(path, storage):
    def make():
        env = SerialEnv(3, [lambda w=w: GymEnv(Countdown(w)) for w in WORLDS])
        return env if path == "raw" else Proxy(env)

    behind, before = buffer(storage), buffer(storage)
    collector = SyncDataCollector(make(), Rule(), frames_per_batch=12, total_frames=60, replay_buffer=behind)
    collector.start()
    collector.start()  # it runs already
    ended(collector).async_shutdown()
    list(SyncDataCollector(make(), Rule(), frames_per_batch=12, total_frames=60, replay_buffer=before))
    rows = [torch.stack(rb[:]) if isinstance(rb[:], list) else rb[:] for rb in (behind, before)]
    assert collector.frames == len(behind) == 60 and bool((rows[0] == rows[1]).all())


def test_the_buffer_is_sampled_while_it_is_filled():
    rb = buffer(sampler=SliceSampler(slice_len=8))
    collector = SyncDataCollector(countdown(), Rule(), frames_per_batch=50, total_frames=2000, replay_buffer=rb)
    collector.start()
    samples = 0
    assert comes(lambda: rb.write_count >= 50)
    while collector.is_running() or not samples:
        rows = rb.sample().reshape(2, 8)
        assert torch.equal(rows["next", "observation"][:, :-1], rows["observation"][:, 1:])
        assert collector.stats.frames <= 2000
        samples += 1
    collector.async_shutdown()
    assert collector.frames == rb.write_count == 2000


def test_nothing_is_collected_in_a_pause_and_it_goes_on_after_it():
    rb, batches = buffer(), threading.Semaphore(0)
    collector = SyncDataCollector(
        countdown(), Rule(), frames_per_batch=5, replay_buffer=rb, post_collect_hook=lambda batch: batches.release()
    )
    with collector.pause():
        pass  # it does not run yet
    collector.start()
    for _ in range(3):
        assert batches.acquire(timeout=120)
        with collector.pause(), collector.pause():
            count = rb.write_count
            threading.Event().wait(0.02)
            assert collector.is_running() and rb.write_count == collector.frames == count
        while batches.acquire(blocking=False):
            pass
    assert batches.acquire(timeout=120)
    collector.async_shutdown()
    left = rb[:]["observation"][:, 0]
    assert torch.equal(left[:400], torch.arange(1000, 600, -1).to(left)[: len(left)]) and rb.write_count % 5 == 0


def test_between_two_pauses_at_least_a_batch_is_collected():
    rb = buffer()
    collector = SyncDataCollector(countdown(), Rule(), frames_per_batch=5, total_frames=500, replay_buffer=rb)
    collector.start()
    counts = []
    while collector.is_running():
        with collector.pause():
            counts.append(rb.write_count)
    assert counts == sorted(counts) and counts.count(500) <= 2 and len(set(counts)) >= len(counts) - 1
    collector.async_shutdown()


def test_several_threads_that_pause_again_and_again_do_not_keep_it_from_collecting():
    rb = buffer()
    collector = SyncDataCollector(countdown(), Rule(), frames_per_batch=5, total_frames=100, replay_buffer=rb)
    collector.start()
    until = time.monotonic() + NEVER

    def pause():
        while collector.is_running() and time.monotonic() < until:
            with collector.pause():
                time.sleep(0.002)

    threads = [threading.Thread(target=pause) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert collector.frames == 100
    collector.async_shutdown()


def test_pause_may_wait_for_another_thread_that_pauses_twice(monkeypatch):
    monkeypatch.setattr(background, "_PATIENCE", 0.1)
    collector = SyncDataCollector(countdown(), Rule(), frames_per_batch=5, replay_buffer=buffer())
    collector.start()
    states = []
    with collector.pause():
        other = threading.Thread(target=lambda: states.extend(collector.state_dict() for _ in range(2)), daemon=True)
        other.start()
        other.join(NEVER)
        assert len(states) == 2 and states[0]["frames"] == states[1]["frames"] == collector.frames
    collector.async_shutdown()


def test_where_no_thread_can_be_started_nobody_waits_for_it(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    collector = SyncDataCollector(countdown(), Rule(), frames_per_batch=5, total_frames=10, replay_buffer=buffer())
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start"):
        patch.setattr(threading.Thread, "start", refuse)
        collector.start()
    assert not collector.is_running()
    with collector.pause():
        assert collector.frames == 0
    collector.start()
    ended(collector).async_shutdown()
    assert collector.frames == 10


def test_two_threads_that_start_it_start_one(monkeypatch):
    begun, start = [], threading.Thread.start

    def slow(thread):
        if thread.name.startswith("the background"):
            begun.append(thread)
            time.sleep(0.1)
        start(thread)

    collector = SyncDataCollector(countdown(), Rule(), frames_per_batch=5, total_frames=10, replay_buffer=buffer())
    collector.start()
    ended(collector)
    collector.total_frames, thread = 10**9, collector._background._thread
    monkeypatch.setattr(threading.Thread, "start", slow)
    monkeypatch.setattr(thread, "join", lambda: time.sleep(0.1))
    callers = [threading.Thread(target=collector.start) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(begun) == 1 and collector.is_running()
    collector.async_shutdown()


def test_a_state_is_that_between_two_batches():
    def make():
        return SyncDataCollector(
            countdown(), Rule(), frames_per_batch=5, reset_at_each_iter=True, replay_buffer=buffer()
        )

    collector = make()
    collector.start()
    state = collector.state_dict()
    with collector.pause():
        second = collector.state_dict()
        assert second["frames"] == collector.frames == collector.replay_buffer.write_count
    assert state["frames"] % 5 == 0 and state["frames"] <= second["frames"]
    collector.load_state_dict(second)
    assert collector.set_seed(3) > 3
    collector.reset()
    collector.async_shutdown()
    twin = make()
    twin.load_state_dict(second)
    assert twin.frames == second["frames"]


CALLS = {
    "start": lambda c: c.start(),
    "pause": lambda c: c.pause().__enter__(),
    "async_shutdown": lambda c: c.async_shutdown(),
    "shutdown": lambda c: c.shutdown(),
    "rollout": lambda c: c.rollout(),
    "iterate": lambda c: next(iter(c)),
    "update": lambda c: c.update_policy_weights_(),
    "state": lambda c: c.state_dict(),
    "load": lambda c: c.load_state_dict({}),
    "seed": lambda c: c.set_seed(0),
    "reset": lambda c: c.reset(),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_error_is_logged_at_once_and_raised_by_the_next_call(call, caplog):
    rb = buffer()
    collector = SyncDataCollector(GymEnv(Breaks(8)), Rule(), frames_per_batch=5, replay_buffer=rb)
    with caplog.at_level(logging.ERROR, "engram"):
        collector.start()
        ended(collector)
    assert "the simulator broke" in caplog.text and "SyncDataCollector" in caplog.text
    assert collector.frames == len(rb.storage) == 7  # the rows before it are there
    with pytest.raises(ArithmeticError, match="the simulator broke"):
        CALLS[call](collector)
    collector.shutdown()  # raised once
    assert collector.is_shut_down


USES = {
    "sample": lambda rb: rb.sample(),
    "iterate": lambda rb: next(iter(rb)),
    "next": lambda rb: rb.next(),
    "extend": lambda rb: rb.extend(rb[:2]),
    "add": lambda rb: rb.add(rb[0]),
    "len": len,
    "write_count": lambda rb: rb.write_count,
}


@each("use", USES)
def test_an_error_ends_programs_that_wait_for_rows_in_the_buffer(use):
    rb = buffer()
    collector = SyncDataCollector(GymEnv(Breaks(8)), Rule(), frames_per_batch=5, replay_buffer=rb)
    collector.start()
    ended(collector)
    copied = copy.deepcopy(rb)
    with pytest.raises(RuntimeError, match=r"in the background has ended .*the simulator broke") as raised:
        USES[use](rb)
    assert isinstance(raised.value.__cause__, ArithmeticError)
    for one in (rb, copied):  # raised once
        USES[use](one)
    with pytest.raises(ArithmeticError, match="the simulator broke"):
        collector.shutdown()


def test_a_buffer_that_waits_for_rows_in_a_loop_is_told_of_the_error():
    rb = buffer()
    collector = SyncDataCollector(GymEnv(Breaks(8)), Rule(), frames_per_batch=5, replay_buffer=rb)
    collector.start()
    with pytest.raises(RuntimeError, match="the simulator broke"):
        while rb.write_count < 1000:
            time.sleep(0.001)
    with pytest.raises(ArithmeticError):
        ended(collector).rollout()


def test_an_error_that_the_collector_has_raised_leaves_the_buffer_in_use():
    rb = buffer()
    collector = SyncDataCollector(GymEnv(Breaks(8)), Rule(), frames_per_batch=5, replay_buffer=rb)
    collector.start()
    with pytest.raises(ArithmeticError):
        ended(collector).update_policy_weights_()
    assert len(rb) == rb.write_count == 7 and len(rb.sample()) == 16


def test_after_an_error_it_can_go_on_with_a_new_trajectory():
    rb = buffer()
    collector = SyncDataCollector(GymEnv(Breaks(8)), Rule(), frames_per_batch=5, total_frames=20, replay_buffer=rb)
    collector.start()
    with pytest.raises(ArithmeticError):
        ended(collector).start()
    collector.start()
    ended(collector).async_shutdown()
    assert rb[:]["collector", "traj_ids"].tolist() == [0] * 7 + [1] * 15 and collector.frames == 22


def test_an_error_of_the_callers_block_is_the_one_that_is_raised():
    with (
        pytest.raises(ZeroDivisionError),
        SyncDataCollector(GymEnv(Breaks(8)), Rule(), frames_per_batch=5, replay_buffer=buffer()) as collector,
    ):
        collector.start()
        ended(collector)
        raise ZeroDivisionError
    assert collector.is_shut_down


def test_batches_cannot_be_asked_for_beside_it():
    collector = SyncDataCollector(countdown(), Rule(), frames_per_batch=5, replay_buffer=buffer())
    collector.start()
    for call in (collector.rollout, lambda: next(iter(collector))):
        with pytest.raises(RuntimeError, match="collecting in the background"):
            call()
    collector.shutdown()
    with pytest.raises(RuntimeError, match="was shut down"):
        collector.start()


def test_background_collection_needs_a_buffer():
    with pytest.raises(RuntimeError, match="give replay_buffer="):
        SyncDataCollector(countdown(), Rule(), frames_per_batch=5).start()


class Weighted(nn.Module):
    """Writes its two weights beside the action, the second after a moment."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def forward(self, observation):
        return torch.tensor([1, 0, 0]), torch.stack([self.first, self.second])


def weighted():
    return TensorDictModule(Weighted(), in_keys=["observation"], out_keys=["action", "weights"])


def test_a_policy_of_its_own_changes_between_two_batches_only():
    rb, batches = buffer(), threading.Semaphore(0)
    collector = SyncDataCollector(
        countdown(),
        policy_factory=weighted,
        frames_per_batch=10,
        replay_buffer=rb,
        track_policy_version=True,
        post_collect_hook=lambda batch: batches.release(),
    )
    collector.start()
    for k in range(1, 6):
        weights = {"module.first": torch.tensor(float(k)), "module.second": torch.tensor(float(k))}
        collector.update_policy_weights_(policy_or_weights=weights)
        collector.update_policy_weights_()
        weights["module.first"] += 0.5  # the caller trains on
        assert collector.policy_version == 2 * k
        while batches.acquire(blocking=False):
            pass  # those of before the update
        for _ in range(3):
            assert batches.acquire(timeout=120)
    assert collector.state_dict()["policy_version"] == 10
    collector.async_shutdown()
    rows = rb[:].reshape(-1, 10)
    assert torch.equal(rows["weights"][..., 0], rows["weights"][..., 1])
    # A batch may begin between the two updates: the first one brings the weights, the second one counts alone.
    assert torch.equal((rows["collector", "policy_version"] + 1) // 2, rows["weights"][..., 0].long())
    assert bool((rows["weights"] == rows["weights"][:, :1]).all()) and rows["weights"].max() == 5


def test_an_update_in_the_middle_of_a_batch_is_for_the_next_one():
    class Waits(Weighted):
        calls, is_waiting, opened = 0, threading.Event(), threading.Event()

        def forward(self, observation):
            type(self).calls += 1
            if self.calls == 8:
                self.is_waiting.set()
                assert self.opened.wait(120)
            return super().forward(observation)

    collector = SyncDataCollector(
        countdown(),
        policy_factory=lambda: TensorDictModule(Waits(), in_keys=["observation"], out_keys=["action", "weights"]),
        frames_per_batch=5,
        total_frames=20,
        replay_buffer=(rb := buffer()),
        track_policy_version=True,
    )
    collector.start()
    assert Waits.is_waiting.wait(120)
    for value in (1.0, 2.0):
        collector.update_policy_weights_({f"module.{name}": torch.tensor(value) for name in ("first", "second")})
    Waits.opened.set()
    ended(collector).async_shutdown()
    assert rb[:]["weights"][:, 0].tolist() == [0] * 10 + [2] * 10
    assert rb[:]["collector", "policy_version"].tolist() == [0] * 10 + [2] * 10


def test_weights_of_another_policy_are_refused_at_the_call():
    collector = SyncDataCollector(countdown(), policy_factory=weighted, frames_per_batch=5, replay_buffer=buffer())
    collector.start()
    with pytest.raises(ValueError, match="not those of the policy"):
        collector.update_policy_weights_({"weight": torch.zeros(2)})
    with pytest.raises(TypeError, match="give one"):
        collector.update_policy_weights_({}, policy_or_weights={})
    assert collector.policy_version == 0
    collector.async_shutdown()


def test_an_update_never_undoes_a_step_of_the_callers_optimiser():
    policy, rb = Gate(), buffer()
    collector = SyncDataCollector(countdown(), policy, frames_per_batch=5, replay_buffer=rb)
    collector.start()
    assert policy.is_waiting.wait(120)
    collector.update_policy_weights_(policy.state_dict())
    with torch.no_grad():
        policy.weight.fill_(7.0)
    policy.opened.set()
    assert comes(lambda: rb.write_count >= 15)
    collector.async_shutdown()
    assert policy.weight.item() == 7


def test_the_exploration_type_of_one_thread_is_not_that_of_another():
    types = []

    class Asks(Gate):
        def forward(self, observation):
            super().forward(observation)
            types.append(exploration_type())
            return torch.tensor([1, 0, 0])

    policy, before = Asks(), exploration_type()
    collector = SyncDataCollector(
        countdown(), policy, frames_per_batch=5, exploration_type=ExplorationType.RANDOM, replay_buffer=buffer()
    )
    with set_exploration_type(ExplorationType.MEAN):
        collector.start()
        assert policy.is_waiting.wait(120)
        assert exploration_type() is ExplorationType.MEAN
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            policy.opened.set()
            collector.async_shutdown()
        assert exploration_type() is ExplorationType.MEAN
    assert exploration_type() is before and set(types) == {ExplorationType.RANDOM}


def test_the_end_waits_for_the_batch_that_was_begun():
    policy, rb = Gate(7), buffer()
    collector = SyncDataCollector(countdown, policy, frames_per_batch=5, replay_buffer=rb)
    collector.start()
    assert policy.is_waiting.wait(120)
    with pytest.raises(TimeoutError, match="in the middle of a batch"):
        collector.async_shutdown(timeout=0.01)
    assert not collector.env.is_closed
    policy.opened.set()
    collector.async_shutdown()
    assert collector.env.is_closed and collector.frames == len(rb) == 10


def test_the_environment_may_be_left_open():
    collector = SyncDataCollector(countdown, Rule(), frames_per_batch=5, total_frames=5, replay_buffer=buffer())
    collector.start()
    collector.async_shutdown(close_env=False)
    assert not collector.env.is_closed


def test_a_collector_that_nobody_uses_any_more_ends():
    collector = SyncDataCollector(countdown, Rule(), frames_per_batch=5, replay_buffer=buffer())
    collector.start()
    thread, env, alive = collector._background._thread, collector.env, weakref.ref(collector)
    del collector
    gc.collect()
    thread.join(120)
    gc.collect()
    assert not thread.is_alive() and alive() is None and env.is_closed


def test_a_forked_process_does_not_collect():
    collector = SyncDataCollector(countdown(), Rule(), frames_per_batch=5, replay_buffer=buffer())
    collector.start()

    def shut_down():
        collector.shutdown()  # waits for nobody
        return collector.is_running()

    assert Child(shut_down).result() is False
    assert collector.is_running()
    collector.async_shutdown()


def test_a_process_that_was_forked_in_a_pause_can_pause():
    collector = SyncDataCollector(countdown(), Rule(), frames_per_batch=5, replay_buffer=buffer())
    collector.start()
    pause = collector.pause()
    pause.__enter__()

    def goes_on_and_pauses():
        pause.__exit__(None, None, None)
        collector.start()
        with collector.pause():
            return collector.is_running()

    child = Child(goes_on_and_pauses)
    pause.__exit__(None, None, None)
    assert child.result() is True
    collector.async_shutdown()


@pytest.mark.deep
def test_a_program_that_forgets_to_end_it_ends():
    program = """
import atexit
atexit.register(lambda: print(collector.is_running()))
from engram.collectors import SyncDataCollector
from engram.data import LazyTensorStorage, ReplayBuffer
from engram.envs import GymEnv
rb = ReplayBuffer(storage=LazyTensorStorage(100))
collector = SyncDataCollector(GymEnv("CartPole-v1"), frames_per_batch=10, replay_buffer=rb)
collector.start()
while not len(rb):
    pass
print("end")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\nFalse\n", "")


@each(("total", "count"), [(20, 4), (22, 5), (5, 1)])
@pytest.mark.filterwarnings("ignore:total_frames")
def test_its_length_is_the_number_of_batches(total, count):
    collector = SyncDataCollector(countdown(), Rule(), frames_per_batch=5, total_frames=total)
    assert len(collector) == count == len(list(collector)) and collector


@pytest.mark.parametrize("arguments", [{}, {"trajs_per_batch": 2, "total_frames": 100}])
def test_a_length_that_is_not_known_is_a_type_error(arguments):
    collector = SyncDataCollector(countdown(), Rule(), frames_per_batch=5, **arguments)
    with pytest.raises(TypeError, match="not known"):
        len(collector)
    assert collector  # an endless collector is no empty one


def test_next_gives_the_batches_of_a_loop_and_goes_on_from_a_state():
    with SyncDataCollector(countdown, frames_per_batch=10, total_frames=20) as collector:
        first = collector.next()
        state = collector.state_dict()
        second = collector.next()
        with pytest.raises(StopIteration):
            collector.next()
        collector.load_state_dict(state_dict=state)
        assert first.numel() == second.numel() == 10 and collector.frames == 10
        assert collector.next().numel() == 10


class Calls:
    """What a background thread does, each time until somebody wants it to pause."""

    def __init__(self):
        self.thread = background.BackgroundThread(
            self.collect, self.finish, self.room, self.report, self.report_filling, "the thread of this test"
        )
        self.begun, self.is_inside, self.is_over = threading.Event(), False, False

    def collect(self):
        self.is_inside = True
        self.begun.set()
        comes(lambda: self.thread._holds or self.is_over)
        self.is_inside = False
        return not self.is_over

    def finish(self):
        pass

    def room(self):
        return None

    def report(self, failure):
        pass

    def report_filling(self, begins):
        pass


def test_every_pause_begins_between_two_calls():
    calls = Calls()
    calls.thread.start()
    try:
        for _ in range(3):
            assert calls.begun.wait(NEVER)
            calls.begun.clear()
            with calls.thread.held():
                assert not calls.is_inside
    finally:
        calls.is_over = True
        calls.thread.stop(NEVER)
