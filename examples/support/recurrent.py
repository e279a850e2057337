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
        state = self._next_state(self.encoder(observation).reshape(-1, HIDDEN), hidden.reshape(-1, HIDDEN))
        state = state.reshape(hidden.shape)
        return self.head(state), state

    def over(self, rows: TensorDictBase, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Values `[slices, time, 2]`, and the states `[slices, time, HIDDEN]` after each observation.

        `hidden` `[slices, HIDDEN]` is the state before; where `"is_init"` is marked, it is the one that was stored
        with the row, which is zero at the start of an episode.
        """
        states, encoded = [], self.encoder(rows["observation"])
        for x, stored, begins in zip(
            encoded.unbind(1), rows["hidden"].unbind(1), rows["is_init"].unbind(1), strict=True
        ):
            hidden = self._next_state(x, torch.where(begins, stored, hidden))
            states.append(hidden)
        stacked = torch.stack(states, 1)
        return self.head(stacked), stacked

    def _next_state(self, encoded: Tensor, hidden: Tensor) -> Tensor:
        return self.cell(encoded, self._keep * hidden)
