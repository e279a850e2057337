"""A game in pixels that costs little: a ball falls, and a paddle is to be under it. Frames are bytes `[1, 84, 84]`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

SIZE = 84  # pixels
STEPS = 40  # of a ball until it is down
BALL, PADDLE = 6, 14
Frame = np.ndarray
Info = dict[str, Any]


class Catch(gymnasium.Env):
    """Actions: left, stay, right. The reward at the end is 1 where the paddle is under the ball, else -1."""

    observation_space = gymnasium.spaces.Box(0, 255, (1, SIZE, SIZE), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Frame, Info]:
        super().reset(seed=seed)
        self._ball = int(self.np_random.integers(SIZE - BALL))
        self._depth, self._paddle = 0, (SIZE - PADDLE) // 2
        return self._frame(), {}

    def step(self, action: int) -> tuple[Frame, float, bool, bool, Info]:
        self._paddle = min(max(self._paddle + 3 * (int(action) - 1), 0), SIZE - PADDLE)
        self._depth += 1
        is_down = self._depth == STEPS
        is_caught = self._paddle - BALL < self._ball < self._paddle + PADDLE
        return self._frame(), (1.0 if is_caught else -1.0) if is_down else 0.0, is_down, False, {}

    def _frame(self) -> Frame:
        frame = np.zeros((1, SIZE, SIZE), np.uint8)
        top = self._depth * (SIZE - BALL - 4) // STEPS
        frame[0, top : top + BALL, self._ball : self._ball + BALL] = 255
        frame[0, -4:, self._paddle : self._paddle + PADDLE] = 128
        return frame
