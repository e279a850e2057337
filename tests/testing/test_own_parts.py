"""The contracts run on parts that users wrote, and find those that are wrong by one."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest

OWN_PARTS = Path(__file__).with_name("own_parts.py")


#: Of a part that fails at every test one will do; of those that are no good as copies, these tests.
COPIES = "copy or pickle or load_makes"
ONLY = {
    "TestBrokenStorage": "writing",
    **dict.fromkeys(("TestLockedStorage", "TestOneStorage", "TestHookedStorage"), COPIES),
}


class Outcomes:
    """A pytest plugin: the reports of the tests of a part, and of those that failed."""

    def __init__(self):
        self.ran, self.failed = [], []

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            self.ran.append(report)
        if report.failed:
            self.failed.append(report)


@pytest.fixture(scope="module")
def outcomes():
    """`outcomes(part)`, of a pytest run in this process: Python and torch are not started again."""

    @functools.cache
    def run(part):
        outcomes = Outcomes()
        options = ["-qq", "--tb=native", *(f"-pno:{name}" for name in ("cacheprovider", "faulthandler", "xdist"))]
        options += ["--override-ini=addopts=--import-mode=importlib"]  # options of a plugin that is off are no mistake
        ended = pytest.main([*options, "-k", ONLY.get(part, ""), f"{OWN_PARTS}::{part}"], [outcomes])
        assert ended == (pytest.ExitCode.TESTS_FAILED if outcomes.failed else pytest.ExitCode.OK)
        return outcomes

    return run


@pytest.mark.deep
@pytest.mark.parametrize(
    "part", ["TestPickledStorage", "TestAnyStep", "TestKeepsFirst", "TestKeepsFirstAlone", "TestHalved", "TestShifted"]
)
def test_a_part_of_a_users_own_passes_its_contract(outcomes, part):
    assert len(outcomes(part).ran) > 5 and outcomes(part).failed == []


@pytest.mark.deep
@pytest.mark.parametrize(
    "part", ["TestBrokenStorage", "TestBrokenSampler", "TestBrokenWriter", "TestBrokenRing", "TestBrokenTransform"]
)
def test_a_part_that_is_wrong_by_one_fails_its_contract(outcomes, part):
    assert 0 < len(outcomes(part).failed) <= len(outcomes(part).ran)


def test_without_pytest_the_message_names_what_to_install():
    code = "import sys; sys.modules['pytest'] = None; import engram.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "ImportError: engram.testing needs pytest: pip install" in done.stderr


@pytest.mark.deep
@pytest.mark.parametrize(
    ("part", "test"),
    [
        ("TestFloatSampler", "test_slots_are_integers_in_every_kind_of_buffer"),
        ("TestForgetfulSampler", "test_a_state_saved_alone_goes_on_with_its_storage"),
        ("TestLockedStorage", "test_a_deep_copy_has_rows_of_its_own"),
        ("TestLockedStorage", "test_a_pickle_gives_the_rows_back"),
        ("TestOneStorage", "test_a_deep_copy_has_rows_of_its_own"),
        ("TestOneStorage", "test_a_pickle_gives_the_rows_back"),
        ("TestOneStorage", "test_a_deep_copy_of_an_empty_storage_can_be_written_to"),
        ("TestHookedStorage", "test_load_makes_a_buffer_with_the_rows"),
    ],
)
def test_fault_of_a_part_fails_the_test_that_names_it(outcomes, part, test):
    assert any(test in report.nodeid for report in outcomes(part).failed)


@pytest.mark.deep
def test_a_contract_that_fails_shows_both_sides(outcomes):
    errors = [report.longreprtext for report in outcomes("TestBrokenRing").failed]
    assert any("assert (1 == 0" in error for error in errors)  # the cursor after `empty`
