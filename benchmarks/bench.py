"""`python -m benchmarks.bench [--quick] [--only CASE ...]`: measure, print the tables, write JSON and PNG.

`--publish` then writes the figures into the pages that show them (`benchmarks/publish.py`).
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import chart, publish, report
from benchmarks.cases import (
    Result,
    adapters,
    cartpole,
    checkpoints,
    classic,
    collecting,
    ensemble,
    epochs,
    lanes,
    mapped,
    max_value,
    measure,
    observations,
    parallel,
    pixels,
    prioritized,
    programs,
    releases,
    resize,
    slices,
    wide,
    workers,
    writing,
)
from benchmarks.machine import facts
from benchmarks.timing import QUICK, Pace

RESULTS = Path(__file__).parent / "results"
IN_TURNS = {
    "cartpole": cartpole.groups,
    "writing": writing.groups,
    "pixels": pixels.groups,
    "observations": observations.groups,
    "wide": wide.groups,
    "prioritized": prioritized.groups,
    "slices": slices.groups,
    "lanes": lanes.groups,
    "ensemble": ensemble.groups,
    "max_value": max_value.groups,
    "resize": resize.groups,
    "classic": classic.groups,
    "adapters": adapters.groups,
}
ALONE = {
    "programs": programs.results,
    "releases": releases.results,
    "epochs": epochs.results,
    "observation_bytes": observations.results,
    "mapped": mapped.results,
    "collect": collecting.results,
    "parallel": parallel.results,
    "workers": workers.results,
    "checkpoints": checkpoints.results,
}
CASES = tuple(sorted((*IN_TURNS, *ALONE), key=lambda name: name != "programs"))  # whole programs first
TOPICS = {
    "programs": report.PROGRAMS,
    "cartpole": "Uniform batches",
    "pixels": "Uniform batches",
    "observations": "Uniform batches",
    "observation_bytes": "Uniform batches",
    "wide": "Uniform batches",
    "releases": "Uniform batches",
    "writing": "Writing",
    "lanes": "Writing",
    "prioritized": "Prioritised replay",
    "slices": "Slices and epochs",
    "epochs": "Slices and epochs",
    "ensemble": "Ensembles, the best rows, transforms",
    "max_value": "Ensembles, the best rows, transforms",
    "resize": "Ensembles, the best rows, transforms",
    "classic": "The classic comparison: 128 steps of a tensor, a dict, a TensorDict",
    "adapters": "Under other trainers",
    "mapped": "Larger than memory",
    "collect": "Collectors",
    "parallel": "Worker processes",
    "workers": "Worker processes",
    "checkpoints": "Checkpoints",
}
"""The heading under which a case's rows stand."""


def run(name: str, *, quick: bool) -> list[Result]:
    """The results of one case."""
    if name in ALONE:
        return ALONE[name](quick=quick)
    results = []
    for rows in IN_TURNS[name](quick=quick):
        results += measure(rows, QUICK if quick else Pace())
        del rows
        gc.collect()
    return results


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.bench", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--quick", action="store_true", help="small data and few rounds: a look, not a measurement")
    parser.add_argument(
        "--out", type=Path, help="the JSON file, the PNG lies beside it; results/latest.json, part.json for parts of it"
    )
    parser.add_argument("--publish", action="store_true", help="write the figures of a whole run into the pages")
    chosen = parser.parse_args()
    is_whole = not chosen.quick and set(chosen.only) == set(CASES)
    if chosen.publish and not is_whole:
        parser.error("--publish: the pages show a whole run; leave --quick and --only out")
    chosen.out = chosen.out or RESULTS / ("latest.json" if is_whole else "part.json")
    return chosen


def main() -> None:
    """Measure, print, write."""
    chosen = arguments()
    console = Console()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    warnings.showwarning = lambda *_, **__: None  # a peer resets the filters at import, so a filter would not do
    document: dict[str, Any] = {
        "machine": facts(Path(tempfile.gettempdir())),
        "quick": chosen.quick,
        "seconds": {},
        "rows": [],
    }
    rows: list[Result] = []
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    for name in chosen.only:
        start = time.perf_counter()
        with console.status(f"{name} ..."):
            results = _attempt(lambda name=name: run(name, quick=chosen.quick), console)
        rows += [{"topic": TOPICS[name], **result} for result in results]
        console.print(f"{name}: {time.perf_counter() - start:.0f} s")
        document["seconds"] = {**document["seconds"], name: round(time.perf_counter() - start)}
        document["rows"] = rows
        chosen.out.write_text(json.dumps(document, indent=1))  # so that an interrupted run leaves what it has
    report.show(document, console)
    chart.draw(document, chosen.out.with_suffix(".png"))
    console.print(f"written: {chosen.out} and {chosen.out.with_suffix('.png').name}")
    if chosen.publish:
        publish.write(document)


def _attempt(case: Callable[[], list[Result]], console: Console) -> list[Result]:
    try:
        return case()
    except Exception:  # a case that cannot even be set up must not cost the others their figures
        console.print(traceback.format_exc(), markup=False)
        return []


if __name__ == "__main__":
    main()
