"""A game in pixels that needs no renderer: a ball falls and bounces off the walls, a paddle is to be under it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

SIZE = 84  # pixels
STEPS = 20  # of a ball until it is down
_BALL, _PADDLE = 6, 14
_FASTEST, _PADDLE_SPEED = 6, 3  # the ball may be twice as fast: one has to know where it is going
_COLORS = {"ball": (255, 200, 60), "paddle": (80, 200, 255)}


class FallingBall(gymnasium.Env):
    """Actions: left, stay, right. The reward at the end is 1 where the paddle is under the ball, else -1.

    One picture does not say where the ball is going; two do. The observation is as good as a picture: `[ball's x, its
    depth, paddle's x]`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}
    observation_space = gymnasium.spaces.Box(0, SIZE, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._x, self._speed = (int(n) for n in self.np_random.integers((0, -_FASTEST), (SIZE - _BALL, _FASTEST + 1)))
        self._depth, self._paddle = 0, (SIZE - _PADDLE) // 2
        return self._observation(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._paddle = min(max(self._paddle + _PADDLE_SPEED * (int(action) - 1), 0), SIZE - _PADDLE)
        self._depth, self._x = self._depth + 1, self._x + self._speed
        widest = SIZE - _BALL
        if not 0 <= self._x <= widest:
            self._x = -self._x if self._x < 0 else 2 * widest - self._x
            self._speed = -self._speed
        is_down = self._depth == STEPS
        is_caught = self._paddle - _BALL < self._x < self._paddle + _PADDLE
        return self._observation(), (1.0 if is_caught else -1.0) if is_down else 0.0, is_down, False, {}

    def render(self) -> np.ndarray[Any, Any]:
        """uint8 `[SIZE, SIZE, 3]`."""
        picture = np.zeros((SIZE, SIZE, 3), np.uint8)
        top = self._depth * (SIZE - _BALL - 4) // STEPS
        picture[top : top + _BALL, self._x : self._x + _BALL] = _COLORS["ball"]
        picture[-4:, self._paddle : self._paddle + _PADDLE] = _COLORS["paddle"]
        return picture

    def _observation(self) -> Any:
        return np.array([self._x, self._depth, self._paddle], np.float32)
