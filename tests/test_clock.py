"""packaging/clock.py: a silent command with a clock; what it printed is shown where it fails."""

import subprocess
import sys
from pathlib import Path

CLOCK = Path(__file__).parents[1] / "packaging" / "clock.py"


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, CLOCK, "trying", sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_command_that_succeeds_says_nothing_but_how_long_it_took():
    done = run("print('hello')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "trying: done in 0 s\n")


def test_a_command_that_fails_shows_its_output_and_ends_with_its_code():
    done = run("import sys; print('why'); print('error', file=sys.stderr); sys.exit(7)")
    assert done.returncode == 7 and "trying: failed after" in done.stderr
    assert "why" in done.stderr and "error" in done.stderr
