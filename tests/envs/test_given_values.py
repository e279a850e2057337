"""What an environment gives is compared with its space, in every way in which it is stepped."""

from __future__ import annotations

import itertools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from contracts.each import each
from contracts.gym_loop import Proxy
from engram.collectors import SyncDataCollector
from engram.envs import EnvBase, GymEnv, ParallelEnv, SerialEnv
from engram.errors import WorkerError
from engram.specs import Categorical, Composite, Unbounded


class Honest(gymnasium.Env):
    """Shows (t, t); from its third step on it gives what it was told to."""

    observation_space = spaces.Box(-9, 9, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, **lies):
        self.lies = lies

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        told = {"observation": np.full(2, self.t, np.float32), "reward": 1.0, "terminated": False, "truncated": False}
        told.update(self.lies if self.t >= 3 else {})
        return *told.values(), {}


class Named(Honest):
    """The same in a Dict, beside another entry."""

    observation_space = spaces.Dict({"other": spaces.Discrete(3), "observation": Honest.observation_space})

    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        return {"other": 1, "observation": observation}, info

    def step(self, action):
        observation, *rest = super().step(action)
        return {"other": 1, "observation": observation}, *rest


class ForMany(VectorEnv):
    """Two in one object, that are reset by their caller; the second one lies."""

    def __init__(self, **lies):
        self.num_envs, self.worlds = 2, [Honest(), Honest(**lies)]
        self.single_observation_space, self.single_action_space = Honest.observation_space, Honest.action_space
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}

    def reset(self, *, seed=None, options=None):
        return np.stack([world.reset()[0] for world in self.worlds]), {}

    def step(self, actions):
        columns = zip(
            *[world.step(action)[:4] for world, action in zip(self.worlds, actions, strict=True)], strict=True
        )
        return *[joined(column) for column in columns], {}


def joined(column):
    """As somebody would who does not look at what he joins."""
    if any(isinstance(value, np.ma.MaskedArray) for value in column):
        return np.ma.stack(column)
    try:
        return np.array(column)
    except ValueError:
        return np.array([*column, None], dtype=object)[:-1]


gymnasium.register("engram/Honest-v0", entry_point=Honest, disable_env_checker=True)
SYNC = {"vectorization_mode": "sync"}


def linear():
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh())


def on_tensordicts():
    return TensorDictModule(linear(), in_keys=["observation"], out_keys=["action"])


def stepped(env):
    td = env.reset()
    for _ in range(3):
        td = env.step(env.rand_action(env.maybe_reset(td)))["next"].exclude("reward")


def collected(env, policy=None):
    for batch in SyncDataCollector(env, policy, frames_per_batch=8 * env.batch_size.numel()):
        assert batch.shape[-1] <= 2


WAYS = {
    "a step": lambda lies: stepped(GymEnv(Honest(**lies))),
    "a step of a Dict": lambda lies: stepped(GymEnv(Named(**lies))),
    "a rollout": lambda lies: GymEnv(Honest(**lies)).rollout(5),
    "collected at random": lambda lies: collected(GymEnv(Honest(**lies))),
    "collected by a module": lambda lies: collected(GymEnv(Honest(**lies)), linear()),
    "collected by a TensorDict module": lambda lies: collected(GymEnv(Honest(**lies)), on_tensordicts()),
    "a Dict, collected": lambda lies: collected(GymEnv(Named(**lies))),
    "through TensorDicts, collected": lambda lies: collected(Proxy(GymEnv(Honest(**lies)))),
    "in a series": lambda lies: stepped(SerialEnv(2, lambda: GymEnv(Honest(**lies)))),
    "in a series, collected": lambda lies: collected(SerialEnv(2, lambda: GymEnv(Honest(**lies)))),
    "of gymnasium's vector, by name": lambda lies: stepped(GymEnv("engram/Honest-v0", num_envs=2, **SYNC, **lies)),
    "written for many": lambda lies: stepped(GymEnv(ForMany(**lies))),
    "written for many, collected": lambda lies: collected(GymEnv(ForMany(**lies)), linear()),
}
OBSERVATIONS = {
    "a scalar": 5.0,
    "a list of one": [5.0],
    "text": "77",
    "nothing": None,
    "a number beyond float32": np.array([0.0, 1e300]),
    "a masked array": np.ma.masked_array(np.zeros(2, np.float32), [True, False]),
    "objects": np.array([0.0, None], dtype=object),
    "texts": np.array(["1", "2"]),
    "a ragged list": [1.0, [2.0]],
    "complex numbers": np.array([1j, 1.0]),
    "one more dimension": np.zeros((1, 2), np.float32),
}
REWARDS = {
    "nothing": None,
    "text": "77",
    "two numbers": np.ones(2),
    "a number beyond float32": 1e300,
    "a masked one": np.ma.masked_array(1.0, True),
    "a complex one": 1j,
    "an endless integer": 10**400,
}
FLAGS = {"nothing": None, "text": "no", "two flags": np.array([True, False]), "nan": float("nan"), "two": 2}
ways = pytest.mark.parametrize("way", WAYS)


def refused(way, key, **lies):
    with pytest.raises((ValueError, TypeError), match=f"gave.*{key}|which has no '{key}'"):
        WAYS[way](lies)


@ways
@each("found", OBSERVATIONS)
def test_an_observation_that_is_not_of_the_space_is_refused_by_its_key(way, found):
    refused(way, "observation", observation=OBSERVATIONS[found])


@ways
@each("found", REWARDS)
def test_a_reward_that_is_no_number_is_refused(way, found):
    refused(way, "reward", reward=REWARDS[found])


@ways
@each("flag", ["terminated", "truncated"])
@each("found", FLAGS)
def test_a_flag_that_is_neither_true_nor_false_is_refused(way, flag, found):
    refused(way, flag, **{flag: FLAGS[found]})


@each("mode", AutoresetMode)
@each("use", [stepped, collected])
@each("flag", ["terminated", "truncated"])
@each("found", FLAGS)
def test_a_flag_of_many_that_is_none_is_refused_whoever_resets_them(mode, use, flag, found):
    env = ForMany(**{flag: FLAGS[found]})
    env.metadata = {"autoreset_mode": mode}
    with pytest.raises(ValueError, match=f"gave {flag}"):
        use(GymEnv(env))


@each("kinds", list(itertools.permutations(["f4", "f8", "i8", ">f4"])))
def test_rewards_of_many_stay_what_they_are_where_their_dtype_changes(kinds):
    class Changing(ForMany):
        def step(self, actions):
            observation, reward, *rest = super().step(actions)
            t = self.worlds[0].t
            return observation, (reward * [t, -t]).astype(kinds[t % 4]), *rest

    batches = SyncDataCollector(GymEnv(Changing()), linear(), frames_per_batch=10)
    found = torch.cat([batches.rollout()["next", "reward"] for _ in range(2)], 1)[..., 0]
    assert found.dtype is torch.float32 and found.tolist() == [[t * sign for t in range(1, 11)] for sign in (1, -1)]


def test_a_reward_beyond_float32_after_float32_rewards_is_refused_behind_them():
    class Growing(ForMany):
        def step(self, actions):
            observation, _, *rest = super().step(actions)
            kind = "f4" if self.worlds[0].t < 3 else "f8"
            return observation, np.array([1.0, 1.0 if kind == "f4" else 1e300], kind), *rest

    collector = SyncDataCollector(GymEnv(Growing()), linear(), frames_per_batch=10)
    assert collector.rollout()["next", "reward"][..., 0].tolist() == [[1.0, 1.0]] * 2
    with pytest.raises(ValueError, match=r"gave rewards with .*e\+300"):
        collector.rollout()


@pytest.mark.deep
@each("name", ["observation", "reward", "terminated"])
@each("kind", [GymEnv, lambda env: Proxy(GymEnv(env))])
def test_a_worker_of_a_parallel_env_refuses_them_too(name, kind):
    env = ParallelEnv(2, [lambda: kind(Honest()), lambda: kind(Honest(**{name: None}))], num_workers=2)
    with pytest.raises(WorkerError, match=f"gave.*{name}") as caught:
        collected(env)
    assert isinstance(caught.value.__cause__, ValueError)
    env.close()


def test_frames_that_are_skipped_are_looked_at():
    with pytest.raises(ValueError, match="gave a reward"):
        GymEnv("engram/Honest-v0", frame_skip=4, reward="77").rollout(1)


def test_a_reset_that_gives_text_is_refused():
    class Text(Honest):
        def reset(self, **kwargs):
            return "77", {}

    for use in (GymEnv.reset, collected):
        with pytest.raises(ValueError, match="'observation' of str '77'"):
            use(GymEnv(Text()))


@each(
    "found",
    [np.array([1.5, 2.0]), [1, 2], torch.tensor([1.0, 2.0]), np.array([1, 2], np.int8), np.float64([np.inf, 1])],
)
def test_numbers_of_another_dtype_are_taken_as_they_are(found):
    batch = SyncDataCollector(GymEnv(Honest(observation=found)), frames_per_batch=4).rollout()
    assert batch["next", "observation"][2:].tolist() == [[float(x) for x in found]] * 2


@each("found", [300, -1, 0.5, float("nan"), [300]])
def test_a_number_that_has_no_place_in_an_integer_space_is_refused(found):
    class Bytes(Honest):
        observation_space = spaces.Box(0, 255, (1,) if isinstance(found, list) else (), np.uint8)

        def reset(self, **kwargs):
            return np.zeros_like(found, np.uint8), {}

        def step(self, action):
            return found, 1.0, False, False, {}

    for policy in (None, lambda td: td.set("action", torch.zeros(2))):
        with pytest.raises(ValueError, match="which uint8 cannot hold"):
            SyncDataCollector(GymEnv(Bytes()), policy, frames_per_batch=4).rollout()


@each(("flag", "expected"), [(np.True_, True), (1, True), (np.array(True), True), (0, False)])
def test_flags_of_any_kind_are_taken_as_they_are(flag, expected):
    batch = SyncDataCollector(GymEnv(Honest(terminated=flag)), frames_per_batch=4).rollout()
    assert batch["next", "done"].flatten().tolist() == [False, False, expected, False]


def test_infinite_and_missing_numbers_of_the_environment_itself_stay():
    lies = {"observation": np.array([np.inf, np.nan], np.float32), "reward": -np.inf}
    for policy in (None, linear()):
        batch = SyncDataCollector(GymEnv(Honest(**lies)), policy, frames_per_batch=3).rollout()
        assert batch["next", "reward"][2] == -np.inf and batch["next", "observation"][2].isnan().tolist() == [
            False,
            True,
        ]


class Own(EnvBase):
    """Somebody's own: gives two numbers, or what it was told to."""

    def __init__(self, **lies):
        super().__init__(Composite(two=Unbounded((2,)), inner=Composite(n=Unbounded((1,)))), Categorical(2))
        self.lies = lies

    def _reset(self, mask):
        return TensorDict({"two": torch.zeros(2), ("inner", "n"): torch.zeros(1)})

    def _step(self, td):
        told = {
            "two": torch.ones(2),
            "inner.n": torch.ones(1),
            "reward": torch.ones(1),
            "terminated": torch.zeros(1).bool(),
        }
        told = {**told, **self.lies}
        return TensorDict({tuple(key.split(".")): value for key, value in told.items() if value is not None})

    def _set_seed(self, seed):
        pass


@each(
    ("key", "value"),
    [
        ("two", torch.ones(())),
        ("two", torch.ones(1)),
        ("two", torch.ones(2).double()),
        ("two", "77"),
        ("two", None),
        ("inner.n", torch.ones(2)),
        ("reward", torch.ones(2)),
        ("reward", torch.ones(())),
        ("reward", torch.ones(1).long()),
        ("terminated", torch.zeros(1)),
        ("truncated", torch.zeros(2).bool()),
    ],
)
def test_values_of_a_user_environment_are_compared_with_its_specs(key, value):
    with pytest.raises(ValueError, match=f"gave .*'{key.split('.')[-1]}'"):
        Own(**{key: value}).rollout(2)
    with pytest.raises(ValueError, match="its spec says"):
        collected(Own(**{key: value}))


def test_an_environment_that_knows_only_that_an_episode_is_over_ends_it():
    following = Own(terminated=None, done=torch.ones(1).bool()).rollout(3)["next"]
    assert following["done"].tolist() == following["terminated"].tolist() == [[True]]


def test_an_entry_of_info_that_is_text_is_refused():
    class Informs(Honest):
        def step(self, action):
            observation, *rest, _ = super().step(action)
            return observation, *rest, {"x": "77" if self.t == 2 else self.t}

    env = GymEnv(Informs(), info_keys=["x"])
    with pytest.raises(ValueError, match=r"info\['x'\] is '77'"):
        env.rollout(3)


class Choosing(Honest):
    """Shows a choice; from its third step on another one."""

    def __init__(self, space, other):
        self.observation_space, self.other = space, other

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.shown(), {}

    def step(self, action):
        self.t += 1
        return self.shown(), 1.0, False, False, {}

    def shown(self):
        return self.other if self.t >= 3 else self.observation_space.sample()


CHOICES = {
    "beyond": (spaces.Discrete(3, start=2), 5),
    "below": (spaces.Discrete(3, start=2), np.int64(1)),
    "below zero": (spaces.Discrete(3), -1),
    "beyond in an array": (spaces.MultiDiscrete([2, 3]), np.array([2, 0])),
    "below in an array": (spaces.MultiDiscrete([2, 3]), np.array([0, -1])),
    "in a Dict": (spaces.Dict(observation=spaces.Discrete(3)), {"observation": 3}),
}


@each("case", CHOICES)
@each("make", [lambda env: env(), lambda env: SerialEnv(1, env), lambda env: ParallelEnv(1, env)])  # fmt: skip
def test_a_choice_that_the_space_has_not_is_refused_and_the_steps_before_it_are_handed_out(case, make):
    env = make(lambda: GymEnv(Choosing(*CHOICES[case])))
    frames = 0
    with pytest.raises((ValueError, WorkerError), match=r"observation 'observation' with .*its space says"):
        for batch in SyncDataCollector(env, frames_per_batch=8):
            frames += batch.numel()
    assert frames == 2


def test_environments_tell_their_number_and_how_they_were_made():
    assert SerialEnv(2, lambda: GymEnv("CartPole-v1")).num_workers == 2
    env = GymEnv("CartPole-v1", frame_skip=3)
    assert env.frame_skip == 3 and not env.from_pixels
