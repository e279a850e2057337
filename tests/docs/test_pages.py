"""Every code block of the documentation runs."""

import importlib
import re

import pytest

from docs.pages import PAGES, ROOT, blocks, pages, run_page


@pytest.mark.parametrize("page", pages(with_peers=False))
def test_the_code_of_a_page_runs(page, tmp_path):
    run_page(page, tmp_path)


def test_a_page_whose_code_fails_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nn = 1\n```\n\ntext\n\n    ```python\n    assert n == 2\n    ```\n")
    assert [text for _, text in blocks(page)] == ["n = 1\n", "assert n == 2\n"]
    with pytest.raises(AssertionError, match="assert n == 2"):
        run_page(str(page), tmp_path)


def test_every_how_to_has_code():
    how_tos = [page for page in PAGES if page.parent == ROOT / "docs" / "how-to" and page.name != "index.md"]
    assert how_tos and all(any(language == "python" for language, _ in blocks(page)) for page in how_tos)


def test_links_between_pages_lead_to_files():
    broken = []
    for page in [*PAGES, *ROOT.glob("*.md"), *(ROOT / "examples").glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    paths = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert [path for path in paths if path not in menu] == []


MODULES = [
    "cli", "data", "envs", "envs.transforms", "collectors", "distributed", "data.datasets",
    "specs", "testing", "errors",
]  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_in_the_reference(name):
    module = importlib.import_module(f"engram.{name}")
    names = getattr(module, "__all__", None) or [n for n, value in vars(module).items() if isinstance(value, type)]
    reference = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    assert [n for n in names if not re.search(rf"\b{n}\b", reference)] == []
