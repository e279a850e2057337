"""Worlds of several environments whose every step is known."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from contracts.gym_worlds import Countdown


class Nested(gymnasium.Env):
    """Episodes of random lengths, observations in a Dict, entries in `info`; writes into its own arrays."""

    observation_space = spaces.Dict(
        {
            "left": spaces.Box(-100, 100, (2,), np.float32),
            "inner": spaces.Tuple((spaces.Discrete(7, start=1), spaces.MultiBinary(2))),
        }
    )
    action_space = spaces.Dict({"push": spaces.Discrete(3, start=1), "turn": spaces.Box(-1, 1, (2,), np.float32)})

    def __init__(self):
        self.left = np.zeros(2, np.float32)
        self.bits = np.zeros(2, np.int8)

    def show(self):
        self.left[:] = self.until - self.t, self.until
        self.bits[:] = self.t % 2, self.until % 2
        info = {"until": self.until, "place": self.left * 2, "deep": {"t": float(self.t)}}
        return {"left": self.left, "inner": (np.int64(1 + self.t % 7), self.bits)}, info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.until = 0, int(self.np_random.integers(1, 6))
        observation, info = self.show()
        return observation, {"until": info["until"]}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        observation, info = self.show()
        over = self.t == self.until
        reward = float(action["push"]) + float(action["turn"].sum())
        return observation, reward, over and self.until % 2 == 0, over and self.until % 2 == 1, info


class Native(VectorEnv):
    """Countdowns in one object, in any autoreset mode, that hand out the same arrays again and again."""

    def __init__(self, num_envs, mode=AutoresetMode.NEXT_STEP, lengths=(3, 1, 4)):
        self.num_envs = num_envs
        self.worlds = [Countdown(lengths) for _ in range(num_envs)]
        self.single_observation_space, self.single_action_space = Countdown.observation_space, Countdown.action_space
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self.metadata = {"autoreset_mode": mode}
        self.mode = mode
        self.shown = np.zeros((num_envs, 2), np.float32)
        self.rewards = np.zeros(num_envs, np.float32)
        self.flags = np.zeros((2, num_envs), np.bool_)

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_))
        for env in np.flatnonzero(mask):
            self.shown[env], _ = self.worlds[env].reset(seed=None if seed is None else seed + int(env))
            self.flags[:, env] = False
        return self.shown, {}

    def step(self, actions):
        assert self.action_space.contains(actions), actions
        final = np.zeros_like(self.shown)
        for env, world in enumerate(self.worlds):
            over = self.flags[:, env].any()
            assert not (over and self.mode is AutoresetMode.DISABLED)
            if over and self.mode is AutoresetMode.NEXT_STEP:
                self.shown[env], _ = world.reset()
                self.rewards[env], self.flags[:, env] = -7, False
                continue
            self.shown[env], self.rewards[env], terminated, truncated, _ = world.step(actions[env])
            self.flags[:, env] = terminated, truncated
            if (terminated or truncated) and self.mode is AutoresetMode.SAME_STEP:
                final[env] = self.shown[env]
                self.shown[env], _ = world.reset()
        infos = {"final_obs": final} if self.mode is AutoresetMode.SAME_STEP else {}
        terminated, truncated = self.flags.copy() if self.mode is AutoresetMode.SAME_STEP else self.flags
        return self.shown, self.rewards, terminated, truncated, infos


class Shown(Countdown):
    """A Countdown that is made with a render mode."""

    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None):
        super().__init__()
        self.render_mode = render_mode


gymnasium.register("engram/Shown-v0", entry_point=Shown)
gymnasium.register("engram/Countdown-v0", entry_point=Countdown)
gymnasium.register("engram/Nested-v0", entry_point=Nested)
gymnasium.register("engram/Native-v0", entry_point=Countdown, vector_entry_point=Native)
