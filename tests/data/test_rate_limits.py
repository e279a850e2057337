"""Samplers that wait for rows, and those who write, who wait for samplers: `ReplayBuffer(rate_limiter=...)`."""

import copy
import functools
import itertools
import math
import pickle
import random
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import engram
from contracts.each import each
from contracts.programs import run_program
from contracts.removed_rows import (
    CAPACITY,
    DRAWS,
    LIMITER,
    NEEDED,
    READINGS,
    arguments,
    check_counted,
    count,
    filled,
    fronts,
    samplers,
)
from contracts.tiers import in_quick
from contracts.waiting import NEVER, comes, end, in_thread, seems_alone
from contracts.ways_to_write import WRITES, Way, buffer, rows
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    MinSize,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SampleToInsertRatio,
    SliceSampler,
    TensorDictReplayBuffer,
)
from engram.data.replay_buffers.buffers import waiting
from engram.envs.transforms import MultiStepTransform
from engram.errors import StorageError
from engram.store import flow

pytestmark = pytest.mark.filterwarnings("ignore:sample was called with batch_size=:UserWarning")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    seems_alone(monkeypatch)


def counts(rb):
    """Rows written and drawn since the counts began, and rows that can be drawn."""
    return rb.storage.lanes.store.rate_counts[:3]


def waits(rb, inserts: bool) -> int:
    return rb.storage.lanes.store.waits[0 if inserts else 2]


# ---- the rule, against a few lines of Python ----
class Rule:
    """What one buffer of one thread may do: the rule of `rate_limit.hpp`, in rows."""

    def __init__(self, ratio, least, ahead, behind, capacity):
        self.ratio, self.least, self.ahead, self.behind, self.capacity = ratio, least, ahead, behind, capacity
        self.written = self.drawn = self.stored = 0

    def budget(self):
        return self.ratio * (self.written - self.least) - self.drawn

    def may_write(self):
        return self.stored < self.least or self.budget() <= self.behind

    def may_draw(self, n):
        return self.stored >= self.least and self.budget() - n >= -self.ahead


PROGRAM = st.lists(st.tuples(st.sampled_from("aeeesssrcl"), st.integers(1, 9)), min_size=5, max_size=40)


@settings(max_examples=60, deadline=None)
@given(
    ratio=st.sampled_from([0.25, 1.0, 2.0, 3.5]),
    least=st.integers(1, 12),
    room=st.tuples(st.integers(9, 30), st.one_of(st.none(), st.integers(0, 30))),
    envs=st.sampled_from([0, 2]),
    program=PROGRAM,
)
def test_rows_are_written_and_drawn_exactly_when_the_rule_says_so(ratio, least, room, envs, program):
    ahead, behind = room
    limiter = SampleToInsertRatio(ratio, least, ahead=ahead, behind=behind)
    rb = ReplayBuffer(storage=LazyTensorStorage(24, ndim=2 if envs else 1), rate_limiter=limiter)
    rule = Rule(ratio, least, ahead, math.inf if behind is None else behind, 24)
    each, saved = max(1, envs), None
    rb.extend(torch.zeros(*([envs] if envs else []), 2))
    rule.written = rule.stored = 2 * each
    for what, n in program:
        if what in "ae":
            n = 1 if what == "a" else n
            may = rule.may_write()
            data = torch.zeros(*([envs] if envs else []), n)
            if may:
                rb.extend(data)
                rule.written, rule.stored = rule.written + n * each, min(24, rule.stored + n * each)
                rule.stored -= 0
            else:
                with pytest.raises(RuntimeError, match=r"waits for [\d,]+ more rows? to be drawn"):
                    rb.extend(data)
        elif what == "s":
            assert rb.can_sample(n) == rule.may_draw(n)
            if rule.may_draw(n):
                rb.sample(n)
                rule.drawn += n
            else:
                with pytest.raises(RuntimeError, match="sample waits for"):
                    rb.sample(n, wait=False)
        elif what == "c":
            rb.empty()
            rule.written = rule.drawn = rule.stored = 0
        elif what == "r":
            saved = rb.state_dict(), rule.written, rule.drawn, rule.stored
        elif saved is not None:
            state, rule.written, rule.drawn, rule.stored = saved
            rb.load_state_dict(state)
        assert counts(rb) == (rule.written, rule.drawn, rule.stored)


def test_removed_rows_do_not_count_as_stored_and_count_as_written():
    rb = buffer(SampleToInsertRatio(1.0, 5, ahead=4, behind=4))
    rb.extend(rows(6))
    assert rb.can_sample()
    rb.remove([0, 1])
    assert not rb.can_sample() and counts(rb) == (6, 0, 4)
    rb.extend(rows(20))  # nobody who writes waits while too few are stored
    assert rb.can_sample() and counts(rb) == (26, 0, 24)


def test_counts_begin_without_a_debt_where_rows_are_there_already():
    rb = buffer()
    rb.extend(rows(50))
    rb.rate_limiter = SampleToInsertRatio(2.0, 10, error_buffer=8)
    assert counts(rb) == (10, 0, 50)
    rb.extend(rows(4))
    assert [rb.can_sample(8) and rb.sample(8) is not None for _ in range(3)] == [True, True, False]
    rb.rate_limiter = None
    assert rb.can_sample(90) and rb.rate_limiter is None and rb.stats().samples is None


def test_a_pair_for_the_error_buffer_means_what_it_means_in_reverb():
    limit = SampleToInsertRatio(4.0, 10, error_buffer=(20.0, 100.0)).limit
    assert (limit.ahead, limit.behind) == (4 * 10 - 20, 100 - 4 * 10)


def test_the_default_grows_to_the_largest_batch():
    rb = buffer(SampleToInsertRatio(0.5), capacity=100)
    rb.extend(rows(20))
    rb.sample(64)
    assert rb.storage.lanes.store.rate_limit[2:4] == (64.0, 64.0)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: SampleToInsertRatio(0), ValueError, "samples_per_insert must be more than 0"),
        (lambda: SampleToInsertRatio(math.inf), ValueError, "samples_per_insert must be more than 0"),
        (lambda: SampleToInsertRatio("4"), TypeError, "samples_per_insert must be a number"),
        (lambda: SampleToInsertRatio(1, 0), ValueError, "min_size_to_sample must be an integer of 1 or more"),
        (lambda: SampleToInsertRatio(1, error_buffer=-1), ValueError, "error_buffer must be 0 or more"),
        (lambda: SampleToInsertRatio(1, error_buffer=(3, 2)), ValueError, "the least and the largest difference"),
        (lambda: SampleToInsertRatio(1, error_buffer=3, ahead=1), TypeError, "error_buffer is ahead= and behind="),
        (lambda: SampleToInsertRatio(1, ahead=math.nan), TypeError, "ahead must be a number"),
        (lambda: MinSize(0), ValueError, "min_size_to_sample"),
        (lambda: buffer(rate_limiter=lambda n: True), TypeError, "rate_limiter must be a SampleToInsertRatio"),
        (lambda: buffer(MinSize(101)), ValueError, "waits until 101 rows are stored, and the storage has room for 100"),
        (lambda: SampleToInsertRatio(1, ahead=0, behind=0), ValueError, "ahead and behind"),
    ],
)
def test_bad_settings_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_a_batch_that_could_never_be_drawn_is_refused():
    rb = buffer(SampleToInsertRatio(1.0, error_buffer=8))
    rb.extend(rows(9))
    with pytest.raises(ValueError, match=r"a batch of 17 rows is more than .* ahead \+ behind = 16"):
        rb.sample(17)
    assert not rb.can_sample(17) and rb.can_sample(16)


# ---- every path that draws ----
#: With what is drawn from all samplers that need nothing else; those that draw parts of rows count these.
SAMPLERS = {name: make for name, make in samplers().items() if "=" not in name}


def bound(reading, folder, **parts):
    on_disk = reading == "published"
    storage = LazyMemmapStorage(CAPACITY, scratch_dir=folder / "named") if on_disk else LazyTensorStorage(CAPACITY)
    parts = {"front": TensorDictReplayBuffer, "rate_limiter": LIMITER, **parts}
    return filled(storage, **{**READINGS[reading].arguments, **parts})


@each("sampler", SAMPLERS)
@pytest.mark.parametrize("reading", in_quick(READINGS, ["sample", "iteration", "prefetch", "another buffer"]))
def test_every_way_to_draw_counts_its_rows_and_waits(reading, sampler, tmp_path):
    check_counted(bound(reading, tmp_path, sampler=SAMPLERS[sampler]()), READINGS[reading].batches)


@each("front", fronts())
def test_every_front_counts_its_rows_and_waits(front, tmp_path):
    own = {name: value for name, value in NEEDED.items() if name in arguments(fronts()[front])}
    check_counted(bound("sample", tmp_path, front=fronts()[front], **own), READINGS["sample"].batches)


def test_a_way_to_draw_that_counts_nothing_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(waiting.Waits, "take_next", lambda self, n: (n, None))
    found = set()
    for reading in READINGS:
        (tmp_path / reading).mkdir()
        try:
            check_counted(bound(reading, tmp_path / reading), READINGS[reading].batches)
        except AssertionError:
            found.add(reading)
    assert found == {"iteration", "dataset", "data loader", "next"}


def test_a_batch_beyond_the_bound_says_what_is_missing_and_counts_nothing():
    rb = buffer(SampleToInsertRatio(1.0, 8, ahead=4, behind=8))
    rb.extend(rows(8))
    for draw in (rb.sample, lambda: ReplayBufferEnsemble(rb, batch_size=4).sample()):
        if not counts(rb)[1]:
            draw()
        with pytest.raises(
            RuntimeError, match="sample waits for 4 more rows to be written: 4 were drawn, and 4 more would be above"
        ):
            draw()
        assert counts(rb)[1] == 4


@pytest.mark.deep
def test_workers_of_a_data_loader_count_what_they_draw():
    rb = filled(LazyTensorStorage(CAPACITY, shared=True), front=TensorDictReplayBuffer, rate_limiter=LIMITER)
    dataset = rb.as_iterable_dataset(batches=4)
    loader = DataLoader(dataset, batch_size=None, collate_fn=dataset.collate, num_workers=2)
    assert sum(count(batch) for batch in loader) == DRAWS == rb.stats().samples and not rb.can_sample()


def test_batches_that_are_prepared_ahead_count_when_they_are_handed_out(monkeypatch):
    monkeypatch.setattr("engram.data.replay_buffers.reading.prefetch.PAYS_FROM_S", 0)
    rb = buffer(SampleToInsertRatio(1.0, 8, ahead=40, behind=8), prefetch=3)
    rb.extend(rows(8))
    for drawn in (4, 8, 12):
        rb.sample()
        assert counts(rb)[1] == drawn
    rb.shutdown()


def test_draws_that_fail_are_given_back():
    rb = buffer(SampleToInsertRatio(1.0, 8, ahead=8, behind=8), transform=_broken)
    rb.extend(rows(8))
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            rb.sample()
    assert counts(rb)[1] == 0


def _broken(batch):
    raise ZeroDivisionError


def test_each_member_of_an_ensemble_is_asked_and_counts_its_own_rows():
    bound, free = buffer(SampleToInsertRatio(1.0, 8, ahead=20, behind=8)), buffer()
    for rb in (bound, free):
        rb.extend(rows(8))
    both = ReplayBufferEnsemble(bound, free, batch_size=8, num_buffer_sampled=2)
    torch.manual_seed(0)
    drawn = 0
    for _ in range(50):
        info = both.sample(return_info=True)[1]
        drawn += int((info["buffer_ids"] == 0).sum())
        assert counts(bound)[1] == drawn <= 20
        if not both.can_sample():
            break
    assert drawn > 12 and both.stats().samples == drawn and free.stats().samples is None
    with pytest.raises(TypeError, match="rate_limiter is the members'"):
        both.rate_limiter = MinSize(1)
    with pytest.raises(TypeError, match="an ensemble takes no rate_limiter"):
        ReplayBufferEnsemble(bound, free, rate_limiter=MinSize(1))


def test_the_members_of_a_batch_that_waited_are_those_that_are_drawn():
    members = [buffer(SampleToInsertRatio(1.0, 8, ahead=4 + 8 * i, behind=99)) for i in range(2)]
    for rb in members:
        rb.extend(rows(8))
    both = ReplayBufferEnsemble(*members, batch_size=4, num_buffer_sampled=1, p=[0.5, 0.5])
    torch.manual_seed(3)
    for _ in range(200):
        before = [counts(rb)[1] for rb in members]
        try:
            _, info = both.sample(return_info=True)
        except RuntimeError:
            assert [counts(rb)[1] for rb in members] == before
            for rb in members:
                rb.extend(rows(4))
            continue
        which = int(info["buffer_ids"][0, 0])
        assert counts(members[which])[1] == before[which] + 4
        assert counts(members[1 - which])[1] == before[1 - which]


def test_an_ensemble_that_cannot_say_ahead_whom_it_draws_from_is_refused():
    class Newest(SamplerEnsemble):
        def choose(self, batch_size):
            return [0], batch_size

    rb = buffer(MinSize(1))
    rb.extend(rows(8))
    with pytest.raises(TypeError, match="Newest chooses members by a method of its own"):
        both = ReplayBufferEnsemble(rb, batch_size=4)
        both.set_sampler(Newest(rb.sampler))
        both.sample()
    with pytest.raises(ValueError, match="make it without prefetch"):
        ReplayBufferEnsemble(rb, batch_size=4, prefetch=2).sample()


# ---- every path that writes ----
def _stands(way: Way) -> bool:
    """Whether a way to write stops at the bound, and goes on when rows are drawn."""
    rb, write = way.make(rate_limiter=SampleToInsertRatio(1.0, 1, ahead=50, behind=8))
    for _ in range(4 if way.declines else 3):
        rb.extend(rows(1)) if way is not WRITES["arrays of an adapter"] and way.declines else write()
    while counts(rb)[0] <= 9:
        before = counts(rb)[0]
        write()
        assert counts(rb)[0] > before
    before = counts(rb)
    if way.declines:
        stood = write() is False
    else:
        thread, results = in_thread(write)
        stood = comes(lambda: waits(rb, inserts=True) or results) and not results
    stood = stood and counts(rb) == before
    rb.storage.lanes.store.take_samples(20)
    if way.declines:
        assert write()
    else:
        end(thread)
        assert not isinstance(results[0], BaseException), results
    return stood


@pytest.mark.parametrize("way", WRITES)
def test_every_way_to_write_stops_at_the_bound_and_goes_on_when_rows_are_drawn(way):
    assert _stands(WRITES[way])


def test_a_way_that_does_not_look_is_found(monkeypatch):
    monkeypatch.setattr(waiting.Waits, "await_room_until", lambda self, *how, **options: None)
    found = {name for name, way in WRITES.items() if not _stands(way)}
    assert found == {name for name, way in WRITES.items() if not way.declines}


def test_flushed_transforms_wait_too():
    rb = buffer(SampleToInsertRatio(1.0, 1, ahead=50, behind=8), transform=MultiStepTransform(n_steps=3, gamma=0.9))
    rb.extend(rows(11))
    rb.extend(rows(1))
    with pytest.raises(RuntimeError, match="flush_transforms waits for"):
        rb.flush_transforms()
    rb.storage.lanes.store.take_samples(20)
    assert len(rb.flush_transforms()) == 2


# ---- waits ----
def test_a_sampler_waits_for_the_rows_of_another_thread():
    rb = buffer(MinSize(8))
    thread, results = in_thread(rb.sample)
    rb.extend(rows(7))
    assert comes(lambda: waits(rb, inserts=False)) and not results
    rb.extend(rows(1))
    end(thread)
    assert results[0].shape == (4,) and rb.stats().waited_sample_s > 0


def test_without_a_limiter_it_waits_where_it_is_told_to():
    rb = buffer(sampler=SamplerWithoutReplacement())
    with pytest.raises(RuntimeError, match="Nobody can write them"):
        rb.sample(wait=True)
    started = threading.Event()
    thread, results = in_thread(lambda: (started.set(), rb.sample(wait=True))[1])
    started.wait(NEVER)
    rb.extend(rows(6))
    end(thread)
    assert len(results[0]) == 4
    with pytest.raises(RuntimeError):
        buffer().sample(wait=False)


def test_a_wait_ends_when_its_time_is_over_and_nothing_was_counted():
    rb = buffer(SampleToInsertRatio(1.0, 1, ahead=4, behind=4))
    rb.extend(rows(9))
    stop = threading.Event()
    other = threading.Thread(target=stop.wait, args=(NEVER,))  # which might sample
    other.start()
    try:
        before = counts(rb)
        with pytest.raises(
            TimeoutError, match="extend waits for 4 more rows to be drawn: 0 were, more than 4 below 1 x"
        ):
            rb.extend(rows(1), timeout=0.01)
        with pytest.raises(TimeoutError, match="add waits for 4 more rows to be drawn"):
            rb.add(rows(1)[0], timeout=0.01)
        with pytest.raises(TimeoutError, match="sample waits for"):
            buffer(MinSize(5)).sample(timeout=0.0)
        assert counts(rb) == before
        with pytest.raises(ValueError, match="timeout must be seconds"):
            rb.sample(timeout=-1)
    finally:
        stop.set()
        end(other)


@pytest.mark.parametrize("who", ["sample", "extend"])
def test_shutdown_ends_a_wait(who):
    rb = buffer(SampleToInsertRatio(1.0, 4, ahead=4, behind=4))
    rb.extend(rows(3 if who == "sample" else 20))
    thread, results = in_thread(rb.sample if who == "sample" else lambda: rb.extend(rows(1)))
    assert comes(lambda: waits(rb, inserts=who == "extend"))
    rb.shutdown()
    end(thread)
    assert "was shut down" in str(results[0])


def test_a_sampler_does_not_wait_for_what_has_failed():
    rb = buffer(MinSize(4))
    rb.extend(rows(1))
    thread, results = in_thread(rb.sample)
    assert comes(lambda: waits(rb, inserts=False))
    rb.report_failure(ZeroDivisionError("in the environment"))
    end(thread)
    assert "ZeroDivisionError('in the environment')" in str(results[0])


def test_emptying_ends_the_wait_of_who_writes():
    rb = buffer(SampleToInsertRatio(1.0, 4, ahead=4, behind=4))
    rb.extend(rows(20))
    thread, results = in_thread(lambda: rb.extend(rows(1)))
    assert comes(lambda: waits(rb, inserts=True))
    rb.empty()
    end(thread)
    assert results[0].tolist() == [0] and counts(rb) == (1, 0, 1)


@pytest.mark.parametrize("who", ["sample", "extend"])
def test_a_limiter_that_is_taken_away_ends_waits(who):
    rb = buffer(SampleToInsertRatio(1.0, 4, ahead=4, behind=4))
    rb.extend(rows(3 if who == "sample" else 20))
    thread, results = in_thread(rb.sample if who == "sample" else lambda: rb.extend(rows(1)))
    assert comes(lambda: waits(rb, inserts=who == "extend"))
    rb.rate_limiter = None
    end(thread)
    assert len(results[0]) == (4 if who == "sample" else 1)


def test_a_wait_that_lasts_says_who_waits_for_whom(monkeypatch, tmp_path):
    monkeypatch.setattr("engram.store.waits._FIRST_WARNING", 0.0)
    monkeypatch.setattr("engram.store.waits._NEXT_WARNINGS", 0.01)
    rb = buffer(MinSize(8), storage=LazyMemmapStorage(100, scratch_dir=tmp_path, shared_init=True))
    rb.extend(rows(3))
    said = "by now: sample waits for 5 more rows: 3 of 8 are there; writers: process"
    with pytest.warns(RuntimeWarning, match=said), pytest.raises(TimeoutError):
        rb.sample(timeout=0.1)


@pytest.mark.parametrize("seed", in_quick(range(12), range(2)))
def test_nobody_stands_and_the_bound_holds_at_every_moment_whatever_threads_write_and_draw(seed):
    rng = random.Random(seed)
    ratio, least = rng.choice([0.5, 1, 3.7]), rng.randint(1, 20)
    batches = [rng.randint(1, 16) for _ in range(rng.randint(1, 3))]
    ahead, behind = max(batches), rng.choice([0, 40, None])
    rb = buffer(SampleToInsertRatio(ratio, least, ahead=ahead, behind=behind), capacity=64)
    rb.extend(rows(1))
    stop, errors = threading.Event(), []
    calls = [functools.partial(rb.sample, n, timeout=NEVER) for n in batches]
    calls += [functools.partial(rb.extend, rows(rng.randint(1, 9)), timeout=NEVER) for _ in range(2)]
    steps = [0] * len(calls)

    def work(i):
        try:
            while not stop.is_set():
                calls[i]()
                steps[i] += 1
        except BaseException as error:
            if "shut down" not in str(error):
                errors.append(error)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    assert comes(lambda: errors or min(steps) >= 20 or _over(rb, ratio, least, ahead)), steps
    assert not errors and not _over(rb, ratio, least, ahead)
    stop.set()
    rb.shutdown()
    for thread in threads:
        end(thread)


def _over(rb, ratio, least, ahead):
    drawn = counts(rb)[1]
    written = counts(rb)[0]  # looked at later: it may only have grown
    return drawn > ratio * max(0, written - least) + ahead + 1e-6


# ---- several users of one store ----
def mapped(folder, limiter=None, capacity=100, **options):
    storage = LazyMemmapStorage(capacity, scratch_dir=folder, shared_init=True, existsok=True, **options)
    return TensorDictReplayBuffer(storage=storage, batch_size=4, rate_limiter=limiter)


def test_who_opens_a_store_finds_its_limiter_and_its_counts(tmp_path):
    first, late = mapped(tmp_path, SampleToInsertRatio(1.0, 4, error_buffer=8)), mapped(tmp_path)
    first.extend(rows(8))
    assert late.rate_limiter == first.rate_limiter == SampleToInsertRatio(1.0, 4, error_buffer=8)
    late.sample()
    assert counts(first) == (8, 4, 8) and first.stats().samples_per_insert == 1.0
    first.storage.close(), late.storage.close()
    again = mapped(tmp_path)
    assert counts(again) == (8, 4, 8) and again.rate_limiter == SampleToInsertRatio(1.0, 4, error_buffer=8)


def test_another_bound_than_others_keep_is_refused_and_one_is_changed_for_all(tmp_path):
    first, second = (mapped(tmp_path, SampleToInsertRatio(n)) for n in (2.0, 3.0))
    first.extend(rows(8))
    text = r"the store keeps SampleToInsertRatio\(2, .*this process was told SampleToInsertRatio\(3"
    for use in (second.sample, lambda: second.extend(rows(1)), second.can_sample):
        with pytest.raises(ValueError, match=text):
            use()
    assert len(first) == 8
    with pytest.raises(ValueError, match=text):
        mapped(tmp_path, SampleToInsertRatio(3.0))
    second.rate_limiter = SampleToInsertRatio(3.0)
    assert first.rate_limiter == SampleToInsertRatio(3.0)
    first.sample(), second.sample()
    assert counts(second)[1] == 8
    with pytest.raises(ValueError, match=r"this storage keeps SampleToInsertRatio\(2"):
        TensorDictReplayBuffer(storage=first.storage, rate_limiter=MinSize(3))


def test_who_has_a_store_alone_sets_another_bound(tmp_path):
    first = mapped(tmp_path, SampleToInsertRatio(2.0))
    first.extend(rows(8))
    first.sample()
    first.storage.close()
    second = mapped(tmp_path, SampleToInsertRatio(3.0))
    assert second.rate_limiter == SampleToInsertRatio(3.0) and counts(second)[1] == 0


def test_a_limiter_set_by_another_user_binds_who_named_none(tmp_path):
    first, second = mapped(tmp_path), mapped(tmp_path)
    first.extend(rows(20))
    second.sample()
    first.rate_limiter = SampleToInsertRatio(1.0, 4, error_buffer=8)
    second.sample(), second.sample()
    assert counts(first) == (4, 8, 20)
    with pytest.raises(RuntimeError, match="wait=False"):
        second.sample(wait=False)


def test_who_only_reads_draws_without_counting(tmp_path):
    rb = mapped(tmp_path, SampleToInsertRatio(1.0, 4, ahead=4, behind=4))
    rb.extend(rows(8))
    reader = TensorDictReplayBuffer.open(tmp_path, read_only=True, batch_size=4)
    for _ in range(5):
        reader.sample()
    assert reader.stats().samples == 0 and reader.rate_limiter == rb.rate_limiter
    with pytest.raises(StorageError):
        reader.rate_limiter = MinSize(1)
    with pytest.raises((ValueError, StorageError)):
        reader.storage.lanes.store.set_rate_limit(None)
    reader.storage.close()


@pytest.mark.parametrize("word", [24, 32, 40, 48])
def test_a_limiter_of_a_damaged_file_is_an_error_and_can_be_set_anew(tmp_path, word):
    rb = mapped(tmp_path, SampleToInsertRatio(1.0, 4, error_buffer=8))
    rb.extend(rows(8))
    rb.storage.close()
    [file] = [path for path in tmp_path.iterdir() if path.stat().st_size > 8192]
    with open(file, "r+b") as damaged:
        damaged.seek(248)  # consumers_offset: docs/store-format.md
        at = int.from_bytes(damaged.read(8), "little")
        damaged.seek(at + word)
        damaged.write(np.float64("nan").tobytes())
    with pytest.raises(StorageError, match="the store's rate limiter is damaged"):
        mapped(tmp_path, SampleToInsertRatio(1.0, 4, error_buffer=8))
    again = mapped(tmp_path)
    with pytest.raises(StorageError, match="the store's rate limiter is damaged"):
        again.extend(rows(1))
    again.rate_limiter = None
    again.rate_limiter = MinSize(4)
    again.extend(rows(1))
    assert again.sample().shape == (4,) and len(again) == 9


def test_a_store_of_before_refuses_a_limiter_and_is_used_as_ever(tmp_path, monkeypatch):
    import engram._native as native

    create = native.Store.create
    monkeypatch.setattr(native.Store, "create", functools.partial(create, flow=False))
    storage = LazyTensorStorage(100)
    rb = buffer(storage=storage)
    rb.extend(rows(8))
    monkeypatch.undo()
    assert rb.sample().shape == (4,) and rb.stats().samples is None and rb.rate_limiter is None
    with pytest.raises(StorageError, match="had no rate limiter: `engram convert`"):
        rb.rate_limiter = MinSize(4)
    rb.rate_limiter = None
    assert rb.sample(wait=True).shape == (4,)


# ---- what is kept ----
def test_counts_are_saved_and_loaded_with_the_rows(tmp_path):
    rb = buffer(SampleToInsertRatio(1.0, 4, error_buffer=8))
    rb.extend(rows(10))
    rb.sample(), rb.sample()
    rb.dumps(tmp_path)
    rb.sample()
    rb.loads(tmp_path)
    assert counts(rb) == (10, 8, 10)
    other = buffer(SampleToInsertRatio(1.0, 4, error_buffer=8), storage=LazyTensorStorage(64, shared=True, lanes=2))
    other.loads(tmp_path)
    assert counts(other)[1:] == (8, 10)
    plain = buffer()
    plain.loads(tmp_path)
    assert plain.rate_limiter is None
    plain.dumps(tmp_path / "plain")
    rb.loads(tmp_path / "plain")
    assert counts(rb) == (4, 0, 10)  # without a debt


@pytest.mark.parametrize(
    "limiter",
    [
        SampleToInsertRatio(2.0, 4),
        SampleToInsertRatio(1.0, error_buffer=8),
        SampleToInsertRatio(1, behind=None),
        MinSize(3),
    ],
    ids=repr,
)
def test_a_buffer_that_is_made_anew_from_a_checkpoint_has_its_limiter_and_counts(tmp_path, limiter):
    rb = buffer(limiter)
    rb.extend(rows(10))
    rb.sample()
    rb.dumps(tmp_path)
    again = engram.load(tmp_path)
    assert again.rate_limiter == limiter and counts(again) == counts(rb)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))], ids=["copy", "pickle"])
def test_a_copy_keeps_the_same_bound_over_rows_of_its_own(make):
    rb = buffer(SampleToInsertRatio(1.0, 4, error_buffer=8))
    rb.extend(rows(10))
    rb.sample()
    twin = make(rb)
    twin.sample()
    assert twin.rate_limiter == rb.rate_limiter and counts(rb) == (10, 4, 10)


def test_rows_that_were_lost_in_a_power_cut_leave_no_debt(tmp_path):
    rb = mapped(tmp_path, SampleToInsertRatio(1.0, 4, error_buffer=8))
    rb.extend(rows(10))
    rb.sample(), rb.sample(), rb.sample()
    store = rb.storage.lanes.store
    store.recover()
    assert counts(rb) == (4, 0, 10)


@pytest.mark.parametrize("ndim", [1, 2])
def test_rows_are_counted_of_all_environments(ndim):
    rb = buffer(SampleToInsertRatio(1.0, 4, error_buffer=8), storage=LazyTensorStorage(100, ndim=ndim))
    rb.extend(torch.stack([rows(5), rows(5)]) if ndim == 2 else rows(10))
    assert counts(rb) == (10, 0, 10)


def test_rows_are_bound_before_a_thread_that_samples_can_see_them(monkeypatch):
    rb, seen, use = buffer(MinSize(8)), [], flow.Flow.use

    def used(self, rows, **options):
        use(self, rows, **options)
        seen.append((self.limit is not None, rb.storage.access.table.rows is rows))

    monkeypatch.setattr(flow.Flow, "use", used)
    rb.extend(rows(1))
    assert seen == [(True, False)]


def test_delayed_parts_get_the_limiter_when_they_are_made():
    rb = buffer(MinSize(4), delayed_init=True)
    rb.extend(rows(3))
    assert rb.rate_limiter == MinSize(4) and not rb.can_sample()


def test_names_of_limiters_say_what_was_given():
    shown = [
        SampleToInsertRatio(4, 1_000),
        SampleToInsertRatio(0.5, error_buffer=3),
        SampleToInsertRatio(2, ahead=0, behind=None),
        MinSize(7),
    ]
    assert [eval(repr(one)) for one in shown] == shown
    assert len(set(shown)) == 4 and all(a != b for a, b in itertools.combinations(shown, 2)) and shown[0] != 4


@pytest.mark.parametrize(
    ("sampler", "batch_size"),
    [
        (lambda: SliceSampler(slice_len=20, end_key=("next", "done"), strict_length=True), 20),
        (lambda: SamplerWithoutReplacement(drop_last=True), 32),
    ],
    ids=["long slices", "full batches"],
)
def test_who_waits_for_a_batch_that_its_sampler_lacks_lets_more_be_written(sampler, batch_size):
    rb = buffer(SampleToInsertRatio(1.0), sampler=sampler(), batch_size=batch_size)
    rb.extend(rows(1))
    thread, results = in_thread(lambda: rb.sample(wait=True))
    for i in range(1, 40):
        rb.extend(rows(1, i), timeout=NEVER)
    end(thread)
    assert results[0].shape == (batch_size,)


def test_a_loop_that_asks_an_ensemble_never_waits():
    for seed in range(20):
        members = [buffer(SampleToInsertRatio(1.0, 8, ahead=8, behind=99)) for _ in range(2)]
        both = ReplayBufferEnsemble(*members, batch_size=4, num_buffer_sampled=2)
        torch.manual_seed(seed)
        for _ in range(10):
            for rb in members:
                rb.extend(rows(8))
            while both.can_sample():
                both.sample()
        assert sum(counts(rb)[1] for rb in members) > 50


def test_a_thread_that_waits_takes_no_lock_from_others():
    rb = buffer(SampleToInsertRatio(1.0, 4, ahead=4, behind=4))
    rb.extend(rows(20))
    thread, results = in_thread(lambda: rb.extend(rows(1)))
    assert comes(lambda: waits(rb, inserts=True))
    began = time.monotonic()
    assert len(rb) == 20 and rb[0] is not None and rb.stats().rows == 20
    assert rb.remove([3]) == 1 and time.monotonic() - began < NEVER and not results
    rb.shutdown()
    end(thread)


# ---- what changes while somebody waits ----
def _waiting_sampler(rb):
    thread, results = in_thread(rb.sample)
    assert comes(lambda: waits(rb, inserts=False))
    return thread, results


def test_a_limiter_that_is_taken_away_ends_the_wait_of_who_samples():
    rb = buffer(MinSize(8))
    rb.extend(rows(5))
    thread, results = _waiting_sampler(rb)
    rb.rate_limiter = None
    end(thread)
    assert results[0].shape == (4,)


def test_a_batch_that_another_limiter_never_lets_be_drawn_does_not_wait_for_it():
    rb = buffer(SampleToInsertRatio(1.0, 4, error_buffer=16), batch_size=16)
    rb.extend(rows(3))
    thread, results = _waiting_sampler(rb)
    rb.rate_limiter = SampleToInsertRatio(1.0, 1, error_buffer=4)
    end(thread)
    assert "a batch of 16 rows is more than" in str(results[0])


def test_what_its_sampler_cannot_draw_is_said_though_the_limiter_would_let_it():
    sampler = SliceSampler(slice_len=8, end_key=("next", "done"), strict_length=True)
    rb = buffer(MinSize(3), batch_size=8, sampler=sampler, storage=LazyTensorStorage(100, shared=True))
    rb.extend(rows(5))
    with pytest.raises(TimeoutError, match="its sampler has no batch of 8 among the 5 rows"):
        rb.sample(timeout=0.01)
    rb.rate_limiter = SampleToInsertRatio(1.0, 3, ahead=8, behind=1)
    with pytest.raises(TimeoutError, match="among the 5 rows that are stored; writers"):
        rb.sample(timeout=0.01)
    rb.extend(rows(2))
    with pytest.raises(TimeoutError, match=r"among the 7 rows that are stored, and who writes waits for draws: nobody"):
        rb.sample(timeout=0.01)


def test_a_thread_that_waits_for_a_member_leaves_the_draws_of_others_to_their_members():
    bound, free = buffer(MinSize(8)), buffer(MinSize(8))
    free.extend(rows(8))
    both = ReplayBufferEnsemble(bound, free, batch_size=4, num_buffer_sampled=1, p=[1.0, 0.0])
    thread, results = in_thread(both.sample)
    assert comes(lambda: waits(bound, inserts=False))
    both.sampler.p = [0.0, 1.0]
    for _ in range(3):
        assert (both.sample(return_info=True)[1]["buffer_ids"] == 1).all()
    assert counts(bound)[1] == 0 and counts(free)[1] == 12
    bound.extend(rows(8))
    end(thread)
    assert results[0].numel() == 4 and counts(bound)[1] == 4


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (lambda rb: rb.shutdown(), "was shut down"),
        (lambda rb: rb.report_failure(ZeroDivisionError("in the environment")), "in the environment"),
    ],
    ids=["shutdown", "failure"],
)
def test_what_ends_the_waits_of_an_ensemble_ends_those_for_its_members(stop, text):
    members = [buffer(MinSize(8)) for _ in range(2)]
    both = ReplayBufferEnsemble(*members, batch_size=4)
    thread, results = in_thread(both.sample)
    assert comes(lambda: any(waits(rb, inserts=False) for rb in members))
    stop(both)
    end(thread)
    assert text in str(results[0])


@pytest.mark.parametrize("sampler", [SamplerWithoutReplacement(), PrioritizedSampler(100, 0.7, 0.5)], ids=type)
def test_who_waits_goes_on_with_another_sampler_and_storage_and_ends_at_shutdown(sampler):
    rb = buffer(MinSize(8))
    waiting_now = [_waiting_sampler(rb) for _ in range(2)]
    rb.set_sampler(sampler)
    rb.set_storage(LazyTensorStorage(50))
    rb.extend(rows(9))
    for thread, results in waiting_now:
        end(thread)
        assert results[0].shape == (4,)
    rb.rate_limiter = MinSize(20)
    thread, results = _waiting_sampler(rb)
    rb.set_rng(torch.Generator())
    rb.shutdown()
    end(thread)
    assert "was shut down" in str(results[0])


def test_who_waits_to_write_ends_at_shutdown_after_parts_were_replaced():
    rb = buffer(SampleToInsertRatio(1.0, 4, ahead=4, behind=4))
    rb.extend(rows(20))
    thread, results = in_thread(lambda: rb.extend(rows(1)))
    assert comes(lambda: waits(rb, inserts=True))
    rb.set_sampler(SamplerWithoutReplacement())
    rb.shutdown()
    end(thread)
    assert "was shut down" in str(results[0]) and len(rb) == 20


def test_a_storage_that_does_not_fit_the_limiter_is_not_taken():
    rb = buffer(SampleToInsertRatio(1.0, 50, error_buffer=8))
    rb.extend(rows(60))
    before = rb.storage
    with pytest.raises(ValueError, match="the storage has room for 10"):
        rb.set_storage(LazyTensorStorage(10))
    assert rb.storage is before and len(rb.sample()) == 4 and counts(rb) == (60, 4, 60)


@pytest.mark.parametrize("later", [SampleToInsertRatio(5.0, 4), None], ids=repr)
def test_what_is_sent_of_a_buffer_keeps_the_bound_that_others_have_set_by_now(tmp_path, later):
    first, other = mapped(tmp_path, SampleToInsertRatio(2.0, 4)), mapped(tmp_path)
    first.extend(rows(8))
    other.rate_limiter = later
    twin = pickle.loads(pickle.dumps(first))
    assert twin.rate_limiter == first.rate_limiter == later
    assert copy.deepcopy(first).rate_limiter == later


def test_other_threads_may_end_a_wait_and_those_of_the_library_may_not():
    done = run_program(
        """
        import threading
        from engram.data import LazyTensorStorage
        from engram.store.waits import nobody_else

        lanes, stop = LazyTensorStorage(10).lanes, threading.Event()
        for name in ("engram-prefetch_0", "a learner"):
            threading.Thread(target=stop.wait, name=name).start()
            print(nobody_else(lanes))
        print(nobody_else(LazyTensorStorage(10, shared=True).lanes))
        stop.set()
        """
    )
    assert done.stdout.split() == ["True", "False", "False"], done.stderr
