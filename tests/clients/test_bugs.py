"""The page of bugs: each script shows in its library what the page says, and that engram does not have it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming-from" / "bugs.md").read_text()
SHOWN = re.findall(r'--8<-- "tests/clients/bugs/(\w+)\.py"\n```\n\n```text\n(.*?)```', PAGE, re.DOTALL)
MEASURED = "slow_slices_torchrl"


def printed_by(script: str, folder: Path) -> str:
    """What a script prints; skips where its library is not installed."""
    pytest.importorskip({"sb3": "stable_baselines3"}.get(name := script.rsplit("_", 1)[1], name))
    command = [sys.executable, str(ROOT / "tests" / "clients" / "bugs" / f"{script}.py")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=300).stdout


def test_every_script_is_on_the_page():
    assert sorted(script for script, _ in SHOWN) == sorted(
        path.stem for path in Path(__file__).parent.glob("bugs/*.py")
    )


@pytest.mark.parametrize(
    "script, text", [shown for shown in SHOWN if shown[0] != MEASURED], ids=lambda shown: shown[:20]
)
def test_the_library_has_the_bug_and_engram_has_not(script, text, tmp_path):
    printed = printed_by(script, tmp_path)
    if script == "priorities_flashbax":  # our draws are random
        assert re.search(r"there row 3: 0 of 1280, row 63: [1-9]", printed)
        assert re.search(r"here  row 3: [1-9]\d* of 1280, row 63: 0$", printed, re.MULTILINE)
    else:
        assert printed == text


def test_slices_of_the_library_become_slower_and_those_of_engram_do_not(tmp_path):
    there, here = (
        [float(time) for time in re.findall(r"([\d.]+) ms", line)]
        for line in printed_by(MEASURED, tmp_path).splitlines()
        if " rows: " in line
    )
    assert there[1] > 2 * there[0] and here[1] < 2 * here[0] + 0.1
