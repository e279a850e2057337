"""The seconds that each module of tests takes, of the clock and of CPUs: `--seconds FILE` writes them as JSON."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from contracts import programs

TIERS = ("quick", "deep")
#: What is no test: to import and to collect, in all processes.
COLLECTING = "(collecting)"

#: CPU seconds of the deep tests of each folder, most of what CI takes. More is said, and no failure. What is new there
#: takes the place of something, or raises the number here, with a reason in its commit.
DEEP_BUDGETS = {
    "data": 220, "processes": 240, "crash": 110, "native": 105, "damage": 100, "docs": 60, "examples": 60, "law": 45,
    "collectors": 40, "machine": 40, "races": 35, "distributed": 35, "(others)": 80,
}  # fmt: skip


def folder_of(module: str) -> str:
    """The folder below `tests` that a budget is of."""
    folder = Path(module).parts[1:2]
    return folder[0] if folder and folder[0] in DEEP_BUDGETS else "(others)"


class Seconds:
    """Of each module in each tier, its tests' seconds of the clock and of CPUs, with processes that they waited for.

    With pytest-xdist the sums of all workers, which each send theirs at their end.
    """

    def __init__(self, file: str) -> None:
        self._file = Path(file)
        self._taken: dict[str, dict[str, list[float]]] = {tier: {} for tier in TIERS}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        began = time.monotonic()
        result = yield
        # CPU since the process began, as most of it goes into imports
        self._add("quick", COLLECTING, time.monotonic() - began, _cpu())
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        began, used = time.monotonic(), _cpu()
        result = yield
        tier = "deep" if item.get_closest_marker("deep") else "quick"
        self._add(tier, item.nodeid.partition("::")[0], time.monotonic() - began, _cpu() - used)
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for tier, modules in getattr(node, "workeroutput", {}).get("seconds", {}).items():
            for name, seconds in modules.items():
                self._add(tier, name, *seconds)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["seconds"] = self._taken
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self._taken, indent=0, sort_keys=True))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._taken["deep"]:
            return
        sums = dict.fromkeys(DEEP_BUDGETS, 0.0)
        for module, (_, cpu) in self._taken["deep"].items():
            sums[folder_of(module)] += cpu
        terminalreporter.section("CPU seconds of deep tests, and their budgets")
        for folder, cpu in sums.items():
            above = "  ABOVE" if cpu > DEEP_BUDGETS[folder] else ""
            terminalreporter.line(f"{folder:<14}{cpu:>8.0f}{DEEP_BUDGETS[folder]:>8}{above}")
        terminalreporter.line(f"{'all':<14}{sum(sums.values()):>8.0f}{sum(DEEP_BUDGETS.values()):>8}")

    def _add(self, tier: str, name: str, clock: float, cpu: float) -> None:
        seconds = self._taken[tier].setdefault(name, [0.0, 0.0])
        seconds[0] += clock
        seconds[1] += cpu


def _cpu() -> float:
    """CPU seconds of this process, of children that it has waited for, and of programs."""
    return sum(os.times()[:4]) + programs.cpu.seconds
