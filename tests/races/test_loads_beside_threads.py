"""`loads` beside threads that do everything else: they see the state of before or the new one, whole."""

import contextlib
import copy
import inspect
import itertools
import sys
import tempfile
import threading
import time

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from contracts.tiers import in_turns
from contracts.waiting import NEVER
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBufferEnsemble,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SequenceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram.data.replay_buffers.samplers.base import WorkerShare
from engram.data.replay_buffers.samplers.runs import mark
from engram.store.items import ItemRows
from engram.store.packed_rows import PackedRows

ROWS = 64
STATES = (1, 2, 3)
LOW = 0.5  # what a thread sets priorities to; a saved state has its number in all of them

SAMPLERS = {
    "uniform": RandomSampler,
    "epochs": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(None, 1.0, 1.0, eps=0.0),
    "slices": lambda: SliceSampler(slice_len=4),
    "slice epochs": lambda: SliceSamplerWithoutReplacement(slice_len=4),
    "prioritized slices": lambda: PrioritizedSliceSampler(None, 1.0, 1.0, eps=0.0, slice_len=4),
    "sequences": lambda: SequenceSampler(slice_len=4, burn_in=1),
}
STORAGES = {
    "memory": lambda: LazyTensorStorage(100),
    "shared": lambda: LazyTensorStorage(100, shared=True),
    "mapped": lambda: LazyMemmapStorage(100),
    "list": lambda: ListStorage(100),
    "columns": lambda: emptied(TensorStorage(steps(0, 100).set("index", torch.arange(100)))),
}


def emptied(storage):
    storage.empty()
    return storage


def steps(number, n=ROWS):
    """Steps that all have one number, in trajectories of 16."""
    at = torch.arange(n)
    following = {"done": (at % 16 == 15).unsqueeze(-1), "truncated": torch.zeros(n, 1, dtype=torch.bool)}
    return TensorDict({"n": torch.full((n,), number), "episode": at // 16, "next": following}, [n])


def the_one(values):
    """The number that all of them are."""
    (number,) = set(torch.as_tensor(values).reshape(-1).tolist())
    assert number in STATES
    return number


def buffer(sampler="prioritized", storage="memory", **settings):
    return TensorDictReplayBuffer(
        storage=STORAGES[storage](), sampler=SAMPLERS[sampler](), batch_size=16, **settings
    )  # fmt: skip


def ensemble(**settings):
    return ReplayBufferEnsemble(buffer(), buffer("epochs"), buffer("slices"), batch_size=24, **settings)


def members(rb):
    return [rb[i] for i in range(len(rb))] if isinstance(rb, ReplayBufferEnsemble) else [rb]


def save(make, path, number):
    rb = make()
    for one in members(rb):
        index = one.extend(steps(number))
        if hasattr(one.sampler, "priorities"):
            one.update_priority(index, float(number))
    rb.dumps(path / str(number))


# ---- what threads do ----
def sample(rb):
    batch, info = rb.sample(return_info=True)
    number = the_one(batch["n"])
    if "priority_weight" in info and not isinstance(rb, ReplayBufferEnsemble):
        # (P / P_min) ** -1, where P is the state's number or what `update` has set.
        for weight in info["priority_weight"].tolist():
            assert min(abs(weight - 1), abs(weight - LOW / number)) < 1e-6, (weight, number)


def iterate(rb):
    for batch in itertools.islice(rb, 5):
        the_one(batch["n"])


def update(rb):
    for one in members(rb):
        if hasattr(one.sampler, "priorities"):
            one.update_priority(torch.arange(8), torch.full((8,), LOW))


def update_what_was_sampled(rb):
    if hasattr(rb.sampler, "priorities"):
        info = rb.sample(return_info=True)[1]
        some = info["index"] < ROWS // 2  # that others keep the number of the state
        generation = info["generation"][some] if "generation" in info else None
        rb.update_priority(info["index"][some], torch.full((int(some.sum()),), LOW), generation)


def read_priorities(rb):
    for one in members(rb):
        if hasattr(one.sampler, "priorities"):
            of_priorities(one.sampler.priorities(torch.arange(ROWS), storage=one.storage))


def of_priorities(found):
    """The number of the state that all priorities belong to."""
    number = the_one(found[ROWS // 2 :])
    assert set(found.tolist()) <= {number, LOW}
    return number


def read_rows(rb):
    for one in members(rb):
        rows = one[:]
        rows = torch.stack(rows) if isinstance(rows, list) else rows
        assert len(rows) == ROWS
        the_one(rows["n"])
        the_one(one[[0, 17, -1]]["n"] if not isinstance(one.storage, ListStorage) else [i["n"] for i in one[[0, 5]]])
        assert int(one[-1]["n"]) in STATES


def look_at_counters(rb):
    for one in members(rb):
        assert (len(one), one.write_count, one.writer._cursor, one.storage._is_full) == (ROWS, ROWS, ROWS, False)


def save_in_memory(rb, twin):
    twin.load_state_dict(rb.state_dict())
    look_at_a_state(twin)


def look_at_a_state(rb):
    for one in members(rb):
        rows = one[:]
        number = the_one((torch.stack(rows) if isinstance(rows, list) else rows)["n"])
        if hasattr(one.sampler, "priorities"):
            assert of_priorities(one.sampler.priorities(torch.arange(ROWS), storage=one.storage)) == number
    assert len({the_one(one[0]["n"]) for one in members(rb)}) == 1


def save_to_disk(rb, twin, path):
    rb.dumps(path)
    twin.loads(path)
    look_at_a_state(twin)


class Threads:
    """Works that go round until the block ends; an error of one of them is raised there.

    Each pauses after each time. Otherwise the quickest take nearly all of the time: a sampler without its lock is found
    after 0.1 s of CPU in the middle, without pauses after 0.5 s or more.
    """

    PAUSE_S = 0.0005

    def __init__(self, *works):
        self.errors, self._stop = [], threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(work,), daemon=True) for work in works]

    def _run(self, work):
        try:
            while not self._stop.is_set():
                work()
                time.sleep(self.PAUSE_S)
        except BaseException as error:
            self.errors.append(error)
            self._stop.set()

    @property
    def failed(self):
        return bool(self.errors)

    def __enter__(self):
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error):
        self._stop.set()
        until = time.monotonic() + 300
        for thread in self._threads:
            thread.join(max(0, until - time.monotonic()))
        sys.setswitchinterval(self._interval)
        if self.errors:
            raise self.errors[0]
        assert not any(thread.is_alive() for thread in self._threads), "a thread hangs"


def load_again_and_again(make, path, loads, in_memory=False):
    for number in STATES:
        save(make, path, number)
    rb, twin, other = make(), make(), make()
    rb.loads(path / "1")
    states = []
    for number in STATES if in_memory else ():
        twin.loads(path / str(number))
        states.append(twin.state_dict())
    works = [sample, iterate, update, read_priorities, read_rows, look_at_counters, update_what_was_sampled]
    if isinstance(rb, ReplayBufferEnsemble):
        works.remove(update_what_was_sampled)
    works = [lambda work=work: work(rb) for work in works]
    works += [lambda: save_in_memory(rb, twin), lambda: save_to_disk(rb, other, path / "again")]
    with Threads(*works) as threads:
        for k in range(loads):
            if in_memory:
                rb.load_state_dict(states[k % len(states)])
            else:
                rb.loads(path / str(STATES[k % len(STATES)]))
            if threads.failed:
                break


KINDS = {
    **{name: lambda name=name, **more: buffer(name, **more) for name in SAMPLERS},
    **{f"prioritized, {name}": lambda name=name, **more: buffer(storage=name, **more) for name in STORAGES},
    "ensemble": ensemble,
}


@pytest.mark.parametrize("loads", [15, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize(("kind", "prefetch"), in_turns(KINDS, [0, 2]))
def test_threads_see_the_old_state_or_the_new_one(kind, prefetch, loads, tmp_path):
    """A sampler without its lock is found in 0.1 s in the middle: 15 loads, which take 0.6 s, miss it in 1 of 400."""
    load_again_and_again(lambda: KINDS[kind](prefetch=prefetch), tmp_path, loads)


@pytest.mark.parametrize("loads", [20, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["prioritized", "epochs", "prioritized, list", "ensemble"])
def test_threads_see_old_or_new_state_loaded_from_memory(kind, loads, tmp_path):
    load_again_and_again(KINDS[kind], tmp_path, loads, in_memory=True)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_threads_see_the_old_state_or_the_new_one_a_thousand_times(kind, tmp_path):
    load_again_and_again(KINDS[kind], tmp_path, 1000)


def ten_thousand(path, loads):
    """Fewer works, so that there are more loads beside each."""
    for number in STATES:
        save(buffer, path, number)
    rb = buffer()
    rb.loads(path / "1")
    counts = dict.fromkeys((sample, update, read_priorities, update_what_was_sampled), 0)

    def counted(work):
        def run():
            work(rb)
            counts[work] += 1

        return run

    with Threads(*map(counted, counts)) as threads:
        until = time.monotonic() + NEVER
        for k in itertools.count():
            if threads.failed or (k >= loads and (all(counts.values()) or time.monotonic() > until)):
                break
            rb.loads(path / str(STATES[k % len(STATES)]))
            assert len(rb) == ROWS
    assert all(counts.values())
    return {work.__name__: count for work, count in counts.items()}


@pytest.mark.quick
def test_hundred_loads_beside_sampling_and_priority_updates(tmp_path):
    ten_thousand(tmp_path, 100)


@pytest.mark.long
def test_ten_thousand_loads_beside_sampling_and_priority_updates(tmp_path):
    print(ten_thousand(tmp_path, 10_000))


# ---- every method of every sampler ----
def _draw_again(sampler, storage):
    plan = sampler.draw_plan(storage)
    assert plan.most_rows(8) <= 8
    if plan.check_rows is not None:
        plan.check_rows(0)
    with sampler.lock:
        cursor = plan.cursor()
        draw = plan.draw(8).redraw([0, 3])
    if draw.seen is not None:
        draw.seen.stale(draw.store, draw.slots)
    if draw.runs is not None:
        mark(steps(1, len(draw.slots)), draw.marks, draw.runs, draw.flags)  # the last of an epoch can be shorter
    plan.put_back(cursor)


def _saved_form(sampler, storage):
    form = sampler.saved_form
    state = form.state(storage)
    form.differences(state)
    form.check(state, storage)
    form.find(storage)


def _totals(sampler, storage):
    with contextlib.suppress(TypeError):  # of those whose draws are not divided
        sampler.totals(storage, 8)


def _check_sending(sampler, storage):
    with contextlib.suppress(RuntimeError):  # of those with priorities
        sampler._check_sending()


def _split(sampler, storage):
    with contextlib.suppress(RuntimeError):  # of those with priorities
        copy.deepcopy(sampler)._split_among_workers(WorkerShare(0, 1, 7))


def _dumps(sampler, storage):
    with tempfile.TemporaryDirectory() as folder:
        sampler.dumps(folder)


def _loads(sampler, storage):
    with tempfile.TemporaryDirectory() as folder:
        sampler.dumps(folder)
        sampler.loads(folder)


METHODS = {
    "sample": lambda s, st: s.sample(st, 8),
    "check_storage": lambda s, st: s.check_storage(st),
    "use_generator": lambda s, st: s.use_generator(None),
    "empty": lambda s, st: s.empty(),
    "state_dict": lambda s, st: s.state_dict(),
    "load_state_dict": lambda s, st: s.load_state_dict(s.state_dict()),
    "can_sample": lambda s, st: s.can_sample(st, 8),
    "add": lambda s, st: s.add(3),
    "extend": lambda s, st: s.extend(torch.arange(8)),
    "update_priority": lambda s, st: s.update_priority(torch.arange(8), torch.ones(8), storage=st),
    "mark_update": lambda s, st: s.mark_update(torch.arange(8), storage=st),
    "draw_weights": lambda s, st: s.draw_weights(st, torch.arange(8)),
    "priorities": lambda s, st: s.priorities(torch.arange(8), storage=st),
    "checked_priorities": lambda s, st: s.checked_priorities(torch.ones(8), 8),
    "split": lambda s, st: s.split(torch.zeros(2, 4)),
    "dumps": _dumps,
    "loads": _loads,
    # what other parts of a buffer ask of it
    "_complete_copy": lambda s, st: copy.deepcopy(s),
    "draw_plan": _draw_again,
    "_draw_batch": _draw_again,
    "as_draw": _draw_again,
    "_empty": lambda s, st: s._empty(),
    "saved_form": _saved_form,
    "_draw_seed": lambda s, st: s._draw_seed(st, st.lanes),
    "_config": lambda s, st: s._config(),
    "totals": _totals,
    "raise_new_priority": lambda s, st: s.raise_new_priority(0.5, storage=st),
    "set_epoch": lambda s, st: s.set_epoch(1),
    "_check_sending": _check_sending,
    "_split_among_workers": _split,
}


def methods_of(sampler):
    """What users call, and what the other parts of a buffer do."""
    of_users = {n for n, _ in inspect.getmembers(type(sampler), inspect.isfunction) if not n.startswith("_")}
    of_parts = {n for n, m in vars(Sampler).items() if inspect.isfunction(m) and not n.startswith("__")}
    return of_users | of_parts | {"saved_form"}


@pytest.mark.parametrize("name", SAMPLERS)
def test_sampler_methods_beside_loads(name, tmp_path):
    """Each method in a thread of its own."""

    def make():
        return buffer(name)

    for number in STATES:
        save(make, tmp_path, number)
    rb = make()
    rb.loads(tmp_path / "1")
    sampler, storage = rb.sampler, rb.storage
    methods = methods_of(sampler)
    assert methods <= METHODS.keys(), "a method that this test does not know"
    works = [lambda call=METHODS[n]: call(sampler, storage) for n in sorted(methods)]
    properties = [n for n, _ in inspect.getmembers(type(sampler), inspect.isdatadescriptor) if n != "__dict__"]
    works.append(lambda: [getattr(sampler, n) for n in properties])
    with Threads(*works) as threads:
        for k in range(36):
            rb.loads(tmp_path / str(STATES[k % 3]))
            if threads.failed:
                break
    rb.loads(tmp_path / "2")
    look_at_a_state(rb)
    rb.sample()


def test_sampler_ensemble_members_beside_loads(tmp_path):
    def make():
        rbs = [buffer() for _ in range(2)]
        return ReplayBufferEnsemble(*rbs, batch_size=8)

    for number in STATES:
        save(make, tmp_path, number)
    rb = make()
    rb.loads(tmp_path / "1")
    sampler: SamplerEnsemble = rb.sampler

    def update_all():
        _, info = rb.sample(return_info=True)
        rb.update_priority(info, torch.full((8,), LOW))

    def draw():
        sampler.sample(rb.storage, 8)

    works = [update_all, draw, sampler.state_dict, lambda: rb._parts.reader.put_back(rb._parts.reader.cursor())]
    with Threads(*works, lambda: sampler.saved_form.sync(rb.storage)) as threads:
        for k in range(30):
            rb.loads(tmp_path / str(STATES[k % 3]))
            if threads.failed:
                break


# ---- rows alone ----
@pytest.mark.parametrize("name", STORAGES)
def test_read_beside_empty_returns_all_rows_or_none(name):
    rb = TensorDictReplayBuffer(storage=STORAGES[name](), batch_size=16)
    rb.extend(steps(1))

    def read():
        rows = rb[:]
        assert len(rows) in (0, ROWS)
        assert not len(rows) or set((torch.stack(rows) if isinstance(rows, list) else rows)["n"].tolist()) == {1}

    with Threads(read, read) as threads:
        for _ in range(50):
            rb.empty()
            rb.extend(steps(1))
            if threads.failed:
                break


@pytest.mark.parametrize("name", STORAGES)
def test_a_storage_loads_beside_a_buffer_that_samples_from_it(name, tmp_path):
    """Who loads the storage alone holds no lock of the sampler's."""
    rb = TensorDictReplayBuffer(storage=STORAGES[name](), sampler=RandomSampler(), batch_size=16)
    for number in STATES:
        rb.empty()
        rb.extend(steps(number))
        rb.storage.dumps(tmp_path / str(number))
    slices = TensorDictReplayBuffer(storage=rb.storage, sampler=SliceSampler(slice_len=4), batch_size=16, prefetch=2)
    works = [lambda: sample(rb), lambda: sample(slices), lambda: read_rows(rb), lambda: look_at_counters(rb)]
    with Threads(*works) as threads:
        for k in range(30):
            rb.storage.loads(tmp_path / str(STATES[k % 3]))
            if threads.failed:
                break


# ---- at one certain moment ----
def with_weight_on(path, number, row, make):
    """Saves a state in which one row alone can be drawn; its number is the state's."""
    rb = make()
    for one in members(rb):
        index = one.extend(steps(number))
        one.update_priority(index, torch.zeros(ROWS))
        one.update_priority(torch.tensor([row]), torch.ones(1))
    rb.dumps(path / str(number))


def pair(**settings):
    return ReplayBufferEnsemble(buffer(), buffer(), batch_size=16, sample_from_all=True, **settings)


def pair_of_lists(**settings):
    return ReplayBufferEnsemble(buffer(storage="list"), buffer(storage="list"), batch_size=16, sample_from_all=True)


class LockAfter:
    """A lock that does something before it is acquired."""

    def __init__(self, before, lock):
        self._before, self._lock = before, lock

    def acquire(self, *args):
        self._before()
        return self._lock.acquire(*args)

    def release(self):
        self._lock.release()

    def __enter__(self):
        self.acquire()

    def __exit__(self, *error):
        self.release()


DRAWS = {
    "sample": lambda rb: rb.sample(return_info=True)[0],
    "iteration": lambda rb: next(iter(rb)),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("make", [buffer, pair, pair_of_lists], ids=lambda make: make.__name__)
@pytest.mark.parametrize("when", ["before the rows are read", "between members", "in a transform"])
def test_a_batch_that_was_drawn_before_a_load_is_drawn_anew_after_it(when, make, draw, tmp_path, monkeypatch):
    for number, row in ((1, 3), (2, 5)):
        with_weight_on(tmp_path, number, row, make)
    rb, loads = make(), iter([None])
    rb.loads(tmp_path / "1")

    def load_once():
        for _ in loads:
            rb.loads(tmp_path / "2")

    def transform(batch):
        load_once()
        return batch

    if when == "in a transform":
        rb.append_transform(transform)
    else:
        which = members(rb)[-1 if when == "between members" else 0]
        ways = (
            (type(which.storage), "read"),
            (PackedRows, "read_many"),
            (ItemRows, "read_batch"),
            (ItemRows, "read_own"),
        )
        for kind, name in ways:
            read = getattr(kind, name)
            monkeypatch.setattr(kind, name, lambda *args, read=read, **more: (load_once(), read(*args, **more))[1])
        if make is buffer and (made := rb._parts.reader.make) is not None:  # draws and reads in one native call
            monkeypatch.setattr(rb._parts.reader, "make", lambda *args: (load_once(), made(*args))[1])
        if make is pair:  # of which each member draws once the lock of its sampler is held
            monkeypatch.setattr(which.sampler, "lock", LockAfter(load_once, which.sampler.lock))
    batch = DRAWS[draw](rb)
    assert not list(loads), "nothing was loaded beside the draw"
    index = batch["index"] if make is buffer else batch["index", "index"]
    assert set(batch["n"].reshape(-1).tolist()) == {2} and set(index.reshape(-1).tolist()) == {5}


def prefetching_with_two_saves(path):
    """A buffer whose storage was saved with 64 steps of number 1, which it holds, and with 8 of number 2."""
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=16, prefetch=1)
    for number, n in ((1, 64), (2, 8)):
        rb.empty()
        rb.extend(steps(number, n))
        rb.storage.dumps(path / str(number))
    rb.storage.loads(path / "1")
    return rb


def test_a_batch_that_was_prepared_before_the_storage_alone_was_loaded_is_drawn_anew(tmp_path):
    rb = prefetching_with_two_saves(tmp_path)
    assert set(rb.sample()["n"].tolist()) == {1}  # and the next batch is prepared
    rb.storage.loads(tmp_path / "2")
    batches = [rb.sample() for _ in range(3)]
    assert all(set(batch["n"].tolist()) == {2} and int(batch["index"].max()) < 8 for batch in batches)


def test_a_batch_in_whose_read_the_storage_alone_is_loaded_is_drawn_anew(tmp_path, monkeypatch):
    rb = prefetching_with_two_saves(tmp_path)
    read, loads = LazyTensorStorage.read, iter([None])

    def load_then_read(self, *args):
        for _ in loads:
            self.loads(tmp_path / "2")
        return read(self, *args)

    monkeypatch.setattr(LazyTensorStorage, "read", load_then_read)
    batches = [rb.sample(return_info=True)[0] for _ in range(3)]  # of which Python code reads the rows
    assert all(set(batch["n"].tolist()) == {2} and int(batch["index"].max()) < 8 for batch in batches)


class Telling(RandomSampler):
    """Says of which state it drew."""

    def sample(self, storage, batch_size):
        index, _ = super().sample(storage, batch_size)
        return index, {"number": storage[0]["n"].expand(batch_size)}


@pytest.mark.parametrize("storage", ["memory", "mapped", "list", "columns"])
def test_sampler_info_describes_the_returned_rows(storage, tmp_path, monkeypatch):
    rb = TensorDictReplayBuffer(storage=STORAGES[storage](), sampler=Telling(), batch_size=16)
    for number in (1, 2):
        rb.empty()
        rb.extend(steps(number))
        rb.dumps(tmp_path / str(number))
    rb.loads(tmp_path / "1")
    kind, sample, drawn, loads = type(rb.storage), Telling.sample, [], iter([None])
    read = kind.read

    def load_then_read(self, *args):
        for _ in loads if drawn else ():
            rb.loads(tmp_path / "2")
        return read(self, *args)

    def sample_then_note(self, *args):
        made = sample(self, *args)
        drawn.append(made)
        return made

    reads, way = (ItemRows, "read_batch") if kind is ListStorage else (kind, "read")
    read = getattr(reads, way)
    monkeypatch.setattr(reads, way, load_then_read)
    monkeypatch.setattr(Telling, "sample", sample_then_note)
    batch, info = rb.sample(return_info=True)
    assert the_one(batch["n"]) == the_one(info["number"]) == 2
    assert len(drawn) == 2


WAITING = {
    "sample": lambda rb: the_one(rb.sample()["n"]),
    "draw": lambda rb: the_one(rb[rb.sampler.sample(rb.storage, 8)[0]]["n"]),
    "rows": lambda rb: the_one(rb[:]["n"]),
    "length": lambda rb: len(rb) // ROWS * 2,
    "write_count": lambda rb: rb.write_count // ROWS * 2,
    "cursor": lambda rb: rb.writer._cursor // ROWS * 2,
}


class Loading:
    """A storage of state 1, into which a thread loads state 2: `begin` returns in the middle of that."""

    def __init__(self, rb, path, monkeypatch):
        for number in (1, 2):
            rb.empty()
            rb.extend(steps(number))
            rb.storage.dumps(path / str(number))
        rb.storage.loads(path / "1")
        table = type(rb.storage._held_table.rows)
        self._begun, self.go_on = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: rb.storage.loads(path / "2"), daemon=True)
        monkeypatch.setattr(table, "set_block", lambda *args, put=table.set_block: self._put(put, args))

    def _put(self, put, args):
        self._begun.set()
        self.go_on.wait(300)
        put(*args)

    def begin(self):
        self._thread.start()
        assert self._begun.wait(300)

    def found_by(self, ask):
        """What a thread finds that asks before the load goes on, and is seen to wait for its end."""
        found = []
        asking = threading.Thread(target=lambda: found.append(ask()), daemon=True)
        asking.start()
        asking.join(0.05)
        assert not found
        self.go_on.set()
        for thread in (self._thread, asking):
            thread.join(300)
        return found


@pytest.mark.parametrize("what", WAITING)
@pytest.mark.parametrize("name", SAMPLERS)
def test_call_during_a_load_waits_for_its_end(what, name, tmp_path, monkeypatch):
    rb = buffer(name)
    loading = Loading(rb, tmp_path, monkeypatch)
    loading.begin()
    assert loading.found_by(lambda: WAITING[what](rb)) == [2]


@pytest.mark.quick
@each("name", sorted(SAMPLERS.keys() - {"epochs", "slice epochs"}))
def test_who_has_begun_to_draw_when_a_load_begins_waits_for_its_end(name, tmp_path, monkeypatch):
    rb = buffer(name)
    loading = Loading(rb, tmp_path, monkeypatch)
    first = iter([None])

    class SeedThenLoad(np.ndarray):
        """Where each draw begins, in Python or in the native call."""

        def random_(self, generator=None):
            torch.from_numpy(self.view(np.ndarray)).random_(generator=generator)
            for _ in first:
                loading.begin()
            return self

    monkeypatch.setattr(rb.sampler, "_seed", rb.sampler._seed.numpy().view(SeedThenLoad))
    assert loading.found_by(lambda: the_one(rb.sample()["n"])) == [2]
