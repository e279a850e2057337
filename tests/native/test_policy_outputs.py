"""Columns of a policy's outputs, and arrays of its actions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from contracts.each import each
from engram._native import ActionReader, OutputRecorder, RowCopies


def recorder(**columns):
    return OutputRecorder([*columns], [*columns.values()])


def test_outputs_are_copied_to_their_row_in_any_order_and_with_any_strides():
    value, loc = np.zeros((3, 2), np.float32), np.zeros((3, 2, 2), np.float64)
    put = recorder(value=value, loc=loc).put
    whole = torch.arange(8.0, dtype=torch.float64).reshape(2, 4)
    assert put(1, {"value": torch.tensor([1.0, 2.0]), "loc": whole[:, 1:3]})
    assert put(2, {"loc": whole.T[:2], "value": torch.tensor(7.0).expand(2)})
    assert value.tolist() == [[0, 0], [1, 2], [7, 7]]
    assert loc.tolist() == [[[0, 0], [0, 0]], [[1, 2], [5, 6]], [[0, 4], [1, 5]]]


@each(
    "outputs",
    [
        {},
        {"value": torch.ones(2)},
        {"value": torch.ones(2), "other": torch.ones(2, 2)},
        {"value": torch.ones(2), "loc": torch.ones(2, 2), "other": torch.ones(2)},
        {"value": torch.ones(2), "loc": torch.ones(2, 3)},
        {"value": torch.ones(2), "loc": torch.ones(4)},
        {"value": torch.ones(2), "loc": torch.ones(2, 2, dtype=torch.float64)},
        {"value": torch.ones(2), "loc": torch.ones(2, 2).to_sparse()},
        {"value": torch.ones(2), "loc": torch._neg_view(torch.ones(2, 2))},
        {"value": torch.ones(2), "loc": torch.ones(2, 2, device="meta")},
        {"value": torch.ones(2), "loc": torch.nn.Parameter(torch.ones(2, 2))},
        {"value": torch.ones(2), "loc": np.ones((2, 2), np.float32)},
        {"value": torch.ones(2), ("loc",): torch.ones(2, 2)},
        [("value", torch.ones(2)), ("loc", torch.ones(2, 2))],
    ],
)
def test_outputs_of_another_form_are_left_out_as_a_whole(outputs):
    value, loc = np.zeros((3, 2), np.float32), np.zeros((3, 2, 2), np.float32)
    assert not recorder(value=value, loc=loc).put(1, outputs)
    assert not value.any() and not loc.any()


def test_no_row_beyond_the_columns_is_written():
    columns = recorder(value=np.zeros((3, 2), np.float32))
    with pytest.raises(IndexError, match="no row"):
        columns.put(3, {"value": torch.ones(2)})


@each(
    "column",
    [np.zeros(()), np.zeros((3, 2)).T, np.broadcast_to(np.zeros(2), (3, 2)), [0.0], np.zeros(3, object), np.zeros(4)],
)
def test_columns_are_contiguous_arrays_of_as_many_rows(column):
    with pytest.raises(TypeError, match="contiguous arrays"):
        OutputRecorder(["first", "second"], [np.zeros((3, 2)), column])


def test_columns_have_one_text_for_a_key_each():
    with pytest.raises(ValueError, match="one key"):
        OutputRecorder(["first"], [])
    with pytest.raises(TypeError, match="strings"):
        OutputRecorder([1], [np.zeros(3)])


def test_choices_are_new_arrays_from_the_start_on():
    read, action = ActionReader(np.zeros(3, np.int64), 4, 2).read, torch.tensor([0, 3, 1])
    array = read(action)
    action.zero_()
    assert array.dtype == np.int64 and array.tolist() == [2, 5, 3] and array.flags.writeable


@each(
    "action",
    [
        torch.tensor([0, 4, 1]),
        torch.tensor([0, -1, 1]),
        torch.tensor([0, 1]),
        torch.tensor([[0, 1, 2]]),
        torch.tensor([0, 1, 2], dtype=torch.int32),
        torch.tensor([0.0, 1, 2]),
        np.array([0, 1, 2]),
        None,
    ],
)
def test_choices_beyond_the_space_and_other_forms_need_a_closer_look(action):
    assert ActionReader(np.zeros(3, np.int64), 4, 2).read(action) is None


@each("dtype", [np.float32, np.float64, np.int64, np.uint8])
def test_numbers_are_new_arrays_of_their_dtype(dtype):
    action = torch.from_numpy(np.arange(12).astype(dtype).reshape(2, 6))[:, ::2]
    array = ActionReader(np.zeros((2, 3), dtype), 0, 0).read(action)
    assert array.dtype == dtype and array.tolist() == action.tolist() and array.flags.owndata


def test_infinite_numbers_are_of_a_box_and_nan_is_not():
    read = ActionReader(np.zeros((1, 2), np.float32), 0, 0).read
    assert read(torch.tensor([[1.0, float("-inf")]])).tolist() == [[1.0, float("-inf")]]
    assert read(torch.tensor([[1.0, float("nan")]])) is None
    assert read(torch._neg_view(torch.tensor([[1.0, 2.0]]))) is None


def test_examples_of_choices_are_int64():
    with pytest.raises(TypeError, match="choices are int64"):
        ActionReader(np.zeros(3, np.float32), 2, 0)
    with pytest.raises(TypeError, match="an array"):
        ActionReader(np.zeros((), np.float32), 0, 0)


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_, np.int64, np.float16, np.float32])
@pytest.mark.parametrize("shape", [(3,), (3, 0), (3, 2), (3, 4, 84, 84)])
def test_row_is_copied_into_a_tensor_of_its_own(shape, dtype):
    rows = (np.arange(int(np.prod(shape))) % 199).reshape(shape).astype(dtype)
    copies = RowCopies(rows)
    expected = torch.from_numpy(rows.copy())
    tensors = [copies.row(number) for number in range(3)]
    rows[:] = 0
    for tensor, row in zip(tensors, expected, strict=True):
        assert tensor.dtype == row.dtype and torch.equal(tensor, row)
        tensor.zero_()
    assert torch.equal(copies.row(1), torch.zeros_like(expected[1]))


def test_row_beyond_the_array_is_an_index_error():
    with pytest.raises(IndexError, match="no such row"):
        RowCopies(np.zeros((3, 2))).row(3)


@each("array", [np.zeros((4, 2))[::2], np.zeros(()), np.array(["a"]), np.ma.zeros((2, 2)), [[1.0]], torch.zeros(2, 2)])
def test_rows_of_anything_but_a_contiguous_array_of_numbers_are_refused(array):
    with pytest.raises(TypeError, match="contiguous array"):
        RowCopies(array)
