"""Turns that are measured by the clock and by CPU time, here or in the process of another library.

A peer has an environment of its own, so it runs as a process that answers a line with the name of a case and seconds by
a line with what it measured; between turns it does nothing. Imports nothing but what every Python has.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Turn:
    """What one turn measured.

    Attributes:
        units: batches or rows that were done.
        wall: seconds by the clock.
        cpu: seconds of CPU of this process, all threads.
        others: seconds of CPU of the processes that store the rows.
        call: seconds of the median call, in which nobody else had the core.
    """

    units: float
    wall: float
    cpu: float
    others: float = 0.0
    call: float = 0.0


def cpu_of(pids: Iterable[int]) -> float:
    """Seconds of CPU that processes have used, in steps of a hundredth."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def turn(step: Callable[[], object], seconds: float, unit: float = 1.0, pids: Iterable[int] = ()) -> Turn:
    """Calls `step` for so long; each call does `unit` units."""
    pids = list(pids)
    step()
    calls, others, cpu = [], cpu_of(pids), time.process_time()
    now = start = time.perf_counter()
    while now - start < seconds:
        step()
        before, now = now, time.perf_counter()
        calls.append(now - before)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    return Turn(len(calls) * unit, wall, cpu, cpu_of(pids) - others, statistics.median(calls))


@dataclass
class Figures:
    """The turns of one case."""

    turns: list[Turn] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Units a second, the median of the turns."""
        return statistics.median(one.units / one.wall for one in self.turns)

    @property
    def best_rate(self) -> float:
        return max(one.units / one.wall for one in self.turns)

    @property
    def wall(self) -> float:
        """Seconds of a unit, the median of the turns."""
        return 1 / self.rate

    @property
    def cpu(self) -> float:
        return statistics.median(one.cpu / one.units for one in self.turns)

    @property
    def call(self) -> float:
        return statistics.median(one.call for one in self.turns)

    @property
    def others(self) -> float:
        return statistics.median(one.others / one.units for one in self.turns)


class PeerProcess:
    """Another library in its own environment: `python -m module`, which calls `serve`.

    Raises:
        RuntimeError: it ended before it was ready; its last words are on stderr.
    """

    def __init__(self, python: str, module: str, folder: str) -> None:
        # Those of Ray are of our cluster, the peer has one of its own.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment["PYTHONPATH"] = folder
        self._process = subprocess.Popen(
            [python, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder,
            env=environment,
        )  # fmt: skip
        self.facts: dict[str, Any] = self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"the peer ended: {self._process.wait()}")

    def turn(self, case: str, seconds: float) -> Turn:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{case} {seconds}\n")
        self._process.stdin.flush()
        return Turn(**self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(cases: dict[str, Callable[[float], Turn]], facts: dict[str, Any]) -> None:
    """Answers turns until there are no more lines."""
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        case, seconds = line.split()
        print(json.dumps(asdict(cases[case](float(seconds)))), flush=True)
