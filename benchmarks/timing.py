"""Measuring contenders in turns: every round gives each of them one turn, so that a slow spell hits all alike."""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)
Turn = Callable[[int], float]
"""Runs a piece of work `n` times and returns the seconds that it took."""


@dataclass(frozen=True)
class Pace:
    """How long a measurement may be."""

    rounds: int = 9
    turn_s: float = 0.05
    beside_s: float = 0.15  # many switch intervals of the interpreter (5 ms), or the share of each thread is luck


QUICK = Pace(rounds=3, turn_s=0.02, beside_s=0.05)


@dataclass
class Samples:
    """Seconds per call, one figure a round."""

    rounds: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    """Seconds of one `torch.empty(1)` around each of these rounds: how fast the machine was then."""

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


REFERENCE_CALLS = 2_000
"""Of `torch.empty(1)` before and after each turn: some milliseconds."""


def reference() -> float:
    """Seconds of one `torch.empty(1)`: the unit in which this machine's speed of the moment is told."""
    empty, clock = torch.empty, time.perf_counter
    start = clock()
    for _ in range(REFERENCE_CALLS):
        empty(1)
    return (clock() - start) / REFERENCE_CALLS


def quartiles(values: list[float]) -> tuple[float, float]:
    """The first and the third; of fewer than four values the least and the greatest."""
    if len(values) < 4:
        return min(values), max(values)
    first, _, third = statistics.quantiles(values, method="inclusive")
    return first, third


def repeat(call: Callable[[], object]) -> Turn:
    """Make a turn of a Python call."""

    def turn(n: int) -> float:
        clock = time.perf_counter
        start = clock()
        for _ in range(n):
            call()
        return clock() - start

    return turn


_LONGER = 8  # times the calls of a turn, where threads make them


def at_once(call: Callable[[], object], threads: int) -> Turn:
    """Make a turn in which several threads make the calls, each as many as the others; their start is not counted.

    They make more calls than they are asked for: for some milliseconds after they have begun one waits for the other.
    """

    def turn(n: int) -> float:
        each, ready = -(-_LONGER * n // threads), threading.Barrier(threads)
        times: list[float] = []

        def calls() -> None:
            ready.wait()
            times.append(time.perf_counter())
            for _ in range(each):
                call()
            times.append(time.perf_counter())

        started = [threading.Thread(target=calls) for _ in range(threads)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        return (max(times) - min(times)) * n / (each * threads)

    return turn


def calls_for(turn: Turn, seconds: float) -> int:
    """How often to call so that a turn lasts about `seconds`; this is the warm-up too."""
    n, took = 1, turn(1)
    while took < seconds / 4 and n < 1 << 24:
        n = max(2 * n, min(16 * n, int(n * seconds / max(took, 1e-9) / 2)))
        took = turn(n)
    return max(1, round(n * seconds / took))


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Collect garbage before a turn and never in it, for all contenders alike."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def beside_busy_thread(turn: Turn) -> Turn:
    """The same turn beside one Python thread that computes all the time, as a logger or a collector would."""

    def crowded(n: int) -> float:
        stop = threading.Event()
        thread = threading.Thread(target=_compute, args=(stop,), daemon=True)
        thread.start()
        try:
            return turn(n)
        finally:
            stop.set()
            thread.join()

    return crowded


def _compute(stop: threading.Event) -> None:
    x = 0
    while not stop.is_set():
        for _ in range(1000):
            x = (x * 31 + 7) % 1_000_003


def in_turns(turns: dict[Name, Turn], lengths: dict[Name, float], rounds: int) -> dict[Name, Samples | Exception]:
    """Measure all turns, each of about its length in seconds, in interleaved rounds.

    One that raises is out, and its exception is its result.
    """
    results: dict[Name, Samples | Exception] = {}
    counts: dict[Name, int] = {}
    for name, turn in turns.items():
        try:
            with quiet_collector():
                counts[name] = calls_for(turn, lengths[name])
            results[name] = Samples()
        except Exception as error:
            results[name] = error
    order = list(turns)
    for _ in range(rounds):
        for name in order:
            result = results[name]
            if isinstance(result, Exception):
                continue
            try:
                with quiet_collector():
                    turns[name](max(1, counts[name] // 20))  # the collector and the one before have emptied the caches
                    before = reference()
                    result.rounds.append(turns[name](counts[name]) / counts[name])
                    result.reference.append((before + reference()) / 2)
            except Exception as error:
                results[name] = error
        order.reverse()  # so that nobody always follows the same neighbour
    return results
