"""Processes that make the same store at the same moment, and processes that die while they make one."""

from __future__ import annotations

import multiprocessing as mp
import os

import pytest
import torch

from contracts.children import Child, Signal
from contracts.kills import killed_at, lines_of
from contracts.tiers import in_ci
from engram.data import LazyMemmapStorage, ReplayBuffer
from engram.errors import StorageError
from engram.store.files import FILE_NAME, remove_leftovers
from engram.testing import numbers, steps


def make_and_write(folder, who, lanes, existsok, layout=0):
    """Makes the store, or joins the one that another made; what came of it."""
    rows = steps(1000 * who, 1000 * who + 20)
    if layout:
        rows["other"] = torch.zeros(20, layout)
    try:
        storage = LazyMemmapStorage(lanes * 100, scratch_dir=folder, lanes=lanes, existsok=existsok)
        rb = ReplayBuffer(storage=storage)
        index = rb.extend(rows)
        said = "wrote", index.tolist(), storage.lanes.store.store_id.hex()
        storage.close()
        return said
    except StorageError as error:
        return "error", type(error).__name__, str(error)


def race_for_ever(barrier, jobs, results):
    """A process of a race: whatever it is told, at the moment at which all are ready."""
    while (job := jobs.get()) is not None:
        barrier.wait(300)
        results.put((job[1], make_and_write(*job)))


class Racers:
    """Processes that wait for the same moment."""

    def __init__(self, method, n):
        context = mp.get_context(method)
        self.barrier, self.results = context.Barrier(n), context.Queue()
        self.jobs = [context.Queue() for _ in range(n)]
        work = [(self.barrier, jobs, self.results) for jobs in self.jobs]
        self.processes = [context.Process(target=race_for_ever, args=args, daemon=True) for args in work]
        for process in self.processes:
            process.start()

    def race(self, folder, lanes, existsok=False, layouts=(0, 0, 0)):
        for who, jobs in enumerate(self.jobs):
            jobs.put((str(folder), who, lanes, existsok, layouts[who]))
        said = dict(self.results.get(timeout=300) for _ in self.jobs)
        return [said[who] for who in range(len(self.jobs))]

    def end(self):
        for jobs in self.jobs:
            jobs.put(None)
        for process in self.processes:
            process.join(300)
            assert process.exitcode == 0


def check_race(folder, said):
    """There is one store, whoever wrote wrote to it, and whoever did not was told why."""
    wrote = [who for who, one in enumerate(said) if one[0] == "wrote"]
    assert wrote, said
    assert len({said[who][2] for who in wrote}) == 1, "two stores were made"
    for one in said:
        if one[0] == "error":
            assert one[1] == "NoFreeLaneError" or "holds a store already" in one[2] or "a different store" in one[2], (
                one
            )
    assert [f.name for f in folder.iterdir()] == [FILE_NAME]
    found = sorted(numbers(ReplayBuffer.open(folder)[:]))
    assert found == [n for who in wrote for n in range(1000 * who, 1000 * who + 20)]
    return wrote


@pytest.fixture(scope="module", params=in_ci(["fork", "spawn"], ["fork"]))
def racers(request):
    made = Racers(request.param, 3)
    yield made
    made.end()


def races(racers, tmp_path, times):
    joined = refused = 0
    for k in range(times):
        folder = tmp_path / "a" / "b" / str(k)
        said = racers.race(folder, lanes=3 if k % 3 else 2, existsok=bool(k % 2))
        wrote = check_race(folder, said)
        joined, refused = joined + (len(wrote) > 1), refused + (len(wrote) < 3)
    return joined, refused


def test_processes_that_make_a_store_at_once_agree_on_one(racers, tmp_path):
    joined, _ = races(racers, tmp_path, 16)
    assert joined > 3, "they were never at it at the same time"


@pytest.mark.long
def test_hundreds_of_races_for_a_store_make_one_each_time(racers, tmp_path):
    joined, _ = races(racers, tmp_path, 500)
    assert joined > 100


def test_of_processes_that_make_different_stores_at_once_one_wins_and_the_others_are_told(racers, tmp_path):
    for k in range(8):
        said = racers.race(tmp_path / str(k), lanes=3, layouts=(0, 2, 3))
        assert len(check_race_of_layouts(tmp_path / str(k), said)) == 1


def check_race_of_layouts(folder, said):
    wrote = [one for one in said if one[0] == "wrote"]
    for one in said:
        if one[0] == "error":
            assert "holds a store already" in one[2] or ("a different store in" in one[2] and "'other'" in one[2]), one
    assert [f.name for f in folder.iterdir()] == [FILE_NAME]
    assert len(ReplayBuffer.open(folder)) == 20 * len(wrote)
    return wrote


def make(folder):
    rb = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=folder, lanes=2))
    rb.extend(steps(0, 10))
    rb.storage.close()


def check_recovered(folder):
    """Whatever a killed maker left: the next one makes or opens the store, and nothing else lies there."""
    if (folder / FILE_NAME).exists():
        rb = ReplayBuffer.open(folder)
        before = numbers(rb[:]) if len(rb) else []
        assert before in ([], [*range(10)])
    else:
        rb, before = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=folder, lanes=2)), []
    rb.extend(steps(50, 60))
    assert sorted(numbers(rb[:])) == [*before, *range(50, 60)]
    rb.storage.close()
    assert [f.name for f in folder.iterdir()] == [FILE_NAME]


def makers_killed(tmp_path, every):
    make(tmp_path / "warm")
    for line in range(0, lines_of(lambda: make(tmp_path / "counted")), every):
        folder = tmp_path / f"k{line}"
        killed_at(line, lambda folder=folder: make(folder))
        check_recovered(folder)


@pytest.fixture(params=[True, False], ids=["nameless", "temporary name"])
def nameless(request, monkeypatch):
    if not request.param:  # as on file systems without nameless files
        monkeypatch.delattr(os, "O_TMPFILE")


def test_a_maker_that_dies_at_some_line_leaves_what_the_next_one_goes_on_with(tmp_path, nameless):
    makers_killed(tmp_path, 97)


@pytest.mark.long
def test_a_maker_that_dies_at_any_line_leaves_what_the_next_one_goes_on_with(tmp_path, nameless):
    makers_killed(tmp_path, 1)


def test_what_is_being_made_is_not_taken_for_a_leftover(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_TMPFILE")
    inside, go = Signal(), Signal()

    def work():
        monkeypatch.setattr(os, "fsync", lambda fd: (inside.send(), go.wait()))
        make(tmp_path)

    child = Child(work)
    inside.wait()
    remove_leftovers(tmp_path)
    assert len([*tmp_path.iterdir()]) == 1
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    go.send()
    for _ in range(9):
        go.send()
    child.result()
    assert [f.name for f in tmp_path.iterdir()] == [FILE_NAME]
