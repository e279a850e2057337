"""Pictures that follow light and dark: SVG files whose ink is a variable.

A file by itself follows the reader's system; on the site, where it is put into the page, it follows the page's switch.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INK = "#010203"  # no other colour of a picture
_STYLE = "<style>svg { --ink: #24292f; } @media (prefers-color-scheme: dark) { svg { --ink: #d0d7de; } }</style>"


@contextmanager
def drawing() -> Iterator[Any]:
    """`pyplot`, with settings under which lines and texts have the ink of the reader's page."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    inked = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    texts = {"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
    with pyplot.rc_context({**inked, **texts, "axes.spines.top": False, "axes.spines.right": False}):
        yield pyplot


def save(figure: Any, path: Path) -> None:
    """Writes a figure; the same figure is the same file."""
    import matplotlib
    from matplotlib import pyplot

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    lines = text.getvalue().replace(INK, "var(--ink)").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("<svg"))
    svg = "\n".join(line.rstrip() for line in lines[begin:])
    head, rest = svg.split(">", 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{head}>\n {_STYLE}{rest}\n")
