"""Packed rows: saved in chunks keyed by write number, and loaded into rings of numpy."""

from pathlib import Path

import numpy as np
import pytest
import torch

from contracts.checkpointer import CheckpointerContract, RowRings, data_files
from contracts.corruption import Forger
from engram.data import LazyTensorStorage, RandomSampler, ReplayBuffer
from engram.data.replay_buffers.checkpointers import TensorStorageCheckpointer, open_snapshot, rows, save_snapshot
from engram.errors import CheckpointMisfitError, CorruptCheckpointError


class TestTensorStorageCheckpointer(CheckpointerContract):
    def make(self):
        return TensorStorageCheckpointer()

    def make_filled(self, salt=0):
        rings = RowRings(lanes=2, strands=3)
        rings.append(0, 130, salt)
        rings.append(1, 7, salt)
        return rings

    def make_empty(self):
        return RowRings(lanes=2, strands=3)

    def make_misfit(self):
        rings = RowRings(lanes=2, strands=3, row_bytes=8)
        rings.append(0, 5)
        return rings

    @pytest.fixture(params=[None, 500], ids=["one chunk", "chunks of 500 bytes"], autouse=True)
    def chunk_bytes(self, request, monkeypatch):
        if request.param:
            monkeypatch.setattr(rows, "CHUNK_BYTES", request.param)

    def test_bases_origins_and_seams_come_back(self, tmp_path):
        rings = self.make_filled()
        rings.lanes[0].update(base=77, origin=3, seams=[80, 101])
        self.save(tmp_path, rings)
        assert self.load(tmp_path, self.make_empty()).contents() == rings.contents()

    def test_a_store_that_was_written_and_emptied_comes_back(self, tmp_path):
        rings = self.make_filled()
        for lane in rings.lanes:
            lane["base"] = lane["published"]
        self.save(tmp_path, rings)
        assert not data_files(tmp_path)
        assert self.load(tmp_path, self.make_empty()).contents() == rings.contents()

    def test_rows_that_fit_into_another_capacity_come_back(self, tmp_path):
        rings = RowRings(lane_capacity=100)
        rings.append(0, 40)
        self.save(tmp_path, rings)
        assert self.load(tmp_path, RowRings(lane_capacity=64)).contents() == rings.contents()

    def test_size_on_disk_follows_length(self, tmp_path):
        rings = RowRings(lane_capacity=100_000)
        rings.append(0, 50)
        self.save(tmp_path, rings)
        assert sum(file.stat().st_size for file in data_files(tmp_path)) == 50 * rings.row_bytes

    def test_a_sink_that_fails_half_way_is_left_empty(self, tmp_path):
        class Failing(RowRings):
            def write_block(self, lane, start, rows):
                if lane == 1:
                    raise RuntimeError("no more")
                super().write_block(lane, start, rows)

        self.save(tmp_path, self.make_filled())
        store = Failing(lanes=2, strands=3)
        with pytest.raises(RuntimeError, match="no more"):
            self.load(tmp_path, store)
        assert len(store) == 0


def test_unchanged_rows_are_in_the_same_files_in_the_next_save(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 240)
    rings = RowRings(lane_capacity=100)
    contents = []
    for count in (95, 20):
        rings.append(0, count)
        save_snapshot(tmp_path, {}, (TensorStorageCheckpointer(), rings))
        contents.append({file.name: file.read_bytes() for file in data_files(tmp_path)})
    before, after = contents
    unchanged = {name for name, content in after.items() if before.get(name) == content}
    assert unchanged == {f"rows-00000-{chunk:08d}.bin" for chunk in range(1, 9)}


def test_strands_lie_one_after_the_other_in_a_chunk(tmp_path):
    rings = RowRings(strands=2)
    rings.append(0, 10)
    save_snapshot(tmp_path, {}, (TensorStorageCheckpointer(), rings))
    (file,) = data_files(tmp_path)
    on_disk = np.fromfile(file, np.uint8).reshape(2, 10, rings.row_bytes)
    assert np.array_equal(on_disk, rings.memory[0][:, :10])


def test_a_chunk_that_begins_before_the_oldest_row_is_read_from_that_row_on(tmp_path, monkeypatch):
    class LinkingSource(RowRings):
        """Says at first that more rows exist, as a save that links an older chunk does."""

    monkeypatch.setattr(rows, "CHUNK_BYTES", 240)
    rings = LinkingSource(lane_capacity=100)
    rings.append(0, 60)
    whole = TensorStorageCheckpointer()
    plan = whole.plan_save(rings)
    write = plan.write

    def with_a_later_base(writer):
        state = write(writer)
        state["counters"]["lanes"][0]["base"] = 5
        return state

    monkeypatch.setattr(plan, "write", with_a_later_base)
    monkeypatch.setattr(whole, "plan_save", lambda source, previous=None: plan)
    save_snapshot(tmp_path, {}, (whole, rings))
    loaded = RowRings(lane_capacity=100)
    with open_snapshot(tmp_path) as opened:
        opened.load_storage(whole, loaded)
    rings.lanes[0]["base"] = 5
    assert loaded.contents() == rings.contents()
    assert not loaded.memory[0][:, :5].any()


def test_path_is_any_path_like(tmp_path: Path):
    assert save_snapshot(str(tmp_path), {"a": 1}) == "g-000001"
    with open_snapshot(tmp_path) as opened:
        assert dict(opened.components) == {"a": 1}


def test_a_file_that_is_not_as_long_as_its_rows_is_damage(tmp_path):
    saved = ReplayBuffer(storage=LazyTensorStorage(10))
    saved.extend(torch.arange(10))
    saved.dumps(tmp_path)
    forger = Forger(tmp_path)
    (file,) = (forger.snapshot / "storage").glob("rows-*")
    forger.write_file(f"storage/{file.name}", file.read_bytes()[:-8])
    with pytest.raises(CorruptCheckpointError, match=r"rows-.* is not as long as its rows 0 to 10"):
        ReplayBuffer(storage=LazyTensorStorage(10)).loads(tmp_path)


def test_a_save_without_a_storage_says_so_to_one_that_is_to_be_loaded(tmp_path):
    RandomSampler().dumps(tmp_path)
    storage = LazyTensorStorage(5)
    for load in (
        lambda: storage.loads(tmp_path),
        lambda: ReplayBuffer(storage=storage).loads(tmp_path, parts=("storage",)),
    ):
        with pytest.raises(CheckpointMisfitError, match="holds no storage; load the other parts only"):
            load()
