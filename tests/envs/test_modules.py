"""Environments are modules, and open again after `close`."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from contracts.each import each
from contracts.gym_worlds import Countdown
from engram.data import Categorical, Composite, Unbounded
from engram.envs import EnvBase, GymEnv, ParallelEnv, SerialEnv, TransformedEnv, check_env_specs
from engram.envs.transforms import Compose, StepCounter, Transform, VecNorm


def countdown():
    return GymEnv(Countdown(lengths=[3]))


class Learned(EnvBase):
    """Observations are the output of a network, whose module and buffer are attributes."""

    def __init__(self):
        super().__init__(batch_size=())
        self.net = nn.Linear(1, 2)
        self.register_buffer("offset", torch.ones(2))
        self.observation_spec = Composite(seen=Unbounded((2,)))
        self.action_spec = Categorical(2)
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict=None, **kwargs):
        return TensorDict({"seen": self.net(torch.zeros(1)).detach() + self.offset})

    def _step(self, td):
        return self._reset().update({"reward": torch.zeros(1), "done": torch.zeros(1).bool()})

    def _set_seed(self, seed):
        pass


def visited(env):
    found = []
    assert env.apply(found.append) is env
    return found


def test_apply_visits_environments_and_transforms():
    counter = StepCounter()
    base = SerialEnv(2, countdown)
    env = TransformedEnv(base, Compose(counter, VecNorm(in_keys=["observation"])))
    found = visited(env)
    assert found[-1] is env and base in found
    assert sum(isinstance(one, GymEnv) for one in found) == 2
    assert [type(one) for one in found if one in env.transform.parts()] == [StepCounter, VecNorm]
    env.append_transform(StepCounter(step_count_key="steps"))
    assert sum(isinstance(one, StepCounter) for one in visited(env)) == 2


def test_single_transform_and_one_after_it_are_visited():
    env = TransformedEnv(countdown(), StepCounter())
    env.append_transform(VecNorm(in_keys=["observation"]))
    assert [type(one) for one in visited(env) if one in env.transform.parts()] == [StepCounter, VecNorm]


def test_transform_is_replaced():
    env = TransformedEnv(countdown(), StepCounter())
    env.transform = Compose(StepCounter(step_count_key="steps"))
    assert "steps" in env.rollout(2) and "step_count" not in env.rollout(2)
    assert len(visited(env)) == 4
    with pytest.raises(AttributeError):
        env.base_env = countdown()
    with pytest.raises((TypeError, ValueError, KeyError)):
        env.transform = VecNorm(in_keys=["absent"])
    assert "steps" in env.rollout(2)


def test_train_and_eval_reach_all_modules():
    env = TransformedEnv(Learned(), StepCounter())
    assert env.training
    assert env.eval() is env
    assert not any(module.training for module in env.modules()) and not env.base_env.net.training
    assert env.train() is env and env.base_env.net.training


def test_parameters_are_those_of_the_modules_in_an_environment():
    env = TransformedEnv(SerialEnv(2, Learned), StepCounter())
    assert len(list(env.parameters())) == 4
    assert [tuple(buffer.shape) for buffer in env.buffers()] == [(2,), (2,)]
    assert list(GymEnv("CartPole-v1").parameters()) == []
    assert not any(parameter.requires_grad for parameter in env.requires_grad_(False).parameters())


def test_environment_is_part_of_a_larger_module():
    env = TransformedEnv(Learned(), VecNorm(in_keys=["seen"]))
    env.rollout(3)
    whole, other = nn.ModuleList([env]), nn.ModuleList([TransformedEnv(Learned(), VecNorm(in_keys=["seen"]))])
    other.load_state_dict(whole.state_dict())
    assert torch.equal(other[0].base_env.net.weight, env.base_env.net.weight)
    state, copied = env.transform.state_dict(), other[0].transform.state_dict()
    assert state and str(copied) == str(state)


def test_state_of_a_transformed_environment_has_its_base_env():
    env, other = (TransformedEnv(Learned(), StepCounter()) for _ in range(2))
    state = env.state_dict()
    other.load_state_dict(state)
    assert torch.equal(other.base_env.net.weight, env.base_env.net.weight)
    with pytest.raises(ValueError, match="base_env"):
        TransformedEnv(countdown(), StepCounter()).load_state_dict(state)


def test_to_moves_specs_and_modules():
    env = TransformedEnv(Learned(), StepCounter()).to("meta")
    assert env.base_env.net.weight.device.type == "meta" == env.observation_spec.device.type
    assert TransformedEnv(countdown()).cpu().device == torch.device("cpu")


class Shifted(Transform):
    """Adds a buffer, whose dtype the result has."""

    def __init__(self):
        super().__init__(["observation"])
        self.register_buffer("shift", torch.ones(1, dtype=torch.float32))

    def _apply_transform(self, value):
        return value.to(self.shift.dtype) + self.shift


@pytest.mark.parametrize("nested", [False, True])
def test_specs_follow_the_dtype_of_modules(nested):
    env = TransformedEnv(GymEnv(Countdown()), Shifted())
    env = TransformedEnv(env, StepCounter()) if nested else env
    assert env.observation_spec["observation"].dtype is torch.float32
    for change, dtype in ((env.double, torch.float64), (env.float, torch.float32)):
        assert change() is env
        assert env.observation_spec["observation"].dtype is env.rollout(1)["observation"].dtype is dtype
        check_env_specs(env)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_copy_has_modules_of_its_own(copied):
    env = TransformedEnv(Learned(), StepCounter())
    other = copied(env)
    assert not set(env.modules()) & set(other.modules()) and len(visited(env)) == len(visited(other))
    assert other.rollout(2)["step_count"].flatten().tolist() == [0, 1]


def test_parent_of_a_transform_has_only_those_before_it():
    env = TransformedEnv(countdown(), Compose(StepCounter(), VecNorm(in_keys=["observation"])))
    parent = env.transform[1].parent
    assert not any(isinstance(one, VecNorm) for one in visited(parent))
    assert any(isinstance(one, VecNorm) for one in visited(env))


KINDS = {
    "gymnasium": countdown,
    "sync vector": lambda: GymEnv("CartPole-v1", num_envs=2, vectorization_mode="sync"),
    "vector entry point": lambda: GymEnv("CartPole-v1", num_envs=2),
    "serial": lambda: SerialEnv(2, countdown),
    "transformed": lambda: TransformedEnv(SerialEnv(2, countdown), StepCounter()),
    "TorchRL's form": Learned,
}


@each("kind", KINDS)
def test_reset_after_close_opens_again(kind):
    env = KINDS[kind]()
    td = env.rollout(2)
    env.close()
    assert env.is_closed
    with pytest.raises(RuntimeError, match="reset it first"):
        env.rand_step(td[..., -1])
    assert env.rollout(2).shape == td.shape and not env.is_closed
    env.close()
    env.start()
    assert not env.is_closed


def test_workers_start_again_after_close():
    env = ParallelEnv(2, countdown, num_workers=1)
    before = env.pids
    env.rollout(2)
    env.close()
    assert env.set_seed(0) == 2  # starts them
    assert not env.is_closed and env.pids != before
    assert env.rollout(2).shape == (2, 2)
    env.close()


def test_partial_reset_of_a_closed_environment_resets_all():
    env = SerialEnv(2, countdown)
    td = env.rollout(2)[:, -1].exclude("next")
    env.close()
    fresh = env.reset(td.set("_reset", torch.tensor([[True], [False]])))
    assert fresh["observation"][:, 0].tolist() == [3.0, 3.0]


def test_workers_that_make_another_environment_are_refused_when_they_start_again(tmp_path):
    marker = tmp_path / "changed"

    def make():
        return GymEnv("Pendulum-v1") if marker.exists() else GymEnv("CartPole-v1")

    env = ParallelEnv(1, make)
    env.close()
    marker.touch()
    with pytest.raises(ValueError, match="another"):
        env.reset()
    assert env.is_closed


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_vector_of_a_name_is_made_again(mode):
    env = GymEnv("CartPole-v1", num_envs=2, vectorization_mode=mode)
    env.close()
    assert env.rollout(2).shape == (2, 2)
    env.close()


def test_copy_of_a_vector_opens_again():
    env = pickle.loads(pickle.dumps(GymEnv("CartPole-v1", num_envs=2)))
    env.close()
    assert env.rollout(2).shape == (2, 2)
