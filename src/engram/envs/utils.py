"""Helpers around environments, under the names that users import them by."""

from engram._advice import advise_on_names
from engram.envs.base import step_mdp
from engram.envs.checks import check_env_specs
from engram.envs.policies import ExplorationType, RandomPolicy, exploration_type, set_exploration_type

__all__ = [
    "ExplorationType",
    "RandomPolicy",
    "check_env_specs",
    "exploration_type",
    "set_exploration_type",
    "step_mdp",
]

advise_on_names(__name__)
