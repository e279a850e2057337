"""Sum and minimum trees against sums, searches and rebuilt trees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.each import each
from engram import _native

SIZES = st.sampled_from([1, 2, 7, 8, 9, 63, 64, 65, 511, 513, 600, 4097])
VALUES = st.one_of(st.just(0.0), st.floats(1e-6, 1e6), st.sampled_from([1.0, 0.1, 1e-300, 1e300]))


def built(values):
    tree = _native.testing.SumTree(len(values))
    tree.set(np.arange(len(values)), np.asarray(values, dtype=np.float64))
    return tree


def prefixes(total, n=64):
    return [total * i / n for i in range(n)] + [np.nextafter(total, 0), total]


def assert_same(tree, twin):
    assert (tree.total, tree.lowest) == (twin.total, twin.lowest)
    if tree.total > 0:
        assert tree.find(prefixes(tree.total, 997)) == twin.find(prefixes(tree.total, 997))


@settings(max_examples=150, deadline=None)
@given(SIZES, st.data())
def test_a_tree_after_any_updates_is_bit_for_bit_the_one_that_is_built_from_its_leaves(size, data):
    tree, leaves = _native.testing.SumTree(size), np.zeros(size)
    for _ in range(data.draw(st.integers(1, 8))):
        if data.draw(st.booleans()):
            start = data.draw(st.integers(0, size - 1))
            stop = data.draw(st.integers(start + 1, size))
            value = data.draw(VALUES)
            tree.fill(start, stop, value)
            leaves[start:stop] = value
        else:
            seed = data.draw(st.integers(0, 1 << 30))
            draw = np.random.default_rng(seed)
            n = data.draw(st.sampled_from([1, 3, 40, 700]))
            at, value = draw.integers(0, size, n), draw.choice([0.0, 0.1, 1.0, *draw.random(5)], n)
            tree.set(at, value)
            leaves[at] = value  # of repetitions the last one
    assert_same(tree, built(leaves))
    positive = leaves[leaves > 0]
    assert tree.lowest == (positive.min() if len(positive) else 0)
    assert tree.total == pytest.approx(leaves.sum(), rel=1e-12)


@settings(max_examples=150, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=700))
def test_no_prefix_finds_a_leaf_of_zero(values):
    tree = built(values)
    if tree.total == 0:
        with pytest.raises(ValueError, match="holds nothing"):
            tree.find([0.0])
        return
    for leaf in tree.find(prefixes(tree.total)):
        assert values[leaf] > 0


@each("size", [1, 5, 8, 70, 1000, 20_000])
def test_a_prefix_finds_the_leaf_that_a_search_in_the_running_sums_finds(size):
    draw = np.random.default_rng(size)
    values = draw.integers(0, 4, size).astype(np.float64)  # sums of integers are exact
    values[-1] = 2
    tree, sums = built(values), np.cumsum(values)
    at = draw.random(5000) * tree.total
    assert tree.total == sums[-1]
    assert tree.find(at.tolist()) == np.searchsorted(sums, at, side="right").tolist()


@each("size", [1, 5, 8, 70, 1000, 20_000])
def test_every_way_down_the_tree_finds_the_same_leaves(size):
    draw = np.random.default_rng(size)
    tree = built(draw.choice([0.0, 1e-300, 0.1, 1.0, 1e9, *draw.random(20)], size) + np.eye(1, size, size - 1)[0])
    for n in (1, 3, 4, 8, 13, 256, 1001):
        first, *others = tree.find_in_all_ways([*(draw.random(n - 1) * tree.total), tree.total])
        assert len(others) >= 1
        assert all(other == first for other in others)


@each("size", [600, 5000, 70_000])
def test_the_lowest_follows_leaves_that_come_go_and_are_set_twice(size):
    draw = np.random.default_rng(size)
    leaves = np.ones(size)
    tree = built(leaves)
    for _ in range(200):
        n = int(draw.choice([1, 4, 7, 16]))
        at = draw.integers(0, size, n)
        at[n // 2 :] = at[0] // 8 * 8 + draw.integers(0, 8, n - n // 2)  # in one node
        at = np.minimum(at, size - 1)
        value = draw.choice([0.0, 0.5, 0.25, 1.0, draw.random()], n)
        tree.set(at, value)
        leaves[at] = value
        assert tree.lowest == leaves[leaves > 0].min()
    assert_same(tree, built(leaves))


def test_the_end_of_the_sum_finds_the_last_leaf_that_is_not_zero():
    draw = np.random.default_rng(0)
    for _ in range(50):
        values = np.zeros(600)
        values[:37] = draw.random(37) * 10.0 ** draw.integers(-9, 9, 37)
        tree = built(values)
        found = tree.find([tree.total, tree.total * 2, np.nextafter(tree.total, 0)])
        assert all(values[leaf] > 0 for leaf in found)


def test_leaves_that_there_are_not_are_refused():
    tree = _native.testing.SumTree(10)
    for at in (-1, 10, 1 << 60):
        with pytest.raises(IndexError):
            tree.set(np.array([at]), np.array([1.0]))
    with pytest.raises(IndexError):
        tree.fill(5, 11, 1.0)
    with pytest.raises(ValueError, match="one value"):
        tree.set(np.array([1, 2]), np.array([1.0]))
    assert tree.total == 0


def test_a_rest_that_rounding_makes_as_large_as_the_child_stays_inside_it():
    ulp = 2.0**-52
    values = np.zeros(64)
    values[0], values[8] = 1.5 * ulp, 1 + 2 * ulp  # their sum is rounded up, and the rest below it as well
    tree = built(values)
    assert (1 + 3 * ulp) - values[0] == values[8] and tree.total > 1 + 3 * ulp
    assert tree.find([1 + 3 * ulp]) == [8]
