"""A transform is an `nn.Module`: its parameters, buffers and modules are moved, saved, and seen by torch's methods."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from contracts.each import each
from engram.data import LazyTensorStorage, TensorDictReplayBuffer
from engram.envs import GymEnv, TransformedEnv
from engram.transforms import Compose, ObservationNorm, RewardSum, StepCounter, Transform, VecNorm
from engram.transforms.adapters import as_transform


class Encoder(Transform):
    """A user's transform with a network, a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__(in_keys=["observation"], out_keys=["code"])
        self.net = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2, affine=False))
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("shift", torch.zeros(2))

    def _apply_transform(self, value):
        return nn.functional.linear(value, self.net[0].weight) * self.gain + self.shift


NAMES = ["gain", "net.0.weight", "net.0.bias"]


def observations(n: int = 4) -> TensorDict:
    return TensorDict({"observation": torch.ones(n, 4)}, [n])


def buffer(transform) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=LazyTensorStorage(20), transform=transform, batch_size=4)


def test_parameters_and_buffers_of_a_users_transform_are_listed():
    encoder = Encoder()
    assert [name for name, _ in encoder.named_parameters()] == NAMES
    assert {name for name, _ in encoder.named_buffers()} == {
        "shift", "net.1.running_mean", "net.1.running_var", "net.1.num_batches_tracked",
    }  # fmt: skip


def test_modules_inside_a_compose_an_inverted_one_and_a_callable_are_found():
    encoder, layer = Encoder(), nn.Linear(4, 4)
    compose = Compose(StepCounter(), Compose(encoder), as_transform(Encoder(), invert=True), layer)
    seen = []
    assert compose.apply(seen.append) is compose
    assert encoder in seen and encoder.net[0] in seen and layer in seen and compose in seen
    assert len(list(compose.parameters())) == 3 + 3 + 2
    assert "transforms.1.transforms.0.net.0.weight" in dict(compose.named_parameters())


def test_train_and_eval_reach_the_modules_inside():
    compose = Compose(StepCounter(), Encoder())
    assert compose.training and compose.eval() is compose
    assert not compose.training and not compose[1].net[1].training
    assert compose.train()[1].net[1].training


def test_moving_casts_parameters_and_buffers():
    compose = Compose(Encoder(), RewardSum()).to(torch.float64)
    assert {tensor.dtype for tensor in compose.parameters()} == {torch.float64}
    assert compose[0].shift.dtype is torch.float64 and compose.float()[0].gain.dtype is torch.float32
    assert compose.requires_grad_(False) is compose and not any(p.requires_grad for p in compose.parameters())


def test_a_transform_is_a_layer_of_a_sequence():
    model = nn.Sequential(ObservationNorm(loc=1.0, scale=2.0, in_keys=["observation"]), Encoder(), nn.Identity())
    assert model(observations())["code"].shape == (4, 2)
    assert not model.eval()[1].training


@each("make", [Encoder, lambda: Compose(Encoder()), lambda: VecNorm(["observation"])])
def test_a_module_that_contains_a_transform_saves_and_loads_it(make):
    one, other = nn.Sequential(make(), nn.Linear(1, 1)), nn.Sequential(make(), nn.Linear(1, 1))
    one[0](observations())
    for tensor in one.parameters():
        nn.init.constant_(tensor, 3.0)
    state = copy.deepcopy(one.state_dict())
    other.load_state_dict(state)
    assert all(bool((tensor == 3).all()) for tensor in other.parameters())
    assert repr(other[0].state_dict()) == repr(one[0].state_dict())


def test_parameters_are_in_the_state_of_the_transform_and_loaded_in_place():
    one, other = Encoder(), Encoder()
    state = one.state_dict()
    assert list(state["parameters"]) == NAMES and "shift" in state["buffers"]
    weight, kept = other.net[0].weight, one.net[0].weight.clone()
    one.net[0].weight.data.zero_()
    other.load_state_dict(state)
    assert other.net[0].weight is weight and torch.equal(weight, kept)


def test_parameters_are_saved_with_the_replay_buffer(tmp_path):
    one, other = Encoder(), Encoder()
    rb, loaded = buffer(one), buffer(other)
    rb.extend(observations())
    rb.dumps(tmp_path)
    loaded.loads(tmp_path)
    assert torch.equal(other.net[0].weight, one.net[0].weight) and torch.equal(loaded[:]["code"], rb[:]["code"])


def test_a_state_with_other_parameters_is_refused_by_name():
    class Wider(Encoder):
        def __init__(self) -> None:
            super().__init__()
            self.net[0] = nn.Linear(5, 2)

    state = Encoder().state_dict()
    assert Wider().differences(state) == ["Wider has net.0.weight [2, 5] here, [2, 4] there"]
    assert "no parameter 'gain' here" in StepCounter().differences(state)[0]


@each("copied", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t)), Transform.clone])
def test_copies_have_parameters_of_their_own(copied):
    one = Encoder()
    other = copied(one)
    assert torch.equal(other.net[0].weight, one.net[0].weight) and other.net[0].weight is not one.net[0].weight


def test_a_refused_write_leaves_the_buffers_of_modules_as_they_were():
    class Normalised(Transform):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def _inv_call(self, td):
            self.norm(td["observation"])
            return td

    rb = buffer(Normalised())
    rb.extend(observations())
    before = rb.transform[0].norm.running_mean.clone()
    with pytest.raises(ValueError, match="'other' is not in this storage"):
        rb.extend(TensorDict({"observation": torch.rand(3, 4), "other": torch.zeros(3)}, [3]))
    assert torch.equal(rb.transform[0].norm.running_mean, before)


def test_a_class_whose_init_does_not_call_that_of_its_base_is_a_module():
    class Bare(Transform):
        def __init__(self) -> None:
            self.net = nn.Linear(1, 1)

    assert len(list(Bare().parameters())) == 2


def test_the_transforms_of_an_environment_are_modules():
    env = TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), Encoder()))
    with torch.no_grad():
        assert env.rollout(2)["code"].shape == (2, 2)
    env.transform.eval()
    assert not env.transform[1].net[0].training
    torch.optim.Adam(env.transform.parameters())


def test_the_library_keeps_no_module_tables_in_the_way_of_attributes():
    counter = StepCounter(5)
    counter.net = nn.Linear(1, 1)
    assert vars(counter)["max_steps"] == 5 and vars(counter)["net"] is counter.net and not counter._modules


def test_children_of_any_transform_register_what_they_assign_and_get_no_method_that_they_have_not():
    class Own(StepCounter):
        def __init__(self) -> None:
            super().__init__(5)
            self.register_buffer("total", torch.zeros(()))
            self.gain = nn.Parameter(torch.ones(()))
            self.net = nn.Linear(1, 1)
            self.total = torch.ones(())

    class Noting(Own):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)

    for kind, methods in ((Own, {"__init__"}), (Noting, {"__setattr__"})):
        assert [*kind()._modules] == ["net"] and {*kind()._parameters} == {"gain"} and kind()._buffers == {"total": 1}
        assert {name for name, value in vars(kind).items() if callable(value)} == methods
