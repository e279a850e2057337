"""A process with a mapped store is killed at any event of its life; the store's next user finds every row.

Events: each system call on the store's files, and (x86-64) each store to the counters that say which rows exist.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from crash import stores, tracer
from engram.data import ReplayBuffer
from engram.errors import EngramError

pytestmark = pytest.mark.quick

EVENTS = tracer.CALLS | tracer.STORE
FAILING = tracer.OPEN | tracer.WRITE | tracer.SIZE | tracer.SYNC | tracer.NAME | tracer.MAP


@pytest.fixture
def root(ram_path: Path) -> Path:
    stores.prepare(ram_path)
    return ram_path


def kill_at(root: Path, at: int) -> tracer.Traced:
    stores.fresh(root)
    traced = tracer.run(lambda: stores.live(root), root / "store", tracer.KILL, at, kinds=EVENTS)
    assert traced.killed or not traced.done
    return traced


def count_events(root: Path) -> int:
    stores.fresh(root)
    counted = tracer.run(lambda: stores.live(root), root / "store", kinds=EVENTS).counted
    assert counted > (100 if tracer.can_watch() else 50)
    return counted


def kills(root: Path, step: int) -> Counter[str]:
    names = [s.name for s in stores.story(root)]
    outcomes: Counter[str] = Counter()
    for at in range(1, count_events(root) + 1, step):
        traced = kill_at(root, at)
        stores.check(root, traced.mark)
        outcomes[names[traced.mark] if traced.mark < len(names) else "end"] += 1
    return outcomes


def test_killed_at_an_event_no_row_of_an_extend_that_returned_is_missing_and_none_is_torn(root):
    outcomes = kills(root, 9)
    assert sum(outcomes.values()) > 5 and len(outcomes) > 4


@pytest.mark.long
def test_killed_at_every_event(root):
    outcomes = kills(root, 1)
    print(f"{sum(outcomes.values())} kills: {dict(outcomes)}")


def kills_of_recoveries(root: Path, step: int, inner: int) -> tuple[int, int]:
    """Kills the life at each `step`-th event, and each opening after it at each `inner`-th event, then checks."""
    first = second = 0
    aside = root / "aside"
    for at in range(1, count_events(root) + 1, step):
        traced = kill_at(root, at)
        if not (root / "store" / "rows.engram").exists():
            continue
        first += 1
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(root / "store", aside)
        for other_boot in (False, True):
            inside = 1 + at % inner
            while True:
                stores.fresh(root)
                shutil.copytree(aside, root / "store")
                opening = stores.reopening(root, other_boot)
                again = tracer.run(opening, root / "store", tracer.KILL, inside, kinds=EVENTS)
                stores.check(root, traced.mark)
                if not again.killed:
                    break
                second, inside = second + 1, inside + inner
    return first, second


def test_killed_again_while_it_is_opened_it_is_opened_by_the_next(root):
    first, second = kills_of_recoveries(root, 61, 11)
    assert first > 1 and second > 2


@pytest.mark.long
def test_every_opening_is_killed_at_every_event(root):
    first, second = kills_of_recoveries(root, 7, 1)
    print(f"{first} kills, then {second} kills of the openings")


def failures(root: Path, step: int) -> Counter[str]:
    """Lets a call fail; the step that it belongs to is done again, and then the story goes on to its end."""
    outcomes: Counter[str] = Counter()
    codes = [errno.EIO, errno.ENOSPC, errno.EROFS]

    def life() -> list[str]:
        tracer.start()
        rb, said = None, []
        for step in stores.story(root):
            for _ in range(3):
                try:
                    if rb is None:
                        rb = stores.opened(root / "store")
                    step.act(rb)
                    break
                except (EngramError, OSError, RuntimeError) as error:
                    said.append(f"{step.name}: {error}")
                    if rb is not None and rb.storage.initialized and step.name not in ("close", "close and open"):
                        found = stores.rows_of(rb)
                        assert step.allows(found), (step.name, found)
            else:
                raise AssertionError(f"{step.name} never succeeded: {said}")
            if rb is not None and not rb.storage.initialized:
                rb = None
        # Others are those of earlier tests, which the child inherits.
        ours = str(root / "store")
        assert not any(os.readlink(f"/proc/self/fd/{fd}").startswith(ours) for fd in _descriptors()), "a file is open"
        return said

    stores.fresh(root)
    calls = tracer.run(life, root / "store", kinds=FAILING).counted
    for k, at in enumerate(range(1, calls + 1, step)):
        stores.fresh(root)
        code = codes[k % 3]
        traced = tracer.run(life, root / "store", tracer.FAIL, at, error=code, kinds=FAILING)
        assert traced.done
        rb = ReplayBuffer.open(root / "store")
        assert stores.rows_of(rb) == list(stores.story(root))[-1].after, f"call {at}, {traced.call}"
        rb.storage.close()
        assert sorted(p.name for p in (root / "store").iterdir()) == ["rows.engram"]
        outcomes[f"{traced.call}: {'error' if traced.result else 'no error'}"] += 1
    return outcomes


def _descriptors() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


@pytest.mark.deep
def test_a_call_that_fails_is_an_error_that_changes_nothing_and_can_be_tried_again(root):
    assert sum(failures(root, 4).values()) > 4


@pytest.mark.long
def test_every_call_that_fails_is_an_error_that_changes_nothing(root):
    print(dict(failures(root, 1)))
