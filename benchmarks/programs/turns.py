"""Measures programs in turns: CPU time of all threads for each frame, a fresh program each turn."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

BY_HAND = "by hand"


class Program(Protocol):
    """One form of a training program; what making it costs is not measured."""

    def run(self) -> int:
        """Runs from the first frame to the last one. Returns the number of frames: steps of single environments."""
        ...


Make = Callable[[], Program]
Figures = dict[str, list[float]]


def measure(forms: Mapping[str, Make], rounds: int) -> Figures:
    """Seconds of CPU a frame of each form in each round; the order alternates, so that neighbours do."""
    seconds: Figures = {name: [] for name in forms}
    for number in range(rounds):
        for name in forms if number % 2 == 0 else reversed(forms):
            seconds[name].append(seconds_a_frame(forms[name]))
    return seconds


def seconds_a_frame(make: Make) -> float:
    """CPU time of one whole run of a new program, by the number of its frames."""
    program = make()
    gc.collect()
    start = time.process_time()
    frames = program.run()
    return (time.process_time() - start) / frames


def ratio(figures: Figures, name: str, to: str) -> float:
    """How many times as long a form takes as another: the median of the rounds' own ratios."""
    return statistics.median(mine / its for mine, its in zip(figures[name], figures[to], strict=True))


def main(description: str | None, rows: Callable[[bool], Mapping[str, Mapping[str, Make]]]) -> None:
    """The command line of an algorithm: `rows(quick)` are its forms by title."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few frames: a look, not a measurement")
    parser.add_argument("--only", default="", help="rows with this word in their title")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for title, forms in rows(chosen.quick).items():
        if chosen.only not in title:
            continue
        figures = measure(forms, chosen.rounds)
        print(title)
        for name, values in figures.items():
            times = "" if name == BY_HAND else f"  {ratio(figures, name, BY_HAND):.3f} of by hand"
            print(f"  {name:28} {statistics.median(values) * 1e6:9.2f} us of CPU a frame{times}", flush=True)
        results[title] = figures
    print(json.dumps(results))
