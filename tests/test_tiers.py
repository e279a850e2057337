"""Which cases are quick and which are deep, and the order in which a run of both tiers has them."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.tiers import in_ci, in_quick, in_tiers, in_turns

TESTS = Path(__file__).parent


#: In the place of fixtures of our conftest that import torch, two seconds for each process.
WITHOUT_TORCH = """
import pytest
@pytest.fixture(scope="session")
def seed_torch(): return lambda seed: None
@pytest.fixture(autouse=True, scope="session")
def prefetching(): pass
"""


@pytest.fixture
def pytest_on(tmp_path: Path) -> Callable[..., str]:
    """`pytest_on(files, *options)` is what pytest prints of files with these texts, with our conftest."""

    def run(files: dict[str, str], *options: str) -> str:
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  deep\n  pairwise\n  quick\n  long\n")
        (tmp_path / "without_torch.py").write_text(WITHOUT_TORCH)
        for name, text in files.items():
            (tmp_path / name).write_text("import pytest\n" + text)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "without_torch", *options, *files],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(tmp_path)]), "PYTEST_ADDOPTS": ""},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def collected(pytest_on: Callable[..., str]) -> Callable[..., list[str]]:
    """`collected(text, *options)` are the names of the tests of a file with this text, as our conftest sorts them."""

    def collect(text: str, *options: str) -> list[str]:
        printed = pytest_on({"test_sorted.py": text}, "--collect-only", "-q", *options)
        return [line.split("::", 1)[1] for line in printed.splitlines() if "::" in line]

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
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(3))
def test_deep_before(a, b, c): pass

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


@pytest.mark.deep
def test_cases_in_which_every_two_values_meet_stay_in_their_tier_and_the_others_are_long(collected):
    quick = collected(PRODUCTS, "-m", "not deep and not long")
    deep, long = collected(PRODUCTS, "-m", "deep and not long"), collected(PRODUCTS, "-m", "long")
    assert "test_of_every_row" in quick and len(values(quick, "test_without_a_mark")) == 4
    for tier, test, factors, at_most, cases in (
        (quick, "test_wide", 4, 15, 81),
        (deep, "test_deep_before", 3, 14, 27),
        (quick, "TestOne::test_inherited", 3, 14, 27),
        (quick, "TestOther::test_inherited", 3, 14, 27),
    ):
        rows = values(tier, test)
        assert len(rows) + len(values(long, test)) == cases, test
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


@pytest.mark.deep
@pytest.mark.parametrize("workers", [pytest.param((), marks=pytest.mark.long), ("-n", "2")])
def test_with_tiers_a_file_that_is_skipped_as_a_whole_is_counted(pytest_on, workers):
    files = {
        "test_of_a_peer.py": "pytest.importorskip('no_such_library')",
        "test_ours.py": "def test_a(): pass\n@pytest.mark.deep\ndef test_b(): pass\n",
    }
    lines = pytest_on(files, "--tiers", *workers).splitlines()
    assert any(line.startswith("quick  1 passed, 1 skipped;") for line in lines), lines
    assert any(line.startswith("deep   1 passed;") for line in lines), lines


def rows_in_ci(cases: list[Any]) -> list[Any]:
    return [case for case in cases if type(case) is not type(pytest.param())]


def test_what_is_not_kept_in_ci_is_long():
    cases = in_ci(["a", ("b", 1), "c"], [("b", 1)])
    assert rows_in_ci(cases) == [("b", 1)] and [case.values for case in cases if case != ("b", 1)] == [("a",), ("c",)]
    assert all(case.marks[0].name == "long" for case in cases if case != ("b", 1))
    with pytest.raises(AssertionError, match="are not among"):
        in_ci(["a"], ["b"])


def test_what_is_not_kept_quick_is_deep():
    cases = in_quick(["a", ("b", 1), "c"], [("b", 1)])
    assert rows_in_ci(cases) == [("b", 1)] and [case.values for case in cases if case != ("b", 1)] == [("a",), ("c",)]
    assert all(case.marks[0].name == "deep" for case in cases if case != ("b", 1))


def test_values_that_take_turns_are_each_in_ci():
    cases = in_turns("abcde", [0, 1], "xyz")
    assert len(cases) == 30
    assert rows_in_ci(cases) == [("a", 0, "x"), ("b", 1, "y"), ("c", 0, "z"), ("d", 1, "x"), ("e", 0, "y")]


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


@pytest.mark.deep
def test_seconds_of_modules_are_written_by_their_tiers_with_workers_and_without(pytest_on, tmp_path):
    burn = "import time\ndef burn():\n    end = time.process_time() + 0.2\n    while time.process_time() < end: pass\n"
    files = {
        "test_one.py": burn + "def test_a(): burn()\n@pytest.mark.deep\ndef test_b(): burn()",
        "test_other.py": "from contracts.programs import run_program\ndef test_c():\n"
        "    run_program('import time\\nwhile time.process_time() < 0.3: pass', imported=())",
    }
    for workers in ([], ["-n", "2"]):
        printed = pytest_on(files, "--seconds", str(tmp_path / "seconds.json"), *workers)
        assert re.search(r"budgets =+\ndata +0 +\d+\n(.*\n)+all +\d+ +\d+\n", printed)
        tiers = json.loads((tmp_path / "seconds.json").read_text())
        assert set(tiers["quick"]) == {"(collecting)", "test_one.py", "test_other.py"} and set(tiers["deep"]) == {
            "test_one.py"
        }
        for seconds in (*tiers["quick"].values(), *tiers["deep"].values()):
            assert 0 < seconds[0] < 60 and 0.1 < seconds[1] < 60
