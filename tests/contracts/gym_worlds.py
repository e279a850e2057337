"""Small gymnasium environments whose every step is known."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces


class Countdown(gymnasium.Env):
    """Shows (how many steps are left, all steps so far); ends by termination or, in odd episodes, truncation."""

    observation_space = spaces.Box(-1000, 1000, (2,), np.float32)
    action_space = spaces.Discrete(3)
    render_mode = "rgb_array"

    def __init__(self, lengths=(3, 1, 4), reuse_array=False):
        self.lengths, self.reuse_array = lengths, reuse_array
        self.episode, self.total = -1, 0
        self.shown = np.zeros(2, np.float32)

    def show(self):
        self.shown[:] = self.left, self.total
        return self.shown if self.reuse_array else self.shown.copy()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode = 0 if seed is not None else self.episode + 1
        self.left = self.lengths[self.episode % len(self.lengths)]
        return self.show(), {}

    def step(self, action):
        self.left -= 1
        self.total += 1
        over = self.left == 0
        return (
            self.show(),
            float(self.left + 10 * action),
            over and self.episode % 2 == 0,
            over and self.episode % 2 == 1,
            {},
        )

    def render(self):
        return np.full((4, 5, 3), self.left, np.uint8)


class Echo(gymnasium.Env):
    """Any spaces: observations are samples, the last raw action is kept."""

    def __init__(self, observation_space, action_space, length=5):
        self.observation_space, self.action_space, self.length = observation_space, action_space, length
        self.actions = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.actions.append(action)
        self.t += 1
        return self.observation_space.sample(), 1.0, self.t == self.length, False, {}


SPACES = {
    "box": spaces.Box(-1.0, 1.0, (2,), np.float32),
    "box of doubles": spaces.Box(-1.0, np.inf, (2, 3), np.float64),
    "unbounded box": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "pixels": spaces.Box(0, 255, (4, 4, 3), np.uint8),
    "scalar box": spaces.Box(0.0, 1.0, (), np.float32),
    "discrete": spaces.Discrete(3),
    "discrete from 5": spaces.Discrete(3, start=5),
    "multidiscrete": spaces.MultiDiscrete([2, 3]),
    "multidiscrete grid": spaces.MultiDiscrete([[2, 3], [4, 5]]),
    "multibinary": spaces.MultiBinary(3),
    "multibinary grid": spaces.MultiBinary([2, 2]),
    "dict": spaces.Dict({"a": spaces.Box(0, 1, (2,)), "b": spaces.Dict({"c": spaces.Discrete(2)})}),
    "tuple": spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (2,)))),
}
