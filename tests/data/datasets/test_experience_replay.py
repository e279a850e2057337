"""Datasets as replay buffers."""

import copy
import os
import sys
from types import ModuleType

import pytest
import torch

from data.datasets.support import steps
from engram.data import PrioritizedSampler, SamplerWithoutReplacement, SliceSampler, TensorDictReplayBuffer
from engram.data.datasets import D4RLExperienceReplay, MinariExperienceReplay, write_hdf5, write_minari
from engram.envs.transforms import RewardScaling
from engram.errors import DatasetError

pytest.importorskip("h5py", reason='reading datasets needs h5py: pip install "engram[h5]"')

LENGTHS = [3, 1, 4]


@pytest.fixture(params=["minari", "d4rl"])
def dataset(request, tmp_path):
    """A function that opens a dataset of three episodes, of 3, 1 and 4 steps, with a batch size and more arguments."""
    if request.param == "minari":
        write_minari(steps(LENGTHS), tmp_path / "cart" / "pole-v0")
        return lambda *args, **more: MinariExperienceReplay(
            "cart/pole-v0", *args, root=tmp_path, download=False, **more
        )
    write_hdf5(steps(LENGTHS), tmp_path / "hopper-medium-v2.hdf5")
    return lambda *args, **more: D4RLExperienceReplay("hopper-medium-v2", *args, root=tmp_path, download=False, **more)


def test_a_dataset_is_a_buffer_of_all_its_steps(dataset):
    rb = dataset(4)
    assert isinstance(rb, TensorDictReplayBuffer) and len(rb) == sum(LENGTHS)
    ids = rb[:]["collector", "traj_ids"]
    assert torch.unique_consecutive(ids, return_counts=True)[1].tolist() == LENGTHS
    batch = rb.sample()
    assert batch.shape == (4,) and torch.equal(rb[batch["index"]]["action"], batch["action"])


def test_a_dataset_cannot_be_written_emptied_or_replaced(dataset):
    rb = dataset(4)
    before = rb[:]
    for change in (
        lambda: rb.extend(before),
        lambda: rb.add(before[0]),
        rb.empty,
        lambda: rb.__setitem__(0, before[0]),
    ):
        with pytest.raises(RuntimeError, match="immutable dataset"):
            change()
    assert bool((rb[:] == before).all())


def test_samplers_and_transforms_work(dataset):
    rb = dataset(4, sampler=SamplerWithoutReplacement(), transform=RewardScaling(0.0, 2.0), prefetch=2)
    seen = torch.cat([rb.sample()["index"] for _ in range(2)])
    assert sorted(seen.tolist()) == list(range(8))
    stored = rb.storage[:]["next", "reward"]
    scaled = torch.cat([rb.sample()["next", "reward"] for _ in range(2)])
    assert torch.equal(scaled.sort(0).values, (stored * 2).sort(0).values)


def test_slices_do_not_cross_episodes(dataset):
    rb = dataset(60, sampler=SliceSampler(slice_len=3))
    ids = rb.sample()["collector", "traj_ids"].reshape(-1, 3)
    assert bool((ids == ids[:, :1]).all())


def test_priorities_may_be_updated(dataset):
    rb = dataset(32, sampler=PrioritizedSampler(8, 1.0, 1.0))
    rb.update_priority(torch.arange(8), torch.tensor([0.0] * 7 + [1.0]))
    assert (rb.sample()["index"] == 7).float().mean() > 0.9


def test_trajectories_may_be_the_items(dataset):
    rb = dataset(2, split_trajs=True)
    assert len(rb) == 3
    items = rb[:]
    assert items["collector", "mask"].sum(-1).tolist() == LENGTHS
    assert rb.sample().shape == (2, 4)
    flat = dataset(2)[:]["action"]
    assert torch.equal(items["action"][items["collector", "mask"]], flat)


def test_a_copy_has_the_same_rows(dataset):
    rb = dataset(4)
    assert bool((copy.deepcopy(rb)[:] == rb[:]).all())


def test_episodes_of_minari_have_their_number(tmp_path):
    write_minari(steps(LENGTHS), tmp_path / "set-v0")
    rb = MinariExperienceReplay("set-v0", 4, root=tmp_path, sampler=SliceSampler(num_slices=2, traj_key="episode"))
    assert rb[:]["episode"].tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert MinariExperienceReplay("any name", 4, root=tmp_path / "set-v0").data_path == tmp_path / "set-v0"


def test_the_end_may_be_the_terminal_step_only(tmp_path):
    batch = steps(LENGTHS)
    batch["next", "truncated"] = batch["next", "done"].clone()
    batch["next", "terminated"] = torch.zeros_like(batch["next", "done"])
    write_hdf5(batch, tmp_path / "set.hdf5")
    assert D4RLExperienceReplay("set", 4, root=tmp_path)[:]["next", "done"].sum() == len(LENGTHS)
    assert D4RLExperienceReplay("set", 4, root=tmp_path, use_truncated_as_done=False)[:]["next", "done"].sum() == 0


def test_d4rls_own_file_names_are_known(tmp_path):
    write_hdf5(steps(LENGTHS), tmp_path / "hopper_medium-v2.hdf5")
    assert len(D4RLExperienceReplay("hopper-medium-v2", 4, root=tmp_path)) == 8
    assert len(D4RLExperienceReplay("any name", 4, root=tmp_path / "hopper_medium-v2.hdf5")) == 8


def test_a_dataset_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "minari", None)
    for kind in (MinariExperienceReplay, D4RLExperienceReplay):
        with pytest.raises(FileNotFoundError, match="there is no dataset 'set-v0'"):
            kind("set-v0", 4, root=tmp_path, download=False)
    with pytest.raises(ImportError, match="pip install minari"):
        MinariExperienceReplay("set-v0", 4, root=tmp_path)
    with pytest.raises(FileNotFoundError, match="D4RL's files are not downloaded"):
        D4RLExperienceReplay("set-v0", 4, root=tmp_path)


@pytest.mark.parametrize("download", [True, "force"])
def test_minari_downloads_into_the_folder(tmp_path, monkeypatch, download):
    calls = []

    def download_dataset(name, force_download):
        calls.append((name, force_download, os.environ["MINARI_DATASETS_PATH"]))
        write_minari(steps(LENGTHS), tmp_path / name, overwrite=True)

    minari = ModuleType("minari")
    minari.download_dataset = download_dataset
    monkeypatch.setitem(sys.modules, "minari", minari)
    monkeypatch.delenv("MINARI_DATASETS_PATH", raising=False)
    for _ in range(2):
        assert len(MinariExperienceReplay("set-v0", 4, root=tmp_path, download=download)) == 8
    times = 2 if download == "force" else 1
    assert calls == [("set-v0", download == "force", str(tmp_path))] * times


def test_folders_of_the_libraries_are_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "m"))
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path / "d"))
    write_minari(steps(LENGTHS), tmp_path / "m" / "set-v0")
    (tmp_path / "d").mkdir()
    write_hdf5(steps(LENGTHS), tmp_path / "d" / "set-v0.hdf5")
    assert len(MinariExperienceReplay("set-v0", 4)) == len(D4RLExperienceReplay("set-v0", 4)) == 8


def test_metadata_that_say_fewer_steps_lose_none(tmp_path):
    write_minari(steps(LENGTHS), tmp_path / "set-v0")
    metadata = tmp_path / "set-v0" / "data" / "metadata.json"
    text = metadata.read_text()
    assert '"total_steps": 8' in text
    metadata.write_text(text.replace('"total_steps": 8', '"total_steps": 5'))
    with pytest.raises(DatasetError, match="has more than the 5 steps"):
        MinariExperienceReplay("set-v0", 4, root=tmp_path)
    metadata.unlink()
    assert len(MinariExperienceReplay("set-v0", 4, root=tmp_path)) == 8


@pytest.mark.parametrize("setting", ["from_env", "terminate_on_end", "render_mode"])
def test_what_only_d4rls_package_does_is_refused(setting, tmp_path):
    with pytest.raises(TypeError, match=f"{setting}: only D4RL's own package"):
        D4RLExperienceReplay("set-v0", 4, root=tmp_path, **{setting: True})
