"""Where trajectories end in a twin: wherever whoever writes next would have cut the store that was saved."""

import pytest
import torch

from contracts.children import Child
from engram import _native
from engram.data import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    NestedStorageCheckpointer,
    PrioritizedSliceSampler,
    ReplayBuffer,
    TensorStorageCheckpointer,
)
from engram.data.replay_buffers.episodes import Episodes


def one_trajectory(start, stop):
    n = torch.arange(start, stop)
    return {"n": n, "next": {"n": n + 1, "done": torch.zeros(len(n), dtype=torch.bool)}}


def lengths(rb):
    """Of the stored trajectories."""
    return Episodes().trajectories(rb.storage).length.tolist()


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


@pytest.mark.parametrize("capacity", [10, 12])
@pytest.mark.parametrize("checkpointer", CHECKPOINTERS)
@pytest.mark.parametrize("how", SAVED)
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
def test_with_a_full_table_of_seams_the_oldest_rows_go_and_nothing_is_joined(tmp_path, how):
    n = _native.SEAMS
    path, samplers = tmp_path / "store", [PrioritizedSliceSampler(1000, 0.7, 0.9, slice_len=2) for _ in range(2)]
    first = ReplayBuffer(storage=LazyMemmapStorage(1000, path))
    for i in range(n + 1):
        first.extend(one_trajectory(2 * i, 2 * i + 2))
        first.storage.release()
    assert len(first.storage.lanes.states()[0]["seams"]) == n
    first.extend(one_trajectory(1000, 1002))
    first.storage.close()
    rb = ReplayBuffer.open(path, sampler=samplers[0])
    twin = ReplayBuffer(storage=LazyTensorStorage(1000), sampler=samplers[1])
    SAVED[how](rb, twin, tmp_path / "saved")
    for b in (rb, twin):
        b.extend(one_trajectory(2000, 2002))
        assert lengths(b) == [2] * (n + 1)
        batch = b.sample(2000)["n"].reshape(-1, 2)
        assert (batch[:, 1] - batch[:, 0] == 1).all() and len(batch[:, 0].unique()) == n + 1
