"""Each protection of removed rows against power cuts and kills, taken out: a test notices it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from contracts.programs import run_program
from crash import tracer

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(not tracer.can_watch(), reason="stores are watched on x86-64 only"),
]

PLANTS = {
    22: "a recovery keeps bits of rows whose slots were given to others",
    23: "a recovery keeps bits of rows that were not flushed",
    24: "the header is not synced before the bit of a new row is set",
    25: "a row that replaces a removed one is written before its bit is on the disk",
    26: "a recovery does not sync the bits that it clears",
    27: "a load sets bits before the disk knows that it has begun",
    28: "a replacement that was killed is finished without its bit",
}


@pytest.mark.parametrize("plant", PLANTS)
def test_tests_of_power_cuts_fail_without_a_protection(plant: int) -> None:
    tests = Path(__file__).parent / "test_removed_cuts.py"
    run = run_program(
        "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))",
        *("-q", "-x", "-p", "no:cacheprovider", "--show-capture=no", "--rootdir", tests.parents[2], tests),
        env=os.environ | {"ENGRAM_PLANTED_MISTAKE": str(plant)},
    )
    assert run.returncode == 1 and "1 failed" in run.stdout, f"{PLANTS[plant]}: {run.stdout[-2000:]}"
