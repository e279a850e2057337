"""Collectors that fill a queue: they wait for room, between two batches or in one, and can be held and ended there."""

from __future__ import annotations

import threading

import pytest
import torch

from contracts.each import each
from contracts.gym_loop import Rule
from contracts.gym_worlds import Countdown
from contracts.waiting import NEVER, comes, in_thread, is_gone, seems_alone
from engram.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, SyncDataCollector
from engram.data import LazyTensorStorage, ListStorage, QueueSampler, TensorDictReplayBuffer
from engram.envs import GymEnv
from engram.errors import WorkerError

pytestmark = [
    pytest.mark.usefixtures("lock_order"),
    pytest.mark.filterwarnings("ignore:sample was called with batch_size=:UserWarning"),
]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    seems_alone(monkeypatch)


def countdown():
    return GymEnv(Countdown((1000,)))


def queued(storage, batch_size=10, **settings):
    return TensorDictReplayBuffer(storage=storage, sampler=QueueSampler(**settings), batch_size=batch_size)


def collecting(rb, frames_per_batch, total_frames, **arguments):
    return SyncDataCollector(
        countdown, Rule(), frames_per_batch=frames_per_batch, total_frames=total_frames, replay_buffer=rb, **arguments
    )


def waits(rb):
    return rb.storage.lanes.store.waits[0] if rb.storage.initialized else 0


STORAGES = {
    "private": lambda: LazyTensorStorage(20),
    "items": lambda: ListStorage(20),
    "shared": lambda: LazyTensorStorage(20, shared=True),
}


@each("storage", STORAGES)
@pytest.mark.parametrize("frames", [5, 30])
def test_a_loop_over_the_queue_gets_each_frame_once_and_ends_with_the_collector(storage, frames):
    rb = queued(STORAGES[storage]())
    collector = collecting(rb, frames, 240)
    collector.start()
    seen = [batch["observation"][:, 0].tolist() for batch in rb]
    assert [row for rows in seen for row in rows] == list(range(1000, 760, -1)) and len(seen) == 24
    collector.shutdown()


def test_a_collector_waits_for_room_for_a_whole_batch_before_it_begins_one():
    rb, hooks = queued(LazyTensorStorage(20), batch_size=2), []
    collector = collecting(rb, 8, -1, pre_collect_hook=lambda: hooks.append(1))
    collector.start()
    assert comes(lambda: waits(rb)) and len(hooks) == 2 and rb.write_count == 16
    rb.sample()
    assert rb.has_room and not rb.has_room_for(8)
    rb.sample(2)
    assert comes(lambda: rb.write_count == 24)
    collector.shutdown()


def test_a_pause_gets_in_while_a_batch_waits_in_its_middle_and_the_rest_of_it_comes_after():
    rb = queued(LazyTensorStorage(20))
    collector = collecting(rb, 50, 100)
    collector.start()
    assert comes(lambda: rb.write_count == 20 and waits(rb))
    with collector.pause():
        assert rb.sample()["observation"][:, 0].tolist() == list(range(1000, 990, -1))
        assert rb.write_count == 20
    seen = [row for batch in rb for row in batch["observation"][:, 0].tolist()]
    assert seen == list(range(990, 900, -1))
    collector.shutdown()


def test_a_shutdown_ends_a_batch_that_waits_in_its_middle():
    rb = queued(LazyTensorStorage(20))
    collector = collecting(rb, 50, 100)
    collector.start()
    assert comes(lambda: rb.write_count == 20 and waits(rb))
    thread, results = in_thread(collector.shutdown)
    thread.join(NEVER)
    assert results == [None] and not collector.is_running()
    assert rb.sample()["observation"][:, 0].tolist() == list(range(1000, 990, -1))


def test_a_collector_in_the_foreground_is_told_that_nobody_takes_rows():
    rb = queued(LazyTensorStorage(20))
    collector = collecting(rb, 8, -1)
    collector.rollout()
    collector.rollout()
    with pytest.raises(RuntimeError, match="waits for room for 8 rows in the queue, which has room for 4"):
        collector.rollout()
    rb.sample()
    collector.rollout()
    assert rb.write_count == 24


@pytest.mark.parametrize(("capacity", "batch", "frames"), [(20, 20, 6), (24, 12, 40), (25, 13, 20)])
def test_a_learner_and_a_collector_that_wait_for_each_other_go_on_where_the_queue_is_small(capacity, batch, frames):
    """A rest that is less than a batch, and a batch of the collector, do not fit together."""
    rb = queued(LazyTensorStorage(capacity), batch_size=batch)
    collector = collecting(rb, frames, 240)
    collector.start()
    seen = [row for rows in rb for row in rows["observation"][:, 0].tolist()]
    assert seen == list(range(1000, 1000 - len(seen), -1)) and len(seen) >= 240
    collector.shutdown()


def test_a_loop_ends_with_the_collector_whatever_other_threads_do():
    over = threading.Event()
    thread = threading.Thread(target=over.wait, daemon=True)
    thread.start()
    rb = queued(LazyTensorStorage(40))
    collector = collecting(rb, 5, 40)
    collector.start()
    assert sum(len(batch) for batch in rb) == 40
    over.set()
    collector.shutdown()


def test_a_sample_that_waits_is_told_that_the_collector_has_all_its_frames():
    rb = queued(LazyTensorStorage(20, shared=True))
    collector = collecting(rb, 5, 15)
    collector.start()
    rb.sample()
    with pytest.raises(RuntimeError, match=r"5 of 10 are there.*what filled the buffer in the background has ended"):
        rb.sample()
    rb.set_sampler(QueueSampler())
    with pytest.raises(RuntimeError, match="has ended"):
        rb.sample()
    collector.shutdown()


def test_new_weights_say_from_which_version_rows_are_too_old():
    rb = queued(LazyTensorStorage(100), batch_size=4, max_staleness=1)
    policy = torch.nn.Linear(1, 1)
    collector = collecting(rb, 4, -1, track_policy_version=True)
    for version in (0, 1, 2):
        collector._weights.newest_version = collector._weights.version = version
        rb.note_policy_version(version)
        collector.rollout()
    batch = rb.sample()
    assert set(batch["collector", "policy_version"].flatten().tolist()) == {1}
    assert rb.stats().stale == 4 and rb.stats().versions == (2, 2) and policy is not None


@each("kind", [MultiSyncDataCollector, MultiaSyncDataCollector])
@pytest.mark.deep
def test_workers_that_write_to_a_queue_lose_no_frame_and_give_none_twice(kind):
    rb = queued(LazyTensorStorage(64, shared=True, lanes=4), batch_size=16)
    collector = kind([countdown] * 2, Rule(), frames_per_batch=16, total_frames=480, replay_buffer=rb)
    try:
        collector.start()
        seen = []
        while len(seen) < 480:
            seen += rb.sample(timeout=NEVER)["observation"][:, 0].tolist()
        assert len(seen) == 480 and all(seen.count(row) <= 2 for row in set(seen))
        assert comes(lambda: not collector.is_running())
        assert rb.stats().waiting == 0
    except WorkerError:
        raise
    finally:
        collector.shutdown()


@pytest.mark.deep
@each("kind", [MultiSyncDataCollector, MultiaSyncDataCollector])
def test_a_loop_over_a_queue_ends_when_the_workers_that_filled_it_have_all_frames(kind):
    rb = queued(LazyTensorStorage(64, shared=True, lanes=4), batch_size=16)
    with kind([countdown] * 2, Rule(), frames_per_batch=16, total_frames=480, replay_buffer=rb) as collector:
        collector.start()
        seen = []
        thread, results = in_thread(lambda: seen.extend(len(batch) for batch in rb))
        thread.join(NEVER)
        assert results == [None] and sum(seen) == 480 == collector.frames
        collector.total_frames = 960
        collector.start()
        thread, results = in_thread(lambda: seen.extend(len(batch) for batch in rb))
        thread.join(NEVER)
        assert results == [None] and sum(seen) == 960 == collector.frames


WITH_WORKERS = each("kind", [MultiSyncDataCollector, MultiaSyncDataCollector])


def stands_with_workers(kind):
    """A buffer, and a collector whose two workers have batches that are larger than the queue, which is full."""
    rb = queued(LazyTensorStorage(40, shared=True, lanes=4))
    collector = kind([countdown] * 2, Rule(), frames_per_batch=100, total_frames=500, replay_buffer=rb)
    collector.start()
    by_owner = 100 if kind is MultiSyncDataCollector else 200  # before there are rows to attach to
    seen = [row for _ in range(by_owner // 10) for row in rb.sample(timeout=NEVER)["observation"][:, 0].tolist()]
    assert comes(lambda: rb.write_count == by_owner + 40)
    assert comes(lambda: all(member.awaits_room for member in collector._members))
    return rb, collector, seen


@WITH_WORKERS
@pytest.mark.deep
def test_workers_that_wait_in_the_middle_of_a_batch_answer_their_owner_and_write_the_rest_after(kind):
    rb, collector, seen = stands_with_workers(kind)
    try:
        for call in (collector.state_dict, lambda: collector.set_seed(3), collector.state_dict):
            thread, results = in_thread(call)
            thread.join(NEVER)
            assert len(results) == 1 and not isinstance(results[0], BaseException)
        with collector.pause():
            assert rb.write_count == len(seen) + 40
        while len(seen) < 500:
            seen += rb.sample(timeout=NEVER)["observation"][:, 0].tolist()
        assert comes(lambda: not collector.is_running()) and collector.frames == rb.write_count == len(seen)
        assert all(seen.count(row) <= 2 for row in set(seen))
    finally:
        collector.shutdown()


@WITH_WORKERS
@pytest.mark.deep
def test_a_shutdown_ends_workers_that_wait_in_the_middle_of_a_batch(kind):
    rb, collector, _ = stands_with_workers(kind)
    pids = [worker.pid for worker in collector._workers]
    thread, results = in_thread(collector.shutdown)
    thread.join(NEVER)
    assert results == [None] and not collector.is_running() and rb.stats().waiting == 40
    assert all(is_gone(pid) for pid in pids)


def test_a_state_that_is_loaded_while_a_batch_waits_in_its_middle_continues_no_row_of_before(monkeypatch):
    rb, seams = queued(LazyTensorStorage(40)), []
    mark_seam = rb.storage.mark_seam
    monkeypatch.setattr(rb.storage, "mark_seam", lambda: (seams.append(rb.write_count), mark_seam()))
    collector = collecting(rb, 50, 100)
    state = collector.state_dict()
    collector.start()
    assert comes(lambda: rb.write_count == 40 and waits(rb))
    collector.load_state_dict(state)
    while rb.write_count <= 50:
        rb.sample(timeout=NEVER)
    assert seams == [0, 50]
    collector.shutdown()
