"""GymEnv and SerialEnv keep the contract of environments."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch.nn.functional import one_hot

from contracts.each import each
from contracts.gym_worlds import SPACES, Countdown, Echo
from engram.data import Bounded, Categorical, Composite, Unbounded
from engram.envs import EnvBase, GymEnv, ParallelEnv, SerialEnv, TransformedEnv, check_env_specs, step_mdp
from engram.errors import WorkerError
from engram.testing import EnvContract


class TestGymEnv(EnvContract):
    def make(self):
        return GymEnv("CartPole-v1")


class TestGymEnvWithCategories(EnvContract):
    def make(self):
        return GymEnv("CartPole-v1", categorical_action_encoding=True)


class TestGymEnvWithNestedSpaces(EnvContract):
    def make(self):
        return GymEnv(Echo(SPACES["dict"], SPACES["box"]))


class TestSerialEnv(EnvContract):
    def make(self):
        return SerialEnv(3, lambda: GymEnv("CartPole-v1"))


class TestSerialEnvOfSerialEnvs(EnvContract):
    def make(self):
        return SerialEnv(2, lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")))


@each("categorical", [False, True])
@each("action", SPACES)
def test_every_space_can_be_the_action(action, categorical):
    env = GymEnv(Echo(SPACES["box"], SPACES[action]), categorical_action_encoding=categorical)
    check_env_specs(env, seed=0, max_steps=8)


@each("categorical", [False, True])
@each("observation", SPACES)
def test_every_space_can_be_the_observation(observation, categorical):
    env = GymEnv(Echo(SPACES[observation], SPACES["discrete"]), categorical_action_encoding=categorical)
    check_env_specs(env, seed=0, max_steps=8)


def test_an_action_reaches_gymnasium_with_the_start_of_its_space():
    world = Echo(SPACES["box"], spaces.Discrete(3, start=5))
    env = GymEnv(world)
    env.step(env.reset().set("action", one_hot(torch.tensor(2), 3)))
    assert world.actions == [7]


def test_an_action_grid_reaches_gymnasium_in_its_shape():
    world = Echo(SPACES["box"], SPACES["multidiscrete grid"])
    env = GymEnv(world, categorical_action_encoding=True)
    env.step(env.reset().set("action", torch.tensor([1, 2, 3, 4])))
    np.testing.assert_array_equal(world.actions[0], [[1, 2], [3, 4]])


def test_entries_of_a_dict_space_are_observations_of_their_own():
    assert set(GymEnv(Echo(SPACES["dict"], SPACES["box"])).observation_spec.leaves()) == {"a", ("b", "c")}


def test_cartpole_has_the_shapes_and_dtypes_of_ted():
    batch = GymEnv("CartPole-v1").rollout(5)
    assert batch["observation"].dtype is torch.float32 and batch["observation"].shape == (5, 4)
    assert batch["action"].dtype is torch.int64 and batch["action"].shape == (5, 2)


def test_frame_skip_repeats_the_action_adds_rewards_and_stops_at_the_end():
    env = GymEnv(Countdown(lengths=(5,)), frame_skip=3, categorical_action_encoding=True)
    batch = env.rollout(10, lambda td: td.set("action", torch.tensor(1)))
    assert batch["next", "observation"][:, 0].tolist() == [2, 0]
    assert batch["next", "reward"].squeeze(-1).tolist() == [4 + 3 + 2 + 30, 1 + 0 + 20]


def test_pixels_are_what_the_environment_renders():
    env = GymEnv(Countdown(), from_pixels=True)
    batch = env.rollout(2)
    assert set(env.observation_spec.keys()) == {"pixels"}
    assert batch["pixels"].dtype is torch.uint8 and batch["pixels"].shape == (2, 4, 5, 3)


def test_pixels_of_an_environment_that_renders_no_arrays_are_refused(monkeypatch):
    monkeypatch.setattr(Countdown, "render_mode", "human")
    with pytest.raises(ValueError, match="needs an environment with render_mode='rgb_array', got 'human'"):
        GymEnv(Countdown(), from_pixels=True)


def test_pixels_can_come_beside_the_observation():
    env = GymEnv(Countdown(), from_pixels=True, pixels_only=False)
    assert set(env.observation_spec.keys()) == {"pixels", "observation"}
    check_env_specs(env)


def test_gymnasiums_autoreset_makes_no_difference():
    plain, wrapped = GymEnv(Countdown()), GymEnv(gymnasium.wrappers.Autoreset(Countdown()))
    batches = []
    for env in (plain, wrapped):
        env.set_seed(0)
        batches.append(
            env.rollout(12, lambda td: td.set("action", one_hot(torch.tensor(0), 3)), break_when_any_done=False)
        )
    assert bool((batches[0] == batches[1]).all())


def test_the_true_last_observation_stays_under_next():
    env = GymEnv(Countdown(lengths=(2, 3)))
    env.set_seed(0)
    batch = env.rollout(4, break_when_any_done=False)
    assert batch["next", "observation"][:, 0].tolist() == [1, 0, 2, 1]
    assert batch["observation"][:, 0].tolist() == [2, 1, 3, 2]
    assert batch["next", "terminated"].squeeze(-1).tolist() == [False, True, False, False]


def test_only_finished_members_of_a_serial_env_are_reset():
    env = SerialEnv(2, [lambda: GymEnv(Countdown(lengths=(1, 5))), lambda: GymEnv(Countdown(lengths=(9,)))])
    env.set_seed(0)
    batch = env.rollout(3, break_when_any_done=False)
    assert batch["observation"][..., 0].tolist() == [[1, 5, 4], [9, 8, 7]]


def test_a_serial_env_refuses_members_that_differ():
    with pytest.raises(ValueError, match="environment 1 has another observation_spec"):
        SerialEnv(2, [lambda: GymEnv("CartPole-v1"), lambda: GymEnv(Countdown())])


def test_observations_may_be_views_in_reverse_order():
    class Flipped(gymnasium.Env):
        observation_space, action_space = spaces.Box(0, 9, (3,)), spaces.Discrete(2)

        def reset(self, **kwargs):
            return np.arange(3, dtype=np.float32)[::-1], {}

    assert GymEnv(Flipped()).reset()["observation"].tolist() == [2, 1, 0]


def test_what_a_policy_keeps_is_zero_in_a_new_episode():
    def remember(td):
        td.set("action", one_hot(torch.tensor(0), 3))
        return td.set(("next", "memory"), td.get("memory", torch.zeros(1)) + 1)

    env = GymEnv(Countdown(lengths=(3,)))
    batch = env.rollout(6, remember, break_when_any_done=False)
    assert batch["next", "memory"].squeeze(-1).tolist() == [1, 2, 3, 1, 2, 3]


def test_spaces_without_a_tensor_form_are_named():
    with pytest.raises(TypeError, match="Sequence"):
        GymEnv(Echo(spaces.Sequence(SPACES["box"]), SPACES["discrete"]))


def test_a_space_key_that_engram_uses_is_refused():
    with pytest.raises(ValueError, match="'reward'"):
        GymEnv(Echo(spaces.Dict({"reward": SPACES["box"]}), SPACES["discrete"]))


def test_scores_instead_of_a_choice_are_refused():
    env = GymEnv("CartPole-v1")
    with pytest.raises(ValueError, match="argmax"):
        env.step(env.reset().set("action", torch.tensor([0.3, 0.7])))


def test_arguments_for_make_beside_an_environment_are_refused():
    with pytest.raises(TypeError, match="render_mode"):
        GymEnv(Countdown(), render_mode="rgb_array")


def test_step_mdp_moves_next_up_and_leaves_the_stepped_data_alone():
    td = GymEnv("CartPole-v1").rollout(2)
    root = step_mdp(td)
    assert set(root.keys()) == {"observation", "done", "terminated", "truncated"}
    assert torch.equal(root["observation"], td["next", "observation"])
    assert "next" in td.keys()


def test_check_env_specs_names_what_does_not_fit():
    class Liar(Countdown):
        observation_space = spaces.Box(-1, 1, (2,), np.float32)

    with pytest.raises(ValueError, match="'observation' is not what its spec says"):
        check_env_specs(GymEnv(Liar()))


def test_check_env_specs_names_a_nested_key_and_a_wrong_batch_size():
    class Nested(Countdown):
        observation_space = spaces.Dict({"in": spaces.Dict({"left": spaces.Box(-1000, 1000, (2,), np.float32)})})

        def show(self):
            return {"in": {"left": super().show() + 2000}}

    with pytest.raises(ValueError, match=r"reset: \('in', 'left'\) is not what its spec says"):
        check_env_specs(SerialEnv(2, lambda: GymEnv(Nested())))

    with pytest.raises(ValueError, match=r"batch_size=\(2, 1\)"):
        check_env_specs(Wide())


class Wide(EnvBase):
    def __init__(self):
        super().__init__(Composite(x=Unbounded((2, 1))), Categorical(2, (2,)), batch_size=(2,))

    def _reset(self, mask):
        return TensorDict({"x": torch.zeros(2, 1)}, [2, 1])

    def _step(self, td):
        return TensorDict({"x": torch.ones(2, 1)}, [2, 1])

    def _set_seed(self, seed):
        pass


class LacksAgents(Wide):
    """Has the observations of agents in its spec, and gives none."""

    def __init__(self):
        super().__init__()
        agents = Composite(y=Unbounded((2, 3)), batch_size=(2,))
        self.observation_spec = Composite(x=Unbounded((2, 1)), agents=agents, batch_size=(2,))


def test_nested_observations_that_are_missing_are_an_error_that_names_them():
    with pytest.raises(ValueError, match=r"gave \('agents',\).* as None, and its spec says torch.float32 \(2, 3\)"):
        LacksAgents().reset()


def test_check_env_specs_names_a_reward_that_its_spec_does_not_allow():
    env = GymEnv(Countdown())
    env.reward_spec = Bounded(-1.0, 0.0, (1,))  # rewards are only under 'next', and 0 or more
    with pytest.raises(ValueError, match=r"step, under 'next': 'reward' is not what its spec says"):
        check_env_specs(env, seed=0)


def test_check_env_specs_sees_a_step_whose_done_is_not_that_of_its_two_reasons():
    class Forgetful(SerialEnv):
        def step(self, tensordict):
            stepped = super().step(tensordict)
            stepped["next", "done"] = torch.zeros_like(stepped["next", "done"])
            return stepped

    with pytest.raises(ValueError, match=r"done must be terminated \| truncated, got done=\[\[False\]\], termin"):
        check_env_specs(Forgetful(1, lambda: GymEnv(Countdown(lengths=(1,)))))


def test_check_env_specs_sees_a_reset_that_changes_the_others():
    class Careless(SerialEnv):
        def reset(self, td=None):
            return super().reset()

    members = [lambda: GymEnv(Countdown(lengths=(1,))), lambda: GymEnv(Countdown(lengths=(9,)))]
    with pytest.raises(ValueError, match="a reset changed 'observation' where no episode was over"):
        check_env_specs(Careless(2, members))


def test_a_module_policy_with_several_observations_is_told_what_to_do():
    env = GymEnv(Echo(SPACES["dict"], SPACES["discrete"]))
    with pytest.raises(ValueError, match="TensorDictModule"):
        env.rollout(2, torch.nn.Linear(2, 3))


def test_an_environment_is_a_class_with_three_methods():
    assert EnvBase.__abstractmethods__ == {"_reset", "_step", "_set_seed"}


@each("make", [SerialEnv, lambda n, make_env: ParallelEnv(n, make_env, num_workers=1)])
@each("is_within", [False, True])
def test_one_environment_given_twice_is_refused(make, is_within):
    env = GymEnv("CartPole-v1")
    with pytest.raises((ValueError, WorkerError), match="environments 0 and 1 are one and the same GymEnv"):
        make(2, lambda: TransformedEnv(env) if is_within else env)
