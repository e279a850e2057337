"""Writers that are killed and stopped, and readers: what `torture.py` must not find, and that it would find it."""

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
from processes.plants import PLANTS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ALL = "random,epochs,prioritized,slices,slices by seams,slice epochs,prioritized slices,sequences"
# One writer and one reader on two cores, a lane that the writer goes round in microseconds, rows of two pages.
RACE = ["--store", "--writers", "1", "--samplers", "1", "--capacity", "16", "--words", "1024"]
# Two lanes, whose writers are killed and never only stopped.
KILLS = ["--store", "--writers", "2", "--capacity", "32", "--kills", "--stops", "0"]
REORDERINGS = ["CLAIM_AFTER_COPY", "CLAIM_READ_EARLY", "PUBLISH_BEFORE_COPY", "ROWS_BEFORE_PUBLISHED"]


def torture(*options: str, package: Path | None = None) -> dict[str, Any]:
    """Runs torture.py against the installed engram, or against the package in a folder."""
    where = package or Path(engram.__file__).resolve().parents[1]
    env = {**os.environ, "PYTHONPATH": str(where)}
    command = [sys.executable, HERE / "torture.py", *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode in (0, 1) and done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def check(said: dict[str, Any]) -> None:
    assert said["faults"] == []
    # Who waits for somebody goes to sleep (or burns its own time): a call that does neither waits for nobody.
    assert said["extend_switches"] <= said["extends"] / 100 + 20
    assert said["sample_switches"] <= said["batches"] / 100 + 100  # a busy machine gives few batches in some seconds
    assert said["longest_extend_cpu_ms"] < 200 and said["longest_sample_cpu_ms"] < 200


def test_samplers_find_nothing_wrong_beside_writers_that_are_killed_and_stopped() -> None:
    said = torture("--seconds", "5", "--kills", "--kinds", ALL, "--at-least", "kills=4,rows=10001,batches=61")
    check(said)
    assert said["kills"] > 3 and said["rows"] > 10_000 and said["batches"] > 60


@pytest.mark.long
@pytest.mark.parametrize("memory", ["mapped", "shared"])
def test_samplers_find_nothing_wrong_for_a_minute(memory: str) -> None:
    said = torture("--seconds", "60", "--kills", "--kinds", ALL, "--memory", memory, "--capacity", "2000")
    check(said | {"longest_sample_cpu_ms": 0})
    assert said["kills"] > 20


@pytest.mark.deep
def test_samplers_find_nothing_wrong_in_a_small_ring_of_shared_memory() -> None:
    least = ["--at-least", "kills=3,batches=61"]
    said = torture("--seconds", "4", "--kills", "--kinds", ALL, "--memory", "shared", "--capacity", "2000", *least)
    # A batch by priority is drawn again and again there, as writers go round the ring while it is read: in own time.
    check(said | {"longest_sample_cpu_ms": 0})
    assert said["kills"] > 2 and said["batches"] > 60


@pytest.mark.long
@pytest.mark.parametrize("memory", ["mapped", "shared"])
def test_twenty_million_rows_go_through_a_ring_of_a_hundred_thousand(memory: str) -> None:
    said = torture("--rows", "20e6", "--kills", "--kinds", ALL, "--memory", memory)
    check(said)
    assert said["rows"] >= 20e6 and said["kills"] > 20


@pytest.mark.mutant
@pytest.mark.long
@pytest.mark.parametrize("what", PLANTS)
def test_a_planted_fault_is_found(what: str) -> None:
    assert torture("--plant", what, *PLANTS[what][1])["faults"]


# ---- the native store ----
@pytest.mark.deep
def test_readers_beside_a_writer_see_whole_rows_only() -> None:
    said = torture("--seconds", "2", *RACE, "--at-least", "missing=1,rows=1001,batches=200")
    assert said["faults"] == []
    assert said["missing"] > 0, "no row was overwritten under a reader: the race was not run"
    assert said["rows"] > 1000 and said["read"] > 1000


@pytest.mark.long  # in CI writers are killed beside samplers of every kind, above
def test_a_killed_writer_leaves_every_published_row_and_the_next_one_enters_a_seam() -> None:
    said = torture("--seconds", "2", *KILLS, "--samplers", "1", "--trailer", "--at-least", "kills=6,seams=3")
    assert said["faults"] == []
    assert said["kills"] > 5 and said["seams"] > 2


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_long_runs_with_kills_find_nothing(seed: int) -> None:
    options = [["--trailer"], [], ["--capacity", "6"], ["--words", "9000", "--capacity", "16"]][seed]
    said = torture(
        "--seconds", "30", *KILLS, "--samplers", "2", "--seed", str(seed), *options, "--at-least", "kills=31"
    )
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
    shutil.copy(ROOT / "tests" / "native" / "before_editable.py", package.parent / "sitecustomize.py")
    return package.parent
