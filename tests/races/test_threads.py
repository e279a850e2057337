"""Any number of threads may add and sample."""

import threading
import time

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from contracts.tiers import in_turns
from contracts.waiting import comes
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SequenceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram.testing import numbers, of_numbers
from engram.transforms import Transform

#: How long threads work beside each other, in CI and at night.
SECONDS = pytest.mark.parametrize("seconds", [0.8, pytest.param(10.0, marks=pytest.mark.long)])
BATCH = 37
STORAGES = {
    "list": lambda: ListStorage(500),
    "memory": lambda: LazyTensorStorage(500),
    "shared": lambda: LazyTensorStorage(1000, shared=True, lanes=2),
    "mapped": lambda: LazyMemmapStorage(500),
    "columns": lambda: emptied(TensorStorage(of_numbers(torch.arange(500)))),
}


def emptied(storage):
    storage.empty()
    return storage


@SECONDS
@pytest.mark.parametrize(("name", "prefetch"), in_turns(STORAGES, [0, 2]))
def test_threads_that_write_and_sample_never_see_a_torn_or_mixed_step(name, prefetch, seconds):
    rb = ReplayBuffer(storage=STORAGES[name](), batch_size=64, prefetch=prefetch)
    rb.extend(of_numbers(torch.arange(BATCH)))
    stop, errors, counts = threading.Event(), [], {"written": BATCH, "drawn": 0}
    lock = threading.Lock()

    def guarded(work):
        def run():
            try:
                while not stop.is_set():
                    work()
            except BaseException as error:
                errors.append(error)
                stop.set()

        return run

    def extend(worker, state):
        state[0] += 1
        rb.extend(of_numbers(torch.arange(BATCH) + 10_000_000 * worker + BATCH * state[0]))
        with lock:
            counts["written"] += BATCH

    def add():
        rb.add(of_numbers(torch.tensor(5)))
        with lock:
            counts["written"] += 1

    def sample():
        assert len(numbers(rb.sample())) == 64
        counts["drawn"] += 1

    def read():
        numbers(rb[:50])
        numbers(rb[[1, 30, -1]])

    def extend_of(worker):
        state = [0]
        return lambda: extend(worker, state)

    work = [extend_of(1), extend_of(2), add, sample, sample, read]
    threads = [threading.Thread(target=guarded(w)) for w in work]
    for t in threads:
        t.start()
    time.sleep(seconds)
    comes(lambda: errors or counts["drawn"] > 3)
    stop.set()
    for t in threads:
        t.join(300)
        assert not t.is_alive(), "a thread hangs"
    assert not errors, errors[0]
    assert rb.write_count == counts["written"] and counts["drawn"] > 3
    numbers(rb[:])


@pytest.mark.quick
@each("name", STORAGES)
def test_whole_extends_follow_each_other(name):
    rb = ReplayBuffer(storage=STORAGES[name]())
    where, lock = {}, threading.Lock()

    def write(worker):
        for k in range(4):
            index = rb.extend(of_numbers(torch.arange(BATCH) + 1000 * worker + 100 * k))
            with lock:
                where[worker, k] = index

    threads = [threading.Thread(target=write, args=(w,)) for w in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for (worker, k), index in where.items():
        assert (index.diff() == 1).all()
        assert numbers(rb[index]) == (torch.arange(BATCH) + 1000 * worker + 100 * k).tolist()
    assert sorted(i for index in where.values() for i in index.tolist()) == list(range(12 * BATCH))


@SECONDS
@pytest.mark.parametrize("name", STORAGES)
def test_a_generation_belongs_to_the_row_beside_it(name, seconds):
    rb = ReplayBuffer(storage=STORAGES[name](), batch_size=64, track_generations=True)
    rb.extend(of_numbers(torch.arange(BATCH)))
    stop = threading.Event()

    def write():
        at = BATCH
        while not stop.is_set():
            rb.extend(of_numbers(torch.arange(at, at + BATCH)))
            at += BATCH

    thread = threading.Thread(target=write)
    thread.start()
    try:
        until = time.monotonic() + seconds / 2
        n = rb.storage.lanes.store.lane_capacity
        while time.monotonic() < until:
            batch, info = rb.sample(return_info=True)
            generation, lane = info["generation"], info["index"] // n  # each lane counts by itself
            number = generation // n * rb.storage.max_size + lane * n + generation % n
            assert len(set((number - batch["n"]).tolist())) == 1, "generations of other rows"
    finally:
        stop.set()
        thread.join()


@pytest.mark.quick
def test_the_first_writes_of_several_threads_make_one_storage():
    for _ in range(20):
        rb = ReplayBuffer(storage=LazyTensorStorage(100))
        barrier = threading.Barrier(4)

        def write(n, rb=rb, barrier=barrier):
            barrier.wait()
            rb.extend(of_numbers(torch.tensor([n])))

        threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert sorted(numbers(rb[:])) == [0, 1, 2, 3]


class Interrupted(PrioritizedSampler):
    """Lets somebody else act before it takes priorities for the first time."""

    meanwhile = None

    def update_priority(self, *args, **kwargs):
        act, self.meanwhile = self.meanwhile, None
        if act is not None:
            act()
        super().update_priority(*args, **kwargs)


WRITES = {
    "extend": lambda rb, data: rb.extend(data),
    "add": lambda rb, data: rb.add(data[0]),
    "list": lambda rb, data: rb.extend(list(data)),
    "transforms": lambda rb, data: rb.extend(data),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_thread_that_overwrites_rows_at_once_does_not_leave_them_the_priorities_of_another_thread(name):
    sampler = Interrupted(None, 1.0, 1.0)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler)
    if name == "transforms":
        rb.append_transform(Transform(), invert=True)
    first, second = (TensorDict({"n": torch.arange(4), "td_error": torch.full((4,), p)}, [4]) for p in (1.0, 7.0))
    other = threading.Thread(target=rb.extend, args=(second,))

    def overwrite():
        other.start()
        other.join(0.5)  # which it does if nothing keeps it out

    sampler.meanwhile = overwrite
    WRITES[name](rb, first)
    other.join()
    stored = rb[:]
    assert rb.sampler.priorities(torch.arange(4), storage=rb.storage).tolist() == stored["td_error"].tolist()


SAMPLERS = {
    "uniform": RandomSampler,
    "epochs": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(None, 1.0, 1.0),
    "slices": lambda: SliceSampler(slice_len=4),
    "slice epochs": lambda: SliceSamplerWithoutReplacement(slice_len=4),
    "prioritized slices": lambda: PrioritizedSliceSampler(None, 1.0, 1.0, slice_len=4),
    "sequences": lambda: SequenceSampler(slice_len=4),
}

ONCE = {"epochs": 1, "slice epochs": 10}  # so many rows, of which an epoch has one place


@pytest.mark.quick
@each("of_the_buffer", [True, False])
@each("name", SAMPLERS)
def test_threads_that_draw_at_once_draw_different_rows(name, of_the_buffer):
    sampler = SAMPLERS[name]()
    rb = ReplayBuffer(storage=LazyTensorStorage(10_000), sampler=sampler, batch_size=640)
    done = torch.arange(10_000).remainder(10) == 9
    flags = TensorDict({"done": done.unsqueeze(-1), "truncated": torch.zeros(10_000, 1, dtype=torch.bool)}, [10_000])
    rb.extend(TensorDict({"next": flags}, [10_000]))
    drawn, first, draw_seed = [], iter([None]), sampler._draw_seed

    def draw():
        drawn.append(rb.sample(return_info=True)[1]["index"] if of_the_buffer else sampler.sample(rb.storage, 640)[0])

    other = threading.Thread(target=draw, daemon=True)

    def seed_then_let_the_other_draw(storage, lanes):
        seed = draw_seed(storage, lanes)
        for _ in first:
            other.start()
            other.join(0.05)
        return seed

    sampler._draw_seed = seed_then_let_the_other_draw
    draw()
    other.join(300)
    assert len(drawn) == 2 and not torch.equal(*drawn)
    if name in ONCE:
        mine, others = (set((index // ONCE[name]).tolist()) for index in drawn)
        assert not mine & others


class Own:
    """A sampler of the user's own, without a lock."""

    def __init__(self):
        self.inside, self.most = 0, 0

    def sample(self, storage, batch_size):
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.01)
        self.inside -= 1
        return torch.arange(batch_size), {}


def test_a_sampler_of_the_users_own_is_asked_by_one_thread_at_a_time():
    sampler = Own()
    rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=10)
    rb.extend(of_numbers(torch.arange(100)))
    threads = [threading.Thread(target=rb.sample, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert sampler.most == 1
