"""TorchRL's environments and policies in our collector: `make interop`, in the environment of the benchmarks."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModule
from torch import nn

from engram.collectors import SyncDataCollector


class Greedy(nn.Module):
    """A net and an argmax, one-hot."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(self.net(observation).argmax(-1), 2)


def check() -> None:
    """Raises AssertionError where a batch is not what TorchRL's users expect."""
    from torchrl.envs import GymEnv, SerialEnv, StepCounter, TransformedEnv

    def transformed() -> TransformedEnv:
        return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(20))

    module = TensorDictModule(Greedy(), in_keys=["observation"], out_keys=["action"])
    for name, env in {"alone": transformed(), "in series": SerialEnv(2, transformed)}.items():
        for policy in (None, module, env.rand_step):
            with SyncDataCollector(env, policy, frames_per_batch=60) as collector:
                batch = torch.cat([collector.rollout() for _ in range(2)], -1)
            before, after = batch[..., 1:], batch[..., :-1]
            ids, over = batch["collector", "traj_ids"], after["next", "done"].squeeze(-1)
            assert torch.equal(before["observation"][~over], after["next", "observation"][~over])
            assert torch.equal(ids[..., 1:] != ids[..., :-1], over)
            assert int(batch["step_count"].max()) < 20
        print(f"{name}: {tuple(batch.shape)}, {ids.unique().numel()} trajectories")
        env.close()


if __name__ == "__main__":
    check()
