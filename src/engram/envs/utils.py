"""Helpers around environments, under the names that users import them by."""

from engram.envs.checks import check_env_specs
from engram.envs.exploration import ExplorationType, exploration_type, set_exploration_type
from engram.envs.mdp import step_mdp
from engram.envs.policies import RandomPolicy

__all__ = [
    "ExplorationType",
    "RandomPolicy",
    "check_env_specs",
    "exploration_type",
    "set_exploration_type",
    "step_mdp",
]
