"""Stores with several lanes: which lane a new writer takes, what it evicts there, and the warning about that."""

from __future__ import annotations

import multiprocessing as mp
import warnings

import pytest
import torch

from contracts.children import Child, Signal
from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from engram.store.lanes import Lanes
from engram.testing import numbers, steps

KINDS = {
    "shared memory": lambda path, n, lanes: LazyTensorStorage(n, shared=True, lanes=lanes),
    "temporary file": lambda path, n, lanes: LazyMemmapStorage(n, lanes=lanes),
    "named file": lambda path, n, lanes: LazyMemmapStorage(n, scratch_dir=path, lanes=lanes),
}


WAYS = {
    "add": lambda rb: rb.add(steps(100, 101)[0]),
    "extend": lambda rb: rb.extend(steps(100, 101)),
    "list": lambda rb: rb.extend([steps(100, 101)[0]]),
    "dict": lambda rb: rb.extend(steps(100, 101).to_dict()),
    "writer": lambda rb: rb.writer.extend(steps(100, 101)),
}


@pytest.fixture(params=KINDS)
def make(request, tmp_path):
    return lambda n, lanes: ReplayBuffer(storage=KINDS[request.param](tmp_path / "store", n, lanes), batch_size=8)


def write(rb, first, n, at_a_time=20):
    """Writes numbered steps in a forked child; returns the slots of the first and the last one, and its warnings."""

    def work():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            index = [
                i for k in range(first, first + n, at_a_time)
                for i in rb.extend(steps(k, min(k + at_a_time, first + n))).tolist()
            ]  # fmt: skip
        return index[0], index[-1], [str(w.message) for w in caught]

    return Child(work).result()


@pytest.mark.quick
def test_writers_that_follow_each_other_keep_all_rows_while_there_are_empty_lanes(make):
    rb = make(500, 5)
    rb.extend(steps(0, 1))
    assert write(rb, 1000, 60) == (100, 159, [])
    assert write(rb, 2000, 60) == (200, 259, [])
    assert len(rb) == 121
    assert numbers(rb[:]) == [0, *range(1000, 1060), *range(2000, 2060)]


def test_writers_side_by_side_that_come_and_go_keep_all_rows(make):
    rb = make(5000, 5)
    rb.extend(steps(0, 1))
    children = [mp.get_context("fork").Process(target=write, args=(rb, 1000 * k, 500)) for k in range(1, 5)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4
    assert sorted(numbers(rb[:])) == [0, *(1000 * k + i for k in range(1, 5) for i in range(500))]


@pytest.mark.quick
def test_a_new_writer_takes_the_lane_with_the_fewest_rows_then_that_whose_newest_row_is_the_oldest(make):
    rb = make(300, 3)
    rb.extend(steps(0, 100))
    rb.storage.release()
    assert write(rb, 1000, 60)[0] == 100
    assert write(rb, 2000, 70)[0] == 200
    assert write(rb, 3000, 40)[:2] == (160, 199)  # the fewest rows
    assert write(rb, 4000, 30)[:2] == (270, 299)
    assert sorted(numbers(rb[:]))[100:] == [
        i for first, n in ((1000, 60), (2000, 70), (3000, 40), (4000, 30)) for i in range(first, first + n)
    ]
    assert write(rb, 5000, 10)[0] == 0  # all are full: the newest row of lane 0 is the oldest one
    assert write(rb, 6000, 10)[0] == 100
    assert write(rb, 7000, 10)[0] == 200
    assert write(rb, 8000, 10)[0] == 10


def test_a_file_of_before_times_were_noted_counts_as_the_oldest(make):
    rb = make(20, 2)
    rb.extend(steps(0, 10))
    assert write(rb, 100, 10)[0] == 10
    store = rb.storage.lanes.store
    assert store.lane(1)["written_at"] > store.lane(0)["written_at"] > 0
    rb.storage.release()
    store.memory()[1024 + 512 + 344 :][:8] = 0  # lane 1, as an older engram leaves it
    assert store.lane(1)["written_at"] == 0
    assert write(rb, 200, 1)[0] == 10


@pytest.mark.quick
def test_a_process_takes_the_lane_again_that_it_gave_back_itself_without_a_seam(make):
    rb = make(300, 3)
    assert rb.extend(steps(0, 10)).tolist() == [*range(10)]
    rb.storage.release()
    assert write(rb, 1000, 5)[0] == 100
    assert rb.extend(steps(10, 12)).tolist() == [10, 11]
    assert rb.storage.lanes.states()[0]["seams"] == []
    rb.storage.release()
    rb.storage.lanes.mark_seam()
    assert rb.extend(steps(12, 14)).tolist() == [12, 13]  # its own lane still, behind a seam
    assert rb.storage.lanes.states()[0]["seams"] == [12]


def test_a_process_takes_another_lane_where_its_own_was_written_to_meanwhile(make):
    rb = make(30, 3)
    rb.extend(steps(0, 2))
    rb.storage.release()
    go, there = Signal(), Signal()
    held = [Child(lambda lane=lane: (rb.storage.lanes.hold_lane(lane), there.send(), go.wait())) for lane in (1, 2)]
    for _ in held:
        there.wait()
    assert write(rb, 100, 3)[0] == 2  # the others are held
    for _ in held:
        go.send()
    for child in held:
        child.result()
    assert rb.extend(steps(2, 4)).tolist() == [10, 11]
    assert numbers(rb[:]) == [0, 1, 100, 101, 102, 2, 3]


def test_a_lane_that_was_written_to_between_the_look_and_its_lock_is_given_back(make, monkeypatch):
    rb = make(30, 3)
    rb.extend(steps(0, 2))
    rb.storage.release()
    rb.storage.lanes._released.clear()
    looked, ordered = [], Lanes.by_room

    def look(self):
        order = ordered(self)
        looked.append(order)
        if len(looked) == 1:  # another process takes the first of them, writes and ends
            write(rb, 100, 4)
        return order

    monkeypatch.setattr(Lanes, "by_room", look)
    assert rb.extend(steps(2, 4)).tolist() == [20, 21]
    assert looked[0] == [1, 2, 0] and looked[-1] == [2, 0, 1]
    assert Child(lambda: rb.extend(steps(200, 201)).tolist()).result() == [2]  # nobody holds lane 1 or 0


def test_the_first_row_of_an_earlier_writer_that_is_evicted_is_told_once_with_figures(make):
    rb = make(300, 3)
    rb.extend(steps(0, 1))
    assert write(rb, 1000, 60)[2] == write(rb, 2000, 60)[2] == []
    first, last, told = write(rb, 3000, 100)  # behind 60 rows: 40 fit
    assert (first, last) == (160, 159)
    assert len(told) == 1
    for figure in ("lane 1 of 3", "one of 60", "161 of 300 steps", "a lane of 100 steps"):
        assert figure in told[0]
    assert write(rb, 4000, 40)[2] == []  # lane 2: it is just filled
    assert len(write(rb, 5000, 1)[2]) == 1  # and now they are full


@pytest.mark.parametrize("path", WAYS)
@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
def test_every_way_of_writing_warns_before_it_evicts(buffer, path):
    rb = buffer(storage=LazyTensorStorage(20, shared=True, lanes=2))
    rb.extend(steps(0, 10))
    rb.storage.release()
    assert write(rb, 10, 10) == (10, 19, [])

    def work():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            before = [len(caught)]
            for _ in range(2):
                WAYS[path](rb)
                before.append(len(caught))
        return before, sorted(numbers(rb[:]))

    assert Child(work).result() == ([0, 1, 1], [*range(2, 20), 100, 100])
    if buffer is TensorDictReplayBuffer:
        assert rb[:]["index"].tolist() == [*range(20)]


def test_a_process_is_told_once_whichever_lanes_it_takes(make):
    rb = make(20, 2)
    rb.extend(steps(0, 10))
    rb.storage.release()
    assert write(rb, 10, 10)[:2] == (10, 19)

    def work():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            index = rb.add(steps(100, 101)[0])
            rb.storage.release()
            write(rb, 200, 1)  # in the other lane, as this one's newest row is newer
            write(rb, 300, 1)  # in this one
            index = [index, rb.add(steps(101, 102)[0])]
        return index, len([w for w in caught if "earlier writer" in str(w.message)])

    assert Child(work).result() == ([0, 11], 1)


def test_a_lane_that_is_held_by_number_after_it_was_left_is_appended_to_without_a_warning(make, recwarn):
    rb = make(40, 2)
    rb.extend(steps(0, 1))
    write(rb, 100, 20)
    storage, lanes = rb.storage, rb.storage.lanes
    storage.release()
    write(rb, 200, 10)
    assert lanes.hold() == 0
    storage.release()
    lanes.hold_lane(0)
    parts = [leaf.contiguous() for leaf in storage.read_packed(torch.arange(10), by_leaf=True).batch]
    assert storage.append_leaves(0, parts).tolist() == [*range(11, 20), 0]
    assert not recwarn.list


def test_rows_that_a_process_loads_itself_are_no_earlier_writers(make, tmp_path):
    rb = make(40, 2)
    rb.extend(steps(0, 20))
    rb.dumps(tmp_path / "saved")
    rb.empty()
    for k in range(2):
        rb.storage.release()
        rb.storage.lanes._released.clear()  # as another process
        rb.extend(steps(10 * k, 10 * k + 10))
    rb.storage.release()
    rb.storage.lanes._released.clear()
    rb.extend(steps(50, 51))  # behind ten rows
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb.loads(tmp_path / "saved")
        for _ in range(5):
            rb.extend(steps(60, 80))


def test_rows_of_before_an_empty_are_nobodys(make):
    rb = make(20, 2)
    rb.extend(steps(0, 10))
    go, there = Signal(), Signal()

    def take():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rb.storage.lanes.hold()
            there.send()
            go.wait()
            rb.extend(steps(50, 60))
        return [str(w.message) for w in caught]

    rb.storage.release()
    rb.storage.lanes.hold_lane(1)
    child = Child(take)
    there.wait()
    rb.storage.lanes.store.empty(False)  # as one process that is alone would do
    go.send()
    assert child.result() == []


def test_a_process_that_loads_goes_on_in_the_lane_of_the_writer_that_saved(make, tmp_path):
    rb = make(30, 3)
    rb.extend(steps(0, 2))
    Child(lambda: (rb.extend(steps(10, 13)), rb.dumps(tmp_path / "saved"))).result()
    other = ReplayBuffer(storage=LazyTensorStorage(30, shared=True, lanes=3))
    other.loads(tmp_path / "saved")
    assert other.extend(steps(13, 15)).tolist() == [13, 14]
    assert [lane["seams"] for lane in other.storage.lanes.states()] == [[2], [], []]
