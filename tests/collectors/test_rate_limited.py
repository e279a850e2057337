"""Collectors that fill a buffer with a rate limiter: they wait before a batch, never in one, and can be held there."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import pytest
import torch

from collectors.failing import cartpole
from contracts.each import each
from contracts.gym_loop import Rule
from contracts.gym_worlds import Countdown
from contracts.waiting import NEVER, comes, seems_alone
from engram.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, SyncDataCollector
from engram.data import (
    LazyTensorStorage,
    ListStorage,
    MinSize,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SampleToInsertRatio,
)
from engram.envs import GymEnv
from engram.envs.transforms import MultiStepTransform

pytestmark = pytest.mark.usefixtures("lock_order")

RATIO, AHEAD, BEHIND = 2.0, 20, 20
STORAGES = {
    "private": lambda: LazyTensorStorage(100_000),
    "shared": lambda: LazyTensorStorage(100_000, shared=True, lanes=2),
    "items": lambda: ListStorage(100_000),
}
WITH_WORKERS = [MultiSyncDataCollector, MultiaSyncDataCollector]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    seems_alone(monkeypatch)


def limited(storage="private", **arguments):
    limiter = SampleToInsertRatio(RATIO, ahead=AHEAD, behind=BEHIND)
    return ReplayBuffer(storage=STORAGES[storage](), batch_size=4, rate_limiter=limiter, **arguments)


def countdown():
    return GymEnv(Countdown((1000,)))


def collecting(rb, **arguments):
    """A collector in this process that has begun to collect in the background."""
    collector = SyncDataCollector(countdown, Rule(), **{"frames_per_batch": 5, **arguments}, replay_buffer=rb)
    collector.start()
    return collector


def waits(rb):
    """How often somebody has begun to wait for samplers."""
    return rb.storage.lanes.store.waits[0] if rb.storage.initialized else 0


def stands(rb, after=0):
    """Whether somebody waits for samplers, once more than `after` times."""
    return comes(lambda: waits(rb) > after) and not rb.has_room


def ends(call):
    """The result of a call that ends, however long others wait."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(NEVER)
    assert results, "it has not ended, or has failed"
    return results[0]


def ended(collector):
    collector._background._thread.join(NEVER)
    assert not collector.is_running()
    return collector


def draw_all(rb):
    while rb.can_sample():
        rb.sample()


@contextlib.contextmanager
def learner(rb):
    """A block beside which a thread samples as much as it may."""
    is_over = threading.Event()

    def draw():
        while not is_over.wait(0.0005):
            draw_all(rb)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def assert_law_holds(rb, rows_beyond):
    """What the limiter promises: producers are over the bound by what they had begun, samplers never."""
    written, drawn = rb.storage.lanes.store.rate_counts[:2]
    assert drawn <= RATIO * (written - 1) + AHEAD
    assert RATIO * (written - rows_beyond - 1) - drawn <= BEHIND, (written, drawn)


# ---- in the background ----
@each("storage", STORAGES)
def test_background_collector_stands_and_goes_on_when_rows_were_drawn(storage):
    rb = limited(storage)
    collector = collecting(rb, total_frames=200)
    assert stands(rb) and collector.is_running()
    assert rb.write_count == collector.frames
    assert_law_holds(rb, rows_beyond=5)
    with learner(rb):
        ended(collector)
    assert rb.write_count == collector.frames == 200
    assert_law_holds(rb, rows_beyond=5)
    collector.async_shutdown()


def test_background_collector_ends_with_its_frames_where_there_is_no_room():
    rb = limited()
    collector = SyncDataCollector(countdown, Rule(), frames_per_batch=5, replay_buffer=rb)
    while not rb.storage.initialized or rb.has_room:
        collector.rollout()
    collector.total_frames = collector.frames
    collector.start()
    assert not ended(collector).shutdown() and waits(rb) == 0


def test_pause_gets_in_while_it_waits_and_it_goes_on_after_it():
    rb = limited()
    collector = collecting(rb)
    for _ in range(3):
        assert stands(rb)
        with contextlib.ExitStack() as pause:
            ends(lambda pause=pause: pause.enter_context(collector.pause()))
            count, begun = rb.write_count, waits(rb)
            draw_all(rb)
            assert collector.is_running() and rb.has_room and rb.write_count == collector.frames == count
        assert comes(lambda count=count: rb.write_count > count) and stands(rb, begun)
    collector.async_shutdown()
    assert_law_holds(rb, rows_beyond=5)


def test_it_waits_again_after_a_pause_in_which_nothing_was_drawn():
    rb = limited()
    collector = collecting(rb)
    assert stands(rb)
    count = rb.write_count
    for _ in range(3):
        begun = waits(rb)
        assert ends(collector.state_dict)["frames"] == count
        assert stands(rb, begun) and rb.write_count == count
    collector.async_shutdown()


CALLS = {
    "state_dict": lambda c: c.state_dict()["frames"] == c.replay_buffer.write_count,
    "load_state_dict": lambda c: c.load_state_dict(c.state_dict()) is None,
    "set_seed": lambda c: c.set_seed(3) > 3,
    "reset": lambda c: c.reset() is None,
}


def test_calls_of_the_state_are_answered_while_it_waits():
    rb = limited()
    collector = collecting(rb)
    assert stands(rb)
    count = rb.write_count
    for name, call in CALLS.items():
        assert ends(lambda call=call: call(collector)), name
    assert collector.is_running() and rb.write_count == count
    collector.async_shutdown()


ENDS = {
    "shutdown": lambda c: c.shutdown(),
    "async_shutdown": lambda c: c.async_shutdown(),
    "with": lambda c: c.__exit__(None, None, None),
    "abandon": lambda c: c._background.abandon(),
}


@each("end", ENDS)
def test_it_ends_at_once_while_it_waits_and_nothing_is_lost(end):
    rb = limited()
    collector = collecting(rb)
    assert stands(rb)
    ends(lambda: ENDS[end](collector))
    assert not collector.is_running() and collector.frames == rb.write_count


def test_waiting_thread_does_not_keep_its_collector():
    rb = limited()
    collector = collecting(rb)
    assert stands(rb)
    thread, env, alive = collector._background._thread, collector.env, weakref.ref(collector)
    del collector
    gc.collect()
    thread.join(NEVER)
    gc.collect()
    assert not thread.is_alive() and alive() is None and env.is_closed and not rb.has_room


def test_error_of_the_wait_is_raised_by_the_next_call_and_by_the_buffer():
    rb = limited()
    collector = collecting(rb)
    assert stands(rb)
    rb.shutdown()
    ended(collector)
    with pytest.raises(RuntimeError, match="shut down while it waited"):
        collector.state_dict()
    collector.shutdown()
    assert collector.frames == rb.write_count


def test_room_that_another_writer_took_is_not_waited_for_in_a_call(monkeypatch):
    """A pause would wait for it: the thread has looked between two calls."""
    rb = limited()
    collector = SyncDataCollector(countdown, Rule(), frames_per_batch=5, replay_buffer=rb)
    collector.rollout()
    while rb.has_room:
        collector.rollout()
    count = rb.write_count
    looks = iter([True])  # before the call there was room
    monkeypatch.setattr(ReplayBuffer, "has_room_for", lambda rb, rows: next(looks, False))
    collector.start()
    assert comes(lambda: rb.write_count == count + 5) and comes(lambda: waits(rb))
    assert ends(collector.state_dict)["frames"] == count + 5
    collector.async_shutdown()


@each("frames", [1, 7])
@each("path", ["columns", "multi-step", "hook"])
def test_law_holds_for_batches_of_any_size(path, frames):
    rb = limited(transform=MultiStepTransform(n_steps=3, gamma=0.9) if path == "multi-step" else None)
    hook = {"post_collect_hook": lambda batch: None} if path == "hook" else {}
    collector = collecting(rb, frames_per_batch=frames, total_frames=20 * frames, **hook)
    with learner(rb):
        ended(collector)
        rb.flush_transforms()
    assert rb.write_count == collector.frames == 20 * frames
    assert_law_holds(rb, rows_beyond=frames + (2 if path == "multi-step" else 0))
    assert rb[:]["observation"][:, 0].tolist() == list(range(1000, 1000 - 20 * frames, -1))


# ---- in the foreground ----
@each("storage", ["private", "items"])
def test_foreground_collector_alone_is_told_that_nobody_samples_and_goes_on_later(storage):
    rb, hooks = limited(storage), []
    collector = SyncDataCollector(
        countdown, Rule(), frames_per_batch=5, replay_buffer=rb, pre_collect_hook=lambda: hooks.append(1)
    )
    for n in range(1, 4):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="Nobody can draw them"):
                for _ in range(20):
                    collector.rollout()
        assert len(hooks) == collector.batches == rb.write_count / 5 > 2 * n
        draw_all(rb)
    rows = torch.stack(list(rb[:])) if storage == "items" else rb[:]
    assert rows["observation"][:, 0].tolist() == list(range(1000, 1000 - rb.write_count, -1))
    assert not rows["collector", "traj_ids"].any()  # no trajectory was broken off


class Acts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, observation):
        return torch.tensor([1, 0, 0])


def test_weights_that_come_while_it_waits_act_in_the_batch_after_it():
    rb = limited()
    policy = Acts()
    collector = SyncDataCollector(
        countdown,
        policy,
        frames_per_batch=5,
        replay_buffer=rb,
        track_policy_version=True,
    )
    collector.start()
    assert stands(rb)
    count = rb.write_count
    ends(lambda: [collector.update_policy_weights_(policy.state_dict())])
    draw_all(rb)
    assert comes(lambda: rb.write_count > count)
    collector.async_shutdown()
    versions = rb[:]["collector", "policy_version"].tolist()
    assert versions == [0] * count + [1] * (rb.write_count - count)


@each("begins", [False, True])
def test_batch_is_written_as_a_whole_where_another_writer_took_the_room(begins):
    """Nobody could draw here: a write that waited would fail, and its batch would be lost."""
    rb = limited()

    def fill():
        if rb.write_count == 5:
            if begins:
                collector._writer.restart()
            rb.extend(rb[:].repeat(10))

    collector = SyncDataCollector(countdown, Rule(), frames_per_batch=5, replay_buffer=rb, pre_collect_hook=fill)
    collector.rollout()
    collector.rollout()
    assert not rb.has_room and rb.write_count == 60 and collector.frames == 10


def test_shutdown_ends_a_foreground_wait_of_another_thread():
    rb = limited()
    errors = []
    collector = SyncDataCollector(countdown, Rule(), frames_per_batch=5, replay_buffer=rb)

    def loop():
        try:
            for _ in collector:
                pass
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    assert stands(rb)
    collector.shutdown()
    thread.join(NEVER)
    assert len(errors) == 1 and "this collector was shut down" in errors[0]


def test_nothing_waits_for_buffers_of_other_libraries_and_for_ensembles():
    class Other:
        rows = 0

        def extend(self, batch):
            self.rows += len(batch)

    members = limited(), limited()
    for rb in members:
        rb.extend(torch.zeros(1))
        rb.extend(torch.zeros(100))
        assert not rb.has_room
    assert ReplayBufferEnsemble(*members).has_room  # what is written into it is refused at once
    other = Other()
    SyncDataCollector(countdown, Rule(), frames_per_batch=5, replay_buffer=other).rollout()
    assert other.rows == 5


# ---- with worker processes ----
@pytest.mark.deep
@pytest.mark.parametrize("storage", ["private", "shared"])
@pytest.mark.parametrize("way", ["foreground", "background"])
@pytest.mark.parametrize("cls", WITH_WORKERS)
def test_workers_keep_to_the_bound(cls, way, storage):
    rb = limited(storage)
    with cls([cartpole] * 2, frames_per_batch=20, total_frames=400, replay_buffer=rb) as collector:
        beyond = 2 * collector.frames_per_batch_worker()  # a batch of each
        if way == "background":
            collector.start()
            assert stands(rb)
            assert_law_holds(rb, beyond)
        with learner(rb):
            ended(collector) if way == "background" else list(collector)
        assert collector.frames == 400 and rb.write_count - 400 in (0, 20, 40)
        assert_law_holds(rb, beyond)


@pytest.mark.deep
@pytest.mark.parametrize("storage", ["private", "shared"])
@pytest.mark.parametrize("cls", WITH_WORKERS)
def test_collector_with_workers_is_held_and_ended_while_it_waits(cls, storage):
    rb = limited(storage)
    with cls([cartpole] * 2, frames_per_batch=20, replay_buffer=rb) as collector:
        collector.start()
        assert stands(rb)
        begun, state = waits(rb), ends(collector.state_dict)
        assert state["frames"] == collector.frames == rb.write_count
        assert stands(rb, begun)
        assert_law_holds(rb, 2 * collector.frames_per_batch_worker())
        with collector.pause():
            count = rb.write_count
            draw_all(rb)
        assert comes(lambda: rb.write_count > count and not rb.has_room)
        ends(lambda: [collector.async_shutdown()])
    assert collector.frames == rb.write_count
    assert_law_holds(rb, 2 * collector.frames_per_batch_worker())


@pytest.mark.deep
@pytest.mark.parametrize("cls", WITH_WORKERS)
def test_foreground_collector_with_workers_alone_goes_on_after_the_error(cls):
    rb = limited()
    with cls([cartpole] * 2, frames_per_batch=20, replay_buffer=rb) as collector:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="Nobody can draw them"):
                for _ in range(20):
                    collector.rollout()
            assert not collector.is_shut_down and collector.frames == rb.write_count
            assert_law_holds(rb, 2 * collector.frames_per_batch_worker())
            draw_all(rb)
        ids = rb[:]["collector", "traj_ids"]
        ends_of = rb[:]["next", "done"].sum()
        assert len(ids.unique()) <= ends_of + 2  # no trajectory was broken off


@pytest.mark.deep
@pytest.mark.parametrize("cls", WITH_WORKERS)
def test_whole_trajectories_of_workers_wait_before_each_batch(cls):
    rb = limited()
    with cls([cartpole] * 2, frames_per_batch=20, trajs_per_batch=2, replay_buffer=rb) as collector:
        collector.rollout()
        for _ in range(3):
            while rb.has_room:  # after one batch there may still be: trajectories are of any length
                collector.rollout()
            count = rb.write_count
            with pytest.raises(RuntimeError, match="Nobody can draw them"):
                collector.rollout()
            assert rb.write_count == count == collector.frames
            draw_all(rb)
            collector.rollout()
            assert rb.write_count > count


@pytest.mark.deep
@pytest.mark.parametrize("cls", WITH_WORKERS)
def test_steps_that_transforms_hold_back_are_written_at_the_end_where_there_is_no_room(cls):
    rb = limited("shared", transform=MultiStepTransform(n_steps=3, gamma=0.9))
    rb.extend(next(iter(SyncDataCollector(cartpole, frames_per_batch=2))))  # workers write from the first batch on
    rb.flush_transforms()
    with cls([cartpole] * 2, frames_per_batch=40, replay_buffer=rb) as collector:
        collector.start()
        assert stands(rb)
        assert ends(lambda: [collector.async_shutdown()])
    assert collector._is_attached and rb.write_count == 2 + collector.frames


@pytest.mark.deep
def test_workers_collect_ahead_where_nobody_who_writes_waits():
    rb = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4, rate_limiter=MinSize(10))
    with MultiaSyncDataCollector([cartpole] * 2, frames_per_batch=20, replay_buffer=rb) as collector:
        collector.rollout()
        assert sum(member.pending for member in collector._members) + len(collector._arrived) == 3
