"""Runs engram with other Pythons and other versions of torch: `make other-pythons`.

    python packaging/other_pythons.py                      # all of RUNS, one after the other: an hour and a half
    python packaging/other_pythons.py 3.12 2.6.0           # those with this Python, and those with this torch
    python packaging/other_pythons.py 3.13 --parts deep    # this part alone

Each run has an environment of its own in the clone, of 5 to 8 GB (a torch with CUDA), which is removed when it ends,
also by a fault, Ctrl-C or SIGTERM. engram is built from the clone and installed as a wheel (`pip install ".[dev]"`).
Other packages have the versions of constraints.txt, but for those that are `free`. At the end there is a table.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import wheels

ROOT = Path(__file__).resolve().parents[1]
SCENES = ("tests/versions/scenes.py",)
TESTS = ("-m", "pytest", "-q", "-n", os.environ.get("WORKERS", "2"), "--dist", "worksteal", "-p", "no:cacheprovider")
#: As in the Makefile.
PARTS = {
    "scenes": SCENES,
    "quick": (*TESTS, "-m", "not long and not deep"),
    "deep": (*TESTS, "-m", "deep and not long"),
}
OUTCOMES = ("passed", "failed", "skipped")


@dataclass(frozen=True)
class Run:
    python: str
    torch: str
    parts: tuple[str, ...] = ("scenes", "quick")
    #: Packages that take what pip chooses: the version of constraints.txt does not exist for this Python or torch.
    free: tuple[str, ...] = ()


RUNS = (
    Run("3.10", "2.13.0", free=("numpy", "hypothesis", "matplotlib", "typer", "imageio", "pillow", "pyarrow")),
    Run("3.11", "2.6.0"),
    Run("3.11", "2.9.1"),
    Run("3.12", "2.13.0"),
    Run("3.13", "2.13.0", ("scenes", "quick", "deep")),
)


@dataclass
class Result:
    run: Run
    commit: str
    seconds: float = 0.0
    fault: str = ""
    #: For each part how many passed, failed and were skipped.
    counts: dict[str, dict[str, int]] = field(default_factory=dict)


def constraints(run: Run) -> str:
    """What pip may install: the versions of constraints.txt, with this torch."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line for line in lines if line.split("==")[0] not in ("torch", *run.free)]
    return "\n".join([f"torch=={run.torch}", *kept]) + "\n"


def shown(command: list[str | Path], environment: dict[str, str]) -> tuple[int, str]:
    """Runs a command and shows what it prints: its exit code and its last line. It ends where this program does."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    )
    last = ""
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
        return process.wait(), last
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def counted(line: str) -> dict[str, int]:
    """How many passed, failed and were skipped, by the last line of pytest or of the scenes."""
    found = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", line)}
    errors = found.pop("error", 0) + found.pop("errors", 0)
    return {one: found.get(one, 0) + (errors if one == "failed" else 0) for one in OUTCOMES}


def install(run: Run, python: Path, scratch: Path) -> Path:
    """The Python of a new environment with engram in it, and what its tests need."""
    own = scratch / "environment/bin/python"
    shown([python, "-m", "venv", scratch / "environment"], dict(os.environ))
    (scratch / "constraints.txt").write_text(constraints(run))
    (scratch / "tmp").mkdir()
    settings = {
        "PIP_CONSTRAINT": str(scratch / "constraints.txt"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "TMPDIR": str(scratch / "tmp"),  # gigabytes, which /tmp may not have
        "SKBUILD_BUILD_DIR": str(scratch / "build"),  # not the build folder of the clone's own environment
    }
    pip = [own, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-compile"]
    code, _ = shown([*pip, f"{ROOT}[dev,video]", "nanobind"], {**os.environ, **settings})
    if code:
        raise RuntimeError("not installed")
    return own


def remove(folder: Path) -> None:
    """Removes a folder, into which a process that was killed may still write."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.5)
    print(f"{folder} could not be removed", flush=True)


def carry_out(run: Run, parts: tuple[str, ...]) -> Result:
    print(f"\n== Python {run.python}, torch {run.torch}: {', '.join(parts)}", flush=True)
    result, begun = Result(run, commit()), time.monotonic()
    python = wheels.interpreter(run.python)
    if python is None:
        result.fault = "no such Python on this machine"
        return result
    # Named as other environments are, which git, the sdist and `make clean` leave out or know.
    scratch = Path(tempfile.mkdtemp(prefix=".venv-other-", dir=ROOT))
    try:
        own = install(run, python, scratch)
        bare = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        for part in parts:
            code, last = shown([own, *PARTS[part]], {**bare, "PATH": f"{own.parent}:{os.environ['PATH']}"})
            result.counts[part] = counted(last)
            if code:
                result.fault = f"{result.fault}, {part} failed".removeprefix(", ")
    except RuntimeError as error:
        result.fault = str(error)
    finally:
        remove(scratch)
    result.seconds = time.monotonic() - begun
    return result


def commit() -> str:
    """The commit of the clone, with a + where files differ from it."""
    git = ["git", "-C", str(ROOT)]
    named = subprocess.run([*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True).stdout.strip()
    return named + "+" * bool(subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True).returncode)


def table(results: list[Result]) -> str:
    heads = ("Python", "torch", *(f"{part}: {'/'.join(OUTCOMES)}" for part in PARTS), "seconds", "date", "commit", "")
    day = datetime.now(timezone.utc).date()
    rows = [heads]
    for one in results:
        counts = ("/".join(map(str, one.counts[part].values())) if part in one.counts else "" for part in PARTS)
        ends = (f"{one.seconds:.0f}", str(day), one.commit, one.fault or "passed")
        rows.append((one.run.python, one.run.torch, *counts, *ends))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


@contextmanager
def exit_by_signals() -> Iterator[None]:
    """A signal that ends this process does so by an exception, by which the environment is removed."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="*", metavar="VERSION", help="a Python such as 3.12, or a torch such as 2.6.0")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="these parts alone")
    asked = parser.parse_args()
    chosen = [run for run in RUNS if not asked.only or {run.python, run.torch} & set(asked.only)]
    if not chosen:
        parser.error(f"no run has {' or '.join(asked.only)}")
    results: list[Result] = []
    with exit_by_signals():
        try:
            for run in chosen:
                results.append(carry_out(run, tuple(asked.parts or run.parts)))
        finally:
            print(f"\n{table(results)}", flush=True)
    return 1 if any(one.fault for one in results) else 0


if __name__ == "__main__":
    sys.exit(main())
