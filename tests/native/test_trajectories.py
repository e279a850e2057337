"""Trajectories of environments that step together, counted natively: equal to loops and array operations in Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram import _native


def flags(seed, n, steps, share):
    return np.random.default_rng(seed).random((n, steps)) < share


sizes = {"n": st.integers(1, 5), "steps": st.integers(1, 7), "seed": st.integers(0, 999)}


def numbered(done, current, starts, count):
    """The ids of `number_trajectories`, by array operations; the state is changed in place."""
    ends = done.T
    begins = np.concatenate([starts[None], ends[:-1]])
    ids = (count - 1 + begins.cumsum()).reshape(begins.shape)
    ids = np.maximum.accumulate(np.where(begins, ids, current), axis=0)
    current[:], starts[:] = ids[-1], ends[-1]
    return ids.T, count + int(begins.sum())


@given(**sizes, share=st.sampled_from([0.0, 0.2, 0.7]))
def test_ids_are_those_of_array_operations(n, steps, seed, share):
    ours, theirs = ([np.zeros(n, np.int64), np.ones(n, np.bool_), 0] for _ in range(2))
    for batch in range(3):
        done, ids = flags((seed, batch), n, steps, share), np.empty((n, steps), np.int64)
        ours[2] = _native.number_trajectories(done, *ours, ids)
        expected, theirs[2] = numbered(done, *theirs)
        assert ids.tolist() == expected.tolist() and ours[2] == theirs[2]
        assert ours[0].tolist() == theirs[0].tolist() and ours[1].tolist() == theirs[1].tolist()


@given(**sizes, split=st.integers(0, 7))
def test_parts_of_arrays_are_numbered_and_added_up_as_the_whole(n, steps, seed, split):
    done, reward = flags(seed, n, steps, 0.3), np.random.default_rng(seed).random((n, steps)).astype(np.float32)
    results = []
    for parts in ([(0, None)], [(0, min(split, steps)), (min(split, steps), steps)]):
        ids, current, starts, count = np.full((n, steps), -1), np.zeros(n, np.int64), np.ones(n, np.bool_), 0
        totals, lengths, ended = np.zeros(n), np.zeros(n, np.int64), []
        for first, stop in parts:
            count = _native.number_trajectories(done, current, starts, count, ids, first, stop)
            number, returns, sizes_of = _native.add_episodes(reward, done, totals, lengths, 100, first, stop)
            ended += zip(returns, sizes_of, strict=True)
            assert number == len(returns)
        results.append(
            (ids.tolist(), current.tolist(), starts.tolist(), count, totals.tolist(), lengths.tolist(), ended)
        )
    assert results[0] == results[1]


def test_parts_that_the_arrays_do_not_have_are_refused_and_change_nothing():
    done, ids = np.zeros((2, 3), np.bool_), np.full((2, 3), -1)
    current, starts, totals = np.zeros(2, np.int64), np.ones(2, np.bool_), np.zeros(2)
    for first, stop in ((0, 4), (4, None), (2, 1)):
        with pytest.raises(IndexError, match="fewer steps"):
            _native.number_trajectories(done, current, starts, 0, ids, first, stop)
        with pytest.raises(IndexError, match="fewer steps"):
            _native.add_episodes(done.astype(np.float32), done, totals, current, 1, first, stop)
    assert (ids == -1).all() and starts.all() and not totals.any()


def taken(idle, taken_before, waiting, steps):
    """What `take_frames` gives, by array operations: calls, calls to drop, and the new `taken` and `waiting`."""
    total, are_frames = len(idle), ~idle.T
    frames, counts = np.flatnonzero(are_frames), taken_before + waiting
    starts = counts.cumsum() - counts + taken_before
    calls = frames[starts[:, None] + np.arange(steps)] - np.arange(0, total * len(waiting), total)[:, None]
    waiting = waiting - steps
    first_waiting = frames.take((starts + steps)[waiting > 0]) % total
    dropped = int(first_waiting.min()) if len(first_waiting) else total
    return calls, dropped, taken_before + steps - are_frames[:, :dropped].sum(1), waiting


@given(**sizes, share=st.sampled_from([0.0, 0.1, 0.5]))
def test_frames_are_taken_as_by_array_operations(n, steps, seed, share):
    idle = np.zeros((0, n), np.bool_)
    before, waiting = np.zeros(n, np.int64), np.zeros(n, np.int64)
    for batch in range(4):
        while waiting.min() < steps:
            more = flags((seed, batch, len(idle)), 3, n, share)
            idle, waiting = np.concatenate([idle, more]), waiting + (~more).sum(0)
        calls, dropped, after, left = taken(idle, before, waiting, steps)
        ours = np.empty((n, steps), np.int64)
        assert _native.take_frames(idle.tobytes(), before, waiting, ours) == dropped
        assert ours.tolist() == calls.tolist()
        assert before.tolist() == after.tolist() and waiting.tolist() == left.tolist()
        idle = idle[dropped:]


def test_too_few_frames_change_nothing():
    before, waiting = np.zeros(2, np.int64), np.array([3, 3])
    with pytest.raises(ValueError, match="fewer frames"):
        _native.take_frames(bytes([0, 1, 0, 0, 0, 0]), before, waiting, np.empty((2, 3), np.int64))
    assert before.tolist() == [0, 0] and waiting.tolist() == [3, 3]


@given(**sizes, most=st.integers(0, 5))
def test_episodes_are_added_up_as_by_a_loop(n, steps, seed, most):
    totals, lengths, expected = np.zeros(n), np.zeros(n, np.int64), []
    sums, ages = [0.0] * n, [0] * n
    for dtype in (np.float32, np.float64):
        reward = np.random.default_rng(seed).random((n, steps)).astype(dtype)
        done, expected = flags(seed, n, steps, 0.4), []
        for t in range(steps):
            for env in range(n):
                sums[env], ages[env] = sums[env] + float(reward[env, t]), ages[env] + 1
                if done[env, t]:
                    expected.append((sums[env], ages[env]))
                    sums[env], ages[env] = 0.0, 0
        ended, returns, sizes_of = _native.add_episodes(reward, done, totals, lengths, most)
        assert ended == len(expected)
        assert list(zip(returns, sizes_of, strict=True)) == expected[len(expected) - min(most, len(expected)) :]
        assert totals.tolist() == sums and lengths.tolist() == ages


def test_arrays_of_other_sizes_are_refused():
    done, n2, n3 = np.zeros((2, 3), np.bool_), np.zeros(2, np.int64), np.zeros(3, np.int64)
    ids = np.empty((2, 3), np.int64)
    for current, starts, out in (
        (n3, n2.astype(bool), ids),
        (n2, n3.astype(bool), ids),
        (n2, n2.astype(bool), ids[:, :2].copy()),
    ):
        with pytest.raises(ValueError, match="same environments"):
            _native.number_trajectories(done, current, starts, 0, out)
    with pytest.raises(ValueError, match="same environments"):
        _native.add_episodes(np.zeros((2, 2), np.float32), done, np.zeros(2), n2, 1)
    with pytest.raises(ValueError, match="same environments"):
        _native.add_episodes(np.zeros((2, 3), np.float32), done, np.zeros(3), n2, 1)
    with pytest.raises(ValueError, match="same environments"):
        _native.take_frames(bytes(5), n2, n2.copy(), ids)
    with pytest.raises(TypeError):
        _native.number_trajectories(done, n2.astype(np.int32), np.ones(2, np.bool_), 0, ids)
