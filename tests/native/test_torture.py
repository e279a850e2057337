"""Writers and readers in several processes: no reader may ever see a row that is not the one it was told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import engram

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# One writer and one reader on two cores, a lane that the writer goes round in microseconds, rows of two pages.
RACE = ["--lanes", "1", "--readers", "1", "--capacity", "16", "--words", "1024"]
REORDERINGS = ["CLAIM_AFTER_COPY", "CLAIM_READ_EARLY", "PUBLISH_BEFORE_COPY", "ROWS_BEFORE_PUBLISHED"]


def torture(*options: str, package: Path | None = None) -> dict[str, Any]:
    """Runs torture.py against the installed engram, or against the package in a folder."""
    where = package or Path(engram.__file__).resolve().parents[1]
    env = {**os.environ, "PYTHONPATH": str(where)}
    made = subprocess.run(
        [sys.executable, HERE / "torture.py", *options], env=env, capture_output=True, text=True, timeout=900
    )
    assert made.returncode in (0, 1) and made.stdout, made.stderr
    return json.loads(made.stdout)


@pytest.mark.deep
def test_readers_beside_a_writer_see_whole_rows_only() -> None:
    said = torture("--seconds", "3", *RACE)
    assert said["faults"] == []
    assert said["missing"] > 0, "no row was overwritten under a reader: the race was not run"
    assert said["written"] > 1000 and said["rows"] > 1000


@pytest.mark.deep
def test_a_killed_writer_leaves_every_published_row_and_the_next_one_enters_a_seam() -> None:
    said = torture("--seconds", "4", "--kills", "--trailer", "--lanes", "2", "--capacity", "16", "--words", "1024")
    assert said["faults"] == []
    assert said["kills"] > 5 and said["seams"] > 2


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_long_runs_with_kills_find_nothing(seed: int) -> None:
    options = [["--trailer"], [], ["--capacity", "3"], ["--words", "9000", "--capacity", "8"]][seed]
    said = torture("--seconds", "30", "--kills", "--lanes", "2", "--readers", "2", "--seed", str(seed), *options)
    assert said["faults"] == []
    assert said["kills"] > 30


@pytest.mark.mutant
@pytest.mark.long
@pytest.mark.parametrize("reordering", REORDERINGS)
def test_a_planted_reordering_is_seen(reordering: str, tmp_path: Path) -> None:
    package = build(reordering, tmp_path)
    said = torture("--seconds", "60", "--until-fault", *RACE, package=package)
    assert said["planted"] == reordering
    assert said["faults"], f"{reordering} went unnoticed: {said}"


@pytest.mark.long
def test_the_sound_build_stands_what_planted_ones_do_not() -> None:
    said = torture("--seconds", "60", "--until-fault", *RACE)
    assert said["planted"] == ""
    assert said["faults"] == []


def build(reordering: str, folder: Path) -> Path:
    """Builds a planted variant aside and puts it into a copy of the package; returns what goes on the path."""
    options = [f"-DPython_EXECUTABLE={sys.executable}", f"-DENGRAM_PLANT={reordering}"]
    for command in (["cmake", "-S", ROOT, "-B", folder / "build", *options], ["cmake", "--build", folder / "build"]):
        made = subprocess.run([*command, *(["-j2"] if "--build" in command else [])], capture_output=True, text=True)
        assert made.returncode == 0, made.stdout + made.stderr
    package = folder / "package" / "engram"
    shutil.copytree(ROOT / "src" / "engram", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (extension,) = (folder / "build").glob("_native*.so")
    shutil.copy(extension, package)
    shutil.copy(HERE / "before_editable.py", package.parent / "sitecustomize.py")
    return package.parent
