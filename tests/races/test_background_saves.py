"""`dumps(path, blocking=False)` saves the state of its moment, whatever becomes of the buffer meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

import pytest
import torch
from tensordict import TensorDict

from contracts.children import Child
from contracts.each import each
from contracts.programs import run_program
from engram import verify
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorStorage,
)
from engram.data.replay_buffers.checkpointers import rows
from engram.errors import CheckpointError
from engram.store.snapshots import RowSnapshot
from engram.testing.helpers import numbers, state_of, steps

KINDS = ["list", "memory", "mapped", "tensors", "environments"]


def storage(kind, path, capacity=60):
    if kind == "tensors":
        made = TensorStorage(steps(0, capacity))
        made.empty()
        return made
    return {
        "list": lambda: ListStorage(capacity),
        "memory": lambda: LazyTensorStorage(capacity),
        "mapped": lambda: LazyMemmapStorage(capacity, scratch_dir=path / "store"),
        "environments": lambda: LazyTensorStorage(capacity, ndim=2),
    }[kind]()


def batch(kind, start, stop):
    return steps(start, stop) if kind != "environments" else steps(2 * start, 2 * stop).reshape(2, stop - start)


class Gate:
    """A save hook that lets rows through when it is opened."""

    def __init__(self, rb):
        self.opened, self.reached = threading.Event(), threading.Event()
        rb.register_save_hook(self)

    def __call__(self, rows):
        self.reached.set()
        assert self.opened.wait(300)
        return rows


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 512)


@pytest.mark.quick
@each("kind", KINDS)
def test_what_is_saved_is_the_state_of_the_call(tmp_path, kind):
    rb = ReplayBuffer(storage=storage(kind, tmp_path))
    rb.extend(batch(kind, 0, 75 if kind != "environments" else 40))
    expected = state_of(rb)
    gate = Gate(rb)
    handle = rb.dumps(tmp_path / "saved", blocking=False)
    for k in range(20):
        rb.extend(batch(kind, 100 + 10 * k, 110 + 10 * k))
    after = state_of(rb)
    assert not handle.done()
    gate.opened.set()
    assert handle.result(300) == "g-000001" and handle.progress == 1.0 and handle.rows_left_out == 0
    twin = ReplayBuffer(storage=storage(kind, tmp_path / "twin"))
    twin.loads(tmp_path / "saved")
    assert state_of(twin) == expected and state_of(rb) == after


@pytest.mark.quick
@each("kind", KINDS)
@each("what", ["replace", "empty", "loads"])
def test_rows_replaced_in_place_or_forgotten_meanwhile_are_saved_as_they_were(tmp_path, kind, what):
    rb = ReplayBuffer(storage=storage(kind, tmp_path))
    rb.extend(batch(kind, 500, 520))
    rb.dumps(tmp_path / "other")
    rb.extend(batch(kind, 0, 45 if kind != "environments" else 20))
    expected = state_of(rb)
    gate = Gate(rb)
    handle = rb.dumps(tmp_path / "saved", blocking=False)
    if what == "replace":
        rb[3] = batch(kind, 900, 901)[0] if kind != "environments" else batch(kind, 900, 901)[:, 0]
    elif what == "empty":
        rb.empty()
        rb.extend(batch(kind, 700, 720))
    else:
        rb.loads(tmp_path / "other")
    after = state_of(rb)
    gate.opened.set()
    handle.result(300)
    twin = ReplayBuffer(storage=storage(kind, tmp_path / "twin"))
    twin.loads(tmp_path / "saved")
    assert state_of(twin) == expected and state_of(rb) == after


def test_the_samplers_state_and_the_generator_are_those_of_the_call(tmp_path):
    def make():
        return ReplayBuffer(
            storage=LazyTensorStorage(60),
            sampler=SamplerWithoutReplacement(),
            generator=torch.Generator(),
            batch_size=4,
        )

    rb, twin = make(), make()
    rb.extend(steps(0, 45))
    rb.sample()
    gate = Gate(rb)
    handle = rb.dumps(tmp_path, blocking=False)
    drawn = [numbers(rb.sample()) for _ in range(5)]
    gate.opened.set()
    handle.result(300)
    twin.loads(tmp_path)
    assert [numbers(twin.sample()) for _ in range(5)] == drawn


def test_while_one_saves_another_save_to_that_path_is_an_error(tmp_path):
    rb, other = (ReplayBuffer(storage=LazyTensorStorage(60)) for _ in range(2))
    rb.extend(steps(0, 45))
    other.extend(steps(0, 5))
    gate = Gate(rb)
    handle = rb.dumps(tmp_path, blocking=False)
    for blocking in (True, False):
        with pytest.raises(CheckpointError, match="another save to"):
            other.dumps(tmp_path, blocking=blocking)
    with pytest.raises(CheckpointError, match="is being saved in the background"):
        rb.dumps(tmp_path / "elsewhere", blocking=False)
    gate.opened.set()
    handle.result(300)
    other.dumps(tmp_path)
    rb.dumps(tmp_path, blocking=False).result(300)


@pytest.mark.quick
def test_a_save_that_fails_says_so_and_what_was_saved_stays(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(60))
    rb.extend(steps(0, 45))
    rb.dumps(tmp_path)
    rb.register_save_hook(lambda rows: 1 / 0)
    handle = rb.dumps(tmp_path, blocking=False)
    with pytest.raises(ZeroDivisionError):
        handle.result(300)
    assert handle.done() and "failed" in repr(handle) and verify(tmp_path).ok
    assert not rb.storage.lanes.store.saving


def test_a_failure_is_logged_for_those_who_never_ask(tmp_path, caplog):
    rb = ReplayBuffer(storage=LazyTensorStorage(60))
    rb.extend(steps(0, 45))
    rb.register_save_hook(lambda rows: 1 / 0)
    handle = rb.dumps(tmp_path, blocking=False)
    while not handle.done():
        time.sleep(0.01)
    assert "a save in the background failed: division by zero" in caplog.text


def test_waiting_can_have_an_end(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(60))
    rb.extend(steps(0, 45))
    gate = Gate(rb)
    handle = rb.dumps(tmp_path, blocking=False)
    with pytest.raises(TimeoutError, match=r"after 0\.01 seconds"):
        handle.result(0.01)
    assert 0 <= handle.progress < 1
    gate.opened.set()
    handle.result(300)


def test_an_empty_buffer_can_be_saved(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(60))
    rb.dumps(tmp_path, blocking=False).result(300)
    twin = ReplayBuffer(storage=LazyTensorStorage(60))
    twin.loads(tmp_path)
    assert len(twin) == 0


def test_what_has_not_changed_is_taken_over(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(60))
    rb.extend(steps(0, 45))
    rb.dumps(tmp_path, blocking=False, keep_last=2).result(300)
    rb.extend(steps(45, 50))
    rb.dumps(tmp_path, blocking=False, keep_last=2).result(300)
    links = [p.stat().st_nlink for p in (tmp_path / "g-000002" / "storage").iterdir()]
    assert links.count(2) == 2 and links.count(1) == 1


def test_a_row_changed_before_the_save_and_overwritten_during_it_is_not_taken_over(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(60))
    rb.extend(steps(0, 60))
    rb.dumps(tmp_path)
    rb[3] = steps(777, 778)[0]
    expected = state_of(rb)
    frozen = rb.storage.saved_form.source(background=True)
    rb.extend(steps(100, 110))  # over row 3, before anybody asks what had changed
    checkpointer = rb.storage.checkpointer
    from engram.data.replay_buffers.checkpointers import save_snapshot

    save_snapshot(tmp_path, {}, (checkpointer, frozen))
    frozen.close()
    twin = ReplayBuffer(storage=LazyTensorStorage(60))
    twin.storage.loads(tmp_path)
    assert state_of(twin) == expected


@pytest.mark.parametrize("hooks", [(), (lambda td: td,)], ids=["rows", "through a hook"])
def test_rows_that_another_process_overwrites_are_left_out_and_counted(hooks, monkeypatch, tmp_path):
    context = multiprocessing.get_context("fork")
    rb = ReplayBuffer(storage=LazyTensorStorage(120, shared=True, lanes=2))
    rb.extend(steps(0, 60))
    go, written, again, done = (context.Event() for _ in range(4))

    def child():
        rb.extend(steps(500, 560))
        written.set()
        go.wait(300)
        rb.extend(steps(560, 575))  # over the 15 oldest
        again.set()
        done.wait(300)

    process = context.Process(target=child)
    process.start()
    try:
        assert written.wait(300)
        reached, opened, read_block = threading.Event(), threading.Event(), RowSnapshot.read_block

        def reads_slowly(self, *place):
            reached.set()
            assert opened.wait(300)
            return read_block(self, *place)

        monkeypatch.setattr(RowSnapshot, "read_block", reads_slowly)
        for hook in hooks:
            rb.register_save_hook(hook)
        handle = rb.dumps(tmp_path, blocking=False)
        assert reached.wait(300)
        go.set()
        assert again.wait(300)
        opened.set()
        handle.result(300)
    finally:
        done.set()
        process.join(300)
        process.kill()
    assert 0 < handle.rows_left_out <= 15
    twin = ReplayBuffer(storage=LazyTensorStorage(120, shared=True, lanes=2))
    twin.loads(tmp_path)
    found = numbers(twin[:])
    assert sorted(found) == [*range(handle.rows_left_out, 60), *range(500, 560)]


def test_a_forked_child_is_not_kept_up_by_its_parents_save(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(60))
    rb.extend(steps(0, 45))
    gate = Gate(rb)
    handle = rb.dumps(tmp_path / "mine", blocking=False)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            rb.storage.checkpointer.save_hooks.clear()
            rb.extend(steps(45, 50))
            rb.dumps(tmp_path / "child", blocking=False).result(30)
            status = 0
        finally:
            os._exit(status)
    gate.opened.set()
    handle.result(300)
    assert os.waitpid(pid, 0)[1] == 0
    twin = ReplayBuffer(storage=LazyTensorStorage(60))
    twin.loads(tmp_path / "child")
    assert len(twin) == 50


def test_the_interpreter_ends_after_the_save(tmp_path):
    code = """
        import sys, torch
        from engram.data import ReplayBuffer, LazyTensorStorage
        rb = ReplayBuffer(storage=LazyTensorStorage(200_000))
        rb.extend(torch.arange(200_000 * 20).reshape(-1, 20))
        rb.dumps(sys.argv[1], blocking=False)
    """
    run_program(code, tmp_path).check_returncode()
    twin = ReplayBuffer(storage=LazyTensorStorage(200_000))
    twin.loads(tmp_path)
    assert len(twin) == 200_000


def test_a_buffer_that_is_gone_is_saved_all_the_same(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(60))
    rb.extend(TensorDict({"a": torch.arange(45)}, [45]))
    gate = Gate(rb)
    handle = rb.dumps(tmp_path, blocking=False)
    del rb
    gate.opened.set()
    handle.result(300)
    twin = ReplayBuffer(storage=LazyTensorStorage(60))
    twin.loads(tmp_path)
    assert twin[:]["a"].tolist() == list(range(45))


@pytest.mark.parametrize("saves", [4, pytest.param(60, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["memory", "mapped", "environments"])
def test_saves_beside_a_busy_writer_are_whole(tmp_path, kind, saves):
    capacity = 3000
    rb = ReplayBuffer(storage=storage(kind, tmp_path, capacity))
    stop, at = threading.Event(), [0]

    def write():
        generator = torch.Generator().manual_seed(1)
        while not stop.is_set():
            n = int(torch.randint(1, 200, (), generator=generator))
            rb.extend(batch(kind, at[0], at[0] + n))
            at[0] += n

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(saves):
            rb.dumps(tmp_path / "saved", blocking=False).result(300)
            twin = ReplayBuffer(storage=storage("memory" if kind == "mapped" else kind, tmp_path, capacity))
            twin.loads(tmp_path / "saved")
            if len(twin):
                found = torch.tensor(numbers(twin[:])).flatten().sort().values
                assert torch.equal(found.unique(), found)
                if kind != "environments":
                    assert torch.equal(found, torch.arange(int(found[0]), int(found[0]) + len(found)))
    finally:
        stop.set()
        writer.join()


def blocks(source):
    return [
        source.read_block(i, lane["base"], lane["published"]).tobytes()
        for i, lane in enumerate(source.counters()["lanes"])
    ]


@pytest.mark.parametrize("kind", ["memory", "mapped", "environments", "tensors"])
@pytest.mark.parametrize("what", ["append", "replace", "empty", "loads"])
def test_a_frozen_storage_gives_its_rows_as_they_were(tmp_path, kind, what):
    rb = ReplayBuffer(storage=storage(kind, tmp_path))
    rb.extend(batch(kind, 500, 520))
    rb.dumps(tmp_path / "other")
    rb.extend(batch(kind, 0, 45 if kind != "environments" else 25))
    expected, counters = blocks(rb.storage.saved_form.sink()), rb.storage.saved_form.sink().counters()
    frozen = rb.storage.saved_form.source(background=True)
    if what == "append":
        rb.extend(batch(kind, 800, 820))
    elif what == "replace":
        rb[3] = batch(kind, 900, 901)[0] if kind != "environments" else batch(kind, 900, 901)[:, 0]
    elif what == "empty":
        rb.empty()
        rb.extend(batch(kind, 700, 720))
    else:
        rb.loads(tmp_path / "other")
    assert blocks(frozen) == expected and frozen.counters() == counters and frozen.left_out == 0
    frozen.close()


def test_a_forked_process_does_not_wait_for_a_save_of_its_parent(tmp_path):
    rb = ReplayBuffer(storage=storage("memory", tmp_path), batch_size=4)
    rb.extend(batch("memory", 0, 40))
    gate = Gate(rb)
    handle = rb.dumps(tmp_path / "saved", blocking=False)

    def waits():
        with pytest.raises(CheckpointError, match="forked from"):
            handle.result()
        return handle.done()

    assert Child(waits, 60).result() is True
    gate.opened.set()
    assert handle.result() == "g-000001"
