"""Whole training programs (`benchmarks/programs`): a loop by hand, engram and others, CPU time a frame in turns."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.cases import BY_HAND, Result, missing
from benchmarks.cases import Row as Line
from benchmarks.cases import result as empty_result
from benchmarks.programs import dqn, pixel_dqn, ppo, random_actions, sac
from benchmarks.programs.turns import Measured, Row, measure

ROWS = [*dqn.ROWS, *sac.ROWS, *ppo.ROWS, *pixel_dqn.ROWS, *ppo.COLLECTION_ROWS, *random_actions.ROWS]
ROUNDS = 9


def results(*, quick: bool) -> list[Result]:
    """A row for each program."""
    return [_result(row, measure(row, rounds=1 if quick else ROUNDS, quick=quick)) for row in ROWS]


def _result(row: Row, measured: Measured) -> Result:
    target = {} if row.most is None else {BY_HAND: row.most}
    made = empty_result(Line(row.key, row.title, {}, target=target))
    made["contenders"] = {name: _figure(name, measured) for name in row.forms}
    return made


def _figure(name: str, measured: Measured) -> dict[str, Any]:
    if name in measured.missing:
        return missing(measured.missing[name])
    rounds = measured.seconds[name]
    return {"median": statistics.median(rounds), "rounds": rounds, "shares": measured.shares[name]}
