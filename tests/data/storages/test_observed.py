"""An observer sees the rows of a store that others write, believes only what stood still, and is in nobody's way."""

from __future__ import annotations

import copy
import pickle
import subprocess
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.children import Child, Signal
from contracts.programs import run_program
from contracts.waiting import NEVER
from engram import _native
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from engram.errors import StorageError, StorageInUseError
from engram.store import files
from engram.store.steps import Steps
from engram.testing.helpers import numbers, of_numbers, steps

CAPACITY = 64


@pytest.fixture
def job(tmp_path: Path) -> ReplayBuffer:
    """The buffer of the job that writes."""
    rb = ReplayBuffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path))
    rb.extend(steps(0, 20))
    return rb


def observer(folder: Path, **parts: Any) -> ReplayBuffer:
    return ReplayBuffer.open(folder, read_only=True, **parts)


def test_observer_sees_what_the_job_writes(job: ReplayBuffer, tmp_path: Path) -> None:
    rb = observer(tmp_path, batch_size=16)
    for start in range(20, 200, 15):
        job.extend(steps(start, start + 15))
        assert len(rb) == len(job) and rb.write_count == job.write_count
        assert sorted(numbers(rb[:])) == sorted(numbers(job[:]))
        assert set(numbers(rb.sample())) <= set(numbers(job[:]))


@pytest.mark.parametrize("sampler", [SamplerWithoutReplacement, lambda: PrioritizedSampler(CAPACITY, 0.7, 0.9),
                                     lambda: SliceSampler(slice_len=2, end_key="done")])  # fmt: skip
def test_every_sampler_draws_from_it(job: ReplayBuffer, tmp_path: Path, sampler: Any) -> None:
    rb = observer(tmp_path, sampler=sampler(), batch_size=4)
    for _ in range(10):
        assert set(numbers(rb.sample())) <= set(range(20))


def test_the_job_may_do_what_needs_the_store_alone(job: ReplayBuffer, tmp_path: Path) -> None:
    rb = observer(tmp_path)
    job[0] = of_numbers(torch.tensor(700))
    assert numbers(rb[0:1]) == [700]
    job.dumps(tmp_path / "saved")
    job.empty()
    assert len(rb) == 0
    job.loads(tmp_path / "saved")
    assert numbers(rb[0:1]) == [700] and len(rb) == 20


def test_observer_writes_nothing(job: ReplayBuffer, tmp_path: Path) -> None:
    rb = observer(tmp_path, batch_size=2)
    job.dumps(tmp_path / "saved")
    before = (tmp_path / files.FILE_NAME).read_bytes()
    for write in (
        lambda: rb.extend(steps(0, 2)), lambda: rb.add(steps(0, 1)[0]), lambda: rb.__setitem__(0, steps(0, 1)[0]),
        rb.empty, lambda: rb.loads(tmp_path / "saved"), lambda: rb.storage.lanes.hold(),
        lambda: rb.storage.set(0, steps(0, 1)[0]), lambda: rb.dumps(tmp_path / "saved", blocking=False),
        lambda: rb.extend(torch.zeros(2, 3)), lambda: rb.storage.overwrite(torch.tensor([0]), steps(0, 1)),
    ):  # fmt: skip
        with pytest.raises(StorageError, match="read_only"):
            write()
    rb.sample()
    rb.storage.flush()
    rb.storage.release()
    rb.storage[0:2]["number"] = torch.zeros(2, dtype=torch.int64)  # a copy
    rb.storage.close()
    assert (tmp_path / files.FILE_NAME).read_bytes() == before


def test_no_native_call_writes_to_its_map(job: ReplayBuffer, tmp_path: Path) -> None:
    store = observer(tmp_path).storage.lanes.store
    _, plan = job.storage._held_table.rows.plan(Steps(steps(0, 1)))
    for write in (
        lambda: store.append(0, plan), lambda: store.overwrite(torch.tensor([0]), plan), store.repair, store.recover,
        lambda: _native.testing.claim(store, 0, 1), lambda: _native.testing.publish(store, 0, 20, 1),
        lambda: store.raise_term(0), store.sync_header,
        lambda: store.mark_durable([0]), lambda: store.empty(True), store.begin_restore, store.end_restore,
        lambda: store.restore_lane(0, 0, 0, 0), lambda: store.set_seams(0, 0, 1, []), store.finish_interrupted,
        lambda: setattr(store, "clean", True), lambda: setattr(store, "boot_id", bytes(16)),
        lambda: setattr(store, "replaced", 1), lambda: store.note_edits(torch.tensor([0])),
        lambda: store.reserve_sequences(1), lambda: store.count_replaced(torch.tensor([0])),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="observed"):
            write()
    with pytest.raises(ValueError, match="read-only"):
        store.memory()[0] = 1


def test_observer_reads_a_read_only_file(job: ReplayBuffer, tmp_path: Path) -> None:
    job.storage.close()
    mount = tmp_path.parent / f"{tmp_path.name}-read-only"
    mount.mkdir()
    made = subprocess.run(["mount", "--bind", tmp_path, mount], capture_output=True)
    if made.returncode:
        pytest.skip("this process may not mount")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", mount], check=True)
        with pytest.raises(StorageError, match="read_only"):
            ReplayBuffer.open(mount)
        assert numbers(observer(mount)[:]) == list(range(20))
    finally:
        subprocess.run(["umount", mount], check=True)


@pytest.mark.parametrize("kind", ["replaced", "emptied", "loaded"])
def test_beside_a_job_that_changes_rows_it_sees_one_state_or_says_so(tmp_path: Path, kind: str) -> None:
    """Each version of the rows has one number in all of them."""
    folder, n = tmp_path / "store", 40
    started = Signal()

    def version(v: int) -> Any:
        return {"v": torch.full((n, 50), v), "next": {"done": torch.zeros(n, dtype=torch.bool)}}

    def change() -> None:
        job = ReplayBuffer(storage=LazyMemmapStorage(n, scratch_dir=folder))
        job.extend(version(0))
        states = []
        for v in range(3):
            other = ReplayBuffer(storage=LazyTensorStorage(n))
            other.extend(version(v))
            states.append(other.state_dict()["storage"])
        started.send()
        v = 0
        while True:
            time.sleep(0.002)
            v += 1
            if kind == "replaced":
                job[:] = version(v)
            elif kind == "emptied":
                job.empty()
                job.extend(version(v))
            else:
                job.storage.load_state_dict(states[v % 3])

    child = Child(change)
    started.wait()
    rb, seen, reads, until = observer(folder, batch_size=64), set(), 0, time.monotonic() + NEVER
    try:
        while reads < 300 or (len(seen) < 2 and time.monotonic() < until):
            reads += 1
            try:
                found = rb[:]["v"] if kind != "replaced" else rb.sample()["v"]
            except (StorageInUseError, RuntimeError, IndexError) as error:
                assert isinstance(error, StorageInUseError) or "empty" in str(error) or "written" in str(error), error
                continue
            if len(found):
                assert kind != "emptied" or len(found) <= n
                assert (found == found[:, :1]).all(), "a torn row"
                assert kind != "loaded" or len(found.unique()) == 1, "rows of two states"
                seen.add(int(found[0, 0]))
    finally:
        child.kill()
    assert len(seen) > 1


def test_a_store_that_a_process_left_in_the_middle_of_a_change_is_refused(job: ReplayBuffer, tmp_path: Path) -> None:
    job.storage.close()
    path = tmp_path / files.FILE_NAME
    image = bytearray(path.read_bytes())
    for at in (512, 576):  # incarnation, edits
        odd = bytearray(image)
        odd[at] |= 1
        path.write_bytes(odd)
        with pytest.raises(StorageError, match=r"died in the middle.*once for writing"):
            observer(tmp_path)
    ReplayBuffer.open(tmp_path).storage.close()
    assert len(observer(tmp_path)) in (0, 20)


@pytest.mark.parametrize("at", [512, 576])  # incarnation, edits
def test_no_batch_is_of_a_moment_in_which_rows_are_being_replaced(
    job: ReplayBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr("engram.store.places._READ_TRIES", 3)
    rb = observer(tmp_path, batch_size=4)
    rb.sample()
    with open(tmp_path / files.FILE_NAME, "r+b") as file:
        file.seek(at)
        before = file.read(1)
        file.seek(at)
        file.write(bytes([before[0] | 1]))  # as a job that is in the middle of it has it
        file.flush()
        with pytest.raises(StorageInUseError):
            rb.sample()
        file.seek(at)
        file.write(bytes([(before[0] | 1) + 1]))
    assert set(numbers(rb.sample())) <= set(range(20))


def test_a_store_whose_machine_stopped_is_refused(job: ReplayBuffer, tmp_path: Path) -> None:
    job.storage.lanes.store.boot_id = b"another machine!"
    job.storage.lanes.locks.close()
    with pytest.raises(StorageError, match=r"machine stopped.*once for writing"):
        observer(tmp_path)
    ReplayBuffer.open(tmp_path).storage.close()
    assert numbers(observer(tmp_path)[:]) == list(range(20))


def test_observer_saves_the_rows_it_sees(job: ReplayBuffer, tmp_path: Path) -> None:
    rb = observer(tmp_path)
    rb.dumps(tmp_path / "saved")
    twin = ReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    twin.loads(tmp_path / "saved")
    assert numbers(twin[:]) == numbers(job[:])


def test_a_save_during_which_rows_were_changed_fails(job: ReplayBuffer, tmp_path: Path) -> None:
    rb = observer(tmp_path)
    source = rb.storage.saved_form.source(background=False)
    source.read_block(0, 0, 5)
    job[3] = of_numbers(torch.tensor(99))
    with pytest.raises(StorageInUseError, match="while they were saved"):
        source.read_block(0, 5, 10)


def test_what_is_sent_to_another_process_observes_there(job: ReplayBuffer, tmp_path: Path) -> None:
    rb = observer(tmp_path, batch_size=4)
    for twin in (pickle.loads(pickle.dumps(rb)), copy.deepcopy(rb), pickle.loads(ForkingPickler.dumps(rb))):
        assert twin.storage.read_only and numbers(twin[:]) == list(range(20))


def test_there_must_be_a_store(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no store"):
        observer(tmp_path)
    with pytest.raises(StorageError, match="no store"):
        observer(tmp_path / "nowhere")


def test_a_tensordict_buffer_attaches_the_index(job: ReplayBuffer, tmp_path: Path) -> None:
    rb = TensorDictReplayBuffer.open(tmp_path, read_only=True, batch_size=8)
    batch = rb.sample()
    assert numbers(rb[batch["index"]]) == numbers(batch)


@pytest.mark.deep
def test_observer_takes_no_lock(job: ReplayBuffer, tmp_path: Path) -> None:
    rb = observer(tmp_path)
    code = "from engram.data import ReplayBuffer; import sys; ReplayBuffer.open(sys.argv[1]).empty()"
    job.storage.close()
    run_program(code, tmp_path).check_returncode()
    assert len(rb) == 0
