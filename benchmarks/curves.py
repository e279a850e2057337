"""`python -m benchmarks.curves [NAME ...]`: run the programs of the pages of algorithms, and draw their curves.

Each runs as it is with three seeds, one after the other: twenty minutes for all. What they print is kept in
results/curves.json, with a fingerprint of the program, which a test compares with that of the program on the page.
`--draw` draws the pictures again from there. `crash_demo` is the run of `make demo`, whose picture the README has.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import re
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import themed

ROOT = Path(__file__).parents[1]
EXAMPLES, PICTURES = ROOT / "examples", ROOT / "docs" / "images" / "curves"
RESULTS = ROOT / "benchmarks" / "results" / "curves.json"
CRASH_DEMO, CRASH_PICTURE = RESULTS.with_name("crash_demo.json"), PICTURES.parent / "crash-demo.svg"
SEEDS = (0, 1, 2)
COLOURS = ("#d1495b", "#4a8bc2", "#8a8a8a")
_POINT = re.compile(r"^frames ([\d,]+)  return (-?[\d.]+)$", re.MULTILINE)
_LEVEL = re.compile(r"^dataset .*  return (-?[\d.]+)$", re.MULTILINE)
Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Curve:
    """A picture: the forms in which a program runs, by what the legend calls them."""

    program: str
    title: str
    forms: dict[str, tuple[str, ...]]
    processes: int = 0  # that torchrun starts

    @property
    def file(self) -> Path:
        return EXAMPLES / f"{self.program}.py"

    @property
    def picture(self) -> Path:
        return PICTURES / f"{self.program}.svg"


ONE = {"": ()}
CURVES = (
    Curve("dqn_per", "CartPole-v1: double DQN, 3-step returns, prioritised", ONE),
    Curve("sac", "Pendulum-v1: SAC", ONE),
    Curve("ppo", "CartPole-v1: PPO, 8 environments", ONE),
    Curve(
        "recurrent_dqn",
        "CartPole-v1 without velocities: recurrent Q-learning",
        {"GRU": ("--memory", "gru"), "LSTM": ("--memory", "lstm"), "no memory": ("--memory", "none")},
    ),
    Curve("pixels_dqn", "FallingBall: DQN from pixels", ONE),
    Curve("offline_to_online", "CartPole-v1: offline (frame 0), then online", ONE),
    Curve("actors_and_learner", "CartPole-v1: double DQN, two actors beside the learner", ONE),
    Curve("data_parallel", "CartPole-v1: double DQN, two learners", ONE, processes=2),
)


def fingerprint(program: Path) -> str:
    """Of what a program does: other comments or line breaks change nothing."""
    tree = ast.parse(program.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return hashlib.sha256(repr(_described(tree)).encode()).hexdigest()[:16]


def _described(node: Any) -> Any:
    """A syntax tree without what is empty, which later Pythons have more of, or none."""
    if isinstance(node, list):
        return [_described(one) for one in node]
    if not isinstance(node, ast.AST):
        return node
    fields = [(name, _described(value)) for name, value in ast.iter_fields(node) if value is not None and value != []]
    return type(node).__name__, fields


def run(curve: Curve, arguments: tuple[str, ...], seed: int) -> dict[str, Any]:
    """What a program printed, and the CPU seconds that it took."""
    start = [sys.executable]
    if curve.processes:
        start += ["-m", "torch.distributed.run", "--nproc-per-node", str(curve.processes)]
    before = _cpu()
    with tempfile.TemporaryDirectory() as folder:
        command = [*start, str(curve.file), "--seed", str(seed), *arguments]
        printed = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout
    points = [(int(frames.replace(",", "")), float(score)) for frames, score in _POINT.findall(printed)]
    levels = [float(level) for level in _LEVEL.findall(printed)]
    return {"seed": seed, "cpu_seconds": round(_cpu() - before), "points": points, "levels": levels}


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(curve: Curve) -> dict[str, Any]:
    """All runs of a picture."""
    runs = {name: [run(curve, arguments, seed) for seed in SEEDS] for name, arguments in curve.forms.items()}
    return {"program": fingerprint(curve.file), "runs": runs}


def keep(curve: Curve, result: dict[str, Any]) -> None:
    """Puts what was measured into the file, a line for each program."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[curve.program] = result
    lines = [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in sorted(results.items())]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def draw(curve: Curve, result: dict[str, Any]) -> None:
    """A thin line for each seed, a thick one for their mean."""
    with themed.drawing() as pyplot:
        figure, axes = pyplot.subplots(figsize=(6.5, 2.9), layout="constrained")
        for colour, (name, runs) in zip(COLOURS, result["runs"].items(), strict=False):
            for one in runs:
                axes.plot(*zip(*one["points"], strict=True), color=colour, lw=1, alpha=0.55)
            axes.plot(*zip(*_mean([one["points"] for one in runs]), strict=True), color=colour, lw=2.2, label=name)
            for level in runs[0]["levels"]:
                axes.axhline(level, color=themed.INK, lw=1, ls=":")
                axes.annotate("mean return of the dataset", (1, level), xycoords=("axes fraction", "data"), ha="right",
                              va="bottom", fontsize=8)  # fmt: skip
        axes.set(xlabel="frames", ylabel="return", xlim=(0, None))
        axes.set_title(curve.title, loc="left", fontsize=10)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(axis="y", alpha=0.25)
        if len(result["runs"]) > 1:
            axes.legend(frameon=False, loc="best")
        themed.save(figure, curve.picture)


def run_crash_demo() -> None:
    """Runs the demo, and keeps its history."""
    with tempfile.TemporaryDirectory() as folder:
        demo = [sys.executable, str(EXAMPLES / "dqn_cartpole.py"), "--run-dir", f"{folder}/run"]
        subprocess.run(demo, cwd=folder, check=True)
        CRASH_DEMO.write_bytes(Path(folder, "run", "history.json").read_bytes())


def draw_crash_demo(picture: Path) -> None:
    """The demo's own picture, in the colours of the reader's page."""
    sys.path.insert(0, str(EXAMPLES))
    history, curve, demo = (importlib.import_module(f) for f in ("support.history", "support.curve", "dqn_cartpole"))
    with themed.drawing() as pyplot:
        figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
        curve.plot(history.History.load(CRASH_DEMO), demo.Settings().solved_at, figure, axes)
        themed.save(figure, picture)


def _mean(runs: list[Points]) -> Points:
    """At the frames of the first run, of which each has the nearest point of the others."""
    return [
        (frames, sum(min(points, key=lambda point: abs(point[0] - frames))[1] for points in runs) / len(runs))
        for frames, _ in runs[0]
    ]


def main() -> None:
    """Run and draw."""
    parser = argparse.ArgumentParser(prog="benchmarks.curves", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs of examples/, all of them if none is named")
    parser.add_argument("--draw", action="store_true", help="only draw, from results/curves.json")
    given = parser.parse_args()
    for curve in CURVES:
        if given.names and curve.program not in given.names:
            continue
        if not given.draw:
            keep(curve, measure(curve))
        draw(curve, json.loads(RESULTS.read_text())[curve.program])
        print(curve.picture, flush=True)
    if not given.names or "crash_demo" in given.names:
        if not given.draw:
            run_crash_demo()
        draw_crash_demo(CRASH_PICTURE)
        print(CRASH_PICTURE, flush=True)


if __name__ == "__main__":
    main()
