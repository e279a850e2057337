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
BAR = 0.16


def draw(document: dict[str, Any], path: Path) -> None:
    """Write the chart as PNG; nothing is written when no row has a figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in document["rows"] if any(figure(row, name) for name in LIBRARIES)]
    classic = [row for row in rows if row["key"].startswith("classic")]
    rates = [row for row in rows if row["unit"] != "s"]
    main = [row for row in rows if row not in classic and row not in rates]
    panels = [
        ("microseconds a call: shorter is faster", 1e6, main),
        ("the classic comparison, microseconds: shorter is faster", 1e6, classic),
        ("steps a second: longer is faster", 1.0, rates),
    ]
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        return
    heights = [max(1, len(panel[2])) for panel in panels]
    total = sum(heights)
    figure_, axes = pyplot.subplots(
        len(panels), 1, figsize=(10, 1.2 * len(panels) + 0.75 * total), height_ratios=heights, squeeze=False
    )
    for axis, (title, scale, chosen) in zip(axes[:, 0], panels, strict=True):
        _panel(axis, chosen, scale)
        axis.set_title(title, loc="left", fontsize=11)
    _legend(figure_)
    figure_.tight_layout(rect=(0, 0, 1, 1 - 0.5 / figure_.get_figheight()))
    figure_.savefig(path, dpi=110)
    pyplot.close(figure_)


def _panel(axis: Any, rows: list[dict[str, Any]], scale: float) -> None:
    for at, row in enumerate(rows):
        present = [name for name in LIBRARIES if figure(row, name)]
        first = at - BAR * (len(present) - 1) / 2
        for i, name in enumerate(present):
            value = (figure(row, name) or 0) * scale
            axis.barh(first + i * BAR, value, BAR * 0.9, color=COLOURS[name])
            axis.text(
                value,
                first + i * BAR,
                f" {value:,.3g}" if value < 1000 else f" {value:,.0f}",
                va="center",
                fontsize=6.5,
            )
        floor = figure(row, FLOOR)
        if floor:
            axis.vlines(floor * scale, at - 0.45, at + 0.45, color="black", linewidth=1.4)
    axis.set_xscale("log")
    axis.margins(x=0.12)
    axis.set_yticks(range(len(rows)), [row["title"] for row in rows], fontsize=8)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _legend(figure_: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=COLOURS[name], label=name) for name in LIBRARIES]
    handles.append(Line2D([0], [0], color="black", linewidth=1.4, label="floor (native copy of the same bytes)"))
    figure_.legend(handles=handles, loc="upper center", ncols=6, fontsize=8, frameon=False)
