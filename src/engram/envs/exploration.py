"""How a stochastic policy acts: one switch, shared with tensordict's probabilistic modules."""

from tensordict.nn import InteractionType as ExplorationType
from tensordict.nn import set_interaction_type as set_exploration_type
from tensordict.nn.probabilistic import interaction_type as exploration_type

__all__ = ["ExplorationType", "exploration_type", "set_exploration_type"]
