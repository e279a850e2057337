"""What the command says of rows that were removed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from typer.testing import CliRunner

from engram.cli.activity import top
from engram.cli.description import info
from engram.cli.main import command
from engram.cli.rows import head, sample
from engram.data import LazyMemmapStorage, ReplayBuffer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of ten rows, of which rows 2 and 5 were removed, and a checkpoint of it beside it."""
    rb = ReplayBuffer(storage=LazyMemmapStorage(20, scratch_dir=tmp_path / "store"))
    rb.extend(TensorDict({"n": torch.arange(10)}, [10]))
    assert rb.remove(torch.tensor([2, 5])) == 2
    rb.dumps(tmp_path / "saved")
    rb.storage.close()
    return tmp_path


@pytest.mark.parametrize("place", ["store", "saved"])
def test_info_counts_removed_rows_of_a_store_and_of_a_checkpoint(folder: Path, place: str) -> None:
    described = info(folder / place)
    assert (described.rows, described.removed) == (10, 2)
    said = CliRunner().invoke(command(), ["info", str(folder / place)])
    assert "2 of these, which are not drawn" in said.output


@pytest.mark.parametrize("place", ["store", "saved"])
def test_head_shows_removed_rows_and_marks_them(folder: Path, place: str) -> None:
    shown = head(folder / place, 4)
    assert shown.removed == (2,)
    assert [row[0] for row in shown.cells()[1]] == ["0", "1", "2 removed", "3"]
    assert [row.get("removed", False) for row in shown.to_json()] == [False, False, True, False]


@pytest.mark.parametrize("place", ["store", "saved"])
def test_sample_draws_no_removed_row(folder: Path, place: str) -> None:
    assert {*sample(folder / place, 200, seed=0).slots.tolist()} == {*range(10)} - {2, 5}


def test_top_counts_removed_rows(folder: Path) -> None:
    assert next(top(folder / "store"))[0].removed == 2
    said = CliRunner().invoke(command(), ["top", str(folder / "store"), "-n", "1"])
    assert "removed    2 of these, which are not drawn" in said.output
