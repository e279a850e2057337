"""Runs a command in silence, and shows how long it has taken: in place on a terminal, else a line now and then.

    python packaging/clock.py "installing torch" python -m pip install torch

What the command prints is shown where it fails; its exit code is this one's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

SECONDS_APART = 15.0  # between two lines where there is no terminal


def run(what: str, command: list[str]) -> int:
    begun, is_terminal = time.monotonic(), sys.stderr.isatty()

    def show(state: str, end: str) -> None:
        text = f"{what}: {state}"
        print(f"\r{text}" if is_terminal else text, end=end if is_terminal else "\n", file=sys.stderr, flush=True)

    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while True:
            try:
                code = process.wait(1.0 if is_terminal else SECONDS_APART)
                break
            except subprocess.TimeoutExpired:
                show(f"{time.monotonic() - begun:.0f} s", "")
        seconds = time.monotonic() - begun
        show(f"failed after {seconds:.0f} s" if code else f"done in {seconds:.0f} s", "\n")
        if code:
            output.seek(0)
            print(output.read(), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1], sys.argv[2:]))
