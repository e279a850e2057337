"""Transforms, and the environment behind them, under the name where users look for them."""

from engram.envs.transformed import TransformedEnv as TransformedEnv
from engram.transforms import *  # noqa: F403
from engram.transforms import __all__ as _transforms

__path__: list[str] = []  # modules below it are aliases only
__all__ = sorted([*_transforms, "TransformedEnv"])
