"""The contracts run on parts that users wrote, and find those that are wrong by one."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

OWN_PARTS = Path(__file__).with_name("own_parts.py")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What pytest said, and of each test class: the names of the tests that ran, and of those that failed."""
    report = tmp_path_factory.mktemp("report") / "report.xml"
    options = ["-q", "--tb=native", "-p", "no:cacheprovider", f"--junitxml={report}"]
    options += ["-k", "not TestBrokenStorage or writing"]  # it fails at every test: one will do
    said = subprocess.run([sys.executable, "-m", "pytest", *options, str(OWN_PARTS)], capture_output=True, text=True)
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        ran, failed = found.setdefault(case.get("classname").rsplit(".", 1)[-1], ([], []))
        ran.append(case.get("name"))
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(case.get("name"))
    return said.stdout, found


@pytest.mark.deep
@pytest.mark.parametrize("part", ["TestPickledStorage", "TestAnyStep", "TestKeepsFirst", "TestHalved", "TestShifted"])
def test_a_part_of_a_users_own_passes_its_contract(run, part):
    ran, failed = run[1][part]
    assert len(ran) > 5 and failed == []


@pytest.mark.deep
@pytest.mark.parametrize(
    "part", ["TestBrokenStorage", "TestBrokenSampler", "TestBrokenWriter", "TestBrokenRing", "TestBrokenTransform"]
)
def test_a_part_that_is_wrong_by_one_fails_its_contract(run, part):
    ran, failed = run[1][part]
    assert 0 < len(failed) <= len(ran)


def test_without_pytest_the_message_names_what_to_install():
    code = "import sys; sys.modules['pytest'] = None; import engram.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "ImportError: engram.testing needs pytest: pip install pytest" in done.stderr


@pytest.mark.deep
def test_a_contract_that_fails_shows_both_sides(run):
    assert "assert (1 == 0" in run[0]  # the cursor of TestBrokenRing after `empty`
