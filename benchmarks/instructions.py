"""Instructions of our commonest calls, which no neighbour on the machine changes: `make instructions`.

    python -m benchmarks.instructions                  counts and compares with instructions.json
    python -m benchmarks.instructions --update         writes that file
    python -m benchmarks.instructions --python PYTHON  counts the engram of another environment, another checkout's say

callgrind runs `counted.py` in a process of its own, with a fixed hash seed and without address space randomisation:
the same code in the same folder counts the same to the last digit. A line that is added anywhere, or another name of
the folder, moves addresses, which Python's caches go by: half a percent as a rule, 1.4 % once, in the epoch. torch,
numpy and libc choose their code by what `cpuid` tells them, and under callgrind that is the CPU that it emulates, with
AVX2 and without AVX-512: an Intel Xeon and an AMD EPYC counted the same to 0.4 %, as two folders do. So the file names
the emulated CPU and the versions. Where they are others, nothing can be compared: that is said, and with
`--must-compare` (CI) it is a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).parent
ROOT = HERE.parent
KEPT = HERE / "instructions.json"
MARKERS = HERE / "native" / "markers.c"
ALLOWED = 0.03
"""A count above the file's by more than this share is a failure."""

Counted = dict[str, Any]
"""`machine`: what the counts depend on besides our code; `instructions`: of one call, by its name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help=f"write {KEPT.name} instead of comparing with it")
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter of the environment whose engram is counted"
    )
    parser.add_argument(
        "--must-compare",
        action="store_true",
        help=f"fail where {KEPT.name} is of another emulated CPU or other versions",
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only calls with this in their name")
    asked = parser.parse_args()
    if asked.update and asked.only:
        parser.error("--update counts every call; leave out --only")
    found = measure(os.path.abspath(asked.python), asked.only)
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {"machine": {}, "instructions": {}}
    kept["instructions"] = {name: count for name, count in kept["instructions"].items() if asked.only in name}
    print(table(found["instructions"], kept["instructions"]), flush=True)
    if asked.update:
        KEPT.write_text(json.dumps(found, indent=2) + "\n")
        print(f"written to {KEPT.relative_to(ROOT)}; its commit says why the counts changed")
        return
    verdict = compare(found, kept, asked.must_compare)
    if verdict:
        sys.exit(verdict)


def measure(python: str, only: str = "") -> Counted:
    """Counts with the engram that `python` imports, of the calls whose name has `only` in it."""
    valgrind = _needed("valgrind")
    with tempfile.TemporaryDirectory(prefix="engram-instructions-") as made:
        folder = Path(made)
        markers, report, dumps = folder / "markers.so", folder / "made.json", folder / "callgrind.out"
        _compile(markers)
        _run([python, "-c", "import benchmarks.counted"])  # so that nothing is compiled while callgrind runs
        command = [valgrind, "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={dumps}", "-q"]
        _run([*_same_addresses(), *command, python, "-m", "benchmarks.counted", str(markers), str(report), only])
        said = json.loads(report.read_text())
        counts = dict(_dump(path) for path in folder.glob(f"{dumps.name}.*"))
    version = subprocess.run([valgrind, "--version"], capture_output=True, text=True).stdout.strip()
    return {
        "machine": {"valgrind": version.removeprefix("valgrind-"), **said["machine"]},
        "instructions": {name: round(counts[name] / times) for name, times in said["made"].items()},
    }


def table(found: dict[str, int], kept: dict[str, int]) -> str:
    """One line a call: instructions, those of the file, and their ratio."""
    lines = [f"{'call':<46}{'instructions':>14}{'file':>14}{'ratio':>9}"]
    for name in found | kept:
        mine, theirs = found.get(name), kept.get(name)
        ratio = f"{mine / theirs:9.4f}" if mine and theirs else f"{'-':>9}"
        lines.append(f"{name:<46}{_number(mine)}{_number(theirs)}{ratio}")
    return "\n".join(lines)


def compare(found: Counted, kept: Counted, must_compare: bool) -> str:
    """The failure in words; empty where the counts are not above the file's, or need not be compared with them."""
    machine, theirs = found["machine"], kept["machine"]
    other = [f"{name} {machine.get(name)} (file: {theirs.get(name)})" for name in machine | theirs
             if machine.get(name) != theirs.get(name)]  # fmt: skip
    if other:
        verdict = (
            f"not compared, as {KEPT.name} was counted elsewhere: {'; '.join(other)}. "
            "`make instructions UPDATE=1`, at a commit whose counts are known, writes the file for this machine"
        )
        if must_compare:
            return verdict
        print(verdict)
        return ""
    missing = sorted(found["instructions"].keys() ^ kept["instructions"].keys())
    if missing:
        return f"only among the calls or only in {KEPT.name}: {', '.join(missing)}; see `make instructions UPDATE=1`"
    limits = {name: count * (1 + ALLOWED) for name, count in kept["instructions"].items()}
    slower = [name for name, count in found["instructions"].items() if count > limits[name]]
    if slower:
        return (f"more than {ALLOWED:.0%} above {KEPT.name}: {'; '.join(slower)}. Where that is meant: "
                "`make instructions UPDATE=1`, and a commit of the file that says why")  # fmt: skip
    print(f"no count is more than {ALLOWED:.0%} above {KEPT.name}")
    return ""


def _run(command: list[str]) -> None:
    """Runs it with surroundings that are the same for everybody, as they lie in its memory, too."""
    environment = {
        "PATH": os.defpath,
        "PYTHONPATH": str(ROOT),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "LC_ALL": "C.UTF-8",
    }
    said = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, **said)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout}")


def _dump(path: Path) -> tuple[str, int]:
    """Name and instructions of a window between two markers."""
    text = path.read_text()
    name = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.MULTILINE)
    total = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
    if name is None or total is None:
        sys.exit(f"{path.name} is no dump of callgrind that this program can read: it begins with {text[:200]!r}")
    return name[1], int(total[1])


def _compile(markers: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or _needed("cc")
    command = [compiler, "-O2", "-shared", "-fPIC", str(MARKERS), "-o", str(markers)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "callgrind.h" in done.stderr:
        _exit_missing("the header valgrind/callgrind.h", "valgrind (Debian, Ubuntu) or valgrind-devel (Fedora)")
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")


def _needed(program: str) -> str:
    packages = {"valgrind": "valgrind", "cc": "gcc"}
    return shutil.which(program) or _exit_missing(f"the program {program}", packages[program])


def _exit_missing(what: str, package: str) -> NoReturn:
    sys.exit(f"make instructions needs {what}, which is not here: install the package {package}, "
             "for example by `apt-get install valgrind gcc`")  # fmt: skip


def _same_addresses() -> list[str]:
    """The start of a command that runs without address space randomisation; nothing where that is not allowed."""
    command = ["setarch", os.uname().machine, "-R"]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        print("addresses are randomised, as `setarch -R` is not allowed or not here: counts may differ a little more")
        return []
    return command


def _number(count: int | None) -> str:
    return f"{'-':>14}" if count is None else f"{count:>14,}"


if __name__ == "__main__":
    main()
