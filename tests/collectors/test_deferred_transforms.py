"""Transforms that follow whole batches give what they give step by step."""

from __future__ import annotations

from itertools import product

import gymnasium
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn

from contracts.each import each
from contracts.pairwise import pairwise_product
from contracts.tiers import in_quick
from contracts.vector_worlds import Native
from engram.collectors import SyncDataCollector, sync
from engram.collectors.rollout import TensorDictRollout
from engram.collectors.sync import DeferredTransformRollout
from engram.envs import GymEnv, ParallelEnv, SerialEnv, TransformedEnv
from engram.envs.transforms import (
    CatFrames,
    Compose,
    InitTracker,
    RewardClipping,
    RewardScaling,
    RewardSum,
    StepCounter,
)


class Walk(gymnasium.Env):
    """Rewards that no order of adding leaves alone; episodes of random lengths, ended either way."""

    observation_space = gymnasium.spaces.Box(-10, 10, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.until = 0, int(self.np_random.integers(1, 9))
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        over, reward = self.t == self.until, float(self.np_random.normal() * 10.0 ** self.np_random.integers(-3, 5))
        shown = np.float32([self.t, action])
        return shown, reward, over and self.until % 2 == 0, over and self.until % 2 == 1, {}


class Doubler(nn.Module):
    def forward(self, observation):
        return nn.functional.one_hot((observation.sum(-1) * 2).long() % 3, 3)


ENVS = {
    "alone": lambda: GymEnv(Walk()),
    "in series": lambda: SerialEnv(3, lambda: GymEnv(Walk())),
    "in parallel": lambda: ParallelEnv(3, lambda: GymEnv(Walk()), num_workers=2),
    "vector": lambda: GymEnv(Native(3)),
    "transformed twice": lambda: TransformedEnv(GymEnv(Walk()), RewardSum(in_keys=["reward"], out_keys=["inner"])),
}
PARTS = {
    "all": lambda: [StepCounter(), RewardSum(), InitTracker(), RewardScaling(0.5, 0.1)],
    "scaled first": lambda: [RewardScaling(1.0, 3.0, standard_normal=True), RewardSum(["reward"], ["sum"])],
    "clipped": lambda: [RewardClipping(0.2, 0.6), RewardSum()],
    "cut": lambda: [InitTracker("first"), RewardSum(), StepCounter(3)],
    "cut twice": lambda: [StepCounter(5, step_count_key="other"), StepCounter(4)],
    "with keys for buffers": lambda: [
        InitTracker(("next", "first"), done_key="done"),
        RewardSum(done_key=("next", "terminated"), traj_key="episode"),
        StepCounter(4, done_key="done"),
    ],
}  # fmt: skip


def batches(monkeypatch, env, parts, *, later, n=4, frames=15, policy=None, **kwargs):
    """Of a collector that may let transforms follow, or may not."""
    with monkeypatch.context() as patch:
        if not later:
            patch.setattr(sync._Choice, "with_deferred_transforms", lambda *_: None)
        torch.manual_seed(0)
        with SyncDataCollector(
            lambda: TransformedEnv(env(), Compose(*parts)), policy, frames_per_batch=frames, **kwargs
        ) as collector:
            assert type(collector._rollout) is (DeferredTransformRollout if later else TensorDictRollout)
            collector.set_seed(4)
            return [collector.rollout() for _ in range(n)]


def assert_equal(found, expected):
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    for key in expected.keys(True, True):
        assert found[key].dtype == expected[key].dtype and found[key].shape == expected[key].shape, key
        assert torch.equal(found[key], expected[key]), key


#: Of environments in processes, which take long to start, one of each.
QUICK = [
    ({}, "all"),
    ({"reset_at_each_iter": True}, "cut twice"),
    ({"max_frames_per_traj": 3}, "with keys for buffers"),
]
SETTINGS = [
    pytest.param(kwargs, env, parts, marks=() if env != "in parallel" or (kwargs, parts) in QUICK else pytest.mark.deep)
    for kwargs in ({}, {"reset_at_each_iter": True}, {"max_frames_per_traj": 3}) for env in ENVS for parts in PARTS
]  # fmt: skip


@pytest.mark.pairwise
@pytest.mark.parametrize(("kwargs", "env", "parts"), SETTINGS, ids=str)
def test_batches_are_those_of_steps_key_by_key(monkeypatch, env, parts, kwargs):
    made = [batches(monkeypatch, ENVS[env], PARTS[parts](), later=later, **kwargs) for later in (True, False)]
    for found, expected in zip(*made, strict=True):
        assert_equal(found, expected)


@pytest.mark.parametrize("random", [0, 30])
def test_a_policy_that_looks_at_nothing_new_is_no_hindrance(monkeypatch, random):
    policy = TensorDictModule(Doubler(), in_keys=["observation"], out_keys=["action"])
    env, kwargs = ENVS["in series"], {"policy": policy, "init_random_frames": random}
    made = [batches(monkeypatch, env, PARTS["all"](), later=later, **kwargs) for later in (True, False)]
    for found, expected in zip(*made, strict=True):
        assert_equal(found, expected)


class Pictures(Walk):
    """Two pictures, one of which the environment goes on writing into, and a number."""

    observation_space = gymnasium.spaces.Dict(
        left=gymnasium.spaces.Box(0, 255, (2, 3, 4), np.uint8),
        right=gymnasium.spaces.Box(0, 255, (2, 3, 4), np.uint8),
        speed=gymnasium.spaces.Discrete(5),
    )
    shown = np.zeros((2, 3, 4), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.pictures(), {}

    def step(self, action):
        return self.pictures(), *super().step(action)[1:]

    def pictures(self):
        self.shown[...] = self.np_random.integers(0, 256, self.shown.shape, np.uint8)
        return {"left": self.shown, "right": self.shown[::-1].copy(), "speed": self.t % 5}


STACKED_ENVS = {
    "alone": ENVS["alone"],
    "in series": ENVS["in series"],
    "pictures": lambda: GymEnv(Pictures()),
    "pictures in series": lambda: SerialEnv(2, lambda: GymEnv(Pictures())),
}
STACKS = {
    "in their place": lambda key, dim: [CatFrames(3, dim, [key, ("next", key)])],
    "constant": lambda key, dim: [RewardSum(), CatFrames(3, dim, key, "s", padding="constant", padding_value=7)],
    "of stacks": lambda key, dim: [CatFrames(2, dim, key, "s"), StepCounter(4), CatFrames(2, -1, ["s"])],
    "twice": lambda key, dim: [CatFrames(2, dim, [key, key], ["s", "t"])],
    "of one frame": lambda key, dim: [CatFrames(1, dim, key, "s")],
    "nested": lambda key, dim: [CatFrames(5, dim, key, [("group", "s")])],
}
OF_STACKS = (STACKS, STACKED_ENVS, [{}, {"reset_at_each_iter": True}, {"max_frames_per_traj": 3}])


@pytest.mark.parametrize(
    ("stacks", "env", "kwargs"), in_quick(product(*OF_STACKS), pairwise_product(*OF_STACKS)), ids=str
)
def test_stacks_of_raw_frames_are_those_of_steps(monkeypatch, env, stacks, kwargs):
    key, dim = ("left", -3) if "pictures" in env else ("observation", -1)
    parts = STACKS[stacks]
    made = [batches(monkeypatch, STACKED_ENVS[env], parts(key, dim), later=later, **kwargs) for later in (True, False)]
    for found, expected in zip(*made, strict=True):
        assert_equal(found, expected)


class Newest(nn.Module):
    def forward(self, stack):
        return nn.functional.one_hot((stack[..., 2:].sum(-1) - stack[..., :2].sum(-1)).long() % 3, 3)


@pytest.mark.parametrize("random", [0, 20])
@pytest.mark.parametrize("env", ["alone", "in series"])
@pytest.mark.parametrize("kind", ["module", "TensorDictModule", "callable"])
def test_policies_read_the_stacks_of_raw_frames(monkeypatch, kind, env, random):
    policy = {
        "module": Newest(),
        "TensorDictModule": TensorDictModule(Newest(), in_keys=["observation"], out_keys=["action"]),
        "callable": lambda td: td.set("action", Newest()(td["observation"])),
    }[kind]
    kwargs = {"policy": policy, "init_random_frames": random}
    made = [
        batches(monkeypatch, STACKED_ENVS[env], [CatFrames(2, -1, ["observation"])], later=later, **kwargs)
        for later in (True, False)
    ]
    for found, expected in zip(*made, strict=True):
        assert_equal(found, expected)


class OwnFrames(CatFrames):
    def _step(self, td, following):
        return super()._step(td, following)


def test_other_stacks_that_come_later_are_seen_in_the_next_batch():
    frames = CatFrames(2, -1, ["observation"], ["s"])
    env = TransformedEnv(GymEnv(Walk()), frames)
    collector = SyncDataCollector(env, frames_per_batch=30)
    assert type(collector._rollout) is DeferredTransformRollout
    collector.rollout()
    env.transform.padding = "constant"
    assert (collector.rollout()["s"][0, :2] == 0).all()
    env.append_transform(CatFrames(2, -1, ["s"], ["t"]))
    assert collector.rollout()["t"].shape == (30, 8)


@each("kind, resets", [(CatFrames, False), (OwnFrames, True)])
def test_a_number_of_frames_may_change_between_batches(kind, resets):
    env = TransformedEnv(GymEnv(Walk()), kind(2, -1, ["observation"], ["s"]))
    collector = SyncDataCollector(env, frames_per_batch=30)
    before = collector.rollout()
    env.transform.N = 3
    if resets:
        collector.reset()
    after = collector.rollout()
    assert [batch["s"].shape[-1] // batch["observation"].shape[-1] for batch in (before, after)] == [2, 3]
    assert torch.equal(after["s"].chunk(3, -1)[2], after["observation"])


def test_observations_that_are_not_of_the_space_are_named_below_stacks():
    class Wrong(Walk):
        def step(self, action):
            observation, *rest = super().step(action)
            self.steps = getattr(self, "steps", 0) + 1
            return (observation[:1] if self.steps == 7 else observation), *rest

    collector = SyncDataCollector(
        TransformedEnv(GymEnv(Wrong()), CatFrames(2, -1, ["observation"])), frames_per_batch=20
    )
    assert len(collector.rollout()) == 6
    with pytest.raises(ValueError, match=r"observation 'observation' of shape \(1,\)"):
        collector.rollout()


@each(
    "env",
    [
        lambda: TransformedEnv(GymEnv(Walk()), OwnFrames(2, -1, ["observation"])),
        lambda: TransformedEnv(GymEnv(Pictures()), CatFrames(2, -1, ["speed"])),  # one-hot vectors of numbers
        lambda: TransformedEnv(GymEnv(Native(3)), CatFrames(2, -1, ["observation"])),
        lambda: TransformedEnv(GymEnv(Walk()), Compose(StepCounter(), CatFrames(2, -1, ["step_count"]))),
        lambda: TransformedEnv(GymEnv(Walk()), Compose(RewardSum(), CatFrames(2, -1, ["episode_reward"]))),
        lambda: TransformedEnv(TransformedEnv(GymEnv(Walk()), RewardSum()), CatFrames(2, -1, ["observation"])),
    ],
)
def test_frames_that_are_not_raw_are_stacked_step_by_step(env):
    collector = SyncDataCollector(env(), frames_per_batch=10)
    assert type(collector._rollout) is TensorDictRollout
    assert len(collector.rollout()) > 0


class Reader(TensorDictModuleBase):
    """Says less than it reads."""

    in_keys = ["observation"]
    out_keys = ["action"]

    def forward(self, td):
        return td.set("action", nn.functional.one_hot(td["step_count"].squeeze(-1) % 3, 3))


def hooked():
    module = TensorDictModule(Doubler(), in_keys=["observation"], out_keys=["action"])
    module.register_forward_pre_hook(lambda *_: None)
    return module


@each(
    "policy",
    [
        Reader(),
        lambda td: td.set("action", nn.functional.one_hot(td["step_count"].squeeze(-1) % 3, 3)),
        TensorDictModule(Doubler(), in_keys=["episode_reward"], out_keys=["action"]),
        TensorDictModule(lambda x: (Doubler()(x), x), in_keys=["observation"], out_keys=["action", "step_count"]),
        hooked(),
    ],
)
def test_a_policy_that_may_look_sees_every_step(policy):
    env = TransformedEnv(GymEnv(Walk()), Compose(StepCounter(), RewardSum()))
    collector = SyncDataCollector(env, policy, frames_per_batch=10)
    assert type(collector._rollout) is TensorDictRollout
    if not isinstance(policy, TensorDictModule):
        batch = collector.rollout()
        assert (batch["action"].argmax(-1) == batch["step_count"].squeeze(-1) % 3).all()


class Own(RewardSum):
    def _step(self, td, following):
        return super()._step(td, following).set("reward", -following["reward"])


class Counted(TransformedEnv):
    def _step(self, td):
        return super()._step(td)


@each(
    "env",
    [
        lambda: TransformedEnv(GymEnv(Walk()), Own()),
        lambda: TransformedEnv(GymEnv(Walk()), lambda td: td),
        lambda: TransformedEnv(GymEnv(Walk()), RewardScaling(torch.zeros(1), torch.ones(2))),
        lambda: TransformedEnv(GymEnv(Walk()), RewardScaling(0.0, 1.0, ["observation"])),
        lambda: TransformedEnv(TransformedEnv(GymEnv(Walk()), lambda td: td), RewardSum()),
        lambda: Counted(GymEnv(Walk()), RewardSum()),
    ],
)
def test_what_cannot_wait_is_done_step_by_step(env):
    assert type(SyncDataCollector(env, frames_per_batch=10)._rollout) is TensorDictRollout


def test_transforms_that_come_later_are_seen_in_the_next_batch():
    env = TransformedEnv(GymEnv(Walk()), StepCounter(4))
    collector = SyncDataCollector(env, frames_per_batch=30)
    first = collector.rollout()
    env.append_transform(RewardSum())
    second = collector.rollout()
    assert "episode_reward" in second.keys() and "episode_reward" not in first.keys()
    assert second["step_count"][0] == 0 and second["collector", "traj_ids"][0] > first["collector", "traj_ids"].max()
    other = SyncDataCollector(TransformedEnv(GymEnv(Walk()), StepCounter(4)), frames_per_batch=30)
    other.rollout()
    other.env.transform.max_steps = 2
    assert other.rollout()["next", "step_count"].max() == 2


def test_failed_batch_is_not_delivered():
    class Fails(Walk):
        def step(self, action):
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyError("world")
            return super().step(action)

    left = 37
    collector = SyncDataCollector(
        TransformedEnv(GymEnv(Fails()), Compose(StepCounter(), InitTracker())), frames_per_batch=20
    )
    collector.rollout()
    before = collector.rollout()
    assert len(before) == 16 and before["next", "step_count"].shape == (16, 1)  # what was stepped before
    with pytest.raises(KeyError, match="world"):
        collector.rollout()
    batch = collector.rollout()
    assert batch["step_count"][0] == 0 and batch["is_init"][0]
