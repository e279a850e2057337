"""The pages of algorithms: each shows one program whole, and the curve that this very program has drawn."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from benchmarks import curves

ROOT = Path(__file__).parents[2]
PAGES = sorted(page for page in (ROOT / "docs" / "algorithms").glob("*.md") if page.name != "index.md")
RESULTS = json.loads(curves.RESULTS.read_text())


def program_on(page):
    """The file that a page shows."""
    (path,) = re.findall(r'^--8<-- "(.*)"$', page.read_text(), re.MULTILINE)
    return ROOT / path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_shows_the_curve_of_the_program_that_it_shows(page):
    (picture,) = re.findall(r"!\[.+\]\((.*\.svg)\)", page.read_text())
    program = program_on(page)
    assert (page.parent / picture).resolve() == (ROOT / "docs" / "images" / "curves" / f"{program.stem}.svg")
    assert RESULTS[program.stem]["program"] == curves.fingerprint(program), (
        f"{program.name} is not the program of the picture: python -m benchmarks.curves {program.stem}"
    )


def test_each_program_has_a_page_and_a_curve():
    names = {program_on(page).stem for page in PAGES}
    assert names == {curve.program for curve in curves.CURVES}


@pytest.mark.parametrize("curve", curves.CURVES, ids=lambda curve: curve.program)
def test_picture_is_drawn_from_the_recorded_runs(curve, tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "PICTURES", tmp_path)
    curves.draw(curve, RESULTS[curve.program])
    committed = ROOT / "docs" / "images" / "curves" / curve.picture.name
    assert curve.picture.read_text() == committed.read_text(), "run: python -m benchmarks.curves --draw"


def test_picture_of_the_demo_is_drawn_from_its_recorded_run(tmp_path):
    curves.draw_crash_demo(tmp_path / curves.CRASH_PICTURE.name)
    drawn = (tmp_path / curves.CRASH_PICTURE.name).read_text()
    assert drawn == curves.CRASH_PICTURE.read_text(), "run: python -m benchmarks.curves --draw"


def test_fingerprint_ignores_comments_and_docstrings_only(tmp_path):
    def of(text):
        (tmp_path / "program.py").write_text(text)
        return curves.fingerprint(tmp_path / "program.py")

    assert of('"""One."""\nx = 1\n') == of("# two\nx = (\n    1\n)\n")
    assert of("x = 1\n") != of("x = 2\n")
