"""Environments: TensorDicts in, TensorDicts out."""

from engram.envs.base import EnvBase, step_mdp
from engram.envs.checks import check_env_specs
from engram.envs.gym import GymEnv
from engram.envs.parallel import ParallelEnv
from engram.envs.policies import ExplorationType, RandomPolicy, exploration_type, set_exploration_type
from engram.envs.serial import SerialEnv
from engram.envs.transformed import TransformedEnv

__all__ = [
    "EnvBase",
    "ExplorationType",
    "GymEnv",
    "ParallelEnv",
    "RandomPolicy",
    "SerialEnv",
    "TransformedEnv",
    "check_env_specs",
    "exploration_type",
    "set_exploration_type",
    "step_mdp",
]
