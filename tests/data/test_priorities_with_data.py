"""Priorities in the form of the data, of several environments; and data whose priorities are not used."""

import threading

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.data import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.envs.transforms import RewardScaling


def of_environments(dim_extend=None, envs=2, time=4):
    """A buffer of `envs` x `time` steps, their index, and priorities in the form of the data."""
    sampler = PrioritizedSampler(100, 1.0, 1.0, 0.0)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=2), sampler=sampler, dim_extend=dim_extend)
    n = torch.arange(envs * time).reshape((envs, time) if dim_extend is None else (time, envs))
    return rb, rb.extend(TensorDict({"n": n}, n.shape)), n + 1.0


def of_steps(rb, index):
    """The priority of each step less the one that belongs to it."""
    stored = rb.storage.get(tuple(index.unbind(-1)))["n"]
    return (rb.sampler.priorities(index, storage=rb.storage) - stored).tolist()


@each("dim_extend", [None, 0])
@each("envs", [2, 4])
def test_priorities_in_the_form_of_the_data_go_to_their_steps(dim_extend, envs):
    rb, index, priorities = of_environments(dim_extend, envs, 4 if envs == 2 else 3)
    rb.update_priority(index, priorities)
    assert of_steps(rb, index) == [1.0] * len(index)
    rb.update_priority(index, torch.zeros(len(index), 1))
    assert float(rb.sampler.priorities(index, storage=rb.storage).sum()) == 0.0
    rb.update_priority(index, priorities.numpy())
    assert of_steps(rb, index) == [1.0] * len(index)


def test_after_the_ring_has_gone_round_they_still_do():
    rb, _, _ = of_environments()
    n = torch.arange(8).reshape(2, 4) + 50
    index = rb.extend(TensorDict({"n": n}, [2, 4]))
    rb.update_priority(index, n + 1.0)
    assert of_steps(rb, index) == [1.0] * 8


def test_for_another_order_or_a_part_of_a_step_they_are_refused():
    rb, index, priorities = of_environments()
    rb.update_priority(index, priorities)
    for bad, values in (
        (index.flip(0), priorities),
        (index[1:7], torch.ones(2, 3)),
        (index, torch.ones(4, 2)),
        (index[torch.randperm(8, generator=torch.Generator().manual_seed(0))], priorities),
    ):
        with pytest.raises(ValueError, match="Nothing was changed"):
            rb.update_priority(bad, values)
    assert of_steps(rb, index) == [1.0] * 8


@each("storage", [LazyTensorStorage, ListStorage])
@each("transform", [None, lambda: RewardScaling(0.0, 1.0, in_keys=["n"], out_keys=["m"])])
def test_with_update_priority_false_data_get_the_priority_of_new_steps(storage, transform):
    sampler = PrioritizedSampler(20, 1.0, 1.0, 0.0)
    rb = TensorDictReplayBuffer(
        storage=storage(20), sampler=sampler, priority_key="p", transform=transform and transform()
    )
    data = TensorDict({"n": torch.arange(4.0), "p": torch.tensor([3.0, 4.0, 5.0, 6.0])}, [4])
    index = rb.extend(data, update_priority=False)
    assert sampler.priorities(index, storage=rb.storage).tolist() == [1.0] * 4
    index = rb.extend(data, update_priority=True)
    assert sampler.priorities(index, storage=rb.storage).tolist() == [3.0, 4.0, 5.0, 6.0]
    index = rb.extend(data)
    assert sampler.priorities(index, storage=rb.storage).tolist() == [3.0, 4.0, 5.0, 6.0]


def test_where_data_come_without_priorities_the_argument_changes_nothing():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    assert rb.extend(torch.arange(3), update_priority=False).tolist() == [0, 1, 2]
    assert rb.extend(torch.arange(3), update_priority=True).tolist() == [3, 4, 5]


def test_no_step_of_another_thread_gets_a_priority_that_came_with_data(monkeypatch):
    """It is written between these data and their priorities, to the slot of one of them, if it does not wait."""
    sampler = PrioritizedSampler(4, 1.0, 1.0, 0.0)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler, priority_key="p")
    data = TensorDict({"n": torch.arange(4), "p": torch.full((4,), 0.5)}, [4])
    rb.extend(data)
    thread = threading.Thread(target=lambda: rb.extend(data[:1], update_priority=False))
    update = sampler.update_priority

    def update_after_the_other_thread(*args, **kwargs):
        thread.start()
        thread.join(0.1)
        update(*args, **kwargs)

    monkeypatch.setattr(sampler, "update_priority", update_after_the_other_thread)
    rb.extend(data)
    thread.join()
    assert sampler.priorities(torch.arange(4), storage=rb.storage).tolist() == [1.0, 0.5, 0.5, 0.5]
