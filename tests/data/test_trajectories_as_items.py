"""Whole trajectories as items: rows with batch dimensions of their own, in every storage, in every way."""

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, tensorclass

from contracts.each import each
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)

STORAGES = {
    "memory": lambda n: LazyTensorStorage(n),
    "shared": lambda n: LazyTensorStorage(n, shared=True),
    "file": lambda n: LazyMemmapStorage(n),
    "list": lambda n: ListStorage(n),
}


def items(start, stop, steps=4):
    """Items number `start` to `stop`, each a trajectory; step t of item i has the number 100 * i + t."""
    n = torch.arange(start, stop).unsqueeze(1) * 100 + torch.arange(steps)
    following = TensorDict({"n": n + 1, "done": torch.zeros(*n.shape, 1, dtype=torch.bool)}, n.shape)
    return TensorDict({"n": n, "next": following}, n.shape)


def check(batch, shape):
    """It is a valid TensorDict of a shape, and each index that it has is that of its own item."""
    assert isinstance(batch, TensorDictBase) and batch.batch_size == torch.Size(shape)
    for value in batch.values(True):
        assert value.shape[: batch.ndim] == batch.batch_size
    batch.clone().reshape(-1)
    if "index" in batch.keys():
        index = batch["index"]
        assert torch.equal(batch["n"] // 100, index if isinstance(index, torch.Tensor) else index["index"])


@pytest.mark.parametrize("writer", [RoundRobinWriter, TensorDictRoundRobinWriter])
@pytest.mark.parametrize("storage", STORAGES)
class TestItems:
    def make(self, storage, writer, cls=TensorDictReplayBuffer, **kwargs):
        rb = cls(storage=STORAGES[storage](10), writer=writer(), batch_size=2, track_generations=True, **kwargs)
        assert rb.extend(items(0, 3)).tolist() == [0, 1, 2]
        return rb

    def test_a_sample_says_of_each_step_which_item_it_is_of(self, storage, writer):
        for kwargs in ({}, {"sampler": SamplerWithoutReplacement()}, {"prefetch": 1}):
            rb = self.make(storage, writer, **kwargs)
            batch, info = rb.sample(return_info=True)
            check(batch, [2, 4])
            assert batch["index"].dtype == torch.int64 and torch.equal(batch["index"][:, 0], info["index"])
            assert batch["generation"].shape == (2, 4) and torch.equal(batch["generation"][:, 0], info["generation"])

    def test_items_are_written_and_read_in_every_way(self, storage, writer):
        rb = self.make(storage, writer)
        assert rb.add(items(3, 4)[0]) == 3 and rb.extend(list(items(4, 6))).tolist() == [4, 5]
        rb[1] = items(1, 2)[0]
        rb[0:2] = items(0, 2)
        whole = rb[:] if storage != "list" else torch.stack(rb[:])
        check(whole, [6, 4])
        check(rb[2], [4])
        assert torch.equal(whole["n"], items(0, 6)["n"])
        assert ("index" in whole.keys()) is (writer is TensorDictRoundRobinWriter)

    def test_weights_are_of_each_step_and_priorities_of_each_item(self, storage, writer):
        rb = self.make(storage, writer, sampler=PrioritizedSampler(None, 1.0, 1.0, 0.0))
        rb.update_priority(torch.arange(3), torch.tensor([0.0, 1.0, 4.0]))
        batch, info = rb.sample(return_info=True)
        check(batch, [2, 4])
        assert batch["priority_weight"].shape == (2, 4) and info["priority_weight"].shape == (2,)
        assert torch.equal(batch["priority_weight"], torch.where(batch["index"] == 2, 0.25, 1.0))


@each("reduction, expected", [("max", 5.0), ("min", 1.0), ("mean", 2.5), ("median", 2.0)])
@each("form", ["as it came", "one number a step", "flat", "generations", "by hand"])
@each("storage", ["memory", "list"])
def test_what_is_given_for_the_steps_of_an_item_is_reduced_to_its_priority(storage, form, reduction, expected):
    rb = TensorDictPrioritizedReplayBuffer(
        1.0, 1.0, storage=STORAGES[storage](10), batch_size=1, reduction=reduction,
        track_generations=form == "generations",
    )  # fmt: skip
    rb.extend(items(0, 3))
    batch = rb.sample()
    drawn = int(batch["index"][0, 0])
    batch["td_error"] = torch.tensor([[1.0, 5.0, 2.0, 2.0]])
    if form == "one number a step":
        batch["td_error"] = batch["td_error"].unsqueeze(-1)
    if form == "by hand":
        rb.update_priority(batch["index"], batch["td_error"])
    else:
        rb.update_tensordict_priority(batch.reshape(-1) if form == "flat" else batch)
    now = rb.sampler.priorities(torch.arange(3), storage=rb.storage).tolist()
    assert now == [expected if i == drawn else 1.0 for i in range(3)]


def test_items_of_a_batch_have_their_own_priorities_also_one_alone():
    rb = TensorDictPrioritizedReplayBuffer(1.0, 1.0, storage=LazyTensorStorage(10))
    rb.extend(items(0, 3))
    batch = TensorDict({"index": torch.tensor([2, 0]).unsqueeze(1).expand(2, 4)}, [2, 4])
    batch["td_error"] = torch.tensor([[1.0, 2, 3, 4], [8.0, 7, 6, 5]])
    rb.update_tensordict_priority(batch)
    assert rb.sampler.priorities(torch.arange(3), storage=rb.storage).tolist() == [8.0, 1.0, 4.0]
    rb.update_tensordict_priority(batch[0].set("td_error", torch.tensor([0.5, 0, 0, 0])))
    assert rb.sampler.priorities(torch.arange(3), storage=rb.storage).tolist() == [8.0, 1.0, 0.5]


def test_priorities_that_come_with_items_are_those_of_the_items_that_stay():
    rb = TensorDictPrioritizedReplayBuffer(1.0, 1.0, storage=LazyTensorStorage(2))
    data = items(0, 5)
    rb.extend(data.set("td_error", torch.tensor([9.0, 8, 7, 6, 5]).unsqueeze(1) - torch.arange(4)))
    stored = (rb[:]["n"][:, 0] // 100).tolist()
    assert rb.sampler.priorities(torch.arange(2), storage=rb.storage).tolist() == [9.0 - i for i in stored]


def test_an_item_that_is_gone_keeps_no_priority():
    rb = TensorDictPrioritizedReplayBuffer(1.0, 1.0, storage=LazyTensorStorage(3), batch_size=2, track_generations=True)
    rb.extend(items(0, 3))
    batch = rb.sample()
    batch["td_error"] = torch.full((2, 4), 7.0)
    rb.extend(items(3, 6))
    rb.update_tensordict_priority(batch)
    assert rb.sampler.priorities(torch.arange(3), storage=rb.storage).tolist() == [1.0] * 3
    assert rb.sampler.skipped == len(set(batch["index"].flatten().tolist()))


def test_environments_by_time_may_hold_trajectories_too():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=2), batch_size=5)
    rb.extend(torch.stack([items(0, 3), items(10, 13)]))
    rb.add(torch.stack([items(3, 4)[0], items(13, 14)[0]]))
    for batch, shape in ((rb.sample(), (5, 4)), (rb[:], (2, 4, 4)), (rb[1], (2, 4))):
        assert batch.batch_size == shape and batch["index"].shape == (*shape, 2)
        number = batch["index"][..., 0] + 10 * batch["index"][..., 1]
        assert torch.equal(batch["n"] // 100, number)


@pytest.mark.parametrize("storage", ["memory", "list"])
def test_ensembles_of_items(storage):
    members = [TensorDictPrioritizedReplayBuffer(1.0, 1.0, storage=STORAGES[storage](10)) for _ in range(2)]
    for member in members:
        member.extend(items(0, 3))
    rb = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=4)
    batch = rb.sample()
    check(batch, [2, 2, 4])
    assert batch["priority_weight"].shape == batch["index", "buffer_ids"].shape == (2, 2, 4)
    rb.update_tensordict_priority(batch.set("td_error", batch["index", "index"] + torch.tensor([0.0, 1.0, 2.0, 3.0])))
    for k, member in enumerate(members):
        drawn = set(batch["index", "index"][k, :, 0].tolist())
        now = member.sampler.priorities(torch.arange(3), storage=member.storage).tolist()
        assert now == [i + 3.0 if i in drawn else 1.0 for i in range(3)]


def test_a_writer_that_keeps_the_best_keeps_the_best_items():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter("rank"), batch_size=2)
    data = items(0, 4)
    rb.extend(data.set("rank", torch.tensor([1.0, 4.0, 2.0, 3.0]).unsqueeze(1).expand(4, 4)))
    assert sorted((rb[:]["n"][:, 0] // 100).tolist()) == [1, 3]
    sample = rb.sample()
    assert sample.batch_size == (2, 4) and sample["index"].shape == rb[:]["index"].shape == (2, 4)


def test_columns_and_tensorclasses():
    @tensorclass
    class Steps:
        n: torch.Tensor
        index: torch.Tensor | None = None

    data = items(0, 3)
    rb = TensorDictReplayBuffer(storage=TensorStorage(data.clone()), writer=RoundRobinWriter(), batch_size=2)
    check(rb.sample(), [2, 4])
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(3), batch_size=2)
    rb.extend(Steps(n=data["n"], batch_size=[3, 4]))
    batch = rb.sample()
    assert batch.batch_size == (2, 4) and torch.equal(batch.n // 100, batch.index)


def test_a_checkpoint_gives_the_same_items(tmp_path):
    rb, other = (TensorDictReplayBuffer(storage=LazyTensorStorage(5), batch_size=2) for _ in range(2))
    rb.extend(items(0, 3))
    rb.dumps(tmp_path)
    other.loads(tmp_path)
    check(other.sample(), [2, 4])
    check(other[:], [3, 4])


def test_plain_buffers_add_nothing():
    rb = ReplayBuffer(storage=LazyTensorStorage(5), batch_size=2)
    rb.extend(items(0, 3))
    check(rb.sample(), [2, 4])
    assert set(rb.sample().keys()) == {"n", "next"}
