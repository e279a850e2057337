"""Links, pipes and folders under the names of a checkpoint's files: nothing outside is touched, and nobody waits."""

import os

import pytest
import torch
from tensordict import TensorDict

from contracts.corruption import KINDS, OUTSIDE, plant, within
from contracts.waiting import NEVER
from engram.checkpoint.reader import verify
from engram.data import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
from engram.errors import CheckpointError

NAMES = [
    "CURRENT", "CURRENT.new", "LOCK", "g-000001", "g-000002", "g-000003", "g-000002/manifest.json",
    "g-000002/ENGRAM-SNAPSHOT", "g-000002/storage", "g-000002/storage/rows-00000.bin",
]  # fmt: skip


def buffer(rows=200):
    rb = ReplayBuffer(storage=LazyTensorStorage(1000), sampler=PrioritizedSampler(None, 1.0, 1.0), batch_size=8)
    rb.extend(TensorDict({"n": torch.arange(rows)}, [rows]))
    return rb


def planted(kind, name, ram_path):
    path = ram_path / "saved"
    rb = buffer()
    rb.dumps(path, keep_last=2)
    rb.extend(TensorDict({"n": torch.arange(7)}, [7]))
    rb.dumps(path, keep_last=2)
    place = path / name
    if place.is_dir():
        place.rename(ram_path / "was")
    place.parent.mkdir(exist_ok=True)
    plant(kind, place, ram_path / "outside")
    return rb, path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_loads_and_saves_touch_nothing_outside_and_work_or_say_why_not(kind, name, ram_path):
    rb, path = planted(kind, name, ram_path)
    other = buffer(1)
    with within(NEVER):
        try:
            other.loads(path)
            assert torch.equal(other[:]["n"], rb[:]["n"])
        except CheckpointError as error:
            assert str(path) in str(error)
        try:
            verify(path)
        except CheckpointError:
            pass
        try:
            rb.dumps(path)
        except CheckpointError as error:
            saved = False
            assert str(path) in str(error)
        else:
            saved = True
            buffer(1).loads(path)
    assert (ram_path / "outside").read_bytes() == OUTSIDE and not (ram_path / "nothing").exists()
    assert saved or name in ("CURRENT", "CURRENT.new", "LOCK", "g-000003")
    assert saved or kind != "hard link" or name == "g-000003"


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_has_the_name_of_the_next_pointer_gives_way_but_for_a_folder(kind, ram_path):
    rb, path = planted(kind, "CURRENT.new", ram_path)
    with within(NEVER):
        if "folder" in kind:
            with pytest.raises(CheckpointError, match=r"CURRENT\.new"):
                rb.dumps(path)
            (path / "CURRENT.new").rename(ram_path / "away")
        rb.dumps(path)
    other = buffer(1)
    other.loads(path)
    assert torch.equal(other[:]["n"], rb[:]["n"]) and not os.path.lexists(path / "CURRENT.new")
    assert (ram_path / "outside").read_bytes() == OUTSIDE


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_beside_a_lost_pointer_does_not_wait_for_a_manifest(kind, ram_path):
    """Without CURRENT the save looks into each manifest for one that could be rescued."""
    rb, path = planted(kind, "g-000002/manifest.json", ram_path)
    (path / "CURRENT").unlink()
    with within(NEVER):
        rb.dumps(path)
    assert verify(path).ok and (ram_path / "outside").read_bytes() == OUTSIDE
