"""What a policy on TensorDicts finds in its input, and what of its output a batch has, whichever way it goes."""

from __future__ import annotations

import gymnasium
import pytest
import torch
from tensordict import NonTensorData, TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Categorical

from contracts.each import each
from contracts.gym_loop import WORLDS, Proxy
from contracts.gym_worlds import Countdown
from engram.collectors import Collector, action_sources
from engram.collectors.policy_weights import PolicyWeights
from engram.collectors.stats import StepsWay
from engram.collectors.sync import make_rollout
from engram.collectors.trajectories import StepTags
from engram.envs import GymEnv, SerialEnv
from engram.envs.policies import as_policy, fast_module_call


def worlds(n):
    envs = [lambda lengths=lengths: GymEnv(Countdown(lengths), categorical_action_encoding=True) for lengths in WORLDS]
    return SerialEnv(n, envs[:n]) if n > 1 else envs[0]()


def act(td):
    return td.set("action", td["observation"].sum(-1).long() % 3)


class OutputsPolicy:
    """Acts, and writes what `write` says; `seen` has copies of its inputs."""

    def __init__(self, write):
        self.write, self.seen = write, []

    def __call__(self, td):
        self.seen.append(td.clone())
        return self.write(act(td), len(self.seen))


def number(td, value=1.0):
    """A number for each environment, which the observation determines."""
    return td["observation"].sum(-1, keepdim=True) * value


def plain(td, call):
    return td.set("value", number(td)).set("logits", td["observation"] * 2)


def remembering(td, call):
    return td.set("memory", td.get("memory", number(td, 0.0)) + 1)


def next_memory(td, call):
    memory = td.get("memory", number(td, 0.0))
    return td.set("seen", memory * 2).set(("next", "memory"), memory + 1)


def nested(td, call):
    hidden = td.get(("agent", "hidden"), number(td, 0.0))
    return td.set(("agent", "value"), number(td)).set(("agent", "hidden"), hidden + 1)


def nested_next(td, call):
    hidden = td.get(("agent", "hidden"), number(td, 0.0))
    return td.set(("agent", "value"), number(td)).set(("next", "agent", "hidden"), hidden + 1)


def not_a_tensor(td, call):
    return td.set("value", number(td)).set("text", NonTensorData(f"call {call}", batch_size=td.batch_size))


def appearing(td, call):
    return td.set("value", number(td)) if call < 3 else td.set("value", number(td)).set("late", number(td, 2.0))


def vanishing(td, call):
    return td.set("value", number(td)) if call < 3 else td.exclude("value").set("other", number(td))


def another_dtype(td, call):
    return td.set("value", number(td) if call != 3 else number(td).double())


def copied(td, call):
    return plain(td, call).clone()


def locking(td, call):
    out = plain(td.clone(), call)
    td.lock_()
    return out


def resized(td, call):
    out = plain(td, call).copy()
    td.batch_size = []
    return out


def bereft(td, call):
    out = plain(td.copy(), call)
    del td["observation"]
    return out


def of_doubles(td, call):
    return td.set("doubles", number(td).double()).set("flag", number(td) > 1).set("count", number(td).long())


WRITES = [
    plain, remembering, next_memory, nested, nested_next, not_a_tensor, appearing, vanishing, another_dtype, copied,
    locking, resized, bereft, of_doubles,
]  # fmt: skip


def collect(env, policy, batches=3, **arguments):
    collector = Collector(env, policy, frames_per_batch=12, **arguments)
    return [collector.rollout() for _ in range(batches)]


def assert_same(found, expected):
    assert found.batch_size == expected.batch_size
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    for key, value in expected.items(True, True):
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype and torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


@pytest.mark.deep
@each("n", [1, 3])
@each("write", WRITES)
@each("arguments", [{}, {"max_frames_per_traj": 3}])
def test_batches_and_inputs_are_those_of_steps_through_tensordicts(n, write, arguments):
    ours, theirs = OutputsPolicy(write), OutputsPolicy(write)
    found, expected = collect(worlds(n), ours, **arguments), collect(Proxy(worlds(n)), theirs, **arguments)
    for batch, other in zip(found, expected, strict=True):
        assert_same(batch, other)
    assert len(ours.seen) == len(theirs.seen) == 3 * 12 // n
    for td, other in zip(ours.seen, theirs.seen, strict=True):
        assert_same(td, other)


@pytest.mark.parametrize("n", [1, 3])
def test_policy_that_returns_some_entries_loses_no_observation(n):
    policy = OutputsPolicy(lambda td, call: plain(td, call).select("action", "value"))
    for batch in collect(worlds(n), policy):
        assert torch.equal(batch["value"], batch["observation"].sum(-1, keepdim=True))
        assert "logits" not in batch.keys()
    assert all("logits" not in td.keys() and "value" in td.keys() for td in policy.seen[1:])


@pytest.mark.parametrize("n", [1, 3])
def test_input_that_a_policy_keeps_stays_as_it_was(n):
    kept, copies = [], []

    def keeping(td):
        kept.append(td)
        plain(act(td), 0)
        copies.append(td.clone())
        return td

    collect(worlds(n), keeping)
    assert len({id(td) for td in kept}) == len(kept) > 3
    for td, copy in zip(kept, copies, strict=True):
        assert_same(td, copy)


@pytest.mark.parametrize("n", [1, 3])
def test_input_that_nobody_keeps_is_one_object(n):
    inputs = []
    collect(worlds(n), lambda td: (inputs.append(id(td)), plain(act(td), 0))[1])
    assert len(inputs) == 36 // n and len(set(inputs)) == 1


@pytest.mark.parametrize("n", [1, 3])
def test_tensordict_that_cannot_be_filled_is_made_for_each_step(n, monkeypatch):
    expected = collect(worlds(n), OutputsPolicy(remembering))
    monkeypatch.setattr(
        action_sources, "tensordict_of", lambda entries, size, device: TensorDict(entries, size, device)
    )
    for batch, other in zip(collect(worlds(n), OutputsPolicy(remembering)), expected, strict=True):
        assert_same(batch, other)


@pytest.mark.parametrize("n", [1, 3])
def test_input_kept_for_one_step_is_not_filled_again_meanwhile(n):
    last = []

    def looking_back(td):
        if last:
            assert torch.equal(last[0]["value"], last[0]["observation"].sum(-1, keepdim=True))
        last[:] = [td]
        return plain(act(td), 0)

    collect(worlds(n), looking_back)


@pytest.mark.parametrize("n", [1, 3])
def test_observation_that_a_policy_writes_into_is_stored_as_the_environment_gave_it(n):
    def scaling(td):
        act(td)
        td["observation"].mul_(2)
        return td

    for batch, expected in zip(collect(worlds(n), scaling), collect(worlds(n), act), strict=True):
        assert_same(batch, expected)


@pytest.mark.parametrize("n", [1, 3])
def test_output_in_one_tensor_has_the_value_of_each_step(n):
    shared = torch.zeros(n, 1) if n > 1 else torch.zeros(1)

    def writing_in_place(td):
        return act(td).set("value", shared.copy_(number(td)))

    for batch in collect(worlds(n), writing_in_place):
        assert torch.equal(batch["value"], batch["observation"].sum(-1, keepdim=True))


@pytest.mark.parametrize("n", [1, 3])
def test_batch_is_not_written_again(n):
    batches = [(batch, batch.clone()) for batch in collect(worlds(n), OutputsPolicy(next_memory), batches=4)]
    for batch, copy in batches:
        assert_same(batch, copy)


def ways(env, write, steps=40):
    policy = as_policy(OutputsPolicy(write), env)
    rollout = make_rollout(env, policy, StepTags(env.numel(), PolicyWeights(policy, None)), max_frames_per_traj=None)
    for _ in range(2 if steps > 32 else 3):
        rollout.collect(steps, random_steps=0)
        yield rollout.steps_way


def vector():
    return GymEnv(gymnasium.vector.SyncVectorEnv([Countdown] * 2), categorical_action_encoding=True)


@each("make", [lambda: worlds(1), lambda: worlds(3), vector])
@each("write", [plain, next_memory, appearing])
def test_outputs_that_are_tensors_of_one_form_go_into_columns(make, write):
    assert [*ways(make(), write)] == [StepsWay("columns")] * 2


@each("make", [lambda: worlds(1), lambda: worlds(3)])
@each("write, entry, found", [(not_a_tensor, "'text'", "NonTensorData"), (another_dtype, "'value'", "float64")])
def test_the_way_of_other_outputs_says_why(make, write, entry, found):
    first, second = ways(make(), write)
    assert first.way == "tensordicts" and entry in first.reason and found in first.reason
    assert second == (StepsWay("columns") if write is another_dtype else first)


@each(
    "write, expected",
    [
        (plain, ["steps", "steps", "steps"]),
        (next_memory, ["columns", "steps", "steps"]),
        (nested_next, ["columns", "steps", "steps"]),
        (appearing, ["columns", "steps", "steps"]),
        (another_dtype, ["tensordicts", "steps", "steps"]),
        (not_a_tensor, ["tensordicts"] * 3),
    ],
)
def test_outputs_of_few_steps_go_by_steps_as_soon_as_all_of_a_batch_are_of_one_form(write, expected):
    assert [way.way for way in ways(worlds(1), write, steps=4)] == expected


def test_environments_that_are_stepped_through_tensordicts_say_so():
    assert "TensorDict interface" in next(ways(Proxy(worlds(1)), plain)).reason


class Memory(nn.Module):
    """A recurrent module: it reads what it wrote under `next`, or at the root, in the last step."""

    def forward(self, observation, memory):
        return observation.sum(-1).long() % 3, memory + 1, memory * 2


@each("n", [1, 3])
@each("key", ["memory", ("next", "memory")])
def test_module_reads_what_it_wrote_and_zeros_after_the_end_of_an_episode(n, key):
    policy = TensorDictModule(Memory(), ["observation", "memory"], ["action", key, "before"])

    def starting(td):
        return policy(td if "memory" in td.keys() else td.set("memory", number(td, 0.0)))

    for batch in collect(worlds(n), starting):
        done, before = batch["next", "done"], batch["before"]
        expected = torch.where(done, 0.0, before + 2)[..., :-1, :]
        assert torch.equal(before[..., 1:, :], expected)


def modules(kind):
    torch.manual_seed(0)
    actor, critic = nn.Linear(2, 3), nn.Linear(2, 1)

    def draw(logits):
        action = Categorical(logits=logits).sample()
        return action, Categorical(logits=logits).log_prob(action)

    if kind == "one":
        both = lambda observation: (*draw(actor(observation)), critic(observation))  # noqa: E731
        return TensorDictModule(both, ["observation"], ["action", "sample_log_prob", "state_value"])
    head = TensorDictModule(actor, ["observation"], ["logits"])
    value = TensorDictModule(critic, ["observation"], ["state_value"])
    if kind == "sequence":
        return TensorDictSequential(head, TensorDictModule(draw, ["logits"], ["action", "sample_log_prob"]), value)
    last = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True, default_interaction_type="random"
    )
    return TensorDictSequential(value, ProbabilisticTensorDictSequential(head, last))


@each("n", [1, 3])
@each("kind", ["one", "sequence", "probabilistic"])
@each("arguments", [{}, {"max_frames_per_traj": 3}])
def test_outputs_of_modules_are_those_of_steps_through_tensordicts(n, kind, arguments):
    def batches(env):
        policy = modules(kind)
        torch.manual_seed(1)
        return collect(env, policy, **arguments)

    for batch, other in zip(batches(worlds(n)), batches(Proxy(worlds(n))), strict=True):
        assert_same(batch, other)
        assert batch["state_value"].shape == (*batch.shape, 1)


def test_module_that_returns_another_number_of_outputs_is_refused():
    policy = TensorDictModule(
        lambda observation: (observation.sum(-1).long() % 3,) * 3, ["observation"], ["action", "a"]
    )
    with pytest.raises(ValueError, match="3 values for its out_keys"):
        collect(worlds(3), policy)


def test_output_that_is_no_tensor_becomes_what_a_module_writes():
    policy = TensorDictModule(
        lambda observation: (observation.sum(-1).long() % 3, observation.numpy() * 2, {"sum": observation.sum(-1)}),
        ["observation"],
        ["action", "array", "mapping"],
    )
    for batch in collect(worlds(3), policy):
        assert torch.equal(batch["array"], batch["observation"] * 2)
        assert torch.equal(batch["mapping", "sum"], batch["observation"].sum(-1))


def test_options_that_change_what_a_module_reads_are_kept():
    module = TensorDictModule(nn.Linear(2, 3), ["observation"], ["action"], get_kwargs={"default": None})
    assert fast_module_call(module) is module


class Drawn(nn.Module):
    """Draws a value beside its action, and counts its calls."""

    def __init__(self, outputs=2):
        super().__init__()
        self.outputs, self.calls = outputs, 0

    def forward(self, observation):
        self.calls += 1
        action = observation.sum(-1).long() % 3
        return (action, torch.rand_like(observation)) if self.outputs == 2 else action


@each("n", [1, 2])
@each("frames", [4, 80])
def test_a_module_that_lacks_outputs_is_refused_though_it_gives_an_action(n, frames):
    policy = TensorDictModule(Drawn(outputs=1), in_keys=["observation"], out_keys=["action", "value"])
    with pytest.raises(ValueError, match="returned 1 values for its out_keys"):
        Collector(worlds(n), policy, frames_per_batch=frames).rollout()


@each("n", [1, 2])
def test_random_frames_of_several_batches_call_a_module_once_for_the_form_of_its_outputs(n):
    module = Drawn()
    policy = TensorDictModule(module, in_keys=["observation"], out_keys=["action", "value"])
    collector = Collector(worlds(n), policy, frames_per_batch=4 * n, init_random_frames=12 * n)
    batches = [collector.rollout() for _ in range(3)]
    assert module.calls == 1
    assert all(not batch["value"].any() for batch in batches)


@each("n", [1, 2])
def test_what_a_module_wrote_under_next_is_at_the_root_of_the_next_step_though_it_reads_it_not(n):
    def forward(observation):
        return observation.sum(-1).long() % 3, observation[..., :1] + 1

    policy = TensorDictModule(forward, in_keys=["observation"], out_keys=["action", ("next", "state")])
    batch = Collector(worlds(n), policy, frames_per_batch=10 * n).rollout()
    before = batch["next", "state"][..., :-1, :].masked_fill(batch["next", "done"][..., :-1, :], 0)
    assert torch.equal(batch["state"][..., 1:, :], before)
