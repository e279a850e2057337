"""Users of a queue with `commit="manual"` are killed: each row is in the model once, as its checkpoint knows the place.

A model is the counts of the rows that it was trained with, a few megabytes, so that kills fall into the middle of its
save; its line is what each of its checkpoints goes on from.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from contracts.children import fork
from contracts.waiting import NEVER, comes
from crash import tracer
from engram.data import LazyMemmapStorage, QueueSampler, ReplayBuffer
from engram.store import positions

ACTORS, BATCH, WRITTEN, BATCHES = 2, 8, 5, 4  # actors, rows of a batch and of an extend, batches between two saves
LIVES, NUMBERS = 3 << 10, 1 << 10  # of actors, and rows that each life may write
CAPACITY = 96
TURN, SESSION = 10, 11  # words of `Flow`


class Model:
    """How often each row was trained, and where the consumer was when the model was saved."""

    def __init__(self, path: Path, in_order: bool) -> None:
        self._path, self._in_order = path, in_order
        self.position: dict[str, Any] | None = None
        self.counts = torch.zeros(LIVES, NUMBERS, dtype=torch.int8)
        if path.exists():
            saved = torch.load(path)
            self.counts, self.position = saved["counts"], saved["position"]

    def train(self, rows: Tensor) -> None:
        rows = rows.flatten()
        self.counts.view(-1).index_add_(0, rows, torch.ones(len(rows), dtype=torch.int8))
        assert int(self.counts.view(-1)[rows].max()) == 1, f"of the rows {rows.tolist()} one is trained twice"
        for life in (rows // NUMBERS).unique().tolist() if self._in_order else ():
            here = rows[rows // NUMBERS == life] % NUMBERS
            before = int(self.counts[life].sum()) - len(here)
            assert here.tolist() == list(range(before, before + len(here))), "a row of an actor is left out"

    def save(self, position: dict[str, Any], counts: Tensor | None = None) -> None:
        new = self._path.with_suffix(".new")
        torch.save({"counts": self.counts if counts is None else counts, "position": position}, new)
        os.replace(new, self._path)


class World:
    """What the processes of a test have in common: the folder, and words of shared memory, each written by one."""

    SAVES, SAVING, SEEKS = range(3)

    def __init__(self, folder: Path, lanes: int | None) -> None:
        self.folder, self.lanes = folder, lanes
        self.path = folder / "model.pt"
        self.lives = torch.zeros(ACTORS, dtype=torch.int64).share_memory_()  # that each actor has begun
        self.words = torch.zeros(3, dtype=torch.int64).share_memory_()  # of the learner
        self.generations = 0  # of ranks
        self.barriers = torch.zeros(4096, 2, dtype=torch.int64).share_memory_()
        self.parts = torch.zeros(2, LIVES, NUMBERS, dtype=torch.int8).share_memory_()

    def open(self) -> ReplayBuffer:
        storage = LazyMemmapStorage(
            CAPACITY, scratch_dir=self.folder / "store", shared_init=True, existsok=True, lanes=self.lanes
        )
        return ReplayBuffer(storage=storage, sampler=QueueSampler(commit="manual"), batch_size=BATCH)

    def model(self, in_order: bool | None = None) -> Model:
        return Model(self.path, self.lanes is None if in_order is None else in_order)

    def act(self, i: int) -> None:
        rb = self.open()
        while True:
            life, number = i + ACTORS * int(self.lives[i]), 0
            self.lives[i] += 1
            for number in range(0, NUMBERS - WRITTEN, WRITTEN):
                first = life * NUMBERS + number
                rb.extend(torch.arange(first, first + WRITTEN))

    def note_saving(self, saving: bool) -> None:
        self.words[self.SAVING] = saving
        self.words[self.SAVES] += not saving

    def finish(self) -> tuple[int, int]:
        """Trains what is left, when nobody else is there; checks all rows. How many there are, and how many saves."""
        rb, model = self.open(), self.model()
        assert rb.seek(model.position) == 0, "rows are gone that the model was not trained with"
        while waiting := rb.stats().waiting:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.train(rb.sample(min(waiting, BATCH)))
        counts = model.counts
        assert int(counts.max()) <= 1, "a row is trained twice"
        trained, written = int(counts.sum()), rb.write_count
        # What an actor has published is the beginning of what it wrote.
        assert bool((counts[:, 1:] <= counts[:, :-1]).all()), "a row of an actor was never trained"
        assert trained == written, f"{written - trained} rows were never trained"
        assert rb.stats().missed == 0
        rb.storage.close()
        return written, int(self.words[self.SAVES])


# ---- learners ----
def learn(world: World) -> None:
    rb, model = world.open(), world.model()
    assert rb.seek(model.position) == 0, "rows are gone that the model was not trained with"
    world.words[world.SEEKS] += 1
    while True:
        for _ in range(BATCHES):
            model.train(rb.sample(wait=True))
        world.note_saving(True)
        with rb.committing() as position:
            model.save(position)
        world.note_saving(False)


def saves_in_a_thread(world: World) -> None:
    rb, model = world.open(), world.model()
    assert rb.seek(model.position) == 0, "rows are gone that the model was not trained with"
    saving: threading.Thread | None = None
    while True:
        for _ in range(BATCHES // 2):
            model.train(rb.sample(wait=True))
        if saving is not None:
            saving.join()
        world.note_saving(True)
        position, counts = rb.position(), model.counts.clone()

        def save(position: dict[str, Any] = position, counts: Tensor = counts) -> None:
            model.save(position, counts)
            rb.commit(position)
            world.note_saving(False)

        saving = threading.Thread(target=save)
        saving.start()


def rank(world: World, rank: int, generation: int) -> None:
    """One of two processes that train one model, each with batches of its own."""

    def barrier() -> None:
        here = world.barriers[generation]
        here[rank] += 1
        assert comes(lambda: here[1 - rank] >= here[rank], 10 * NEVER)

    rb, model = world.open(), world.model(in_order=False)
    world.parts[rank].zero_()
    if rank == 0:
        assert rb.seek(model.position) == 0, "rows are gone that the model was not trained with"
        assert comes(lambda: rb.storage.initialized)
        rb.position()  # where there were no rows yet, the session begins now
    barrier()
    while True:
        for _ in range(BATCHES // 2):
            try:
                rows = rb.sample(wait=True)
            except RuntimeError as error:  # of a session whose owner was killed just now, as this one is going to be
                assert "is told first" in str(error)
                time.sleep(NEVER)
            world.parts[rank].view(-1).index_add_(0, rows, torch.ones(len(rows), dtype=torch.int8))
        barrier()
        if rank == 0:
            world.note_saving(True)
            with rb.committing() as position:
                counts = model.counts + world.parts.sum(0, dtype=torch.int8)
                assert int(counts.max()) == 1, "a row is trained twice"
                model.save(position, counts)
            world.note_saving(False)
        barrier()


# ---- learners that make a mistake ----
def commits_before_it_saves(world: World) -> None:
    rb, model = world.open(), world.model()
    assert rb.seek(model.position) == 0, "rows are gone that the model was not trained with"
    while True:
        for _ in range(BATCHES):
            model.train(rb.sample(wait=True))
        world.note_saving(True)
        position = rb.position()
        rb.commit(position)
        model.save(position)
        world.note_saving(False)


def does_not_seek(world: World) -> None:
    rb, model = world.open(), world.model()
    check = positions.Sessions.check
    positions.Sessions.check = lambda self, lanes, *, joins: check(self, lanes, joins=False)
    while True:
        for _ in range(BATCHES):
            model.train(rb.sample(wait=True))
        world.note_saving(True)
        with rb.committing() as position:
            model.save(position)
        world.note_saving(False)


def takes_a_batch_ahead(world: World) -> None:
    rb, model = world.open(), world.model()
    assert rb.seek(model.position) == 0, "rows are gone that the model was not trained with"
    ahead = rb.sample(wait=True)
    while True:
        for _ in range(BATCHES):
            batch, ahead = ahead, rb.sample(wait=True)
            model.train(batch)
        world.note_saving(True)
        with rb.committing() as position:
            model.save(position)
        world.note_saving(False)


MISTAKES = [commits_before_it_saves, does_not_seek, takes_a_batch_ahead]


# ---- kills ----
class Jobs:
    """Actors and learners in children, some of which are killed and replaced."""

    def __init__(self, world: World, learner: Callable[[World], None], ranks: bool = False) -> None:
        self.world, self._learner, self._ranks = world, learner, ranks
        self.learners = [ACTORS, ACTORS + 1] if ranks else [ACTORS]
        self.pids: dict[int, int] = {}
        self.in_saves = 0  # kills of a learner that was saving
        self.start([*range(ACTORS), *self.learners])

    def start(self, which: list[int]) -> None:
        world = self.world
        world.generations += any(i in self.learners for i in which)
        for i in which:
            if i < ACTORS:
                self.pids[i] = fork(lambda i=i: world.act(i))
            elif self._ranks:
                self.pids[i] = fork(lambda i=i, n=world.generations: rank(world, i - ACTORS, n))
            else:
                self.pids[i] = fork(lambda: self._learner(world))

    def kill(self, which: list[int]) -> None:
        self.in_saves += any(i in self.learners for i in which) and bool(self.world.words[World.SAVING])
        for i in which:
            os.kill(self.pids[i], signal.SIGKILL)
        for i in which:
            assert os.waitpid(self.pids.pop(i), 0)[1] == signal.SIGKILL, "it ended by itself"
        if any(i in self.learners for i in which):
            self.world.words[World.SAVING] = 0

    def saves_more(self) -> None:
        """Waits until the learner has saved once more."""
        words = self.world.words
        before = int(words[World.SAVES])

        def over() -> bool:
            for i in self.learners:
                assert os.waitpid(self.pids[i], os.WNOHANG) == (0, 0), "it ended by itself"
            return bool(words[World.SAVES] > before)

        assert comes(over), "who trains stands"

    def replace(self, which: list[int]) -> None:
        self.kill(which)
        self.start(which)

    def end(self) -> None:
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self.pids = {}


@pytest.fixture
def jobs() -> Iterator[list[Jobs]]:
    made: list[Jobs] = []
    yield made
    for one in made:
        one.end()


def kill_some(jobs: Jobs, kills: int) -> None:
    """Kills so many processes at random moments, each time with others in their places, and then all."""
    rng, done = random.Random(kills), 0
    actor, both = [0], [0, 1]
    while done < kills:
        if rng.random() < 0.75:
            jobs.saves_more()
        time.sleep(rng.uniform(0, 0.03))
        learners = jobs.learners
        which = rng.choice([actor, both, learners, learners, actor + learners, both + learners])
        if len(learners) > 1 and which == learners:  # one of them dies, and then whoever runs them ends the others
            first = rng.choice(learners)
            jobs.kill([first])
            time.sleep(rng.uniform(0, 0.01))
            jobs.kill([i for i in learners if i != first])
            jobs.start(learners)
        else:
            jobs.replace(which)
        done += len(which)
    jobs.saves_more()
    jobs.kill([0, 1])
    jobs.kill(jobs.learners)


def run(world: World, jobs: list[Jobs], learner: Callable[[World], None], kills: int, ranks: bool = False) -> None:
    jobs.append(Jobs(world, learner, ranks))
    kill_some(jobs[-1], kills)
    rows, saves = world.finish()
    lanes = world.lanes or 1
    print(
        f"{learner.__name__}, {lanes} lanes: {kills} kills, {jobs[-1].in_saves} in a save, {saves} saves, {rows} rows"
    )
    assert rows > kills


@pytest.mark.parametrize("lanes", [None, 3])
@pytest.mark.parametrize(
    "kills", [pytest.param(20, marks=pytest.mark.quick), 100, pytest.param(1000, marks=pytest.mark.long)]
)
def test_each_row_is_in_the_model_once_whoever_is_killed(
    tmp_path: Path, jobs: list[Jobs], kills: int, lanes: int | None
) -> None:
    run(World(tmp_path, lanes), jobs, learn, kills)


@pytest.mark.parametrize("lanes", [None, 3])
@pytest.mark.parametrize("kills", [50, pytest.param(200, marks=pytest.mark.long)])
def test_each_row_is_once_in_a_model_that_a_thread_saves(
    tmp_path: Path, jobs: list[Jobs], kills: int, lanes: int | None
) -> None:
    run(World(tmp_path, lanes), jobs, saves_in_a_thread, kills)


@pytest.mark.parametrize("lanes", [None, 3])
@pytest.mark.parametrize("kills", [50, pytest.param(200, marks=pytest.mark.long)])
def test_each_row_is_once_in_a_model_that_two_ranks_train(
    tmp_path: Path, jobs: list[Jobs], kills: int, lanes: int | None
) -> None:
    run(World(tmp_path, lanes), jobs, rank, kills, ranks=True)


@pytest.mark.mutant
@pytest.mark.parametrize("mistake", MISTAKES)
def test_rows_are_not_in_the_model_once_where_the_learner_makes_a_mistake(
    tmp_path: Path, jobs: list[Jobs], mistake: Callable[[World], None]
) -> None:
    with pytest.raises(AssertionError, match=r"rows are gone|trained twice|left out|never trained|ended by itself"):
        run(World(tmp_path, None), jobs, mistake, 300)


# ---- a learner that was stopped ----
class Outcome:
    """What becomes of a learner that goes on after another one has begun."""

    REFUSED = 42

    @staticmethod
    def of(pid: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def learn_until_refused(world: World) -> None:
    try:
        learn(world)
    except RuntimeError as error:
        assert "has called seek() on this queue since" in str(error)
        os._exit(Outcome.REFUSED)


def flow_at(memory: Any, word: int) -> int:
    """Where a word of `Flow` lies in the memory of a store."""
    return int.from_bytes(bytes(memory[248:256]), "little") + 8 * word


def lane_flow_at(memory: Any) -> int:
    """Where `LaneFlow` of the first lane lies."""
    lanes, seams_at, seams_bytes = (int.from_bytes(bytes(memory[at : at + 8]), "little") for at in (152, 192, 200))
    return seams_at + lanes * seams_bytes


def stop_and_replace(world: World, jobs: list[Jobs], rounds: int) -> None:
    jobs.append(Jobs(world, learn_until_refused))
    (one,) = jobs
    rng, (learner,) = random.Random(rounds), one.learners
    words = world.words

    one.saves_more()
    memory, done = world.open().storage.lanes.store.memory(), 0
    while done < rounds:
        one.saves_more()
        time.sleep(rng.uniform(0, 0.02))
        old = one.pids[learner]
        os.kill(old, signal.SIGSTOP)
        os.waitpid(old, os.WUNTRACED)
        # Where it was saving, its file would replace that of the next one; where it has the turn, that one would wait.
        if words[World.SAVING] or int.from_bytes(bytes(memory[flow_at(memory, TURN) :][:8]), "little"):
            os.kill(old, signal.SIGCONT)
            continue
        seeks = int(words[World.SEEKS])
        one.start([learner])
        assert comes(lambda then=seeks: words[World.SEEKS] > then), "the next one does not begin"
        if rng.random() < 0.5:
            one.saves_more()
        os.kill(old, signal.SIGCONT)
        assert Outcome.of(old) == Outcome.REFUSED, "a learner that was replaced goes on"
        done += 1
    one.saves_more()
    one.kill([0, 1])
    one.kill(one.learners)
    rows, _ = world.finish()
    print(f"{rounds} learners were stopped and replaced, {rows} rows")


@pytest.mark.parametrize("lanes", [None, 3])
@pytest.mark.parametrize(
    "rounds", [pytest.param(5, marks=pytest.mark.quick), pytest.param(100, marks=pytest.mark.long)]
)
def test_a_learner_that_was_stopped_and_replaced_is_told_and_no_row_is_gone(
    tmp_path: Path, jobs: list[Jobs], rounds: int, lanes: int | None
) -> None:
    stop_and_replace(World(tmp_path, lanes), jobs, rounds)


@pytest.mark.quick
@pytest.mark.skipif(not tracer.can_watch(), reason="stores are watched on x86-64 only")
def test_a_seek_that_is_killed_brings_no_row_back_to_the_learner_of_before(tmp_path: Path) -> None:
    world = World(tmp_path, None)
    rb = world.open()
    rb.seek(None)
    rb.extend(torch.arange(4 * BATCH))
    begin, store = rb.position(), rb.storage.lanes.store
    memory, refused, at = store.memory(), 0, 0
    cursors = lane_flow_at(memory)

    def goes_back() -> None:
        other = world.open()
        mapped = other.storage.lanes.store.memory().ctypes.data
        for slot, offset in enumerate((flow_at(memory, SESSION), cursors, cursors + 8)):
            tracer.watch(slot, mapped + offset)
        tracer.start()
        other.seek(begin)

    while True:
        rb.seek(begin)
        assert rb.sample().tolist() == list(range(BATCH))
        rb.commit(rb.position())
        at += 1
        killed = tracer.run(goes_back, tmp_path, tracer.KILL, at, kinds=tracer.STORE).killed
        try:
            assert rb.sample().tolist() == list(range(BATCH, 2 * BATCH)), "a row comes again in one session"
        except RuntimeError as error:
            assert "has called seek() on this queue since" in str(error)
            refused += 1
        if not killed:
            break
    assert at > 3 and refused >= 2


@pytest.mark.mutant
def test_without_sessions_a_learner_that_was_replaced_goes_on(
    tmp_path: Path, jobs: list[Jobs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions.Sessions, "check", lambda self, lanes, *, joins: None)
    with pytest.raises(AssertionError):
        stop_and_replace(World(tmp_path, None), jobs, 20)
