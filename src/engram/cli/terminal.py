"""The terminal: everything that the command prints, made visible, and never taken for markup."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from engram.kernel.tools import visible

_WIDE = 10_000  # columns

#: A text, or a text and its style.
Part = str | tuple[str, str]


def print_line(*parts: Part, style: str = "") -> None:
    """Prints a line of texts to standard output, some of them styled."""
    from rich.console import Console  # late: an optional package

    console = Console(soft_wrap=True, highlight=False)
    console.print(_text(*parts), style=style or None)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table to standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2), header_style="bold")
    for name in head:
        table.add_column(_text(name))
    for row in rows:
        table.add_row(*map(_text, row))
    console = Console()
    if not console.is_terminal:  # lines of a file or a pipe may be as long as they need
        console = Console(width=_WIDE)
    console.print(table)


def print_rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints rows as a table to standard output; turned, and only as many as fit, where a terminal is too narrow.

    Then each key has a line, and each row a column.
    """
    from rich.console import Console

    columns = [[visible(cell) for cell in column] for column in zip(head, *rows, strict=True)]
    room = Console().width
    if not Console().is_terminal or sum(_width(column) for column in columns) <= room:
        print_table(head, rows)
        return
    names, values = [column[0] for column in columns], list(zip(*(column[1:] for column in columns), strict=True))
    left, shown = room - _width(names), 0
    while shown < len(values) and left >= _width(values[shown]):
        left -= _width(values[shown])
        shown += 1
    shown = max(1, shown)
    lines = list(zip(names, *values[:shown], strict=True))
    print_table(lines[0], lines[1:])
    if shown < len(values):
        print_line(f"  {shown} of {len(values)} rows fit; a pipe (| less -S) or --json shows all", style="dim")


def _width(cells: Sequence[str]) -> int:
    """Columns that cells take below each other, with the space beside them."""
    from rich.cells import cell_len

    return max(map(cell_len, cells)) + 4


@contextmanager
def live_screen() -> Iterator[Callable[[Sequence[str]], None]]:
    """A block in which lines are shown in the place of those before; in a file or a pipe below them."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        yield lambda lines: print(*map(visible, lines), sep="\n", flush=True)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:

        def show(lines: Sequence[str]) -> None:
            text = Text("\n".join(map(visible, lines)), no_wrap=True, overflow="ellipsis")
            live.update(text, refresh=True)

        yield show


def print_json_line(value: Any) -> None:
    """Prints JSON in one line, in ASCII, at once."""
    print(json.dumps(value).replace("\x7f", "\\u007f"), flush=True)


def print_json(value: Any) -> None:
    """Prints JSON to standard output, in ASCII."""
    print(json.dumps(value, indent=2).replace("\x7f", "\\u007f"))


def print_plain(text: str) -> None:
    """Prints a line to standard output, without the package rich."""
    print(visible(text))


def print_error(text: str) -> None:
    """Prints a line to standard error, without the package rich."""
    print(f"engram: {visible(text)}", file=sys.stderr)


def _text(*parts: Part) -> Any:
    from rich.text import Text

    styled = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((visible(text), style) for text, style in styled))
