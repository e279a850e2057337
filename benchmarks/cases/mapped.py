"""A mapped buffer three times as large as the memory: 60 M rows, reopened in a control group of 1.6 GB.

Each contender runs in child processes of its own: one builds its files outside the group, one reads them inside. So
they follow each other here and do not take turns; the floors read a file of packed rows in the same kind of child.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import floors
from benchmarks.cases import FLOOR, Result, Row, missing, result
from benchmarks.control_group import inside, memory_group
from benchmarks.data import CARTPOLE_LEAVES, row_bytes
from benchmarks.machine import read_ahead_kb

ROWS, LIMIT = 60_000_000, 1_600_000_000
DISK_NEEDED = ROWS * 112  # rows with their trailers, or columns; some air
MINUTES = 8
FLOORS = {FLOOR: "readahead", "floor, io_uring": "io_uring", "floor, no asking ahead": "touch"}


def results(*, quick: bool) -> list[Result]:
    """The one row of this case, with the reason wherever something could not be measured."""
    row = result(Row("sample_mapped", "60 M rows on disk, 1.6 GB of memory", {}, target={"floor, io_uring": 1 / 1.3}))
    folder = Path(tempfile.mkdtemp(prefix="engram-bench-"))
    try:
        ahead = read_ahead_kb(folder)
        row["notes"].append(f"read_ahead_kb of the device: {ahead}")
        reason = _why_not(folder, ahead, quick)
        for name in ("engram", "torchrl"):
            row["contenders"][name] = missing(reason) if reason else _attempt(name, folder / name)
        row["contenders"] |= {name: missing(reason) for name in FLOORS} if reason else _floors(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    counts = [f"{name} {len(value['rounds'])}" for name, value in row["contenders"].items() if "rounds" in value]
    row["notes"] += ["batches timed: " + ", ".join(counts)] if counts else []
    return [row]


def _why_not(folder: Path, ahead: int | None, quick: bool) -> str | None:
    if quick:
        return "left out by --quick"
    if ahead is None:
        return "the temporary directory is not on a disk that can be told; set TMPDIR"
    free = shutil.disk_usage(folder).free
    if free < DISK_NEEDED:
        return f"{DISK_NEEDED / 1e9:.1f} GB of disk are needed and {free / 1e9:.1f} GB are free; set TMPDIR"
    try:
        with memory_group(LIMIT):
            return None
    except OSError as error:
        return str(error)


def _attempt(name: str, folder: Path) -> Result:
    """Build, drop the page cache, read inside the group, remove."""
    try:
        _child("build", name, folder)
        drop_from_cache(folder)
        return _read(name, folder)
    except Exception as error:
        return missing(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _floors(folder: Path) -> dict[str, Result]:
    path = folder / "packed-rows"
    try:
        floors.make_file(path, ROWS * row_bytes(CARTPOLE_LEAVES))
    except Exception as error:
        return {name: missing(error) for name in FLOORS}
    figures = {}
    for name, mode in FLOORS.items():
        drop_from_cache(folder)
        try:
            figures[name] = _read(mode, path)
        except Exception as error:
            figures[name] = missing(error)
    path.unlink()
    return figures


def _read(what: str, path: Path) -> Result:
    with memory_group(LIMIT) as group:
        seconds = _child("read", what, path, group=group)
    return {"median": statistics.median(seconds), "rounds": seconds}


def _child(verb: str, what: str, path: Path, group: Path | None = None) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.cases.mapped_child", verb, what, str(path), str(ROWS)]
    if group is not None:
        command = inside(group, command)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 * MINUTES)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"its process ended with {done.returncode}: {last}")
    seconds: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return seconds


def drop_from_cache(folder: Path) -> None:
    """Sync every file below `folder` and let its pages go; the rest of the machine keeps its cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
