"""What mkdocs needs beside mkdocs.yml: pages that lie in other folders or are made of the reference's, and their links.

A page keeps its place in the repository, so that its links to other pages hold in both. A link to a file that is no
page (a source, a test) leads nowhere on a site: it becomes the file's name.
"""

from __future__ import annotations

import functools
import html
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
from reference import pages_of, with_all_parts, with_tables

ROOT = Path(__file__).parents[1]
DRAWING = ".svg"  # is put into the page: it follows the page's light and dark

#: The tables of the benchmarks, in the order in which their summary leads to them.
TABLES = tuple(
    f"benchmarks/{path}" for path in re.findall(r"\((tables/.*?)\)", (ROOT / "benchmarks/README.md").read_text())
)
#: Pages of the site that do not lie in docs/.
ELSEWHERE = ("CHANGELOG.md", "benchmarks/README.md", "benchmarks/method.md", *TABLES)

#: What readers search for by other words than those of the page that they want.
SEARCHED = {
    "how-to/prioritized.md": ("PER", "prioritized replay", "priority", "SumTree", "importance weights"),
    "how-to/crash-and-resume.md": ("kill", "mmap", "checkpoint", "save and load", "larger buffer", "resize"),
    "how-to/memory.md": ("memory usage", "capacity"),
    "how-to/n-step.md": ("n-step", "multi-step"),
    "how-to/pixels.md": ("frame stack", "framestack"),
    "how-to/processes.md": ("multiprocessing", "shared memory"),
    "how-to/slices.md": ("sequence", "padding", "episode"),
    "how-to/goals.md": ("HER",),
    "how-to/looking-inside.md": ("gif", "video"),
    "coming-from/stable-baselines3.md": ("SB3",),
    "algorithms/dqn.md": ("DQN", "Rainbow", "PER"),
}

#: The days of the work before a release: the changelog leads to them, and who searches wants what is so today.
NOT_SEARCHED = ("release-notes.md",)

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Puts the page of each class into the menu, below the page that names it, and the tables of the benchmarks."""
    config.nav = [_with_classes(entry) for entry in config.nav]
    next(entry for entry in config.nav if "Benchmarks" in entry)["Benchmarks"] += TABLES
    return config


def _with_classes(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {title: [_with_classes(one) for one in below] if isinstance(below, list) else below
                for title, below in entry.items()}  # fmt: skip
    classes = _classes(entry) if entry.startswith("reference/") else {}
    if not classes:
        return entry
    title = (ROOT / "docs" / entry).read_text().split("\n", 1)[0].removeprefix("# ")
    return {title: [entry, *({posixpath.basename(path).removesuffix(".md"): path} for path in classes)]}


def _classes(here: str) -> dict[str, str]:
    """The pages of the classes of a page of the reference."""
    return pages_of(here, with_all_parts(here, (ROOT / "docs" / here).read_text()))


@functools.cache
def _package() -> Any:
    return griffe.load("engram", search_paths=[str(ROOT / "src")], resolve_aliases=True)


def summary_of(name: str) -> str:
    """The first line of a docstring."""
    docstring = _package()[name.removeprefix("engram.")].docstring
    return docstring.value.split("\n\n", 1)[0].replace("\n", " ") if docstring else ""


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that lie elsewhere, and those of the reference's classes."""
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for path, text in _classes(f"reference/{page.name}").items():
            files.append(File.generated(config, path, content=text))
    for path in ELSEWHERE:
        content = (ROOT / path).read_bytes()
        files.append(File.generated(config, path, content=content))
    unknown = [path for path in SEARCHED if files.get_file_from_path(path) is None]
    if unknown:
        raise PluginError(f"SEARCHED of packaging/site.py names pages that are not there: {', '.join(unknown)}")
    return files


def in_repository(page: str) -> str:
    """Where a page of the site lies in the repository."""
    return page if page in ELSEWHERE else posixpath.join("docs", page)


def page_of(path: str) -> str | None:
    """The page of the site that a file of the repository is; None: it is no page."""
    if path in ELSEWHERE:
        return path
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/") and (ROOT / path).is_file():
        return path.removeprefix("docs/")
    return None


def drawing(path: str, text: str) -> str:
    """A picture as a part of the page, without its own rule of which colours it has."""
    svg = re.sub(r"<style>.*?</style>", "", (ROOT / path).read_text(), count=1)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(text)}"', 1)
    return f'<div class="drawing">{" ".join(svg.split())}</div>'


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """A page of the reference with all its parts; links, from the repository's folders to the site's; drawings."""
    here = page.file.src_uri
    if here in SEARCHED:
        page.meta["tags"] = list(SEARCHED[here])
    if here in NOT_SEARCHED:
        page.meta["search"] = {"exclude": True}
    if not (ROOT / in_repository(here)).exists():
        return markdown  # a class of the reference
    markdown = with_tables(here, with_all_parts(here, markdown), summary_of)

    def replace(link: re.Match[str]) -> str:
        picture, text, target, anchor = link.groups()
        if re.match(r"[a-z]+:", target):
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository(here)), target))
        if not (ROOT / path).exists():
            return link[0]  # mkdocs says that it is broken
        if picture and path.endswith(DRAWING):
            return drawing(path, text)
        to = page_of(path)
        if to is None:
            return f"`{path}`" if not picture else text
        return f"{picture}[{text}]({posixpath.relpath(to, posixpath.dirname(here) or '.')}{anchor or ''})"

    return _LINK.sub(replace, markdown)
