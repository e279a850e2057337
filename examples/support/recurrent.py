"""What the recurrent example learns with: the task without velocities, and a network that can remember."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

HIDDEN = 64


class Positions(gymnasium.ObservationWrapper):
    """Where cart and pole are, in units of the limits of an episode, but not how they move."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: Any) -> Any:
        return np.array([observation[0] / 2.4, observation[2] / 0.2], np.float32)


class RecurrentQ(nn.Module):
    """Values of both actions from all observations so far, or, without memory, from the last one."""

    def __init__(self, first_value: float, has_memory: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, HIDDEN), nn.ReLU())
        self.cell, self.head = nn.GRUCell(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 2)
        nn.init.constant_(self.head.bias, first_value)
        self._keep = float(has_memory)

    def forward(self, observation: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Values `[*, 2]` and the next state `[*, HIDDEN]` of observations `[*, 2]` and states `[*, HIDDEN]`."""
        lead = observation.shape[:-1]
        hidden = self.cell(self.encoder(observation).reshape(-1, HIDDEN), self._keep * hidden.reshape(-1, HIDDEN))
        hidden = hidden.reshape(*lead, HIDDEN)
        return self.head(hidden), hidden

    def over(self, rows: TensorDictBase, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Values `[slices, time, 2]`, and the states `[slices, time, HIDDEN]` after each observation."""
        values, states = [], []
        for row in rows.select("observation", "hidden", "is_init").unbind(1):
            hidden = torch.where(row["is_init"], row["hidden"], hidden)  # the stored one; zero at an episode's start
            value, hidden = self(row["observation"], hidden)
            values.append(value)
            states.append(hidden)
        return torch.stack(values, 1), torch.stack(states, 1)
