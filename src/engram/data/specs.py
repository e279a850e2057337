"""Specs, under the path where users look for them."""

from engram._advice import advise_on_names
from engram.specs import *  # noqa: F403
from engram.specs import __all__ as __all__

advise_on_names(__name__)
