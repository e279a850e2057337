"""Transforms in the form that users know: the methods that they override, and what these get."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from engram.envs import GymEnv, TransformedEnv, check_env_specs
from engram.envs.transforms import _apply_to_composite, _apply_to_composite_inv
from engram.specs import Bounded, Composite, Unbounded
from engram.transforms import Compose, ObservationNorm, RewardScaling, StepCounter, Transform


def pendulum(*transforms) -> TransformedEnv:
    return TransformedEnv(GymEnv("Pendulum-v1"), Compose(*transforms))


class Sine(Transform):
    def _apply_transform(self, obs):
        return obs.sin()

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)

    @_apply_to_composite
    def transform_observation_spec(self, observation_spec):
        return Bounded(-1, 1, shape=observation_spec.shape, dtype=observation_spec.dtype)


def test_a_method_written_for_one_spec_is_applied_to_each_key():
    env = pendulum(Sine(in_keys=["observation"], out_keys=["sine"]))
    check_env_specs(env)
    rollout = env.rollout(3)
    assert torch.equal(rollout["sine"], rollout["observation"].sin())
    assert isinstance(env.observation_spec["sine"], Bounded)


class Doubled(Transform):
    def __init__(self, key: str) -> None:
        super().__init__(in_keys=[key])

    def _apply_transform(self, value):
        return torch.cat([value, value], -1)


def of_one_spec(self, reward_spec):
    return Unbounded((*reward_spec.shape[:-1], 2))


def of_all_specs(self, reward_spec):
    reward_spec["reward"] = Unbounded((*reward_spec["reward"].shape[:-1], 2))
    return reward_spec


@each("method", [of_one_spec, of_all_specs, _apply_to_composite(of_one_spec)])
def test_the_spec_of_a_reward_may_be_given_alone_or_in_a_composite(method):
    kind = type("Own", (Doubled,), {"transform_reward_spec": method})
    env = pendulum(kind("reward"))
    assert env.reward_spec.shape == (2,)
    check_env_specs(env)


def test_an_error_in_a_users_method_is_the_one_of_the_spec_itself():
    class Wrong(Doubled):
        def transform_reward_spec(self, reward_spec):
            raise ValueError(f"got {type(reward_spec).__name__}")

    with pytest.raises(ValueError, match="got Unbounded"):
        pendulum(Wrong("reward"))


def test_specs_may_be_changed_all_at_once():
    class Marked(Transform):
        def _call(self, next_tensordict):
            return next_tensordict.set("mark", torch.ones(2))

        def transform_output_spec(self, output_spec):
            output_spec = super().transform_output_spec(output_spec)
            output_spec["full_observation_spec"]["mark"] = Unbounded((2,))
            return output_spec

    env = pendulum(Marked(), StepCounter())
    check_env_specs(env)
    assert env.rollout(2)["next", "mark"].shape == (2, 2)


class Unit(Transform):
    """Takes actions from -1 to 1."""

    def __init__(self) -> None:
        super().__init__(in_keys_inv=["action"], out_keys_inv=["action"])

    def _inv_apply_transform(self, action):
        return action * 2


def of_inputs(self, input_spec):
    input_spec["full_action_spec", "action"] = Bounded(-1, 1, input_spec["full_action_spec", "action"].shape)
    return input_spec


def of_action(self, action_spec):
    return Bounded(-1, 1, shape=action_spec.shape)


@each(
    ("name", "method"),
    [
        ("transform_input_spec", of_inputs),
        ("transform_input_spec", _apply_to_composite_inv(of_action)),
        ("transform_action_spec", of_action),
        ("transform_action_spec", _apply_to_composite_inv(of_action)),
    ],
)
def test_the_spec_of_an_action_is_what_a_users_method_says(name, method):
    env = pendulum(type("Own", (Unit,), {name: method})())
    assert float(env.action_spec.high.max()) == 1
    check_env_specs(env)


def test_entries_that_steps_would_read_are_refused():
    class Reads(Transform):
        def transform_input_spec(self, input_spec):
            input_spec["full_state_spec"] = Composite({"state": Unbounded((1,))})
            return input_spec

    with pytest.raises(TypeError, match="Reads adds entries that steps read"):
        pendulum(Reads())


def test_keys_need_not_pair_where_a_class_has_a_method_of_its_own():
    class Difference(Transform):
        def __init__(self) -> None:
            super().__init__(in_keys=["a", "b"], out_keys=["difference"])

        def forward(self, tensordict):
            return tensordict.set("difference", tensordict["a"] - tensordict["b"])

    td = TensorDict({"a": torch.ones(2), "b": torch.ones(2)}, [2])
    assert not Difference()(td)["difference"].any()
    with pytest.raises(ValueError, match="in_keys has 2 keys, out_keys 1"):
        Transform(in_keys=["a", "b"], out_keys=["difference"])


def test_missing_keys_may_be_passed_over():
    norm = ObservationNorm(1.0, 2.0, in_keys=["a", "b"], in_keys_inv=["c"])
    compose = Compose(norm)
    with pytest.raises(KeyError, match="'b'"):
        compose(TensorDict({"a": torch.ones(2)}, [2]))
    compose.set_missing_tolerance(True)
    batch = TensorDict({"a": torch.ones(2)}, [2])
    assert norm.missing_tolerance and compose(batch)["a"].tolist() == [3, 3]
    assert list(compose.inv(tensordict=batch).keys()) == ["a"]


def test_a_transform_is_taken_out_of_a_compose_and_of_its_environment():
    compose = Compose(StepCounter(), RewardScaling(0.0, 1.0))
    taken = compose.pop(0)
    assert isinstance(taken, StepCounter) and len(compose) == 1
    env = TransformedEnv(GymEnv("Pendulum-v1"), StepCounter())
    assert env.transform.container is env
    transform = env.transform
    transform.reset_parent()
    assert transform.container is None


def test_what_a_compose_is_told_reaches_its_transforms():
    told = []

    class Recorder(Transform):
        def close(self):
            told.append("closed")

        def dump(self, suffix=None):
            told.append(suffix)

    compose = Compose(Recorder(), StepCounter())
    compose.dump(suffix="7")
    compose.close()
    assert told == ["7", "closed"]


def test_closing_an_environment_closes_its_transforms():
    told = []

    class Recorder(Transform):
        def close(self):
            told.append("closed")

    pendulum(Recorder()).close()
    assert told == ["closed"]


def test_keys_that_are_set_later_are_used_after_the_cache_is_emptied():
    scaling = RewardScaling(0.0, 2.0, in_keys=["reward"])
    scaling.for_env(None)
    assert scaling._env_pairs == [("reward", "reward")]
    scaling.out_keys = ["scaled"]
    scaling.empty_cache()
    assert scaling._env_pairs == [("reward", "scaled")]


def test_a_transform_tells_whether_it_has_an_inverse():
    assert ObservationNorm.invertible and Unit().invertible and not StepCounter().invertible
