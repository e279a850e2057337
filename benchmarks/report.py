"""The tables: whole programs, then calls by topic; for the terminal, and as markdown for the page of the benchmarks.

"of target" says how many times the target was measured, of each target of a row: 1 or less is within it. What falls
short is listed once, by its reason.

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

from benchmarks.cases import BESIDE, BY_HAND, FLOOR
from benchmarks.libraries import OURS, PEERS
from benchmarks.reasons import REASONS
from benchmarks.timing import quartiles

Document = dict[str, Any]
Row = dict[str, Any]
PROGRAMS, SHARES = "Whole programs", "Where their time goes"
HEADER = ("work", "engram", "floor", "engram / floor", *PEERS, "target", "of target")
BESIDE_HEADER = ("beside one busy Python thread", OURS, *PEERS, "target", "of target")
PROGRAM_PEERS = ("stable-baselines3", "torchrl", "tianshou")
PROGRAMS_HEADER = ("program", BY_HAND, OURS, "engram / by hand", *PROGRAM_PEERS, "target", "of target")
PARTS = ("environment", "policy", "learner", "replay", "collection")
SHARES_HEADER = ("program", "form", *PARTS)


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

    @property
    def of_target(self) -> str:
        return "not measured" if self.ratio is None else f"{self.ratio:.2f}x"

    @property
    def falls_short(self) -> bool:
        return self.ratio is not None and self.ratio > 1


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
    if name == BESIDE:
        alone, beside = alone_and_beside(row, OURS)
        return _times_aim(f"beside a busy thread at most {value:g}x alone", _share(beside, alone), value)
    if name == BY_HAND:
        return _times_aim(f"at most {value:.3g}x by hand", times_by_hand(row, OURS), value)
    ratio, words = times_faster(row, name), _against(name, value, row)
    if ratio is None:
        return Aim(words, text_of(None, unit), None)
    if name in PEERS or row["better"] == "higher":
        measured = f"{ratio:.1%}" if name.startswith(FLOOR) else times(ratio)
    else:
        measured = times(1 / ratio)
    return Aim(words, measured, value / ratio)


def _times_aim(words: str, ratio: float | None, value: float) -> Aim:
    return Aim(words, "not available" if ratio is None else times(ratio), _share(ratio, value))


def _share(value: float | None, of: float | None) -> float | None:
    """`value / of`; of a target of 0, 0 where it is met."""
    if value is None or of is None:
        return None
    if of == 0:
        return 0.0 if value <= 0 else math.inf
    return value / of


def target_cells(chosen: list[Aim]) -> list[str]:
    """The targets of a row in words, and how many times each was measured."""
    return ["; ".join(aim.words for aim in chosen), "; ".join(aim.of_target for aim in chosen)]


def times_by_hand(row: Row, name: str) -> float | None:
    """How many times as long as by hand a form takes: the median of the rounds' own ratios."""
    mine, its = (row["contenders"].get(form, {}).get("rounds") for form in (name, BY_HAND))
    return statistics.median(a / b for a, b in zip(mine, its, strict=True)) if mine and its else None


def target_summary(document: Document) -> str:
    """How many targets are met, how many fall short, and how many could not be measured."""
    rows = {row["key"]: row for row in document["rows"]}
    chosen = [aim for row in rows.values() for aim in aims(row, rows)]
    short, unknown = (sum(test(aim) for aim in chosen) for test in (lambda a: a.falls_short, lambda a: a.ratio is None))
    text = f"{len(chosen) - short - unknown} of {len(chosen)} targets are met, {short} fall short"
    return text + (f", {unknown} could not be measured." if unknown else ".")


def shortfalls(document: Document) -> dict[str, list[str]]:
    """What falls short, by its reason: the rows with how many times their target they take."""
    rows = {row["key"]: row for row in document["rows"]}
    lines: dict[str, list[str]] = {}
    for row in rows.values():
        for name, value in row["target"].items():
            aim = _aim(row, name, value, rows)
            if aim.falls_short:
                lines.setdefault(_reason(row, aim), []).append(f"{row['title']} ({aim.words}: {aim.of_target})")
    return lines


def _reason(row: Row, aim: Aim) -> str:
    contender = row["contenders"][OURS]
    if aim.ratio is not None and aim.ratio - 1 <= (spread(contender) or 0):
        return "By less than their rounds differ from each other"
    return REASONS.get(row["key"], "Not explained yet")


def _against(name: str, value: float, row: Row) -> str:
    if name.startswith(FLOOR):
        return f"{value:.0%} of the floor" if row["better"] == "higher" else f"at most {1 / value:.3g}x the {name}"
    return f"{value:g}x {name}"


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
    return [*line, *target_cells(aims(row, rows))]


def _own_words(row: Row, name: str, rows: dict[str, Row]) -> str:
    ratio = of_own(row, name, rows)
    return f", {times(ratio)} its own" if ratio is not None else ""


def program_cells(row: Row, rows: dict[str, Row]) -> list[str]:
    """The cells of one line of the table of whole programs: CPU time a frame."""
    forms = [program_figure(row, form) for form in PROGRAM_PEERS]
    by_hand, ours = (text_of(figure(row, form), row["unit"]) + detail(row, form) for form in (BY_HAND, OURS))
    return [row["title"], by_hand, ours, ratio_by_hand(row, OURS), *forms, *target_cells(aims(row, rows))]


def program_figure(row: Row, form: str) -> str:
    """CPU time a frame, and in brackets how many times as long as by hand that is; empty where it has no such form."""
    if form not in row["contenders"]:
        return ""
    ratio = ratio_by_hand(row, form)
    return text_of(figure(row, form), row["unit"]) + (f" ({ratio})" if ratio else "")


def ratio_by_hand(row: Row, form: str) -> str:
    """How many times as long as by hand a form takes, with the spread of the rounds' own ratios.

    Empty where one of the two was not measured.
    """
    ratio = times_by_hand(row, form)
    if ratio is None:
        return ""
    rounds = (row["contenders"][name]["rounds"] for name in (form, BY_HAND))
    share = spread({"rounds": [mine / its for mine, its in zip(*rounds, strict=True)], "median": ratio})
    return times(ratio) + ("" if share is None else f" ±{share / 2:.0%}")


def share_lines(rows: list[Row]) -> list[list[str]]:
    """A line for each form of a program: the shares of its parts."""
    return [
        [row["title"], name, *(f"{contender['shares'][part]:.0%}" for part in PARTS)]
        for row in rows
        for name, contender in row["contenders"].items()
        if "shares" in contender and len(row["contenders"]) > 2
    ]


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
    return [*line, *target_cells(chosen)]


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
    commit = f"commit {machine['commit']}, " if machine.get("commit") else ""
    return (
        f"{commit}{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, Python {machine['python']}, "
        f"{versions}; read_ahead_kb {machine['read_ahead_kb']}; "
        f"load {machine['load']} before the start; {machine['date'][:10]}{quick}"
    )


def by_topic(rows: dict[str, Row]) -> dict[str, list[Row]]:
    """The rows under the headings that they stand under: whole programs, then in the order of their first rows."""
    topics: dict[str, list[Row]] = {PROGRAMS: []}
    for row in rows.values():
        topics.setdefault(row.get("topic", "All"), []).append(row)
    return {topic: chosen for topic, chosen in topics.items() if chosen}


class Page(NamedTuple):
    """A heading, and a table or lines of text."""

    title: str
    header: tuple[str, ...]
    lines: list[list[str]]


def tables(document: Document) -> list[Page]:
    """All tables, in the order in which they are shown."""
    rows = {row["key"]: row for row in document["rows"]}
    made = []
    for topic, chosen in by_topic(rows).items():
        if topic == PROGRAMS:
            made.append(Page(topic, PROGRAMS_HEADER, [program_cells(row, rows) for row in chosen]))
            made.append(Page(SHARES, SHARES_HEADER, share_lines(chosen)))
        else:
            made.append(Page(topic, HEADER, [cells(row, rows) for row in chosen]))
    crowded = [beside_cells(row) for row in rows.values() if has_beside(row)]
    if crowded:
        made.append(Page("Beside a busy Python thread", BESIDE_HEADER, crowded))
    return made


def reason_lines(document: Document) -> list[str]:
    """What falls short of its target: each reason once, with the rows."""
    return [f"{reason}: {'; '.join(short)}." for reason, short in shortfalls(document).items()]


def show(document: Document, console: Console) -> None:
    """Print the tables and the remarks; wide ones are not folded when the output is a file."""
    if not console.is_terminal:
        console = Console(width=250)
    for page in tables(document):
        table = Table(*page.header, title=page.title, box=box.SIMPLE)
        for line in page.lines:
            table.add_row(*line)
        console.print(table)
    for line in [target_summary(document), *reason_lines(document), *remarks(document), machine_line(document)]:
        console.print(line, markup=False, highlight=False)


def markdown(document: Document) -> str:
    """The same as sections of a page: whole programs, what falls short, then calls."""
    sections = [(page.title, markdown_table(page.header, page.lines)) for page in tables(document)]
    first = sum(title in (PROGRAMS, SHARES) for title, _ in sections)
    short = "\n\n".join([target_summary(document), bullets(reason_lines(document))])
    sections.insert(first, ("What falls short of its target", short))
    parts = [part for title, text in sections for part in (f"## {title}", text)]
    parts += ["## Remarks", bullets(remarks(document)), machine_line(document) + "."]
    return "\n\n".join(part for part in parts if part) + "\n"


def bullets(lines: list[str]) -> str:
    """A list in markdown."""
    return "\n".join(f"- {line}" for line in lines)


def markdown_table(header: tuple[str, ...], lines: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in [list(header), rule, *lines])


def main() -> None:
    """Print a results file again."""
    parser = argparse.ArgumentParser(prog="benchmarks.report", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--markdown", action="store_true", help="as a page, not for the terminal")
    chosen = parser.parse_args()
    document = json.loads(chosen.file.read_text())
    if chosen.markdown:
        print(markdown(document), end="")
    else:
        show(document, Console())


if __name__ == "__main__":
    main()
