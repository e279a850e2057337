"""Columns of what environments that step together gave, and batches from these: equal to array operations."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engram._native import StepRecorder, ended_envs, lay_out_frames, one_hot

N, CALLS = 3, 4
NONE = np.zeros(N, np.bool_)


class Columns:
    """The columns of `CALLS` calls, and their recorder."""

    def __init__(self, *shapes, dtype=np.float32):
        self.shown = [np.zeros((CALLS + 1, N, *shape), dtype) for shape in shapes]
        self.reward = np.zeros((CALLS, N, 1), np.float32)
        self.terminated, self.truncated, self.done = (np.zeros((CALLS, N, 1), np.bool_) for _ in range(3))
        self.idle, self.waiting = np.zeros((CALLS, N), np.bool_), np.zeros(N, np.int64)
        self.recorder = StepRecorder(
            self.shown, self.reward, self.terminated, self.truncated, self.done, self.idle, self.waiting
        )


def test_a_call_is_copied_into_its_row_and_its_frames_are_counted():
    columns = Columns((2,), ())
    shown = np.arange(6, dtype=np.float32).reshape(2, N).T, np.float32([7, 8, 9])  # the first one is not in C order
    ends = np.array([False, True, False])
    assert columns.recorder.add(1, shown, np.array([1.0, 2.0, 3.0]), ends, NONE, ends) == 1
    assert columns.shown[0][2].tolist() == shown[0].tolist() and columns.shown[1][2].tolist() == [7, 8, 9]
    assert columns.reward[1, :, 0].tolist() == [1, 2, 3]
    assert columns.terminated[1, :, 0].tolist() == columns.done[1, :, 0].tolist() == ends.tolist()
    assert columns.idle[1].tolist() == ends.tolist() and columns.waiting.tolist() == [1, 0, 1]
    assert columns.recorder.add(2, shown, np.float32([4, 5, 6]), NONE, NONE, None) == 0
    assert columns.waiting.tolist() == [2, 1, 2] and not columns.idle[2].any()


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32, np.int64, np.complex128])
def test_arrays_in_any_order_of_memory_are_copied(dtype):
    columns = Columns((4, 5), dtype=dtype)
    array = np.arange(5 * 4 * 2 * N).reshape(5, 4, 2 * N).astype(dtype).T[::2].transpose(0, 1, 2)
    assert columns.recorder.add(0, (array,), np.zeros(N), NONE, NONE, None) == 0
    assert np.array_equal(columns.shown[0][1], array)


class Child(np.ndarray):
    """A child of numpy's class, which may mean something else by its memory."""


FIT = (np.zeros((N, 2), np.float32),), np.zeros(N), NONE, NONE, None


@pytest.mark.parametrize(
    "place, value",
    [
        (0, ()),
        (0, (np.zeros((N, 2), np.float64),)),
        (0, (np.zeros((N, 3), np.float32),)),
        (0, (np.zeros((N, 2, 1), np.float32),)),
        (0, (np.zeros((N, 2), ">f4"),)),
        (0, (np.zeros((N, 2), np.float32).view(Child),)),
        (0, (np.ma.zeros((N, 2), np.float32),)),
        (0, ([[0.0, 0.0]] * N,)),
        (1, np.zeros(N, np.int64)),
        (1, np.zeros((N, 1))),
        (1, [0.0] * N),
        (2, np.zeros(N, np.uint8)),
        (2, np.zeros(N + 1, np.bool_)),
        (3, None),
        (4, np.zeros(N - 1, np.bool_)),
    ],
)
def test_what_is_not_exactly_of_the_columns_form_is_left_to_the_caller(place, value):
    columns = Columns((2,))
    given = [*FIT]
    given[place] = value
    assert columns.recorder.add(0, *given) == -1
    assert columns.waiting.tolist() == [0] * N
    assert columns.recorder.add(0, *FIT) == 0


@pytest.mark.parametrize("reward, fits", [(3.5e38, False), (np.inf, True), (np.nan, True), (-1e39, False)])
def test_rewards_beyond_float32_are_not_counted(reward, fits):
    columns = Columns((2,))
    rewards = np.array([0.0, reward, 1.0])
    assert columns.recorder.add(0, FIT[0], rewards, *FIT[2:]) == (0 if fits else -2)
    assert columns.waiting.tolist() == [int(fits)] * N


def test_calls_beyond_the_columns_are_refused():
    columns = Columns((2,))
    with pytest.raises(IndexError, match="no row"):
        columns.recorder.add(CALLS, *FIT)


def test_columns_of_other_sizes_are_refused():
    fit = Columns((2,))
    given = [fit.shown, fit.reward, fit.terminated, fit.truncated, fit.done, fit.idle, fit.waiting]
    for place, other in (
        (0, [fit.shown[0][:CALLS]]),
        (0, [fit.shown[0][:, :2].copy()]),
        (2, fit.truncated[:2]),
        (4, np.zeros((CALLS, N, 2), np.bool_)),
        (5, fit.idle[:2]),
        (6, np.zeros(N + 1, np.int64)),
    ):
        with pytest.raises(ValueError, match="same environments"):
            StepRecorder(*given[:place], other, *given[place + 1 :])
    for place, other in ((0, [fit.shown[0][:, ::2]]), (1, fit.reward.astype(np.float64)), (5, fit.idle[0])):
        with pytest.raises(TypeError, match="column"):
            StepRecorder(*given[:place], other, *given[place + 1 :])
    read_only = fit.reward.copy()
    read_only.flags.writeable = False
    with pytest.raises(TypeError, match="column"):
        StepRecorder(fit.shown, read_only, *given[2:])


def test_envs_whose_episode_ends_are_those_of_either_flag_that_were_not_only_reset():
    one, two, idle = (np.array(flags) for flags in ([True, False, False], [False, True, False], [True, False, False]))
    assert ended_envs(3, one, two).tolist() == [True, True, False]
    assert ended_envs(3, one, two, idle).tolist() == [False, True, False]
    assert ended_envs(3, one, NONE, idle) is None and ended_envs(3, NONE, NONE) is None
    for flags in ([False] * 3, np.zeros(3), np.zeros(2, np.bool_), None):
        with pytest.raises(TypeError, match="bool arrays"):
            ended_envs(3, NONE, flags)


@given(
    n=st.integers(1, 4),
    steps=st.integers(1, 6),
    more=st.integers(0, 3),
    shape=st.sampled_from([(), (1,), (2,), (4,), (0,), (3, 2)]),
    dtype=st.sampled_from([np.bool_, np.uint8, np.float32, np.float64, np.complex128]),
    seed=st.integers(0, 99),
)
def test_frames_are_laid_out_as_by_array_operations(n, steps, more, shape, dtype, seed):
    draw = np.random.default_rng(seed)
    rows, envs = steps + more, np.arange(n)[:, None]
    column = (draw.random((rows + 1, n, *shape)) * 100).astype(dtype)
    calls = np.sort([draw.permutation(rows)[:steps] for _ in range(n)], 1).astype(np.int64)
    marked = [(call, env) for call in range(rows) for env in range(n) if draw.random() < 0.3]
    last_calls, last_envs = (np.array([pair[k] for pair in marked], np.int64) for k in (0, 1))
    last = (draw.random((len(marked), *shape)) * 100).astype(dtype)
    following = column[1:].copy()
    following[last_calls, last_envs] = last
    for asked, frames in ((None, np.arange(steps)[None]), (calls, calls)):
        present, after = lay_out_frames([column], [column], steps, asked, last_calls, last_envs, [last])
        assert np.array_equal(present.numpy(), column[frames, envs])
        assert np.array_equal(after.numpy(), following[frames, envs])


def test_frames_of_no_call_or_environment_are_refused():
    column, none = np.zeros((3, 2, 1), np.float32), np.zeros(0, np.int64)
    rows = np.zeros((1, 1), np.float32)

    def laid_out(
        steps=2, calls=None, last_calls=none, last_envs=none, last=rows[:0], columns=(column,), next_of=column
    ):
        return lay_out_frames([*columns], [next_of], steps, calls, last_calls, last_envs, [last])

    assert [tensor.shape for tensor in laid_out()] == [(2, 2, 1)] * 2
    zero = np.zeros(1, np.int64)
    for wrong, error in (
        ({"steps": 3}, IndexError),
        ({"calls": np.array([[0, 2], [0, 1]])}, IndexError),
        ({"calls": np.array([[0, -1], [0, 1]])}, IndexError),
        ({"calls": np.zeros((2, 1), np.int64)}, TypeError),
        ({"calls": np.zeros((2, 2), np.int32)}, TypeError),
        ({"columns": [column, np.zeros((3, 1, 1), np.float32)]}, IndexError),
        ({"next_of": column[:2]}, IndexError),
        ({"last_calls": zero, "last_envs": zero + 2, "last": rows}, IndexError),
        ({"last_calls": zero, "last_envs": zero - 1, "last": rows}, IndexError),
        ({"last_calls": zero, "last_envs": zero}, ValueError),
        ({"last_calls": zero}, ValueError),
        ({"last_calls": np.array([1, 0]), "last_envs": np.zeros(2, np.int64), "last": np.zeros((2, 1), np.float32)},
         ValueError),
    ):  # fmt: skip
        with pytest.raises(error):
            laid_out(**wrong)


@pytest.mark.parametrize("start", [0, 5, -3])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,)])
def test_choices_become_one_hot_vectors(shape, start):
    choices = np.random.default_rng(0).integers(start, start + 3, shape)
    expected = torch.nn.functional.one_hot(torch.as_tensor(choices - start), 3)
    assert torch.equal(one_hot(np.asarray(choices), start, 3), expected.reshape(*shape, 3))
    for beyond in (start - 1, start + 3, np.iinfo(np.int64).max):
        with pytest.raises(IndexError, match="beyond"):
            one_hot(np.array([start, beyond]), start, 3)
    with pytest.raises(TypeError, match="int64"):
        one_hot(np.zeros(3, np.int32), start, 3)
