"""Entries of stored steps that are set in place: `set_`, `set_at_`, `update_`; and `read_all_in_order`."""

import pytest
import torch
from tensordict import TensorDict

from engram.data import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from engram.testing import env_steps, numbers, steps


@pytest.fixture(params=[LazyTensorStorage, LazyMemmapStorage, ListStorage], ids=lambda c: c.__name__)
def rb(request):
    rb = TensorDictReplayBuffer(storage=request.param(6), batch_size=3)
    rb.extend(steps(0, 4))
    return rb


def column(rb, key):
    return torch.stack([rb[i][key] for i in range(len(rb))])


def test_set_changes_one_entry_of_every_step(rb):
    generations = rb.storage.lanes.generations(torch.arange(4))
    assert rb.set_("n", torch.arange(10, 14)) is rb
    assert column(rb, "n").tolist() == [10, 11, 12, 13] and column(rb, "index").tolist() == [0, 1, 2, 3]
    rb.set_(("next", "reward"), torch.full((4, 1), 2.0).double()).set_("obs", torch.tensor([1.0, 2.0, 3.0]))
    assert column(rb, ("next", "reward")).sum() == 8.0 and column(rb, "obs")[3].tolist() == [1.0, 2.0, 3.0]
    assert torch.equal(rb.storage.lanes.generations(torch.arange(4)), generations) and rb.write_count == 4


def test_set_at_changes_one_entry_of_some_steps(rb):
    for index, value in (
        (torch.tensor([0, 3]), torch.tensor([20, 23])),
        (1, torch.tensor(21)),
        (slice(2, 3), torch.tensor([22])),
    ):
        assert rb.set_at_("n", value, index) is rb
    assert (
        column(rb, "n").tolist() == [20, 21, 22, 23] and column(rb, "obs")[3].tolist() == steps(3, 4)["obs"][0].tolist()
    )


def test_update_changes_several_entries_together(rb):
    rewards = torch.arange(4.0).double().unsqueeze(-1)
    rb.update_({"n": torch.arange(4) + 5, "next": {"reward": rewards}})
    assert column(rb, "n").tolist() == [5, 6, 7, 8] and torch.equal(column(rb, ("next", "reward")), rewards)
    rb.update_(
        TensorDict({"n": torch.zeros(4, dtype=torch.int64), "obs": torch.zeros(4, 3)}, [4]), keys_to_update=["n"]
    )
    assert column(rb, "n").sum() == 0 and column(rb, "obs").abs().sum() > 0


def test_what_does_not_fit_is_refused_and_changes_nothing(rb):
    with pytest.raises(KeyError, match="'other'"):
        rb.set_("other", torch.zeros(4))
    with pytest.raises(ValueError, match="'n' is"):
        rb.set_("n", torch.arange(6))
    with pytest.raises(KeyError, match="'other'"):
        rb.update_({"n": torch.zeros(4, dtype=torch.int64), "other": torch.zeros(4)})
    with pytest.raises(KeyError, match="keys_to_update"):
        rb.update_({"n": torch.zeros(4)}, keys_to_update=["obs"])
    with pytest.raises(IndexError):
        rb.set_at_("n", torch.tensor(0), 5)
    rb.set_writer(ImmutableDatasetWriter())
    with pytest.raises(RuntimeError, match="immutable"):
        rb.set_("n", torch.zeros(4, dtype=torch.int64))
    assert numbers(rb[:]) == [0, 1, 2, 3]


def test_with_several_environments_values_have_the_form_of_the_data():
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    rb.extend(env_steps(2, 0, 4))
    values = torch.arange(8).view(2, 4)
    rb.set_("n", values)
    assert torch.equal(rb[:]["n"], values)
    rb.set_at_("n", torch.tensor(50), (1, 2)).set_at_("n", torch.tensor([60, 61]), 0).set_at_(
        "n", values[:, 1:3] + 70, slice(1, 3)
    )
    assert rb[:]["n"].tolist() == [[60, 71, 72, 3], [61, 75, 76, 7]]


def test_a_step_that_changed_has_the_priority_of_new_ones_as_with_any_change_in_place():
    sampler = PrioritizedSampler(6, 1.0, 1.0, 0.0)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(6), sampler=sampler)
    index = rb.extend(steps(0, 4))
    rb.update_priority(index, torch.arange(1.0, 5.0))
    rb.set_at_("n", torch.tensor([7, 8]), [1, 2])
    assert sampler.priorities(index, storage=rb.storage).tolist() == [1.0, 4.0, 4.0, 4.0]


def test_all_steps_are_read_as_one_batch_in_the_order_of_slots(rb):
    rb.extend(steps(4, 9))
    assert numbers(rb.read_all_in_order()) == [6, 7, 8, 3, 4, 5] and rb.read_all_in_order().batch_size == (6,)
    assert numbers(rb.read_all_in_order(end=2)) == [6, 7] and numbers(rb.read_all_in_order(99)) == [6, 7, 8, 3, 4, 5]
    with pytest.raises(IndexError, match="nothing has been written"):
        ReplayBuffer(storage=LazyTensorStorage(10)).read_all_in_order()
    wide = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    wide.extend(env_steps(2, 0, 4))
    assert numbers(wide.read_all_in_order(end=3)) == [[0, 1, 2], [1000, 1001, 1002]]


def test_items_that_do_not_stack_are_read_as_a_list():
    rb = ReplayBuffer(storage=ListStorage(10))
    rb.extend(["a", 1, None])
    assert rb.read_all_in_order() == ["a", 1, None]


class TestStepsThatAreNamedTwice:
    """The last counts, as for NumPy arrays."""

    @pytest.fixture(params=[LazyTensorStorage, LazyMemmapStorage, ListStorage, LazyStackStorage])
    def rb(self, request):
        rb = ReplayBuffer(storage=request.param(6), batch_size=3)
        rb.extend(steps(0, 4))
        return rb

    def numbers(self, rb):
        return column(rb, "n").tolist()

    def test_of_a_batch(self, rb):
        rb[[2, 0, 2, -4]] = steps(10, 14)
        assert self.numbers(rb) == [13, 1, 12, 3]

    def test_of_a_list(self, rb):
        rb[torch.tensor([1, 1, 3])] = list(steps(10, 13))
        assert self.numbers(rb) == [0, 11, 2, 12]

    def test_of_a_sampled_batch_that_goes_back(self, rb):
        batch, info = rb.sample(32, return_info=True)
        assert len(info["index"].unique()) < 32
        batch["n"] += 100
        rb[info["index"]] = batch
        assert set(self.numbers(rb)) <= {0, 1, 2, 3, 100, 101, 102, 103}
        assert [n for n in self.numbers(rb) if n >= 100] == [n + 100 for n in info["index"].unique().tolist()]

    def test_of_one_entry(self, rb):
        rb.set_at_("n", torch.tensor([10, 11, 12]), [1, 3, 1])
        assert self.numbers(rb) == [0, 12, 2, 11]

    def test_of_a_set_of_stored_and_new_steps(self, rb):
        rb.storage.set([3, 3, 4, 4], steps(10, 14))
        assert self.numbers(rb) == [0, 1, 2, 11, 13] and rb.write_count == 5

    def test_of_values_of_another_number_nothing_is_written(self, rb):
        for index, values in ([[1, 1], steps(0, 3)], [[1, 1, 4, 4], steps(0, 3)], [[1, 1], list(steps(0, 3))]):
            with pytest.raises(ValueError, match=f"{len(index)} steps are indexed, the values have 3; nothing"):
                rb.storage[index] = values
        with pytest.raises(TypeError, match=r"2 steps are indexed, the value is a int \(5\) without rows; nothing"):
            rb[[1, 1]] = 5
        assert self.numbers(rb) == [0, 1, 2, 3]


def test_of_steps_of_several_environments_that_are_named_twice_the_last_counts():
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    rb.extend(TensorDict({"x": torch.arange(6).reshape(2, 3)}, [2, 3]))
    rb[[0, 0, 1], [1, 1, 2]] = TensorDict({"x": torch.tensor([10, 11, 12])}, [3])
    assert rb[:]["x"].tolist() == [[0, 11, 2], [3, 4, 12]]
    rb[[2, 2]] = TensorDict({"x": torch.tensor([[20, 21], [22, 23]])}, [2, 2])
    assert rb[:]["x"].tolist() == [[0, 11, 21], [3, 4, 23]]


class TestIndicesOfSeveralDimensions:
    @pytest.fixture
    def rb(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
        rb.extend(TensorDict({"x": torch.arange(6).reshape(2, 3)}, [2, 3]))
        return rb

    @pytest.mark.parametrize(
        "index", [(0, slice(1, 2)), (0, 1), (slice(None), slice(1, 2)), (slice(None), 1), (1,), (...,)]
    )
    def test_what_is_read_at_an_index_is_written_there(self, rb, index):
        rb[index] = rb[index].apply(lambda x: x + 10)
        changed = torch.zeros(2, 3, dtype=torch.int64)
        changed[(slice(None), *index) if len(index) == 1 and index != (...,) else index] = 10
        assert torch.equal(rb[:]["x"], torch.arange(6).reshape(2, 3) + changed)

    def test_values_of_another_shape_are_refused(self, rb):
        for values in (torch.zeros(1), torch.zeros(1, 2), torch.zeros(2)):
            with pytest.raises(ValueError, match=r"index means steps of shape \[2, 1\], the data have .*nothing was"):
                rb[:, 1:2] = TensorDict({"x": values.long()}, values.shape)
        with pytest.raises(ValueError, match="0 steps are indexed, the data have 1; nothing was written"):
            rb[0, 3:4] = TensorDict({"x": torch.zeros(1).long()}, [1])
        assert rb[:]["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
