"""Which tests reach which mutants, and how long each test takes: one run of the tests, kept until something changes."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np

from . import runs
from .candidates import Mutant

ROOT = Path(__file__).parents[2]
LONGEST_FILE = 3600.0  # seconds
QUICKEST = 60  # tests kept for each place
#: Tests that judge the harness, other libraries or the text of the sources.
NOT_RUN = ("mutation", "clients", "cluster")


@dataclasses.dataclass
class Reach:
    """`tests[place]`: the quickest tests that reach it; `files[place]`: all test files with one that does."""

    seconds: dict[str, float]  # of each test that passes
    tests: dict[int, list[str]]
    files: dict[int, list[str]]

    def of(self, place: int) -> tuple[list[str], list[str]]:
        return self.tests.get(place, []), self.files.get(place, [])


def places(mutants: list[Mutant]) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """The place of each line of Python that has mutants, by file, and of each mutant by number; native ones first."""
    of_mutant = {m.number: i for i, m in enumerate(m for m in mutants if m.package == "native")}
    lines: dict[str, dict[str, int]] = defaultdict(dict)
    following = len(of_mutant)
    for m in mutants:
        if m.package != "native":
            if str(m.line) not in lines[m.file]:
                lines[m.file][str(m.line)] = following
                following += 1
            of_mutant[m.number] = lines[m.file][str(m.line)]
    return lines, of_mutant


def record(mutants: list[Mutant], core: Path, folder: Path, tier: str, workers: int) -> None:
    """Runs each test file of a tier once, and leaves in `folder` what its tests reach; goes on where it was ended."""
    folder.mkdir(parents=True, exist_ok=True)
    sites, of_mutant = places(mutants)
    (folder / "sites.json").write_text(json.dumps(sites))
    (folder / "hits").write_bytes(bytes(max(of_mutant.values()) + 1))
    names = {"ENGRAM_SITES": folder / "sites.json", "ENGRAM_HITS": folder / "hits", "ENGRAM_NATIVE": core}

    def job(file: Path) -> runs.Job:
        name = str(file.relative_to(ROOT))
        result = folder / (name.replace("/", "-") + ".pickle")
        if result.exists():
            return
        log, scratch = result.with_suffix(".log"), result.with_suffix(".tmp")
        own = {name: str(path) for name, path in {**names, "ENGRAM_REACH": result}.items()}
        arguments = ["-m", tier, "-o", "faulthandler_timeout=0", f"--basetemp={scratch}", name]
        status = yield runs.Run(arguments, own, LONGEST_FILE, log)
        shutil.rmtree(scratch, ignore_errors=True)
        last = "ended after an hour" if status is None else log.read_text(errors="replace").strip().split("\n")[-1]
        print(f"{name}: {last}", flush=True)
        if not result.exists():
            result.write_bytes(pickle.dumps([]))

    files = [f for f in (ROOT / "tests").rglob("test_*.py") if f.relative_to(ROOT / "tests").parts[0] not in NOT_RUN]
    runs.finish(map(job, sorted(files)), workers)


def load(mutants: list[Mutant], folders: list[Path]) -> Reach:
    """What the recorded runs say. What is executed when a module is imported is reached by all tests of the module."""
    seconds: dict[str, float] = {}
    hits, by_test, names = [], [], []
    imported: set[int] = set()
    for file in sorted(file for folder in folders for file in folder.glob("*.pickle")):
        for name, took, passed, found in pickle.loads(file.read_bytes()):
            reached = np.frombuffer(found, dtype=np.uint32)
            if not name:
                imported.update(reached.tolist())
            elif passed:
                seconds[name] = took
                hits.append(reached)
                by_test.append(np.full(len(reached), len(names), np.uint32))
                names.append(name)
    if not names:
        raise SystemExit(f"no test passed; see the logs in {folders[0]}")
    place, test = np.concatenate(hits), np.concatenate(by_test)
    durations = np.array([seconds[name] for name in names])
    order = np.lexsort((durations[test], place))
    place, test = place[order], test[order]
    starts = np.flatnonzero(np.r_[True, place[1:] != place[:-1]])
    tests, files = {}, {}
    for at, start, end in zip(place[starts], starts, np.r_[starts[1:], len(place)], strict=True):
        found = [names[i] for i in test[start:end]]
        tests[int(at)], files[int(at)] = found[:QUICKEST], list(dict.fromkeys(name.split("::")[0] for name in found))
    reach = Reach(seconds, tests, files)
    _, of_mutant = places(mutants)
    inside: dict[str, set[int]] = defaultdict(set)
    for m in mutants:
        if not m.at_import:
            inside[m.file].add(of_mutant[m.number])
    for m in mutants:
        at = of_mutant[m.number]
        if m.package != "native" and (m.at_import or at in imported):
            others = [n for p in inside[m.file] for n in reach.tests.get(p, [])]
            reach.tests[at] = sorted({*others, *reach.tests.get(at, [])}, key=seconds.__getitem__)[:QUICKEST]
            reach.files[at] = sorted({f for p in (*inside[m.file], at) for f in reach.files.get(p, [])})
    return reach
