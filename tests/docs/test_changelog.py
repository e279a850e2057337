"""CHANGELOG.md says in short what each version has; the days have their own page."""

import re

from docs.pages import ROOT
from engram import __version__


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_this_version_has_a_section_with_its_tag():
    assert f"`v{__version__}`" in sections()[__version__]


def test_a_version_is_told_in_forty_lines():
    for version, text in sections().items():
        assert version == "Unreleased" or len(text.strip().splitlines()) <= 40, version


def test_release_notes_go_from_the_newest_day_to_the_oldest():
    days = re.findall(r"^## (\d{4}-\d{2}-\d{2})$", (ROOT / "docs" / "release-notes.md").read_text(), re.MULTILINE)
    assert days == sorted(days, reverse=True) and len(set(days)) == len(days) > 1
