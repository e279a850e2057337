"""The tables, one a topic: for the terminal, and as markdown (`python -m benchmarks.report --markdown FILE`).

`--targets` prints one table of every target of every row: in words, what was measured, and how many times the target
that is (1 or less: met).

A time is that of the machine at rest: each round's is divided by what `torch.empty(1)` took around it, and multiplied
by 1.1 us. The median as it was measured stands behind it. Between the two stands how far apart the quartiles of the
rounds are, in per cent of the median; `~` marks a figure in whose rounds `torch.empty(1)` itself moved by more than a
tenth (its quartiles, of their median): read it as noise.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.cases import BESIDE, FLOOR
from benchmarks.libraries import OURS, PEERS
from benchmarks.timing import quartiles

Document = dict[str, Any]
Row = dict[str, Any]
HEADER = ("work", "engram", "floor", "engram / floor", *PEERS, "target", "")
BESIDE_HEADER = ("beside one busy Python thread", OURS, *PEERS, "target", "")
TARGETS_HEADER = ("topic", "work", "target", "measured", "measured / target", "spread", "")


REST_S = 1.1e-6
"""What `torch.empty(1)` takes on this machine when nothing else runs."""

NOISE = 0.10
"""Where `torch.empty(1)` moves by more than this between rounds, the machine was not at rest."""


def figure(row: Row, name: str) -> float | None:
    """The median of a contender, as it would be on the machine at rest where that is known; or None."""
    contender = row["contenders"].get(name, {})
    return at_rest(contender) if contender.get("median") is not None else None


def at_rest(contender: dict[str, Any]) -> float:
    """The median of the rounds, each divided by what `torch.empty(1)` took around it; the measured one without that."""
    reference = contender.get("reference")
    if not reference:
        return float(contender["median"])
    return statistics.median(r / e for r, e in zip(contender["rounds"], reference, strict=True)) * REST_S


def spread(contender: dict[str, Any]) -> float | None:
    """How far apart the quartiles of the rounds are, of their median; None for a single round."""
    rounds, reference = contender.get("rounds", []), contender.get("reference")
    if len(rounds) < 2:
        return None
    values = [r / e for r, e in zip(rounds, reference, strict=True)] if reference else rounds
    first, third = quartiles(values)
    return (third - first) / statistics.median(values)


def is_noise(contender: dict[str, Any]) -> bool:
    """Whether the machine itself moved by more than a tenth while this was measured."""
    reference = contender.get("reference") or []
    if len(reference) < 2:
        return False
    first, third = quartiles(reference)
    return (third - first) / statistics.median(reference) > NOISE


def detail(row: Row, name: str) -> str:
    """The spread of a figure, the median as measured, and the mark of noise: `" ±4 %, measured 9.8 us"`."""
    contender = row["contenders"].get(name, {})
    if contender.get("median") is None:
        return ""
    words = []
    if (share := spread(contender)) is not None:
        words.append(f" ±{share / 2:.0%}")
    if contender.get("reference"):
        words.append(f" (measured {text_of(float(contender['median']), row['unit'])})")
    return "".join(words) + (" ~" if is_noise(contender) else "")


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


class Aim(NamedTuple):
    """One target of a row: in words, what was measured, and how many times the target that is; None: not measured."""

    words: str
    measured: str
    ratio: float | None
    decides: bool = True

    @property
    def met(self) -> bool | None:
        return None if self.ratio is None else self.ratio <= 1


def aims(row: Row, rows: dict[str, Row]) -> list[Aim]:
    """The targets of a row."""
    return [_aim(row, name, value, rows) for name, value in row["target"].items()]


def _aim(row: Row, name: str, value: float, rows: dict[str, Row]) -> Aim:
    ours, unit = figure(row, OURS), row["unit"]
    if name == "us":
        return Aim(text_of(value * 1e-6, "s"), text_of(ours, unit), _share(ours, value * 1e-6))
    if name == "most":
        return Aim(f"at most {text_of(value, unit)}", text_of(ours, unit), _share(ours, value))
    if name == "own":
        return _times_aim(f"at most {value:g}x its own", of_own(row, OURS, rows), value)
    if name.startswith(BESIDE):
        alone, beside = alone_and_beside(row, OURS)
        if name == BESIDE:
            return _times_aim(f"beside a busy thread at most {value:g}x alone", _share(beside, alone), value)
        words = f"{text_of(value * 1e-6, 's')} beside a busy thread"
        return Aim(words, text_of(beside, "s"), _share(beside, value * 1e-6))
    ratio, words = times_faster(row, name), _against(name, value, row)
    # A peer that does not run here decides nothing.
    decides = name not in PEERS or figure(row, name) is not None
    if ratio is None:
        return Aim(words, text_of(None, unit), None, decides)
    if name in PEERS or row["better"] == "higher":
        measured = f"{ratio:.1%}" if name.startswith(FLOOR) else times(ratio)
    else:
        measured = times(1 / ratio)
    return Aim(words, measured, value / ratio, decides)


def _times_aim(words: str, ratio: float | None, value: float) -> Aim:
    return Aim(words, "not available" if ratio is None else times(ratio), _share(ratio, value))


def _share(value: float | None, of: float | None) -> float | None:
    """`value / of`; of a target of 0, 0 where it is met."""
    if value is None or of is None:
        return None
    if of == 0:
        return 0.0 if value <= 0 else math.inf
    return value / of


def verdict(row: Row, rows: dict[str, Row]) -> tuple[str, str]:
    """The target in words, and whether it is met."""
    all_aims = aims(row, rows)
    return "; ".join(aim.words for aim in all_aims), _mark([aim.met for aim in all_aims if aim.decides])


def target_lines(document: Document) -> list[list[str]]:
    """A line for each target of each row: what was measured is that of the machine at rest."""
    rows = {row["key"]: row for row in document["rows"]}
    lines = []
    for topic, chosen in by_topic(rows).items():
        for row in chosen:
            share = spread(row["contenders"].get(OURS, {}))
            apart = "" if share is None else f"±{share / 2:.0%}"
            noise = " ~" if is_noise(row["contenders"].get(OURS, {})) else ""
            for aim in aims(row, rows):
                ratio = "" if aim.ratio is None else f"{aim.ratio:.2f}"
                mark = _mark([aim.met]) or "not measured"
                lines.append([topic, row["title"], aim.words, aim.measured, ratio, apart + noise, mark])
    return lines


def target_summary(lines: list[list[str]]) -> str:
    """How many targets are met, missed and not measured."""
    counts = {mark: sum(line[-1] == mark for line in lines) for mark in ("met", "MISSED", "not measured")}
    return ", ".join(f"{count} {mark.lower()}" for mark, count in counts.items())


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
    ours_words = text_of(ours, unit) + detail(row, OURS) + _own_words(row, OURS, rows)
    line = [row["title"], ours_words, native, over]
    for peer in PEERS:
        if peer not in row["contenders"]:
            line.append("")
            continue
        ratio = times_faster(row, peer)
        more = f" ({times(ratio)})" if ratio is not None else ""
        noise = " ~" if is_noise(row["contenders"][peer]) else ""
        line.append(text_of(figure(row, peer), unit) + more + noise + _own_words(row, peer, rows))
    return [*line, *verdict(row, rows)]


def _own_words(row: Row, name: str, rows: dict[str, Row]) -> str:
    ratio = of_own(row, name, rows)
    return f", {times(ratio)} its own" if ratio is not None else ""


def alone_and_beside(row: Row, name: str) -> tuple[float | None, float | None]:
    """The medians as they were measured: turns alone and beside a busy thread follow each other."""
    contender = row["contenders"].get(name, {})
    return contender.get("median"), contender.get("beside", {}).get("median")


def beside_cells(row: Row) -> list[str]:
    """The cells of one line of the table of calls beside a busy thread."""
    line = [row["title"]]
    for name in (OURS, *PEERS):
        alone, beside = alone_and_beside(row, name)
        line.append(f"{text_of(beside, 's')} ({times(beside / alone)})" if alone and beside else "")
    chosen = [_aim(row, target, value, {}) for target, value in row["target"].items() if target.startswith(BESIDE)]
    return [*line, "; ".join(aim.words for aim in chosen), _mark([aim.met for aim in chosen])]


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


def by_topic(rows: dict[str, Row]) -> dict[str, list[Row]]:
    """The rows under the headings that they stand under, in the order of their first rows."""
    topics: dict[str, list[Row]] = {}
    for row in rows.values():
        topics.setdefault(row.get("topic", "All"), []).append(row)
    return topics


def show(document: Document, console: Console) -> None:
    """Print the tables and the remarks; wide ones are not folded when the output is a file."""
    rows = {row["key"]: row for row in document["rows"]}
    if not console.is_terminal:
        console = Console(width=250)
    for topic, chosen in by_topic(rows).items():
        table = Table(*HEADER, title=f"{topic} (in brackets: how many times faster engram is)", box=box.SIMPLE)
        for row in chosen:
            table.add_row(*cells(row, rows))
        console.print(table)
    crowded = [row for row in rows.values() if has_beside(row)]
    if crowded:
        table = Table(*BESIDE_HEADER, title="in brackets: times the figure alone", box=box.SIMPLE)
        for row in crowded:
            table.add_row(*beside_cells(row))
        console.print(table)
    show_targets(document, console)
    for line in [*remarks(document), machine_line(document)]:
        console.print(line, markup=False, highlight=False)


def show_targets(document: Document, console: Console) -> None:
    """Print the table of targets."""
    lines = target_lines(document)
    if not lines:
        return
    table = Table(*TARGETS_HEADER, title=f"Targets: {target_summary(lines)}", box=box.SIMPLE)
    for line in lines:
        table.add_row(*line)
    console.print(table)


def markdown_of_targets(document: Document) -> str:
    """The table of targets as a page."""
    lines = target_lines(document)
    return f"{target_summary(lines)}\n\n{_markdown_table(TARGETS_HEADER, lines)}\n\n{machine_line(document)}.\n"


def markdown(document: Document) -> str:
    """The same tables and remarks as a page."""
    rows = {row["key"]: row for row in document["rows"]}
    parts = []
    for topic, chosen in by_topic(rows).items():
        parts += [f"## {topic}", _markdown_table(HEADER, [cells(row, rows) for row in chosen])]
    crowded = [beside_cells(row) for row in rows.values() if has_beside(row)]
    if crowded:
        parts += ["## Beside a busy Python thread", _markdown_table(BESIDE_HEADER, crowded)]
    parts.append("## Remarks")
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
    parser.add_argument("--markdown", action="store_true", help="as a page, not for the terminal")
    parser.add_argument("--targets", action="store_true", help="only the table of targets")
    chosen = parser.parse_args()
    document = json.loads(chosen.file.read_text())
    if chosen.markdown:
        print(markdown_of_targets(document) if chosen.targets else markdown(document), end="")
    else:
        console = Console()
        (show_targets if chosen.targets else show)(document, console if console.is_terminal else Console(width=250))


if __name__ == "__main__":
    main()
