"""TorchRL's environments and transforms below engram's, and engram's specs in TorchRL's environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchrl.data
import torchrl.envs
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.envs.transforms.rnd import RNDTransform
from torchrl.modules import MLP, GRUModule

from clients.torchrl_field import AGENTS, WORLDS, Field
from engram.collectors import SyncDataCollector
from engram.data import Binary, Bounded, Categorical, Composite, OneHot, Unbounded
from engram.envs import (
    CatFrames,
    Compose,
    EnvBase,
    GymEnv,
    InitTracker,
    ObservationNorm,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)
from engram.specs.torchrl import spec_from_torchrl

REWARD, RETURN = ("agents", "reward"), ("agents", "episode_reward")


def cartpole() -> Any:
    return torchrl.envs.GymEnv("CartPole-v1")


def assert_continuous(batch: TensorDictBase, *keys: Any) -> None:
    """Asserts that each row begins with what the one before it ended with, except after the end of an episode."""
    over = batch["next", "done"][..., :-1, 0]
    assert over.any()
    for key in keys:
        after, before = batch["next"][..., :-1].get(key), batch[..., 1:].get(key)
        assert torch.equal(before[~over], after[~over]), key


# ---- specs ----
@pytest.mark.parametrize("differ", [False, True])
def test_torchrl_environment_with_specs_of_engram_fits_them(differ):
    env = Field(differ=differ)
    torchrl.envs.check_env_specs(env)
    assert isinstance(env.observation_spec, torchrl.data.Composite)
    assert not isinstance(env.observation_spec["agents"], Composite)
    assert env.rollout(3).shape == (WORLDS, 3)


def test_torchrl_primer_takes_specs_of_engram():
    primer = torchrl.envs.TensorDictPrimer(hidden=Unbounded((5,)))
    env = torchrl.envs.TransformedEnv(cartpole(), primer)
    assert env.rollout(2)["hidden"].shape == (2, 5)


def test_composite_takes_specs_of_torchrl():
    theirs = torchrl.data.Composite(a=torchrl.data.OneHot(3), b=torchrl.data.Composite(c=torchrl.data.Unbounded(2)))
    ours = Composite(theirs, d=torchrl.data.Bounded(-1, 1, (2,)))
    expected = Composite(
        a=OneHot(3, device="cpu"),
        b=Composite(c=Unbounded((2,), device="cpu")),
        d=Bounded(-1, 1, (2,), device="cpu"),
    )
    assert ours == expected


def test_stacked_and_masked_specs_of_torchrl_are_converted():
    wide = [torchrl.data.Composite(x=torchrl.data.Unbounded((n,))) for n in (2, 3)]
    stacked = spec_from_torchrl(torch.stack(wide, 0))
    assert [one["x"].shape for one in stacked.specs] == [(2,), (3,)]
    mask = torch.tensor([True, False, True])
    assert spec_from_torchrl(torchrl.data.Categorical(3, mask=mask)) == Categorical(3, mask=mask, device="cpu")
    assert spec_from_torchrl(torchrl.data.NonTensor(())) is None


# ---- environments ----
@pytest.mark.parametrize("transforms_of", ["engram", "torchrl"])
def test_batched_environment_of_agents_behind_transforms(transforms_of):
    kind: Any = RewardSum if transforms_of == "engram" else torchrl.envs.RewardSum
    env = TransformedEnv(Field(), kind(in_keys=[REWARD], out_keys=[RETURN]))
    check_env_specs(env)
    assert (env.reward_key, env.action_key, env.n_agents) == (REWARD, ("agents", "action"), AGENTS)
    env.set_seed(1)
    batch = env.rollout(20, break_when_any_done=False)
    with SyncDataCollector(env, frames_per_batch=40, total_frames=80) as collector:
        collected = torch.cat(list(collector), -1)
    for rows in (batch, collected):
        assert_continuous(rows, ("agents", "observation"), RETURN)
        before = torch.zeros(WORLDS, AGENTS, 1)
        for t in range(rows.shape[1]):
            before = before + rows["next"][:, t].get(REWARD)
            assert torch.allclose(rows["next"][:, t].get(RETURN), before)
            before = torch.where(rows["next", "done"][:, t].unsqueeze(-1), torch.zeros(()), before)


def test_environment_of_agents_that_differ_behind_transforms():
    env = TransformedEnv(Field(differ=True), StepCounter(4))
    check_env_specs(env)
    batch = env.rollout(9, break_when_any_done=False)
    assert batch["step_count"].max() == 3
    with SyncDataCollector(env, frames_per_batch=20, total_frames=40) as collector:
        batch = torch.cat(list(collector), -1)
    assert isinstance(batch["agents"], LazyStackedTensorDict)
    assert [one["observation"].shape[-1] for one in batch["agents"].unbind(2)] == [2, 3, 4]


KINDS: dict[str, Callable[[], Any]] = {
    "alone": cartpole,
    "theirs in series": lambda: torchrl.envs.SerialEnv(2, cartpole),
    "in series": lambda: SerialEnv(2, cartpole),
    "in parallel": lambda: ParallelEnv(2, cartpole),
}


@pytest.mark.parametrize("kind", KINDS)
def test_gym_environments_of_torchrl_behind_transforms(kind):
    transforms = (StepCounter(20), RewardSum(), InitTracker(), CatFrames(3, -1, in_keys=["observation"]))
    env = TransformedEnv(KINDS[kind](), Compose(*transforms, ObservationNorm(1.0, 2.0, in_keys=["observation"])))
    check_env_specs(env, seed=3)
    with SyncDataCollector(env, frames_per_batch=120, total_frames=240) as collector:
        batch = torch.cat(list(collector), -1)
    assert_continuous(batch, "observation", "step_count", "episode_reward")
    assert batch["observation"].shape[-1] == 12 and batch["step_count"].max() < 20
    assert torch.equal(batch["is_init"][..., 1:, :], batch["next", "done"][..., :-1, :])
    env.close()
    assert env.reset()["step_count"].sum() == 0
    env.close()


def test_the_same_seed_gives_the_same_episode_with_either_transformed_environment():
    ours = TransformedEnv(cartpole(), RewardSum())
    theirs = torchrl.envs.TransformedEnv(cartpole(), torchrl.envs.RewardSum())
    policy = TensorDictModule(lambda x: nn.functional.one_hot((x[..., 2] > 0).long(), 2), ["observation"], ["action"])
    ours.set_seed(5), theirs.set_seed(5)
    a, b = ours.rollout(50, policy), theirs.rollout(50, policy)
    for key in ("observation", "action", ("next", "observation"), ("next", "episode_reward"), ("next", "done")):
        assert torch.equal(a[key], b[key]), key


def test_hidden_state_of_primers_below_continues():
    keys = {"in_keys": ["observation", "hidden", "is_init"], "out_keys": ["embed", ("next", "hidden")]}
    rnn = GRUModule(input_size=4, hidden_size=5, **keys)
    primed = torchrl.envs.Compose(torchrl.envs.InitTracker(), rnn.make_tensordict_primer())
    env = TransformedEnv(torchrl.envs.TransformedEnv(cartpole(), primed), StepCounter(10))
    action = TensorDictModule(lambda x: nn.functional.one_hot(x[..., :2].argmax(-1), 2), ["embed"], ["action"])
    batch = env.rollout(6, TensorDictSequential(rnn, action))
    assert bool((batch["hidden"][0] == 0).all()) and bool(batch["next", "hidden"].any())
    assert torch.equal(batch["hidden"][1:], batch["next", "hidden"][:-1])


def test_what_is_no_environment_is_refused():
    with pytest.raises(TypeError, match="takes an environment of engram, gymnasium or TorchRL, got a str"):
        TransformedEnv("CartPole-v1")


# ---- transforms ----
@pytest.mark.parametrize("number", [1, 2])
def test_rewards_that_a_torchrl_transform_adds_are_rewards(number):
    env = TransformedEnv(SerialEnv(number, lambda: GymEnv("CartPole-v1")), torchrl.envs.InitTracker())
    nets = [MLP(4, 3, num_cells=[8]) for _ in range(2)]
    env.append_transform(RNDTransform(*nets, in_keys=["observation"], out_keys=["intrinsic_reward"]))
    env.append_transform(RewardSum(in_keys=["intrinsic_reward"], out_keys=["intrinsic_return"]))
    check_env_specs(env)
    assert env.reward_keys == ["reward", "intrinsic_reward"]
    with SyncDataCollector(env, frames_per_batch=20) as collector:
        batch = collector.rollout()
    assert "intrinsic_reward" not in batch.keys() and bool(batch["next", "intrinsic_reward"].any())
    first = batch[:, 0]["next"]
    assert torch.equal(first["intrinsic_return"], first["intrinsic_reward"])


def test_apply_reaches_environments_and_transforms_of_torchrl():
    env = TransformedEnv(Field(), torchrl.envs.StepCounter())
    kinds: list[type] = []
    env.apply(lambda module: kinds.append(type(module)))
    assert {TransformedEnv, Field, torchrl.envs.StepCounter} <= set(kinds)
    env.eval()
    assert not env.base_env.torchrl_env.training


# ---- masks ----
class OneChoice(EnvBase):
    """Allows one of four actions, the next one at each step."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.observation_spec = Composite(action_mask=Binary(4, dtype=torch.bool))
        self.action_spec, self.reward_spec = kind(4), Unbounded(1)
        self.allowed = 0

    def mask(self) -> TensorDict:
        self.allowed += 1
        return TensorDict({"action_mask": torch.arange(4) == self.allowed % 4})

    def _reset(self, td: Any) -> TensorDict:
        self.allowed = 0
        return self.mask()

    def _step(self, td: Any) -> TensorDict:
        return self.mask().update({"reward": torch.ones(1), "done": torch.zeros(1, dtype=torch.bool)})

    def _set_seed(self, seed: Any) -> None:
        pass


@pytest.mark.parametrize("kind", [Categorical, OneHot])
def test_random_actions_obey_an_action_mask_of_torchrl(kind):
    env = TransformedEnv(OneChoice(kind), torchrl.envs.ActionMask()).append_transform(StepCounter())
    collected = next(iter(SyncDataCollector(env, None, frames_per_batch=8, total_frames=8)))
    for batch in (env.rollout(8), collected):
        chosen = batch["action"] if kind is Categorical else batch["action"].int().argmax(-1)
        assert chosen.tolist() == [1, 2, 3, 0, 1, 2, 3, 0]
