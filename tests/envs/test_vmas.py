"""Scenarios of VMAS as environments, by a simulation of ours with its interface."""

import sys
import types

import pytest
import torch
from gymnasium.spaces import Box, Discrete

from contracts.each import each
from engram.collectors import SyncDataCollector
from engram.envs import GymEnv, TransformedEnv, check_env_specs
from engram.envs.libs.vmas import VmasEnv, VmasWrapper
from engram.transforms import Compose, RewardSum, StepCounter

NAMES = ("agent_0", "agent_1")


class Simulation:
    """As `vmas.make_env(..., terminated_truncated=True)`: agents that see where they are; episodes of `max_steps`."""

    terminated_truncated = True

    def __init__(
        self, num_envs=3, device="cpu", max_steps=4, continuous_actions=True, names=("agent_0", "agent_1"), **_
    ):
        self.num_envs, self.device, self.max_steps = num_envs, torch.device(device), max_steps
        self.continuous_actions = continuous_actions
        self.agents = [types.SimpleNamespace(name=name) for name in names]
        self.action_space = [Box(-1.0, 1.0, (2,)) if continuous_actions else Discrete(5) for _ in names]
        self.place = [torch.zeros(num_envs, 3 if name.startswith("agent") else 2) for name in names]
        self.steps = torch.zeros(num_envs)

    def reset(self, return_observations=True):
        for number in range(self.num_envs):
            self.reset_at(number)

    def reset_at(self, index, return_observations=True):
        self.steps[index] = 0
        for place in self.place:
            place[index] = 0.0

    def get_from_scenario(self, get_observations, get_rewards, get_infos, get_dones):
        return [self.place, [{"speed": place[:, 0]} for place in self.place]]

    def step(self, actions):
        self.steps += 1
        for place, action in zip(self.place, actions, strict=True):
            assert action.shape == (self.num_envs, 2 if self.continuous_actions else 1)
            place += 1 + action.float().sum(1, keepdim=True)
        seen, infos = self.get_from_scenario(True, True, True, True)
        over = torch.zeros(self.num_envs, dtype=torch.bool)
        return seen, [place.sum(1) for place in self.place], over, self.steps >= self.max_steps, infos

    def seed(self, seed):
        torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def vmas(monkeypatch):
    module = types.SimpleNamespace(make_env=lambda scenario, seed, terminated_truncated, **given: Simulation(**given))
    monkeypatch.setitem(sys.modules, "vmas", module)


@each(
    "arguments",
    [{}, {"continuous_actions": False}, {"continuous_actions": False, "categorical_actions": False}],
)
def test_agents_are_a_group_with_their_own_rewards(arguments):
    env = VmasEnv("balance", num_envs=3, max_steps=4, seed=0, **arguments)
    assert env.group_map == {"agents": ["agent_0", "agent_1"]} and env.batch_size == (3,)
    check_env_specs(env)
    env = TransformedEnv(env, Compose(RewardSum(), StepCounter()))
    check_env_specs(env)
    batch = SyncDataCollector(env, None, frames_per_batch=18).rollout()
    assert batch["agents", "observation"].shape == (3, 6, 2, 3) and batch["agents", "info", "speed"].shape == (
        3,
        6,
        2,
        1,
    )
    reward = batch["next", "agents", "reward"]
    assert reward.shape == (3, 6, 2, 1) and torch.equal(reward[..., 0], batch["next", "agents", "observation"].sum(-1))
    assert batch["next", "truncated"][0].flatten().tolist() == [False] * 3 + [True] + [False] * 2
    assert batch["step_count"][0].flatten().tolist() == [0, 1, 2, 3, 0, 1]
    assert torch.equal(batch["next", "agents", "episode_reward"][:, :4], reward[:, :4].cumsum(1))
    same = batch["next", "agents", "observation"][:, :3] == batch["agents", "observation"][:, 1:4]
    assert same.all()


def test_agents_of_other_names_are_other_groups():
    simulation = Simulation(names=("agent_0", "adversary_0", "agent_1"))
    env = VmasWrapper(simulation)
    assert env.group_map == {"agents": ["agent_0", "agent_1"], "adversary": ["adversary_0"]}
    check_env_specs(env)
    assert env.rollout(2)["adversary", "observation"].shape == (3, 2, 1, 2)
    given = VmasWrapper(simulation, group_map={"one": ["agent_0"], "rest": ["adversary_0"], "two": ["agent_1"]})
    assert given.rollout(2)["two", "action"].shape == (3, 2, 1, 2)


def test_what_is_no_group_or_no_simulation_is_refused_by_name(monkeypatch):
    with pytest.raises(ValueError, match=r"'agents' see observations of the shapes .*group_map="):
        VmasWrapper(Simulation(names=("agent_0", "leader")))
    with pytest.raises(ValueError, match=r"names each agent once; the agents are \['agent_0', 'agent_1'\]"):
        VmasWrapper(Simulation(), group_map={"one": ["agent_0"]})
    with pytest.raises(TypeError, match=r"vmas\.make_env\(\.\.\., terminated_truncated=True\), got a GymEnv"):
        VmasWrapper(GymEnv("CartPole-v1"))
    monkeypatch.setitem(sys.modules, "vmas", None)
    with pytest.raises(ImportError, match="pip install vmas"):
        VmasEnv("balance", num_envs=2)
