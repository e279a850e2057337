"""Transforms, under the name where users look for them."""

from engram.transforms import *  # noqa: F403
from engram.transforms import __all__ as __all__
