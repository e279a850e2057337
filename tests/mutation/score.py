"""`make mutation-score`: plants mutants one at a time and runs the tests that reach each until one fails.

    python -m mutation.score run --count 600 --seed 0 [--only engram/store] [--numbers 1a2b3c4d ...] [--update]
    python -m mutation.score compare [FILE]         that, or what was found so far, against tests/mutation/score.jsonl

Results are appended as they come to build/mutation/, so that an interrupted run goes on when it is started again.
`score.jsonl` has a line for each mutant, known again by its content, and is what later runs are compared with.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path

from . import native, reach, runs
from .candidates import Mutant, candidates, choose, quotas

ROOT = Path(__file__).parents[2]
KEPT = Path(__file__).with_name("score.jsonl")
BUILT = ROOT / "build" / "mutation"
TIERS = {"quick": "not long and not deep", "deep": "deep and not long"}
FIRST, FIRST_SECONDS = 60, 10.0  # so many tests are tried first, which take so long in all
SHARES = re.compile(r"scope=|cache")  # in a test file: what one test reaches may show in another one
LONGEST = 160  # characters of a replaced text in the file


@dataclasses.dataclass(frozen=True)
class Result:
    """The fate of one mutant: killed by a test, survived all that reach it, or reached by none."""

    package: str
    file: str
    function: str
    kind: str
    before: str
    after: str
    fate: str
    by: str
    number: str

    @staticmethod
    def of(m: Mutant, fate: str, by: str = "") -> Result:
        before, after = (text if len(text) <= LONGEST else text[: LONGEST - 3] + "..." for text in (m.before, m.after))
        return Result(m.package, m.file, m.function, m.kind, before, after, fate, by, m.number)

    def line(self) -> str:
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False) + "\n"


def read(file: Path) -> list[Result]:
    return [Result(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


# ---- one mutant ----
def trial(
    m: Mutant, tests: list[str], known: reach.Reach, core: Path
) -> Generator[runs.Run, int | None, tuple[str, str]]:
    """Runs tests with a mutant planted: "" where all pass, otherwise how it was killed and in which test."""
    folder = Path(tempfile.mkdtemp(prefix="engram-mutant-"))  # whose end no fork brings about
    try:
        names = {name: folder / name.lower() for name in ("ENGRAM_PLAN", "ENGRAM_STARTED", "ENGRAM_PLANTED")}
        names["ENGRAM_PLAN"].write_text(json.dumps(tests))
        env = {name: str(path) for name, path in names.items()}
        if m.package == "native":
            env |= {"ENGRAM_NATIVE": str(core), "ENGRAM_NATIVE_MUTANT": m.number}
        else:
            env["ENGRAM_MUTANT"] = json.dumps({"file": m.file, "start": m.start, "end": m.end, "new": m.new})
        files = dict.fromkeys(test.split("::")[0] for test in tests)
        arguments = ["-x", "--tb=line", f"--basetemp={folder}/tmp", *files]
        code = yield runs.Run(arguments, env, known.limit(tests), folder / "log")
        started = names["ENGRAM_STARTED"].read_text() if names["ENGRAM_STARTED"].exists() else "import"
        said = (folder / "log").read_text(errors="replace")[-2000:]
        if m.package != "native" and not names["ENGRAM_PLANTED"].exists():
            raise RuntimeError(f"{m.number} of {m.file} was not loaded:\n{said}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if code in (0, 5):  # 5: none of these tests is there any more, as where a mutant changes parameters' names
        return "", ""
    if code is None:
        return "killed by timeout", started
    if code in (1, 2, 4):
        return "killed", started
    if code < 0 or code > 100:
        return "killed by crash", started
    raise RuntimeError(f"pytest ended with {code} for {m.number} of {m.file}:\n{said}")


def judge(m: Mutant, known: reach.Reach, core: Path) -> Generator[runs.Run, int | None, Result]:
    """The quickest tests that reach the mutant, then the others; of files whose tests share fixtures all tests."""
    reaching = known.of(m)
    if not reaching:
        return Result.of(m, "not reached")
    first = [test for at, test in enumerate(reaching[:FIRST]) if at == 0 or known.seconds[test] < FIRST_SECONDS / FIRST]
    how, by = yield from trial(m, first, known, core)
    if not how:
        sharing = {
            file for file in {test.split("::")[0] for test in reaching} if SHARES.search((ROOT / file).read_text())
        }
        others = {*reaching, *(test for test in known.seconds if test.split("::")[0] in sharing)} - set(first)
        if others:
            how, by = yield from trial(m, sorted(others, key=known.seconds.__getitem__), known, core)
    return Result.of(m, how or "survived", by)


def control(tests: list[str], known: reach.Reach, core: Path) -> Generator[runs.Run, int | None, list[str]]:
    """The tests of these that fail although nothing is planted: what they killed is not known to be killed."""
    folder = Path(tempfile.mkdtemp(prefix="engram-mutant-"))
    try:
        (folder / "plan").write_text(json.dumps(tests))
        env = {
            "ENGRAM_PLAN": str(folder / "plan"),
            "ENGRAM_STARTED": str(folder / "started"),
            "ENGRAM_NATIVE": str(core),
        }
        files = dict.fromkeys(test.split("::")[0] for test in tests)
        arguments = ["--tb=no", f"--basetemp={folder}/tmp", *files]
        code = yield runs.Run(arguments, env, known.limit(tests), folder / "log")
        said = (folder / "log").read_text(errors="replace")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if code not in (0, 1):
        raise SystemExit(f"the tests that killed do not run to their end without mutants; try again:\n{said[-2000:]}")
    return [test for test in tests if f"\nFAILED {test}" in said or f"\nERROR {test}" in said]


# ---- all of them ----
def digest(*folders: Path, where: str) -> str:
    """Of all files in these folders, but for those of the score itself, and of the places that are noted."""
    of_all = hashlib.blake2s(where.encode(), digest_size=6)
    for file in sorted(f for folder in folders for f in folder.rglob("*")):
        if file.is_file() and Path(__file__).parent not in file.parents and file.suffix not in (".pyc", ".so"):
            of_all.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return of_all.hexdigest()


def run(args: argparse.Namespace) -> None:
    started = time.monotonic()
    found = candidates(ROOT / "src")
    of_native = [m for m in found if m.package == "native"]
    cores = BUILT / f"native-{hashlib.blake2s(repr(of_native).encode(), digest_size=6).hexdigest()}"
    print(f"{len(found)} places to mutate; the native core with all of its own: {cores}")
    core, alive = native.build(of_native, cores)
    state = digest(ROOT / "src", ROOT / "tests", where=repr([(m.file, m.start, m.new) for m in found]))
    tiers = ["quick", "deep"] if args.deep else ["quick"]
    folders = [BUILT / f"reach-{state}-{tier}" for tier in tiers]
    for tier, folder in zip(tiers, folders, strict=True):
        if not (folder / "done").exists():
            print(f"one run of the {tier} tests, to see which mutants each reaches: {folder}", flush=True)
            reach.record(found, core, folder, TIERS[tier], args.workers)
            (folder / "done").touch()
    known = reach.Reach(found, folders)

    def asked(of: Mutant | Result) -> bool:
        if args.numbers:
            return of.number in args.numbers
        return args.only is None or of.file.startswith(args.only) or of.package == args.only

    able = [m for m in found if asked(m) and (m.package != "native" or m.number in alive)]
    kept = read(KEPT)
    chosen = (
        able if args.numbers else choose(able, args.count, args.seed, [r.number for r in kept], quotas(ROOT / "src"))
    )
    results = BUILT / f"results-{state}-{'-'.join(tiers)}.jsonl"
    done = {} if args.numbers else {r.number: r for r in read(results)}
    left = [m for m in chosen if m.number not in done]
    print(f"{len(chosen)} mutants, of which {len(left)} are left to do; {results}", flush=True)
    with open(results, "a") as out:

        def job(m: Mutant) -> runs.Job:
            if args.minutes and time.monotonic() - started > 60 * args.minutes:
                return
            try:
                result = done[m.number] = yield from judge(m, known, core)
            except RuntimeError as error:
                return print(error)
            out.write(result.line())
            out.flush()
            print(f"{len(done)}  {result.fate:11} {result.file} {result.function}  {result.after}", flush=True)

        runs.finish(map(job, left), args.workers)
    planted = [done[m.number] for m in chosen if m.number in done]
    killers = [test for test in known.seconds if test in {r.by for r in planted}]

    def last() -> runs.Job:
        for test in (yield from control(killers, known, core)):
            print(f"fails without a mutant, too: {test}, which killed {[r.number for r in planted if r.by == test]}")
            planted[:] = [r for r in planted if r.by != test]

    runs.finish([last()] if killers else [], 1)
    undone = {m.number for m in chosen} - {r.number for r in planted}
    untouched = [r for r in kept if not asked(r) or r.number in undone]
    compare(planted, [r for r in kept if r not in untouched])
    if args.update:
        every = sorted([*planted, *untouched], key=lambda r: (r.file, r.function, r.number))
        KEPT.write_text("".join(r.line() for r in every))


def compare(now: list[Result], before: list[Result]) -> bool:
    """Prints what changed since `before`; whether no kill was lost and no package's share fell."""
    shares = [Counter(r.package for r in of if r.fate.startswith("killed")) for of in (before, now)]
    planted = [Counter(r.package for r in of) for of in (before, now)]
    was = {r.number: r for r in before}
    lost = [r for r in now if r.number in was and was[r.number].fate.startswith("killed") > r.fate.startswith("killed")]
    gone = [r for number, r in was.items() if number not in {r.number for r in now}]
    new = [r for r in now if r.number not in was]
    fallen = []
    print(f"\n{'package':36}{'before':>10}{'now':>10}   survived  not reached")
    for package in sorted(planted[0] | planted[1]):
        then, today = (f"{shares[i][package]}/{planted[i][package]}" if planted[i][package] else "-" for i in (0, 1))
        of = Counter(r.fate for r in now if r.package == package)
        falls = planted[0][package] and planted[1][package] and (
            shares[1][package] / planted[1][package] < shares[0][package] / planted[0][package]
        )  # fmt: skip
        if falls:
            fallen.append(package)
        mark = "  the share fell" if falls else ""
        print(f"{package:36}{then:>10}{today:>10}   {of['survived']:8}  {of['not reached']:11}{mark}")
    all_of = [f"{sum(shares[i].values())}/{sum(planted[i].values())}" for i in (0, 1)]
    print(f"{'all':36}{all_of[0]:>10}{all_of[1]:>10}")
    for title, listed in (("no longer killed", lost), ("no longer there", gone), ("new", new if before else [])):
        print(f"\n{title}: {len(listed)}")
        for r in listed:
            print(f"  {r.number}  {r.fate:11} {r.file}  {r.function}  {r.kind}\n      {r.before}\n      {r.after}")
    return not lost and not fallen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--count", type=int, default=600)
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--only", help="a package, or the beginning of files' names below src")
    running.add_argument("--numbers", nargs="*", help="these mutants once more")
    running.add_argument("--deep", action="store_true", help="with the deep tests, too")
    running.add_argument("--workers", type=int, default=2)
    running.add_argument("--minutes", type=float, help="plants no other mutant after so long")
    running.add_argument("--update", action="store_true", help="writes tests/mutation/score.jsonl")
    comparing = commands.add_parser("compare")
    comparing.add_argument("file", nargs="?", type=Path)
    args = parser.parse_args()
    if args.command == "run":
        return run(args)
    newest = args.file or max(BUILT.glob("results-*.jsonl"), key=os.path.getmtime)
    latest = {r.number: r for r in read(newest)}  # those repeated are there twice
    raise SystemExit(0 if compare(list(latest.values()), read(KEPT)) else 1)


if __name__ == "__main__":
    main()
