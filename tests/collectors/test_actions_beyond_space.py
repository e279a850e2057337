"""Actions that no space has: refused before the environment gets them, with the rows before them kept."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from gymnasium.spaces import Dict as DictSpace
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn, tensor

from contracts.each import each
from contracts.gym_loop import Proxy
from engram.collectors import MultiaSyncDataCollector, MultiSyncDataCollector, SyncDataCollector
from engram.data import LazyTensorStorage, ReplayBuffer
from engram.envs import EnvBase, GymEnv, ParallelEnv, SerialEnv
from engram.errors import WorkerError
from engram.specs import Bounded, Categorical, Composite, OneHot, Unbounded

AT = 5  # the step whose action is wrong, counted from 1
NAN = float("nan")


class World(gymnasium.Env):
    """Accepts any action, and counts its steps."""

    observation_space = Box(-np.inf, np.inf, (1,), np.float32)

    def __init__(self, space):
        self.action_space, self.steps = space, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.full(1, self.steps, np.float32), 0.0, False, False, {}


class Acts(nn.Module):
    """Gives `sound` actions, and once, at its call AT, `wrong` for the last environment."""

    def __init__(self, sound, wrong, envs):
        super().__init__()
        self.sound, self.wrong, self.envs, self.calls = sound, wrong, envs, 0

    def forward(self, observation):
        self.calls += 1
        rows = [self.sound] * max(1, self.envs)
        if self.calls == AT:
            rows[-1] = self.wrong
        if not self.envs:
            return rows[0]
        if len({row.dtype for row in rows}) > 1:
            rows = [row.to(torch.float64) for row in rows]
        return torch.stack(rows)


CASES = {
    "a number beyond": (Discrete(3), True, tensor(1), tensor(3)),
    "a negative number": (Discrete(3), True, tensor(1), tensor(-1)),
    "a fraction": (Discrete(3), True, tensor(1), tensor(1.5)),
    "a number beyond many": (Discrete(1000), True, tensor(999), tensor(1000)),
    "no one": (Discrete(3), False, tensor([0, 1, 0]), tensor([0, 0, 0])),
    "two ones": (Discrete(3), False, tensor([0, 1, 0]), tensor([1, 0, 1])),
    "a two": (Discrete(3), False, tensor([0, 1, 0]), tensor([0, 2, 0])),
    "scores": (Discrete(3), False, tensor([0.0, 1.0, 0.0]), tensor([0.2, 0.5, 0.3])),
    "two ones of many": (Discrete(300), False, torch.eye(300)[7], torch.eye(300)[7] + torch.eye(300)[9]),
    "one of several beyond": (MultiDiscrete([2, 3]), True, tensor([1, 2]), tensor([2, 1])),
    "two ones of several": (MultiDiscrete([2, 2]), False, tensor([1, 0, 0, 1]), tensor([1, 1, 0, 1])),
    "a bit that is two": (MultiBinary(2), False, tensor([1, 0]), tensor([1, 2])),
    "NaN": (Box(-1, 1, (2,)), False, tensor([0.0, 0.0]), tensor([0.0, NAN])),
    "NaN in integers": (Box(0, 9, (2,), np.uint8), False, tensor([0.0, 3.0]), tensor([0.0, NAN])),
    "more than its dtype holds": (Box(0, 9, (2,), np.uint8), False, tensor([0.0, 3.0]), tensor([0.0, 256.0])),
}
PATHS = ["single", "serial", "vector", "stepped", "parallel"]


def made(path, space, categorical):
    def one():
        return GymEnv(World(space), categorical_action_encoding=categorical)

    if path == "vector":
        worlds = gymnasium.vector.SyncVectorEnv([lambda: World(space)] * 2)
        return GymEnv(worlds, categorical_action_encoding=categorical)
    if path == "parallel":
        return ParallelEnv(2, one, num_workers=1)
    return SerialEnv(2, one) if path == "serial" else Proxy(one()) if path == "stepped" else one()


def width(path):
    return 0 if path in ("single", "stepped") else 2


@each("case", CASES)
@each("path", PATHS[:-1])
def test_an_action_beyond_the_space_is_refused_with_its_step_and_environment(path, case):
    space, categorical, sound, wrong = CASES[case]
    n = width(path)
    collector = SyncDataCollector(
        made(path, space, categorical), Acts(sound, wrong, n), frames_per_batch=10 * max(1, n)
    )
    assert collector.rollout().shape[-1] == AT - 1  # the rows before it
    where = f"where:   {'environment 1, ' if n else ''}step {AT} of the batch"
    with pytest.raises(ValueError, match=f"not what the environment takes(.|\n)*{where}(.|\n)*allowed: "):
        collector.rollout()
    batch = collector.rollout()  # it goes on, and its environments have not been stepped with that action
    assert batch["next", "observation"].reshape(max(1, n), -1)[:, 0].tolist() == [AT] * max(1, n)


@each("space", [Discrete(3), MultiDiscrete([2, 3])])
@each("path", PATHS[:-1])
def test_numbers_where_one_hot_vectors_are_taken_are_refused_with_what_to_pass(path, space):
    env = made(path, space, False)
    numbers = torch.ones((*env.batch_size, *space.shape), dtype=torch.int64)
    policy = TensorDictModule(lambda observation: numbers, ["observation"], ["action"])
    calls = (
        lambda: env.step(policy(env.reset())),
        lambda: env.rollout(2, policy),
        SyncDataCollector(env, policy, frames_per_batch=4).rollout,
        SyncDataCollector(env, lambda td: policy(td), frames_per_batch=4).rollout,
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"one_hot\(number, n\), or .*categorical_action_encoding=True"):
            call()
    env.close()


@each("case", ["a number beyond", "two ones", "NaN"])
@each("path", PATHS)
def test_with_a_buffer_only_rows_before_the_refused_action_are_stored(path, case):
    space, categorical, sound, wrong = CASES[case]
    rb, n = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4), width(path)
    env = made(path, space, categorical)
    collector = SyncDataCollector(env, Acts(sound, wrong, n), frames_per_batch=10 * max(1, n), replay_buffer=rb)
    with pytest.raises(ValueError, match="not what the environment takes"):
        collector.rollout()
    assert len(rb) == (AT - 1) * max(1, n) and torch.equal(
        rb[:]["action"], sound.expand(len(rb), *sound.shape).to(rb[:]["action"])
    )
    collector.rollout()
    assert len(rb) == (AT + 9) * max(1, n)
    env.close()


@each("cls", [MultiSyncDataCollector, MultiaSyncDataCollector])
@each("has_buffer", [False, True])
def test_a_worker_refuses_an_action_beyond_the_space_and_says_which(cls, has_buffer):
    rb = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4) if has_buffer else None
    policy = Acts(tensor(1), tensor(7), 0)
    with cls(
        [lambda: made("single", Discrete(3), True)], policy, frames_per_batch=10, total_frames=40, replay_buffer=rb
    ) as collector:
        frames = 0
        with pytest.raises(WorkerError, match=f"worker 0 of(.|\n)*step {AT} of the batch"):
            for batch in collector:
                frames += 0 if batch is None else batch.numel()
        assert (len(rb) if has_buffer else frames) == AT - 1


@each("path", PATHS[:-1])
@each("value", [5.0, float("inf"), -float("inf")])
def test_the_bounds_of_a_box_are_left_to_the_environment(path, value):
    n = width(path)
    policy = Acts(tensor([0.0, 0.0]), tensor([0.0, value]), n)
    collector = SyncDataCollector(made(path, Box(-1, 1, (2,)), False), policy, frames_per_batch=10 * max(1, n))
    batch = collector.rollout()
    assert batch["action"].reshape(-1, 2)[:, 1].sum().item() == value


@each("dtype", [torch.bool, torch.int8, torch.int32, torch.int64, torch.float32, torch.float64])
@each("path", PATHS[:-1])
def test_one_hot_actions_of_any_dtype_are_taken(path, dtype):
    n = width(path)
    policy = Acts(tensor([0, 1, 0], dtype=dtype), tensor([0, 0, 1], dtype=dtype), n)
    collector = SyncDataCollector(made(path, Discrete(3), False), policy, frames_per_batch=10 * max(1, n))
    actions = collector.rollout()["action"].reshape(-1, 10, 3)[-1].argmax(-1)
    assert actions.tolist() == [1] * (AT - 1) + [2] + [1] * (10 - AT)


@each("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float32])
@each("path", PATHS[:-1])
def test_categories_of_any_dtype_are_taken(path, dtype):
    n = width(path)
    policy = Acts(tensor(1, dtype=dtype), tensor(2, dtype=dtype), n)
    collector = SyncDataCollector(made(path, Discrete(3), True), policy, frames_per_batch=10 * max(1, n))
    actions = collector.rollout()["action"].reshape(-1, 10)[-1]
    assert actions.tolist() == [1] * (AT - 1) + [2] + [1] * (10 - AT)


def test_an_action_of_a_nested_space_is_refused_by_its_name():
    class Nested(nn.Module):
        calls = 0

        def forward(self, observation):
            self.calls += 1
            force = tensor([0.0, NAN if self.calls == AT else 0.0])
            return TensorDict({"arm": TensorDict({"force": force}), "leg": tensor(1)})

    space = DictSpace(arm=DictSpace(force=Box(-1, 1, (2,))), leg=Discrete(2))
    policy = TensorDictModule(Nested(), in_keys=["observation"], out_keys=["action"])
    collector = SyncDataCollector(made("single", space, True), policy, frames_per_batch=10)
    assert len(collector.rollout()) == AT - 1
    with pytest.raises(ValueError, match=r"action \('arm', 'force'\) is not"):
        collector.rollout()


class Agents(EnvBase):
    """Two agents in each of two environments, whose actions are below keys of their own."""

    def __init__(self):
        super().__init__(batch_size=[2])
        self.observation_spec = Composite({"seen": Unbounded((2, 1))}, shape=[2])
        group = {
            "turn": OneHot(3, (2, 2, 3), dtype=torch.int64),
            "push": Bounded(-1, 1, (2, 2, 1)),
            "say": Categorical(4, (2, 2)),
        }
        self.full_action_spec = Composite({"team": Composite(group, shape=[2, 2])}, shape=[2])

    def _reset(self, td):
        return TensorDict({"seen": torch.zeros(2, 1)}, [2])

    def _step(self, td):
        return TensorDict(
            {"seen": torch.zeros(2, 1), "reward": torch.zeros(2, 1), "terminated": torch.zeros(2, 1, dtype=torch.bool)},
            [2],
        )

    def _set_seed(self, seed):
        pass


@each(("key", "wrong"), [("turn", 1), ("push", NAN), ("say", 4)])
def test_actions_of_agents_are_refused_by_their_keys(key, wrong):
    calls = []

    def act(td):
        calls.append(1)
        turn = torch.nn.functional.one_hot(torch.zeros(2, 2, dtype=torch.int64), 3)
        team = TensorDict(
            {"turn": turn, "push": torch.full((2, 2, 1), 7.0), "say": torch.zeros(2, 2, dtype=torch.int64)}, [2, 2]
        )
        if len(calls) == AT:
            team[key][1].reshape(-1)[-1] = wrong
        return td.set("team", team)

    collector = SyncDataCollector(Agents(), act, frames_per_batch=20)
    assert collector.rollout().shape == (2, AT - 1)
    with pytest.raises(ValueError, match=rf"action \('team', '{key}'\) is not(.|\n)*environment 1, step {AT} of"):
        collector.rollout()
    assert collector.rollout().shape == (2, 10)


@pytest.mark.parametrize("n", [0, 2])
def test_a_step_of_an_environment_refuses_nan_too(n):
    env = made("vector" if n else "single", Box(-1, 1, (2,)), False)
    td = env.reset().set("action", torch.full((*env.batch_size, 2), NAN))
    with pytest.raises(ValueError, match="NaN is in no space"):
        env.step(td)
