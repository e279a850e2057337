"""Keys of observations that steps have for something else are refused with the wrapper that renames them."""

import textwrap

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from contracts.each import each
from engram.envs import GymEnv


class Observed(gymnasium.Env):
    """Observes the position under "position", and zeros under another key."""

    action_space = spaces.Discrete(2)

    def __init__(self, key):
        self.observation_space = spaces.Dict({"position": spaces.Box(-1, 1, (2,)), key: spaces.Box(-1, 1, (1,))})

    def reset(self, *, seed=None, options=None):
        return {key: np.zeros(space.shape, np.float32) for key, space in self.observation_space.items()}, {}

    def step(self, action):
        return self.reset()[0], 1.0, False, False, {}


@each("key", ["action", "next", "reward", "done", "terminated", "truncated", "collector", "_reset"])
def test_the_code_in_the_error_renames_the_key(key):
    env = Observed(key)
    with pytest.raises(ValueError, match=f"the observation space has a key '{key}', which is reserved") as refused:
        GymEnv(env)
    program = {"gymnasium": gymnasium, "env": env}
    exec(textwrap.dedent(str(refused.value).split("\n", 1)[1]), program)
    steps = GymEnv(program["env"]).rollout(3)
    assert f"observed_{key.lstrip('_')}" in steps.keys() and "position" in steps.keys() and len(steps) == 3


def test_a_vector_of_such_environments_is_refused_alike():
    with pytest.raises(ValueError, match=r"each single one of a vector.*'observed_action'"):
        GymEnv(gymnasium.vector.SyncVectorEnv([lambda: Observed("action")] * 2))
