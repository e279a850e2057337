"""The rows of a store as commands see them that load no torch: the trajectories and values that a sampler sees."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from cli.support import episodes, store
from engram.cli import info
from engram.data import LazyMemmapStorage, ReplayBuffer
from engram.store.episodes import EpisodeIndex
from engram.store.header import StoreFile
from engram.store.observed import ObservedRows


def observed(folder) -> ObservedRows:
    return ObservedRows(StoreFile.observed(folder).store)


def steps(n: int, envs: int, seed: int, ids: bool) -> TensorDict:
    """Random flags or ids, in ragged episodes."""
    generator = torch.Generator().manual_seed(seed)
    shape = (envs, n) if envs > 1 else (n,)
    ends = torch.rand(*shape, 1, generator=generator) < 0.1
    data = TensorDict({"x": torch.rand(*shape, 3, generator=generator), "next": {"done": ends}}, shape)
    if ids:
        data["collector", "traj_ids"] = ends.squeeze(-1).long().cumsum(-1)
    return data


@pytest.mark.parametrize("ids", [False, True], ids=["flags", "ids"])
@pytest.mark.parametrize(("envs", "capacity"), [(1, 1000), (1, 130), (3, 999), (3, 150)])
def test_trajectories_are_those_of_an_episode_index(tmp_path, envs, capacity, ids):
    rb = ReplayBuffer(storage=LazyMemmapStorage(capacity, scratch_dir=tmp_path, ndim=min(envs, 2), lanes=1))
    for n, seed in ((40, 0), (37, 1), (61, 2)):
        rb.extend(steps(n, envs, seed, ids))
        if seed == 1:
            rb.storage.mark_seam()
    found, wanted = observed(tmp_path).trajectories(), EpisodeIndex().trajectories(rb.storage)
    for ours, theirs in zip(found[:4], wanted, strict=True):
        assert ours.tolist() == theirs.tolist()


def test_trajectories_of_several_lanes_are_those_of_each(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(300, scratch_dir=tmp_path, lanes=3))
    rb.extend(steps(90, 1, 0, False))
    found, wanted = observed(tmp_path).trajectories(), EpisodeIndex().trajectories(rb.storage)
    assert [values.tolist() for values in found[:4]] == [values.tolist() for values in wanted]


def test_flags_read_in_blocks_give_the_same_trajectories(tmp_path, monkeypatch):
    rb = ReplayBuffer(storage=LazyMemmapStorage(500, scratch_dir=tmp_path))
    rb.extend(steps(400, 1, 0, False))
    whole = observed(tmp_path).trajectories()[:4]
    monkeypatch.setattr("engram.store.observed._AT_ONCE", 7)
    assert [values.tolist() for values in observed(tmp_path).trajectories()[:4]] == [
        values.tolist() for values in whole[:4]
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_a_column_has_the_values_of_the_rows(tmp_path, dtype):
    rb = ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=tmp_path))
    value = torch.arange(24).reshape(12, 2).to(dtype)
    rb.extend({"a": torch.zeros(12, dtype=torch.int16), "value": value, "b": torch.zeros(12, 3, dtype=torch.uint8)})
    rows = observed(tmp_path)
    column = rows.column(rows.leaf(("value",)), 0, rows.stored(0))
    assert rows.stored(0) == range(4, 12)  # it goes round the end of the ring
    assert np.array_equal(column[:, 0], value[4:].float().numpy() if dtype == torch.bfloat16 else value[4:].numpy())


def test_a_column_of_rows_that_carry_their_sequence_is_where_it_lies(tmp_path):
    from engram.data import TensorDictMaxValueWriter, TensorDictReplayBuffer

    storage = LazyMemmapStorage(4, scratch_dir=tmp_path)
    rb = TensorDictReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter(rank_key="rank"))
    rb.extend(TensorDict({"rank": torch.arange(6.0), "n": torch.arange(6), "b": torch.zeros(6).bool()}, [6]))
    rows = observed(tmp_path)
    assert sorted(rows.column(rows.leaf(("n",)), 0, rows.stored(0)).ravel()) == [2, 3, 4, 5]
    assert sorted(rows.column(rows.leaf(("rank",)), 0, rows.stored(0)).ravel()) == [2, 3, 4, 5]


def test_info_of_a_store_counts_episodes_and_returns_without_torch(tmp_path):
    store(tmp_path).storage.close()
    code = (
        "import sys; from engram.cli import info; found = info(sys.argv[1], returns=True); "
        "assert found.episodes == 3 and found.returns.mean == 100, found; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "store")], check=True)


def test_steps_whose_ids_are_no_integers_have_no_episodes(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(400, scratch_dir=tmp_path))
    data = episodes()
    data["episode"] = torch.zeros(300)
    rb.extend(data)
    assert observed(tmp_path).trajectories() is None and info(tmp_path).episodes is None
