"""The committed type stubs of the native core are those of the core."""

import subprocess
import sys
from pathlib import Path

import engram


def test_the_committed_stubs_are_fresh(tmp_path):
    fresh = tmp_path / "_native.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-m", "engram._native", "-o", str(fresh)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    committed = Path(engram.__file__).with_name("_native.pyi").read_text()
    assert fresh.read_text() == committed, f"write them again: {' '.join(command[1:-1])} src/engram/_native.pyi"
