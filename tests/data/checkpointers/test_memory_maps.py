"""Folders of memory-mapped TensorDicts, such as a `scratch_dir` of TorchRL's LazyMemmapStorage: `loads` reads them."""

import json
import shutil
import warnings

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack, tensorclass

from cli.test_command import call
from contracts.each import each
from data.datasets.support import assert_same_bits, steps
from engram.cli import convert, info
from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from engram.errors import CheckpointError, CorruptCheckpointError, StorageError
from engram.testing import env_steps

ROOM, WRITTEN = 12, 10


@tensorclass
class Observed:
    pixels: torch.Tensor
    angle: torch.Tensor


def maps(folder, rows=None, room=ROOM):
    """Memory maps with room for more steps than the rows that are written there, as TorchRL makes them."""
    rows = steps([7, 3]) if rows is None else rows
    mapped = rows[:1].expand(room, *rows.shape[1:]).memmap_like(folder)
    for key in rows.keys(include_nested=True, leaves_only=True):
        if torch.is_tensor(rows[key]):
            mapped[key][: len(rows)].copy_(rows[key])
    return folder


def loaded(folder, room=ROOM, kind=ReplayBuffer, ndim=1):
    buffer = kind(storage=LazyTensorStorage(room, ndim=ndim), batch_size=4)
    with pytest.warns(UserWarning, match="does not say how many were written: all are read"):
        buffer.loads(folder)
    return buffer


# ---- reading ----
def test_every_step_that_has_room_is_loaded(tmp_path):
    buffer = loaded(maps(tmp_path / "maps"))
    assert len(buffer) == ROOM
    assert_same_bits(buffer[:WRITTEN], steps([7, 3]))
    assert not buffer[WRITTEN:]["observation"].any()


@each("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_a_buffer_of_any_storage_goes_on_after_them(tmp_path, storage):
    buffer = TensorDictReplayBuffer(storage=storage(20), batch_size=4)
    with pytest.warns(UserWarning, match="room for 12 steps"):
        buffer.loads(maps(tmp_path / "maps"))
    assert buffer.extend(steps([2])).tolist() == [12, 13]
    assert buffer[:]["index"].tolist() == list(range(14))


def test_a_tensordict_that_memmap_wrote_comes_back(tmp_path):
    rows = TensorDict(
        {
            "a.b": torch.arange(6).to(torch.uint8),
            "a/b": torch.randn(6, 2, 3, dtype=torch.float64),
            "half": torch.randn(6).to(torch.bfloat16),
            "empty": torch.zeros(6, 0),
            "deep": {"er": {"flag": torch.tensor([True, False] * 3)}},
            "about": NonTensorData({"rate": 0.5, "names": ["a", "b"]}, batch_size=[6]),
            "same": NonTensorStack(*[NonTensorData("x")] * 6),
        },
        [6],
    )
    rows.memmap(tmp_path / "maps")
    back = loaded(tmp_path / "maps")[:]
    for key in rows.exclude("about", "same").keys(include_nested=True, leaves_only=True):
        assert torch.equal(back[key], rows[key]) and back[key].dtype is rows[key].dtype, key
    assert back["about"] == {"rate": 0.5, "names": ["a", "b"]} and back["same"] == "x"


def test_a_tensorclass_comes_back_into_a_buffer_that_knows_it(tmp_path):
    rows = Observed(torch.arange(8).reshape(4, 2), torch.randn(4), batch_size=[4])
    rows.memmap(tmp_path / "maps")
    assert torch.equal(loaded(tmp_path / "maps")[:]["angle"], rows.angle)
    buffer = ReplayBuffer(storage=LazyTensorStorage(ROOM))
    buffer.extend(rows[:1])
    with pytest.warns(UserWarning, match="room for 4 steps"):
        buffer.loads(tmp_path / "maps")
    assert isinstance(buffer[:], Observed) and torch.equal(buffer[:].pixels, rows.pixels)


def test_environments_are_those_of_ndim(tmp_path):
    rows = env_steps(2, 0, 5).transpose(0, 1).contiguous()
    buffer = loaded(maps(tmp_path / "maps", rows, 6), room=12, ndim=2)
    assert buffer.storage.env_shape == (2,) and len(buffer) == 12
    assert_same_bits(buffer[:5], rows.transpose(0, 1))


def test_a_storage_that_is_too_small_is_refused_and_unchanged(tmp_path):
    buffer = ReplayBuffer(storage=LazyTensorStorage(11))
    buffer.extend(steps([4]))
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="12"):
        buffer.loads(maps(tmp_path / "maps"))
    assert_same_bits(buffer[:], steps([4]))


# ---- a store of engram's in the same folder ----
@each("existsok", [True, False])
def test_a_store_that_begins_beside_memory_maps_warns(tmp_path, existsok):
    maps(tmp_path)
    with pytest.warns(UserWarning, match=r"an empty one begins.*convert .* --rows N --capacity 12`.*rb\.loads\("):
        storage = LazyMemmapStorage(ROOM, scratch_dir=tmp_path, existsok=existsok)
    buffer = ReplayBuffer(storage=storage)
    with pytest.warns(UserWarning, match="does not say how many"):
        buffer.loads(tmp_path)
    storage.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_bits(LazyMemmapStorage.open(tmp_path)[:WRITTEN], steps([7, 3]))


def test_a_store_beside_maps_of_nested_keys_alone_warns(tmp_path):
    TensorDict({"next": {"done": torch.zeros(3)}}, [3]).memmap(tmp_path)
    with pytest.warns(UserWarning, match="an empty one begins there"):
        LazyMemmapStorage(3, scratch_dir=tmp_path, existsok=True)


@each("name", ["notes.txt", "meta.json"])
def test_a_store_beside_files_of_other_kinds_does_not_warn(tmp_path, name):
    (tmp_path / name).write_text('{"shape": [3]}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LazyMemmapStorage(3, scratch_dir=tmp_path, existsok=True)


def test_opening_memory_maps_as_a_store_says_what_reads_them(tmp_path):
    with pytest.raises(StorageError, match=r"no store in .*memory-mapped TensorDicts.*engram convert"):
        LazyMemmapStorage.open(maps(tmp_path))


# ---- the command line ----
def test_info_says_that_nobody_counted_the_steps(tmp_path):
    described = info(maps(tmp_path / "maps"))
    assert (described.kind, described.rows, described.capacity) == ("TorchRL directory", ROOM, ROOM)
    assert "how many of these steps were written" in described.notes[0]
    assert ("next.reward", (1,), "float32", 4) in described.keys


def test_convert_takes_as_many_rows_as_it_is_told(tmp_path):
    converted = convert(maps(tmp_path / "maps"), tmp_path / "store", to="store", rows=WRITTEN)
    assert converted.rows == WRITTEN and info(tmp_path / "store").episodes == 2
    assert_same_bits(LazyMemmapStorage.open(tmp_path / "store")[:], steps([7, 3]))


def test_the_command_converts_as_many_rows_as_it_is_told(tmp_path):
    folder, new = maps(tmp_path / "maps"), tmp_path / "new"
    assert "10 rows" in call("convert", folder, new, "--to", "checkpoint", "--rows", WRITTEN).output
    assert "has room for 12 steps" in call("convert", folder, tmp_path / "other", "--to", "store", "--rows", 13).stderr


def test_convert_takes_all_rows_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="--rows N"):
        assert convert(maps(tmp_path / "maps"), tmp_path / "store", to="store").rows == ROOM


@each("rows", [0, -1, ROOM + 1, 10**30, 2.5])
def test_convert_refuses_rows_that_have_no_room(tmp_path, rows):
    with pytest.raises(ValueError, match="has room for 12 steps, not for rows="):
        convert(maps(tmp_path / "maps"), tmp_path / "store", to="store", rows=rows)
    assert not (tmp_path / "store").exists()


@each("to", ["store", "checkpoint", "torchrl", "parquet"])
def test_convert_refuses_rows_of_a_source_that_says_how_many_it_has(tmp_path, to):
    convert(maps(tmp_path / "maps"), tmp_path / "counted", to=to, rows=WRITTEN)
    with pytest.raises(ValueError, match="says how many steps it has: rows=3 has no meaning"):
        convert(tmp_path / "counted", tmp_path / "store", to="store", rows=3)


# ---- what is refused ----
def refused(folder, match, error=CheckpointError):
    for read in (lambda: ReplayBuffer(storage=LazyTensorStorage(ROOM)).loads(folder), lambda: info(folder)):
        with pytest.raises(error, match=match):
            read()


def test_a_lazy_stack_is_refused(tmp_path):
    lazy_stack([TensorDict({"x": torch.zeros(2, n)}, [2]) for n in (1, 2)]).memmap(tmp_path / "maps")
    refused(tmp_path / "maps", "engram reads TensorDicts")


def test_a_constant_that_is_a_pickle_is_refused_and_not_opened(tmp_path):
    TensorDict({"x": torch.zeros(3), "o": NonTensorData(object, batch_size=[3])}, [3]).memmap(tmp_path / "maps")
    refused(tmp_path / "maps", r"other\.pickle is a pickle")


def test_values_that_differ_and_are_no_tensors_are_refused(tmp_path):
    values = NonTensorStack(*[NonTensorData(letter) for letter in "abc"])
    TensorDict({"x": torch.zeros(3), "letter": values}, [3]).memmap(tmp_path / "maps")
    refused(tmp_path / "maps", "'letter' holds values that differ from step to step")


def test_maps_that_nothing_describes_are_refused_with_advice(tmp_path):
    shutil.copytree(maps(tmp_path / "maps") / "next", tmp_path / "alone", ignore=lambda *_: ["meta.json"])
    refused(tmp_path / "alone", r"without a meta\.json.*nothing says their dtypes and shapes")


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    folder = maps(tmp_path / "maps")
    for name in ("observation.memmap", "next"):
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
        refused(folder, name.partition(".")[0], CorruptCheckpointError)
        (folder / name).unlink()
        (tmp_path / name).rename(folder / name)


@each("shape", [[12, 3, 1 << 40], [1 << 62, 3], [12], [0, 3], [11, 3]])
def test_a_shape_that_its_file_does_not_have_is_refused(tmp_path, shape):
    folder = maps(tmp_path / "maps")
    said = json.loads((folder / "meta.json").read_text())
    said["observation"]["shape"] = shape
    (folder / "meta.json").write_text(json.dumps(said))
    refused(folder, "observation|not a shape|larger than any storage", CorruptCheckpointError)


@each("batch", [None, [], [0], [1 << 62], [-12], ["12"], [12, 2], 12])
@each("keys", [["observation"], ["next"], ["observation", "next"]])
def test_a_batch_size_that_cannot_be_is_refused(tmp_path, batch, keys):
    folder = maps(tmp_path / "maps", steps([7, 3]).select(*keys))
    said = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**said, "shape": batch}))
    refused(folder, "maps")
