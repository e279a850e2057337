"""Nothing is lost without a word: errors and interrupts anywhere in a batch, odd sizes, odd dtypes, wrong states."""

from __future__ import annotations

import copy
import time

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict.nn import TensorDictModule
from torch import nn

from contracts.each import each
from engram.collectors import SyncDataCollector
from engram.collectors.utils import split_trajectories
from engram.data import LazyTensorStorage, ReplayBuffer
from engram.envs import GymEnv, ParallelEnv, RandomPolicy, SerialEnv


class Clock(gymnasium.Env):
    """Shows the time of its episode, which never ends by itself."""

    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, dtype=np.float32):
        self.observation_space = gymnasium.spaces.Box(0, 1000, (1,), dtype)

    def shown(self):
        return np.full(1, self.t, self.observation_space.dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.shown(), {}

    def step(self, action):
        self.t += 1
        return self.shown(), 1.0, False, False, {}


@each("make", [lambda env: None, lambda env: RandomPolicy(env.action_spec), lambda env: env.rand_step])
def test_a_series_of_one_keeps_its_dimension(make):
    env = SerialEnv(1, lambda: GymEnv(Clock()))
    batch = SyncDataCollector(env, make(env), frames_per_batch=5).rollout()
    assert batch.shape == (1, 5) and batch["observation"].flatten().tolist() == [0, 1, 2, 3, 4]


class Once:
    """Raises at its second call."""

    def __init__(self, error=KeyError):
        self.calls, self.error = 0, error

    def __call__(self, *args):
        self.calls += 1
        if self.calls == 2:
            raise self.error("once")
        return args[0] if args else None


def assert_new(batch, old):
    """The batch continues nothing."""
    assert batch["observation"][0] == 0 and batch["collector", "traj_ids"][0] not in old["collector", "traj_ids"]


@pytest.mark.parametrize("place", ["add_part", "postproc", "_split"])
def test_a_batch_that_is_lost_after_its_steps_is_followed_by_new_trajectories(monkeypatch, place):
    fails = Once(KeyboardInterrupt)
    collector = SyncDataCollector(
        GymEnv(Clock()), frames_per_batch=5, postproc=lambda td: td, split_trajs=place == "_split"
    )
    if place == "_split":
        monkeypatch.setattr("engram.collectors.sync.split_trajectories", fails)
    else:
        monkeypatch.setattr(collector._episodes if place == "add_part" else collector, place, fails)
    old = collector.rollout()
    with pytest.raises(KeyboardInterrupt):
        collector.rollout()
    assert_new(collector.rollout(), old)


def test_whole_trajectories_have_no_hole(monkeypatch):
    class Ends(Clock):
        def step(self, action):
            observation, reward, *_ = super().step(action)
            return observation, reward, self.t == 12, False, {}

    collector = SyncDataCollector(GymEnv(Ends()), frames_per_batch=5, trajs_per_batch=1)
    monkeypatch.setattr(collector._episodes, "add_part", Once(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        collector.rollout()
    assert collector.rollout()["observation"].flatten().tolist() == list(range(12))


def test_a_buffer_that_refuses_a_batch_gets_no_trajectory_with_a_hole(monkeypatch):
    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    collector = SyncDataCollector(GymEnv(Clock()), frames_per_batch=5, replay_buffer=rb)
    extend, fails = rb.extend, Once()
    monkeypatch.setattr(rb, "extend", lambda batch: extend(fails(batch)))
    collector.rollout()
    with pytest.raises(KeyError, match="once"):
        collector.rollout()
    collector.rollout()
    assert rb[:]["observation"].flatten().tolist() == [0, 1, 2, 3, 4] * 2
    assert rb[:]["collector", "traj_ids"].unique().numel() == 2


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_wide_unsigned_observations_go_everywhere(dtype):
    env = ParallelEnv(2, lambda: GymEnv(Clock(dtype)), num_workers=2)
    batch = SyncDataCollector(env, frames_per_batch=8, max_frames_per_traj=3).rollout()
    env.close()
    split = split_trajectories(batch)
    assert split["observation"].dtype == batch["observation"].dtype == getattr(torch, dtype.__name__)
    assert split["observation"].int().squeeze(-1).tolist() == [[0, 1, 2], [0, 0, 0], [0, 1, 2], [0, 0, 0]]
    assert split["next", "observation"].int().squeeze(-1)[0].tolist() == [1, 2, 3]


class Sleeps(Clock):
    def step(self, action):
        time.sleep(0.02)
        return super().step(action)


def test_workers_of_gymnasium_are_heard_after_an_interrupt():
    def make():
        vector_kwargs = {"autoreset_mode": AutoresetMode.SAME_STEP}
        return gymnasium.vector.AsyncVectorEnv([Sleeps] * 2, **vector_kwargs)

    env = make()
    collector = SyncDataCollector(GymEnv(env), frames_per_batch=8)
    wait, fails = env.step_wait, Once(KeyboardInterrupt)
    env.step_wait = lambda *args, **kwargs: (fails(), wait(*args, **kwargs))[1]
    with pytest.raises(KeyboardInterrupt):
        collector.rollout()
    assert collector.rollout()["observation"].int().squeeze(-1).tolist() == [[0, 1, 2, 3]] * 2
    env.close()


def policy(width):
    return TensorDictModule(nn.Linear(1, width), in_keys=["observation"], out_keys=["action"])


@each(
    "change",
    [
        lambda s: s.pop("policy_state_dict"),
        lambda s: s["episodes"].update(count="x"),
        lambda s: s["episodes"].update(returns=[1.0, None]),
        lambda s: s["episodes"].update(lengths=3),
        lambda s: s.update(policy_state_dict=policy(4).state_dict()),
    ],
)
def test_a_wrong_state_changes_nothing(change):
    collector = SyncDataCollector(GymEnv(Clock()), policy(3), frames_per_batch=5)
    state = copy.deepcopy(collector.state_dict())
    change(state)
    state["frames"] = 77
    before = copy.deepcopy(collector.state_dict())
    with pytest.raises(ValueError, match="state"):
        collector.load_state_dict(state)
    after = collector.state_dict()
    assert all(torch.equal(before["policy_state_dict"][k], v) for k, v in after["policy_state_dict"].items())
    assert after["frames"] == 0 and after["episodes"] == before["episodes"]
    assert after["env_random_state"] == before["env_random_state"]
