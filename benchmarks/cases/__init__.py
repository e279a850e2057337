"""The cases. A row is one line of the table: what is measured, for whom, against which floor."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from benchmarks.libraries import Call
from benchmarks.timing import Pace, Samples, Turn, beside_busy_thread, in_turns, repeat

Make = Callable[[], Turn]
Result = dict[str, Any]
FLOOR = "floor"
ALONE, BESIDE = "alone", "beside"
BY_HAND = "by hand"
"""The contender of whole programs that is a loop with arrays, without a library."""


@dataclass
class Row:
    """One line of the table. `contenders` and `floor` build what they measure when they are called."""

    key: str
    title: str
    contenders: dict[str, Make]
    floor: Make | None = None
    target: dict[str, float] = field(default_factory=dict)
    """`us`: microseconds; `most`: at most this, in the row's unit; a library's name: how many times faster; `own`: at
    most this many times the row `own_of`; `beside`: at most this many times what it takes alone."""
    own_of: str | None = None
    beside: bool = False
    warm_up: int = 0
    """Calls before the first timed one: large memory is not all there at first, whatever the guest system says."""
    notes: list[str] = field(default_factory=list)


def calling(make: Callable[[], Call]) -> Make:
    """A contender out of a function that builds a buffer and returns the call to measure."""
    return lambda: repeat(make())


def result(row: Row, *, unit: str = "s", better: str = "lower") -> Result:
    """What a row leaves in the JSON file before anything is measured."""
    return {
        "key": row.key,
        "title": row.title,
        "unit": unit,
        "better": better,
        "target": row.target,
        "own_of": row.own_of,
        "notes": row.notes,
        "contenders": {},
    }


def missing(error: Exception | str) -> Result:
    """The figure of a contender that could not be measured."""
    reason = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return {"not_available": " ".join(reason.split())[:300]}


def measure(rows: list[Row], pace: Pace) -> list[Result]:
    """Build every contender of these rows, then measure all of them in turns, alone and beside a busy thread."""
    results = {row.key: result(row) for row in rows}
    turns: dict[tuple[str, str], Turn] = {}
    for row in rows:
        for name, make in {**row.contenders, **({FLOOR: row.floor} if row.floor else {})}.items():
            try:
                turns[row.key, name] = make()
            except Exception as error:
                results[row.key]["contenders"][name] = missing(error)
    gc.collect()
    gc.freeze()  # the buffers' objects stay: looking through them before every turn would take seconds
    try:
        _warm_up(rows, turns)
        crowded = {row.key for row in rows if row.beside}
        all_turns = {}
        for (key, name), turn in turns.items():  # each beside-turn right after its turn alone: the ratio is what counts
            all_turns[key, name, ALONE] = turn
            if key in crowded and not name.startswith(FLOOR):
                all_turns[key, name, BESIDE] = beside_busy_thread(turn)
        lengths = {at: pace.turn_s if at[2] == ALONE else pace.beside_s for at in all_turns}
        for (key, name, how), samples in in_turns(all_turns, lengths, pace.rounds).items():
            figures = results[key]["contenders"]
            if how == ALONE:
                figures[name] = _figure(samples)
            else:
                figures[name][BESIDE] = _figure(samples)
    finally:
        gc.unfreeze()
    return list(results.values())


def _warm_up(rows: list[Row], turns: dict[tuple[str, str], Turn]) -> None:
    calls = {row.key: row.warm_up for row in rows}
    for (key, _), turn in turns.items():
        if calls[key]:
            with suppress(Exception):  # the rounds meet the same error, and report it
                turn(calls[key])


def _figure(samples: Samples | Exception) -> Result:
    if isinstance(samples, Exception):
        return missing(samples)
    return {"median": samples.median, "rounds": samples.rounds, "reference": samples.reference}
