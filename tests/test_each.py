"""Tests of `contracts.each`: many values in one test."""

import pytest

from contracts.each import each


def test_every_case_runs_and_each_that_failed_is_named():
    seen = []

    @each("a", [1, 2])
    @each("b, c", [(3, 4), (5, 6)])
    def test(a, b, c):
        seen.append((a, b, c))
        assert (a, b) != (2, 3), "no"
        if (a, b) == (1, 5):
            pytest.fail("not that")

    with pytest.raises(
        AssertionError, match=r"(?s)2 of 2 cases failed.*a = 1:.*1 of 2.*not that.*a = 2:.*\(3, 4\).*no"
    ):
        test()
    assert seen == [(1, 3, 4), (1, 5, 6), (2, 3, 4), (2, 5, 6)]


@each("number", range(3))
def test_fixtures_are_given_beside_the_cases(number, tmp_path_factory):
    assert tmp_path_factory.getbasetemp().exists()


@each("number", range(3))
def test_each_case_has_a_folder_and_patches_of_its_own(number, tmp_path, monkeypatch):
    assert list(tmp_path.iterdir()) == [] and not hasattr(each, "patched")
    (tmp_path / str(number)).touch()
    monkeypatch.setattr(each, "patched", True, raising=False)


def test_a_name_that_the_test_does_not_take_is_refused():
    with pytest.raises(AssertionError, match="takes no"):
        each("b", [1])(lambda a: None)


def test_no_cases_are_refused():
    with pytest.raises(AssertionError, match="looks at nothing"):
        each("a", [])
