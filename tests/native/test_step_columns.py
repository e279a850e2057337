"""Columns of what environments that step together gave, and batches from these: equal to array operations."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engram._native import StepRecorder, ended_envs, one_hot, take_frames

N, CALLS = 3, 4
NONE = np.zeros(N, np.bool_)


class Columns:
    """The columns of `CALLS` calls, and their recorder."""

    def __init__(self, *shapes, dtype=np.float32):
        self.shown = [np.zeros((CALLS + 1, N, *shape), dtype) for shape in shapes]
        self.reward = np.zeros((CALLS, N, 1), np.float32)
        self.terminated, self.truncated, self.done = (np.zeros((CALLS, N, 1), np.bool_) for _ in range(3))
        self.actions = [np.arange(CALLS * N).reshape(CALLS, N)]
        self.idle, self.over = np.zeros((CALLS, N), np.bool_), np.zeros(N, np.bool_)
        self.waiting, self.taken = np.zeros(N, np.int64), np.zeros(N, np.int64)
        self.recorder = StepRecorder(self.waiting, self.taken, self.over)
        self.recorder.use(*self.given(), None)

    def given(self):
        return [self.shown, self.actions, self.reward, self.terminated, self.truncated, self.done, self.idle]


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


def test_flags_are_0_or_1_whatever_byte_stands_for_true():
    columns, odd = Columns((2,)), np.full(N, 255, np.uint8).view(np.bool_)
    columns.recorder.add(0, FIT[0], FIT[1], odd, odd, odd)
    for column in (columns.terminated, columns.truncated, columns.done, columns.idle):
        assert column[0].tobytes() == b"\1" * N


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
    given = fit.given()
    for place, other in (
        (0, [fit.shown[0][:CALLS]]),
        (0, [fit.shown[0][:, :2].copy()]),
        (1, [fit.actions[0][:2]]),
        (3, fit.truncated[:2]),
        (5, np.zeros((CALLS, N, 2), np.bool_)),
        (6, fit.idle[:2]),
    ):
        with pytest.raises(ValueError, match="same environments"):
            fit.recorder.use(*given[:place], other, *given[place + 1 :], None)
    for place, other in ((0, [fit.shown[0][:, ::2]]), (2, fit.reward.astype(np.float64)), (6, fit.idle[0])):
        with pytest.raises(TypeError, match="column"):
            fit.recorder.use(*given[:place], other, *given[place + 1 :], None)
    read_only = fit.reward.copy()
    read_only.flags.writeable = False
    with pytest.raises(TypeError, match="column"):
        fit.recorder.use(*given[:2], read_only, *given[3:], None)
    for counts in ([fit.waiting, fit.taken[:2], fit.over], [fit.waiting, fit.taken, np.zeros(N + 1, np.bool_)]):
        with pytest.raises(ValueError, match="same environments"):
            StepRecorder(*counts)


def test_a_recorder_without_columns_refuses_calls():
    counts = np.zeros(N, np.int64)
    recorder = StepRecorder(counts, counts.copy(), NONE.copy())
    for refused in (
        lambda: recorder.add(0, *FIT),
        lambda: recorder.add_result(0, (FIT[0][0], *FIT[1:4], {})),
        lambda: recorder.keep(0, 0),
        lambda: recorder.take(0, 0, False, counts[:0], counts[:0], []),
    ):
        with pytest.raises(ValueError, match="no columns"):
            refused()


def result(shown=0.0, ends=(), cut=()):
    """What gymnasium's `step` returns, where the episodes of the environments `ends` and `cut` end."""
    flags = np.zeros((2, N), np.bool_)
    flags[0, [*ends]] = flags[1, [*cut]] = True
    return np.full((N, 2), shown, np.float32), np.arange(N) + shown, *flags, {}


def test_a_result_only_resets_environments_whose_episode_the_call_before_ended():
    columns = Columns((2,))
    assert columns.recorder.add_result(0, result(1.0, ends=[0], cut=[2])) == 1
    assert columns.over.tolist() == [True, False, True] and not columns.idle[0].any()
    assert columns.recorder.add_result(1, result(2.0, ends=[0, 1])) == 3
    assert columns.idle[1].tolist() == [True, False, True] and columns.over.tolist() == [False, True, False]
    assert columns.recorder.add_result(2, result(3.0)) == 2
    assert columns.idle[2].tolist() == [False, True, False] and not columns.over.any()
    assert columns.recorder.add_result(3, result(4.0)) == 0
    assert columns.waiting.tolist() == [3, 3, 3] and columns.recorder.waiting() == (3, 3)
    assert columns.shown[0][:, 0, 0].tolist() == [0, 1, 2, 3, 4] and columns.reward[2, :, 0].tolist() == [3, 4, 5]
    assert columns.done[0, :, 0].tolist() == [True, False, True] and columns.truncated[0, :, 0].sum() == 1


@pytest.mark.parametrize("given", [None, [*result()], result()[:4], (*result(), {}), (1.0, *result()[1:])])
def test_a_result_that_is_not_of_the_columns_form_changes_nothing(given):
    columns = Columns((2,))
    columns.over[1] = True
    assert columns.recorder.add_result(0, given) == -1
    assert columns.recorder.add_result(0, (result()[0], np.full(N, 1e39), *result()[2:])) == -2
    assert columns.over.tolist() == [False, True, False] and columns.waiting.tolist() == [0] * N
    with pytest.raises(IndexError, match="no row"):
        columns.recorder.add_result(CALLS, result())


@pytest.mark.parametrize("into_others", [False, True])
def test_rows_of_kept_calls_become_the_first_ones(into_others):
    columns = Columns((2,), ())
    draw = np.random.default_rng(0)
    for column in [*columns.shown, *columns.actions, columns.reward, columns.done, columns.idle]:
        column[:] = draw.random(column.shape) * 2
    before = [column.copy() for column in [*columns.shown, *columns.given()[1], *columns.given()[2:]]]
    kept = Columns((2,), ()) if into_others else columns
    if into_others:
        columns.recorder.use(*kept.given(), (1, 2))
    else:
        columns.recorder.keep(1, 2)
    after = [*kept.shown, *kept.given()[1], *kept.given()[2:]]
    for k, (old, new) in enumerate(zip(before, after, strict=True)):
        rows = 3 if k < 2 else 2  # what was shown after the last call, too
        assert np.array_equal(new[:rows], old[1 : 1 + rows])


def test_calls_that_the_columns_do_not_have_are_not_kept():
    columns = Columns((2,))
    for first, calls in ((0, CALLS + 1), (CALLS, 1), (CALLS + 1, 0), (2**63, 2**63)):
        with pytest.raises(IndexError, match="no row"):
            columns.recorder.keep(first, calls)
    small = [column[:1] for column in columns.given()[2:]]
    with pytest.raises(IndexError, match="no row"):
        columns.recorder.use([columns.shown[0][:2].copy()], [columns.actions[0][:1]], *small, (0, 2))
    for shown, actions in (
        ([np.zeros((CALLS + 1, N, 3), np.float32)], columns.actions),
        (columns.shown * 2, columns.actions),
        (columns.shown, []),
    ):
        with pytest.raises(ValueError, match="same form"):
            columns.recorder.use(shown, actions, *columns.given()[2:], (0, 1))
    assert columns.recorder.add(0, *FIT) == 0


def test_envs_whose_episode_ends_are_those_of_either_flag_that_were_not_only_reset():
    one, two, idle = (np.array(flags) for flags in ([True, False, False], [False, True, False], [True, False, False]))
    assert ended_envs(3, one, two).tolist() == [True, True, False]
    assert ended_envs(3, one, two, idle).tolist() == [False, True, False]
    assert ended_envs(3, one, NONE, idle) is None and ended_envs(3, NONE, NONE) is None
    for flags in ([False] * 3, np.zeros(3), np.zeros(2, np.bool_), None):
        with pytest.raises(TypeError, match="bool arrays"):
            ended_envs(3, NONE, flags)


def numbers(draw, shape, dtype):
    return (draw.random(shape) * 100).astype(dtype)


@given(
    n=st.integers(1, 4),
    steps=st.integers(1, 6),
    share=st.sampled_from([0.0, 0.1, 0.5]),
    shape=st.sampled_from([(), (1,), (2,), (4,), (0,), (3, 2)]),
    dtype=st.sampled_from([np.bool_, np.uint8, np.float32, np.float64, np.complex128]),
    seed=st.integers(0, 99),
)
def test_frames_are_taken_as_by_array_operations(n, steps, share, shape, dtype, seed):
    draw = np.random.default_rng(seed)
    before = draw.integers(0, 3, n)
    idle = np.zeros((0, n), np.bool_)
    while ((~idle).sum(0) < before + steps).any():
        idle = np.concatenate([idle, draw.random((draw.integers(1, 3), n)) < share])
    rows, envs = len(idle), np.arange(n)[:, None]
    shown, acted, reward = (
        numbers(draw, (rows + more, n, *s), t)
        for more, s, t in ((1, shape, dtype), (0, (2,), np.int64), (0, (1,), np.float32))
    )
    flags = [draw.random((rows, n, 1)) < often for often in (0.5, 0.05, 0.0)]
    waiting, taken = (~idle).sum(0) - before, before.copy()
    expected, calls = [waiting.copy(), taken.copy()], np.empty((n, steps), np.int64)
    dropped = take_frames(idle, expected[1], expected[0], calls)
    marked = [(call, env) for call in range(rows) for env in range(n) if draw.random() < 0.3]
    last_calls, last_envs = (np.array([pair[k] for pair in marked], np.int64) for k in (0, 1))
    last = numbers(draw, (len(marked), *shape), dtype)
    following = shown[1:].copy()
    following[last_calls, last_envs] = last
    recorder = StepRecorder(waiting, taken, np.zeros(n, np.bool_))
    recorder.use([shown], [acted], reward, *flags, idle, None)
    tensors, found, gone = recorder.take(rows, steps, True, last_calls, last_envs, [last])
    assert (calls if found is None else found).tolist() == calls.tolist() and gone == dropped
    assert waiting.tolist() == expected[0].tolist() and taken.tolist() == expected[1].tolist()
    for tensor, column in zip(
        tensors, [shown, acted, reward, *flags, *[np.zeros_like(flags[0])] * 3, following], strict=True
    ):
        assert np.array_equal(tensor.numpy(), column[calls, envs])


def test_frames_that_are_not_there_are_refused():
    columns, none, rows = Columns((1,)), np.zeros(0, np.int64), np.zeros((1, 1), np.float32)
    columns.waiting[:] = 2

    def taken(calls=2, steps=2, last_calls=none, last_envs=none, last=(rows[:0],)):
        return columns.recorder.take(calls, steps, True, last_calls, last_envs, [*last])

    zero = np.zeros(1, np.int64)
    for wrong, error in (
        ({"calls": CALLS + 1}, IndexError),
        ({"steps": 3}, ValueError),
        ({"steps": 2**40}, ValueError),
        ({"last_calls": zero, "last_envs": zero + N, "last": [rows]}, IndexError),
        ({"last_calls": zero, "last_envs": zero - 1, "last": [rows]}, IndexError),
        ({"last_calls": zero, "last_envs": zero}, ValueError),
        ({"last_calls": zero}, ValueError),
        ({"last": []}, ValueError),
        ({"last_calls": np.array([1, 0]), "last_envs": zero.repeat(2), "last": [rows.repeat(2, 0)]}, ValueError),
    ):
        with pytest.raises(error):
            taken(**wrong)
    assert columns.waiting.tolist() == [2] * N and columns.taken.tolist() == [0] * N
    columns.taken[1] = 1
    with pytest.raises(ValueError, match="fewer frames"):
        taken()
    _, calls, dropped = taken(steps=1)
    assert calls.tolist() == [[0], [1], [0]] and dropped == 1 and columns.taken.tolist() == [0, 1, 0]


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
