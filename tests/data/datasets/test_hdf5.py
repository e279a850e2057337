"""Flat HDF5 files (D4RL's form) in and out."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.each import each
from data.datasets.support import assert_same_bits, steps, with_bits
from engram.data import LazyTensorStorage, ReplayBuffer
from engram.data.datasets import iter_hdf5, read_hdf5, write_hdf5
from engram.errors import DatasetError

h5py = pytest.importorskip("h5py", reason='reading HDF5 datasets needs h5py: pip install "engram[h5]"')


def buffer(capacity=1000):
    return ReplayBuffer(storage=LazyTensorStorage(capacity))


def filled(batch, capacity=1000):
    rb = buffer(capacity)
    rb.extend(batch)
    return rb


def d4rl(path, terminals, timeouts, **more):
    """A file as D4RL has them, without next_observations: observation t is [t, -t]."""
    n = len(terminals)
    with h5py.File(path, "w") as file:
        seen = np.arange(n, dtype=np.float32)
        file["observations"] = np.stack([seen, -seen], 1)
        file["actions"] = np.arange(n, dtype=np.float32).reshape(n, 1)
        file["rewards"] = np.arange(n, dtype=np.float32)
        file["terminals"], file["timeouts"] = np.array(terminals, bool), np.array(timeouts, bool)
        file["metadata/algorithm"] = "text"
        for name, values in more.items():
            file[name.replace("__", "/")] = values
    return path


@settings(max_examples=6)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), compression=st.sampled_from([None, "gzip", "lzf"]))
def test_trajectories_come_back_bit_by_bit(tmp_path_factory, lengths, compression):
    path = tmp_path_factory.mktemp("h") / "steps.hdf5"
    batch = with_bits(steps(lengths))
    batch["observation"][-1] += 1  # kept, as the file has both
    assert write_hdf5(filled(batch), path, h5_kwargs={"compression": compression}) == len(batch)
    rb = buffer()
    assert read_hdf5(path, rb) == len(batch)
    assert_same_bits(rb[:], batch)
    for n in (1, 3, 100):
        assert_same_bits(torch.cat(list(iter_hdf5(path, n))), batch)


def test_the_last_step_of_a_trajectory_that_has_not_ended_is_a_timeout(tmp_path):
    write_hdf5(steps([3, 2], flagged=False), tmp_path / "s.hdf5")
    with h5py.File(tmp_path / "s.hdf5") as file:
        assert file["timeouts"][:].tolist() == [False, False, True, False, True]
        assert file["terminals"][:].sum() == 0
        assert set(file) == {"observations", "next_observations", "actions", "rewards", "terminals", "timeouts"}
        assert file["rewards"].shape == (5,)


def test_nested_observations_and_infos_come_back(tmp_path):
    batch = steps([3, 2])
    seen = batch.pop("observation"), batch["next"].pop("observation")
    batch["a"], batch["next", "a"] = seen
    batch["b", "c"], batch["next", "b", "c"] = (x.to(torch.float64) for x in seen)
    batch["info", "qpos"] = torch.arange(5)
    write_hdf5(batch, tmp_path / "s.hdf5")
    assert_same_bits(torch.cat(list(iter_hdf5(tmp_path / "s.hdf5"))), batch)
    less = next(iter(iter_hdf5(tmp_path / "s.hdf5", exclude=["info", ("b", "c")])))
    assert set(batch.keys(True, True)) - set(less.keys(True, True)) == {
        ("info", "qpos"),
        ("b", "c"),
        ("next", "b", "c"),
    }


@each("rows", [1, 2, 3, 5, 100])
def test_without_next_observations_no_step_is_followed_by_another_trajectory(tmp_path, rows):
    terminals = [0, 0, 1, 0, 0, 0, 0, 0]
    timeouts_ = [0, 0, 0, 0, 0, 1, 0, 0]
    path = d4rl(tmp_path / "d.hdf5", terminals, timeouts_)
    found = torch.cat(list(iter_hdf5(path, rows)))
    # Steps 5 (timeout) and 7 (the end of the file): what followed them is not there.
    assert found["next", "reward"].flatten().tolist() == [0, 1, 2, 3, 4, 6]
    assert found["next", "observation"][:, 0].tolist() == [1, 2, 2, 4, 5, 7]
    assert found["next", "terminated"].flatten().tolist() == [False, False, True, False, False, False]
    assert found["next", "truncated"].flatten().tolist() == [False, False, False, False, True, True]
    assert found["next", "done"].flatten().tolist() == [False, False, True, False, True, True]
    assert found["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 1, 2]


def test_a_file_without_timeouts_is_read_and_keys_nobody_knows_are_named(tmp_path):
    path = d4rl(tmp_path / "d.hdf5", [0, 1, 1], [0, 0, 0], stray=np.zeros(3), infos__qpos=np.arange(3))
    with h5py.File(path, "r+") as file:
        del file["timeouts"]
    with pytest.raises(DatasetError, match=r"stray is none of .*exclude=\['stray'\]"):
        read_hdf5(path, buffer())
    rb = buffer()
    assert read_hdf5(path, rb, exclude=["stray"]) == 3
    assert rb[:]["info", "qpos"].tolist() == [0, 1, 2]


def spoil(file, name, values):
    del file[name]
    if values is not None:
        file[name] = values


@each("dtype", ["float16", "float32", "float64"])
def test_flags_of_zeros_and_ones_in_floats_are_read(tmp_path, dtype):
    path = d4rl(tmp_path / "d.hdf5", [0, 0, 1, 0, 0], [0, 0, 0, 0, 1])
    rb, of_floats = buffer(), buffer()
    read_hdf5(path, rb)
    with h5py.File(path, "r+") as file:
        for name in ("terminals", "timeouts"):
            spoil(file, name, file[name][:].astype(dtype))
    read_hdf5(path, of_floats)
    assert (of_floats[:] == rb[:]).all()


@each(
    ("name", "values", "said"),
    [
        ("terminals", np.array([0, 0.5, 1]), "terminals is float64 and holds 0.5; a flag is 0.0 or 1.0"),
        ("timeouts", np.array([0, 0, np.nan], np.float32), "timeouts is float32 and holds nan; a flag is 0.0 or 1.0"),
        ("terminals", None, "terminals is missing"),
        ("actions", np.zeros((2, 1)), "actions has 2 steps, terminals 3"),
        ("timeouts", np.zeros(2, bool), "timeouts has 2 steps, terminals 3"),
        ("timeouts", np.zeros((3, 2), bool), "not one flag a step"),
        ("rewards", ["a", "b", "c"], "rewards holds objects"),
        ("observations", 3.0, "is a single value"),
        ("actions", h5py.ExternalLink("/etc/hostname", "x"), "is a link"),
    ],
)
def test_a_wrong_array_is_named(tmp_path, name, values, said):
    path = d4rl(tmp_path / "d.hdf5", [0, 0, 1], [0, 0, 0])
    with h5py.File(path, "r+") as file:
        spoil(file, name, values)
    rb = buffer()
    with pytest.raises(DatasetError, match=said) as caught:
        read_hdf5(path, rb)
    assert str(path) in str(caught.value) and len(rb) == 0


def test_observations_that_partly_have_a_next_are_refused(tmp_path):
    path = d4rl(tmp_path / "d.hdf5", [0, 0, 1], [0, 0, 0], next_observations__x=np.zeros(3))
    with h5py.File(path, "r+") as file:
        del file["observations"]
        file["observations/x"], file["observations/y"] = np.zeros(3), np.zeros(3)
    with pytest.raises(DatasetError, match="observations/y has no counterpart"):
        read_hdf5(path, buffer())


def test_a_block_that_cannot_be_read_leaves_those_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr("engram.datasets.episodes.BLOCK_BYTES", 1)
    path = tmp_path / "s.hdf5"
    write_hdf5(steps([400]), path, h5_kwargs={"fletcher32": True})
    with h5py.File(path) as file:
        chunk = file["rewards"].id.get_chunk_info(0)
    data = bytearray(path.read_bytes())
    data[chunk.byte_offset + 5] ^= 255
    path.write_bytes(data)
    rb = buffer()
    with pytest.raises(DatasetError, match="cannot be read") as caught:
        read_hdf5(path, rb)
    assert caught.value.rows_read == len(rb)


def test_options_and_batch_sizes_are_checked(tmp_path):
    with pytest.raises(ValueError, match="compression is 'gzip', 'lzf' or None"):
        write_hdf5(steps([3]), tmp_path / "s", h5_kwargs={"compression": "szip"})
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        next(iter_hdf5(tmp_path / "s", 0))
    (tmp_path / "no").write_bytes(b"no")
    with pytest.raises(DatasetError, match="is no HDF5 file"):
        read_hdf5(tmp_path / "no", buffer())
    with pytest.raises(FileNotFoundError):
        read_hdf5(tmp_path / "nowhere", buffer())
