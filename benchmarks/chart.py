"""The bar charts: of a run, a group of bars a row with the floor as a black line across it; and of the front page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import themed
from benchmarks.cases import BY_HAND, FLOOR
from benchmarks.libraries import LIBRARIES, OURS, PEERS
from benchmarks.report import Document, Row, figure, text_of, times_faster

COLOURS = {
    "engram": "#d1495b",
    "torchrl": "#4a8bc2",
    "cpprb": "#7fb069",
    "tianshou": "#e0a030",
    "stable-baselines3": "#a583b8",
    BY_HAND: "#8a8a8a",
}
GAP = 0.8
"""Room between two rows, in bars."""

PROGRAMS = {
    "program_dqn": "DQN, an update each step",
    "program_sac": "SAC, an update each step",
    "program_ppo_8": "PPO, 8 environments",
    "program_ppo_64": "PPO, 64 environments",
    "program_pixel_dqn": "DQN from pixels",
}
CALLS = {
    "sample_small": "sample 256 of 100,000 steps",
    "extend": "store 64 steps",
    "slices_100000": "sample 8 slices of 32 steps",
    "sample_mapped": "sample 256 of 60 million steps on disk",
    "collect_random": "collect CartPole steps",
}
"""Rows of the front page by key, and what the chart calls them."""


def draw(document: dict[str, Any], path: Path) -> None:
    """Write the chart as PNG; nothing is written when no row has a figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in document["rows"] if any(figure(row, name) for name in LIBRARIES)]
    classic = [row for row in rows if row["key"].startswith("classic")]
    rates = [row for row in rows if row["unit"] == "steps/s"]
    programs = [row for row in rows if row["key"].startswith("program_")]
    main = [row for row in rows if row["unit"] == "s" and row not in classic and row not in programs]
    panels = [
        ("whole programs, microseconds of CPU a frame: shorter is faster", 1e6, programs),
        ("microseconds a call: shorter is faster", 1e6, main),
        ("the classic comparison, microseconds: shorter is faster", 1e6, classic),
        ("steps a second: longer is faster", 1.0, rates),
    ]
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        return
    heights = [_places(rows)[1] for _, _, rows in panels]
    figure_, axes = pyplot.subplots(
        len(panels), 1, figsize=(10, 1.0 * len(panels) + 0.16 * sum(heights)), height_ratios=heights, squeeze=False
    )
    for axis, (title, scale, chosen) in zip(axes[:, 0], panels, strict=True):
        _panel(axis, chosen, scale)
        axis.set_title(title, loc="left", fontsize=11)
    _legend(figure_)
    figure_.tight_layout(rect=(0, 0, 1, 1 - 0.5 / figure_.get_figheight()))
    figure_.savefig(path, dpi=110)
    pyplot.close(figure_)


def _places(rows: list[dict[str, Any]]) -> tuple[list[float], float]:
    """Where each row's first bar lies, and the height of them all, in bars: rows of one bar take less room."""
    places, at = [], 0.0
    for row in rows:
        places.append(at)
        at += sum(figure(row, name) is not None for name in LIBRARIES) + GAP
    return places, at


def _panel(axis: Any, rows: list[dict[str, Any]], scale: float) -> None:
    places, height = _places(rows)
    middles, values = [], []
    for first, row in zip(places, rows, strict=True):
        present = [name for name in LIBRARIES if figure(row, name) is not None]
        for i, name in enumerate(present):
            value = (figure(row, name) or 0) * scale
            values.append(value)
            axis.barh(first + i, value, 0.9, color=COLOURS[name])
            words = f" {value:,.3g}" if value < 1000 else f" {value:,.0f}"
            axis.text(value, first + i, words, va="center", fontsize=7)
        floor = figure(row, BY_HAND if BY_HAND in row["contenders"] else FLOOR)
        if floor is not None:
            values.append(floor * scale)
            axis.vlines(floor * scale, first - 0.6, first + len(present) - 0.4, color="black", linewidth=1.6)
        middles.append(first + (len(present) - 1) / 2)
    axis.set_xscale("log")
    axis.set_xlim(min(values) / 3, max(values) * 3)
    axis.set_yticks(middles, [row["title"] for row in rows], fontsize=8)
    axis.set_ylim(height - GAP / 2, -GAP / 2 - 0.5)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _legend(figure_: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=COLOURS[name], label=name) for name in LIBRARIES]
    handles.append(
        Line2D([0], [0], color="black", linewidth=1.4, label="floor (native copy of the same bytes), loop by hand")
    )
    figure_.legend(handles=handles, loc="upper center", ncols=6, fontsize=8, frameon=False)


def _ratios(row: Row) -> dict[str, float]:
    """How many times as long as engram each of the others takes, of those that were measured."""
    return {name: ratio for name in (BY_HAND, *PEERS) if (ratio := times_faster(row, name)) is not None}


def draw_front_page(document: Document, path: Path) -> None:
    """Write the chart of the front page: how many times as long as engram the others take, a point for each."""
    rows = {row["key"]: row for row in document["rows"]}
    shown = {key: label for key, label in {**PROGRAMS, **CALLS}.items() if key in rows and _ratios(rows[key])}
    with themed.drawing() as pyplot:
        figure_, axis = pyplot.subplots(figsize=(8, 0.9 + 0.28 * len(shown)), layout="constrained")
        for at, key in enumerate(shown):
            for name, ratio in _ratios(rows[key]).items():
                axis.plot(ratio, at, "o", ms=7, color=COLOURS[name], label=name)
        axis.axvline(1, color=COLOURS[OURS], linewidth=2, label=OURS)
        axis.set_xscale("log")
        axis.set_xticks([1, 2, 5, 10, 100, 1_000], ["1x", "2x", "5x", "10x", "100x", "1,000x"])
        axis.minorticks_off()
        times_of_ours = {key: text_of(figure(rows[key], OURS), rows[key]["unit"]) for key in shown}
        axis.set_yticks(range(len(shown)), [f"{label}: {times_of_ours[key]}" for key, label in shown.items()])
        axis.set_ylim(len(shown) - 0.5, -0.5)
        axis.tick_params(left=False)
        axis.set_title("times as long as engram takes", loc="left", fontsize=10)
        axis.grid(alpha=0.25)
        axis.set_axisbelow(True)
        axis.spines[["left"]].set_visible(False)
        by_name = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
        names = [name for name in LIBRARIES if name in by_name] + [BY_HAND]
        figure_.legend([by_name[name] for name in names], names, loc="outside lower center", ncols=6, frameon=False)
        themed.save(figure_, path)
