"""TorchRL's environments and policies in our collector."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl import data
from torchrl.envs import EnvBase, GymEnv, SerialEnv, StepCounter, TransformedEnv, check_env_specs
from torchrl.envs.model_based.common import ModelBasedEnvBase
from torchrl.modules import WorldModelWrapper
from torchrl.testing.mocking_classes import HeterogeneousCountingEnv, HeterogeneousCountingEnvPolicy

from engram import envs
from engram.collectors import Evaluator, MultiSyncDataCollector, SyncDataCollector
from engram.data import Composite, LazyTensorStorage, TensorDictReplayBuffer, Unbounded


class Greedy(nn.Module):
    """A net and an argmax, one-hot."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(self.net(observation).argmax(-1), 2)


def transformed() -> TransformedEnv:
    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(20))


@pytest.mark.parametrize("policy", ["none", "module", "rand_step"])
@pytest.mark.parametrize("kind", ["alone", "in series"])
def test_batches_of_torchrl_environments_continue_each_other(kind, policy):
    env = transformed() if kind == "alone" else SerialEnv(2, transformed)
    module = TensorDictModule(Greedy(), in_keys=["observation"], out_keys=["action"])
    chosen = {"none": None, "module": module, "rand_step": env.rand_step}[policy]
    with SyncDataCollector(env, chosen, frames_per_batch=60) as collector:
        batch = torch.cat([collector.rollout() for _ in range(2)], -1)
    before, after = batch[..., 1:], batch[..., :-1]
    ids, over = batch["collector", "traj_ids"], after["next", "done"].squeeze(-1)
    assert torch.equal(before["observation"][~over], after["next", "observation"][~over])
    assert torch.equal(ids[..., 1:] != ids[..., :-1], over)
    assert int(batch["step_count"].max()) < 20


class Choices(EnvBase):
    """Environments `batch` whose actions are of `spec`, and which count their steps."""

    def __init__(self, spec: data.TensorSpec, batch: tuple[int, ...]) -> None:
        super().__init__(batch_size=batch)
        self.observation_spec = data.Composite(observation=data.Unbounded((*batch, 1)), shape=batch)
        self.action_spec = spec.expand(*batch, *spec.shape)
        self.reward_spec = data.Unbounded((*batch, 1))
        self.steps = 0

    def _reset(self, tensordict: TensorDict | None = None, **options: object) -> TensorDict:
        return self.full_observation_spec.zero().update(self.full_done_spec.zero())

    def _step(self, tensordict: TensorDict) -> TensorDict:
        self.steps += 1
        return self._reset().set("reward", torch.zeros(*self.batch_size, 1))

    def _set_seed(self, seed: int | None) -> None:
        pass


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("nvec", [[2, 5], [[2, 5], [3, 4]]])
def test_choices_beyond_one_of_several_are_refused_whatever_the_batch(nvec, batch):
    env, wrong = Choices(data.MultiCategorical(torch.tensor(nvec)), batch), torch.tensor(nvec) - 1
    wrong[..., 0] += 1  # 2 of 0, 1: other places may have a 2
    actions = iter([env.action_spec.zero(), env.action_spec.zero() + wrong])
    collector = SyncDataCollector(env, lambda td: td.set("action", next(actions)), frames_per_batch=5 * env.numel())
    assert collector.rollout().shape == (*batch, 1) and env.steps == 1
    with pytest.raises(ValueError, match="step 2 of the batch"):
        collector.rollout()


def assert_agents_are_whole(batch):
    """Each agent's observations and actions have its own shapes, as the environment's spec says."""
    env = HeterogeneousCountingEnv()
    seen, done = env.observation_spec["lazy"].unbind(0), env.full_action_spec["lazy"].unbind(0)
    for agent, of_agent, action in zip(batch["lazy"].unbind(batch.ndim), seen, done, strict=True):
        for key, spec in (*of_agent.items(), *action.items()):
            assert agent[key].shape == (*batch.shape, *spec.shape), key


@pytest.mark.parametrize("is_random", [True, False])
@pytest.mark.parametrize("kind", ["alone", "batched", "in series", "transformed"])
@pytest.mark.parametrize("arguments", [{}, {"max_frames_per_traj": 2}, {"trajs_per_batch": 2, "traj_format": "cat"}])
def test_agents_that_differ_keep_their_shapes(kind, is_random, arguments):
    batch_size = (2,) if kind == "batched" else ()
    env = HeterogeneousCountingEnv(max_steps=3, batch_size=batch_size)
    if kind == "in series":
        env = SerialEnv(2, lambda: HeterogeneousCountingEnv(max_steps=3))
    elif kind == "transformed":
        env = TransformedEnv(env, StepCounter())
    policy = None if is_random else HeterogeneousCountingEnvPolicy(env.input_spec["full_action_spec"])
    with SyncDataCollector(env, policy, frames_per_batch=12, **arguments) as collector:
        for _ in range(2):
            assert_agents_are_whole(collector.rollout())


def test_the_last_step_is_truncated_for_each_agent():
    env = HeterogeneousCountingEnv(max_steps=50)
    batch = SyncDataCollector(env, None, frames_per_batch=5, set_truncated=True).rollout()
    for flag in ("truncated", "done"):
        assert batch["next", "lazy", flag].flatten(1).all(1).tolist() == [False] * 4 + [True]


def test_agents_that_differ_come_from_workers_and_buffers():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(40), batch_size=8)
    make = HeterogeneousCountingEnv
    with MultiSyncDataCollector([make, make()], None, frames_per_batch=20, cat_results=0) as collector:
        batch = collector.rollout()
    assert_agents_are_whole(batch)
    rb.extend(batch)
    assert_agents_are_whole(rb.sample())


def test_a_torchrl_environment_is_evaluated():
    module = TensorDictModule(Greedy(), in_keys=["observation"], out_keys=["action"])
    with Evaluator(transformed(), module, num_trajectories=3) as evaluator:
        result = evaluator.evaluate(step=7)
    assert result["eval/reward"] == result["eval/episode_length"] <= 20 and result["eval/step"] == 7


class Imagined(ModelBasedEnvBase):
    """A learned world with the specs of `env`, besides its observations: a state of 6 numbers."""

    def __init__(self, env: envs.EnvBase) -> None:
        state = TensorDictModule(nn.Linear(7, 6), in_keys=["state_action"], out_keys=["state"])
        both = TensorDictModule(lambda *parts: torch.cat(parts, -1), ["state", "action"], ["state_action"])
        reward = TensorDictModule(nn.Linear(6, 1), in_keys=["state"], out_keys=["reward"])
        super().__init__(WorldModelWrapper(TensorDictSequential(both, state), reward), batch_size=env.batch_size)
        self.set_specs_from_env(env)
        spec = Composite(state=Unbounded((*self.batch_size, 6)), shape=self.batch_size)
        self.observation_spec, self.state_spec = spec, spec.clone()

    def _reset(self, tensordict: TensorDict | None = None) -> TensorDict:
        return TensorDict({"state": torch.zeros(*self.batch_size, 6)}, self.batch_size)

    def _set_seed(self, seed: int | None) -> None:
        pass


@pytest.mark.parametrize("kind", ["alone", "in series", "transformed"])
def test_a_model_of_torchrl_takes_the_specs_of_our_environment(kind):
    base = envs.GymEnv("Pendulum-v1") if kind == "alone" else envs.SerialEnv(4, lambda: envs.GymEnv("Pendulum-v1"))
    base = envs.TransformedEnv(base, envs.StepCounter()) if kind == "transformed" else base
    env = Imagined(base)
    check_env_specs(env)
    batch = env.rollout(5)
    assert batch.shape == (*base.batch_size, 5)
    assert torch.equal(batch["state"][..., 1:, :], batch["next", "state"][..., :-1, :])
    assert TransformedEnv(env, StepCounter(3)).rollout(5).shape == (*base.batch_size, 3)
