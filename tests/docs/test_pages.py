"""Every code block of the documentation runs."""

import importlib
import re
import sys

import pytest

from docs.pages import PAGES, ROOT, blocks, pages, run_page

sys.path.insert(0, str(ROOT / "packaging"))
from reference import pages_of, with_all_parts, with_tables


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
    menu = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    paths = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert [path for path in paths if path not in menu] == ["release-notes.md"]  # the changelog leads to it


NO_RELEASE = "There is no release on a package registry yet"


def test_no_page_installs_engram_from_a_registry_that_does_not_have_it():
    """The page of the installation says that there is none, and what the command does where engram is installed."""
    saying = [page for page in PAGES if NO_RELEASE in page.read_text()]
    assert saying == [ROOT / "docs" / "getting-started.md"]
    guides = {*PAGES, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")}
    promising = [page.name for page in guides if re.search(r"pip install [^`\n]*\bengram\b", page.read_text())]
    assert sorted(promising) == ["getting-started.md", "release-notes.md"]
    assert "Where engram is installed, `pip install " in saying[0].read_text()


def test_each_extra_that_a_page_names_is_there():
    extras = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    there = set(re.findall(r"^([\w-]+) = ", extras, re.MULTILINE))
    naming = re.compile(r"\b[Tt]he (?:extra|\[extra\]\([^)]*\)) `([\w-]+)`")
    named = {name for page in (ROOT / "docs").rglob("*.md") for name in naming.findall(page.read_text())}
    assert {"gym", "h5", "parquet", "cli", "ray", "video", "progress"} <= named <= there


def test_the_readme_says_once_what_its_links_are_relative_to():
    text = (ROOT / "README.md").read_text()
    assert text.count("are relative to the page that has them") == 1
    assert not re.search(r"\]\((?:https?:)?//", text)


@pytest.mark.parametrize(
    "word",
    [
        "SAC",
        "PPO",
        "PER",
        "LSTM",
        "GRU",
        "Atari",
        "Token",
        "Minari",
        "HER",
        "torchrun",
        "remove",
        "delete",
        "Evict",
        "[Ff]ilter",
        "bad episode",
    ],
)
def test_a_word_that_people_search_for_is_in_a_heading(word):
    """A heading counts most in the site's search."""
    guides = [page for page in PAGES if page.parent.name in ("algorithms", "how-to")]
    assert any(re.search(rf"^#+ .*\b{word}", page.read_text(), re.MULTILINE) for page in guides)


def test_each_class_of_a_page_of_the_reference_has_a_page_of_its_own():
    text = "# Parts\n\n::: engram.data.A\n    options:\n      inherited_members: true\n\n::: engram.data.B\n\n## More\n"
    pages = pages_of("reference/parts.md", text)
    assert list(pages) == ["reference/parts/A.md", "reference/parts/B.md"]
    assert pages["reference/parts/A.md"].splitlines() == [
        "::: engram.data.A", "    options:", "      inherited_members: true", "      heading_level: 1",
    ]  # fmt: skip
    table = with_tables("reference/parts.md", text, summary=lambda name: f"About {name}.")
    assert "| [`A`](parts/A.md) | About engram.data.A. |\n| [`B`](parts/B.md) |" in table and ":::" not in table
    assert table.endswith("## More\n")


def shown(page):
    """A page of the reference as the site shows it."""
    return with_all_parts(f"reference/{page.name}", page.read_text())


def test_a_page_of_parts_shows_those_that_it_does_not_name_after_the_others():
    text = with_all_parts("reference/samplers.md", "::: engram.data.Sampler\n")
    assert text.startswith("::: engram.data.Sampler\n") and text.count("engram.data.Sampler\n") == 1
    assert "\n::: engram.data.RandomSampler\n" in text
    assert with_all_parts("reference/errors.md", "text") == "text"


MODULES = [
    "cli", "data", "envs", "envs.transforms", "collectors", "distributed", "data.datasets",
    "specs", "testing", "errors",
]  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_in_the_reference(name):
    module = importlib.import_module(f"engram.{name}")
    names = getattr(module, "__all__", None) or [n for n, value in vars(module).items() if isinstance(value, type)]
    reference = "\n".join(shown(page) for page in (ROOT / "docs" / "reference").glob("*.md"))
    assert [n for n in names if not re.search(rf"\b{n}\b", reference)] == []
