"""Where trajectories end in a twin: wherever whoever writes next would have cut the store that was saved."""

import time

import pytest
import torch

from contracts.children import Child, Signal
from contracts.each import each
from contracts.pairwise import pairwise_product
from engram.data import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NestedStorageCheckpointer,
    PrioritizedSliceSampler,
    ReplayBuffer,
    TensorStorageCheckpointer,
)
from engram.errors import StorageInUseError
from engram.store.episodes import EpisodeIndex


def one_trajectory(start, stop):
    n = torch.arange(start, stop)
    return {"n": n, "next": {"n": n + 1, "done": torch.zeros(len(n), dtype=torch.bool)}}


def lengths(rb):
    """Of the stored trajectories."""
    return EpisodeIndex().trajectories(rb.storage).length.tolist()


def dumped(rb, twin, path):
    rb.dumps(path)
    twin.loads(path)


def dumped_beside(rb, twin, path):
    rb.dumps(path, blocking=False).result()
    twin.loads(path)


def handed_over(rb, twin, path):
    twin.load_state_dict(rb.state_dict())


SAVED = {"dumps": dumped, "background": dumped_beside, "state_dict": handed_over}
CHECKPOINTERS = [
    TensorStorageCheckpointer, FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer,
]  # fmt: skip


@each("how, checkpointer, capacity", pairwise_product(SAVED, CHECKPOINTERS, [10, 12]))
def test_a_save_before_the_first_write_of_a_store_that_was_opened_again_cuts_where_that_write_does(
    tmp_path, how, checkpointer, capacity
):
    first = ReplayBuffer(storage=LazyMemmapStorage(10, tmp_path / "store"))
    first.extend(one_trajectory(0, 3))
    first.storage.close()
    rb = ReplayBuffer.open(tmp_path / "store")
    twin = ReplayBuffer(storage=LazyTensorStorage(capacity))
    rb.storage.checkpointer, twin.storage.checkpointer = checkpointer(), checkpointer()
    SAVED[how](rb, twin, tmp_path / "saved")
    for b in (rb, twin):
        assert lengths(b) == [3]
        b.extend(one_trajectory(3, 5))
        assert lengths(b) == [3, 2]


@pytest.mark.parametrize("how", SAVED)
def test_a_save_of_the_writer_cuts_nothing(tmp_path, how):
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, tmp_path / "store"))
    twin = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(one_trajectory(0, 3))
    SAVED[how](rb, twin, tmp_path / "saved")
    for b in (rb, twin):
        b.extend(one_trajectory(3, 5))
        assert lengths(b) == [5]


@pytest.mark.parametrize("how", SAVED)
def test_what_a_reader_saves_ends_the_trajectory_of_the_writer(tmp_path, how):
    rb = ReplayBuffer(storage=LazyTensorStorage(20, shared=True, lanes=2))
    rb.extend(one_trajectory(0, 3))

    def save_and_load():
        twin = ReplayBuffer(storage=LazyTensorStorage(20, shared=True, lanes=2))
        SAVED[how](rb, twin, tmp_path / "saved")
        twin.extend(one_trajectory(3, 5))
        return lengths(twin)

    assert Child(save_and_load).result() == [3, 2]
    rb.extend(one_trajectory(3, 5))
    assert lengths(rb) == [5], "the writer's own goes on"


@pytest.mark.parametrize("how", SAVED)
def test_a_store_of_many_writers_is_saved_with_every_row_and_every_seam(tmp_path, how):
    n, path = 300, tmp_path / "store"
    samplers = [PrioritizedSliceSampler(1000, 0.7, 0.9, slice_len=2) for _ in range(2)]
    first = ReplayBuffer(storage=LazyMemmapStorage(1000, path))
    for i in range(n):
        first.extend(one_trajectory(2 * i, 2 * i + 2))
        first.storage.lanes.mark_seam()
    first.storage.close()
    rb = ReplayBuffer.open(path, sampler=samplers[0])
    twin = ReplayBuffer(storage=LazyTensorStorage(1000), sampler=samplers[1])
    SAVED[how](rb, twin, tmp_path / "saved")
    for b in (rb, twin):
        b.extend(one_trajectory(2000, 2002))
        assert lengths(b) == [2] * (n + 1)
        # So many that none of the starts is left out by chance.
        batch = b.sample(20_000)["n"].reshape(-1, 2)
        assert (batch[:, 1] - batch[:, 0] == 1).all() and len(batch[:, 0].unique()) == n + 1


@each("capacity", [1000, 150, None])
@each("how", SAVED)
def test_a_list_of_many_writers_is_saved_with_every_item_and_every_seam(tmp_path, how, capacity):
    rb, twin = (ReplayBuffer(storage=ListStorage(capacity), collate_fn=list) for _ in range(2))
    last = 400
    for n in range(0, last, 2):
        rb.extend([n, n + 1])
        rb.storage.lanes.mark_seam()
    SAVED[how](rb, twin, tmp_path / "saved")
    for b in (rb, twin):
        first = max(0, last - (capacity or last))
        assert sorted(b[:]) == list(range(first, last))
        assert b.storage._held_table.rows.items() == sorted(b[:]), "oldest first"
        seams, there = b.storage.lanes.states()[0]["seams"], b.storage.lanes.states()[0]["published"]
        assert seams == list(range(there - (last - first) + 2, there + 1, 2))
        b.extend([last, last + 1])
        assert (
            b.storage._held_table.rows.items()[-3:] == [last - 1, last, last + 1]
            and sorted(b[:]) == b.storage._held_table.rows.items()
        )


@pytest.mark.parametrize("save", [lambda rb, path: rb.dumps(path), lambda rb, path: rb.state_dict()])
def test_a_forked_child_that_only_saves_uses_the_store_and_nobody_empties_it_meanwhile(tmp_path, save):
    rb, saved, go = ReplayBuffer(storage=LazyTensorStorage(20, shared=True)), Signal(), Signal()
    rb.extend(one_trajectory(0, 3))
    child = Child(lambda: [save(rb, tmp_path / "saved") and None, saved.send(), go.wait()])
    saved.wait()
    with pytest.raises(StorageInUseError):
        rb.empty()
    go.send()
    child.result()
    rb.empty()


def writes_for_ever(rb):
    """Two rows after each other, each pair a trajectory that only a seam tells from the one before."""

    def write():
        n = 2
        while True:
            rb.storage.lanes.mark_seam()
            rb.extend(one_trajectory(n, n + 2))
            n += 2

    rb.extend(one_trajectory(0, 2))
    rb.storage.release()
    return Child(write)


def test_every_seam_of_a_lane_is_listed_while_another_process_writes_new_ones():
    rb = ReplayBuffer(storage=LazyTensorStorage(1000, shared=True))
    child = writes_for_ever(rb)
    try:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            lane = rb.storage.lanes.states()[0]
            seams = [seam for seam in lane["seams"] if seam <= lane["published"]]
            assert seams == list(range(seams[0] if seams else 0, lane["published"] + 1, 2))[: len(seams)]
            assert not seams or seams[-1] >= lane["published"] - 2
    finally:
        child.kill()


def test_a_state_of_a_tiny_lane_that_is_written_over_again_and_again_is_one_of_whole_rows():
    rb, twin = (ReplayBuffer(storage=LazyTensorStorage(8, shared=True)) for _ in range(2))
    child = writes_for_ever(rb)
    try:
        for _ in range(200):
            twin.load_state_dict(rb.state_dict())
            if len(twin):
                n = twin[:]["n"].sort().values
                assert (n.diff() == 1).all()
    finally:
        child.kill()


WRONG = {
    "no rows": lambda storage: storage.update(rows=[]),
    "fewer rows": lambda storage: storage.update(rows=[storage["rows"][0][:, :3]]),
    "other rows": lambda storage: storage.update(rows=[storage["rows"][0].float()]),
    "no tensors": lambda storage: storage.update(rows=[None]),
    "a base beyond its end": lambda storage: storage["counters"]["lanes"][0].update(base=7),
    "no origin": lambda storage: storage["counters"]["lanes"][0].pop("origin"),
    "falling seams": lambda storage: storage["counters"]["lanes"][0].update(seams=[3, 2]),
    "a seam beyond its end": lambda storage: storage["counters"]["lanes"][0].update(seams=[100]),
    "no counters": lambda storage: storage.pop("counters"),
}


@each("wrong", WRONG)
def test_a_state_that_cannot_be_is_refused_and_the_rows_stay(wrong):
    rb, twin = (ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2))
    rb.extend(one_trajectory(0, 5))
    twin.extend(one_trajectory(50, 53))
    state = rb.state_dict()
    WRONG[wrong](state["storage"])
    with pytest.raises(ValueError, match=r"state|rows|lane|origin|base|seams|counters"):
        twin.load_state_dict(state)
    assert twin[:]["n"].tolist() == [50, 51, 52] and lengths(twin) == [3]


@each("wrong", [lambda state: state["items"].pop(), lambda state: state["counters"]["lanes"][0].update(base=7),
              lambda state: state["counters"]["lanes"].pop(), lambda state: state.pop("items")])  # fmt: skip
def test_a_state_of_a_list_that_cannot_be_is_refused_and_the_items_stay(wrong):
    rb, twin = (ReplayBuffer(storage=ListStorage(10), collate_fn=list) for _ in range(2))
    rb.extend([1, 2, 3, 4, 5])
    twin.extend([7, 8])
    state = rb.state_dict()
    wrong(state["storage"])
    with pytest.raises(ValueError, match=r"state|items|base"):
        twin.load_state_dict(state)
    assert twin[:] == [7, 8]


def test_rows_of_one_lane_are_loaded_beside_lanes_for_other_writers(tmp_path):
    saved, rb = (ReplayBuffer(storage=LazyTensorStorage(40, shared=True, lanes=n), batch_size=4) for n in (1, 2))
    saved.extend(torch.arange(10))
    saved.dumps(tmp_path)
    rb.loads(tmp_path)
    assert rb.storage.lanes.store.lanes > 1 and sorted(rb[:].tolist()) == list(range(10))
