"""The tables: for the terminal, and as markdown for the README (`python -m benchmarks.report --markdown FILE`)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.cases import FLOOR
from benchmarks.libraries import OURS, PEERS

Document = dict[str, Any]
Row = dict[str, Any]
MOST_BESIDE = 3.0
"""Beside one busy Python thread a call may take this many times what it takes alone."""

HEADER = ("work", "engram", "floor", "engram / floor", *PEERS, "target", "")
BESIDE_HEADER = ("beside one busy Python thread", OURS, *PEERS, "target", "")


def figure(row: Row, name: str) -> float | None:
    """The median of a contender, or None."""
    median = row["contenders"].get(name, {}).get("median")
    return None if median is None else float(median)


def text_of(value: float | None, unit: str) -> str:
    """A figure with a unit that suits its size."""
    if value is None:
        return "not available"
    if unit != "s":
        return f"{value:,.0f} {unit}"
    for name, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {name}"
    return f"{value * 1e9:.3g} ns"


def times(ratio: float) -> str:
    """A ratio in three digits, or whole."""
    return f"{ratio:,.0f}x" if ratio >= 100 else f"{ratio:.3g}x"


def times_faster(row: Row, peer: str) -> float | None:
    """How many times better ours is than `peer`."""
    ours, theirs = figure(row, OURS), figure(row, peer)
    if not ours or not theirs:  # none measured, or nothing used: neither makes a ratio
        return None
    return ours / theirs if row["better"] == "higher" else theirs / ours


def of_own(row: Row, name: str, rows: dict[str, Row]) -> float | None:
    """A contender's figure as a multiple of its own in the row `own_of`."""
    base = rows.get(row["own_of"] or "")
    here, there = figure(row, name), figure(base, name) if base else None
    return here / there if here is not None and there is not None else None


def verdict(row: Row, rows: dict[str, Row]) -> tuple[str, str]:
    """The target in words, and whether it is met."""
    words, met = [], []
    for name, value in row["target"].items():
        if name == "us":
            ours = figure(row, OURS)
            words.append(text_of(value * 1e-6, "s"))
            met.append(None if ours is None else ours <= value * 1e-6)
        elif name == "most":
            ours = figure(row, OURS)
            words.append(f"at most {text_of(value, row['unit'])}")
            met.append(None if ours is None else ours <= value)
        elif name == "own":
            ratio = of_own(row, OURS, rows)
            words.append(f"at most {value:g}x its own")
            met.append(None if ratio is None else ratio <= value)
        else:
            ratio = times_faster(row, name)
            words.append(_against(name, value, row))
            if name not in PEERS or figure(row, name) is not None:  # a peer that does not run here decides nothing
                met.append(None if ratio is None else ratio >= value)
    return "; ".join(words), _mark(met)


def _against(name: str, value: float, row: Row) -> str:
    if name.startswith(FLOOR):
        return f"{value:.0%} of the floor" if row["better"] == "higher" else f"at most {1 / value:.3g}x the {name}"
    return f"{value:g}x {name}"


def _mark(met: list[bool | None]) -> str:
    if not met or None in met:
        return ""
    return "met" if all(met) else "MISSED"


def cells(row: Row, rows: dict[str, Row]) -> list[str]:
    """The cells of one line of the main table."""
    unit = row["unit"]
    floor, ours = figure(row, FLOOR), figure(row, OURS)
    over = times(ours / floor) if ours is not None and floor is not None else ""
    native = text_of(floor, unit) if FLOOR in row["contenders"] else ""
    line = [row["title"], text_of(ours, unit) + _own_words(row, OURS, rows), native, over]
    for peer in PEERS:
        if peer not in row["contenders"]:
            line.append("")
            continue
        ratio = times_faster(row, peer)
        more = f" ({times(ratio)})" if ratio is not None else ""
        line.append(text_of(figure(row, peer), unit) + more + _own_words(row, peer, rows))
    return [*line, *verdict(row, rows)]


def _own_words(row: Row, name: str, rows: dict[str, Row]) -> str:
    ratio = of_own(row, name, rows)
    return f", {times(ratio)} its own" if ratio is not None else ""


def beside_cells(row: Row) -> list[str]:
    """The cells of one line of the table of calls beside a busy thread."""
    line = [row["title"]]
    for name in (OURS, *PEERS):
        alone, beside = figure(row, name), row["contenders"].get(name, {}).get("beside", {}).get("median")
        line.append(f"{text_of(beside, 's')} ({times(beside / alone)})" if alone and beside else "")
    alone, beside = figure(row, OURS), row["contenders"].get(OURS, {}).get("beside", {}).get("median")
    met = [beside / alone <= MOST_BESIDE] if alone and beside else [None]
    return [*line, f"at most {MOST_BESIDE:g}x alone", _mark(met)]


def has_beside(row: Row) -> bool:
    """Whether anybody was measured beside a busy thread in this row."""
    return any("beside" in contender for contender in row["contenders"].values())


def remarks(document: Document) -> list[str]:
    """Notes of the rows, further floors, and why something is not available; each reason once."""
    lines: dict[str, None] = {}
    for row in document["rows"]:
        for note in row["notes"]:
            lines[f"{row['title']}: {note}"] = None
        for name, value in row["contenders"].items():
            if "not_available" in value:
                lines[f"{name} not available: {value['not_available']}"] = None
            elif name.startswith(FLOOR) and name != FLOOR:
                lines[f"{row['title']}: {name}: {text_of(value['median'], row['unit'])}"] = None
    return list(lines)


def machine_line(document: Document) -> str:
    """One line on what the figures were measured on."""
    machine = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    quick = " (--quick: a look, not a measurement)" if document["quick"] else ""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, Python {machine['python']}, "
        f"{versions}; read_ahead_kb {machine['read_ahead_kb']}; "
        f"load {machine['load']} before the start; {machine['date'][:10]}{quick}"
    )


def show(document: Document, console: Console) -> None:
    """Print the tables and the remarks; wide ones are not folded when the output is a file."""
    rows = {row["key"]: row for row in document["rows"]}
    if not console.is_terminal:
        console = Console(width=250)
    table = Table(*HEADER, title="in brackets: how many times faster engram is", box=box.SIMPLE)
    for row in rows.values():
        table.add_row(*cells(row, rows))
    console.print(table)
    crowded = [row for row in rows.values() if has_beside(row)]
    if crowded:
        table = Table(*BESIDE_HEADER, title="in brackets: times the figure alone", box=box.SIMPLE)
        for row in crowded:
            table.add_row(*beside_cells(row))
        console.print(table)
    for line in [*remarks(document), machine_line(document)]:
        console.print(line, markup=False, highlight=False)


def markdown(document: Document) -> str:
    """The same tables and remarks for a README."""
    rows = {row["key"]: row for row in document["rows"]}
    parts = [_markdown_table(HEADER, [cells(row, rows) for row in rows.values()])]
    crowded = [beside_cells(row) for row in rows.values() if has_beside(row)]
    if crowded:
        parts.append(_markdown_table(BESIDE_HEADER, crowded))
    parts.append("\n".join(f"- {line}" for line in remarks(document)))
    parts.append(machine_line(document) + ".")
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown_table(header: tuple[str, ...], lines: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in [list(header), rule, *lines])


def main() -> None:
    """Print a results file again."""
    parser = argparse.ArgumentParser(prog="benchmarks.report", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--markdown", action="store_true")
    chosen = parser.parse_args()
    document = json.loads(chosen.file.read_text())
    if chosen.markdown:
        print(markdown(document), end="")
    else:
        show(document, Console())


if __name__ == "__main__":
    main()
