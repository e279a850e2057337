"""Stores that several processes write and read: forked children, spawned ones, and those that open a folder."""

import multiprocessing as mp
import os
import threading
import warnings

import pytest
import torch

from contracts.children import Child, Signal
from contracts.tiers import in_ci
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from engram.errors import NoFreeLaneError, StorageError, StorageInUseError
from engram.testing import env_steps, numbers, steps

KINDS = {
    "shared memory": lambda path, lanes: LazyTensorStorage(lanes * 100, shared=True, lanes=lanes),
    "temporary file": lambda path, lanes: LazyMemmapStorage(lanes * 100, lanes=lanes),
    "named file": lambda path, lanes: LazyMemmapStorage(lanes * 100, scratch_dir=path, lanes=lanes),
}


@pytest.fixture(params=KINDS)
def make(request, tmp_path):
    return lambda lanes: ReplayBuffer(storage=KINDS[request.param](tmp_path / "store", lanes), batch_size=8)


def test_forked_children_write_lanes_of_their_own_and_everybody_sees_all_rows(make):
    rb = make(3)
    rb.extend(steps(0, 10))

    def write(start):
        index = rb.extend(steps(start, start + 10))
        return index.tolist(), rb.writer._cursor, len(rb)

    first = Child(lambda: write(1000)).result()
    assert first[0] == [*range(50, 60)] and first[1:] == (60, 20)
    assert numbers(rb[:]) == [*range(10), *range(1000, 1010)]
    assert (len(rb), rb.write_count, rb.writer._cursor) == (20, 20, 10)
    go, done, second = Signal(), Signal(), None

    def write_and_wait():
        found = write(2000)
        done.send()
        go.wait()
        return found

    second = Child(write_and_wait)
    done.wait()
    third = Child(lambda: write(3000)).result()
    go.send()
    assert second.result()[0] == [*range(100, 110)]  # nobody is in lane 1, but it is not empty
    assert third[0] == [*range(150, 160)]
    assert sorted(numbers(rb[:])) == sorted([*range(10), *range(1000, 1010), *range(2000, 2010), *range(3000, 3010)])


def test_more_writers_than_lanes_are_welcome(make):
    rb = make(2)
    rb.extend(steps(0, 3))
    n, go = rb.storage.lanes.store.lanes, Signal()
    children = []
    for k in range(1, n + 3):
        done = Signal()
        children.append(Child(lambda k=k, done=done: (rb.extend(steps(10 * k, 10 * k + 3)), done.send(), go.wait())))
        done.wait()
    assert sorted(numbers(rb[:])) == [0, 1, 2, *(10 * k + i for k in range(1, n + 3) for i in range(3))]
    for _ in children:
        go.send()
    for child in children:
        child.result()
    rb.extend(steps(1000, 1200))
    assert len(rb) == 200


@pytest.mark.quick
def test_what_needs_the_store_alone_is_refused_while_another_has_it_open(make, tmp_path):
    rb = make(2)
    rb.extend(steps(0, 10))
    rb.dumps(tmp_path / "saved")
    done, go = Signal(), Signal()
    child = Child(lambda: [numbers(rb[:]), done.send(), go.wait()])  # it only reads
    done.wait()
    before = numbers(rb[:])
    for what in (
        lambda: rb.__setitem__(0, steps(50, 51)[0]),
        lambda: rb.empty(),
        lambda: rb.loads(tmp_path / "saved"),
        lambda: rb.load_state_dict(rb.state_dict()),
        lambda: rb.update_if_present(index=torch.tensor([0]), generation=torch.tensor([0]), patch=steps(50, 51)),
    ):
        with pytest.raises(StorageInUseError, match="alone"):
            what()
    assert numbers(rb[:]) == before
    rb.extend(steps(10, 12))
    rb.sample()
    go.send()
    child.result()
    rb[0] = steps(50, 51)[0]
    rb.loads(tmp_path / "saved")
    rb.empty()
    assert len(rb) == 0


def test_a_child_that_never_touches_the_store_blocks_nobody(make):
    rb = make(2)
    rb.extend(steps(0, 10))
    go = Signal()
    child = Child(lambda: (go.wait(), rb.extend(steps(70, 73)), sorted(numbers(rb[:])))[-1])
    rb[0] = steps(50, 51)[0]
    rb.empty()
    rb.extend(steps(20, 22))
    go.send()
    assert child.result() == [20, 21, 70, 71, 72]


def test_a_child_is_refused_while_its_parent_has_the_store_open(make):
    rb = make(1)
    rb.extend(steps(0, 5))
    for what in (rb.empty, lambda: rb.__setitem__(0, steps(50, 51)[0])):
        with pytest.raises(StorageInUseError):
            Child(what).result()
    with pytest.raises(NoFreeLaneError):
        Child(lambda: rb.extend(steps(5, 6)).tolist()).result()
    assert numbers(rb[:]) == [0, 1, 2, 3, 4]


@pytest.mark.quick
def test_the_lane_of_a_writer_that_is_killed_is_free_and_has_a_seam(make):
    rb = make(2)
    rb.extend(steps(0, 3))
    done, go = Signal(), Signal()
    child = Child(lambda: (rb.extend(steps(10, 14)), done.send(), go.wait()))
    done.wait()
    child.kill()
    capacity = rb.storage.lanes.store.lane_capacity
    # Not an empty lane: the rows of the dead writer are the first that another one will replace.
    assert Child(lambda: rb.extend(steps(20, 22)).tolist()).result() == [2 * capacity, 2 * capacity + 1]
    assert Child(lambda: rb.extend(steps(30, 30 + capacity + 2)).tolist()).result()[0] == 3 * capacity
    assert len(rb) == 3 + 4 + 2 + capacity + 2


def test_a_writer_that_is_killed_holds_nothing_though_a_child_of_it_lives_on(make):
    rb = make(2)
    rb.extend(steps(0, 3))
    ready, go = Signal(), Signal()

    def work():
        rb.extend(steps(10, 14))
        # The idle child says when it runs: before that it still holds what it inherited.
        idle = Child(lambda: (ready.send(), go.wait()))
        return idle.result()

    child = Child(work)
    ready.wait()
    child.kill()
    try:
        rb[0] = steps(50, 51)[0]
        assert Child(lambda: rb.extend(steps(20, 22)).tolist()).result() == [100, 101]
    finally:
        go.send()


def test_a_live_view_keeps_no_lock(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path))
    rb.extend(steps(0, 3))
    view = rb.storage[0:3]
    rb.storage.close()
    other = ReplayBuffer.open(tmp_path)
    other[0] = steps(50, 51)[0]
    assert numbers(view) == [50, 1, 2]


def test_private_memory_is_a_childs_own_copy():
    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    rb.extend(steps(0, 5))
    child = Child(
        lambda: [rb.extend(steps(5, 7)).tolist(), rb.empty(), rb.extend(steps(50, 53)).tolist(), numbers(rb[:])]
    )
    assert child.result()[-1] == [50, 51, 52]
    assert numbers(rb[:]) == [0, 1, 2, 3, 4]


def is_refused(error, use):
    with pytest.raises(error):
        use()


# What a child does first with a buffer that nobody had written to when it was forked.
FIRST_USES = {
    "length": len,
    "extend": lambda rb: rb.extend(steps(0, 2)),
    "sample": lambda rb: is_refused(RuntimeError, rb.sample),
    "read": lambda rb: is_refused(IndexError, lambda: rb[0]),
    "empty": lambda rb: rb.empty(),
    "close": lambda rb: rb.storage.close(),
}
# Buffers, and whether a child that was forked before the first write has rows of its own.
UNWRITTEN = {
    "private memory": (lambda folder: LazyTensorStorage(100), True),
    "memory that is shared from the first write on": (lambda folder: LazyTensorStorage(100, shared=True), True),
    "memory that is shared before": (lambda folder: LazyTensorStorage(100, shared_init=True), False),
    "a file that is shared before": (lambda folder: LazyMemmapStorage(100, shared_init=True), False),
    "a folder": (lambda folder: LazyMemmapStorage(100, scratch_dir=folder), False),
}


def warnings_of_copies(rb, use):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use(rb)
        len(rb)
    return sum("uses a copy of its replay buffer" in str(one.message) for one in caught)


@pytest.mark.parametrize("kind", UNWRITTEN)
def test_a_child_that_was_forked_before_the_first_write_is_warned_once_where_its_rows_are_its_own(kind, tmp_path):
    make, has_own = UNWRITTEN[kind]
    for name, use in FIRST_USES.items():
        rb = ReplayBuffer(storage=make(tmp_path / name), batch_size=4)
        warned = Child(lambda rb=rb, use=use: warnings_of_copies(rb, use)).result()
        assert warned == has_own, name


@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])
def test_no_child_is_warned_of_rows_that_it_shares_also_where_share_is_called_after_the_first_write(make):
    rb = ReplayBuffer(storage=make(100, shared=True) if make is LazyTensorStorage else make(100), batch_size=4)
    rb.extend(steps(0, 3))
    rb.share()
    assert Child(lambda: warnings_of_copies(rb, lambda rb: rb.sample())).result() == 0


@pytest.mark.quick
def test_readers_in_other_processes_never_see_a_torn_row(make):
    rb = make(2)
    rb.extend(steps(0, 50))
    stop = Signal()

    def read():
        torch.manual_seed(os.getpid())
        for _ in range(400):
            numbers(rb.sample())
        numbers(rb[:60])
        return True

    def write():
        for k in range(400):
            rb.extend(steps(1_000_000 + 31 * k, 1_000_000 + 31 * (k + 1)))
        return True

    children = [Child(read), Child(write)]
    for k in range(400):
        rb.extend(steps(31 * k, 31 * (k + 1)))
    assert all(child.result() for child in children)
    numbers(rb[:])
    assert rb.write_count == 50 + 2 * 400 * 31
    stop.send()


def test_a_sampler_without_replacement_follows_rows_of_other_processes(make):
    rb = make(2)
    rb.set_sampler(SamplerWithoutReplacement())
    rb.extend(steps(0, 10))
    Child(lambda: rb.extend(steps(10, 20)).tolist()).result()
    assert sorted(n for batch in rb for n in numbers(batch)) == list(range(20))


def test_two_processes_that_make_a_store_at_once_agree(tmp_path):
    for k in range(12):
        folder = tmp_path / f"s{k}"
        ready, go = Signal(), Signal()

        def work(n, folder=folder, ready=ready, go=go):
            rb = ReplayBuffer(storage=LazyMemmapStorage(200, scratch_dir=folder, lanes=2))
            ready.send()
            go.wait()
            rb.extend(steps(1000 * n, 1000 * n + 30))
            rb.storage.close()
            return True

        children = [Child(lambda n=n: work(n)) for n in range(2)]
        for wait_or_go in (ready.wait, go.send):
            for _ in children:
                wait_or_go()
        assert all(c.result() for c in children)
        assert sorted(numbers(ReplayBuffer.open(folder)[:])) == [*range(30), *range(1000, 1030)]
        assert [f.name for f in folder.iterdir()] == ["rows.engram"]


def test_a_process_that_makes_another_layout_in_the_same_folder_is_refused(tmp_path):
    one, other = (ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path, lanes=2)) for _ in range(2))
    one.extend(steps(0, 5))
    with pytest.raises(StorageError, match=r"a different store in .*'n' is (missing|new)"):
        other.extend(steps(0, 5).exclude("n"))
    one.empty()
    other.extend(steps(5, 7))
    assert len(one) == 2


def test_a_renamed_folder_confuses_no_child(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(200, scratch_dir=tmp_path / "a", lanes=2))
    rb.extend(steps(0, 5))
    (tmp_path / "a").rename(tmp_path / "b")
    other = ReplayBuffer(storage=LazyMemmapStorage(200, scratch_dir=tmp_path / "a", lanes=2))
    other.extend(steps(50, 55))
    assert Child(lambda: rb.extend(steps(5, 8)).tolist()).result() == [50, 51, 52]
    assert numbers(rb[:]) == [0, 1, 2, 3, 4, 5, 6, 7] and len(other) == 5


def _sent(rbs, go, queue):
    try:
        for rb in rbs:
            index = rb.extend(steps(1000, 1010))
            queue.put((index.tolist(), len(rb), sorted(numbers(rb[:])), rb.sample().batch_size[0]))
        go.wait(300)
    except BaseException as error:
        queue.put(repr(error))


@pytest.mark.parametrize("method", in_ci(["fork", "spawn"], ["fork"]))
def test_buffers_can_be_sent_to_another_process(tmp_path, method):
    context = mp.get_context(method)
    rbs = []
    for kind in KINDS:
        generator = torch.Generator().manual_seed(1)
        storage = KINDS[kind](tmp_path / "store", 2)
        sampler = RandomSampler()
        rb = TensorDictReplayBuffer(storage=storage, batch_size=8, sampler=sampler, prefetch=2, generator=generator)
        rb.extend(steps(0, 10))
        rb.sample()
        rbs.append(rb)
    go, queue = context.Event(), context.Queue()
    child = context.Process(target=_sent, args=(rbs, go, queue))
    child.start()
    for rb in rbs:
        assert queue.get(timeout=300) == ([*range(50, 60)], 20, [*range(10), *range(1000, 1010)], 8)
        assert len(rb) == 20
    for rb in rbs:
        with pytest.raises(StorageInUseError):
            rb.empty()
    go.set()
    child.join(300)
    assert child.exitcode == 0
    for rb in rbs:
        rb.empty()


def test_a_store_of_environments_can_be_sent(tmp_path):
    for storage in (LazyTensorStorage(30, ndim=2, shared=True), LazyMemmapStorage(30, ndim=2)):
        rb = ReplayBuffer(storage=storage)
        rb.extend(env_steps(3, 0, 4))
        queue = mp.get_context("fork").Queue()
        queue.put(storage)
        got = ReplayBuffer(storage=queue.get(timeout=300))
        assert numbers(got[:]) == numbers(rb[:]) and got.storage.ndim == 2 and got.storage.max_size == 30
        with pytest.warns(RuntimeWarning, match="take turns"):
            got.extend(env_steps(3, 4, 5))
        rb.extend(env_steps(3, 5, 6))
        assert numbers(got[4]) == [4, 1004, 2004] and numbers(got[5]) == [5, 1005, 2005]


def test_a_fork_while_another_thread_makes_the_store_leaves_the_child_free(monkeypatch):
    storage = LazyTensorStorage(100)
    rb = ReplayBuffer(storage=storage)
    inside, go = threading.Event(), threading.Event()
    place = storage._held_table.place
    make = place.make

    def slow(*args):
        inside.set()
        go.wait(300)
        return make(*args)

    monkeypatch.setattr(place, "make", slow)
    thread = threading.Thread(target=lambda: rb.extend(steps(0, 3)))
    thread.start()
    inside.wait(300)

    def work():
        go.set()
        rb.extend(steps(5, 7))
        return numbers(rb[:])

    child = Child(work)
    go.set()
    thread.join()
    assert child.result() == [5, 6]
