"""Worker processes that collect into a buffer in the background."""

import functools
import threading
import time

import pytest
import torch

from collectors.failing import Fails, cartpole, raises
from contracts.gym_worlds import Countdown
from contracts.tiers import in_turns
from contracts.waiting import NEVER, is_gone
from engram.collectors import MultiaSyncDataCollector, MultiSyncDataCollector
from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from engram.envs import GymEnv
from engram.errors import WorkerError
from processes.test_multi import constant

pytestmark = pytest.mark.usefixtures("lock_order")

BOTH = [MultiSyncDataCollector, MultiaSyncDataCollector]
STORAGES = {
    "private": lambda: LazyTensorStorage(100_000),
    "shared": lambda: LazyTensorStorage(100_000, shared=True, lanes=2),
    "mapped": lambda: LazyMemmapStorage(100_000, lanes=2),
}


def buffer(storage="private"):
    return ReplayBuffer(storage=STORAGES[storage](), batch_size=32)


def has_rows(rb, n):
    until = time.monotonic() + NEVER
    while rb.write_count < n and time.monotonic() < until:
        time.sleep(0.001)
    return rb.write_count >= n


def ended(collector):
    collector._background._thread.join(NEVER)
    assert not collector.is_running()
    return collector


@pytest.mark.parametrize(("storage", "cls"), in_turns(STORAGES, BOTH))
def test_frames_are_the_rows_of_the_buffer_at_the_end_in_a_pause_and_when_it_is_ended(cls, storage):
    rb = buffer(storage)
    with cls([cartpole] * 2, frames_per_batch=20, total_frames=400, replay_buffer=rb) as collector:
        collector.start()
        assert ended(collector).frames == rb.write_count == 400
        assert collector.state_dict()["frames"] == 400 and len(collector) == 20
    with cls([cartpole] * 2, frames_per_batch=20, replay_buffer=rb) as collector:
        collector.start()
        for k in range(3):
            assert has_rows(rb, 500 + 100 * k)
            with collector.pause():
                before = rb.write_count
                rb.sample()
                time.sleep(0.02)
                assert rb.write_count == before == 400 + collector.frames
                assert collector.state_dict()["frames"] == collector.frames
        collector.async_shutdown()
        assert rb.write_count == 400 + collector.frames and collector.is_shut_down
    ids, done = rb[:]["collector", "traj_ids"], rb[:]["next", "done"]
    assert len(ids) == rb.write_count and int(done.sum()) <= len(ids.unique()) * 2


@pytest.mark.parametrize(("storage", "cls"), in_turns(["private", "shared"], BOTH))
def test_the_error_of_a_worker_is_raised_by_the_next_call_and_no_row_is_lost(cls, storage):
    rb = buffer(storage)
    collector = cls([cartpole, functools.partial(Fails, 47, raises)], frames_per_batch=20, replay_buffer=rb)
    collector.start()
    assert ended(collector).is_shut_down
    with pytest.raises(WorkerError, match="the simulator broke"):
        collector.update_policy_weights_()
    # In a shared buffer the other worker may have written a batch after that, which nobody counts any more.
    assert 40 <= collector.frames <= rb.write_count <= collector.frames + 40 * (storage == "shared")
    collector.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        collector.start()


@pytest.mark.parametrize("cls", BOTH)
def test_new_weights_reach_the_workers_while_they_collect(cls):
    policy, rb = constant(), buffer("shared")
    with cls([cartpole] * 2, policy, frames_per_batch=20, replay_buffer=rb, track_policy_version=True) as collector:
        collector.start()
        for _ in range(3):
            policy.module.weight.data += 1.0
            collector.update_policy_weights_()
            assert has_rows(rb, rb.write_count + 400)
        state = collector.state_dict()
    rows = rb[:]
    assert torch.equal(rows["weight"].squeeze(-1).long(), rows["collector", "policy_version"])
    assert rows["weight"].unique().tolist()[-1] == 3 and state["workers"][1]["policy_version"] == 3


@pytest.mark.parametrize("cls", BOTH)
def test_the_end_does_not_wait_for_a_trajectory_that_never_ends(cls):
    makers = [lambda: GymEnv(Countdown((10**9,)))] * 2
    collector = cls(makers, frames_per_batch=10, trajs_per_batch=1, replay_buffer=buffer())
    collector.start()
    ending = threading.Thread(target=collector.shutdown, args=(0.2,), daemon=True)
    ending.start()
    ending.join(60)
    assert not ending.is_alive() and collector.is_shut_down


def test_rows_that_another_thread_writes_first_do_not_stop_it(monkeypatch):
    rb = buffer("shared")
    collector = MultiaSyncDataCollector([cartpole] * 2, frames_per_batch=20, total_frames=100, replay_buffer=rb)
    asked, ask = [], collector._should_attach

    def asked_before_the_first_rows():
        asked.append(ask())
        if len(asked) == 1:
            rb.extend(first)
        return asked[-1]

    with MultiaSyncDataCollector([cartpole], frames_per_batch=20) as other:
        first = other.rollout()
    monkeypatch.setattr(collector, "_should_attach", asked_before_the_first_rows)
    collector.start()
    collector._background._thread.join(60)
    assert not collector.is_running() and collector.frames == 100
    collector.shutdown()


def test_weights_are_written_by_one_thread_at_a_time(monkeypatch):
    policy, rb, inside = constant(), buffer("shared"), []
    with MultiSyncDataCollector(
        [cartpole], policy, frames_per_batch=5, replay_buffer=rb, update_at_each_batch=True
    ) as collector:
        write = collector._weights.write

        def slow_write(tensors, **arguments):
            inside.append(1)
            time.sleep(0.001)
            write(tensors, **arguments)
            assert sum(inside) == 1
            inside.append(-1)

        monkeypatch.setattr(collector._weights, "write", slow_write)
        collector.start()
        for _ in range(30):
            collector.update_policy_weights_()
        assert has_rows(rb, 50)
        collector.async_shutdown()
        assert collector.policy_version >= 30 + collector.batches


def hangs(sign=None):
    if sign is not None:
        sign.touch()
    time.sleep(1000)


@pytest.mark.parametrize("cls", BOTH)
def test_the_end_does_not_wait_for_a_worker_that_hangs(cls, tmp_path):
    rb, sign = buffer(), tmp_path / "hangs"
    make = functools.partial(Fails, 7, functools.partial(hangs, sign))
    collector = cls([make], frames_per_batch=5, replay_buffer=rb)
    pid = collector._workers[0].pid
    collector.start()
    assert has_rows(rb, 5)
    until = time.monotonic() + NEVER
    while not sign.exists() and time.monotonic() < until:  # the batch that does not end has begun
        time.sleep(0.001)
    with pytest.raises(TimeoutError, match="in the middle of a batch"):
        collector.async_shutdown(timeout=0.01)
    collector.shutdown(timeout=0.01)
    assert is_gone(pid) and len(rb) == 5 and threading.active_count() == threads_before()


def threads_before():
    return sum(not thread.name.startswith("the background thread") for thread in threading.enumerate())


def test_an_error_of_the_callers_block_ends_it_at_once():
    rb = buffer()
    with (
        pytest.raises(ZeroDivisionError),
        MultiSyncDataCollector([functools.partial(Fails, 7, hangs)], frames_per_batch=5, replay_buffer=rb) as collector,
    ):
        collector.start()
        assert has_rows(rb, 5)
        raise ZeroDivisionError
    assert collector.is_shut_down and not collector.is_running()


def test_trajectories_go_on_over_pauses():
    rb = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=32)
    with MultiaSyncDataCollector(
        [lambda: GymEnv(Countdown((10_000,)))], frames_per_batch=5, replay_buffer=rb
    ) as collector:
        collector.start()
        for k in range(3):
            assert has_rows(rb, 20 * (k + 1))
            with collector.pause():
                pass
    left = rb[:]["observation"][:, 0]
    assert torch.equal(left, torch.arange(10_000, 10_000 - len(left), -1).to(left))
