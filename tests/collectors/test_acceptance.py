"""The whole way at once: environments, collector, mapped storage, checkpoint, twin."""

from __future__ import annotations

import pytest
import torch

from contracts.each import each
from contracts.pairwise import pairwise_product
from engram.collectors import SyncDataCollector
from engram.data import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    NestedStorageCheckpointer,
    TensorDictReplayBuffer,
    TensorStorageCheckpointer,
)
from engram.envs import GymEnv, SerialEnv


def test_a_collector_writes_directly_into_a_buffer(tmp_path):
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(1000, scratch_dir=tmp_path / "rows"), batch_size=32)
    with SyncDataCollector(GymEnv("CartPole-v1"), frames_per_batch=50, total_frames=200, replay_buffer=rb) as collector:
        assert list(collector) == [None] * 4
    assert len(rb) == 200
    next_is_next = rb[:]["next", "observation"][:-1] == rb[:]["observation"][1:]
    over = rb[:]["next", "done"][:-1]
    assert (next_is_next | over).all()


CHECKPOINTERS = {
    "rows": TensorStorageCheckpointer,
    "flat": FlatStorageCheckpointer,
    "nested": NestedStorageCheckpointer,
    "h5": H5StorageCheckpointer,
}


@pytest.mark.deep
@each("make, storage, envs", pairwise_product(CHECKPOINTERS, [LazyMemmapStorage, LazyTensorStorage], [1, 3]))
def test_a_twin_is_equal_after_every_batch_whatever_saves_it(tmp_path, envs, storage, make):
    torch.manual_seed(0)
    make = CHECKPOINTERS[make]
    env = GymEnv("CartPole-v1") if envs == 1 else SerialEnv(envs, lambda: GymEnv("CartPole-v1"))
    ndim = 1 if envs == 1 else 2
    ours, twin = (
        TensorDictReplayBuffer(storage=storage(100, ndim=ndim), batch_size=4, checkpointer=make()) for _ in range(2)
    )
    batches, collected = 0, []
    with (
        pytest.warns(UserWarning, match="total_frames"),
        SyncDataCollector(env, frames_per_batch=22, total_frames=180) as collector,
    ):
        for batch in collector:
            collected.append(batch.clone())
            ours.extend(batch)
            ours.dumps(tmp_path / "checkpoint")
            twin.loads(tmp_path / "checkpoint")
            assert (ours[:] == twin[:]).all() and ours[:].shape == twin[:].shape
            assert batch.shape == ((22,) if envs == 1 else (3, 8))
            assert twin.storage.max_size == (100 if envs == 1 else 102)
            assert (len(ours), ours.write_count, ours.writer._cursor) == (
                len(twin),
                twin.write_count,
                twin.writer._cursor,
            )
            expected = newest_in_their_slots(torch.cat(collected, dim=-1), twin.storage.max_size // envs)
            for key in expected.keys(include_nested=True, leaves_only=True):
                assert torch.equal(twin[:][key], expected[key]), key
            torch.manual_seed(batches)
            drawn = ours.sample()
            torch.manual_seed(batches)
            assert (drawn == twin.sample()).all()
            batches += 1
    assert batches == (9 if envs == 1 else 8) and len(twin) == twin.storage.max_size


def newest_in_their_slots(steps, room):
    """The last `room` steps along time, where a ring of that many slots keeps them."""
    total = steps.shape[-1]
    times = torch.arange(max(0, total - room), total)
    return steps[..., times[torch.argsort(times % room)]]
