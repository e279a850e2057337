"""Every row is there, and no slice joins two writers' rows, however many have written to one store after each other."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from contracts.children import fork
from contracts.gym_worlds import Countdown
from contracts.programs import run_program
from crash import tracer
from engram.collectors import MultiaSyncDataCollector
from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, SliceSampler
from engram.envs import GymEnv
from engram.store.episodes import EpisodeIndex

quick = pytest.mark.quick

ROWS = 10  # of each run
ROOM = 100_000
RUNS = pytest.mark.parametrize("runs", [pytest.param(120, marks=quick), pytest.param(1000, marks=pytest.mark.long)])
FORKS = pytest.mark.parametrize("runs", [8, pytest.param(1000, marks=pytest.mark.long)])


def going_on(start: int, stop: int) -> TensorDict:
    """Steps of one endless trajectory: neither their flags nor their values tell where a run begins."""
    n = torch.arange(start, stop)
    return TensorDict({"n": n, "next": {"n": n + 1, "done": torch.zeros(len(n), 1, dtype=torch.bool)}}, [len(n)])


def forked(work: Callable[[], None], killed: bool = False) -> None:
    """Runs `work` in a child, which ends at once, or is killed, when it has returned."""
    pid = fork(lambda: [work(), os.kill(os.getpid(), signal.SIGKILL) if killed else None])
    assert os.waitpid(pid, 0)[1] == (signal.SIGKILL if killed else 0)


def check(rb: ReplayBuffer, lengths: list[int], rows: list[int] | None = None) -> None:
    """Fails unless all rows are there, in trajectories of these lengths, and no slice joins two of them."""
    wanted = list(range(sum(lengths))) if rows is None else rows
    assert len(rb) == sum(lengths) and rb[:]["n"].tolist() == wanted
    assert EpisodeIndex().trajectories(rb.storage).length.tolist() == lengths
    rb.set_sampler(SliceSampler(slice_len=4))
    ends = torch.tensor(lengths).cumsum(0)
    slots = torch.searchsorted(torch.tensor(wanted), rb.sample(4000)["n"].reshape(-1, 4))
    runs = torch.searchsorted(ends, slots, right=True)
    assert (runs == runs[:, :1]).all() and (slots.diff(dim=1) == 1).all()


@FORKS
@pytest.mark.parametrize("kind", ["clean", "killed", pytest.param("both", marks=quick)])
def test_runs_that_open_a_store_extend_and_end(tmp_path: Path, runs: int, kind: str) -> None:
    for run in range(runs):
        killed = kind == "killed" or (kind == "both" and run % 3 == 1)

        def work(run: int = run, killed: bool = killed) -> None:
            rb = ReplayBuffer(storage=LazyMemmapStorage(ROOM, scratch_dir=tmp_path, existsok=True))
            assert len(rb) == run * ROWS
            rb.extend(going_on(run * ROWS, (run + 1) * ROWS))
            if not killed:
                rb.storage.close()

        forked(work, killed)
    check(ReplayBuffer.open(tmp_path), [ROWS] * runs)


@quick
def test_an_open_after_many_runs_makes_the_calls_of_one_after_the_first(tmp_path: Path) -> None:
    def extend_and_close(run: int) -> None:
        rb = ReplayBuffer(storage=LazyMemmapStorage(ROOM, scratch_dir=tmp_path, existsok=True))
        rb.extend(going_on(run * ROWS, (run + 1) * ROWS))
        rb.storage.close()

    def calls(below: str | Path) -> list[str]:
        made: list[str] = []

        def work() -> int:
            tracer.start()
            rb = ReplayBuffer.open(tmp_path)
            tracer.stop()
            return len(rb)

        kinds = tracer.CALLS | tracer.STAT
        done = tracer.run(work, below, kinds=kinds, listen=lambda name, path, *_: made.append(f"{name} {path}"))
        assert done.result % ROWS == 0
        return made

    extend_and_close(0)
    first = calls(tmp_path)
    assert any("open" in call for call in first)
    for run in range(1, 120):
        extend_and_close(run)
    assert calls(tmp_path) == first
    assert calls("/proc/sys") == [], "of a store that was closed nobody asks whether the machine is still the same"


@pytest.mark.long
@pytest.mark.parametrize("last", ["rb.storage.close()", "os.kill(os.getpid(), 9)", "pass"])
def test_programs_of_their_own(tmp_path: Path, last: str) -> None:
    code = (
        "import os, sys, torch\n"
        "from tensordict import TensorDict\n"
        "from engram.data import LazyMemmapStorage, ReplayBuffer\n"
        f"rb = ReplayBuffer(storage=LazyMemmapStorage({ROOM}, scratch_dir=sys.argv[1], existsok=True))\n"
        f"n = torch.arange({ROWS}) + len(rb)\n"
        "done = torch.zeros(len(n), 1, dtype=torch.bool)\n"
        "rb.extend(TensorDict({'n': n, 'next': {'n': n + 1, 'done': done}}, [len(n)]))\n" + last
    )
    for _ in range(5):
        done = run_program(code, tmp_path)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
    check(ReplayBuffer.open(tmp_path), [ROWS] * 5)


STORES: dict[str, Callable[..., Any]] = {
    "mapped": lambda path, lanes=1: LazyMemmapStorage(lanes * ROOM, lanes=lanes),
    "named": lambda path, lanes=1: LazyMemmapStorage(lanes * ROOM, scratch_dir=path, lanes=lanes),
    "shared": lambda path, lanes=1: LazyTensorStorage(lanes * ROOM, shared=True, lanes=lanes),
}


@RUNS
@pytest.mark.parametrize("kind", STORES)
def test_a_release_after_each_write_cuts_nothing_where_nobody_else_writes(tmp_path: Path, kind: str, runs: int) -> None:
    rb = ReplayBuffer(storage=STORES[kind](tmp_path))
    for run in range(runs):
        rb.extend(going_on(run * ROWS, (run + 1) * ROWS))
        rb.storage.release()
    check(rb, [ROWS * runs])


@RUNS
def test_two_openings_that_take_turns_and_release_after_each_write(tmp_path: Path, runs: int) -> None:
    both = [ReplayBuffer(storage=LazyMemmapStorage(ROOM, scratch_dir=tmp_path, existsok=True)) for _ in range(2)]
    for run in range(runs):
        both[run % 2].extend(going_on(run * ROWS, (run + 1) * ROWS))
        both[run % 2].storage.release()
    for rb in both:
        check(rb, [ROWS] * runs)


@FORKS
@pytest.mark.parametrize("kind", ["mapped", pytest.param("named", marks=quick), "shared"])
def test_short_forked_workers(tmp_path: Path, kind: str, runs: int) -> None:
    rb = ReplayBuffer(storage=STORES[kind](tmp_path, lanes=2))
    rb.extend(going_on(0, ROWS))
    for run in range(1, runs + 1):
        forked(lambda run=run: rb.extend(going_on(run * ROWS, (run + 1) * ROWS)), killed=run % 5 == 0)  # type: ignore[misc]
    rb.extend(going_on((runs + 1) * ROWS, (runs + 2) * ROWS))  # its own lane: it goes on, but its values do not
    mine = [*range(ROWS), *range((runs + 1) * ROWS, (runs + 2) * ROWS)]
    assert rb[:]["n"].tolist() == [*mine, *range(ROWS, (runs + 1) * ROWS)]
    lengths = EpisodeIndex().trajectories(rb.storage).length.tolist()
    assert lengths == [ROWS] * (runs + 2)


def endless() -> GymEnv:
    return GymEnv(Countdown((1000,)))


@pytest.mark.parametrize("runs", [3, pytest.param(1000, marks=pytest.mark.long)])
def test_asynchronous_collectors_one_after_the_other(runs: int) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(ROOM), sampler=SliceSampler(slice_len=4), batch_size=4000)
    there = 0
    for _ in range(runs):
        with MultiaSyncDataCollector([endless], frames_per_batch=4, replay_buffer=rb) as collector:
            for _ in range(2):
                collector.rollout()
        assert len(rb) >= there + 8
        there = len(rb)
    lengths = EpisodeIndex().trajectories(rb.storage).length.tolist()
    assert len(lengths) == runs and sum(lengths) == len(rb) == rb.write_count
    # Each run's environment counts down from 1000.
    wanted = torch.cat([1000 - torch.arange(length) for length in lengths])
    assert torch.equal(rb[:]["observation"][:, 0], wanted.float())
    rows = rb.sample().reshape(-1, 4)
    assert torch.equal(rows["next", "observation"][:, :-1], rows["observation"][:, 1:])
