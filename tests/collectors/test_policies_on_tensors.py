"""Policies that get observations as tensors, and return the action alone or several tensors."""

import gymnasium
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from contracts.each import each
from contracts.gym_loop import WORLDS, Proxy
from contracts.gym_worlds import Countdown
from engram.collectors import Collector, MultiSyncCollector
from engram.collectors.action_sources import TensorDictActions
from engram.envs import GymEnv, SerialEnv, StepCounter, TransformedEnv


def first_choice(observation):
    return torch.eye(3, dtype=torch.int64)[0].expand(*observation.shape[:-1], 3).clone()


class Several(nn.Module):
    """Returns the action and two more tensors, and counts its calls."""

    calls = 0

    def forward(self, observation):
        self.calls += 1
        return first_choice(observation), observation * 2, observation.sum(-1, keepdim=True)


class Counts(nn.Module):
    """Gets another observation too, which a transform makes."""

    def forward(self, observation, step_count, scale=3):
        return first_choice(observation), step_count * scale


def worlds(n):
    envs = [lambda lengths=lengths: GymEnv(Countdown(lengths)) for lengths in WORLDS[:n]]
    return SerialEnv(n, envs) if n > 1 else envs[0]()


def collect(env, policy, **arguments):
    collector = Collector(env, policy, frames_per_batch=12, **arguments)
    return [collector.rollout() for _ in range(3)]


def check_several(batches):
    for batch in batches:
        assert set(batch.keys()) == set(batches[0].keys()) and "output3" not in batch.keys()
        assert torch.equal(batch["output1"], batch["observation"] * 2)
        assert torch.equal(batch["output2"], batch["observation"].sum(-1, keepdim=True))
        assert bool(batch["action"][..., 0].all())


@each("adapt", [lambda env: env, Proxy])
@each("n", [1, 3])
def test_outputs_after_the_action_are_entries_of_the_batch(n, adapt):
    policy = Several()
    check_several(collect(adapt(worlds(n)), policy))
    assert policy.calls == 3 * 12 // n  # no call but those of the steps


def test_outputs_of_a_vector_environment_are_entries_of_the_batch():
    policy = TupleOfCartPole()
    batches = collect(GymEnv("CartPole-v1", num_envs=2), policy)
    for batch in batches:
        assert torch.equal(batch["output1"], batch["observation"] * 2)


class TupleOfCartPole(nn.Module):
    def forward(self, observation):
        return torch.tensor([0, 1]).expand(*observation.shape[:-1], 2).clone(), observation * 2


def test_outputs_of_random_steps_are_zero():
    batches = collect(worlds(1), Several(), init_random_frames=12)
    assert set(batches[0].keys()) == set(batches[1].keys()) and not bool(batches[0]["output1"].any())
    check_several(batches[1:])


def test_workers_have_the_outputs_too():
    collector = MultiSyncCollector([lambda: worlds(1)] * 2, Several(), frames_per_batch=24, total_frames=72)
    check_several(list(collector))
    collector.shutdown()


def test_a_rollout_of_the_environment_has_the_outputs():
    check_several([worlds(1).rollout(6, Several(), break_when_any_done=False)])


@each("n", [1, 3])
@each("policy", [Counts(), Counts().forward, lambda step_count, observation: Counts()(
    observation, step_count)])  # fmt: skip
def test_parameters_with_the_names_of_observations_get_these(n, policy):
    env = TransformedEnv(worlds(n), StepCounter())
    for batch in collect(env, policy):
        assert torch.equal(batch["output1"], batch["step_count"] * 3) and int(batch["output1"].max()) > 0


def test_a_function_with_an_observations_name_gets_the_tensor_and_others_the_tensordict():
    by_name = collect(worlds(1), lambda observation: first_choice(observation))
    by_td = collect(worlds(1), lambda td: td.set("action", first_choice(td["observation"])))
    for ours, theirs in zip(by_name, by_td, strict=True):
        assert set(ours.keys()) == set(theirs.keys()) and bool((ours == theirs).all())


@pytest.mark.parametrize("n", [1, 3])
def test_a_module_is_called_without_tensordicts_from_the_first_step_on(n, monkeypatch):
    monkeypatch.setattr(TensorDictActions, "choose", None)
    check_several(collect(worlds(n), Several()))
    assert all(bool(batch["action"][..., 0].all()) for batch in collect(worlds(n), lambda observation: first_choice(
        observation)))  # fmt: skip


@pytest.mark.parametrize("n", [1, 3])
def test_outputs_that_only_some_steps_have_are_zero_in_the_others(n):
    def third_call_has_more(observation):
        calls.append(observation)
        return (first_choice(observation), observation * 2) if len(calls) == 3 else first_choice(observation)

    calls: list[torch.Tensor] = []
    batch = Collector(worlds(n), third_call_has_more, frames_per_batch=5 * n).rollout()
    expected = torch.zeros_like(batch["observation"])
    expected[..., 2, :] = batch["observation"][..., 2, :] * 2
    assert torch.equal(batch["output1"], expected)


def test_an_output_with_the_name_of_an_observation_is_left_out():
    class Echo(nn.Module):
        def forward(self, output1):
            return torch.tensor([1, 0]), output1 + 1, output1 + 2

    plain = gymnasium.make("CartPole-v1")
    named = gymnasium.spaces.Dict({"output1": plain.observation_space})
    env = GymEnv(gymnasium.wrappers.TransformObservation(plain, lambda observation: {"output1": observation}, named))
    batch = Collector(env, Echo(), frames_per_batch=4).rollout()
    assert torch.equal(batch["output2"], batch["output1"] + 2)


def test_a_tensordict_module_may_read_a_flag():
    module = TensorDictModule(NotDone(), in_keys=["done"], out_keys=["action"])
    batch = Collector(worlds(1), module, frames_per_batch=4).rollout()
    assert bool(batch["action"][..., 0].all())


class NotDone(nn.Module):
    def forward(self, done):
        assert done.dtype is torch.bool
        return first_choice(done)


def test_an_output_that_is_no_tensor_is_refused():
    class Names(nn.Module):
        def forward(self, observation):
            return first_choice(observation), "a name"

    with pytest.raises(TypeError, match="output 1 of the policy is a str"):
        collect(worlds(1), Names())


def test_parameters_with_other_names_beside_several_observations_are_refused():
    class Other(nn.Module):
        def forward(self, observation, mask):
            return first_choice(observation)

    with pytest.raises(ValueError, match="name its parameters so"):
        collect(TransformedEnv(worlds(1), StepCounter()), Other())
