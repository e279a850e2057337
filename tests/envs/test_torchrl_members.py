"""Arguments and members of TorchRL's environments: what each does here."""

from __future__ import annotations

import sys

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from contracts.gym_worlds import SPACES, Countdown, Echo
from engram.collectors import SyncDataCollector
from engram.data import Composite, OneHot, Unbounded
from engram.envs import (
    EnvBase,
    EnvCreator,
    GymEnv,
    GymWrapper,
    ParallelEnv,
    RandomPolicy,
    SerialEnv,
    TransformedEnv,
    check_env_specs,
    gym_backend,
    gym_make,
    set_gym_backend,
)
from engram.envs.transforms import StepCounter


def countdown(**kwargs):
    return GymEnv(Countdown(lengths=[3]), **kwargs)


# ---- every environment ----
@each("env", [countdown(), SerialEnv(2, countdown), TransformedEnv(countdown(), StepCounter())])
def test_small_members(env):
    td = env.rollout(3)[..., -1]
    assert env.any_done(td["next"]) and not env.any_done(env.reset())
    assert env.ndimension() == env.batch_dims == len(env.batch_size)
    assert env.cardinality() == 3
    assert env.add_truncated_keys() is env and env.set_spec_lock_(False) is env
    assert env.run_type_checks and env.auto_complete_done_specs and list(env.reset_keys) == ["_reset"]
    assert env.set_seed() is None and env.set_seed(None) is None


@each("name", ["observation", "full_observation", "reward", "full_reward", "done", "full_done"])
def test_unbatched_specs_are_those_of_one_environment(name):
    env = SerialEnv(2, countdown)
    assert getattr(env, f"{name}_spec_unbatched") == getattr(countdown(), f"{name}_spec")


def test_unbatched_specs_in_groups():
    env = SerialEnv(2, countdown)
    assert env.output_spec_unbatched.shape == env.input_spec_unbatched.shape == env.state_spec_unbatched.shape == ()
    assert env.full_state_spec_unbatched.is_empty()


def test_check_env_specs_takes_a_first_state_and_is_a_method():
    env = countdown()
    check_env_specs(env, tensordict=env.reset(), break_when_any_done="both")
    env.check_env_specs(seed=0)


# ---- GymEnv ----
def test_gymnasium_members_are_read_through():
    env = TransformedEnv(GymEnv("CartPole-v1", render_mode="rgb_array"), StepCounter())
    assert type(env.unwrapped).__name__ == "CartPoleEnv"
    assert env.action_space == gymnasium.spaces.Discrete(2) and env.render_mode == "rgb_array"
    assert countdown().lengths == [3]
    with pytest.raises(AttributeError, match="'GymEnv' object has no attribute 'nothing'"):
        countdown().nothing  # noqa: B018
    with pytest.raises(AttributeError, match="info_keys"):
        countdown().set_info_dict_reader  # noqa: B018


@each("name", ["name_or_env", "env_name", "env"])
def test_name_has_three_names(name):
    assert GymEnv(**{name: "CartPole-v1"}).env_name == "CartPole-v1"


@pytest.mark.parametrize("settings", [{}, {"env_name": "CartPole-v1", "env": Countdown()}])
def test_one_name_is_needed(settings):
    with pytest.raises(TypeError, match="needs one of"):
        GymEnv(**settings)


def test_env_name_of_an_existing_environment():
    assert GymWrapper(env=gymnasium.make("CartPole-v1")).env_name == "CartPole-v1"
    assert countdown().env_name is None
    assert GymEnv("CartPole-v1", num_envs=2).env_name == "CartPole-v1"


def test_available_environments():
    assert "CartPole-v1" in GymEnv.available_envs
    assert countdown().available_envs == GymEnv.available_envs
    assert countdown().lib is gymnasium and GymEnv.libname == "gym"


def test_arguments_of_torchrl_without_effect():
    env = GymEnv(
        "CartPole-v1",
        allow_done_after_reset=True,
        batch_size=[],
        convert_actions_to_numpy=True,
        missing_obs_value=0,
        auto_reset=False,
        num_workers=1,
    )
    assert env.rollout(2).shape == (2,)
    with pytest.raises(TypeError, match="ParallelEnv"):
        GymEnv("CartPole-v1", num_workers=2)
    with pytest.raises(ValueError, match="num_envs"):
        GymEnv("CartPole-v1", batch_size=[3])


class WithPolicy(Countdown):
    def __init__(self, policy=None):
        super().__init__()
        self.policy = policy


@pytest.fixture
def registered():
    gymnasium.register("engram/WithPolicy-v0", WithPolicy)
    yield "engram/WithPolicy-v0"
    del gymnasium.registry["engram/WithPolicy-v0"]


def test_policy_goes_to_an_environment_that_takes_one(registered):
    assert GymEnv(registered, policy="mine").unwrapped.policy == "mine"
    assert GymEnv("CartPole-v1", policy="mine").rollout(1).shape == (1,)
    assert GymEnv(Countdown(), policy="mine").rollout(1).shape == (1,)


class WithFrameSkip(gymnasium.Env):
    """Counts frames; skips some itself, as Atari's environments do."""

    observation_space = gymnasium.spaces.Box(0, 1000, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, frameskip=4):
        self.frameskip = frameskip

    def reset(self, *, seed=None, options=None):
        self.frames = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.frames += self.frameskip
        return np.full(1, self.frames, np.float32), 1.0, False, False, {}


@pytest.mark.parametrize("num_envs", [0, 2])
def test_frame_skip_is_that_of_an_environment_that_has_one(num_envs):
    gymnasium.register("engram/WithFrameSkip-v0", WithFrameSkip)
    try:
        for given, frames in (({}, 4), ({"frame_skip": 3}, 3), ({"frame_skip": 1}, 1), ({"frameskip": 2}, 2)):
            following = GymEnv("engram/WithFrameSkip-v0", num_envs=num_envs, **given).rollout(2)["next"]
            assert (following["observation"][..., -1, 0] == 2 * frames).all() and (following["reward"] == 1).all()
        with pytest.raises(ValueError, match="frame_skip=3 is frameskip=2 of engram/WithFrameSkip-v0: give one"):
            GymEnv("engram/WithFrameSkip-v0", num_envs=num_envs, frame_skip=3, frameskip=2)
    finally:
        del gymnasium.registry["engram/WithFrameSkip-v0"]


def test_atari_is_registered_where_ale_py_is_installed(tmp_path, monkeypatch):
    (tmp_path / "ale_py.py").write_text("import gymnasium\ngymnasium.register('ALE/Fake-v5', 'fake:Fake')\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        gym_make.register_atari()
        assert "ALE/Fake-v5" in GymEnv.available_envs
    finally:
        gymnasium.registry.pop("ALE/Fake-v5", None)
        sys.modules.pop("ale_py", None)


# ---- several environments ----
WORKERS = {"num_threads": 1, "num_sub_threads": 2, "memmap": False, "shared_memory": True, "pin_memory": False}


@pytest.mark.parametrize("cls", [SerialEnv, ParallelEnv])
def test_arguments_for_workers(cls):
    env = cls(2, countdown, **WORKERS, use_buffers=True, mp_start_method="fork", shutdown_timeout=5.0, daemon=True)
    env.start()
    assert env.rollout(2).shape == (2, 2)
    env.close()
    with pytest.raises(TypeError, match="maybe_reset"):
        cls(2, countdown, allow_step_when_done=True)
    with pytest.raises(AttributeError, match="create_env_kwargs"):
        env.update_kwargs({})


def test_patience_has_two_names_and_one_value():
    with pytest.raises(TypeError, match="only one"):
        ParallelEnv(1, countdown, patience=1.0, shutdown_timeout=1.0)


def test_transformed_environment_on_a_device():
    env = TransformedEnv(countdown(), StepCounter(), device="cpu", auto_unwrap=False, cache_specs=True)
    assert env.rollout(2).device == env.base_env.device == torch.device("cpu")


def test_collector_opens_environments_that_were_closed():
    for env in (countdown(), SerialEnv(2, countdown), GymEnv("CartPole-v1", num_envs=2), ParallelEnv(2, countdown)):
        env.close()
        collector = SyncDataCollector(env, frames_per_batch=4)
        assert collector.rollout().numel() == 4 and not env.is_closed
        collector.shutdown()


# ---- the rest ----
def test_variant_of_a_creator_has_other_arguments():
    creator = EnvCreator(GymEnv, {"name_or_env": "CartPole-v1"}).init_()
    variant = creator.make_variant(categorical_action_encoding=True)
    assert variant().action_spec.shape == () and creator().action_spec.shape == (2,)
    with pytest.raises(AttributeError, match="read its specs"):
        creator.meta_data  # noqa: B018


@each("backend", ["gym", "gymnasium", gymnasium, lambda: gymnasium])
def test_backend_is_gymnasium(backend):
    chosen = set_gym_backend(backend)
    assert chosen.backend is chosen.clone().backend is gym_backend() is gymnasium
    assert gym_backend("wrappers") is gymnasium.wrappers


def test_other_backend_is_refused():
    with pytest.raises(ValueError, match="'gymnasium' only"):
        set_gym_backend("jumanji")


def test_random_policy_takes_the_spec_of_an_environment():
    policy = RandomPolicy(None)
    policy.set_action_spec_from_env(countdown())
    assert policy(TensorDict())["action"].shape == (3,)


def test_random_policy_takes_the_composite_of_all_actions():
    single, several = countdown(), GymEnv(Echo(SPACES["box"], SPACES["dict"]))
    assert RandomPolicy(single.full_action_spec)(TensorDict())["action"].shape == (3,)
    assert single.rollout(2, RandomPolicy(single.full_action_spec))["action"].shape == (2, 3)
    for spec in (several.action_spec, several.full_action_spec):
        assert several.rollout(2, RandomPolicy(spec))["action"].keys() == {"a", "b"}


def test_random_policy_takes_actions_with_other_keys():
    env = Agents()
    assert env.rollout(2, RandomPolicy(env.full_action_spec))["agents", "action"].shape == (2, 3, 2)


class Agents(EnvBase):
    """Three agents, whose actions are under their own key."""

    def __init__(self):
        super().__init__(batch_size=())
        self.observation_spec = Composite(seen=Unbounded((1,)))
        self.action_spec = Composite(agents=Composite(action=OneHot(2, (3, 2)), shape=(3,)))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict=None, **kwargs):
        return TensorDict({"seen": torch.zeros(1)})

    def _step(self, td):
        return TensorDict({"seen": torch.zeros(1), "reward": torch.zeros(1), "done": torch.zeros(1).bool()})

    def _set_seed(self, seed):
        pass
