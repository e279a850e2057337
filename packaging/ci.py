"""Everything that runs on every submission: `.ci/run`, or `make ci`.

    .ci/run, make ci    every part of a submission, but for those that nothing has changed since they passed
    make release-check  every part
    python packaging/ci.py docs model  these parts, and those that they need

Two parts run beside each other, as most use one core, and one more that mostly `waits`, for processes that start or are
found gone. Parts that are `alone` use both cores, and their tests have limits of time. The output of a part comes when
it ends, and stays in build/ci. A fault stops no other part; at the end there is a table of all parts, and the last
lines of those that failed.

A part is skipped if all that it can see is as it was when the part passed. The hashes of that are in LANDINGS, in the
repository, and for parts that passed here beside the layers of environments (packaging/environment.py).

A run of all parts of a commit without changes, in which none fails, appends a line to LANDINGS: the commit, and each
part's and each test module's seconds of the clock and of CPUs. Who lands the commit lands the line with the next one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from environment import ROOT, kept_in, system

#: Paths that every part depends on, as git's pathspecs.
EVERY = (
    "Makefile",
    "*.mk",
    ".ci",
    "constraints.txt",
    "pyproject.toml",
    "packaging/ci.py",
    "packaging/environment.py",
    "packaging/requirements-*.txt",
    "benchmarks/requirements-peers.txt",
)
#: A line of JSON for each run that passed. No part sees it.
LANDINGS = Path("packaging/landings.jsonl")
#: What the tests write: tests/contracts/seconds.py.
MODULES = Path("build/ci/modules.json")
#: CPU seconds of a module of tests from which a line names it.
NAMED_FROM_S = 0.5
OTHERS = "(others)"
BESIDE = 2
KILLED_AFTER_S = 10
TOLD_EACH_S = 60
LAST_LINES = 60


@dataclass(frozen=True)
class Part:
    """A command, which runs after the parts that it `needs`.

    `sees` are the paths, beside EVERY, that can change its outcome; without them it is never skipped. No other part
    runs beside one that is `alone`, and one that `waits` is not counted among those that do. One `of_releases` runs in
    `make release-check`, and where it is asked for.
    """

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    sees: tuple[str, ...] = ()
    alone: bool = False
    waits: bool = False
    of_releases: bool = False


def make(name: str, *targets: str, **settings: Any) -> Part:
    return Part(name, ("make", *(targets or (name,))), **settings)


BUILT = ("environment",)
PEERS = (*BUILT, "peers")
#: What the native core is built from.
NATIVE = ("src/native", "CMakeLists.txt")
#: What all tests use.
HELP = ("tests/conftest.py", "tests/contracts")
#: Of a satellite a submission looks at its own code; `make release-check` runs it whatever has changed.
RAY = (
    "src/engram/distributed",
    *NATIVE,
    "tests/cluster",
    "tests/distributed/shards.py",
    "tests/docs/pages.py",
    "docs/how-to/clusters.md",
    "docs/how-to/many-machines.md",
    "benchmarks",
    *HELP,
)
CLIENTS = ("src", "CMakeLists.txt", "tests/clients", "benchmarks", *HELP)
#: In the order in which they start: what the others need, then the longest, so that two end at about the same time.
PARTS = (
    make("environment"),
    Part("tools", (".ci/tools",)),
    make("model", needs=("tools",), sees=("tests/model", "src/native/*_protocol.hpp", "src/native/crc32c.hpp")),
    make("test-ray", needs=BUILT, sees=RAY, waits=True),
    make("wheel-check", sees=(*NATIVE, "packaging", "tests/native", *HELP, "README.md", "LICENSE*")),
    make(
        "instructions",
        "instructions",
        "INSTRUCTIONS=--must-compare",
        needs=("tools", *BUILT),
        sees=("src", "CMakeLists.txt", "benchmarks"),
    ),
    make("peers", ".venv-bench/.engram", needs=BUILT),
    make("interop", "interop", "PYTEST=-m 'not theirs'", needs=PEERS, sees=CLIENTS),
    make("oldest", needs=BUILT, sees=("src", "CMakeLists.txt", "tests/versions", "constraints-oldest.txt")),
    make("newest", needs=BUILT, sees=("src", "CMakeLists.txt", "tests/versions", "constraints-newest.txt")),
    make("static", needs=BUILT),
    make("docs", sees=("docs", "mkdocs.yml", "src", "CMakeLists.txt", "packaging", "examples", "benchmarks", "*.md")),
    make("tests", "test-tiers", needs=BUILT, alone=True),
    make("theirs", "interop", "PYTEST=-m theirs", needs=PEERS, sees=CLIENTS, alone=True, of_releases=True),
)


def state(part: Part, root: Path, on: str) -> str | None:
    """The hash of all that can change the outcome of a part; None where that is not known."""
    if not part.sees:
        return None
    listed = subprocess.run(
        [
            "git",
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
            "--",
            *EVERY,
            *part.sees,
            f":!{LANDINGS}",
        ],
        cwd=root,
        capture_output=True,
    )
    if listed.returncode:
        return None
    digest = hashlib.sha256(f"{on}\0{part}\0".encode())
    for name in sorted(set(listed.stdout.split(b"\0")) - {b""}):
        file = Path(os.fsdecode(os.path.join(os.fsencode(root), name)))
        if file.is_symlink():
            content, mode = os.fsencode(os.readlink(file)), "link"
        elif file.is_file():
            content, mode = file.read_bytes(), oct(file.stat().st_mode & 0o111)
        else:
            content, mode = b"", "gone"
        digest.update(name + f"\0{mode}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:32]


def machine() -> str:
    """What the outcome of parts depends on besides the clone."""
    compiler = subprocess.run([os.environ.get("CXX", "c++"), "--version"], capture_output=True, text=True)
    return "\n".join([system(), platform.release(), compiler.stdout])


def passed_states(*files: Path) -> set[str]:
    """The states in which parts passed, of these files of lines."""
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    return {part["saw"] for line in lines for part in json.loads(line)["parts"].values() if "saw" in part}


def add_line(file: Path, line: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a") as lines:
        lines.write(json.dumps(line) + "\n")


def commit(root: Path) -> str | None:
    """The commit of a clone in which nothing that a part could see was changed."""

    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
        return None if done.returncode else done.stdout.strip()

    changed = git("status", "--porcelain", "--", ".", f":!{LANDINGS}")
    return git("rev-parse", "HEAD") if changed == "" else None


def modules(file: Path) -> dict[str, dict[str, list[float]]]:
    """The seconds of the modules of each tier; those of few, of which there are hundreds, together."""
    named: dict[str, dict[str, list[float]]] = {}
    for tier, of_tier in (json.loads(file.read_text()) if file.exists() else {}).items():
        sums = named[tier] = {OTHERS: [0.0, 0.0]}
        for name, seconds in of_tier.items():
            sum_of = sums.setdefault(name if seconds[1] >= NAMED_FROM_S else OTHERS, [0.0, 0.0])
            sum_of[:] = (round(sum_of[k] + seconds[k], 1) for k in (0, 1))
    return named


@dataclass
class Outcome:
    word: str
    began: float = 0.0
    took: float = 0.0
    cpu: float = 0.0
    saw: str | None = None

    @property
    def line(self) -> dict[str, Any]:
        """Its part in a line of LANDINGS."""
        saw = {"saw": self.saw} if self.saw else {}
        return {"word": self.word, "took": round(self.took, 1), "cpu": round(self.cpu, 1), **saw}


@dataclass
class Run:
    """Parts, at most BESIDE beside each other and beside those that wait, and what became of each."""

    parts: Sequence[Part]
    root: Path
    kept: Path
    on: str
    everything: bool = False
    #: Whether these are all parts of a submission: a run of a few is no landing.
    whole: bool = False
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    taken: dict[str, Part] = field(default_factory=dict)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    stopped: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self) -> bool:
        """Whether every part passed, or was skipped."""
        threads = [threading.Thread(target=self._work) for _ in range(BESIDE + self._waiting)]
        self.logs.mkdir(parents=True, exist_ok=True)
        (self.root / MODULES).unlink(missing_ok=True)
        of = commit(self.root) if self.whole else None
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(TOLD_EACH_S)
                    self._tell_what_runs()
        finally:
            self.stop()
            for thread in threads:
                thread.join()
            self._report()
        passed = all(outcome.word in ("passed", "skipped") for outcome in self.outcomes.values())
        if passed and of and of == commit(self.root):
            day, parts = datetime.now(timezone.utc).date(), {name: one.line for name, one in self.outcomes.items()}
            line = {"commit": of, "date": str(day), "parts": parts, "modules": modules(self.root / MODULES)}
            add_line(self.root / LANDINGS, line)
        return passed

    @property
    def passed_here(self) -> Path:
        return self.kept / "passed.jsonl"

    @property
    def logs(self) -> Path:
        return self.root / "build" / "ci"

    def stop(self) -> None:
        """Starts no other part, and ends those that run."""
        with self.changed:
            self.stopped = True
            running = list(self.running.values())
            self.changed.notify_all()
        for process in running:
            _signal(process, signal.SIGTERM)
        end = time.monotonic() + KILLED_AFTER_S
        with self.changed:
            self.changed.wait_for(lambda: not self.running, max(0.0, end - time.monotonic()))
            running = list(self.running.values())
        for process in running:
            _signal(process, signal.SIGKILL)

    def _work(self) -> None:
        """Does one part after the other until all are taken."""
        while part := self._take():
            try:
                outcome = self._do(part)
            except Exception:
                outcome = Outcome("failed")
                (self.logs / f"{part.name}.txt").write_text(traceback.format_exc())
            with self.changed:
                self.outcomes[part.name] = outcome
                self.changed.notify_all()

    def _take(self) -> Part | None:
        """The first part that may start, as soon as there is one; None where no part is left or the run is stopped."""
        with self.changed:
            while not self.stopped and (left := [part for part in self.parts if part.name not in self.taken]):
                if part := next(filter(self._may_start, left), None):
                    self.taken[part.name] = part
                    return part
                self.changed.wait()
            return None

    @property
    def _waiting(self) -> int:
        return sum(part.waits for part in self.parts)

    def _may_start(self, part: Part) -> bool:
        beside = [other for other in self.taken.values() if other.name not in self.outcomes]
        alone = not beside if part.alone else not any(other.alone for other in beside)
        has_room = part.waits or sum(not other.waits for other in beside) < BESIDE
        return alone and has_room and all(need in self.outcomes for need in part.needs)

    def _do(self, part: Part) -> Outcome:
        with self.changed:
            if any(self.outcomes[need].word not in ("passed", "skipped") for need in part.needs):
                return Outcome("not run")
        before = state(part, self.root, self.on)
        if before and not self.everything and before in passed_states(self.root / LANDINGS, self.passed_here):
            print(f"--- {part.name}: skipped, as nothing that it can see has changed since it passed", flush=True)
            return Outcome("skipped", saw=before)
        outcome = self._run(part)
        # What was changed meanwhile was perhaps not seen.
        if before and outcome.word == "passed" and state(part, self.root, self.on) == before:
            outcome.saw = before
            add_line(self.passed_here, {"parts": {part.name: outcome.line}})
        text = (self.logs / f"{part.name}.txt").read_text(errors="replace")
        with self.changed:  # the output of one part at a time
            print(f"\n=== {part.name}: {outcome.word} in {_clock(outcome.took)}\n{text}", flush=True)
        return outcome

    def _run(self, part: Part) -> Outcome:
        began = time.monotonic()
        with open(self.logs / f"{part.name}.txt", "wb") as log:
            with self.changed:
                if self.stopped:
                    return Outcome("not run")
                process = subprocess.Popen(
                    part.command,
                    cwd=self.root,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self.running[part.name] = process
            # Not reaped at once: until then its number is no other's, and what it left behind can be ended by it.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            _signal(process, signal.SIGKILL)
            with self.changed:
                del self.running[part.name]
                _, status, used = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
                self.changed.notify_all()
        word = "passed" if process.returncode == 0 else "failed"
        return Outcome(word, began - self.began, time.monotonic() - began, used.ru_utime + used.ru_stime)

    def _tell_what_runs(self) -> None:
        with self.changed:
            if self.running:
                print(f"    {_clock(time.monotonic() - self.began)}: {', '.join(self.running)}", flush=True)

    def _report(self) -> None:
        print(f"\n{'part':<14}{'':<10}{'began':>7}{'took':>8}{'CPU':>8}")
        for part in self.parts:
            outcome = self.outcomes.get(part.name, Outcome("not run"))
            times = "".join(f"{_clock(t):>8}" for t in (outcome.began, outcome.took, outcome.cpu))
            print(f"{part.name:<14}{outcome.word:<9}{times if outcome.took else ''}")
        print(f"{'all':<14}{'':<9}{'':>8}{_clock(time.monotonic() - self.began):>8}")
        for name, outcome in self.outcomes.items():
            if outcome.word == "failed":
                log = self.logs / f"{name}.txt"
                lines = log.read_text(errors="replace").splitlines() if log.exists() else []
                print(f"\n=== {name} failed; all of its output is in {log.relative_to(self.root)}, and ends with")
                print("\n".join(lines[-LAST_LINES:]))
        sys.stdout.flush()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To a part and all processes of its session."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def chosen(parts: Sequence[Part], names: Sequence[str], everything: bool = False) -> list[Part]:
    """The parts of these names and those that they need; without names those of a submission, or everything."""
    known = {part.name: part for part in parts}
    if unknown := set(names) - set(known):
        raise SystemExit(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    wanted = set(names) or {part.name for part in parts if everything or not part.of_releases}
    for name in list(wanted):
        wanted.update(known[name].needs)
    return [part for part in parts if part.name in wanted]


def _stop_by_signal(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main(parts: Sequence[Part] = PARTS, on: Callable[[], str] = machine) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument(
        "--all", action="store_true", help="every part, also those that nothing has changed since they passed"
    )
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop_by_signal)
    run = Run(chosen(parts, asked.parts, asked.all), ROOT, kept_in(), on(), asked.all, not asked.parts)
    sys.exit(0 if run() else 1)


if __name__ == "__main__":
    main()
