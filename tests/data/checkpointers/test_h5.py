"""HDF5 files: what other tools find in them, and that files made to deceive are refused."""

import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from contracts.checkpointer import data_files
from contracts.corruption import forge_file, forge_state
from contracts.each import each
from contracts.ted_rings import TedRings
from engram import _hdf5 as h5
from engram.data import LazyTensorStorage, ReplayBuffer
from engram.data.replay_buffers.checkpointers import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    open_snapshot,
    rows,
    save_snapshot,
)
from engram.errors import CheckpointError, CorruptCheckpointError


def filled(n=200, **options):
    rings = TedRings(n, **options)
    rings.append(0, n)
    return rings


def load(path, store):
    with open_snapshot(path) as opened:
        opened.load_storage(H5StorageCheckpointer(), store)
    return store


def forged(path, edit):
    """Changes the HDF5 file of a checkpoint and every hash that covers it."""
    (file,) = data_files(path)
    file.chmod(0o644)
    with h5py.File(file, "r+") as opened:
        edit(opened)
    forge_file(path, file, file.read_bytes())
    return file


def test_any_tool_finds_a_dataset_for_each_key_and_what_explains_it(tmp_path):
    x, done = torch.arange(6.0), torch.tensor([0, 1, 0, 0, 0]).bool().reshape(5, 1)
    rb = ReplayBuffer(storage=LazyTensorStorage(5, checkpointer=H5StorageCheckpointer(checkpoint_file="steps.h5")))
    rb.extend(TensorDict({"x": x[:5], "next": {"x": x[1:], "done": done}}, [5]))
    rb.dumps(tmp_path)
    with h5py.File(tmp_path / "g-000001" / "storage" / "steps.h5") as file:
        assert file.attrs["format"] == "engram steps" and file.attrs["version"] == 1
        assert "trajectory_starts" in file.attrs["description"]
        lane = file["lane_0"]
        assert dict(lane.attrs) == {"first_sequence": 0, "steps": 5, "envs": 1}
        assert lane["trajectory_starts"][:].tolist() == [0, 2]
        assert lane["steps/x"][:].tolist() == [0, 1, 2, 3, 4] and lane["steps/x"].dtype == np.float32
        assert dict(lane["steps/x"].attrs) == {"key": '["x"]', "dtype": "float32", "stored": "values"}
        assert lane["steps/next/done"][:].tolist() == done.tolist()
        copy = lane["steps/next/x"]
        assert copy.attrs["stored"] == "exceptions" and '["x"] one step later' in copy.attrs["meaning"]
        assert (copy["row"][:].tolist(), copy["value"][:].tolist()) == ([4], [5.0])


def steps_like_cartpole(n):
    """4 float32 of a motion in small steps, 2 actions, a reward of 1, episodes of 25."""
    torch.manual_seed(0)
    obs = torch.randn(n + 1, 4).cumsum(0) * 0.02
    end = (torch.arange(n) % 25 == 24).unsqueeze(1)
    after = {"observation": obs[1:], "reward": torch.ones(n, 1), "done": end, "terminated": end}
    return TensorDict({"observation": obs[:-1], "action": torch.randint(2, (n,)), "next": TensorDict(after, [n])}, [n])


def test_default_file_is_compressed_and_smaller_than_the_flat_form(tmp_path):
    n, sizes = 20_000, {}
    steps = steps_like_cartpole(n)
    checkpointers = {
        "default": H5StorageCheckpointer(),
        "plain": H5StorageCheckpointer(h5_kwargs={}),
        "flat": FlatStorageCheckpointer(),
    }
    for name, checkpointer in checkpointers.items():
        rb = ReplayBuffer(storage=LazyTensorStorage(n, checkpointer=checkpointer))
        rb.extend(steps)
        rb.dumps(tmp_path / name)
        sizes[name] = sum(file.stat().st_size for file in data_files(tmp_path / name))
    with h5py.File(data_files(tmp_path / "default")[0]) as file:
        dataset = file["lane_0/steps/observation"]
        assert (dataset.compression, dataset.shuffle) == ("gzip", True)
    assert sizes["default"] < sizes["flat"] < sizes["plain"], sizes


def test_a_group_per_trajectory_has_one_observation_more_than_steps(tmp_path):
    x, done = torch.arange(6.0), torch.tensor([0, 1, 0, 0, 0]).bool().reshape(5, 1)
    checkpointer = H5StorageCheckpointer(group_per_trajectory=True)
    rb = ReplayBuffer(storage=LazyTensorStorage(5, checkpointer=checkpointer))
    rb.extend(TensorDict({"x": x[:5], "next": {"x": x[1:], "done": done}}, [5]))
    rb.dumps(tmp_path)
    (name,) = data_files(tmp_path)
    with h5py.File(name) as file:
        lane = file["lane_0"]
        assert lane["trajectory_00000000/x"][:].tolist() == [0, 1, 2]
        assert lane["trajectory_00000001/x"][:].tolist() == [2, 3, 4, 5]
        assert lane["trajectory_00000001/next/done"][:].tolist() == [[False]] * 3
        assert dict(lane["trajectory_00000001"].attrs) == {"first_step": 2, "env": 0, "steps": 3}
        assert lane["exceptions/next/x/row"].shape == (0,)


def test_trajectory_starts_go_over_the_edges_of_blocks_and_name_every_strand(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 3000)
    rings = filled(60, strands=2, length=7.0)
    rings.lanes[0]["seams"] = [33]
    save_snapshot(tmp_path, {}, (H5StorageCheckpointer(), rings))
    (name,) = data_files(tmp_path)
    layout = rings.layout_state()["leaves"]
    assert ["next", "done"] in [leaf["path"] for leaf in layout]
    with h5py.File(name) as file:
        lane = file["lane_0"]
        found = sorted(lane["trajectory_starts"][:].tolist())
        ids = values_of(lane["steps/collector/traj_ids"], 2, 60)
        assert lane["steps/obs"].shape == (2, 60, 3)
    expected = [
        t * 2 + strand for t in range(60) for strand in range(2) if t in (0, 33) or ids[strand][t] != ids[strand][t - 1]
    ]
    assert found == expected


def values_of(entry, strands, steps):
    """A key of the file for every strand and step, by the words of its `meaning`."""
    if isinstance(entry, h5py.Dataset):
        return entry[:].reshape(strands, steps).tolist()
    assert entry.attrs["stored"] == "changes"
    changes = dict(zip(entry["row"][:].tolist(), entry["value"][:].tolist(), strict=True))
    out = [[None] * steps for _ in range(strands)]
    for strand in range(strands):
        value = None
        for step in range(steps):
            value = changes.get(step * strands + strand, value)
            out[strand][step] = value
    return out


def test_a_key_that_comes_to_change_often_gets_a_value_for_each_step(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 4000)
    data = TensorDict({"late": torch.zeros(1000, dtype=torch.int64), "never": torch.ones(1000, 1)}, [1000])
    data["late"][500:] = torch.arange(500)
    rb, twin = (ReplayBuffer(storage=LazyTensorStorage(1000, checkpointer=H5StorageCheckpointer())) for _ in range(2))
    rb.extend(data)
    rb.dumps(tmp_path)
    (name,) = data_files(tmp_path)
    with h5py.File(name) as file:
        assert file["lane_0/steps/late"][:].tolist() == data["late"].tolist()
        assert file["lane_0/steps/never"].attrs["stored"] == "changes"
        assert sorted(file["lane_0"]) == ["steps", "trajectory_starts"]
    twin.loads(tmp_path)
    assert (twin[:] == data).all()


def elsewhere(file):
    del file["lane_0/steps/action"]


def soft_link(file):
    del file["lane_0/steps/next/terminated"]
    file["lane_0/steps/next/terminated"] = h5py.SoftLink("/lane_0/steps/next/done")


def external_link(file):
    other = Path(file.filename).parents[2] / "other.h5"
    with h5py.File(other, "w") as made:
        made["x"] = np.zeros(200, "i8")
    elsewhere(file)
    file["lane_0/steps/action"] = h5py.ExternalLink(str(other), "/x")


def external_storage(file):
    elsewhere(file)
    file.create_dataset("lane_0/steps/action", (200,), "i8", external=[("/etc/hostname", 0, 1600)])


def virtual(file):
    elsewhere(file)
    layout = h5py.VirtualLayout((200,), "i8")
    layout[:] = h5py.VirtualSource("/etc/hostname", "x", shape=(200,))
    file.create_virtual_dataset("lane_0/steps/action", layout)


def objects(file):
    elsewhere(file)
    file.create_dataset("lane_0/steps/action", (200,), h5py.string_dtype())


def references(file):
    elsewhere(file)
    file.create_dataset("lane_0/steps/action", (200,), h5py.ref_dtype)


def lossy_filter(file):
    elsewhere(file)
    file.create_dataset("lane_0/steps/action", data=np.zeros(200, "i8"), scaleoffset=3)


def huge_chunks(file):
    elsewhere(file)
    data, chunks = np.arange(200), (1 << 20,)
    file.create_dataset("lane_0/steps/action", data=data, chunks=chunks, maxshape=(None,), compression="gzip")


def nothing_allocated(file):
    elsewhere(file)
    file.create_dataset("lane_0/steps/action", (200,), "i8")


def another_type(file):
    elsewhere(file)
    file["lane_0/steps/action"] = np.zeros(200, ">i8")


def another_shape(file):
    elsewhere(file)
    file["lane_0/steps/action"] = np.zeros(1 << 20, "i8")


def a_group(file):
    elsewhere(file)
    file.create_group("lane_0/steps/action")


def a_named_type(file):
    elsewhere(file)
    file["lane_0/steps/action"] = np.dtype("i8")


def a_dataset_where_a_group_belongs(file):
    del file["lane_0/steps"]
    file["lane_0/steps"] = np.zeros(3)


def something_more(file):
    file["lane_0/steps/more"] = np.zeros(3)


def rows_out_of_range(file):
    file["lane_0/steps/next/obs/row"][-1] = 1 << 40


def rows_that_fall(file):
    file["lane_0/steps/next/obs/row"][:2] = [5, 4]


def newest_step_without_successor(file):
    rows = file["lane_0/steps/next/obs/row"]
    rows[:] = np.arange(len(rows))


def no_beginning(file):
    file["lane_0/steps/collector/traj_ids/row"][0] = 1


FORGERIES = [
    elsewhere, soft_link, external_link, external_storage, virtual, objects, references, lossy_filter, huge_chunks,
    nothing_allocated, another_type, another_shape, a_group, a_named_type, a_dataset_where_a_group_belongs,
    something_more, rows_out_of_range, rows_that_fall,
    newest_step_without_successor, no_beginning,
]  # fmt: skip


@each("edit", FORGERIES)
def test_a_forged_file_is_refused_by_name_and_changes_nothing(tmp_path, edit):
    save_snapshot(tmp_path, {}, (H5StorageCheckpointer(), filled()))
    file = forged(tmp_path, edit)
    for store in (TedRings(200), filled(200, exceptions=0.5)):
        before = store.contents()
        with pytest.raises(CorruptCheckpointError, match=str(file)):
            load(tmp_path, store)
        assert store.contents() == before


def test_a_file_that_is_not_hdf5_is_refused(tmp_path):
    save_snapshot(tmp_path, {}, (H5StorageCheckpointer(), filled()))
    (file,) = data_files(tmp_path)
    forge_file(tmp_path, file, file.read_bytes()[::-1])
    with pytest.raises(CorruptCheckpointError, match=f"{file}.*HDF5"):
        load(tmp_path, TedRings(200))


@each(
    "edit",
    [
        lambda d: d.update(lanes=[]),
        lambda d: d.update(layout=None),
        lambda d: d.update(file="storage/../x"),
        lambda d: d.update(shared=[[0, 99]]),
        lambda d: d["lanes"][0].update(start=1),
        lambda d: d["lanes"][0]["blocks"][0].__setitem__(0, 1 << 40),
        lambda d: d["lanes"][0]["blocks"][0].__setitem__(2, "x"),
        lambda d: d["lanes"][0]["blocks"].append([5] + [0] * 20),
        lambda d: d["lanes"][0]["blocks"][0].pop(),
        lambda d: d["lanes"][0].update(blocks=3),
    ],
)
def test_a_forged_manifest_that_cannot_be_is_refused(tmp_path, edit):
    save_snapshot(tmp_path, {}, (H5StorageCheckpointer(), filled()))
    forge_state(tmp_path, edit)
    store = TedRings(200)
    with pytest.raises(CorruptCheckpointError):
        load(tmp_path, store)
    assert store.contents() == TedRings(200).contents()


@each("trajectories", [0, 21])
def test_a_block_has_a_trajectory_and_no_more_of_them_than_steps(tmp_path, trajectories):
    save_snapshot(tmp_path, {}, (H5StorageCheckpointer(group_per_trajectory=True), filled(20)))
    forge_state(tmp_path, lambda d: d["lanes"][0]["blocks"][0].__setitem__(1, trajectories))
    store = TedRings(20)
    with pytest.raises(CorruptCheckpointError, match="a block has no trajectory, or more of them than steps"):
        load(tmp_path, store)
    assert store.contents() == TedRings(20).contents()


def test_what_h5py_says_of_a_disk_that_fails_when_it_closes_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match="HDF5 cannot write"), h5.create_checked(str(tmp_path / "x.h5"), {}):
        raise RuntimeError("unable to flush")


def test_without_h5py_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r'pip install "engram\[h5\]"'):
        H5StorageCheckpointer()


@each(
    ("options", "said"),
    [
        ({"h5_kwargs": {"chunks": True}}, "compression_opts, shuffle, fletcher32; found 'chunks'"),
        ({"h5_kwargs": {"compression": "szip"}}, "'gzip', 'lzf' or None"),
        ({"h5_kwargs": {"compression": "gzip", "compression_opts": 10}}, "0 to 9"),
        ({"h5_kwargs": {"compression_opts": 3}}, "of gzip"),
        ({"checkpoint_file": "../x.h5"}, "not the name of a file"),
        ({"checkpoint_file": "a/x.h5"}, "not the name of a file"),
    ],
)
def test_bad_settings_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        H5StorageCheckpointer(**options)


def test_a_full_disk_leaves_what_was_saved_before(mount):
    path = mount("2m")
    small, large = filled(200), filled(60_000)
    save_snapshot(path, {}, (H5StorageCheckpointer(), small))
    checkpointer = H5StorageCheckpointer()
    checkpointer.nbytes = lambda *_: 0  # it fills while it is being written
    with pytest.raises(CheckpointError, match="cannot save"):
        save_snapshot(path, {}, (checkpointer, large))
    assert load(path, TedRings(200)).contents() == small.contents()
    assert len(list(path.glob("g-*"))) == 1
