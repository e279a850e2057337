"""What mkdocs needs beside mkdocs.yml: pages of the site that lie in other folders of the repository, and their links.

A page keeps its place in the repository, so that its links to other pages hold in both. A link to a file that is no
page (a source, a test) leads nowhere on a site: it becomes the file's name.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
from reference import with_all_parts

ROOT = Path(__file__).parents[1]

#: Pages and pictures of the site that do not lie in docs/.
ELSEWHERE = (
    "CHANGELOG.md",
    "benchmarks/README.md",
    "benchmarks/results/latest.png",
    "examples/README.md",
)

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that lie elsewhere."""
    for path in ELSEWHERE:
        content = (ROOT / path).read_bytes()
        files.append(File.generated(config, path, content=content))
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


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """All parts that belong on a page; its links, from the repository's folders to the site's."""
    here = page.file.src_uri
    markdown = with_all_parts(here, markdown)

    def replace(link: re.Match[str]) -> str:
        picture, text, target, anchor = link.groups()
        if re.match(r"[a-z]+:", target):
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository(here)), target))
        if not (ROOT / path).exists():
            return link[0]  # mkdocs says that it is broken
        to = page_of(path)
        if to is None:
            return f"`{path}`" if not picture else text
        return f"{picture}[{text}]({posixpath.relpath(to, posixpath.dirname(here) or '.')}{anchor or ''})"

    return _LINK.sub(replace, markdown)
