"""Environments of other libraries, under the paths where users look for them."""

from engram.envs.libs.dm_control import DMControlEnv
from engram.envs.libs.gym import GymEnv, GymWrapper, gym_backend, set_gym_backend
from engram.envs.libs.vmas import VmasEnv, VmasWrapper

__all__ = ["DMControlEnv", "GymEnv", "GymWrapper", "VmasEnv", "VmasWrapper", "gym_backend", "set_gym_backend"]
