"""Results as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from engram.cli.description import Info, Summary
from engram.cli.terminal import print_line, print_table
from engram.kernel.tools import human_bytes

if TYPE_CHECKING:
    from engram.cli.conversion import Conversion
    from engram.cli.differences import Differences
    from engram.cli.rows import RowsShown
    from engram.cli.verification import Verification

HELD = {True: "a process", False: "nobody", None: "-"}
WRITER_HEAD = ("process", "rows", "share", "steps written", "newest at")


def show_info(result: Info) -> None:
    """Prints what `info` returned."""
    print_line((result.path, "bold"), f": {result.kind}")
    for name, value in facts(result):
        print_line(f"  {name:<10} {value}")
    if result.keys:
        rows = [(k.key, str(list(k.shape)), k.dtype, human_bytes(k.nbytes)) for k in result.keys]
        print_table(("key", "shape", "dtype", "bytes"), rows)
    if result.lanes:
        lanes = [
            (str(i), f"{x.rows:,}", f"{x.written:,}", str(x.seams), HELD[x.held]) for i, x in enumerate(result.lanes)
        ]
        print_table(("lane", "rows", "steps written", "seams", "writer"), lanes)
    if result.writers:
        print_table(WRITER_HEAD, writer_rows(result))
    for note in result.notes:
        print_line(f"  {note}", style="dim")


def writer_rows(result: Info) -> list[tuple[str, ...]]:
    """A row of a table for each writer."""
    total = sum(writer.rows for writer in result.writers)
    return [
        (str(x.pid or "not known"), f"{x.rows:,}", f"{100 * x.rows / total:.1f} %", f"{x.written:,}", str(x.newest))
        for x in result.writers
    ]


def facts(result: Info) -> Iterator[tuple[str, str]]:
    """Names and values of the facts beside keys and lanes."""
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
    state = ("whole", "green") if not result.damages else ("DAMAGED", "red")
    if result.damages and result.ok:
        state = ("usable, with damage in older snapshots", "yellow")
    print_line((result.path, "bold"), f": {result.kind}, ", state)
    print_line(f"  {result.checked} compared, {human_bytes(result.nbytes)}")
    for damage in result.damages:
        rows = f" ({damage.rows})" if damage.rows else ""
        print_line(f"  {damage.file}{rows}: {damage.reason}")
    if not result.ok and result.newest_whole is not None:
        print_line(f"  the newest whole snapshot is {result.newest_whole}")


def show_differences(result: Differences) -> None:
    """Prints what `diff` returned."""
    print_line("a: ", (result.a, "bold"))
    print_line("b: ", (result.b, "bold"))
    if result.equal:
        print_line("  ", ("equal", "green"), f": {result.compared:,} rows compared")
    else:
        counts = f"{result.rows:,} of {result.compared:,} rows, compared by {result.by}"
        print_line("  ", ("different", "red"), f": {counts}")
    for name, n in (("a", result.only_a), ("b", result.only_b)):
        if n:
            print_line(f"  {n:,} rows are only in {name}")
    for line in (*result.keys, *result.parts):
        print_line(f"  {line}")
    if result.values:
        which = "slots of a" if result.by == "sequence" else "rows, the oldest is 0"
        print_table(("key", "rows differ", which), [(v.key, f"{v.rows:,}", v.which) for v in result.values])
    for note in result.notes:
        print_line(f"  {note}", style="dim")


def show_conversion(result: Conversion) -> None:
    """Prints what `convert` returned."""
    print_line((result.target, "bold"), f": {result.kind}")
    print_line(f"  {result.rows:,} rows, {human_bytes(result.nbytes)}")
    if result.dropped:
        print_line(f"  without {', '.join(result.dropped)}")
    for note in result.notes:
        print_line(f"  {note}", style="dim")


def show_rows(result: RowsShown) -> None:
    """Prints what `head` or `sample` returned."""
    if len(result.slots):
        print_table(*result.cells())
    else:
        print_line("no rows are stored")
