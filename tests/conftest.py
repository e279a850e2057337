"""What all tests share: the tiers, the same examples in every run, scripts that end with it, and places to save to.

`make test` runs what is neither deep nor long. What lies in a folder of DEEP is deep, but for what is marked `quick`:
one of each kind, so that a fault shows in `make test`, too. Of what is marked `pairwise` only the cases in which every
two values of its parameters meet are quick or deep, and the others long. (`make test-search` looks for new examples.)
"""

import faulthandler
import gc
import importlib.util
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

from contracts.pairwise import pairwise
from contracts.programs import Program
from contracts.seconds import Seconds
from contracts.tiers import in_tiers

#: Torch's threads sleep while they wait for each other: spinning, they would take the cores from the tests beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

#: Wheels are tried without torch.
TORCH = importlib.util.find_spec("torch") is not None

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

#: Kills, damaged files, pages, races, processes, whole trainings, and machines that drive everything: minutes.
DEEP = ("cluster", "crash", "damage", "docs", "examples", "law", "machine", "processes", "races")
#: Tests of products in the contracts, which users run without our markers.
PAIRWISE = ("test_a_state_saved_alone_goes_on_with_its_storage",)
_HERE = Path(__file__).parent


#: Nothing that is imported and collected becomes garbage: while that goes on nothing is collected, and no test later
#: pays for a look at all of it (a third of a second for each `gc.collect()`).
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()
    # Pytest attaches its handlers to each logger that does not propagate, six times a test; torch has fifty.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        inside = item.path.relative_to(_HERE).parts[0] if item.path.is_relative_to(_HERE) else ""
        if inside in DEEP and not any(map(item.get_closest_marker, ("deep", "long", "quick"))):
            item.add_marker("deep")
        if inside in ("clients", "cluster"):  # what the threads of peers and of Ray do is not ours
            item.add_marker(pytest.mark.filterwarnings("default::pytest.PytestUnhandledThreadExceptionWarning"))
    _leave_pairs(items)
    yield  # what is not asked for is deselected
    if config.getoption("--tiers"):
        _put_in_tiers(config, items)


def _leave_pairs(items: list[pytest.Item]) -> None:
    """Of tests of wide products, the cases in which every two values still meet stay in their tier; others are long."""
    products: dict[tuple[object, ...], list[pytest.Function]] = {}
    for item in items:
        if not isinstance(item, pytest.Function) or item.get_closest_marker("long"):
            continue
        if item.get_closest_marker("pairwise") or item.originalname in PAIRWISE:
            products.setdefault((item.path, item.cls, item.originalname), []).append(item)
    for cases in products.values():
        values = [{name: repr(value) for name, value in case.callspec.params.items()} for case in cases]
        for k in set(range(len(cases))) - set(pairwise(values)):
            cases[k].add_marker("long")


#: The longest deep tests: with `--tiers` they come before the others. `--durations=20` finds them; a name that no test
#: has any more changes nothing.
LONGEST = _HERE / "longest.txt"


def _put_in_tiers(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers: dict[bool, list[pytest.Item]] = {False: [], True: []}
    for item in items:
        tiers[bool(item.get_closest_marker("deep"))].append(item)
    by_name = {item.nodeid.removeprefix("tests/"): item for item in tiers[True]}
    longest = [by_name[name] for name in LONGEST.read_text().splitlines() if name in by_name]
    workers = config.workerinput["workercount"] if hasattr(config, "workerinput") else 1
    items[:] = in_tiers(tiers[False], tiers[True], longest, workers)


#: What `make mutants` must find: a line each, the test's folder and name.
MUTANTS = _HERE / "mutants.txt"


class HangWatch:
    """A test that hangs shows where every thread is, and ends the process.

    It is armed at most once a minute: pytest's own is armed for each test, and waits each time until a thread ends.
    """

    EVERY_S = 60.0

    def __init__(self, timeout: float) -> None:
        self._timeout, self._armed = timeout, -self.EVERY_S
        self._stderr = os.dup(sys.__stderr__.fileno())  # which is not captured while pytest is configured

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        now = time.monotonic()
        if now - self._armed >= self.EVERY_S:
            faulthandler.dump_traceback_later(self._timeout + 2 * self.EVERY_S, file=self._stderr, exit=True)
            self._armed = now
        return (yield)

    def pytest_exception_interact(self) -> None:
        self._armed = -self.EVERY_S  # pytest disarms it

    def pytest_unconfigure(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        os.close(self._stderr)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--hang-timeout"):
        config.pluginmanager.register(HangWatch(config.getoption("--hang-timeout")))
    if config.getoption("--seconds"):
        config.pluginmanager.register(Seconds(config.getoption("--seconds")))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--hang-timeout", type=float, default=600.0, help="seconds after which a test that runs is one that hangs"
    )
    parser.addoption("--mutants", action="store_true", help="list the planted errors that were found, and compare")
    parser.addoption("--seconds", help="writes there what each module of tests took, as JSON")
    parser.addoption("--tiers", action="store_true", help="quick tests first, then the deep ones, the longest first")


def _is_deep(report: pytest.TestReport | pytest.CollectReport) -> bool:
    """A whole file that is skipped, or that fails when it is imported, has no markers: it counts as quick."""
    return isinstance(report, pytest.TestReport) and "deep" in report.keywords


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """With `--tiers`: what each tier did, and which of its tests failed."""
    if not config.getoption("--tiers"):
        return
    terminalreporter.section("tiers")
    reports = terminalreporter.stats
    for tier in ("quick", "deep"):
        of_tier = {
            outcome: [r for r in reports.get(outcome, []) if _is_deep(r) == (tier == "deep")]
            for outcome in ("passed", "skipped", "xfailed", "failed", "error")
        }
        counts = ", ".join(f"{len(found)} {outcome}" for outcome, found in of_tier.items() if found)
        seconds = sum(getattr(report, "duration", 0.0) for found in of_tier.values() for report in found)
        terminalreporter.line(f"{tier:<6} {counts or 'nothing ran'}; {seconds:.0f} s in the bodies of its tests")
        for report in of_tier["failed"] + of_tier["error"]:
            terminalreporter.line(f"       FAILED {report.nodeid}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With `--mutants`: the names of what was found; a failure where one of `mutants.txt` is missing."""
    config = session.config
    if not config.getoption("--mutants") or hasattr(config, "workerinput"):
        return
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    passed = [report.nodeid for report in reporter.stats.get("passed", []) if "mutant" in report.keywords]
    found = sorted(nodeid.removeprefix("tests/").replace(".py::", "::") for nodeid in passed)
    missing = sorted(set(MUTANTS.read_text().splitlines()) - set(found))
    print("", *(f"found    {name}" for name in found), *(f"MISSING  {name}" for name in missing), sep="\n")
    print(f"{len(found)} planted errors found, {len(missing)} of {MUTANTS.name} missing")
    if missing:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def seed_torch() -> Iterator[Callable[[int], object]]:
    """Seeds torch's generators: without a device only the CPU's, as `torch.manual_seed` notes stacks for others.

    So it is replaced: a stack takes longer than many a test, and all of them are kept.
    """
    if not TORCH:
        yield lambda seed: None
        return
    import torch  # late: two seconds, which the process that only hands tests to others does without

    with pytest.MonkeyPatch.context() as patch:
        if not torch.accelerator.is_available():
            patch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
        yield torch.manual_seed


@pytest.fixture(autouse=True)
def seeded(seed_torch):
    """The same draws in every run, of tests that do not seed themselves."""
    random.seed(0)
    seed_torch(0)


@pytest.fixture(autouse=True)
def as_before():
    """A test leaves Ctrl-C as it was: what interrupts a later one is a KeyboardInterrupt."""
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before, "this test left a handler of SIGINT"


@pytest.fixture(autouse=True, scope="session")
def prefetching():
    """Batches of a buffer with `prefetch` are prepared by threads also where they are as quick as those of tests."""
    with pytest.MonkeyPatch.context() as patch:
        if TORCH:
            from engram.data.replay_buffers.reading import prefetch  # late, as above

            patch.setattr(prefetch, "PAYS_FROM_S", 0.0)
        yield


@pytest.fixture
def lock_order() -> Iterator[object]:
    """The test fails where threads take locks in another order than docs/architecture.md says."""
    from contracts.lock_order import checking

    with checking() as watch:
        yield watch


@pytest.fixture
def script(tmp_path):
    """`script(text, **names)` starts Python on a text, and ends it with the test, or with the process of the tests."""
    started = []

    def start(text, **names):
        file = tmp_path / f"script_{len(started)}.py"
        file.write_text(textwrap.dedent(text).format(**names))
        started.append(Program(file))
        return started[-1]

    yield start
    for program in started:
        program.kill()
        program.communicate()


@pytest.fixture
def ram_path() -> Iterator[Path]:
    """A directory that is quick to sync."""
    root = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=root) as path:
        yield Path(path).resolve()


@contextmanager
def _mounted(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True)
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes a disk of the size given, such as "1m"."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    with ExitStack() as stack:
        yield lambda size: stack.enter_context(_mounted(tmp_path / "disk", size))
