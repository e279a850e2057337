"""`~` at the beginning of a path is the home folder, wherever a user gives one."""

import os
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import engram
from contracts.each import each
from engram import datasets
from engram.cli import convert, info
from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    yield home
    assert not os.listdir(elsewhere) and os.listdir(home)


def steps(n=3):
    following = {"observation": torch.ones(n, 2), "reward": torch.ones(n, 1), "done": torch.ones(n, 1).bool()}
    return TensorDict({"observation": torch.zeros(n, 2), "action": torch.zeros(n, 1), "next": following}, [n])


def filled(storage=None):
    rb = ReplayBuffer(storage=LazyTensorStorage(10) if storage is None else storage)
    rb.extend(steps())
    return rb


def test_of_stores(home):
    rb = filled(LazyMemmapStorage(10, scratch_dir="~/store"))
    assert rb.storage.scratch_dir == home / "store" and (home / "store").is_dir()
    assert len(LazyMemmapStorage.open("~/store", read_only=True)) == 3
    rb.storage.close()
    for opened in (ReplayBuffer.open(Path("~/store")), engram.load("~/store")):
        assert len(opened) == 3
        opened.storage.close()
    assert info("~/store").kind == "store"


def test_of_checkpoints(home):
    rb = filled()
    rb.dumps("~/whole")
    rb.begin_dumps("~/aside").result()
    rb.storage.dumps("~/storage")
    rb.sampler.dumps("~/sampler")
    rb.writer.dumps("~/writer")
    assert sorted(os.listdir(home)) == ["aside", "sampler", "storage", "whole", "writer"]
    for path in ("~/whole", "~/aside"):
        again = ReplayBuffer(storage=LazyTensorStorage(10))
        again.loads(path)
        assert len(again) == len(engram.load(path)) == 3 and engram.verify(path).ok
    for part, path in ((rb.storage, "~/storage"), (rb.sampler, "~/sampler"), (rb.writer, "~/writer")):
        part.loads(path)
    assert info("~/whole").kind == "checkpoint"


@each("form", ["hdf5", "parquet", "minari"])
def test_of_datasets(home, form):
    pytest.importorskip({"parquet": "pyarrow"}.get(form, "h5py"))
    path = f"~/steps.{form}"
    getattr(datasets, f"write_{form}")(steps(), path, progress=False)
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    assert getattr(datasets, f"read_{form}")(path, rb, progress=False) == 3 and (home / f"steps.{form}").exists()
    assert sum(len(batch) for batch in getattr(datasets, f"iter_{form}")(path)) == 3
    assert info(path).rows == 3


def test_of_what_the_command_writes(home):
    filled().dumps("~/whole")
    convert("~/whole", "~/steps.h5", to="hdf5")
    assert (home / "steps.h5").is_file()
