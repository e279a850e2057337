"""`verify`: every checksum; which file, and which rows."""

import itertools
import multiprocessing
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from cli.support import episodes, store
from contracts.waiting import NEVER
from engram.cli import verification, verify
from engram.data import LazyMemmapStorage, ReplayBuffer
from engram.data.datasets import write_minari, write_parquet
from engram.store.places import LaneCount


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    mode = file.stat().st_mode
    file.chmod(0o644)
    file.write_bytes(content)
    file.chmod(mode)


def test_a_whole_store_is_whole_beside_the_job_that_writes_it(tmp_path):
    rb = store(tmp_path)
    result = verify(tmp_path / "store")
    assert result.ok and result.checked == "300 rows" and not result.damages
    assert result.nbytes == 300 * rb.storage.lanes.store.row_stride
    rb[0] = rb[1]
    rb.extend(episodes(900))
    assert verify(tmp_path / "store").ok and verify(tmp_path / "store").checked == "1,000 rows"


@pytest.mark.parametrize("row", [0, 7, 299])
def test_a_damaged_row_of_a_store_is_named(tmp_path, row):
    rb = store(tmp_path)
    native = rb.storage.lanes.store
    at = native.rows_offset + row * native.row_stride
    rb.storage.close()
    flip(tmp_path / "store" / "rows.engram", at)
    result = verify(tmp_path / "store")
    assert not result.ok and [damage.rows for damage in result.damages] == [f"slot {row}, lane 0"]
    assert result.damages[0].file.endswith("rows.engram")


def test_a_damaged_header_of_a_store_is_named(tmp_path):
    store(tmp_path).storage.close()
    flip(tmp_path / "store" / "rows.engram", 185)
    result = verify(tmp_path / "store")
    assert not result.ok and "checksum" in result.damages[0].reason


def test_a_damaged_file_of_a_checkpoint_is_named_with_its_rows(tmp_path):
    rb = store(tmp_path)
    rb.dumps(tmp_path / "saved", keep_last=2)
    rb.sample()
    rb.dumps(tmp_path / "saved", keep_last=2)
    assert verify(tmp_path / "saved").ok
    file = tmp_path / "saved" / "g-000002" / "storage" / "rows-00000-00000000.bin"
    flip(file, 5)
    result = verify(tmp_path / "saved")
    assert not result.ok
    damage = next(d for d in result.damages if "g-000002" in d.file)
    assert damage.file == str(file) and damage.rows == "steps 0 to 299 of lane 0" and "checksum" in damage.reason


def test_damage_of_an_older_snapshot_leaves_the_current_one_usable(tmp_path):
    rb = store(tmp_path)
    rb.dumps(tmp_path / "saved", keep_last=2)
    rb[0] = rb[1]
    rb.dumps(tmp_path / "saved", keep_last=2)
    flip(tmp_path / "saved" / "g-000001" / "manifest.json", 5)
    result = verify(tmp_path / "saved")
    assert result.ok and result.newest_whole == "g-000002"
    assert "g-000001" in result.damages[0].file


@pytest.mark.parametrize(("write", "name", "file"), [
    (write_parquet, "steps.parquet", "steps.parquet"),
    (write_minari, "dataset", "dataset/data/main_data.hdf5"),
])  # fmt: skip
def test_a_dataset_is_read_to_its_end(tmp_path, write, name, file):
    write(episodes(), tmp_path / name)
    assert verify(tmp_path / name).ok and verify(tmp_path / name).checked == "300 steps read"
    content = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(content[: len(content) // 2])
    assert not verify(tmp_path / name).ok


def test_rows_of_several_environments_are_all_compared(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(40, scratch_dir=tmp_path, ndim=2))
    rb.extend(TensorDict({"x": torch.arange(20).reshape(2, 10)}, [2, 10]))
    native = rb.storage.lanes.store
    at = native.rows_offset + (native.lane_capacity + 3) * native.row_stride  # environment 1, step 3
    rb.storage.close()
    assert verify(tmp_path).checked == "20 rows"
    flip(tmp_path / "rows.engram", at)
    assert verify(tmp_path).damages[0].rows == "slot 7 (environment 1), lane 0"


@contextmanager
def another_process(write, *args):
    """A block beside which another process writes without a pause; it begins when the first rows are stored."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_in_one_thread, args=(write, ready, *args), daemon=True)
    process.start()
    try:
        assert ready.wait(NEVER)
        yield
    finally:
        process.kill()
        process.join()


def _in_one_thread(write, *args):
    torch.set_num_threads(1)  # the threads of OpenMP, if the parent has had some, are not in a forked child
    write(*args)


ROWS, NUMBERS = 64, 1 << 14  # rows of 64 KB: comparing them takes long enough to be met by a writer


def append(ready, folder):
    # Several environments: their rows are compared one environment after the other, so that the writer overtakes.
    rb = ReplayBuffer(storage=LazyMemmapStorage(8 * ROWS, scratch_dir=folder, ndim=2))
    batch = torch.zeros(8, ROWS // 2, NUMBERS // 8)
    while True:
        rb.extend(batch.add_(1))
        if len(rb) == 8 * ROWS:
            ready.set()


def change_in_place(ready, folder):
    rb = ReplayBuffer(storage=LazyMemmapStorage(ROWS, scratch_dir=folder))
    rb.extend(torch.zeros(ROWS, NUMBERS))
    ready.set()
    for value in itertools.count(1):
        rb[value % ROWS] = torch.full((NUMBERS,), float(value))
        if value % 50 == 0:
            time.sleep(0.005)  # a job that never pauses is told so: StorageInUseError


@pytest.mark.parametrize("write", [append, change_in_place])
def test_rows_that_are_overwritten_or_changed_meanwhile_are_no_damage(tmp_path, write):
    with another_process(write, tmp_path):
        results = [verify(tmp_path) for _ in range(60)]
    assert [result.damages for result in results if not result.ok] == []


def test_a_bar_comes_to_its_end_when_all_rows_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(verification, "_ROWS_AT_ONCE", 70)
    store(tmp_path)
    steps = []

    @contextmanager
    def bar(what, total, shown):
        yield steps.append
        assert sum(steps) == total == 300

    monkeypatch.setattr(verification, "progress_bar", bar)
    verify(tmp_path / "store")
    assert len(steps) > 1


def test_every_row_of_every_lane_is_compared_once(tmp_path, monkeypatch):
    monkeypatch.setattr(verification, "_ROWS_AT_ONCE", 7)  # many pieces, in two threads
    rb = store(tmp_path, steps=120, capacity=200, lanes=LaneCount(2))
    rb.extend(episodes(100))  # the first lane has gone round
    native = rb.storage.lanes.store
    at = [native.rows_offset + row * native.row_stride for row in (0, 50, 99, 100, 150, 199)]
    rb.storage.close()
    assert verify(tmp_path / "store").checked == "200 rows"
    for offset in at:
        flip(tmp_path / "store" / "rows.engram", offset)
    rows = [damage.rows for damage in verify(tmp_path / "store").damages]
    # The oldest row lies in slot 20: the damaged rows are named in the order of their age.
    of_second = [f"slot {slot}, lane 1" for slot in (100, 150, 199)]
    assert rows == ["slot 50, lane 0", "slot 99, lane 0", "slot 0, lane 0", *of_second]
