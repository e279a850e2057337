"""The pages show the figures of the run in benchmarks/results/latest.json, and how far they are from their targets."""

import json
from importlib import metadata

import pytest
from benchmarks import chart, publish, report
from benchmarks.cases import programs

DOCUMENT = json.loads(publish.RESULTS.read_text())


@pytest.mark.parametrize("page", publish.pages(DOCUMENT), ids=lambda page: f"{page.parent.name}/{page.name}")
def test_figures_of_the_pages_are_those_of_the_last_recorded_run(page):
    assert publish.pages(DOCUMENT)[page] == page.read_text(), "run: python -m benchmarks.publish"


def test_there_is_no_page_of_a_topic_that_is_not_measured():
    assert set(publish.TABLES.glob("*.md")) <= publish.pages(DOCUMENT).keys()


@pytest.mark.skipif(
    f"matplotlib=={metadata.version('matplotlib')}\n" not in (publish.ROOT / "constraints.txt").read_text(),
    reason="each version of matplotlib sets texts otherwise",
)
def test_chart_is_that_of_the_last_recorded_run(tmp_path):
    chart.draw_front_page(DOCUMENT, tmp_path / publish.CHART.name)
    assert (tmp_path / publish.CHART.name).read_text() == publish.CHART.read_text(), "run: python -m benchmarks.publish"


def test_another_figure_in_the_results_changes_the_page():
    other = json.loads(json.dumps(DOCUMENT))
    row = next(row for row in other["rows"] if row["key"] == "extend")
    row["contenders"]["engram"] = {"median": 7.77e-06}
    pages = publish.pages(other)
    for page in (publish.FRONT_PAGE, publish.TABLES / "writing.md"):
        assert "7.77 us" in pages[page] and pages[page] != page.read_text()


def test_summary_leads_to_every_table():
    summary = publish.summary(DOCUMENT)
    tables = [page.name for page in publish.pages(DOCUMENT) if page.parent == publish.TABLES]
    assert len(tables) > 5 and all(f"(tables/{name})" in summary for name in tables)


def row(key, target, topic="Calls", **contenders):
    shared = {"title": f"the row {key}", "unit": "s", "better": "lower", "own_of": None, "notes": []}
    return {"key": key, "topic": topic, "target": target, "contenders": contenders, **shared}


def rounds(*seconds, **more):
    return {"median": sorted(seconds)[len(seconds) // 2], "rounds": list(seconds), **more}


SHARES = {"environment": 0.1, "policy": 0.2, "learner": 0.6, "replay": 0.04, "collection": 0.06}
PROGRAM = row(
    "program_dqn",
    {"by hand": 1.1},
    topic=report.PROGRAMS,
    **{
        "by hand": rounds(100e-6, 110e-6, 120e-6, shares=SHARES),
        "engram": rounds(110e-6, 132e-6, 156e-6, shares=SHARES),
        "torchrl": rounds(480e-6, 528e-6, 576e-6, shares=SHARES),
    },
)
CALL = row("call", {"us": 10, "torchrl": 4}, engram={"median": 5e-6}, torchrl={"median": 30e-6})


def document(*rows):
    return {**DOCUMENT, "rows": list(rows)}


def test_whole_programs_stand_before_calls_then_what_falls_short():
    text = report.markdown(document(CALL, PROGRAM))
    headings = ["## Whole programs", "## Where their time goes", "## What falls short of its target", "## Calls"]
    places = [text.index(heading) for heading in headings]
    assert places == sorted(places)


def test_program_is_compared_with_the_loop_by_hand_and_with_its_target():
    line = report.program_cells(PROGRAM, {})
    cells = dict(zip(report.PROGRAMS_HEADER, line, strict=True))
    assert cells["by hand"] == "110 us ±9%" and cells["engram / by hand"] == "1.2x ±8%"
    assert cells["torchrl"] == "528 us (4.8x ±0%)" and cells["tianshou"] == ""
    assert cells["target"] == "at most 1.1x by hand" and cells["of target"] == "1.09x"


def test_shares_of_each_form_are_listed():
    assert report.share_lines([PROGRAM])[0] == ["the row program_dqn", "by hand", "10%", "20%", "60%", "4%", "6%"]


def test_each_target_of_a_call_says_how_many_times_it_was_measured():
    cells = dict(zip(report.HEADER, report.cells(CALL, {}), strict=True))
    assert cells["target"] == "10 us; 4x torchrl" and cells["of target"] == "0.50x; 0.67x"


def test_what_falls_short_is_listed_once_by_its_reason(monkeypatch):
    monkeypatch.setattr(report, "REASONS", {"slow": "It copies", "slower": "It copies"})
    slow = row("slow", {"us": 10}, engram={"median": 13e-6})
    slower = row("slower", {"us": 10, "most": 1}, engram={"median": 20e-6})
    other = row("other", {"us": 10}, engram={"median": 11e-6})
    lines = report.shortfalls(document(CALL, slow, slower, other))
    assert lines == {
        "It copies": ["the row slow (10 us: 1.30x)", "the row slower (10 us: 2.00x)"],
        "Not explained yet": ["the row other (10 us: 1.10x)"],
    }
    assert report.target_summary(document(CALL, slow, slower, other)) == "3 of 6 targets are met, 3 fall short."


def test_target_that_a_missing_peer_would_decide_is_not_measured():
    line = row("call", {"torchrl": 4}, engram={"median": 5e-6}, torchrl={"not_available": "no such module"})
    assert report.cells(line, {})[-1] == "not measured" and report.shortfalls(document(line)) == {}


def test_front_page_shows_programs_first_and_names_the_commit():
    machine = {**DOCUMENT["machine"], "commit": "abc1234"}
    text = publish.front_page({**document(*DOCUMENT["rows"], PROGRAM), "machine": machine})
    assert text.index("| DQN, an update each step | 110 us | 132 us (1.2x ±8%) |") < text.index("| a call |")
    assert "commit abc1234" in text


def test_reasons_are_of_rows_that_there_are():
    measured = {row["key"] for row in DOCUMENT["rows"]} | {row.key for row in programs.ROWS}
    assert set(report.REASONS) <= measured
