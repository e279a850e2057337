"""Datasets that are read through `Reward2GoTransform`, whatever the size of their blocks."""

from __future__ import annotations

import warnings

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.data import LazyTensorStorage, ReplayBuffer
from engram.data.datasets import read_hdf5, read_minari, read_parquet, write_hdf5, write_minari, write_parquet
from engram.envs.transforms import Compose, Reward2GoTransform

LENGTHS = (4, 1, 9, 2)


def episodes(last_ends: bool) -> TensorDict:
    n = sum(LENGTHS)
    ends = torch.zeros(n, 1, dtype=torch.bool)
    ends[torch.tensor(LENGTHS).cumsum(0) - 1] = True
    ends[-1] = last_ends
    number = torch.arange(n + 1).float().unsqueeze(1)
    following = {"observation": number[1:], "reward": number[1:] ** 2, "terminated": ends}
    following |= {"truncated": torch.zeros_like(ends), "done": ends.clone()}
    ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    steps = {"observation": number[:-1], "action": torch.zeros(n, dtype=torch.int64), "collector": {"traj_ids": ids}}
    return TensorDict({**steps, "next": following}, [n])


@pytest.mark.filterwarnings("ignore:.*(environment|spaces|env_spec)")
@each("block", [1, 60, 200, 1 << 20])
@each("last_ends", [True, False])
@each(
    ("write", "read", "name"),
    [
        (write_minari, read_minari, "made-v0"),
        (write_hdf5, read_hdf5, "made.h5"),
        (write_parquet, read_parquet, "made.parquet"),
    ],
)
def test_returns_are_those_of_whole_episodes(block, last_ends, write, read, name, tmp_path, monkeypatch):
    rows = episodes(last_ends)
    source = ReplayBuffer(storage=LazyTensorStorage(50))
    source.extend(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write(source, tmp_path / name)
    monkeypatch.setattr("engram.datasets.episodes.BLOCK_BYTES", block)
    rb = ReplayBuffer(storage=LazyTensorStorage(50), transform=Compose(Reward2GoTransform(gamma=0.5)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert read(tmp_path / name, rb, progress=False) == len(rows)
    expected = [Reward2GoTransform(0.5)(part.clone()) for part in rows.split(LENGTHS)]
    torch.testing.assert_close(rb[:]["reward_to_go"], torch.cat(expected)["reward_to_go"])
    assert torch.equal(rb[:]["observation"], rows["observation"])
