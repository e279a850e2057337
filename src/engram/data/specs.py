"""Specs, under the path where users look for them."""

from engram._advice import advise_on_names
from engram.specs import (
    Binary,
    Bounded,
    BoundedContinuous,
    BoundedDiscrete,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Spec,
    Stacked,
    StackedComposite,
    TensorSpec,
    Text,
    Unbounded,
    UnboundedContinuous,
    UnboundedDiscrete,
    space_from_spec,
    spec_from_space,
)

__all__ = [
    "Binary",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "Categorical",
    "Composite",
    "MultiCategorical",
    "MultiOneHot",
    "OneHot",
    "Spec",
    "Stacked",
    "StackedComposite",
    "TensorSpec",
    "Text",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedDiscrete",
    "space_from_spec",
    "spec_from_space",
]

advise_on_names(__name__)
