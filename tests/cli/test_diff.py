"""`diff`: keys, rows and parts that differ."""

import json

import pytest
import torch
from tensordict import TensorDict

from cli.support import episodes, store
from cli.test_command import call
from engram.cli import diff
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.data.datasets import write_parquet
from engram.transforms import Transform


class Many(Transform):
    """A transform whose state has thirty numbers."""

    def __init__(self, first: float = 0.0) -> None:
        super().__init__()
        self.first = first

    def state_dict(self, *args, **kwargs):
        return {f"n{k}": self.first + k for k in range(30)}

    def load_state_dict(self, state, *args, **kwargs):
        self.first = state["n0"]


def test_a_store_equals_its_checkpoint_and_its_parquet_file(tmp_path):
    rb = store(tmp_path)
    rb.dumps(tmp_path / "saved")
    write_parquet(rb, tmp_path / "steps.parquet")
    for other in ("saved", "steps.parquet"):
        result = diff(tmp_path / "store", tmp_path / other)
        assert result.equal and result.compared == 300 and not result.values


def test_rows_that_were_changed_in_place_are_named_by_key_and_slot(tmp_path):
    rb = store(tmp_path)
    rb.dumps(tmp_path / "saved")
    for row in (3, 7, 8, 9):
        rb.storage.set(row, rb[row].set("action", torch.tensor(-1)))
    result = diff(tmp_path / "saved", tmp_path / "store")
    assert (result.equal, result.rows, result.by) == (False, 4, "sequence")
    assert [tuple(v) for v in result.values] == [("action", 4, "3, 7 to 9")]


def test_two_snapshots_of_a_ring_share_the_rows_that_both_have(tmp_path):
    rb = store(tmp_path, steps=300, capacity=400)
    rb.dumps(tmp_path / "saved", keep_last=2)
    rb.extend(episodes(200))  # 100 rows are overwritten
    rb.dumps(tmp_path / "saved", keep_last=2)
    result = diff(tmp_path / "saved", tmp_path / "saved", snapshot_a="g-000001")
    assert (result.by, result.compared, result.rows, result.only_a, result.only_b) == ("sequence", 200, 0, 100, 200)


def test_a_copy_of_a_ring_that_has_gone_round_is_compared_by_age(tmp_path):
    rb = store(tmp_path, capacity=250)
    copy = TensorDictReplayBuffer(storage=LazyMemmapStorage(250, scratch_dir=tmp_path / "copy"))
    copy.extend(episodes()[50:])
    result = diff(tmp_path / "store", tmp_path / "copy")
    assert (result.equal, result.by, result.compared) == (True, "age", 250)
    assert not diff(tmp_path / "store", tmp_path / "copy", by="sequence").equal and len(rb) == 250


def test_keys_that_are_missing_or_of_another_form_are_named(tmp_path):
    for name, batch in (
        ("a", {"x": torch.zeros(3), "y": torch.zeros(3)}),
        ("b", {"x": torch.zeros(3), "y": torch.zeros(3, 2), "z": torch.zeros(3)}),
    ):
        ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path / name)).extend(batch)
    result = diff(tmp_path / "a", tmp_path / "b")
    assert result.keys == ("z is only in b", "y is float32 [] in a, float32 [2] in b")
    assert result.rows == 0 and not result.equal


def test_nan_equals_nan_and_zero_is_not_minus_zero(tmp_path):
    for name, zero in (("a", 0.0), ("b", -0.0)):
        rb = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path / name))
        rb.extend({"x": torch.tensor([float("nan"), zero])})
    assert [tuple(v) for v in diff(tmp_path / "a", tmp_path / "b").values] == [("x", 1, "1")]


def test_settings_and_state_of_the_parts_of_checkpoints_are_compared(tmp_path):
    for name, beta in (("a", 0.4), ("b", 0.5)):
        rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=PrioritizedSampler(10, 0.7, beta), batch_size=2)
        rb.update_priority(rb.extend(torch.arange(5)), torch.arange(5.0) + (name == "b"))
        rb.dumps(tmp_path / name)
    result = diff(tmp_path / "a", tmp_path / "b")
    assert result.rows == 0 and not result.equal
    assert "sampler.state.beta is 0.4 in a, 0.5 in b" in result.parts
    assert any("numbers differ" in line and "sampler" in line for line in result.parts)
    assert not diff(tmp_path / "a", tmp_path / "a").parts


def test_of_many_differences_of_a_part_twenty_are_told_and_the_others_counted(tmp_path):
    for name, first in (("a", 0.0), ("b", 1.0)):
        rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=Many(first))
        rb.extend(TensorDict({"reward": torch.zeros(2, 1)}, [2]))
        rb.dumps(tmp_path / name)
    lines = diff(tmp_path / "a", tmp_path / "b").parts
    assert len(lines) == 21 and lines[-1].endswith(": 10 more differences")


def test_items_of_any_form_are_compared_one_by_one(tmp_path):
    for name, last in (("a", {"x": [1, "c"]}), ("b", {"x": [1, "d"]})):
        rb = ReplayBuffer(storage=ListStorage(10))
        rb.extend([{"x": torch.ones(2)}, last])
        rb.dumps(tmp_path / name)
    assert [tuple(v) for v in diff(tmp_path / "a", tmp_path / "b").values] == [("item", 1, "1")]


def test_the_command_has_exit_code_1_where_something_differs(tmp_path):
    rb = store(tmp_path)
    rb.dumps(tmp_path / "saved")
    assert call("diff", tmp_path / "store", tmp_path / "saved").exit_code == 0
    rb[0] = rb[1]
    shown = call("diff", tmp_path / "store", tmp_path / "saved")
    assert shown.exit_code == 1 and "observation" in shown.output and "1 of 300 rows" in shown.output
    assert json.loads(call("diff", tmp_path / "store", tmp_path / "saved", "--json").stdout)["rows"] == 1


def test_another_way_to_compare_is_refused(tmp_path):
    with pytest.raises(ValueError, match="by is 'sequence' or 'age', got 'slot'"):
        diff(tmp_path, tmp_path, by="slot")
