"""The bar chart: one group of bars a row on a logarithmic scale, the floor as a black line across its group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cases import FLOOR
from benchmarks.libraries import LIBRARIES
from benchmarks.report import figure

COLOURS = {
    "engram": "#d1495b",
    "torchrl": "#30638e",
    "cpprb": "#7fb069",
    "tianshou": "#edae49",
    "stable-baselines3": "#8d6a9f",
}
GAP = 0.8
"""Room between two rows, in bars."""


def draw(document: dict[str, Any], path: Path) -> None:
    """Write the chart as PNG; nothing is written when no row has a figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in document["rows"] if any(figure(row, name) for name in LIBRARIES)]
    classic = [row for row in rows if row["key"].startswith("classic")]
    rates = [row for row in rows if row["unit"].endswith("/s")]
    main = [row for row in rows if row["unit"] == "s" and row not in classic]
    panels = [
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
        floor = figure(row, FLOOR)
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
    handles.append(Line2D([0], [0], color="black", linewidth=1.4, label="floor (native copy of the same bytes)"))
    figure_.legend(handles=handles, loc="upper center", ncols=6, fontsize=8, frameon=False)
