"""Prefetch of whole batches: their rows are copied by threads that never take the GIL."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import engram
from contracts.children import Child
from contracts.each import each
from contracts.programs import run_program
from contracts.waiting import comes
from engram import _native
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from engram.envs import RewardScaling
from engram.errors import StorageError

pytestmark = pytest.mark.usefixtures("lock_order")

SAMPLERS = {
    "uniform": RandomSampler,
    "epochs": SamplerWithoutReplacement,
    "priorities": lambda: PrioritizedSampler(200, alpha=0.7, beta=0.5),
}
STORAGES = [LazyTensorStorage, LazyMemmapStorage]
WIDE = 20_000  # numbers of a row: batches of several pieces


def steps(n, first=0, wide=WIDE):
    number = torch.arange(first, first + n)
    obs = number.to(torch.float32)[:, None].expand(n, wide).contiguous()
    return TensorDict({"obs": obs, "number": number, "done": torch.zeros(n, 1, dtype=torch.bool)}, [n])


def filled(prefetch, sampler="uniform", storage=LazyTensorStorage, n=60, wide=WIDE, **more):
    rb = TensorDictReplayBuffer(
        storage=storage(n), sampler=SAMPLERS[sampler](), prefetch=prefetch, batch_size=more.pop("batch_size", 16),
        generator=engram.Generator(5), **more,
    )  # fmt: skip
    rb.extend(steps(n, wide=wide))
    return rb


def copying_threads():
    """The numbers of the threads that copy rows, in this process."""
    if sys.platform != "linux":
        pytest.skip("threads are listed by Linux")
    return {int(task.name) for task in Path("/proc/self/task").iterdir() if is_copying(task)}


def is_copying(task):
    try:
        return (task / "comm").read_text().strip() == "engram-copy"
    except OSError:  # it has just ended
        return False


@pytest.fixture
def no_threads(monkeypatch):
    """Rows are copied when the batch is wanted, and not before: no thread can be started."""
    make = _native.CopyThreads
    monkeypatch.setattr(_native, "CopyThreads", lambda most: make(0))


def equal(a, b):
    return sorted(a.keys()) == sorted(b.keys()) and all(torch.equal(a[key], b[key]) for key in a.keys())


@each("depth", [1, 3])
@each("storage", STORAGES)
@each("sampler", SAMPLERS)
def test_the_batches_are_those_without_it(sampler, storage, depth):
    ahead, plain = filled(depth, sampler, storage), filled(0, sampler, storage)
    for _ in range(20):
        batch = ahead.sample()
        assert equal(batch, plain.sample())
        assert (batch["obs"] == batch["number"][:, None]).all()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_batches_are_those_without_it_where_the_caller_copies_all_rows(sampler, no_threads):
    ahead, plain = filled(2, sampler), filled(0, sampler)
    for _ in range(10):
        assert equal(ahead.sample(), plain.sample())


def test_the_batches_are_those_without_it_where_info_is_wanted_now_and_then():
    ahead, plain = filled(2, "epochs"), filled(0, "epochs")
    for k in range(20):
        if k % 5 == 3:
            (batch, info), (other, its) = (rb.sample(return_info=True) for rb in (ahead, plain))
            assert torch.equal(info["generation"], its["generation"]) and torch.equal(info["index"], its["index"])
        else:
            batch, other = ahead.sample(), plain.sample()
        assert equal(batch, other)


def test_transforms_are_applied_to_what_was_copied():
    def double(batch):
        return batch.set("obs", 2 * batch["obs"])

    ahead, plain = (filled(depth, transform=double) for depth in (2, 0))
    for _ in range(10):
        assert equal(ahead.sample(), plain.sample())


def test_no_thread_of_python_reads_plain_batches():
    before = set(threading.enumerate())
    rb = filled(3)
    for _ in range(10):
        rb.sample()
    assert set(threading.enumerate()) <= before and copying_threads()


def test_threads_that_copy_end_with_their_buffer():
    before = copying_threads()
    rb = filled(2)
    rb.sample()
    assert copying_threads() - before
    del rb
    assert comes(lambda: copying_threads() <= before)  # one that was waited for is still listed for a moment


def test_threads_that_copy_leave_signals_to_those_that_python_knows():
    before = copying_threads()
    rb = filled(1)
    rb.sample()
    (mine,) = copying_threads() - before
    for _ in range(30):  # a thread is born with all of them blocked, and shows its own mask a little later
        status = Path(f"/proc/self/task/{mine}/status").read_text()
        blocked = int(next(line for line in status.splitlines() if line.startswith("SigBlk")).split()[1], 16)
        assert blocked >> (signal.SIGINT - 1) & 1, "it would be taken by a thread that nobody waits for"
        rb.sample()
        time.sleep(0.005)


def test_a_batch_has_the_rows_that_came_in_the_places_of_those_that_were_drawn(no_threads):
    rb = filled(1)
    rb.sample()
    rb.extend(steps(60, 1000))
    batch = rb.sample()
    assert batch["number"].min() >= 1000 and (batch["obs"] == batch["number"][:, None]).all()


@pytest.mark.parametrize("sampler", ["epochs", "priorities"])
def test_rows_that_were_overwritten_before_they_were_copied_are_drawn_again(sampler, no_threads):
    """In the place of a row of the epoch stands one of the next; that of a drawn one would have its weight."""
    rb = filled(3, sampler)
    first = rb.sample()["number"].tolist()
    rb.extend(steps(30, 1000))  # half of the ring
    left = {n for n in range(30, 60) if n not in first}
    if sampler == "priorities":
        rb.update_priority(torch.arange(30), torch.full((30,), 1e-9))
        rb.update_priority(torch.arange(30, 60), torch.ones(30))
    following = [n for _ in range(20) for n in rb.sample()["number"].tolist()]
    if sampler == "epochs":
        assert sorted(following[: len(left)]) == sorted(left), "the rest of the epoch comes once"
    else:
        assert set(following) <= set(range(30, 60)), "those that cannot be drawn any more do not come"


def test_rows_that_are_being_written_when_the_copy_begins_do_not_come(no_threads):
    """They were drawn before that, and are settled as they are then: whether anything changed since does not say it."""
    rb = filled(1)
    rb.sample()  # draws the next batch, too
    _native.testing.claim(rb.storage.lanes.store, 0, 40)
    assert rb.sample()["number"].min() >= 40


def test_rows_are_whole_while_a_thread_overwrites_them():
    rb, stop = filled(2, n=40, wide=4000), threading.Event()

    def write():
        first = 1000
        while not stop.is_set():
            rb.extend(steps(4, first, wide=4000))
            first += 4

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(60):
            batch = rb.sample()
            assert (batch["obs"] == batch["number"][:, None].to(torch.float32)).all()
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_nothing_of_before_comes_after_an_empty_a_load_or_a_replacement(sampler, no_threads, tmp_path):
    rb = filled(2, sampler)
    rb.dumps(tmp_path)
    rb.sample()
    rb.empty()
    with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
        rb.sample()
    rb.extend(steps(60, 100))
    assert rb.sample()["number"].min() >= 100
    rb.loads(tmp_path)
    assert rb.sample()["number"].max() < 60
    rb[:] = rb[:].update({"number": torch.arange(200, 260)})
    assert rb.sample()["number"].min() >= 200


@pytest.mark.deep
def test_a_storage_that_is_closed_while_its_rows_are_copied_stays_mapped_until_then():
    """A thread that read from memory that is unmapped would end the process."""
    code = """
        import torch
        from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
        from engram.data.replay_buffers.reading import prefetch
        prefetch.PAYS_FROM_S = 0.0
        rows = torch.zeros(64, 1 << 16)
        for storage in [LazyTensorStorage] * 3 + [LazyMemmapStorage]:
            rb = ReplayBuffer(storage=storage(64), prefetch=2, batch_size=64)
            rb.extend(rows)
            rb.sample()
            if storage is LazyMemmapStorage:
                rb.storage.close()
            del rb
        print("done")
    """
    done = run_program(code, timeout=300)
    assert done.returncode == 0 and done.stdout.strip() == "done", done.stderr


def test_a_child_forked_while_rows_are_copied_goes_on_with_the_same_batches():
    rb = filled(2, n=200, wide=100_000, batch_size=64)
    for _ in range(3):
        rb.sample()
        child = Child(lambda: [rb.sample()["number"].tolist() for _ in range(3)])
        assert child.result() == [rb.sample()["number"].tolist() for _ in range(3)]


def test_a_forked_child_may_drop_a_buffer_whose_rows_are_copied_in_its_parent():
    rbs = [filled(2, n=200, wide=100_000, batch_size=64)]
    rbs[0].sample()

    def drop():
        rbs.clear()
        return "done"

    assert Child(drop).result() == "done"
    rbs[0].sample()


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(end, marks=pytest.mark.deep)
        for end in ["pass", "del rb; sys.exit(0)", "os._exit(0)", "os.kill(os.getpid(), signal.SIGINT)"]
    ],
)
def test_the_interpreter_exits_while_rows_are_copied(end):
    code = f"""
        import os, signal, sys, torch
        from engram.data import LazyTensorStorage, ReplayBuffer
        from engram.data.replay_buffers.reading import prefetch
        prefetch.PAYS_FROM_S = 0.0
        rb = ReplayBuffer(storage=LazyTensorStorage(64), prefetch=4, batch_size=64)
        rb.extend(torch.zeros(64, 1 << 17))
        try:
            rb.sample()
            {end}
        except KeyboardInterrupt:
            pass
    """
    done = run_program(code, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_a_file_that_is_cut_short_is_an_error_and_no_signal(tmp_path, no_threads):
    rb = filled(2, storage=lambda n: LazyMemmapStorage(n, scratch_dir=tmp_path / "store"))
    rb.sample()
    (file,) = (path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.stat().st_size > 1 << 20)
    size = file.stat().st_size
    os.truncate(file, 1 << 16)
    try:
        with pytest.raises(StorageError, match="cut short"):
            rb.sample()
    finally:
        os.truncate(file, size)


def pair(prefetch, sampler="uniform", transform=None, **more):
    members = [filled(0, sampler, n=30 + 10 * k, transform=transform and transform(k)) for k in range(2)]
    return ReplayBufferEnsemble(
        *members, batch_size=12, num_buffer_sampled=3, prefetch=prefetch, generator=engram.Generator(4), **more
    )


def equal_joint(a, b):
    return (a == b).all() and torch.equal(a["index", "index"], b["index", "index"])


@each("depth", [1, 3])
@each("sampler", ["uniform", "priorities"])
def test_batches_of_an_ensemble_are_those_without_it(sampler, depth):
    before = set(threading.enumerate())
    ahead, plain = pair(depth, sampler), pair(0, sampler)
    for _ in range(20):
        batch = ahead.sample()
        assert batch.shape == (3, 4) and equal_joint(batch, plain.sample())
        assert (batch["obs"] == batch["number"][..., None]).all()
    assert set(threading.enumerate()) == before, "a thread of Python's reads what is copied without the GIL"


@pytest.mark.parametrize("own", [False, True], ids=["the same of all", "one of each"])
def test_batches_of_an_ensemble_go_through_all_transforms(own):
    def scaled(k):
        return RewardScaling(1.0, 2.0 + own * k, in_keys=["obs"])

    ahead, plain = (pair(depth, transform=scaled, pin_memory=False) for depth in (2, 0))
    for rb in (ahead, plain):
        rb.append_transform(lambda batch: batch.set("all", batch["obs"].sum()[None, None].expand(batch.shape)))
    for _ in range(10):
        batch = ahead.sample()
        assert equal_joint(batch, plain.sample())
        factor = 2 + own * batch["index", "buffer_ids"]
        assert torch.equal(batch["obs"][..., 0], batch["number"] * factor + 1.0)


def test_a_batch_of_an_ensemble_is_drawn_again_where_a_member_was_emptied(no_threads):
    rb = pair(2)
    rb.sample()
    rb[1].storage.empty()  # which drops nothing that is prepared: the ensemble is not told
    rb[1].extend(steps(5, 900))
    for _ in range(5):
        batch = rb.sample()
        assert (batch["number"][batch["index", "buffer_ids"] == 1] >= 900).all()


def test_a_child_forked_while_rows_of_an_ensemble_are_copied_goes_on_with_the_same_batches():
    rb, twin = pair(3), pair(0)
    assert equal_joint(rb.sample(), twin.sample())
    child = Child(lambda: [rb.sample()["number"].tolist() for _ in range(5)])
    expected = [twin.sample()["number"].tolist() for _ in range(5)]
    assert child.result() == expected
    assert [rb.sample()["number"].tolist() for _ in range(5)] == expected


def test_a_prepared_batch_is_taken_once():
    rb = filled(0)
    draw = _native.UniformDraw(rb.sampler, threading.RLock())
    maker = _native.BatchMaker([(draw, rb.sampler)])
    source = rb.storage.native.source
    prepared = maker.prepare(source, 5, _native.CopyThreads(1))
    assert len(prepared.take()) == 5 and prepared.seconds > 0
    with pytest.raises(ValueError, match="taken already"):
        prepared.take()


def test_a_prepared_batch_that_is_cancelled_is_none():
    rb = filled(0)
    maker = _native.BatchMaker([(_native.UniformDraw(rb.sampler, threading.RLock()), rb.sampler)])
    threads = _native.CopyThreads(1)
    prepared = maker.prepare(rb.storage.native.source, 5, threads)
    prepared.cancel()
    assert prepared.take() is None
    threads.close()
    after = maker.prepare(rb.storage.native.source, 5, threads)
    assert len(after.take()) == 5, "without threads the caller copies"


def test_batches_that_wait_keep_the_time_that_they_took():
    rb = filled(0, wide=200_000)
    maker = _native.BatchMaker([(_native.UniformDraw(rb.sampler, threading.RLock()), rb.sampler)])
    prepared = maker.prepare(rb.storage.native.source, 32, _native.CopyThreads(2))
    time.sleep(0.05)
    took = prepared.seconds
    prepared.take()
    assert 0 < took <= prepared.seconds
