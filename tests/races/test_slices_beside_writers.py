"""Slices while rows are overwritten: between the look, the draw and the read, by this process or by another."""

import functools
import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from contracts.children import Child, Signal
from data.samplers.episode_data import episodes, slices_of
from engram import _native
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SequenceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorStorage,
)
from engram.data.replay_buffers.samplers import runs
from engram.store.episodes import EpisodeIndex


def columns(n):
    return TensorStorage(episodes([n]))


def interfered(kind, storage, lengths, **how):
    """A buffer into which so many steps are written between a draw and its read, a few times."""

    class Interfered(kind):
        left = 3

        def sample(self, storage, batch_size):
            drawn = super().sample(storage, batch_size)
            if self.left:
                self.left -= 1
                rb.extend(episodes(lengths, start=rb.write_count, first_id=rb.write_count))
            return drawn

    rb = ReplayBuffer(storage=storage, sampler=Interfered(**how))
    return rb


CUT = {"strict_length": False, "span": True}


@pytest.mark.pairwise
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("lengths", [[3, 4], [5] * 8, [7] * 17])
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (SliceSampler, {}),
        (SliceSampler, CUT),
        (SliceSampler, {"weight": "steps"}),
        (SliceSampler, {"weight": "steps", **CUT}),
        (SliceSamplerWithoutReplacement, {}),
        (SliceSamplerWithoutReplacement, CUT),
    ],
)
def test_a_slice_that_lost_a_step_before_it_was_read_is_drawn_anew_whole(kind, storage, lengths, how):
    torch.manual_seed(0)
    for _ in range(6):
        rb = interfered(kind, storage(40), lengths, slice_len=4, **how)
        rb.extend(episodes([9, 8, 6, 10, 7]))
        for _ in range(4):
            batch, info = rb.sample(32, return_info=True)
            slices_of(batch, info)
            assert torch.equal(info["index"], batch["n"] % 40)
            assert min(batch["n"].tolist()) >= rb.write_count - 40


@pytest.mark.parametrize("weight", ["trajectories", "steps"])
def test_a_sequence_that_lost_a_step_is_drawn_anew_with_its_mask(weight):
    torch.manual_seed(0)
    how = {"slice_len": 6, "burn_in": 3, "strict_length": False, "weight": weight}
    for _ in range(20):
        rb = interfered(SequenceSampler, LazyTensorStorage(40), [7] * 17, **how)
        rb.extend(episodes([9, 8, 6, 10, 7]))
        batch, info = rb.sample(36, return_info=True)
        for row, mask in zip(batch.reshape(6, 6), info["collector", "mask"].reshape(6, 6), strict=True):
            assert torch.equal(row["collector", "mask"], mask)
            real = row["n"][mask].tolist()
            assert real == list(range(real[0], real[0] + len(real))) and len(row["id"].unique()) == 1


@pytest.mark.quick
def test_boundaries_read_from_steps_that_were_overwritten_meanwhile_are_dropped():
    store = _native.Store.create(-1, 1, 10, 1, 0, 8, False, b"", bytes(16))
    _native.testing.publish(store, 0, _native.testing.claim(store, 0, 10), 10)
    index = _native.Episodes(False, None, 1)
    reads = []

    def fetch(lane, start, stop):
        flags = np.zeros((stop - start, 1), np.uint8)
        if not reads:
            _native.testing.claim(store, 0, 6)  # a writer: of steps 0 to 5 the flags are those of others by now
            flags[:6] = 1
        reads.append((start, stop))
        return flags

    _, _, start, length = index.trajectories(store, fetch=fetch)
    assert (start.tolist(), length.tolist()) == ([6], [4])
    _native.testing.publish(store, 0, 10, 6)
    _, _, start, length = index.trajectories(store, fetch=fetch)
    assert (start.tolist(), length.tolist()) == ([6], [10]) and reads == [(0, 10), (10, 16)]


def test_a_look_that_writers_went_through_whole_is_made_again():
    store = _native.Store.create(-1, 1, 10, 1, 0, 8, False, b"", bytes(16))
    _native.testing.publish(store, 0, _native.testing.claim(store, 0, 10), 10)
    index, reads = _native.Episodes(False, None, 1), []

    def fetch(lane, start, stop):
        reads.append((start, stop))
        if len(reads) < 3:
            _native.testing.publish(store, 0, _native.testing.claim(store, 0, 13), 13)
        return np.zeros((stop - start, 1), np.uint8)

    _, _, start, length = index.trajectories(store, fetch=fetch)
    assert (start.tolist(), length.tolist()) == ([26], [10]) and reads == [(0, 10), (13, 23), (26, 36)]


def test_threads_look_one_after_the_other_and_a_look_inside_a_look_is_refused():
    store = _native.Store.create(-1, 1, 10, 1, 0, 8, False, b"", bytes(16))
    _native.testing.publish(store, 0, _native.testing.claim(store, 0, 10), 10)
    index, inside, found = _native.Episodes(False, None, 1), [], []

    def fetch(lane, start, stop):
        assert not inside
        inside.append(True)
        threads.append(threading.Thread(target=look))
        if len(threads) == 2:
            _native.testing.publish(store, 0, _native.testing.claim(store, 0, 5), 5)
            threads[1].start()
        time.sleep(0.05)
        with pytest.raises(RuntimeError, match="drawing already"):
            index.trajectories(store, fetch=fetch)
        inside.pop()
        return np.zeros((stop - start, 1), np.uint8)

    def look():
        found.append([t.tolist() for t in index.trajectories(store, fetch=fetch)[2:]])

    threads = [threading.Thread(target=look)]
    threads[0].start()
    for k in range(2):
        threads[k].join()
    assert found == [[[5], [5]], [[5], [10]]]


def test_an_error_while_flags_are_fetched_leaves_nothing_half_known():
    store = _native.Store.create(-1, 1, 10, 1, 0, 8, False, b"", bytes(16))
    _native.testing.publish(store, 0, _native.testing.claim(store, 0, 5), 5)
    index = _native.Episodes(True, None, 8)

    def broken(lane, start, stop):
        raise KeyError("no such key")

    def fetch(lane, start, stop):
        return np.arange(start, stop) // 2

    for _ in range(2):
        with pytest.raises(KeyError, match="no such key"):
            index.trajectories(store, fetch=broken)
        with pytest.raises(ValueError, match="contiguous array"):
            index.trajectories(store, fetch=lambda lane, start, stop: np.zeros(3))
        assert index.trajectories(store, fetch=fetch)[2].tolist() == [0, 2, 4]
        _native.testing.publish(store, 0, _native.testing.claim(store, 0, 1), 1)


@pytest.mark.parametrize(
    "kind", [SliceSampler, functools.partial(SliceSampler, weight="steps"), SliceSamplerWithoutReplacement]
)
def test_no_slice_crosses_the_cursor_while_another_process_writes(kind, tmp_path):
    storage = LazyMemmapStorage(2 * 64, tmp_path, lanes=2)
    rb = ReplayBuffer(storage=storage, sampler=kind(slice_len=8, traj_key="id"), batch_size=64)
    rb.extend(episodes([30, 34]))
    began = Signal()

    def write():
        at = 1000
        for k in range(1500):
            rb.extend(episodes([9 + k % 7, 13], start=at, first_id=100 + 2 * k))
            at += 22 + k % 7
            if k == 3:
                began.send()
        return at

    child = Child(write)
    began.wait()
    for _ in range(300):
        slices_of(*rb.sample(return_info=True))
    assert child.result() > 30_000
    batch, info = rb.sample(return_info=True)
    slices_of(batch, info)


@pytest.mark.parametrize("one_storage", [True, False])
def test_threads_that_share_a_sampler_through_two_buffers_take_turns(one_storage):
    """Long looks happen without the GIL; two storages have their flags in different places."""
    sampler, data = SliceSampler(slice_len=8), [episodes([50] * 500), episodes([50] * 500)]
    storages = [LazyTensorStorage(60_000)] * 2 if one_storage else [LazyTensorStorage(60_000) for _ in range(2)]
    if not one_storage:
        data[1]["more"] = torch.zeros(25_000, 3)
    rbs = [ReplayBuffer(storage=storage, sampler=sampler, batch_size=64) for storage in storages]
    for rb, batch in zip(rbs, data, strict=True):
        rb.extend(batch)
    wrong = []

    def work(k):
        try:
            for _ in range(60):
                rbs[k].extend(data[k])
                batch = rbs[k].sample().reshape(8, 8)
                assert (batch["n"].diff() == 1).all() and (batch["id"].diff() == 0).all()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(k % 2,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("storage", [ListStorage, columns])
def test_flags_are_read_of_steps_that_are_there_beside_a_thread_that_writes(storage):
    rb = ReplayBuffer(storage=storage(64), sampler=SliceSampler(slice_len=4, traj_key="id"), batch_size=16)
    rb.extend(episodes([30, 34]))
    wrong, end = [], threading.Event()

    def write():
        try:
            for k in range(600):
                rb.extend(episodes([5 + k % 7, 4], start=rb.write_count, first_id=100 + 2 * k))
        except BaseException as error:
            wrong.append(error)
        end.set()

    threading.Thread(target=write).start()
    while not end.is_set():
        slices_of(*rb.sample(return_info=True))
    assert not wrong


@pytest.mark.quick
def test_a_small_ring_whose_writer_is_in_the_middle_of_a_step_is_looked_at_again(monkeypatch):
    rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=SliceSampler(slice_len=8, traj_key="id"), batch_size=8)
    rb.extend(episodes([8]))
    store = rb.storage.lanes.store
    at, looks = _native.testing.claim(store, 0, 1), itertools.count(1)

    def let_the_writer_run(seconds):
        if next(looks) == 20:
            _native.testing.publish(store, 0, at, 1)

    monkeypatch.setattr(runs, "time", SimpleNamespace(sleep=let_the_writer_run))
    assert rb.sample(return_info=True)[1]["index"].tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    assert next(looks) == 21


@pytest.mark.quick
def test_a_small_ring_whose_writer_ends_its_step_right_after_a_look_is_looked_at_again(monkeypatch):
    rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=SliceSampler(slice_len=8, traj_key="id"), batch_size=8)
    rb.extend(episodes([8]))
    store, draw, drawn = rb.storage.lanes.store, EpisodeIndex.draw, []
    at = _native.testing.claim(store, 0, 1)

    def draw_before_it_ends(*args):
        drawn.append(draw(*args))
        if len(drawn) == 2:
            _native.testing.publish(store, 0, at, 1)
        return drawn[-1]

    monkeypatch.setattr(EpisodeIndex, "draw", draw_before_it_ends)
    assert rb.sample(return_info=True)[1]["index"].tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    assert drawn[:2] == [None, None]


def test_a_forked_child_draws_with_an_index_of_its_own():
    rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=SliceSampler(slice_len=3), batch_size=12)
    rb.extend(episodes([20, 30]))
    rb.sample()

    def work():
        rb.extend(episodes([60], start=50, first_id=2))
        for _ in range(30):
            slices_of(*rb.sample(return_info=True))
        return rb.sampler.episodes.trajectories(rb.storage).length.tolist()

    assert Child(work).result() == [10, 30, 60]
    assert rb.sampler.episodes.trajectories(rb.storage).length.tolist() == [20, 30]
