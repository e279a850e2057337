"""Which tests reach which mutants, and how long each test takes: one run of the tests, kept until something changes."""

from __future__ import annotations

import json
import pickle
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np

from . import runs
from .candidates import Mutant

ROOT = Path(__file__).parents[2]
START_SECONDS = 60.0  # to import and to collect, on a machine that is busy
LONGEST_FILE = 3600.0  # seconds
#: Tests that judge the harness, other libraries or the text of the sources.
NOT_RUN = ("mutation", "clients", "cluster")


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
        arguments = ["-m", tier, "--hang-timeout=0", f"--basetemp={scratch}", name]
        status = yield runs.Run(arguments, own, LONGEST_FILE, log)
        shutil.rmtree(scratch, ignore_errors=True)
        last = "ended after an hour" if status is None else log.read_text(errors="replace").strip().split("\n")[-1]
        print(f"{name}: {last}", flush=True)
        if not result.exists():
            result.write_bytes(pickle.dumps([]))

    files = [f for f in (ROOT / "tests").rglob("test_*.py") if f.relative_to(ROOT / "tests").parts[0] not in NOT_RUN]
    runs.finish(map(job, sorted(files)), workers)


class Reach:
    """What the recorded runs say of the tests that passed."""

    def __init__(self, mutants: list[Mutant], folders: list[Path]) -> None:
        self.seconds: dict[str, float] = {}
        self._imported: set[int] = set()
        hits, by_test = [], []
        for file in sorted(file for folder in folders for file in folder.glob("*.pickle")):
            for name, took, passed, found in pickle.loads(file.read_bytes()):
                reached = np.frombuffer(found, dtype=np.uint32)
                if not name:
                    self._imported.update(reached.tolist())
                elif passed:
                    hits.append(reached)
                    by_test.append(np.full(len(reached), len(self.seconds), np.uint32))
                    self.seconds[name] = took
        if not self.seconds:
            raise SystemExit(f"no test passed; see the logs in {folders[0]}")
        self._names = list(self.seconds)
        place, test = np.concatenate(hits), np.concatenate(by_test)
        order = np.argsort(place, kind="stable")
        self._places, self._tests = place[order], test[order]
        _, self._place = places(mutants)
        self._inside: dict[str, set[int]] = defaultdict(set)  # the places in functions of a file
        for m in mutants:
            if not m.at_import:
                self._inside[m.file].add(self._place[m.number])

    def limit(self, tests: list[str]) -> float:
        """Seconds after which a run of these tests is taken to hang."""
        return START_SECONDS + 5 * sum(map(self.seconds.__getitem__, tests))

    def of(self, m: Mutant) -> list[str]:
        """The tests that reach a mutant, quickest first; of what an import executes, all that reach the module."""
        at = self._place[m.number]
        by_import = m.package != "native" and (m.at_import or at in self._imported)
        asked = np.array(sorted({at, *(self._inside[m.file] if by_import else ())}), np.uint32)
        starts, ends = (np.searchsorted(self._places, asked, side) for side in ("left", "right"))
        found = np.unique(np.concatenate([self._tests[a:b] for a, b in zip(starts, ends, strict=True)]))
        return sorted((self._names[i] for i in found), key=self.seconds.__getitem__)
