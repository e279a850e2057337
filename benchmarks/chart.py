"""The bar charts: of a run, with a group of bars a row and the floor as a black line across it; and of the front page.

`python -m benchmarks.chart` draws the second, docs/images/speed.png, from the tables in README.md,
`python -m benchmarks.chart FILE` from the JSON file of a whole run.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from benchmarks.cases import FLOOR
from benchmarks.libraries import LIBRARIES, OURS, PEERS
from benchmarks.report import HEADER, cells, figure, times

COLOURS = {
    "engram": "#d1495b",
    "torchrl": "#30638e",
    "cpprb": "#7fb069",
    "tianshou": "#edae49",
    "stable-baselines3": "#8d6a9f",
}
GAP = 0.8
"""Room between two rows, in bars."""

_FOLDER = Path(__file__).parent
TABLES = (_FOLDER / "README.md",)
FRONT_PAGE = {
    "sample(256), 11 TED keys, 100 k rows": "sample 256 of 100,000 steps",
    "extend(64)": "store 64 steps",
    "sample(256) as 8 slices of 32, 100 k rows": "sample 8 slices of 32 steps",
    "60 M rows on disk, 1.6 GB of memory": "sample 256 of 60 million steps\non disk, with 1.6 GB of memory",
    "collector, CartPole, random policy": "collect CartPole steps",
}
"""Rows of the tables, and what the front page calls them."""


def draw(document: dict[str, Any], path: Path) -> None:
    """Write the chart as PNG; nothing is written when no row has a figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in document["rows"] if any(figure(row, name) for name in LIBRARIES)]
    classic = [row for row in rows if row["key"].startswith("classic")]
    rates = [row for row in rows if row["unit"] == "steps/s"]
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


def recorded(tables: tuple[Path, ...] = TABLES) -> dict[str, dict[str, str]]:
    """The rows of recorded tables, the first of each title: what stands in each column."""
    rows: dict[str, dict[str, str]] = {}
    for table in tables:
        header: list[str] = []
        for line in table.read_text().splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
            if not cells or not header:
                header = cells
            elif header[0] == "work" and not cells[0].startswith("---"):
                rows.setdefault(cells[0], dict(zip(header, cells, strict=True)))
    return rows


def times_as_long(cell: str) -> float | None:
    """The ratio in a peer's cell, such as "355 us (17.5x)"; None where it was not measured."""
    matched = re.search(r"\(([\d.,]+)x\)", cell)
    return None if matched is None else float(matched[1].replace(",", ""))


def _ratios(row: dict[str, str]) -> dict[str, float]:
    """How many times as long as engram each of the others takes, of those that were measured."""
    return {name: ratio for name in PEERS if (ratio := times_as_long(row[name])) is not None}


def _first_figure(cell: str) -> str:
    """Of "10.1 us ±4% (measured 9.8 us), 1.1x its own" the first figure with its unit."""
    return re.split(r" ±| \(|, ", cell)[0]


def measured(document: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The rows of a run as `recorded` gives those of tables."""
    rows = {row["key"]: row for row in document["rows"]}
    return {row["title"]: dict(zip(HEADER, cells(row, rows), strict=True)) for row in rows.values()}


def draw_front_page(path: Path, rows: dict[str, dict[str, str]]) -> None:
    """Write the chart of the front page: how many times as long as engram the others take."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    missing = [title for title in FRONT_PAGE if title not in rows or not _ratios(rows[title])]
    if missing:
        raise ValueError(f"these rows have no figures of others: {'; '.join(missing)}; draw the chart from a whole run")
    figure_, axis = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    at, middles, labels = 0.0, [], []
    for title, label in FRONT_PAGE.items():
        ratios = _ratios(rows[title])
        for i, (name, ratio) in enumerate(ratios.items()):
            axis.barh(at + i, ratio, 0.9, color=COLOURS[name], label=name)
            axis.text(ratio, at + i, f" {times(ratio)}", va="center", fontsize=8)
        middles.append(at + (len(ratios) - 1) / 2)
        labels.append(f"{label}\n(engram: {_first_figure(rows[title][OURS])})")
        at += max(len(ratios), 1.7) + GAP  # room for the lines of a label
    axis.axvline(1, color=COLOURS[OURS], linewidth=2, label=OURS)
    axis.set_xscale("log")
    shortest = min(min(_ratios(rows[title]).values()) for title in FRONT_PAGE)
    axis.set_xlim(0.8 * min(1, shortest), 5_000)
    axis.set_xticks([1, 10, 100, 1_000], ["1x", "10x", "100x", "1,000x"])
    axis.set_yticks(middles, labels, fontsize=8)
    axis.set_ylim(at - GAP / 2, -GAP / 2 - 0.5)
    axis.set_title("times as long as engram takes", loc="left", fontsize=10)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    by_name = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure_.legend(by_name.values(), by_name.keys(), loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure_.savefig(path, dpi=110)
    pyplot.close(figure_)


def main() -> None:
    """Draw the chart of the front page."""
    parser = argparse.ArgumentParser(prog="benchmarks.chart", description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", help="the JSON file of a whole run; the recorded tables")
    file = parser.parse_args().file
    rows = recorded() if file is None else measured(json.loads(file.read_text()))
    draw_front_page(_FOLDER.parent / "docs" / "images" / "speed.png", rows)


if __name__ == "__main__":
    main()
