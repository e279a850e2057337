"""Measures programs in turns: CPU time of all threads for each frame, a fresh program each turn."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from benchmarks.cases import BY_HAND
from benchmarks.programs.shares import Parts, measured_parts

ENGRAM = "engram"
PEERS = {"torchrl": "torchrl", "tianshou": "tianshou", "stable-baselines3": "sb3"}


class Program(Protocol):
    """One form of a training program; what making it costs is not measured."""

    def run(self) -> int:
        """Runs from the first frame to the last one. Returns the number of frames: steps of single environments."""
        ...

    def parts(self) -> Parts:
        """The methods of which its shares are measured."""
        ...


class Settings(Protocol):
    """What decides how a run goes; equal in all forms of a row."""

    def shorter(self) -> Settings:
        """A run of the same kind, as short as one that reaches each part of the program."""
        ...


Make = Callable[[Any], Program]
Figures = dict[str, list[float]]


@dataclass(frozen=True)
class Row:
    """One line of the table: a program in all its forms."""

    key: str
    title: str
    settings: Any
    forms: dict[str, Make]
    most: float | None = None
    """The target: how many times as long as the loop by hand it may take with engram."""


def in_all_forms(by_hand: Make, engram: Make, peers: str = "") -> dict[str, Make]:
    """The forms of a program; `peers` is the name of the functions that make it under other libraries, if any do."""
    others = {name: _of_peer(module, peers) for name, module in PEERS.items()} if peers else {}
    return {BY_HAND: by_hand, ENGRAM: engram, **others}


def _of_peer(module: str, function: str) -> Make:
    """The library is imported when the program is made."""
    return lambda s: getattr(importlib.import_module(f"benchmarks.programs.peers.{module}"), function)(s)


@dataclass
class Measured:
    """Seconds of CPU a frame by form and round, the shares of its parts, and why a form could not run."""

    seconds: Figures
    shares: dict[str, dict[str, float]]
    missing: dict[str, Exception]


def measure(row: Row, *, rounds: int, quick: bool = False, shares: bool = True) -> Measured:
    """Runs all forms in rounds, in alternating order, so that neighbours do; then each once with its parts timed."""
    settings = row.settings.shorter() if quick else row.settings
    seconds: Figures = {}
    missing: dict[str, Exception] = {}
    with one_thread():
        for name, make in row.forms.items():  # once unmeasured: imports, and what libraries make at first use
            try:
                make(row.settings.shorter()).run()
                seconds[name] = []
            except Exception as error:
                missing[name] = error
        for number in range(rounds):
            for name in seconds if number % 2 == 0 else reversed(seconds):
                seconds[name].append(seconds_a_frame(row.forms[name], settings))
        parts = {name: measured_parts(partial(row.forms[name], settings)) for name in seconds} if shares else {}
    return Measured(seconds, parts, missing)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch: networks as small as these are slower on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def seconds_a_frame(make: Make, settings: Any) -> float:
    """CPU time of one whole run of a new program, by the number of its frames."""
    program = make(settings)
    gc.collect()
    start = time.process_time()
    frames = program.run()
    return (time.process_time() - start) / frames


def ratio(figures: Figures, name: str, to: str) -> float:
    """How many times as long a form takes as another: the median of the rounds' own ratios."""
    return statistics.median(mine / its for mine, its in zip(figures[name], figures[to], strict=True))


def main(description: str | None, rows: list[Row]) -> None:
    """The command line of an algorithm."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few frames: a look, not a measurement")
    parser.add_argument("--only", default="", help="rows with this word in their title")
    parser.add_argument("--peers", action="store_true", help="other libraries too")
    parser.add_argument("--shares", action="store_true", help="the shares of environment, policy, learner, replay")
    chosen = parser.parse_args()
    results: dict[str, Any] = {}
    for row in rows:
        if chosen.only not in row.title:
            continue
        forms = {name: make for name, make in row.forms.items() if chosen.peers or name not in PEERS}
        kept = Row(row.key, row.title, row.settings, forms, row.most)
        measured = measure(kept, rounds=chosen.rounds, quick=chosen.quick, shares=chosen.shares)
        print(row.title)
        for name, values in measured.seconds.items():
            times = "" if name == BY_HAND else f"  {ratio(measured.seconds, name, BY_HAND):.3f} of by hand"
            parts = " ".join(f"{part} {share:.0%}" for part, share in measured.shares.get(name, {}).items())
            print(f"  {name:20} {statistics.median(values) * 1e6:9.2f} us of CPU a frame{times}  {parts}", flush=True)
        for name, error in measured.missing.items():
            print(f"  {name:20} not available: {error}")
        results[row.key] = measured.seconds
    print(json.dumps(results))
