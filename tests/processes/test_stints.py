"""Stores of several lanes: writers move on, and the newest `max_size` steps are kept, whoever writes."""

from __future__ import annotations

import multiprocessing as mp

import pytest
import torch
from tensordict import TensorDict

import engram
from contracts.children import Child, Signal
from engram.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from engram.errors import StorageInUseError
from engram.store.places import lanes_for
from engram.testing import numbers, steps
from processes.held_lanes import HeldLaneCount

KINDS = {
    "shared memory": lambda path, n, lanes: LazyTensorStorage(n, shared=True, lanes=lanes),
    "temporary file": lambda path, n, lanes: LazyMemmapStorage(n, lanes=lanes),
    "named file": lambda path, n, lanes: LazyMemmapStorage(n, scratch_dir=path, lanes=lanes),
}
WAYS = {
    "add": lambda rb, i: [rb.add(steps(i, i + 1)[0])],
    "extend": lambda rb, i: rb.extend(steps(i, i + 7)).tolist(),
    "list": lambda rb, i: rb.extend([step.clone() for step in steps(i, i + 7)]).tolist(),
    "dict": lambda rb, i: rb.extend(steps(i, i + 7).to_dict()).tolist(),
    "writer": lambda rb, i: rb.writer.extend(steps(i, i + 7)).tolist(),
}


@pytest.fixture(params=KINDS)
def make(request, tmp_path):
    return lambda n, lanes: ReplayBuffer(storage=KINDS[request.param](tmp_path / "store", n, lanes), batch_size=8)


def write(rb, first, n, at_a_time=20):
    """Writes numbered steps in a forked child; returns their slots."""
    return Child(
        lambda: [
            i for k in range(first, first + n, at_a_time)
            for i in rb.extend(steps(k, min(k + at_a_time, first + n))).tolist()
        ]
    ).result()  # fmt: skip


@pytest.mark.quick
def test_one_writer_fills_the_whole_storage_as_one_ring(make):
    rb = make(1000, 8)
    for first in range(0, 2600, 130):
        assert rb.extend(steps(first, first + 130)).tolist() == [i % 1000 for i in range(first, first + 130)]
        assert (len(rb), rb.writer._cursor) == (min(first + 130, 1000), (first + 130) % 1000)
    assert sorted(numbers(rb[:])) == list(range(1600, 2600)) and rb.write_count == 2600


@pytest.mark.quick
def test_writers_that_follow_each_other_keep_all_rows(make):
    rb = make(500, 5)
    rb.extend(steps(0, 1))
    for k in range(1, 5):
        write(rb, 1000 * k, 100)
    assert sorted(numbers(rb[:])) == [0, *(1000 * k + i for k in range(1, 5) for i in range(100))]
    write(rb, 5000, 99), write(rb, 6000, 1)
    assert len(rb) == 500
    write(rb, 7000, 60)
    assert len(rb) == 500 and set(numbers(rb[:])) >= {*range(7000, 7060), 6000}


def test_one_writer_keeps_max_size_rows_in_a_storage_for_eight(make):
    rb = make(100_000, 8)
    for first in range(0, 130_000, 1300):
        rb.extend(steps(first, first + 1300))
        assert len(rb) == min(first + 1300, 100_000)
    assert sorted(numbers(rb[:])) == list(range(30_000, 130_000))


def test_writers_that_follow_each_other_keep_forty_thousand_rows(make):
    rb = make(50_000, 5)
    rb.extend(steps(0, 1))
    for k in range(1, 5):
        write(rb, 100_000 * k, 10_000, 500)
    assert sorted(numbers(rb[:])) == [0, *(100_000 * k + i for k in range(1, 5) for i in range(10_000))]


@pytest.mark.parametrize("many", [30, pytest.param(20_000, marks=pytest.mark.long)])
def test_each_of_many_processes_leaves_its_ten_rows(many, make):
    size = 5 * many  # half of what they write
    rb = make(size, 8)
    rb.extend(steps(0, 10))
    capacity = rb.storage.lanes.store.lane_capacity
    for k in range(1, many):
        write(rb, 10 * k, 10)
        assert len(rb) == min(10 * k + 10, rb.storage.max_size)
    assert min(numbers(rb[:])) >= 10 * many - rb.storage.max_size - capacity


def test_the_length_never_exceeds_max_size_beside_writers(make):
    rb = make(500, 3)
    rb.extend(steps(0, 1))
    children = [mp.get_context("fork").Process(target=write, args=(rb, 10_000 * k, 3000, 7)) for k in range(1, 4)]
    for child in children:
        child.start()
    before = 0
    while any(child.is_alive() for child in children):
        # Of rows that are just being replaced at most a piece of each writer's lane is left out.
        length, before = len(rb), max(before, len(rb))
        assert length <= rb.storage.max_size
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 3
    assert before and len(rb) == rb.storage.max_size


def test_more_writers_side_by_side_than_were_said_keep_all_rows(make):
    rb = make(6000, 2)
    rb.extend(steps(0, 1))
    children = [mp.get_context("fork").Process(target=write, args=(rb, 1000 * k, 500)) for k in range(1, 8)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 7
    assert sorted(numbers(rb[:])) == [0, *(1000 * k + i for k in range(1, 8) for i in range(500))]


def test_a_process_goes_on_in_its_lane_after_others_have_written(make):
    rb = make(300, 3)  # lanes of 50
    assert rb.extend(steps(0, 10)).tolist() == [*range(10)]
    rb.storage.release()
    assert write(rb, 1000, 5)[0] == 50
    assert rb.extend(steps(10, 12)).tolist() == [10, 11]
    assert rb.storage.lanes.states()[0]["seams"] == []
    rb.storage.release()
    rb.storage.mark_seam()
    assert rb.extend(steps(12, 14)).tolist() == [12, 13]  # its own lane still, behind a seam
    assert rb.storage.lanes.states()[0]["seams"] == [12]


@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("path", WAYS)
def test_every_way_of_writing_returns_the_slots_and_stores_the_index(buffer, path):
    rb = buffer(storage=LazyTensorStorage(30, shared=True, lanes=3))
    other = write(rb, 500, 2) if rb.extend(steps(0, 4)) is not None else None
    first = 1000
    for _ in range(9):  # over the ends of lanes and of the ring, in lanes that another one has begun
        index = WAYS[path](rb, first)
        assert numbers(rb[torch.tensor(index)]) == list(range(first, first + len(index)))
        first += len(index)
        write(rb, 600, 1)
    assert other is not None
    if buffer is TensorDictReplayBuffer:
        stored = torch.arange(30)[rb.storage.lanes.generations(torch.arange(30)) >= 0]
        assert rb[:]["index"].tolist() == stored.tolist()


def cuts(rb):
    """The seams between stored rows of each lane."""
    return [[seam for seam in lane["seams"] if seam < lane["published"]] for lane in rb.storage.lanes.states()]


def test_trajectories_are_cut_where_a_writer_moves_on_and_only_there(make):
    rb = make(120, 2)
    lanes, capacity = rb.storage._held_table.size.lanes, 120 // rb.storage._held_table.size.lanes
    rb.extend(steps(0, 120))
    assert cuts(rb) == [[] for _ in range(lanes)]
    rb.extend(steps(120, 120 + capacity + 3))
    assert cuts(rb)[:3] == [
        [],
        [capacity],
        [],
    ]  # lane 0 has only rows of its second round, whose first one is its oldest


def step(observation: float, next_observation: float) -> TensorDict:
    """A step of a trajectory that nothing but its observations tells from others."""
    rest = {"reward": torch.ones(1), "done": torch.zeros(1, dtype=torch.bool)}
    done = {"done": torch.zeros(1, dtype=torch.bool)}
    observed = torch.tensor([observation])
    return TensorDict(
        {"observation": observed, **done, "next": {"observation": torch.tensor([next_observation]), **rest}}
    )


def test_what_a_writer_knows_of_its_borders_comes_with_it_to_the_next_lane(make):
    rb = make(16, 2)
    capacity = rb.storage._held_table.size.max_size // rb.storage._held_table.size.lanes
    for k in range(capacity + 1):  # the last one begins a lane
        rb.add(step(k, k + 1))
    rb.add(step(100, 101))
    assert cuts(rb)[:2] == [[], [1]]


def test_borders_are_not_judged_by_what_another_writer_had_in_the_lane(make):
    rb = make(16, 2)
    size = rb.storage._held_table.size
    rb.add(step(0, 0))
    for k in range(1, size.max_size):
        rb.add(step(2 * k, 0))  # of this process no step shows what the one before it said

    def follow():
        for k in range(size.max_size):
            rb.add(step(k, k + 1))

    Child(follow).result()
    for k in range(3):
        rb.add(step(2 * k, 0))
    assert cuts(rb) == [[2 * size.max_size // size.lanes], *[[]] * (size.lanes - 1)]  # the begin of the stint only


def test_a_forked_process_takes_another_lane_than_its_parent(make):
    rb = make(300, 3)
    rb.extend(steps(0, 10))
    assert Child(lambda: rb.extend(steps(100, 105)).tolist()).result() == [*range(50, 55)]
    assert rb.extend(steps(10, 12)).tolist() == [10, 11]


def test_a_lane_of_a_process_that_was_killed_inside_an_extend_is_taken_over(make):
    rb = make(300, 3)
    rb.extend(steps(0, 1))
    store = rb.storage.lanes.store
    begun = Signal()

    def stop_inside():
        rb.storage.lanes.hold()
        rb.storage.lanes.store.begin_turn(1)
        begun.send()
        Signal().wait()

    child = Child(stop_inside)
    begun.wait()
    assert write(rb, 100, 5)[0] == 100  # lane 1 is busy
    child.kill()
    assert write(rb, 200, 5)[0] == 50
    assert (store.lane(1)["turn"], store.lane(1)["term"]) == (0, 1)


def test_who_waits_for_a_lane_in_vain_is_told_for_whom(monkeypatch):
    monkeypatch.setattr("engram.store.lanes._TURN_TIMEOUT", 0.2)
    rb = ReplayBuffer(storage=LazyTensorStorage(4, shared=True, lanes=2))
    rb.extend(steps(0, 1))
    begun, n = Signal(), rb.storage.lanes.store.lanes

    def stop_inside(lane):
        rb.storage.lanes.hold()
        rb.storage.lanes.store.begin_turn(lane)
        begun.send()
        Signal().wait()

    children = [Child(lambda lane=lane: stop_inside(lane)) for lane in range(n)]
    for _ in children:
        begun.wait()
    pids = "|".join(str(child.pid) for child in children)
    with pytest.raises(StorageInUseError, match=rf"{n} lanes.*0\.2 seconds.*process ({pids}).*larger lanes=n"):
        rb.extend(steps(1, 3))
    for child in children:
        child.kill()
    assert len(rb.extend(steps(1, 3))) == 2


def test_a_process_that_loads_goes_on_where_the_writer_was_that_saved(make, tmp_path):
    rb = make(60, 3)
    rb.extend(steps(0, 75))
    Child(lambda: (rb.extend(steps(100, 103)), rb.dumps(tmp_path / "saved"))).result()
    rb.dumps(tmp_path / "mine")
    for name, first, goes_on in (("saved", 103, True), ("mine", 75, True)):
        other = ReplayBuffer(storage=LazyTensorStorage(60, shared=True, lanes=3))
        other.loads(tmp_path / name)
        assert sorted(numbers(other[:])) == sorted(numbers(rb[:]))
        seams = [lane["seams"] for lane in other.storage.lanes.states()]
        expected = rb.storage.lanes.cursor if name == "mine" else None
        index = other.extend(steps(first, first + 2)).tolist()
        assert numbers(other[torch.tensor(index)]) == [first, first + 1] and goes_on
        if name == "mine":
            assert index[0] == expected
            assert [lane["seams"] for lane in other.storage.lanes.states()] == seams
        assert numbers(other[torch.tensor(index[:1]) - 1]) == [first - 1]


def test_a_load_goes_on_behind_a_seam_in_the_lane_of_the_save(make, tmp_path):
    rb = make(60, 3)
    rb.extend(steps(0, 75))
    rb.storage.mark_seam()
    rb.dumps(tmp_path / "saved")
    other = ReplayBuffer(storage=LazyTensorStorage(60, shared=True, lanes=3))
    other.loads(tmp_path / "saved")
    assert other.extend(steps(75, 77)).tolist() == rb.extend(steps(75, 77)).tolist() == [15, 16]
    assert cuts(other) == cuts(rb)


def test_a_save_with_as_many_lanes_as_writers_is_loaded_into_as_many(tmp_path):
    old = ReplayBuffer(storage=LazyTensorStorage(40, shared=True, lanes=HeldLaneCount(4)))  # as an engram of before
    old.extend(steps(0, 10))
    old.dumps(tmp_path / "saved")
    for rb in (
        ReplayBuffer(storage=LazyTensorStorage(40, shared=True, lanes=4)),
        engram.load(tmp_path / "saved"),
    ):
        if not len(rb):
            rb.loads(tmp_path / "saved")
        assert rb.storage.lanes.store.lanes == 4 and numbers(rb[:]) == list(range(10))
        rb.extend(steps(10, 45))
        assert len(rb) == 40 and sorted(numbers(rb[:])) == list(range(5, 45))


def test_a_store_whose_lanes_are_held_one_by_one_is_not_written_beside_them(tmp_path):
    held = LazyMemmapStorage(40, scratch_dir=tmp_path, lanes=HeldLaneCount(4))
    ReplayBuffer(storage=held).extend(steps(0, 3))
    other = ReplayBuffer(storage=LazyMemmapStorage.open(tmp_path))
    with pytest.raises(StorageInUseError, match="holds a lane of this store for itself"):
        other.extend(steps(3, 5))
    held.close()
    other.extend(steps(3, 5))  # an old store: it has no extents
    assert sorted(numbers(other[:])) == [0, 1, 2, 3, 4]
    assert not other.storage.lanes.store.keeps_extents


@pytest.mark.quick
def test_the_number_of_lanes_suits_the_writers_and_divides_the_size():
    for writers in (2, 3, 8, 50, 300):
        for size in (1, 2, 7, 10, 1000, 50_000, 99_991, 100_000, 1_000_000, 10**9):
            lanes = lanes_for(writers, size)
            assert 1 <= lanes <= min(256, size)
            if size // writers >= 1024:
                assert size // lanes >= 1024
            if size // writers >= 1550:
                assert size // lanes >= 1550
            if size in (1000, 50_000, 100_000, 1_000_000, 10**9):
                assert size % lanes == 0
    assert lanes_for(1, 10**6) == 1
