"""Flat, nested and HDF5: episode data without the second copy of the observations, byte for byte what was saved."""

import os
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as s
from tensordict import TensorDict

from contracts.checkpointer import CheckpointerContract, RowRings, data_files
from contracts.corruption import forge_file, forge_state
from contracts.each import each
from contracts.ted_rings import TedRings, ted_steps
from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from engram.data.replay_buffers.checkpointers import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    NestedStorageCheckpointer,
    TensorStorageCheckpointer,
    open_snapshot,
    rows,
    save_snapshot,
)
from engram.data.replay_buffers.utils import Flat2TED, TED2Flat
from engram.errors import CheckpointError, CorruptCheckpointError

COMPRESSED = {"compression": "gzip", "shuffle": True, "fletcher32": True}
MAKERS = {
    "flat": FlatStorageCheckpointer,
    "nested": NestedStorageCheckpointer,
    "h5": H5StorageCheckpointer,
    "h5 compressed": lambda: H5StorageCheckpointer(h5_kwargs=COMPRESSED),
    "h5 groups": lambda: H5StorageCheckpointer(group_per_trajectory=True),
}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
chunked = pytest.mark.parametrize("make", [FlatStorageCheckpointer, NestedStorageCheckpointer], ids=["flat", "nested"])


class TedContract(CheckpointerContract):
    length = 10.0
    strands = 3

    @pytest.fixture(autouse=True)
    def chunks(self, monkeypatch):
        monkeypatch.setattr(rows, "CHUNK_BYTES", 8000)  # about a third of a lane

    def make_filled(self, salt=0):
        rings = TedRings(lanes=2, strands=self.strands, exceptions=0.1, length=self.length)
        rings.append(0, 130, salt)
        rings.append(1, 7, salt)
        return rings

    def make_empty(self):
        return TedRings(lanes=2, strands=self.strands)

    def make_misfit(self):
        rings = RowRings(lanes=2, strands=self.strands, row_bytes=8)
        rings.append(0, 5)
        return rings


class TestFlat(TedContract):
    def make(self):
        return FlatStorageCheckpointer()


class TestNested(TedContract):
    def make(self):
        return NestedStorageCheckpointer()


class TestH5(TedContract):
    strands = 2  # a dataset is slow to make

    def make(self):
        return H5StorageCheckpointer()


class TestH5GroupPerTrajectory(TedContract):
    length = 40.0
    strands = 1

    def make(self):
        return H5StorageCheckpointer(group_per_trajectory=True)


def round_trip(checkpointer, rings, like):
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as path:
        save_snapshot(path, {}, (checkpointer, rings))
        with open_snapshot(path) as opened:
            opened.load_storage(checkpointer, like)
    return like


@given(
    kind=s.sampled_from(["rows", *MAKERS]),
    counts=s.lists(s.integers(0, 50), min_size=1, max_size=2),
    strands=s.integers(1, 3),
    capacity=s.integers(1, 25),
    exceptions=s.sampled_from([0.0, 0.1, 1.0]),
    length=s.sampled_from([1.0, 4.0, 1000.0]),
    base=s.integers(0, 20),
    chunk_bytes=s.sampled_from([200, 2000, 1 << 24]),
)
@settings(max_examples=24, deadline=None)
def test_rings_of_any_state_come_back(kind, counts, strands, capacity, exceptions, length, base, chunk_bytes):
    make = TensorStorageCheckpointer if kind == "rows" else MAKERS[kind]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "CHUNK_BYTES", chunk_bytes)
        rings = TedRings(capacity, len(counts), strands, exceptions, length)
        for lane, count in enumerate(counts):
            rings.append(lane, count // 2)
            rings.lanes[lane]["seams"] = [count // 2]  # another process took the lane over
            rings.append(lane, count - count // 2)
            rings.lanes[lane]["base"] = min(base, count)
        assert round_trip(make(), rings, TedRings(capacity, len(counts), strands)).contents() == rings.contents()


@makers
def test_a_step_of_nothing_but_empty_keys_comes_back(make, tmp_path):
    rb, twin = (ReplayBuffer(storage=LazyTensorStorage(5, checkpointer=make())) for _ in range(2))
    rb.extend(TensorDict({"x": torch.zeros(7, 0), "next": {"x": torch.zeros(7, 0)}}, [7]))
    rb.dumps(tmp_path)
    twin.loads(tmp_path)
    assert len(twin) == 5 and twin.write_count == 7 and twin[:]["next", "x"].shape == (5, 0)


@makers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.uint16, torch.bool], ids=str)
def test_dtypes_that_numpy_or_hdf5_do_not_know_come_back(make, dtype, tmp_path):
    bits = torch.arange(24, dtype=torch.uint8).reshape(6, 4) % 2
    x = bits.bool() if dtype == torch.bool else bits.view(dtype) if dtype.itemsize <= 4 else bits.float().to(dtype)
    rb, twin = (ReplayBuffer(storage=LazyTensorStorage(6, checkpointer=make())) for _ in range(2))
    rb.extend(TensorDict({"x": x, "next": {"x": x.view(torch.uint8).roll(-1, 0).view(dtype)}}, [6]))
    rb.dumps(tmp_path)
    twin.loads(tmp_path)
    assert torch.equal(twin[:]["x"].view(torch.uint8), x.view(torch.uint8))


@makers
def test_names_that_hdf5_cannot_have_come_back(make, tmp_path):
    keys = {"a/b": 1, "%2F": 2, ".": 3, "..": 4, "with space": 5, "\u00e9": 6, "steps": 7}
    td = TensorDict({"next": {k: torch.full((4,), v) for k, v in keys.items()}}, [4])
    td.update({k: torch.full((4,), v) for k, v in keys.items()})
    rb, twin = (ReplayBuffer(storage=LazyTensorStorage(4, checkpointer=make())) for _ in range(2))
    rb.extend(td)
    rb.dumps(tmp_path)
    twin.loads(tmp_path)
    assert (twin[:] == td).all()


@makers
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_another_capacity_will_do_if_the_rows_fit(make, storage, tmp_path):
    data = ted_steps(130).exclude("empty")
    rb = ReplayBuffer(storage=storage(50, checkpointer=make()))
    rb.extend(data)
    rb.dumps(tmp_path)
    larger = ReplayBuffer(storage=storage(60, checkpointer=make()))
    larger.loads(tmp_path)
    assert len(larger) == 50
    n = larger[:]["action"].tolist()
    assert n == data[-50:]["action"].tolist()
    smaller = ReplayBuffer(storage=storage(40, checkpointer=make()))
    with pytest.raises(ValueError, match="room for 40 steps"):
        smaller.loads(tmp_path)


@makers
def test_several_done_flags_in_a_step_are_refused_by_name_and_nothing_is_saved(make, tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(4, checkpointer=make()))
    rb.extend(TensorDict({"x": torch.zeros(4), "next": {"x": torch.zeros(4), "done": torch.zeros(4, 3, 1)}}, [4]))
    with pytest.raises(ValueError, match=r"\('next', 'done'\) has the shape \[3, 1\].*several agents"):
        rb.dumps(tmp_path)
    assert not list(tmp_path.glob("g-*"))


@chunked
def test_keys_that_the_saver_names_are_known_to_the_loader(make, tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(30, checkpointer=make(done_keys=("over",), reward_keys=("gain",))))
    td = TensorDict({k: torch.rand(30, 1) for k in ("over", "gain", "reward")}, [30])
    rb.extend(td.set("next", td.roll(-1, 0) if hasattr(td, "roll") else td.clone()))
    rb.dumps(tmp_path)
    twin = ReplayBuffer(storage=LazyTensorStorage(30, checkpointer=make()))
    twin.loads(tmp_path)
    assert (twin[:] == rb[:]).all()


@makers
@pytest.mark.parametrize("lanes, strands", [(1, 1), (1, 3), (2, 2)])
def test_hooks_get_all_steps_and_are_undone(make, lanes, strands, tmp_path):
    rings = TedRings(exceptions=0.1, lanes=lanes, strands=strands)
    for lane in range(lanes):
        rings.append(lane, 60 + 70 * lane)
    one, other, seen = make(), make(), []
    one.register_save_hook(lambda td: seen.append(td) or td)
    one.register_save_hook(TED2Flat())
    other.register_load_hook(Flat2TED())
    save_snapshot(tmp_path, {}, (one, rings))
    assert [td.batch_size for td in seen] == [(strands, 60 + 100 * (lanes - 1))]
    loaded = TedRings(lanes=lanes, strands=strands)
    with open_snapshot(tmp_path) as opened:
        opened.load_storage(other, loaded)
    assert loaded.contents() == rings.contents()


@chunked
def test_the_next_save_takes_over_the_chunks_that_have_not_changed(make, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 2000)
    rings = TedRings()
    inodes = []
    for count in (95, 20):
        rings.append(0, count)
        save_snapshot(tmp_path, {}, (make(), rings), keep_last=2)
        newest = max(tmp_path.glob("g-*"))
        inodes.append({file.name: file.stat().st_ino for file in newest.glob("storage/*")})
    same = {name for name in inodes[0] if inodes[0][name] == inodes[1].get(name)}
    assert len(same) >= len(inodes[0]) - 3
    loaded = TedRings()
    with open_snapshot(tmp_path) as opened:
        opened.load_storage(make(), loaded)
    assert loaded.contents() == rings.contents()


class OverwrittenRings(TedRings):
    """Rows that other processes overwrite before they are read: after the first block the oldest are gone."""

    def read_block(self, lane, start, stop):
        rows = super().read_block(lane, start, stop)
        self.lanes[0]["base"] = self.lanes[0]["published"] - 40
        return rows


@makers
def test_rows_that_were_overwritten_before_they_were_read_are_left_out(make, monkeypatch):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 2000)
    rings = OverwrittenRings(exceptions=0.1)
    rings.append(0, 130)
    loaded = round_trip(make(), rings, TedRings())
    assert len(loaded) == 40 and loaded.contents() == rings.contents()


@makers
def test_saves_in_the_background_hold_what_was_there_when_they_began(make, tmp_path):
    rb, twin = (ReplayBuffer(storage=LazyTensorStorage(50, checkpointer=make())) for _ in range(2))
    rb.extend(ted_steps(70, length=30.0).exclude("empty"))
    before = rb[:]
    handle = rb.dumps(tmp_path, blocking=False)
    rb.extend(ted_steps(20, salt=1).exclude("empty"))
    handle.result()
    twin.loads(tmp_path)
    names = before.keys(include_nested=True, leaves_only=True)
    assert all(twin[:][k].numpy().tobytes() == before[k].numpy().tobytes() for k in names) and len(twin) == 50


def test_loading_with_another_checkpointer_names_the_one_that_saved(tmp_path):
    rb, twin = (ReplayBuffer(storage=LazyTensorStorage(50)) for _ in range(2))
    rb.extend(few_rows())
    rb.storage.checkpointer = NestedStorageCheckpointer()
    rb.dumps(tmp_path)
    with pytest.raises(CheckpointError, match=r"saved as 'nested'.*use the checkpointer that saved it"):
        twin.loads(tmp_path)
    twin.storage.checkpointer = NestedStorageCheckpointer(done_keys=("over",))
    twin.loads(tmp_path)
    assert (twin[:] == few_rows()).all()


@pytest.mark.parametrize(
    "make",
    [pytest.param(MAKERS[name], marks=[pytest.mark.long] * name.startswith("h5"), id=name) for name in MAKERS],
)
def test_memory_does_not_grow_with_the_data(make, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 1 << 20)
    rings, loaded = TedRings(250_000, length=30_000.0), TedRings(250_000)
    rings.append(0, 250_000)
    for work in ("save", "load"):
        tracemalloc.start()
        if work == "save":
            save_snapshot(tmp_path, {}, (make(), rings))
        else:
            with open_snapshot(tmp_path) as opened:
                opened.load_storage(make(), loaded)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < rings.memory.nbytes // 2, work
    assert loaded.contents() == rings.contents()


# ---- sizes ----
def cartpole(n):
    """Rows as those of CartPole, with trajectories as long as a random policy's."""
    td = ted_steps(n, length=22.0)
    obs = torch.randn(n + 1, 4)
    first = obs[:-1].clone()
    first[1:][td["next", "done"][:-1, 0]] = 0.0
    flags = {k: td[k] for k in ("done", "terminated", "truncated")}
    root = {"observation": first, "action": torch.nn.functional.one_hot(torch.randint(0, 2, (n,)), 2), **flags}
    after = {"observation": obs[1:].clone(), **{k: td["next", k] for k in (*flags, "reward")}}
    return TensorDict({**root, "collector": {"traj_ids": td["collector", "traj_ids"]}, "next": after}, [n])


def pixels(n):
    """Rows as those of an environment whose observations are images of 84 x 84."""
    td = cartpole(n)
    obs = torch.randint(0, 256, (n + 1, 84, 84), dtype=torch.uint8)
    first = obs[:-1].clone()
    first[1:][td["next", "done"][:-1, 0]] = 0
    td["observation"], td["next", "observation"] = first, obs[1:].clone()
    return td


def saved_bytes(data, checkpointer, path) -> int:
    """The size of a checkpoint, after it was loaded and found equal."""
    rb, twin = (ReplayBuffer(storage=LazyTensorStorage(len(data), checkpointer=checkpointer)) for _ in range(2))
    rb.extend(data)
    rb.dumps(path)
    twin.loads(path)
    assert (twin[:] == rb[:]).all()
    return sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())


@each(("rows", "n", "most"), [(cartpole, 20_000, 0.65), (pixels, 200, 0.55)])
@each("make", [FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer])
def test_the_second_copy_of_the_observations_is_not_on_disk(rows, n, most, make, tmp_path):
    torch.manual_seed(0)
    data = rows(n)
    whole = saved_bytes(data, TensorStorageCheckpointer(), tmp_path / "whole")
    once = saved_bytes(data, make(), tmp_path / "once")
    assert once <= most * whole
    data["next", "observation"][torch.randperm(n)[: max(1, n // 1000)]] = 7
    assert saved_bytes(data, make(), tmp_path / "broken") <= 1.01 * once


# ---- what lies in the files ----
def test_flat_files_hold_what_the_description_of_the_format_says(tmp_path):
    x = torch.arange(6, dtype=torch.int32)
    data = TensorDict({"x": x[:5], "c": torch.ones(5, dtype=torch.uint8), "next": {"x": x[1:].clone()}}, [5])
    data["next", "x"][1] = 9
    rb = ReplayBuffer(storage=LazyTensorStorage(5, checkpointer=FlatStorageCheckpointer()))
    rb.extend(data)
    rb.dumps(tmp_path)
    paths = [leaf.path for leaf in rb.storage.layout.leaves]
    assert paths == [("x",), ("c",), ("next", "x")]
    (file,) = data_files(tmp_path)
    expected = np.array([0, 1, 2, 3, 4], "<i4").tobytes()
    expected += b"\1" * 5  # no longer than where it changes: a position of 4 bytes and a value
    expected += np.array([1, 4], "<u4").tobytes() + np.array([9, 5], "<i4").tobytes()
    assert file.read_bytes() == expected


def test_nested_files_hold_trajectories_with_one_observation_more(tmp_path):
    x = torch.arange(6, dtype=torch.int32)
    done = torch.tensor([0, 1, 0, 0, 0]).bool().reshape(5, 1)
    data = TensorDict({"x": x[:5], "next": {"x": x[1:].clone(), "done": done}}, [5])
    data["next", "x"][:2] = torch.tensor([8, 9])
    rb = ReplayBuffer(storage=LazyTensorStorage(5, checkpointer=NestedStorageCheckpointer()))
    rb.extend(data)
    rb.dumps(tmp_path)
    assert [leaf.path for leaf in rb.storage.layout.leaves] == [("x",), ("next", "x"), ("next", "done")]
    (file,) = data_files(tmp_path)
    expected = np.array([1, 4], "<u4").tobytes() + np.array([0, 1, 9, 2, 3, 4, 5], "<i4").tobytes()
    expected += np.array([0], "<u4").tobytes() + np.array([8], "<i4").tobytes()
    assert file.read_bytes() == expected + bytes([0, 1, 0, 0, 0])


def test_a_trajectory_ends_at_a_seam(tmp_path):
    rings = TedRings(length=1e9)
    rings.append(0, 20)
    rings.lanes[0]["seams"] = [13]
    rings.memory[:] = 0  # nothing in the rows says it
    save_snapshot(tmp_path, {}, (NestedStorageCheckpointer(), rings))
    (file,) = data_files(tmp_path)
    assert np.fromfile(file, "<u4", 2).tolist() == [12, 19]


# ---- files made to deceive ----
def few_rows():
    """Five steps of which the last has the only exception; `c` is stored where it changes."""
    x = torch.arange(6, dtype=torch.int32)
    return TensorDict({"x": x[:5].clone(), "c": torch.ones(5, 2, dtype=torch.int64), "next": {"x": x[1:].clone()}}, [5])


def save_few(path, make):
    rb = ReplayBuffer(storage=LazyTensorStorage(5, checkpointer=make()))
    rb.extend(few_rows())
    rb.dumps(path)
    assert [leaf.path for leaf in rb.storage.layout.leaves] == [("x",), ("c",), ("next", "x")]
    (file,) = data_files(path)
    return file


@chunked
def test_positions_that_cannot_be_are_refused_by_name_and_change_nothing(make, tmp_path):
    file = save_few(tmp_path, make)
    whole = file.read_bytes()
    sections = np.frombuffer(whole, "<u4")
    # flat: x [5], c (a position, two words twice), next x (a position, a value); nested: ends [1], x [6], c
    start_of_c, last = (5, 10) if make is FlatStorageCheckpointer else (7, 0)
    assert sections[start_of_c] == 0 and sections[last] == 4
    for place, value in ((start_of_c, 1), (start_of_c, 5), (last, 3), (last, 5), (last, 1 << 31)):
        changed = sections.copy()
        changed[place] = value
        forge_file(tmp_path, file, changed.tobytes())
        for fill in (False, True):
            rb = ReplayBuffer(storage=LazyTensorStorage(5, checkpointer=make()))
            if fill:
                rb.extend(few_rows().apply(lambda x: x * 3))
            before = rb[:] if fill else None
            with pytest.raises(CorruptCheckpointError, match=file.name):
                rb.loads(tmp_path)
            assert len(rb) == (5 if fill else 0)
            assert not fill or (rb[:] == before).all()
    forge_file(tmp_path, file, whole)
    rb.loads(tmp_path)
    assert (rb[:] == few_rows()).all()


@chunked
def test_two_steps_of_which_one_is_not_described_are_refused(make, tmp_path):
    """Where numpy would repeat the other one."""
    rb = ReplayBuffer(storage=LazyTensorStorage(2, checkpointer=make()))
    rb.extend(few_rows()[:2])
    rb.dumps(tmp_path)
    (file,) = data_files(tmp_path)
    whole = np.frombuffer(file.read_bytes(), "<u4")
    # flat: x [2], c (a position, two words twice); nested: ends [1], x [3], c
    for place, value in [(2, 1)] if make is FlatStorageCheckpointer else [(0, 0), (4, 1)]:
        changed = whole.copy()
        assert changed[place] == 1 - value
        changed[place] = value
        forge_file(tmp_path, file, changed.tobytes())
        with pytest.raises(CorruptCheckpointError, match=file.name):
            ReplayBuffer(storage=LazyTensorStorage(2, checkpointer=make())).loads(tmp_path)


@chunked
@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d.pop("shared"),
        lambda d: d.update(shared=[[2, 7]]),
        lambda d: d.update(shared=[[2, 1]]),
        lambda d: d.update(shared=[[2, 0], [1, 0]]),
        lambda d: d["chunks"][0].pop(),
        lambda d: d["chunks"][0].__setitem__(-1, -1),
        lambda d: d["chunks"][0].__setitem__(-1, 6),
        lambda d: d["chunks"][0].__setitem__(-2, "x"),
        lambda d: d["chunks"][0].__setitem__(3, 1 << 50),
        lambda d: d.update(rows_per_chunk=1),
    ],
)
def test_a_forged_description_is_refused(make, edit, tmp_path):
    save_few(tmp_path, make)
    forge_state(tmp_path, edit)
    rb = ReplayBuffer(storage=LazyTensorStorage(5, checkpointer=make()))
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json"):
        rb.loads(tmp_path)
    assert len(rb) == 0


@chunked
def test_a_few_bytes_cannot_stand_for_more_rows_than_a_chunk_has(make, tmp_path):
    """Constant keys alone: the file would be as long with any number of rows."""
    rings = ReplayBuffer(storage=LazyTensorStorage(1 << 12, checkpointer=make()))
    rings.extend(TensorDict({"c": torch.zeros(1 << 12, 1)}, [1 << 12]))
    rings.dumps(tmp_path)

    def many(state):
        state["rows_per_chunk"] = state["chunks"][0][3] = 1 << 40
        state["counters"]["lane_capacity"] = state["counters"]["lanes"][0]["published"] = 1 << 40

    forge_state(tmp_path, many)
    with pytest.raises(CorruptCheckpointError, match="cannot hold rows"):
        ReplayBuffer(storage=LazyTensorStorage(1 << 12, checkpointer=make())).loads(tmp_path)
