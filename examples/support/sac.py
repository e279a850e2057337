"""Soft actor-critic: a squashed Gaussian actor, two critics, and one step of everything."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch.distributions import AffineTransform, Independent, Normal, TanhTransform, TransformedDistribution

LARGEST_TORQUE = 2.0
TARGET_RATE = 0.005


class Torque(TransformedDistribution):
    """A Gaussian, squashed to the torques that the pendulum takes."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        squash = [TanhTransform(cache_size=1), AffineTransform(0.0, LARGEST_TORQUE, event_dim=1)]
        super().__init__(Independent(Normal(loc, scale), 1), squash)

    @property
    def deterministic_sample(self) -> Tensor:
        """What the policy does when it does not explore; tensordict looks for this name."""
        return LARGEST_TORQUE * self.base_dist.mean.tanh()


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    width = 128
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


def make_actor() -> ProbabilisticTensorDictSequential:
    network = nn.Sequential(mlp(3, 2), NormalParamExtractor())
    return ProbabilisticTensorDictSequential(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(in_keys=["loc", "scale"], out_keys=["action"], distribution_class=Torque),
    )


class Learner:
    """Actor, two critics with slow copies, the temperature, and one step of each."""

    def __init__(self, actor: ProbabilisticTensorDictSequential, learning_rate: float, gamma: float) -> None:
        self.actor, self.critics = actor, nn.ModuleList(mlp(4, 1) for _ in range(2))
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_temperature = nn.Parameter(torch.zeros(()))
        self.parts = {
            "actor": torch.optim.Adam(actor.parameters(), lr=learning_rate, fused=True),
            "critics": torch.optim.Adam(self.critics.parameters(), lr=learning_rate, fused=True),
            "temperature": torch.optim.Adam([self.log_temperature], lr=learning_rate, fused=True),
        }
        self._gamma, self.updates = gamma, 0

    def update(self, batch: TensorDictBase) -> tuple[Tensor, float]:
        """One step of everything; returns the larger error of the two critics for each row, and their loss."""
        observation, action, following = batch["observation"], batch["action"], batch["next"]
        with torch.no_grad():
            next_action, next_log_prob = self._acted(following["observation"])
            value = lowest(self.targets, following["observation"], next_action) - self._temperature * next_log_prob
            # Pendulum is only ever truncated: each state has a future.
            goal = following["reward"] + self._gamma * value * ~following["terminated"]
        pairs = torch.cat([observation, action], -1)
        errors = torch.stack([critic(pairs) - goal for critic in self.critics]).squeeze(-1)
        loss = (errors.square().sum(0) * batch["priority_weight"]).mean()  # rare draws count more
        self._step("critics", loss)
        drawn, log_prob = self._acted(observation)
        self._step("actor", (self._temperature * log_prob - lowest(self.critics, observation, drawn)).mean())
        surplus = -log_prob.detach().mean() + action.shape[-1]  # entropy above the usual target
        self._step("temperature", self.log_temperature * surplus)
        with torch.no_grad():
            for slow, fast in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
                slow.lerp_(fast, TARGET_RATE)
        self.updates += 1
        return errors.detach().abs().amax(0), loss.item()

    @property
    def _temperature(self) -> Tensor:
        return self.log_temperature.detach().exp()

    def _acted(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        policy = Torque(*self.actor[0].module(observation))
        action = policy.rsample()
        return action, policy.log_prob(action).unsqueeze(-1)

    def _step(self, name: str, loss: Tensor) -> None:
        optimizer = self.parts[name]
        optimizer.zero_grad()
        loss.backward(inputs=optimizer.param_groups[0]["params"])  # the actor's loss leaves no trace in the critics
        optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        modules = {"actor": self.actor, "critics": self.critics, "targets": self.targets}
        states = {name: module.state_dict() for name, module in modules.items()}
        optimizers = {name: optimizer.state_dict() for name, optimizer in self.parts.items()}
        return {"updates": self.updates, "temperature": self.log_temperature.detach(), "parts": optimizers, **states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("actor", "critics", "targets"):
            getattr(self, name).load_state_dict(state[name])
        for name, optimizer in self.parts.items():
            optimizer.load_state_dict(state["parts"][name])
        self.log_temperature.data.copy_(state["temperature"])
        self.updates = state["updates"]


def lowest(critics: nn.ModuleList, observation: Tensor, action: Tensor) -> Tensor:
    pairs = torch.cat([observation, action], -1)
    return torch.minimum(*(critic(pairs) for critic in critics))
