"""Results as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engram._system import human_bytes
from engram.cli.description import Info, Summary

if TYPE_CHECKING:
    from engram.cli.conversion import Conversion
    from engram.cli.differences import Differences
    from engram.cli.rows import RowsShown
    from engram.cli.verification import Verification

_WIDE = 10_000  # columns
HELD = {True: "a process", False: "nobody", None: "-"}


def show_info(result: Info) -> None:
    """Prints what `info` returned."""
    console = _console()
    console.print(f"[bold]{_escaped(result.path)}[/bold]: {result.kind}")
    for name, value in facts(result):
        console.print(f"  {name:<10} {_escaped(value)}")
    if result.keys:
        rows = [(k.key, str(list(k.shape)), k.dtype, human_bytes(k.nbytes)) for k in result.keys]
        show_table(("key", "shape", "dtype", "bytes"), rows)
    if result.lanes:
        lanes = [
            (str(i), f"{x.rows:,}", f"{x.written:,}", str(x.seams), HELD[x.held]) for i, x in enumerate(result.lanes)
        ]
        show_table(("lane", "rows", "steps written", "seams", "writer"), lanes)
    for note in result.notes:
        console.print(f"  {_escaped(note)}", style="dim")


def facts(result: Info) -> Iterator[tuple[str, str]]:
    """Names and values of what there is to say beside keys and lanes."""
    if result.rows is not None:
        share = f" of {result.capacity:,} ({result.rows / result.capacity:.0%})" if result.capacity else ""
        yield "rows", f"{result.rows:,}{share}"
    if result.envs > 1:
        yield "envs", str(result.envs)
    if result.row_bytes is not None:
        yield "a row", human_bytes(result.row_bytes)
    if result.file_bytes is not None:
        yield "on disk", human_bytes(result.file_bytes)
    if result.in_use is not None:
        yield "in use", "yes" if result.in_use else "no"
    if result.snapshot is not None:
        yield "snapshot", result.snapshot
    if result.parts:
        yield "parts", ", ".join(f"{name} {kind}".strip() for name, kind in result.parts.items())
    if result.episodes is not None:
        yield "episodes", f"{result.episodes:,}"
    for name, summary in (("lengths", result.lengths), ("returns", result.returns)):
        if summary is not None:
            yield name, _in_words(summary)


def _in_words(summary: Summary) -> str:
    return f"{summary.least:.6g} to {summary.most:.6g}, mean {summary.mean:.6g}"


def show_verification(result: Verification) -> None:
    """Prints what `verify` returned."""
    console = _console()
    state = "[green]whole[/green]" if not result.damages else "[red]DAMAGED[/red]"
    if result.damages and result.ok:
        state = "[yellow]usable, with damage in older snapshots[/yellow]"
    console.print(f"[bold]{_escaped(result.path)}[/bold]: {result.kind}, {state}")
    console.print(f"  {result.checked} compared, {human_bytes(result.nbytes)}")
    for damage in result.damages:
        rows = f" ({damage.rows})" if damage.rows else ""
        console.print(f"  {_escaped(damage.file)}{_escaped(rows)}: {_escaped(damage.reason)}")
    if not result.ok and result.newest_whole is not None:
        console.print(f"  the newest whole snapshot is {result.newest_whole}")


def show_differences(result: Differences) -> None:
    """Prints what `diff` returned."""
    console = _console()
    console.print(f"a: [bold]{_escaped(result.a)}[/bold]")
    console.print(f"b: [bold]{_escaped(result.b)}[/bold]")
    if result.equal:
        console.print(f"  [green]equal[/green]: {result.compared:,} rows compared")
    else:
        console.print(f"  [red]different[/red]: {result.rows:,} of {result.compared:,} rows, compared by {result.by}")
    for name, n in (("a", result.only_a), ("b", result.only_b)):
        if n:
            console.print(f"  {n:,} rows are only in {name}")
    for line in (*result.keys, *result.parts):
        console.print(f"  {_escaped(line)}")
    if result.values:
        which = "slots of a" if result.by == "sequence" else "rows, the oldest is 0"
        show_table(("key", "rows differ", which), [(v.key, f"{v.rows:,}", v.which) for v in result.values])
    for note in result.notes:
        console.print(f"  {_escaped(note)}", style="dim")


def show_conversion(result: Conversion) -> None:
    """Prints what `convert` returned."""
    console = _console()
    console.print(f"[bold]{_escaped(result.target)}[/bold]: {result.kind}")
    console.print(f"  {result.rows:,} rows, {human_bytes(result.nbytes)}")
    if result.dropped:
        console.print(f"  without {_escaped(', '.join(result.dropped))}")
    for note in result.notes:
        console.print(f"  {_escaped(note)}", style="dim")


def show_rows(result: RowsShown) -> None:
    """Prints what `head` or `sample` returned."""
    if len(result.slots):
        show_table(*result.cells())
    else:
        _console().print("no rows are stored")


def show_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Prints a table to standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2), header_style="bold")
    for name in head:
        table.add_column(name)
    for row in rows:
        table.add_row(*map(_escaped, row))
    console = Console()
    if not console.is_terminal:  # lines of a file or a pipe may be as long as they need
        console = Console(width=_WIDE)
    console.print(table)


def _console() -> Any:
    from rich.console import Console  # late: an optional package

    return Console(soft_wrap=True, highlight=False)


def _escaped(text: str) -> str:
    """Text whose brackets are not taken for styles."""
    return text.replace("[", r"\[")
