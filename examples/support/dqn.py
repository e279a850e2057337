"""A double DQN with n-step returns: the network, two ways to act with it, and one gradient step."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn


class Scaled(nn.Module):
    """Divides each entry of an observation by its usual size, so that no entry drowns in the others."""

    def __init__(self, sizes: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("_factors", 1 / torch.tensor(sizes), persistent=False)

    def forward(self, observation: Tensor) -> Tensor:
        return observation * self._factors


def q_network(observation_sizes: Sequence[float], actions: int, first_value: float, width: int = 64) -> nn.Module:
    """From observations `[..., entries]` to the value of each action `[..., actions]`, at first `first_value`."""
    first, last = nn.Linear(len(observation_sizes), width), nn.Linear(width, actions)
    nn.init.constant_(last.bias, first_value)
    return nn.Sequential(Scaled(observation_sizes), first, nn.ReLU(), nn.Linear(width, width), nn.ReLU(), last)


class Greedy(nn.Module):
    """The action with the highest value."""

    def __init__(self, q: nn.Module) -> None:
        super().__init__()
        self.q = q

    def forward(self, observation: Tensor) -> Tensor:
        return self.q(observation).argmax(-1)


class EpsilonGreedy(Greedy):
    """With probability `epsilon`, which the training loop lowers, a random action; for one environment."""

    epsilon = 1.0

    def forward(self, observation: Tensor) -> Tensor:
        if torch.rand(()) < self.epsilon:
            return torch.randint(2, ())
        return super().forward(observation)


def returns(slices: TensorDictBase, value: Tensor, gamma: float, reward_scale: float) -> Tensor:
    """The n-step return `[slices]` of the first row of each slice `[slices, steps]` of TED transitions.

    `value` `[slices]` is that of the state after a slice. A slice that the end of its trajectory has cut is filled up
    with copies of its last step, where `("collector", "mask")` is False.
    """
    mask, reward = slices["collector", "mask"], reward_scale * slices["next", "reward"].squeeze(-1)
    discount = gamma ** torch.arange(mask.shape[1])
    # A pole that still stands when time is up has a future: only `terminated` ends the sum of rewards.
    has_future = ~slices["next", "terminated"][:, -1].squeeze(-1)
    return (reward * discount * mask).sum(1) + gamma ** mask.sum(1) * value * has_future


class Learner:
    """A network, its target copy and its optimizer; all that gradient steps change.

    The target follows the network slowly, by `target_rate` of the distance with each update: an average over its last
    states, which is also the steadier player of the two. Rewards are multiplied by `reward_scale`.
    """

    def __init__(
        self, q: nn.Module, learning_rate: float, gamma: float, target_rate: float, reward_scale: float
    ) -> None:
        self.q = q
        self.updates = 0
        self.target = copy.deepcopy(q).requires_grad_(False)
        self._optimizer = torch.optim.Adam(q.parameters(), lr=learning_rate, fused=True)
        self._gamma, self._reward_scale = gamma, reward_scale
        self._target_rate = target_rate

    def update(self, slices: TensorDictBase) -> None:
        """One step on the first row of each slice `[slices, steps]`; the others are there for its return."""
        following = slices["next", "observation"][:, -1]
        with torch.no_grad():
            best = self.q(following).argmax(-1, keepdim=True)  # chosen by one network, valued by the other
            value = self.target(following).gather(-1, best).squeeze(-1)
            goal = returns(slices, value, self._gamma, self._reward_scale)
        values, action = self.q(slices["observation"][:, 0]), slices["action"][:, 0]
        chosen = values.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        loss = nn.functional.smooth_l1_loss(chosen, goal)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.updates += 1
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.q.parameters(), strict=True):
                slow.lerp_(fast, self._target_rate)

    def state_dict(self) -> dict[str, Any]:
        """Weights, the optimizer's state and the number of updates."""
        parts = {"q": self.q, "target": self.target, "optimizer": self._optimizer}
        return {"updates": self.updates, **{name: part.state_dict() for name, part in parts.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what `state_dict` gave."""
        self.q.load_state_dict(state["q"])
        self.target.load_state_dict(state["target"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]
