"""Damaged checkpoints: whatever byte changed, never wrong data, always an error that names the file."""

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from contracts.checkpointer import RowRings, flip, overwrite
from engram.checkpoint.directory import MARKER, digest, from_checksummed_json, open_below, to_checksummed_json
from engram.data.replay_buffers.checkpointers import (
    TensorStorageCheckpointer,
    open_snapshot,
    rows,
    save_snapshot,
    verify,
)
from engram.errors import CheckpointError, CorruptCheckpointError


def rings_of(number):
    rings = RowRings(lanes=2, strands=2)
    rings.append(0, 130, number)
    rings.append(1, 20, number)
    return rings


def save(path, number, **options):
    state = {"sampler": {"number": number, "tree": torch.full((500,), float(number))}}
    return save_snapshot(path, state, (TensorStorageCheckpointer(), rings_of(number)), **options)


def load(path, snapshot=None):
    """The number that was saved, once every part has been seen to belong to it."""
    rings = RowRings(lanes=2, strands=2)
    with open_snapshot(path, snapshot) as opened:
        sampler = opened.components["sampler"]
        try:
            opened.load_storage(TensorStorageCheckpointer(), rings)
        except CheckpointError:
            assert rings.contents() == RowRings(lanes=2, strands=2).contents()
            raise
    number = sampler["number"]
    assert rings.contents() == rings_of(number).contents()
    assert torch.equal(sampler["tree"], torch.full((500,), float(number)))
    return number


@pytest.fixture
def checkpoint(ram_path, monkeypatch):
    """Two snapshots, 1 and 2, the second in force."""
    monkeypatch.setattr(rows, "CHUNK_BYTES", 1000)
    save(ram_path, 1)
    save(ram_path, 2, keep_last=2)
    return ram_path


def files_of(checkpoint: Path, snapshot="g-000002") -> list[Path]:
    return sorted(file for file in (checkpoint / snapshot).rglob("*") if file.is_file())


def assert_refused(checkpoint, file, whole="g-000001"):
    """A load names the file and the snapshot that can be loaded instead; verify names the file, too."""
    with pytest.raises(CorruptCheckpointError) as caught:
        load(checkpoint)
    assert str(file) in str(caught.value)
    assert caught.value.newest_whole == whole
    assert whole is None or whole in str(caught.value)
    report = verify(checkpoint)
    assert not report.ok and str(file) in str(report)


@pytest.mark.quick
def test_an_undamaged_checkpoint_loads_and_verifies(checkpoint):
    assert load(checkpoint) == 2 and load(checkpoint, "g-000001") == 1
    report = verify(checkpoint)
    assert (
        report.ok
        and report.newest_whole == "g-000002"
        and [one.name for one in report.snapshots]
        == [
            "g-000002",
            "g-000001",
        ]
    )
    assert "whole" in str(report)


def test_any_changed_byte_of_current_is_noticed(checkpoint):
    file = checkpoint / "CURRENT"
    for position in range(file.stat().st_size):
        for bit in (1, 32, 128):
            flip(file, position, bit)
            assert_refused(checkpoint, file, whole="g-000002")
            flip(file, position, bit)
    assert load(checkpoint) == 2


@pytest.mark.parametrize("name", ["manifest.json", MARKER])
def test_any_changed_byte_of_the_metadata_is_noticed(checkpoint, name):
    file = checkpoint / "g-000002" / name
    for position in range(file.stat().st_size):
        flip(file, position, 1 << position % 8)
        with pytest.raises(CorruptCheckpointError, match=f"{file}.*g-000001"):
            load(checkpoint)
        with pytest.raises(CorruptCheckpointError, match=str(file)):
            load(checkpoint, "g-000002")
        flip(file, position, 1 << position % 8)
    assert load(checkpoint) == 2


def test_random_changed_bytes_of_the_data_are_noticed(checkpoint):
    files = [file for file in files_of(checkpoint) if file.suffix == ".bin"]
    for _ in range(500):
        file = random.choice(files)
        position, bit = random.randrange(file.stat().st_size), 1 << random.randrange(8)
        flip(file, position, bit)
        with pytest.raises(CorruptCheckpointError, match=str(file)):
            load(checkpoint)
        flip(file, position, bit)
    assert load(checkpoint) == 2


def test_files_of_another_length_are_noticed(checkpoint):
    for file in [checkpoint / "CURRENT", *files_of(checkpoint)]:
        content = file.read_bytes()
        for changed in (b"", content[:1], content[: len(content) // 2], content[:-1], content + b"\0", content * 2):
            overwrite(file, changed)
            whole = "g-000002" if file.name == "CURRENT" else "g-000001"
            if file.name == MARKER:  # not ours any more by its marker: named by the load, not listed by verify
                with pytest.raises(CorruptCheckpointError, match=str(file)):
                    load(checkpoint)
            else:
                assert_refused(checkpoint, file, whole)
        overwrite(file, content)
    assert load(checkpoint) == 2


@pytest.mark.quick
def test_missing_files_are_noticed(checkpoint):
    for file in files_of(checkpoint):
        aside = checkpoint / "aside"
        file.rename(aside)
        with pytest.raises(CorruptCheckpointError, match=f"{file}.*g-000001"):
            load(checkpoint)
        assert not verify(checkpoint).ok
        aside.rename(file)
    (checkpoint / "CURRENT").unlink()
    with pytest.raises(CheckpointError, match=r"CURRENT.*g-000002"):
        load(checkpoint)


def test_a_missing_snapshot_is_noticed(checkpoint):
    shutil.rmtree(checkpoint / "g-000002")
    assert_refused(checkpoint, checkpoint / "CURRENT")


@pytest.mark.quick
def test_swapped_files_are_noticed(checkpoint):
    chunks = [file for file in files_of(checkpoint) if file.parent.name == "storage"]
    pairs = {
        file.stat().st_size: [other for other in chunks if other.stat().st_size == file.stat().st_size]
        for file in chunks
    }
    one, two = next(same for same in pairs.values() if len(same) > 1)[:2]
    first, second = one.read_bytes(), two.read_bytes()
    overwrite(one, second)
    overwrite(two, first)
    assert_refused(checkpoint, one)


@pytest.mark.quick
def test_files_of_another_snapshot_are_noticed(checkpoint):
    for file in files_of(checkpoint):
        older = checkpoint / "g-000001" / file.relative_to(checkpoint / "g-000002")
        content = file.read_bytes()
        if older.read_bytes() != content:
            overwrite(file, older.read_bytes())
            assert_refused(checkpoint, file)
            overwrite(file, content)
    assert load(checkpoint) == 2


def test_snapshots_with_each_others_names_are_noticed(checkpoint):
    (checkpoint / "g-000001").rename(checkpoint / "aside")
    (checkpoint / "g-000002").rename(checkpoint / "g-000001")
    (checkpoint / "aside").rename(checkpoint / "g-000002")
    assert_refused(checkpoint, checkpoint / "g-000002" / "manifest.json", whole=None)


def test_current_pointed_to_another_snapshot_is_noticed(checkpoint):
    file = checkpoint / "CURRENT"
    document = {**from_checksummed_json(file.read_bytes()), "snapshot": "g-000001"}
    overwrite(file, to_checksummed_json(document))
    with pytest.raises(CorruptCheckpointError, match=r"g-000001/manifest.json.*CURRENT"):
        load(checkpoint)


@pytest.mark.parametrize("name", ["../g-000001", "/etc", "g-000009", "g-1", "", None, 3])
def test_current_pointed_out_of_the_checkpoint_is_noticed(checkpoint, name):
    file = checkpoint / "CURRENT"
    overwrite(file, to_checksummed_json({**from_checksummed_json(file.read_bytes()), "snapshot": name}))
    assert_refused(checkpoint, file, whole="g-000002")


def forge_manifest(checkpoint, edit):
    """Changes the manifest in force and every hash that covers it, as an attacker can."""
    manifest = checkpoint / "g-000002" / "manifest.json"
    document = from_checksummed_json(manifest.read_bytes())
    edit(document)
    overwrite(manifest, to_checksummed_json(document))
    current = checkpoint / "CURRENT"
    overwrite(
        current,
        to_checksummed_json({**from_checksummed_json(current.read_bytes()), "manifest": digest(manifest.read_bytes())}),
    )
    return manifest


def rename_file(document, name):
    files = document["files"]
    files[name] = files.pop("components/sampler.bin")


@pytest.mark.parametrize(
    "name",
    [
        "../../secret",
        "/etc/passwd",
        "components/../../secret",
        "./x",
        "components//x",
        "a\\..\\b",
        "x\0y",
        ".hidden",
        "a" * 300,
    ],
)
def test_a_forged_file_name_is_refused(checkpoint, name):
    (checkpoint / "secret").write_bytes(b"x" * 2000)
    assert_refused(checkpoint, forge_manifest(checkpoint, lambda document: rename_file(document, name)))


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d.update(files=[]),
        lambda d: d.update(files={"a": 1}),
        lambda d: d.update(body=3),
        lambda d: d["files"]["components/sampler.bin"].update(nbytes=-1),
        lambda d: d["files"]["components/sampler.bin"].update(nbytes=True),
        lambda d: d["body"]["storage"]["state"].pop("counters"),
        lambda d: d["body"]["storage"]["state"]["counters"].update(strands=2**40),
        lambda d: d["body"]["storage"]["state"]["counters"]["lanes"][0].update(published=2**62),
        lambda d: d["body"]["storage"]["state"]["counters"]["lanes"][0].update(base=1000),
        lambda d: d["body"]["storage"]["state"]["layout"].update(row_bytes=2**40),
        lambda d: d["body"]["storage"]["state"]["layout"].update(row_bytes=-24),
        lambda d: d["body"]["storage"]["state"]["chunks"].pop(),
        lambda d: d["body"]["storage"]["state"]["chunks"].pop(0),
        lambda d: d["body"]["storage"]["state"]["chunks"].reverse(),
        lambda d: d["body"]["storage"]["state"]["chunks"].append([9, 0, 0, 1]),
        lambda d: d["body"]["storage"]["state"].update(chunks=[[0]]),
        lambda d: d["body"]["storage"]["state"].update(layout=None),
    ],
)
def test_a_forged_manifest_that_cannot_be_is_refused(checkpoint, edit):
    manifest = forge_manifest(checkpoint, edit)
    with pytest.raises(CorruptCheckpointError, match=str(manifest)):
        load(checkpoint)


def test_a_size_in_the_manifest_is_compared_with_the_file_before_it_is_used(checkpoint, monkeypatch):
    name = "components/sampler.bin"
    forge_manifest(checkpoint, lambda document: document["files"][name].update(nbytes=1 << 50))
    monkeypatch.setattr(torch, "empty", None)
    with pytest.raises(CorruptCheckpointError, match=f"{name} is damaged: it has 2000 bytes, {1 << 50} were saved"):
        load(checkpoint)


@pytest.mark.quick
@pytest.mark.parametrize("what", ["file", "folder", "snapshot", "current"])
def test_symbolic_links_are_not_followed(checkpoint, tmp_path, what):
    place = {
        "file": checkpoint / "g-000002" / "components" / "sampler.bin",
        "folder": checkpoint / "g-000002" / "components",
        "snapshot": checkpoint / "g-000002",
        "current": checkpoint / "CURRENT",
    }[what]
    shutil.move(place, tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptCheckpointError, match=str(place)):
        load(checkpoint)


def test_a_pipe_in_the_place_of_a_file_does_not_block(checkpoint):
    file = checkpoint / "g-000002" / "components" / "sampler.bin"
    file.unlink()
    os.mkfifo(file)
    assert_refused(checkpoint, file)


def test_when_no_snapshot_is_whole_the_error_says_so(checkpoint):
    for snapshot in ("g-000001", "g-000002"):
        flip(checkpoint / snapshot / "components" / "sampler.bin", 0)
    with pytest.raises(CorruptCheckpointError, match="no other snapshot there verifies whole"):
        load(checkpoint)


def test_the_snapshot_that_the_error_names_can_be_loaded(checkpoint):
    flip(checkpoint / "g-000002" / "manifest.json", 10)
    with pytest.raises(CorruptCheckpointError) as caught:
        load(checkpoint)
    assert load(checkpoint, caught.value.newest_whole) == 1


def test_a_save_to_a_damaged_checkpoint_repairs_it(checkpoint):
    flip(checkpoint / "CURRENT", 5)
    flip(checkpoint / "g-000002" / "manifest.json", 10)
    save(checkpoint, 3)
    assert load(checkpoint) == 3 and verify(checkpoint).ok


def test_verify_counts_what_it_read_and_lists_every_problem(checkpoint):
    damaged = sorted((checkpoint / "g-000002" / "storage").iterdir())[:2]
    for file in damaged:
        flip(file, 0)
    newest, older = verify(checkpoint).snapshots
    assert len(newest.problems) == 2 and all(str(f) in p for f, p in zip(damaged, newest.problems, strict=True))
    assert older.ok and older.files > 3 and older.nbytes == 2 * 120 * 24 + 2000


def test_the_manifest_is_json_that_anybody_can_read(checkpoint):
    document = json.loads((checkpoint / "g-000002" / "manifest.json").read_bytes())
    chunks = document["body"]["storage"]["state"]["chunks"]
    assert np.array(chunks).shape[1] == 4 and document["body"]["components"]["sampler"]["number"] == 2


def test_a_file_below_a_linked_folder_is_not_opened(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        os.close(open_below(folder, "real/file"))
        with pytest.raises(OSError):
            open_below(folder, "link/file")
    finally:
        os.close(folder)
