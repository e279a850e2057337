"""`head` and `sample`: rows of anything."""

import pytest
import torch

from cli.support import episodes, store
from cli.test_command import call
from engram.cli import head, sample
from engram.data import LazyMemmapStorage, ListStorage, ReplayBuffer
from engram.data.datasets import write_parquet


def test_head_gives_the_oldest_rows_of_a_ring_that_has_gone_round(tmp_path):
    rb = store(tmp_path, capacity=250)  # 300 steps were written
    rows = head(tmp_path / "store", 3)
    assert rows.slots.tolist() == [50, 51, 52] and rows.batch["action"].tolist() == [50, 51, 52]
    assert len(rb) == 250 and len(head(tmp_path / "store", 1000).slots) == 250


def test_sample_draws_stored_rows_and_the_same_ones_with_a_seed(tmp_path):
    store(tmp_path).storage.close()
    rows = sample(tmp_path / "store", 50, seed=3)
    assert torch.equal(rows.batch["action"], rows.slots) and len(rows.slots.unique()) > 10
    assert torch.equal(sample(tmp_path / "store", 50, seed=3).slots, rows.slots)


def test_rows_of_checkpoints_lists_and_datasets(tmp_path):
    rb = store(tmp_path)
    rb.dumps(tmp_path / "saved")
    assert head(tmp_path / "saved", 2).batch["action"].tolist() == [0, 1]
    write_parquet(episodes(), tmp_path / "steps.parquet")
    assert head(tmp_path / "steps.parquet", 2).batch["action"].tolist() == [0, 1]
    items = ReplayBuffer(storage=ListStorage(10))
    items.extend(["a", "b"])
    items.dumps(tmp_path / "items")
    assert head(tmp_path / "items").to_json() == [{"slot": 0, "item": "'a'"}, {"slot": 1, "item": "'b'"}]


def test_an_empty_store_has_no_rows(tmp_path):
    rb = store(tmp_path)
    rb.empty()
    assert len(head(tmp_path / "store").slots) == 0 and len(sample(tmp_path / "store").slots) == 0
    assert "no rows are stored" in call("head", tmp_path / "store").output


def test_a_number_of_rows_below_1_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be 1 or more, got 0"):
        head(tmp_path, 0)


def test_large_leaves_are_summed_up_in_the_table(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path))
    rb.extend({"pixels": torch.arange(2 * 64, dtype=torch.uint8).reshape(2, 8, 8), "reward": torch.tensor([0.5, 1.5])})
    shown = call("head", tmp_path, "-n", 1)
    assert shown.exit_code == 0 and "0.5" in shown.output and "1.5" not in shown.output
    assert "[8, 8] 0 to 63" in shown.output
    assert "slot" in call("sample", tmp_path, "--json").stdout
