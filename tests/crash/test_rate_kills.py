"""Users of a rate limiter are killed: draws stay below its bound, and nobody stands when others take their places."""

from __future__ import annotations

import functools
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from contracts.children import fork
from contracts.waiting import comes
from engram.data import LazyMemmapStorage, ReplayBuffer, SampleToInsertRatio

RATIO, LEAST, AHEAD, BEHIND, BATCH, WRITTEN = 3.7, 20, 40, 60, 16, 5
ACTORS, LEARNERS = 2, 2
KILLS = pytest.mark.parametrize(
    ("kills", "lanes"),
    [pytest.param(30, None, marks=pytest.mark.quick), (100, 3), pytest.param(1000, 3, marks=pytest.mark.long)],
)


def opened(folder: Path, lanes: int | None) -> ReplayBuffer:
    storage = LazyMemmapStorage(200, scratch_dir=folder, shared_init=True, existsok=True, lanes=lanes)
    limiter = SampleToInsertRatio(RATIO, LEAST, ahead=AHEAD, behind=BEHIND)
    return ReplayBuffer(storage=storage, batch_size=BATCH, rate_limiter=limiter)


def act(folder: Path, lanes: int | None) -> None:
    rb = opened(folder, lanes)
    while True:
        rb.extend(torch.arange(WRITTEN))


def learn(folder: Path, lanes: int | None) -> None:
    rb = opened(folder, lanes)
    while True:
        rb.sample(wait=True)


class Jobs:
    """Actors and learners in children, some of which are killed and replaced."""

    def __init__(self, folder: Path, lanes: int | None) -> None:
        works = [*[act] * ACTORS, *[learn] * LEARNERS]
        self._works: list[Callable[[], None]] = [functools.partial(work, folder, lanes) for work in works]
        self.pids = [fork(work) for work in self._works]

    def replace(self, which: list[int]) -> None:
        self.kill(which)
        for i in which:
            self.pids[i] = fork(self._works[i])

    def kill(self, which: list[int]) -> None:
        for i in which:
            os.kill(self.pids[i], signal.SIGKILL)
        for i in which:
            assert os.waitpid(self.pids[i], 0)[1] == signal.SIGKILL, "it ended by itself"


@pytest.fixture
def jobs(tmp_path: Path, lanes: int | None) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path, lanes)
    yield jobs
    jobs.kill(list(range(len(jobs.pids))))


@KILLS
def test_killed_learners_and_actors_leave_the_bound_kept_and_nobody_standing(
    tmp_path: Path, jobs: Jobs, kills: int, lanes: int | None
) -> None:
    rb, rng = opened(tmp_path, lanes), random.Random(kills)

    def counts() -> tuple[int, int]:
        """Rows written and drawn, of which the first is looked at later: it only grows."""
        drawn = rb.storage.lanes.store.rate_counts[1]
        return rb.storage.lanes.store.rate_counts[0], drawn

    assert comes(lambda: rb.storage.initialized)
    done = 0
    while done < kills:
        written, drawn = counts()
        assert comes(lambda then=written: counts()[0] > then + BEHIND / RATIO), "who writes stands"
        assert comes(lambda then=drawn: counts()[1] > then + BATCH), "who samples stands"
        which = rng.choice([[0], [2], [0, 1], [2, 3], [0, 2], [0, 1, 2, 3]])
        jobs.replace(which)
        done += len(which)
        written, drawn = counts()
        assert drawn <= RATIO * max(0, written - LEAST) + AHEAD, "more was drawn than may be"
    # A kill between the count and the batch leaves draws counted, which those who write wait for less, not longer.
    written, drawn = counts()
    assert RATIO * (written - LEAST) - drawn <= BEHIND + RATIO * WRITTEN * ACTORS + RATIO * WRITTEN, "more was written"
