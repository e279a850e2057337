"""Tests of `contracts.folded`: whole contracts in one test."""

from contextlib import nullcontext

import pytest

from contracts.folded import assert_contract, contracts_in


class Contract:
    ran: list

    @pytest.mark.parametrize("a, b", [(1, 2), (3, 4)])
    @pytest.mark.parametrize("c", [5, 6])
    def test_product(self, a, b, c):
        self.ran.append((a, b, c))
        assert (a, c) != (3, 6), "no"

    @pytest.mark.usefixtures("first")
    def test_what_is_asked_for(self, other):
        self.ran.append(other)

    def test_what_is_skipped(self):
        pytest.skip("not here")


class Bad(Contract):
    def test_that_fails(self):
        pytest.fail("not that")


def run(contract, **how):
    contract.ran = []
    fixtures = {"first": lambda: nullcontext(contract.ran.append("first")), "other": lambda: nullcontext("other")}
    return assert_contract(contract, fixtures, **how)


def test_every_case_of_every_test_runs_and_each_that_failed_is_named():
    contract = Bad()
    with pytest.raises(AssertionError, match=r"(?s)2 of 6 tests failed.*test_product \{.*'a': 3.*no.*that_fails.*not"):
        run(contract)
    assert len(contract.ran) == 6 and contract.ran[-2:] == ["first", "other"]


def test_the_tests_that_passed_are_counted_and_those_that_were_skipped_are_not(monkeypatch):
    contract = Contract()
    monkeypatch.setattr(Contract, "test_product", lambda self: None)
    assert run(contract) == 2


def test_in_turns_one_case_of_each_test_runs_and_each_case_has_its_turn():
    contract, seen = Contract(), []
    for turn in range(4):
        if turn == 3:
            with pytest.raises(AssertionError, match="1 of 2 tests failed"):
                run(contract, turn=turn)
        else:
            assert run(contract, turn=turn) == 2
        seen.append(contract.ran[0])
    assert sorted(seen) == [(1, 2, 5), (1, 2, 6), (3, 4, 5), (3, 4, 6)]


def test_classes_that_implement_a_contract_are_found_and_not_collected():
    class TestIt(Contract):
        pass

    assert contracts_in({"TestIt": TestIt, "Bad": Bad, "TestOther": int}, Contract) == {"TestIt": TestIt}
    assert TestIt.__test__ is False and not hasattr(Contract, "__test__")
