"""Specs, under the path where users look for them."""

from engram._advice import advise_on_names
from engram.specs import *  # noqa: F403
from engram.specs import __all__ as _specs
from engram.specs.tensors import BoxList, CategoricalBox, ContinuousBox

__all__ = sorted([*_specs, BoxList.__name__, CategoricalBox.__name__, ContinuousBox.__name__])

advise_on_names(__name__)
