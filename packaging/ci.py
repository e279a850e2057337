"""Everything that runs on every submission: `.ci/run`, or `make ci`.

    .ci/run             every part, one after the other, but for those that nothing has changed since they passed
    make ci             the same in two queues
    make release-check  every part, in two queues
    python packaging/ci.py docs model  these parts, and those that they need

Two queues run beside each other, as tests wait for processes and parts for the network. The tests with Ray come after
the others: their shards are given up where they do not answer in time. The output of a part comes when it ends, and
stays in build/ci. A fault stops no other part; at the end there is a table of all parts, and the last lines of those
that failed.

A part is skipped if all that it can see is as it was when the part last passed. The hashes of that are kept beside the
layers of environments (packaging/environment.py); in a clean clone without such a folder every part runs.
"""

from __future__ import annotations

import argparse
import hashlib
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
from pathlib import Path

from environment import ROOT, kept_in, system

#: Paths that every part depends on, as git's pathspecs.
EVERY = (
    "Makefile",
    "*.mk",
    ".ci",
    "constraints.txt",
    "pyproject.toml",
    "CMakeLists.txt",
    "packaging/ci.py",
    "packaging/environment.py",
    "packaging/requirements-*.txt",
    "benchmarks/requirements-peers.txt",
)
KILLED_AFTER_S = 10
TOLD_EACH_S = 60
LAST_LINES = 60


@dataclass(frozen=True)
class Part:
    """A command. `sees` are the paths, beside EVERY, that can change its outcome; without them it is never skipped."""

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    sees: tuple[str, ...] = ()


def make(name: str, *targets: str, needs: tuple[str, ...] = (), sees: tuple[str, ...] = ()) -> Part:
    return Part(name, ("make", *(targets or (name,))), needs, sees)


BUILT = ("environment",)
ALL_TESTS = ("tests", "src", "docs", "examples", "README.md")
TESTS = (
    make("environment"),
    make("static", needs=BUILT),
    make("tests", "test-tiers", needs=BUILT),
    make("test-ray", needs=BUILT, sees=(*ALL_TESTS, "benchmarks")),
)
OTHERS = (
    Part("tools", (".ci/tools",)),
    make("docs", sees=("docs", "mkdocs.yml", "src", "packaging", "examples", "benchmarks", "*.md")),
    make("model", needs=("tools",), sees=("tests/model", "src/native")),
    make("interop", needs=BUILT, sees=(*ALL_TESTS, "benchmarks")),
    make(
        "wheel-check",
        sees=("src", "packaging", "tests/native", "tests/conftest.py", "tests/contracts", "*.md", "LICENSE"),
    ),
    make(
        "instructions",
        "instructions",
        "INSTRUCTIONS=--must-compare",
        needs=("tools", *BUILT),
        sees=("src", "benchmarks"),
    ),
)


def state(part: Part, root: Path, on: str) -> str | None:
    """The hash of all that can change the outcome of a part; None where that is not known."""
    if not part.sees:
        return None
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *EVERY, *part.sees],
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


@dataclass
class Outcome:
    word: str
    began: float = 0.0
    took: float = 0.0
    cpu: float = 0.0


@dataclass
class Run:
    """Queues of parts, and what became of each."""

    queues: Sequence[Sequence[Part]]
    root: Path
    kept: Path
    on: str
    everything: bool = False
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    stopped: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self) -> bool:
        """Whether every part passed, or was skipped."""
        threads = [threading.Thread(target=self._queue, args=(queue,)) for queue in self.queues]
        self.logs.mkdir(parents=True, exist_ok=True)
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
        return all(outcome.word in ("passed", "skipped") for outcome in self.outcomes.values())

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

    def _queue(self, parts: Sequence[Part]) -> None:
        for part in parts:
            try:
                outcome = self._do(part)
            except Exception:
                outcome = Outcome("failed")
                (self.logs / f"{part.name}.txt").write_text(traceback.format_exc())
            with self.changed:
                self.outcomes[part.name] = outcome
                self.changed.notify_all()

    def _do(self, part: Part) -> Outcome:
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or all(need in self.outcomes for need in part.needs))
            if self.stopped:
                return Outcome("not run")
            if any(self.outcomes[need].word not in ("passed", "skipped") for need in part.needs):
                return Outcome("not run")
        before = state(part, self.root, self.on)
        passed = self.kept / "passed" / f"{part.name}-{before}"
        if before and not self.everything and passed.exists():
            print(f"--- {part.name}: skipped, as nothing that it can see has changed since it passed", flush=True)
            return Outcome("skipped")
        outcome = self._run(part)
        # What was changed meanwhile was perhaps not seen.
        if before and outcome.word == "passed" and state(part, self.root, self.on) == before:
            passed.parent.mkdir(parents=True, exist_ok=True)
            passed.touch()
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
        for queue in self.queues:
            for part in queue:
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


def chosen(queues: Sequence[Sequence[Part]], names: Sequence[str]) -> list[list[Part]]:
    """The parts of these names and those that they need; all without names."""
    parts = {part.name: part for queue in queues for part in queue}
    if unknown := set(names) - set(parts):
        raise SystemExit(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    wanted = set(names or parts)
    for name in list(wanted):
        wanted.update(parts[name].needs)
    return [[part for part in queue if part.name in wanted] for queue in queues]


def _stop_by_signal(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main(queues: Sequence[Sequence[Part]] = (TESTS, OTHERS), on: Callable[[], str] = machine) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--all", action="store_true", help="also parts that nothing has changed since they passed")
    parser.add_argument("--in-turn", action="store_true", help="one part after the other")
    asked = parser.parse_args()
    if asked.in_turn:
        queues = [[part for queue in queues for part in queue]]
    signal.signal(signal.SIGTERM, _stop_by_signal)
    run = Run(chosen(queues, asked.parts), ROOT, kept_in(), on(), asked.all)
    sys.exit(0 if run() else 1)


if __name__ == "__main__":
    main()
