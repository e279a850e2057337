"""`torch.stack` of specs: of equal ones, of leaves that differ, of Composites that differ in shapes or keys."""

import pickle

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from engram.specs import Bounded, Categorical, Composite, OneHot, Stacked, StackedComposite, Unbounded

SCOUT = Composite(obs=Unbounded((3,)), action=Bounded(-1, 1, (2,)))
TANK = Composite(obs=Unbounded((5,)), action=Bounded(-1, 1, (2,)), fuel=Unbounded((1,)))


def team():
    return torch.stack([SCOUT, TANK], 0)


class TestLeaves:
    def test_equal_ones_get_one_more_batch_dimension(self):
        assert torch.stack([Unbounded((3,))] * 2, 0) == Unbounded((2, 3))
        assert torch.stack([OneHot(4)] * 3, -1) == OneHot(4, (3, 4))

    def test_different_bounds_are_bounds_of_one_spec(self):
        spec = torch.stack([Bounded(-1, 1, (3,)), Bounded(-2, 2, (3,))], 0)
        assert spec == Bounded(torch.tensor([[-1.0], [-2.0]]).expand(2, 3), torch.tensor([[1.0], [2.0]]), (2, 3))

    def test_different_choices_are_drawn_and_tested_each_in_its_own(self):
        spec = torch.stack([Categorical(2), Categorical(5)], 0)
        assert isinstance(spec, Stacked) and spec.shape == (2,)
        assert all(spec.is_in(spec.rand((7,))) for _ in range(5)) and spec.rand((7,)).shape == (7, 2)
        assert spec.is_in(torch.tensor([1, 4])) and not spec.is_in(torch.tensor([2, 4]))
        assert spec.project(torch.tensor([9, 9])).tolist() == [1, 4]
        assert spec.encode([1, 4]).tolist() == [1, 4] and spec.to_numpy(torch.tensor([1, 4])) == [1, 4]

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_different_shapes_are_minus_one_and_their_values_nested_tensors(self):
        spec = torch.stack([Unbounded((3,)), Unbounded((5,))], 0)
        assert spec.shape == (2, -1) and spec.dtype == torch.float32
        for value in (spec.rand(), spec.zero(), spec.one()):
            assert [part.shape for part in value.unbind()] == [(3,), (5,)] and spec.is_in(value)
        assert spec.is_in(spec.project(spec.rand())) and not spec.is_in(torch.zeros(2, 3))
        with pytest.raises(RuntimeError, match=r"cannot be stacked along dimension 1.*specs"):
            spec.rand((4,))

    def test_members_and_batches_are_indexed_and_expanded(self):
        spec = torch.stack([Unbounded((3,)), Unbounded((5,))], 0)
        assert spec[0] == Unbounded((3,)) and spec[-1] == Unbounded((5,)) and spec[:] == spec
        assert spec[[1, 0]] == torch.stack([Unbounded((5,)), Unbounded((3,))], 0)
        wide = spec.expand(4, 2, -1)
        assert wide.shape == (4, 2, -1) and wide[:, 1] == Unbounded((4, 5)) and wide[0] == spec
        assert spec.unsqueeze(0).shape == (1, 2, -1) and spec.unsqueeze(0).squeeze(0) == spec
        with pytest.raises(ValueError, match="must end in the old one"):
            spec.expand(4, 3, -1)

    def test_copies_are_equal_and_hashable(self):
        spec = torch.stack([Categorical(2), Categorical(5)], 0)
        assert spec == spec.clone() == pickle.loads(pickle.dumps(spec)) and hash(spec) == hash(spec.clone())
        assert spec != torch.stack([Categorical(5), Categorical(2)], 0) and spec != Categorical(2)
        assert spec.to(torch.int32).dtype == torch.int32 and spec.to("cpu").device == torch.device("cpu")

    def test_items_that_do_not_stack_are_refused(self):
        for specs, text in [
            ([Unbounded((3,)), Unbounded((3,), dtype=torch.float64)], "same dtype"),
            ([Unbounded((3,)), Unbounded((3, 5))], "same number of dimensions"),
            ([SCOUT, Unbounded((3,))], "Composite cannot be stacked"),
            ([], "one spec or more|non-empty"),
        ]:
            with pytest.raises(RuntimeError, match=text):
                torch.stack(specs, 0)
        with pytest.raises(IndexError, match="dim must be -2 to 1, got 2"):
            torch.stack([Unbounded((3,)), Unbounded((5,))], 2)
        with pytest.raises(TypeError):
            torch.cat([SCOUT, TANK], 0)


class TestComposites:
    def test_equal_ones_are_one_composite(self):
        assert torch.stack([SCOUT, SCOUT.clone()], 0) == SCOUT.expand(2)

    def test_values_are_lazy_stacks_with_each_members_own_keys_and_shapes(self):
        spec = team()
        assert isinstance(spec, StackedComposite) and spec.shape == (2,) and spec.stack_dim == 0
        for value, lead in ((spec.rand(), ()), (spec.zero((4,)), (4,)), (spec.one((4, 6)), (4, 6))):
            assert isinstance(value, LazyStackedTensorDict) and value.batch_size == (*lead, 2)
            scout, tank = value.unbind(len(lead))
            assert scout["obs"].shape == (*lead, 3) and tank["obs"].shape == (*lead, 5) and "fuel" not in scout
            assert tank["fuel"].shape == (*lead, 1) and spec.is_in(value)

    def test_a_value_that_is_wrong_in_one_member_is_not_in(self):
        value = team().zero()
        value.tensordicts[1]["action"].fill_(7)
        assert not team().is_in(value) and team().project(value)[1]["action"].tolist() == [1, 1]
        del value.tensordicts[1]["fuel"]
        assert not team().is_in(value) and not team().is_in(TensorDict(batch_size=[3])) and not team().is_in(None)

    def test_entries_that_all_have_are_read_as_stacks(self):
        spec = team()
        assert list(spec) == ["obs", "action"] and spec["obs"].shape == (2, -1)
        assert spec["action"] == Bounded(-1, 1, (2, 2)) and "fuel" not in spec and spec[1]["fuel"] == Unbounded((1,))

    def test_entries_are_set_and_deleted_in_every_member(self):
        spec = Composite(agents=team())
        spec["agents", "mask"] = Categorical(2, (2, 1), dtype=torch.bool)
        assert spec["agents"][0]["mask"].shape == (1,) and spec["agents", "mask"].shape == (2, 1)
        del spec["agents", "obs"]
        assert list(spec["agents"]) == ["action", "mask"] and "obs" not in spec["agents"][0]
        with pytest.raises(ValueError, match="does not start with the batch shape"):
            spec["agents", "x"] = Unbounded((3, 1))
        assert SCOUT["obs"] == Unbounded((3,))  # the specs that were stacked stay as they are

    def test_batch_dimensions_are_indexed_and_expanded(self):
        spec = Composite(agents=team()).expand(4)
        assert spec.shape == (4,) and spec["agents"].shape == (4, 2) and spec["agents", "obs"].shape == (4, 2, -1)
        assert spec[0] == Composite(agents=team()) and spec["agents"][:, 1] == TANK.expand(4)
        assert spec.is_in(spec.rand()) and spec.rand()["agents"][:, 0]["obs"].shape == (4, 3)
        with pytest.raises(ValueError, match="must stay a dimension"):
            team().expand(3, 2).with_batch(2, lambda tensor: tensor.reshape(2, 3))

    def test_copies_are_equal_and_stacks_in_another_order_are_not(self):
        spec = team()
        assert spec == spec.clone() == pickle.loads(pickle.dumps(spec)) and hash(spec) == hash(spec.clone())
        assert spec != torch.stack([TANK, SCOUT], 0) and spec != SCOUT
        assert spec.to("cpu").device == torch.device("cpu") and spec.to("cpu").rand().device == torch.device("cpu")

    def test_values_go_to_numpy_and_back(self):
        value = team().rand()
        raw = team().to_numpy(value)
        assert raw[1]["obs"].shape == (5,) and bool((team().encode(raw)[1]["obs"] == value[1]["obs"]).all())
        with pytest.raises(NotImplementedError, match="each of `specs`"):
            team().cardinality()

    def test_a_leaf_of_another_dtype_is_refused_by_its_key(self):
        with pytest.raises(RuntimeError, match=r"'obs' does not stack: .*same dtype"):
            torch.stack([SCOUT, Composite(obs=Unbounded((3,), dtype=torch.float64))], 0)
