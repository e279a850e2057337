"""Transforms, and the environment behind them, under the name where users look for them."""

from engram._advice import advise_on_names
from engram.envs.transformed import TransformedEnv as TransformedEnv
from engram.transforms import *  # noqa: F403
from engram.transforms import __all__ as _transforms

__all__ = sorted([*_transforms, "TransformedEnv"])

advise_on_names(__name__)
