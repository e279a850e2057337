"""Checkpoints whose pointer, names or manifest were changed; what errors and `verify` say of damage."""

import json
import os
import shutil

import numpy as np
import pytest
import torch

from contracts.corruption import Forger, flip
from damage.formats import load_numbered, save_numbered
from engram.checkpoint.directory import MARKER, open_folder_below
from engram.data.replay_buffers.checkpointers import rows, verify
from engram.errors import CorruptCheckpointError


@pytest.fixture
def checkpoint(ram_path, monkeypatch):
    """Two snapshots, 1 and 2, the second in force."""
    monkeypatch.setattr(rows, "CHUNK_BYTES", 1000)
    save_numbered(ram_path, 1)
    save_numbered(ram_path, 2, keep_last=2)
    return ram_path


def assert_refused(checkpoint, file, whole="g-000001"):
    """A load names the file and the snapshot that can be loaded instead; verify names the file, too."""
    with pytest.raises(CorruptCheckpointError) as caught:
        load_numbered(checkpoint)
    assert str(file) in str(caught.value)
    assert caught.value.newest_whole == whole
    assert whole is None or whole in str(caught.value)
    report = verify(checkpoint)
    assert not report.ok and str(file) in str(report)


@pytest.mark.quick
def test_an_undamaged_checkpoint_loads_and_verifies(checkpoint):
    assert load_numbered(checkpoint) == 2 and load_numbered(checkpoint, "g-000001") == 1
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


def test_a_missing_snapshot_is_noticed(checkpoint):
    shutil.rmtree(checkpoint / "g-000002")
    assert_refused(checkpoint, checkpoint / "CURRENT")


def test_snapshots_with_each_others_names_are_noticed(checkpoint):
    (checkpoint / "g-000001").rename(checkpoint / "aside")
    (checkpoint / "g-000002").rename(checkpoint / "g-000001")
    (checkpoint / "aside").rename(checkpoint / "g-000002")
    assert_refused(checkpoint, checkpoint / "g-000002" / "manifest.json", whole=None)


def test_current_pointed_to_another_snapshot_is_noticed(checkpoint):
    Forger(checkpoint).point(snapshot="g-000001")
    with pytest.raises(CorruptCheckpointError, match=r"g-000001/manifest.json.*CURRENT"):
        load_numbered(checkpoint)


@pytest.mark.parametrize("name", ["../g-000001", "/etc", "g-000009", "g-1", "", None, 3])
def test_current_pointed_out_of_the_checkpoint_is_noticed(checkpoint, name):
    Forger(checkpoint).point(snapshot=name)
    assert_refused(checkpoint, checkpoint / "CURRENT", whole="g-000002")


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
    assert_refused(checkpoint, Forger(checkpoint).edit(lambda document: rename_file(document, name)))


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d.update(files=[]),
        lambda d: d.update(files={"a": 1}),
        lambda d: d.update(body=3),
        lambda d: d["files"]["components/sampler.bin"].update(nbytes=-1),
        lambda d: d["files"]["components/sampler.bin"].update(nbytes=True),
        lambda d: d["body"]["storage"]["state"].pop("counters"),
        lambda d: d["body"]["storage"]["state"]["counters"].update(envs=2**40),
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
    manifest = Forger(checkpoint).edit(edit)
    with pytest.raises(CorruptCheckpointError, match=str(manifest)):
        load_numbered(checkpoint)


def test_a_size_in_the_manifest_is_compared_with_the_file_before_it_is_used(checkpoint, monkeypatch):
    name = "components/sampler.bin"
    Forger(checkpoint).edit(lambda document: document["files"][name].update(nbytes=1 << 50))
    monkeypatch.setattr(torch, "empty", None)
    with pytest.raises(CorruptCheckpointError, match=f"{name} is damaged: it has 2000 bytes, {1 << 50} were saved"):
        load_numbered(checkpoint)


def test_when_no_snapshot_is_whole_the_error_says_so(checkpoint):
    for snapshot in ("g-000001", "g-000002"):
        flip(checkpoint / snapshot / "components" / "sampler.bin", 0)
    with pytest.raises(CorruptCheckpointError, match="no other snapshot there verifies whole"):
        load_numbered(checkpoint)


def test_the_snapshot_that_the_error_names_can_be_loaded(checkpoint):
    flip(checkpoint / "g-000002" / "manifest.json", 10)
    with pytest.raises(CorruptCheckpointError) as caught:
        load_numbered(checkpoint)
    assert load_numbered(checkpoint, caught.value.newest_whole) == 1


def test_a_save_to_a_damaged_checkpoint_repairs_it(checkpoint):
    flip(checkpoint / "CURRENT", 5)
    flip(checkpoint / "g-000002" / "manifest.json", 10)
    save_numbered(checkpoint, 3)
    assert load_numbered(checkpoint) == 3 and verify(checkpoint).ok


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


def test_a_folder_below_a_linked_folder_is_not_opened(tmp_path):
    (tmp_path / "real" / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        os.close(open_folder_below(folder, "real/below"))
        with pytest.raises(OSError):
            open_folder_below(folder, "link/below")
    finally:
        os.close(folder)


@pytest.mark.quick
def test_a_damaged_marker_is_named_by_verify(checkpoint):
    marker = checkpoint / "g-000002" / MARKER
    flip(marker, 3)
    report = verify(checkpoint)
    assert not report.ok and str(marker) in str(report)
