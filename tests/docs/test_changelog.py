"""CHANGELOG.md says in short what each version has; the days have their own page. The version stands in one place."""

import re
import subprocess
from importlib import metadata

import pytest

from docs.pages import ROOT
from engram import __version__


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_this_version_has_a_section_with_its_tag():
    assert f"`v{__version__}`" in sections()[__version__]


def test_each_section_is_a_version_and_this_one_is_the_newest():
    versions = [tuple(map(int, name.split("."))) for name in sections()]
    assert versions == sorted(set(versions), reverse=True)
    assert next(iter(sections())) == __version__


def test_a_version_is_told_in_forty_lines():
    for version, text in sections().items():
        assert len(text.strip().splitlines()) <= 40, version


def test_the_build_reads_the_version_where_the_package_has_it():
    settings = (ROOT / "pyproject.toml").read_text()
    assert not re.search(r"^version =", settings, re.MULTILINE) and '\ndynamic = ["version"]' in settings
    assert 'input = "src/engram/__init__.py" }' in settings
    assert metadata.version("engram") == __version__, "make environment builds it anew"


def test_the_citation_has_the_version_of_the_package():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_no_other_file_says_which_version_this_is():
    shown = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if shown.returncode:
        pytest.skip("a copy without git")
    told = ("docs/", "tests/", "benchmarks/results/", "benchmarks/tables/")
    may = ("CHANGELOG.md", "CITATION.cff", "src/engram/__init__.py", *told)
    says = re.compile(rf"version\W{{0,4}}{re.escape(__version__)}", re.IGNORECASE)
    here = [path for path in shown.stdout.splitlines() if not path.startswith(may) and (ROOT / path).is_file()]
    assert [path for path in here if says.search((ROOT / path).read_text(errors="replace"))] == []


def test_the_days_are_in_no_menu_and_no_search_and_the_changelog_leads_to_them():
    site = (ROOT / "mkdocs.yml").read_text()
    assert "release-notes.md" not in site.split("\nnav:\n")[1]
    assert 'NOT_SEARCHED = ("release-notes.md",)' in (ROOT / "packaging" / "pages.py").read_text()
    assert "(docs/release-notes.md)" in (ROOT / "CHANGELOG.md").read_text()


def test_release_notes_go_from_the_newest_day_to_the_oldest():
    days = re.findall(r"^## (\d{4}-\d{2}-\d{2})$", (ROOT / "docs" / "release-notes.md").read_text(), re.MULTILINE)
    assert days == sorted(days, reverse=True) and len(set(days)) == len(days) > 1
