"""Rows that are handed out once: `ReplayBuffer(sampler=QueueSampler())`."""

import copy
import functools
import itertools
import os
import pickle
import signal
import time
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.utils.data import DataLoader

import engram
from contracts.children import fork
from contracts.each import each
from contracts.removed_rows import (
    CAPACITY,
    READINGS,
    arguments,
    check_once,
    chosen,
    filled,
    fronts,
    numbers,
    places,
)
from contracts.waiting import NEVER, comes, end, in_thread, seems_alone
from contracts.ways_to_write import WRITES, rows
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    MinSize,
    QueueSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram.errors import QueueFullError, StorageError
from engram.store import waits
from testing.own_parts import PickledStorage

pytestmark = pytest.mark.filterwarnings("ignore:sample was called with batch_size=:UserWarning")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    seems_alone(monkeypatch)


def queue(capacity=12, batch_size=4, storage=None, front=ReplayBuffer, **settings):
    parts = {name: settings.pop(name) for name in ("transform", "prefetch", "collate_fn", "writer") if name in settings}
    storage = LazyTensorStorage(capacity) if storage is None else storage
    return front(storage=storage, sampler=QueueSampler(**settings), batch_size=batch_size, **parts)


def taken(rb, **how):
    return rb.sample(**how).flatten().tolist()


def cursors(rb):
    return rb.storage.lanes.queue.consumed, rb.storage.lanes.queue.kept


# ---- order, each row once ----
PROGRAM = st.lists(st.tuples(st.sampled_from("aeeessssrcf"), st.integers(1, 9)), min_size=5, max_size=40)


@settings(max_examples=80, deadline=None)
@given(
    program=PROGRAM,
    capacity=st.integers(1, 14),
    full=st.sampled_from(["wait", "overwrite"]),
    envs=st.sampled_from([0, 3]),
)
def test_rows_come_once_and_in_order_as_those_of_a_deque(program, capacity, full, envs):
    each_time = max(1, envs)
    storage = LazyTensorStorage(capacity * each_time, ndim=2 if envs else 1)
    rb = ReplayBuffer(storage=storage, sampler=QueueSampler(full=full))
    waiting, missed, number, saved = deque(), 0, 0, None
    for what, n in program:
        if what in "ae":
            n = 1 if what == "a" else n
            room = capacity - -(-len(waiting) // each_time)
            batch = torch.arange(number, number + n * each_time).reshape(n, each_time)
            if full == "wait" and n > room:
                with pytest.raises(RuntimeError, match="extend waits for room in the queue"):
                    rb.extend(batch.T if envs else batch[:, 0])
                n = room
            else:
                rb.extend(batch.T if envs else batch[:, 0])
            waiting.extend(range(number, number + n * each_time))
            number += n * each_time
            while len(waiting) > capacity * each_time:
                waiting.popleft()
                missed += 1
        elif what == "s":
            n = min(n, capacity) * each_time
            assert rb.can_sample(n) == (len(waiting) >= n)
            if len(waiting) >= n:
                assert rb.sample(n).flatten().tolist() == [waiting.popleft() for _ in range(n)]
            elif waiting or number:
                with pytest.raises(RuntimeError, match="sample waits for"):
                    rb.sample(n, wait=False)
        elif what == "r" and waiting:
            gone = list(itertools.islice(waiting, 0, None, 3))
            removed = torch.tensor(gone)
            assert rb.remove(lambda block: torch.isin(whole(block), removed)) == len(gone)  # noqa: B023
            if full == "wait" and not envs:
                # A removed row is passed with the ones around it: its place is free when they are handed out.
                assert rb.stats().waiting == len(waiting) - len(gone)
            rest = [row for row in waiting if row not in set(gone)]
            while len(rest) >= each_time:
                assert rb.sample(each_time).flatten().tolist() == [rest.pop(0) for _ in range(each_time)]
            waiting.clear()
            rb.empty()
        elif what == "c":
            rb.empty()
            waiting.clear()
        elif what == "f" and saved is None:
            saved = rb.state_dict(), list(waiting)
        elif what == "f":
            rb.load_state_dict(saved[0])
            waiting, saved = deque(saved[1]), None
        assert rb.stats().waiting == len(waiting)
    assert full == "wait" or rb.stats().missed <= missed


def whole(block):
    return block.batch().flatten()


def test_of_several_lanes_each_gives_its_rows_in_order_and_its_share():
    storage = LazyTensorStorage(400, shared=True, lanes=4)
    rb = queue(storage=storage, batch_size=50)
    rb.extend(torch.arange(350))
    lanes = rb.storage.lanes.store.lanes
    each_lane = rb.storage.max_size // lanes
    for _ in range(7):
        info = rb.sample(return_info=True)[1]
        order = [info["generation"][info["index"] // each_lane == lane].tolist() for lane in range(lanes)]
        assert all(sequences == sorted(sequences) for sequences in order)
        assert sorted(len(one) for one in order)[-1] <= 50 / 350 * 100 + lanes
    assert rb.stats().waiting == 0 and not rb.can_sample(1)


def test_indices_of_rows_that_were_written_in_parts_are_theirs():
    rb = queue(capacity=5, batch_size=3)
    thread, results = in_thread(lambda: rb.extend(torch.arange(20)))
    got = [taken(rb, timeout=NEVER) for _ in range(6)]
    end(thread)
    assert list(itertools.chain(*got)) == list(range(18))
    assert results[0].tolist() == [i % 5 for i in range(20)]


@each("place", {name: place for name, place in places().items() if name not in ("TensorStorage",)})
def test_a_queue_in_any_storage_gives_each_row_once_and_no_removed_one(place, tmp_path):
    made = places()[place]
    rb = filled(made.make(tmp_path), made.envs, front=TensorDictReplayBuffer, sampler=QueueSampler(full="overwrite"))
    gone = {n for n in numbers(rb[:]) if bool(chosen(torch.tensor(n)))}
    everything = numbers(rb[:])
    rb.remove(lambda block: chosen(block["n"]))
    seen = []
    each_time = max(1, made.envs)
    while rb.can_sample(each_time):
        seen += sorted(numbers(rb.sample(each_time)))
    assert len(seen) == len(set(seen)) and set(seen) <= everything - gone
    assert len(everything - gone) - len(seen) < each_time


#: Those that take each batch when it is wanted.
AT_ONCE = [name for name, how in READINGS.items() if not how.ahead]


def full_queue(reading, folder, **parts):
    on_disk = reading == "published"
    storage = LazyMemmapStorage(CAPACITY, scratch_dir=folder / "named") if on_disk else LazyTensorStorage(CAPACITY)
    parts = {"front": TensorDictReplayBuffer, "sampler": QueueSampler(full="overwrite"), **parts}
    return filled(storage, **{**READINGS[reading].arguments, **parts})


@each("reading", AT_ONCE)
def test_each_way_to_read_a_queue_gives_each_row_once_and_no_removed_one(reading, tmp_path):
    check_once(full_queue(reading, tmp_path), READINGS[reading].batches)


@each("front", [name for name, front in fronts().items() if "alpha" not in arguments(front)])
def test_each_front_of_a_queue_gives_each_row_once_and_no_removed_one(front, tmp_path):
    check_once(full_queue("sample", tmp_path, front=fronts()[front]), READINGS["sample"].batches)


@each("reading", AT_ONCE)
def test_a_way_to_read_that_takes_nothing_out_of_the_queue_is_found(reading, tmp_path, monkeypatch):
    monkeypatch.setattr(QueueSampler, "_hand_out", lambda self, are_whole: self.put_off())
    with pytest.raises(AssertionError, match="rows wait"):
        check_once(full_queue(reading, tmp_path), READINGS[reading].batches)


def test_a_batch_carries_what_others_carry(tmp_path):
    rb = queue(storage=LazyMemmapStorage(20, scratch_dir=tmp_path), front=TensorDictReplayBuffer)
    rb.extend(rows(10))
    batch, info = rb.sample(return_info=True)
    assert batch["x"].tolist() == [0, 1, 2, 3] and batch["index"].tolist() == [0, 1, 2, 3]
    assert info["generation"].tolist() == [0, 1, 2, 3]
    assert isinstance(rb.sample(as_numpy=True), dict)
    assert rb.sample(1, as_numpy=True)["x"].tolist() == [8]


# ---- waiting ----
def _full(way):
    """A queue that a way to write fills, and what writes one step more."""
    rb, write = way.make(rate_limiter=None, sampler=QueueSampler())
    while rb.write_count < rb.storage.max_size:
        first = way.declines and way is not WRITES["arrays of an adapter"] and not rb.storage.initialized
        rb.extend(rows(1)) if first else write()
    return rb, write


QUEUES = [name for name in WRITES if name not in ("priorities", "a storage of the user's", "the best rows")]


@pytest.mark.parametrize("way", QUEUES)
def test_every_way_to_write_stops_at_a_full_queue_and_goes_on_when_rows_are_handed_out(way):
    rb, write = _full(WRITES[way])
    if WRITES[way].declines:
        assert write() is False
    else:
        thread, results = in_thread(write)
        assert comes(lambda: rb.storage.lanes.store.waits[0] or results) and not results
    before = rb.write_count
    rb.sample(4)
    if WRITES[way].declines:
        assert write()
    else:
        end(thread)
        assert not isinstance(results[0], BaseException), results
    assert rb.write_count > before


def test_a_writer_that_knows_no_queue_gets_an_error_and_overwrites_nothing():
    rb = queue(capacity=5)
    rb.extend(torch.arange(4))
    with pytest.raises(QueueFullError, match=r"no room for 3 more time steps .* nothing was written"):
        rb.writer.extend(torch.arange(3))
    assert taken(rb) == [0, 1, 2, 3]


def test_other_samplers_draw_all_that_is_stored_and_take_nothing_out():
    rb = queue()
    other = ReplayBuffer(storage=rb.storage, batch_size=64)
    rb.extend(torch.arange(12))
    assert set(taken(other)) == set(range(12)) and rb.stats().waiting == 12
    thread, results = in_thread(lambda: other.extend(torch.arange(12, 16)))
    assert comes(lambda: rb.storage.lanes.store.waits[0]) and not results
    assert taken(rb) == [0, 1, 2, 3]
    end(thread)
    assert taken(rb) == [4, 5, 6, 7] and taken(rb) == [8, 9, 10, 11] and taken(rb) == [12, 13, 14, 15]


def test_waits_that_nobody_can_end_are_errors_and_others_end_by_their_timeout():
    rb = queue(capacity=6)
    rb.extend(torch.arange(3))
    with pytest.raises(RuntimeError, match=r"sample waits for 1 more row: 3 of 4 are there.*Nobody can write them"):
        rb.sample()
    with pytest.raises(TimeoutError, match="sample waits for 1 more row"):
        rb.sample(timeout=0.01)
    with pytest.raises(RuntimeError, match="wait=False"):
        rb.sample(wait=False)
    with pytest.raises(RuntimeError, match=r"6 rows wait to be handed out, of 6 that fit.* the first 3 of 5"):
        rb.extend(torch.arange(3, 8))
    with pytest.raises(TimeoutError, match="nothing was written"):
        rb.extend(torch.arange(8, 10), timeout=0.01)
    with pytest.raises(TimeoutError, match=r"add waits for room in the queue.*nothing was written"):
        rb.add(torch.tensor(8), timeout=0.01)
    assert taken(rb) == [0, 1, 2, 3] and taken(rb, batch_size=2) == [4, 5]


def test_a_loop_ends_where_nobody_can_write_any_more_with_the_rest_as_a_shorter_batch():
    rb = queue()
    rb.extend(torch.arange(10))
    assert [batch.tolist() for batch in rb] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert list(rb) == []


def test_a_loop_goes_on_while_another_thread_writes():
    rb = queue(capacity=7)

    def write():
        for i in range(0, 40, 5):
            rb.extend(torch.arange(i, i + 5))
            time.sleep(0.001)

    thread, _ = in_thread(write)
    assert list(itertools.chain.from_iterable(batch.tolist() for batch in rb)) == list(range(40))
    end(thread)


def test_a_shut_down_ends_a_wait_and_so_does_the_end_of_the_queue():
    rb = queue()
    thread, results = in_thread(rb.sample)
    assert comes(lambda: rb.storage.lanes.store.waits[2])
    rb.shutdown()
    end(thread)
    assert "shut down" in str(results[0])
    rb = queue(capacity=4)
    rb.extend(torch.arange(4))
    thread, results = in_thread(lambda: rb.extend(torch.arange(4, 9)))
    assert comes(lambda: rb.storage.lanes.store.waits[0])
    rb.end_queue()
    end(thread)
    assert results[0].tolist() == [0, 1, 2, 3, 0] and isinstance(rb.sampler, RandomSampler)


@pytest.mark.parametrize("ends", ["empty", "load_state_dict"])
def test_writers_that_wait_do_not_go_on_in_rows_that_were_replaced(ends):
    rb = queue(capacity=4)
    rb.extend(torch.arange(4))
    state = rb.state_dict()
    thread, results = in_thread(lambda: rb.extend(torch.arange(4, 9)))
    assert comes(lambda: rb.storage.lanes.store.waits[0])
    rb.empty() if ends == "empty" else rb.load_state_dict(state)
    if ends == "empty":
        end(thread)
        assert "all rows of this storage were replaced while extend waited" in str(results[0])
    else:
        end(thread)
        assert "all rows of this storage were replaced" in str(results[0]) and taken(rb) == [0, 1, 2, 3]


# ---- errors in the middle of a batch ----
def test_a_batch_that_cannot_be_made_comes_again():
    broken = [True]

    def reads(*args, **kwargs):
        if broken and broken.pop():
            raise KeyboardInterrupt
        return read(*args, **kwargs)

    rb = queue()
    rb.extend(torch.arange(8))
    read = rb.storage.read
    rb.storage.read = reads
    with pytest.raises(KeyboardInterrupt):
        rb.sample()
    assert taken(rb) == [0, 1, 2, 3]
    thread, results = in_thread(lambda: taken(rb))  # nobody has kept the turn
    end(thread)
    assert results == [[4, 5, 6, 7]]


def test_a_row_that_was_removed_after_it_was_chosen_is_not_in_the_batch():
    rb = queue()
    rb.extend(torch.arange(8))
    read, removes = rb.storage.read, [True]

    def reads(*args, **kwargs):
        if removes and removes.pop():
            rb.remove([1])
        return read(*args, **kwargs)

    rb.storage.read = reads
    assert taken(rb) == [0, 1, 2, 3]  # removed while it was read: the look at removed rows comes before
    rb.remove([5])
    assert taken(rb, batch_size=3) == [4, 6, 7]


def test_rows_that_are_overwritten_while_they_are_read_are_missed_and_others_come():
    rb = queue(capacity=8, full="overwrite")
    rb.extend(torch.arange(8))
    read, writes = rb.storage.read, [True]

    def reads(*args, **kwargs):
        if writes and writes.pop():
            rb.extend(torch.arange(8, 10))
        return read(*args, **kwargs)

    rb.storage.read = reads
    assert taken(rb) == [2, 3, 4, 5] and rb.stats().missed == 2


# ---- rows that are too old ----
def versioned(versions, first=0):
    n = len(versions)
    return TensorDict(
        {"x": torch.arange(first, first + n), "collector": {"policy_version": torch.tensor(versions)}}, [n]
    )


def test_rows_that_are_too_old_are_passed_and_counted():
    rb = queue(capacity=12, batch_size=3, front=TensorDictReplayBuffer, max_staleness=1)
    rb.extend(versioned([0, 1, 2, 0, 3, 2, 0, 3, 1]))
    assert rb.sample()["x"].tolist() == [0, 1, 2]
    rb.sampler.consumer_version = 3
    assert rb.stats().versions == (0, 3)
    assert rb.sample()["x"].tolist() == [4, 5, 7]
    assert rb.stats().stale == 2 and rb.stats().waiting == 1
    with pytest.raises(RuntimeError, match="wait=False"):
        rb.sample(1, wait=False)  # the last one is too old, and makes room
    assert rb.stats().stale == 3 and rb.stats().waiting == 0
    rb.extend(versioned([0] * 9 + [3, 0, 3], 10))
    with pytest.raises(RuntimeError, match="wait=False"):
        rb.sample(wait=False)
    assert rb.stats().waiting == 3, "what is too old in front of the others goes at once"
    rb.extend(versioned([3], 30))
    assert rb.sample()["x"].tolist() == [19, 21, 30]


def test_max_staleness_needs_versions_and_says_how_to_get_them():
    rb = queue(front=TensorDictReplayBuffer, max_staleness=1)
    rb.extend(rows(8))
    with pytest.raises(ValueError, match="track_policy_version=True"):
        rb.sample()
    rb = queue(front=TensorDictReplayBuffer, max_staleness=1, version_key="x")
    rb.extend(rows(8))
    with pytest.raises(ValueError, match=r"one integer for each row, and .*x.* torch.float32"):
        rb.sample()


def test_a_version_that_is_said_before_there_are_rows_holds_when_they_come():
    rb = queue(front=TensorDictReplayBuffer, batch_size=2, max_staleness=2)
    rb.note_policy_version(5)
    rb.extend(versioned([0, 3, 4, 2]))
    assert rb.sampler.consumer_version == 5 and rb.sample()["x"].tolist() == [1, 2] and rb.stats().stale == 1
    assert rb.stats().versions == (2, 5)
    with pytest.raises(ValueError, match=r"an integer of 0 or more, got 1\.5"):
        rb.sampler.consumer_version = 1.5


def test_the_version_that_trains_is_the_stores(tmp_path):
    storage = LazyMemmapStorage(20, scratch_dir=tmp_path, shared_init=True, existsok=True)
    rb = queue(storage=storage, front=TensorDictReplayBuffer, max_staleness=1)
    rb.extend(versioned([1]))
    rb.sampler.consumer_version = 7
    other = queue(
        storage=LazyMemmapStorage(20, scratch_dir=tmp_path, shared_init=True, existsok=True),
        front=TensorDictReplayBuffer, max_staleness=1,
    )  # fmt: skip
    assert len(other) == 1 and other.sampler.consumer_version == 7


# ---- what a queue is not ----
def test_settings_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="full must be"):
        QueueSampler(full="drop")
    with pytest.raises(ValueError, match="commit must be"):
        QueueSampler(commit="later")
    with pytest.raises(ValueError, match="max_staleness"):
        QueueSampler(max_staleness=-1)
    with pytest.raises(ValueError, match="make the buffer without prefetch"):
        queue(prefetch=2)
    with pytest.raises(TypeError, match="a TensorDictMaxValueWriter puts them elsewhere"):
        queue(front=TensorDictReplayBuffer, writer=TensorDictMaxValueWriter())
    with pytest.raises(TypeError, match="takes rows out of a storage of the library's own"):
        queue(storage=PickledStorage(10))
    rb = queue()
    rb.extend(torch.arange(4))
    with pytest.raises(ValueError, match="a batch of 13 rows is more than the queue has room for, 12"):
        rb.sample(13)
    with pytest.raises(TypeError, match="is no member of an ensemble"):
        ReplayBufferEnsemble(rb, batch_size=4)
    with pytest.raises(ValueError, match="either a rate limiter or is a queue"):
        rb.rate_limiter = MinSize(2)
    with pytest.raises(ValueError, match="either a rate limiter or is a queue"):
        ReplayBuffer(storage=LazyTensorStorage(10), sampler=QueueSampler(), rate_limiter=MinSize(2))
    with pytest.raises(ValueError, match="this storage is a QueueSampler"):
        ReplayBuffer(storage=rb.storage, sampler=QueueSampler(full="overwrite"))
    writer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=QueueSampler(), batch_size=2)
    best = TensorDictReplayBuffer(storage=writer.storage, writer=TensorDictMaxValueWriter(rank_key="x"), batch_size=2)
    writer.extend(rows(10))
    with pytest.raises(TypeError, match="is a queue, whose rows are handed out in the order"):
        best.extend(rows(3, 100))


# ---- the store ----
def test_the_store_is_a_queue_for_all_who_open_it_until_it_is_ended(tmp_path):
    rb = queue(storage=LazyMemmapStorage(8, scratch_dir=tmp_path))
    rb.extend(torch.arange(8))
    assert taken(rb) == [0, 1, 2, 3]
    rb.storage.close()
    actor = ReplayBuffer(storage=LazyMemmapStorage.open(tmp_path))
    actor.extend(torch.arange(8, 12))
    with pytest.raises(TimeoutError, match="extend waits for room in the queue"):
        actor.extend(torch.arange(12, 13), timeout=0.01)
    actor.storage.close()
    rb = queue(storage=LazyMemmapStorage.open(tmp_path))
    assert taken(rb, batch_size=8) == [4, 5, 6, 7, 8, 9, 10, 11]
    with pytest.raises(StorageError, match="open for reading only"):
        queue(storage=LazyMemmapStorage.open(tmp_path, read_only=True))
    rb.end_queue()
    rb.extend(torch.arange(30))
    assert rb.stats().waiting is None


def test_of_two_processes_that_name_it_differently_the_second_is_told(tmp_path):
    rb = queue(storage=LazyMemmapStorage(8, scratch_dir=tmp_path))
    rb.extend(torch.arange(3))

    def other():
        another = LazyMemmapStorage.open(tmp_path)
        with pytest.raises(
            ValueError, match=r"the store is a QueueSampler\(full='wait', commit='auto'\), as its other"
        ):
            queue(storage=another, full="overwrite")

    assert_ends_well(other)


def assert_ends_well(work):
    pid = fork(work)
    assert os.waitpid(pid, 0)[1] == 0


def test_rows_that_were_overwritten_before_anybody_knew_the_queue_are_told_once():
    storage = LazyTensorStorage(8)
    actor = ReplayBuffer(storage=storage)
    actor.extend(torch.arange(11))
    rb = queue(storage=storage)
    with pytest.raises(RuntimeError, match="3 rows were overwritten before they were handed out"):
        rb.sample()
    assert taken(rb) == [3, 4, 5, 6] and rb.stats().missed == 3


def test_what_was_handed_out_is_saved_with_the_rows(tmp_path):
    rb = queue(capacity=8)
    rb.extend(torch.arange(8))
    taken(rb)
    rb.dumps(tmp_path / "save")
    state = rb.state_dict()
    assert taken(rb) == [4, 5, 6, 7]
    for twin in (
        queue(capacity=8),
        queue(storage=LazyMemmapStorage(20, scratch_dir=tmp_path / "store")),
        copy.deepcopy(rb),
    ):
        twin.loads(tmp_path / "save")
        assert taken(twin) == [4, 5, 6, 7]
        twin.load_state_dict(state)
        assert twin.stats().waiting == 4 and taken(twin) == [4, 5, 6, 7]
    twin = engram.load(tmp_path / "save")
    assert twin.sampler.full == "wait" and taken(twin) == [4, 5, 6, 7]
    twin = pickle.loads(pickle.dumps(twin))
    assert not twin.can_sample(1) and twin.stats().waiting == 0


def test_the_version_that_trains_and_what_was_passed_are_saved_with_the_rows(tmp_path):
    def made():
        return queue(capacity=8, batch_size=2, front=TensorDictReplayBuffer, full="overwrite", max_staleness=1)

    rb = made()
    rb.extend(versioned([0, 3, 3, 1, 3, 2, 3, 3]))
    rb.sampler.consumer_version = 3
    assert rb.sample()["x"].tolist() == [1, 2]
    rb.extend(versioned([3, 3, 3, 3, 3], 8))  # over two that were not handed out
    rb.dumps(tmp_path)
    state = rb.state_dict()
    for load in (lambda twin: twin.loads(tmp_path), lambda twin: twin.load_state_dict(state)):
        twin = made()
        twin.extend(versioned([9]))
        twin.sampler.consumer_version = 9
        load(twin)
        assert twin.stats().versions == (2, 3)
        assert twin.sample()["x"].tolist() == [5, 6]
        assert (twin.stats().missed, twin.stats().stale) == (2, 1)
    assert rb.sample()["x"].tolist() == [5, 6] and rb.stats().missed == 2


def test_a_fork_of_a_buffer_in_private_memory_takes_rows_of_its_own_copy():
    rb = queue(capacity=8)
    rb.extend(torch.arange(8))

    def child():
        with pytest.warns(RuntimeWarning, match="copy of its replay buffer"):
            assert taken(rb) == [0, 1, 2, 3]

    assert_ends_well(child)
    assert taken(rb) == [0, 1, 2, 3]


def test_processes_that_share_a_queue_take_different_rows():
    rb = queue(storage=LazyTensorStorage(400, shared=True), batch_size=10)
    rb.extend(torch.arange(400))
    got = torch.zeros(400, dtype=torch.int64).share_memory_()

    def take():
        for _ in range(12):
            got[rb.sample().flatten()] += 1

    pids = [fork(take) for _ in range(3)]
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
    assert got.max() == 1 and got.sum() == 360 and rb.stats().waiting == 40


def test_workers_of_a_data_loader_take_different_rows():
    rb = queue(storage=LazyTensorStorage(200, shared=True), batch_size=10)
    rb.extend(torch.arange(200))
    dataset = rb.as_iterable_dataset(16)
    loader = DataLoader(dataset, batch_size=None, collate_fn=dataset.collate, num_workers=2)
    got = torch.cat(list(loader)).tolist()
    assert len(got) == len(set(got)) == 160


def test_a_wait_that_lasts_says_who_waits_for_what(monkeypatch):
    monkeypatch.setattr(waits, "_FIRST_WARNING", 0.01)
    rb = queue(storage=LazyTensorStorage(8, shared=True))
    rb.extend(torch.arange(3))
    with pytest.warns(
        RuntimeWarning, match=r"sample waits for 1 more row: 3 of 4 are there; writers: process \d+ is there"
    ):
        thread, _ = in_thread(rb.sample)
        assert comes(lambda: rb.storage.lanes.store.waits[3] > 2e7 or not thread.is_alive())
        rb.extend(torch.arange(3, 4))
        end(thread)


@pytest.mark.deep
@pytest.mark.parametrize("lanes", [None, 4])
def test_two_processes_that_write_as_fast_as_they_can_get_the_same_room(tmp_path, lanes):
    def opened():
        storage = LazyMemmapStorage(64, scratch_dir=tmp_path, shared_init=True, existsok=True, lanes=lanes)
        return queue(storage=storage, batch_size=16)

    def write(which):
        rb = opened()
        while True:
            rb.extend(torch.full((8,), which))

    pids = [fork(functools.partial(write, i)) for i in range(2)]
    try:
        rb, counts = opened(), torch.zeros(2)
        for _ in range(50):
            rb.sample(timeout=NEVER)
        for _ in range(1500):
            counts += torch.bincount(rb.sample(timeout=NEVER), minlength=2)
        assert counts.min() / counts.sum() > 0.2
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
