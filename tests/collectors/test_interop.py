"""Foreign environments and policies: only the TensorDict interface, and modules as users wire them."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn

from contracts.each import each
from contracts.gym_loop import Proxy
from contracts.gym_worlds import SPACES, Echo
from engram.collectors import SyncDataCollector
from engram.envs import GymEnv
from engram.envs.policies import fast_module_call
from engram.envs.utils import ExplorationType, set_exploration_type


class ForeignSpec:
    """A spec of another library: `rand`, `zero`, `shape`, `dtype`, `keys`, and nothing of ours."""

    def __init__(self, leaves=None, shape=()):
        self.leaf, self.entries, self.shape, self.dtype = leaves is None, leaves or {}, torch.Size(shape), torch.float32

    def rand(self, shape=()):
        return torch.rand(*shape, *self.shape)

    def zero(self, shape=()):
        return torch.zeros(*shape, *self.shape)

    def keys(self, *args):
        return self.entries.keys()


class ForeignEnv:
    """Counts down from 3 in a TensorDict interface of its own."""

    batch_size, device = torch.Size([]), None
    observation_spec = ForeignSpec({"observation": ForeignSpec(shape=(1,))})
    action_spec = ForeignSpec(shape=(1,))
    is_closed = False

    def flags(self, done):
        return {"done": torch.tensor([done]), "terminated": torch.tensor([done]), "truncated": torch.tensor([False])}

    def reset(self, td=None):
        self.left = 3
        return TensorDict({"observation": torch.tensor([3.0]), **self.flags(False)})

    def step(self, td):
        self.left -= 1
        entries = {"observation": torch.tensor([float(self.left)]), "reward": td["action"]}
        return td.set("next", TensorDict({**entries, **self.flags(self.left == 0)}))

    def step_and_maybe_reset(self, td):
        raise AssertionError("step is enough")

    def set_seed(self, seed):
        return seed + 1

    def close(self):
        self.is_closed = True


POLICIES = [None, nn.Linear(1, 1), TensorDictModule(nn.Linear(1, 1), ["observation"], ["action"])]


@each("policy", POLICIES)
def test_an_environment_with_only_the_tensordict_interface_is_collected(policy):
    collector = SyncDataCollector(ForeignEnv, policy, frames_per_batch=4)
    batches = [collector.rollout() for _ in range(2)]
    assert torch.cat(batches)["observation"].squeeze(-1).tolist() == [3, 2, 1, 3, 2, 1, 3, 2]
    assert torch.cat(batches)["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert torch.equal(batches[0]["next", "reward"], batches[0]["action"])
    assert "env_random_state" not in collector.state_dict()
    collector.shutdown()
    assert collector.env.is_closed


class LocScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2)

    def forward(self, observation):
        return self.net(observation), torch.full_like(observation, 0.1)


def modules():
    def two():
        return [
            TensorDictModule(nn.Linear(2, 4), ["observation"], ["hidden"]),
            TensorDictModule(nn.Sequential(nn.Linear(4, 2), nn.Tanh()), ["hidden"], ["action"]),
        ]

    draw = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["action"], distribution_class=torch.distributions.Normal, return_log_prob=True
    )
    return {
        "module": TensorDictModule(nn.Linear(2, 2), ["observation"], ["action"]),
        "several keys": TensorDictModule(LocScale(), ["observation"], ["action", "scale"]),
        "sequence": TensorDictSequential(*two()),
        "sequence in a sequence": TensorDictSequential(TensorDictSequential(*two())),
        "distribution": ProbabilisticTensorDictSequential(
            TensorDictModule(LocScale(), ["observation"], ["loc", "scale"]), draw
        ),
    }


@each("name", modules())
@each("kind", ["RANDOM", "DETERMINISTIC"])
def test_a_module_called_through_writes_what_it_writes_itself(name, kind):
    module, td = modules()[name], TensorDict({"observation": torch.randn(3, 2)}, batch_size=[3])
    call, results = fast_module_call(module), []
    assert call is not module
    for function in (module, call):
        torch.manual_seed(0)
        with torch.no_grad(), set_exploration_type(ExplorationType[kind]):
            results.append(function(td.clone()))
    assert set(results[0].keys(True, True)) == set(results[1].keys(True, True))
    assert bool((results[0] == results[1]).all())


@each("name", modules())
@each("path", ["raw", "stepped"])
def test_no_call_of_a_policy_searches_for_a_package(name, path, monkeypatch):
    env = GymEnv(Echo(SPACES["box"], SPACES["box"], 1000))
    env.gym_env.step = lambda action, step=env.gym_env.step: step(action.clip(-1, 1))
    collector = SyncDataCollector(env if path == "raw" else Proxy(env), modules()[name], frames_per_batch=5)
    searched = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: searched.append(name))
    try:
        collector.rollout()
    except AssertionError as error:  # the environment is strict about bounds; the policy has been called all the same
        assert "is not in" in str(error)
    assert searched == []


class OwnNormal(torch.distributions.Normal):
    """A distribution whose draws may be anything."""


def draw(kind=torch.distributions.Normal, in_keys=("loc", "scale"), **options):
    keys = in_keys if isinstance(in_keys, dict) else [*in_keys]
    return ProbabilisticTensorDictModule(keys, ["action"], distribution_class=kind, **options)


def categorical(**options):
    return draw(torch.distributions.Categorical, ("logits",), **options)


DRAWS = {
    "log-probability": draw(return_log_prob=True),
    "sample alone": draw(),
    "not differentiable": categorical(return_log_prob=True, log_prob_key="lp"),
    "bounds": draw(torch.distributions.Uniform, {"low": "loc", "high": "logits"}),
    "random unless set": categorical(default_interaction_type=ExplorationType.RANDOM),
}
LEFT_ALONE = {
    "several samples": draw(num_samples=2),
    "class of a user": draw(OwnNormal),
    "generator": draw(generator=torch.Generator()),
}


@each("name", DRAWS)
@each("kind", [None, "RANDOM", "MODE"])
def test_draw_is_that_of_the_module(name, kind):
    module, results = DRAWS[name], []
    td = TensorDict({"loc": torch.randn(3, 2), "scale": torch.rand(3, 2), "logits": torch.rand(3, 2) + 9}, [3])
    for function in (module, fast_module_call(module)):
        torch.manual_seed(0)
        with torch.no_grad(), set_exploration_type(kind and ExplorationType[kind]):
            results.append(function(td.clone()))
    assert set(results[0].keys()) == set(results[1].keys()) > set(td.keys())
    for key, value in results[0].items():
        assert torch.allclose(value, results[1][key], 0, 0, equal_nan=True), key


@each("name", LEFT_ALONE)
def test_module_with_other_draws_is_called_itself(name):
    assert fast_module_call(LEFT_ALONE[name]) is LEFT_ALONE[name]


def test_random_draw_is_made_without_the_module(monkeypatch):
    monkeypatch.setattr(ProbabilisticTensorDictModule, "_dist_sample", None)
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        out = fast_module_call(DRAWS["sample alone"])(TensorDict({"loc": torch.zeros(2), "scale": torch.ones(2)}))
    assert out["action"].shape == (2,)


def changed(change):
    module = modules()["sequence"]
    change(module)
    return module


CHANGES = {
    "a hook on the whole": lambda module: module.register_forward_hook(lambda *args: None),
    "another forward": lambda module: setattr(module, "forward", lambda td: td.set("action", torch.zeros(2))),
    "select_out_keys": lambda module: module.select_out_keys("action"),
}


@each("name", CHANGES)
def test_a_module_that_was_changed_is_called_as_it_is(name):
    module = changed(CHANGES[name])
    td = TensorDict({"observation": torch.randn(2)})
    ours, theirs = fast_module_call(module)(td.clone()), module(td.clone())
    assert set(ours.keys()) == set(theirs.keys()) and bool((ours == theirs).all())


def test_a_hook_on_a_part_of_a_sequence_is_called():
    module, seen = modules()["sequence"], []
    module[1].register_forward_hook(lambda *args: seen.append(1))
    fast_module_call(module)(TensorDict({"observation": torch.randn(2)}))
    assert seen == [1]


def test_a_missing_entry_is_named():
    with pytest.raises(KeyError, match="observation"):
        fast_module_call(modules()["module"])(TensorDict({"x": torch.randn(2)}))
