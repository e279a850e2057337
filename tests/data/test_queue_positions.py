"""Rows that are trained once, as a checkpoint remembers where the consumer was: `position`, `commit` and `seek`."""

import functools
import json
import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.children import fork
from contracts.waiting import NEVER, seems_alone
from engram.data import LazyMemmapStorage, LazyTensorStorage, QueueSampler, RandomSampler, ReplayBuffer

pytestmark = pytest.mark.filterwarnings("ignore:sample was called with batch_size=:UserWarning")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    seems_alone(monkeypatch)


def queue(storage=None, capacity=16, batch_size=4, begins=True, **settings):
    storage = LazyTensorStorage(capacity) if storage is None else storage
    rb = ReplayBuffer(storage=storage, sampler=QueueSampler(**{"commit": "manual", **settings}), batch_size=batch_size)
    if begins:
        rb.seek(None)
    return rb


def opened(folder, **arguments):
    storage = LazyMemmapStorage(16, scratch_dir=folder, shared_init=True, existsok=True)
    return queue(storage, **{"begins": False, **arguments})


def taken(rb, n=None, **how):
    return rb.sample(n, **how).flatten().tolist()


def in_child(work):
    pid = fork(work)
    assert os.waitpid(pid, 0)[1] == 0


# ---- a model and its checkpoints ----
PROGRAM = st.lists(st.tuples(st.sampled_from("eeesssskcbB"), st.integers(1, 6)), min_size=5, max_size=60)


@settings(max_examples=100, deadline=None)
@given(program=PROGRAM, capacity=st.integers(4, 16), lanes=st.sampled_from([1, 3]))
def test_each_row_is_once_in_the_line_of_models_wherever_it_goes_on_from(program, capacity, lanes):
    """k: a kill, after which the newest checkpoint is loaded; c: one that is committed; b: one that is not, and
    B: its commit."""
    rb = queue(LazyTensorStorage(capacity * lanes, shared=lanes > 1, lanes=lanes if lanes > 1 else None))
    model, number, saved, pending = [], 0, ([], None), None
    for what, n in program:
        if what == "e":
            try:
                rb.extend(torch.arange(number, number + n), timeout=0)
                number += n
            except TimeoutError as error:
                text = str(error)
                number += int(text.split("first ")[1].split(" of")[0]) if "first" in text else 0
        elif what == "s":
            if rb.can_sample(n):
                model += taken(rb, n)
        elif what == "k":
            assert rb.seek(saved[1]) == 0
            model = list(saved[0])
            pending = None
        elif what == "c":
            if rb.storage.initialized:
                with rb.committing() as position:
                    saved = list(model), json.loads(json.dumps(position))
                pending = None
        elif what == "b" and rb.storage.initialized:
            pending = rb.position()
            saved = list(model), pending
        elif what == "B" and pending is not None:
            rb.commit(pending)
            pending = None
    model += taken(rb, rb.stats().waiting) if rb.stats().waiting else []
    assert sorted(model) == list(range(number))


def test_a_batch_that_was_taken_ahead_is_not_in_the_position_of_the_one_before():
    rb = queue()
    rb.extend(torch.arange(12))
    first, info = rb.sample(return_info=True)
    rb.sample()
    position = rb.position(info)
    rb.commit(position)
    assert rb.stats().uncommitted == 4
    assert rb.seek(position) == 0 and taken(rb) == [4, 5, 6, 7] and first.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="of a batch of a queue"):
        rb.position({"index": torch.arange(3)})
    with pytest.raises(TypeError, match="position takes the info of a batch"):
        rb.position(first)


def test_rows_keep_their_places_until_they_are_committed():
    rb = queue(capacity=8)
    rb.extend(torch.arange(8))
    assert taken(rb) == [0, 1, 2, 3] and rb.stats().uncommitted == 4
    with pytest.raises(
        TimeoutError, match=r"4 rows wait to be handed out, of 8 that fit, 4 were handed out and are not"
    ):
        rb.extend(torch.arange(8, 9), timeout=0)
    rb.commit(rb.position())
    rb.extend(torch.arange(8, 12))
    assert taken(rb, 8) == list(range(4, 12)) and rb.stats().uncommitted == 8


def test_rows_that_were_overwritten_wait_for_no_commit():
    rb = queue(capacity=8, full="overwrite")
    rb.extend(torch.arange(8))
    taken(rb, 6)
    rb.extend(torch.arange(8, 12))
    assert rb.stats().uncommitted == 2
    rb.extend(torch.arange(12, 20))
    assert rb.stats().uncommitted == 0


def test_a_checkpoint_that_fails_lets_nothing_go():
    rb = queue(capacity=8)
    rb.extend(torch.arange(8))
    taken(rb)
    with pytest.raises(OSError, match="no space"), rb.committing():
        raise OSError("no space")
    assert rb.stats().uncommitted == 4 and rb.seek(None) == 0 and taken(rb) == [0, 1, 2, 3]


def test_going_back_before_what_was_committed_says_how_many_rows_are_gone():
    rb = queue(capacity=8)
    rb.extend(torch.arange(8))
    begin = rb.position()
    taken(rb, 6)
    rb.commit(rb.position())
    rb.extend(torch.arange(8, 12))
    assert rb.seek(begin) == 4 == rb.stats().missed
    assert taken(rb) == [4, 5, 6, 7] and taken(rb) == [8, 9, 10, 11]


def test_rows_that_are_gone_are_told_once():
    rb = queue(capacity=8, full="overwrite")
    rb.extend(torch.arange(12))
    assert (rb.seek(None), rb.seek(None)) == (4, 0) and rb.stats().missed == 4


def test_the_version_that_trains_goes_back_with_the_position():
    rb = queue(max_staleness=None)
    rb.extend(torch.arange(8))
    rb.sampler.consumer_version = 5
    position = rb.position()
    rb.sampler.consumer_version = 9
    rb.seek(position)
    assert rb.sampler.consumer_version == 5


def test_a_seek_before_there_are_rows_holds_when_they_come(tmp_path):
    rb = opened(tmp_path)
    assert rb.seek(None) == 0
    in_child(lambda: opened(tmp_path).extend(torch.arange(8)))
    assert taken(rb) == [0, 1, 2, 3]
    position = rb.position()
    fresh = queue(begins=False)
    fresh.seek(position)
    fresh.extend(torch.arange(8))
    with pytest.raises(ValueError, match=r"one of another store.*rb.seek\(None\)"):
        fresh.sample()


# ---- sessions ----
def test_the_first_sample_without_a_seek_is_an_error_and_one_beside_a_living_learner_is_not(tmp_path):
    rb = opened(tmp_path)
    rb.extend(torch.arange(16))
    with pytest.raises(
        RuntimeError, match=r'is told first which rows the model has: rb.seek\(checkpoint\["position"\]\)'
    ):
        rb.sample()
    rb.seek(None)
    got = torch.zeros(16, dtype=torch.int64).share_memory_()

    def rank():
        other = opened(tmp_path)
        got[other.sample().flatten()] += 1

    in_child(rank)
    got[rb.sample().flatten()] += 1
    assert got.tolist() == [1] * 8 + [0] * 8


def test_a_learner_that_was_replaced_takes_nothing_and_is_told(tmp_path):
    rb = opened(tmp_path, begins=True)
    rb.extend(torch.arange(16))
    taken(rb)
    position = rb.position()

    def another():
        other = opened(tmp_path)
        assert other.seek(position) == 0
        assert taken(other) == [4, 5, 6, 7]
        with other.committing():
            pass

    in_child(another)
    for use in (rb.sample, rb.position, functools.partial(rb.commit, position)):
        with pytest.raises(RuntimeError, match=r"has called seek\(\) on this queue since"):
            use()
    assert rb.seek(None) == 0 and taken(rb) == [8, 9, 10, 11]


def test_a_learner_that_ended_leaves_no_session_to_join(tmp_path):
    def learner():
        rb = opened(tmp_path, begins=True)
        rb.extend(torch.arange(8))
        rb.sample()

    in_child(learner)
    rb = opened(tmp_path)
    with pytest.raises(RuntimeError, match="is told first"):
        rb.sample()
    assert rb.seek(None) == 0 and taken(rb) == [0, 1, 2, 3]


# ---- what is refused ----
def test_positions_of_other_rows_are_refused(tmp_path):
    rb = queue()
    with pytest.raises(RuntimeError, match="nothing has been written"):
        rb.position()
    rb.extend(torch.arange(8))
    position = rb.position()
    for wrong, error, text in [
        (5, TypeError, "a position is what rb.position"),
        ({**position, "rows": [0, 0]}, ValueError, "were replaced since"),
        ({**position, "rows": ["0"]}, ValueError, "the position"),
        ({**position, "rows": [100]}, ValueError, "lies beyond the rows of the store"),
        ({**position, "store": "0" * 32}, ValueError, "one of another store"),
        ({"store": position["store"]}, ValueError, "the position"),
    ]:
        with pytest.raises(error, match=text):
            rb.seek(wrong)
        if text != "lies beyond the rows of the store":
            with pytest.raises(error, match=text):
                rb.commit(wrong)
    rb.empty()
    rb.extend(torch.arange(8))
    with pytest.raises(ValueError, match="by `empty` or `loads`"):
        rb.seek(position)
    plain = ReplayBuffer(storage=LazyTensorStorage(8), sampler=RandomSampler())
    for use in (plain.position, functools.partial(plain.commit, position), functools.partial(plain.seek, None)):
        with pytest.raises(TypeError, match=r"is of a queue, and the sampler of this buffer is RandomSampler\(\)"):
            use()
    with pytest.raises(ValueError, match="Use num_workers=0"):
        rb._sampler._split_among_workers(None)


def test_rows_that_only_a_commit_frees_are_told_at_once():
    rb = queue(capacity=8)
    rb.extend(torch.arange(8))
    taken(rb, 8)
    with pytest.raises(RuntimeError, match=r"no room for any: 8 of 8 rows were handed out and wait for commit\(\)"):
        rb.sample()
    rb.position()  # from now on a thread that saves may commit

    position = rb.position()
    with pytest.raises(TimeoutError, match=r"8 of 8 wait for commit\(\)"):
        rb.sample(timeout=0.01)
    thread = threading.Thread(target=rb.commit, args=(position,))
    thread.start()
    thread.join(NEVER)
    rb.extend(torch.arange(8, 12))
    assert taken(rb) == [8, 9, 10, 11]


def test_saved_rows_bring_what_was_handed_out_and_what_was_committed(tmp_path):
    rb = queue(capacity=12)
    rb.extend(torch.arange(12))
    taken(rb)
    rb.commit(rb.position())
    taken(rb)
    rb.dumps(tmp_path)
    twin = queue(capacity=12)
    twin.loads(tmp_path)
    assert twin.stats().uncommitted == 4 and twin.stats().waiting == 4
    assert twin.seek(None) == 0 and taken(twin) == [4, 5, 6, 7]
    with pytest.raises(ValueError, match="another store"):
        twin.seek(rb.position())
