"""What a run looks like: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from support.ledger import Check

_WINDOW = 10  # messages over which steps/s are taken


class Screen:
    """Shows a run as it goes."""

    def __init__(self, solved_at: float) -> None:
        self._console = Console(highlight=False)
        self._solved_at = solved_at
        self._returns: deque[float] = deque(maxlen=20)
        self._live: Live | None = None

    def headline(self, text: str) -> None:
        self._console.print(f"\n[bold]{text}[/]", soft_wrap=True)

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def failure(self, text: str) -> None:
        self._console.print(f"[bold red]FAILED[/]: {text}", soft_wrap=True)

    # ---- while a process trains ----
    @contextmanager
    def live(self) -> Iterator[None]:
        """Shows progress in between; without a terminal there is a line for each evaluation only."""
        self._clock: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self._line = Text("starting a process ...", style="dim")
        if not self._console.is_terminal:
            yield
            return
        with Live(self._line, console=self._console, refresh_per_second=8, transient=True) as self._live:
            yield
        self._live = None

    def show(self, what: str, facts: dict[str, Any]) -> None:
        """One message of the training process."""
        if what == "progress":
            self._progress(**facts)
        elif what == "evaluation":
            score = facts["score"]
            style = "green" if score >= self._solved_at else ""
            self._console.print(Text.assemble(self._line, (f"  greedy {score:.1f}", style)), soft_wrap=True)
        elif what == "resumed":
            self.say(f"made up for {facts['updates']:,} updates that had been lost")

    def _progress(self, frames: int, updates: int, episodes: list[float], fill: float, sample_us: float | None) -> None:
        self._returns.extend(episodes)
        self._clock.append((time.perf_counter(), frames))
        (then, frames_then), (now, _) = self._clock[0], self._clock[-1]
        speed = f"{(frames - frames_then) / (now - then):,.0f}" if now > then else "-"
        mean = f"{sum(self._returns) / len(self._returns):.0f}" if self._returns else "-"
        batch = "-" if sample_us is None else f"{sample_us:.0f}"
        self._line = Text(
            f"frame {frames:>6,}  {speed:>5} steps/s  return {mean:>3}  buffer {fill:>4.0%}  batch {batch:>3} us"
        )
        if self._live is not None:
            self._live.update(self._line)

    # ---- tables ----
    def checks(self, checks: list[Check]) -> None:
        """What was logged beside what was found."""
        table = Table(
            "", "logged by the writer", "found in the file", "", box=None, header_style="dim", padding=(0, 2, 0, 0)
        )
        for check in checks:
            table.add_row(check.what, check.logged, check.found, _verdict(check.holds))
        self._console.print(table)

    def summary(self, facts: dict[str, Any]) -> None:
        """Names and values; a bool is a verdict."""
        table = _table()
        for name, value in facts.items():
            table.add_row(name, _verdict(value) if isinstance(value, bool) else str(value))
        self._console.print(table)


def _table(*headers: str) -> Table:
    return Table(*headers, show_header=bool(headers), box=None, header_style="dim", padding=(0, 3, 0, 3))


def _verdict(holds: bool) -> str:
    return "[green]yes[/]" if holds else "[bold red]NO[/]"
