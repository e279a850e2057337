"""Saves of whole buffers that are killed: the next load finds exactly the old state or the new one.

The kills fall before every system call that touches the checkpoint, whoever makes it (Python, the native core, HDF5,
any thread), and in the middle of every write.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from crash import buffers, tracer
from crash.buffers import KINDS, STYLES
from crash.saves import Watched

quick = pytest.mark.quick

#: One style each is enough for the suite; `make test-long` has them all, at every call.
ONE_STYLE = [
    pytest.param("tensor", "incremental", marks=quick), ("best", "full"), ("flat", "background"),
    pytest.param("nested", "full", marks=quick), ("h5", "background"), ("list", "incremental"),
    ("ensemble", "background"),
]  # fmt: skip
ALL = [(kind, style) for kind in KINDS for style in STYLES]


def kill_at(watched: Watched, path: Path, calls: range, what: int, kinds: int = tracer.CALLS) -> Counter[str]:
    """Kills a save at each of these calls; how often the old and the new state were found."""
    outcomes: Counter[str] = Counter()
    for at in calls:
        traced, found = watched.killed(path, what, at, kinds)
        assert traced.killed or not traced.done
        outcomes[found if traced.killed else "finished"] += 1
    return outcomes


@pytest.mark.parametrize(("kind", "style"), ONE_STYLE)
def test_a_killed_save_leaves_the_old_state_or_the_new_and_the_next_one_cleans_up(ram_path, kind, style):
    watched = Watched.make(kind, style, ram_path)
    step = watched.calls // 3
    outcomes = kill_at(watched, ram_path / "p", range(1 + len(kind), watched.calls, step), tracer.KILL)
    outcomes += kill_at(watched, ram_path / "p", range(watched.calls - 4, watched.calls - 3), tracer.KILL_AFTER)
    assert outcomes["old"] and outcomes["new"]


@quick
def test_saves_that_are_all_killed_do_not_fill_the_disk(ram_path):
    watched = Watched.make("tensor", "full", ram_path)
    path = buffers.fresh(ram_path / "p")

    def work() -> None:
        rb = buffers.MAKERS["tensor"]()
        buffers.grow(rb, buffers.OLD)
        tracer.start()
        rb.dumps(path)

    for k in range(5):
        assert tracer.run(work, path, tracer.KILL, watched.calls // 2 - k).killed
        assert len([name for name in buffers.own_names(path) if name.startswith("g-")]) <= 2
    tracer.run(work, path)
    assert len(buffers.own_names(path)) == 3
    buffers.check_foreign(path)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "style"), ALL)
def test_killed_at_every_system_call_a_save_leaves_the_old_state_or_the_new(ram_path, kind, style):
    watched = Watched.make(kind, style, ram_path)
    step = 1 + watched.calls // 400  # lists are written in a thousand pieces
    outcomes = kill_at(watched, ram_path / "p", range(1, watched.calls + 3, step), tracer.KILL)
    print(f"{kind}, {style}: killed at each {step}. of {watched.calls} calls: {dict(outcomes)}")
    assert outcomes["old"] > 40 // step and outcomes["new"] and (outcomes["finished"] or step > 1)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "style"), ALL)
def test_killed_in_the_middle_of_every_write_a_save_leaves_the_old_state(ram_path, kind, style):
    watched = Watched.make(kind, style, ram_path, tracer.WRITE)
    step = 1 + watched.calls // 50
    calls = range(1, watched.calls + 1, step)
    outcomes = kill_at(watched, ram_path / "p", calls, tracer.SHORTEN_AND_KILL, tracer.WRITE)
    print(f"{kind}, {style}: killed inside each {step}. of {watched.calls} writes: {dict(outcomes)}")
    assert outcomes["new"] == 0
