"""Directories that claim to be TorchRL's: nothing in them runs code, reads outside, takes memory or loses rows."""

import json
import os
import pickle
import random
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from contracts.corruption import exchanged, places
from damage import formats
from damage.formats import torchrl_buffer
from engram.checkpoint import foreign
from engram.data import LazyTensorStorage, TensorDictReplayBuffer
from engram.errors import CheckpointError, CorruptCheckpointError
from engram.interop.torchrl import files

EVIL = [
    None,
    True,
    -1,
    0,
    3,
    11,
    1 << 40,
    1 << 62,
    1 << 70,
    1.5,
    "torch.float8_e4m3fn",
    "../../x",
    "/etc",
    "",
    [],
    [-1],
]
EVIL += [[1 << 62], [10, 1 << 62], [True], ["10"], {}, {"type": "TensorDict"}, {"type": "NonTensorData"}]


@pytest.fixture
def unpacked(tmp_path):
    return lambda name: formats.unpacked(name, tmp_path)


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.quick
@pytest.mark.parametrize(
    "place",
    ["prefetch.pkl", "storage/other.pickle", "storage/x.pkl", "storage/next/x.pt", "sampler/state.pkl", "writer/x.pkl",
     "sampler/meta.json", "writer/metadata.json", "storage/meta.json", "storage/obs.memmap"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["flat-wrapped-1", "epoch-begun"])
def test_no_pickle_is_ever_opened(unpacked, tmp_path, name, place):
    saved, trap = unpacked(name), tmp_path / "sprung"
    target = saved / place
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(pickle.dumps([Trap(trap), "x" * 100]))
    buffer = torchrl_buffer(name)
    if place == "prefetch.pkl":
        with pytest.warns(UserWarning, match="never opens"):
            buffer.loads(saved)
    else:
        with pytest.raises((CheckpointError, ValueError), match=f"{target.parent.name}|{target.name}"):
            buffer.loads(saved)
        assert not len(buffer)
    assert not trap.exists()
    pickle.loads(target.read_bytes())
    assert trap.exists(), "the trap works"


@pytest.mark.parametrize("place", ["sampler/state.pkl", "writer/x.pkl"])
def test_a_pickled_part_is_left_out_by_name(unpacked, place):
    saved = unpacked("epoch-begun")
    (saved / place).write_bytes(b"\x80\x04N.")
    buffer = torchrl_buffer("epoch-begun")
    part = place.split("/")[0]
    rest = tuple(p for p in ("storage", "sampler", "writer", "generator") if p != part)
    with pytest.raises(ValueError, match="is a pickle") as error:
        buffer.loads(saved)
    assert f"loads(path, parts={rest!r})" in str(error.value)
    buffer.loads(saved, parts=rest)
    assert len(buffer) == 10


@pytest.mark.parametrize("name", [name for name in formats.TORCHRL if not name.startswith("h5")])
def test_any_value_of_any_json_file_may_be_forged(unpacked, name):
    saved, held = unpacked(name), torchrl_buffer(name)
    held.loads(saved)
    before = held.storage.state_dict()["rows"][0].clone()
    rng, tried = random.Random(name), 0
    for file in sorted(saved.rglob("*.json")):
        document = json.loads(file.read_text())
        cases = [(path, value) for path in [(), *places(document)] for value in EVIL]
        for path, value in rng.sample(cases, min(len(cases), 16)):
            file.write_text(json.dumps(exchanged(document, path, value)))
            for buffer in (torchrl_buffer(name), held):
                try:
                    buffer.loads(saved)
                except (CheckpointError, ValueError):
                    assert len(buffer) == (0 if buffer is not held else len(held))
                    if buffer is held:
                        assert (held.storage.state_dict()["rows"][0] == before).all()
                else:
                    held = torchrl_buffer(name)
                    file.write_text(json.dumps(document))
                    held.loads(saved)
                    before = held.storage.state_dict()["rows"][0].clone()
            tried += 1
        file.write_text(json.dumps(document))
    assert tried > 40


@pytest.mark.parametrize("key", ["../../secret", "/etc/passwd", "..", ".", "", "a\0b"])
@pytest.mark.parametrize("said", [{"dtype": "torch.uint8", "shape": [10], "is_nested": False}, {"type": "TensorDict"}])
def test_keys_are_no_paths(unpacked, tmp_path, key, said):
    saved = unpacked("tensor-partial")
    (tmp_path / "secret.memmap").write_bytes(bytes(10))
    meta = saved / "storage" / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), key: said}))
    with pytest.raises(CheckpointError):
        torchrl_buffer("x").loads(saved)


def test_an_entry_that_does_not_say_whether_it_is_nested_is_refused(unpacked):
    saved = unpacked("tensor-partial")
    meta = saved / "storage" / "meta.json"
    said = json.loads(meta.read_text())
    key = next(key for key, entry in said.items() if isinstance(entry, dict) and "is_nested" in entry)
    del said[key]["is_nested"]
    meta.write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=f"{key}.* does not say whether it is nested"):
        torchrl_buffer("x").loads(saved)


@pytest.mark.parametrize(
    "kind", ["<class 'os.system'>", "<class 'tensordict._lazy.LazyStackedTensorDict'>", "os.system", 3]
)
def test_no_class_is_looked_up(unpacked, kind):
    saved = unpacked("tensor-partial")
    meta = saved / "storage" / "next" / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "_type": kind}))
    with pytest.raises(CheckpointError, match="engram reads TensorDicts"):
        torchrl_buffer("x").loads(saved)


def test_deep_json_and_deep_directories_are_errors(unpacked):
    saved = unpacked("pytree")
    metadata = saved / "storage" / "storage_metadata.json"
    whole = metadata.read_text()
    metadata.write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(CheckpointError, match="storage_metadata"):
        torchrl_buffer("pytree").loads(saved)
    metadata.write_text(whole)
    deep = saved / "storage" / "/".join(["d"] * 100)
    deep.mkdir(parents=True)
    with pytest.raises(CheckpointError, match="nested deeper"):
        torchrl_buffer("pytree").loads(saved)


def test_a_file_nobody_describes_is_not_left_out_without_a_word(unpacked):
    saved = unpacked("flat-wrapped-1")
    (saved / "storage" / "lost.memmap").write_bytes(bytes(40))
    with pytest.raises(CorruptCheckpointError, match=r"lost\.memmap"):
        torchrl_buffer("x").loads(saved)


def test_bytes_that_are_no_bool_become_one(unpacked):
    saved = unpacked("tensor-partial")
    file = saved / "storage" / "bool.memmap"
    file.write_bytes(bytes([0, 7, 255, 1, 0, 2, 0]) + file.read_bytes()[7:])
    buffer = torchrl_buffer("x")
    buffer.loads(saved)
    assert buffer[:]["bool"].view(torch.uint8).tolist() == [0, 1, 1, 1, 0, 1, 0]


def test_a_cursor_that_is_not_where_the_steps_end_is_refused(unpacked):
    saved = unpacked("tensor-partial")
    (saved / "writer" / "metadata.json").write_text('{"cursor": 3, "write_count": 3}')
    with pytest.raises(ValueError, match="3 steps lie in the storage, which holds 7: either its ndim is another"):
        torchrl_buffer("x").loads(saved)


def test_flags_that_were_changed_do_not_shift_what_follows(unpacked):
    saved = unpacked("flat-wrapped-1")
    file = saved / "storage" / "done.memmap"
    file.write_bytes(bytes(10))
    with pytest.raises(CorruptCheckpointError, match="not of 10 steps or 11 values"):
        torchrl_buffer("x").loads(saved)


@pytest.mark.quick
@pytest.mark.parametrize(
    "shapes", [[[7, 2], [5, 2], [6, 2], [6, 2]], [[5, 2], [6, 2], [6, 2], [6, 2]], [[6, 2], [6, 2], [6, 2], [6, 1]]]
)
def test_lengths_of_a_nested_tensor_that_are_not_those_of_the_trajectories_are_refused(unpacked, shapes):
    saved = unpacked("nested-full-2")  # four trajectories of five steps, and so of six observations
    (saved / "storage" / "obs.shape.memmap").write_bytes(np.array(shapes, np.int64).tobytes())
    buffer = torchrl_buffer("nested-full-2")
    with pytest.raises(CorruptCheckpointError, match=r"obs\.shape\.memmap.*not those of the trajectories that 'done'"):
        buffer.loads(saved)
    assert not len(buffer)


@pytest.mark.parametrize("rows", [[0, 10], [-1, 2], [1, 1], [1 << 62, 3]])
def test_an_epoch_of_rows_that_are_not_there_is_refused(unpacked, rows):
    saved = unpacked("epoch-begun")
    meta = saved / "sampler" / "meta.json"
    said = json.loads(meta.read_text())
    said["_sample_list"]["shape"] = [len(rows)]
    meta.write_text(json.dumps(said))
    (saved / "sampler" / "_sample_list.memmap").write_bytes(np.array(rows, np.int64).tobytes())
    with pytest.raises(ValueError, match="rows that are not stored, or one of them twice"):
        torchrl_buffer("epoch-begun").loads(saved)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["tensor-partial", "flat-wrapped-1", "nested-wrapped-2"])
@pytest.mark.parametrize("at", [0, 5, -1])
@pytest.mark.parametrize("many", [False, True], ids=["rows that wait in memory", "more rows than may wait"])
def test_a_read_that_fails_leaves_a_buffer_as_it_was(unpacked, monkeypatch, name, at, many):
    if many:  # they are read twice: the first time only to see that they can be
        monkeypatch.setattr("engram.data.replay_buffers.state.rows._STAGED_BYTES", 0)
    saved, held, empty = unpacked(name), torchrl_buffer(name), torchrl_buffer(name)
    held.loads(saved)
    before = held.storage.state_dict()["rows"][0].clone()
    reads, real = [], files.ItemFile.read

    def failing(column, start, stop):
        reads.append(1)
        if len(reads) > limit:
            raise CorruptCheckpointError("x.memmap", "it cannot be read (Input/output error)")
        return real(column, start, stop)

    monkeypatch.setattr(files.ItemFile, "read", failing)
    limit = 1 << 30
    torchrl_buffer(name).loads(saved)
    limit = (at if at >= 0 else len(reads) - 1) % len(reads)
    for buffer in (empty, held):
        reads.clear()
        with pytest.raises(CorruptCheckpointError):
            buffer.loads(saved)
    assert not empty.storage.initialized or empty.storage.lanes.store.incarnation % 2 == 0  # no restore is under way
    assert not len(empty) and (held.storage.state_dict()["rows"][0] == before).all()


def test_a_generator_of_any_bytes_is_refused(unpacked):
    saved = unpacked("generator")
    state = saved / "rng_state" / "rng_state.memmap"
    state.write_bytes(bytes(state.stat().st_size))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), generator=torch.Generator())
    with pytest.raises(CheckpointError, match="not the state of a generator"):
        buffer.loads(saved)
    assert not len(buffer)


# ---- HDF5 ----
def soft(h5py, file):
    file["traj_0/more"] = h5py.SoftLink("/traj_1/obs")


def outside(h5py, file):
    del file["traj_0/obs"]
    file["traj_0/obs"] = h5py.ExternalLink("other.h5", "/obs")


def objects(h5py, file):
    file.create_dataset("traj_0/more", (2,), h5py.string_dtype())


def other_endian(h5py, file):
    for group in [name for name in file if name.startswith("traj_")]:
        values = file[group]["obs"][()]
        del file[group]["obs"]
        file[group].create_dataset("obs", data=values.astype(">f4"))


def elsewhere(h5py, file):
    shape = file["traj_0/obs"].shape
    del file["traj_0/obs"]
    file.create_dataset("traj_0/obs", shape, "f4", external=[("/etc/passwd", 0, 8 * shape[0])])


def endless(h5py, file):
    del file["traj_0/obs"]
    file.create_dataset("traj_0/obs", (1 << 50, 2), "f4", chunks=(1024, 2))


def one_less(h5py, file):
    del file["traj_1/action"]


def not_numbered(h5py, file):
    file.move("traj_1", "traj_7")


def no_length(h5py, file):
    del file["_len"]


def long_length(h5py, file):
    file["_len"][()] = 1 << 50


FORGERIES = [soft, outside, objects, other_endian, elsewhere, endless, one_less, not_numbered, no_length, long_length]


@pytest.mark.parametrize("forge", FORGERIES)
def test_an_hdf5_file_that_was_forged_is_refused(unpacked, forge):
    h5py = pytest.importorskip("h5py")
    saved = unpacked("h5-wrapped-1")
    with h5py.File(saved / "storage" / "checkpoint.h5", "r+") as file:
        forge(h5py, file)
    buffer = torchrl_buffer("x")
    with pytest.raises((CheckpointError, ValueError), match="storage"):
        buffer.loads(saved)
    assert not len(buffer)


@pytest.mark.quick
@pytest.mark.parametrize(("name", "last"), [("h5-full-1", "traj_1"), ("h5-full-2", "traj_3")])
def test_an_hdf5_file_without_the_observation_after_the_last_step_is_refused(unpacked, name, last):
    h5py = pytest.importorskip("h5py")
    saved = unpacked(name)
    with h5py.File(saved / "storage" / "checkpoint.h5", "r+") as file:
        values = file[last]["obs"][:-1]
        del file[last]["obs"]
        file[last]["obs"] = values
    buffer = torchrl_buffer(name)
    with pytest.raises(CorruptCheckpointError, match=r"'obs' has \d+ values, which are not those of \d+ steps"):
        buffer.loads(saved)
    assert not len(buffer)


def test_a_link_to_a_directory_is_no_folder_and_is_not_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with ExitStack() as stack:
        folder = files.Folder(str(tmp_path), stack)
        assert folder.is_folder("real") and not folder.is_folder("link") and not folder.is_folder("none")
        with pytest.raises(CorruptCheckpointError, match="link is damaged: it is not a directory, or a link to one"):
            folder.folder("link")


def test_nothing_that_runs_code_is_imported_or_called():
    forbidden = ["import pickle", "pickle.", "Unpickler", "eval(", "exec(", "importlib", "__import__", "torch.load"]
    sources = [*Path(files.__file__).parents[1].rglob("*.py"), Path(foreign.__file__)]
    assert len(sources) > 5
    for source in sources:
        text = source.read_text()
        assert not [word for word in [*forbidden, "allow_pickle", "marshal"] if word in text], source
