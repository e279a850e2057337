"""Arguments and methods that code written for other libraries passes everywhere: compilable, device, shape, share."""

import pickle

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram import data
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from engram.testing import env_steps, numbers, steps

PARTS = {
    "ListStorage": {"max_size": 4},
    "LazyTensorStorage": {"max_size": 4},
    "LazyMemmapStorage": {"max_size": 4},
    "TensorStorage": {"storage": torch.zeros(3)},
    "RoundRobinWriter": {},
    "TensorDictRoundRobinWriter": {},
    "TensorDictMaxValueWriter": {},
    "ImmutableDatasetWriter": {},
    "RandomSampler": {},
    "SamplerWithoutReplacement": {},
    "PrioritizedSampler": {"max_capacity": 4, "alpha": 0.7, "beta": 0.5},
    "SliceSampler": {"slice_len": 2},
    "SliceSamplerWithoutReplacement": {"slice_len": 2},
    "PrioritizedSliceSampler": {"max_capacity": 4, "alpha": 0.7, "beta": 0.5, "slice_len": 2},
    "SequenceSampler": {"slice_len": 2},
    "ReplayBuffer": {},
    "TensorDictReplayBuffer": {},
    "PrioritizedReplayBuffer": {"alpha": 0.7, "beta": 0.5},
    "TensorDictPrioritizedReplayBuffer": {"alpha": 0.7, "beta": 0.5},
}


@each("name", PARTS)
def test_every_part_takes_compilable(name):
    for compilable in (True, False):
        assert getattr(data, name)(**PARTS[name], compilable=compilable) is not None


@pytest.mark.deep
@pytest.mark.parametrize(
    ("storage", "sampler"),
    [(LazyTensorStorage, RandomSampler), (ListStorage, lambda: PrioritizedSampler(20, 1.0, 1.0))],
)
def test_in_a_compiled_function_a_buffer_is_a_graph_break(storage, sampler):
    rb = TensorDictReplayBuffer(storage=storage(20, compilable=True), sampler=sampler(), batch_size=3, compilable=True)

    @torch.compile(backend="eager")
    def step(x):
        index = rb.extend(TensorDict({"x": x + 1}, [4]))
        batch = rb.sample()
        rb.update_priority(index, torch.ones(4))
        return batch["x"] * 2

    for _ in range(2):
        drawn = step(torch.arange(4.0))
        assert drawn.shape == (3,) and set((drawn / 2).tolist()) <= {1.0, 2.0, 3.0, 4.0}
    assert len(rb) == 8


def test_a_mapped_storage_is_on_the_cpu():
    for device in ("cpu", "auto", torch.device("cpu")):
        assert LazyMemmapStorage(10, device=device).device == torch.device("cpu")
    for device in ("cuda:0", torch.device("meta")):
        with pytest.raises(ValueError, match="Memory map device other than CPU"):
            LazyMemmapStorage(10, device=device)


@each("storage", [ListStorage, LazyTensorStorage, LazyMemmapStorage])
def test_a_storage_knows_its_shape_and_which_steps_it_has(storage):
    storage = storage(10)
    assert storage.shape == (0,) and 0 not in storage
    rb = ReplayBuffer(storage=storage)
    rb.extend(steps(0, 4))
    assert storage.shape == torch.Size([4]) and storage.flatten() is storage
    assert [i in storage for i in (0, 3, 4, 99, -1, -4, -5)] == [True, True, False, False, True, True, False]
    assert torch.tensor([0, 3]) in storage and [1, 4] not in storage and "a" not in storage
    storage.attach(rb)
    rb.extend(steps(4, 13))
    assert storage.shape == (10,) and 9 in storage and 10 not in storage


def test_several_environments_are_flattened_time_by_time():
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    assert rb.storage.shape == (0,)
    rb.extend(env_steps(2, 0, 4))
    assert rb.storage.shape == torch.Size([4, 2]) and (3, 1) in rb.storage and (3, 2) not in rb.storage
    flat = rb.storage.flatten()
    assert isinstance(flat, TensorStorage) and flat.ndim == 1 and len(flat) == 8
    assert numbers(flat.get(slice(None))) == [0, 1000, 1, 1001, 2, 1002, 3, 1003]
    flat[0] = steps(50, 51)[0]
    assert numbers(rb[:])[0][0] == 0


def test_share_lets_a_buffer_be_sent_and_comes_before_the_first_write():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    assert rb.share() is rb and rb.storage.shared
    rb.extend(steps(0, 3))
    assert rb.share() is rb and numbers(pickle.loads(pickle.dumps(rb))[:]) == [0, 1, 2]
    with pytest.raises(ValueError, match="shared memory"):
        rb.share(False)
    private = ReplayBuffer(storage=LazyTensorStorage(10))
    assert private.share(False) is private
    private.extend(steps(0, 3))
    with pytest.raises(ValueError, match="before its first write"):
        private.share()
    assert not private.storage.shared
    with pytest.raises(ValueError, match="ListStorage"):
        ReplayBuffer(storage=ListStorage(10)).share()
