"""Four writers, two samplers, kills and stops: what `torture.py` must not find, and that it would find it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import engram
from processes.plants import PLANTS

HERE = Path(__file__).parent
ALL = "random,epochs,prioritized,slices,slices by seams,slice epochs,prioritized slices,sequences"


def torture(*options: str) -> dict[str, Any]:
    env = {**os.environ, "PYTHONPATH": str(Path(engram.__file__).resolve().parents[1])}
    made = subprocess.run(
        [sys.executable, HERE / "torture.py", *options], env=env, capture_output=True, text=True, timeout=1500
    )
    assert made.returncode in (0, 1) and made.stdout, made.stderr
    said: dict[str, Any] = json.loads(made.stdout)
    return said


def check(said: dict[str, Any]) -> None:
    assert said["faults"] == []
    # Who waits for somebody goes to sleep (or burns its own time): a call that does neither waits for nobody.
    assert said["extend_switches"] <= said["extends"] / 100 + 20
    assert said["sample_switches"] <= said["batches"] / 100 + 20
    assert said["longest_extend_cpu_ms"] < 200 and said["longest_sample_cpu_ms"] < 200


def test_samplers_find_nothing_wrong_beside_writers_that_are_killed_and_stopped() -> None:
    said = torture("--seconds", "9", "--kills", "--kinds", ALL)
    check(said)
    assert said["kills"] > 3 and said["rows"] > 10_000 and said["batches"] > 60


@pytest.mark.deep
def test_samplers_find_nothing_wrong_in_a_small_ring_of_shared_memory() -> None:
    said = torture("--seconds", "6", "--kills", "--kinds", ALL, "--memory", "shared", "--capacity", "2000")
    check(said)
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
