"""Which classes a page of the reference shows besides those that it names."""

from __future__ import annotations

import ast
import re
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


def _names_in(file: Path) -> list[str]:
    """The `__all__` of a module."""
    for statement in ast.parse(file.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(statement.value)
            return names
    raise ValueError(f"{file} has no __all__")
