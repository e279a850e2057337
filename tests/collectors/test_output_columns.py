"""Outputs in columns are, entry by entry, the stacked TensorDicts of the steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, TensorDictBase

from engram.collectors.output_columns import OutputColumns
from engram.collectors.stats import StepsWay
from engram.envs.base import stack_steps

N = torch.Size([2])
SHAPES = {"value": (), "logits": (3,), "frame": (2, 2)}


def outputs_of(t, names, batch_size=N):
    number = 10 * t + torch.arange(1.0, batch_size.numel() + 1)
    return {
        name: number.reshape((*batch_size, *(1 for _ in SHAPES[name]))) * torch.ones(SHAPES[name]) for name in names
    }


def assert_same(batch, expected):
    assert type(batch) is type(expected) and batch.batch_size == expected.batch_size
    assert batch.device == expected.device and set(batch.keys()) == set(expected.keys())
    for key, value in expected.items():
        found = batch.get(key)
        if isinstance(value, TensorDictBase):
            assert_same(found, value)
        elif isinstance(value, torch.Tensor):
            assert found.dtype == value.dtype and torch.equal(found, value) and found.is_contiguous()
        else:
            assert found == value


def filled(steps, batch_size=N, **options):
    columns = OutputColumns(batch_size, None, **options)
    for t, outputs in enumerate(steps):
        columns.put(t, outputs)
    return columns


def stacked(steps, batch_size=N):
    return stack_steps([TensorDict(dict(outputs), batch_size) for outputs in steps], len(batch_size))


def test_a_step_that_is_left_out_after_others_were_dropped_is_zero():
    columns = filled([outputs_of(t, ["value"]) for t in range(5)])
    columns.drop(3)
    columns.put(3, outputs_of(6, ["value"]))
    assert columns.take(4)["value"].T.tolist() == [[31, 32], [41, 42], [0, 0], [61, 62]]


@given(
    names=st.lists(st.sets(st.sampled_from(sorted(SHAPES)), min_size=1), min_size=1, max_size=9),
    batch_size=st.sampled_from([torch.Size([]), N, torch.Size([2, 3])]),
    capacity=st.integers(1, 9),
)
def test_columns_are_the_stacked_steps(names, batch_size, capacity):
    steps = [outputs_of(t, chosen, batch_size) for t, chosen in enumerate(names)]
    columns = filled(steps, batch_size, capacity=capacity)
    assert columns.way == StepsWay("columns")
    assert_same(columns.take(len(steps)), stacked(steps, batch_size))


@given(names=st.lists(st.sets(st.sampled_from(sorted(SHAPES))), min_size=1, max_size=9), data=st.data())
def test_slots_are_rows_of_the_steps_that_were_not_dropped(names, data):
    steps = [outputs_of(t, chosen) for t, chosen in enumerate(names)]
    columns, dropped = filled(steps, capacity=2), data.draw(st.integers(0, len(steps) - 1))
    columns.drop(dropped)
    left = stacked(steps).movedim(1, 0)[dropped:].reshape(-1)
    slots = torch.tensor(
        data.draw(st.lists(st.lists(st.integers(0, len(left) - 1), min_size=2, max_size=2), min_size=1))
    )
    found = columns.at(slots, len(steps) - dropped)
    if found is None:
        assert not any(names[dropped:])
        return
    for key, value in found.items():
        assert torch.equal(value, left[slots][key])
    missing = set(left.keys()) - set(found.keys())
    assert not any(name in missing for chosen in names[dropped:] for name in chosen)


def test_steps_that_are_left_out_are_zero():
    columns = OutputColumns(N, None)
    columns.put(2, {"value": torch.ones(2)})
    assert columns.take(4)["value"].tolist() == [[0, 0, 1, 0], [0, 0, 1, 0]]


def test_second_put_replaces_the_first():
    columns = filled([{"value": torch.ones(2)}, {"value": torch.ones(2)}])
    columns.put(1, {"value": torch.tensor([5.0, 6.0])})
    assert columns.take(2)["value"].tolist() == [[1, 5], [1, 6]]


def test_output_is_copied_when_it_is_put():
    value = torch.ones(2)
    columns = filled([{"value": value}])
    value.zero_()
    assert columns.take(1)["value"].tolist() == [[1], [1]]


@pytest.mark.parametrize("batch_size", [torch.Size([]), N])
def test_what_was_taken_is_never_written_again(batch_size):
    columns = filled([outputs_of(t, ["logits"], batch_size) for t in range(3)], batch_size, capacity=3)
    taken = columns.take(3)
    before = taken.clone()
    for t in range(4):
        columns.put(t, outputs_of(100 + t, ["logits"], batch_size))
    assert_same(taken, before)


def test_outputs_at_slots_are_a_copy():
    columns = filled([outputs_of(t, ["logits"]) for t in range(3)])
    rows = columns.at(torch.tensor([[0, 2], [1, 3]]), 3)
    before = rows.clone()
    columns.drop(1)
    columns.put(1, outputs_of(9, ["logits"]))
    columns.put(2, outputs_of(9, ["logits"]))
    assert_same(rows, before)


def test_nested_entries_have_columns():
    steps = [
        {"value": torch.full((2,), t), "next": TensorDict({"h": torch.full((2, 4), 1.0 * t)}, N)} for t in range(3)
    ]
    columns = filled(steps)
    assert columns.way.way == "columns"
    assert_same(columns.take(3), stacked(steps))


GENERAL = {
    "another dtype": ([{"a": torch.ones(2)}, {"a": torch.ones(2, dtype=torch.int64)}], "float32"),
    "not a tensor": ([{"a": NonTensorData("x", batch_size=N)}] * 2, "NonTensorData"),
    "parameter": ([{"a": torch.nn.Parameter(torch.ones(2))}] * 2, "Parameter"),
    "not a tensor beside one": (
        [{"b": torch.ones(2), "a": NonTensorData(str(t), batch_size=N)} for t in range(3)],
        "NonTensorData",
    ),
    "nested with more dimensions": (
        [{"a": TensorDict({"b": torch.ones(2, 3)}, [2, 3]), "c": torch.full((2,), 1.0 * t)} for t in range(3)],
        "TensorDict",
    ),
    "empty": ([{"a": TensorDict(batch_size=N), "b": torch.ones(2)}] * 2, "TensorDict"),
}


@pytest.mark.parametrize("case", GENERAL)
def test_what_has_no_place_in_columns_is_stacked_and_the_way_says_why(case):
    steps, word = GENERAL[case]
    columns = filled(steps)
    assert columns.way.way == "tensordicts"
    assert "'a'" in columns.way.reason and word in columns.way.reason
    assert_same(columns.take(len(steps)), stacked(steps))
    assert columns.way == StepsWay("columns")  # the next batch begins anew


def test_steps_before_a_change_to_tensordicts_stay():
    steps = [outputs_of(t, ["value", "logits"]) for t in range(3)]
    steps.append({**outputs_of(3, ["value"]), "logits": torch.full((2, 3), 7, dtype=torch.int32)})
    columns = filled(steps)
    rows = columns.at(torch.arange(8), 4)
    assert_same(rows, stacked(steps).movedim(1, 0).reshape(-1))
    columns.drop(2)
    assert_same(columns.take(2), stacked(steps[2:]))


def test_another_shape_is_the_error_of_stacking():
    columns = filled([{"a": torch.ones(2)}, {"a": torch.ones(2, 3)}])
    assert "(2, 3)" in columns.way.reason
    with pytest.raises(RuntimeError, match="incompatible"):
        columns.take(2)


def test_entry_that_becomes_nested_is_an_error_of_stacking():
    columns = filled([{"a": torch.ones(2)}, {"a": TensorDict({"b": torch.ones(2)}, N)}])
    assert "below it" in columns.way.reason
    with pytest.raises(KeyError, match="already present"):
        columns.take(2)


def test_output_of_another_batch_size_is_refused():
    with pytest.raises(RuntimeError, match="batch"):
        OutputColumns(N, None).put(0, {"a": torch.ones(3)})


def test_no_outputs_are_none():
    assert OutputColumns(N, None).take(4) is None
    assert OutputColumns(N, None).at(torch.tensor([0]), 1) is None
    assert filled([{}, {}]).take(2) is None


def test_tensordict_that_is_kept_as_it_is_says_why():
    columns = filled([{"a": torch.ones(2)}])
    columns.put_tensordict(1, TensorDict({"a": torch.zeros(2)}, N), "the policy returned another TensorDict")
    assert columns.way == StepsWay("tensordicts", "the policy returned another TensorDict")
    assert columns.take(2)["a"].tolist() == [[1, 0], [1, 0]]
