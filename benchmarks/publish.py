"""`python -m benchmarks.publish [FILE]`: write the figures of a run into README.md, the pages of benchmarks/, a chart.

What is between the two marks of README.md and of benchmarks/README.md is written here, and all of benchmarks/tables/.
Tests compare them with results/latest.json.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from benchmarks import chart, report
from benchmarks.cases import BY_HAND
from benchmarks.libraries import OURS, PEERS
from benchmarks.report import Document, Row, figure, text_of, times, times_faster

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "latest.json"
FRONT_PAGE, SUMMARY, TABLES = ROOT / "README.md", ROOT / "benchmarks" / "README.md", ROOT / "benchmarks" / "tables"
SHORTFALLS = "What falls short of its target"
BEGIN, END = "<!-- figures: written by python -m benchmarks.publish -->", "<!-- end of figures -->"
CHART = ROOT / "docs" / "images" / "speed.svg"
NAMES = {"torchrl": "TorchRL", "tianshou": "tianshou", "stable-baselines3": "Stable-Baselines3", "cpprb": "cpprb"}
CALLS = {
    "sample_small": "sample 256 of 100,000 steps with 11 keys",
    "extend": "store 64 steps",
    "slices_100000": "sample 8 slices of 32 steps",
    "sample_mapped": "sample 256 of 60 million steps on disk, with 1.6 GB of memory",
    "collect_random": "collect CartPole with random actions",
}
"""Rows of the front page by key, and what it calls them."""


def pages(document: Document) -> dict[Path, str]:
    """The text of each page with the figures of a run."""
    figures = {FRONT_PAGE: front_page(document), SUMMARY: summary(document)}
    marked = {path: _between_marks(path.read_text(), text) for path, text in figures.items()}
    end = f"Measured on: {report.machine_line(document)}.\n"
    return {**marked, **{_page(title): f"# {title}\n\n{text}\n\n{end}" for title, text in tables(document).items()}}


def write(document: Document) -> None:
    """Writes the pages and the chart."""
    written = pages(document)
    for old in set(TABLES.glob("*.md")) - written.keys():
        old.unlink()
    for path, text in written.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    chart.draw_front_page(document, CHART)


def _page(title: str) -> Path:
    """The page of a topic."""
    return TABLES / (re.sub(r"\W+", "-", title.split(":")[0].lower()) + ".md")


def tables(document: Document) -> dict[str, str]:
    """The pages of the tables by their titles, each with the remarks on its rows."""
    rows = {row["key"]: row for row in document["rows"]}
    topics, made = report.by_topic(rows), {}
    for page in report.tables(document):
        parts = [report.markdown_table(page.header, page.lines)]
        if notes := report.remarks({**document, "rows": topics.get(page.title, [])}):
            parts.append(report.bullets(notes))
        made[page.title] = "\n\n".join(parts)
    made[SHORTFALLS] = f"{report.target_summary(document)}\n\n{report.bullets(report.reason_lines(document))}"
    return made


def summary(document: Document) -> str:
    """What all was measured on, how many targets are met, and the list of the tables."""
    links = [f"[{title.split(':')[0]}](tables/{_page(title).name})" for title in tables(document)]
    machine = document["machine"]
    commit = f" of commit {machine['commit']}" if machine.get("commit") else ""
    on = f"One run{commit} on {machine['cores']} cores ({machine['cpu']}), {machine['date'][:10]}."
    return f"{on} {report.target_summary(document)} The tables: {', '.join(links)}."


def _between_marks(page: str, text: str) -> str:
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{text.rstrip()}\n\n{END}{rest.split(END)[1]}"


def front_page(document: Document) -> str:
    """Two tables: whole programs, then calls."""
    rows = {row["key"]: row for row in document["rows"]}
    programs = [_program_line(rows[key], name) for key, name in chart.PROGRAMS.items() if key in rows]
    calls = [_call_line(rows[key], name) for key, name in CALLS.items() if key in rows]
    header = ("CPU time a step of a whole program", BY_HAND, OURS, *(NAMES[peer] for peer in report.PROGRAM_PEERS))
    parts = [report.markdown_table(header, programs)] if programs else []
    parts.append(report.markdown_table(("a call", OURS, "TorchRL", "fastest other library"), calls))
    parts.append(_measured_on(document))
    return "\n\n".join(parts)


def _program_line(row: Row, name: str) -> list[str]:
    by_hand = text_of(figure(row, BY_HAND), row["unit"])
    return [name, by_hand, *(report.program_figure(row, form) for form in (OURS, *report.PROGRAM_PEERS))]


def _call_line(row: Row, name: str) -> list[str]:
    ratios = {peer: ratio for peer in PEERS if (ratio := times_faster(row, peer)) is not None}

    def cell(peer: str) -> str:
        return f"{text_of(figure(row, peer), row['unit'])} ({times(ratios[peer])})"

    others = sorted((ratio, peer) for peer, ratio in ratios.items() if peer != "torchrl")
    other = f"{NAMES[others[0][1]]}: {cell(others[0][1])}" if others else ""
    return [name, text_of(figure(row, OURS), row["unit"]), cell("torchrl") if "torchrl" in ratios else "", other]


def _measured_on(document: Document) -> str:
    machine = document["machine"]
    commit = f" of commit {machine['commit']}" if machine.get("commit") else ""
    return (
        f"{machine['cores']} cores, medians of one run{commit} on {machine['date'][:10]}. In brackets: of programs, "
        "times as long as the loop by hand, which has no library: the median of what the rounds say, so not quite the "
        "quotient of the times; of calls, times as long as engram. The first three\n"
        "calls are scaled to a machine on which `torch.empty(1)` takes 1.1 us: compare ratios, not times. All "
        "measurements, their targets, and what falls short of them are in [benchmarks/](benchmarks/README.md)."
    )


def main() -> None:
    """Write the pages from a results file."""
    parser = argparse.ArgumentParser(prog="benchmarks.publish", description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=RESULTS, help="the JSON file of a whole run")
    write(json.loads(parser.parse_args().file.read_text()))


if __name__ == "__main__":
    main()
