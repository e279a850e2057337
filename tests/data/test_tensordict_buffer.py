"""TensorDictReplayBuffer: what it adds to samples."""

import pytest
import torch
from tensordict import TensorDict

from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram.data import TensorDictRoundRobinWriter as Writer
from engram.testing import numbers, steps


@pytest.fixture(params=[ListStorage, LazyTensorStorage, LazyMemmapStorage], ids=lambda c: c.__name__)
def storage(request):
    return request.param(10)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_samples_carry_their_indices(storage, prefetch):
    rb = TensorDictReplayBuffer(storage=storage, batch_size=6, prefetch=prefetch)
    rb.extend(steps(0, 13))
    for _ in range(10):
        batch, info = rb.sample(return_info=True)
        assert batch["index"].dtype == torch.int64 and torch.equal(batch["index"], info["index"])
        assert [rb[int(i)]["n"].item() for i in batch["index"]] == numbers(batch)
        assert "generation" not in batch.keys()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_samples_carry_generations_on_request(storage, prefetch):
    rb = TensorDictReplayBuffer(storage=storage, batch_size=6, prefetch=prefetch, track_generations=True)
    rb.extend(steps(0, 13))
    for _ in range(5):
        batch, info = rb.sample(return_info=True)
        assert batch["generation"].tolist() == numbers(batch) == info["generation"].tolist()
    index = batch["index"].unique()
    done = rb.update_if_present(index=index, generation=index * 0 - 1, patch=steps(0, 6)[: len(index)])
    assert not done.applied and done.stale.all()


def test_its_writer_stores_the_index_too(storage):
    rb = TensorDictReplayBuffer(storage=storage)
    assert type(rb.writer) is Writer
    rb.extend(steps(0, 3))
    assert int(rb[1]["index"]) == 1


def test_the_device_of_samples_is_the_storages_at_every_level():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=6)
    data = steps(0, 13)
    assert data.device is None
    rb.extend(data)
    for batch in (rb.sample(), rb[:], rb[1], rb.storage[0:2]):
        assert batch.device == torch.device("cpu") and batch["next"].device == torch.device("cpu")
        assert batch["next"].batch_size == batch.batch_size


def test_the_priority_key_is_what_was_asked_for():
    assert TensorDictReplayBuffer().priority_key == "td_error"
    rb = TensorDictPrioritizedReplayBuffer(1.0, 1.0, storage=LazyTensorStorage(10), priority_key="loss", batch_size=4)
    rb.extend(steps(0, 5))
    batch = rb.sample()
    with pytest.raises(KeyError, match="'loss'"):
        rb.update_tensordict_priority(batch)
    rb.update_tensordict_priority(batch.set("loss", torch.ones(4)))
    with pytest.raises(KeyError, match="'index'"):
        rb.update_tensordict_priority(TensorDict({"loss": torch.ones(4)}, [4]))


def test_a_batch_that_is_written_back_keeps_its_rows_whole(storage):
    rb = TensorDictReplayBuffer(storage=storage, batch_size=4)
    rb.extend(steps(0, 10))
    batch = rb.sample()
    rb.extend(batch)  # with its old indices
    assert [int(rb[i]["index"]) for i in range(10)] == list(range(10))
    assert numbers(rb[0:4]) == numbers(batch)


@pytest.mark.parametrize("way", ["opened", "handed over", "columns"])
def test_rows_without_an_index_take_more_rows_without_one(tmp_path, way):
    if way == "columns":
        storage = TensorStorage(TensorDict({"a": torch.zeros(20)}, [20]))
        storage.empty()
    else:
        storage = LazyMemmapStorage(20, scratch_dir=tmp_path)
        ReplayBuffer(storage=storage).extend(TensorDict({"a": torch.zeros(3)}, [3]))
    if way == "opened":
        storage.close()
        rb = TensorDictReplayBuffer.open(tmp_path, batch_size=4)
    else:
        rb = TensorDictReplayBuffer(storage=storage, batch_size=4)
    before = len(rb)
    rb.extend(TensorDict({"a": torch.ones(2)}, [2]))
    rb.add(TensorDict({"a": torch.ones(())}))
    assert len(rb) == before + 3 and "index" in rb.sample() and rb[before:]["a"].tolist() == [1, 1, 1]
