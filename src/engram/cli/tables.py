"""Results as tables on a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engram.cli.description import Info, Summary
from engram.cli.terminal import print_line, print_rows, print_table
from engram.kernel.tools import human_bytes

if TYPE_CHECKING:
    from engram.cli.activity import Activity, WriterActivity
    from engram.cli.cells import Cells
    from engram.cli.conversion import Conversion
    from engram.cli.differences import Differences
    from engram.cli.verification import Verification
    from engram.kernel.disk import LearnerStats

_COMMAND = 40  # letters of a process's command line

HELD = {True: "a process", False: "nobody", None: "-"}
WRITER_HEAD = ("process", "rows", "share", "steps written", "newest at")


def _rows_and_room(one: Info) -> tuple[str, str]:
    rows, room = ("?" if n is None else f"{n:,}" for n in (one.rows, one.capacity))
    return rows, room


def show_info(result: Info) -> None:
    """Prints what `info` returned."""
    print_line((result.path, "bold"), f": {result.kind}")
    for name, value in facts(result):
        print_line(f"  {name:<10} {value}")
    if result.below:
        found = [
            (os.path.relpath(x.path, result.path), x.kind, *_rows_and_room(x), human_bytes(x.file_bytes or 0),
             "in use" if x.in_use else "", *x.notes[:1])
            for x in result.below
        ]  # fmt: skip
        print_table(("path", "kind", "rows", "room", "on disk", "", ""), [(*row, "")[:7] for row in found])
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
    if result.removed:
        yield "removed", f"{result.removed:,} of these, which are not drawn"
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


def show_rows(cells: Cells) -> None:
    """Prints rows that `head` or `sample` returned."""
    head, rows = cells
    if rows:
        print_rows(head, rows)
    else:
        print_line("no rows are stored")


def activity_lines(stores: Sequence[Activity]) -> list[str]:
    """What `top` saw of each store, as lines of a terminal."""
    lines = []
    for now in stores:
        lines += [*_lines_of(now), ""]
    return lines[:-1]


def _lines_of(now: Activity) -> Iterator[str]:
    yield now.path
    if now.problem is not None:
        yield f"  {now.problem}"
        return
    share = f" of {now.capacity:,} ({now.rows / now.capacity:.0%})" if now.capacity else ""
    use = "in use" if now.in_use else "nobody has it open"
    yield f"  rows       {now.rows:,}{share}, {now.written:,} written; {use}"
    if now.removed:
        yield f"  removed    {now.removed:,} of these, which are not drawn"
    if now.rate is not None:
        yield f"  ratio      {now.rate}"
    if now.queue is not None:
        yield f"  queue      {now.queue}"
    yield f"  rates      {_rate(now.rate_in)} in, {_rate(now.rate_out)} overwritten"
    for writer in now.writers:
        yield f"  writer     {_writer(writer)}"
    if now.episodes is not None:
        ended = f"{now.episodes:,} ended while watched"
        seen = f"; the last: returns {_in_words(now.returns)}" if now.returns is not None else ""
        lengths = f"; lengths {_in_words(now.lengths)}" if now.lengths is not None else ""
        yield f"  episodes   {ended}{seen}{lengths}"
    for learner in now.learners:
        for name, line in zip(("learner", ""), _learner(learner), strict=False):
            yield f"  {name:<10} {line}"
    if not now.learners:
        yield "  learner    not published: ReplayBuffer(..., publish_stats=True) says what it draws"


def _writer(writer: WriterActivity) -> str:
    lanes = f"lane{'s' if len(writer.lanes) > 1 else ''} {_ranges(writer.lanes)}"
    who = "not known" if writer.pid is None else f"process {writer.pid}"
    if writer.holds:
        held = f"holds {lanes}{_command_of(writer.pid)}"
    elif writer.lanes:
        held = f"wrote {lanes}, is not there now"
    else:
        held = "has written, and others since in its lanes"
    return f"{who} {held}: {writer.rows:,} rows, {_rate(writer.rate)}"


def _learner(learner: LearnerStats) -> Iterator[str]:
    draws = [f"process {learner.pid}, {learner.sampler}"]
    if learner.rate is not None:
        draws.append(f"{_rate(learner.rate)} drawn")
    if learner.ratio is not None:
        draws.append(f"{learner.ratio:.3g} for each step written")
    yield "; ".join(draws)
    if learner.ages is not None and learner.effective is not None and learner.rows:
        young, middle, old = (f"{learner.ages[k]:,.0f}" for k in (1, 5, 9))
        share = f"{learner.effective:,.0f} rows ({learner.effective / learner.rows:.0%})"
        yield f"age {young} / {middle} / {old} steps (10, 50, 90 %); effective {share}"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}/s"


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers that rise, in few words: 0-3, 7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _command_of(pid: int | None) -> str:
    """The command line of a process of this machine, in brackets; nothing where it cannot be read."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    command = b" ".join(words).decode(errors="replace").strip()
    return f" ({command[:_COMMAND]})" if command else ""
