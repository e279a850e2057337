"""The reference: which classes a page has besides those that it names, and the page that each of them has.

A page of docs/reference names classes and functions. On the site each has a page of its own, and the page that names
them shows a table of them.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: Pages that show every part of a package, in the order in which they name them, and then those that they do not name.
PARTS = {
    f"reference/{kind}.md": f"src/engram/data/replay_buffers/{kind}" for kind in ("samplers", "storages", "writers")
}


def with_all_parts(here: str, markdown: str) -> str:
    """A page with all public parts of its package, if it is one of PARTS."""
    if here not in PARTS:
        return markdown
    public = _names_in(ROOT / "src/engram/data/__init__.py")
    named = set(re.findall(r"^::: engram\.data\.(\w+)", markdown, re.MULTILINE))
    others = [name for name in _names_in(ROOT / PARTS[here] / "__init__.py") if name in public and name not in named]
    return markdown + "".join(f"\n::: engram.data.{name}\n" for name in others)


_DIRECTIVE = re.compile(r"^::: (\S+)\n((?: +.*\n)*)", re.MULTILINE)
_DIRECTIVES = re.compile(r"(?:^::: \S+\n(?: +.*\n)*\n*)+", re.MULTILINE)


def pages_of(here: str, markdown: str) -> dict[str, str]:
    """The pages of what a page of the reference names, in its order: where each lies, and its text."""
    return {
        _page_of(here, name): f"::: {name}\n{options or '    options:' + chr(10)}      heading_level: 1\n"
        for name, options in _DIRECTIVE.findall(markdown)
    }


def with_tables(here: str, markdown: str, summary: Callable[[str], str]) -> str:
    """A page of the reference with a table in place of what it names; `summary` is a line on each."""

    def table(found: re.Match[str]) -> str:
        lines = ["| | |", "|---|---|"]
        for name, _ in _DIRECTIVE.findall(found[0]):
            target = posixpath.relpath(_page_of(here, name), posixpath.dirname(here))
            text = summary(name).replace("|", "\\|")
            lines.append(f"| [`{title_of(name)}`]({target}) | {text} |")
        return "\n".join(lines) + "\n\n"

    return _DIRECTIVES.sub(table, markdown)


def title_of(name: str) -> str:
    """`engram.data.ReplayBuffer` is `ReplayBuffer`; where two of a page have one name, the package stands before it."""
    *package, last = name.split(".")
    return f"{package[-1]}.{last}" if package[:-1] == ["engram", "compat"] else last


def _page_of(here: str, name: str) -> str:
    return f"{here.removesuffix('.md')}/{title_of(name)}.md"


def _names_in(file: Path) -> list[str]:
    """The `__all__` of a module."""
    for statement in ast.parse(file.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(statement.value)
            return names
    raise ValueError(f"{file} has no __all__")
