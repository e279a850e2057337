"""Which cases are quick and which are deep, and the order in which a run of both tiers has them."""

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.tiers import in_tiers

TESTS = Path(__file__).parent


@pytest.fixture
def collected(tmp_path: Path) -> Callable[..., list[str]]:
    """`collected(text, *options)` are the names of the tests of a file with this text, as our conftest sorts them."""

    def collect(text: str, *options: str) -> list[str]:
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  deep\n  pairwise\n  quick\n  long\n")
        file = tmp_path / "test_sorted.py"
        file.write_text("import pytest\n" + text)
        asked = ["--collect-only", "-q", "-p", "conftest", "-p", "no:cacheprovider", *options, str(file)]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *asked],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_ADDOPTS": ""},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return [line.split("::", 1)[1] for line in done.stdout.splitlines() if "::" in line]

    return collect


PRODUCTS = """
def test_of_every_row(): pass

@pytest.mark.parametrize("a", range(4))
def test_without_a_mark(a): pass

@pytest.mark.pairwise
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(3))
@pytest.mark.parametrize("d", range(3))
def test_wide(a, b, c, d): pass

@pytest.mark.deep
@pytest.mark.pairwise
@pytest.mark.parametrize("a", range(3))
def test_deep_before(a): pass

class Contract:
    @pytest.mark.pairwise
    @pytest.mark.parametrize("a", range(3))
    @pytest.mark.parametrize("b", range(3))
    @pytest.mark.parametrize("c", range(3))
    def test_inherited(self, a, b, c): pass

class TestOne(Contract): pass
class TestOther(Contract): pass
"""


def values(names: list[str], test: str) -> list[tuple[str, ...]]:
    return [tuple(name.split("[")[1].rstrip("]").split("-")) for name in names if name.startswith(test + "[")]


def test_cases_in_which_every_two_values_meet_stay_quick_and_no_other_test_becomes_deep(collected):
    quick = collected(PRODUCTS, "-m", "not deep")
    assert "test_of_every_row" in quick and len(values(quick, "test_without_a_mark")) == 4
    assert not values(quick, "test_deep_before")
    for test, factors, at_most in (
        ("test_wide", 4, 15),
        ("TestOne::test_inherited", 3, 14),
        ("TestOther::test_inherited", 3, 14),
    ):
        rows = values(quick, test)
        pairs = {(f, row[f], g, row[g]) for row in rows for f, g in combinations(range(factors), 2)}
        assert len(pairs) == 9 * len(list(combinations(range(factors), 2))), test
        assert len(rows) <= at_most, test


def test_with_tiers_the_quick_tests_come_first(collected):
    text = """
@pytest.mark.deep
def test_a(): pass
def test_b(): pass
@pytest.mark.deep
def test_c(): pass
def test_d(): pass
"""
    assert collected(text, "--tiers") == ["test_b", "test_d", "test_a", "test_c"]


def parts(order: list[str], workers: int) -> list[list[str]]:
    """What `worksteal` gives each worker at the start."""
    left, begin, found = len(order), 0, []
    for worker in range(workers):
        size = left // (workers - worker)
        found.append(order[begin : begin + size])
        begin, left = begin + size, left - size
    return found


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 10), st.integers(1, 4))
def test_an_order_has_every_test_once(quick, deep, long, workers):
    names = [f"q{k}" for k in range(quick)], [f"d{k}" for k in range(deep)]
    order = in_tiers(*names, names[1][:long], workers)
    assert sorted(order) == sorted(names[0] + names[1])


@given(st.integers(50, 200), st.integers(10, 40), st.integers(0, 10), st.integers(1, 4))
def test_each_worker_begins_with_quick_tests_and_has_its_share_of_the_longest_next(quick, deep, long, workers):
    names = [f"q{k}" for k in range(quick)], [f"d{k}" for k in range(deep)]
    longest = names[1][:long]
    for worker, part in enumerate(parts(in_tiers(*names, longest, workers), workers)):
        tiers = [name[0] for name in part]
        assert tiers == sorted(tiers, reverse=True) and tiers[0] == "q"
        slow = [name for name in part if name[0] == "d"]
        assert slow[: len(longest[worker::workers])] == longest[worker::workers]


def test_of_the_longest_tests_none_is_named_twice():
    names = (TESTS / "longest.txt").read_text().splitlines()
    assert len(names) == len(set(names)) and all((TESTS / name.split("::")[0]).exists() for name in names)
