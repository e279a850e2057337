"""TorchRL's environments and policies in our collector."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import GymEnv, SerialEnv, StepCounter, TransformedEnv

from engram.collectors import SyncDataCollector


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
