"""Pairwise covers lose no pair of values."""

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from contracts.pairwise import in_turns, pairwise, pairwise_product


def pairs_of(rows):
    return {frozenset(pair) for row in rows for pair in combinations(row.items(), 2)}


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 3), min_size=2), max_size=60))
def test_every_pair_of_values_that_a_row_holds_is_kept(rows):
    kept = [rows[k] for k in pairwise(rows)]
    assert pairs_of(kept) == pairs_of(rows)


def test_four_factors_of_three_values_need_few_of_their_81_rows():
    rows = [dict(zip("abcd", values, strict=True)) for values in product(range(3), repeat=4)]
    assert 9 <= len(pairwise(rows)) <= 15


def test_a_row_that_holds_nothing_new_is_left_out():
    assert pairwise([{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 3}]) == [0, 2]


def test_a_product_keeps_its_values_which_need_not_be_hashable():
    rows = pairwise_product([[0], [1]], "ab", (None, {}))
    assert len(rows) == 4 and all(type(row[0]) is list and row[1] in "ab" and row[2] in (None, {}) for row in rows)
    assert {(row[0][0], row[1]) for row in rows} == {(0, "a"), (0, "b"), (1, "a"), (1, "b")}


def test_in_turns_each_value_is_tested_with_one_setting_and_each_setting_with_some_value():
    cases = in_turns("abcd", [(1, 2), (3, 4), (5, 6)])
    assert len({case.values for case in cases}) == 12
    assert [case.values for case in cases if not case.marks] == [("a", 1, 2), ("b", 3, 4), ("c", 5, 6), ("d", 1, 2)]
    kept = [case.values for case in in_turns("abc", [(1,), (2,), (3,)], keep=2) if not case.marks]
    assert kept == [("a", 1), ("a", 2), ("b", 1), ("b", 3), ("c", 2), ("c", 3)]
