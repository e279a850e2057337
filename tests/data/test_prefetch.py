"""Prefetch: the same batches, only earlier."""

import gc
import threading
import time

import pytest
import torch

from contracts.children import Child
from contracts.each import each
from contracts.programs import run_program
from contracts.waiting import NEVER
from engram.data import LazyTensorStorage, ListStorage, RandomSampler, ReplayBuffer, SamplerWithoutReplacement
from engram.data.replay_buffers.reading import prefetch

pytestmark = pytest.mark.usefixtures("lock_order")

SAMPLERS = [RandomSampler, SamplerWithoutReplacement]
STORAGES = [ListStorage, LazyTensorStorage]


def make(prefetch, sampler=SamplerWithoutReplacement, storage=LazyTensorStorage, n=50, seed=3, **more):
    rb = ReplayBuffer(
        storage=storage(n), sampler=sampler(), prefetch=prefetch, batch_size=7,
        generator=torch.Generator().manual_seed(seed), **more,
    )  # fmt: skip
    rb.extend(torch.arange(n))
    return rb


@each("sampler", SAMPLERS)
@each("storage", STORAGES)
@each("depth", [1, 4])
def test_the_batches_are_those_without_it(sampler, storage, depth):
    with_, without = make(depth, sampler, storage), make(0, sampler, storage)
    for k in range(40):
        if k % 9 == 8:  # another size for once: what was prepared is drawn again
            assert with_.sample(3).tolist() == without.sample(3).tolist()
        else:
            assert with_.sample().tolist() == without.sample().tolist()


@each("depth", [0, 1, 4])
def test_a_batch_that_got_no_memory_is_drawn_again(depth):
    plain, failed = make(0), []
    third = [plain.sample().tolist() for _ in range(3)][-1]

    def short_of_memory(batch):  # in any order, by several threads
        if batch.tolist() == third and not failed:
            failed.append(True)
            raise MemoryError
        return batch

    rb, other, seen = make(depth, transform=short_of_memory), make(0), []
    while len(seen) < 16:
        try:
            seen.append(rb.sample().tolist())
        except MemoryError:
            seen.append(None)
    assert seen.pop(2) is None
    assert seen == [other.sample().tolist() for _ in seen]


def test_no_batch_is_lost_or_repeated_without_replacement():
    rb = make(5)
    for _ in range(4):
        seen = [n for batch in rb for n in batch.tolist()]
        assert sorted(seen) == list(range(50))


@each("sampler", SAMPLERS)
@each(
    "change",
    [
        lambda rb: rb.__setitem__(0, torch.tensor(0)),
        lambda rb: rb.append_transform(lambda x: x),
        lambda rb: rb.load_state_dict(rb.state_dict()),
        lambda rb: rb.update_if_present(index=torch.tensor([0]), generation=torch.tensor([0]), patch=torch.tensor([0])),
        lambda rb: rb.set_writer(rb.writer),
    ],
)
def test_a_change_drops_what_was_prepared_and_rewinds(sampler, change):
    with_, without = make(4, sampler), make(0, sampler)
    for k in range(20):
        assert with_.sample().tolist() == without.sample().tolist()
        if k % 4 == 3:
            change(with_)
            change(without)


def test_no_prepared_batch_outlives_a_replacement_an_empty_or_a_load(tmp_path):
    rb = make(4, RandomSampler)
    rb.dumps(tmp_path)
    rb.sample()
    rb[:] = torch.arange(100, 150)
    assert rb.sample().min() >= 100
    rb.empty()
    rb.extend(torch.arange(200, 210))
    assert rb.sample().min() >= 200
    rb.loads(tmp_path)
    assert rb.sample().max() < 50
    rb.sample()
    rb.set_sampler(SamplerWithoutReplacement(shuffle=False))
    assert rb.sample().tolist() == [0, 1, 2, 3, 4, 5, 6]
    storage = LazyTensorStorage(9)
    ReplayBuffer(storage=storage).extend(torch.arange(300, 309))
    rb.set_storage(storage)
    assert rb.sample().min() >= 300


class Announced:
    """A lock that tells when somebody comes for it."""

    def __init__(self, lock):
        self.lock, self.came = lock, threading.Event()

    def __enter__(self):
        self.came.set()
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()


@pytest.mark.parametrize("draw", [lambda rb: rb.sample(), lambda rb: next(iter(rb))], ids=["sample", "iterate"])
def test_waiting_thread_gets_a_batch_while_the_sampler_is_replaced(draw):
    rb = make(2, RandomSampler, ListStorage)
    rb.sample()
    batches = []
    waits = threading.Thread(target=lambda: batches.append(draw(rb)), daemon=True)
    with rb._parts.prefetcher.paused():
        rb._parts.prefetcher._lock = lock = Announced(rb._parts.prefetcher._lock)
        waits.start()
        assert lock.came.wait(NEVER)
        rb.set_sampler(SamplerWithoutReplacement(shuffle=False))
    waits.join(NEVER)
    assert len(batches) == 1 and len(batches[0]) == 7
    assert rb.sample().tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_an_emptied_buffer_says_so_and_recovers():
    rb = make(3)
    rb.sample()
    rb.empty()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
            rb.sample()
    rb.extend(torch.arange(7))
    assert sorted(rb.sample().tolist()) == list(range(7))


def test_errors_reach_the_caller_and_the_next_batch_comes():
    calls = []

    def fails_at_third(batch):
        calls.append(1)
        if len(calls) == 3:
            raise ArithmeticError("third")
        return batch

    rb = make(2, transform=fails_at_third)
    seen = []
    for _ in range(8):
        try:
            seen += rb.sample().tolist()
        except ArithmeticError as error:
            assert "third" in str(error)
            seen.append(None)
    assert seen.count(None) == 1 and len(seen) > 40


def test_an_error_costs_the_same_batch_as_without_prefetch():
    def run(depth):
        bad = []

        def transform(batch):
            if 13 in batch.tolist() and not bad:
                bad.append(1)
                raise ArithmeticError
            return batch

        rb = make(depth, transform=transform)
        out = []
        for _ in range(8):
            try:
                out.append(rb.sample().tolist())
            except ArithmeticError:
                out.append(None)
        return out

    assert run(3) == run(0)


def test_a_state_saved_in_the_middle_resumes_exactly(tmp_path):
    for sampler in SAMPLERS:
        rb, twin = make(4, sampler), make(2, sampler, seed=9)
        for _ in range(5):
            rb.sample()
        rb.dumps(tmp_path / sampler.__name__)
        twin.loads(tmp_path / sampler.__name__)
        assert [rb.sample().tolist() for _ in range(9)] == [twin.sample().tolist() for _ in range(9)]


def test_a_batch_that_a_writer_overtook_is_drawn_again_and_nobody_waits_for_ever(monkeypatch):
    """The thread that reads must draw again while the caller waits for it."""
    for storage, names in ((LazyTensorStorage(50), ["read"]), (ListStorage(50), ["read_batch", "read_own"])):
        rb = ReplayBuffer(storage=storage, prefetch=2, batch_size=7)
        rb.extend(torch.arange(50))
        reads, torn = storage.access.item_reader or storage, []

        def torn_at_first(read, _torn=torn):
            def read_torn(slots, *args, **kwargs):
                rows = read(slots, *args, **kwargs)
                if len(_torn) < 9:
                    _torn.append(1)
                    return rows._replace(overwritten=[0, 3])
                return rows

            return read_torn

        for name in names:
            monkeypatch.setattr(reads, name, torn_at_first(getattr(reads, name)))
        done = []
        thread = threading.Thread(
            target=lambda rb=rb, done=done: done.extend(rb.sample(return_info=True)[0].tolist() for _ in range(5)),
            daemon=True,
        )
        thread.start()
        thread.join(120)
        assert len(done) == 5, "the caller and its thread wait for each other"
        assert len(torn) == 9, "the batches were read otherwise"


def test_threads_that_share_a_buffer_get_each_batch_once():
    rb = make(4, n=7000)
    seen, lock = [], threading.Lock()

    def take():
        for _ in range(250):
            batch = rb.sample().tolist()
            with lock:
                seen.extend(batch)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(seen) == list(range(7000))


def test_while_a_thread_prepares_nothing_stale_survives_an_empty():
    """Dropping and emptying are one step: no batch is prepared between them."""
    rb = make(3, RandomSampler, n=20)
    stop, wrong = threading.Event(), []
    low = [0]

    def take():
        while not stop.is_set():
            at_least = low[0]
            try:
                found = int(rb.sample().min())
            except RuntimeError:
                continue
            if found < at_least:
                wrong.append((found, at_least))

    thread = threading.Thread(target=take)
    thread.start()
    for k in range(1, 300):
        rb.empty()
        low[0] = 1000 * k
        rb.extend(torch.arange(20) + 1000 * k)
    stop.set()
    thread.join()
    assert not wrong, wrong[:3]


def test_a_forked_child_goes_on_with_the_same_batches():
    rb = make(4)
    for _ in range(3):
        rb.sample()
    child = Child(lambda: [rb.sample().tolist() for _ in range(4)])
    assert child.result() == [rb.sample().tolist() for _ in range(4)]


@pytest.mark.parametrize("forks", [3, pytest.param(60, marks=pytest.mark.long)])
@pytest.mark.parametrize("depth", [0, 3])
def test_a_child_forked_while_threads_sample_and_write_can_use_the_buffer(depth, forks):
    rb = make(depth, RandomSampler, n=1000)
    stop = threading.Event()

    def use(what):
        while not stop.is_set():
            what()

    work = [rb.sample, rb.sample, lambda: rb.extend(torch.arange(100)), lambda: rb[:10]]
    threads = [threading.Thread(target=use, args=(w,), daemon=True) for w in work]
    for t in threads:
        t.start()
    try:
        for _ in range(forks):

            def work():
                rb.extend(torch.arange(5))
                rb.sample()
                rb[0] = torch.tensor(3)
                rb.empty()
                return len(rb)

            assert Child(work).result() == 0, "it must not wait for a lock that a thread of its parent held"
    finally:
        stop.set()
        for t in threads:
            t.join()


def test_threads_end_with_their_buffer():
    others = set(threading.enumerate())
    rb = make(3)
    rb.sample()
    mine = set(threading.enumerate()) - others
    assert mine
    del rb
    gc.collect()
    for thread in mine:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in mine)


def threads_of(rb, samples, threads_before):
    for _ in range(samples):
        rb.sample()
    return set(threading.enumerate()) - threads_before


def test_no_thread_prepares_what_takes_less_than_handing_it_over(monkeypatch):
    monkeypatch.setattr(prefetch, "PAYS_FROM_S", 10.0)
    assert not threads_of(make(2), 30, set(threading.enumerate()))


def test_threads_begin_where_batches_become_slow_and_end_where_they_become_quick(monkeypatch):
    monkeypatch.setattr(prefetch, "PAYS_FROM_S", 0.02)
    pause, by_caller = threading.Event(), []

    def slow(batch):
        by_caller.append(threading.current_thread() is threading.main_thread())
        if pause.is_set():
            time.sleep(0.03)
        return batch

    rb, other = make(2, transform=slow), make(0)
    seen = [rb.sample().tolist() for _ in range(10)]
    assert all(by_caller)
    pause.set()
    seen += [rb.sample().tolist() for _ in range(20)]
    assert not any(by_caller[-5:])
    pause.clear()
    seen += [rb.sample().tolist() for _ in range(200)]
    assert all(by_caller[-5:])
    assert seen == [other.sample().tolist() for _ in seen], "whoever prepares them, the batches are the same"


def test_prefetching_pauses_while_it_is_slower_than_sampling(monkeypatch):
    for name, value in (("PAYS_FROM_S", 0.001), ("_COMPARED", 4), ("_PAUSE", 10)):
        monkeypatch.setattr(prefetch, name, value)
    by_caller = []

    def slow_in_threads(batch):
        by_caller.append(threading.current_thread() is threading.main_thread())
        time.sleep(0.002 if by_caller[-1] else 0.05)
        return batch

    rb, other = make(1, transform=slow_in_threads), make(0)
    seen = [rb.sample().tolist() for _ in range(8 + 6 + 10)]
    assert all(by_caller[:8]) and not any(by_caller[8:12]) and all(by_caller[-8:])
    seen += [rb.sample().tolist() for _ in range(10)]
    assert not by_caller[-1], "after the rest they are tried again"
    assert seen == [other.sample().tolist() for _ in seen], "whoever prepares them, the batches are the same"


def test_a_thread_of_pythons_must_save_more_than_one_that_never_takes_the_gil(monkeypatch):
    monkeypatch.setattr(prefetch, "PAYS_FROM_S", 1e-9)
    monkeypatch.setattr(prefetch, "PYTHON_PAYS_FROM_S", 10.0)
    before = set(threading.enumerate())
    assert not threads_of(make(2, transform=lambda batch: batch), 30, before)
    rb = make(2)
    for _ in range(10):
        rb.sample()
    assert rb._parts.prefetcher._queue, "its rows are copied by native threads"


def test_an_epoch_is_whole_whoever_prepares_its_batches(monkeypatch):
    monkeypatch.setattr(prefetch, "PAYS_FROM_S", 0.001)
    calls = []

    def now_and_then_slow(batch):
        calls.append(1)
        if len(calls) // 20 % 2:
            time.sleep(0.002)
        return batch

    rb = make(3, transform=now_and_then_slow)
    for _ in range(30):
        assert sorted(n for batch in rb for n in batch.tolist()) == list(range(50))


@pytest.mark.deep
@pytest.mark.parametrize("end", ["pass", "del rb; sys.exit(0)", "threading.Thread(target=rb.sample).start()"])
def test_the_interpreter_exits_while_batches_are_prepared(end):
    code = f"""
        import sys, threading, time, torch
        from engram.data import LazyTensorStorage, ReplayBuffer
        slow = lambda x: time.sleep(0.05) or x
        rb = ReplayBuffer(storage=LazyTensorStorage(1000), prefetch=4, batch_size=8, transform=slow)
        rb.extend(torch.arange(1000))
        for _ in range(3):
            rb.sample()
        {end}
    """
    done = run_program(code, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stderr
