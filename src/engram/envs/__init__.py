"""Environments: TensorDicts in, TensorDicts out."""

from engram.envs.base import EnvBase
from engram.envs.checks import check_env_specs
from engram.envs.exploration import ExplorationType, exploration_type, set_exploration_type
from engram.envs.gym import GymEnv
from engram.envs.mdp import step_mdp
from engram.envs.policies import RandomPolicy
from engram.envs.transformed import TransformedEnv
from engram.envs.vector import SerialEnv

__all__ = [
    "EnvBase",
    "ExplorationType",
    "GymEnv",
    "RandomPolicy",
    "SerialEnv",
    "TransformedEnv",
    "check_env_specs",
    "exploration_type",
    "set_exploration_type",
    "step_mdp",
]
